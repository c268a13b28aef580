"""Jobs that survive: what is finished stays, what is missing is done, nothing is lost, doubled or another job's."""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.parquet
import pytest

from lookahead.cli import job_display as report
from lookahead.documents.decode_text import Document, Reject
from lookahead.errors import ConfigError
from lookahead.jobs.identity import JobIdentity, JobSettings, text_hash
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.journal import Journal, OutputPaths
from lookahead.jobs.line import Line
from lookahead.jobs.line_file import LineFile
from lookahead.stats import DecodingStats
from lookahead.summarization.summarizer import Summarized, Summary
from tests.support.forked import status_of

OPTIONS = JobSettings(model="some-model", max_new_tokens=8).identity
JOB = JobIdentity(model="some-model", weights="w", tokenizer="t", dtype="float32", options=OPTIONS)
OUT = Path("out.jsonl")
REJECTS = Path("out.jsonl.rejects.jsonl")


class Killed(BaseException):
    """Stands in for a kill."""


class Worker:
    """Summarizes by shouting; some texts fail, a kill comes after so many, and rows may finish out of order."""

    def __init__(self, *, fails=(), killed_after=None, backwards=False):
        self.fails, self.killed_after, self.backwards = fails, killed_after, backwards
        self.seen = []

    def summarize_all(self, documents, rows):
        waiting = []
        for document in documents:
            waiting.append(document)
            if not self.backwards or len(waiting) == rows:
                yield from self.work(waiting)
                waiting = []
        yield from self.work(waiting)

    def work(self, documents):
        for document in reversed(documents):
            if self.killed_after is not None and len(self.seen) >= self.killed_after:
                raise Killed
            self.seen.append(document.id)
            if document.text in self.fails:
                yield Reject(document.id, f"{document.id}: it failed", document)
            else:
                yield Summarized(document, Summary(document.text.upper(), 1, 2, 1, "none", DecodingStats()))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def documents(*texts):
    return [text if isinstance(text, Reject) else Document(text, f"text {text}") for text in texts]


def run(items, worker=None, *, resume=False, identity=JOB, output=OUT, rows=1, **options):
    totals = JobTotals()
    paths = OutputPaths(output, resume=resume, **options)
    paths.check([])
    summarize_all = partial((worker or Worker()).summarize_all, rows=rows)
    run_job(items, summarize_all, paths, identity, totals=totals)
    return totals


def ids(path=OUT):
    return [json.loads(line)["id"] for line in path.read_text("utf-8").splitlines()]


def without_stats(path=OUT):
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [{**record, "stats": None} for record in records]


# Resuming


@pytest.mark.parametrize("killed_after", range(5))
@pytest.mark.parametrize("rows", [1, 3])
def test_a_killed_job_is_resumed_to_what_it_would_have_been(killed_after, rows):
    items = documents("a", "b", "c", "d", "e")
    run(items, Worker(backwards=True), output=Path("whole.jsonl"), rows=rows)
    with pytest.raises(Killed):
        run(items, Worker(killed_after=killed_after, backwards=True), rows=rows)
    assert len(ids()) == killed_after
    worker = Worker(backwards=True)
    totals = run(items, worker, resume=True, rows=rows)
    assert (totals.earlier, totals.summarized, len(worker.seen)) == (killed_after, 5 - killed_after, 5 - killed_after)
    assert OUT.read_bytes() == Path("whole.jsonl").read_bytes()
    assert ids() == ["a", "b", "c", "d", "e"]


def test_a_finished_job_resumed_does_nothing_and_takes_what_is_new():
    run(documents("a", "b"))
    before = OUT.stat().st_ino, OUT.read_bytes()
    worker = Worker()
    run(documents("a", "b"), worker, resume=True)
    assert worker.seen == [] and (OUT.stat().st_ino, OUT.read_bytes()) == before
    run(documents("a", "new", "b"), worker, resume=True)
    assert worker.seen == ["new"] and ids() == ["a", "new", "b"]


