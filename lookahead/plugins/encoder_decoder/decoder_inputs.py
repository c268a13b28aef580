"""The inputs of a decoder behind an encoder in a pass: tokens, positions, and encoder outputs."""

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
from lookahead.model.cache import TreeCache
from lookahead.model.calls import ModelInputs
from lookahead.model.facts import calls_registered_attention, side_positions
from lookahead.plugins.encoder_decoder.encoded_rows import Encoded, EncodedRows, rows_of


class EncoderInputs(ModelInputs):
    """The inputs of the decoder of an encoder-decoder model, whose cache has the decoder's own text.

    Position embeddings and relative biases that the decoder looks up by slot are replaced by those for the positions of
    the nodes. `encoded` are encoder outputs, one row per input; None if all rows join later.
    """

    prefix = "decoder_"
    counts_nodes = has_cross = True

    def __init__(self, model: PreTrainedModel, cache: TreeCache, encoded: Encoded | None = None) -> None:
        super().__init__(model, cache)
        self.positions, self.joins_alone = side_positions(model, "decoder"), encoded is None
        self._vectors, self._biases = _position_tables(model)
        if self.takes_positions:  # it looks up embeddings by position itself
            self._vectors, self.counts_nodes = [], False
        self._known = dict[nn.Module, Tensor]()  # vectors by position, of `_vectors`
        # Our attention function follows distances itself.
        self._follows_slots = [] if calls_registered_attention(model) else self._biases
        self._rows = EncodedRows(cache, cast(Any, model).get_decoder())
        self._joining, self._is_returned = encoded, False

    def reading(self, encoded: Encoded | None) -> AbstractContextManager[None]:
        """A block whose passes compute cross-attention keys and values for new rows, or the rows it was made with."""
        encoded, self._joining = self._joining if encoded is None else encoded, None
        if encoded is None:
            return nullcontext()
        self._is_returned = encoded.is_returned
        return self._rows.joining(encoded)

    def retire(self, row: int, last: int) -> None:
        if self._joining is None:
            self._rows.retire(row)
            return
        # before the first pass
        kept = torch.tensor([last if index == row else index for index in range(last)], dtype=torch.int64)
        outputs, mask = rows_of(self._joining.outputs, self._joining.mask, kept)
        self._joining = replace(self._joining, outputs=outputs, mask=mask)

    @contextmanager
    def of_pass(self, tokens: Tensor, positions: Tensor) -> Iterator[dict[str, Any]]:
        encoded, self.cross = self._rows.of_pass()
        # Passes run in inference mode. A returned cache must be usable outside of it.
        is_inner, inputs = not self._is_returned, super().of_pass(tokens, positions)
        with torch.inference_mode(is_inner), torch.no_grad(), self._placed(positions) as modules, inputs as options:
            yield {**options, **encoded}
        if not (modules or self.takes_positions or self._biases):
            raise UnsupportedModelError(f"{type(self.model).__name__} takes no positions for the nodes of a tree")

    @contextmanager
    def _placed(self, positions: Tensor) -> Iterator[list[nn.Module]]:
        """Let this thread's pass use positions int64 `[rows, nodes]` instead of its slots.

        No position is beyond the last slot, so its embedding was looked up in this pass or an earlier one. Yields the
        modules that looked up embeddings.
        """
        thread, width, modules = get_ident(), positions.shape[1], list[nn.Module]()
        slots = self.cache.slots

        def by_position(module: nn.Module, _inputs: Any, vectors: Tensor) -> Tensor:  # `[rows or 1, nodes, size]`
            if get_ident() != thread or vectors.shape[-2] != width:
                return vectors
            modules.append(module)
            new, end = vectors.reshape(-1, width, vectors.shape[-1])[0], slots.kv_length
            biases = self._known.get(module, new[:0])
            if len(biases) < end:  # doubled, so that a step does not copy the whole text
                self._known[module] = biases = torch.cat([biases, new.new_empty(end, new.shape[1])])
            biases[end - width : end] = new
            return biases[positions.to(biases.device)]

        def by_distance(_module: nn.Module, _inputs: Any, biases: Tensor) -> Tensor:  # `[nodes, keys, heads]`
            past = slots.kv_length - width
            if get_ident() != thread or biases.shape[:2] != (width, slots.kv_length):
                return biases
            keys = torch.cat([torch.arange(past, device=biases.device), positions[0].to(biases.device)])
            return biases[keys[past:, None] - past, keys]

        handles = [vector.register_forward_hook(by_position) for vector in self._vectors]
        handles += [slot.register_forward_hook(by_distance) for slot in self._follows_slots]
        try:
            yield modules
        finally:
            for handle in handles:
                handle.remove()


def _position_tables(model: Any) -> list[list[nn.Module]]:
    """The modules in which a decoder that counts slots looks up position embeddings, and relative biases."""
    named = list(model.get_decoder().named_modules())
    kinds = ("embed_positions", "position_embeddings", "wpe"), "relative_attention_bias"
    return [[module for name, module in named if name.endswith(kind)] for kind in kinds]
