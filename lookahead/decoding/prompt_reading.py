"""Prompts with further inputs, such as images or audio: the model reads them itself, and drafts follow.

`model.generate` gives these inputs only to the first pass; all later passes take tokens, a cache and positions. So the
model runs the first pass, and nothing about later passes is assumed for an architecture: the model prepares the inputs
of the next two tokens. Any other input among them must change nothing, positions must grow by one per token, and the
first call for a model compares passes of a backend with the model's own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from lookahead.backend.choice import backend_for
from lookahead.backend.probes import agree
from lookahead.backend.protocol import Shape
from lookahead.decoding.hf_outputs import copy_prefix_from
from lookahead.drafting.tree import TokenTree
from lookahead.errors import is_out_of_memory, with_place
from lookahead.model.cache import TreeCache
from lookahead.model.calls import SERVED, ModelInputs, ResolvedCall, inputs_of_step, read_prompt
from lookahead.model.facts import CACHE, cache_in, decoder_vocabulary, input_device, position_limit, tokens_in
from lookahead.model.model_state import outside_passes, state_of

_OF_STEP = SERVED | {"input_ids"}
# Names of text tokens in a configuration; the other token ids there are placeholders.
_OF_TEXT = frozenset(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"))


class _Prompt(NamedTuple):
    """A prompt that the model has read."""

    past: DynamicCache
    logits: Tensor  # `[batch, 1, vocab]`


class PromptReading:
    """The prompts of a call with further inputs, read by the model once.

    Args:
        call: The call.
        lengths: int64 `[batch]`, tokens of the prompts without padding.
        keeps_cache: Whether the cache of the call must hold the prompts too.
    """

    def __init__(self, call: ResolvedCall, lengths: NDArray[np.int64], *, keeps_cache: bool) -> None:
        self._call, self._model, self._lengths = call, call.model, lengths
        past, self.seconds = cache_in(call.model_kwargs), 0.0
        self._keeps = isinstance(past, DynamicCache) and (keeps_cache or tokens_in(past) > 0)
        self._given: DynamicCache | None = past if self._keeps else None

    @cached_property
    def _prompt(self) -> _Prompt:
        """The cache of the prompts and the logits after them."""
        started, call, past = time.perf_counter(), self._call, self._given
        if past is None:
            past = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        # The cache may be returned, and must be usable outside of inference mode.
        with outside_passes(), torch.inference_mode(False), torch.no_grad():
            inputs = {**call.model_kwargs, CACHE: past}
            logits = read_prompt(self._model, call.input_ids, call.generation_config, inputs)[:, -1:].clone()
        self.seconds = time.perf_counter() - started
        return _Prompt(past, logits)

    def fill(self, cache: TreeCache, *, drops: bool) -> Tensor:
        """Copy the prompts into an empty cache; returns the logits after them, `[batch, 1, vocab]`.

        `drops` frees the prompts' cache while copying, unless the caller of `model.generate` gets it.
        """
        past, logits = self._prompt
        padding = self._call.input_ids.shape[1] - self._lengths
        copy_prefix_from(past, cache, padding, drops=drops and not self._keeps)
        return logits

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        """The model's inputs for one and for two tokens after the prompts, each the most likely one."""
        past, logits = self._prompt
        token = logits[:, -1].argmax(-1, keepdim=True).to(self._call.input_ids)
        return [inputs_of_step(self._call, past, token.repeat(1, n)) for n in (1, 2)]

    @cached_property
    def positions(self) -> Tensor | None:
        """Positions of the next tokens, int64 `[batch]` or `[components, batch]`; None if the model takes none."""
        positions: Tensor | None = self._steps[0].get("position_ids")
        return None if positions is None else positions[..., 0].expand(*positions.shape[:-2], len(self._lengths))

    def unsupported_reason(self, shape: Shape, ropes: Sequence[tuple[str, int]], new: int) -> str:
        """Read the prompts and return why drafts cannot follow, or an empty string; skips reading if that is known.

        The first call for a model and these input names compares passes of a backend with the model's own.

        Args:
            shape: The shape of drafts in one pass.
            ropes: Position embeddings that change beyond a length: kind, limit.
            new: Tokens that may follow.
        """
        names = ", ".join(sorted(name for name, value in self._call.model_kwargs.items() if value is not None))
        name = f"{shape} behind {names}, a batch: {len(self._lengths) > 1}, padded: {bool(np.ptp(self._lengths))}"
        try:
            layers = deepcopy(self._given.layers) if self._given is not None else []
        except RuntimeError:  # torch does not copy tensors that are part of a graph
            return "its cache keeps what gradients are computed of"
        try:
            reason = state_of(self._model).probed(name, self._model, partial(self._find_difference, shape))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = "there was too little memory to compare its passes with ours"  # the next call retries
        _ = self._prompt if not reason else None
        reason = reason or self._unlike_text() or self._outgrown(ropes, new)
        if reason and self._given is not None:
            self._given.layers = layers  # transformers reads the prompts again
        return reason

    def _unlike_text(self) -> str:
        """Why the prompts cannot be continued like text, or an empty string."""
        layers: Any = self._prompt.past.layers
        width = self._call.input_ids.shape[1]
        if any(getattr(layer, "keys", None) is not None and layer.get_seq_length() != width for layer in layers):
            return "its cache holds more than the text"
        first, second = (step.get("position_ids") for step in self._steps)
        if first is None:
            return ""
        if second is None or not torch.equal(second, first + 1):
            return "its positions do not grow by one a token"
        return "the components of its positions differ" if first.ndim > 2 and (first[-3:] != first[-1]).any() else ""

    def _outgrown(self, ropes: Sequence[tuple[str, int]], new: int) -> str:
        """The limit that positions of the next tokens may exceed, or an empty string."""
        if self.positions is None:
            return ""
        lowest, highest = int(self.positions.min()), int(self.positions.max()) + new
        for kind, limit in ropes:
            if highest > limit and (kind == "dynamic" or lowest <= limit):
                return f"its {kind} position embeddings change beyond {limit} positions"
        most = position_limit(self._model)
        return f"they may need positions beyond its {most}" if most is not None and highest > most else ""

    def _find_difference(self, shape: Shape) -> str:
        _ = self._prompt  # an error of the model here is caused by the inputs
        try:
            with torch.inference_mode(False), torch.no_grad():
                return self._unlike_text() or self._difference(shape)
        except Exception as error:  # a model may raise anything for foreign inputs
            if is_out_of_memory(error):
                raise
            state_of(self._model).note_problem(f"{type(self._model).__name__} drafts nothing", with_place(error))
            return "its passes after them fail"

    def _difference(self, shape: Shape) -> str:
        """How the model's passes over one token differ from the backend's, or an empty string."""
        for name, value in self._steps[0].items():
            if name not in _OF_STEP and value is not None and self._reads(name):
                return f"the model input {name!r} is of later tokens too"
        return "" if self._agrees(shape) else "its passes after them differ from ours"

    def _own_logits(self, inputs: Mapping[str, Any], past: Any) -> Tensor:
        """The logits of the model's own pass over one token, `[batch, vocab]`; the cache grows."""
        model: Any = self._model
        logits: Tensor = model(**{**inputs, CACHE: past, "return_dict": True}).logits
        return logits[:, -1]

    def _reads(self, name: str) -> bool:
        """Whether the model's pass over one token depends on an input, bit for bit."""
        inputs, past = self._steps[0], self._prompt.past
        value, without = inputs[name], {key: other for key, other in inputs.items() if key != name}
        others = [without]
        if isinstance(value, Tensor):
            others += [{**inputs, name: make(value)} for make in (torch.zeros_like, torch.ones_like)]
        expected = self._own_logits(inputs, deepcopy(past))
        return not all(torch.equal(self._own_logits(other, deepcopy(past)), expected) for other in others)

    def _agrees(self, shape: Shape) -> bool:
        """Whether two nodes of a tree have the logits of the model's own passes over one token each."""
        model, past = self._model, deepcopy(self._prompt.past)
        roots = self._prompt.logits[:, -1].argmax(-1, keepdim=True).to(self._call.input_ids)
        own = [self._own_logits(inputs_of_step(self._call, past, roots), past)]
        tokens = torch.cat([roots, own[0].argmax(-1, keepdim=True).to(roots)], -1)
        own.append(self._own_logits(inputs_of_step(self._call, past, tokens), past))
        vocabulary, trees = decoder_vocabulary(model), list[TokenTree]()
        for root, token in tokens.tolist():
            drafted = [token] if shape == "chains" else [(token + 1) % vocabulary, token]
            trees.append(TokenTree.from_parents([root, *drafted], [0] * (1 + len(drafted))))
        rows, capacity = len(trees), int(self._lengths.max()) + 8
        make_inputs = partial(PromptInputs, reading=self, drops=False)
        backend = backend_for(model, rows=rows, capacity=capacity, shape=shape, packs=False, make_inputs=make_inputs)
        with backend.serving():
            backend.read([np.zeros(n, np.int32) for n in self._lengths])  # the model has read them
            for row in range(rows):
                backend.cache.commit(row, np.zeros(1, np.int32))
            logits = backend.score(trees)
            pairs = [
                (logits[row, node], scores[row])
                for row in range(rows)
                for node, scores in zip((0, -1), own, strict=True)
            ]
            return all(agree(model, ours, theirs) for ours, theirs in pairs)


