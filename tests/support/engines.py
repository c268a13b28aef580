"""Engines for tests: the engine of a call of `model.generate` before it runs."""

from __future__ import annotations

from typing import Any

from lookahead import LookaheadConfig
from lookahead.decoding.plan import plan_request
from lookahead.model.calls import ResolvedCall


def engine_of(model: Any, prompts: Any = None, lookahead_config: LookaheadConfig | None = None, **options: Any) -> Any:
    """The engine of a call with these arguments, or transformers' loop."""
    prompts = options.pop("input_ids") if prompts is None else prompts
    call = ResolvedCall.resolve(model, prompts, **options)
    return plan_request(call, lookahead_config).begin()
