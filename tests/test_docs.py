"""Every command and every piece of Python in the README and in docs/ is run, in order, as a reader would."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.loading import loading

ROOT = Path(__file__).resolve().parent.parent
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
LANGUAGES = {"sh", "python", "text", "json", "toml"}
SHELL = {"|", "||", "&&", ";", "&", ">", ">>", "2>"}

# Blocks that stand under `<!-- not run: reason -->`, by the page and their first three words.
NOT_RUN = {
    ("README.md", "make demo #"),
    ("README.md", "pip install torch"),
    ("README.md", "lookahead summarize docs/"),
    ("docs/how-fast.md", "python -m bench.llm"),
    ("docs/models.md", "pip install 'lookahead-decoding[gguf]'"),
    ("docs/models.md", 'lookahead generate "The'),
    ("docs/models.md", "model, tokenizer ="),
    ("docs/install.md", "pip install lookahead-decoding"),
    ("docs/install.md", "git clone URL"),
    ("docs/install.md", "make dist pip"),
    ("docs/measurements.md", "python -m bench.llm"),
    ("docs/architecture.md", "python -m tests.support.path"),
    ("docs/beams.md", "python -m bench.beams"),
    ("docs/measurements.md", "python -m tools.head_texts"),
    ("docs/measurements.md", "python -m bench.never_slower"),
    ("docs/summaries.md", "python -m bench.llm"),
    ("docs/memory.md", "python -m bench.ablation"),
    ("docs/jobs.md", "pip install 'lookahead-decoding[documents,html,tables,remote]'"),
    ("docs/drop-in-reference.md", "torchrun --nproc-per-node 2"),
    ("docs/drop-in-reference.md", 'model = AutoModelForImageTextToText.from_pretrained("PATH_OR_ID")'),
    ("docs/drop-in-reference.md", 'model = AutoModelForSeq2SeqLM.from_pretrained("PATH_OR_ID")'),
    ("docs/models.md", "lookahead models --suggest"),
    ("docs/speech.md", "pip install 'lookahead-decoding[speech]'"),
    ("docs/speech.md", "model, processor ="),
    ("docs/serving.md", "pip install 'lookahead-decoding[serve]'"),
    ("docs/serving.md", "from anthropic import"),
    ("docs/grammars.md", "pip install 'lookahead-decoding[grammar]'"),
    ("docs/grammars.md", "schema = {"),
    ("docs/grammars.md", 'lookahead generate "The'),
    ("docs/grammars.md", 'lookahead generate "What'),
    ("docs/grammars.md", "grammar = lookahead.Grammar(tokenizer,"),
    ("docs/serving.md", "from openai import"),
    ("docs/measurements.md", "python -m bench.serve"),
    ("docs/front-ends.md", "from langchain_huggingface import"),
    ("docs/front-ends.md", "from smolagents import"),
    ("docs/front-ends.md", "from lm_eval import"),
    ("docs/front-ends.md", "import xgrammar info"),
    ("docs/front-ends.md", "import outlines number"),
    ("docs/heads.md", "pip install 'lookahead-decoding[train]'"),
    ("docs/ray.md", "pip install 'lookahead-decoding[ray]'"),
    ("docs/ray.md", "ray start --head"),
    ("docs/first-hour-on-a-gpu.md", "make test-gpu lookahead"),
    ("docs/first-hour-on-a-gpu.md", "lookahead bench --model"),
    ("docs/first-hour-on-a-gpu.md", "import lookahead model.generate(**inputs,"),
    ("docs/sglang.md", "pip install lookahead-decoding"),
    ("docs/vllm.md", "pip install lookahead-decoding"),
    ("docs/vllm.md", "vllm serve MODEL"),
    ("docs/vllm.md", "from vllm import"),
}


class Block(NamedTuple):
    """A fenced block: its language, its text, why it is not run, and the output shown below it."""

    language: str
    code: str
    reason: str | None
    shown: str | None


_BLOCK = re.compile(r"(?:^<!-- not run:(.*?)-->\n+)?^```([^\n]*)\n(.*?)^```$", re.M | re.S)


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page; one of ```text shows the output of the one before it.

    Of several the last is compared: those before it show what a real model wrote.
    """
    found: list[Block] = []
    for reason, language, code in _BLOCK.findall(text):
        if language == "text" and found:
            found[-1] = found[-1]._replace(shown=code)
        else:
            found.append(Block(language, code, reason.strip() if reason else None, None))
    return found


