"""Loading of checkpoints with a check of every tensor: transformers fills missing tensors with random numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lookahead.errors import UnsupportedModelError, count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OTHER_SHAPES = "has other shapes than the configuration says, in"
_MAX_NAMED_TENSORS = 8  # tensors named in an error
# Causal masks, which old releases of transformers saved with attention weights.
_MASK = re.compile(r"\battn(\.attention)?\.(bias|masked_bias|causal_mask)$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def auto_class(config: Any) -> Any:
    """The transformers class that loads the language model of a configuration."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    if reads_sound(config):
        return AutoModelForSpeechSeq2Seq
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or not reads_media(config)
    return AutoModelForCausalLM if is_text else AutoModelForMultimodalLM


def reads_sound(config: Any) -> bool:
    """Whether the encoder of a configuration reads speech, as Whisper's does."""
    from transformers import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

    return type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


def reads_media(config: Any) -> bool:
    """Whether a configuration is of a model that reads images or sound too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    return type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING


@contextmanager
def no_bars() -> Iterator[None]:
    """Disable the progress bars of transformers while a model is loaded."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_weights(config: Any, location: Any, model_class: Any = None, **options: Any) -> PreTrainedModel:
    """Load a model by `from_pretrained` with `options`; by `auto_class` if no class is given.

    The checkpoint must have exactly the tensors of the model, with their shapes. Tensors that transformers derives or
    leaves out by design do not count: tied embeddings, buffers, rotary frequencies, layers for multi-token prediction,
    and the extra tensors of a quantized checkpoint.

    Raises:
        UnsupportedModelError: A tensor is missing, unexpected or of another shape; the message names it.
    """
    # Without `ignore_mismatched_sizes` transformers raises an error that names no tensor.
    options |= {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if options.get("local_files_only"):  # transformers asks the Hub for an adapter nonetheless
        options["adapter_kwargs"] = {"local_files_only": True}
    is_quantized = getattr(config, "quantization_config", None) is not None
    try:
        model, info = (model_class or auto_class(config)).from_pretrained(location, **options)
    except RuntimeError as error:
        if "CONVERSION" not in str(error):  # a heading in transformers' log, which has the names
            raise
        problem = "tensors that become one in the model, as those of experts, are missing or of another shape"
        raise UnsupportedModelError(f"the checkpoint does not fit its configuration: {problem}") from error
    unexpected = {*info["unexpected_keys"]} - {*_unused_by_design(model, info["unexpected_keys"], is_quantized)}
    mismatched = [
        f"{name} is {tuple(shape)} instead of {tuple(expected)}" for name, shape, expected in info["mismatched_keys"]
    ]
    faults = [
        *fault("lacks", info["missing_keys"]),
        *fault(OTHER_SHAPES, mismatched),
        *fault("has, beyond the model,", unexpected),
        *(str(message) for message in info["error_msgs"]),
    ]
    check_fit(model, faults)
    loaded: PreTrainedModel = model
    return loaded


def check_fit(model: Any, faults: Sequence[str]) -> None:
    """Raise UnsupportedModelError if a checkpoint has faults, as formatted by `fault`."""
    if faults:
        raise UnsupportedModelError(f"the checkpoint does not fit {type(model).__name__}: it {'; it '.join(faults)}")


def fault(what: str, names: Any) -> Iterator[str]:
    """A fault of the named tensors; nothing if there are none."""
    if shown := sorted(names):
        more = f" and {len(shown) - _MAX_NAMED_TENSORS:,} more" if len(shown) > _MAX_NAMED_TENSORS else ""
        yield f"{what} {count(len(shown), 'tensor')}: {', '.join(shown[:_MAX_NAMED_TENSORS])}{more}"


def _unused_by_design(model: PreTrainedModel, names: Any, is_quantized: bool) -> Iterator[str]:
    """The tensors of a checkpoint that its transformers model does not need."""
    config = model.config.get_text_config()
    buffers, modules = dict(model.named_buffers()), dict(model.named_modules())
    layers = getattr(config, "num_hidden_layers", None) or 0
    predicting = getattr(config, "num_nextn_predict_layers", None) or getattr(config, "num_mtp_layers", None) or 0
    for name in names:
        layer, (module, _, _) = _LAYER.search(name), name.rpartition(".")
        is_predicting = layer is not None and layers <= int(layer.group(1)) < layers + predicting
        is_scale = is_quantized and module in modules
        if name in buffers or _MASK.search(name) or is_predicting or is_scale:
            yield name
