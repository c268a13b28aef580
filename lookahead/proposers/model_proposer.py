"""What a draft model does within one call: it reads along with the target, and grows trees."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.drafting.proposal import Call, Feedback, IntArray, Proposal, Proposer
from lookahead.models.support import prefills_at_once
from lookahead.models.target import PREFILL_CHUNK, Shape, Target, input_device
from lookahead.proposers.draft_rates import DraftRates
from lookahead.proposers.draft_tree import Growth
from lookahead.proposers.draft_tree_batch import Grove

_FOLLOW = 0.2  # share of a new measurement that is believed


@dataclass(slots=True)
class Pace:
    """Seconds measured for one number of rows; 0 where nothing was measured yet.

    Attributes:
        grow: One pass of the draft model over new nodes, and what is made of it.
        step: From the end of drafting to the target's answer.
    """

    grow: float = 0.0
    step: float = 0.0

    def pays(self, tokens: float, gain: float, spent: float) -> bool:
        """Whether to go on: a further pass beats the tokens per second of going to the target now.

        Nothing is known of the target's steps when the first draft is made, so that one stays small.

        Args:
            tokens: Expected of the draft as it is.
            gain: Expected of a further pass besides.
            spent: Seconds of drafting so far.
        """
        return self.step > 0.0 and gain * (self.step + spent) > tokens * self.grow

    def learn_grow(self, seconds: float) -> None:
        """Count a pass of the draft model."""
        self.grow += (_FOLLOW if self.grow else 1.0) * (seconds - self.grow)

    def learn_step(self, seconds: float) -> None:
        """Count a step of the target."""
        self.step += (_FOLLOW if self.step else 1.0) * (seconds - self.step)


@dataclass(slots=True)
class DraftModelState:
    """What a draft model learned of one target: how far it is to be trusted, and what passes take.

    Attributes:
        rates: For every way tokens are chosen.
        paces: By the number of rows, in powers of two.
    """

    rates: dict[str, DraftRates] = field(default_factory=dict)
    paces: dict[int, Pace] = field(default_factory=dict)


@dataclass(slots=True)
class _DraftRow:
    """One row's text, and the tree that was grown for it last."""

    ids: IntArray
    length: int
    growth: Growth | None = None


