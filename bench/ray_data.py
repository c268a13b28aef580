"""The crew of workers against `map_batches` of Ray Data, with the same engines: undisturbed, and when workers die.

    pip install 'ray[data]'
    python -m bench.ray_data --documents 200 --workers 4 --output bench/results/ray_data.json

The documents of `bench.ray_job` are summarized by local processes first, whose summaries all others are compared with;
where an undisturbed way gives others, this ends in an error. Then the same job, with its journal, is run by

- `crew`: what `lookahead summarize --ray` does;
- `batches`: `from_items(documents).map_batches(..., batch_size=16)` with a pool of as many actors;
- `calls`: the same with batches of one document, as many of them side by side in an actor as the crew has in hand.

Each runs undisturbed, while one worker is killed with SIGKILL after a quarter of the seconds that it took undisturbed,
and with one document more, which kills every worker that begins it: with what Ray does unless told, and `_bounded`,
with two more tries of what dies (`max_task_retries=2`, and `max_errored_blocks=-1`, which leaves out what failed). A
job that writes no result for `--patience` seconds will not end; it is stopped.

The clock of a way starts when all of its workers are warm and stops when its last result is in the journal. `at_half`
is the share of results that the journal has after half of that: what is kept where the driver dies then. `begun_again`
counts documents that a worker began after another had, `begun_again_by_new` those among them that waited for a worker
started since, and `done_again` those that were decoded to their end once more. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from bench.ray_job import cut, local_seconds, parser_of, summaries
from bench.ray_ways import POISON, Note, WatchedOptions, Way, noted, work
from bench.report import publish
from lookahead.documents.decode_text import Document

TRIES = 3  # as many as the crew has
ROWS = 8
IN_HAND = ROWS + ROWS // 4  # as the crew gives them to a worker


@dataclass(frozen=True, slots=True)
class Course:
    """What became of a job.

    Attributes:
        log: What its workers noted.
        ready_at: When all of them were ready, by the clock of the log.
        done_at: When results came to the journal, by the same.
        ended: Whether it came to an end, and was not stopped.
        error: What it ended with; empty where it was done.
    """

    log: list[Note]
    ready_at: float
    done_at: list[float]
    ended: bool
    error: str

    @property
    def seconds(self) -> float:
        """Until the last result."""
        return self.done_at[-1] - self.ready_at if self.done_at else float("nan")

    def times(self, what: str) -> Counter[str]:
        """How often each document was `"begun"`, or `"done"`."""
        return Counter(each.name for each in self.log if each.what == what)

    def in_time(self) -> dict[str, Any]:
        """How results came."""
        half = self.ready_at + self.seconds / 2
        return {
            "seconds": round(self.seconds, 2),
            "first_s": round(self.done_at[0] - self.ready_at, 2),
            "at_half": round(sum(when <= half for when in self.done_at) / len(self.done_at), 3),
            "read_before_first": sum(each.what == "read" and each.when < self.done_at[0] for each in self.log),
        }

    def in_trouble(self) -> dict[str, Any]:
        """What came of it."""
        begun, done = self.times("begun"), self.times("done")
        begun.pop(POISON, None)
        return {
            "ended": self.ended,
            "results": len(self.done_at),
            "begun_again": begun.total() - len(begun),
            "begun_again_by_new": self._begun_again_by_new(),
            "done_again": done.total() - len(done),
            "most_often_begun": max(begun.values(), default=0),
        }

    def _begun_again_by_new(self) -> int:
        """How often a document was begun again by a worker that was not there when the job began."""
        first = {each.pid for each in self.log if each.what == "ready" and each.when <= self.ready_at}
        begun: set[str] = set()
        count = 0
        for each in self.log:
            if each.what == "begun" and each.name != POISON:
                count += each.name in begun and each.pid not in first
                begun.add(each.name)
        return count


def options_of(arguments: argparse.Namespace, log: Path) -> WatchedOptions:
    """How the workers of all ways work."""
    asked = {"max_new_tokens": arguments.max_new_tokens, "request": None}
    return WatchedOptions(
        model=arguments.model, name=arguments.model, dtype="fp32", device="cpu", threads=1, rows=ROWS,
        summarizer=asked, identity=asked, log=str(log), workers=arguments.workers,
    )  # fmt: skip


def stop(pid: int) -> None:
    """End a job and the cluster that it started."""
    with suppress(psutil.NoSuchProcess):
        job = psutil.Process(pid)
        for each in [job, *job.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def follow(
    way: Way, documents: list[Document], output: Path, arguments: argparse.Namespace, kill_after: float | None = None
) -> Course:
    """Run a job in a process of its own, and write down what comes of it and when.

    Args:
        way: How.
        documents: Of what.
        output: Where its results go.
        arguments: The settings of all.
        kill_after: Seconds after which the worker that began a document last is killed.
    """
    log = output.with_suffix(".log")
    job = multiprocessing.get_context("spawn").Process(
        target=work, args=(way, documents, options_of(arguments, log), output)
    )
    job.start()
    ready_at, done_at, last, ended = float("inf"), [], float("inf"), True
    while job.is_alive():
        now = time.monotonic()
        if ready_at > now:
            ready = [each.when for each in noted(log) if each.what == "ready"][: arguments.workers]
            if len(ready) == arguments.workers:
                ready_at = last = ready[-1]
        written = output.read_bytes().count(b"\n") if output.exists() else 0
        if written > len(done_at):
            done_at += [now] * (written - len(done_at))
            last = now
        if kill_after is not None and now > ready_at + kill_after:
            os.kill(next(each.pid for each in reversed(noted(log)) if each.what == "begun"), signal.SIGKILL)
            kill_after = None
        if now > last + arguments.patience and written < len(documents):
            ended = False
            stop(job.pid or 0)
        time.sleep(0.01)
    error = output.with_suffix(".error")
    return Course(noted(log), ready_at, done_at, ended, error.read_text("utf-8") if error.exists() else "")


def compared(
    way: Way, documents: list[Document], expected: list[tuple[str, str]], folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A way undisturbed, and while a worker is killed."""
    output = folder / f"{way.name}.jsonl"
    course = follow(way, documents, output, arguments)
    if course.error or summaries([output]) != expected:
        sys.exit(f"{way.name}: the summaries are not those of the local processes: {course.error}")
    report = course.in_time()
    output = folder / f"{way.name}_killed.jsonl"
    killed = follow(way, documents, output, arguments, course.seconds / 4)
    same = killed.ended and not killed.error and summaries([output]) == expected
    report["killed"] = {"seconds": round(killed.seconds, 2), "same": same} | killed.in_trouble()
    return report


