"""What an engine is made of: a model behind its cache, sources of drafts, and what was learned of both."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from lookahead.config import LookaheadConfig
from lookahead.drafting.controller import Pacing
from lookahead.drafting.lookahead_branch import Branch
from lookahead.drafting.proposal import Call
from lookahead.drafting.tree import MAX_NODES_LIMIT
from lookahead.engine.engine import Engine
from lookahead.engine.row import Row
from lookahead.models.model_state import LearnedState, state_of
from lookahead.models.support import prefills_at_once
from lookahead.models.target import PREFILL_CHUNK, Shape, Target, input_device
from lookahead.models.tensor_parallel import ensemble_of, refuse_in_ensemble
from lookahead.ngram.pool_file import Pool
from lookahead.proposers import ProposerState, make_proposers


def assemble(
    model: PreTrainedModel,
    config: LookaheadConfig,
    call: Call,
    pool: Pool | None,
    batch: Sequence[Row] = (),
    *,
    capacity: int,
    shape: Shape = "trees",
    runs_to_limit: bool,
    keep_cache: bool = False,
    isolates: bool = False,
) -> Engine:
    """Make an engine.

    Args:
        model: The model.
        config: The options.
        call: What is asked of it; its rows are those of the cache.
        pool: That of the configuration, opened.
        batch: As for `Engine`.
        capacity: Slots per row to begin with.
        shape: What the model can score.
        runs_to_limit: Whether nothing ends a row before its limit.
        keep_cache: As for `Engine`.
        isolates: As for `Engine`.

    Raises:
        ProposerError: A source of drafts is none.
        UnsupportedModelError: It is spread over several processes, and one of them alone cannot draft so.
    """
    learned = state_of(model).learned
    with learned.lock:
        branch = _branch_of(config, learned, is_chain=call.is_chain)
        proposers = make_proposers(config, learned.of(ProposerState, ProposerState), pool, call, branch)
        cost, switch = learned.costs[config.passes], learned.switches[config.passes]
    ensemble = ensemble_of(model)
    if ensemble is not None:
        reads_hidden = any(proposer.hidden_layers for proposer in proposers)
        refuse_in_ensemble(model, reads_hidden=reads_hidden, by_rejection=call.by_rejection)
        proposers = proposers if ensemble.leads else []
    longest = max((row.length for row in batch), default=PREFILL_CHUNK)
    target = Target(
        model,
        rows=call.rows,
        capacity=capacity,
        device=batch[0].device if batch else input_device(model),
        shape=shape,
        prefill_chunk=longest if prefills_at_once(model) else PREFILL_CHUNK,
        hidden_layers=sorted({layer for proposer in proposers for layer in proposer.hidden_layers}),
        compiles=config.compile,
        captures=config.cuda_graphs,
        most_nodes=config.node_budget + 1,
    )
    pacing = None
    if proposers and config.draft == "auto":
        pacing = Pacing(cost, switch, branch, is_padded=config.has_fixed_shapes, runs_to_limit=runs_to_limit)
    return Engine(
        target,
        proposers,
        pacing,
        config,
        batch,
        keep_cache=keep_cache,
        is_chain=call.is_chain,
        by_rejection=call.by_rejection,
        by_typicality=config.acceptance == "typical" and call.warp is not None,
        isolates=isolates,
        ensemble=ensemble,
        learning=learned.lock,
    )


def _branch_of(config: LookaheadConfig, learned: LearnedState, *, is_chain: bool) -> Branch:
    """Whether the lookahead branch runs, where costs decide that; elsewhere it is always off for them."""
    return Branch(
        config.branch_sizes if config.decides_branch and not is_chain else (),
        learned.branch[tuple(name for name in config.proposers if isinstance(name, str))],
        max_nodes=config.max_nodes or MAX_NODES_LIMIT,
        teaches="recycled" in config.proposers,
    )
