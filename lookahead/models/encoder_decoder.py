"""The decoder of an encoder-decoder model as a target: one row, chains, and transformers' own cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.models.target import Target, input_device, position_limit


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the decoder attends to, and where it keeps its keys and values.

    Attributes:
        outputs: What the encoder made of one input.
        mask: int64 `[1, tokens]`, which of them count; None for all.
        past: An empty cache; it ends as `model.generate` would leave it, and cross-attention is computed once.
        is_returned: Whether the caller gets the cache, and so must be able to go on with it in any mode of torch.
        tokens: int32 `[tokens]`, what the encoder read, padding left out; none if the decoder's vocabulary is another.
    """

    outputs: Any
    mask: Tensor | None
    past: EncoderDecoderCache
    is_returned: bool = False
    tokens: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))


def empty_cache(model: PreTrainedModel) -> EncoderDecoderCache:
    """A cache as `model.generate` makes one."""
    config: Any = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def decoder_positions(model: PreTrainedModel) -> int | None:
    """Positions the decoder has a table for; None where they are computed."""
    limit: int | None = getattr(model.config, "max_decoder_position_embeddings", None)  # LED names both
    return limit if limit is not None else position_limit(model)


class DecoderTarget(Target):
    """A decoder that scores a chain in one pass: causal attention verifies it, and the cache is cut behind what stays.

    The model's own attention, masks and positions are used, so relative and learned ones are those of
    `model.generate`.

    Args:
        model: The encoder-decoder model; nothing in it is changed.
        encoded: What it reads.
    """

    def __init__(self, model: PreTrainedModel, encoded: Encoded) -> None:
        super().__init__(model, rows=1, capacity=1, device=input_device(model), shape="chains")
        self.positions = decoder_positions(model)
        self._encoded = encoded
        self._past = encoded.past
        self._committed = 0
        pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
        self._pad = -1 if pad is None else pad

    def prefill(self, prompts: Sequence[IntArray], first: int = 0) -> Tensor:
        """Read the decoder's prompt, its start token in most calls; logits after its last token, `[1, 1, vocab]`."""
        logits = self._read(prompts[0])
        self._committed = len(prompts[0]) - 1
        return logits[:, -1:]

    def commit(self, row: int, path: IntArray) -> None:
        """Keep the keys and values of an accepted path, which begins the chain, and cut off the rest."""
        self._committed += len(path)
        surplus = self._past.get_seq_length() - self._committed
        if surplus:
            self._past.crop(-surplus)

    def retire(self, row: int) -> int:
        """The cache stays as it is: it may be the caller's."""
        return row

    def _score(self, trees: Sequence[TokenTree], scored: NDArray[np.int64]) -> Tensor:
        """One pass over a chain, or several: behind a padding token some models count positions anew (M2M100)."""
        tokens = trees[0].tokens
        ends = np.flatnonzero(tokens[:-1] == self._pad) + 1
        parts = [self._read(part) for part in np.split(tokens, ends)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _read(self, tokens: IntArray) -> Tensor:
        """One pass over tokens behind those in the cache; logits after all of them, `[1, tokens, vocab]`."""
        with self._mode():
            ids = torch.from_numpy(np.ascontiguousarray(tokens, np.int64))[None].to(self._device)
            output = self._model(
                decoder_input_ids=ids,
                encoder_outputs=self._encoded.outputs,
                attention_mask=self._encoded.mask,
                past_key_values=self._past,
                use_cache=True,
            )
        logits: Tensor = output.logits
        return logits

    def _mode(self) -> AbstractContextManager[object]:
        """Within `serving` tensors belong to inference mode alone, and those of a cache that is returned must not."""
        modes = ExitStack()
        if self._encoded.is_returned:
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        return modes
