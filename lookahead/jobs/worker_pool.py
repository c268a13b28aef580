"""A pool of workers on a Ray cluster, used like one summarizer; `docs/ray.md` explains why it is not `map_batches`.

A worker is a Ray actor with an engine. A document is one call. A worker has a few more documents in flight than rows.
The documents of a dead worker go to other workers. Their last try comes after all other documents, alone on a worker.
"""

from __future__ import annotations

import asyncio
import socket
from bisect import insort
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from queue import SimpleQueue
from threading import Thread, get_ident
from typing import Any, NamedTuple, TextIO

import lookahead
from lookahead.documents.byte_sources import in_time
from lookahead.documents.decode_text import Document, Reject
from lookahead.errors import ClusterError, ConfigError, LookaheadError, first_line
from lookahead.jobs.identity import JobIdentity, JobSettings
from lookahead.summarization.summarizer import Outcome, Summarized, Summarizer, Summary

TRIES = 3  # worker deaths with a document in flight until it is rejected
FAILED_STARTS = 3  # consecutive worker deaths during startup until no more are added
_MAX_CONCURRENCY = 2048  # concurrent calls of an actor, more than it ever gets
_CONNECT_S = 10.0
_SHUTDOWN_S = 30.0
_CHECK_S = 10.0  # without an answer, until the cluster is asked whether it lives


