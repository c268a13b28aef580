"""A worker on a Ray cluster: one engine in its own process, which receives documents and returns summaries.

This module does not import ray: `lookahead.jobs.worker_pool` makes actors of `RayWorker`.
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
from lookahead.jobs.job_options import WorkerOptions
from lookahead.summarization.summarizer import Summarized, Summarizer, Summary


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker reports when it is ready."""

    identity: JobIdentity  # of the job with the worker's model
    rows: int  # documents it decodes together


class RayWorker:
    """An actor that summarizes documents: its calls are awaited concurrently, and a thread decodes them together."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = WorkerOptions(**options)
        self._inbox: SimpleQueue[Document] = SimpleQueue()
        self._waiting: dict[int, tuple[Document, Future[Summary | str]]] = {}  # by the `id` of the document
        self._in_flight = 0
        self._failure: BaseException | None = None

    async def start(self) -> WorkerInfo | LookaheadError:
        """Load the model and start the engine. An error in the options is returned, not raised."""
        from lookahead.generation.step_costs import prepare_costs
        from lookahead.models.loading import load, prepare_process

        options = self._options
        try:
            prepare_process(options.threads)
            loaded = load(
                options.location or options.model, dtype=options.dtype, device=options.device, quantize=options.quantize
            )
            with suppress(OSError):  # the costs are measured, but not saved
                prepare_costs(loaded.model)
            summarizer = options.make_summarizer(*loaded)
            rows = summarizer.rows_together(options.rows)
            summarizer.warm_up()
        except LookaheadError as error:
            return error
        Thread(target=self._serve, args=(summarizer,), daemon=True).start()
        return WorkerInfo(JobIdentity.of(options, *loaded), rows)

    async def summarize(self, document: Document) -> Summary | str:
        """The summary of a document, or an error message. RuntimeError if the engine has stopped."""
        answer: Future[Summary | str] = Future()
        self._waiting[id(document)] = document, answer
        self._inbox.put(document)
        if self._failure is not None:  # checked last: an engine that stops later fails the pending futures
            raise RuntimeError(f"the engine stopped: {self._failure!r}")
        return await asyncio.wrap_future(answer)

    def _serve(self, summarizer: Summarizer) -> None:
        """Summarize documents until the process ends."""
        try:
            for outcome in summarizer.summarize_all(self._documents(), self._options.rows):
                self._in_flight -= 1
                _, answer = self._waiting.pop(id(outcome.document))
                answer.set_result(outcome.summary if isinstance(outcome, Summarized) else outcome.error)
            raise RuntimeError("the engine ended before its input did")
        except BaseException as error:
            # No caller sees an error of this thread: fail the pending calls and all later ones.
            self._failure = error
            for _, answer in list(self._waiting.values()):
                answer.set_exception(RuntimeError(f"the engine stopped: {error!r}"))

    def _documents(self) -> Iterator[Document | None]:
        """The documents as they arrive. While some are in flight, None instead of waiting."""
        while True:
            try:
                document = self._inbox.get(block=self._in_flight == 0)
            except Empty:
                yield None
            else:
                self._in_flight += 1
                yield document
