"""Sources of drafts, one file each, behind the interface of `lookahead.proposers.base`."""

from __future__ import annotations

from collections.abc import Mapping

from lookahead.config import LookaheadConfig
from lookahead.ngram.hits import HitRates
from lookahead.ngram.pool import Pool
from lookahead.proposers.base import Proposer
from lookahead.proposers.corpus import CorpusProposer
from lookahead.proposers.jacobi import JacobiProposer
from lookahead.proposers.prompt import PromptProposer


def make_proposers(config: LookaheadConfig, rates_of: Mapping[str, HitRates], pool: Pool | None) -> list[Proposer]:
    """The proposers a configuration names, in its order, with the hit rates learned before of each, and its pool."""
    made: list[Proposer] = []
    for name in config.proposers:
        rates = rates_of[name]
        if name == "prompt":
            made.append(PromptProposer(config.min_ngram, config.max_ngram, rates))
        elif name == "jacobi":
            made.append(
                JacobiProposer(
                    config.window,
                    config.ngram_size,
                    config.guesses,
                    pool_from_prompt=config.pool_from_prompt,
                    rates=rates,
                )
            )
        elif pool is not None:  # a configuration that names `corpus` has one
            made.append(CorpusProposer(pool, config.min_ngram, config.max_ngram, rates))
    return made
