"""Files of probe verdicts for later processes.

A verdict is valid for the weights, the code, the flags and the machine that it was found with. So it is saved only if
another process can check that all of these are equal: no user code, hook, compiled or offloaded module is involved, and
the weights are on the CPU. The key covers every byte of weights and buffers, the attributes of modules, the
configuration, each function that a pass can reach, and the source files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lookahead.hf.model_code import arithmetic_flags, shipped_code
from lookahead.utils.kept_values import kept_file
from lookahead.utils.machine import machine_fingerprint
from lookahead.utils.shipped import sources_digest

_PLAIN = frozenset((bool, int, float, str, type(None), list, tuple, dict, set, torch.dtype, torch.device, torch.Size))
_EMPTY = CellType()
_HELD = frozenset(vars(nn.Module()))  # standard attributes such as weights and hooks, which are covered elsewhere


def verdict_file(model: Any) -> Path | None:
    """The verdict file of a model; None if its verdicts are valid only for this process."""
    code = shipped_code(model)
    digest = None if code is None else _digest_of_state(model)
    if code is None or digest is None:
        return None
    files = {getattr(sys.modules.get(type(each).__module__), "__file__", None) for each in model.modules()}
    for name, value in code.items():
        parts = list(_parts_of(value, set()))
        files |= {part[0] for part in parts if isinstance(part, tuple)}
        digest.update(repr((name, parts)).encode())
    digest.update(sources_digest(Path(file) for file in files if file is not None))
    return kept_file("verdicts", f"{type(model).__name__}-{digest.hexdigest()}")


def _digest_of_state(model: Any) -> Any:
    """A digest of everything but the code; None if a tensor is not on the CPU, or has another class."""
    configs = model.config, model.config.get_text_config()
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    settings = (
        (machine_fingerprint(), torch.get_num_threads(), autocast, arithmetic_flags(), torch.get_default_dtype()),
        [(each.to_dict(), [(key, _shown(value)) for key, value in vars(each).items()]) for each in configs],
    )
    digest, known = xxhash.xxh3_128(repr(settings).encode()), dict[int, int]()
    for name, module in model.named_modules():
        kind, own = type(module), {key: value for key, value in vars(module).items() if key not in _HELD}
        shown = [(key, _shown(value)) for key, value in own.items()], module.training
        digest.update(repr((name, kind.__module__, kind.__qualname__, shown)).encode())
        for key, tensor in (*module._parameters.items(), *module._buffers.items(), *own.items()):
            if not isinstance(tensor, Tensor):
                continue
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.is_inference():
                return None
            is_known = id(tensor) in known
            place = known.setdefault(id(tensor), len(known))
            digest.update(repr((key, place, tensor.dtype, tensor.shape, tensor.stride())).encode())
            if not is_known:
                digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest


def _shown(value: Any) -> str:
    """An attribute as another process would print it; only the class for other kinds of objects."""
    shown = repr(value) if type(value) in _PLAIN else ""
    return f"{type(value).__module__}.{type(value).__qualname__} {shown if ' at 0x' not in shown else ''}"


def _parts_of(value: Any, seen: set[int]) -> Iterator[Any]:
    """The identity of a function and all that it wraps: `(file, line, name, code)` each; names for other values."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner = [getattr(value, name, None) for name in ("__wrapped__", "__func__", "fget", "fset")]
    if type(value) is FunctionType:
        code = value.__code__
        yield code.co_filename, code.co_firstlineno, code.co_name, code.co_code
        inner += [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}"
    else:
        yield getattr(value, "__qualname__", None), _shown(value)
    for each in inner:
        if each is not None:
            yield from _parts_of(each, seen)
