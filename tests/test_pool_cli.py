"""The commands on pools as a user meets them: what they print, what they write and how they exit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.config import LookaheadConfig
from lookahead.ngram.chains import SEPARATOR
from lookahead.ngram.pool_file import Pool, PoolHeader
from lookahead.utils.fingerprints import tokenizer_fingerprint
from tests.support import forked

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path, workplace):
    """A working directory with documents."""
    (tmp_path / "a.txt").write_text("The cat sat.")
    (tmp_path / "b.txt").write_text("A dog ran.")
    (tmp_path / "docs.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    return tmp_path


@pytest.fixture
def pool(folder, model_folder):
    """Runs `lookahead pool`, with a tiny model where a command takes one and none is given."""

    def run(command, *arguments, input=None):
        takes_model = command in ("build", "add") and "--model" not in arguments
        options = ["--model", str(model_folder)] if takes_model else []
        return CliRunner().invoke(app, ["pool", command, *arguments, *options], input=input)

    return run


def texts_of(path, tokenizer):
    """The documents of a pool, as text."""
    documents, tokens = [], Pool.open(path).tokens.tolist()
    for token in tokens:
        documents = [*documents, []] if token == SEPARATOR else [*documents[:-1], [*documents[-1], token]]
    return [tokenizer.decode(document) for document in documents]


def only_error(result):
    """The one line a refused call prints."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


def contents(folder):
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# Help


@pytest.mark.parametrize("command", ["build", "add", "info", "merge"])
@pytest.mark.parametrize("kind", ["pool", "memory"])
def test_every_help_shows_an_example(kind, command):
    result = CliRunner().invoke(app, [kind, command, "--help"])
    assert result.exit_code == 0
    assert f"lookahead {kind} {command} " in result.stdout.split("For example")[1]
    assert "{kind}" not in result.stdout and "{suffix}" not in result.stdout


@pytest.mark.parametrize("kind", ["pool", "memory"])
def test_the_command_that_info_replaces_is_refused_by_name(kind):
    result = CliRunner().invoke(app, [kind, "verify", "pool.lkp"])
    assert only_error(result) == (
        f"error: {kind} verify was removed: 'pool info' and 'memory info' check every byte, and with --model whether "
        "the file fits"
    )


# Build


def test_build_makes_a_pool_of_files_patterns_and_json_lines(pool, tiny_tokenizer):
    result = pool("build", "docs.jsonl", "*.txt", "-o", "pool.lkp")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "30 tokens of 4 documents taken\npool.lkp: 30 tokens in 4 documents\n"
    assert texts_of("pool.lkp", tiny_tokenizer) == ["One.", "Two.", "The cat sat.", "A dog ran."]
    assert PoolHeader.read("pool.lkp").fingerprint == tokenizer_fingerprint(tiny_tokenizer)


def test_build_reads_a_chosen_field_and_standard_input(pool, tiny_tokenizer):
    result = pool("build", "-", "--field", "body", "-o", "pool.lkp", input='{"body": "One."}\n{"body": "Two."}\n')
    assert result.exit_code == 0
    assert texts_of("pool.lkp", tiny_tokenizer) == ["One.", "Two."]


