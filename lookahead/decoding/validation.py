"""Validation of the arguments of the Python API and of `model.generate`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from math import inf
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from lookahead.config import DEFAULTS, REMOVED, LookaheadConfig, check_seed, check_whole, refuse_removed
from lookahead.errors import ConfigError, PromptError, UnsupportedModelError, warn, with_place
from lookahead.model.calls import kind_of, mask_length
from lookahead.model.facts import (
    CACHE,
    check_model,
    decoder_vocabulary,
    described,
    embedding_of,
    input_device,
    reads_text,
    validate_model,
)
from lookahead.model.model_state import ModelPlan, plan_of, recognise, state_of
from lookahead.model.state_layers import is_filled
from lookahead.proposers.pool_files import pool_of
from lookahead.utils.fingerprints import tokenizer_fingerprint
from lookahead.utils.kept_values import truth

# Arguments of `model.generate` that the API refuses if they are set.
_NOT_TAKEN = {
    "streamer": "use stream, or model.generate under lookahead.enable",
    "custom_generate": "use model.generate",
    "token_healing": "use model.generate, with the tokenizer",
}
_PROMPTS = ("input_ids", "attention_mask", "inputs", "inputs_embeds", "messages")
_ALIASES = {"max_tokens": "max_new_tokens", "stop": "stop_strings", "lookahead_config": "config"}
# The minimum of integer options, and the maximum of float options.
_WHOLE = {"max_new_tokens": 1, "max_length": 1, "min_new_tokens": 0, "min_length": 0, "top_k": 0, "num_beams": 1}
_NUMBERS = {"temperature": inf, "top_p": 1.0, "min_p": 1.0, "typical_p": 1.0, "repetition_penalty": inf}
_LEAST_SHARE = 0.8  # minimum share of embedding rows with a token; the rest is padding

# transformers extends these by repeating the last column, so zeros stay zeros.
TOKEN_TYPES = frozenset(("token_type_ids", "mm_token_type_ids"))
"""Inputs of which zeros may mean nothing to a model, which a pass tells."""
# Options that select a mode other than greedy search or sampling.
_MODE_OPTIONS = (
    *("num_beams", "num_beam_groups", "constraints", "force_words_ids", "penalty_alpha", "dola_layers"),
    *("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
)

LOOPS = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
"""The generation modes of `Engine`."""
_NO_BEAMS = ("num_beams", 1), ("num_beam_groups", 1)


def check_pair(model: Any, tokenizer: object) -> None:
    """Raise ConfigError unless given a model and a tokenizer; warn once if they do not seem to match."""
    if isinstance(model, PreTrainedTokenizerBase) and isinstance(tokenizer, nn.Module):
        raise ConfigError("model and tokenizer are swapped: pass the model first, then its tokenizer")
    check_model(model)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        has_one = hasattr(tokenizer, "tokenizer")
        got = f"a {type(tokenizer).__name__}; pass its .tokenizer" if has_one else described(tokenizer)
        raise ConfigError(f"tokenizer must be a tokenizer of transformers, got {got}")
    seen = state_of(model).tokenizers
    if tokenizer in seen or not model.can_generate():
        return
    seen.add(tokenizer)
    embeddings = getattr(embedding_of(model), "num_embeddings", None)
    if embeddings is None:
        return
    differences = []
    if not _LEAST_SHARE * embeddings <= len(tokenizer) <= embeddings:
        differences.append(f"{len(tokenizer):,} tokens against embeddings for {embeddings:,}")
    for name in ("eos_token_id", "bos_token_id"):
        configs = (model.config.get_text_config(), getattr(model, "generation_config", None))
        own, tokens = getattr(tokenizer, name, None), [getattr(config, name, None) for config in configs]
        special: set[Any] = {
            token for entry in tokens for token in (entry if isinstance(entry, list | tuple) else [entry])
        }
        # Other ids are defaults.
        special = {token for token in special if token is not None and 0 <= token < embeddings}
        if own is not None and special and own not in special:
            differences.append(f"{name} {own} against {', '.join(map(str, sorted(special)))}")
    if differences:
        names = f"{tokenizer.name_or_path!r}", f"{model.config.name_or_path or type(model).__name__!r}"
        told = f"the tokenizer {names[0]} may belong to another model than {names[1]}: {'; '.join(differences)}"
        warn(told)


def check_options(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: LookaheadConfig | None,
    generation_config: object,
    options: Mapping[str, Any],
    seed: object = None,
    *,
    recognises: bool = True,
) -> ModelPlan:
    """Check the arguments of a call of the Python API; returns the plan of the model.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        config: How to draft; None for the defaults.
        generation_config: As for `model.generate`.
        options: Other options of `model.generate`.
        seed: None, or a whole number from -2^63 to 2^64 - 1.
        recognises: Whether to look at the model as it is now, not as a call saw it last.

    Raises:
        ConfigError: An option is out of its range, not accepted here, or unknown.
        PoolError: The pool of the configuration cannot be read, or was made with another tokenizer.
        UnsupportedModelError: The model cannot be used.
    """
    if config is not None:
        check_config("config", config)
    facts = recognise(model, trusted=(config or DEFAULTS).trust_user_code) if recognises else plan_of(model)
    facts.part("usable", facts.form, partial(validate_model, model))
    if kind_of(model).has_encoder and not reads_text(model):
        command = ", or 'lookahead transcribe'" if model.config.model_type == "whisper" else ""
        raise UnsupportedModelError(
            f"{type(model).__name__} reads {model.main_input_name}, not text: call model.generate under "
            f"lookahead.enable(model){command}"
        )
    if config is not None and config.pool is not None:
        pool_of(config, fingerprint=tokenizer_fingerprint(tokenizer))
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        hint = "; pass its entries as keyword arguments" if isinstance(generation_config, Mapping) else ""
        got = f"a {type(generation_config).__name__}{hint}"
        raise ConfigError(f"generation_config must be a GenerationConfig, got {got}")
    for name in options:
        if name in REMOVED:
            refuse_removed(options)
        if name in _PROMPTS:
            raise ConfigError(
                f"{name} is not taken here: pass the prompt as the third argument; "
                "a string, chat messages, token ids and the output of a tokenizer are accepted"
            )
        if name in _NOT_TAKEN and options[name]:
            raise ConfigError(f"{name} is not taken here; {_NOT_TAKEN[name]}")
    if seed is not None:
        check_seed(seed)
    values = {name: value for name, value in options.items() if value is not None}
    check_numbers(values)
    if not isinstance(values.get("do_sample", False), bool):
        raise ConfigError(f"do_sample must be True or False, got {values['do_sample']!r}")
    if values.get("temperature") == 0 and resolved(model, generation_config, options, "do_sample"):
        raise ConfigError("temperature must be more than 0 to sample, got 0; do_sample=False takes the likeliest token")
    names = vars(GenerationConfig())
    for name in options:
        # Unknown options that look like a typo; transformers refuses the others.
        if name not in names and not hasattr(model.generation_config, name):
            meant = _ALIASES.get(name) or next(iter(difflib.get_close_matches(name, names, 1, 0.8)), None)
            if meant is not None:
                raise ConfigError(f"{name!r} is not an option of generate; did you mean {meant!r}?")
    return facts


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if a number is out of its range."""
    for name, value in options.items():
        if name in _WHOLE:
            check_whole(name, value, _WHOLE[name])
        most, is_number = _NUMBERS.get(name), isinstance(value, Real) and not isinstance(value, bool)
        if most is not None and not (is_number and 0 <= value <= most):
            span = f"from 0 to {most:g}" if most < inf else "of at least 0"
            raise ConfigError(f"{name} must be a number {span}, got {value!r}")


