"""What encoders read, and what is given to decoders in its place."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.drafting.tree import IntArray
from lookahead.hf.encoded_rows import Encoded, EncoderOutputs, rows_of
from lookahead.hf.facts import empty_cache, encoder_of, input_device, reads_text


def encode(model: PreTrainedModel, inputs: Sequence[IntArray]) -> Encoded:
    """Let the encoder of a model read inputs, int32 `[tokens]` each."""
    seq2seq: Any = model
    ids, mask = np.zeros((2, len(inputs), max(map(len, inputs))), np.int64)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    read, seen = (torch.from_numpy(each).to(input_device(model)) for each in (ids, mask))
    with torch.inference_mode():
        outputs = seq2seq.get_encoder()(input_ids=read, attention_mask=seen, return_dict=True)
    return Encoded(outputs, seen, empty_cache(model))


def encode_heard(model: PreTrainedModel, encoded: Encoded, rows: Sequence[int], *, is_shared: bool) -> Encoded | None:
    """Let the encoder of a model read the sound or the images that another one has read; None where they are not known.

    Args:
        model: The model.
        encoded: What the other one has read, and gives.
        rows: Those of its rows to read.
        is_shared: Whether both encoders give the same (`are_alike`), so that none runs.
    """
    outputs, mask = rows_of(encoded.outputs, encoded.mask, torch.tensor(rows, dtype=torch.int64))
    if not is_shared and encoded.heard is None:
        return None
    if not is_shared and encoded.heard is not None:
        encoder: Any = encoder_of(model)
        is_float = encoded.heard.is_floating_point()
        read = encoded.heard[rows].to(input_device(model), model.dtype if is_float else None)
        takes_mask = mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters
        with torch.inference_mode():
            outputs = encoder(read, **({"attention_mask": mask} if takes_mask else {}), return_dict=True)
    return Encoded(outputs, mask, empty_cache(model))


def are_alike(encoder: nn.Module | None, other: nn.Module | None) -> bool:
    """Whether two encoders have the same weights, as those of a model and of one distilled from it."""
    if encoder is None or other is None or type(encoder) is not type(other):
        return False
    own, others = encoder.state_dict(), other.state_dict()
    kinds = [{name: (each.dtype, each.device) for name, each in weights.items()} for weights in (own, others)]
    return kinds[0] == kinds[1] and all(torch.equal(each, others[name]) for name, each in own.items())


def encode_probe(model: PreTrainedModel, tokens: Sequence[int], rows: int) -> Encoded:
    """What a decoder is probed with, the same for every row: tokens that the encoder reads.

    Of an encoder that reads no text the outputs are drawn at random: none runs, and no sound or image is made up for
    it, whose form is its own.
    """
    if reads_text(model):
        return encode(model, [np.array(tokens, np.int32)] * rows)
    config: Any = cast(Any, model).get_encoder().config
    width = getattr(config, "output_hidden_size", None) or config.hidden_size
    drawn = torch.randn(1, len(tokens), width, generator=torch.Generator().manual_seed(len(tokens)), device="cpu")
    hidden = drawn.to(input_device(model), model.dtype).repeat(rows, 1, 1)
    return Encoded(EncoderOutputs(hidden), None, empty_cache(model))
