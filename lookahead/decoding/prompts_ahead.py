"""Prompts that are read in a cache of their own before they join the rows of an engine."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from lookahead.backend.read_prompt import Prefix, PrefixStore, ReadingAhead, ReadPrompt, prefixes_of, reads_apart
from lookahead.config import LookaheadConfig
from lookahead.decoding.assembly import has_kernels
from lookahead.decoding.request import Request
from lookahead.engine.row import Row
from lookahead.kernels.jobs import torch_on_threads
from lookahead.model.model_state import recognise
from lookahead.utils.task_thread import TaskThread

_SHORT = 64  # maximum tokens that are read between two steps
_MOST = 2  # prompts being read, so that the thread does not wait for a step
_WAIT_S = 0.05


class PromptsAhead:
    """Reads prompts ahead, after the longest beginning that the model keeps of an earlier text.

    Args:
        model: The model.
        config: How to draft.
        prefix_bytes: Bytes of keys and values of earlier texts to keep.
        is_beside: Whether prompts are read on a thread of their own, beside the steps of the running rows.

    Attributes:
        reading: The prompts that are being read, or were read, in order.
        store: What the model keeps of earlier texts.
        reads_apart: Whether prompts are read apart; those with states or indexer keys are read in the rows' cache.
    """

    def __init__(self, model: PreTrainedModel, config: LookaheadConfig, prefix_bytes: int, *, is_beside: bool) -> None:
        self._model, self._config, self._prefix_bytes, self._is_beside = model, config, prefix_bytes, is_beside
        self.reading = deque[tuple[Request, Future[ReadPrompt]]]()
        self.store: PrefixStore = prefixes_of(model, prefix_bytes)
        self.reads_apart = reads_apart(model)
        self._reader: ReadingAhead | None = None
        self._thread: TaskThread | None = None

    def refresh(self) -> None:
        """Take another store if the weights have changed."""
        if not self._is_beside:
            recognise(self._model, trusted=self._config.trust_user_code)
        if (store := prefixes_of(self._model, self._prefix_bytes)) is not self.store:
            self.store, self._reader = store, None

    def prefix_if_short(self, row: Row, unread: int = 0) -> Prefix | None:
        """The kept beginning of a prompt that is read between two steps with `unread` others; None if it is long.

        Prompts that cannot be read apart are always read there.
        """
        prefix = self.store.longest(row.text)
        is_short = unread + row.tokens - prefix.tokens <= _SHORT
        return prefix if is_short or not self.reads_apart else None

    @property
    def can_begin(self) -> bool:
        """Whether the reader takes another prompt."""
        return len(self.reading) < (_MOST if self._is_beside else 1)

    @property
    def has_read(self) -> bool:
        """Whether the first prompt was read."""
        return bool(self.reading) and self.reading[0][1].done()

    def begin(self, request: Request, *, is_shared: bool) -> None:
        """Read a prompt; `is_shared` is whether rows are running, with which it shares the threads."""
        row: Row = request.row
        if self._is_beside:
            self._thread = self._thread or TaskThread("lookahead-prompts")
            future = self._thread.begin(lambda: self._read(row, is_shared))
        else:
            future = Future()
            try:
                future.set_result(self._read(row, is_shared))
            except Exception as error:
                future.set_exception(error)
        self.reading.append((request, future))

    def wait(self) -> None:
        """Wait for the first prompt, but only a moment, since its request may be cancelled."""
        if self.reading:
            wait([self.reading[0][1]], _WAIT_S)

    def share_of_threads(self, is_shared: bool) -> AbstractContextManager[None]:
        """Use half of the threads while a prompt is read beside steps: more threads than cores slow each other down."""
        halves = self._is_beside and is_shared
        return torch_on_threads(max(1, torch.get_num_threads() // 2)) if halves else nullcontext()

    def _read(self, row: Row, is_shared: bool) -> ReadPrompt:
        try:
            if self._reader is None:
                self._reader = ReadingAhead(self._model, self.store, {"has_kernels": has_kernels(self._model)})
            began = time.perf_counter()
            with self.share_of_threads(is_shared):
                read = self._reader.read(row.text)
        except BaseException as error:
            self._reader = None
            if not isinstance(error, Exception):  # it would end the thread, and the prompts after this one
                raise RuntimeError(f"a prompt could not be read: {error!r}") from error
            raise
        row.stats.prefill_s = time.perf_counter() - began
        return read

    def close(self) -> None:
        """End the thread after its prompts."""
        if self._thread is not None:
            self._thread.close()
