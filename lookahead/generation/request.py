"""What a call of `model.generate` asks for: what is refused, how long its prompts are, when its rows end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode

from lookahead.config import LookaheadConfig
from lookahead.drafting.proposal import Call
from lookahead.errors import PromptError, UnsupportedModelError
from lookahead.models.model_state import state_of
from lookahead.models.target import input_device, position_limit
from lookahead.models.validate import refuse_model, vocabulary_size
from lookahead.verification.sampling import foreign_processor
from lookahead.verification.stopping import StoppingRule, reason_of

# What `model.generate` passes along that an engine with its own cache and positions has no use for.
_IGNORED = frozenset(
    {
        "attention_mask",
        "position_ids",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "cache_params",
    }
)
# What transformers extends by its newest column, so that zeros stay zeros.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")

# What asks for another mode than greedy search or sampling.
_MODE_OPTIONS = (
    *("num_beams", "num_beam_groups", "constraints", "force_words_ids", "penalty_alpha", "dola_layers"),
    *("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
)


def refuse_unsupported(
    model: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *,
    cache: type = DynamicCache,
    served: frozenset[str] = _IGNORED,
) -> None:
    """Say what cannot be served, and what to do instead; `cache` and `served` are the cache and the inputs that are."""
    refuse_model(model)
    if config.guidance_scale is not None and config.guidance_scale != 1:
        raise UnsupportedModelError(
            f"guidance_scale must be 1, got {config.guidance_scale}: guidance runs the model once more per token; "
            "leave out custom_generate for it"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        given = {name: getattr(config, name, None) for name in _MODE_OPTIONS}
        named = ", ".join(f"{name}={value!r}" for name, value in given.items() if value)
        raise UnsupportedModelError(
            f"{mode.value.replace('_', ' ')} ({named}) has no exact speculative form; leave out custom_generate for it"
            + (", or pass num_beams=1" if "beam" in mode.value else "")
        )
    if config.cache_implementation == "quantized":
        raise UnsupportedModelError("a quantized cache changes tokens and is not served; leave out custom_generate")
    past = model_kwargs.get("past_key_values")
    if getattr(past, "_is_user_defined", False) and not isinstance(past, cache):
        raise UnsupportedModelError(f"past_key_values must be a {cache.__name__}, got a {type(past).__name__}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise UnsupportedModelError(f"{name}=True is not served; leave out custom_generate for it")
    for name, value in model_kwargs.items():
        if name in served or _is_absent(value):
            continue
        if name in _TOKEN_TYPES and not value.any() and not _heeds(model, name):
            continue
        raise UnsupportedModelError(f"the model input {name!r} is not served; leave out custom_generate for it")


def _is_absent(value: Any) -> bool:
    """Whether an input is none; for images that are none transformers passes an empty dictionary."""
    return value is None or (isinstance(value, dict) and all(each is None for each in value.values()))


def _heeds(model: PreTrainedModel, name: str) -> bool:
    """Whether a model reads zeros in an input `[batch, tokens]` as something else than nothing."""

    def probe() -> bool:
        ids = torch.arange(1, 7, device=input_device(model))[None]
        causal_lm: Any = model
        try:
            with torch.no_grad():
                given = causal_lm(input_ids=ids, **{name: torch.zeros_like(ids)}).logits
                return not torch.equal(given, causal_lm(input_ids=ids).logits)
        except Exception:
            return True  # it takes more than text, and is left to transformers

    return state_of(model).probed(name, model, probe)


def refuse_past(past: Any, input_ids: Tensor, config: GenerationConfig, attention_mask: Tensor | None) -> None:
    """Say why a filled cache that was passed in cannot be continued from."""
    if not isinstance(past, DynamicCache) or not all(layer.is_initialized for layer in cast(Any, past.layers)):
        raise UnsupportedModelError(f"past_key_values must be a DynamicCache, got a {type(past).__name__}")
    whole = input_ids.shape[1]
    seen = attention_mask.shape[1] if attention_mask is not None else getattr(config, "_mask_length", whole)
    if seen != whole or past.get_seq_length() >= whole:
        raise UnsupportedModelError(
            f"input_ids must hold the whole text, the {past.get_seq_length()} cached tokens included and at least "
            f"one more, got {whole} tokens and a mask of {seen}"
        )


def call_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: int,
    stopping: StoppingRule,
    config: LookaheadConfig,
    *,
    is_chain: bool,
    warp: Callable[[Tensor], Tensor] | None,
) -> Call:
    """What proposers of a user's own are told about the call they are made for."""
    return Call(
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        vocab_size=vocabulary_size(model),
        max_length=stopping.max_length,
        max_nodes=config.node_budget,
        is_chain=is_chain,
        is_timed=config.draft == "auto",
        by_rejection=config.acceptance == "rejection" and warp is not None,
        warp=warp,
    )


