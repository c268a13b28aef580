"""The kind of a decoder behind an encoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.generation import utils

from lookahead.backend.probes import PADDING, PROBES, agree, heeds_padding, own_logits
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.drafting.tree import IntArray
from lookahead.errors import UnsupportedModelError, is_out_of_memory, with_place
from lookahead.model.calls import CallCache, ModelKind, Probe, ResolvedCall
from lookahead.model.facts import (
    CACHE,
    calls_registered_attention,
    decoder_vocabulary,
    empty_cache,
    encoder_of,
    input_device,
    reads_text,
    side_positions,
    vocabulary_size,
)
from lookahead.model.model_state import state_of
from lookahead.plugins.encoder_decoder.decoder_inputs import EncoderInputs
from lookahead.plugins.encoder_decoder.encoded_rows import Encoded
from lookahead.plugins.encoder_decoder.encoding import encode, encode_heard, encode_probe, note_outputs
from lookahead.utils.seams import register


class DecoderKind(ModelKind):
    """See `ModelKind`: the encoder reads the prompt once, and the decoder writes after a prompt of its own."""

    has_encoder = True
    make_inputs = EncoderInputs
    output: type[Any] = utils.GenerateEncoderDecoderOutput
    served = frozenset(
        {
            *("encoder_outputs", "attention_mask", "decoder_attention_mask", CACHE, "use_cache"),
            *("global_attention_mask", "inputs_embeds", "logits_to_keep"),  # the encoder has read them already
        }
    )
    mask = "decoder_attention_mask"
    text = "text_target"  # the outputs of a translation model may have their own vocabulary
    nouns = "input", "encoder"

    def probe(self, model: PreTrainedModel, tokens: Sequence[int], rows: int) -> Probe:
        encoded = encode_probe(model, tokens, rows)
        inputs = {"encoder_outputs": encoded.outputs, "attention_mask": encoded.mask}
        return Probe(partial(self.make_inputs, encoded=encoded), empty_cache(model), inputs)

    def inputs_of_text(self, model: PreTrainedModel, ids: Tensor, tokens: Sequence[int]) -> dict[str, Any]:
        return {**self.probe(model, tokens, len(ids)).inputs, "decoder_input_ids": ids}

    @torch.inference_mode()
    def heeds_padding(self, model: Any) -> bool:
        """Prepared as `generate` does: some models derive positions from the mask, others count padding too."""
        vocabulary, device = decoder_vocabulary(model), input_device(model)
        text = [token * vocabulary // 9 for token in PROBES[0]]
        ids = torch.tensor([[0] * PADDING + text], device=device)
        mask = torch.tensor([[0] * PADDING + [1] * len(text)], device=device)
        try:
            inputs = {**self.probe(model, text, 1).inputs, "decoder_attention_mask": mask}
            inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, use_cache=False, **inputs)
            return agree(model, model(**inputs).logits[0, -1], own_logits(model, [text], text)[0, -1])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            state_of(model).note_problem(f"{type(model).__name__} reads no padding", with_place(error))
            return False

    def prompt_limit(self, model: PreTrainedModel) -> int | None:
        return side_positions(model, "encoder")

    def positions(self, model: PreTrainedModel) -> int | None:
        return side_positions(model, "decoder")

    def cache_of(self, call: ResolvedCall) -> CallCache:
        cache = super().cache_of(call)
        _check_cache(cache)
        if reads_text(call.model):
            return cache
        note_outputs(call.model, call.model_kwargs["encoder_outputs"])  # probes need to know their sizes
        grows = isinstance(getattr(cache.past, "self_attention_cache", cache.past), DynamicCache)
        if grows and call.generation_config.use_cache is not False:
            return cache
        return cache._replace(obstacle="its encoder reads no text, and the cache of its decoder does not grow")

    def encoded(self, call: ResolvedCall, cache: CallCache) -> Encoded:
        model, options, inputs = call.model, call.model_kwargs, call.inputs_tensor
        past, mask = cache.past, options.get("attention_mask")  # the cache, if it can be cropped
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
        return Encoded(outputs, mask, past, cache.is_returned, tokens, heard)

    def encode_for_drafts(
        self, model: PreTrainedModel, call: Any, rows: Sequence[int], *, is_shared: bool
    ) -> tuple[list[int], Any]:
        if not reads_text(model):
            encoded = encode_heard(model, call.encoded, rows, is_shared=is_shared) if rows else None
            return [] if encoded is None else list(rows), encoded
        # The encoder must know all tokens of an input, and have positions for it.
        vocabulary, limit = vocabulary_size(model, encoder_of(model)), self.prompt_limit(model) or math.inf
        read = [row for row in rows if 0 < len(call.inputs[row]) <= limit and call.inputs[row].max() < vocabulary]
        return read, encode(model, [call.inputs[row] for row in read]) if read else None

    def shares_encoder(self, model: PreTrainedModel, target: PreTrainedModel) -> bool:
        encoder, other = encoder_of(model), encoder_of(target)
        if reads_text(model) or encoder is None or other is None or type(encoder) is not type(other):
            return False
        own, others = encoder.state_dict(), other.state_dict()
        kinds = [{name: (weight.dtype, weight.device) for name, weight in weights.items()} for weights in (own, others)]
        return kinds[0] == kinds[1] and all(torch.equal(weight, others[name]) for name, weight in own.items())

    def trees_reason(self, model: PreTrainedModel, *, rows: int, is_padded: bool, is_rounded: bool) -> str:
        is_half = model.dtype in (torch.bfloat16, torch.float16) and input_device(model).type == "cpu"
        if is_padded and not heeds_padding(model):
            return "its decoder counts the padding of decoder_attention_mask"
        if rows > 1 and not calls_registered_attention(model):
            return "the rows of a batch must keep one length for its own attention code"
        if is_half and not is_rounded and (rows > 1 or is_padded or not keeps_solo_bits(model)):
            return "trees would change its bits in half precision on a CPU"
        return ""

    def modules_beside(self, model: PreTrainedModel) -> list[nn.Module]:
        encoder = encoder_of(model)
        return [] if encoder is None else [encoder]


def _check_cache(cache: CallCache) -> None:
    past = cache.past
    if cache.is_callers and not isinstance(past, EncoderDecoderCache):
        raise UnsupportedModelError(f"{CACHE} must be an EncoderDecoderCache, got a {type(past).__name__}")
    if not isinstance(past, EncoderDecoderCache):
        return
    if past.get_seq_length() > 0:
        got = f"{CACHE} of an encoder-decoder model must be empty, got {past.get_seq_length()} tokens"
        raise UnsupportedModelError(f"{got}; leave out custom_generate to continue from them")
    kind = type(past.self_attention_cache)
    if cache.is_returned and not issubclass(kind, DynamicCache):
        raise UnsupportedModelError(f"a {kind.__name__} is not returned; leave out custom_generate for it")


register("kind", "encoder-decoder", DecoderKind)
