"""The caches of `model.generate` calls: argument names, and ownership."""

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
    """The cache among arguments of `model.generate`, or None."""
    names = CACHE, "past_key_values", "cache_params"
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def may_be_callers(cache: Any, config: GenerationConfig) -> bool:
    """Whether a cache may come from the caller of `model.generate`, which rules out a named cache implementation."""
    is_unmarked = not MARKS_CACHES and config.cache_implementation is None  # before transformers 5.17 none is marked
    return cache is not None and getattr(cache, "_is_user_defined", is_unmarked)


def is_callers(cache: Any) -> bool:
    """Whether a cache is known to come from the caller of `model.generate`."""
    return bool(getattr(cache, "_is_user_defined", False))


def tokens_in(cache: Any) -> int:
    """Tokens in a cache; 0 for None, and for a cache that does not count tokens."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:  # since transformers 5.24, from a cache without attention layers
        return 0