class ModelProposer(Proposer):
    """The drafts of one call. Rows share the passes of the draft model, whose cache keeps what was accepted.

    Args:
        model: The draft model.
        call: The call.
        experience: What is known of the draft model, and where more is learned.
        name: What it is called in the stats.
        vocabulary: Token ids that both models know are those below.
        shape: What the draft model can score: trees, or a chain.
        depth: Most passes a step.
        children: Candidates after every node.
        width: Candidates that one pass extends.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        call: Call,
        experience: DraftModelState,
        *,
        name: str,
        vocabulary: int,
        shape: Shape,
        depth: int,
        children: int,
        width: int,
    ) -> None:
        self.sources = (name,)
        self._model = model
        self._call = call
        self._vocabulary = vocabulary
        self._shape = shape
        self._depth = depth
        is_chain = shape == "chains" or call.is_chain
        self._children, self._width = (1, 1) if is_chain else (children, width)
        mode = "drawn" if call.by_rejection else "greedy" if call.warp is None else "sampled"
        self._rates = experience.rates.setdefault(mode, DraftRates(of_draws=call.by_rejection))
        self._paces = experience.paces
        self._rows: dict[int, _DraftRow] = {}
        self._places: list[int] = []  # the rows in the order of the model's passes
        self._target: Target | None = None  # the draft model behind its cache
        self._done: float | None = None  # when the drafts of this step were done

    def start(self, row: int, prompt: IntArray) -> None:
        """Meet a new row; it is read when a draft is asked for."""
        ids = np.empty(max(self._call.max_length, len(prompt) + 1), np.int32)
        ids[: len(prompt)] = prompt
        self._rows[row] = _DraftRow(ids, len(prompt))
        self._target = None

    def propose(self, row: int, room: int) -> Proposal | None:
        """Draft for one row."""
        return self.propose_batch([row], room)[0]

    def propose_batch(self, rows: Sequence[int], room: int) -> list[Proposal | None]:
        """Draft for rows together; those of the call that are not asked for are drafted for as well."""
        target = self._target if self._target is not None else self._open()
        for row in list(self._places):
            if not self._can_read(row, target):
                self._leave(row)
        offers: dict[int, Proposal] = {}
        # The target gives the last token in any case: nothing is drafted beyond the one before it.
        shortest = min((self._rows[row].length for row in self._places), default=0)
        passes = min(self._depth, self._call.max_length - shortest - 1)
        if self._places and passes > 0:
            with target.serving():
                grove = self._grow(target, room, passes)
            offers = dict(zip(self._places, grove.proposals(), strict=True))
        self._done = time.perf_counter()
        return [offers.get(row) for row in rows]

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Keep of the cache what was accepted, and learn which candidates were right."""
        if self._done is not None:
            self._pace().learn_step(time.perf_counter() - self._done)
            self._done = None
        state = self._rows[row]
        growth, state.growth = state.growth, None
        if growth is not None and self._target is not None:
            with torch.inference_mode():
                # The newest token is read again, for what comes after it.
                self._target.commit(self._places.index(row), growth.path_of(feedback.tokens[:-1]))
            self._rates.learn(growth.parents, growth.tokens, growth.features, feedback.tokens)
        state.ids[state.length : state.length + len(feedback.tokens)] = feedback.tokens
        state.length += len(feedback.tokens)

    def finish(self, row: int) -> None:
        """Forget the row."""
        self._leave(row)
        del self._rows[row]

    def _open(self) -> Target:
        """Make a cache for all rows there are; what was read of them before is read again."""
        self._places = list(self._rows)
        longest = max(state.length for state in self._rows.values())
        self._target = Target(
            self._model,
            rows=len(self._places),
            capacity=longest + 256,
            device=input_device(self._model),
            shape=self._shape,
            prefill_chunk=longest if prefills_at_once(self._model) else PREFILL_CHUNK,
        )
        return self._target

    def _can_read(self, row: int, target: Target) -> bool:
        """Whether the draft model knows all tokens of a row, and has positions for it and a draft."""
        state = self._rows[row]
        if target.positions is not None and state.length + self._depth > target.positions:
            return False
        return self._vocabulary == self._call.vocab_size or int(state.ids[: state.length].max()) < self._vocabulary

    def _leave(self, row: int) -> None:
        """Take a row out of the passes."""
        if row not in self._places:
            return
        place, last = self._places.index(row), self._places.pop()
        if last != row:
            self._places[place] = last
        if self._target is not None:
            with torch.inference_mode():
                self._target.retire(place)

    def _grow(self, target: Target, room: int, passes: int) -> Grove:
        """Read what is new of every row, which is the first pass, then grow their trees pass by pass."""
        begin = time.perf_counter()
        states = [self._rows[row] for row in self._places]
        grove = Grove(
            [int(state.ids[state.length - 1]) for state in states],
            self._rates,
            room=room,
            passes=passes,
            width=self._width,
            children=self._children,
            vocabulary=self._vocabulary,
            warp=self._call.warp,
            by_rejection=self._call.by_rejection,
        )
        grove.add(target.prefill([state.ids[: state.length] for state in states]))
        pace, now = self._pace(), time.perf_counter()
        for _ in range(passes - 1):
            if self._call.is_timed and not pace.pays(*grove.outlook(), now - begin):
                break
            before = grove.choose()
            if not grove.is_chosen:
                break
            grove.add(target.extend(grove.trees(), before))
            then, now = now, time.perf_counter()
            pace.learn_grow(now - then)
        for state, growth in zip(states, grove.growths, strict=True):
            state.growth = growth
        return grove

    def _pace(self) -> Pace:
        """What passes take with so many rows."""
        return self._paces.setdefault((len(self._rows) - 1).bit_length(), Pace())