def prompt_lengths(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> NDArray[np.int64]:
    """Tokens of each prompt without its left padding, once all of them are known to be in the vocabulary."""
    lengths = _prompt_lengths(input_ids, attention_mask)
    for row, ids in enumerate(input_ids.cpu().numpy()):
        refuse_strangers(ids[len(ids) - lengths[row] :], row, vocab_size)
    return lengths


def refuse_strangers(ids: NDArray[np.int64], prompt: int, vocab_size: int) -> None:
    """Say that the prompt of such a number holds tokens, int64 `[n]`, that the model does not know."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        stranger = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise PromptError(
            f"prompt {prompt} holds token {stranger}, and the model's vocabulary ends at {vocab_size - 1}: "
            "is the tokenizer that of another model?"
        )


def _prompt_lengths(input_ids: Tensor, attention_mask: Tensor | None) -> NDArray[np.int64]:
    """Tokens of each prompt by its mask."""
    batch_size, longest = input_ids.shape
    if not longest:
        raise PromptError("prompt 0 has no tokens: a prompt needs at least one")
    if attention_mask is None:
        return np.full(batch_size, longest)
    mask = attention_mask.cpu().numpy().astype(bool)
    lengths: NDArray[np.int64] = mask.sum(1)
    if not (mask == (np.arange(longest) >= (longest - lengths)[:, None])).all():
        raise UnsupportedModelError("attention_mask must be left-padded: zeros first, then ones, in every row")
    if (lengths == 0).any():
        raise UnsupportedModelError(
            f"attention_mask of prompt {int(lengths.argmin())} is all zeros: a prompt needs at least one token; "
            "leave out custom_generate for it"
        )
    return lengths


# Criteria that treat every row by itself and keep nothing from step to step. A subclass may do otherwise.
_ROW_WISE = frozenset({EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria})


def foreigner(processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig) -> str:
    """The name of the first processor or criterion that may keep a state or look across rows, or an empty string.

    Such a one must see what `model.generate` would show it: the whole batch, once a step.
    """
    others = [criterion for criterion in criteria if type(criterion) not in _ROW_WISE]
    names = [str(getattr(each, "__qualname__", type(each).__qualname__)) for each in others]  # it may be a function
    return next(iter(names), "") or foreign_processor(processors, config)


def warns_of_foreigner(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    rows: int,
    acceptance: str,
) -> bool:
    """Whether one would see other calls than those of `model.generate`; a warning then names it.

    Such a call is decoded plainly. Rows of a batch advance at different rates, and where tokens are sampled, typical
    acceptance asks processors about tokens that may not be emitted.
    """
    name = foreigner(processors, criteria, config) if rows > 1 else ""
    why = (
        f"or look at other rows, so it must see every step of the whole batch: the {rows} rows are decoded plainly; "
        "a prompt by itself is drafted for"
    )
    if not name and acceptance == "typical" and config.do_sample:
        name = foreign_processor(processors, config, is_tentative=True)
        why = (
            "and acceptance='typical' would ask it about tokens that are not emitted: the call is decoded plainly; "
            "with acceptance='exact' a prompt by itself is drafted for"
        )
    if name:
        warnings.warn(f"{name} may keep a state, {why}", stacklevel=3)
    return bool(name)


def stopping_rule(criteria: StoppingCriteriaList, config: GenerationConfig) -> StoppingRule:
    """Split the criteria that count tokens from those that need to be asked."""
    eos = [int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1)]
    limits = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    others = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
    shows_scores = config.return_dict_in_generate and config.output_scores

    def ask(criterion: StoppingCriteriaList, ids: Tensor, scores: Sequence[Tensor]) -> bool:
        steps = tuple(cast(Any, step[None]) for step in scores) if shows_scores else None
        return bool(criterion(cast(torch.LongTensor, ids), steps))

    custom = tuple((reason_of(c), partial(ask, StoppingCriteriaList([c]))) for c in others)
    return StoppingRule(max_length=min(limits), eos_tokens=np.array(eos, np.int32), custom=custom)


def refuse_long_prompts(model: PreTrainedModel, lengths: NDArray[np.int64]) -> None:
    """Say that a prompt outgrows the model's table of positions; on a GPU the model would bring the process down."""
    limit, longest = position_limit(model), int(lengths.max())
    if limit is not None and longest > limit:
        number = int(lengths.argmax())
        raise PromptError(f"prompt {number} has {longest} tokens and the model positions for {limit}; shorten it")


def refuse_inputs(model: PreTrainedModel, inputs: Sequence[Sequence[int]]) -> None:
    """Say what the encoder of an encoder-decoder model, which reads before a custom method is called, cannot read."""
    config: Any = model.config
    limit = getattr(config, "max_encoder_position_embeddings", None) or position_limit(model)
    for i, ids in enumerate(inputs if config.is_encoder_decoder else ()):
        if limit is not None and len(ids) > limit:
            raise PromptError(f"input {i} has {len(ids)} tokens and the encoder positions for {limit}; shorten it")
        refuse_strangers(np.array(ids), i, vocabulary_size(model))


def pad_prompts(
    prompts: Sequence[list[int]], pad: int, *, on_the_right: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of one length, and their masks; a decoder's are padded on the left, an encoder's on the right."""
    longest = max(map(len, prompts))
    fillings = [longest - len(ids) for ids in prompts]
    pairs = zip(prompts, fillings, strict=True)
    if on_the_right:
        padded = [ids + [pad] * n for ids, n in pairs]
        return padded, [[1] * (longest - n) + [0] * n for n in fillings]
    padded = [[pad] * n + ids for ids, n in pairs]
    return padded, [[0] * n + [1] * (longest - n) for n in fillings]


def refuse_positions(position_ids: Tensor | None, lengths: NDArray[np.int64], longest: int) -> None:
    """Say that positions of the user's own, `[…, batch or 1, tokens]`, are not served; padding's may be any."""
    if position_ids is None:
        return
    usual = np.arange(longest) - (longest - lengths)[:, None]
    given = position_ids.cpu().numpy()
    if given.shape[-1] != longest or ((given != usual) & (usual >= 0)).any():
        raise UnsupportedModelError("position_ids of your own are not served; leave out custom_generate for them")


def serve_stop_strings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: GenerationConfig | None,
    generate_kwargs: dict[str, Any],
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Turn stop strings into the stopping criterion they mean.

    `model.generate` cannot do it itself, since it hands no tokenizer to a custom method. Returns the
    configuration and the arguments to call `generate` with.
    """
    options = generation_config if generation_config is not None else model.generation_config
    stop_strings = generate_kwargs.get("stop_strings", options.stop_strings)
    if stop_strings is None or tokenizer is None:
        return generation_config, generate_kwargs
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings)])
    criteria.extend(generate_kwargs.get("stopping_criteria") or [])
    if options.stop_strings is not None:
        generation_config = copy(options)
        generation_config.stop_strings = None
    kept = {name: value for name, value in generate_kwargs.items() if name != "stop_strings"}
    return generation_config, {**kept, "stopping_criteria": criteria}
