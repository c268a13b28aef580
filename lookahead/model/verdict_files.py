"""Files of verdicts for later processes.

A verdict is valid for the weights, the code, the flags and the machine that it was found with. A file is named by a
digest of all of them, so only models of known code have one, with all their weights on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash
from torch import nn

from lookahead.model.known_code import callables_in, global_hooks, hooks_of, is_ours
from lookahead.model.stamp import digest_of, modules_of
from lookahead.utils.kept_values import kept_file
from lookahead.utils.machine import machine_fingerprint
from lookahead.utils.sources import sources_digest

_REMOTE = "transformers_modules"


def verdict_file(model: Any) -> Path | None:
    """The verdict file of a model; None if its verdicts are valid only for this process.

    The model has no code of a user's (`users_code`).
    """
    modules = modules_of(model)
    placed = [hook for module in modules for hook in hooks_of(module)] + global_hooks()
    placed += [
        forward
        for forward in (vars(module).get("forward") for module in modules)
        if not (forward is None or is_ours(forward))
    ]
    compiled = any(module._compiled_call_impl is not None for module in modules)
    digest = None if placed or compiled else digest_of(model)
    if digest is None:
        return None
    files = {type(module).__module__ for module in modules}
    packages = sorted({name.partition(".")[0] for name in files} - {_REMOTE, "lookahead"})
    releases = [(name, _releases_of(name)) for name in packages]
    named = xxhash.xxh3_128(repr((digest, machine_fingerprint(), releases, _places_of(modules))).encode())
    sources = {getattr(sys.modules.get(name), "__file__", None) for name in files if name.startswith(_REMOTE)}
    named.update(sources_digest(Path(source) for source in sources if source is not None))
    return kept_file("verdicts", f"{type(model).__name__}-{named.hexdigest()}")


def _places_of(modules: Sequence[nn.Module]) -> list[tuple[str, str, str]]:
    """Where the functions of classes and their files were defined, which tells if one took the place of another."""
    kinds = {base for module in modules for base in type(module).__mro__ if base is not object}
    files = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}
    # `torch.compile` replaces these two of every module, and adds names with two underscores to the files it compiles.
    items = [item for kind in kinds for item in vars(kind).items() if item[0] not in ("__init__", "__setstate__")]
    items += [item for name in files for item in vars(sys.modules[name]).items() if not item[0].startswith("__")]
    functions = [(name, function) for name, value in items for function in callables_in(value)]
    return sorted(
        (name, str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", "")))
        for name, function in functions
    )


def _releases_of(package: str) -> list[str]:
    """The releases of the distributions that a package may be of."""
    with suppress(metadata.PackageNotFoundError):
        return [metadata.version(package)]  # asking all distributions for their packages takes a second
    return [metadata.version(name) for name in metadata.packages_distributions().get(package, ())]
