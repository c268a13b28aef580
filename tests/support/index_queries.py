"""Queries of the indexes for tests. Drafting queries both inside one compiled search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from lookahead.ngram.chains import MAX_CONTEXT, Chains, IntArray, as_tokens, find_matches
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.search import Search, Trie
from lookahead.ngram.successors import ORDERS, UNIT, SuccessorTable, find_context, hash_context


def find(
    chains: Chains,
    context: Sequence[int] | IntArray | None = None,
    *,
    min_ngram: int = 1,
    max_ngram: int = MAX_CONTEXT,
    max_links: int = 32,
) -> list[tuple[int, int]]:
    """Position of the next token and length of every match of the end of a context; None is the open document."""
    tail = chains.tokens if context is None else as_tokens(context)
    positions, lengths = np.empty((2, max_links), np.int32)
    found = find_matches(chains.state, tail, tail.size, min_ngram, max_ngram, positions, lengths)
    return list(zip(positions[:found].tolist(), lengths[:found].tolist(), strict=True))


def grow_trie(
    texts: Sequence[Chains],
    rates: HitRates,
    max_nodes: int,
    *,
    memory: SuccessorTable | None = None,
    context: Sequence[int] | IntArray | None = None,
    bounds: tuple[int, int, int] = (1, 16, 32),
    min_probability: float = 0.0,
) -> Trie | None:
    """The tree of one search; None if nothing was found."""
    tail = None if context is None else as_tokens(context)
    trie = Search(texts, rates, memory, bounds).grow(max_nodes, min_probability, tail)
    return trie if len(trie.tokens) > 1 else None


def find_recycled(table: SuccessorTable, context: Sequence[int] | IntArray) -> tuple[int, list[int], list[float]]:
    """The length of the known end of a context in tokens, and its successors with their probabilities."""
    tail, hashes = np.asarray(context, np.int32), np.empty(ORDERS, np.uint64)
    order, group, way, _ = _look_up(table.entries, -1, tail, hashes)
    entry = table.entries[group, way]
    return (order, entry["tokens"].tolist(), (entry["probs"] / UNIT).tolist()) if order else (0, [], [])


@njit
def _look_up(entries, since, context, hashes):
    return find_context(entries, since, hashes, hash_context(context, context.size, context, context, 0, hashes))
