"""The trees of partial summaries that a job writes: through kills, copies, and both kinds of file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest

from lookahead.documents.decode_text import Document
from lookahead.jobs.identity import JobIdentity
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.journal import OutputPaths
from lookahead.summarization.summarizer import Summarizer

LONG = [Document(name, f"{name}. " + "The cat sat on the mat. " * count) for name, count in (("a", 60), ("b", 2))]
LONG.append(Document("same as a", LONG[0].text))
KEEPING = JobIdentity(
    model="some-model", weights="w", tokenizer="t", dtype="float32", options={"max_new_tokens": 16, "keep_parts": True}
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)


class Killed(BaseException):
    """Stands in for a kill."""


def run(items, worker, *, identity=KEEPING, output, resume=False):
    totals, paths = JobTotals(), OutputPaths(output, resume=resume)
    paths.check([])
    run_job(items, worker.summarize_all, paths, identity, totals=totals)
    return totals


class Summarizing:
    """Summarizes for real, with what came of the parts; a kill comes after so many documents."""

    def __init__(self, model, tokenizer, killed_after=None):
        self.summarizer = Summarizer(model, tokenizer, max_new_tokens=16, keep_parts=True)
        self.killed_after = killed_after

    def summarize_all(self, documents):
        for number, done in enumerate(self.summarizer.summarize_all(documents, 1)):
            if number == self.killed_after:
                raise Killed
            yield done


def trees(path):
    if path.suffix == ".parquet":
        return [json.loads(tree) for tree in pyarrow.parquet.read_table(path)["tree"].to_pylist()]
    return [json.loads(line)["tree"] for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("killed_after", [None, 0, 1])
def test_trees_of_parts_are_written_copied_and_kept_through_a_kill(tiny_llama, tiny_tokenizer, suffix, killed_after):
    out = Path(f"out.{suffix}")
    if killed_after is not None:
        with pytest.raises(Killed):
            run(LONG, Summarizing(tiny_llama, tiny_tokenizer, killed_after), identity=KEEPING, output=out)
    summarizing = Summarizing(tiny_llama, tiny_tokenizer)
    totals = run(LONG, summarizing, identity=KEEPING, output=out, resume=killed_after is not None)
    expected = [summarizing.summarizer.summarize(document.text).to_dict()["tree"] for document in LONG]
    assert [len(level) for level in expected[0]] == [3, 1]
    assert trees(out) == expected
    assert (totals.summarized + totals.earlier, totals.copied) == (2, 1)
    again = run([*LONG, Document("new", "text new")], summarizing, identity=KEEPING, output=out, resume=True)
    assert (again.earlier, again.summarized, trees(out)[:3]) == (3, 1, expected)


def test_a_parquet_file_without_trees_has_none(tiny_llama, tiny_tokenizer):
    plain, worker = (
        replace(KEEPING, options={**KEEPING.options, "keep_parts": False}),
        Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=4),
    )
    both = [Document(name, f"text {name}") for name in "ab"]
    run(both[:1], worker, identity=plain, output=Path("out.parquet"))
    assert pyarrow.parquet.read_table("out.parquet")["tree"].to_pylist() == [None]
    run(both, worker, identity=plain, output=Path("out.parquet"), resume=True)
    assert pyarrow.parquet.read_table("out.parquet")["tree"].to_pylist() == [None, None]
