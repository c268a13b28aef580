"""Facts about a model of transformers: its inputs, sizes, positions, windows, and what it attends by."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from os import PathLike, fspath
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PretrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.errors import ConfigError, UnsupportedModelError
from lookahead.hf.call_caches import CACHE

Attention = Callable[..., tuple[Tensor, Any]]
_INDEXED = "indexed_attention"  # whose queries see the keys that an indexer picks, by a mask that the model makes
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", _INDEXED})
SILU = SiLUActivation, nn.SiLU
"""The classes of the activation `x * sigmoid(x)`."""


def attention_name(config: Any) -> str | None:
    """The name of the attention function that layers with a configuration call, such as "sdpa"."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def is_sdpa(attention: Attention) -> bool:
    """Whether an attention function is transformers' own for SDPA."""
    return attention is sdpa_attention_forward


def calls_registered_attention(model: Any) -> bool:
    """Whether layers of a model, or of its decoder, call the attention function that is configured, with all keys."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    own = not isinstance(decoder, PreTrainedModel) or decoder._can_set_attn_implementation()
    return bool(own and model._can_set_attn_implementation()) and not picks_keys(model)


def picks_keys(model: Any) -> bool:
    """Whether an indexer of some layer picks the keys that a query sees, as in DeepSeek sparse attention."""
    return _INDEXED in (getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())


def uncompiled(model: Any) -> Any:
    """The model that `torch.compile` wraps, which forwards attributes to it but does not store them; else the model."""
    return getattr(model, "_orig_mod", model)


def is_sequential(model: Any) -> bool:
    """Whether a model keeps a state that cannot be cut back, as recurrent layers do."""
    return bool(getattr(model, "_is_stateful", False))


def may_keep_states(model: Any) -> bool:
    """Whether some layers of a model are other than attention, by its class and its configuration alone."""
    return is_sequential(model) or bool(other_layers(model.config.get_text_config(decoder=True)))


def other_layers(config: Any) -> set[str]:
    """The types of layers of a configuration that are other than attention."""
    return set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS


def is_offloaded(module: Any) -> bool:
    """Whether accelerate moves the weights of a module to their device for every call."""
    return "_hf_hook" in module.__dict__


def processes_of(model: Any) -> int:
    """Number of processes that hold a model together, by tensor parallelism."""
    return getattr(model, "tp_size", None) or 1


def embedding_of(model: PreTrainedModel) -> Any:
    """The table of a model's tokens, of some models that of their decoder; None for a transducer, which has none."""
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
        # Offloaded weights are on meta between passes. The hook of accelerate knows the device they run on.
        return torch.device(getattr(embedding._hf_hook, "execution_device", "cpu"))
    return device


def inputs_of(model: PreTrainedModel) -> frozenset[str]:
    """The names of the inputs of a model; of a subclass that hands all on by `**kwargs`, those of its base too."""
    names: set[str] = set()
    for kind in type(model).__mro__:
        if "forward" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["forward"]).parameters
        names |= parameters.keys()
        if "input_ids" in names or not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            break
    return frozenset(names)


def cache_input(model: PreTrainedModel) -> str:
    """The name by which a model takes its cache; models of states alone have one of their own."""
    names = inputs_of(model)
    return "cache_params" if "cache_params" in names and CACHE not in names else CACHE


def position_limit(model: PreTrainedModel) -> int | None:
    """Positions a model has a table for; None where positions are computed and unlimited."""
    config: Any = model.config.get_text_config()
    if getattr(config, "rope_parameters", None) or getattr(config, "alibi", False):
        return None
    # Recurrent models have no table, and sinusoidal ones of this kind lengthen it.
    if is_sequential(model) or _lengthens_table(model):
        return None
    limit: int | None = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None else getattr(config, "max_seq_len", None)  # as MPT names its ALiBi table


def _lengthens_table(model: PreTrainedModel) -> bool:
    """Whether a model makes a longer table of positions when it needs one."""
    return any(hasattr(module, "make_weights") for module in model.modules())


def prefills_at_once(model: PreTrainedModel) -> bool:
    """Whether a prompt must be read in one pass, because position embeddings depend on the longest position in it."""
    return any(rope.get("rope_type") == "longrope" for rope in rope_parameters_of(model.config.get_text_config()))