def resolved(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: Mapping[str, Any], name: str
) -> Any:
    """An option as `model.generate` resolves it: the argument, the given configuration's, or the model's."""
    if name in options:
        return options[name]
    value = getattr(generation_config, name, None)
    return value if value is not None else getattr(model.generation_config, name, None)


def serve_stop_strings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: GenerationConfig | None,
    generate_kwargs: dict[str, Any],
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """The configuration and arguments for `model.generate` with stop strings turned into a stopping criterion.

    `generate` cannot do that, since it passes no tokenizer to a custom method.
    """
    stop_strings = resolved(model, generation_config, generate_kwargs, "stop_strings")
    if stop_strings is None or tokenizer is None:
        return generation_config, generate_kwargs
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings)])
    criteria.extend(generate_kwargs.get("stopping_criteria") or [])
    if generation_config is not None and generation_config.stop_strings is not None:
        generation_config = copy(generation_config)
        generation_config.stop_strings = None
    kept = {name: value for name, value in generate_kwargs.items() if name != "stop_strings"}
    if model.generation_config.stop_strings is not None:
        kept["stop_strings"] = None  # else the model's own would apply
    return generation_config, {**kept, "stopping_criteria": criteria}


def check_config(name: str, config: object) -> None:
    """Raise ConfigError unless the argument is a LookaheadConfig or None."""
    if config is not None and not isinstance(config, LookaheadConfig):
        raise ConfigError(f"{name} must be a LookaheadConfig, got a {type(config).__name__}")


