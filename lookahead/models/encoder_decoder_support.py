"""Whether a decoder verifies chains, found out from the model; its encoder is never drafted for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.drafting.tree import MAX_NODES_LIMIT, TokenTree
from lookahead.models.encoder_decoder import DecoderTarget, Encoded, empty_cache
from lookahead.models.model_state import state_of
from lookahead.models.support import ATTENTION_LAYERS, PROBES, Support, agree, own_ways, rope_parameters_of
from lookahead.models.target import input_device

_CHAINS = Support("chains", "the decoder of an encoder-decoder model verifies chains, a row at a time")
_CHAIN = (0, 0, 1, 2, 3)


def decoder_support(model: PreTrainedModel, *, max_length: int) -> Support:
    """Whether chains can be drafted for the decoder of a model; it is probed when it is met for the first time.

    Args:
        model: An encoder-decoder model.
        max_length: Tokens a row of the decoder may reach.
    """
    config: Any = model.config.get_text_config(decoder=True)
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if getattr(model, "_is_stateful", False) or others:
        return Support("none", "the state of its decoder is sequential, so a rejected draft could not be taken back")
    window = getattr(config, "sliding_window", None)
    if window is not None and max_length + MAX_NODES_LIMIT >= window:
        return Support("none", f"the cache of its decoder drops tokens beyond {window}")
    if getattr(config, "expert_capacity", None) is not None:
        return Support("none", "its experts take so many tokens of a pass and no more")
    if any(rope.get("rope_type") in ("dynamic", "longrope") for rope in rope_parameters_of(config)):
        return Support("none", "the position embeddings of its decoder change with its length")
    reason = own_ways(model)
    if reason:
        return Support("none", reason)
    return state_of(model).probed("decoder support", model, partial(_probe, model))


def _probe(model: PreTrainedModel) -> Support:
    """Try chains."""
    complaint = _complaint(model)
    return Support("none", complaint) if complaint else _CHAINS


def _complaint(model: PreTrainedModel) -> str:
    """What is wrong with the logits of a drafted pass, or an empty string."""
    complaint = ""
    for tokens in PROBES:
        try:
            if _scores_like_the_model(model, tokens):
                return ""
            complaint = "its decoder does not read several tokens as it reads one after the other"
        except Exception as error:
            # A decoder that reads one token at a time fails in a way of its own.
            return f"its decoder does not go on from a cut cache ({type(error).__name__})"
    return complaint


@torch.inference_mode()
def _scores_like_the_model(model: PreTrainedModel, tokens: Sequence[int]) -> bool:
    """Whether two drafted passes, with a commit between them, give the logits of the model's own passes."""
    seq2seq: Any = model
    read = torch.tensor([tokens], device=input_device(model))
    outputs = seq2seq.get_encoder()(input_ids=read, return_dict=True)
    chain, path = [tokens[2], *tokens[2:]], np.array([0, 1], np.int32)
    target = DecoderTarget(model, Encoded(outputs, None, empty_cache(model)))
    with target.serving():
        target.prefill([np.array(tokens[:2], np.int32)])
        target.commit(0, path[:1])
        first = target.score([TokenTree.from_parents(chain, _CHAIN)])[0]
        target.commit(0, path)
        second = target.score([TokenTree.root(tokens[0])])[0]
    before = list(tokens[:2])
    checks: list[tuple[list[int], Tensor]] = [
        (before + chain, first[-1]),
        (before + chain[:-1], first[-2]),
        ([*before, *chain[:2], tokens[0]], second[0]),
    ]
    return all(
        agree(model, logits, seq2seq(input_ids=read, decoder_input_ids=torch.tensor([ids]).to(read)).logits[0, -1])
        for ids, logits in checks
    )
