"""Ways to give the documents of a job to workers on Ray: the crew of `lookahead`, and `map_batches` of Ray Data.

All of them have the engine of `RayWorker`, which writes down here what it begins and ends, so that `bench.ray_data` can
tell how often a document is done, and whom to kill.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.faults import Silent
from lookahead.documents.decode_text import Document, Reject
from lookahead.errors import LookaheadError
from lookahead.jobs import ray_workers as ray_crew
from lookahead.jobs.identity import JobIdentity
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.output_location import OutputPaths
from lookahead.jobs.ray_cluster import Plan, first_line
from lookahead.jobs.ray_worker import Introduction, RayWorker, WorkerOptions
from lookahead.summarization.summarizer import Summarized, Summary

POISON = "poison"  # the document that kills whoever begins it


@dataclass(frozen=True, slots=True)
class Way:
    """How documents come to workers.

    Attributes:
        name: What it is called.
        batch_size: Documents of a batch of `map_batches`; `None` for the crew.
        in_hand: Batches that a worker has in hand side by side; `None` for one after the other.
        retries: How often what dies with a worker is tried again, and left out after that; `None` for what Ray does
            unless told: without end.
    """

    name: str
    batch_size: int | None = None
    in_hand: int | None = None
    retries: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedOptions(WorkerOptions):
    """Those of a worker that is watched.

    Attributes:
        log: The file it writes to.
        workers: How many there are.
    """

    log: str
    workers: int


class Note(NamedTuple):
    """What a process wrote down.

    Attributes:
        when: By the monotonic clock, which is the same in all processes of a machine.
        pid: The process.
        what: `"ready"`, `"read"`, `"begun"` or `"done"`.
        name: The document; empty of a worker that is ready.
    """

    when: float
    pid: int
    what: str
    name: str


def note(log: str, what: str, name: object = "") -> None:
    """Write a line, whole beside those of others."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{time.monotonic()} {os.getpid()} {what} {name}\n".encode())
    os.close(file)


def noted(log: str | Path) -> list[Note]:
    """All that was written down so far."""
    path = Path(log)
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    fields = (line.split(" ", 3) for line in lines)
    return [Note(float(when), int(pid), what, name) for when, pid, what, name in fields]


class WatchedWorker(RayWorker):
    """A worker that waits for the others before it begins, writes down what it does, and dies of poison."""

    def __init__(self, options: WatchedOptions) -> None:
        super().__init__(options)
        self._log, self._workers = options.log, options.workers

    async def start(self) -> Introduction | LookaheadError:
        """Be ready, and wait until all were once."""
        answer = await super().start()
        note(self._log, "ready")
        while sum(each.what == "ready" for each in noted(self._log)) < self._workers:
            await asyncio.sleep(0.01)
        return answer

    async def summarize(self, document: Document) -> Summary | str:
        """Summarize a document, unless it is the one."""
        note(self._log, "begun", document.id)
        if document.id == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await super().summarize(document)
        note(self._log, "done", document.id)
        return answer


class SummarizeBatch:
    """What `map_batches` calls: a worker behind a function, which may be called by several threads."""

    def __init__(self, options: WatchedOptions) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        self._worker = WatchedWorker(options)
        asyncio.run_coroutine_threadsafe(self._worker.start(), self._loop).result()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Summarize a batch: its documents together in refilled rows."""
        documents = [Document(str(name), str(text)) for name, text in zip(batch["id"], batch["text"], strict=True)]
        answers = asyncio.run_coroutine_threadsafe(self._summarize(documents), self._loop).result()
        return {"id": batch["id"], "answer": [pickle.dumps(answer) for answer in answers]}

    async def _summarize(self, documents: list[Document]) -> list[Summary | str]:
        return await asyncio.gather(*map(self._worker.summarize, documents))


class DataCrew:
    """Summarizes documents by `map_batches` with a pool of actors."""

    def __init__(self, ray: Any, options: WatchedOptions, way: Way) -> None:
        self._ray, self._options, self._way = ray, options, way

    def summarize_all(self, documents: Iterable[Document], rows: int | None = None) -> Iterator[Summarized | Reject]:
        """Summarize documents, in batches that come as they are done."""
        data, way = self._ray.data, self._way
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        retries = {}
        if way.retries is not None:
            context.max_errored_blocks = -1  # else the job ends with the first one
            retries = {"max_restarts": -1, "max_task_retries": way.retries}
        all_of_them = {str(document.id): document for document in documents}
        items = [{"id": name, "text": document.text} for name, document in all_of_them.items()]
        threads = way.in_hand is not None
        pool = data.ActorPoolStrategy(
            size=self._options.workers,
            max_tasks_in_flight_per_actor=way.in_hand,
            max_concurrent_calls_per_actor=way.in_hand,
            enable_true_multi_threading=threads,
        )
        done = data.from_items(items, override_num_blocks=len(items)).map_batches(
            SummarizeBatch,
            batch_size=way.batch_size,
            compute=pool,
            fn_constructor_args=(self._options,),
            num_cpus=1,
            **retries,
        )
        for batch in done.iter_batches(batch_size=None, prefetch_batches=0):
            for name, answer in zip(batch["id"], batch["answer"], strict=True):
                document, summary = all_of_them[str(name)], pickle.loads(answer)
                if isinstance(summary, str):
                    yield Reject(document.id, summary, document)
                else:
                    yield Summarized(document, summary)


def work(way: Way, documents: list[Document], options: WatchedOptions, output: Path) -> None:
    """A job on a cluster of its own, to its end; what ends it before stands beside the results."""
    import ray

    paths = OutputPaths(output)
    paths.check([])

    def read() -> Iterator[Document]:
        for document in documents:
            note(options.log, "read", document.id)
            yield document

    workers = options.workers
    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        if way.batch_size is None:
            with (
                patch.object(ray_crew, "RayWorker", WatchedWorker),
                ray_crew.Crew(ray, options, Plan(workers, 1, 0)) as crew,
            ):
                identity = crew.introduce(workers).identity
                run_job(read(), crew, paths, identity, totals=JobTotals(), observer=Silent())
        else:
            import ray.data

            logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it shows a traceback of whatever dies
            new = options.identity["max_new_tokens"]
            identity = JobIdentity(model=options.name, weights="", tokenizer="", dtype="", max_new_tokens=new)
            run_job(read(), DataCrew(ray, options, way), paths, identity, totals=JobTotals(), observer=Silent())
    except Exception as error:
        output.with_suffix(".error").write_text(first_line(error), encoding="utf-8")
    finally:
        ray.shutdown()