def validate_call(
    model: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    modes: Sequence[GenerationMode] = LOOPS,
) -> None:
    """Raise UnsupportedModelError if a resolved call of `model.generate` cannot be served."""
    plan = plan_of(model)
    plan.part("usable", plan.form, partial(validate_model, model))
    mode, kind = config.get_generation_mode(), kind_of(model)
    if config.guidance_scale is not None and config.guidance_scale != 1:
        raise _left_out(
            f"guidance_scale must be 1, got {config.guidance_scale}: guidance runs the model once more per token"
        )
    if mode not in modes:
        mode_options = {name: getattr(config, name, None) for name in _MODE_OPTIONS}
        mode_options = {name: value for name, value in mode_options.items() if value and (name, value) not in _NO_BEAMS}
        named = ", ".join(f"{name}={value!r}" for name, value in mode_options.items())
        hint = ", or pass num_beams=1" if "beam" in mode.value else ""
        raise _left_out(f"{mode.value.replace('_', ' ')} ({named}) is not served here", hint)
    if config.cache_implementation == "quantized":
        raise _left_out("a quantized cache changes tokens and is not served")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise _left_out(f"{name}=True is not served")
    for name in other_inputs(model, model_kwargs):
        # Beam search and encoder-decoder models take only tokens.
        if mode not in LOOPS and name == "mm_encoder_outputs":  # made of them by `generate`
            raise _left_out(f"{mode.value.replace('_', ' ')} is not served after images, videos or sound")
        if kind.has_encoder or mode not in LOOPS or name == "inputs_embeds":
            raise _left_out(f"the model input {name!r} is not served")


