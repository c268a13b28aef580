"""The journal of a job: what it finds after a kill, whom it lets write, and what its manifest says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from lookahead.documents.decode_text import Document, Reject
from lookahead.errors import ConfigError
from lookahead.jobs import journal as journals
from lookahead.jobs.identity import JobIdentity, JobSettings, text_hash
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.journal import Journal, OutputPaths, write_manifest
from lookahead.jobs.line import Line
from tests.support.stand_ins import StandIn

OPTIONS = JobSettings(model="some-model", max_new_tokens=8).identity
JOB = JobIdentity(model="some-model", weights="w", tokenizer="t", dtype="float32", options=OPTIONS)
OUT = Path("out.jsonl")
REJECTS = Path("out.jsonl.rejects.jsonl")


class Killed(BaseException):
    """Stands in for a kill."""


class Worker(StandIn):
    """Notes what it is given; a kill may come after so many."""

    def __init__(self, killed_after: int | None = None) -> None:
        self.killed_after = killed_after
        self.seen: list[Any] = []

    def summarize_all(self, documents: Iterable[Document]) -> Iterator[Any]:
        for document in documents:
            if len(self.seen) == self.killed_after:
                raise Killed
            self.seen.append(document.id)
            yield from super().summarize_all([document])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)


def run(
    items: Iterable[Document | Reject],
    worker: Worker | None = None,
    *,
    output: Path = OUT,
    is_part: bool = False,
    **options: bool,
) -> JobTotals:
    paths, totals = OutputPaths(output, **options), JobTotals()
    paths.check([])
    summarize_all = (worker or Worker()).summarize_all
    run_job(items, summarize_all, paths, JOB, totals=totals, is_part=is_part)
    return totals


def documents(names: str) -> list[Document]:
    return [Document(name, f"text {name}") for name in names]


def line(name: str) -> tuple[Line, bytes]:
    """A line of results, and the hash of its text."""
    content = text_hash(f"text {name}")
    return Line(id=name, summary="S", document=content.hex(), fingerprint=JOB.fingerprint), content


def lines(path: Path = OUT) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_torn_line_of_rejects_is_cut_off_and_told() -> None:
    items = [Reject("a", "a: it failed"), Reject("b", "b: it failed"), *documents("c")]
    run(items)
    whole = REJECTS.read_bytes()
    REJECTS.write_bytes(whole[:-5])
    totals = run(items, resume=True)
    torn = len(whole.splitlines(keepends=True)[1]) - 5
    assert totals.notes == [f"{REJECTS}: cut off its last line, which was torn ({torn} bytes)"]
    assert REJECTS.read_bytes() == whole


def test_a_text_with_an_equal_one_behind_a_repaired_line_gets_its_summary() -> None:
    with pytest.raises(Killed):
        run(documents("abc"), Worker(killed_after=2))
    OUT.write_bytes(OUT.read_bytes()[:-5])
    run([*documents("ab"), Document("twin", "text b")], resume=True)
    assert [(line["id"], line["summary"]) for line in lines()] == [("a", "TEXT A"), ("b", "TEXT B"), ("twin", "TEXT B")]


def test_a_last_line_longer_than_what_is_read_at_once_is_whole() -> None:
    run([*documents("a"), Document("long", "word" * 50_000)])
    before, worker = OUT.read_bytes(), Worker()
    assert len(before) > 1 << 17
    assert run([*documents("a"), Document("long", "word" * 50_000)], worker, resume=True).notes == []
    assert (worker.seen, OUT.read_bytes()) == ([], before)


def test_a_parquet_file_that_was_gone_on_with_keeps_what_was_done_until_a_kill() -> None:
    output, worker = Path("out.parquet"), Worker()
    run(documents("a"), output=output)
    with pytest.raises(Killed):
        run(documents("abc"), Worker(killed_after=1), output=output, resume=True)
    totals = run(documents("abc"), worker, output=output, resume=True)
    assert (totals.earlier, worker.seen) == (2, ["c"])


def test_a_number_that_parquet_cannot_hold_becomes_a_string() -> None:
    output = Path("out.parquet")
    run([Document(1 << 70, "x"), Document(1, "y")], output=output)
    assert pyarrow.parquet.read_table(output)["id"].to_pylist() == [str(1 << 70), "1"]


@pytest.mark.parametrize(
    ("output", "rejects", "content"),
    [
        ("out.jsonl", "out.jsonl", "the summaries"),
        ("out.jsonl", "out.jsonl.manifest.json", "the manifest"),
        ("out.parquet", "out.parquet.running.jsonl", "the running job"),
    ],
)
def test_rejects_do_not_go_to_a_file_of_the_results(output: str, rejects: str, content: str) -> None:
    with pytest.raises(ConfigError, match=f"output {rejects} cannot hold both {content} and the rejects"):
        OutputPaths(Path(output), Path(rejects).absolute()).check([])


@pytest.mark.parametrize("damage", ["cut", "in the middle", "of numbers", "of bytes"])
def test_a_parquet_file_that_is_damaged_or_of_something_else_is_refused(damage: str) -> None:
    output = Path("out.parquet")
    run(documents("abc"), output=output)
    whole = output.read_bytes()
    if damage.startswith("of"):
        values = [1] if damage == "of numbers" else [b"\xff"]
        pyarrow.parquet.write_table(pyarrow.table({"stats": values}), output)
    else:
        output.write_bytes(whole[:-9] if damage == "cut" else whole[:40] + b"\0" * 400 + whole[440:])
    with pytest.raises(ConfigError, match=r"^out\.parquet holds no results .*; pass --overwrite to start over$"):
        run(documents("abc"), output=output, resume=True)
    assert run(documents("abc"), output=output, overwrite=True).summarized == 3


@pytest.mark.parametrize(
    "columns",
    [
        {"fingerprint": [JOB.fingerprint, "0" * 16]},
        {"document": ["0" * 32, "no hash"]},
        {"document": ["0" * 32, None]},
        {"id": [1, None]},
    ],
    ids=lambda columns: " ".join(columns),
)
def test_a_foreign_parquet_file_beside_this_jobs_manifest_is_named_and_kept(columns: Any) -> None:
    output = Path("out.parquet")
    run(documents("ab"), output=output)
    table = {
        "id": ["a", "b"],
        "summary": ["A", "B"],
        "document": ["0" * 32] * 2,
        "fingerprint": [JOB.fingerprint] * 2,
        **columns,
    }
    pyarrow.parquet.write_table(pyarrow.table(table), output)
    before = {path: path.read_bytes() for path in Path().iterdir()}
    with pytest.raises(ConfigError, match=r"^out\.parquet holds no results to continue: row 2 is not of this job: it "):
        run(documents("ab"), output=output, resume=True)
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_lines_of_another_job_beside_the_manifest_of_this_one_are_refused() -> None:
    run(documents("ab"))
    OUT.write_text(OUT.read_text().replace(JOB.fingerprint, "0" * 16))
    with pytest.raises(ConfigError, match=r"out\.jsonl:1: not a line of this job"):
        run(documents("ab"), resume=True)


def test_a_long_prompt_that_differs_is_told_in_a_line() -> None:
    told = replace(JOB, options={**JOB.options, "prompt": "say it " * 99}).differences(JOB.to_dict())
    assert told.startswith("prompt was None and is 'say it say it") and len(told) < 120


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}], ids=["resume", "overwrite"])
def test_what_a_process_is_writing_is_left_to_it(options: dict[str, bool]) -> None:
    paths = OutputPaths(OUT)
    with Journal(paths, JOB, []) as journal:
        journal.append(*line("a"))
        before = OUT.read_bytes()
        with pytest.raises(ConfigError, match=r"out\.jsonl cannot be written: another process is"):
            run(documents("b"), **options)
        assert OUT.read_bytes() == before and Path("out.jsonl.manifest.json").exists()


def test_two_jobs_do_not_write_rejects_to_one_file() -> None:
    with Journal(OutputPaths(OUT, REJECTS), JOB, []):
        pass
    with (
        Journal(OutputPaths(OUT, Path("bad.jsonl")), JOB, []),
        pytest.raises(ConfigError, match=r"bad\.jsonl cannot be written: another process is"),
    ):
        Journal(OutputPaths(Path("other.jsonl"), Path("bad.jsonl")), JOB, [])
    with Journal(OutputPaths(Path("other.jsonl"), Path("bad.jsonl")), JOB, []):
        pass


def test_a_job_is_alone_also_when_its_files_were_replaced() -> None:
    paths = OutputPaths(OUT)
    with Journal(paths, JOB, []) as journal:
        for name in "ba":
            journal.append(*line(name))
        for document in documents("ab"):
            journal.register(document)
        before = OUT.stat().st_ino
        journal.finish()
        assert OUT.stat().st_ino != before
        with pytest.raises(ConfigError, match=r"out\.jsonl cannot be written: another process is"):
            Journal(paths, JOB, [])
    with Journal(paths, JOB, []):
        pass


def test_of_two_jobs_begun_at_once_one_is_told_and_the_other_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = OutputPaths(OUT)

    def write_while_another_begins(*manifest: Any) -> None:
        monkeypatch.setattr(journals, "write_manifest", write_manifest)
        with pytest.raises(ConfigError, match=r"out\.jsonl cannot be written: another process is"):
            Journal(paths, JOB, [])
        write_manifest(*manifest)

    monkeypatch.setattr(journals, "write_manifest", write_while_another_begins)
    with Journal(paths, JOB, []) as journal:
        journal.append(*line("a"))
    assert Path("out.jsonl.manifest.json").exists()


def test_results_that_are_refused_can_be_begun_anew_by_the_same_process() -> None:
    run(documents("ab"))
    OUT.write_bytes(b"what is this\n" + OUT.read_bytes())
    with pytest.raises(ConfigError, match=r"out\.jsonl:1: not a line of this job"):
        run(documents("a"), resume=True)
    assert run(documents("a"), overwrite=True).summarized == 1


def test_a_manifest_tells_whether_the_job_ended_and_how_many_lines_there_are() -> None:
    manifest = Path("out.jsonl.manifest.json")
    with pytest.raises(Killed):
        run(documents("ab"), Worker(killed_after=1))
    assert {"state": "running", "documents": None}.items() <= json.loads(manifest.read_text()).items()
    run(documents("aba"), resume=True)
    assert {"state": "finished", "documents": 3}.items() <= json.loads(manifest.read_text()).items()


DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n"


def test_a_manifest_nested_without_end_or_a_pipe_in_its_place_is_none() -> None:
    run(documents("a"))
    manifest = Path("out.jsonl.manifest.json")
    manifest.write_text(DEEP)
    with pytest.raises(ConfigError, match=r"not the manifest of a job; remove it to continue .*, or pass --overwrite"):
        run(documents("a"), resume=True)
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(ConfigError, match="not a regular file"):
        run(documents("a"), resume=True)


@pytest.mark.parametrize("file", [OUT, REJECTS])
def test_a_line_nested_without_end_is_none_of_the_job(file: Path) -> None:
    run([*documents("ab"), Reject("c", "no text")])
    first, *others = file.read_text().splitlines(keepends=True)
    file.write_text("".join((DEEP, first, *others)))
    with pytest.raises(ConfigError, match=f"{file}:1: not a line of this job"):
        run(documents("abc"), resume=True)


def test_of_ids_of_several_texts_the_first_is_named() -> None:
    totals = run([*documents("ab"), Document("a", "x"), Document("b", "y")])
    assert totals.notes[0].startswith("2 documents have the id of another with a different text, the first of them 'a'")


def test_a_run_over_some_documents_drops_no_line_of_an_id_that_the_others_may_have() -> None:
    items = [Document("a", "one"), Document("b", "two"), Document("a", "three")]
    failed = Reject("a", "a: it failed", Document("a", "it fails"))
    run([*items, failed, Reject("a", "x:5: no JSON")])
    for seen in (items[:1], items[1:], [Document("a", "new")]):
        assert run(seen, resume=True, is_part=True).notes == []
        assert {"ONE", "TWO", "THREE"} <= {line["summary"] for line in lines()}
        assert [line["error"] for line in lines(REJECTS)] == ["a: it failed", "x:5: no JSON"]
    totals = run([*items, failed], resume=True)  # all of them: now it is known what has changed
    assert [line["summary"] for line in lines()] == ["ONE", "TWO", "THREE"]
    assert totals.notes[-1] == "out.jsonl: left out 1 line of documents that have changed since"
    assert [line["error"] for line in lines(REJECTS)] == ["a: it failed"]


def test_a_reject_that_a_run_over_some_documents_tried_again_is_none_any_more() -> None:
    run([*(Reject(each.id, f"{each.id}: it failed", each) for each in documents("ab")), *documents("c")])
    run(documents("a"), resume=True, is_part=True, retry_rejects=True)
    assert ([line["id"] for line in lines()], [line["id"] for line in lines(REJECTS)]) == (["a", "c"], ["b"])


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("killed_after", [1, None], ids=["killed", "finished"])
def test_lines_without_a_manifest_are_gone_on_with_if_they_tell_this_job(name: str, killed_after: int | None) -> None:
    if killed_after is None:
        run(documents("a"), output=Path(name))
    else:
        with pytest.raises(Killed):
            run(documents("ab"), Worker(killed_after), output=Path(name))
    Path(f"{name}.manifest.json").unlink()
    worker = Worker()
    assert run(documents("ab"), worker, output=Path(name), resume=True).earlier == 1
    assert worker.seen == ["b"]


@pytest.mark.parametrize("content", ["a note, not a line", "a note\n", '{"id": 5}\n', "[]\n", "5"])
def test_what_is_no_line_of_a_job_is_left_alone_without_a_manifest(content: str) -> None:
    OUT.write_text(content)
    with pytest.raises(ConfigError, match=r"out\.jsonl has no manifest \(out\.jsonl\.manifest\.json\), so"):
        run(documents("ab"), resume=True)
    assert OUT.read_text() == content and [*Path().iterdir()] == [OUT]


def test_lines_of_another_job_are_left_alone_without_a_manifest() -> None:
    run(documents("ab"))
    OUT.write_text(OUT.read_text().replace(JOB.fingerprint, "0" * 16))
    Path("out.jsonl.manifest.json").unlink()
    before = OUT.read_bytes()
    with pytest.raises(ConfigError, match=r"out\.jsonl:1: not a line of this job"):
        run(documents("ab"), resume=True)
    assert OUT.read_bytes() == before and not Path("out.jsonl.manifest.json").exists()


def test_what_was_measured_stays_with_the_document_it_was_measured_of() -> None:
    measured = {"stats": {"prompt_tokens": 1}, "plain": {}, "speedup": 2.0, "identical": True}
    kept = {"summary": "S", "document": "0" * 32, "fingerprint": "f"}
    copy = Line.from_json({"id": "a", **kept, **measured}).copied("b")
    assert copy.to_json() == {"id": "b", **kept, "stats": None, "copy_of": "a"}
    assert copy.copied("c").copy_of == "a"
