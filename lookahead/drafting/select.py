"""Merge proposals into one draft, and size the drafts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.cost_model import FloatArray
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.ngram.prune import FREE, Limits, rank, select, union
from lookahead.utils.jit import njit

if TYPE_CHECKING:
    from lookahead.drafting.proposal import Proposal

_BESIDE_JUDGE = 0.1  # factor on the probability of a node that the surest proposer passed over
_CERTAIN = np.ones(1)
_NONE_REQUIRED = np.zeros(1, np.int32)
NO_ENDS: NDArray[np.int64] = np.zeros(0, np.int64)


class Draft(NamedTuple):
    """One row's tree, and the place of each proposal's nodes in it.

    For each proposer, `placed` holds the tree node of each node of its proposal, 0 if it was dropped; it is empty if
    the proposer offered nothing. The sum of `path_probs` is the expected number of tokens of the step. A draft reduced
    to its root has no `proposals`.

    Example:
        >>> draft = Draft(TokenTree.from_parents([5, 6, 7], [0, 0, 1]), (np.array([0, 1, 2], np.int32),))
        >>> draft.root_only().tree.tokens.tolist(), draft.root_only().placed[0].tolist()
        ([5], [0, 0, 0])
    """

    tree: TokenTree
    placed: tuple[IntArray, ...]
    path_probs: FloatArray = _CERTAIN  # [nodes], the probability that the node is accepted; 1 for the root
    required: IntArray = _NONE_REQUIRED  # [nodes], 1 if a node must be in the draft
    proposals: Sequence[Proposal | None] = ()

    def root_only(self) -> Draft:
        """The draft reduced to its root."""
        root = TokenTree.root(int(self.tree.tokens[0]))
        return Draft(root, tuple(np.zeros(len(where), np.int32) for where in self.placed))


def merge(
    root: int,
    proposals: Sequence[Proposal | None],
    limits: Limits,
    *,
    sources: Sequence[int] | None = None,
    costs: FloatArray = FREE,
    judge: int = 0,
    ends: NDArray[np.int64] = NO_ENDS,
) -> Draft:
    """Merge proposals by prefix and select the nodes with the most expected tokens per cost.

    A node offered by several proposers gets the highest of their probabilities. Selection and layout follow
    `lookahead.ngram.prune.select`: the most likely path is 0, 1, 2, …, and committing it moves no KV.

    Args:
        root: The row's last token, the root of each proposal.
        proposals: The proposal of each proposer; None if it offered nothing.
        limits: Limits of the draft.
        sources: Number of sources of each proposer, at most 31 in total; their bits are consecutive in the tree. One
            each when None.
        costs: float64 `[max_nodes + 2]` or longer, the cost of a step by its nodes, including the root; empty if nodes
            are free.
        judge: The bits of a proposer that is surer than the others: a node of theirs beside its nodes, which it does
            not offer, counts a tenth of its probability.
        ends: int64 `[n]`, the tokens that end the output: no node behind one is selected.

    Raises:
        ValueError: `sources` and `proposals` differ in length.

    Example:
        >>> from lookahead.drafting.proposal import Proposal
        >>> parents, probabilities = np.array([0, 0, 1], np.int32), np.array([1.0, 0.6, 0.5], np.float32)
        >>> chains = np.array([[5, 6, 7], [5, 6, 8]], np.int32)
        >>> proposals = [Proposal(chain, parents, probabilities) for chain in chains]
        >>> draft = merge(5, proposals, Limits(max_nodes=8, max_depth=4))
        >>> draft.tree.tokens.tolist(), draft.tree.parents.tolist(), draft.path_probs.round(1).tolist()
        ([5, 6, 7, 8], [0, 0, 1, 1], [1.0, 0.6, 0.3, 0.3])
    """
    arrays, offers, ranges, first, end = [], [], [], 0, 0
    for offer, count in zip(proposals, sources or [1] * len(proposals), strict=True):
        begin = end
        if offer is not None:
            size = len(offer.tokens)
            arrays.append(offer[:4] if offer.sources is not None else (*offer[:3], np.ones(size, np.int32)))
            offers.append((size, offer.required, first))
            end += size
        ranges.append(slice(begin, end))
        first += count
    if not arrays:
        return Draft(TokenTree.root(root), tuple(np.zeros(0, np.int32) for _ in proposals))
    offered = arrays[0] if len(arrays) == 1 else tuple(map(np.concatenate, zip(*arrays, strict=True)))
    whole, path_probs, placed = _merge(root, offered, np.array(offers), (*limits,), costs, judge, ends)
    tree = TokenTree(whole[0], whole[1], whole[2], whole[3])
    return Draft(tree, tuple([placed[nodes] for nodes in ranges]), path_probs, whole[4], proposals)


class BatchValue(NamedTuple):
    """The value of tokens to a batch, which ends with its longest row: the wall time that they save.

    Example:
        >>> value = BatchValue.of([10, 2], plain=np.array([0.0, 1.0, 1.0]), p_runs_to_limit=1.0)
        >>> value.steps_saved([0.0, 2.0]), value.steps_saved([2.0, 0.0])  # the batch ends with its first row
        (0.0, 2.0)
    """

    left: FloatArray  # [rows], tokens that each row may still emit
    plain: FloatArray  # [rows + 1], cost of a plain step of 0, 1, … rows; non-decreasing

    @classmethod
    def of(cls, left: Sequence[int], plain: FloatArray, p_runs_to_limit: float) -> BatchValue:
        """The value if rows run to their limits with probability `p_runs_to_limit`; the last row then ends the batch.

        Otherwise rows may end at any time, and tokens of all rows are worth the same.
        """
        rows = len(left)
        weights = p_runs_to_limit * plain / plain[-1] + (1.0 - p_runs_to_limit) * np.arange(rows + 1.0) / rows
        return cls(np.array(left, np.float64), weights)

    def steps_saved(self, tokens: Sequence[float]) -> float:
        """Plain steps of all rows by which the batch ends sooner if each row gains `tokens`."""
        return float(_steps_saved(np.array(tokens, np.float64), self.left, self.plain))


def fit(drafts: Sequence[Draft], costs: FloatArray, batch: BatchValue, *, ragged_nodes: int = 0) -> list[Draft]:
    """Cut the drafts of a batch, merged without costs, to the sizes that save the most per cost.

    A padded pass computes the size of the largest tree for every row: each tree keeps its required and its most likely
    nodes up to one size. A ragged pass computes only the nodes of all trees: the most likely nodes across trees are
    kept, at most `ragged_nodes`. `costs` are by nodes per row, in a ragged pass by their mean over the rows.

    Example:
        >>> tree = TokenTree.from_parents([5, 6, 7], [0, 0, 1])
        >>> drafts = [Draft(tree, (), np.array([1.0, 0.9, p]), np.zeros(3, np.int32)) for p in (0.8, 0.1)]
        >>> value, costs = BatchValue(np.full(2, 100.0), np.array([0.0, 0.5, 1.0])), np.array([1.0, 1.0, 1.3, 1.7])
        >>> [len(draft.tree) for draft in fit(drafts, costs, value)]
        [2, 2]
        >>> [len(draft.tree) for draft in fit(drafts, costs, value, ragged_nodes=6)]
        [3, 2]
    """
    path_probs = np.concatenate([draft.path_probs for draft in drafts])
    required = np.concatenate([draft.required for draft in drafts])
    ends = np.cumsum([len(draft.tree) for draft in drafts])
    options = path_probs, required, ends, costs, batch.left, batch.plain
    size, ranks = _fit_ragged(ragged_nodes, *options) if ragged_nodes else _fit(*options)
    fitted = []
    for draft, end in zip(drafts, ends, strict=True):
        tree, keep = draft.tree, ranks[end - len(draft.tree) : end] < size
        place = np.where(keep, np.cumsum(keep, dtype=np.int32) - 1, 0)
        cut = TokenTree(tree.tokens[keep], place[tree.parents[keep]], tree.depths[keep], tree.sources[keep])
        placed = tuple(place[where] for where in draft.placed)
        fitted.append(Draft(cut, placed, draft.path_probs[keep], draft.required[keep], draft.proposals))
    return fitted


@njit(error_model="numpy")
def _merge(root, offered, offers, limits, costs, judge, ends):
    """Tokens, parents, depths, sources and required flags, int32 `[5, nodes]`; path probabilities; places of nodes."""
    merged, path_probs, placed = union(root, offered, offers)
    parents = merged[1]
    if judge:
        judged = np.zeros(len(path_probs), np.bool_)
        for node in range(1, len(path_probs)):
            judged[parents[node]] |= (merged[3, node] & judge) != 0
        for node in range(1, len(path_probs)):
            if judged[parents[node]] and (merged[3, node] & judge) == 0:
                path_probs[node] *= _BESIDE_JUDGE
    for node in range(1, len(path_probs)):
        path_probs[node] *= path_probs[parents[node]]
        for end in ends:
            if parents[node] and merged[0, parents[node]] == end:
                path_probs[node] = 0.0
        if limits[3]:
            merged[4, node] = 0
    order = select(parents, merged[2], path_probs, merged[4], limits, costs)
    # Loops compile in a fraction of the time of NumPy's array indexing.
    places, whole, probs = (
        np.zeros(len(path_probs), np.int32),
        np.empty((5, len(order)), np.int32),
        np.empty(len(order)),
    )
    for place in range(len(order)):
        node = order[place]
        places[node], probs[place] = place, path_probs[node]
        for line in range(5):
            whole[line, place] = merged[line, node]
        whole[1, place] = places[parents[node]]
    for at in range(len(placed)):
        placed[at] = places[placed[at]]
    return whole, probs, placed


@njit(error_model="numpy")
def _steps_saved(tokens, left, plain):
    return (_seconds_left(left, tokens, 0.0, plain) - _seconds_left(left, tokens, 1.0, plain)) / plain[len(left)]


@njit(error_model="numpy")
def _seconds_left(left, tokens, share, plain):
    """Time of plain decoding of the rest of every row, after a share of the tokens."""
    rows, seconds = len(left), 0.0
    ends = np.empty(rows)  # steps after which a row ends, sorted
    for row in range(rows):
        end, at = max(0.0, left[row] - share * tokens[row]), row
        while at > 0 and ends[at - 1] > end:
            ends[at] = ends[at - 1]
            at -= 1
        ends[at] = end
    for at in range(rows):  # cost of this row over a step without it
        seconds += ends[at] * (plain[rows - at] - plain[rows - at - 1])
    return seconds


@njit(error_model="numpy")
def _fit(path_probs, required, ends, costs, left, plain):
    """The size of the cut trees, and the rank of every node in its tree, int64 `[nodes]`."""
    ranks = np.zeros(len(path_probs), np.int64)
    gains = np.zeros((len(costs), len(ends)))
    least, most, begin = 1, 1, 0
    for row, end in enumerate(ends):
        values = np.empty(end - begin)
        for at in range(len(values)):
            values[at] = 2.0 if required[begin + at] > 0 else path_probs[begin + at]
        values[0] = 3.0
        ranked = np.empty(len(values), np.int64)
        rank(values, ranked)
        for at in range(1, len(ranked)):
            ranks[begin + ranked[at]] = at
            gains[at + 1, row] = path_probs[begin + ranked[at]]
        least, most = max(least, 1 + required[begin:end].sum()), max(most, len(ranked))
        begin = end
    expected, best, best_rate = np.ones(len(ends)), least, 0.0
    for size in range(1, most + 1):
        expected += gains[size]
        if size >= least:
            rate = _steps_saved(expected, left, plain) / costs[size]
            if rate > best_rate:
                best, best_rate = size, rate
    return best, ranks


@njit(error_model="numpy")
def _fit_ragged(most, path_probs, required, ends, costs, left, plain):
    """The total number of nodes kept in all trees, and the rank of every node among all, int64 `[nodes]`."""
    rows, row = len(ends), 0
    owners = np.empty(len(path_probs), np.int64)
    values = np.empty(len(path_probs))
    for node in range(len(path_probs)):
        values[node] = 2.0 if required[node] > 0 else path_probs[node]
        if node == ends[row]:
            row += 1
        owners[node] = row
        if node == 0 or owners[node - 1] < row:
            values[node] = 3.0
    ranked, ranks = np.empty(len(values), np.int64), np.empty(len(values), np.int64)
    rank(values, ranked)
    expected, least, best, best_rate = np.zeros(rows), 0, rows, 0.0
    for value in values:
        least += int(value >= 2.0)
    for at in range(len(ranked)):
        node, size = ranked[at], at + 1
        ranks[node] = at
        expected[owners[node]] += path_probs[node]
        if least <= size <= max(least, most):
            below = min(size // rows, len(costs) - 2)
            cost = costs[below] + (size / rows - below) * (costs[below + 1] - costs[below])
            rate = _steps_saved(expected, left, plain) / cost
            if rate > best_rate:
                best, best_rate = size, rate
    return best, ranks
