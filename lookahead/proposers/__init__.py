"""The proposers of a configuration, and what they learn across calls."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from lookahead.config import LookaheadConfig
from lookahead.drafting.budget import LookaheadBranch
from lookahead.drafting.proposal import Call, Proposer, ProposerFactory
from lookahead.errors import ProposerError
from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.pool_file import Pool
from lookahead.proposers.file_memory import FileMemory, open_file_memory
from lookahead.proposers.jacobi import AutoJacobiProposer, JacobiProposer
from lookahead.proposers.ngram import SOURCES, Memory, NgramProposer
from lookahead.proposers.validated import ProposerBudget, ValidatedProposer

_MOST_SOURCES = 31  # bits of a node for its sources


@dataclass(slots=True)
class ProposerState:
    """What proposers learn of a model and its requests, for later requests.

    Attributes:
        ngram: Hit rates of the candidates of a `NgramProposer`.
        jacobi: Hit rates of the lookahead branch.
        memory: Texts and recycled tokens of earlier requests.
        files: The same of requests with a memory file, by its path.
        budgets: Budgets of users' proposers, by their factories.
    """

    ngram: HitRates = field(default_factory=HitRates)
    jacobi: HitRates = field(default_factory=HitRates)
    memory: Memory = field(default_factory=Memory)
    files: dict[str, FileMemory] = field(default_factory=dict)
    budgets: WeakKeyDictionary[Any, ProposerBudget] = field(default_factory=WeakKeyDictionary)


def make_proposers(
    config: LookaheadConfig, learned: ProposerState, pool: Pool | None, call: Call, branch: LookaheadBranch
) -> list[Proposer]:
    """The proposers of a configuration: first those with a name, then those of its factories.

    Raises:
        PoolError: The memory file cannot be read, is damaged, or belongs to another model.
        ProposerError: A factory returns no proposer, or two sources have the same name.
    """
    made: list[Proposer] = []
    mixed = [name for name in config.proposers if name in SOURCES]
    if mixed:
        memory = _memory_of(config, learned, call)
        made.append(
            NgramProposer(
                mixed,
                memory,
                learned.ngram,
                pool,
                min_ngram=config.min_ngram,
                max_ngram=config.max_ngram,
                min_probability=config.min_probability,
            )
        )
    rates, from_prompt = learned.jacobi, config.pool_from_prompt
    if config.decides_branch:
        made.append(AutoJacobiProposer(branch, pool_from_prompt=from_prompt, rates=rates))
    elif "jacobi" in config.proposers:
        made.append(JacobiProposer(*config.branch_sizes[0], pool_from_prompt=from_prompt, rates=rates))
    for factory in config.proposers:
        if not isinstance(factory, str):
            made.append(ValidatedProposer(factory, call, _budget_of(factory, learned)))
    names = [name for proposer in made for name in proposer.sources]
    for name in names:
        if names.count(name) > 1:
            raise ProposerError(f"two proposers have a source called {name!r}: rename one of them")
    if len(names) > _MOST_SOURCES:
        raise ProposerError(f"proposers may have {_MOST_SOURCES} sources together, got {len(names)}")
    return made


def _memory_of(config: LookaheadConfig, learned: ProposerState, call: Call) -> Memory:
    """Where the n-gram sources of a call learn."""
    if config.memory == "shared":
        return learned.memory
    if config.memory == "request":
        return Memory()
    return open_file_memory(os.fspath(config.memory), call.model, learned.files)


def _budget_of(factory: ProposerFactory, learned: ProposerState) -> ProposerBudget:
    """The budget of a proposer; that of an unhashable factory is not kept for later calls."""
    try:
        return learned.budgets.setdefault(factory, ProposerBudget())
    except TypeError:
        return ProposerBudget()
