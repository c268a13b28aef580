"""The caches of calls of `model.generate`: their names among its arguments, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

# The name of the cache among the inputs and outputs of a model. Transformers changed it in 5.24.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
MARKS_CACHES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments of `model.generate`; None without one."""
    names = CACHE, "past_key_values", "cache_params"
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def may_be_callers(cache: Any, config: GenerationConfig) -> bool:
    """Whether the caller of `model.generate` may have passed a cache; of an implementation that is named, none did."""
    is_unmarked = not MARKS_CACHES and config.cache_implementation is None  # before transformers 5.17 none is marked
    return cache is not None and getattr(cache, "_is_user_defined", is_unmarked)


def is_callers(cache: Any) -> bool:
    """Whether the caller of `model.generate` is known to have passed a cache."""
    return bool(getattr(cache, "_is_user_defined", False))


def tokens_in(cache: Any) -> int:
    """Tokens that a cache holds; 0 without one, and for states that count none."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:  # since transformers 5.24, from a cache without attention layers
        return 0
