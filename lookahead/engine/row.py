"""A row of the engine, with its ids, sampling, stopping and stats; and the output of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.backend.protocol import BitPolicy
from lookahead.drafting.proposal import IntArray, Proposal
from lookahead.drafting.select import Draft
from lookahead.drafting.tree import TokenTree
from lookahead.errors import PromptError
from lookahead.stats import DecodingStats
from lookahead.utils.jit import njit
from lookahead.verification.acceptance import EXACT, Acceptance, Target
from lookahead.verification.rules import FinishReason, StoppingRule, TokenChooser, not_a_number

ROOT = np.zeros(1, np.int32)
"""The path of a step that accepted no node."""


@dataclass(slots=True)  # not frozen, which would double the time to create one
class StepOutput:
    """Tokens one row emitted in one step."""

    row: int  # its place in the batch
    tokens: IntArray  # empty only after an error
    finish_reason: FinishReason | None  # None if the output continues, or after an error
    draft: Draft | None = None  # None if transformers decoded
    path: IntArray = field(default_factory=lambda: ROOT)  # int32 `[a]`, the accepted nodes, the root first
    error: Exception | None = None  # ended the row, which emitted nothing in this step

    @property
    def finished(self) -> bool:
        """Whether the row's output ends here."""
        return self.finish_reason is not None or self.error is not None


