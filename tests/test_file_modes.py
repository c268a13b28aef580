"""A file that is written anew keeps its mode and its owner, and is at no moment more readable."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lookahead.backend.gpu.kernel_trial import _write_verdicts
from lookahead.backend.step_costs import cost_path, save_costs
from lookahead.cli.app import app
from lookahead.documents.decode_text import Document, Reject
from lookahead.jobs.identity import JobIdentity, JobSettings
from lookahead.jobs.job import JobTotals, run_job
from lookahead.jobs.journal import Journal, OutputPaths
from lookahead.kernels.dispatch import Verdict
from lookahead.loading.loading import LoadedModel
from lookahead.ngram.memory_file import write_memory
from lookahead.ngram.pool_file import write_pool
from lookahead.plugins.heads.head_files import write_heads
from lookahead.plugins.heads.medusa import MedusaHeads
from lookahead.plugins.heads.training.train_heads import answer_prompts
from lookahead.reporting.report_page import write_report
from lookahead.utils.atomic import replacing
from lookahead.utils.locks import locked
from tests.support.forked import Forked
from tests.support.memories import MODEL, learned
from tests.support.stand_ins import StandIn

OPTIONS = JobSettings(model="some-model", max_new_tokens=8).identity
JOB = JobIdentity(model="some-model", weights="w", tokenizer="t", dtype="float32", options=OPTIONS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(output: str, **options: bool) -> None:
    """A job whose lines are put in order at its end, and one document of which fails."""
    done = [*StandIn().summarize_all([Document(name, f"text {name}") for name in "ba"])]

    def summarize_all(documents: Any) -> Iterator[Any]:
        yield from done if [*documents] else ()

    items = [Document("a", "text a"), Document("b", "text b"), Reject("c", "c: it failed"), Reject("d", "d: it failed")]
    run_job(items, summarize_all, OutputPaths(Path(output), **options), JOB, totals=JobTotals())


def report(results: str) -> None:
    Path(results).write_text('{"id": 1, "summary": "S", "stats": {}}\n')
    write_report(Path(results))


def answer(file: Path, loaded: LoadedModel) -> None:
    answer_prompts(loaded, ["a"], file, 2)


def rewrites(loaded: LoadedModel) -> dict[str, Callable[[], object]]:
    """By the name of a file, what writes it first, and what writes it anew."""
    tokens, network = np.array([1, 2], np.int32), torch.nn.Linear(1, 1)
    return {
        "pool.lkp": lambda: write_pool("pool.lkp", tokens, 1),
        "memory.lkm": lambda: write_memory("memory.lkm", MODEL, learned([1])),
        "out.jsonl": lambda: job("out.jsonl", overwrite=True),
        "out.jsonl.manifest.json": lambda: job("out.jsonl", overwrite=True),
        "out.jsonl.rejects.jsonl": lambda: job("out.jsonl", overwrite=True),
        "resumed.jsonl": lambda: job("resumed.jsonl", resume=True),
        "out.parquet": lambda: job("out.parquet", overwrite=True),
        "resumed.parquet": lambda: job("resumed.parquet", resume=True),
        "r.jsonl.report.html": lambda: report("r.jsonl"),
        "heads/config.json": lambda: write_heads(MedusaHeads.fresh(loaded.model, heads=1), "heads", loaded.model),
        "heads/medusa_lm_head.safetensors": lambda: write_heads(
            MedusaHeads.fresh(loaded.model, heads=1), "heads", loaded.model
        ),
        "answers.json": lambda: answer(Path("answers.json"), loaded),
        "verdicts.json": lambda: _write_verdicts(Path("verdicts.json"), {"gpu": "none"}, {"kernel": Verdict()}),
        cost_path(network, ".").name: lambda: save_costs(cast(Any, network), "."),
    }


def test_a_file_that_is_written_anew_keeps_its_mode_and_owner(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    owner = (12345, 54321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    for name, write in rewrites(LoadedModel(tiny_llama, tiny_tokenizer)).items():
        write()
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o644, name
        os.chown(name, *owner)
        for mode in (0o600, 0o640):
            os.chmod(name, mode)
            write()
            status = os.stat(name)
            assert (oct(stat.S_IMODE(status.st_mode)), status.st_uid, status.st_gid) == (oct(mode), *owner), name


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o444])
def test_what_replaces_a_file_is_at_no_moment_more_readable(mode: int, folder: Path) -> None:
    path = Path("file")
    path.touch()
    path.chmod(mode)

    def modes() -> list[int]:
        return [stat.S_IMODE(each.stat().st_mode) for each in Path().glob(".file.*.tmp")]

    def work() -> None:
        seen: list[int] = []
        sys.addaudithook(
            lambda event, _: seen.extend(modes() if event in ("os.chown", "os.chmod", "os.rename") else ())
        )
        with replacing(path) as file:
            file.write(b"private")
            seen.extend(modes())
        assert seen[0] == 0o600 and seen[-1] == mode and not any(each & ~mode & 0o077 for each in seen)

    process = Forked(work, folder / "stderr")
    assert process.wait() == 0, process.stderr
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another group")
def test_a_group_that_cannot_be_kept_gets_no_more_rights_than_everybody(folder: Path) -> None:
    modes = {"private": (0o640, 0o600), "public": (0o644, 0o644), "shared": (0o664, 0o644), "odd": (0o607, 0o607)}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)  # other users cannot reach the folder of the tests
        place.chmod(0o777)
        for each, (mode, _) in modes.items():
            (place / each).touch(mode)
            (place / each).chmod(mode)
            os.chown(place / each, 12345, 54321)

        def work() -> None:
            os.setgroups([])
            os.setresgid(1000, 1000, 1000)
            os.setresuid(12345, 12345, 12345)
            for each in modes:
                with replacing(place / each):
                    pass

        process = Forked(work, folder / "stderr")
        assert process.wait() == 0, process.stderr
        found = {each: stat.S_IMODE((place / each).stat().st_mode) for each in modes}
        assert found == {each: after for each, (_, after) in modes.items()}


def test_the_lines_of_a_private_parquet_file_are_private_while_a_job_adds_to_it() -> None:
    job("out.parquet")
    os.chmod("out.parquet", 0o600)
    for options in ({"resume": True}, {"overwrite": True}):
        with Journal(OutputPaths(Path("out.parquet"), **options), JOB, []):
            assert stat.S_IMODE(os.stat("out.parquet.running.jsonl").st_mode) == 0o600
        Path("out.parquet.running.jsonl").unlink()
        os.chmod("out.parquet", 0o600)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o664])
def test_who_may_write_a_file_may_take_its_lock(mode: int) -> None:
    Path("file").touch()
    Path("file").chmod(mode)
    with locked(Path("file")):
        assert stat.S_IMODE(Path(".file.lock").stat().st_mode) == mode


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """A user who may do so would lose /dev/null."""
    os.mkfifo(tmp_path / "pipe.lkm")
    (tmp_path / "link.lkp").symlink_to("pipe.lkm")
    (tmp_path / "a.txt").write_text("A text.")
    for name in ("pipe.lkm", "link.lkp"):
        with pytest.raises(OSError, match="not a regular file"), replacing(tmp_path / name):
            pytest.fail("it is written")
        kind, inputs = ("memory", []) if name.endswith("lkm") else ("pool", [str(tmp_path / "a.txt")])
        words = [kind, "build", *inputs, "-m", "no/model", "--overwrite", "-o", str(tmp_path / name)]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2 and "is not a regular file" in " ".join(result.stderr.split())
    assert (tmp_path / "pipe.lkm").is_fifo() and (tmp_path / "link.lkp").is_symlink()
