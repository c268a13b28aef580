"""Files of verdicts of probes, in which a later process finds them again.

A verdict holds for the weights, the code, the flags and the machine that it was found with. So it is kept only where
another process can tell whether all of these are the same: no code of a user takes part, no hook, no compiled or
offloaded module, and the weights are on the CPU. Every byte of weights and buffers counts, and so do the attributes of
modules, the configuration, each function that a pass can reach, and the files that these stand in.
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
_HELD = frozenset(vars(nn.Module()))  # parts of a module, its weights and hooks, that are read in another way


def verdict_file(model: Any) -> Path | None:
    """The file of a model's verdicts; None where they hold for this process alone."""
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
    """A digest of all but the code; None where a tensor is elsewhere than on the CPU, or of another class."""
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
    """An attribute as another process would write it; of an object of another kind its class."""
    shown = repr(value) if type(value) in _PLAIN else ""
    return f"{type(value).__module__}.{type(value).__qualname__} {shown if ' at 0x' not in shown else ''}"


def _parts_of(value: Any, seen: set[int]) -> Iterator[Any]:
    """What tells a function, with all that it wraps, from another: `(file, line, name, code)` for each; names else."""
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
