"""The processors that every row gets for itself: grammars that outputs follow, and those of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.generation import validation
from lookahead.verification.grammar import Grammar
from lookahead.verification.per_row import PerRow


def with_row_processors(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    options: dict[str, Any],
    *,
    json_schema: Any = None,
    regex: str | None = None,
    grammar: str | None = None,
    per_row: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """The options of `model.generate` with the processors that these arguments of `lookahead.generate` ask for.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        generation_config: That of the call.
        options: The options of `model.generate`; processors among them come first.
        json_schema: As of `Grammar`, as are the next two; of all three at most one.
        regex: A regular expression.
        grammar: A context-free grammar.
        per_row: Makes the processor of a row, as of `PerRow`.

    Raises:
        ConfigError: One of them is not valid, or llguidance is not installed.
    """
    added: list[PerRow] = []
    if any(each is not None for each in (json_schema, regex, grammar)):
        validation.check_pair(model, tokenizer)
        ends = validation.resolved(model, generation_config, options, "eos_token_id")
        if ends is None:
            ends = tokenizer.eos_token_id  # without one an output could not end where its grammar must
            options = {**options, "eos_token_id": ends}
        added.append(Grammar(tokenizer, json_schema=json_schema, regex=regex, grammar=grammar, eos_token_id=ends))
    if per_row is not None:
        added.append(PerRow(per_row))
    return {**options, "logits_processor": [*(options.get("logits_processor") or ()), *added]} if added else options
