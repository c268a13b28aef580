"""Speculative sampling: accepts draws from a draft's distribution so that outputs follow the target's.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", §2.3 (one draw: accept with
    min(1, p/q), else draw from norm(max(0, p - q))); Chen et al. 2023, "Accelerating Large Language Model Decoding with
    Speculative Sampling"; Miao et al. 2024, "SpecInfer", §4.3 (several draws, in rounds); Jeon et al. 2024, "Recursive
    Speculative Decoding", §3.2 (draws without replacement).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lookahead.drafting.proposal import IntArray, Proposal


def coin(chance: float) -> bool:
    """True with a probability from 0 to 1."""
    return float(torch.rand((), dtype=torch.float32, device="cpu")) < chance


def draw(weights: Tensor) -> int:
    """Draw one index by `[vocab]` weights."""
    return int(torch.multinomial(weights, 1))


def draw_several(weights: Tensor, count: int) -> Tensor:
    """Draw from every row of `[n, vocab]` weights without replacement: int64 `[n, count]`, -1 if no weight is left."""
    # Exponential clocks arrive in the order of successive draws.
    times = weights / torch.empty_like(weights).exponential_()
    arrived, order = times.topk(min(count, weights.shape[-1]), sorted=True)
    order = torch.where(arrived > 0, order, -1)
    return torch.nn.functional.pad(order, (0, count - order.shape[-1]), value=-1)


class RejectionRounds:
    """The draws of proposers at the nodes of one row's draft, tried in order; `placed` is as in `Draft`."""

    def __init__(self, offers: Sequence[Proposal | None], placed: Sequence[IntArray]) -> None:
        self._rounds: dict[int, list[tuple[Tensor, list[int]]]] = {}
        for offer, where in zip(offers, placed, strict=True):
            if offer is None or offer.draws is None:
                continue
            families: dict[int, tuple[Tensor, list[int]]] = {}
            parents, origins = offer.parents.tolist(), offer.draws.origins.tolist()
            for node, (parent, token) in enumerate(zip(parents, offer.tokens.tolist(), strict=True)):
                if node == 0 or where[node] == 0:  # the node and its siblings lie beyond the end of the output
                    continue
                if parent not in families:
                    families[parent] = (offer.draws.distributions[origins[node]], [])
                    self._rounds.setdefault(int(where[parent]), []).append(families[parent])
                families[parent][1].append(token)

    def choose(self, node: int, chances: Tensor) -> int:
        """The token after a node of the draft, distributed as the target's probabilities, `chances`, float `[vocab]`.

        Returns an accepted child of the node, else a draw from the residual distribution.
        """
        p = chances.cpu().double()  # on a device every iteration would synchronize
        for distribution, tokens in self._rounds.get(node, ()):
            q = torch.zeros_like(p)
            q[: len(distribution)] = distribution.cpu()
            q /= q.sum()
            for token in tokens:
                if coin(min(1.0, float(p[token] / q[token]))):
                    return token
                p = _normalized((p - q).clamp_(min=0.0), p)
                q[token] = 0.0
                q = _normalized(q, q)
        return draw(p)


def _normalized(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights divided by their sum; `otherwise` if rounding left a sum of 0."""
    total = weights.sum()
    return weights / total if float(total) > 0.0 else otherwise
