"""Proposers of a user's own: made for a call, and what they offer checked before it is drafted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead.drafting.budget import ProposerBudget
from lookahead.drafting.proposal import Call, Feedback, IntArray, Proposal, Proposer, ProposerFactory, question_of
from lookahead.errors import ProposerError

_METHODS = ("start", "propose", "observe", "finish")
_ATTRIBUTES = ("sources", "needs_argmax", "needs_top", "hidden_layers")
_PATIENCE = 8  # steps without a question for which hidden states are kept


class CustomProposer:
    """Stands before a proposer that was not written here, so that a mistake in it is told and never decoded.

    Where time counts it is shown only rows that it can be afforded for, and asked as long as it is worth its time. One
    that reads hidden states, which have to be kept for it, is done with a row once it is not asked any more.

    Args:
        factory: What the configuration holds; called once.
        call: The call it makes a proposer for.
        budget: What it was worth so far.

    Raises:
        ProposerError: What it makes is no proposer, or offers what is no tree of tokens the target knows.
    """

    def __init__(self, factory: ProposerFactory, call: Call, budget: ProposerBudget) -> None:
        proposer = factory(call)
        self._name = getattr(factory, "__name__", type(factory).__name__)
        lacking = [name for name in (*_METHODS, *_ATTRIBUTES) if not hasattr(proposer, name)]
        if lacking:
            raise ProposerError(
                f"the proposer {self._name} gave a {type(proposer).__name__}, which is none: it has no "
                f"{', '.join(lacking)}; derive it from lookahead.drafting.proposal.Proposer"
            )
        sources = proposer.sources
        if not isinstance(sources, tuple) or not sources or not all(isinstance(each, str) for each in sources):
            raise ProposerError(f"sources of the proposer {self._name} must be a tuple of names, got {sources!r}")
        self._proposer: Proposer = proposer
        self._question = question_of(proposer)
        self._vocab_size = call.vocab_size
        self._by_rejection = call.by_rejection
        self._is_chain = call.is_chain
        self._is_timed = call.is_timed
        self._budget = budget
        self._is_new = True  # it was not asked since it was shown a row
        self._unasked: dict[int, int] = {}  # steps since the last question, of the rows it was shown
        self._spent_s: float | None = None  # since the last step; None where it was not asked
        self._roots: dict[int, int] = {}  # newest tokens of the rows it was shown
        self.sources = sources
        self.needs_argmax = bool(proposer.needs_argmax)
        self.needs_top = bool(proposer.needs_top)
        self.hidden_layers = tuple(proposer.hidden_layers)

    @property
    def reads_hidden(self) -> bool:
        """Whether it wants the hidden states of the next pass."""
        return bool(self.hidden_layers and self._roots)

    def start(self, row: int, prompt: IntArray) -> None:
        """Show it a new row, if it is worth it."""
        is_poor = not self._budget.begins or (bool(self.hidden_layers) and not self._budget.affords)
        if self._is_timed and is_poor:
            return
        self._roots[row] = int(prompt[-1])
        self._unasked[row], self._is_new = 0, True
        self._proposer.start(row, prompt)

    def propose(self, row: int, room: int) -> Proposal | None:
        """What it offers for one row."""
        return self.propose_batch([row], room)[0]

    def propose_batch(self, rows: Sequence[int], room: int) -> Sequence[Proposal | None]:
        """What it offers for some rows, all at once where it can; nothing where it is not worth asking."""
        known = [row for row in rows if row in self._roots]
        is_poor = self._is_timed and not self._budget.affords
        if is_poor:
            self._leave(known)
        if is_poor or not known:
            return [None] * len(rows)
        begin = time.perf_counter()
        offers = dict(zip(known, self._ask(known, room), strict=True))
        self._spent_s = time.perf_counter() - begin
        self._unasked.update(dict.fromkeys(known, 0))
        return [offers.get(row) for row in rows]

    def _ask(self, rows: Sequence[int], room: int) -> Sequence[Proposal | None]:
        """Ask it, and check what it says."""
        offers = self._question(rows, room)
        if len(offers) != len(rows):
            raise ProposerError(f"the proposer {self._name} gave {len(offers)} proposals for {len(rows)} rows")
        for row, offer in zip(rows, offers, strict=True):
            fault = "" if offer is None else self._fault(row, offer, room)
            if fault:
                raise ProposerError(f"the proposer {self._name} gave a proposal for row {row} {fault}")
        return offers

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Let it learn."""
        if row not in self._roots:
            return
        self._roots[row] = int(feedback.tokens[-1])
        begin = time.perf_counter()
        self._proposer.observe(row, feedback, placed)
        if self._spent_s is not None:
            self._spent_s += time.perf_counter() - begin
            return
        self._unasked[row] += 1
        if self._is_timed and self._unasked[row] > _PATIENCE:
            self._leave([row])

    def settle(self, *, alone: float, tokens: float, step_s: float) -> float | None:
        """Learn what a step gave that only this proposer foretold, as told to `ProposerBudget.settle`.

        Returns:
            Seconds it took of the step, where they are on its own account alone: it has not earned more than it takes,
            or read the prompt. None where all sources answer for it together, or it was not asked.
        """
        spent_s, self._spent_s = self._spent_s, None
        is_first = self._is_new
        self._is_new = is_first and spent_s is None
        self._budget.settle(spent_s=spent_s, alone=alone, tokens=tokens, step_s=step_s, is_first=is_first)
        return None if self._budget.earns and not is_first else spent_s

    def finish(self, row: int) -> None:
        """Let it forget the row."""
        if row in self._roots:
            del self._roots[row], self._unasked[row]
            self._proposer.finish(row)

    def _leave(self, rows: Sequence[int]) -> None:
        """Be done with rows that it is not asked for, if that has a price: hidden states kept for it."""
        for row in rows if self.hidden_layers else ():
            self.finish(row)

    def _fault(self, row: int, offer: Proposal, room: int) -> str:
        """What is wrong with a proposal, or an empty string: the tree is made by code that checks nothing more."""
        arrays: dict[str, tuple[Any, Any]] = {"tokens": (offer.tokens, np.int32), "parents": (offer.parents, np.int32)}
        arrays["probabilities"] = (offer.probabilities, np.float32)
        if offer.sources is not None:
            arrays["sources"] = (offer.sources, np.int32)
        size = len(offer.tokens)
        for name, (array, dtype) in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (size,):
                got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                return f"whose {name} must be {np.dtype(dtype)} ({size},), got {got}"
        if not 1 <= size <= room + 1:
            return f"of {size} nodes, room is for 1 to {room + 1}, the root counted"
        if offer.tokens[0] != self._roots[row]:
            return f"whose root is {offer.tokens[0]}, the row's newest token is {self._roots[row]}"
        if offer.tokens.min() < 0 or offer.tokens.max() >= self._vocab_size:
            return f"with a token beyond 0 to {self._vocab_size - 1}"
        if offer.parents[0] != 0 or offer.parents.min() < 0 or (offer.parents[1:] >= np.arange(1, size)).any():
            return "whose parents do not come before their children"
        if not (offer.probabilities.min() >= 0.0 and offer.probabilities.max() <= 1.0):
            return "with a probability beyond 0 to 1"
        if offer.sources is not None and (offer.sources.min() < 0 or offer.sources.max() >> len(self.sources)):
            return f"whose sources set other bits than the first {len(self.sources)}"
        if not 0 <= offer.required <= size:
            return f"that requires {offer.required} of its {size} nodes"
        return self._fault_of_draws(offer) if self._by_rejection else ""

    def _fault_of_draws(self, offer: Proposal) -> str:
        """What keeps a proposal from being accepted by rejection sampling, or an empty string."""
        size, draws = len(offer.tokens), offer.draws
        if draws is None:
            return "without its draws, and acceptance is 'rejection'"
        if self._is_chain and (offer.parents[1:] != np.arange(size - 1)).any():
            return "that is no chain, and the model verifies nothing else"
        if offer.required < size:
            return f"that requires {offer.required} of its {size} nodes, and what was drawn must all be tried"
        distributions, origins = draws.distributions, draws.origins
        if distributions.ndim != 2 or distributions.shape[1] > self._vocab_size or origins.shape != (size,):
            return f"with draws of shapes {tuple(distributions.shape)} and {origins.shape}"
        if size > 1 and not 0 <= origins[1:].min() <= origins[1:].max() < len(distributions):
            return f"with origins beyond its {len(distributions)} distributions"
        drawn = distributions[torch.from_numpy(origins[1:]).long(), torch.from_numpy(offer.tokens[1:]).long()]
        return "" if bool((drawn > 0).all()) else "with a node that its distribution could not give"