def test_lines_of_documents_left_out_of_the_inputs_stay_at_the_end():
    run(documents("a", "b", "c"))
    run(documents("c"), resume=True)
    assert ids() == ["c", "a", "b"]


def test_a_document_that_changed_is_summarized_anew_and_its_old_line_goes():
    run([Document("a", "old"), Document("b", "same")])
    totals = run([Document("a", "new"), Document("b", "same")], resume=True)
    assert [record["summary"] for record in without_stats()] == ["NEW", "SAME"]
    assert totals.notes == ["out.jsonl: left out 1 line of documents that have changed since"]


def test_resuming_where_nothing_is_yet_begins():
    assert run(documents("a"), resume=True).summarized == 1


def test_a_limited_job_is_the_beginning_of_the_whole_one():
    run(documents("a", "b", "c")[:2])
    worker = Worker()
    run(documents("a", "b", "c"), worker, resume=True)
    assert worker.seen == ["c"] and ids() == ["a", "b", "c"]


# Duplicates


@pytest.mark.parametrize("rows", [1, 4])
def test_equal_texts_are_summarized_once_and_each_id_gets_a_line(rows):
    items = [Document("a", "x"), Document("b", "y"), Document("c", "x"), Document("d", "x"), Document("e", "z")]
    worker = Worker(backwards=True)
    totals = run(items, worker, rows=rows)
    assert sorted(worker.seen) == ["a", "b", "e"] and (totals.summarized, totals.copied) == (3, 2)
    records = [json.loads(line) for line in OUT.read_text().splitlines()]
    assert [record["id"] for record in records] == ["a", "b", "c", "d", "e"]
    assert [record.get("copy_of") for record in records] == [None, None, "a", "a", None]
    assert records[2]["summary"] == "X" and records[2]["stats"] is None


def test_a_document_that_stands_there_twice_has_two_lines_after_a_kill_too():
    items = documents("a", "b", "a", "a")
    with pytest.raises(Killed):
        run(items, Worker(killed_after=1))
    run(items, resume=True)
    assert ids() == ["a", "b", "a", "a"]


def test_ids_of_several_texts_are_told_and_all_are_summarized():
    totals = run([Document("a", "one"), Document("a", "two"), Document("b", "three")])
    assert [record["summary"] for record in without_stats()] == ["ONE", "TWO", "THREE"]
    assert totals.notes == [
        "1 document has the id of another with a different text, the first of them 'a'; lines of one id stand in "
        "the order of the inputs"
    ]


# Rejects


def test_what_failed_is_put_aside_until_it_is_to_be_tried_again():
    items = [*documents("a", "b"), Reject("docs.jsonl:3", "docs.jsonl:3: not valid JSON"), *documents("c")]
    totals = run(items, Worker(fails=["text b"]))
    assert (totals.rejected, ids(), ids(REJECTS)) == (2, ["a", "c"], ["b", "docs.jsonl:3"])
    before = REJECTS.read_bytes()
    worker = Worker()
    totals = run(items, worker, resume=True)
    assert (worker.seen, totals.rejected, REJECTS.read_bytes()) == ([], 2, before)
    totals = run(items, worker, resume=True, retry_rejects=True)
    assert (worker.seen, totals.rejected, ids(), ids(REJECTS)) == (["b"], 1, ["a", "b", "c"], ["docs.jsonl:3"])


def test_a_reject_tried_again_in_vain_has_one_line_with_the_newest_reason():
    run(documents("a", "b"), Worker(fails=["text a"]))
    first = json.loads(REJECTS.read_text())
    REJECTS.write_text(json.dumps({**first, "error": "a: out of memory"}) + "\n")
    run(documents("a", "b"), Worker(fails=["text a"]), resume=True, retry_rejects=True)
    assert (ids(), [json.loads(line) for line in REJECTS.read_text().splitlines()]) == (["b"], [first])


def test_what_cannot_be_read_any_more_keeps_its_summary_and_tells_its_newest_reason():
    run(documents("a", "b"))
    for reason in ("timed out", "not found"):
        run([Reject("a", f"a: {reason}"), *documents("b")], resume=True)
        assert (ids(), json.loads(REJECTS.read_text())["error"]) == (["b", "a"], f"a: {reason}")
    assert run(documents("a", "b"), resume=True).earlier == 2
    assert ids() == ["a", "b"] and not REJECTS.exists()


