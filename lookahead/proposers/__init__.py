"""The proposers of a configuration, and their learned state across calls."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from lookahead.config import LookaheadConfig
from lookahead.drafting.branch import LookaheadBranch
from lookahead.drafting.budget import Budget
from lookahead.drafting.proposal import Call, Proposer
from lookahead.errors import ProposerError
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.pool_file import Pool
from lookahead.proposers.forced import ForcedTokens
from lookahead.proposers.jacobi import JacobiProposer
from lookahead.proposers.memory_files import MemoryFile, open_memory_file
from lookahead.proposers.ngram import PREDICTION, SOURCES, Memory, NgramProposer
from lookahead.proposers.validated import ValidatedProposer
from lookahead.utils.seams import plugin_for

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


def make_proposers(
    config: LookaheadConfig,
    learned: ProposerState,
    pool: Pool | None,
    call: Call,
    branch: LookaheadBranch,
    request: Memory | None = None,
) -> list[Proposer]:
    """The proposers of a configuration: first the named ones, then those of its factories.

    Args:
        config: The options.
        learned: The learned state for the model, which the proposers update.
        pool: The pool, in token ids of the model; None without one.
        call: The call that they are made for.
        branch: Turns the lookahead branch on and off, unless it always runs.
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
        decided, rates = branch if config.decides_branch else None, learned.jacobi
        made.append(JacobiProposer(config.branch_size, decided, rates=rates))
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
