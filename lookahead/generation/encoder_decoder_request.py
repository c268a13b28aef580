"""A call of `model.generate` on an encoder-decoder model: what is refused, what it reads, and what serves it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from lookahead.config import LookaheadConfig
from lookahead.drafting.controller import Pacing
from lookahead.drafting.lookahead_branch import Branch
from lookahead.drafting.proposal import IntArray, Proposer
from lookahead.engine.engine import Engine
from lookahead.engine.fallback import PlainLoop
from lookahead.engine.row import Row
from lookahead.errors import PromptError, UnsupportedModelError
from lookahead.generation.request import (
    call_of,
    prompt_lengths,
    refuse_unsupported,
    stopping_rule,
    warns_of_foreigner,
)
from lookahead.models.encoder_decoder import DecoderTarget, Encoded, decoder_positions, empty_cache
from lookahead.models.encoder_decoder_support import decoder_support
from lookahead.models.model_state import state_of
from lookahead.models.tensor_parallel import ensemble_of, refuse_in_ensemble
from lookahead.models.validate import vocabulary_size
from lookahead.pools.open_pool import open_pool
from lookahead.proposers import ProposerState, make_proposers
from lookahead.proposers.encoder_input import Informed, informed
from lookahead.verification.sampling import TokenChooser, warp_of

_SERVED = frozenset({"encoder_outputs", "attention_mask", "decoder_attention_mask", "past_key_values", "use_cache"})
# The encoder has read them before a custom method is called.
_READ = frozenset({"global_attention_mask", "inputs_embeds", "logits_to_keep"})


def prepare_encoder_decoder(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None,
    lookahead_tokenizer: PreTrainedTokenizerBase | None,
    inputs_tensor: Tensor | None,
    model_kwargs: dict[str, Any],
) -> Engine | PlainLoop:
    """Check a call on an encoder-decoder model and build what serves it: one row speculatively, several plainly.

    The arguments are those of `lookahead.decode`. `input_ids` is the decoder's prompt, `inputs_tensor` what the encoder
    has read, both int64 `[batch, tokens]`, and `model_kwargs` holds the encoder's outputs.
    """
    refuse_unsupported(model, generation_config, model_kwargs, cache=EncoderDecoderCache, served=_SERVED | _READ)
    _refuse_past(model_kwargs.get("past_key_values"), generation_config)
    config = lookahead_config if lookahead_config is not None else LookaheadConfig()
    vocabulary = _vocabulary(model, model.get_decoder())
    pool = open_pool(os.fspath(config.pool), vocabulary=vocabulary) if config.pool is not None else None
    lengths = prompt_lengths(input_ids, model_kwargs.get("decoder_attention_mask"), vocabulary)
    rows, longest = input_ids.shape
    _refuse_long_prompt(longest, decoder_positions(model))
    stopping = stopping_rule(stopping_criteria, generation_config)
    seq2seq: Any = model
    sample = partial(seq2seq._sample, input_ids, logits_processor, generation_config=generation_config, **model_kwargs)
    plain = PlainLoop(sample, input_ids, lengths, stopping_criteria)
    if stopping.max_length <= longest + 1:
        return plain  # a single token: there is nothing to draft
    complaint = _complaint(model, rows, lengths.min() < longest, stopping.max_length, config)
    if complaint and lookahead_config is not None and config.proposers:
        raise UnsupportedModelError(f"{complaint}; leave out the configuration to decode it plainly")
    if complaint:
        warnings.warn(f"{complaint}; it is decoded plainly", stacklevel=3)
        return plain
    if warns_of_foreigner(logits_processor, stopping_criteria, generation_config, rows, config.acceptance):
        return plain
    read = _read(model, inputs_tensor, model_kwargs.get("attention_mask"))
    learned = state_of(model).learned
    warp = warp_of(logits_processor) if generation_config.do_sample else None
    call = call_of(model, lookahead_tokenizer, rows, stopping, config, is_chain=True, warp=warp)
    call = replace(call, vocab_size=vocabulary, max_length=call.max_length + len(read))
    branch = Branch((), {}, max_nodes=1, teaches=False)  # the lookahead branch is a tree
    with learned.lock:
        proposers = _proposers(
            make_proposers(config, learned.of(ProposerState, ProposerState), pool, call, branch), read, model
        )
        cost, switch = learned.costs[config.passes], learned.switches[config.passes]
    ensemble = ensemble_of(model)
    if ensemble is not None:
        refuse_in_ensemble(model, reads_hidden=False, by_rejection=call.by_rejection)
        proposers = proposers if ensemble.leads else []
    pacing = None
    if proposers and config.draft == "auto":
        pacing = Pacing(cost, switch, branch, runs_to_limit=stopping.is_only_length)
    chooser = _chooser(logits_processor, generation_config)
    row = Row.begin(0, input_ids[0].cpu().numpy(), chooser, stopping, device=input_ids.device)
    row.stats.prompt_tokens += len(read)
    target = DecoderTarget(model, _encoded(model, generation_config, model_kwargs))
    return Engine(
        target,
        proposers,
        pacing,
        config,
        [row],
        is_chain=True,
        by_rejection=call.by_rejection,
        by_typicality=config.acceptance == "typical" and call.warp is not None,
        ensemble=ensemble,
        learning=learned.lock,
    )


def _chooser(processors: LogitsProcessorList, config: GenerationConfig) -> TokenChooser:
    """How the row's tokens are chosen."""
    keep = bool(config.output_scores or config.output_logits)
    return TokenChooser(processors, do_sample=bool(config.do_sample), batch_size=1, keep=keep)


