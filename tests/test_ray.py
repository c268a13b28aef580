"""Jobs on a Ray cluster of two worker processes: the results of a local job, whatever becomes of a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lookahead.documents.decode_text import Document
from lookahead.jobs import worker_pool
from lookahead.jobs.identity import JobSettings
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.journal import OutputPaths
from lookahead.jobs.worker_pool import TRIES, RayWorker, WorkerPool
from lookahead.summarization.summarizer import Summarized
from tests.support.forked import heed_ctrl_c

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'lookahead-decoding[ray]'")

TWO = ("--ray", "--workers", "2")


@pytest.fixture(scope="module", autouse=True)
def cluster(own_cache_folder):
    """A cluster on this machine, which the jobs of these tests find connected."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def docs(cli_folder):
    """Ten documents, two of them equal, and a line that is none."""
    lines = [json.dumps({"id": f"d{i}", "text": f"Text number {i % 9}, of some words."}) for i in range(10)]
    (cli_folder / "docs.jsonl").write_text("\n".join([*lines[:4], '{"text": ', *lines[4:]]))
    return "docs.jsonl"


def lines_of(path):
    """The lines of a file of results, but for what differs from run to run."""
    return [{**json.loads(line), "stats": None} for line in Path(path).read_text("utf-8").splitlines()]


def manifest(path):
    return json.loads(Path(f"{path}.manifest.json").read_text("utf-8"))


def worker_processes():
    """The workers of our cluster, and of no other."""
    family = psutil.Process().children(recursive=True)
    return [each for each in family if "RayWorker" in "".join(each.cmdline()[:1])]


def pool_for(model_folder, **options):
    """Two workers with the tiny model."""
    asked = {"max_new_tokens": 12, "rows": 1, **options}
    settings = JobSettings(model=str(model_folder), dtype="fp32", device="cpu", threads=1, **asked)
    return WorkerPool(ray, settings, workers=2)


class KillsAWorker:
    """Kills one of the workers at once when so many documents are done."""

    def __init__(self, after):
        self.after, self.killed = after, 0

    def __call__(self, done, totals):
        if isinstance(done, Summarized) and totals.summarized == self.after:
            victim = worker_processes()[0]
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait(10)
            self.killed += 1


def run(pool, documents, output, observer=lambda *_: None):
    """A job with a pool, all of whose workers are ready before it begins."""
    totals, paths = JobTotals(), OutputPaths(Path(output))
    paths.check([])
    with pool:
        identity = pool.wait_ready(2)
        run_job(documents, pool.summarize_all, paths, identity, totals=totals, observer=observer)
    return totals


def test_a_job_on_a_cluster_goes_on_with_a_local_one_and_writes_the_same(summarize, docs):
    assert summarize(docs, "-o", "local.jsonl").exit_code == 1  # one line of docs is none
    assert summarize(docs, "-o", "out.jsonl", "--limit", "3").exit_code == 0
    done = summarize(docs, "-o", "out.jsonl", "--resume", "--ray", "--workers", "1")
    assert "6 documents summarized, 1 with the same text as another, 3 finished before, 1 failed" in done.stderr
    assert lines_of("out.jsonl") == lines_of("local.jsonl")
    assert lines_of("out.jsonl.rejects.jsonl") == lines_of("local.jsonl.rejects.jsonl")
    assert manifest("out.jsonl")["job"] == manifest("local.jsonl")["job"]


@pytest.mark.exhaustive
def test_a_local_job_goes_on_with_one_of_a_cluster(summarize, docs):
    assert summarize(docs, "-o", "out.jsonl", "--limit", "3", *TWO, "--rows", "2").exit_code == 0
    done = summarize(docs, "-o", "out.jsonl", "--resume")
    assert "6 documents summarized, 1 with the same text as another, 3 finished before, 1 failed" in done.stderr
    assert summarize(docs, "-o", "local.jsonl").exit_code == 1
    assert lines_of("out.jsonl") == lines_of("local.jsonl")


@pytest.mark.exhaustive  # tests/test_worker_pool.py kills workers of a scripted cluster
def test_a_worker_killed_on_the_way_loses_nothing_and_nothing_is_done_twice(summarize, model_folder, cli_folder):
    documents = [Document(f"d{i}", f"Text number {i}, which has a few words.") for i in range(20)]
    (cli_folder / "docs.jsonl").write_text("\n".join(json.dumps({"id": d.id, "text": d.text}) for d in documents))
    summarize("docs.jsonl", "-o", "local.jsonl", "--max-new-tokens", "30")
    pool, observer = pool_for(model_folder, max_new_tokens=30), KillsAWorker(after=5)
    totals = run(pool, [*documents[:9], Document("blank", " "), *documents[9:]], "out.jsonl", observer)
    assert observer.killed == 1
    assert [note.split(":")[0] for note in pool.notes] == ["a worker died, and its documents went to others"]
    assert (totals.summarized, totals.rejected) == (20, 1)
    assert [record["error"] for record in lines_of("out.jsonl.rejects.jsonl")] == ["blank: the document is empty"]
    names = [record["id"] for record in lines_of("out.jsonl")]
    assert names == [document.id for document in documents]
    mine, local = ([{**each, "model": None} for each in lines_of(name)] for name in ("out.jsonl", "local.jsonl"))
    assert mine == local


