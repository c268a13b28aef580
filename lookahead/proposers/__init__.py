"""Sources of drafts, one file each, behind the interface of `lookahead.proposers.base`."""

from lookahead.config import LookaheadConfig
from lookahead.proposers.base import Proposer
from lookahead.proposers.prompt import PromptProposer


def make_proposers(config: LookaheadConfig) -> list[Proposer]:
    """The proposers a configuration names, in its order."""
    made: list[Proposer] = []
    for name in config.proposers:
        if name == "prompt":
            made.append(PromptProposer(min_ngram=config.min_ngram, max_ngram=config.max_ngram))
        else:
            from lookahead.proposers.jacobi import JacobiProposer

            made.append(
                JacobiProposer(
                    window=config.window,
                    ngram_size=config.ngram_size,
                    guesses=config.guesses,
                    pool_from_prompt=config.pool_from_prompt,
                )
            )
    return made