def _proposers(made: Sequence[Proposer], read: IntArray, model: PreTrainedModel) -> list[Informed]:
    """Proposers that have read what the encoder has."""
    if any(proposer.hidden_layers for proposer in made):
        raise UnsupportedModelError(f"{type(model).__name__} shows no hidden states to proposers: take others")
    return [informed(proposer, [read]) for proposer in made]


def _refuse_past(past: Any, config: GenerationConfig) -> None:
    """Say that a filled cache is not gone on from, and that none is given back that cannot be cut."""
    if not isinstance(past, EncoderDecoderCache):
        return
    if past.get_seq_length() > 0:
        raise UnsupportedModelError(
            f"past_key_values of an encoder-decoder model must be empty, got {past.get_seq_length()} tokens; "
            "leave out custom_generate to go on from them"
        )
    kind = type(past.self_attention_cache)
    if _is_returned(past, config) and not issubclass(kind, DynamicCache):
        raise UnsupportedModelError(f"a {kind.__name__} is not given back; leave out custom_generate for it")


def _is_returned(past: Any, config: GenerationConfig) -> bool:
    """Whether the caller sees the cache."""
    return bool(config.return_dict_in_generate or getattr(past, "_is_user_defined", False))


def _refuse_long_prompt(tokens: int, positions: int | None) -> None:
    """Say that a decoder's prompt outgrows its table of positions."""
    if positions is not None and tokens > positions:
        raise PromptError(f"the decoder's prompt has {tokens} tokens and its positions end at {positions}; shorten it")


def _complaint(model: PreTrainedModel, rows: int, is_padded: bool, max_length: int, config: LookaheadConfig) -> str:
    """Why a call cannot be served speculatively, or an empty string."""
    name = type(model).__name__
    support = decoder_support(model, max_length=max_length)
    if support.shape == "none":
        return f"{name} cannot be decoded speculatively: {support.reason}"
    if rows > 1:
        return f"{name} cannot be decoded speculatively for {rows} inputs at once: {support.reason}"
    if is_padded:
        return f"{name} cannot be decoded speculatively behind a padded decoder_attention_mask"
    if "jacobi" in config.proposers and not config.decides_branch:
        return f"{name} cannot verify the lookahead branch: {support.reason}"
    if config.acceptance == "rejection" and len(config.proposers) > 1:
        return f"{name} cannot verify what several proposers draw: {support.reason}"
    return ""


def _vocabulary(model: PreTrainedModel, side: Any) -> int:
    """Token ids that the encoder or the decoder of a model has embeddings for."""
    own: Any = side.get_input_embeddings() if isinstance(side, PreTrainedModel) else None
    return int(own.num_embeddings) if own is not None else vocabulary_size(model)


def _read(model: PreTrainedModel, inputs: Tensor | None, mask: Tensor | None) -> IntArray:
    """Tokens of the only input, its padding left out; none where the decoder's vocabulary is another."""
    known = _vocabulary(model, model.get_decoder())
    if inputs is None or inputs.ndim != 2 or _vocabulary(model, model.get_encoder()) != known:
        return np.zeros(0, np.int32)
    ids = inputs[0] if mask is None else inputs[0][mask[0].bool()]
    return ids.cpu().numpy().astype(np.int32)


def _encoded(model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Encoded:
    """What the decoder attends to, with the cache that `generate` made, where it can be cut."""
    past = model_kwargs.get("past_key_values")
    is_returned = _is_returned(past, config)
    if not isinstance(past, EncoderDecoderCache) or not isinstance(past.self_attention_cache, DynamicCache):
        past = empty_cache(model)
    return Encoded(model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask"), past, is_returned)
