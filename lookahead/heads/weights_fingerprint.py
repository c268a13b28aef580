"""What tells a model's weights from others, as 64 bits."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.heads.base_model import body_of

_ROWS = 64  # of the embedding, evenly spaced


def fingerprint_of(model: PreTrainedModel) -> str:
    """16 hexadecimal digits that are the same for every copy of a model, whatever its dtype or device.

    They are of its sizes, of some rows of its embedding, and of its norms and biases, which training changes and
    quantisation leaves alone; rounded to bfloat16, so that a copy loaded in another precision has the same ones.
    """
    config: Any = model.config.get_text_config()
    digest = xxhash.xxh3_64(f"{config.model_type} {config.num_hidden_layers} {config.hidden_size}".encode())
    embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    rows = torch.linspace(0, len(embedding) - 1, min(_ROWS, len(embedding))).long()
    digest.update(_bits(embedding.detach()[rows.to(embedding.device)]))
    for parameter in body_of(model).parameters():
        if parameter.ndim == 1:
            digest.update(_bits(parameter.detach()))
    return digest.hexdigest()


def _bits(values: Tensor) -> bytes:
    """Values rounded to bfloat16, as bytes."""
    return values.to("cpu", torch.float32).bfloat16().view(torch.int16).numpy().tobytes()
