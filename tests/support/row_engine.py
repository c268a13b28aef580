"""A stub of vLLM's model runner: the arguments of a custom proposer, as recorded in vLLM 0.32.

A batch is rows of one buffer. A new request takes the first free row. The last row fills a row that ends, rows may be
swapped, and old tokens stay in the buffer. A row has no sampled tokens while its prompt is read, or while a preempted
request is read again. Near the maximum length of the model no drafts are requested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

Target = Callable[[list[int]], int]  # the next token after a text


@dataclass(eq=False)
class StubRequest:
    """A request: its tokens so far, and the number of tokens read."""

    tokens: list[int]
    limit: int
    read: int = 0
    draft: list[int] = field(default_factory=list)


def stub_config(most: int = 8, max_model_len: int = 256, max_num_seqs: int = 8, **lookahead: Any) -> Any:
    """The fields of a `VllmConfig` that `LookaheadProposer` reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: 1000),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        additional_config={"lookahead": lookahead} if lookahead else {},
    )


class RowEngine:
    """Decodes requests with a proposer, step by step.

    Attributes:
        rows: The requests of the rows.
        drafted: Tokens drafted so far.
        steps: Row-steps that emitted tokens.
        emitted: Tokens emitted.
    """

    def __init__(self, proposer: Any, target: Target, config: Any, *, chunk: int = 64) -> None:
        self._proposer, self._target, self._chunk = proposer, target, chunk
        self._most = config.speculative_config.num_speculative_tokens
        self._longest = config.model_config.max_model_len
        seats = config.scheduler_config.max_num_seqs
        self.tokens = np.zeros((seats, self._longest), np.int32)
        self.counts = np.zeros(seats, np.int32)
        self.rows: list[StubRequest] = []
        self.drafted = self.steps = self.emitted = 0

    def add(self, request: StubRequest) -> None:
        """Put a request into the next row. It is read from its first token."""
        request.read, request.draft = 0, []
        row = len(self.rows)
        self.rows.append(request)
        self._write(row)

    def remove(self, request: StubRequest) -> None:
        """Remove a request from its row, which the last row fills."""
        row = self.rows.index(request)
        last = self.rows.pop()
        if last is not request:
            self.rows[row] = last
            self._write(row)

    def swap(self, row: int, other: int) -> None:
        """Swap two rows."""
        self.rows[row], self.rows[other] = self.rows[other], self.rows[row]
        self._write(row)
        self._write(other)

    def step(self) -> None:
        """One pass over all rows, and the drafts for the next one. Ended requests stay in their rows until removed."""
        sampled = [self._pass(request) for request in self.rows]
        for row, (request, new) in enumerate(zip(self.rows, sampled, strict=True)):
            begin = len(request.tokens) - len(new)
            self.tokens[row, begin : begin + len(new)] = new
            self.counts[row] = begin + len(new)
            request.draft = []
        if self.rows and max(len(request.tokens) for request in self.rows) + self._most > self._longest:
            return
        drafts = self._proposer.propose(sampled, self.counts, self.tokens, slot_mappings=None)
        assert len(drafts) == len(self.rows)
        for request, new, draft in zip(self.rows, sampled, drafts, strict=True):
            assert type(draft) is list and all(type(token) is int for token in draft)
            assert len(draft) <= self._most and len(request.tokens) + len(draft) < self._longest
            assert new or not draft
            request.draft = draft
            self.drafted += len(draft)

    def following(self, request: StubRequest) -> int:
        """The token that the target chooses next."""
        return self._target(request.tokens)

    def _pass(self, request: StubRequest) -> list[int]:
        """Read a chunk of a prompt, or verify a draft; returns the tokens that the target chose."""
        request.read = min(len(request.tokens), request.read + self._chunk)
        if request.read < len(request.tokens):
            return []
        before, draft = len(request.tokens), [*request.draft, None]
        for guess in draft:
            token = self.following(request)
            request.tokens.append(token)
            if token != guess or len(request.tokens) >= request.limit:
                break
        request.read = len(request.tokens)
        self.steps, self.emitted = self.steps + 1, self.emitted + len(request.tokens) - before
        return request.tokens[before:]

    def _write(self, row: int) -> None:
        """Copy a request's tokens to its row. Old tokens after them stay."""
        tokens = self.rows[row].tokens
        self.tokens[row, : len(tokens)] = tokens
        self.counts[row] = len(tokens)
