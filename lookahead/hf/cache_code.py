"""Detection of code that replaces the code of transformers' caches."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lookahead.hf.model_code import callables_in, code_of

_CACHES = frozenset((DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache))


def changed_caches() -> str:
    """The name of a function that replaces one of transformers' caches, or an empty string."""
    return _changed_in(_CACHES)


def changed_cache(cache: Any) -> str:
    """The same for a cache passed to a call, whose class or `update` may be a user's; empty without a cache."""
    if cache is None:
        return ""
    parts = [cache, *(getattr(cache, "layers", None) or ())]
    items = [item for part in parts for item in list(vars(part).items())]
    own = [name for name, each in items if callable(each) and not isinstance(each, type | torch.dtype)]
    return own[0] if own else _changed_in(frozenset(map(type, parts)))


def _changed_in(kinds: frozenset[type]) -> str:
    """A method added under a name that transformers' caches do not use is harmless: they never call it."""
    if not (foreign := code_of(kinds).foreign):
        return ""
    spaces = [vars(base) for kind in kinds for base in kind.__mro__ if base is not object]
    names = {id(each): name for space in spaces for name, value in space.items() for each in callables_in(value)}
    added = {at for at, name in names.items() if not name.startswith("__") and name not in _known_names()}
    return next((str(getattr(each, "__qualname__", each)) for each in foreign if id(each) not in added), "")


@functools.cache
def _known_names() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", inspect.getsource(cache_utils)))
