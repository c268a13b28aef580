"""Decoding inside `model.generate`: checks a call of transformers and builds the engine for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import utils
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lookahead.config import LookaheadConfig
from lookahead.drafting.branch import LookaheadBranch
from lookahead.drafting.controller import Controller
from lookahead.drafting.proposal import Call, IntArray, Proposer
from lookahead.drafting.sizes import MAX_NODES_LIMIT
from lookahead.engine.engine import Engine
from lookahead.engine.fallback import PlainLoop
from lookahead.engine.row import Row
from lookahead.errors import UnsupportedModelError
from lookahead.generation import validation
from lookahead.generation.beams import BEAM_MODES, BeamLoop
from lookahead.generation.hf_outputs import collect, copy_prefix_from, return_cache, scores_by_step
from lookahead.models import self_check, support
from lookahead.models.cache import CACHE, cache_in, tokens_in
from lookahead.models.calibration import node_cost
from lookahead.models.encoded_rows import Encoded
from lookahead.models.encoder_decoder import ChainTarget, DecoderTarget, empty_cache
from lookahead.models.model_code import changed_cache, edits_inputs, version_of
from lookahead.models.model_state import outside_passes, state_of, undisturbed
from lookahead.models.target import Shape, Target, input_device
from lookahead.models.tensor_parallel import tensor_parallel_group, validate_tensor_parallel
from lookahead.pools.pool_files import pool_of
from lookahead.proposers import ProposerState, make_proposers
from lookahead.verification.sampling import TokenChooser, warp_of
from lookahead.verification.stopping import StoppingRule, stateful_reason, stopping_rule


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    lookahead_streamer: BaseStreamer | None = None,
    lookahead_tokenizer: PreTrainedTokenizerBase | None = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Tensor | utils.GenerateOutput:
    """Decode speculatively inside `model.generate`, without changing a token.

    Example:
        `model.generate(**inputs, max_new_tokens=256, custom_generate=lookahead.decode)`; options go along as
        `lookahead_config=LookaheadConfig(...)`.

    Args:
        model: The model `generate` was called on.
        input_ids: int64 `[batch, tokens]`, left-padded.
        logits_processor: Prepared by `generate`.
        stopping_criteria: Prepared by `generate`.
        generation_config: Resolved by `generate`.
        lookahead_config: How to draft; the defaults when None.
        lookahead_streamer: Gets the new tokens of a single prompt as they are verified; transformers passes its
            own `streamer` argument to no custom method.
        lookahead_tokenizer: The model's tokenizer, for proposers that compare it with their own; `generate` passes its
            own `tokenizer` to no custom method either.
        inputs_tensor: What the encoder of an encoder-decoder model has read; passed by `generate`.
        **model_kwargs: What `generate` would pass to the model.

    Returns:
        int64 `[batch, tokens + new]`, or with `return_dict_in_generate` the output class that transformers gives,
        with it as `sequences`, the scores and logits asked for, and the cache. A filled cache is continued from, and
        grows in place. Behind the end of a row of a batch, scores and logits are 0 for the padding token and -inf for
        all others: `compute_transition_scores` gives 0 there. transformers decodes on there, from padding.

    Raises:
        PoolError: The pool or the memory file of the configuration cannot be opened, or is of another model.
        UnsupportedModelError: The generation mode or an input cannot be served; the message names it.
    """
    validation.check_config("lookahead_config", lookahead_config)
    arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    engine = prepare(*arguments, lookahead_config, lookahead_tokenizer, inputs_tensor, **model_kwargs)
    if lookahead_streamer is not None and not isinstance(engine, BeamLoop):
        lookahead_streamer.put(input_ids.cpu())
    if isinstance(engine, PlainLoop):
        return cast(Tensor | utils.GenerateOutput, engine.sample(streamer=lookahead_streamer))
    pad, past = generation_config._pad_token_tensor, cache_in(model_kwargs)
    tokens, _ = collect(engine, lookahead_streamer, pad)
    new = pad_sequence(
        [torch.tensor(row, device="cpu") for row in tokens], batch_first=True, padding_value=int(pad or 0)
    )
    sequences = torch.cat([input_ids, new.to(input_ids.device)], -1)
    return_cache(engine, past)
    if not generation_config.return_dict_in_generate:
        return sequences
    is_kept = isinstance(past, DynamicCache | StaticCache | EncoderDecoderCache)
    outputs: dict[str, Any] = {"sequences": sequences, CACHE: past if is_kept else None}
    chooser = engine.batch[0].chooser
    for name, rows in {"scores": chooser.scores, "logits": chooser.logits}.items():
        if getattr(generation_config, f"output_{name}"):
            outputs[name] = scores_by_step(rows, int(pad or 0))
    kind = utils.GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else utils.GenerateDecoderOnlyOutput
    return kind(**outputs)


def prepare(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    lookahead_tokenizer: PreTrainedTokenizerBase | None = None,
    inputs_tensor: Tensor | None = None,
    lookahead_context: int | None = None,
    **model_kwargs: Any,
) -> Engine | PlainLoop:
    """Check a call of `model.generate` and build what serves it; the arguments are those of `decode`.

    Of an encoder-decoder model `input_ids` is the decoder's prompt, and `model_kwargs` holds the encoder's outputs.
    With a context of so many tokens a row ends where the model has read them all.
    """
    if generation_config.get_generation_mode() in BEAM_MODES:
        arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config, lookahead_config)
        return BeamLoop(*arguments, inputs_tensor, lookahead_context, model_kwargs)
    validation.validate_call(model, generation_config, model_kwargs)
    config = lookahead_config if lookahead_config is not None else LookaheadConfig()
    has_encoder, past = model.config.is_encoder_decoder, cache_in(model_kwargs)
    held = getattr(past, "self_attention_cache", past)
    # Transformers attends to the empty slots of a static cache under a mask, and without a cache, or with a prompt that
    # is read in parts, it multiplies other numbers of rows together: the bits are not those of one token at a time.
    if isinstance(held, StaticCache) or validation.reads_otherwise(generation_config):
        config = replace(config, exactness="fast")
    lengths = validation.prompt_lengths(model, input_ids, model_kwargs)
    batch_size, longest = input_ids.shape
    is_continued = not has_encoder and tokens_in(past) > 0
    stopping = stopping_rule(stopping_criteria, generation_config)
    lm: Any = model
    sample = partial(lm._sample, input_ids, logits_processor, generation_config=generation_config, **model_kwargs)
    plain = PlainLoop(outside_passes()(sample), input_ids, lengths, stopping_criteria, lookahead_context)
    if stopping.max_length <= longest + 1:
        return plain  # a single token: there is nothing to draft
    is_lossy = config.acceptance == "typical"
    reason = stateful_reason(logits_processor, stopping_criteria, generation_config, batch_size, is_lossy)
    if reason:
        warnings.warn(reason, stacklevel=2)
        return plain
    found = support.support_of(model, shortest=int(lengths.min()), max_length=stopping.max_length)
    if changed := changed_cache(past):
        found = support.Support("none", f"its cache has code of its own, {changed}")
    elif found.shape != "none" and lengths.min() < longest and edits_inputs(model):
        found = support.Support("none", "a hook of a user's may edit its masks, which the padding of a batch needs")
    elif generation_config.use_cache is False and (users := version_of(model).users):
        found = support.Support(
            "none", f"its {users[0]} is not of transformers and may compute otherwise without a cache"
        )
    is_returned = validation.is_cache_returned(past, generation_config)
    shape, reason = _verified(model, found, batch_size, bool(lengths.min() < longest), is_returned, config)
    if reason and lookahead_config is not None and config.proposers:
        raise UnsupportedModelError(f"{reason}; leave out the configuration to decode it plainly")
    if batch_size > 1 and stopping.custom and not stopping.eos_tokens:
        # There transformers lets a row that was stopped go on until all are: how far depends on the slowest.
        reason = "a batch with stopping criteria and no end-of-sequence token ends as one"
    if shape == "none" or reason:
        warnings.warn(f"{reason}; it is decoded plainly", stacklevel=2)
        return plain
    if is_continued:
        validation.validate_past(model, past, input_ids, generation_config, model_kwargs.get("attention_mask"))
    validation.validate_positions(model_kwargs.get("position_ids"), lengths, longest)
    is_sampled = bool(generation_config.do_sample)
    is_shown = bool(generation_config.output_scores or generation_config.output_logits)
    chooser = TokenChooser(logits_processor, do_sample=is_sampled, batch_size=batch_size, keep=is_shown)
    rows = []
    for i, (ids, length) in enumerate(zip(input_ids.cpu().numpy(), lengths.tolist(), strict=True)):
        rule = stopping.within(lookahead_context, longest - length)
        rows.append(Row(i, ids, chooser, rule, padding=longest - length, place=i, device=input_ids.device))
    encoded = encoded_in(model, is_returned, inputs_tensor, model_kwargs) if has_encoder else None
    for row, tokens in zip(rows, () if encoded is None else encoded.tokens, strict=False):
        row.read_by_encoder(tokens)
    warp = warp_of(logits_processor) if is_sampled else None
    keeps = is_returned or is_continued
    given = (model, config, stopping, lookahead_tokenizer, rows)
    with undisturbed(model):
        engine = assemble(*given, shape=shape, warp=warp, encoded=encoded, keep_cache=keeps)
    if is_continued:
        copy_prefix_from(cast(DynamicCache, past), engine.cache, longest - lengths)
    return engine


def assemble(
    model: PreTrainedModel,
    config: LookaheadConfig,
    stopping: StoppingRule,
    tokenizer: PreTrainedTokenizerBase | None,
    batch: Sequence[Row] = (),
    *,
    slots: int = 0,
    shape: Shape = "trees",
    warp: Callable[[Tensor], Tensor] | None = None,
    encoded: Encoded | None = None,
    keep_cache: bool = False,
) -> Engine:
    """Build an engine: a model with its cache, the proposers, and the controller with its learned state.

    `batch` and `keep_cache` are as for `Engine`, and `warp` is as in `Call`. Without a batch, rows of prompts of their
    own join the engine later, up to `slots`, and one that fails ends alone.
    """
    rows, isolates, longest = len(batch) or slots, not batch, max((row.length for row in batch), default=0)
    call = Call(
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        vocab_size=support.decoder_vocabulary(model),
        max_length=stopping.max_length + (0 if encoded is None else max(map(len, encoded.tokens))),
        max_nodes=config.node_budget,
        is_chain=shape == "chains",
        is_timed=config.draft == "auto",
        by_rejection=config.acceptance == "rejection" and warp is not None,
        warp=warp,
        inputs=None if encoded is None else encoded.tokens,
    )
    proposers, controller = _drafting(config, call, runs_to_limit=not (stopping.custom or stopping.eos_tokens))
    # `generate` attends to padding under a mask.
    is_separate = isolates or (rows == 1 and not batch[0].padding)
    is_bitwise = is_separate and shape == "trees" and config.exactness == "auto" and self_check.is_bitwise(model)
    # Enough for short outputs; the cache grows with a longer one.
    capacity = min(stopping.max_length, longest + 256) + config.node_budget + 1
    target: Target
    packs = config.pack == "auto"
    if not model.config.is_encoder_decoder:
        target = Target(
            model,
            rows=rows,
            capacity=capacity,
            shape=shape,
            hidden_layers=sorted({layer for proposer in proposers for layer in proposer.hidden_layers}),
            captures=config.cuda_graphs,
            most_nodes=config.node_budget + 1,
            is_bitwise=is_bitwise,
            packs=packs,
            # The comparison of bits was made with all kernels.
            has_kernels=is_bitwise or self_check.kernels_agree(model, shape, packs=packs),
        )
    elif shape == "trees":
        target = DecoderTarget(model, encoded, rows, capacity=capacity, is_bitwise=is_bitwise, packs=packs)
    else:
        assert encoded is not None
        target, keep_cache = ChainTarget(model, encoded, rows, packs=packs), False
    return Engine(target, proposers, controller, config, call, batch, keep_cache=keep_cache, isolates=isolates)


def _drafting(
    config: LookaheadConfig, call: Call, *, runs_to_limit: bool
) -> tuple[Sequence[Proposer], Controller | None]:
    """The proposers of a call and their controller, with the learned state of the model."""
    model, has_encoder, learned = call.model, call.model.config.is_encoder_decoder, state_of(call.model).learned
    pool = pool_of(config, vocabulary=call.vocab_size)
    with learned.lock:
        size = config.branch_size if config.decides_branch and not call.is_chain else None  # the branch is a tree
        branch = LookaheadBranch(
            size,
            learned.branch[size, tuple(name for name in config.proposers if isinstance(name, str))],
            max_nodes=config.max_nodes or MAX_NODES_LIMIT,
            teaches="recycled" in config.proposers,
        )
        proposers = make_proposers(config, learned.of(ProposerState, ProposerState), pool, call, branch)
        cost, budget = learned.costs[config.passes], learned.budgets[config.passes]
        cost.assume(node_cost(model))
    reads_hidden = any(proposer.hidden_layers for proposer in proposers)
    if has_encoder and reads_hidden:
        raise UnsupportedModelError(f"{type(model).__name__} shows no hidden states to proposers: take others")
    tp_group = tensor_parallel_group(model)
    if tp_group is not None:
        validate_tensor_parallel(model, reads_hidden=reads_hidden, by_rejection=call.by_rejection)
        proposers = proposers if tp_group.leads else []
    if not proposers or config.draft != "auto":
        return proposers, None
    is_padded = config.cuda_graphs and not has_encoder
    limits = {"is_padded": is_padded, "runs_to_limit": runs_to_limit, "by_rejection": call.by_rejection}
    return proposers, Controller(cost, budget, branch, proposers, node_budget=config.node_budget, **limits)


def _verified(
    model: PreTrainedModel,
    found: support.Support,
    rows: int,
    is_padded: bool,
    is_returned: bool,
    config: LookaheadConfig,
) -> tuple[Shape | Literal["none"], str]:
    """What a call verifies in one pass, and why the model cannot verify what is asked for, or an empty string."""
    shape, why, has_encoder = found.shape, found.reason, model.config.is_encoder_decoder
    if has_encoder and shape == "trees":
        is_half = model.dtype in (torch.bfloat16, torch.float16) and input_device(model).type == "cpu"
        if is_padded or (rows > 1 and (is_returned or not model._can_set_attn_implementation())):
            shape, why = "chains", "the rows of such a batch keep one length"
        # The nodes of a chain attend to the slots that they would see alone: fewer outputs differ by rounding.
        elif is_half and config.exactness == "auto" and (rows > 1 or not self_check.is_bitwise(model)):
            shape, why = "chains", "in half precision on a CPU it verifies chains, and trees with exactness='fast'"
    elif found.by_node and rows == 1 and not is_padded and config.exactness == "auto" and self_check.is_bitwise(model):
        shape = "trees"
    acceptance = config.acceptance
    obstacles = {
        f"be decoded speculatively: {why}": shape == "none",
        f"be decoded speculatively for {rows} prompts at once: {why}": rows > 1 and not has_encoder,
        "be decoded speculatively behind a padded decoder_attention_mask": has_encoder and is_padded,
        f"verify the lookahead branch: {why}": "jacobi" in config.proposers and not config.decides_branch,
        f"verify what several proposers draw: {why}": acceptance == "rejection" and len(config.proposers) > 1,
        f"accept {rows} inputs by acceptance={acceptance!r}: {why}": acceptance != "exact" and rows > 1,
    }
    met = [obstacle for obstacle, is_met in obstacles.items() if is_met and shape != "trees"]
    return shape, f"{type(model).__name__} cannot {met[0]}" if met else ""


def takes_rows_apart(model: PreTrainedModel, config: LookaheadConfig) -> bool:
    """Whether inputs of an encoder-decoder model are to join one at a time, each with the tokens that it has alone.

    On a GPU several inputs are read in little more time than one.
    """
    found = support.support_of(model, shortest=1, max_length=1)
    shape, _ = _verified(model, found, 1, is_padded=False, is_returned=False, config=config)
    return shape == "trees" and model._can_set_attn_implementation() and input_device(model).type == "cpu"


def encoded_in(
    model: PreTrainedModel, is_returned: bool, inputs: Tensor | None, model_kwargs: dict[str, Any]
) -> Encoded:
    """The output of the encoder, with the cache that `generate` made if that can be cropped."""
    past, mask = cache_in(model_kwargs), model_kwargs.get("attention_mask")
    if not isinstance(past, EncoderDecoderCache) or not isinstance(past.self_attention_cache, DynamicCache):
        past = empty_cache(model)
    outputs = model_kwargs["encoder_outputs"]
    tokens: list[IntArray] = [np.zeros(0, np.int32)] * len(outputs[0])
    is_shared = support.vocabulary_size(model, model.get_encoder()) == support.decoder_vocabulary(model)
    if inputs is not None and inputs.ndim == 2 and is_shared:
        inputs = inputs.repeat_interleave(len(tokens) // len(inputs), 0)  # for several sampled outputs of each
        # Where the outputs of the encoder are given without its inputs, `generate` fills these with -100.
        seen = (inputs >= 0) & (torch.ones_like(inputs) if mask is None else mask).bool()
        tokens = [ids[kept].cpu().numpy().astype(np.int32) for ids, kept in zip(inputs, seen, strict=True)]
    return Encoded(outputs, mask, past, is_returned, tokens)
