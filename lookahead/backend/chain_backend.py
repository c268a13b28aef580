"""Passes over one chain per row by the decoder of an encoder-decoder model, with transformers' masks and cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.backend.cpu.cpu_pass import CpuPass, running, thread
from lookahead.backend.protocol import BitPolicy, OnPrefill
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.model.call_caches import CACHE
from lookahead.model.encoded_rows import Encoded, rows_of
from lookahead.model.facts import side_positions


class ChainBackend(CpuBackend):
    """Scores a chain per row in one pass of a decoder; on a CPU its products are those of `CpuBackend`.

    Masks and positions are for a batch of rows of one length, so all rows must accept equally many tokens. Finished
    rows leave the passes, unless the caller gets the cache: then they continue with padding.

    Args:
        model: The model.
        encoded: Encoder outputs, one row per input.
        rows: Rows of the batch.
        packs: Whether linear layers may keep packed copies of their weights.
    """

    def __init__(self, model: PreTrainedModel, encoded: Encoded, rows: int = 1, *, packs: bool = True) -> None:
        super().__init__(model, rows=rows, capacity=1, shape="chains", packs=packs)
        self.positions = side_positions(model, "decoder")
        self.is_aligned = rows > 1
        self._outputs, self._mask = encoded.outputs, encoded.mask
        self._past, self._is_returned = encoded.past, encoded.is_returned
        self._places = list(range(rows))  # cache rows of the active rows
        self._all = rows  # rows of the cache
        self._committed = 0
        self._accepted: int | None = None
        pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
        self._pad = -1 if pad is None else pad

    def read(
        self,
        prompts: Sequence[IntArray],
        first: int = 0,
        *,
        encoded: Encoded | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> Tensor:
        """Read the uncached part of the decoder's prompts, all of one length; last logits, `[rows, 1, vocab]`."""
        self._settle()
        tokens = np.stack([prompt[self._committed :] for prompt in prompts])
        logits = self._pass(tokens, BitPolicy.BATCH, is_prompt=True)
        self._committed = len(prompts[0]) - 1
        return logits[:, -1:]

    def commit(self, row: int, path: IntArray) -> None:
        """Keep the keys and values of an accepted path, cut to the shortest accepted path of all rows."""
        self._accepted = len(path) if self._accepted is None else min(self._accepted, len(path))

    def retire(self, row: int) -> int:
        """Remove a row. After the last row the cache keeps its rows, since it may be the caller's."""
        last = self._places.pop()
        if row < len(self._places):
            self._places[row] = last
        self.cache.slots.active -= 1
        if not self._places:
            self._settle()
        return len(self._places)

    def _settle(self) -> None:
        """Remove rejected tokens and finished rows from the cache."""
        self._committed += self._accepted or 0
        self._accepted = None
        surplus = self._past.get_seq_length() - self._committed
        if surplus:
            self._past.crop(-surplus)
        if self._is_returned or not self._places or self._places == list(range(self._all)):
            return
        kept = torch.tensor(self._places, device=self._device)
        self._past.batch_select_indices(kept)
        self._outputs, self._mask = rows_of(self._outputs, self._mask, kept)
        self._all, self._places = len(self._places), list(range(len(self._places)))

    def score(
        self,
        trees: Sequence[TokenTree],
        policy: BitPolicy = BitPolicy.ROUNDED,
        scored: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """One pass over a chain per row, split after padding tokens: some models restart positions there (M2M100).

        Partly scored chains come from a draft model; the longest ones gained equally many nodes.
        """
        longest, first, self.is_cold = max(map(len, trees)), 0, False
        if scored is None:
            self._settle()
        else:
            first = int(scored.max())
        tokens: IntArray = np.full((self._all, longest), max(self._pad, 0))
        tokens[self._places] = [np.pad(tree.tokens, (0, longest - len(tree)), "edge") for tree in trees]
        tokens = tokens[:, first:]
        ends = np.flatnonzero((tokens[self._places, :-1] == self._pad).any(0)) + 1
        policy = BitPolicy.BATCH if self._rows > 1 else BitPolicy.ROUNDED
        parts = [self._pass(part, policy) for part in np.split(tokens, ends, 1)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return logits if self._places == list(range(self._all)) else logits[self._places]

    def _pass(self, tokens: IntArray, policy: BitPolicy, *, is_prompt: bool = False) -> Tensor:
        """One pass over tokens `[rows, tokens]` after the cached ones; logits `[rows, tokens, vocab]`."""
        model: Any = self._model
        mode = CpuPass(policy, is_prompt, self._linears.packs, self._linears.fewest)
        # `serving` runs in inference mode. A returned cache must be usable outside of it.
        with torch.inference_mode(not self._is_returned), torch.no_grad(), running(mode, fuses=False):
            output = model(
                decoder_input_ids=torch.from_numpy(np.ascontiguousarray(tokens, np.int64)).to(self._device),
                encoder_outputs=self._outputs,
                attention_mask=self._mask,
                use_cache=True,
                **{CACHE: self._past},
            )
            self.is_cold |= thread.is_cold
        logits: Tensor = output.logits
        return logits