class Desk:
    """A folder, a name space and the two ways of running a block there."""

    def __init__(self, folder: Path, names: dict[str, Any]) -> None:
        self.folder = folder
        self.names = names

    def run(self, block: Block) -> str:
        """Run a block, check that all of it succeeds, and return what it prints."""
        if block.language == "sh":
            lines = block.code.replace("\\\n", " ").splitlines()
            return "".join(self._command(line) for line in lines if shlex.split(line, comments=True))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block.code, "a page", "exec"), self.names)
        return out.getvalue()

    def _command(self, line: str) -> str:
        """Run a command here, or in a shell where it needs one; importing torch takes seconds."""
        words = shlex.split(line, comments=True)
        source = None
        if len(words) > 2 and words[-2] == "<":
            source = (self.folder / words[-1]).read_bytes()
            words = words[:-2]
        if words[0] != "lookahead" or SHELL & {*words} or "$(" in line:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            return done.stdout + done.stderr
        if "--model" in _options_of(words[1:]) and not {"--model", "-t"} & {*words}:
            words += ["--model", "PATH_OR_ID"]  # a real model would take minutes
        if "--max-new-tokens" in _options_of(words[1:]) and not {"--max-new-tokens", "-t"} & {*words}:
            words += ["--max-new-tokens", "12"]
        result = CliRunner().invoke(app, words[1:], input=source)  # it expands patterns itself
        assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
        return result.output


@cache
def commands() -> Any:
    """All commands, as Click has them."""
    return typer.main.get_command(app)


def _options_of(words: list[str]) -> set[str]:
    """The options of the command that some words call."""
    command = commands()
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return {option for parameter in command.params for option in parameter.opts}


@pytest.fixture(scope="module")
def names(float32_summarizer: Path) -> dict[str, Any]:
    """What the snippets of the README take for granted."""
    large, small = (AutoModelForCausalLM.from_pretrained(float32_summarizer) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(float32_summarizer)
    return {
        "__name__": "page", "lookahead": lookahead, "LookaheadConfig": lookahead.LookaheadConfig, "pipeline": pipeline,
        "model": large, "large": large, "small": small, "tokenizer": tokenizer,
        "inputs": tokenizer("Once upon a time", return_tensors="pt"), "prompts": ["Once upon a time", "..."],
    }  # fmt: skip


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float32_summarizer: Path, names: dict[str, Any]
) -> Iterator[Desk]:
    """A folder with small files by the names that the pages use, no network, and `lookahead` on the path."""
    text = (ROOT / "examples" / "dust_unto_dust.txt").read_text("utf-8")
    paragraphs = text.split("\n\n")
    (tmp_path / "examples").mkdir()
    for path in (ROOT / "examples").glob("*.txt"):  # as much of each as shows what the page shows
        (tmp_path / "examples" / path.name).write_text(path.read_text("utf-8")[:2500])
    for name in ("PATH_OR_ID", "my-model"):
        (tmp_path / name).symlink_to(float32_summarizer)
    (tmp_path / "article.txt").write_text("\n\n".join(paragraphs[:4]))
    (tmp_path / "prompt.txt").write_text(f"<doc> {' '.join(text.split()[:150])}<sum>")
    for folder, suffix in (("notes", "md"), ("docs", "txt")):
        (tmp_path / folder).mkdir()
        for i in range(2):
            (tmp_path / folder / f"{i}.{suffix}").write_text("\n\n".join(paragraphs[8 + i : 11 + i]))
    for name, field, count in (
        ("corpus", "text", 6),
        ("handbook", "text", 6),
        ("answers", "text", 6),
        ("prompts", "prompt", 12),
    ):
        lines = [json.dumps({"id": i, field: paragraph}) for i, paragraph in enumerate(paragraphs[:count])]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    command = tmp_path / "bin" / "lookahead"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m lookahead "$@"\n')
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", _refuse)
    monkeypatch.setattr(loading, "_default_file", lambda: float32_summarizer)
    loading.load_default.cache_clear()
    # The commands set up their process, which here is that of all tests.
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield Desk(tmp_path, dict(names))
    loading.load_default.cache_clear()
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


