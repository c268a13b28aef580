"""Passes over one chain per row by a decoder behind an encoder, with masks, positions and a cache of transformers."""

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
from lookahead.hf.call_caches import CACHE
from lookahead.hf.encoded_rows import Encoded, rows_of
from lookahead.hf.facts import side_positions


class ChainBackend(CpuBackend):
    """A decoder that scores a chain per row in one pass; on a CPU its products are those of `CpuBackend`.

    Masks and positions are those of a batch whose rows have one length, so all rows must accept as many tokens. Rows
    that ended leave the passes, unless the caller gets the cache: then they go on with padding.

    Args:
        model: The model.
        encoded: What the encoder has read, one row per input.
        rows: Rows of the batch.
        packs: Whether linear layers may keep packed copies of their weights.
    """

    def __init__(self, model: PreTrainedModel, encoded: Encoded, rows: int = 1, *, packs: bool = True) -> None:
        super().__init__(model, rows=rows, capacity=1, shape="chains", packs=packs)
        self.positions = side_positions(model, "decoder")
        self.is_aligned = rows > 1
        self._outputs, self._mask = encoded.outputs, encoded.mask
        self._past, self._is_returned = encoded.past, encoded.is_returned
        self._places = list(range(rows))  # of the active rows among those of the cache
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
        """Read what is new of the decoder's prompts, all of one length; logits after the last, `[rows, 1, vocab]`."""
        self._settle()
        tokens = np.stack([prompt[self._committed :] for prompt in prompts])
        logits = self._pass(tokens, BitPolicy.BATCH, is_prompt=True)
        self._committed = len(prompts[0]) - 1
        return logits[:, -1:]

    def commit(self, row: int, path: IntArray) -> None:
        """Keep the keys and values of an accepted path, as long as those of other rows."""
        self._accepted = len(path) if self._accepted is None else min(self._accepted, len(path))

    def retire(self, row: int) -> int:
        """Take a row out; of the last one the cache stays as it is: it may be the caller's."""
        last = self._places.pop()
        if row < len(self._places):
            self._places[row] = last
        self.cache.slots.active -= 1
        if not self._places:
            self._settle()
        return len(self._places)

    def _settle(self) -> None:
        """Cut off what was not accepted, and the rows that ended."""
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
        """One pass over a chain per row, or several: behind padding some models count anew (M2M100).

        Chains that were scored in part are those of a draft model; the longest ones gained as many nodes.
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
        """One pass over tokens `[rows, tokens]` behind those in the cache; logits `[rows, tokens, vocab]`."""
        model: Any = self._model
        mode = CpuPass(policy, is_prompt, self._linears.packs, self._linears.fewest)
        # `serving` runs in inference mode. A cache that is returned must be usable outside of it.
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
