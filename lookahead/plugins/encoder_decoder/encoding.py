"""Encoding of inputs, and encoder outputs for drafters and probes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from lookahead.drafting.tree import IntArray
from lookahead.model.facts import (
    empty_cache,
    encoder_of,
    input_device,
    reads_text,
)
from lookahead.model.model_state import state_of
from lookahead.plugins.encoder_decoder.encoded_rows import Encoded, rows_of, with_tensors


def encode(model: PreTrainedModel, inputs: Sequence[IntArray]) -> Encoded:
    """Encode inputs, int32 `[tokens]` each."""
    seq2seq: Any = model
    ids, mask = np.zeros((2, len(inputs), max(map(len, inputs))), np.int64)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    read, seen = (torch.from_numpy(array).to(input_device(model)) for array in (ids, mask))
    with torch.inference_mode():
        outputs = seq2seq.get_encoder()(input_ids=read, attention_mask=seen, return_dict=True)
    return Encoded(outputs, seen, empty_cache(model))


def encode_heard(model: PreTrainedModel, encoded: Encoded, rows: Sequence[int], *, is_shared: bool) -> Encoded | None:
    """Encode what another model's encoder has heard of rows, or share its outputs; None if it is not known."""
    outputs, mask = rows_of(encoded.outputs, encoded.mask, torch.tensor(rows, dtype=torch.int64))
    if not is_shared:
        if encoded.heard is None:
            return None
        encoder: Any = encoder_of(model)
        is_float, device = encoded.heard.is_floating_point(), input_device(model)
        read = encoded.heard[rows].to(device, model.dtype if is_float else None)
        takes_mask = mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters
        mask = None if mask is None else mask.to(device)
        with torch.inference_mode():
            outputs = encoder(read, **({"attention_mask": mask} if takes_mask else {}), return_dict=True)
    return Encoded(outputs, mask, empty_cache(model))


def note_outputs(model: PreTrainedModel, outputs: Any) -> None:
    """Remember the form of a model's encoder outputs for probes, unless it is the one they guess."""
    kind = type(outputs) if isinstance(outputs, ModelOutput) else BaseModelOutput
    sizes = {name: tuple(tensor.shape[1:]) for name, tensor in with_tensors(outputs, lambda tensor: tensor).items()}
    sizes.pop("attention_mask", None)
    states = sizes["last_hidden_state"]
    if len(sizes) > 1 or len(states) != 2 or states[1] != _guessed_width(model):
        state_of(model).encoding = kind, sizes


def _guessed_width(model: PreTrainedModel) -> int | None:
    """The width of encoder outputs according to the configuration."""
    config = getattr(encoder_of(model), "config", None)
    width: int | None = getattr(config, "output_hidden_size", None) or getattr(config, "hidden_size", None)
    return width


def encode_probe(model: PreTrainedModel, tokens: Sequence[int], rows: int) -> Encoded:
    """Encoder outputs for probing a decoder, equal in every row: those of `tokens` if the encoder reads text.

    For audio or images the outputs are random, one per token, in the form of the last real outputs; the encoder does
    not run, and no input is made up for it. Before the first call their width comes from the configuration.
    """
    if reads_text(model):
        return encode(model, [np.array(tokens, np.int32)] * rows)
    guess: tuple[Any, Any] = EncoderOutputs, {"last_hidden_state": (0, _guessed_width(model))}
    kind, sizes = state_of(model).encoding or guess
    source = torch.Generator().manual_seed(len(tokens))
    drawn = {}
    for name, size in sizes.items():
        size = (len(tokens), size[1]) if len(size) == 2 else size
        numbers = torch.randn(1, *size, generator=source, device="cpu")
        drawn[name] = numbers.to(input_device(model), model.dtype).repeat(rows, *(1 for _ in size))
    return Encoded(kind(**drawn), None, empty_cache(model))


@dataclass
class EncoderOutputs(BaseModelOutput):
    """Encoder outputs, to which some audio encoders add a mask."""

    attention_mask: Tensor | None = None  # int64 `[rows, tokens]`