class RayWorker:
    """An actor that summarizes documents. Its calls are awaited concurrently, and one thread decodes them together."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._inbox: SimpleQueue[tuple[Document, Future[Summary | str]]] = SimpleQueue()
        self._in_flight: dict[int, tuple[Document, Future[Summary | str]]] = {}  # by the `id` of the document

    async def start(self) -> tuple[JobIdentity, int] | LookaheadError:
        """Load the model and start the engine; returns the identity of the job and the number of rows.

        An error in the settings is returned, not raised.
        """
        settings = self._settings
        try:
            lookahead.prepare_process(settings.threads)
            name = settings.location or settings.model
            loaded = lookahead.load(name, dtype=settings.dtype, device=settings.device, quantize=settings.quantize)
            with suppress(OSError):  # the costs were measured but cannot be saved
                lookahead.prepare_costs(loaded.model)
            summarizer = settings.summarizer(loaded)
            rows = summarizer.rows_together(settings.rows)
            summarizer.warm_up()
        except LookaheadError as error:
            return error
        Thread(target=self._serve, args=(summarizer,), daemon=True).start()
        return JobIdentity.of(settings, *loaded), rows

    async def summarize(self, document: Document) -> Summary | str:
        """The summary of a document, or an error message. RuntimeError if the engine has stopped."""
        answer: Future[Summary | str] = Future()
        self._inbox.put((document, answer))
        return await asyncio.wrap_future(answer)

    def _serve(self, summarizer: Summarizer) -> None:
        try:
            for outcome in summarizer.summarize_all(self._documents(), self._settings.rows):
                _, answer = self._in_flight.pop(id(outcome.document))
                answer.set_result(outcome.summary if isinstance(outcome, Summarized) else outcome.error)
            raise RuntimeError("the engine ended before its input did")
        except BaseException as error:  # no caller in this thread sees it: fail the pending and all later calls
            for _, answer in chain(self._in_flight.values(), iter(self._inbox.get, None)):
                answer.set_exception(RuntimeError(f"the engine stopped: {error!r}"))

    def _documents(self) -> Iterator[Document | None]:
        """The documents as they arrive; None instead of waiting while documents are in flight."""
        while True:
            if self._in_flight and self._inbox.empty():
                yield None
                continue
            document, answer = self._inbox.get()  # no other thread reads the inbox
            self._in_flight[id(document)] = document, answer
            yield document


@dataclass(slots=True, eq=False)
class _Worker:
    handle: Any
    capacity: int = 0  # maximum documents in flight; 0 until the worker is ready
    in_flight: int = 0


class _Call(NamedTuple):
    """A pending call: to start, or to summarize a document with which `deaths` workers died."""

    worker: _Worker
    document: Document | None = None
    deaths: int = 0
    size: int = 0  # used part of the worker's capacity


class WorkerPool:
    """Summarizes documents with workers on a cluster, each with `settings`, whose threads Ray counts as CPUs.

    Workers without resources wait, so that an autoscaling cluster grows. `ray` is the module, connected to a cluster.
    """

    def __init__(self, ray: Any, settings: JobSettings, workers: int, gpus: int = 0) -> None:
        self._ray, self._settings, self._size = ray, settings, workers
        resources = {"num_cpus": settings.threads, "num_gpus": gpus, "max_concurrency": _MAX_CONCURRENCY}
        self._make = ray.remote(RayWorker).options(**resources).remote
        self._workers: list[_Worker] = []
        self._calls: dict[Any, _Call] = {}
        self._retries: list[tuple[Document, int]] = []  # documents and their worker deaths, fewest deaths first
        self._identity: JobIdentity | None = None  # of the first ready worker
        self._failed_starts = 0
        self._last_words = ""  # why the last worker was removed
        self.notes: list[str] = []  # messages to the user about workers

    def __enter__(self) -> WorkerPool:
        for _ in range(self._size):
            self._add()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(TimeoutError):  # a cluster that is gone answers no call
            in_time(lambda: [self._ray.kill(worker.handle) for worker in self._workers], _CONNECT_S)

    def wait_ready(self, workers: int = 1) -> JobIdentity:
        """Wait until `workers` are ready. LookaheadError if options are wrong, or all workers died during startup."""
        while self._identity is None or sum(worker.capacity > 0 for worker in self._workers) < workers:
            list(self._collect(waits=True))
        return self._identity

    def summarize_all(self, documents: Iterable[Document]) -> Iterator[Outcome]:
        """Summarize documents. They are taken when a worker has room, and yielded as they finish.

        If `documents` raises, the documents in flight are finished and yielded first.

        Raises:
            ClusterError: No worker is left, and none can be started.
        """
        source, is_open = iter(documents), True
        error: Exception | None = None
        while True:
            free = [worker for worker in self._workers if worker.in_flight < worker.capacity]
            worker = min(free, key=lambda worker: worker.in_flight, default=None)
            document, deaths = None, 0
            if worker and self._retries and (self._retries[0][1] < TRIES - 1 or not (is_open or worker.in_flight)):
                document, deaths = self._retries.pop(0)
            elif worker and is_open:
                try:
                    document = next(source)
                except Exception as raised:
                    is_open, error = False, None if isinstance(raised, StopIteration) else raised
                    continue
            if worker and document:
                size = worker.capacity if deaths == TRIES - 1 else 1  # the last try is alone on its worker
                self._calls[worker.handle.summarize.remote(document)] = _Call(worker, document, deaths, size)
                worker.in_flight += size
            is_busy = any(call.document is not None for call in self._calls.values())
            if not (is_open or is_busy or self._retries):
                break
            yield from self._collect(waits=document is None)
        if error is not None:
            raise error

    def _add(self) -> None:
        worker = _Worker(self._make(self._settings))
        self._workers.append(worker)
        self._calls[worker.handle.start.remote()] = _Call(worker)

    def _collect(self, *, waits: bool) -> Iterator[Outcome]:
        """Yield finished documents; with `waits`, wait for at least one answer. ClusterError if no worker is left."""
        calls = list(self._calls)
        done, _ = self._ray.wait(calls, num_returns=1 if waits else len(calls), timeout=_CHECK_S if waits else 0)
        if waits and not done:
            self._check_cluster()
        for reference in done:
            call = self._calls.pop(reference)
            call.worker.in_flight -= call.size
            try:
                answer = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                yield from self._fail(call, first_line(error))
                continue
            if (document := call.document) is None:
                self._accept(call.worker, answer)
            else:
                is_error = isinstance(answer, str)
                yield Reject(document.id, answer, document) if is_error else Summarized(document, answer)
        if not self._workers:
            raise ClusterError(f"no worker is left; the last one: {self._last_words}")

    def _check_cluster(self) -> None:
        """ClusterError if the node of this process is gone: Ray then leaves every call without an answer."""
        try:
            own = self._ray.get_runtime_context().get_node_id()
            alive = {node["NodeID"] for node in in_time(self._ray.nodes, _CONNECT_S) if node["Alive"]}
        except Exception as error:  # Ray's own types, or a TimeoutError
            raise ClusterError(f"the Ray cluster is gone: {first_line(error)}") from error
        if own not in alive:
            raise ClusterError(f"the Ray cluster is gone: its node {own[:8]}, to which this process is connected, died")

    def _accept(self, worker: _Worker, answer: tuple[JobIdentity, int] | LookaheadError) -> None:
        """Use a ready worker if its job equals the job of the others."""
        if not isinstance(answer, LookaheadError):
            identity, rows = answer
            self._identity = self._identity or identity
            different = identity.differences(self._identity.to_dict())
            if not different:
                self._failed_starts = 0
                worker.capacity = rows + max(1, rows // 4)  # spare documents, so that no row waits for one
                return
            answer = ClusterError(f"it would do another job: {different}")
        if self._identity is None:
            raise answer
        self._remove(worker, str(answer))
        self.notes.append(f"a worker was left out: {answer}")

    def _fail(self, call: _Call, reason: str) -> Iterator[Outcome]:
        """Replace a worker that died, and retry or reject the document it had in flight."""
        if call.worker in self._workers:  # the worker's first failed call
            self._remove(call.worker, reason)
            if call.document is None:
                self._failed_starts += 1
            else:
                self.notes.append(f"a worker died, and its documents went to others: {reason}")
            if self._failed_starts < FAILED_STARTS:
                self._add()
        if (document := call.document) is not None and call.deaths + 1 < TRIES:
            insort(self._retries, (document, call.deaths + 1), key=lambda retry: retry[1])
        elif document is not None:
            error = f"{document.id}: {TRIES} workers died while they summarized it: {reason}"
            yield Reject(document.id, error, document)

    def _remove(self, worker: _Worker, reason: str) -> None:
        """Stop a worker; its pending calls end with an error."""
        self._last_words = reason
        self._workers.remove(worker)
        self._ray.kill(worker.handle)


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """Connect to a cluster for the duration of the context; yields the module `ray`.

    The address is an address for `ray.init`: `"HOST:PORT"`, `"ray://HOST:PORT"`, `"auto"` or `"local"`. `None` uses the
    existing connection of the process, else the variable RAY_ADDRESS, else `"auto"` or `"local"`.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs ray: pip install 'lookahead-decoding[ray]'") from error
    if address is None and ray.is_initialized():
        yield ray
        return
    where = "a Ray cluster" if address is None else f"the Ray cluster at {address!r}"
    # Ray refuses options for starting a cluster when it connects to a running one.
    options = {"include_dashboard": False} if address in (None, "local") else {}
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if host and port.isdecimal():  # Ray would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # OSError, ValueError, RuntimeError and Ray's own types
        raise ClusterError(f"{where} cannot be reached: {first_line(error)}") from error
    try:
        yield ray
    finally:
        with suppress(TimeoutError):  # the cluster may be gone
            in_time(ray.shutdown, _SHUTDOWN_S)


class OwnStdout:
    """Standard output of this thread. It drops the output of Ray's threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, get_ident()

    def write(self, text: str) -> int:
        """Write the text of this thread."""
        return self._stream.write(text) if get_ident() == self._thread else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def plan_workers(ray: Any, workers: int | None, threads: int | None, device: str | None) -> tuple[int, int, int]:
    """The number of workers of a cluster, and the threads and GPUs of each.

    The default is a worker with one thread for each GPU. Without GPUs it is a worker for each machine, and the workers
    share the CPUs.
    """
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"with --ray each worker gets its own device: device must be cpu or cuda, got {device!r}")
    gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    if gpus or device == "cuda":
        return workers or max(1, gpus), threads or 1, 1
    machines = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    wanted = workers or max(1, sum(cpus >= (threads or 1) for cpus in machines))
    share = int(min(sum(machines) / wanted, max(machines, default=1)))
    return wanted, threads or max(1, share), 0
