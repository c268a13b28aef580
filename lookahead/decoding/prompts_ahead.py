"""Prompts that are read in a cache of their own before they join the rows of an engine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import islice
from threading import get_native_id

import torch
from transformers import PreTrainedModel

from lookahead.backend.read_prompt import Prefix, PrefixStore, ReadingAhead, ReadPrompt, prefixes_of, reads_apart
from lookahead.backend.self_check import keeps_solo_bits, kernels_agree
from lookahead.config import LookaheadConfig
from lookahead.decoding.request import Request
from lookahead.engine.row import Row
from lookahead.kernels.jobs import torch_on_threads
from lookahead.kernels.team import team_of
from lookahead.model.model_state import recognise
from lookahead.utils.task_thread import TaskThread

_SHORT = 64  # maximum tokens of a prompt that is read between two steps
_PASS = 128  # maximum tokens of a pass over such prompts, which all wait for its end; and of one beside a thread
BETWEEN_STEPS = 128  # tokens of prompts that are read between two steps
_QUICK = 512  # maximum tokens of a prompt that is not read behind longer ones
_MOST = 2  # prompts being read by a thread, so that it does not wait for a step
_LOOKED_AT = 16  # waiting requests that may pass others
_PASSED = 4  # times the tokens of a prompt that others may have which pass it
_WAIT_S = 0.05
_NICENESS = 3  # of the thread for long prompts: a third of a core that steps use too


class _GivenUpError(Exception):
    """Ends the reading of a prompt between two parts of it."""


class PromptsAhead:
    """Reads prompts ahead, after the longest beginning that the model keeps of an earlier text.

    Beside the steps of the running rows a thread reads quick prompts and another one long prompts, each whole: so a
    quick prompt does not wait for long ones, and the bits of neither change.

    Args:
        model: The model.
        config: How to draft.
        prefix_bytes: Bytes of keys and values of earlier texts to keep.
        is_beside: Whether prompts are read on threads of their own, beside the steps of the running rows.
        rounds: Whether half-precision prompts copy earlier texts as far as they share them, which changes bits.

    Attributes:
        reading: The prompts that are being read, or were read, in order.
        store: What the model keeps of earlier texts.
        reads_apart: Whether prompts are read apart; those with states are read in the rows' cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LookaheadConfig,
        prefix_bytes: int,
        *,
        is_beside: bool,
        rounds: bool = False,
    ) -> None:
        self._model, self._config, self._is_beside = model, config, is_beside
        self._store_of = partial(prefixes_of, model, prefix_bytes, rounds=rounds)
        self.reading = list[tuple[Request, Future[ReadPrompt]]]()
        self.store: PrefixStore = self._store_of()
        self.reads_apart = reads_apart(model)
        self._readers: dict[bool, ReadingAhead] = {}  # by whether they read quick prompts
        self._threads: dict[bool, TaskThread] = {}
        self._read_tokens = 0  # of all prompts that were begun

    def refresh(self) -> None:
        """Take another store if the weights have changed."""
        if not self._is_beside:
            recognise(self._model, trusted=self._config.trust_user_code)
        if (store := self._store_of()) is not self.store:
            self.store, self._readers = store, {}

    def candidates(self, waiting: Sequence[Request]) -> list[Request]:
        """The waiting requests that may be next: beside steps, short prompts pass longer ones."""
        return list(islice(waiting, _LOOKED_AT if self._is_beside else 1))

    def in_order(self, requests: Sequence[Request]) -> list[Request]:
        """Requests in the order in which their prompts are read: by turns, and in a turn the shortest first.

        Others may pass a prompt only until they have four times as many tokens as it has.
        """
        return sorted(requests, key=lambda request: (request.turn, self._due(request)))

    def _due(self, request: Request) -> int:
        """How many tokens of prompts may have been read before that of a request."""
        if request.came_at is None:
            request.came_at = self._read_tokens
        return request.came_at + _PASSED * self.unread(request)

    def count(self, request: Request) -> None:
        """Count the tokens of a prompt that is now read."""
        self._read_tokens += self.unread(request)

    def is_short(self, request: Request, unread: int = 0) -> bool:
        """Whether a prompt is read between two steps, in one pass with `unread` tokens of others.

        Prompts that cannot be read apart are always read there.
        """
        own = self.unread(request)
        return not self.reads_apart or (own <= (_PASS if self._is_beside else _SHORT) and unread + own <= _PASS)

    def unread(self, request: Request) -> int:
        """Tokens of a prompt that no kept text has."""
        newest = self.store.newest
        if request.unread is None or request.unread[1] != newest:
            request.unread = request.row.tokens - self.prefix(request).tokens, newest
        return request.unread[0]

    def prefix(self, request: Request) -> Prefix:
        """The kept beginning of a prompt."""
        return self.store.longest(request.row.text, request.salt)

    def beginning(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Those of the next requests that a thread takes now: a long prompt takes no time from quick ones before it."""
        for request in requests:
            if not self.is_short(request):
                if self._can_begin(request):
                    yield request
                elif self._is_quick(request):
                    return

    def _can_begin(self, request: Request) -> bool:
        """Whether the thread for such prompts takes another one: a long one while no quick one is read, or if due."""
        if not self._is_beside:
            return not self.reading
        is_quick = self._is_quick(request)
        is_read = any(self._is_quick(other) and not future.done() for other, future in self.reading)
        alike = sum(self._is_quick(other) == is_quick for other, _ in self.reading)
        return alike < _MOST and (is_quick or not is_read or self._due(request) <= self._read_tokens)

    @property
    def has_read(self) -> bool:
        """Whether a prompt was read."""
        return any(future.done() for _, future in self.reading)

    def take(self) -> tuple[Request, Future[ReadPrompt]]:
        """Take the first prompt that was read."""
        at = next(at for at, (_, future) in enumerate(self.reading) if future.done())
        return self.reading.pop(at)

    def begin(self, request: Request, *, is_shared: bool) -> None:
        """Read a prompt; `is_shared` is whether rows are running, with which it shares the threads."""
        is_quick = self._is_quick(request)
        self.count(request)
        if self._is_beside:
            team_of(torch.get_num_threads())  # threads that a thread of low priority begins have that too
            thread = self._threads.get(is_quick) or TaskThread("lookahead-prompts")
            self._threads[is_quick] = thread
            is_shared = is_shared or any(not future.done() for _, future in self.reading)
            future = thread.begin(lambda: self._read(request, is_quick, is_shared))
        else:
            future = Future()
            try:
                future.set_result(self._read(request, is_quick, is_shared))
            except Exception as error:
                future.set_exception(error)
        self.reading.append((request, future))

    def wait(self) -> None:
        """Wait for a prompt, but only a moment, since others may come and requests may be cancelled."""
        if self.reading:
            wait([future for _, future in self.reading], _WAIT_S, FIRST_COMPLETED)

    def share_of_threads(self, is_shared: bool) -> AbstractContextManager[None]:
        """Use half of the threads while a prompt is read beside steps: more threads than cores slow each other down."""
        halves = self._is_beside and is_shared
        return torch_on_threads(max(1, torch.get_num_threads() // 2)) if halves else nullcontext()

    def _is_quick(self, request: Request) -> bool:
        return bool(request.row.tokens <= _QUICK)

    def _read(self, request: Request, is_quick: bool, is_shared: bool) -> ReadPrompt:
        row: Row = request.row
        if self._is_beside and not is_quick and sys.platform == "linux":
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICENESS)  # of this thread alone

        def go_on(*_: int) -> None:
            if request.is_cancelled:
                raise _GivenUpError("the request was cancelled")

        try:
            reader, store = self._readers.get(is_quick), self.store
            if reader is None:
                has_kernels = keeps_solo_bits(self._model) or kernels_agree(self._model, "trees")
                reader = ReadingAhead(self._model, store, {"has_kernels": has_kernels})
                self._readers[is_quick] = reader
            began = time.perf_counter()
            with self.share_of_threads(is_shared):
                read = reader.read(row.text, request.salt, go_on)
        except BaseException as error:
            self._readers.pop(is_quick, None)
            if not isinstance(error, Exception):  # it would end the thread, and the prompts after this one
                raise RuntimeError(f"a prompt could not be read: {error!r}") from error
            raise
        row.stats.prefill_s = time.perf_counter() - began
        return read

    def close(self) -> None:
        """End the threads after their prompts."""
        for thread in self._threads.values():
            thread.close()
