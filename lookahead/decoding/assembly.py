"""Assembles an engine: a backend, proposers, and a controller with the learned state of the model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend import probes, self_check
from lookahead.backend.choice import backend_for, records_graphs
from lookahead.backend.protocol import BitPolicy, Shape
from lookahead.config import LookaheadConfig
from lookahead.decoding.prompt_reading import PromptInputs, PromptReading
from lookahead.drafting.branch import LookaheadBranch
from lookahead.drafting.budget import Budget
from lookahead.drafting.controller import Controller
from lookahead.drafting.cost_model import NODE_COST
from lookahead.drafting.proposal import Call, Proposer
from lookahead.drafting.sizes import MAX_NODES_LIMIT
from lookahead.engine.engine import Engine
from lookahead.engine.row import Row
from lookahead.errors import ProposerError, UnsupportedModelError
from lookahead.model.calls import kind_of
from lookahead.model.facts import input_device, may_keep_states
from lookahead.model.model_state import plan_of, state_of
from lookahead.model.state_scope import mixers_of, most_nodes
from lookahead.model.tensor_parallel import tensor_parallel_group, validate_tensor_parallel
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.pool_file import Pool
from lookahead.proposers.forced import ForcedTokens
from lookahead.proposers.jacobi import JacobiProposer
from lookahead.proposers.memory_files import MemoryFile, open_memory_file
from lookahead.proposers.ngram import PREDICTION, SOURCES, Memory, NgramProposer
from lookahead.proposers.pool_files import pool_of
from lookahead.proposers.validated import ValidatedProposer
from lookahead.utils.seams import plugin_for
from lookahead.verification.acceptance import acceptance_of
from lookahead.verification.rules import StoppingRule

# Bytes read over products, by data sheets: 0.0034 for an H100 SXM, 0.0065 for an A100, 0.0061 for an RTX 4090.
_GPU_NODE_COST = 0.005
_STATES_NODE_COST = 0.12  # measured at the sizes of Qwen3.5-0.8B in float32, up to 8 nodes
_MAX_SOURCES = 31  # bits of a node for its sources


@dataclass(slots=True)
class ProposerState:
    """Learned state of proposers for a model, kept for later requests."""

    ngram: HitRates = field(default_factory=HitRates)
    predicted: HitRates = field(default_factory=HitRates)  # for calls with predictions
    jacobi: HitRates = field(default_factory=HitRates)  # of the lookahead branch
    memory: Memory = field(default_factory=Memory)
    files: dict[str, MemoryFile] = field(default_factory=dict)  # by the path of the memory file
    budgets: WeakKeyDictionary[Any, Budget] = field(default_factory=WeakKeyDictionary)  # by users' factories


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What the rows of an engine have in common, whether they are one batch or join it later.

    Attributes:
        model: The model.
        config: How to draft.
        tokenizer: The model's tokenizer, for proposers that compare it with their own.
        memory: The store of `memory="request"`, shared by the calls of one request; None for one call.
        keep_cache: As for `Engine`.
        predicts: Whether rows that join later may have predictions.
        is_constrained: Whether rows that join later may follow a grammar.
        is_rounded: Whether transformers' own passes differ in their bits from decoding one token at a time.
    """

    model: PreTrainedModel
    config: LookaheadConfig
    tokenizer: PreTrainedTokenizerBase | None = None
    memory: Memory | None = None
    keep_cache: bool = False
    predicts: bool = False
    is_constrained: bool = False
    is_rounded: bool = False


