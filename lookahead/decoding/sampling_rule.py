"""Checks of numeric options, and the rule that decides whether tokens are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from numbers import Real
from typing import Any

from lookahead.config import check_whole
from lookahead.errors import ConfigError

# The minimum of integer options, and the maximum of float options.
_WHOLE = {"max_new_tokens": 1, "max_length": 1, "min_new_tokens": 0, "min_length": 0, "top_k": 0, "num_beams": 1}
_NUMBERS = {"temperature": inf, "top_p": 1.0, "min_p": 1.0, "typical_p": 1.0, "repetition_penalty": inf}
_DRAWS = ("temperature", "top_p", "top_k", "min_p")  # options that only affect sampling


def checked_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None; ConfigError if a number is out of its range."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name in _WHOLE:
            check_whole(name, given[name], _WHOLE[name])
        value, most = given[name], _NUMBERS.get(name)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if most is not None and not (is_number and 0 <= value <= most):
            span = f"from 0 to {most:g}" if most < inf else "of at least 0"
            raise ConfigError(f"{name} must be a number {span}, got {value!r}")
    return given


def with_sampling(generation_config: object, options: dict[str, Any]) -> dict[str, Any]:
    """Options of `model.generate` with `do_sample` set if it is not given.

    Tokens are sampled if a temperature, `top_p`, `top_k` or `min_p` is given. A temperature of 0 is greedy.
    """
    given = checked_numbers(options)
    # With `penalty_alpha` `top_k` is an option of contrastive search.
    if not given.keys() & {*_DRAWS} or given.keys() & {"do_sample", "penalty_alpha"}:
        return options
    if given.get("temperature") == 0:
        return {**{name: value for name, value in options.items() if name not in _DRAWS}, "do_sample": False}
    if getattr(generation_config, "do_sample", None) is False:
        return options
    return {**options, "do_sample": True}
