"""Logits to token, exactly as transformers' own sampling loop does it."""

from __future__ import annotations

from collections import deque
from typing import cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessorList


class TokenChooser:
    """Chooses one token per row and HuggingFace step from raw logits.

    Greedy decoding takes the argmax of the processed logits. Sampling takes the very draw that
    `torch.multinomial(probs, 1)` makes: it is `argmax(probs / noise)` with exponential noise of the shape of
    `probs`. The noise of HuggingFace step t is drawn once, for the whole batch, when the first row reaches t,
    so rows that advance at different rates still see the numbers `model.generate` would have shown them.

    Args:
        processors: The logits processors that `model.generate` prepared.
        do_sample: Whether to sample rather than to take the argmax.
        batch_size: Rows of the batch, finished ones included.
    """

    def __init__(self, processors: LogitsProcessorList, *, do_sample: bool, batch_size: int) -> None:
        self._processors = processors
        self._do_sample = do_sample
        self._batch_size = batch_size
        self._noise: deque[Tensor] = deque()
        self._first_step = 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is just the argmax of the raw logits."""
        return not self._do_sample and len(self._processors) == 0

    def choose(self, prefix: Tensor, logits: Tensor, *, row: int, step: int) -> int:
        """Choose the token that follows `prefix`; call it once per emitted token, in order.

        Args:
            prefix: int64 `[1, tokens]`, the row's ids as `model.generate` would hold them, padding included.
            logits: `[vocab]`, the target's raw logits after `prefix`.
            row: Index of the row in the batch.
            step: How many tokens the row had emitted before this one.
        """
        ids, raw = cast(LongTensor, prefix), cast(FloatTensor, logits[None].to(torch.float32, copy=True))
        scores: Tensor = self._processors(ids, raw)
        if not self._do_sample:
            return int(scores.argmax(-1))
        probs = torch.softmax(scores, -1)
        return int((probs / self._noise_of(step, probs)[row]).argmax(-1))

    def forget_before(self, step: int) -> None:
        """Drop noise that no row needs any more: every running row has emitted at least `step` tokens."""
        while self._noise and self._first_step < step:
            self._noise.popleft()
            self._first_step += 1

    def _noise_of(self, step: int, probs: Tensor) -> Tensor:
        """Noise `[batch, vocab]` of a HuggingFace step, drawn in step order."""
        while self._first_step + len(self._noise) <= step:
            shape = (self._batch_size, probs.shape[-1])
            self._noise.append(torch.empty(shape, dtype=probs.dtype, device=probs.device).exponential_())
        return self._noise[step - self._first_step]
