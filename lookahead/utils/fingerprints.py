"""Fingerprints of tokenizers and weights. They are stored in files."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor, nn

_TEXT_TO_IDS = ("added_tokens", "model", "normalizer", "pre_tokenizer")  # the rest concerns special tokens and decoding
_ROWS = 64  # evenly spaced rows of the embedding
_VALUES = 4096  # evenly spaced values of a parameter

_known: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()


def tokenizer_fingerprint(tokenizer: Any) -> int:
    """64 bits, equal for tokenizers that give the same ids to the same text.

    Added tokens count. Special tokens around a text, truncation, padding and decoding do not. The fingerprint is
    computed once for each tokenizer, and again when its length changes.
    """
    size = len(tokenizer)
    entry = _known.get(tokenizer)
    if entry is None or entry[0] != size:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            described = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
        else:
            whole = json.loads(backend.to_str())
            described = {part: whole[part] for part in _TEXT_TO_IDS}
        text = json.dumps(described, sort_keys=True, ensure_ascii=True)
        entry = _known[tokenizer] = size, xxhash.xxh3_64_intdigest(text.encode("ascii"))
    return entry[1]


def body_of(model: Any) -> Any:
    """The model without its LM head."""
    body = model.base_model
    return body if body is not model else getattr(model, "model", model)


def model_fingerprint(model: Any) -> str:
    """16 hexadecimal digits, equal for every copy of a model in any dtype and on any device.

    They depend on the sizes of the model, some rows of its embedding, and the norms and biases of its body (the model
    without its head). Training changes these values, quantization does not. They are rounded to bfloat16 to be
    independent of the loaded precision.
    """
    config: Any = model.config.get_text_config()
    digest = xxhash.xxh3_64(f"{config.model_type} {config.num_hidden_layers} {config.hidden_size}".encode())
    embedding = model.get_input_embeddings()
    weight: Tensor = embedding.weight
    if weight.is_floating_point():
        rows = _spaced(weight, _ROWS, torch.float32)
    else:  # quantized blocks of a file
        rows = embedding(_spaced(torch.arange(embedding.num_embeddings, device=weight.device), _ROWS, torch.float32))
    for values in (rows, *(part for part in body_of(model).parameters() if part.ndim == 1)):
        digest.update(values.detach().to("cpu", torch.float32).bfloat16().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def weights_fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits that depend on the sizes and some values of every parameter.

    Every parameter counts since training may change only a few matrices, for example when a LoRA is merged. For
    offloaded and quantized parameters only the sizes count.
    """
    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel():
            values = _spaced(parameter.detach().flatten(), _VALUES, torch.float64)
            digest.update(values.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _spaced(values: Tensor, most: int, dtype: torch.dtype) -> Tensor:
    """At most `most` evenly spaced entries. The dtype of the positions affects rounding, and so the fingerprint."""
    places = torch.linspace(0, len(values) - 1, min(most, len(values)), dtype=dtype, device="cpu").long()
    return values[places.to(values.device)]
