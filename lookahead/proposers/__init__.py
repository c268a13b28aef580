"""Sources of drafts, one file each, behind the interface of `lookahead.drafting.proposal`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from lookahead.config import LookaheadConfig
from lookahead.drafting.budget import LookaheadBranch, ProposerBudget
from lookahead.drafting.proposal import Call, Proposer, ProposerFactory
from lookahead.errors import ProposerError
from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.pool_file import Pool
from lookahead.proposers.jacobi import JacobiProposer
from lookahead.proposers.jacobi_auto import AutoJacobiProposer
from lookahead.proposers.ngram import SOURCES, Memory, MixtureProposer
from lookahead.proposers.validated import CustomProposer

_MOST_SOURCES = 31  # bits of a node that tell who offered it


@dataclass(slots=True)
class ProposerState:
    """What proposers learn of a model and its requests, for those that come later.

    Attributes:
        mixture: The hit rates of all candidates of a `MixtureProposer`.
        jacobi: The hit rates of the lookahead branch.
        memory: Texts, and what the target thought of them.
        budgets: What proposers of a user's own were worth, by what makes them.
    """

    mixture: HitRates = field(default_factory=HitRates)
    jacobi: HitRates = field(default_factory=HitRates)
    memory: Memory = field(default_factory=Memory)
    budgets: WeakKeyDictionary[Any, ProposerBudget] = field(default_factory=WeakKeyDictionary)


def make_proposers(
    config: LookaheadConfig, experience: ProposerState, pool: Pool | None, call: Call, branch: LookaheadBranch
) -> list[Proposer]:
    """The proposers a configuration names, with what was learned before, and its pool, then those it brings along.

    `branch` tells whether the lookahead branch runs, where the configuration leaves that open.

    Raises:
        ProposerError: One of these is none, or two sources have one name.
    """
    made: list[Proposer] = []
    mixed = [name for name in config.proposers if name in SOURCES]
    if mixed:
        memory = experience.memory if config.memory == "shared" else Memory()
        made.append(
            MixtureProposer(
                mixed,
                memory,
                experience.mixture,
                pool,
                min_ngram=config.min_ngram,
                max_ngram=config.max_ngram,
                min_probability=config.min_probability,
            )
        )
    rates, from_prompt = experience.jacobi, config.pool_from_prompt
    if config.decides_branch:
        made.append(AutoJacobiProposer(branch, pool_from_prompt=from_prompt, rates=rates))
    elif "jacobi" in config.proposers:
        made.append(JacobiProposer(*config.branch_sizes[0], pool_from_prompt=from_prompt, rates=rates))
    for factory in config.proposers:
        if not isinstance(factory, str):
            made.append(CustomProposer(factory, call, _budget_of(factory, experience)))
    names = [name for proposer in made for name in proposer.sources]
    for name in names:
        if names.count(name) > 1:
            raise ProposerError(f"two proposers have a source called {name!r}: give one of them another name")
    if len(names) > _MOST_SOURCES:
        raise ProposerError(f"proposers may have {_MOST_SOURCES} sources together, got {len(names)}")
    return made


def _budget_of(factory: ProposerFactory, experience: ProposerState) -> ProposerBudget:
    """What a proposer was worth so far; of one that cannot be told from others nothing is kept."""
    try:
        return experience.budgets.setdefault(factory, ProposerBudget())
    except TypeError:
        return ProposerBudget()