def assemble(
    common: Common,
    stopping: StoppingRule,
    batch: Sequence[Row] = (),
    *,
    slots: int = 0,
    shape: Shape = "trees",
    warp: Callable[[Tensor], Tensor] | None = None,
    encoded: Any = None,
    reading: PromptReading | None = None,
) -> Engine:
    """Build an engine: a backend with its cache, the proposers, and the controller with its learned state.

    Args:
        common: What the rows have in common.
        stopping: Ends the rows.
        batch: The rows of one call. Without them, independent rows join the engine later, up to `slots`, and a row that
            fails ends alone.
        slots: Maximum rows at a time, without a batch.
        shape: The shape of drafts in one pass.
        warp: As in `Call`.
        encoded: The encoded inputs of the batch; None without an encoder, and for rows that join with their own.
        reading: Reads prompts of the batch that are more than tokens.
    """
    model, rows, isolates = common.model, len(batch) or slots, not batch
    plan, kind = plan_of(model), kind_of(model)
    keeps_states = plan.may_keep_states and bool(mixers_of(model))
    config = _bounded(common.config, model, rows) if keeps_states else common.config
    captures = reading is None and not keeps_states and records_graphs(model)
    # Trees with their root are padded to powers of two where passes are recorded.
    is_less = captures and config.max_nodes is None and any(name != "jacobi" for name in config.proposers)
    acceptance = acceptance_of(config.acceptance, is_sampled=warp is not None)
    inputs = None if encoded is None else encoded.tokens
    call = Call(
        model=model,
        tokenizer=common.tokenizer,
        rows=rows,
        vocab_size=plan.vocabulary,
        max_length=stopping.max_length + max(map(len, inputs or ()), default=0),
        max_nodes=config.node_budget - is_less,
        is_chain=shape == "chains",
        is_timed=config.draft == "auto",
        by_rejection=acceptance.draws,
        warp=warp,
        inputs=inputs,
        encoded=encoded,
        predicts=common.predicts or any(row.predictions for row in batch),
        # Drawn tokens can be neither cut nor extended.
        is_constrained=not acceptance.draws
        and (common.is_constrained or any(row.forcing is not None for row in batch)),
    )
    limits = {"is_padded": captures, "runs_to_limit": not (stopping.custom or stopping.eos_tokens)}
    shows_hidden = not kind.has_encoder and reading is None
    proposers, controller = _drafting(config, call, common.memory, shows_hidden=shows_hidden, **limits)
    policy = BitPolicy.ROUNDED
    # What reads more than tokens reads a batch as one, with its padding.
    is_separate = isolates or (encoded is None and reading is None) or (rows == 1 and not batch[0].padding)
    if is_separate and shape == "trees" and not common.is_rounded and self_check.keeps_solo_bits(model):
        policy = BitPolicy.SOLO
    make_inputs: Any = partial(kind.make_inputs, encoded=encoded)
    if reading is not None:
        make_inputs = partial(PromptInputs, reading=reading)
    longest = max((row.length for row in batch), default=0)
    # Enough for most outputs; the cache grows for longer ones. On a CPU only slots that are written take memory.
    ample = max(256, longest) if plan.device.type == "cpu" else 256
    backend = backend_for(
        model,
        rows=rows,
        capacity=min(stopping.max_length, longest + ample) + call.max_nodes + 1,
        shape=shape,
        hidden_layers=sorted({layer for proposer in proposers for layer in proposer.hidden_layers}),
        captures=captures,
        most_nodes=call.max_nodes + 1,
        # Bits were compared with all kernels.
        has_kernels=policy is BitPolicy.SOLO or kind.has_encoder or self_check.kernels_agree(model, shape),
        packs_prompts=reading is None and rows > 1 and self_check.packs_prompts(model, policy),
        shares_beginnings=partial(self_check.shares_beginnings, model),
        continues=partial(probes.continues_texts, model),
        make_inputs=make_inputs,
    )
    ways: Any = {"policy": policy, "keep_cache": common.keep_cache, "isolates": isolates}
    return Engine(backend, proposers, controller, config, call, batch, acceptance=acceptance, **ways)


def _bounded(config: LookaheadConfig, model: PreTrainedModel, rows: int) -> LookaheadConfig:
    """The configuration with trees limited by the room for the states of rows, unless it sets `max_nodes`."""
    if config.max_nodes is not None or not config.node_budget:
        return config
    fewest = 1 if config.branch_size is None else config.branch_size.window_nodes
    return replace(config, max_nodes=min(config.node_budget, max(fewest, most_nodes(model, rows))))


