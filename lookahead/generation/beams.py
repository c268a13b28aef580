"""Exact beam search: transformers' own loop, over one token tree per prompt.

`model.generate` keeps a copy of the prompt's keys and values for every beam and rearranges all of them at every step.
Here the beams of a prompt are nodes of one tree behind one copy of the prompt, and a pass scores the tips of all beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numba import njit
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateBeamOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from lookahead.config import LookaheadConfig
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.errors import UnsupportedModelError
from lookahead.generation.hf_outputs import adopt
from lookahead.generation.request import prompt_lengths
from lookahead.generation.validation import validate_call, validate_lengths, validate_positions
from lookahead.models.cache import TreeCache
from lookahead.models.encoder_decoder import empty_cache
from lookahead.models.linears import LinearScope, rows_alike
from lookahead.models.support import is_bitwise, prefills_at_once, support_of, vocabulary_size
from lookahead.models.target import PREFILL_CHUNK, Target, input_device

BEAM_MODES = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
_DEAD_NODES = 64  # nodes that a tree gains before those that no beam comes from are dropped


def beam_search(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateBeamOutput:
    """Search with beams inside `model.generate`, for its sequences and scores; see `lookahead.decode`.

    Args:
        model: The model `generate` was called on.
        input_ids: int64 `[batch * num_beams, tokens]`, left-padded; each prompt as often as it has beams.
        logits_processor: Prepared by `generate`.
        stopping_criteria: Prepared by `generate`.
        generation_config: Resolved by `generate`.
        lookahead_config: `exactness`, `pack` and `proposers` are heeded.
        **model_kwargs: What `generate` would pass to the model.

    Returns:
        What transformers' beam search returns. The cache of a causal model is not among it.

    Raises:
        UnsupportedModelError: The model or an input cannot be served; the message names it.
    """
    validate_call(model, generation_config, model_kwargs, modes=BEAM_MODES)
    past = model_kwargs.get("past_key_values")
    if getattr(past, "_is_user_defined", False):
        raise UnsupportedModelError("past_key_values of your own are not served with beams")
    lm: Any = type(model)
    arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
    config = lookahead_config if lookahead_config is not None else LookaheadConfig()
    beams = generation_config.num_beams
    if model.config.is_encoder_decoder:
        linears = LinearScope(model, packs=config.pack == "auto")
        with linears.serving(), linears.running(is_exact=False):
            if isinstance(past, EncoderDecoderCache) and isinstance(past.cross_attention_cache, DynamicCache):
                model_kwargs["past_key_values"] = _shared_input(model, past, input_ids, beams, model_kwargs)
            return cast(Tensor | GenerateBeamOutput, lm._beam_search(model, *arguments, **model_kwargs))
    mask = model_kwargs.get("attention_mask")
    prompts = input_ids[::beams]
    lengths = prompt_lengths(prompts, None if mask is None else mask[::beams], vocabulary_size(model))
    validate_lengths(model, lengths)
    positions = model_kwargs.get("position_ids")
    if positions is not None and len(positions) == len(input_ids):
        positions = positions[::beams]
    validate_positions(positions, lengths, input_ids.shape[1])
    support = support_of(model, shortest=int(lengths.min()), max_length=generation_config.max_length)
    if support.shape != "trees" or (getattr(model, "_tp_size", None) or 1) > 1:
        reason = support.reason or "it is spread over several processes"
        raise UnsupportedModelError(f"{type(model).__name__} cannot be decoded with beams in one tree: {reason}")
    # In a batch transformers attends to padding under a mask, which changes bits.
    is_alone = len(prompts) == 1 and lengths[0] == input_ids.shape[1]
    is_exact = is_alone and config.exactness == "auto" and is_bitwise(model) and rows_alike(model) >= beams
    target = Target(
        model,
        rows=len(prompts),
        capacity=input_ids.shape[1] + min(generation_config.max_length - input_ids.shape[1], 256) + _DEAD_NODES,
        device=input_device(model),
        prefill_chunk=int(lengths.max()) if prefills_at_once(model) else PREFILL_CHUNK,
        is_bitwise=is_exact,
        packs=config.pack == "auto",
    )
    texts = [ids[len(ids) - length :] for ids, length in zip(prompts.cpu().numpy(), lengths.tolist(), strict=True)]
    search = _Search(model, target, texts, beams, model_kwargs if is_exact else None)
    with target.serving(), torch.inference_mode(False), torch.no_grad():
        output = lm._beam_search(search, *arguments, past_key_values=search, use_cache=True)
    if not isinstance(output, Tensor):
        output.past_key_values = None
    return cast(Tensor | GenerateBeamOutput, output)


def _shared_input(
    model: PreTrainedModel, past: EncoderDecoderCache, input_ids: Tensor, beams: int, model_kwargs: dict[str, Any]
) -> EncoderDecoderCache:
    """A cache whose keys and values of an input are shared by its beams.

    In float32 they are computed once for each input. In half precision their bits depend on the rows of the pass.
    """
    cross = past.cross_attention_cache
    if model.dtype == torch.float32:
        seq2seq: Any = model
        outputs, mask, own = model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask"), empty_cache(model)
        seq2seq(
            encoder_outputs=type(outputs)(last_hidden_state=outputs.last_hidden_state[::beams]),
            attention_mask=None if mask is None else mask[::beams],
            decoder_input_ids=input_ids[::beams, :1],
            past_key_values=own,
            use_cache=True,
        )
        cross = own.cross_attention_cache
        for layer in cast(Any, cross.layers):
            if len(input_ids) > beams:
                layer.batch_repeat_interleave(beams)
            else:  # one copy for all
                layer.keys, layer.values = (each.expand(beams, -1, -1, -1) for each in (layer.keys, layer.values))
    return _SharedInput(past.self_attention_cache, cross)


class _SharedInput(EncoderDecoderCache):
    """A cache for beams: those of one input attend to one input, so its keys and values need not be rearranged."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rearrange the keys and values of what was generated."""
        self.self_attention_cache.reorder_cache(beam_idx)