def _refuse(*_: Any) -> None:
    raise AssertionError("a page reached for the network")


def words(text: str) -> set[str]:
    """The words of a text; its figures, and what has digits in it such as a checksum, differ from run to run."""
    return {*re.findall(r"(?<![^\W_])[^\W\d_]{3,}(?![^\W_])", text)}


def prose_of(text: str) -> str:
    """A page without its blocks, in one line."""
    return " ".join(_BLOCK.sub(" ", text).split())


def links_of(text: str) -> set[str]:
    """The files that a page points at."""
    found = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return {link for link in found if "://" not in link}


def commands_of(text: str) -> list[list[str]]:
    """Commands in the prose and in blocks that are not run."""
    inline = re.findall(r"`((?:lookahead|python -m bench\.)[^`]* [^`]*)`", prose_of(text))
    unrun = [
        line for block in blocks_of(text) if block.reason and block.language == "sh" for line in block.code.splitlines()
    ]
    return [shlex.split(line, comments=True) for line in (*inline, *unrun)]


def check_command(given: list[str]) -> None:
    """Fail unless a command of ours, and its options, exist."""
    options = {word.split("=")[0] for word in given if word.startswith("--")}
    if given[:2] == ["python", "-m"] and given[2].startswith("bench."):
        assert (ROOT / f"{given[2].replace('.', '/')}.py").exists(), given
        known = " ".join(path.read_text("utf-8") for path in (ROOT / "bench").glob("*.py"))
        assert all(f'"{option}"' in known for option in options), given
    elif given[0] == "lookahead" and not given[1].isupper():
        command = commands()
        for word in given[1:]:
            command = getattr(command, "commands", {}).get(word, command)
        assert not hasattr(command, "commands"), f"no command: {given}"
        assert options <= {"--help"}.union(*(parameter.opts for parameter in command.params)), given


@pytest.mark.filterwarnings("ignore")  # a page may show what warns
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs_and_prints_what_it_shows(page: str, desk: Desk) -> None:
    for block in blocks_of(PAGES[page].read_text("utf-8")):
        if block.reason is None and block.language in ("sh", "python"):
            printed = desk.run(block)
            if block.shown is not None:
                assert not words(block.shown) - words(printed), f"{block.code}\nprints\n{printed}"


def test_job_files_that_pages_show_are_read(desk: Desk) -> None:
    blocks = [block for path in PAGES.values() for block in blocks_of(path.read_text("utf-8"))]
    job_files = [block.code for block in blocks if block.language == "toml"]
    assert job_files
    for code in job_files:
        (desk.folder / "job.toml").write_text(code)
        desk.run(Block("sh", "lookahead summarize -t job.toml --save taken.toml\n", None, None))
        assert {*code.splitlines()} <= {*(desk.folder / "taken.toml").read_text().splitlines()}


def test_blocks_are_left_out_for_a_reason_and_are_few() -> None:
    left_out = set()
    for page, path in PAGES.items():
        for block in blocks_of(path.read_text("utf-8")):
            if block.reason is not None:
                assert len(block.reason.split()) >= 3, f"{page}: {block.code}"
                left_out.add((page, " ".join(block.code.split()[:3])))
    assert left_out == NOT_RUN


@pytest.mark.parametrize("page", PAGES)
def test_no_block_escapes_by_another_name(page: str) -> None:
    text = PAGES[page].read_text("utf-8")
    assert {block.language for block in blocks_of(text)} <= LANGUAGES
    assert text.count("```") == 2 * len(_BLOCK.findall(text))
    assert text.count("<!-- not run") == sum(block.reason is not None for block in blocks_of(text))


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_only_told_of_exist_too(page: str) -> None:
    for given in commands_of(PAGES[page].read_text("utf-8")):
        check_command(given)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    for link in links_of(PAGES[page].read_text("utf-8")):
        assert (PAGES[page].parent / link).exists(), link


