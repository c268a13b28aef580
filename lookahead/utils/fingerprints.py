"""Fingerprints of tokenizers and of weights: equal where the thing is the same, and written into files."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor, nn

_TEXT_TO_IDS = ("added_tokens", "model", "normalizer", "pre_tokenizer")  # the rest is about special tokens and text
_ROWS = 64  # of the embedding, evenly spaced
_FIGURES = 4096  # of a parameter, evenly spaced

_known: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()


def tokenizer_fingerprint(tokenizer: Any) -> int:
    """64 bits that are the same for tokenizers that give the same ids to the same text.

    What a tokenizer puts around a text, how it cuts and pads, and how it makes text of ids again do not count.
    Added tokens do. It is computed once for each tokenizer, and again when tokens were added.
    """
    size = len(tokenizer)
    known = _known.get(tokenizer)
    if known is None or known[0] != size:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            described = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
        else:
            whole = json.loads(backend.to_str())
            described = {part: whole[part] for part in _TEXT_TO_IDS}
        text = json.dumps(described, sort_keys=True, ensure_ascii=True)
        known = _known[tokenizer] = size, xxhash.xxh3_64_intdigest(text.encode("ascii"))
    return known[1]


def model_fingerprint(model: Any, body: nn.Module) -> str:
    """16 hexadecimal digits that are the same for every copy of a model, whatever its dtype or device.

    They are of its sizes, of some rows of its embedding, and of its norms and biases, which training changes and
    quantization leaves alone; rounded to bfloat16, so that a copy loaded in another precision has the same ones.

    Args:
        model: The model.
        body: The same without its LM head.
    """
    config: Any = model.config.get_text_config()
    digest = xxhash.xxh3_64(f"{config.model_type} {config.num_hidden_layers} {config.hidden_size}".encode())
    embedding: Tensor = model.get_input_embeddings().weight
    rows = torch.linspace(0, len(embedding) - 1, min(_ROWS, len(embedding))).long()
    for values in (embedding[rows.to(embedding.device)], *(each for each in body.parameters() if each.ndim == 1)):
        digest.update(values.detach().to("cpu", torch.float32).bfloat16().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def weights_fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits that change with any weight: of the sizes and some values of every parameter.

    Training may change some matrices and nothing else, as it does where a LoRA is merged. Parameters that are quantized
    in a way of their own, or offloaded, count with their sizes.
    """
    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel():
            values = parameter.detach().flatten()
            places = torch.linspace(0, len(values) - 1, min(len(values), _FIGURES), dtype=torch.float64).long()
            digest.update(values[places.to(values.device)].cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
