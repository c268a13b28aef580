"""A worker pool on a scripted cluster: who gets which document, and what becomes of it when workers die."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from lookahead.documents.decode_text import Document, Reject
from lookahead.errors import ClusterError, ConfigError
from lookahead.jobs import worker_pool
from lookahead.jobs.identity import JobIdentity, JobSettings
from lookahead.jobs.worker_pool import (
    FAILED_STARTS,
    TRIES,
    OwnStdout,
    WorkerPool,
    connect,
    plan_workers,
)
from lookahead.stats import DecodingStats
from lookahead.summarization.summarizer import Summarized, Summary

JOB = JobIdentity(model="tiny", weights="w", tokenizer="t", dtype="float32", options={"max_new_tokens": 8})
READY = JOB, 1  # has two documents in flight


class RayError(Exception):
    """What a dead worker answers."""


class Thing(SimpleNamespace):
    """What a dict can hold."""

    __hash__ = object.__hash__


class Ray:
    """A cluster on which workers start one after the other by a script, and die of some texts."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, starts, deadly=()):
        self.starts, self.deadly = list(starts), deadly
        self.added = self.killed = 0
        self.given = []

    def remote(self, _):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.add))

    def add(self, _):
        self.added += 1
        handle = SimpleNamespace(is_alive=True, number=self.added)
        answer = self.starts.pop(0) if len(self.starts) > 1 else self.starts[0]
        handle.start = SimpleNamespace(remote=lambda: Thing(handle=handle, answer=answer))
        handle.summarize = SimpleNamespace(remote=lambda document: self.give(handle, document))
        return handle

    def give(self, handle, document):
        self.given.append((handle.number, document.id))
        if document.text in self.deadly:
            handle.is_alive = False
        return Thing(handle=handle, answer=Summary(document.text, 1, 1, 1, "none", DecodingStats()))

    def wait(self, calls, num_returns, timeout):
        assert len(calls) >= num_returns > 0
        return calls[: 1 if timeout else 0], []  # answers come only to those who wait

    def get(self, call):
        if isinstance(call.answer, RayError) or not call.handle.is_alive:
            raise call.answer if isinstance(call.answer, RayError) else RayError("\nthe worker died\nsomewhere")
        return call.answer

    def kill(self, handle):
        handle.is_alive = False
        self.killed += 1


def pool_of(ray, workers=2):
    return WorkerPool(ray, JobSettings(model="tiny", threads=1), workers)


def documents(*texts):
    return [Document(text, text) for text in texts]


def outcomes(pool, items):
    with pool:
        pool.wait_ready(1)
        return {
            done.document.id: "reject" if isinstance(done, Reject) else done.summary.text
            for done in pool.summarize_all(items)
        }


def test_documents_are_shared_out_evenly_and_every_one_is_done_once():
    ray = Ray([READY])
    names = [f"d{i}" for i in range(20)]
    assert outcomes(pool_of(ray), documents(*names)) == dict(zip(names, names, strict=True))
    assert sorted(name for _, name in ray.given) == sorted(names)
    assert {number for number, _ in ray.given} == {1, 2}
    assert ray.killed == 2  # at the end


def test_documents_are_taken_only_as_workers_come_free():
    taken = []

    def stream():
        for document in documents(*map(str, range(50))):
            taken.append(document)
            yield document

    with pool_of(Ray([READY])) as pool:
        pool.wait_ready(2)
        for finished, _ in enumerate(pool.summarize_all(stream()), start=1):
            assert len(taken) - finished <= 2 * 2


def test_a_stream_that_breaks_is_told_after_what_was_in_flight():
    def stream():
        yield from documents("a", "b", "c")
        raise OSError("the disk is gone")

    done = []
    with pool_of(Ray([READY])) as pool:
        pool.wait_ready()
        with pytest.raises(OSError, match="the disk is gone"):
            done += pool.summarize_all(stream())
    assert sorted(each.document.id for each in done) == ["a", "b", "c"]


def test_a_document_that_kills_workers_is_put_aside_and_its_neighbours_are_done():
    ray = Ray([READY], deadly=("x",))
    pool = pool_of(ray)
    good = [*"abcdefgh"]
    done = outcomes(pool, documents("a", "x", *good[1:]))
    assert done == dict(zip(good, good, strict=True)) | {"x": "reject"}
    assert [name for _, name in ray.given].count("x") == TRIES
    assert ray.given[-1][1] == "x"  # its last try is alone, when all others are done
    assert ray.added == 2 + TRIES
    assert pool.notes == ["a worker died, and its documents went to others: the worker died"] * TRIES


def test_a_worker_that_would_do_another_job_is_left_out():
    stranger = (replace(JOB, weights="other"), 1)
    ray = Ray([READY, stranger])
    pool = pool_of(ray)
    assert len(outcomes(pool, documents(*"abcdef"))) == 6
    assert {number for number, _ in ray.given} == {1}
    assert pool.notes == [
        "a worker was left out: it would do another job: model was 'tiny' and is 'tiny', with other weights"
    ]


