"""The command line as a user meets it: what it prints, what it writes and how it exits."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

from lookahead.cli.app import app
from lookahead.cli.generate import GenerateOptions
from lookahead.cli.job_options import JobOptions
from lookahead.cli.options import options_of
from lookahead.decoding.comparison import decode_plainly
from lookahead.jobs.line_file import LineFile
from lookahead.summarization.prompting import PromptFitter

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The cat sat on the mat. The dog sat by the door. "


def records(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def only_error(result):
    """The one line a refused call prints."""
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


# Help


@pytest.mark.parametrize("arguments", [["--help"], ["summarize", "--help"], ["generate", "-h"]], ids=" ".join)
def test_every_help_shows_an_example(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    command = arguments[0] if len(arguments) > 1 else "summarize"
    assert f"lookahead {command} " in result.stdout.split("For example")[1]


def commands(command, name=""):
    """A command and those below it, by the words that call them."""
    yield name, command
    for word, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{name} {word}".strip())


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_swallows_what_stands_in_brackets(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    command = COMMANDS[name]
    texts = [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
    shown = " ".join(CliRunner().invoke(app, [*name.split(), "--help"]).stdout.split())
    for bracketed in re.findall(r"\S*\[[^\]]*\]", " ".join(texts).replace("\\[", "[")):
        assert bracketed in shown
    if name == "train":
        assert "pip install 'lookahead-decoding[train]'." in shown


@pytest.mark.parametrize("options", [JobOptions, GenerateOptions])
def test_every_option_is_read(options):
    files = [*(ROOT / "lookahead" / "cli").glob("*.py"), ROOT / "lookahead" / "jobs" / "identity.py"]
    code = "".join(path.read_text("utf-8") for path in files)
    for each, _ in options_of(options):
        is_read = re.search(rf'\b(options|self)\.{each.name}\b|"{each.name}"', code)  # by attribute or by name
        is_read = is_read or "callback" in each.metadata
        assert is_read, f"{each.name} is never read"


# Summaries


def test_with_an_output_file_each_document_is_one_json_line(summarize):
    result = summarize("a.txt", "b.txt", "-o", "out.jsonl")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "2 documents summarized; 24 tokens at " in result.stderr
    first, second = records("out.jsonl")
    assert (first["id"], second["id"]) == ("a.txt", "b.txt")
    assert (first["document_tokens"], first["summary_tokens"], first["parts"], first["split"]) == (48, 12, 1, "none")
    assert first["stats"]["emitted_tokens"] == 12
    assert not {"plain", "identical"} & first.keys()
    assert not Path("out.jsonl.rejects.jsonl").exists()


def test_without_an_output_file_a_pipe_gets_json_lines_and_nothing_else(summarize):
    result = summarize("*.txt")
    assert sorted(json.loads(line)["id"] for line in result.stdout.splitlines()) == ["a.txt", "b.txt"]


def test_text_is_for_reading(summarize):
    as_json = json.loads(summarize("a.txt").stdout)
    result = summarize("a.txt", "--format", "text")
    assert result.exit_code == 0
    assert result.stdout.startswith("a.txt ───")
    assert as_json["summary"] in result.stdout
    assert "48 tokens summarized in 12, " in result.stdout


def test_standard_input_is_summarized(summarize):
    result = summarize("-", input=TEXT)
    assert json.loads(result.stdout)["id"] == "-"
    result = summarize("-", "--field", "body", input='{"id": 5, "body": "One. Two."}\n')
    assert json.loads(result.stdout)["id"] == 5


def test_the_field_of_json_lines_can_be_chosen(summarize, cli_folder):
    (cli_folder / "docs.jsonl").write_text('{"id": "x", "body": "One."}\n{"body": "Two."}\n')
    assert summarize("docs.jsonl", "--field", "body", "-o", "out.jsonl").exit_code == 0
    assert [record["id"] for record in records("out.jsonl")] == ["x", "docs.jsonl:2"]


def test_a_long_document_says_in_how_many_parts_it_was_summarized(summarize, cli_folder):
    (cli_folder / "long.txt").write_text(TEXT * 30)
    (cli_folder / "wall.txt").write_text("x" * 1200)
    assert summarize("long.txt", "wall.txt", "-o", "out.jsonl").exit_code == 0
    long, wall = records("out.jsonl")
    assert (long["parts"], long["split"]) == (3, "sentences")
    assert (wall["parts"], wall["split"]) == (3, "hard")


@pytest.mark.parametrize(
    "options",
    [
        ["--proposers", "none"],
        ["--proposers", "prompt", "--max-nodes", "4"],
        ["--proposers", "jacobi", "--window", "4,3,2"],
        ["--proposers", "prompt,jacobi"],
        ["--window", "auto"],
        ["--dtype", "fp32", "--device", "cpu", "--threads", "1"],
    ],
    ids=" ".join,
)
def test_no_option_for_speed_changes_a_summary(summarize, options):
    expected = json.loads(summarize("a.txt").stdout)
    changed = json.loads(summarize("a.txt", *options).stdout)
    assert changed["summary"] == expected["summary"]


# Comparison


def test_compare_shows_both_speeds_and_that_the_tokens_are_identical(summarize):
    result = summarize("a.txt", "b.txt", "--compare", "-o", "out.jsonl")
    assert result.exit_code == 0
    assert [row.split()[-1] for row in result.stderr.splitlines() if ".txt " in row or row.startswith("all ")] == [
        "yes"
    ] * 3
    for record in records("out.jsonl"):
        assert record["identical"] is True
        assert record["plain"]["emitted_tokens"] == record["stats"]["emitted_tokens"] == 12
        assert record["speedup"] == pytest.approx(
            record["stats"]["tokens_per_s"] / record["plain"]["tokens_per_s"], rel=0.01
        )


def test_compare_in_text_ends_with_the_table(summarize):
    result = summarize("a.txt", "--compare", "--format", "text")
    assert result.stdout.index("48 tokens summarized") < result.stdout.index("lookahead")
    assert "identical" in result.stdout


def test_many_documents_are_compared_in_a_table_that_stays_short(summarize, cli_folder):
    (cli_folder / "docs.jsonl").write_text("".join(f'{{"id": "doc{i}", "text": "Text {i}."}}\n' for i in range(25)))
    result = summarize("docs.jsonl", "--compare", "-o", "out.jsonl", "--max-new-tokens", "2")
    assert "doc19" in result.stderr
    assert "doc20" not in result.stderr
    assert "25 documents summarized" in result.stderr


@pytest.mark.parametrize(
    ("dtype", "status", "hint"), [("fp32", 1, "in fp32 that is a bug"), ("bf16", 0, "--dtype fp32 is exact")]
)
def test_a_difference_is_told_loudly_and_is_a_failure_in_fp32(summarize, monkeypatch, dtype, status, hint):
    def wrong(*call, **options):
        rows, figures = decode_plainly(*call, **options)
        return [[*row[:-1], row[-1] + 1] for row in rows], figures

    monkeypatch.setattr("lookahead.summarization.summarizer.decode_plainly", wrong)
    result = summarize("a.txt", "--compare", "-o", "out.jsonl", "--dtype", dtype)
    assert result.exit_code == status
    assert "NOT IDENTICAL: plain decoding wrote other tokens for a.txt; " in result.stderr
    assert hint in result.stderr
    assert records("out.jsonl")[0]["identical"] is False


# Documents that fail


def test_a_document_that_fails_is_put_aside_and_the_others_go_on(summarize, cli_folder):
    (cli_folder / "empty.txt").write_text("")
    (cli_folder / "latin.txt").write_bytes(b"Gr\xf6\xdfe")
    (cli_folder / "docs.jsonl").write_text('{"text": "One."}\n{"text": \n{"id": 3}\n')
    result = summarize("a.txt", "empty.txt", "latin.txt", "docs.jsonl", "-o", "out.jsonl")
    assert result.exit_code == 1
    assert [record["id"] for record in records("out.jsonl")] == ["a.txt", "docs.jsonl:1"]
    rejects = {record["id"]: record["error"] for record in records("out.jsonl.rejects.jsonl")}
    assert list(rejects) == ["empty.txt", "latin.txt", "docs.jsonl:2", 3]
    assert "byte 0xf6 at byte offset 2" in rejects["latin.txt"]
    for error in rejects.values():
        assert f"error: {error}\n" in result.stderr
    assert "2 documents summarized, 4 failed" in result.stderr


def test_what_goes_wrong_within_a_document_is_that_document_s_alone(summarize, monkeypatch):
    honest = PromptFitter.fit

    def failing(self, text):
        if text == TEXT:
            raise RuntimeError("out of\n memory")
        return honest(self, text)

    monkeypatch.setattr(PromptFitter, "fit", failing)
    result = summarize("a.txt", "b.txt", "--rejects", "bad.jsonl")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["id"] == "b.txt"
    assert records("bad.jsonl") == [{"id": "a.txt", "error": "a.txt: RuntimeError: out of memory"}]
    assert "Traceback" not in result.stderr


# Wrong usage: status 2, one line, nothing written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.txt"], "gone.txt: no such file"),
        (["*.md"], "*.md: no file matches this pattern"),
        (["a.txt", "--max-new-tokens", "600"], "max_new_tokens must be at most 487 to leave room"),
        (["a.txt", "--model", "./gone"], "model './gone' does not exist: looked for the folder /"),
        (["a.txt", "--model", "."], "no config.json in the folder"),
        (["a.txt", "--dtype", "int3"], "dtype must be auto, fp32, bf16, fp16, got 'int3'"),
        (["a.txt", "--device", "gpu"], "device 'gpu' is not available: PyTorch finds cpu"),
        (["a.txt", "--device", "privateuseone"], "device 'privateuseone' is not available: PyTorch finds cpu"),
        (["a.txt", "--format", "json", "-o", "x"], "--json and --format are for stdout; with --output"),
        (["a.txt", "--json", "-o", "x"], "--json and --format are for stdout; with --output"),
        (["a.txt", "--field", "body"], "field 'body' is read from JSON lines"),
        (["a.txt", "--window", "0"], "or a whole number from 1 to 64, got 0"),
        (["a.txt", "--window", "7,1"], "N of window must be a whole number from 2 to 16, got 1"),
        (["a.txt", "--window", "7,5,65"], "G of window must be a whole number from 0 to 64, got 65"),
        (["a.txt", "--window", "7,5,"], "window must be auto, a tuple (W, N) or (W, N, G), or a whole number from 1"),
        (["a.txt", "--max-nodes", "0"], "max_nodes must be a whole number from 1 to 512, got 0"),
        (
            ["a.txt", "--proposers", "magic"],
            "proposers must be of prompt, outputs, corpus, recycled, jacobi, self, got 'magic'",
        ),
        (["a.txt", "-o", "."], "output . is a directory"),
        (["a.txt", "-o", "gone/out.jsonl"], "there is no folder gone"),
        (["a.txt", "-o", "/proc/out.jsonl"], "output /proc/out.jsonl cannot be written: "),
        (["a.txt", "-o", "b.txt"], "output b.txt is an input as well"),
        (["a.txt", "-o", "old.jsonl"], "output old.jsonl exists; pass --overwrite to replace it"),
        ([".", "-o", "old.jsonl", "--overwrite"], "output old.jsonl is an input as well"),
        (["a.txt", "-o", "new.jsonl", "--rejects", "old.jsonl"], "output old.jsonl exists"),
        (["a.txt", "-o", "x.jsonl", "--rejects", "./x.jsonl"], "cannot hold both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_clear_line_and_writes_nothing(summarize, cli_folder, arguments, message):
    (cli_folder / "old.jsonl").write_text("old")
    before = {path: path.read_bytes() for path in cli_folder.iterdir()}
    extra = ["b.txt"] if "b.txt" in arguments else []
    assert message in only_error(summarize(*arguments, *extra))
    assert {path: path.read_bytes() for path in cli_folder.iterdir()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_one_may_not_write_to_is_told(summarize, cli_folder):
    (cli_folder / "locked").mkdir(mode=0o500)
    assert "Permission denied" in only_error(summarize("a.txt", "-o", "locked/out.jsonl"))


@pytest.mark.parametrize(
    "option",
    [["--threads", "0"], ["--limit", "0"], ["--max-new-tokens", "0"], ["--max-nodes", "many"], ["--no-such-option"]],
    ids=" ".join,
)
def test_an_option_that_cannot_be_read_exits_with_status_2(summarize, option):
    result = summarize("a.txt", *option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert option[0] in result.stderr
    assert "Traceback" not in result.stderr
    assert all(f"got '{value}'" in " ".join(result.stderr.replace("│", " ").split()) for value in option[1:])


def test_overwrite_replaces_the_output_and_forgets_old_rejects(summarize, cli_folder):
    (cli_folder / "out.jsonl").write_text("old")
    (cli_folder / "out.jsonl.rejects.jsonl").write_text("old")
    assert summarize("a.txt", "-o", "out.jsonl", "--overwrite").exit_code == 0
    assert [record["id"] for record in records("out.jsonl")] == ["a.txt"]
    assert not Path("out.jsonl.rejects.jsonl").exists()


# Stopped in the middle


def test_no_space_left_is_told_and_what_is_finished_stays(summarize, monkeypatch):
    honest = LineFile.write

    def full(self, record):
        if record["id"] == "b.txt":
            raise OSError(28, "No space left on device")
        honest(self, record)

    monkeypatch.setattr(LineFile, "write", full)
    result = summarize("a.txt", "b.txt", "-o", "out.jsonl", "--rows", "1")
    assert result.exit_code == 1
    assert (
        "error: writing failed: No space left on device; 1 finished summary in out.jsonl; --resume continues\n"
        in result.stderr
    )
    assert [record["id"] for record in records("out.jsonl")] == ["a.txt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_is_told(summarize):
    result = summarize("a.txt", "-o", "/dev/full", "--rejects", "bad.jsonl")
    assert result.exit_code == 1
    assert "writing failed: No space left on device; 0 finished summaries in /dev/full\n" in result.stderr


# Generate


@pytest.fixture
def generate(cli_folder, model_folder):
    """Runs `lookahead generate` with a tiny model."""

    def run(*arguments, input=None):
        options = ["--model", str(model_folder), "--max-new-tokens", "20"]
        return CliRunner().invoke(app, ["generate", *options, *arguments], input=input)

    return run


def test_generate_continues_a_prompt_as_plain_decoding_does(generate, tiny_llama, tiny_tokenizer):
    inputs = tiny_tokenizer("Once upon", return_tensors="pt")
    ids = tiny_llama.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, 9:]
    expected = tiny_tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    for arguments, input in ((["Once upon"], None), (["-"], "Once upon"), (["Once upon", "--temperature", "0"], None)):
        result = generate(*arguments, input=input)
        assert (result.exit_code, result.stdout) == (0, expected)
        assert result.stderr == "note: cut at --max-new-tokens, after 20 new tokens\n"


def test_the_same_seed_samples_the_same_text(generate):
    texts = [generate("Once", "--temperature", "0.8", "--top-k", "40", "--seed", seed).stdout for seed in "778"]
    assert texts[0] == texts[1] != texts[2]


def test_more_beams_than_any_memory_holds_are_refused(generate):
    result = generate("Once", "--num-beams", "99999999")
    assert result.exit_code == 2 and "'--num-beams'" in result.stderr and "1024" in result.stderr


def test_stats_go_to_stderr(generate):
    plain = generate("Once upon")
    result = generate("Once upon", "--stats")
    assert result.stdout == plain.stdout
    figures = dict(line.split(maxsplit=1) for line in result.stderr.splitlines() if line.strip())
    assert figures["emitted_tokens"].strip() == "20"
    assert {"mean_acceptance_length", "draft_acceptance_rate", "ttft_s", "tokens_per_s"} <= figures.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty"),
        (["-"], "- has no prompt: it is empty"),
        (["Once", "--model", "./gone"], "model './gone' does not exist"),
        (["Once", "--window", "0"], "window must be auto, a tuple (W, N) or (W, N, G), or a whole number"),
        (["Once", "--seed", f"{1 << 70}"], "seed must be a whole number from -2^63 to 2^64 - 1, got 1180591620717411"),
        (["x" * 513], "prompt 0 has 513 tokens and the model has 512 positions; shorten it"),
        (["Once", "--system", "Be brief."], "the tokenizer has no chat template"),
        (["Once", "--raw", "--system", "Be brief."], "--system is part of the chat template, which --raw leaves out"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_generate_refuses_wrong_usage_in_one_line(generate, arguments, message):
    assert message in only_error(generate(*arguments, input=""))


def test_too_little_memory_is_told_in_one_line(generate, monkeypatch):
    refused = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.\nError code 12")
    monkeypatch.setattr("lookahead.stream", Mock(side_effect=refused))
    result = generate("Once", "--num-beams", "1000")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "too little memory: DefaultCPUAllocator: can't allocate memory" in result.stderr