def poisoned(way: Way, documents: list[Document], folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """A way with a document that kills its workers, after a quarter of the others."""
    quarter = len(documents) // 4
    mixed = [*documents[:quarter], Document(POISON, "This one kills."), *documents[quarter:]]
    course = follow(way, mixed, folder / f"{way.name}_poisoned.jsonl", arguments)
    told = folder / f"{way.name}_poisoned.jsonl.rejects.jsonl"
    names = [json.loads(line)["id"] for line in told.read_text("utf-8").splitlines()] if told.exists() else []
    figures = {"poison_begun": course.times("begun")[POISON], "told": POISON in names, "error": course.error}
    return course.in_trouble() | {"lost": len(documents) - len(course.done_at)} | figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without a result that are too many")
    arguments = parser.parse_args(argv)
    import ray

    report: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("documents", "workers", "max_new_tokens", "batch_size", "patience")
    }
    batches, calls = Way("batches", arguments.batch_size), Way("calls", 1, in_hand=IN_HAND)
    bounded = [replace(way, name=f"{way.name}_bounded", retries=TRIES - 1) for way in (batches, calls)]
    documents = cut(arguments.documents)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        local_s = local_seconds(documents, arguments.workers, arguments.model, arguments.max_new_tokens, folder)
        expected = summaries(sorted(folder.glob("local*.jsonl")))
        report["local_s"] = round(local_s, 2)
        for way in (Way("crew"), batches, calls):
            figures = compared(way, documents, expected, folder, arguments)
            figures["overhead"] = round(figures["seconds"] / local_s - 1, 3)
            report[way.name] = figures
            print(way.name, json.dumps(figures), flush=True)
        for way in (Way("crew"), batches, *bounded):
            report.setdefault(way.name, {})["poison"] = figures = poisoned(way, documents, folder, arguments)
            print(way.name, "poisoned", json.dumps(figures), flush=True)
    report |= {"identical": len(expected), "model": Path(arguments.model).name, "cpus": os.cpu_count()}
    report |= {"ray": ray.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    publish(report, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
