"""Detection of code that belongs to torch and transformers, and the sources of this package."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import typing
from collections.abc import Iterable
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    WrapperDescriptorType,
)
from typing import Any

import xxhash

_PACKAGES = ("torch", "transformers")
_SPECS = [spec for spec in map(importlib.util.find_spec, _PACKAGES) if spec is not None]
_FOLDERS = tuple(os.path.dirname(str(spec.origin)) + os.sep for spec in _SPECS)
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DECORATORS = contextlib.__file__, functools.__file__, typing.__file__  # files of wrappers that both packages use
_AUTOCAST = os.path.join("amp", "autocast_mode.py")  # as a decorator it changes what it wraps
_COMPILED = BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType


def is_shipped(function: Any, *, or_ours: bool = False) -> bool:
    """Whether a callable and everything that it wraps is defined in transformers or torch, or is compiled code.

    With `or_ours`, code of this package counts too.
    """
    folders = (*_FOLDERS, _OWN) if or_ours else _FOLDERS
    while function is not None:
        if isinstance(function, functools.partial) and (function.args or function.keywords):
            return False  # the arguments come from a user
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        elif type(function) is FunctionType:
            file = function.__code__.co_filename
            if (not file.startswith(folders) and file not in _DECORATORS) or file.endswith(_AUTOCAST):
                return False
            function = getattr(function, "__wrapped__", None)
        elif hasattr(function, "__wrapped__"):  # a functools cache
            function = function.__wrapped__
        else:
            package = type(function).__module__.partition(".")[0]
            return isinstance(function, _COMPILED) or package in (*_PACKAGES, "typing")
    return True


def sources_digest(files: Iterable[Path]) -> bytes:
    """16 bytes that depend on the names and contents of source files. For a missing file only the name counts."""
    digest = xxhash.xxh3_128()
    for file in sorted(files):
        digest.update(file.name.encode())
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
    return digest.digest()


@functools.cache
def source_files() -> list[Path]:
    """The source files of this package, including folders that are linked into it."""
    found = os.walk(_OWN, followlinks=True)
    return [Path(place, name) for place, _, names in found for name in names if name.endswith(".py")]