# What a reader looks for first: a command, and a page that has it.
NEEDS = {
    "a first summary": ("lookahead summarize", "docs/jobs.md"),
    "my own model": ('lookahead.load("PATH_OR_ID"', "docs/models.md"),
    "a GGUF file": ("--quantize gguf", "docs/models.md"),
    "a server": ("lookahead serve", "docs/serving.md"),
    "an edit with a prediction": ("--prediction", "docs/edits.md"),
    "speech": ("lookahead transcribe", "docs/speech.md"),
    "how fast it is": ("lookahead bench", "docs/how-fast.md"),
    "whether it is exact": ("lookahead bench", "docs/is-it-exact.md"),
}


@pytest.mark.parametrize("need", NEEDS)
def test_a_reader_of_the_readme_finds_what_is_needed_in_two_links(need: str) -> None:
    command, page = NEEDS[need]
    near = {"README.md"}
    for _ in range(2):
        near |= {
            os.path.normpath(PAGES[name].parent.relative_to(ROOT) / link)
            for name in near & PAGES.keys()
            for link in links_of(PAGES[name].read_text("utf-8"))
        }
    assert page in near and any(command in block.code for block in blocks_of(PAGES[page].read_text("utf-8")))


def test_a_page_is_read_in_one_sitting_unless_it_is_reference() -> None:
    reference = PAGES["docs/README.md"].read_text("utf-8").partition("## Reference\n")[2].partition("\n## ")[0]
    for name, page in PAGES.items():
        is_page = name.startswith("docs/") and page.name not in links_of(reference)
        assert not is_page or page.read_text("utf-8").count("\n") <= 200, name


def test_the_index_has_a_line_for_every_page() -> None:
    index = links_of(PAGES["docs/README.md"].read_text("utf-8"))
    assert {Path(page).name for page in PAGES if page.startswith("docs/")} - {"README.md"} <= index


def test_the_page_of_speeds_shows_the_figures_of_its_result_files() -> None:
    text = PAGES["docs/how-fast.md"].read_text("utf-8")
    rows = re.findall(r"^\| .* \| (\d) \| (.*) \| \[file\]\(\.\./(.*)\) \|$", text, re.M)
    assert len(rows) > 5
    for threads, shown, file in rows:
        result = json.loads((ROOT / file).read_text())
        found, clock = result["lookahead"], "cpu" if result["threads"] == 1 else "wall"
        assert found["identical"] == result["prompts"] and int(threads) == result["threads"], file
        ms = result["methods"]["greedy"]["ms_per_token"][clock], found["ms_per_token"]
        times = [f"{found[name]:.2f}x" for name in ("speedup", "end_to_end", "lowest")]
        assert shown.split(" | ") == [f"{ms[0]:.1f}", f"{ms[1]:.1f}", *times], file


# That these tests can fail


def test_the_stats_page_shows_and_explains_every_figure() -> None:
    page = PAGES["docs/stats.md"].read_text()
    for name in lookahead.DecodingStats().to_dict():
        assert f"\n  {name} " in page and f"`{name}`" in page, name


def test_a_command_that_fails_fails_its_page(desk: Desk) -> None:
    with pytest.raises(AssertionError, match="pool info"):
        desk.run(Block("sh", "lookahead pool info article.txt\n", None, None))
    with pytest.raises(AssertionError, match="missing"):
        desk.run(Block("sh", "cat missing | lookahead --version\n", None, None))


def test_a_command_with_a_pipe_runs_this_tree_in_a_shell(desk: Desk) -> None:
    printed = desk.run(Block("sh", "lookahead --version | cat   # a comment\n", None, None))
    assert printed == f"lookahead {lookahead.__version__}\n"


@pytest.mark.parametrize(
    "given", ["lookahead pool inform x", "lookahead explain x --windows auto", "python -m bench.none --x"]
)
def test_a_command_or_option_that_does_not_exist_is_found(given: str) -> None:
    with pytest.raises(AssertionError):
        check_command(given.split())
