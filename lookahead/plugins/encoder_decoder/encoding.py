"""Encoding of inputs, and encoder outputs for drafters and probes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from lookahead.drafting.tree import IntArray
from lookahead.model.calls import ResolvedCall
from lookahead.model.facts import (
    cache_in,
    decoder_vocabulary,
    empty_cache,
    encoder_of,
    input_device,
    reads_text,
    vocabulary_size,
)
from lookahead.model.model_state import state_of
from lookahead.plugins.encoder_decoder.encoded_rows import Encoded, rows_of, with_tensors


def encoded_by(call: ResolvedCall, *, is_returned: bool) -> Encoded:
    """The encoded inputs of a call, with the cache of `generate` if it can be cropped.

    With `is_returned` the caller gets the cache.
    """
    model, options, inputs = call.model, call.model_kwargs, call.inputs_tensor
    past, mask = cache_in(options), options.get("attention_mask")
    if not isinstance(past, EncoderDecoderCache) or not isinstance(past.self_attention_cache, DynamicCache):
        past = empty_cache(model)
    outputs = options["encoder_outputs"]
    tokens: list[IntArray] = [np.zeros(0, np.int32)] * len(outputs[0])
    if mask is not None and len(mask) != len(tokens):
        mask = None  # Whisper's mask, which its decoder never sees, includes audios that ended
    is_shared = reads_text(model) and vocabulary_size(model, encoder_of(model)) == decoder_vocabulary(model)
    if inputs is not None and inputs.ndim == 2 and is_shared:
        inputs = inputs.repeat_interleave(len(tokens) // len(inputs), 0)  # several sampled outputs of each
        # If encoder outputs are given without inputs, `generate` fills the inputs with -100.
        seen = (inputs >= 0) & (torch.ones_like(inputs) if mask is None else mask).bool()
        tokens = [ids[kept].cpu().numpy().astype(np.int32) for ids, kept in zip(inputs, seen, strict=True)]
    heard = None
    if inputs is not None and not reads_text(model):
        heard = inputs.repeat_interleave(len(tokens) // len(inputs), 0)
    return Encoded(outputs, mask, past, is_returned, tokens, heard)


def encode(model: PreTrainedModel, inputs: Sequence[IntArray]) -> Encoded:
    """Encode inputs, int32 `[tokens]` each."""
    seq2seq: Any = model
    ids, mask = np.zeros((2, len(inputs), max(map(len, inputs))), np.int64)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    read, seen = (torch.from_numpy(each).to(input_device(model)) for each in (ids, mask))
    with torch.inference_mode():
        outputs = seq2seq.get_encoder()(input_ids=read, attention_mask=seen, return_dict=True)
    return Encoded(outputs, seen, empty_cache(model))


def encode_heard(model: PreTrainedModel, encoded: Encoded, rows: Sequence[int], *, is_shared: bool) -> Encoded | None:
    """Encode the audio or images of rows that another model's encoder has read; None if they are not known.

    If both encoders are equal (`are_alike`), their outputs are shared.
    """
    outputs, mask = rows_of(encoded.outputs, encoded.mask, torch.tensor(rows, dtype=torch.int64))
    if not is_shared and encoded.heard is None:
        return None
    if not is_shared and encoded.heard is not None:
        encoder: Any = encoder_of(model)
        is_float, device = encoded.heard.is_floating_point(), input_device(model)
        read = encoded.heard[rows].to(device, model.dtype if is_float else None)
        takes_mask = mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters
        mask = None if mask is None else mask.to(device)
        with torch.inference_mode():
            outputs = encoder(read, **({"attention_mask": mask} if takes_mask else {}), return_dict=True)
    return Encoded(outputs, mask, empty_cache(model))


def are_alike(encoder: nn.Module | None, other: nn.Module | None) -> bool:
    """Whether two encoders have the same weights, such as those of a model and of one distilled from it."""
    if encoder is None or other is None or type(encoder) is not type(other):
        return False
    own, others = encoder.state_dict(), other.state_dict()
    kinds = [{name: (each.dtype, each.device) for name, each in weights.items()} for weights in (own, others)]
    return kinds[0] == kinds[1] and all(torch.equal(each, others[name]) for name, each in own.items())


def note_outputs(model: PreTrainedModel, outputs: Any) -> None:
    """Remember the form of a model's encoder outputs for probes, unless it is the one they guess."""
    kind = type(outputs) if isinstance(outputs, ModelOutput) else BaseModelOutput
    sizes = {name: tuple(each.shape[1:]) for name, each in with_tensors(outputs, lambda each: each).items()}
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
        each = torch.randn(1, *size, generator=source, device="cpu")
        drawn[name] = each.to(input_device(model), model.dtype).repeat(rows, *(1 for _ in size))
    return Encoded(kind(**drawn), None, empty_cache(model))


@dataclass
class EncoderOutputs(BaseModelOutput):
    """Encoder outputs, to which some audio encoders add a mask."""

    attention_mask: Tensor | None = None  # int64 `[rows, tokens]`
