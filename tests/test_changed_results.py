"""Another program changes the files of a job while it runs: the job says where, and what was finished is kept."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lookahead.cli.job_display import describe_changes
from lookahead.documents.decode_text import Document, Reject
from lookahead.errors import ResultsError
from lookahead.jobs.identity import JobIdentity, JobSettings
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.journal import OutputPaths
from tests.support.forked import command
from tests.support.stand_ins import StandIn

OPTIONS = JobSettings(model="some-model", max_new_tokens=8).identity
JOB = JobIdentity(model="some-model", weights="w", tokenizer="t", dtype="float32", options=OPTIONS)
OUT = Path("out.jsonl")
NAMES = "abcdef"
CHANGED_AFTER = 3  # documents
MODEL = Path(__file__).resolve().parent / "models" / "summarizer"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Worker(StandIn):
    """Notes the documents that it is given."""

    def __init__(self) -> None:
        self.seen = ""

    def summarize_all(self, documents):
        for document in documents:
            self.seen += str(document.id)
            yield from super().summarize_all([document])


def run(documents, worker: Worker, output: Path, **options: bool) -> JobTotals:
    paths, totals = OutputPaths(output, **options), JobTotals()
    paths.check([])
    run_job(documents, worker.summarize_all, paths, JOB, totals=totals)
    return totals


def documents_and_change(change: Callable[[], None], moment: str) -> Iterator[Document]:
    """Documents, with a change before the fourth, before an interrupt in its place, or when all have their lines."""
    for i, name in enumerate(NAMES):
        if i == CHANGED_AFTER and moment != "the end":
            change()
            if moment == "an interrupt":
                raise KeyboardInterrupt
        yield Document(name, f"text {name}")
    if moment == "the end":
        change()


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def write(path: Path, *parts: bytes) -> None:
    """Write to a file as an editor does that does not replace it."""
    with path.open("r+b") as file:
        file.truncate()
        file.write(b"".join(parts))


def replace_by(path: Path, content: bytes | None) -> None:
    """Put another file, or a folder, in the place of a file."""
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


def delete_all(path: Path) -> None:
    for each in Path().glob(f"{path.name}*"):
        each.unlink()


def spoil(path: Path, number: int, *, extra: bytes = b"") -> None:
    """Change the line of this number into something else, of the same length without `extra`."""
    lines = lines_of(path)
    spoilt = b"?" * (len(lines[number - 1]) - 1) + extra + b"\n"
    if extra:
        write(path, *lines[: number - 1], spoilt, *lines[number:])
    else:  # at once, since the job may be writing behind it
        with path.open("r+b") as file:
            file.seek(sum(map(len, lines[: number - 1])))
            file.write(spoilt)


GONE = "FILE was deleted or replaced by another program while the job ran; its content"
WRITTEN_AGAIN = rf"{GONE} was written again \(\d lines\)"
MOVED = rf"{GONE} is in FILE\.recovered\.jsonl \(\d lines\): move that to FILE to continue with it"

# What is done to a file of lines, the message, and the documents whose lines are lost, where three were done before.
CHANGES = {
    "deleted": (Path.unlink, WRITTEN_AGAIN, ""),
    "deleted with the manifest": (delete_all, WRITTEN_AGAIN, ""),
    "replaced by a folder": (
        lambda path: replace_by(path, None),
        MOVED,
        "",
    ),
    "replaced by a file": (
        lambda path: replace_by(path, b"mine\n"),
        MOVED,
        "",
    ),
    "cut behind a line": (lambda path: write(path, *lines_of(path)[:-2]), r"FILE:LAST-1: another program cut off", -2),
    "cut in a line": (lambda path: write(path, path.read_bytes()[:-5]), "FILE:LAST: another program cut off", -1),
    "emptied": (lambda path: write(path, b""), "FILE:1: another program cut off the file here", 0),
    "a line spoilt": (lambda path: spoil(path, 2), "FILE:2: not a line of this job: .*; remove the line", "b"),
    "a line made longer": (lambda path: spoil(path, 1, extra=b"!"), "FILE:1: not a line of this job: .*; remove", "a"),
    "no id": (
        lambda path: write(path, b"{}\n", *lines_of(path)[1:]),
        "FILE:1: not a line of this job: .*; remove",
        "a",
    ),
    "a torn line behind": (lambda path: write(path, path.read_bytes(), b"mine"), "FILE: another program wrote to", ""),
}


def go_on_as_told(message: str, path: Path) -> None:
    """Do what a message asks for."""
    if "move that to" in message:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        Path(f"{path}.recovered.jsonl").rename(path)
    elif "remove the line" in message:
        lines = lines_of(path)
        del lines[int(message.split(":")[1]) - 1]
        write(path, *lines)


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("moment", ["the next line", "the end", "an interrupt"])
@pytest.mark.parametrize("output", [OUT, Path("out.parquet")], ids=str)
def test_what_was_finished_before_results_were_changed_is_kept(kind: str, moment: str, output: Path) -> None:
    change, message, lost = CHANGES[kind]
    file = output if output == OUT else Path(f"{output}.running.jsonl")
    worker, second = Worker(), Worker()
    is_seen = moment != "an interrupt" or kind != "a line spoilt"  # a line of the same size is read at the end only
    with pytest.raises(ResultsError if is_seen else KeyboardInterrupt) as caught:
        run(documents_and_change(lambda: change(file), moment), worker, output)
    done = len(NAMES) if moment == "the end" else CHANGED_AFTER
    if is_seen:
        where = message.replace("FILE", str(file)).replace("LAST-1", str(done - 1)).replace("LAST", str(done))
        assert re.match(where, str(caught.value)), caught.value
        go_on_as_told(str(caught.value), file)
    else:
        go_on_as_told(f"{file}:2: remove the line", file)
    gone = lost if isinstance(lost, str) else NAMES[:done][lost:]
    run((Document(name, f"text {name}") for name in NAMES), second, output, resume=True)
    assert sorted(second.seen) == sorted({*gone, *NAMES} - ({*worker.seen} - {*gone}))
    if output == OUT:
        assert [json.loads(line)["id"] for line in lines_of(OUT)] == [*NAMES]


@pytest.mark.parametrize("kind", CHANGES)
def test_what_failed_before_rejects_were_changed_is_kept_or_tried_again(kind: str) -> None:
    change, message, _ = CHANGES[kind]
    file = Path("out.jsonl.rejects.jsonl")

    def items(change: Callable[[], None]) -> Iterator[Document | Reject]:
        yield Document("good", "text")
        for name in "abc":
            yield Reject(name, f"{name}: it failed")
        change()
        yield Reject("d", "d: it failed")

    with pytest.raises(ResultsError) as caught:
        run(items(lambda: change(file)), Worker(), OUT)
    where = message.replace("FILE", str(file)).replace("LAST-1", "2").replace("LAST", "3")
    assert re.match(where, str(caught.value)), caught.value
    go_on_as_told(str(caught.value), file)
    assert run(items(lambda: None), Worker(), OUT, resume=True).earlier == 1
    assert [json.loads(line)["id"] for line in lines_of(file)] == [*"abcd"]


def test_rejects_of_a_job_without_an_output_that_were_written_to_are_told() -> None:
    rejects = Path("rejects.jsonl")

    def items() -> Iterator[Document | Reject]:
        yield Reject("a", "a: it failed")
        write(rejects, rejects.read_bytes(), b"mine")
        yield Reject("b", "b: it failed")

    with pytest.raises(ResultsError, match=r"^rejects\.jsonl: another program wrote to the file while the job ran$"):
        run_job(items(), Worker().summarize_all, OutputPaths(None, rejects), JOB, totals=JobTotals())
    assert [json.loads(line)["id"] for line in lines_of(rejects)] == ["a", "b"]


def test_every_file_that_was_changed_is_named() -> None:
    items = [Document("a", "text a"), Reject("b", "b: it failed")]

    def changed() -> Iterator[Document | Reject]:
        yield from items
        delete_all(OUT)

    with pytest.raises(ResultsError) as caught:
        run(changed(), Worker(), OUT)
    first, second = describe_changes(caught.value, OUT)
    assert first.startswith("out.jsonl was deleted") and "--resume" not in first
    assert second.startswith("out.jsonl.rejects.jsonl was deleted")
    assert second.endswith("; --resume does the rest")
    worker = Worker()
    assert run(items, worker, OUT, resume=True).rejected == 1 and worker.seen == ""


def test_a_second_recovery_leaves_the_first_one() -> None:
    for first in ("a", "b"):
        with pytest.raises(ResultsError, match=r"is in out\.jsonl\.recovered\.jsonl"):
            run(documents_and_change(lambda: replace_by(OUT, b""), "the end"), Worker(), OUT, resume=first == "b")
    assert len(lines_of(Path("out.jsonl.recovered.jsonl"))) == 2 * len(NAMES)


def test_lines_that_cannot_be_kept_are_not_claimed_to_be_there() -> None:
    Path("deep").mkdir()
    with pytest.raises(ResultsError, match=r"deep/out\.jsonl was deleted .*, and its lines are lost: .* No such file"):
        run(documents_and_change(lambda: shutil.rmtree("deep"), "the next line"), Worker(), Path("deep/out.jsonl"))


@pytest.mark.parametrize("kind", ["deleted with the manifest", "a line spoilt"])
def test_the_command_says_in_a_line_what_was_changed_and_how_to_go_on(kind: str, folder: Path) -> None:
    change, message, _ = CHANGES[kind]
    Path("docs.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 5000)
    words = ("summarize", "docs.jsonl", "-o", "out.jsonl", "--model", str(MODEL), "--max-new-tokens", "4")
    with command(*words, "--threads", "1", "--dtype", "fp32", folder=folder) as process:
        process.until(lambda: OUT.exists() and OUT.read_bytes().count(b"\n") > 2)
        spoil(OUT, 1) if kind == "a line spoilt" else change(OUT)
        assert process.wait() == 1
    # A first use on a loaded machine also notes what it compiles.
    (said,) = [line for line in process.stderr.splitlines() if not line.startswith("compiling code ")]
    where = re.sub(r"FILE(:\d)?", r"out\\.jsonl(:\\d)?", message).replace(r"\(\d", r"\(\d+")
    assert re.search(where, said), said
    assert said.startswith("error: ") and said.endswith("; --resume does the rest")
    assert Path("out.jsonl.manifest.json").exists()


def test_the_command_names_the_file_that_it_could_not_write(folder: Path) -> None:
    manifest = Path("out.jsonl.manifest.json")
    Path("docs.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 300)
    words = ("summarize", "docs.jsonl", "-o", "out.jsonl", "--model", str(MODEL), "--max-new-tokens", "4")
    with command(*words, "--threads", "1", "--dtype", "fp32", folder=folder) as process:
        process.until(manifest.exists)
        replace_by(manifest, None)
        assert process.wait() == 1
    said = process.stderr
    assert re.search(r"error: writing \S*out\.jsonl\.manifest\.json failed: Is a directory; 300 finished summ", said)
    assert len(lines_of(OUT)) == 300