def placeholders_of(model: PreTrainedModel, input_ids: Tensor) -> list[int]:
    """Placeholder tokens of other inputs: named in the configuration, as `image_token_id`, or out of vocabulary."""
    config, vocabulary = model.config, decoder_vocabulary(model)
    unknown: list[int] = input_ids[(input_ids < 0) | (input_ids >= vocabulary)].unique().tolist()
    text_config = config.get_text_config(decoder=True)
    parts = [config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))]
    named = [item for part in parts if part is not text_config for item in vars(part).items()]
    return unknown + [
        token
        for name, token in named
        if name.endswith(("token_id", "token_index")) and name not in _OF_TEXT and isinstance(token, int)
    ]


class PromptInputs(ModelInputs):
    """The inputs of a model after prompts that it has read itself.

    Args:
        model: The model.
        cache: The cache of its passes.
        reading: The prompts.
        drops: Whether the prompts' cache may be freed.
    """

    def __init__(self, model: PreTrainedModel, cache: TreeCache, reading: PromptReading, *, drops: bool = True) -> None:
        super().__init__(model, cache)
        self._reading, self._drops = reading, drops
        self._components: Tensor | None = None  # int64 `[components, rows, 1]`, relative to the last component

    def reading(self, encoded: Any) -> AbstractContextManager[Tensor]:
        """As for `ModelInputs`."""
        reading, device = self._reading, input_device(self.model)
        positions = reading.positions
        logits = reading.fill(self.cache, drops=self._drops)
        if positions is not None:
            positions, lengths = positions.to(device), torch.from_numpy(self.cache.slots.lengths).to(device)
            if positions.ndim == 2:
                self._components = (positions - positions[-1])[:, :, None]
                positions = positions[-1]
            shifts = (positions - lengths)[:, None]
            self.shifts = shifts if bool(shifts.any()) else None
        return nullcontext(logits)

    def retire(self, row: int, last: int) -> None:
        """As for `ModelInputs`."""
        if self.shifts is not None:
            self.shifts[row] = self.shifts[last]
        if self._components is not None:
            self._components[:, row] = self._components[:, last]

    def of_pass(self, tokens: Tensor, positions: Tensor) -> AbstractContextManager[dict[str, Any]]:
        """As for `ModelInputs`."""
        if self._components is not None:
            positions = positions[None] + self._components[:, : len(positions)]
        return super().of_pass(tokens, positions)
