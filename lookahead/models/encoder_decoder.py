"""The decoder of an encoder-decoder model as a target: chains only, rows of one length, the cache of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from lookahead.drafting.sizes import MAX_NODES_LIMIT
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.models import support
from lookahead.models.cache import CACHE
from lookahead.models.model_state import state_of
from lookahead.models.support import ProbeError, Support, agree, probe_passes, unsupported_reason, vocabulary_size
from lookahead.models.target import Target, input_device, position_limit

_CHAINS = Support("chains", "the decoder of an encoder-decoder model verifies chains")
_CHAIN = (0, 0, 1, 2, 3)


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
    """A decoder that scores a chain per row in one causal pass; the cache is cropped to the accepted tokens.

    The model's own attention, masks and positions are used, so relative and learned ones are those of
    `model.generate`. They are those of a batch whose rows have one length, so all rows must accept as many tokens.
    Rows that ended leave the passes, unless the caller gets the cache: then they go on with padding.
    """

    def __init__(self, model: PreTrainedModel, encoded: Encoded, rows: int = 1) -> None:
        super().__init__(model, rows=rows, capacity=1, device=input_device(model), shape="chains")
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
        logits = self._read(np.stack([prompt[self._committed :] for prompt in prompts]))
        self._committed = len(prompts[0]) - 1
        return logits[:, -1:]

    def commit(self, row: int, path: IntArray) -> None:
        """Keep the keys and values of an accepted path, which begins the chain, as long as those of other rows."""
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
        """One pass over a chain per row, or several: behind padding some models count positions anew (M2M100).

        Chains that were scored in part are those of a draft model; the longest ones gained as many nodes.
        """
        longest, first = max(map(len, trees)), 0
        if scored is None:
            self._settle()
        else:
            first = int(scored.max())
        tokens: IntArray = np.full((self._rows, longest), max(self._pad, 0))
        tokens[self._places] = [np.pad(tree.tokens, (0, longest - len(tree)), "edge") for tree in trees]
        tokens = tokens[:, first:]
        ends = np.flatnonzero((tokens[self._places, :-1] == self._pad).any(0)) + 1
        parts = [self._read(part) for part in np.split(tokens, ends, 1)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return logits if self._places == list(range(self._rows)) else logits[self._places]

    def _read(self, tokens: IntArray) -> Tensor:
        """One pass over tokens `[rows, tokens]` behind those in the cache; logits `[rows, tokens, vocab]`."""
        # `serving` runs in inference mode. A cache that is returned must be usable outside of it.
        with torch.inference_mode(not self._keeps), torch.no_grad():
            output = self._model(
                decoder_input_ids=torch.from_numpy(np.ascontiguousarray(tokens, np.int64)).to(self._device),
                encoder_outputs=self._outputs,
                attention_mask=self._mask,
                use_cache=True,
                **{CACHE: self._past},
            )
        logits: Tensor = output.logits
        return logits


def decoder_support(model: PreTrainedModel, *, max_length: int) -> Support:
    """Whether chains of up to `max_length` tokens can be drafted for a decoder. The first call probes it."""
    config: Any = model.config.get_text_config(decoder=True)
    others = set(getattr(config, "layer_types", None) or ()) - support.ATTENTION_LAYERS
    if getattr(model, "_is_stateful", False) or others:
        return Support("none", "the state of its decoder is sequential, so a rejected draft could not be undone")
    window = getattr(config, "sliding_window", None)
    if window is not None and max_length + MAX_NODES_LIMIT >= window:
        return Support("none", f"the cache of its decoder drops tokens beyond {window}")
    if getattr(config, "expert_capacity", None) is not None:
        return Support("none", "its experts take so many tokens of a pass and no more")
    if any(rope.get("rope_type") in ("dynamic", "longrope") for rope in support.rope_parameters_of(config)):
        return Support("none", "the position embeddings of its decoder change with its length")
    reason = unsupported_reason(model)
    if reason:
        return Support("none", reason)
    try:
        return state_of(model).probed("decoder support", model, partial(_probe_decoder, model))
    except ProbeError as error:
        return Support("none", str(error))


def _probe_decoder(model: PreTrainedModel) -> Support:
    seq2seq: Any = model
    device = input_device(model)
    reason = probe_passes(
        partial(_chains_score_like_the_model, model),
        lambda ids: seq2seq(input_ids=ids.to(device), decoder_input_ids=ids.to(device)),
        vocabulary=min(vocabulary_size(model, side) for side in (seq2seq.get_encoder(), seq2seq.get_decoder())),
        mismatch="its decoder does not read several tokens as it reads one after the other",
        failure="its decoder does not continue from a truncated cache",
    )
    return Support("none", reason) if reason else _CHAINS


@torch.inference_mode()
def _chains_score_like_the_model(model: PreTrainedModel, tokens: Sequence[int]) -> bool:
    """Whether two drafted passes, with a commit between them, give the logits of the model's own passes."""
    seq2seq: Any = model
    read = torch.tensor([tokens], device=input_device(model))
    outputs = seq2seq.get_encoder()(input_ids=read, return_dict=True)
    chain, path = [tokens[2], *tokens[2:]], np.array([0, 1], np.int32)
    target = DecoderTarget(model, Encoded(outputs, None, empty_cache(model)))
    with target.serving():
        target.prefill([np.array(tokens[:2], np.int32)])
        target.commit(0, path[:1])
        first = target.score([TokenTree.from_parents(chain, _CHAIN)])[0]
        target.commit(0, path)
        second = target.score([TokenTree.root(tokens[0])])[0]
    before = list(tokens[:2])
    checks: list[tuple[list[int], Tensor]] = [
        (before + chain, first[-1]),
        (before + chain[:-1], first[-2]),
        ([*before, *chain[:2], tokens[0]], second[0]),
    ]
    return all(
        agree(model, logits, seq2seq(input_ids=read, decoder_input_ids=torch.tensor([ids]).to(read)).logits[0, -1])
        for ids, logits in checks
    )


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
