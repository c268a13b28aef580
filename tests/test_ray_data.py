"""The benchmark that puts the crew beside `map_batches` of Ray Data: its engines, its counts, and a job of each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.ray_data import TRIES, Course, follow, poisoned
from bench.ray_job import summaries
from bench.ray_ways import POISON, Note, Way, note, noted
from lookahead.documents.decode_text import Document
from lookahead.summarization.summarizer import Summarizer

DOCUMENTS = [Document(f"d{i}", f"Text number {i}, of some words.") for i in range(6)]


@pytest.fixture
def arguments(model_folder: Path) -> argparse.Namespace:
    """One worker with the tiny model."""
    return argparse.Namespace(model=str(model_folder), max_new_tokens=12, workers=1, patience=120.0)


def test_a_course_tells_when_results_came_and_what_was_done_twice() -> None:
    log = [Note(9.0, 1, "read", "a"), Note(9.1, 1, "read", "b"), Note(10.0, 2, "ready", "")]
    log += [Note(10.1, 2, "begun", "a"), Note(10.2, 2, "begun", "b"), Note(10.3, 2, "done", "a")]
    log += [Note(11.0, 2, "begun", "a"), Note(11.1, 2, "done", "a"), Note(11.2, 3, "ready", "")]
    log += [Note(11.3, 3, "begun", "b"), Note(11.5, 3, "begun", POISON), Note(11.6, 3, "done", "b")]
    log += [Note(11.7, 1, "read", "c")]
    course = Course(log, ready_at=10.0, done_at=[11.4, 14.0], ended=True, error="")
    assert course.in_time() == {"seconds": 4.0, "first_s": 1.4, "at_half": 0.5, "read_before_first": 2}
    assert course.in_trouble() == {
        "ended": True, "results": 2, "begun_again": 2, "begun_again_by_new": 1, "done_again": 1, "most_often_begun": 2
    }  # fmt: skip


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert noted(log) == []
    note(str(log), "done", "two words")
    with log.open("a") as file:
        file.write("12.5 77 beg")
    (only,) = noted(log)
    assert (only.what, only.name) == ("done", "two words")


def test_the_crew_that_is_watched_puts_poison_aside_and_does_the_rest(
    tmp_path: Path, arguments: argparse.Namespace, own_cache_folder: Path
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    figures = poisoned(Way("crew"), DOCUMENTS, tmp_path, arguments)
    assert (figures["ended"], figures["told"], figures["lost"]) == (True, True, 0)
    assert (figures["poison_begun"], figures["results"]) == (TRIES, len(DOCUMENTS))


@pytest.mark.parametrize("way", [Way("batches", 3), Way("calls", 1, in_hand=4)], ids=["batches", "calls"])
def test_map_batches_gives_the_summaries_of_one_by_one(
    tmp_path: Path, arguments: argparse.Namespace, tiny_llama, tiny_tokenizer, way: Way, own_cache_folder: Path
) -> None:
    pytest.importorskip("ray.data", reason="Ray Data is not installed: pip install 'ray[data]'")
    output = tmp_path / "out.jsonl"
    course = follow(way, DOCUMENTS, output, arguments)
    assert (course.ended, course.error) == (True, "")
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=12)
    assert summaries([output]) == [(each.id, summarizer.summarize(each.text).text) for each in DOCUMENTS]
    assert course.times("done") == {each.id: 1 for each in DOCUMENTS}
    assert json.loads(output.read_text("utf-8").splitlines()[0])["id"] == "d0"
