"""Plain decoding with `model.generate`, which lookahead decoding is compared with."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from lookahead.generation.prompts import pad_token_of
from lookahead.generation.request import pad_prompts
from lookahead.stats import DecodingStats, total_in_sequence


@dataclass(frozen=True, slots=True)
class PlainFigures:
    """Counters of plain decoding, and whether lookahead decoding gave the same tokens."""

    stats: DecodingStats = field(default_factory=DecodingStats)  # no draft is counted
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


def decode_plainly(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], max_new_tokens: int, num_beams: int
) -> tuple[list[list[int]], DecodingStats]:
    """The new tokens of each prompt by `model.generate`, up to its end-of-sequence token, and the counters."""
    pad, has_encoder = pad_token_of(tokenizer), model.config.is_encoder_decoder
    ids, mask = pad_prompts(prompts, pad, on_the_right=has_encoder)
    clock = _Clock()
    start = time.perf_counter()
    output: torch.Tensor = model.generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=num_beams,
        pad_token_id=pad,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    end = time.perf_counter()
    first = clock.first or end
    stops = model.generation_config.eos_token_id if model.generation_config is not None else None
    stop_ids = set(stops) if isinstance(stops, list) else {stops}
    rows = []
    begin = 1 if has_encoder else len(ids[0])  # an encoder-decoder's output begins with its start token
    for row in output[:, begin:].tolist():
        rows.append(row[: next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))])
    emitted = sum(map(len, rows))
    passes = Counter({1: emitted - len(rows)})  # the prefill gives the first token of each row
    return rows, DecodingStats(
        emitted_tokens=emitted, acceptance_histogram=passes, prefill_s=first - start, decode_s=end - first
    )


class _Clock(StoppingCriteria):
    """Stops nothing, and notes the time of the first tokens."""

    first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.first = self.first or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
