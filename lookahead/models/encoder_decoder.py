"""The decoder of an encoder-decoder model as a target: the masks, positions and cache of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.errors import UnsupportedModelError
from lookahead.models.cache import CACHE
from lookahead.models.product_bits import Bits
from lookahead.models.target import Target, input_device, position_limit
from lookahead.models.tree_pass import AttentionSpan, TreePass


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the decoder attends to, and where it keeps its keys and values."""

    outputs: Any  # of the encoder, one row per input
    mask: Tensor | None  # int64 `[rows, tokens]`, the attention mask of the inputs; None for all tokens
    past: EncoderDecoderCache  # empty at first; it ends as `model.generate` would leave it
    is_returned: bool = False  # whether the caller gets the cache, and may use it outside of inference mode
    tokens: Sequence[IntArray] = ()  # inputs without padding, int32; none if the decoder has another vocabulary


def empty_cache(model: PreTrainedModel) -> EncoderDecoderCache:
    """A cache as `model.generate` makes one."""
    config: Any = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def side_positions(model: PreTrainedModel, side: Literal["encoder", "decoder"]) -> int | None:
    """Positions one side has a table for; None where they are computed."""
    limit: int | None = getattr(model.config, f"max_{side}_position_embeddings", None)  # LED names both
    return limit if limit is not None else position_limit(model)


class DecoderTarget(Target):
    """A decoder that scores a tree of one row, or a chain of each of several, in one pass.

    The model's own attention, masks and positions are used, so relative and learned ones are those of
    `model.generate`. They are those of a batch whose rows have one length, so all rows must accept as many tokens.
    Rows that ended leave the passes, unless the caller gets the cache: then they go on with padding.

    A tree that branches brings its mask, and the positions that the model counts in slots are those of its depths.
    """

    def __init__(self, model: PreTrainedModel, encoded: Encoded, rows: int = 1, *, packs: bool = True) -> None:
        super().__init__(model, rows=rows, capacity=1, shape="chains", packs=packs)
        self.positions = side_positions(model, "decoder")
        self.is_aligned, self.counts_nodes = rows > 1, True
        self._tables = _position_tables(model)
        self._takes_depths = "decoder_position_ids" in inspect.signature(type(model).forward).parameters
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
        if len(path) and path[-1] >= len(path):  # other nodes stand between those of the path
            nodes, kept = torch.from_numpy(self._committed + path), slice(self._committed, self._committed + len(path))
            layers: Any = self._past.self_attention_cache.layers
            for states in (each for layer in layers for each in (layer.keys, layer.values)):
                states[:, :, kept] = states.index_select(2, nodes.to(states.device))
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
        kind = BaseModelOutput if isinstance(self._outputs, tuple) else type(self._outputs)
        self._outputs = kind(last_hidden_state=self._outputs[0][kept])
        self._mask = None if self._mask is None else self._mask[kept]
        self._rows, self._places = len(self._places), list(range(len(self._places)))

    def score(self, trees: Sequence[TokenTree], scored: NDArray[np.int64] | None = None) -> Tensor:
        """One pass over a tree or a chain per row, or several: behind padding some models count anew (M2M100).

        Chains that were scored in part are those of a draft model; the longest ones gained as many nodes.
        """
        longest, first, self.is_cold = max(map(len, trees)), 0, False
        if scored is None:
            self._settle()
        else:
            first = int(scored.max())
        if len(trees) == 1 and int(trees[0].depths.max()) < longest - 1:
            return self._read_tree(trees[0])
        tokens: IntArray = np.full((self._rows, longest), max(self._pad, 0))
        tokens[self._places] = [np.pad(tree.tokens, (0, longest - len(tree)), "edge") for tree in trees]
        tokens = tokens[:, first:]
        ends = np.flatnonzero((tokens[self._places, :-1] == self._pad).any(0)) + 1
        parts = [self._read(part, self._bits) for part in np.split(tokens, ends, 1)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return logits if self._places == list(range(self._rows)) else logits[self._places]

    def _read_tree(self, tree: TokenTree) -> Tensor:
        """One pass over the nodes of the only row; logits `[1, nodes, vocab]`."""
        slots = self.cache.slots
        slots.lengths[0] = self._committed
        slots.begin(len(tree))
        nodes = TreePass(slots, self._device, [tree])
        options = {"decoder_attention_mask": nodes.mask(1, AttentionSpan(), self._model.dtype, self._device)}
        if self._takes_depths:
            options["decoder_position_ids"] = nodes.positions
        with _placed(self._tables, nodes.positions[0], self._committed) as found:
            logits = self._read(tree.tokens[None], self._bits, **options)
        if not found and not self._takes_depths:
            raise UnsupportedModelError(f"{type(self._model).__name__} takes no positions for the nodes of a tree")
        return logits

    def _read(self, tokens: IntArray, bits: Bits, **options: Tensor) -> Tensor:
        """One pass over tokens `[rows, tokens]` behind those in the cache; logits `[rows, tokens, vocab]`."""
        # `serving` runs in inference mode. A cache that is returned must be usable outside of it.
        with torch.inference_mode(not self._keeps), torch.no_grad(), self._linears.running(bits):
            output = self._model(
                decoder_input_ids=torch.from_numpy(np.ascontiguousarray(tokens, np.int64)).to(self._device),
                encoder_outputs=self._outputs,
                attention_mask=self._mask,
                use_cache=True,
                **{CACHE: self._past, **options},
            )
        self.is_cold |= self._linears.has_packed
        logits: Tensor = output.logits
        return logits


@contextmanager
def _placed(tables: Sequence[list[nn.Module]], positions: Tensor, past: int) -> Iterator[list[Tensor]]:
    """Let a pass of this thread over a tree, behind `past` tokens, have positions int64 `[nodes]` in place of slots.

    No node is deeper than its place in the tree, so what belongs to its position was looked up for another node. Yields
    a list of all that was looked up.
    """
    thread, depths, found = get_ident(), positions - past, list[Tensor]()
    keys = torch.cat([torch.arange(past, device=positions.device), positions])

    def by_position(_module: nn.Module, _inputs: Any, vectors: Tensor) -> Tensor:  # `[rows or 1, nodes, size]`
        if get_ident() != thread or vectors.shape[-2] != len(depths):
            return vectors
        found.append(vectors.index_select(-2, depths.to(vectors.device)))
        return found[-1]

    def by_distance(_module: nn.Module, _inputs: Any, biases: Tensor) -> Tensor:  # `[nodes, keys, heads]`
        if get_ident() != thread or biases.shape[:2] != (len(depths), len(keys)):
            return biases
        found.append(biases[depths.to(biases.device)[:, None], keys.to(biases.device)])
        return found[-1]

    hooks = zip((by_position, by_distance), tables, strict=True)
    handles = [table.register_forward_hook(hook) for hook, each in hooks for table in each]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


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
