"""What jobs leave on disk and on standard output: copies of equal texts, and nothing half written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import accumulate, count
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow.parquet
import pytest
import torch

from lookahead.documents.decode_text import Document
from lookahead.errors import ConfigError
from lookahead.jobs import job, journal, line_file
from lookahead.jobs.identity import JobIdentity, JobSettings
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.journal import OutputPaths
from lookahead.jobs.line_file import LineFile
from lookahead.loading.loading import load
from lookahead.summarization.prompting import SummaryRequest
from tests.support.stand_ins import StandIn

JOB = JobIdentity(model="some-model", weights="w", tokenizer="t", dtype="float32", options={"max_new_tokens": 8})


class Killed(BaseException):
    """Stands in for a kill."""


class Backwards(StandIn):
    """Finishes documents in the wrong order, so that their lines have to be put in order."""

    def summarize_all(self, documents: Iterable[Document]) -> Iterator[Any]:
        yield from super().summarize_all(list(documents)[::-1])


def test_every_text_is_summarized_where_no_journal_is_kept() -> None:
    items = [Document(name, f"text {name[0]}") for name in ("a", "a2", "b")]
    totals, shown = JobTotals(), list[dict[str, Any]]()
    run_job(items, StandIn().summarize_all, OutputPaths(None), JOB, totals=totals, shown=shown.append)
    assert [(line["id"], line["summary"]) for line in shown] == [("a", "TEXT A"), ("a2", "TEXT A"), ("b", "TEXT B")]
    assert not any("copy_of" in line for line in shown) and (totals.summarized, totals.copied) == (3, 0)


@pytest.mark.parametrize(("name", "moves"), [("out.jsonl", 3), ("out[1].parquet", 4)])
def test_what_a_kill_left_half_written_is_removed_and_nothing_else(
    name: str, moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, replace_file = tmp_path / name, os.replace
    others = output.with_name(f".{name}.notes.tmp")
    others.touch()

    def run(**options: bool) -> None:
        paths = OutputPaths(output, **options)
        paths.check([])
        items = [Document(each, f"text {each}") for each in "ab"]
        run_job(items, Backwards().summarize_all, paths, JOB, totals=JobTotals())

    for move in range(moves):
        left_to_go = [replace_file] * move
        with monkeypatch.context() as patched, pytest.raises(Killed):

            def replace_or_die(source: str, target: str, left_to_go: Any = left_to_go, patched: Any = patched) -> None:
                if not left_to_go:
                    patched.setattr(Path, "unlink", lambda *_, **__: None)  # a kill leaves things as they are
                    raise Killed
                left_to_go.pop()(source, target)

            patched.setattr(os, "replace", replace_or_die)
            run(overwrite=True)
        assert len(list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))) > 1, "nothing was left"
        run(resume=True)
        assert [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == [others]


def run(output: Path, count: int, **options: bool) -> None:
    """A job of so many documents."""
    items = [Document(f"d{number}", f"text {number}") for number in range(count)]
    paths = OutputPaths(output, **options)
    paths.check([])
    run_job(items, StandIn().summarize_all, paths, JOB, totals=JobTotals())


def test_every_line_and_every_repair_is_on_the_disk_before_anything_else_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, synced = tmp_path / "out.jsonl", set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add((os.fstat(file).st_ino, os.fstat(file).st_size)))
    run(output, 3)
    ends = list(accumulate(len(line) for line in output.read_bytes().splitlines(keepends=True)))
    assert {(output.stat().st_ino, end) for end in ends} <= synced
    os.truncate(output, ends[-1] - 5)
    synced.clear()
    run(output, 2, resume=True)  # nothing is written but the repair
    assert (output.stat().st_ino, ends[1]) in synced


def test_the_name_of_a_new_file_is_on_the_disk_before_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    for _ in range(2):
        with LineFile(tmp_path / "lines.jsonl") as file:
            file.write({"id": 1})
    folder, lines = tmp_path.stat().st_ino, (tmp_path / "lines.jsonl").stat().st_ino
    assert synced == [folder, lines, lines]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_line_that_is_interrupted_is_not_there_at_all(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LineFile(tmp_path / "lines.jsonl") as file:
        file.write({"id": 1})

        def fail(_: int) -> None:
            raise error

        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(os, "fsync", fail)
            file.write({"id": 2})
        file.write({"id": 3})
    assert (tmp_path / "lines.jsonl").read_text() == '{"id": 1}\n{"id": 3}\n'


def test_an_interrupt_at_any_line_of_code_leaves_as_many_summaries_as_are_told(tmp_path: Path) -> None:
    names = {source.__file__ for source in (job, journal, line_file)}
    items = [Document(name, f"text {name[0]}") for name in ("a", "b", "a2")]
    counts = set()
    for moment in count():
        left, totals, output = moment, JobTotals(), tmp_path / f"{moment}.jsonl"
        paths = OutputPaths(output)
        paths.check([])

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in names:
                return None
            left -= event == "line"
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        try:
            sys.settrace(trace)
            run_job(items, StandIn().summarize_all, paths, JOB, totals=totals)
        except KeyboardInterrupt:
            written = output.read_bytes() if output.exists() else b""
            assert totals.written == written.count(b"\n") and (not written or written.endswith(b"\n"))
            counts.add(totals.written)
        else:
            break
        finally:
            sys.settrace(None)
    assert moment > 100 and counts == {0, 1, 2, 3}


def identity_of(model: Any, tokenizer: Any) -> JobIdentity:
    return JobIdentity.of(JobSettings(model="m", max_new_tokens=8), model, tokenizer)


def other_matrix(model: Any, tokenizer: Any) -> None:
    """What merging a LoRA does: norms and embeddings stay."""
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.01)


def other_settings(model: Any, tokenizer: Any) -> None:
    model.generation_config.no_repeat_ngram_size = 3


def other_template(model: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_matrix, "with other weights"),
        (other_settings, "with other settings for generation, or chat template"),
        (other_template, "with other settings for generation, or chat template"),
    ],
)
def test_a_model_that_says_other_things_is_another_job(
    change: Callable[[Any, Any], None], told: str, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    before = identity_of(tiny_llama, tiny_tokenizer)
    model, tokenizer = deepcopy(tiny_llama), deepcopy(tiny_tokenizer)
    assert identity_of(model, tokenizer) == before
    change(model, tokenizer)
    now = identity_of(model, tokenizer)
    assert now.differences(before.to_dict()) == f"model was 'm' and is 'm', {told}"
    assert now.fingerprint != before.fingerprint


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_read_anew_is_the_same_job(dtype: str, model_folder: Path) -> None:
    first, second = (load(str(model_folder), dtype=dtype) for _ in range(2))
    assert identity_of(*first) == identity_of(*second)


def test_a_manifest_of_another_release_is_refused_by_its_version(tmp_path: Path) -> None:
    run(tmp_path / "out.jsonl", 1)
    manifest = tmp_path / "out.jsonl.manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match="version 2; this release continues version 1"):
        run(tmp_path / "out.jsonl", 2, resume=True)


def test_a_file_name_that_is_no_text_is_known_again_in_a_parquet_file(tmp_path: Path) -> None:
    items = [Document("caf\udce9.txt", "One."), Document("b.txt", "Half of a pair: \udce9.")]
    for resume in (False, True):
        paths, totals = OutputPaths(tmp_path / "out.parquet", resume=resume), JobTotals()
        run_job(items, StandIn().summarize_all, paths, JOB, totals=totals)
        assert totals.earlier == (2 if resume else 0)
        rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
        assert [row["id"] for row in rows] == ["caf\\udce9.txt", "b.txt"]
        assert rows[1]["summary"] == "HALF OF A PAIR: \\udce9."


def test_the_manifest_of_a_job_names_all_that_its_summaries_depend_on():
    settings = JobSettings(model="m", max_new_tokens=20, request=SummaryRequest(style="bullets"))
    identity = JobIdentity(model="m", weights="w", tokenizer="t", dtype="float32", options=settings.identity)
    assert list(identity.to_dict()) == [
        "model", "weights", "tokenizer", "generation", "dtype", "max_new_tokens", "prompt", "style", "refine",
    ]  # fmt: skip
