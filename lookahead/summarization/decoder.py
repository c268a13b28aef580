"""Decoding of prompts for summaries, greedily or with beams, and with `model.generate` for comparison."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lookahead.errors import ConfigError
from lookahead.generation.prompts import pad_token_of
from lookahead.generation.request import pad_prompts
from lookahead.stats import DecodingStats, total_in_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lookahead.config import LookaheadConfig
    from lookahead.generation.api import GenerationResult
    from lookahead.models.target import OnPrefill

_ROWS_TOGETHER = 8


@dataclass(frozen=True, slots=True)
class PlainFigures:
    """Counters of plain decoding, and whether lookahead decoding gave the same tokens.

    Attributes:
        stats: The counters; no draft is counted.
        identical: Whether every token equals that of lookahead decoding.
    """

    stats: DecodingStats = field(default_factory=DecodingStats)
    identical: bool = True

    def speedup(self, stats: DecodingStats) -> float | None:
        """Tokens per second of lookahead decoding over those of plain decoding; `None` with nothing to compare."""
        return stats.tokens_per_s / self.stats.tokens_per_s if self.stats.tokens_per_s else None

    def __add__(self, other: PlainFigures) -> PlainFigures:
        """The figures of prompts that were decoded one after the other."""
        return PlainFigures(total_in_sequence([self.stats, other.stats]), self.identical and other.identical)

    def to_dict(self) -> dict[str, Any]:
        """Tokens, seconds and the rate as a JSON-ready dict."""
        figures = self.stats.to_dict()
        return {name: figures[name] for name in ("emitted_tokens", "prefill_s", "decode_s", "tokens_per_s")}


class SummaryDecoder:
    """Decodes prompts with `lookahead.generate`, several together.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        config: How drafts are made; `None` means the defaults.
        num_beams: Beams of the search; `None` means the model's own number.
        add_special_tokens: Whether the tokenizer adds its special tokens, since no template wrote them.
        compare: Whether the same prompts are decoded with `model.generate` too.

    Raises:
        ConfigError: `num_beams` is less than 1.

    Attributes:
        compare: As given.
        on_prefill: As for `lookahead.generate`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        config: LookaheadConfig | None = None,
        num_beams: int | None = None,
        add_special_tokens: bool = True,
        compare: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.add_special_tokens, self.compare = add_special_tokens, compare
        if num_beams is not None and num_beams < 1:
            raise ConfigError(f"num_beams must be at least 1, got {num_beams}")
        own = model.generation_config.num_beams if model.generation_config is not None else None
        self._num_beams: int = num_beams or own or 1
        self.on_prefill: OnPrefill | None = None
        self._figures = PlainFigures()

    @property
    def is_alone(self) -> bool:
        """Whether prompts of one document are not decoded together with those of others."""
        return self.compare or self._num_beams > 1

    def decode(self, prompts: Sequence[str], max_new_tokens: int) -> list[GenerationResult]:
        """Continue each prompt by at most `max_new_tokens` tokens, as many together as the cache has room for."""
        from lookahead.generation.scheduler import cache_tokens_of

        longest = max(map(len, self._encode(prompts))) + max_new_tokens
        rows = max(1, min(_ROWS_TOGETHER // self._num_beams, cache_tokens_of(self.model, _ROWS_TOGETHER) // longest))
        batches = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
        return [result for batch in batches for result in self._decode_batch(batch, max_new_tokens)]

    def take_figures(self) -> PlainFigures | None:
        """The figures of plain decoding since the last call; `None` without `compare`."""
        figures, self._figures = self._figures, PlainFigures()
        return figures if self.compare else None

    def warm_up(self, prompt: str) -> None:
        """Decode a few tokens with every proposer, so that compiling is not charged to the first prompt."""
        import numpy as np

        from lookahead.config import LookaheadConfig
        from lookahead.drafting.select import BatchValue, Draft, fit
        from lookahead.drafting.tree import TokenTree
        from lookahead.generation.api import generate

        everything = replace(self.config or LookaheadConfig(), draft="fixed", min_probability=0.0)
        generate(self.model, self.tokenizer, prompt, config=everything, max_new_tokens=12, do_sample=False, num_beams=1)
        # Compile what only batches need.
        fit([Draft(TokenTree.root(0), ())] * 2, np.ones(3), BatchValue(np.ones(2), np.arange(3.0)))

    def _decode_batch(self, prompts: Sequence[str], max_new_tokens: int) -> list[GenerationResult]:
        from lookahead.generation.api import generate

        # An encoder-decoder model is drafted for one input at a time.
        calls = [[prompt] for prompt in prompts] if self.model.config.is_encoder_decoder else [list(prompts)]
        done = [
            generate(
                self.model,
                self.tokenizer,
                call,
                config=self.config,
                add_special_tokens=self.add_special_tokens,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=self._num_beams,
                on_prefill=self.on_prefill,
            )
            for call in calls
        ]
        if self.compare:
            plain, stats = self._decode_plainly(prompts, max_new_tokens)
            self._figures += PlainFigures(stats, plain == [ids for result in done for ids in result.token_ids])
        return done

    def _encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """The token ids of each prompt."""
        encoded = self.tokenizer(list(prompts), add_special_tokens=self.add_special_tokens, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _decode_plainly(self, prompts: Sequence[str], max_new_tokens: int) -> tuple[list[list[int]], DecodingStats]:
        """The new tokens of each prompt by `model.generate`, and its counters."""
        model: Any = self.model  # PreTrainedModel is not typed as one that can generate
        pad, has_encoder = pad_token_of(self.tokenizer), model.config.is_encoder_decoder
        ids, mask = pad_prompts(self._encode(prompts), pad, on_the_right=has_encoder)
        clock = _Clock()
        start = time.perf_counter()
        output: torch.Tensor = model.generate(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=self._num_beams,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        end = time.perf_counter()
        first = clock.first or end
        begin = 1 if has_encoder else len(ids[0])  # an encoder-decoder's output begins with its start token
        rows = [self._up_to_stop(row) for row in output[:, begin:].tolist()]
        emitted = sum(map(len, rows))
        passes = Counter({1: emitted - len(rows)})  # the prefill gives the first token of each row
        return rows, DecodingStats(
            emitted_tokens=emitted, acceptance_histogram=passes, prefill_s=first - start, decode_s=end - first
        )

    def _up_to_stop(self, row: list[int]) -> list[int]:
        """The tokens of a row up to its first end-of-sequence token, inclusive; padding follows."""
        config = self.model.generation_config
        stops = config.eos_token_id if config is not None else None
        stop_ids = set(stops) if isinstance(stops, list) else {stops}
        length = next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))
        return row[:length]


class _Clock(StoppingCriteria):
    """Stops nothing, and notes the time of the first tokens."""

    first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.first = self.first or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
