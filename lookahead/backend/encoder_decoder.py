"""The decoder of an encoder-decoder model as a target: the masks, positions and cache of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import get_ident
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from lookahead.backend.cpu.product_bits import Bits
from lookahead.backend.target import Target, input_device, inputs_of, position_limit
from lookahead.backend.tree_pass import TreePass
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.errors import UnsupportedModelError
from lookahead.hf.cache import CACHE
from lookahead.hf.encoded_rows import Encoded, EncodedRows


def empty_cache(model: PreTrainedModel) -> EncoderDecoderCache:
    """A cache as `model.generate` makes one."""
    config: Any = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def side_positions(model: PreTrainedModel, side: Literal["encoder", "decoder"]) -> int | None:
    """Positions one side has a table for; None where they are computed."""
    limit: int | None = getattr(model.config, f"max_{side}_position_embeddings", None)  # LED names both
    return limit if limit is not None else position_limit(model)


class DecoderTarget(Target):
    """A decoder that scores one token tree per row in one pass, behind a cache of trees for its own text.

    Its masks are those of the trees. What it looks up for slots, embeddings of positions or relative biases, is
    replaced by what belongs to the positions of the nodes. Rows that ended leave the passes.

    Args:
        model: The model.
        encoded: What the encoder has read, one row per input; None if all rows `join`.
        rows: Rows of the batch.
        capacity: Slots per row to begin with.
        is_bitwise: As for `Target`; for a single row, or rows that join one at a time.
        packs: Whether linear layers may keep packed copies of their weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        encoded: Encoded | None,
        rows: int = 1,
        *,
        capacity: int = 256,
        is_bitwise: bool = False,
        packs: bool = True,
    ) -> None:
        super().__init__(model, rows=rows, capacity=capacity, is_bitwise=is_bitwise, packs=packs)
        self.positions, self.counts_nodes = side_positions(model, "decoder"), True
        self._takes_positions = "decoder_position_ids" in inputs_of(model)
        self._takes_rows &= self.is_exact  # else all nodes attend to the encoder's output in one call
        self._tables, self._known = _position_tables(model), dict[nn.Module, Tensor]()
        self._prefix = "decoder_"
        self._rows, self._joining, self._keeps = EncodedRows(self.cache), encoded, False
        self.reads_alone = encoded is None

    def join(self, encoded: Encoded) -> None:
        """Let the rows of the next prompts attend to what the encoder has read for them."""
        self._joining = encoded

    def prefill(self, prompts: Sequence[IntArray], first: int = 0) -> Tensor:
        """As for `Target`; of rows that join, the passes compute keys and values of what is encoded."""
        with self._joined():
            return super().prefill(prompts, first)

    def score(self, trees: Sequence[TokenTree], scored: NDArray[np.int64] | None = None) -> Tensor:
        """As for `Target`."""
        with self._joined():
            return super().score(trees, scored)

    def _joined(self) -> AbstractContextManager[None]:
        encoded, self._joining = self._joining, None
        if encoded is None:
            return nullcontext()
        self._keeps = encoded.is_returned
        return self._rows.joining(encoded)

    def retire(self, row: int) -> int:
        """Remove a finished row from the passes; returns the row that took its place."""
        last = super().retire(row)
        if self._joining is None:
            self._rows.retire(row)
        else:  # before the first pass
            kept = [last if each == row else each for each in range(last)]
            outputs, mask = _rows_of(self._joining.outputs, self._joining.mask, torch.tensor(kept, dtype=torch.int64))
            self._joining = replace(self._joining, outputs=outputs, mask=mask)
        return last

    def _forward(self, tree_pass: TreePass, bits: Bits) -> Tensor:
        self._encoded, tree_pass.cross = self._rows.of_pass()
        # `serving` runs in inference mode. A cache that is returned must be usable outside of it.
        with torch.inference_mode(not self._keeps), torch.no_grad(), self._placed(tree_pass.positions) as found:
            logits = super()._forward(tree_pass, bits)
        if not (found or self._takes_positions or self._tables[1]):
            raise UnsupportedModelError(f"{type(self._model).__name__} takes no positions for the nodes of a tree")
        return logits

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

        # An attention function of ours follows the distances by itself.
        slot_biases = self._tables[1] if self._scope is None else []
        handles = [each.register_forward_hook(by_position) for each in self._tables[0]]
        handles += [each.register_forward_hook(by_distance) for each in slot_biases]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


