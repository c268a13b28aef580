"""The overhead of Ray: a job on Ray compared to local processes, and once more while a worker is killed.

    python -m bench.ray_job --documents 200 --workers 4

Documents cut from the stories in `examples` are summarized three times: by --workers local processes, each with a share
of the documents; by as many workers on a Ray cluster started on this machine; and by these again, while one of them is
killed with SIGKILL after a quarter of the documents. Every process has one thread, and has loaded the model and warmed
up before its clock starts. The clock stops when all results are written. In fp32 a summary that differs or is lost is
an error. `overhead` is the share by which the seconds on Ray exceed the seconds of the local processes. It is rough
with fewer cores than workers or with other work on the machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.command import parser_of, publish
from bench.prompts import SUMMARIZER
from lookahead.documents.decode_text import Document
from lookahead.jobs.identity import JobIdentity
from lookahead.jobs.job import JobObserver, JobTotals, SummarizeAll, run_job
from lookahead.jobs.job_settings import JobSettings
from lookahead.jobs.journal import OutputPaths
from lookahead.jobs.worker_pool import WorkerPool
from lookahead.loading.loading import load, prepare_process
from lookahead.summarization.summarizer import Summarizer


def cut(count: int) -> list[Document]:
    """Documents of 40 to 400 words, each starting at a random word of a story."""
    draw, examples = random.Random(0), Path(__file__).resolve().parent.parent / "examples"
    stories = [path.read_text(encoding="utf-8").split() for path in sorted(examples.glob("*.txt"))]
    found = []
    for number in range(count):
        story = draw.choice(stories)
        begin, length = draw.randrange(len(story) - 40), draw.randint(40, 400)
        found.append(Document(f"d{number}", " ".join(story[begin : begin + length])))
    return found


def written(
    summarize_all: SummarizeAll,
    identity: JobIdentity,
    documents: list[Document],
    output: Path,
    observer: JobObserver = lambda *_: None,
) -> None:
    paths = OutputPaths(output)
    paths.check([])
    run_job(documents, summarize_all, paths, identity, totals=JobTotals(), observer=observer)


def work_alone(share: list[Document], output: Path, model: str, new: int, gate: Any, finish: Any) -> None:
    """A local process: load the model, wait for the others, and summarize a share of the documents."""
    prepare_process(1)
    loaded = load(model, dtype="fp32", device="cpu")
    summarizer = Summarizer(*loaded, max_new_tokens=new)
    summarizer.warm_up()
    identity = JobIdentity.of(JobSettings(model=model, max_new_tokens=new), *loaded)
    gate.wait()
    written(summarizer.summarize_all, identity, share, output)
    finish.wait()


def local_seconds(documents: list[Document], workers: int, model: str, new: int, folder: Path) -> float:
    """Seconds of local processes with a share of the documents each."""
    context = multiprocessing.get_context("spawn")
    gate, finish = context.Barrier(workers + 1), context.Barrier(workers + 1)
    processes = []
    for number in range(workers):
        share, output = documents[number::workers], folder / f"local{number}.jsonl"
        processes.append(context.Process(target=work_alone, args=(share, output, model, new, gate, finish)))
        processes[-1].start()
    gate.wait()
    start = time.perf_counter()
    finish.wait()
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return seconds


def kill_one(after: int, done: Any, totals: JobTotals) -> None:
    """Kill a worker after `after` finished documents."""
    if totals.summarized == after:
        family = psutil.Process().children(recursive=True)
        os.kill(next(each.pid for each in family if "RayWorker" in "".join(each.cmdline()[:1])), signal.SIGKILL)


def summaries(paths: Sequence[Path]) -> list[tuple[str, str]]:
    lines = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted((line["id"], line["summary"]) for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, model=SUMMARIZER)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args(argv)
    import ray

    documents, workers = cut(arguments.documents), arguments.workers
    model, new = arguments.model, arguments.max_new_tokens
    report: dict[str, Any] = {"documents": len(documents), "workers": workers, "max_new_tokens": new}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        local_s = local_seconds(documents, workers, model, new, folder)
        expected = summaries(sorted(folder.glob("local*.jsonl")))
        ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        seconds = {}
        settings = JobSettings(model=model, dtype="fp32", device="cpu", threads=1, max_new_tokens=new)
        for way, observer in (("ray", lambda *_: None), ("killed", partial(kill_one, len(documents) // 4))):
            output = folder / f"{way}.jsonl"
            with WorkerPool(ray, settings, workers) as pool:
                identity = pool.wait_ready(workers)
                start = time.perf_counter()
                written(pool.summarize_all, identity, documents, output, observer)
                seconds[way] = time.perf_counter() - start
                report["died"] = len(pool.notes)
            if summaries([output]) != expected:
                sys.exit(f"{way}: the summaries are not those of the local processes")
        ray.shutdown()
    report |= {"overhead": round(seconds["ray"] / local_s - 1, 3), "local_s": round(local_s, 1)}
    report |= {"ray_s": round(seconds["ray"], 1), "ray_with_a_kill_s": round(seconds["killed"], 1)}
    report |= {"identical": len(expected), "model": Path(model).name, "cpus": os.cpu_count()}
    publish(report, arguments.output)


if __name__ == "__main__":
    main()