def test_options_that_are_wrong_end_the_job_before_it_begins():
    with pool_of(Ray([ConfigError("style must be ...")])) as pool, pytest.raises(ConfigError, match="style"):
        pool.wait_ready()


def test_workers_that_die_while_they_start_are_tried_again_a_few_times_and_then_told():
    ray = Ray([RayError("out of memory"), RayError("out of memory"), READY])
    assert len(outcomes(pool_of(ray), documents(*"abc"))) == 3
    ray = Ray([RayError("out of memory")])
    with pool_of(ray) as pool, pytest.raises(ClusterError, match=r"no worker is left; .*out of memory"):
        pool.wait_ready()
    assert ray.added == 2 + FAILED_STARTS - 1


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (lambda: [{"NodeID": "n0", "Alive": False}, {"NodeID": "n1", "Alive": True}], "its node n0, .* died"),
        (Mock(side_effect=RayError("no answer")), "no answer"),
        (Event().wait, "no answer within 0.01 s"),
    ],
    ids=["its node is dead", "nobody tells", "nobody answers"],
)
def test_a_cluster_that_is_gone_ends_the_job_and_does_not_wait_for_ever(monkeypatch, nodes, reason):
    monkeypatch.setattr(worker_pool, "_CONNECT_S", 0.01)
    ray = Ray([READY])
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "n0")
    ray.nodes = nodes
    with pytest.raises(ClusterError, match=f"the Ray cluster is gone: {reason}"), pool_of(ray, 1) as pool:
        pool.wait_ready()
        ray.wait = lambda calls, num_returns, timeout: ([], calls)
        ray.kill = lambda _: Event().wait()  # no call is answered
        list(pool.summarize_all(documents("a")))


def test_a_cluster_that_is_only_slow_is_waited_for():
    ray = Ray([READY])
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "n0")
    ray.nodes = lambda: [{"NodeID": "n0", "Alive": True}]
    at_once, waits = ray.wait, iter([False] * 3)
    ray.wait = lambda calls, **words: at_once(calls, **words) if next(waits, True) else ([], calls)
    assert len(outcomes(pool_of(ray, 1), documents(*"abc"))) == 3


def cluster(**resources):
    """A cluster of machines with so many CPUs each, and GPUs somewhere."""
    nodes = [{"Alive": True, "Resources": {"CPU": float(cpus)}} for cpus in resources["cpus"]]
    nodes.append({"Alive": False, "Resources": {"CPU": 64.0}})
    total = {"CPU": float(sum(resources["cpus"])), "GPU": float(sum(resources.get("gpus", ())))}
    return SimpleNamespace(nodes=lambda: nodes, cluster_resources=lambda: total)


@pytest.mark.parametrize(
    ("machines", "asked", "plan"),
    [
        ({"cpus": [8]}, (None, None, None), (1, 8, 0)),
        ({"cpus": [8]}, (4, None, None), (4, 2, 0)),
        ({"cpus": [2]}, (4, None, None), (4, 1, 0)),  # two of them wait for a larger cluster
        ({"cpus": [8, 8]}, (None, None, None), (2, 8, 0)),
        ({"cpus": [8, 2]}, (1, None, None), (1, 8, 0)),  # and not the ten, which no machine has
        ({"cpus": [8, 2]}, (None, 4, None), (1, 4, 0)),
        ({"cpus": [16], "gpus": [4]}, (None, None, None), (4, 1, 1)),
        ({"cpus": [16], "gpus": [4]}, (2, 3, "cuda"), (2, 3, 1)),
        ({"cpus": [16], "gpus": [4]}, (2, None, "cpu"), (2, 8, 0)),
        ({"cpus": [1]}, (3, None, "cuda"), (3, 1, 1)),  # machines with GPUs may come
    ],
)
def test_a_cluster_is_divided_by_gpus_or_else_by_cpus(machines, asked, plan):
    assert plan_workers(cluster(**machines), *asked) == plan


def test_standard_output_is_that_of_the_job_and_not_of_rays_threads(capsysbinary):
    with redirect_stdout(OwnStdout(sys.stdout)):
        print("a result")
        other = Thread(target=print, args=("(raylet) A worker died",))
        other.start()
        other.join()
        sys.stdout.flush()
        sys.stdout.buffer.write(b"another\n")
    assert capsysbinary.readouterr().out == b"a result\nanother\n"


def test_a_port_that_nobody_answers_is_told_at_once():
    pytest.importorskip("ray", reason="ray is not installed")
    with pytest.raises(ClusterError, match=r"the Ray cluster at 'ray://127\.0\.0\.1:1' cannot be reached"):
        connect("ray://127.0.0.1:1").__enter__()


def test_what_a_summarized_document_holds_is_the_document_that_was_given():
    document = Document("a", "a")
    with pool_of(Ray([READY])) as pool:
        pool.wait_ready()
        (done,) = pool.summarize_all([document])
    assert isinstance(done, Summarized) and done.document is document
