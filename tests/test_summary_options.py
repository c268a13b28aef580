"""Options of `model.generate` that summaries are written with, and what becomes of summaries that loop."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.decoding.loops import loops
from lookahead.documents.decode_text import Document
from lookahead.summarization.prompting import DEFAULT_SAMPLING
from lookahead.summarization.summarizer import Summarizer

SENTENCE = "The cat sat on the mat. "  # with the tokenizer of these tests a token is a character
DOCUMENTS = [SENTENCE, SENTENCE[::-1], SENTENCE * 3]
OPTIONS = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
    {"do_sample": True, "min_p": 0.05},
]


def lines_of(name):
    return Path(name).read_text("utf-8").splitlines()


def prompt_of(summarizer, document):
    (prompt,) = summarizer.fitter.prompts(summarizer.fitter.fit(document).parts)
    return prompt


def plainly(model, tokenizer, prompt, options, seed=7):
    """The new text by transformers alone."""
    from transformers import set_seed

    encoded = tokenizer(prompt, return_tensors="pt")
    set_seed(seed)
    given = {"tokenizer": tokenizer} if "stop_strings" in options else {}
    output = model.generate(**encoded, max_new_tokens=40, pad_token_id=0, **given, **{"do_sample": False, **options})
    return tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True).strip()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_summaries_are_those_of_transformers_with_the_same_options(tiny_llama, tiny_tokenizer, options):
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=40, sampling=options, seed=7)
    expected = [plainly(tiny_llama, tiny_tokenizer, prompt_of(summarizer, each), options) for each in DOCUMENTS]
    bare = [plainly(tiny_llama, tiny_tokenizer, prompt_of(summarizer, each), {}) for each in DOCUMENTS]
    assert all(one != other for one, other in zip(expected, bare, strict=True))
    assert [summarizer.summarize(each).text for each in DOCUMENTS] == expected
    together = summarizer.summarize_all([Document(i, each) for i, each in enumerate(DOCUMENTS)])
    assert {done.document.id: done.summary.text for done in together} == dict(enumerate(expected))


@pytest.mark.parametrize("compare", [False, True])
def test_a_summary_ends_with_the_first_of_several_stop_texts(tiny_llama, tiny_tokenizer, compare):
    whole = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=40)
    texts = [whole.summarize(each).text for each in DOCUMENTS]
    options = {"stop_strings": [text[9:12] for text in texts]}
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=40, sampling=options, compare=compare)
    done = list(summarizer.summarize_all([Document(i, each) for i, each in enumerate(DOCUMENTS)]))
    for each in done:
        prompt = prompt_of(summarizer, each.document.text)
        assert each.summary.text == plainly(tiny_llama, tiny_tokenizer, prompt, options)
        assert each.summary.finish_reason == "stop" and each.summary.summary_tokens < 40
        assert each.summary.plain is None or each.summary.plain.identical


@pytest.fixture
def run(cli_folder, model_folder):
    """Runs a command with a tiny model and short outputs."""

    def call(*words):
        options = ("--model", str(model_folder), "--max-new-tokens", "24")
        return CliRunner().invoke(app, [*words, *options])

    return call


@pytest.mark.parametrize(
    "words",
    [
        ["--repetition-penalty", "1.3"],
        ["--no-repeat-ngram-size", "2", "--repetition-penalty", "1.1"],
        ["--min-p", "0.05", "--seed", "7"],
        ["--stop", "e", "--stop", "Q"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("compare", [[], ["--compare"]], ids=["alone", "compared"])
def test_summarize_writes_what_generate_writes_with_the_same_options(run, cli_folder, words, compare):
    prompt = f"{(cli_folder / 'a.txt').read_text().strip()}\n\nSummary:"
    generated = run("generate", prompt, *words)
    summarized = run("summarize", "a.txt", *words, *compare)
    assert (generated.exit_code, summarized.exit_code) == (0, 0), generated.output + summarized.output
    line = json.loads(summarized.stdout)
    assert line["summary"] == generated.stdout.strip()
    assert line.get("identical", True)


@pytest.mark.parametrize("compare", [[], ["--compare"]], ids=["alone", "compared"])
def test_a_job_goes_on_with_the_options_it_began_with_and_no_others(run, cli_folder, compare):
    words = ("summarize", "a.txt", "b.txt", "-o", "out.jsonl", *compare, "--repetition-penalty", "1.3")
    assert run(*words, "--limit", "1").exit_code == 0
    for other in (
        ["--repetition-penalty", "1.2"],
        ["--no-repeat-ngram-size", "3"],
        ["--stop", "x"],
        ["--min-p", "0.1"],
    ):
        refused = run(*words, "--resume", *other)
        assert refused.exit_code == 2 and "was written by another job: " in refused.stderr, refused.output
        assert other[0].removeprefix("--").replace("-", "_").replace("stop", "stop_strings") in refused.stderr
    without = run("summarize", "a.txt", "b.txt", "-o", "out.jsonl", "--resume")
    assert "repetition_penalty was 1.3 and is None" in without.stderr
    assert run(*words, "--resume").exit_code == 0
    assert run(*words, "-o", "whole.jsonl").exit_code == 0
    texts = [[json.loads(line)["summary"] for line in lines_of(name)] for name in ("out.jsonl", "whole.jsonl")]
    assert texts[0] == texts[1] and len(texts[0]) == 2


def test_options_that_change_nothing_are_no_other_job(run, cli_folder):
    assert run("summarize", "a.txt", "-o", "out.jsonl").exit_code == 0
    off = ("--repetition-penalty", "1", "--no-repeat-ngram-size", "0", "--seed", "5")
    assert run("summarize", "a.txt", "b.txt", "-o", "out.jsonl", "--resume", *off).exit_code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--repetition-penalty", "0"], "greater than or equal to 0.01, got '0'"),
        (["--no-repeat-ngram-size", "-1"], "greater than or equal to 0, got '-1'"),
        (["--min-p", "1.5"], "less than or equal to 1, got '1.5'"),
        (["--stop", ""], "--stop must be a text of at least one character, got ''"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "summarize"])
def test_values_out_of_range_are_refused_with_the_range(run, command, words, told):
    refused = run(command, "a.txt", *words)
    assert refused.exit_code == 2 and not refused.stdout
    assert words[0] in refused.stderr and told in " ".join(refused.stderr.replace("│", " ").split())


# The default model


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], DEFAULT_SAMPLING),
        (["--stop", "."], {**DEFAULT_SAMPLING, "stop_strings": ["."]}),
        (["--repetition-penalty", "1"], {"repetition_penalty": 1.0}),
        (["--no-repeat-ngram-size", "0"], {"no_repeat_ngram_size": 0}),
        (["--model", "somewhere"], {}),
    ],
)
def test_only_the_default_model_has_options_against_loops_unless_given(words, kept):
    from lookahead.cli.job_options import JobOptions

    names = {"--stop": "stop", "--repetition-penalty": "repetition_penalty", "--model": "model"}
    names["--no-repeat-ngram-size"] = "no_repeat_ngram_size"
    values = {names[name]: value for name, value in zip(words[::2], words[1::2], strict=True)}
    read = {"stop": lambda text: [text], "repetition_penalty": float, "no_repeat_ngram_size": int, "model": str}
    options = JobOptions(**{name: read[name](value) for name, value in values.items()})
    assert options.settings().sampling == {"do_sample": False, **kept}


# Loops


@pytest.fixture
def looping(looping_llama, tiny_tokenizer):
    """Summarizes with a model that repeats itself without end."""

    def summarizer(**options):
        return Summarizer(looping_llama, tiny_tokenizer, max_new_tokens=120, **options)

    return summarizer


def test_a_summary_that_loops_is_flagged(looping, looping_llama, tiny_tokenizer):
    flags = set()
    for options in ({}, {"no_repeat_ngram_size": 3}):
        summarizer = looping(sampling=options)
        for document in DOCUMENTS:
            given = {"max_new_tokens": 120, "do_sample": False, **options}
            prompt = prompt_of(summarizer, document)
            expected = loops(lookahead.generate(looping_llama, tiny_tokenizer, prompt, **given).token_ids[0])
            (together,) = summarizer.summarize_all([Document("a", document)])
            for summary in (summarizer.summarize(document), together.summary):
                assert summary.loops == expected == summary.to_dict()["loops"]
            flags.add(expected)
    assert flags == {True, False}


def test_a_loop_in_a_part_is_flagged_too(looping):
    summarizer = looping()
    summary = summarizer.summarize(SENTENCE * 60)
    assert summary.parts > 1 and summary.loops


@pytest.fixture
def looping_run(looping_llama, tiny_tokenizer, tmp_path, cli_folder):
    """Summarizes two files with that model."""
    folder = tmp_path / "looping"
    looping_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    (cli_folder / "a.txt").write_text(DOCUMENTS[1])  # its summary loops
    (cli_folder / "b.txt").write_text(DOCUMENTS[0])

    def call(*words, tokens="120"):
        options = ("--model", str(folder), "--max-new-tokens", tokens, "--dtype", "fp32")
        return CliRunner().invoke(app, ["summarize", "a.txt", "b.txt", *words, *options])

    return call


def test_loops_are_told_in_lines_and_tables(looping_run):
    compared = looping_run("-o", "out.jsonl", "--compare")
    assert compared.exit_code == 0, compared.output
    flags = [json.loads(line)["loops"] for line in lines_of("out.jsonl")]
    told = " ".join(compared.stderr.split())
    assert flags == [True, False]
    assert told.count(" yes, loops ") == 2  # of the first one and of all
    advice = "--repetition-penalty and --no-repeat-ngram-size are against that"
    assert f"; 1 loops: it repeats one phrase to the end; {advice}" in told
    shown = looping_run("--format", "text").stdout
    assert shown.count("; it loops: it repeats one phrase to its end; ") == 1
    assert looping_run("-o", "out.parquet").exit_code == 0
    assert pyarrow.parquet.read_table("out.parquet")["loops"].to_pylist() == flags


def test_of_summaries_that_do_not_loop_nothing_is_said(looping_run):
    quiet = looping_run("-o", "out.jsonl", "--compare", tokens="20")
    assert [json.loads(line)["loops"] for line in lines_of("out.jsonl")] == [False, False]
    assert "loop" not in quiet.stderr


def test_results_of_a_release_that_did_not_tell_loops_are_gone_on_with(run, cli_folder):
    assert run("summarize", "a.txt", "-o", "out.jsonl").exit_code == 0
    record = json.loads(Path("out.jsonl").read_text())
    del record["loops"]
    Path("out.jsonl").write_text(json.dumps(record) + "\n")
    assert run("summarize", "a.txt", "b.txt", "-o", "out.jsonl", "--resume").exit_code == 0
    assert ["loops" in json.loads(line) for line in lines_of("out.jsonl")] == [False, True]
