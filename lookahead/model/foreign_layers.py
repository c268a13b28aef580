"""Layers of a model with products of third-party code, such as quantized layers of other libraries."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from lookahead.model.known_code import forward_under

_SHIPPED = "torch.", "transformers.", "lookahead."
_ADDRESS = re.compile(r" at 0x\w+")
_QUANTIZERS = "torch.ao.", "transformers.integrations."  # ship with torch or transformers, but with other arithmetic


def foreign_layers(module: nn.Module) -> list[nn.Module]:
    """The modules computed by third-party code, judging by their class, a weight's class, or a `forward` set on them.

    If submodules of a module hold parameters, the submodules count instead.
    """
    return [part for part in module.modules() if is_foreign(part) and not _has_parts(part)]


def is_foreign(module: nn.Module) -> bool:
    """Whether a module, without its submodules, runs code from outside torch, transformers and this package."""
    forward = forward_under(module)
    forward = getattr(forward, "func", getattr(forward, "__func__", forward))
    return (
        not _is_shipped_class(type(module))
        or not all(map(_is_shipped_class, weight_kinds(module)))
        or not (forward is None or f"{forward.__module__}.".startswith(_SHIPPED))
    )


def weight_kinds(module: nn.Module) -> list[type[Any]]:
    """The classes of a module's own parameters."""
    return [type(weight) for weight in module._parameters.values() if weight is not None]


def arithmetic_of(module: nn.Module) -> tuple[Any, ...]:
    """A key of the arithmetic of a layer: classes, its `repr` and its settings."""
    settings = {name: value for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, Tensor)}
    shown = [_ADDRESS.sub("", repr(part)) for part in (module, *settings.values())]
    return type(module), *weight_kinds(module), *settings, *shown


def _is_shipped_class(kind: type[Any]) -> bool:
    name = f"{kind.__module__}."
    return name.startswith(_SHIPPED) and not name.startswith(_QUANTIZERS)


def _has_parts(module: nn.Module) -> bool:
    return any(next(part.parameters(), None) is not None for part in module.children())
