"""Facts about a transformers model: its inputs, sizes, positions, windows and attention; and the caches of calls."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike, fspath
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.activations import SiLUActivation
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.errors import ConfigError, UnsupportedModelError

Attention = Callable[..., tuple[Tensor, Any]]
# The name of the cache among the inputs and outputs of a model. Transformers changed it in 5.24.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
MARKS_CACHES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
SILU = SiLUActivation, nn.SiLU
"""The classes of the activation `x * sigmoid(x)`."""


def attention_name(config: Any) -> str | None:
    """The name of the attention function that layers with a configuration call, such as "sdpa"."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def experts_name(config: Any) -> str | None:
    """The name of the function that multiplies by the weights of experts, such as "grouped_mm"."""
    name: str | None = getattr(config, "_experts_implementation", None)
    return name


def sdpa() -> Attention:
    """Transformers' own function for SDPA."""
    return sdpa_attention_forward


def is_sdpa(attention: Attention) -> bool:
    """Whether an attention function is transformers' own for SDPA."""
    return attention is sdpa_attention_forward


def calls_registered_attention(model: Any) -> bool:
    """Whether the layers of a model, or of its decoder, call the configured attention function with all keys."""
    decoder = decoder_of(model)
    own = not isinstance(decoder, PreTrainedModel) or decoder._can_set_attn_implementation()
    return bool(own and model._can_set_attn_implementation())


def uncompiled(model: Any) -> Any:
    """The model inside `torch.compile`'s wrapper, which forwards attribute reads only; other models unchanged."""
    return getattr(model, "_orig_mod", model)


def is_sequential(model: Any) -> bool:
    """Whether a model keeps a state that cannot be cut back, as recurrent layers do.

    A class of hybrid models says so even if all layers of a model are attention, as in some sizes of Granite 4.
    """
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    return bool(getattr(model, "_is_stateful", False)) and not (kinds and kinds <= ATTENTION_LAYERS)


def may_keep_states(model: Any) -> bool:
    """Whether some layers of a model are not attention, judging by its class and configuration."""
    return is_sequential(model) or bool(other_layers(model.config.get_text_config(decoder=True)))


def other_layers(config: Any) -> set[str]:
    """The layer types of a configuration that are not attention."""
    return set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS


def is_offloaded(module: Any) -> bool:
    """Whether accelerate moves the weights of a module to their device for every call."""
    return "_hf_hook" in module.__dict__


def processes_of(model: Any) -> int:
    """Number of processes that share a model by tensor parallelism."""
    return getattr(model, "tp_size", None) or 1


def embedding_of(model: PreTrainedModel) -> Any:
    """The token embedding of a model, or of its decoder; None for a transducer, which has none."""
    sides: list[Any] = [model, model.get_decoder()]
    for side in sides:
        with suppress(NotImplementedError, AttributeError):
            return side.get_input_embeddings()
    return None


def input_device(model: PreTrainedModel) -> torch.device:
    """The device of a model's input tokens; `meta` for a model without weights."""
    embedding = embedding_of(model)
    device: torch.device = embedding.weight.device
    if device.type == "meta" and is_offloaded(embedding):
        # Offloaded weights are on meta between passes; accelerate's hook knows the device they run on.
        return torch.device(getattr(embedding._hf_hook, "execution_device", "cpu"))
    return device


def inputs_of(model: PreTrainedModel) -> frozenset[str]:
    """The names of the inputs of a model; if a subclass forwards `**kwargs`, the names of its base too."""
    names: set[str] = set()
    for kind in type(model).__mro__:
        if "forward" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["forward"]).parameters
        names |= parameters.keys()
        if "input_ids" in names or not any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        ):
            break
    return frozenset(names)


def cache_input(model: PreTrainedModel) -> str:
    """The name of a model's cache argument; purely recurrent models have another one."""
    names = inputs_of(model)
    return "cache_params" if "cache_params" in names and CACHE not in names else CACHE


def position_limit(model: PreTrainedModel) -> int | None:
    """Size of a model's position table; None if positions are computed and unlimited."""
    config: Any = model.config.get_text_config()
    if getattr(config, "rope_parameters", None) or getattr(config, "alibi", False):
        return None
    # Recurrent models have no table, and some sinusoidal models extend theirs.
    if is_sequential(model) or _lengthens_table(model):
        return None
    limit: int | None = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None else getattr(config, "max_seq_len", None)  # as MPT names its ALiBi table


def _lengthens_table(model: PreTrainedModel) -> bool:
    """Whether a model extends its position table on demand."""
    return any(hasattr(module, "make_weights") for module in model.modules())


def prefills_at_once(model: PreTrainedModel) -> bool:
    """Whether a prompt must be read in one pass, because position embeddings depend on its longest position."""
    return any(rope.get("rope_type") == "longrope" for rope in rope_parameters_of(model.config.get_text_config()))


