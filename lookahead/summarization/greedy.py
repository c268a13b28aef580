"""Decoding prompts together, greedily."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from lookahead.stats import DecodingStats, total

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lookahead.config import LookaheadConfig
    from lookahead.models.target import OnPrefill
    from lookahead.verification.stopping import FinishReason


@dataclass(frozen=True, slots=True)
class Decoded:
    """What some prompts were continued with.

    Attributes:
        texts: New text of each prompt.
        token_ids: New tokens of each prompt.
        stats: What decoding did, all prompts together.
        finish_reasons: Why the output of each prompt ended.
    """

    texts: list[str]
    token_ids: list[list[int]]
    stats: DecodingStats
    finish_reasons: list[FinishReason]


class Decoder(Protocol):
    """Continues prompts."""

    def decode(self, prompts: Sequence[str], max_new_tokens: int) -> Decoded:
        """Continue each prompt by at most `max_new_tokens` tokens."""


class LookaheadDecoder:
    """Decodes with `lookahead.generate`.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        config: How drafts are made; `None` for the defaults.
        add_special_tokens: Whether the tokenizer adds its special tokens: not where a template wrote them.

    Attributes:
        on_prefill: As for `lookahead.generate`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        config: LookaheadConfig | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.add_special_tokens = add_special_tokens
        self.on_prefill: OnPrefill | None = None

    def decode(self, prompts: Sequence[str], max_new_tokens: int) -> Decoded:
        """Continue each prompt by at most `max_new_tokens` tokens."""
        # An encoder-decoder model is drafted for one input at a time.
        batches = [[prompt] for prompt in prompts] if self.model.config.is_encoder_decoder else [list(prompts)]
        done = [self._decode_together(batch, max_new_tokens) for batch in batches]
        texts = [text for decoded in done for text in decoded.texts]
        token_ids = [ids for decoded in done for ids in decoded.token_ids]
        stats = done[0].stats if len(done) == 1 else total_in_sequence(decoded.stats for decoded in done)
        reasons = [reason for decoded in done for reason in decoded.finish_reasons]
        return Decoded(texts, token_ids, stats, reasons)

    def _decode_together(self, prompts: list[str], max_new_tokens: int) -> Decoded:
        """Continue prompts in one batch."""
        from lookahead.generation.api import generate

        result = generate(
            self.model,
            self.tokenizer,
            prompts,
            config=self.config,
            add_special_tokens=self.add_special_tokens,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            on_prefill=self.on_prefill,
        )
        return Decoded(result.texts, result.token_ids, result.stats, result.finish_reasons)

    def warm_up(self, prompt: str) -> None:
        """Decode a few tokens, drafting whatever pays, so that compiling is not charged to the first prompt."""
        import numpy as np

        from lookahead.config import LookaheadConfig
        from lookahead.drafting.cost_model import BatchValue
        from lookahead.drafting.select import Draft, fit
        from lookahead.drafting.tree import TokenTree
        from lookahead.generation.api import generate

        everything = replace(self.config or LookaheadConfig(), draft="fixed", min_probability=0.0)
        generate(self.model, self.tokenizer, prompt, config=everything, max_new_tokens=12, do_sample=False, num_beams=1)
        # What only batches need.
        fit([Draft(TokenTree.root(0), ())] * 2, np.ones(3), BatchValue(np.ones(2), np.arange(3.0)))


def total_in_sequence(calls: Iterable[DecodingStats]) -> DecodingStats:
    """Add up calls that ran one after the other, so that their seconds add up too.

    The time to the first token is that of the last call, everything before it included.
    """
    done = list(calls)
    result = total(done)
    result.prefill_s = sum(stats.prefill_s for stats in done)
    result.decode_s = sum(stats.decode_s for stats in done)
    result.ttft_s = sum(stats.prefill_s + stats.decode_s for stats in done[:-1]) + (done[-1].ttft_s if done else 0.0)
    return result
