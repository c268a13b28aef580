"""The target model: prefill prompts, score trees, commit what was accepted."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.attention import ATTENTION_NAME, TreePass, running
from lookahead.cache import TreeCache
from lookahead.tree import IntArray, TokenTree

PREFILL_CHUNK = 1024


def takes_registered_attention(model: PreTrainedModel) -> bool:
    """Whether the model calls registered attention functions; older architectures are given prepared masks."""
    return bool(model._can_set_attn_implementation())


_locks: WeakKeyDictionary[PreTrainedModel, RLock] = WeakKeyDictionary()
_locks_guard = Lock()


def _lock_of(model: PreTrainedModel) -> RLock:
    """One lock per model: its attention implementation is part of the model, so threads take turns."""
    with _locks_guard:
        return _locks.setdefault(model, RLock())


class Target:
    """A HuggingFace causal LM that scores one token tree per row in one forward pass.

    Args:
        model: The model; nothing in it is changed but, within `serving`, its attention implementation.
        rows: Rows of the batch.
        capacity: Slots per row to begin with.
    """

    def __init__(self, model: PreTrainedModel, *, rows: int, capacity: int) -> None:
        self._model = model
        embedding: Any = model.get_input_embeddings()
        self._device: torch.device = embedding.weight.device
        self._dtype: torch.dtype = embedding.weight.dtype
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.cache = TreeCache(rows=rows, capacity=capacity)
        self._registered = takes_registered_attention(model)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let the model use tree attention until the block ends; every pass must run inside.

        Blocks may be nested. Another thread that wants the same model waits until the outermost one ends.
        """
        config = self._model.config
        with _lock_of(self._model), torch.inference_mode():
            before = config._attn_implementation
            if not self._registered or before == ATTENTION_NAME:
                yield
                return
            self._model.set_attn_implementation(ATTENTION_NAME)
            try:
                yield
            finally:
                self._model.set_attn_implementation(before)

    def prefill(self, prompts: Sequence[IntArray]) -> Tensor:
        """Put the KV of every prompt into the cache; its last token, the first root, is not committed yet.

        Args:
            prompts: int32 `[tokens]` per row, at least one token more than the row's cache holds already; rows may
                differ in length.

        Returns:
            Logits after the last token of every prompt, `[rows, 1, vocab]`.
        """
        slots = self.cache.slots
        cached = slots.lengths.copy()
        lengths = np.array([len(prompt) for prompt in prompts])
        new = lengths - cached
        padded = np.zeros((len(prompts), int(new.max())), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : new[row]] = prompt[cached[row] :]
        last: dict[int, Tensor] = {}
        for start in range(0, padded.shape[1], PREFILL_CHUNK):
            chunk = np.ascontiguousarray(padded[:, start : start + PREFILL_CHUNK])
            # A row whose prompt has ended writes padding behind its end, where its trees will stand.
            slots.lengths[:] = cached + start
            ends = new - 1 - start
            ending = np.flatnonzero((ends >= 0) & (ends < chunk.shape[1]))
            keep, place = np.unique(ends[ending], return_inverse=True)
            positions = slots.lengths[:, None] + np.arange(chunk.shape[1])
            logits = self._forward(chunk, positions, None, keep=keep if len(keep) else np.zeros(1, np.int64))
            last.update({int(row): logits[row, column] for row, column in zip(ending, place, strict=True)})
        slots.lengths[:] = lengths - 1
        return torch.stack([last[row] for row in range(len(prompts))])[:, None]

    def score(self, trees: Sequence[TokenTree]) -> Tensor:
        """Logits after every node, `[active, nodes of the largest tree, vocab]`, in one forward pass.

        Args:
            trees: One tree per active row, in the order of the rows.
        """
        slots = self.cache.slots
        width = max(len(tree) for tree in trees)
        tokens = np.zeros((len(trees), width), np.int64)
        positions = np.empty((len(trees), width), np.int64)
        for row, tree in enumerate(trees):
            tokens[row, : len(tree)] = tree.tokens
            positions[row] = slots.lengths[row]
            positions[row, : len(tree)] += tree.depths
        return self._forward(tokens, positions, trees)

    def commit(self, row: int, path: IntArray) -> None:
        """Keep the KV of an accepted path (int32 `[a]`, from node 0) of a row's tree."""
        self.cache.commit(row, path)

    def retire(self, row: int) -> int:
        """Take a finished row out of the passes; returns the row that took its place."""
        return self.cache.retire(row)

    def _forward(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        trees: Sequence[TokenTree] | None,
        keep: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """One pass of the model over `[active, width]` tokens; returns the logits of all columns, or of `keep`."""
        self.cache.slots.begin(tokens.shape[1])
        tree_pass = TreePass(self.cache.slots, trees)
        options: dict[str, object] = {}
        columns = None if keep is None else torch.from_numpy(keep).to(self._device)
        if self._keeps_logits and columns is not None:
            options["logits_to_keep"] = columns
        scope: AbstractContextManager[None] = nullcontext()
        if self._registered:
            scope = running(tree_pass)
        else:
            options["attention_mask"] = tree_pass.mask(1, None, self._dtype, self._device)
        with scope:
            logits: Tensor = self._model(
                input_ids=torch.from_numpy(tokens).to(self._device),
                position_ids=torch.from_numpy(positions).to(self._device),
                past_key_values=self.cache,
                use_cache=True,
                **options,
            ).logits
        return logits if columns is None or self._keeps_logits else logits[:, columns]
