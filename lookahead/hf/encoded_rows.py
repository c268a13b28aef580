"""What the rows of a decoder attend to: keys and values of what the encoder has read for each, and their masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from lookahead.drafting.tree import IntArray
from lookahead.hf.cache import CACHE, TreeCache


class Cross(NamedTuple):
    """How a decoder attends to what the encoder has read: by keys and values that are not those of its own text."""

    own: TreeCache
    mask: Tensor | None  # bool `[rows, 1, 1, tokens]`; None for all tokens
    alone: Sequence[tuple[int, Tensor | None]] = ()  # by row, without what pads it: tokens, and their mask as above


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the decoder attends to, and where it keeps its keys and values."""

    outputs: Any  # of the encoder, one row per input
    mask: Tensor | None  # int64 `[rows, tokens]`, the attention mask of the inputs; None for all tokens
    past: EncoderDecoderCache  # empty at first; it ends as `model.generate` would leave it
    is_returned: bool = False  # whether the caller gets the cache, and may use it outside of inference mode
    tokens: Sequence[IntArray] = ()  # inputs without padding, int32; none if the decoder has another vocabulary


class EncodedRows:
    """What was encoded for the rows of a batch that others join and leave, padded to one length.

    Args:
        own: The cache of the decoder's own text.
    """

    def __init__(self, own: TreeCache) -> None:
        self._own = own
        self._masks: list[Tensor] = []  # bool `[tokens]` of every row
        self._buffers: list[Tensor] = []  # keys and values of all layers, `[rows or more, heads, tokens, size]`
        self._is_changed = False
        self._inputs: dict[str, Any] = {}
        self._cross = Cross(own, None)

    @contextmanager
    def joining(self, encoded: Encoded) -> Iterator[None]:
        """Let rows join: the passes of the block are over them alone, and compute their keys and values."""
        outputs, mask, cross = encoded.outputs, encoded.mask, encoded.past.cross_attention_cache
        past = EncoderDecoderCache(self._own, cross)
        past.is_updated = encoded.past.is_updated
        others, self._is_changed = self._inputs, False
        self._inputs = {"encoder_outputs": outputs, "attention_mask": mask, CACHE: past}
        masks = list(outputs[0].new_ones(outputs[0].shape[:2]).bool() if mask is None else mask.bool())
        self._cross = self._cross_over(masks)
        yield
        layers: Any = cross.layers
        states: list[Tensor] = [each for layer in layers for each in (layer.keys, layer.values)]
        if self._masks:
            self._inputs = others
            self._append(states)
        else:
            self._buffers = states
        self._masks += masks

    def _append(self, states: Sequence[Tensor]) -> None:
        """Keep keys and values of further rows."""
        first, (rows, _, tokens, _) = len(self._masks), states[0].shape
        for at, new in enumerate(states):
            buffer = self._buffers[at]
            if first + rows > len(buffer) or tokens > buffer.shape[2]:
                sizes = max(first + rows, 2 * first), buffer.shape[1], max(tokens, buffer.shape[2]), buffer.shape[3]
                self._buffers[at] = buffer.new_zeros(sizes)
                self._buffers[at][:first, :, : buffer.shape[2]] = buffer[:first]
                buffer = self._buffers[at]
            buffer[first : first + rows, :, :tokens] = new
            buffer[first : first + rows, :, tokens:] = 0  # what is no number there would spread, as NaN · 0
        self._is_changed = True

    def retire(self, row: int) -> None:
        """Remove a row; the last one takes its place. Of the last row all stays as it is: it may be the caller's."""
        last = self._masks.pop()
        if row < len(self._masks):
            self._masks[row] = last
            for buffer in self._buffers:
                buffer[row] = buffer[len(self._masks)]
        self._is_changed = bool(self._masks)

    def of_pass(self) -> tuple[dict[str, Any], Cross]:
        """The inputs of a pass over all rows, and how they attend."""
        if self._is_changed:
            mask = pad_sequence(self._masks, batch_first=True)
            (rows, tokens), hidden = mask.shape, self._inputs["encoder_outputs"][0]
            layers = self._inputs[CACHE].cross_attention_cache.layers
            for layer, keys, values in zip(layers, self._buffers[::2], self._buffers[1::2], strict=True):
                layer.keys, layer.values = keys[:rows, :, :tokens], values[:rows, :, :tokens]
            # Their keys and values are known: of the outputs of the encoder a pass reads the shape alone.
            outputs = BaseModelOutput(last_hidden_state=hidden[:1, :1].expand(rows, tokens, -1))
            self._inputs |= {"encoder_outputs": outputs, "attention_mask": mask.long()}
            self._cross, self._is_changed = self._cross_over(self._masks), False
        return self._inputs, self._cross

    def _cross_over(self, masks: Sequence[Tensor]) -> Cross:
        alone = [(len(mask), None if bool(mask.all()) else mask[None, None, None]) for mask in masks]
        mask = pad_sequence(list(masks), batch_first=True)
        return Cross(self._own, None if bool(mask.all()) else mask[:, None, None], alone)


def rows_of(outputs: Any, mask: Tensor | None, rows: Tensor) -> tuple[Any, Tensor | None]:
    """Some rows, int64 `[n]`, of the encoder's outputs and of the mask of its inputs."""
    kind = BaseModelOutput if isinstance(outputs, tuple) else type(outputs)
    return kind(last_hidden_state=outputs[0][rows]), None if mask is None else mask[rows]