def rope_parameters_of(config: Any) -> list[dict[str, Any]]:
    """The rotary embedding parameters of a model: one set for all layers, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def check_model(model: object) -> None:
    """Raise ConfigError if the argument is not a model; the message explains how to load one."""
    if isinstance(model, nn.Module) and hasattr(model, "can_generate"):
        return
    if isinstance(model, tuple) and len(model) == 2:
        raise ConfigError(f"model must be a PreTrainedModel, got a {type(model).__name__}; pass its two parts: *loaded")
    raise ConfigError(f"model must be a PreTrainedModel, got {described(model)}")


def reads_text(model: Any) -> bool:
    """Whether a model, or its encoder, reads tokens instead of audio or images."""
    return bool(model.main_input_name == "input_ids")


def decoder_of(model: Any) -> Any:
    """The part that writes: the model, or the decoder behind its encoder."""
    return model.get_decoder() if model.config.is_encoder_decoder else model


def encoder_of(model: Any) -> Any:
    """The encoder of a model, or None."""
    encoder = None if decoder_of(model) is model else model.get_encoder()
    return None if encoder is model else encoder


def validate_causal_lm(model: PreTrainedModel, purpose: str) -> None:
    """Raise UnsupportedModelError if the model has an encoder; `purpose` is a verb phrase for the message."""
    if decoder_of(model) is not model:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder model, which cannot {purpose}")


def validate_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if no request to the model can be served."""
    check_model(model)
    name, config = type(model).__name__, model.config
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{name} cannot generate; lookahead serves what AutoModelForCausalLM and AutoModelForSeq2SeqLM load"
        )
    is_decoder = decoder_of(model) is not model or getattr(config, "is_decoder", True) is not False
    # GPT-NeoX is not configured as a decoder either, but its attention layers are causal.
    if not is_decoder and not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise UnsupportedModelError(f"{name} is an encoder: config.is_decoder is False; lookahead serves causal LMs")
    if embedding_of(model) is None:
        raise UnsupportedModelError(f"{name} has no decoder that reads tokens; lookahead serves models that have one")
    if input_device(model).type == "meta":
        raise UnsupportedModelError(f"{name} is on the meta device: it has no weights to run with")


def context_limit(model: PreTrainedModel) -> int | None:
    """The maximum length of a prompt plus output by the model's configuration, including RoPE scaling."""
    config: Any = model.config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    for rope in rope_parameters_of(config):
        if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
            trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            limit = max(limit, int(trained * (rope.get("factor") or 1)))
    return limit


def vocabulary_size(model: PreTrainedModel, side: Any = None) -> int:
    """Rows of the embedding table of a model, or of its encoder or decoder `side`, padding included."""
    text_config: Any = model.config.get_text_config()
    own = side.get_input_embeddings() if isinstance(side, PreTrainedModel) else None
    size: int = getattr(own or embedding_of(model), "num_embeddings", text_config.vocab_size)
    return size


def decoder_vocabulary(model: PreTrainedModel) -> int:
    """Number of token ids that the model, or its decoder, has embeddings for."""
    decoder = decoder_of(model)
    return vocabulary_size(model, None if decoder is model else decoder)


def described(value: object) -> str:
    """Describe a wrong argument in an error message; for a name or path, add how to load it."""
    if not isinstance(value, str | PathLike):
        return repr(value) if value is None else f"a {type(value).__name__}"
    name = fspath(value)
    return f"{type(value).__name__} {name!r}; load it: model, tokenizer = lookahead.load({name!r})"


def modules_of_text(model: nn.Module) -> list[nn.Module]:
    """The modules that a pass over text may call.

    Modules of the base model outside of the decoder read images or audio.
    """
    if not isinstance(model, PreTrainedModel) or decoder_of(model) is not model:
        return list(model.modules())
    text = {part for root in (model.get_decoder(), model.get_output_embeddings()) if root for part in root.modules()}
    if model.get_input_embeddings() not in text:  # some models call their head a decoder
        return list(model.modules())
    beside = {
        module for module in model.base_model.modules() if module not in text and text.isdisjoint(module.modules())
    }
    return [module for module in model.modules() if module not in beside]


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """Positions that each layer of `model.generate`'s cache keeps for a query; None for all."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]


def side_positions(model: PreTrainedModel, side: Literal["encoder", "decoder"]) -> int | None:
    """Size of the position table of one side; None if positions are computed."""
    limit: int | None = getattr(model.config, f"max_{side}_position_embeddings", None)  # LED names both
    limit = limit if limit is not None else position_limit(model)
    if limit is None and side == "decoder" and not _lengthens_table(model):
        limit = getattr(model.config, "max_target_positions", None)  # its name in audio models
    return limit


def empty_cache(model: PreTrainedModel) -> EncoderDecoderCache:
    """An empty cache as `model.generate` makes it."""
    config: Any = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def own_attention(module: Any, config: PretrainedConfig) -> Attention:
    """The attention function that a layer of the model calls on its own, for one row at a time."""
    name, space = config._attn_implementation, vars(sys.modules[type(module).__module__])
    if name not in ("sdpa", "eager"):
        raise UnsupportedModelError(f"the attention {name!r} has no form for single rows")
    registry = space.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    own: Attention = registry.get(name, space.get("eager_attention_forward"))
    return own


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments of `model.generate`, or None."""
    names = CACHE, "past_key_values", "cache_params"
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def is_callers(cache: Any) -> bool:
    """Whether a cache is known to come from the caller of `model.generate`."""
    return bool(getattr(cache, "_is_user_defined", False))


def tokens_in(cache: Any) -> int:
    """Tokens in a cache; 0 for None, and for a cache that does not count tokens."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:  # since transformers 5.24, from a cache without attention layers
        return 0
