"""Cross-attention of decoder rows: keys and values of each row's encoder outputs, and their masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from lookahead.drafting.tree import IntArray
from lookahead.errors import UnsupportedModelError
from lookahead.model.attention import real_config
from lookahead.model.cache import TreeCache
from lookahead.model.facts import CACHE, is_sdpa, own_attention


class Cross:
    """Cross-attention of a decoder, whose own text is in `own`: keys and values of encoder outputs.

    `mask` is bool `[rows, 1, 1, tokens]`, None for all tokens; `alone` has by row the tokens without padding and their
    mask.
    """

    def __init__(self, own: TreeCache, masks: Sequence[Tensor] = ()) -> None:
        self.own = own
        self.see(masks)

    def see(self, masks: Sequence[Tensor]) -> None:
        """Set the masks of all rows, bool `[tokens]` each."""
        self.mask: Tensor | None = None
        if not all(bool(mask.all()) for mask in masks) or len({len(mask) for mask in masks}) > 1:
            self.mask = pad_sequence(list(masks), batch_first=True)[:, None, None]
        self.alone = [(len(mask), None if bool(mask.all()) else mask[None, None, None]) for mask in masks]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, tree_pass: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attention of nodes to the encoder's output, by the model's own function; `[rows, width, heads, dim]`.

        Args:
            module: The attention layer.
            query: `[rows, heads, width, dim]`.
            key: `[rows, heads, tokens, dim]`, as `value`.
            value: The values.
            tree_pass: The `TreePass`.
            options: Other arguments of the layer.
        """
        own = own_attention(module, real_config(cast(Any, module.config)))
        options = {name: option for name, option in options.items() if option is not None}

        def attend(nodes: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
            mask = None if mask is None else mask.to(query.device)
            if mask is not None and not is_sdpa(own):
                mask = query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
            return own(module, nodes, keys, values, mask, **options)[0]

        if not tree_pass.attends_per_node:
            return attend(query, key, value, self.mask, **options)
        rows, heads, width, _ = query.shape
        out, bias = query.new_zeros(rows, width, heads, value.shape[3]), options.get("position_bias")
        per_node = tree_pass.per_node
        for row, (tokens, mask) in enumerate(self.alone):
            one = slice(row, row + 1)
            nodes = slice(len(per_node.trees[row]) - per_node.scored[row])  # padding attends to nothing
            keys, values = key[one, :, :tokens], value[one, :, :tokens]
            if bias is not None:
                options["position_bias"] = bias[one if len(bias) > 1 else slice(1), :, -1:, :tokens]
            alone = [attend(node, keys, values, mask, **options) for node in query[one, :, nodes].split(1, 2)]
            out[one, nodes] = torch.cat(alone, 1)
        return out


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoder outputs for the decoder to attend to, and its cache."""

    outputs: Any  # of the encoder, one row per input
    mask: Tensor | None  # int64 `[rows, tokens]`, attention mask of the inputs; None for all; audio has longer masks
    past: EncoderDecoderCache  # empty at first; ends as `model.generate` would leave it
    is_returned: bool = False  # the caller gets the cache, and may use it outside of inference mode
    tokens: Sequence[IntArray] = ()  # inputs without padding, int32; empty if the decoder has another vocabulary
    heard: Tensor | None = None  # audio or images that the encoder has read, `[rows, ...]`

    def masks(self) -> list[Tensor]:
        """The decoder's masks over each row's outputs, bool `[tokens]`; all True if `mask` has another length."""
        shape = self.outputs[0].shape[:2]
        if self.mask is not None and self.mask.shape == shape:
            return list(self.mask.bool())
        return list(self.outputs[0].new_ones(shape, dtype=torch.bool))


class EncodedRows:
    """Encoder outputs for the rows of a batch that rows join and leave, padded to one length."""

    def __init__(self, own: TreeCache, decoder: nn.Module) -> None:
        self._own, self._decoder = own, decoder
        self._masks: list[Tensor] = []  # bool `[tokens]` per row
        self._buffers: list[Tensor] = []  # keys and values of all layers, `[rows or more, heads, tokens, size]`
        self._is_changed = self._is_lent = False  # lent: the buffers also belong to the caller
        self._inputs: dict[str, Any] = {}
        self._cross = Cross(own)

    @contextmanager
    def joining(self, encoded: Encoded) -> Iterator[None]:
        """Let rows join. Passes in the block are over the new rows only, and compute their keys and values."""
        outputs, mask, cross = encoded.outputs, encoded.mask, encoded.past.cross_attention_cache
        past = EncoderDecoderCache(self._own, cross)
        past.is_updated = encoded.past.is_updated
        others, self._is_changed = self._inputs, False
        self._inputs = {"encoder_outputs": outputs, "attention_mask": mask, CACHE: past}
        with self._seeing(encoded) as masks:
            yield
        if encoded.is_returned:  # finished rows leave the passes, but not the caller's cache
            cross, self._is_lent = copy(cross), True
            cross.layers = [copy(layer) for layer in cross.layers]
            self._inputs[CACHE] = past = EncoderDecoderCache(self._own, cross)
            past.is_updated = encoded.past.is_updated
        states: list[Tensor] = [states for layer in held_layers(cross) for states in (layer.keys, layer.values)]
        if self._masks:
            self._inputs = others
            self._append(states)
        else:
            self._buffers = states
        self._masks += masks

    @contextmanager
    def _seeing(self, encoded: Encoded) -> Iterator[list[Tensor]]:
        """Record the masks that the model passes to its decoder in a block; yields them, bool `[tokens]` per row.

        For audio an encoder gives fewer outputs than its mask has entries, and the model makes another mask for them.
        """
        thread, masks, is_shown = get_ident(), encoded.masks(), False
        self._cross = Cross(self._own, masks)

        def see(_decoder: nn.Module, _inputs: Any, options: dict[str, Any]) -> None:
            nonlocal is_shown
            states, mask = options.get("encoder_hidden_states"), options.get("encoder_attention_mask")
            if get_ident() != thread or states is None:
                return
            if mask is not None and mask.shape != states.shape[:2]:
                raise UnsupportedModelError(f"its decoder gets a mask of {[*mask.shape]} for {[*states.shape]} states")
            is_shown = True
            masks[:] = list(states.new_ones(states.shape[:2], dtype=torch.bool) if mask is None else mask.bool())
            self._cross.see(masks)

        handle = self._decoder.register_forward_pre_hook(see, with_kwargs=True)
        try:
            yield masks
        finally:
            handle.remove()
        if not is_shown and encoded.mask is not None and encoded.mask.shape != encoded.outputs[0].shape[:2]:
            raise UnsupportedModelError("it is unknown which encoder outputs its decoder sees")

    def _append(self, states: Sequence[Tensor]) -> None:
        """Keep the keys and values of further rows."""
        first, (rows, _, tokens, _) = len(self._masks), states[0].shape
        for at, new in enumerate(states):
            buffer = self._buffers[at]
            if first + rows > len(buffer) or tokens > buffer.shape[2]:
                sizes = max(first + rows, 2 * first), buffer.shape[1], max(tokens, buffer.shape[2]), buffer.shape[3]
                self._buffers[at] = buffer.new_zeros(sizes)
                self._buffers[at][:first, :, : buffer.shape[2]] = buffer[:first]
                buffer = self._buffers[at]
            buffer[first : first + rows, :, :tokens] = new
            buffer[first : first + rows, :, tokens:] = 0  # NaN there would spread, as NaN · 0
        self._is_changed = True

    def retire(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last = self._masks.pop()
        if self._is_lent and row < len(self._masks):
            self._buffers, self._is_lent = [buffer.clone() for buffer in self._buffers], False
        if row < len(self._masks):
            self._masks[row] = last
            for buffer in self._buffers:
                buffer[row] = buffer[len(self._masks)]
        self._is_changed = bool(self._masks)

    def of_pass(self) -> tuple[dict[str, Any], Cross]:
        """The inputs of a pass over all rows, and their cross-attention."""
        if self._is_changed:
            mask = pad_sequence(self._masks, batch_first=True)
            (rows, tokens), former = mask.shape, self._inputs["attention_mask"]
            layers = held_layers(self._inputs[CACHE].cross_attention_cache)
            for layer, keys, values in zip(layers, self._buffers[::2], self._buffers[1::2], strict=True):
                layer.keys, layer.values = keys[:rows, :, :tokens], values[:rows, :, :tokens]
            # Keys and values are cached, so a pass reads only the shape of the encoder's outputs.
            outputs, width = self._inputs["encoder_outputs"], self._inputs["encoder_outputs"][0].shape[1]
            lengths = {width: tokens}
            with torch.inference_mode(False):  # some models modify them in place
                outputs = with_tensors(
                    outputs,
                    lambda tensor: tensor.new_zeros(
                        rows, *(lengths.get(n, n) for n in tensor.shape[1:2]), *tensor.shape[2:]
                    ),
                )
            # A mask of audio length is left out: the model would derive another mask from it.
            former = mask.long() if former is None or former.shape[1] == width else None
            self._inputs |= {"encoder_outputs": outputs, "attention_mask": former}
            self._cross, self._is_changed = Cross(self._own, self._masks), False
        return self._inputs, self._cross


def held_layers(cache: Any) -> list[Any]:
    """The initialized layers of a transformers cache; some configurations count the encoder's layers."""
    return [layer for layer in cache.layers if layer.is_initialized]


def with_tensors(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """An encoder's outputs with changed tensors: last states, their mean or their mask. Other fields are dropped."""
    outputs = outputs if isinstance(outputs, ModelOutput) else BaseModelOutput(outputs[0])
    return type(outputs)(**{name: change(tensor) for name, tensor in outputs.items() if isinstance(tensor, Tensor)})


def rows_of(outputs: Any, mask: Tensor | None, rows: Tensor) -> tuple[Any, Tensor | None]:
    """Some rows, int64 `[n]`, of the encoder's outputs and of the mask of its inputs."""
    return with_tensors(outputs, lambda tensor: tensor[rows]), None if mask is None else mask[rows]
