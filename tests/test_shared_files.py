"""Files that several processes change at once lose nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lookahead.backend import step_costs
from lookahead.backend.gpu import kernel_trial
from lookahead.cli.app import app
from lookahead.kernels.dispatch import Verdict
from lookahead.loading.loading import LoadedModel
from lookahead.model.model_state import LearnedState, use_learned
from lookahead.ngram.chains import SEPARATOR, ChainIndex
from lookahead.ngram.memory_file import read_memory
from lookahead.ngram.pool_file import Pool, PoolHeader
from lookahead.plugins.heads.training.train_heads import train_heads
from lookahead.plugins.heads.training.train_inputs import Settings
from lookahead.proposers.memory_files import merge_into
from lookahead.utils.locks import locked
from tests.support.forked import Forked, command
from tests.support.memories import MODEL, learned

AT_ONCE = 4  # processes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, workplace: None) -> Path:
    """An empty working directory."""
    return tmp_path


def documents_of(path: str) -> list[tuple[int, ...]]:
    """The documents of a pool, in the order of the file."""
    tokens = Pool.open(path).tokens
    return [tuple(part[part != SEPARATOR].tolist()) for part in np.split(tokens, np.flatnonzero(tokens < 0))[1:]]


@contextlib.contextmanager
def reading_at_once(*commands: tuple[str, ...]) -> Iterator[list[Forked]]:
    """Run commands that read a document each, `{}` in its words: all have begun to read before one may go on."""
    with contextlib.ExitStack() as stack:
        processes, pipes = [], []
        for i, words in enumerate(commands):
            place = Path(f"process{i}")
            place.mkdir()
            os.mkfifo(place / "document")
            named = [word.format(place / "document") for word in words]
            processes.append(stack.enter_context(command(*named, folder=place)))
        for i, process in enumerate(processes):
            process.until(lambda i=i: pipes[i:] or pipes.extend(opened(Path(f"process{i}/document"))) or pipes[i:])
        for i, pipe in enumerate(pipes):
            with os.fdopen(pipe, "w") as document:
                document.write(f"Document {i} is about the number {i}.")
        yield processes


def opened(pipe: Path) -> list[int]:
    """The descriptor of a pipe to write to, once somebody reads it."""
    try:
        return [os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)]
    except OSError as error:
        assert error.errno == errno.ENXIO
        return []


def test_documents_that_processes_add_to_a_pool_at_once_are_all_there(model_folder: Path) -> None:
    Path("first.txt").write_text("The first document.")
    model = ("--model", str(model_folder))
    assert CliRunner().invoke(app, ["pool", "build", "first.txt", "-o", "pool.lkp", *model]).exit_code == 0
    with reading_at_once(*[("pool", "add", "pool.lkp", "{}", *model)] * AT_ONCE) as processes:
        assert [process.wait() for process in processes] == [0] * AT_ONCE
    assert len(set(documents_of("pool.lkp"))) == PoolHeader.read("pool.lkp").documents == 1 + AT_ONCE


def test_of_documents_beyond_half_of_an_index_the_newest_are_added() -> None:
    index = ChainIndex(1024)
    index.append_documents(np.arange(600, dtype=np.int32))
    assert index.tokens[1:].tolist() == list(range(600 - 512, 600))


def add_verdict(i: int) -> None:
    kernel_trial._write_verdicts(Path("verdicts.json"), {"gpu": "none"}, {f"kernel {i}": Verdict()})


def verdicts() -> int:
    return len(kernel_trial._read_verdicts(Path("verdicts.json")))


NETWORK = torch.nn.Linear(1, 1)


def add_costs(i: int) -> None:
    """Save the costs of steps of one size, as a process does that measured no others."""
    learned = LearnedState()
    learned.cost.observe(1, 0.1, rows=1 << i % 8, context=300 << 2 * (i // 8))
    with use_learned(NETWORK, learned):
        step_costs.save_costs(cast(Any, NETWORK), ".")


def costs() -> int:
    return len(json.loads(step_costs.cost_path(NETWORK, ".").read_text())["costs"])


def add_context(i: int) -> None:
    merge_into("m.lkm", MODEL, learned([i + 1]))


@pytest.mark.parametrize(
    ("add", "count"),
    [
        pytest.param(add_verdict, verdicts, id="verdicts on kernels"),
        pytest.param(add_costs, costs, id="step costs"),
        pytest.param(
            lambda i: merge_into("m.lkm", MODEL, learned([i + 1])),
            lambda: read_memory("m.lkm")[0].contexts,
            id="memory",
        ),
    ],
)
def test_what_processes_add_to_a_file_at_once_is_all_there(
    add: Callable[[int], object], count: Callable[[], int], folder: Path
) -> None:
    begin = time.time() + 0.3

    def work(i: int) -> None:
        time.sleep(max(0.0, begin - time.time()))
        for j in range(8):
            add(8 * i + j)

    processes = [Forked(lambda i=i: work(i), folder / f"stderr{i}") for i in range(AT_ONCE)]
    assert [process.wait() for process in processes] == [0] * AT_ONCE, [each.stderr for each in processes]
    assert count() == 8 * AT_ONCE


def test_a_folder_of_heads_is_written_by_one_run(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    Path("data.jsonl").write_text('{"text": "What is this about?"}')
    loaded, data, output = LoadedModel(tiny_llama, tiny_tokenizer), Path("data.jsonl"), Path("new/heads")
    output.mkdir(parents=True)
    message = "another process is writing it; wait for it, or stop it"
    with locked(output), pytest.raises(TimeoutError, match=message):
        train_heads(loaded, data, output, Settings(kind="medusa"))
    assert not list(output.iterdir())


@pytest.mark.parametrize("folder", ["gone", "a/b", *[path for path in ("/proc", "/proc/self") if Path(path).is_dir()]])
def test_a_folder_that_is_missing_or_takes_no_files_has_no_locks(folder: str) -> None:
    before = Path(folder).exists()
    with pytest.raises(FileNotFoundError), locked(Path(folder, "file"), timeout_s=2):
        pass
    assert Path(folder).exists() == before