class ChainTarget(Target):
    """A decoder that scores a chain per row in one pass, with masks, positions and a cache of transformers.

    They are those of a batch whose rows have one length, so all rows must accept as many tokens. Rows that ended leave
    the passes, unless the caller gets the cache: then they go on with padding.
    """

    def __init__(self, model: PreTrainedModel, encoded: Encoded, rows: int = 1, *, packs: bool = True) -> None:
        super().__init__(model, rows=rows, capacity=1, shape="chains", packs=packs)
        self.positions = side_positions(model, "decoder")
        self.is_aligned = rows > 1
        self._outputs, self._mask = encoded.outputs, encoded.mask
        self._past, self._keeps = encoded.past, encoded.is_returned
        self._rows = rows  # of the cache
        self._places = list(range(rows))  # of the active rows among them
        self._committed = 0
        self._accepted: int | None = None
        pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
        self._pad = -1 if pad is None else pad

    def prefill(self, prompts: Sequence[IntArray], first: int = 0) -> Tensor:
        """Read what is new of the decoder's prompts, all of one length; logits after the last, `[rows, 1, vocab]`."""
        self._settle()
        logits = self._read(np.stack([prompt[self._committed :] for prompt in prompts]), "torch")
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
        if self._keeps or not self._places or self._places == list(range(self._rows)):
            return
        kept = torch.tensor(self._places, device=self._device)
        self._past.batch_select_indices(kept)
        self._outputs, self._mask = _rows_of(self._outputs, self._mask, kept)
        self._rows, self._places = len(self._places), list(range(len(self._places)))

    def score(self, trees: Sequence[TokenTree], scored: NDArray[np.int64] | None = None) -> Tensor:
        """One pass over a chain per row, or several: behind padding some models count anew (M2M100).

        Chains that were scored in part are those of a draft model; the longest ones gained as many nodes.
        """
        longest, first, self.is_cold = max(map(len, trees)), 0, False
        if scored is None:
            self._settle()
        else:
            first = int(scored.max())
        tokens: IntArray = np.full((self._rows, longest), max(self._pad, 0))
        tokens[self._places] = [np.pad(tree.tokens, (0, longest - len(tree)), "edge") for tree in trees]
        tokens = tokens[:, first:]
        ends = np.flatnonzero((tokens[self._places, :-1] == self._pad).any(0)) + 1
        parts = [self._read(part, self._bits) for part in np.split(tokens, ends, 1)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return logits if self._places == list(range(self._rows)) else logits[self._places]

    def _read(self, tokens: IntArray, bits: Bits) -> Tensor:
        """One pass over tokens `[rows, tokens]` behind those in the cache; logits `[rows, tokens, vocab]`."""
        # `serving` runs in inference mode. A cache that is returned must be usable outside of it.
        with torch.inference_mode(not self._keeps), torch.no_grad(), self._linears.running(bits):
            output = self._model(
                decoder_input_ids=torch.from_numpy(np.ascontiguousarray(tokens, np.int64)).to(self._device),
                encoder_outputs=self._outputs,
                attention_mask=self._mask,
                use_cache=True,
                **{CACHE: self._past},
            )
        self.is_cold |= self._linears.has_packed
        logits: Tensor = output.logits
        return logits


def _rows_of(outputs: Any, mask: Tensor | None, rows: Tensor) -> tuple[Any, Tensor | None]:
    """Some rows of the encoder's outputs and of the mask of its inputs."""
    kind = BaseModelOutput if isinstance(outputs, tuple) else type(outputs)
    return kind(last_hidden_state=outputs[0][rows]), None if mask is None else mask[rows]


def _position_tables(model: Any) -> list[list[nn.Module]]:
    """The modules in which a decoder that counts slots looks up a vector for each, and a bias for each pair."""
    named = list(model.get_decoder().named_modules())
    kinds = ("embed_positions", "position_embeddings"), "relative_attention_bias"
    return [[module for name, module in named if name.endswith(kind)] for kind in kinds]


def encode(model: PreTrainedModel, inputs: Sequence[IntArray]) -> Encoded:
    """Let the encoder of a model read inputs, int32 `[tokens]` each."""
    seq2seq: Any = model
    ids, mask = np.zeros((2, len(inputs), max(map(len, inputs))), np.int64)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    read, seen = (torch.from_numpy(each).to(input_device(model)) for each in (ids, mask))
    with torch.inference_mode():
        outputs = seq2seq.get_encoder()(input_ids=read, attention_mask=seen, return_dict=True)
    return Encoded(outputs, seen, empty_cache(model))