def other_inputs(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> list[str]:
    """Names of inputs of a call that may change its output, other than tokens and the inputs of every pass."""
    served = kind_of(model).served
    names = []
    for name, value in model_kwargs.items():
        # transformers passes an empty dictionary for no images
        if name in served or value is None or (isinstance(value, dict) and all(v is None for v in value.values())):
            continue
        if name not in TOKEN_TYPES or value.any() or _heeds(model, name):
            names.append(name)
    return names


def _left_out(what: str, hint: str = "") -> UnsupportedModelError:
    """The error for a feature that only transformers supports."""
    return UnsupportedModelError(f"{what}; leave out custom_generate for it{hint}")


def _heeds(model: PreTrainedModel, name: str) -> bool:
    """Whether zeros in an input `[batch, tokens]` change the logits of a model, as its call has recognised it."""
    plan = plan_of(model)
    if plan.user_code and not plan.trusted:
        return True

    def probe() -> bool:
        ids = torch.arange(1, 7, device=input_device(model))[None]
        causal_lm: Any = model
        try:
            with torch.no_grad():
                logits = causal_lm(input_ids=ids, **{name: torch.zeros_like(ids)}).logits
                return not torch.equal(logits, causal_lm(input_ids=ids).logits)
        except Exception as error:  # it needs more than text; left to transformers
            state_of(model).note_problem(f"{type(model).__name__} is not served with {name}", with_place(error))
            return True

    return state_of(model).probed(name, model, probe, truth)


def validate_past(
    model: PreTrainedModel, past: Any, input_ids: Tensor, config: GenerationConfig, attention_mask: Tensor | None
) -> None:
    """Refuse a filled cache that cannot be continued.

    Args:
        model: The model.
        past: The cache.
        input_ids: int64 `[batch, tokens]`, the whole text.
        config: The generation configuration of the call.
        attention_mask: `[batch, tokens]`, or None.

    Raises:
        UnsupportedModelError: The cache is not a DynamicCache, has other rows or a narrower dtype, or the text or the
            mask is not longer than it.
    """
    if not isinstance(past, DynamicCache) or not all(map(is_filled, past.layers)):
        raise UnsupportedModelError(f"{CACHE} must be a DynamicCache, got a {type(past).__name__}")
    whole = input_ids.shape[1]
    seen = attention_mask.shape[1] if attention_mask is not None else mask_length(config, whole)
    if seen != whole or past.get_seq_length() >= whole:
        raise UnsupportedModelError(
            f"input_ids must hold the whole text, the {past.get_seq_length()} cached tokens included and at least "
            f"one more, got {whole} tokens and a mask of {seen}"
        )
    for layer in cast(Any, past.layers):
        keys = getattr(layer, "keys", None)
        if keys is None:  # it reads another layer's
            continue
        if len(keys) != len(input_ids):
            raise UnsupportedModelError(f"{CACHE} holds {len(keys)} rows, got input_ids of {len(input_ids)}")
        # transformers appends in the wider dtype; under autocast the dtype of keys is not the model's
        is_wide = torch.promote_types(keys.dtype, model.dtype) == keys.dtype
        if not is_wide and not torch.is_autocast_enabled(keys.device.type):
            raise UnsupportedModelError(f"{CACHE} holds {keys.dtype}, which is narrower than the model's {model.dtype}")


def has_usual_positions(position_ids: Tensor | None, lengths: NDArray[np.int64], longest: int) -> bool:
    """Whether positions, `[…, batch or 1, tokens]`, are the positions of text; any are allowed for padding."""
    if position_ids is None:
        return True
    usual = np.arange(longest) - (longest - lengths)[:, None]
    positions = position_ids.cpu().numpy()
    return positions.shape[-1] == longest and not ((positions != usual) & (usual >= 0)).any()


def check_token_ids(ids: NDArray[np.int64], prompt: int, vocab_size: int) -> None:
    """Refuse prompt number `prompt` if its tokens, int64 `[n]`, are not all in the vocabulary."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        stranger = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise PromptError(
            f"prompt {prompt} holds token {stranger}, and the model's vocabulary ends at {vocab_size - 1}: "
            "is the tokenizer that of another model?"
        )


def prompt_lengths(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any], beams: int = 1
) -> NDArray[np.int64]:
    """Tokens of each prompt without left padding, int64 `[batch]`; `input_ids` repeat each prompt once per beam.

    Refuses tokens outside the vocabulary, unless other inputs may replace them, and prompts longer than the model's
    position table: on a GPU they would crash the process.
    """
    kind, vocab_size = kind_of(model), decoder_vocabulary(model)
    own_mask = model_kwargs.get(kind.mask)
    input_ids, own_mask = input_ids[::beams], None if own_mask is None else own_mask[::beams]
    batch_size, longest = input_ids.shape
    if not batch_size:
        raise PromptError("input_ids have no prompt")
    if not longest:
        raise PromptError("prompt 0 has no tokens: a prompt needs at least one")
    if input_ids.is_floating_point():
        raise PromptError(f"input_ids must be whole numbers, got a tensor of {input_ids.dtype}")
    if own_mask is not None and own_mask.shape != input_ids.shape:
        shapes = f"{[*input_ids.shape]}, got {[*own_mask.shape]}"
        raise UnsupportedModelError(f"attention_mask must have the shape of input_ids, {shapes}")
    mask = np.ones((batch_size, longest), bool) if own_mask is None else own_mask.bool().cpu().numpy()
    lengths: NDArray[np.int64] = mask.sum(1)
    if (lengths == 0).any():
        raise _left_out(
            f"attention_mask of prompt {int(lengths.argmin())} is all zeros: a prompt needs at least one token"
        )
    for row, ids in enumerate(() if other_inputs(model, model_kwargs) else input_ids.cpu().numpy()):
        check_token_ids(ids[longest - lengths[row] :], row, vocab_size)
    limit = kind.positions(model)
    most = longest if kind.has_encoder else int(lengths.max())
    if limit is not None and most > limit:
        prompt = "the decoder's prompt" if kind.has_encoder else f"prompt {int(lengths.argmax())}"
        raise PromptError(f"{prompt} has {most} tokens and the model has {limit} positions; shorten it")
    return lengths