def test_a_folder_with_a_tokenizer_alone_is_enough(pool, folder, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    assert pool("build", "a.txt", "-o", "pool.lkp", "--model", "tokenizer").exit_code == 0
    assert PoolHeader.read("pool.lkp").fingerprint == tokenizer_fingerprint(tiny_tokenizer)


def test_documents_that_cannot_be_used_are_told_counted_and_left_out(pool, folder, tiny_tokenizer):
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes(b"Gr\xf6\xdfe")
    (folder / "bad.jsonl").write_text('{"text": 3}\n{"text": \n{"body": "x"}\n{"text": "Yes."}\n')
    result = pool("build", "a.txt", "empty.txt", "latin.txt", "bad.jsonl", "-o", "pool.lkp")
    assert result.exit_code == 1
    assert "error: bad.jsonl:1: field 'text' must hold a string, got int\n" in result.stderr
    assert "byte 0xf6 at byte offset 2" in result.stderr
    assert result.stderr.count("error: ") == 5
    assert "16 tokens of 2 documents taken, 5 skipped\n" in result.stderr
    assert texts_of("pool.lkp", tiny_tokenizer) == ["The cat sat.", "Yes."]


@pytest.mark.parametrize(
    ("most", "texts"), [("12", ["The cat sat."]), ("13", ["The cat sat.", "A"]), ("5", ["The c"]), ("22", None)]
)
def test_no_more_tokens_are_taken_than_allowed(pool, tiny_tokenizer, most, texts):
    result = pool("build", "a.txt", "b.txt", "-o", "pool.lkp", "--max-tokens", most)
    assert result.exit_code == 0
    assert ("the rest was not read" in result.stderr) == (texts is not None)
    assert texts_of("pool.lkp", tiny_tokenizer) == (texts or ["The cat sat.", "A dog ran."])


def test_a_document_that_the_tokenizer_chokes_on_is_that_document_s_alone(pool, monkeypatch, tiny_tokenizer):
    honest = type(tiny_tokenizer).__call__

    def choking(self, text, **options):
        if "dog" in text:
            raise RuntimeError("a\n panic")
        return honest(self, text, **options)

    monkeypatch.setattr(type(tiny_tokenizer), "__call__", choking)
    result = pool("build", "a.txt", "b.txt", "-o", "pool.lkp")
    assert result.exit_code == 1
    assert "error: b.txt: RuntimeError: a panic\n" in result.stderr
    assert texts_of("pool.lkp", tiny_tokenizer) == ["The cat sat."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.txt", "-o", "pool.lkp"], "gone.txt: no such file"),
        (["a.txt", "-o", "."], "output . is a directory"),
        (["a.txt", "-o", "gone/pool.lkp"], "there is no folder gone"),
        (["a.txt", "-o", "a.txt"], "output a.txt is an input as well"),
        (["a.txt", "-o", "b.txt"], "output b.txt exists; pass --overwrite to replace it"),
        (["a.txt", "-o", "pool.lkp", "--field", "body"], "field 'body' is read from JSON lines"),
        (["a.txt", "-o", "pool.lkp", "--model", "./gone"], "model './gone' does not exist"),
        (["a.txt", "-o", "pool.lkp", "--model", "."], "no tokenizer.json or tokenizer_config.json or config.json in"),
        (["a.txt", "-o", "/proc/pool.lkp"], "/proc/pool.lkp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_clear_line_and_writes_nothing(pool, folder, arguments, message):
    before = contents(folder)
    assert message in only_error(pool("build", *arguments))
    assert contents(folder) == before


def test_a_pool_of_nothing_is_not_made(pool, folder):
    (folder / "empty.txt").write_text("")
    before = contents(folder)
    result = pool("build", "empty.txt", "-o", "pool.lkp")
    assert result.exit_code == 2
    assert "error: pool.lkp: no document to make it of, 1 could not be used\n" in result.stderr
    assert contents(folder) == before


def test_no_space_left_is_told_and_leaves_the_old_pool(pool, folder, monkeypatch):
    assert pool("build", "a.txt", "-o", "pool.lkp").exit_code == 0
    before = contents(folder)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for command in (["build", "b.txt", "-o", "pool.lkp", "--overwrite"], ["add", "pool.lkp", "b.txt"]):
        assert only_error(pool(*command)) == "error: pool.lkp: No space left on device"
        assert contents(folder) == before


def _open_files(process: int) -> Iterator[str]:
    """The names of the files that a process has open; it may close one meanwhile."""
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            yield os.readlink(link)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see that the work began")
def test_ctrl_c_leaves_no_file_behind(folder, model_folder):
    (folder / "many.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 300_000)
    words = ("pool", "build", "many.jsonl", "-o", "pool.lkp", "--model", str(model_folder))
    with forked.command(*words, folder=folder) as process:
        process.until(lambda: any(name.endswith("many.jsonl") for name in _open_files(process.process.pid)))
        process.interrupt()
        assert process.wait() == 130
    assert process.stderr == "interrupted: stopped before it was finished\n"
    assert not [path for path in os.listdir(folder) if "pool.lkp" in path]


# Add


def test_add_takes_no_more_tokens_than_allowed(pool, tiny_tokenizer):
    assert pool("build", "a.txt", "-o", "pool.lkp").exit_code == 0
    assert "the rest was not read" in pool("add", "pool.lkp", "b.txt", "--max-tokens", "1").stderr
    assert texts_of("pool.lkp", tiny_tokenizer) == ["The cat sat.", "A"]


def test_add_puts_documents_behind_those_of_the_pool(pool, tiny_tokenizer):
    assert pool("build", "a.txt", "-o", "pool.lkp").exit_code == 0
    result = pool("add", "pool.lkp", "docs.jsonl", "b.txt")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "18 tokens of 3 documents taken\npool.lkp: 30 tokens in 4 documents\n"
    assert texts_of("pool.lkp", tiny_tokenizer) == ["The cat sat.", "One.", "Two.", "A dog ran."]
    assert pool("build", "a.txt", "docs.jsonl", "b.txt", "-o", "at_once.lkp").exit_code == 0
    assert Path("pool.lkp").read_bytes() == Path("at_once.lkp").read_bytes()


def test_what_cannot_be_added_to_is_refused_and_stays_as_it_was(pool, folder, summarizer_path):
    assert pool("build", "a.txt", "-o", "pool.lkp").exit_code == 0
    damaged = bytearray(Path("pool.lkp").read_bytes())
    damaged[-1] ^= 1
    (folder / "damaged.lkp").write_bytes(damaged)
    (folder / "empty.txt").write_text(" ")
    before = contents(folder)
    assert "made with another tokenizer" in only_error(
        pool("add", "pool.lkp", "b.txt", "--model", str(summarizer_path))
    )
    assert "damaged.lkp: damaged" in only_error(pool("add", "damaged.lkp", "b.txt"))
    assert "a.txt: not a pool file" in only_error(pool("add", "a.txt", "b.txt"))
    assert "gone.lkp: No such file" in only_error(pool("add", "gone.lkp", "b.txt"))
    assert "output pool.lkp is an input as well" in only_error(pool("add", "pool.lkp", "pool.lkp"))
    assert "no document to add, 1 could not be used" in pool("add", "pool.lkp", "empty.txt").stderr
    assert contents(folder) == before


# Info


def test_info_shows_what_the_header_says(pool, tiny_tokenizer):
    assert pool("build", "a.txt", "b.txt", "-o", "pool.lkp").exit_code == 0
    result = pool("info", "pool.lkp")
    assert (result.exit_code, result.stderr) == (0, "")
    figures = dict(re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines() if line.strip())
    assert (figures["pool"], figures["documents"], figures["tokens"]) == ("pool.lkp", "2", "22")
    assert figures["bytes"] == f"{os.path.getsize('pool.lkp'):,}"
    assert figures["tokenizer"] == f"{tokenizer_fingerprint(tiny_tokenizer):016x}"


def test_info_refuses_a_pool_of_another_model(pool, model_folder, summarizer_path):
    assert pool("build", "a.txt", "-o", "pool.lkp").exit_code == 0
    assert pool("info", "pool.lkp", "--model", str(model_folder)).exit_code == 0
    assert "made with another tokenizer" in only_error(pool("info", "pool.lkp", "--model", str(summarizer_path)))


def test_what_is_no_pool_is_one_clear_line(pool, folder):
    assert pool("build", "a.txt", "-o", "pool.lkp").exit_code == 0
    data = Path("pool.lkp").read_bytes()
    (folder / "short.lkp").write_bytes(data[:-5])
    (folder / "harmed.lkp").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for name, message in [
        ("gone.lkp", "gone.lkp: No such file or directory"),
        ("a.txt", "a.txt: not a pool file"),
        (".", ".: not a file"),
        ("short.lkp", "short.lkp: cut short: "),
        ("harmed.lkp", "harmed.lkp: damaged: "),
    ]:
        assert message in only_error(pool("info", name))


# Merge


def test_merge_makes_the_pool_that_is_built_of_all_documents(pool):
    for name in ("a", "b"):
        assert pool("build", f"{name}.txt", "-o", f"{name}.lkp").exit_code == 0
    assert pool("build", "a.txt", "b.txt", "-o", "at_once.lkp").exit_code == 0
    result = pool("merge", "a.lkp", "b.lkp", "-o", "both.lkp")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "both.lkp: 22 tokens in 2 documents\n")
    assert Path("both.lkp").read_bytes() == Path("at_once.lkp").read_bytes()


def test_pools_of_two_tokenizers_are_not_merged(pool, folder, summarizer_path):
    assert pool("build", "a.txt", "-o", "a.lkp").exit_code == 0
    assert pool("build", "b.txt", "-o", "b.lkp", "--model", str(summarizer_path)).exit_code == 0
    before = contents(folder)
    assert "b.lkp: made with another tokenizer" in only_error(pool("merge", "a.lkp", "b.lkp", "-o", "both.lkp"))
    assert "output a.lkp is an input as well" in only_error(pool("merge", "a.lkp", "-o", "a.lkp", "--overwrite"))
    assert contents(folder) == before


# Drafting


def test_summaries_and_continuations_with_a_pool_are_those_without(
    pool, folder, model_folder, tiny_llama, tiny_tokenizer
):
    def run(*arguments):
        return CliRunner().invoke(app, [*arguments, "--model", str(model_folder), "--max-new-tokens", "30"])

    plain = run("generate", "Once upon")
    (folder / "said.txt").write_text("Once upon" + plain.stdout)
    assert pool("build", "said.txt", "-o", "pool.lkp").exit_code == 0
    drafted = run("generate", "Once upon", "--pool", "pool.lkp", "--stats")
    assert (drafted.exit_code, drafted.stdout) == (0, plain.stdout)
    # Whether the command drafts at all is decided by the clock, so that the pool's worth is looked at without one.
    config = LookaheadConfig(proposers=(), pool=folder / "pool.lkp", draft="fixed")
    options = {"max_new_tokens": 30, "do_sample": False}
    result = lookahead.generate(tiny_llama, tiny_tokenizer, "Once upon", config=config, **options)
    assert result.stats.accepted_by_source["corpus"] > 10
    expected = json.loads(run("summarize", "a.txt").stdout)
    summary = json.loads(run("summarize", "a.txt", "--pool", "pool.lkp", "--proposers", "none").stdout)
    assert summary["summary"] == expected["summary"]
    assert "gone.lkp: No such file" in only_error(run("generate", "a.txt", "--pool", "gone.lkp"))
