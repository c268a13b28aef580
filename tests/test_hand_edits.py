"""Results that somebody edited before the job was resumed: each change is told as what it is, and no line is lost."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path

import pytest

from lookahead.documents.decode_text import Document
from lookahead.errors import ConfigError
from lookahead.jobs.identity import JobIdentity, JobSettings
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.journal import OutputPaths
from tests.support.stand_ins import StandIn

OPTIONS = JobSettings(model="some-model", max_new_tokens=8).identity
JOB = JobIdentity(model="some-model", weights="w", tokenizer="t", dtype="float32", options=OPTIONS)
OUT = Path("out.jsonl")


def run(names: str, *, resume: bool = True, is_part: bool = False) -> JobTotals:
    paths, totals = OutputPaths(OUT, resume=resume), JobTotals()
    documents = [Document(name, f"text {name}") for name in names]
    run_job(documents, StandIn().summarize_all, paths, JOB, totals=totals, is_part=is_part)
    return totals


@pytest.fixture(autouse=True)
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The results of a finished job over the documents a, b and c."""
    monkeypatch.chdir(tmp_path)
    run("abc", resume=False)
    return OUT.read_bytes()


def lines(content: bytes) -> list[bytes]:
    return content.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("edit", "note"),
    [
        (lambda whole: whole + lines(whole)[0], "left out 1 duplicate line"),
        (lambda whole: whole + whole, "left out 3 duplicate lines"),
        (lambda whole: BOM_UTF8 + whole, "removed the byte order mark that an editor wrote before the first line"),
        (lambda whole: whole + b"\n", "cut off its last line, which was blank (1 bytes)"),
        (lambda whole: whole[:-1], None),
        (lambda whole: b"".join(reversed(lines(whole))), None),
    ],
    ids=["a line twice", "all lines twice", "a BOM", "a blank last line", "no line break at the end", "reversed"],
)
def test_an_edit_that_loses_nothing_is_mended_and_told(
    whole: bytes, edit: Callable[[bytes], bytes], note: str | None
) -> None:
    OUT.write_bytes(edit(whole))
    totals = run("abc")
    assert OUT.read_bytes() == whole and totals.earlier == 3
    assert totals.notes == ([] if note is None else [f"out.jsonl: {note}"])


def test_a_line_of_a_document_that_is_not_among_the_inputs_is_kept_and_told(whole: bytes) -> None:
    totals = run("ac")
    first, second, third = lines(whole)
    assert OUT.read_bytes() == first + third + second
    assert totals.notes == ["out.jsonl: kept 1 line of documents that are not among the inputs, at its end"]
    assert run("a", is_part=True).notes == []  # a job over a part of the inputs knows no better


def test_a_blank_line_in_the_middle_is_refused_as_blank_with_its_number(whole: bytes) -> None:
    first, *rest = lines(whole)
    OUT.write_bytes(b"".join([first, b"  \n", *rest]))
    with pytest.raises(ConfigError, match=r"out\.jsonl:2: not a line of this job: it is blank; remove the line"):
        run("abc")


def test_a_last_line_that_is_cut_within_is_done_again(whole: bytes) -> None:
    OUT.write_bytes(whole[:-2])
    totals = run("abc")
    assert (totals.earlier, totals.summarized) == (2, 1) and OUT.read_bytes() == whole
    assert "which was torn" in totals.notes[0]


def test_a_line_whose_summary_was_removed_is_refused(whole: bytes) -> None:
    first, *rest = lines(whole)
    record = json.loads(first)
    for edited in (record | {"summary": None}, {name: value for name, value in record.items() if name != "summary"}):
        OUT.write_bytes(b"".join([json.dumps(edited).encode(), b"\n", *rest]))
        with pytest.raises(ConfigError, match=r"out\.jsonl:1: .* it has no summary; remove the line"):
            run("abc")


def test_a_line_in_another_encoding_is_refused_with_the_place_of_its_first_byte(whole: bytes) -> None:
    first, *rest = lines(whole)
    OUT.write_bytes(b"".join([first, first.replace(b"some-model", b"m\xe9"), *rest]))
    with pytest.raises(ConfigError, match=r"out\.jsonl:2: .* it is not UTF-8 text, from its byte \d+ on"):
        run("abc")
