"""A line of results or rejects: it reads back as it was written, and one that is none gives one error everywhere."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.readers import parquet_records
from lookahead.errors import ConfigError, ResultsError
from lookahead.jobs.identity import JobIdentity, JobSettings, text_hash
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.journal import Journal, OutputPaths
from lookahead.jobs.line import Line, parse_line
from lookahead.reporting.report_page import write_report
from lookahead.stats import DecodingStats
from lookahead.summarization.pipeline import PlainFigures, Summarized, Summary
from tests.support.stand_ins import StandIn

OPTIONS = JobSettings(model="some-model", max_new_tokens=8).identity
JOB = JobIdentity(model="some-model", weights="w", tokenizer="t", dtype="float32", options=OPTIONS)
ROOT = Path(__file__).resolve().parent.parent
OUT = Path("out.jsonl")
GOOD = {"id": "a", "summary": "A.", "document": text_hash("text a").hex(), "fingerprint": JOB.fingerprint}

PLAIN = {
    "compared": PlainFigures(DecodingStats(emitted_tokens=3, decode_s=1.0, acceptance_histogram={1: 2}), True),
    "without a token": PlainFigures(DecodingStats(), False),
    "not compared": None,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)


def run(items: Iterable[Document | Reject], summarize_all: Any, output: Path | None, **options: Any) -> list[Any]:
    """A job; returns what it showed."""
    shown: list[Any] = []
    paths = OutputPaths(output, Path("rejects"), **options)
    run_job(items, summarize_all, paths, JOB, totals=JobTotals(), shown=shown.append)
    return shown


# Lines that are whole


@pytest.mark.parametrize("ids", [(1, 2, 1 << 70), ("a", "caf\udce9", "")], ids=["numbers", "names"])
@pytest.mark.parametrize("plain", PLAIN)
def test_a_line_reads_back_as_it_was_written_from_every_place_it_is_written_to(ids: Any, plain: str) -> None:
    stats = DecodingStats(prompt_tokens=3, emitted_tokens=4, acceptance_histogram={1: 1, 3: 1}, decode_s=0.5)
    summary = Summary("Größe.", 7, 4, 2, "sections", stats, PLAIN[plain], "length")

    def summarize_all(documents: Iterable[Document]) -> Iterator[Summarized]:
        for document in documents:
            yield Summarized(document, summary)

    first, twin, other = ids
    items = [Document(first, "text"), Document(twin, "text"), Document(other, "more"), Reject("bad", "bad: it failed")]
    line = Line.of(Summarized(items[0], summary), text_hash("text"), JOB)
    last = Line.of(Summarized(items[2], summary), text_hash("more"), JOB)
    lines = [line, line.copied(twin), last]
    assert (line.summary, line.parts, line.finish_reason, line.copy_of) == ("Größe.", 2, "length", None)
    shown = run(items, summarize_all, None)
    alone = Line.of(Summarized(items[1], summary), text_hash("text"), JOB)  # nothing is copied without a journal
    assert [Line.from_json(record) for record in shown] == [line, alone, last]
    job = {"document": text_hash("text").hex(), "model": "some-model", "fingerprint": JOB.fingerprint}
    assert json.dumps(shown[0]) == json.dumps({"id": first, **summary.to_dict(), **job})
    run(items, summarize_all, OUT)
    written = [parse_line(each) for each in OUT.read_bytes().splitlines(keepends=True)]
    assert [Line.from_json(each) for each in written] == lines
    (reject,) = Path("rejects").read_bytes().splitlines(keepends=True)
    assert Line.from_json(parse_line(reject), is_reject=True) == Line(id="bad", error="bad: it failed")
    run(items, summarize_all, Path("out.parquet"))
    rows = [Line.from_json(row) for row in parquet_records(Path("out.parquet"))]
    assert [row.key for row in rows] == [line.key for line in lines]
    kept = [{**each.to_json(), "id": 0, "copy_of": 0} for each in rows]
    assert kept == [{**each.to_json(), "id": 0, "copy_of": 0} for each in lines]


def test_fields_of_other_programs_are_kept_and_copied() -> None:
    OUT.write_text(json.dumps({**GOOD, "checked_by": ["me"]}) + "\n")
    run([Document("a", "text a"), Document("twin", "text a")], StandIn().summarize_all, OUT, resume=True)
    lines = [json.loads(line) for line in OUT.read_text().splitlines()]
    assert [(line["id"], line["checked_by"]) for line in lines] == [("a", ["me"]), ("twin", ["me"])]


# Lines that are none

VALUES = {
    "text": "x", "hash": "0" * 32, "count": 7, "below zero": -7, "fraction": 0.5, "too large": 1 << 63, "flag": True,
    "list": [1], "object": {"x": 1},
}  # fmt: skip
NUMBERS = {"count", "below zero", "too large"}
HOLDS = {
    "id": {"text", "hash"} | NUMBERS, "copy_of": {"text", "hash"} | NUMBERS, "document": {"hash"},
    **{name: {"text", "hash"} for name in ("summary", "split", "finish_reason", "model", "fingerprint")},
    **{name: {"count"} for name in ("document_tokens", "summary_tokens", "parts")},
    "stats": {"object"}, "plain": {"object"}, "identical": {"flag"}, "loops": {"flag"},
    "speedup": {"count", "below zero", "fraction"},
}  # fmt: skip


def test_every_field_of_a_line_is_in_this_file() -> None:
    assert HOLDS.keys() == {each.name for each in fields(Line)} - {"others", "error"}


def test_only_the_schema_names_the_fields_of_a_line() -> None:
    names = {each.name for each in fields(Line)} - JOB.to_dict().keys()
    for room in ("jobs", "reporting", "cli"):
        for path in sorted((ROOT / "lookahead" / room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                keys = [node.slice] if isinstance(node, ast.Subscript) else []
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                    keys = node.args
                named = {each.value for each in keys if isinstance(each, ast.Constant)}
                assert not named & names, f"{path.name}:{getattr(node, 'lineno', 0)}"


def error_of(record: Any) -> str:
    with pytest.raises(ValueError) as caught:
        Line.from_json(record)
    return str(caught.value)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", HOLDS)
def test_a_value_that_a_field_cannot_hold_is_named_by_whoever_reads_the_line(name: str, value: str) -> None:
    line = {**GOOD, name: VALUES[value]}
    if value in HOLDS[name]:
        assert getattr(Line.from_json(line), name) == VALUES[value]
        return
    told = error_of(line)
    assert told.startswith(f"has {name} {VALUES[value]!r}, but {name} must be ")
    refused_by_all(json.dumps(line).encode() + b"\n", told)


@pytest.mark.parametrize("name", ["id", "document", "fingerprint"])
@pytest.mark.parametrize("gap", [{}, {"null": None}], ids=["absent", "null"])
def test_a_field_that_every_line_has_is_named_by_whoever_misses_it(name: str, gap: dict[str, None]) -> None:
    line = {key: value for key, value in GOOD.items() if key != name} | dict.fromkeys(name for _ in gap)
    assert error_of(line) == f"has no {name}"
    refused_by_all(json.dumps(line).encode() + b"\n", f"has no {name}")


WHAT_IS_NONE = {
    b"{broken\n": "is not JSON: ",
    b'{"id": "\xff"}\n': "is not UTF-8 text, from its byte 9 on",
    b"[1]\n": "is a list, not a JSON object",
    b"null\n": "is a NoneType, not a JSON object",
    b"{}\n": "has neither summary nor stats, but nothing",
    b'{"id": 1, "text": "x"}\n': "has neither summary nor stats, but 'id', 'text'",
    b'{"id": 1, "error": "x"}\n': "belongs to a file of rejects",
}


@pytest.mark.parametrize("line", WHAT_IS_NONE, ids=lambda line: repr(line))
def test_what_is_no_line_of_results_gives_one_error_in_a_job_and_in_a_report(line: bytes) -> None:
    told = WHAT_IS_NONE[line]
    refused_by_all(line, told)
    good = json.dumps(GOOD).encode() + b"\n"
    OUT.write_bytes(good + line + good)
    assert f": 1 line was left out: line 2 {told}" in write_report(OUT, Path("page.html")).problems[0]


@pytest.mark.parametrize("error", [{}, {"error": None}, {"error": 5}, {"error": ["x"]}], ids=str)
def test_what_is_no_line_of_rejects_gives_one_error_in_a_job_and_in_a_report(error: dict[str, Any]) -> None:
    told = f"has error {error['error']!r}, but error must be a string" if error.get("error") else "has no error"
    good = json.dumps(GOOD) + "\n"
    OUT.write_text(good)
    rejects = Path("out.jsonl.rejects.jsonl")
    rejects.write_text(json.dumps({"id": "b", **error}) + "\n" + '{"id": "c", "error": "c: it failed"}\n')
    with pytest.raises(ConfigError) as caught:
        Journal(OutputPaths(OUT), JOB, [])
    assert f"{rejects}:1: not a line of this job: it {told}; remove the line" in str(caught.value)
    assert write_report(OUT).problems[0].endswith(f": 1 line was left out: line 1 {told}.")


def refused_by_all(line: bytes, told: str) -> None:
    """A line is refused with this error when a job is resumed, while it runs, and in a Parquet file."""
    good = json.dumps(GOOD).encode() + b"\n"
    OUT.write_bytes(good + line + good)
    with pytest.raises(ConfigError) as caught:
        Journal(OutputPaths(OUT, resume=True), JOB, [])
    assert f"{OUT}:2: not a line of this job: it {told}" in str(caught.value)
    assert str(caught.value).endswith("; remove the line, or pass --overwrite to start over")
    OUT.unlink()
    changed_while_a_job_runs(line, told)
    parquet_of(line, told)


def changed_while_a_job_runs(line: bytes, told: str) -> None:
    def documents() -> Iterator[Document]:
        yield Document("b", "text b")
        with OUT.open("r+b") as file:
            file.truncate()
            file.write(line)
        yield Document("c", "text c")

    with pytest.raises(ResultsError) as changed:
        run(documents(), StandIn().summarize_all, OUT)
    assert f"{OUT}:1: not a line of this job: it {told}" in str(changed.value)
    assert "; another program changed it while the job ran; remove the line" in str(changed.value)


def parquet_of(line: bytes, told: str) -> None:
    """The same for a row, where the line is a JSON object."""
    path = Path("out.parquet")
    if "is no" in told or "not a JSON object" in told or line == b"{}\n":
        return
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line)]), path)
    except OverflowError:  # no column holds such a number
        return
    with pytest.raises(ConfigError) as caught:
        Journal(OutputPaths(path, resume=True), JOB, [])
    assert f"row 1 is not of this job: it {told}" in str(caught.value)
