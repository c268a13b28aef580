"""What a model of transformers takes in a pass: tokens, positions, and what an encoder has read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.errors import UnsupportedModelError
from lookahead.hf.cache import TreeCache
from lookahead.hf.encoded_rows import Cross, Encoded, EncodedRows, rows_of
from lookahead.hf.facts import (
    cache_input,
    calls_registered_attention,
    inputs_of,
    position_limit,
    side_positions,
)


class ModelInputs:
    """The inputs of a model without an encoder.

    Args:
        model: The model.
        cache: The cache of its passes.
    """

    prefix = ""  # of the names of inputs
    counts_nodes = False
    joins_alone = False  # whether rows join one at a time
    shifts: Tensor | None = None  # int64 `[rows, 1]`, positions behind a prompt less its tokens; None for zeros

    def __init__(self, model: PreTrainedModel, cache: TreeCache) -> None:
        names = inputs_of(model)
        self.model, self.cache, self.cache_name = model, cache, cache_input(model)
        self.takes_positions = f"{self.prefix}position_ids" in names
        self.keeps_logits = "logits_to_keep" in names
        self.positions = position_limit(model)
        self.cross: Cross | None = None  # what the nodes of the running pass attend to besides their text

    def join(self, encoded: Encoded) -> None:
        """Say what an encoder has read for the rows of the next prompts."""

    def joining(self) -> AbstractContextManager[None]:
        """A block whose passes are over the rows of new prompts alone."""
        return nullcontext()

    def read(self) -> Tensor | None:
        """Fill the cache with the prompts; the logits behind them `[rows, 1, vocab]`, or None if passes are to read."""
        return None

    def retire(self, row: int, last: int) -> None:
        """Forget a row, whose place the last one takes."""

    def of_pass(self, tokens: Tensor, positions: Tensor) -> AbstractContextManager[dict[str, Any]]:
        """The arguments of one call of the model, made within a block.

        Args:
            tokens: int64 `[rows, width]`.
            positions: int64 `[rows, width]`.
        """
        options = {self.cache_name: self.cache, f"{self.prefix}input_ids": tokens}
        if self.takes_positions:
            options[f"{self.prefix}position_ids"] = positions
        return nullcontext(options)


class EncoderInputs(ModelInputs):
    """The inputs of the decoder of a model with an encoder.

    What the decoder looks up for slots, embeddings of positions or relative biases, is replaced by what belongs to the
    positions of the nodes.

    Args:
        model: The model.
        cache: The cache of the decoder's own text.
        encoded: What the encoder has read, one row per input; None if all rows join.
    """

    prefix = "decoder_"
    counts_nodes = True

    def __init__(self, model: PreTrainedModel, cache: TreeCache, encoded: Encoded | None = None) -> None:
        super().__init__(model, cache)
        self.positions, self.joins_alone = side_positions(model, "decoder"), encoded is None
        self._vectors, self._biases = _position_tables(model)
        if self.takes_positions:  # it looks up what belongs to them
            self._vectors, self.counts_nodes = [], False
        self._known = dict[nn.Module, Tensor]()  # vectors by position, of `_vectors`
        # An attention function of ours follows the distances by itself.
        self._follows_slots = [] if calls_registered_attention(model) else self._biases
        self._rows, self._joining, self._is_returned = (
            EncodedRows(cache, cast(Any, model).get_decoder()),
            encoded,
            False,
        )

    def join(self, encoded: Encoded) -> None:
        """As for `ModelInputs`."""
        self._joining = encoded

    def joining(self) -> AbstractContextManager[None]:
        """A block whose passes compute keys and values of what is encoded for new rows."""
        encoded, self._joining = self._joining, None
        if encoded is None:
            return nullcontext()
        self._is_returned = encoded.is_returned
        return self._rows.joining(encoded)

    def retire(self, row: int, last: int) -> None:
        """As for `ModelInputs`."""
        if self._joining is None:
            self._rows.retire(row)
            return
        # before the first pass
        kept = torch.tensor([last if each == row else each for each in range(last)], dtype=torch.int64)
        outputs, mask = rows_of(self._joining.outputs, self._joining.mask, kept)
        self._joining = replace(self._joining, outputs=outputs, mask=mask)

    @contextmanager
    def of_pass(self, tokens: Tensor, positions: Tensor) -> Iterator[dict[str, Any]]:
        """As for `ModelInputs`."""
        encoded, self.cross = self._rows.of_pass()
        # Passes run in inference mode. A cache that is returned must be usable outside of it.
        is_inner, given = not self._is_returned, super().of_pass(tokens, positions)
        with torch.inference_mode(is_inner), torch.no_grad(), self._placed(positions) as found, given as options:
            yield {**options, **encoded}
        if not (found or self.takes_positions or self._biases):
            raise UnsupportedModelError(f"{type(self.model).__name__} takes no positions for the nodes of a tree")

    @contextmanager
    def _placed(self, positions: Tensor) -> Iterator[list[nn.Module]]:
        """Let a pass of this thread have positions int64 `[rows, nodes]` in place of those of its slots.

        No position is behind the last slot, so what belongs to it was looked up in this pass or an earlier one. Yields
        a list of the modules that looked up.
        """
        thread, width, found = get_ident(), positions.shape[1], list[nn.Module]()
        slots = self.cache.slots

        def by_position(module: nn.Module, _inputs: Any, vectors: Tensor) -> Tensor:  # `[rows or 1, nodes, size]`
            if get_ident() != thread or vectors.shape[-2] != width:
                return vectors
            found.append(module)
            new, end = vectors.reshape(-1, width, vectors.shape[-1])[0], slots.kv_length
            known = self._known.get(module, new[:0])
            if len(known) < end:  # it doubles, so that a step copies no text
                self._known[module] = known = torch.cat([known, new.new_empty(end, new.shape[1])])
            known[end - width : end] = new
            return known[positions.to(known.device)]

        def by_distance(_module: nn.Module, _inputs: Any, biases: Tensor) -> Tensor:  # `[nodes, keys, heads]`
            past = slots.kv_length - width
            if get_ident() != thread or biases.shape[:2] != (width, slots.kv_length):
                return biases
            keys = torch.cat([torch.arange(past, device=biases.device), positions[0].to(biases.device)])
            return biases[keys[past:, None] - past, keys]

        handles = [each.register_forward_hook(by_position) for each in self._vectors]
        handles += [each.register_forward_hook(by_distance) for each in self._follows_slots]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _position_tables(model: Any) -> list[list[nn.Module]]:
    """The modules in which a decoder that counts slots looks up a vector for each, and a bias for each pair."""
    named = list(model.get_decoder().named_modules())
    kinds = ("embed_positions", "position_embeddings", "wpe"), "relative_attention_bias"
    return [[module for name, module in named if name.endswith(kind)] for kind in kinds]
