"""Parts of `lookahead.kernels.row_attention`: which nodes of which rows a thread attends to at once."""

from __future__ import annotations

from lookahead.kernels.microkernel import ROWS
from lookahead.kernels.scalars import jit_part
from lookahead.kernels.weighted_sums import FEW

MAX_TURNS = 4  # parts of a group's nodes for different threads, each of which reads all keys
MAX_SHARING = 8  # rows that read the same keys at once
_FEWEST = 2  # nodes of such a part


@jit_part
def units_of(groups, trees, kv_heads, threads):
    """How many groups and KV heads there are; the first ones that threads share evenly; and the parts of each other."""
    units, widest = 0, 0
    for group in groups:
        units += kv_heads if group[1] else 0
        widest = max(widest, nodes_of(group, trees))
    turns = max(1, min(threads, MAX_TURNS, widest // _FEWEST))
    return units, units // threads * threads if turns > 1 else units, turns


@jit_part
def nodes_of(group, trees):
    """The unscored nodes of the rows of a group."""
    nodes = 0
    for row in group[2 : 2 + group[1]]:
        nodes += trees[row, 1] - trees[row, 2]
    return nodes


@jit_part
def share_of(tree, before, begin, end):
    """Some unscored nodes of a tree, as in `trees`: those from `begin` to `end` among its group's.

    `before` are the group's nodes before them.
    """
    start, count, scored, first = tree
    begin, end = min(max(begin - before, 0), count - scored), min(max(end - before, 0), count - scored)
    return start, scored + end, scored + begin, first + begin


@jit_part
def end_of_depth(depths, node, count):
    """The node after those that follow a node at its depth."""
    until = node + 1
    while until < count and depths[until] == depths[node]:
        until += 1
    return until


@jit_part
def shallowest(depths, node, until):
    """The least depth of some nodes."""
    least = depths[node]
    for other in range(node, until):
        least = min(least, depths[other])
    return least


@jit_part
def whole_tiles(rows):
    """The number of rows in whole tiles."""
    return (rows + FEW - 1) // FEW * FEW


@jit_part
def most_rows_of(groups, trees, per_kv):
    """The query rows of a KV head in the largest group, in whole tiles."""
    most = 0
    for group in groups:
        filled = 0
        for row in group[2 : 2 + group[1]]:
            filled += whole_tiles((trees[row, 1] - trees[row, 2]) * per_kv)
        most = max(most, filled)
    return (most + ROWS - 1) // ROWS * ROWS
