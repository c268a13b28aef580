"""Plain decoding of the same prompts, to compare lookahead decoding with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lookahead.generation.request import pad_prompts
from lookahead.summarization.greedy import Decoded, LookaheadDecoder

if TYPE_CHECKING:
    from lookahead.stats import DecodingStats


@dataclass(frozen=True, slots=True)
class PlainFigures:
    """What plain decoding took for some prompts, and whether lookahead decoding wrote the same.

    Attributes:
        emitted_tokens: New tokens, end-of-sequence tokens included.
        decoded_tokens: Those of them that a decoding step made: all but the first of each prompt, which the
            prefill yields.
        prefill_s: Seconds until the first tokens were there.
        decode_s: Seconds from there to the end.
        identical: Whether every token equals that of lookahead decoding.
    """

    emitted_tokens: int = 0
    decoded_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    identical: bool = True

    @property
    def tokens_per_s(self) -> float:
        """Tokens per decode second; the prefill and the tokens it yields are left out."""
        return self.decoded_tokens / self.decode_s if self.decode_s else 0.0

    def speedup(self, stats: DecodingStats) -> float | None:
        """How many times as many tokens per second lookahead decoding made; `None` with nothing to compare."""
        return stats.tokens_per_s / self.tokens_per_s if self.tokens_per_s else None

    def __add__(self, other: PlainFigures) -> PlainFigures:
        """The figures of prompts that were decoded one after the other."""
        return PlainFigures(
            emitted_tokens=self.emitted_tokens + other.emitted_tokens,
            decoded_tokens=self.decoded_tokens + other.decoded_tokens,
            prefill_s=self.prefill_s + other.prefill_s,
            decode_s=self.decode_s + other.decode_s,
            identical=self.identical and other.identical,
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures as a JSON-ready dict, without `identical`."""
        return {
            "emitted_tokens": self.emitted_tokens,
            "prefill_s": round(self.prefill_s, 6),
            "decode_s": round(self.decode_s, 6),
            "tokens_per_s": round(self.tokens_per_s, 3),
        }


class ComparingDecoder:
    """Decodes with lookahead, then the very same prompts with transformers' own `model.generate`.

    Args:
        decoder: The lookahead decoder; texts, tokens and stats are its.

    Attributes:
        figures: What plain decoding did since they were last taken.
    """

    def __init__(self, decoder: LookaheadDecoder) -> None:
        self.decoder = decoder
        self.figures = PlainFigures()

    def decode(self, prompts: Sequence[str], max_new_tokens: int) -> Decoded:
        """Continue each prompt by at most `max_new_tokens` tokens, twice."""
        decoded = self.decoder.decode(prompts, max_new_tokens)
        plain, figures = self._decode_plainly(prompts, max_new_tokens)
        self.figures += replace(figures, identical=plain == decoded.token_ids)
        return decoded

    def take_figures(self) -> PlainFigures:
        """The figures so far; counting starts anew."""
        figures, self.figures = self.figures, PlainFigures()
        return figures

    def _decode_plainly(self, prompts: Sequence[str], max_new_tokens: int) -> tuple[list[list[int]], PlainFigures]:
        """Decode with `model.generate`: new tokens of each prompt, and what it took."""
        model: Any = self.decoder.model  # PreTrainedModel is not typed as one that can generate
        pad = self._pad_token_id()
        input_ids, attention_mask = self._padded(prompts, pad)
        clock = _Clock()
        start = time.perf_counter()
        output: torch.Tensor = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        end = time.perf_counter()
        first = end if clock.first is None else clock.first
        begin = 1 if model.config.is_encoder_decoder else input_ids.shape[1]  # a decoder's prompt is its start token
        rows = [self._up_to_stop(row) for row in output[:, begin:].tolist()]
        emitted = sum(map(len, rows))
        return rows, PlainFigures(emitted, emitted - len(rows), first - start, end - first)

    def _padded(self, prompts: Sequence[str], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask of the prompts, `[prompts, longest]`, on the model's device."""
        encoded = self.decoder.tokenizer(
            list(prompts), add_special_tokens=self.decoder.add_special_tokens, verbose=False
        )
        model = self.decoder.model
        ids, mask = pad_prompts(encoded["input_ids"], pad, on_the_right=model.config.is_encoder_decoder)
        return torch.tensor(ids, device=model.device), torch.tensor(mask, device=model.device)

    def _pad_token_id(self) -> int:
        """A token to fill rows with; the attention mask hides it, so any will do."""
        tokenizer = self.decoder.tokenizer
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        return next((token for token in candidates if isinstance(token, int)), 0)

    def _up_to_stop(self, row: list[int]) -> list[int]:
        """The tokens of a row up to and with its first end-of-sequence token; what follows fills the row."""
        config = self.decoder.model.generation_config
        stops = config.eos_token_id if config is not None else None
        stop_ids = set(stops) if isinstance(stops, list) else {stops}
        length = next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))
        return row[:length]


class _Clock(StoppingCriteria):
    """Stops nothing, and notes when the first tokens are there."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if self.first is None:
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
