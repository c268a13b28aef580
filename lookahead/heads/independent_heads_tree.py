"""The tree of guesses of heads that do not see each other's: every guess of one head may follow every one before."""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit

from lookahead.heads.guess_tree import FloatArray, GuessTree, IntArray
from lookahead.heads.hit_rates import HeadRates


def grow_product(root: int, tokens: IntArray, promised: FloatArray, rates: HeadRates, room: int) -> GuessTree:
    """Combine the guesses of independent heads into the tree of so many nodes that promises most.

    Published trees of this kind are chosen once, from the average accuracy of every rank of every head. Here every
    step has its own, from what the heads say now: the nodes of the highest product of chances along their path.

    Args:
        root: The token that the first head's guesses follow.
        tokens: int32 `[heads, k]`, the guesses of each head, all different, the likeliest first.
        promised: float32 `[heads, k]`, the probabilities that the heads give them.
        rates: How far that can be trusted.
        room: Most nodes besides the root.

    Source: Cai et al. 2024, "Medusa", §2.3.3 (sparse trees), there greedy over measured accuracies.
    """
    heads, width = tokens.shape
    kinds = np.indices((heads, width), np.int32).reshape(2, -1).T
    chances = rates.calibrate(np.ascontiguousarray(kinds), promised.reshape(-1)).reshape(heads, width)
    order = np.argsort(-chances, axis=1, kind="stable").astype(np.int32)
    return GuessTree(*_grow(root, tokens, promised, chances, order, room))


@njit(cache=True)
def _grow(root, tokens, promised, chances, order, room):
    """Take the likeliest node at hand, again and again; at hand are its next sibling and its first child."""
    heads, width = tokens.shape
    out_tokens, parents = np.empty(room + 1, np.int32), np.zeros(room + 1, np.int32)
    kinds, reach = np.zeros((room + 1, 2), np.int32), np.ones(room + 1, np.float64)
    out_chances, out_promised = np.ones(room + 1, np.float32), np.ones(room + 1, np.float32)
    out_tokens[0] = root
    count = 1
    # -reach, parent, head, place in the head's order; ties go to the older parent.
    at_hand = [(-1.0 * chances[0, order[0, 0]], 0, 0, 0)] if heads > 0 and width > 0 else [(0.0, 0, 0, 0)]
    while count <= room and len(at_hand) > 0:
        negative, parent, head, place = heapq.heappop(at_hand)
        if negative == 0.0:
            break
        rank = order[head, place]
        out_tokens[count], parents[count], reach[count] = tokens[head, rank], parent, -negative
        kinds[count, 0], kinds[count, 1] = head, rank
        out_chances[count], out_promised[count] = chances[head, rank], promised[head, rank]
        if place + 1 < width:
            heapq.heappush(at_hand, (-reach[parent] * chances[head, order[head, place + 1]], parent, head, place + 1))
        if head + 1 < heads:
            heapq.heappush(at_hand, (negative * chances[head + 1, order[head + 1, 0]], count, head + 1, 0))
        count += 1
    return out_tokens[:count], parents[:count], out_chances[:count], kinds[:count], out_promised[:count]
