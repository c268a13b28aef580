"""Kills of a job at random moments, resumed after each: whether any result is lost, doubled or different.

    python -m bench.faults --documents 1000 --kills 200
    python -m bench.faults --documents 1000 --kills 200 --model none

The documents are generated from a seed: words, some duplicate texts, some malformed lines. A job summarizes them
undisturbed. Then it runs in child processes that are killed with SIGKILL after a random time and resumed by the next,
until it is done. If it ends before all kills are used, another job begins. After some kills the last line of the
results is also cut at a random byte, as a power failure can do. Every finished job is compared with the undisturbed one
byte by byte, except for the measured `stats`. The children are forked from a process that has loaded the model. With
`--model none` a stand-in writes the first words of each document, to test only the journal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.command import parser_of, publish, use_one_thread
from bench.prompts import SUMMARIZER
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import read_documents
from lookahead.jobs.identity import JobIdentity
from lookahead.jobs.job import JobTotals, SummarizeAll, run_job
from lookahead.jobs.job_settings import JobSettings
from lookahead.jobs.journal import OutputPaths
from lookahead.loading.loading import load
from lookahead.summarization.summarizer import Summarizer
from tests.support.stand_ins import StandIn

WORDS = "the storm hit coast at dawn two ships were lost and a harbour of Brest stayed open while nobody slept"
TWINS, MALFORMED = 20, 50  # documents per duplicate text; documents per malformed line
WRONG = ("lost", "doubled", "different")  # faults of a document


def write_documents(path: Path, count: int, seed: int) -> None:
    """Write a JSON line for each document, and some malformed lines."""
    draw, words = random.Random(seed), WORDS.split()
    texts: list[str] = []
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = " ".join(draw.choices(words, k=draw.randint(5, 30))).capitalize() + "."
            text = draw.choice(texts) if texts and number % TWINS == TWINS - 1 else text
            texts.append(text)
            line = json.dumps({"id": f"d{number:05}", "text": text}) + "\n"
            file.write(line)
            if number % MALFORMED == MALFORMED - 1:
                file.write(line[: len(line) // 2] + "\n")


class Job:
    """The job, run to its end or to a kill."""

    def __init__(self, model: str, documents: Path, max_new_tokens: int) -> None:
        self._inputs = find_inputs([str(documents)])
        if model == "none":
            self._summarize_all: SummarizeAll = StandIn().summarize_all
            self._identity = JobIdentity(model=model, weights="", tokenizer="", dtype="", options={})
            return
        loaded = load(model, dtype="fp32", device="cpu")
        summarizer = Summarizer(*loaded, max_new_tokens=max_new_tokens)
        summarizer.warm_up()
        self._summarize_all = summarizer.summarize_all
        self._identity = JobIdentity.of(JobSettings(model=model, max_new_tokens=max_new_tokens), *loaded)

    def run(self, output: Path) -> None:
        paths = OutputPaths(output, resume=True)
        paths.check(self._inputs)
        documents = read_documents(self._inputs)
        run_job(documents, self._summarize_all, paths, self._identity, totals=JobTotals())

    def run_and_kill(self, output: Path, delay_s: float) -> bool:
        """Resume the job in a child process, killed after `delay_s`; returns whether the job was finished."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self.run(output)
                status = 0
            finally:
                os._exit(status)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
            raise RuntimeError("the job failed by itself")
        return os.WIFEXITED(status)


def lines_of(path: Path) -> list[str]:
    """The lines of results or rejects, without measurements."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [json.dumps({key: value for key, value in record.items() if key != "stats"}) for record in records]


def cut_last_line(path: Path, draw: random.Random) -> bool:
    """Cut off a part of the last line; returns whether there was one."""
    data = path.read_bytes() if path.exists() else b""
    last = len(data) - (data.rfind(b"\n", 0, max(0, len(data) - 1)) + 1)
    if last < 2:
        return False
    os.truncate(path, len(data) - draw.randint(1, last - 1))
    return True


def compare(output: Path, expected: Sequence[str], counts: dict[str, int]) -> None:
    found = lines_of(output)
    counts["jobs"] += 1
    ids, wanted = ([json.loads(line)["id"] for line in lines] for lines in (found, expected))
    counts["lost"] += len(set(wanted) - set(ids))
    counts["doubled"] += len(ids) - len(set(ids))
    counts["different"] += sum(one != other for one, other in zip(found, expected, strict=False))


def disturb(
    job: Job, folder: Path, expected: Sequence[str], seconds: float, arguments: argparse.Namespace
) -> tuple[dict[str, int], list[int]]:
    """The faults of the killed jobs, and the number of lines at every kill."""
    draw, at_kill = random.Random(arguments.seed), list[int]()
    counts = dict.fromkeys(("kills", "jobs", "lines_cut_after_kills", *WRONG), 0)
    while counts["kills"] < arguments.kills:
        output = folder / f"killed_{counts['jobs']}.jsonl"
        done = False
        while not done:
            if counts["kills"] >= arguments.kills:
                job.run(output)
                break
            done = job.run_and_kill(output, draw.uniform(0, 2 * (seconds / arguments.kills + arguments.start_s)))
            counts["kills"] += not done
            if not done and output.exists():
                at_kill.append(output.read_bytes().count(b"\n"))
                if draw.random() < arguments.cut:
                    counts["lines_cut_after_kills"] += cut_last_line(output, draw)
        compare(output, expected, counts)
    return counts, at_kill


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, model=SUMMARIZER)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cut", type=float, default=0.25, help="share of kills after which the last line is cut")
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--start-s", type=float, default=0.05, help="what a child needs before its first document")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    use_one_thread()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "documents.jsonl", arguments.documents, arguments.seed)
        job = Job(arguments.model, folder / "documents.jsonl", arguments.max_new_tokens)
        started = time.perf_counter()
        job.run(folder / "undisturbed.jsonl")
        seconds = time.perf_counter() - started
        expected = lines_of(folder / "undisturbed.jsonl")
        print(f"undisturbed: {len(expected)} results in {seconds:.1f} s", flush=True)
        counts, at = disturb(job, folder, expected, seconds, arguments)
        rejects = lines_of(folder / "undisturbed.jsonl.rejects.jsonl")
        same_rejects = all(lines_of(path) == rejects for path in folder.glob("killed_*.rejects.jsonl"))
    report = {"model": "a stand-in" if arguments.model == "none" else Path(arguments.model).name}
    report |= {"documents": arguments.documents, "results": len(expected), "rejects": len(rejects), **counts}
    report["kills_before_any_result"] = sum(lines == 0 for lines in at) + counts["kills"] - len(at)
    report["kills_after_all_results"] = sum(lines == len(expected) for lines in at)
    is_identical = not any(counts[name] for name in WRONG) and same_rejects
    report |= {"rejects_identical": same_rejects, "identical": is_identical, "undisturbed_s": round(seconds, 1)}
    publish(report, arguments.output)
    return int(not is_identical)


if __name__ == "__main__":
    sys.exit(main())