def test_a_line_that_was_repaired_is_no_reject_any_more():
    run([Reject("x:1", "x:1: not valid JSON"), *documents("a")])
    assert ids(REJECTS) == ["x:1"]
    run([Document("x:1", "now it is"), *documents("a")], resume=True)
    assert ids() == ["x:1", "a"] and not REJECTS.exists()


def test_texts_equal_to_one_that_failed_fail_with_it():
    totals = run(
        [Document("a", "x"), Document("b", "x"), Document("c", "y")], Worker(fails=["x"], backwards=True), rows=3
    )
    assert (totals.rejected, ids(), ids(REJECTS)) == (2, ["c"], ["a", "b"])


# Torn and foreign files


@pytest.mark.parametrize("cut", [2, 7, 60])
def test_a_torn_last_line_is_cut_off_and_done_again(cut):
    run(documents("a", "b", "c"), output=Path("whole.jsonl"))
    with pytest.raises(Killed):
        run(documents("a", "b", "c"), Worker(killed_after=2))
    os.truncate(OUT, OUT.stat().st_size - cut)
    whole = len(OUT.read_bytes().split(b"\n")[0]) + 1
    torn = OUT.stat().st_size - whole
    worker = Worker()
    totals = run(documents("a", "b", "c"), worker, resume=True)
    assert totals.notes == [f"out.jsonl: cut off its last line, which was torn ({torn} bytes)"]
    assert worker.seen == ["b", "c"] and OUT.read_bytes() == Path("whole.jsonl").read_bytes()


def test_a_last_line_of_zeros_is_cut_off_too():
    with pytest.raises(Killed):
        run(documents("a", "b"), Worker(killed_after=1))
    with OUT.open("ab") as file:
        file.write(b"\0" * 100 + b"\n")
    totals = run(documents("a", "b"), resume=True)
    assert "(101 bytes)" in totals.notes[0] and ids() == ["a", "b"]


def test_a_damaged_line_in_the_middle_is_refused_by_its_number():
    run(documents("a", "b", "c"))
    first, _, third = OUT.read_bytes().splitlines(keepends=True)
    OUT.write_bytes(first + b"what is this\n" + third)
    with pytest.raises(
        ConfigError, match=r"out\.jsonl:2: not a line of this job: it is not JSON: .*; remove the line, or pass"
    ):
        run(documents("a"), resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "v", "model": "./mine"}, "model was 'some-model' and is './mine', with other weights"),
        ({"max_new_tokens": 9}, "max_new_tokens was 8 and is 9"),
        ({"style": "bullets"}, "style was None and is 'bullets'"),
        ({"dtype": "bfloat16"}, "dtype was 'float32' and is 'bfloat16'"),
        ({"refine": True}, "refine was False and is True"),
        ({"options": {**OPTIONS, "part_tokens": 64}}, "part_tokens was None and is 64"),
    ],
)
def test_results_of_another_job_are_refused_with_what_differs_and_what_to_do(change, message):
    run(documents("a"))
    before = OUT.read_bytes()
    other = replace(JOB, **({"options": {**OPTIONS, **change}} if change.keys() <= OPTIONS.keys() else change))
    with pytest.raises(ConfigError) as caught:
        run(documents("a", "b"), resume=True, identity=other)
    assert message in str(caught.value) and "name another --output, or pass --overwrite" in str(caught.value)
    assert OUT.read_bytes() == before


def test_a_moved_model_is_the_same_job():
    run(documents("a"))
    assert run(documents("a"), resume=True, identity=replace(JOB, model="./elsewhere")).earlier == 1


