"""Attributes of modules that have another value within a block, or within several of any threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import nn

_guard = Lock()
_uses: Counter[tuple[int, str]] = Counter()  # open blocks by attribute; they keep the module of an id alive


@contextmanager
def replaced(name: str, values: Collection[tuple[nn.Module, Any, Any]]) -> Iterator[None]:
    """Set an attribute of modules until the last open block of any thread ends.

    Args:
        name: The attribute.
        values: Modules, each with its own value and the one that takes its place; without one of its own (None) it has
            that of its class.
    """
    with _guard:
        for module, _, value in values:
            _uses[id(module), name] += 1
            module.__dict__[name] = value
    try:
        yield
    finally:
        with _guard:
            for module, own, _ in values:
                key = id(module), name
                _uses[key] -= 1
                if _uses[key]:
                    continue
                del _uses[key]
                module.__dict__.pop(name, None)
                if own is not None:
                    module.__dict__[name] = own