class Row:
    """A row of an engine; `ids[:length]` are the ids of `model.generate`, padding included.

    Args:
        index: Its number in a `StepOutput`: its place in the batch, or the number of its prompt.
        ids: int64 `[tokens]`, its prompt.
        chooser: Chooses its tokens.
        stopping: Ends it.
        padding: The number of padding ids, which come first.
        place: Its index in the batch that `chooser` and `stopping` were made for.
        device: The device of the ids that logits processors and stopping criteria get.
    """

    def __init__(
        self,
        index: int,
        ids: Sequence[int] | NDArray[np.int64],
        chooser: TokenChooser,
        stopping: StoppingRule,
        *,
        padding: int = 0,
        place: int = 0,
        device: torch.device,
    ) -> None:
        self.index, self.padding, self.place, self.device = index, padding, place, device
        self.chooser, self.stopping = chooser, stopping
        self.forcing = chooser.forcing[place]
        self.ends: NDArray[np.int64] = np.array([*stopping.eos_tokens], np.int64)  # no draft goes on behind one
        self.length, self.last_token = len(ids), int(ids[-1])
        self.ids = np.array(ids, np.int64)  # grows on demand: the limit may be any number
        self.stats = DecodingStats(prompt_tokens=len(ids) - padding)
        self.slot = self.emitted = 0  # its slot in the engine, and new tokens
        self.inputs: IntArray = np.zeros(0, np.int32)  # tokens that an encoder has read for it
        self.placeholders: NDArray[np.int64] = np.zeros(0, np.int64)  # placeholder tokens of its prompt
        self.predictions: Sequence[IntArray] = ()  # its expected output
        self.encoded: Any = None  # the `Encoded` of `inputs`, until the row joins others
        self.prefilled = 0.0  # `time.perf_counter` at the end of its prefill
        self.policy = BitPolicy.ROUNDED  # the bits of its passes
        self.finish_reason: FinishReason | None = None
        self.runs_users_code = bool(stopping.custom) or not chooser.is_known
        self.drafts = True  # whether drafts are made for it
        self.read: tuple[int, IntArray] = 0, self.inputs  # the number of the stamp that read its prompt, and the prompt
        self.is_edited = False  # whether processors or criteria of a user's, which may write into the ids, are called

    @property
    def text(self) -> IntArray:
        """Its ids without padding, int32 `[tokens]`."""
        return np.ascontiguousarray(self.ids[self.padding : self.length], np.int32)

    @property
    def source(self) -> IntArray:
        """The source of its drafts: the encoder's input and its text without placeholders, int32 `[tokens]`."""
        text = self.text
        if len(self.placeholders):
            text = text[~np.isin(text, self.placeholders)]
        return np.concatenate((self.inputs, text))

    @property
    def tokens(self) -> int:
        """Number of its tokens without padding."""
        return self.length - self.padding

    def read_by_encoder(self, inputs: IntArray) -> None:
        """Set the encoder's input, int32 `[tokens]`."""
        self.inputs = inputs
        self.stats.prompt_tokens += len(inputs)

    def positions_left(self, positions: int) -> int:
        """Positions left of the model's `positions` after the newest token; PromptError if the row exceeds them."""
        if self.tokens > positions:
            raise PromptError(
                f"row {self.index} has {self.tokens} tokens and the model has {positions} positions; "
                "lower max_new_tokens or max_length"
            )
        return positions - self.tokens

    def constrain(self, offers: Sequence[Proposal | None], max_nodes: int, least: float) -> list[Proposal | None]:
        """Cut what its processor forbids from the proposals; the forced tokens replace the last one.

        At most `max_nodes` are forced. Nodes reached with a probability below `least` are not checked.
        """
        if self.forcing is None:
            return list(offers)
        ids = torch.from_numpy(self.ids[: self.length])
        offers, forced = self.forcing.constrain(ids, offers, max_nodes, least)
        return [*offers[:-1], forced]

    def verify(self, draft: Draft, logits: Tensor, argmax: IntArray, acceptance: Acceptance = EXACT) -> StepOutput:
        """Accept nodes of a scored draft, and append the emitted tokens to the ids.

        Args:
            draft: The draft.
            logits: `[nodes or more, vocab]`.
            argmax: int32 `[nodes or more]`; read if the chooser is plain greedy.
            acceptance: Chooses the tokens.
        """
        room = self.length + len(draft.tree.tokens)
        if room > self.ids.size:
            self.ids = np.resize(self.ids, 2 * room)
        target = Target(
            argmax.item if self.chooser.is_plain_greedy else partial(self._choose, logits),
            partial(self._chances, logits),
            partial(self._chances_after, draft.tree, logits),
            self._emit,
        )
        walk = acceptance.accept(draft, target)
        self.stats.total_variation += walk.total_variation
        return StepOutput(self.index, walk.tokens, self.finish_reason, draft, walk.path)

    def _choose(self, logits: Tensor, node: int) -> int:
        """The token of `model.generate` after a node."""
        with self._showing() as seen:
            return self.chooser.choose(seen, logits[node], row=self.place, step=self.emitted)

    def _chances(self, logits: Tensor, node: int) -> Tensor:
        """The target's distribution after a node."""
        return self.chooser.chances(self._seen(), logits[node], row=self.place, step=self.emitted)

    def _emit(self, token: int) -> bool:
        """Add a token to the ids; returns whether the walk ends with it: the output, or a criterion replaced it."""
        if token < 0:
            raise not_a_number(self.index, self.emitted)
        self.ids[self.length] = self.last_token = token
        self.length += 1
        self.emitted += 1
        rule = self.stopping
        # Every criterion is called, as in `model.generate`: one may count its calls.
        fired: list[FinishReason] = []
        if rule.custom:
            scores = self.chooser.scores[self.place]
            with self._showing() as seen:
                fired = [reason for reason, criterion in rule.custom if criterion(seen, scores)]
            self.last_token = int(self.ids[self.length - 1])
        if "stop" in fired or token in rule.eos_tokens:
            self.finish_reason = "stop"
        elif fired or self.length >= rule.max_length:
            self.finish_reason = fired[0] if fired else "length"
        return self.finish_reason is not None or self.last_token != token

    @contextmanager
    def _showing(self) -> Iterator[Tensor]:
        """The ids so far for a processor or criterion; what a user's writes into them is taken over.

        As in `model.generate` it gets a tensor of its own, which may take part in gradients.
        """
        if not self.is_edited:
            yield self._seen()
            return
        with torch.inference_mode(False), torch.no_grad():
            seen = self._seen().clone()
            yield seen
            self.ids[: seen.shape[1]] = seen[0].cpu().numpy()

    def _chances_after(self, tree: TokenTree, logits: Tensor, path: list[int]) -> Tensor:
        """The target's distribution after a path of nodes, from `[nodes, vocab]` logits."""
        behind = len(path) - 1
        self.ids[self.length : self.length + behind] = tree.tokens[path[1:]]
        place = {"row": self.place, "step": self.emitted + behind}
        return self.chooser.chances(self._seen(behind), logits[path[-1]], **place, is_tentative=True)

    def _seen(self, more: int = 0) -> Tensor:
        """The ids so far and `more` further ones, as processors and criteria get them, int64 `[1, tokens]`."""
        return torch.from_numpy(self.ids[: self.length + more])[None].to(self.device)

    def count(self, draft: Draft, result: StepOutput, sources: Sequence[str]) -> None:
        """Count a verified draft; the first token of a row comes from the prefill, not from a draft's pass."""
        stats = self.stats
        if stats.emitted_tokens:
            stats.target_forwards += 1
            stats.bitwise_forwards += self.policy is not BitPolicy.ROUNDED
            stats.acceptance_histogram[len(result.tokens)] += 1
        stats.emitted_tokens += len(result.tokens)
        drafted_tokens = len(draft.tree.tokens) - 1
        if drafted_tokens == 0:
            return
        stats.drafted_tokens += drafted_tokens
        stats.accepted_tokens += len(result.path) - 1
        stats.expected_tokens += sum(draft.path_probs.tolist()) - 1.0
        counts = _by_source(draft.tree.sources, result.path, draft.path_probs, len(sources)).tolist()
        for name, (drafted, accepted, expected) in zip(sources, counts, strict=True):
            stats.forwards_by_source[name] += drafted > 0
            stats.drafted_by_source[name] += int(drafted)
            stats.accepted_by_source[name] += int(accepted)
            stats.expected_by_source[name] += expected


@njit()
def _by_source(sources, path, path_probs, count):
    """Drafted, accepted and expected nodes of each source, float64 `[sources, 3]`; the root has no source."""
    counts = np.zeros((count, 3))
    for node in range(len(sources)):
        for source in range(count):
            if sources[node] >> source & 1:
                counts[source, 0] += 1.0
                counts[source, 2] += path_probs[node]
    for node in path:
        for source in range(count):
            counts[source, 1] += sources[node] >> source & 1
    return counts
