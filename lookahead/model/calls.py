"""Calls of `model.generate`: their resolved arguments, and transformers' own loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation import utils
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.utils.generic import ModelOutput

from lookahead.model.facts import CACHE, cache_in, may_be_callers
from lookahead.model.known_code import CRITERIA, is_known, is_known_class
from lookahead.model.model_kind import kind_of

GenerateOutput = utils.GenerateOutput


class ResolvedCall(NamedTuple):
    """The arguments that `model.generate` passes to its loop."""

    model: PreTrainedModel
    input_ids: Tensor  # int64 `[batch, tokens]`, left-padded; of an encoder-decoder model the decoder's prompt
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    inputs_tensor: Tensor | None  # the encoder's inputs
    model_kwargs: dict[str, Any]  # inputs of the model, including the encoder's outputs

    @property
    def pad_token(self) -> Tensor | None:
        """The padding token as a tensor, or None."""
        config: Any = self.generation_config
        token: Tensor | None = getattr(config, "_pad_token_tensor", None)
        if token is None and isinstance(config.pad_token_id, int):
            token = torch.tensor(config.pad_token_id, device="cpu")
        return token


# The methods of a model that `generate` decodes with, besides its passes.
_LOOP = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def changed_loop(model: Any) -> str:
    """The name of a method of the loop of `model.generate` that transformers does not ship, or an empty string."""
    for name in _LOOP:
        own = vars(model).get(name) if name != "prepare_inputs_for_generation" else None
        if not is_known(own or getattr(type(model), name, None)):
            return name
    kinds = LogitsProcessorList, StoppingCriteriaList, *CRITERIA
    return next((f"{kind.__name__}.__call__" for kind in kinds if not is_known(kind.__call__)), "")


def mask_length(config: GenerationConfig, default: int) -> int:
    """Length of a call's mask in tokens, if its configuration has one."""
    length: int = getattr(config, "_mask_length", default)
    return length


def unserved_reason(call: ResolvedCall) -> str:
    """Why passes over drafts cannot follow the mask or the cache of a call, or an empty string.

    `generate` infers a mask of its own if a prompt holds the padding token.
    """
    past, mask = cache_in(call.model_kwargs), call.model_kwargs.get("attention_mask")
    tensors = [call.input_ids, *call.model_kwargs.values()]
    tensors += [value for layer in getattr(past, "layers", None) or () for value in vars(layer).values()]
    own = next(
        (type(tensor) for tensor in tensors if isinstance(tensor, Tensor) and not is_known_class(type(tensor))), None
    )
    if own is not None:
        return f"{own.__qualname__}, the class of an input, is your own code"
    if mask is not None and mask.shape == call.input_ids.shape and not is_left_padded(mask):
        return "its attention_mask has zeros after ones"
    if may_be_callers(past, call.generation_config) and not isinstance(past, DynamicCache | EncoderDecoderCache):
        return f"its cache is a {type(past).__name__}"
    layers: Any = past.layers if isinstance(past, DynamicCache) else ()
    lengths = {int(layer.get_seq_length()) for layer in layers if getattr(layer, "keys", None) is not None}
    return "the layers of its cache hold different numbers of tokens" if len(lengths) > 1 else ""


def is_left_padded(mask: Tensor) -> bool:
    """Whether every row of a mask, `[batch, tokens]`, is zeros and then ones."""
    kept = mask.bool().cpu().numpy()
    return bool((kept[:, 1:] >= kept[:, :-1]).all())


def resolve_call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> ResolvedCall:
    """Let `model.generate` check and resolve its arguments, without generating.

    Args:
        model: The model.
        *args: Arguments of `model.generate`.
        **kwargs: Keyword arguments of it, except `custom_generate`.
    """
    resolved: list[ResolvedCall] = []

    def keep(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **rest: Any,
    ) -> Tensor:
        given = (model, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor, rest)
        resolved.append(ResolvedCall(*given))
        return input_ids

    cast(Any, model).generate(*args, custom_generate=keep, **kwargs)
    return resolved[0]


def own_sample(call: ResolvedCall) -> Callable[..., Any]:
    """Transformers' own loop for greedy search and sampling; call it with criteria and a streamer."""
    lm: Any = call.model
    return partial(
        lm._sample,
        call.input_ids,
        call.logits_processor,
        generation_config=call.generation_config,
        **call.model_kwargs,
    )


def own_beam_search(call: ResolvedCall) -> Callable[..., Any]:
    """Transformers' own beam search; call it with a stand-in for the model, criteria and inputs."""
    kind: Any = type(call.model)
    return partial(
        kind._beam_search,
        input_ids=call.input_ids,
        logits_processor=call.logits_processor,
        generation_config=call.generation_config,
    )


def own_loop(model: Any, config: GenerationConfig) -> Callable[..., Any] | None:
    """The transformers loop that `model.generate` chooses for a configuration; None if it is on the Hub."""
    name = utils.GENERATION_MODES_MAPPING[config.get_generation_mode()]
    loop: Callable[..., Any] | None = getattr(type(model), name, None)
    return loop


def read_prompt(model: Any, input_ids: Tensor, config: GenerationConfig, inputs: dict[str, Any]) -> Tensor:
    """Read a prompt as transformers' loop does; returns logits `[rows, n, vocab]`."""
    logits: Tensor = model._prefill(input_ids, config, inputs).logits
    return logits


def inputs_of_step(call: ResolvedCall, past: Cache, tokens: Tensor) -> dict[str, Any]:
    """The model inputs for the newest of `tokens` after a prompt, as transformers' loop makes them.

    Args:
        call: The call.
        past: The cache, with the prompt and all tokens but the newest.
        tokens: int64 `[batch, 1 or more]`.
    """
    model: Any = call.model
    inputs, outputs = {**call.model_kwargs, CACHE: past}, ModelOutput({CACHE: past})
    for _ in range(tokens.shape[1]):
        inputs = model._update_model_kwargs_for_generation(outputs, inputs, is_encoder_decoder=False)
    ids = torch.cat([call.input_ids, tokens], -1)
    prepared: dict[str, Any] = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs)
    return prepared


def generate_output(model: PreTrainedModel, sequences: Tensor, past: Any, **others: Any) -> GenerateOutput:
    """The output of `model.generate` for greedy search and sampling."""
    output: GenerateOutput = kind_of(model).output(**{"sequences": sequences, CACHE: past, **others})
    return output