class _BeamTree:
    """The beams of one prompt as a token tree.

    Args:
        root: The last token of the prompt.
        beams: Number of beams.
        logits: `[vocab]`, after the prompt.

    Attributes:
        scored: First nodes that passes have scored.
        tips: The newest node of each beam.
    """

    def __init__(self, root: int, beams: int, logits: Tensor) -> None:
        self._tokens, self._parents = [root], [0]
        self._children: dict[tuple[int, int], int] = {}
        self._logits = {0: logits}
        self.scored = 1
        self.tips = [0] * beams
        self._most = _DEAD_NODES

    def __len__(self) -> int:
        return len(self._tokens)

    def advance(self, beams: Sequence[int], tokens: Sequence[int]) -> None:
        """Continue some of the beams by one token each; they are the new beams."""
        tips = [self.tips[beam] for beam in beams]
        self.tips = [self._child(tip, token) for tip, token in zip(tips, tokens, strict=True)]

    def _child(self, parent: int, token: int) -> int:
        """The node of a token behind a node."""
        node = self._children.setdefault((parent, token), len(self))
        if node == len(self):
            self._tokens.append(token)
            self._parents.append(parent)
        return node

    @property
    def is_overgrown(self) -> bool:
        """Whether so many nodes were added that dropping dead ones pays."""
        return len(self) > self._most

    def tree(self) -> TokenTree:
        """All nodes."""
        return TokenTree.from_parents(self._tokens, self._parents)

    def learn(self, logits: Tensor) -> None:
        """Take the logits `[n, vocab]` after the nodes that were not scored yet."""
        self._logits = {tip: self._logits[tip] for tip in self.tips if tip in self._logits}
        self._logits.update(zip(range(self.scored, len(self)), logits, strict=False))
        self.scored = len(self)

    def after_tips(self) -> list[Tensor]:
        """Logits `[vocab]` after the newest token of each beam."""
        return [self._logits[tip] for tip in self.tips]

    def drop_dead(self) -> tuple[IntArray, int]:
        """Forget the nodes that no beam comes from; what all beams share is left to the cache.

        Returns:
            int32, the nodes to keep in the cache, and how many of them, the last ones, are still nodes.
        """
        kept, shared = _survivors(np.array(self._parents), np.array(self.tips))
        places = {node: place for place, node in enumerate(kept[shared:].tolist())}
        self._tokens = [self._tokens[node] for node in places]
        self._parents = [places.get(self._parents[node], 0) for node in places]
        children = zip(self._parents[1:], self._tokens[1:], range(1, len(self)), strict=True)
        self._children = {(parent, token): node for parent, token, node in children}
        self._logits = {places[node]: logits for node, logits in self._logits.items() if node in places}
        self.tips = [places[tip] for tip in self.tips]
        self.scored = len(self)
        self._most = len(self) + _DEAD_NODES
        return kept, len(self)


