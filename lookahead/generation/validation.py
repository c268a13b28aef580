"""Arguments of the Python API, checked before anything runs: the model, its tokenizer, and the options."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.config import LookaheadConfig
from lookahead.errors import ConfigError
from lookahead.models.model_state import state_of
from lookahead.models.validate import check_model, described

# The least value of options that are whole numbers, and the range of those that are any number.
_WHOLE = {"max_new_tokens": 1, "max_length": 1, "min_new_tokens": 0, "min_length": 0, "top_k": 0}
_NUMBERS = {"temperature": None, "top_p": 1.0, "min_p": 1.0, "typical_p": 1.0, "repetition_penalty": None}
_PROMPTS = ("input_ids", "attention_mask", "inputs", "inputs_embeds", "messages")
_ALIASES = {"max_tokens": "max_new_tokens", "stop": "stop_strings", "lookahead_config": "config"}
_LEAST_SHARE = 0.8  # of the rows of an embedding that a tokenizer names; the rest is padding of the table


def check_pair(model: object, tokenizer: object, *, stacklevel: int = 4) -> None:
    """Refuse what is no model or no tokenizer, and warn once of a tokenizer that looks like that of another model.

    Raises:
        ConfigError: It says what was passed, and how to load a model or a tokenizer.
    """
    if isinstance(model, PreTrainedTokenizerBase) and isinstance(tokenizer, nn.Module):
        raise ConfigError("model and tokenizer are swapped: pass the model first, then its tokenizer")
    check_model(model)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        if hasattr(tokenizer, "tokenizer"):
            name = type(tokenizer).__name__
            raise ConfigError(f"tokenizer must be a tokenizer of transformers, got a {name}; pass its .tokenizer")
        got = described(tokenizer, "model, tokenizer")
        raise ConfigError(f"tokenizer must be a tokenizer of transformers, got {got}")
    _warn_of_a_foreign_tokenizer(model, tokenizer, stacklevel)


def _warn_of_a_foreign_tokenizer(model: Any, tokenizer: PreTrainedTokenizerBase, stacklevel: int) -> None:
    """Compare sizes of vocabularies and special tokens, once for every pair."""
    seen = state_of(model).tokenizers
    if tokenizer in seen or not model.can_generate():
        return
    seen.add(tokenizer)
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if known is None:
        return
    differences = []
    if not _LEAST_SHARE * known <= len(tokenizer) <= known:
        differences.append(f"{len(tokenizer):,} tokens against embeddings for {known:,}")
    for name in ("eos_token_id", "bos_token_id"):
        own = getattr(tokenizer, name, None)
        configs = (model.config.get_text_config(), getattr(model, "generation_config", None))
        given = {token for config in configs for token in _as_list(getattr(config, name, None))}
        given = {token for token in given if 0 <= token < known}  # others are defaults that no one set
        if own is not None and given and own not in given:
            differences.append(f"{name} {own} against {', '.join(map(str, sorted(given)))}")
    if differences:
        names = f"{tokenizer.name_or_path!r}", f"{model.config.name_or_path or type(model).__name__!r}"
        warnings.warn(
            f"the tokenizer {names[0]} may be that of another model than {names[1]}: {'; '.join(differences)}",
            stacklevel=stacklevel,
        )


def _as_list(tokens: Any) -> list[int]:
    """One token id, several, or none."""
    return [] if tokens is None else list(tokens) if isinstance(tokens, list | tuple) else [tokens]


def check_options(
    model: PreTrainedModel,
    config: object,
    generation_config: object,
    options: Mapping[str, Any],
    seed: object = None,
) -> None:
    """Refuse options of the wrong type or out of range, and those that no one would read.

    Raises:
        ConfigError: It names the option, what is allowed, and what was received.
    """
    check_config("config", config)
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        hint = "; pass its entries as keyword arguments" if isinstance(generation_config, Mapping) else ""
        raise ConfigError(f"generation_config must be a GenerationConfig, got {_got(generation_config)}{hint}")
    if options.get("streamer") is not None:
        raise ConfigError("streamer is not taken here; use stream, or model.generate under lookahead.enable")
    for name in _PROMPTS:
        if name in options:
            raise ConfigError(
                f"{name} is not taken here: pass the prompt as the third argument; "
                "a string, chat messages, token ids and what a tokenizer returns are served"
            )
    if seed is not None and not _is_whole(seed):
        raise ConfigError(f"seed must be a whole number, got {seed!r}")
    _check_ranges(options)
    do_sample = options.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConfigError(f"do_sample must be True or False, got {do_sample!r}")
    defaults = generation_config if generation_config is not None else model.generation_config
    if options.get("temperature") == 0 and (do_sample if do_sample is not None else defaults.do_sample):
        raise ConfigError("temperature must be more than 0 to sample, got 0; do_sample=False takes the likeliest token")
    for name in options:
        _refuse_misspelt(model, name)


def check_config(name: str, config: object) -> None:
    """Refuse what is no configuration of ours; None stands for the defaults."""
    if config is not None and not isinstance(config, LookaheadConfig):
        raise ConfigError(f"{name} must be a LookaheadConfig, got {_got(config)}")


def _check_ranges(options: Mapping[str, Any]) -> None:
    """Refuse numbers that are none, or out of range; None stands for the default."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, least in _WHOLE.items():
        if name in given and not (_is_whole(given[name]) and given[name] >= least):
            raise ConfigError(f"{name} must be a whole number of at least {least}, got {given[name]!r}")
    for name, most in _NUMBERS.items():
        if name not in given:
            continue
        value = given[name]
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= (most or float("inf"))):
            span = f"from 0 to {most:g}" if most else "of at least 0"
            raise ConfigError(f"{name} must be a number {span}, got {value!r}")


@cache
def _known_options() -> frozenset[str]:
    """Names of the options of `model.generate`."""
    return frozenset(vars(GenerationConfig()))


def _refuse_misspelt(model: PreTrainedModel, name: str) -> None:
    """Refuse an option that is none, where another one was meant; transformers refuses the others."""
    known = _known_options()
    if name in known or hasattr(model.generation_config, name):
        return
    meant = _ALIASES.get(name) or next(iter(difflib.get_close_matches(name, known, 1, 0.8)), None)
    if meant is not None:
        raise ConfigError(f"{name!r} is no option of generate; did you mean {meant!r}?")


def _is_whole(value: object) -> bool:
    """Whether a value is a whole number; a truth value is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _got(value: object) -> str:
    """What was passed in place of a configuration."""
    return f"a {type(value).__name__}"


def context_limit(model: PreTrainedModel) -> int | None:
    """Most positions a prompt and its output may take together, as the model's configuration states; None if nowhere.

    What scales the positions (linear, dynamic or YaRN RoPE) extends the number that the model was trained with.
    """
    config: Any = model.config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") in ("linear", "dynamic", "yarn"):
            trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            limit = max(limit, int(trained * (rope.get("factor") or 1)))
    return limit