def _drafting(
    config: LookaheadConfig,
    call: Call,
    memory: Memory | None,
    *,
    is_padded: bool,
    runs_to_limit: bool,
    shows_hidden: bool,
) -> tuple[Sequence[Proposer], Controller | None]:
    """The proposers of a call and their controller, with the learned state of the model."""
    model, learned = call.model, state_of(call.model).learned
    pool = pool_of(config, vocabulary=call.vocab_size) if config.pool is not None else None
    with learned.lock:
        branch, teaches = None, "recycled" in config.proposers
        if config.decides_branch and (size := config.branch_size) is not None:
            states = learned.branch[size, tuple(name for name in config.proposers if isinstance(name, str))]
            branch = LookaheadBranch(size, states, max_nodes=config.max_nodes or MAX_NODES_LIMIT, teaches=teaches)
        proposers = make_proposers(config, learned.of(ProposerState, ProposerState), pool, call, branch, memory)
        plan = plan_of(model)
        learned.cost.node_cost = plan.part("node cost", plan.form, partial(node_cost, model))
    reads_hidden = any(proposer.hidden_layers for proposer in proposers)
    if reads_hidden and not shows_hidden:
        raise UnsupportedModelError(f"{type(model).__name__} shows no hidden states to proposers: choose others")
    tp_group = tensor_parallel_group(model) if plan.processes > 1 else None
    if tp_group is not None:
        validate_tensor_parallel(model, reads_hidden=reads_hidden, by_rejection=call.by_rejection)
        proposers = proposers if tp_group.leads else []
    if not proposers or config.draft != "auto":
        return proposers, None
    controller = Controller(
        learned.cost,
        learned.budget,
        None if call.is_chain else branch,  # which is a tree
        proposers,
        node_budget=call.max_nodes,
        is_padded=is_padded,
        runs_to_limit=runs_to_limit,
        teaches=teaches,
        by_rejection=call.by_rejection,
    )
    return proposers, controller


def make_proposers(
    config: LookaheadConfig,
    learned: ProposerState,
    pool: Pool | None,
    call: Call,
    branch: LookaheadBranch | None = None,
    request: Memory | None = None,
) -> list[Proposer]:
    """The proposers of a configuration: first the named ones, then those of its factories.

    Args:
        config: The options.
        learned: The learned state for the model, which the proposers update.
        pool: The pool, in token ids of the model; None without one.
        call: The call that they are made for.
        branch: Turns the lookahead branch on and off; None if it always runs.
        request: The memory of `memory="request"`, shared by the calls of one request; None for an empty one.

    Raises:
        ProposerError: Two sources have one name, there are more than 31 sources, or a factory made no proposer.
        PoolError: The memory file cannot be read, or belongs to another model.
    """
    made: list[Proposer] = []
    mixed = [name for name in config.proposers if name in SOURCES]
    predicts = call.predicts and bool(config.proposers) and not call.by_rejection
    if mixed or predicts:
        memory = learned.memory if config.memory == "shared" else request or Memory()
        if config.memory not in ("shared", "request"):
            memory = open_memory_file(os.fspath(config.memory), call.model, learned.files)
        least = config.min_probability
        # A match that contradicts a good prediction is less likely than a match without a prediction.
        rates = learned.predicted if predicts else learned.ngram
        sources = [*mixed, PREDICTION] if predicts else mixed
        made.append(NgramProposer(sources, memory, rates, pool, min_probability=least))
    if "jacobi" in config.proposers and config.branch_size is not None:
        made.append(JacobiProposer(config.branch_size, branch, rates=learned.jacobi))
    for factory in config.proposers:
        if factory == "self":
            factory = plugin_for("proposer", "self").of(call.model)
        if not isinstance(factory, str):
            budget = Budget()
            with contextlib.suppress(TypeError):  # the budget of an unhashable factory is not kept for later calls
                budget = learned.budgets.setdefault(factory, budget)
            made.append(ValidatedProposer(factory, call, budget))
    if made and call.is_constrained:
        made.append(ForcedTokens())  # last, since the engine replaces the last proposal with the forced tokens
    names = [name for proposer in made for name in proposer.sources]
    for name in names:
        if names.count(name) > 1:
            raise ProposerError(f"two proposers have a source called {name!r}: rename one of them")
    if len(names) > _MAX_SOURCES:
        raise ProposerError(f"proposers may have {_MAX_SOURCES} sources together, got {len(names)}")
    return made


def node_cost(model: PreTrainedModel) -> float:
    """First estimate of the cost of one more node of a tree, as a share of a step of one node.

    In half precision a GPU does about two hundred products per number read. Mixtures of experts, where nodes read
    different experts, and quantized weights, which are unpacked first, cost more. Recurrent layers are called once per
    depth, and many drafts are chains.
    """
    if may_keep_states(model) and mixers_of(model):
        return _STATES_NODE_COST
    is_half = model.dtype in (torch.bfloat16, torch.float16) and not getattr(model, "is_quantized", False)
    has_experts = any("experts" in name for name, _ in model.named_modules())
    return _GPU_NODE_COST if input_device(model).type == "cuda" and is_half and not has_experts else NODE_COST