@njit(cache=True)
def _survivors(parents, tips):
    """The nodes that tips come from, ascending, and how many of the first ones are shared by all and not the last."""
    below = np.zeros(len(parents), np.int64)
    for tip in tips:
        below[tip] += 1
    for node in range(len(parents) - 1, 0, -1):
        below[parents[node]] += below[node]
    return np.flatnonzero(below).astype(np.int32), np.sum(below == len(tips)) - 1


class _Search:
    """What transformers' beam search takes for the model and for its cache.

    Args:
        model: The model.
        target: The model behind its cache of trees, one row per prompt; in service while the search runs.
        prompts: The tokens of each prompt.
        beams: Beams of a prompt.
        exact_inputs: Inputs of the model for a pass over the prompt as `model.generate` makes it, once for each beam:
            in half precision its bits depend on that. None to read each prompt once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: Target,
        prompts: Sequence[IntArray],
        beams: int,
        exact_inputs: dict[str, Any] | None,
    ) -> None:
        self._model, self._target, self._prompts, self._beams = model, target, prompts, beams
        self._exact_inputs = exact_inputs
        self._trees: list[_BeamTree] = []
        self._chosen: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name == "_reorder_cache":  # a model's own way to rearrange a cache
            raise AttributeError(name)
        return getattr(self._model, name)

    def _prefill(self, input_ids: Tensor, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        """Read the prompts."""
        if self._exact_inputs is None:
            with torch.inference_mode():
                logits = self._target.prefill(self._prompts)[:, 0]
        else:
            lm: Any = self._model
            past = DynamicCache(config=lm.config.get_text_config(decoder=True))
            inputs = {**self._exact_inputs, "past_key_values": past}
            logits = lm._prefill(input_ids, generation_config, inputs).logits[:1, -1]
            with torch.inference_mode():
                adopt(past, self._target.cache, np.zeros(1, np.int64))
            self._target.cache.slots.lengths[0] -= 1  # the last token is the root of the tree
        roots = [int(prompt[-1]) for prompt in self._prompts]
        self._trees = [_BeamTree(root, self._beams, each) for root, each in zip(roots, logits, strict=True)]
        return self._output()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """The newest token of every beam."""
        return {"tokens": input_ids[:, -1].tolist()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the beams, int64 `[batch * num_beams]`, that the next tokens continue."""
        self._chosen = (beam_idx % self._beams).tolist()

    def __call__(self, tokens: list[int], return_dict: bool = True) -> Any:
        """Score the tips of all beams in one pass."""
        cache: TreeCache = self._target.cache
        with torch.inference_mode():
            for row, tree in enumerate(self._trees):
                if tree.is_overgrown:
                    cache.commit(row, *tree.drop_dead())
                own = slice(row * self._beams, (row + 1) * self._beams)
                tree.advance(self._chosen[own], tokens[own])
            scored = np.array([tree.scored for tree in self._trees])
            logits = self._target.extend([tree.tree() for tree in self._trees], scored)
        for tree, each in zip(self._trees, logits, strict=True):
            tree.learn(each)
        return self._output()

    def _output(self) -> Any:
        """Logits after the tips, `[batch * num_beams, 1, vocab]`, as transformers' models return them."""
        return CausalLMOutputWithPast(
            logits=cast(
                torch.FloatTensor, torch.stack([each for tree in self._trees for each in tree.after_tips()])[:, None]
            )
        )

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """Leave the inputs as they are."""
        return model_kwargs