class DeadlyWorker(RayWorker):
    """Its process dies of a document with a tilde in it."""

    async def summarize(self, document):
        if "~" in document.text:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().summarize(document)


@pytest.mark.exhaustive
def test_documents_that_fail_or_kill_workers_are_put_aside_and_the_rest_is_done(model_folder, cli_folder, monkeypatch):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers do not know this file
    good = [Document(f"d{i}", f"Text number {i}.") for i in range(8)]
    blank, deadly = Document("blank", " "), Document("deadly", "A tilde: ~")
    monkeypatch.setattr(worker_pool, "RayWorker", DeadlyWorker)
    pool = pool_for(model_folder)
    totals = run(pool, [*good[:2], blank, deadly, *good[2:]], "out.jsonl")
    assert (totals.summarized, totals.rejected) == (8, 2)
    assert {record["id"] for record in lines_of("out.jsonl")} == {document.id for document in good}
    rejects = {record["id"]: record["error"] for record in lines_of("out.jsonl.rejects.jsonl")}
    assert rejects["blank"] == "blank: the document is empty"
    assert rejects["deadly"].startswith(f"deadly: {TRIES} workers died while they summarized it: ")
    assert len(pool.notes) == TRIES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2"], "--ray-address and --workers are for --ray, which works on a cluster"),
        (["--ray", "--dry-run"], "--dry-run measures the time on this machine alone; leave --ray out"),
        (["--ray", "--device", "cuda:1"], "device must be cpu or cuda, got 'cuda:1'"),
        (["--ray", "--model", "./gone"], "model './gone' does not exist"),
        (["--ray", "--ray-address", "127.0.0.1:1"], "the Ray cluster at '127.0.0.1:1' cannot be reached"),
        pytest.param(  # found out by a worker
            [*TWO, "--style", "bullets"], "the model's tokenizer has no chat template", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_what_a_cluster_cannot_do_is_refused_in_one_line_and_nothing_is_written(
    summarize, cli_folder, arguments, message
):
    before = sorted(cli_folder.iterdir())
    result = summarize("a.txt", "-o", "out.jsonl", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert sorted(cli_folder.iterdir()) == before


def test_without_ray_the_extra_is_named(summarize, cli_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = summarize("a.txt", "--ray")
    assert result.exit_code == 2
    assert "--ray needs ray: pip install 'lookahead-decoding[ray]'" in result.stderr


@pytest.fixture
def begun(model_folder, cli_folder):
    """A job of two workers with a cluster of its own, of which some documents are done."""
    texts = "".join(json.dumps({"id": f"d{i}", "text": f"Text number {i}, of some words."}) + "\n" for i in range(4000))
    (cli_folder / "many.jsonl").write_text(texts)
    words = [sys.executable, "-m", "lookahead", "summarize", "many.jsonl", "-o", "out.jsonl", "-n", "12", *TWO]
    options = ["--ray-address", "local", "--model", str(model_folder), "--dtype", "fp32", "--device", "cpu"]
    process = subprocess.Popen(
        [*words, *options], stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_ctrl_c
    )
    output, deadline = cli_folder / "out.jsonl", time.monotonic() + 120
    while not (output.exists() and output.read_bytes().count(b"\n") > 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    started = psutil.Process(process.pid).children(recursive=True)
    yield process, started
    for each in (*started, process):
        with suppress(psutil.NoSuchProcess):
            each.kill()


def finished(path):
    """The ids of the documents of a file of results, all different."""
    done = [json.loads(line)["id"] for line in Path(path).read_text().splitlines()]
    assert 2 <= len(done) < 4000 and len({*done}) == len(done)
    return done


def test_ctrl_c_ends_a_job_of_workers_and_its_cluster_and_keeps_finished_lines(begun):
    """It reaches the command and what it started alike."""
    process, started = begun
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    done = finished("out.jsonl")
    assert process.returncode == 130
    assert said.splitlines()[-1] == f"interrupted: {len(done)} finished summaries in out.jsonl; --resume continues"
    assert started and not psutil.wait_procs(started, timeout=30)[1]


def test_a_job_whose_cluster_dies_ends_with_a_message_and_its_finished_lines(begun):
    process, started = begun
    agents = [each for each in started if each.name() == "raylet"]
    for agent in agents:
        agent.kill()
    _, said = process.communicate(timeout=240)
    assert agents and process.returncode == 1, said
    assert "the Ray cluster is gone" in said and "--resume" in said, said
    finished("out.jsonl")
