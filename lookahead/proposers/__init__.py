"""Sources of drafts, one file each, behind the interface of `lookahead.proposers.base`."""

from __future__ import annotations

from dataclasses import dataclass, field

from lookahead.config import LookaheadConfig
from lookahead.errors import ProposerError
from lookahead.ngram.hits import HitRates
from lookahead.ngram.pool import Pool
from lookahead.proposers.base import Call, Proposer
from lookahead.proposers.custom import CustomProposer
from lookahead.proposers.jacobi import JacobiProposer
from lookahead.proposers.mixture import SOURCES, Memory, MixtureProposer

_MOST_SOURCES = 31  # bits of a node that tell who offered it


@dataclass(slots=True)
class Experience:
    """What proposers learn of a model and its requests, for those that come later.

    Attributes:
        mixture: The hit rates of all candidates of a `MixtureProposer`.
        jacobi: The hit rates of the lookahead branch.
        memory: Texts, and what the target thought of them.
    """

    mixture: HitRates = field(default_factory=HitRates)
    jacobi: HitRates = field(default_factory=HitRates)
    memory: Memory = field(default_factory=Memory)


def make_proposers(config: LookaheadConfig, experience: Experience, pool: Pool | None, call: Call) -> list[Proposer]:
    """The proposers a configuration names, with what was learned before, and its pool, then those it brings along.

    Raises:
        ProposerError: One of these is none, or two sources have one name.
    """
    made: list[Proposer] = []
    mixed = [name for name in config.proposers if name in SOURCES]
    if mixed:
        memory = experience.memory if config.memory == "shared" else Memory()
        made.append(
            MixtureProposer(
                mixed, memory, experience.mixture, pool, min_ngram=config.min_ngram, max_ngram=config.max_ngram
            )
        )
    if "jacobi" in config.proposers:
        made.append(
            JacobiProposer(
                config.window,
                config.ngram_size,
                config.guesses,
                pool_from_prompt=config.pool_from_prompt,
                rates=experience.jacobi,
            )
        )
    made += [CustomProposer(factory, call) for factory in config.proposers if not isinstance(factory, str)]
    names = [name for proposer in made for name in proposer.sources]
    for name in names:
        if names.count(name) > 1:
            raise ProposerError(f"two proposers have a source called {name!r}: give one of them another name")
    if len(names) > _MOST_SOURCES:
        raise ProposerError(f"proposers may have {_MOST_SOURCES} sources together, got {len(names)}")
    return made
