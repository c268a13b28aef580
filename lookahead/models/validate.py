"""Models that cannot be served, refused by name before anything runs."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lookahead.errors import ConfigError, UnsupportedModelError
from lookahead.models.model_state import state_of
from lookahead.models.target import input_device


def check_model(model: object) -> None:
    """Refuse what is no model.

    Raises:
        ConfigError: It says what was passed, and how to load a model.
    """
    if isinstance(model, nn.Module) and hasattr(model, "can_generate"):
        return
    if isinstance(model, tuple) and len(model) == 2:
        raise ConfigError(f"model must be a PreTrainedModel, got a {type(model).__name__}; pass its two parts: *loaded")
    raise ConfigError(f"model must be a PreTrainedModel, got {described(model, 'model, tokenizer')}")


def refuse_encoder_decoder(model: PreTrainedModel, purpose: str) -> None:
    """Say that only a causal LM serves a purpose, told by a verb phrase."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder model, which cannot {purpose}")


def refuse_model(model: PreTrainedModel) -> None:
    """Say what cannot be served whatever is asked of it."""
    check_model(model)
    name, config = type(model).__name__, model.config
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{name} cannot generate; lookahead serves what AutoModelForCausalLM and AutoModelForSeq2SeqLM load"
        )
    if config.is_encoder_decoder and model.main_input_name != "input_ids":
        raise UnsupportedModelError(f"{name} reads {model.main_input_name}; lookahead serves models that read text")
    state = state_of(model)
    if state.is_encoder is None:
        # GPT-NeoX is no decoder either by its configuration, but its attention layers are causal.
        looks_ahead = not all(getattr(module, "is_causal", True) for module in model.modules())
        is_decoder = config.is_encoder_decoder or getattr(config, "is_decoder", True) is not False
        state.is_encoder = looks_ahead and not is_decoder
    if state.is_encoder:
        raise UnsupportedModelError(f"{name} is an encoder: config.is_decoder is False; lookahead serves causal LMs")
    if input_device(model).type == "meta":
        raise UnsupportedModelError(f"{name} is on the meta device: it has no weights to run with")


def vocabulary_size(model: PreTrainedModel, side: Any = None) -> int:
    """Token ids that a model, or its encoder or decoder `side`, has embeddings for, padding of its table included."""
    text_config: Any = model.config.get_text_config()
    own = side.get_input_embeddings() if isinstance(side, PreTrainedModel) else None
    size: int = getattr(own or model.get_input_embeddings(), "num_embeddings", text_config.vocab_size)
    return size


def described(value: object, names: str) -> str:
    """What was passed in place of an object; of a name or path also how to load it."""
    if not isinstance(value, str | PathLike):
        return repr(value) if value is None else f"a {type(value).__name__}"
    name = fspath(value)
    return f"{type(value).__name__} {name!r}; load it: {names} = lookahead.load({name!r})"
