"""A worker on a Ray cluster: one engine in a process of its own, which gets documents and gives summaries.

Nothing here imports ray: `RayWorker` is a class like any other, and `lookahead.jobs.ray_workers` makes actors of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from lookahead.documents.decode_text import Document
from lookahead.errors import LookaheadError
from lookahead.jobs.identity import JobIdentity
from lookahead.summarization.summarizer import Summarized, Summarizer, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker needs to know to work as a local job would.

    Attributes:
        model: As `lookahead.load` takes it; a folder or a file by its full path, which is the same on all machines.
        name: What the job calls the model.
        dtype: As `lookahead.load` takes it.
        device: Likewise; `None` is the GPU that Ray lends to the worker, or else the CPU.
        threads: CPU threads.
        rows: Most prompts decoded together; `None` lets the worker decide.
        summarizer: The keyword arguments of `Summarizer`.
        identity: Those of `JobIdentity.of`.
    """

    model: str
    name: str
    dtype: str
    device: str | None
    threads: int
    rows: int | None
    summarizer: dict[str, Any]
    identity: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker says when it is ready.

    Attributes:
        identity: The job, as its model makes it.
        rows: How many documents it has in hand at a time.
    """

    identity: JobIdentity
    rows: int


class RayWorker:
    """Summarizes the documents that it is sent, those that are there together in refilled rows.

    It is an actor whose calls are awaited side by side, while a thread beside them decodes.

    Args:
        options: How to work.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._inbox: SimpleQueue[Document] = SimpleQueue()
        self._waiting: dict[int, tuple[Document, Future[Summary | str]]] = {}  # by what `id` says of the document
        self._in_hand = 0
        self._failure: BaseException | None = None

    async def start(self) -> Introduction | LookaheadError:
        """Load the model and begin to work; what is wrong with the options is returned, not raised."""
        try:
            summarizer, introduction = self._load()
        except LookaheadError as error:
            return error
        Thread(target=self._serve, args=(summarizer,), daemon=True).start()
        return introduction

    async def summarize(self, document: Document) -> Summary | str:
        """The summary of a document, or why there is none.

        Raises:
            RuntimeError: This worker cannot go on; the document may be given to another.
        """
        answer: Future[Summary | str] = Future()
        self._waiting[id(document)] = document, answer
        self._inbox.put(document)
        if self._failure is not None:  # asked last: an engine that stops from here on answers those who wait
            raise RuntimeError(f"the engine stopped: {self._failure!r}")
        return await asyncio.wrap_future(answer)

    def _load(self) -> tuple[Summarizer, Introduction]:
        """What summarizes, warmed up."""
        from lookahead.generation.step_costs import prepare_costs
        from lookahead.models.loading import load, prepare_process

        options = self._options
        prepare_process(options.threads)
        loaded = load(options.model, dtype=options.dtype, device=options.device)
        with suppress(OSError):  # they are known all the same, and only not kept for the next worker
            prepare_costs(loaded.model)
        summarizer = Summarizer(*loaded, **options.summarizer)
        rows = summarizer.rows_together(options.rows)
        summarizer.warm_up()
        return summarizer, Introduction(JobIdentity.of(options.name, *loaded, **options.identity), rows)

    def _serve(self, summarizer: Summarizer) -> None:
        """Summarize what comes, until the process ends."""
        try:
            for outcome in summarizer.summarize_all(self._documents(), self._options.rows):
                self._in_hand -= 1
                _, answer = self._waiting.pop(id(outcome.document))
                answer.set_result(outcome.summary if isinstance(outcome, Summarized) else outcome.error)
            raise RuntimeError("it took its documents for all there are")
        except BaseException as error:
            # Nobody else would hear of it: those who wait, and those who come, are told to go elsewhere.
            self._failure = error
            for _, answer in list(self._waiting.values()):
                answer.set_exception(RuntimeError(f"the engine stopped: {error!r}"))

    def _documents(self) -> Iterator[Document | None]:
        """The documents as they come; with some in hand the engine does not wait for the next one."""
        while True:
            try:
                document = self._inbox.get(block=self._in_hand == 0)
            except Empty:
                yield None
            else:
                self._in_hand += 1
                yield document
