"""The part of a grown tree that is worth verifying, and its layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.ngram.candidates import DEPTH, FEATURE, FIRST, PARENT, SOURCES, STOP, TOKEN
from lookahead.ngram.raw_arrays import jit_inline

FREE: NDArray[np.float64] = np.zeros(0)  # costs where there are none


class Limits(NamedTuple):
    """What part of a tree may be verified.

    Attributes:
        budget: Most nodes besides the root.
        max_depth: Deepest node.
        min_probability: Nodes less likely to be reached than this are left out.
        is_chain: Whether only the likeliest child of a node is kept.
    """

    budget: int
    max_depth: int
    min_probability: float = 0.0
    is_chain: bool = False


NOTHING = Limits(0, 0)

# Rows of what is written: five of the whole tree as it grew, where its nodes went, and five of the part.
PLACED, PART = 5, 6
_ROWS = 11


@jit_inline
def cut(nodes, chances, reaches, count, limits, costs):
    """Write down the whole tree and the part of it that is worth verifying.

    Returns int32 `[11, count]`: tokens, parents, features, sources and chances (the bits of float32) of the whole,
    the node of the part that each became, then tokens, parents, depths and sources of the part, as far as it goes,
    and zeros; and the reach of the part's nodes, float64.
    """
    kept = _keep(nodes, reaches, count, limits, costs)
    written, reach = np.empty((_ROWS, count), np.int32), np.empty(kept)
    bits = written[4].view(np.float32)
    for node in range(count):
        written[0, node], written[1, node] = nodes[node, TOKEN], nodes[node, PARENT]
        written[2, node], written[3, node] = nodes[node, FEATURE], nodes[node, SOURCES]
        bits[node] = chances[node]
        written[5, node] = written[10, node] = 0
    _lay_out(nodes, reaches, count, written, reach)
    return written, reach


@jit_inline
def _keep(nodes, reaches, count, limits, costs):
    """Mark in the column `STOP` the nodes that give the most expected tokens per cost; returns how many.

    Nodes were grown in the order of their reach, so the best part is the beginning of what may be kept.
    """
    budget, max_depth, min_probability, is_chain = limits
    kept, best, last, end = 1, 1, 0, 0
    expected, best_rate = 1.0, 0.0
    if costs.size > 0:
        best_rate = 1.0 / costs[1]
    nodes[0, STOP] = 1
    for node in range(1, count):
        nodes[node, STOP] = 0
        if kept > budget or reaches[node] < min_probability:
            continue
        if nodes[node, DEPTH] > max_depth or (is_chain and nodes[node, PARENT] != end):
            continue
        nodes[node, STOP] = 1
        kept, end = kept + 1, node
        expected += reaches[node]
        if costs.size == 0 or expected / costs[kept] > best_rate:
            best, last = kept, node
            best_rate = expected / costs[kept] if costs.size > 0 else 0.0
    for node in range(last + 1, count):
        nodes[node, STOP] = 0
    return best


@jit_inline
def _lay_out(nodes, reaches, count, written, reach):
    """Write the kept nodes as a walk from the root meets them, the likelier child first."""
    # What led to a node is of no use any more: its columns serve to lay the nodes out.
    for node in range(count):
        nodes[node, FIRST] = 0
    for node in range(count - 1, 0, -1):
        if nodes[node, STOP]:
            nodes[node, STOP] = nodes[nodes[node, PARENT], FIRST]
            nodes[nodes[node, PARENT], FIRST] = node
    node, new = 0, 0
    while True:
        parent = written[5, nodes[node, PARENT]]
        written[5, node] = new
        written[6, new], written[7, new] = nodes[node, TOKEN], parent
        written[8, new], written[9, new] = nodes[node, DEPTH], nodes[node, SOURCES]
        reach[new] = reaches[node]
        new += 1
        if new == reach.size:
            return
        if nodes[node, FIRST] > 0:
            node = nodes[node, FIRST]
        else:
            while nodes[node, STOP] == 0:
                node = nodes[node, PARENT]
            node = nodes[node, STOP]