def rope_parameters_of(config: Any) -> list[dict[str, Any]]:
    """The rotary embeddings of a model: one for all layers, or one per type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [each for each in rope.values() if isinstance(each, dict)] or [rope]


def check_model(model: object) -> None:
    """Raise ConfigError if the argument is not a model; the message says how to load one."""
    if isinstance(model, nn.Module) and hasattr(model, "can_generate"):
        return
    if isinstance(model, tuple) and len(model) == 2:
        raise ConfigError(f"model must be a PreTrainedModel, got a {type(model).__name__}; pass its two parts: *loaded")
    raise ConfigError(f"model must be a PreTrainedModel, got {described(model)}")


def reads_text(model: Any) -> bool:
    """Whether what a model, or its encoder, reads is tokens, not sound or an image."""
    return bool(model.main_input_name == "input_ids")


def encoder_of(model: Any) -> Any:
    """The encoder of a model; None without one."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    return None if encoder is model else encoder


def validate_causal_lm(model: PreTrainedModel, purpose: str) -> None:
    """Raise UnsupportedModelError if the model has an encoder; `purpose` is a verb phrase for the message."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder model, which cannot {purpose}")


def validate_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if no request to the model can be served."""
    check_model(model)
    name, config = type(model).__name__, model.config
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{name} cannot generate; lookahead serves what AutoModelForCausalLM and AutoModelForSeq2SeqLM load"
        )
    is_decoder = config.is_encoder_decoder or getattr(config, "is_decoder", True) is not False
    # GPT-NeoX is no decoder either by its configuration, but its attention layers are causal.
    if not is_decoder and not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise UnsupportedModelError(f"{name} is an encoder: config.is_decoder is False; lookahead serves causal LMs")
    if embedding_of(model) is None:
        raise UnsupportedModelError(f"{name} has no decoder that reads tokens; lookahead serves models that have one")
    if input_device(model).type == "meta":
        raise UnsupportedModelError(f"{name} is on the meta device: it has no weights to run with")


def context_limit(model: PreTrainedModel) -> int | None:
    """Most positions of a prompt and its output together by the model's configuration, its RoPE scaling included."""
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
    return vocabulary_size(model, model.get_decoder() if model.config.is_encoder_decoder else None)


def described(value: object) -> str:
    """Describe a wrong argument in an error message; for a name or path, add how to load it."""
    if not isinstance(value, str | PathLike):
        return repr(value) if value is None else f"a {type(value).__name__}"
    name = fspath(value)
    return f"{type(value).__name__} {name!r}; load it: model, tokenizer = lookahead.load({name!r})"


def modules_of_text(model: nn.Module) -> list[nn.Module]:
    """The modules that a pass over text may call.

    What stands beside the decoder within the base model reads images or sound.
    """
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return list(model.modules())
    text = {part for each in (model.get_decoder(), model.get_output_embeddings()) if each for part in each.modules()}
    if model.get_input_embeddings() not in text:  # some name their head a decoder
        return list(model.modules())
    beside = {each for each in model.base_model.modules() if each not in text and text.isdisjoint(each.modules())}
    return [each for each in model.modules() if each not in beside]


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """Positions that each layer of the cache of `model.generate` keeps for a query; None for all."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]


def side_positions(model: PreTrainedModel, side: Literal["encoder", "decoder"]) -> int | None:
    """Positions one side has a table for; None where they are computed."""
    limit: int | None = getattr(model.config, f"max_{side}_position_embeddings", None)  # LED names both
    limit = limit if limit is not None else position_limit(model)
    if limit is None and side == "decoder" and not _lengthens_table(model):
        limit = getattr(model.config, "max_target_positions", None)  # as models that hear name it
    return limit


def empty_cache(model: PreTrainedModel) -> EncoderDecoderCache:
    """A cache as `model.generate` makes one."""
    config: Any = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def own_attention(module: Any, config: PretrainedConfig) -> Attention:
    """The attention function that a layer of the model calls by itself, for one row at a time."""
    name, space = config._attn_implementation, vars(sys.modules[type(module).__module__])
    if name not in ("sdpa", "eager"):
        raise UnsupportedModelError(f"the attention {name!r} has no form for single rows")
    registry = space.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    own: Attention = registry.get(name, space.get("eager_attention_forward"))
    return own
