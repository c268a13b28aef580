"""Sources of drafts, one file each, behind the interface of `lookahead.proposers.base`."""

from __future__ import annotations

from lookahead.config import PROPOSERS, LookaheadConfig
from lookahead.ngram.hits import HitRates
from lookahead.proposers.base import Proposer
from lookahead.proposers.jacobi import JacobiProposer
from lookahead.proposers.prompt import PromptProposer


class Experience:
    """What proposers learn of a model that is worth keeping from one call to the next: never text, only hit rates.

    Attributes:
        rates: For every proposer, how often each kind of its candidates was right.
    """

    def __init__(self) -> None:
        self.rates = {name: HitRates() for name in PROPOSERS}


def make_proposers(config: LookaheadConfig, experience: Experience) -> list[Proposer]:
    """The proposers a configuration names, in its order, with what was learned before."""
    made: list[Proposer] = []
    for name in config.proposers:
        rates = experience.rates[name]
        if name == "prompt":
            made.append(PromptProposer(config.min_ngram, config.max_ngram, rates))
        else:
            made.append(
                JacobiProposer(
                    config.window,
                    config.ngram_size,
                    config.guesses,
                    pool_from_prompt=config.pool_from_prompt,
                    rates=rates,
                )
            )
    return made