@pytest.mark.parametrize(("killed", "state"), [(True, "a job that did not finish"), (False, "a finished job")])
def test_results_that_are_there_are_neither_replaced_nor_gone_on_with_unasked(killed, state):
    if killed:
        with pytest.raises(Killed):
            run(documents("a", "b"), Worker(killed_after=1))
    else:
        run(documents("a"))
    with pytest.raises(ConfigError, match=f"output out.jsonl is of {state}; pass --resume .* or --overwrite"):
        run(documents("a"))
    assert run(documents("c"), overwrite=True).summarized == 1
    assert ids() == ["c"]


def test_a_manifest_that_is_none_is_refused():
    run(documents("a"))
    Path("out.jsonl.manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not the manifest of a job; remove it to continue .*, or pass --overwrite"):
        run(documents("a"), resume=True)


def test_two_processes_do_not_write_one_output():
    paths = OutputPaths(OUT, resume=True)
    with (
        Journal(paths, JOB, []),
        pytest.raises(ConfigError, match=r"out\.jsonl cannot be written: another process is"),
    ):
        Journal(paths, JOB, [])


# No space left


def test_no_space_for_a_line_leaves_whole_lines_and_the_job_can_be_resumed():

    def fill():
        with Journal(OutputPaths(OUT, resume=True), JOB, []) as journal:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            with pytest.raises(OSError):
                for i in range(99):
                    content = text_hash(f"text {i}")
                    known = {"document": content.hex(), "fingerprint": JOB.fingerprint}
                    journal.append(Line(id=i, summary="x" * 100, **known), content)
        sys.exit(i)

    count = status_of(fill)
    assert 0 < count < 99 and ids() == list(range(count)) and OUT.read_bytes().endswith(b"\n")
    assert run([Document(i, f"text {i}") for i in range(12)], resume=True).earlier == count


def test_no_space_to_put_the_lines_in_order_leaves_them_as_they_are(monkeypatch):
    items = documents("a", "b", "c")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lookahead.utils.atomic.os.replace", full)
        patch.setattr("lookahead.jobs.journal.write_manifest", lambda *_: None)
        with pytest.raises(OSError, match="No space left"):
            run(items, Worker(backwards=True), rows=3)
    assert ids() == ["c", "b", "a"] and not list(Path().glob(".*.tmp"))


def test_a_line_goes_on_behind_those_that_are_there():
    with LineFile(OUT) as file:
        file.write({"id": 1})
    with LineFile(OUT) as file:
        assert file.whole == (10, 0)
        file.write({"id": 2})
    assert ids() == [1, 2]


# Parquet


def test_results_become_a_parquet_file_and_can_be_gone_on_with():
    out = Path("out.parquet")
    items = [Document(2, "x"), Document(1, "y"), Document(3, "x")]
    with pytest.raises(Killed):
        run(items, Worker(killed_after=1), output=out)
    assert not out.exists() and Path("out.parquet.running.jsonl").exists()
    run(items, resume=True, output=out)
    assert not Path("out.parquet.running.jsonl").exists()
    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert [(row["id"], row["summary"], row["copy_of"]) for row in rows] == [
        (2, "X", None),
        (1, "Y", None),
        (3, "X", 2),
    ]
    assert json.loads(rows[0]["stats"])["emitted_tokens"] == 0
    assert (rows[0]["model"], rows[0]["fingerprint"]) == ("some-model", JOB.fingerprint)
    worker = Worker()
    run([*items, Document("four", "z")], worker, resume=True, output=out)
    assert worker.seen == ["four"]
    assert pyarrow.parquet.read_table(out)["id"].to_pylist() == ["2", "1", "3", "four"]
    run([*items, Document("four", "z")], worker, resume=True, output=out)
    assert worker.seen == ["four"]


def test_the_speed_of_a_job_is_by_the_clock_as_documents_are_decoded_together():
    totals = JobTotals(summarized=2)
    totals.stats.emitted_tokens, totals.stats.decode_s = 300, 10.0  # of two documents in the same five seconds
    assert report.speed_of(totals, 6.0) == 50.0
    assert "300 tokens at 50.0 tokens/s" in report.describe_totals(totals, 6.0)
    totals.summarized = 1
    assert report.speed_of(totals, 60.0) == totals.stats.tokens_per_s
