"""Proposers written by users: proposals are validated, and a budget bounds their loss."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from lookahead.drafting.budget import START, Budget
from lookahead.drafting.proposal import (
    BatchProposer,
    Call,
    Feedback,
    IntArray,
    Proposal,
    Proposer,
    ProposerFactory,
)
from lookahead.errors import ProposerError

_METHODS = ("start", "propose", "observe", "finish")
_ATTRIBUTES = ("sources", "needs_argmax", "needs_top", "hidden_layers")
_PATIENCE = 8  # steps for which hidden states are kept for a proposer that is not called


class ValidatedProposer(BatchProposer):
    """Wraps a user's proposer: validates every proposal, and calls it only while its budget allows.

    With `draft="auto"` it gets only the rows that its budget can pay for. A proposer that reads hidden states, which
    cost memory, finishes a row once it is no longer called for it.
    """

    def __init__(self, factory: ProposerFactory, call: Call, budget: Budget) -> None:
        proposer = factory(call)
        self._name = getattr(factory, "__name__", type(factory).__name__)
        lacking = [name for name in (*_METHODS, *_ATTRIBUTES) if not hasattr(proposer, name)]
        if lacking:
            raise ProposerError(
                f"the factory {self._name} returned a {type(proposer).__name__}, which is not a proposer: it has no "
                f"{', '.join(lacking)}; derive it from lookahead.proposers.base.Proposer"
            )
        sources = proposer.sources
        if not isinstance(sources, tuple) or not sources or not all(isinstance(source, str) for source in sources):
            raise ProposerError(f"sources of the proposer {self._name} must be a tuple of names, got {sources!r}")
        self._proposer = proposer
        self._ask_rows = getattr(proposer, "propose_batch", partial(Proposer.propose_batch, proposer))
        self._call, self._budget = call, budget
        self._is_new = True  # not called since it got a row
        self._unasked: dict[int, int] = {}  # steps since its last call, by row
        self._spent_s: float | None = None  # since the last step; None if it was not called
        self._roots: dict[int, int] = {}  # last tokens of its rows
        self.sources = sources
        self.needs_argmax = bool(proposer.needs_argmax)
        self.needs_top = bool(proposer.needs_top)
        self.hidden_layers = tuple(proposer.hidden_layers)
        self.reads_inputs = bool(getattr(proposer, "reads_inputs", False))
        self.reads_offers = bool(getattr(proposer, "reads_offers", False))
        self.is_judge = bool(getattr(proposer, "is_judge", False))
        self.shares_cache = bool(getattr(proposer, "shares_cache", False))

    @property
    def reads_hidden(self) -> bool:
        """Whether it needs the hidden states of the next pass."""
        return bool(self.hidden_layers and self._roots)

    def share_cache(self, cache: Any) -> None:
        self._proposer.share_cache(cache)

    def start(self, row: int, prompt: IntArray) -> None:
        is_poor = not self._budget.begins or (bool(self.hidden_layers) and not self._budget.affords)
        if self._call.is_timed and is_poor and not self.shares_cache:  # its rows are those of the cache
            return
        if self.shares_cache:  # it has no prompt to read: every output begins with what the first did, and one call
            self._budget.balance = max(self._budget.balance, START + self._budget.price.value)
        self._roots[row] = int(prompt[-1])
        self._unasked[row], self._is_new = 0, True
        self._proposer.start(row, prompt)

    def expect(self, row: int, predictions: Sequence[IntArray]) -> None:
        if row in self._roots and hasattr(self._proposer, "expect"):  # optional if it is not derived from `Proposer`
            self._proposer.expect(row, predictions)

    def propose_batch(
        self, rows: Sequence[int], max_nodes: int, offers: Sequence[Sequence[Proposal | None]] = ()
    ) -> Sequence[Proposal | None]:
        """Its proposals for rows, in one batch if supported; None for every row while it is not called."""
        served = [row for row in rows if row in self._roots]
        is_poor = self._call.is_timed and not self._budget.affords
        if is_poor:
            self._leave(served)
        if is_poor or not served:
            return [None] * len(rows)
        begin = time.perf_counter()
        of_known = [
            [offer for row, offer in zip(rows, offered, strict=True) if row in self._roots] for offered in offers
        ]
        made = self._ask_rows(served, max_nodes, *([of_known] if self.reads_offers else []))
        if len(made) != len(served):
            raise ProposerError(f"the proposer {self._name} gave {len(made)} proposals for {len(served)} rows")
        offered: dict[int, Proposal] = {}
        for row, offer in zip(served, made, strict=True):
            if offer is None:
                continue
            if fault := self._fault(row, offer, max_nodes):
                raise ProposerError(f"the proposer {self._name} gave a proposal for row {row} {fault}")
            # Strided or read-only views would make the merge code compile again.
            fields: list[Any] = [np.require(x, None, ["C", "W"]) if isinstance(x, np.ndarray) else x for x in offer]
            offered[row] = Proposal(*fields)
        self._spent_s = time.perf_counter() - begin
        self._unasked.update(dict.fromkeys(served, 0))
        return [offered.get(row) for row in rows]

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        if row not in self._roots:
            return
        self._roots[row] = int(feedback.tokens[-1])
        begin = time.perf_counter()
        self._proposer.observe(row, feedback, placed)
        if self._spent_s is not None:
            self._spent_s += time.perf_counter() - begin
            return
        self._unasked[row] += 1
        if self._call.is_timed and self._unasked[row] > _PATIENCE:
            self._leave([row])

    def settle(self, *, alone: float, tokens: float, step_s: float) -> float | None:
        """Count a step as `Budget.charge` does; returns the seconds charged only to its budget, or None.

        They are returned if the budget is not proven or the step read the prompt.
        """
        spent_s, self._spent_s = self._spent_s, None
        is_first = self._is_new
        self._is_new = is_first and spent_s is None
        self._budget.charge(spent_s=spent_s, alone=alone, tokens=tokens, step_s=step_s, is_first=is_first)
        return None if self._budget.is_proven and not is_first else spent_s

    def finish(self, row: int) -> None:
        if row in self._roots:
            del self._roots[row], self._unasked[row]
            self._proposer.finish(row)

    def _leave(self, rows: Sequence[int]) -> None:
        """Finish rows that it is not called for, if it reads hidden states, which cost memory."""
        for row in rows if self.hidden_layers else ():
            self.finish(row)

    def _fault(self, row: int, offer: Proposal, max_nodes: int) -> str:
        """The fault of a proposal, or an empty string. The compiled merge code does no further checks."""
        size = len(offer.tokens)
        for name in ("tokens", "parents", "probabilities", "sources"):
            array, dtype = getattr(offer, name), np.float32 if name == "probabilities" else np.int32
            if array is None and name == "sources":
                continue
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (size,):
                got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                return f"whose {name} must be {np.dtype(dtype)} ({size},), got {got}"
        if not 1 <= size <= max_nodes + 1:
            return f"of {size} nodes, allowed are 1 to {max_nodes + 1}, the root counted"
        if offer.tokens[0] != self._roots[row]:
            return f"whose root is {offer.tokens[0]}, the row's last token is {self._roots[row]}"
        if offer.tokens.min() < 0 or offer.tokens.max() >= self._call.vocab_size:
            return f"with a token outside of 0 to {self._call.vocab_size - 1}"
        if offer.parents[0] != 0 or offer.parents.min() < 0 or (offer.parents[1:] >= np.arange(1, size)).any():
            return "whose parents do not come before their children"
        if not (offer.probabilities.min() >= 0.0 and offer.probabilities.max() <= 1.0):
            return "with a probability outside of 0 to 1"
        if offer.sources is not None and (offer.sources.min() < 0 or offer.sources.max() >> len(self.sources)):
            return f"whose sources set bits beyond the first {len(self.sources)}"
        if not 0 <= offer.required <= size:
            return f"that requires {offer.required} of its {size} nodes"
        if not self._call.by_rejection:
            return ""
        draws = offer.draws
        if draws is None:
            return "without its draws, and acceptance is 'rejection'"
        if self._call.is_chain and (offer.parents[1:] != np.arange(size - 1)).any():
            return "that is not a chain, and the model verifies chains only"
        if offer.required < size:
            return f"that requires {offer.required} of its {size} nodes, and all drawn nodes must be required"
        distributions, origins = draws.distributions, draws.origins
        if distributions.ndim != 2 or distributions.shape[1] > self._call.vocab_size or origins.shape != (size,):
            return f"with draws of shapes {tuple(distributions.shape)} and {origins.shape}"
        if size > 1 and not 0 <= origins[1:].min() <= origins[1:].max() < len(distributions):
            return f"with origins outside of its {len(distributions)} distributions"
        if size > 1 and not (distributions.min() >= 0.0 and distributions.sum().isfinite()):
            return "with a probability that is negative, infinite or NaN in a distribution"
        drawn = distributions[torch.from_numpy(origins[1:]).long(), torch.from_numpy(offer.tokens[1:]).long()]
        return "" if bool((drawn > 0).all()) else "with a node whose probability in its distribution is 0"
