"""Jobs on the command line: resumed, described in a file, estimated, and asked for in one's own words."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pyarrow.parquet
import pytest

from lookahead.jobs.job import MAX_TIMED_PARTS
from lookahead.jobs.line_file import LineFile
from lookahead.summarization.prompting import INSTRUCTION, STYLES, Prompting, SummaryRequest

SUMMARIZER = str(Path(__file__).resolve().parent / "models" / "summarizer")
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"


def records(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def only_error(result):
    """The one line a refused call prints."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    errors = [
        line for line in result.stderr.splitlines() if not line.startswith(("note: decoding in bf16", "compiling"))
    ]
    assert len(errors) == 1, result.stderr
    return errors[0]


@pytest.fixture
def docs(cli_folder):
    """Six documents, two of them equal, and a line that is none."""
    lines = [f'{{"id": "d{i}", "text": "Text number {i % 5}."}}\n' for i in range(6)]
    (cli_folder / "docs.jsonl").write_text("".join([*lines[:3], '{"text": \n', *lines[3:]]))
    return "docs.jsonl"


# Resuming


def test_a_stopped_job_is_resumed_by_the_same_command(summarize, docs, monkeypatch):
    assert summarize(docs, "-o", "whole.jsonl").exit_code == 1
    honest = LineFile.write

    def full(self, record):
        if record["id"] == "d4":
            raise OSError(28, "No space left on device")
        honest(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "write", full)
        stopped = summarize(docs, "-o", "out.jsonl", "--rows", "1")
    assert "writing failed: No space left on device; 4 finished summaries in out.jsonl; --resume" in stopped.stderr
    assert "is of a job that did not finish; pass --resume" in only_error(summarize(docs, "-o", "out.jsonl"))
    resumed = summarize(docs, "-o", "out.jsonl", "--resume")
    assert "1 document summarized, 1 with the same text as another, 4 finished before, 1 failed" in resumed.stderr
    for whole, mine in zip(records("whole.jsonl"), records("out.jsonl"), strict=True):
        assert {**whole, "stats": None} == {**mine, "stats": None}


def test_part_of_the_documents_resumed_loses_no_line_of_the_others(summarize, cli_folder):
    lines = "".join(json.dumps({"id": "same", "text": f"Text {i}."}) + "\n" for i in range(4))
    (cli_folder / "docs.jsonl").write_text(lines)
    summarize("docs.jsonl", "-o", "out.jsonl")
    whole = (cli_folder / "out.jsonl").read_bytes()
    resumed = summarize("docs.jsonl", "-o", "out.jsonl", "--resume", "--limit", "2")
    assert resumed.exit_code == 0 and "changed since" not in resumed.stderr
    summarize("docs.jsonl", "-o", "out.jsonl", "--resume", "--limit", "9")
    assert (cli_folder / "out.jsonl").read_bytes() == whole


def test_a_limit_beyond_the_last_document_leaves_out_what_changed(summarize, cli_folder):
    summarize("a.txt", "b.txt", "-o", "out.jsonl")
    (cli_folder / "a.txt").write_text("Something else.")
    assert "left out 1 line" in summarize("a.txt", "b.txt", "-o", "out.jsonl", "--resume", "--limit", "2").stderr
    assert [record["id"] for record in records("out.jsonl")] == ["a.txt", "b.txt"]


def test_another_model_or_length_does_not_go_on_with_an_output(summarize, docs, summarizer_path):
    summarize(docs, "-o", "out.jsonl", "--limit", "2")
    message = only_error(summarize(docs, "-o", "out.jsonl", "--resume", "--max-new-tokens", "9"))
    assert "out.jsonl was written by another job: max_new_tokens was 12 and is 9; name another --output" in message
    message = only_error(summarize(docs, "-o", "out.jsonl", "--resume", "--model", str(summarizer_path)))
    assert "model was '" in message and f"and is '{summarizer_path}', with other weights" in message


def test_beams_and_greedy_decoding_do_not_go_on_with_each_others_output(summarize, docs):
    summarize(docs, "-o", "out.jsonl", "--limit", "2", "--num-beams", "2")
    message = only_error(summarize(docs, "-o", "out.jsonl", "--resume", "--num-beams", "1"))
    assert "out.jsonl was written by another job: num_beams was 2 and is None" in message
    resumed = summarize(docs, "-o", "out.jsonl", "--resume", "--num-beams", "2", "--limit", "2")
    assert "2 finished before" in resumed.stderr
    summarize(docs, "-o", "greedy.jsonl", "--limit", "2", "--num-beams", "1")
    assert "2 finished before" in summarize(docs, "-o", "greedy.jsonl", "--resume", "--limit", "2").stderr
    message = only_error(summarize(docs, "-o", "greedy.jsonl", "--resume", "--num-beams", "3"))
    assert "num_beams was None and is 3" in message


def test_a_folder_is_summarized_without_its_own_results(summarize, cli_folder):
    for arguments in ((), ("--resume",)):
        assert summarize(".", "-o", "out.jsonl", *arguments).exit_code == 0
        assert [record["id"] for record in records("out.jsonl")] == ["a.txt", "b.txt"]


def test_an_output_that_ends_in_parquet_is_one(summarize, docs):
    result = summarize(docs, "-o", "out.parquet")
    assert result.exit_code == 1
    table = pyarrow.parquet.read_table("out.parquet")
    assert table["id"].to_pylist() == [f"d{i}" for i in range(6)]
    assert table["copy_of"].to_pylist()[-1] == "d0"
    assert records("out.parquet.rejects.jsonl")[0]["id"] == "docs.jsonl:4"
    assert "5 documents summarized, 1 with the same text as another, 1 failed; " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no input: name files, folders or URLs, or - for stdin"),
        (["a.txt", "--resume"], "--resume needs --output, the file to continue"),
        (["a.txt", "-o", "new.jsonl", "--retry-rejects"], "add --resume"),
        (["a.txt", "-o", "new.jsonl", "--resume", "--overwrite"], "pass one of them"),
        (["a.txt", "-o", "old.jsonl", "--resume"], "output old.jsonl has no manifest (old.jsonl.manifest.json)"),
        (["a.txt", "--price-per-hour", "1"], "price_per_hour was removed: --dry-run prints the time"),
        (["a.txt", "-o", "new.lkp", "--pool", "new.lkp"], "new.lkp: No such file or directory"),
        (["a.txt", "--rejects", "m.lkm", "--memory", "./m.lkm"], "memory ./m.lkm cannot be a file that the job writes"),
        (["a.txt", "--style", "haiku"], "style must be bullets, paragraph, headline, got 'haiku'"),
        (["a.txt", "--style", "bullets"], "the model's tokenizer has no chat template"),
        (["a.txt", "--style", "bullets", "--model", SUMMARIZER], "made to summarize and follows no instructions"),
        (["a.txt", "--refine"], "the model's tokenizer has no chat template, so it cannot refine a summary"),
        (["a.txt", "--refine", "--model", SUMMARIZER], "follows no instructions, so it cannot refine a summary"),
        (["a.txt", "--overlap", "40"], "overlap was removed: parts of a long document are cut between sections"),
        (["a.txt", "--keep-parts"], "keep_parts was removed: a line of results holds the summary of the whole"),
        (["a.txt", "--prompt-file", "gone.txt"], "gone.txt: No such file"),
        (["a.txt", "--sample", "3"], "sample was removed: --limit takes the first documents"),
        (["a.txt", "--pool", "gone.lkp"], "gone.lkp: No such file or directory"),
        (["a.txt", "--pool", "b.txt"], "b.txt: not a pool file"),
        (["s3x://bucket/a.txt"], "s3x://bucket/a.txt: cannot be read: Protocol not known: s3x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_clear_line_and_writes_nothing(summarize, cli_folder, arguments, message):
    (cli_folder / "old.jsonl").write_text("old")
    before = {path: path.read_bytes() for path in cli_folder.iterdir()}
    assert message in only_error(summarize(*arguments))
    assert {path: path.read_bytes() for path in cli_folder.iterdir()} == before


def test_a_line_longer_than_the_limit_is_put_aside(summarize, cli_folder):
    (cli_folder / "docs.jsonl").write_text(f'{{"text": "One."}}\n{{"text": "{"x" * 3000}"}}\n{{"text": "Two."}}\n')
    assert summarize("docs.jsonl", "-o", "out.jsonl", "--max-document-mb", "inf").exit_code == 2
    assert summarize("docs.jsonl", "-o", "out.jsonl", "--max-document-mb", "0.002").exit_code == 1
    assert [record["id"] for record in records("out.jsonl")] == ["docs.jsonl:1", "docs.jsonl:3"]
    assert "docs.jsonl:2: longer than 0.002 MB; --max-document-mb" in records("out.jsonl.rejects.jsonl")[0]["error"]


# Estimates


def test_a_dry_run_counts_and_estimates_and_writes_nothing(summarize, docs, cli_folder):
    before = sorted(cli_folder.iterdir())
    result = summarize(docs, "-o", "out.jsonl", "--dry-run")
    assert result.exit_code == 1
    estimate = json.loads(result.stdout)
    assert (estimate["documents"], estimate["failed"], estimate["copies"], estimate["parts"]) == (6, 1, 1, 5)
    assert estimate["most_new_tokens"] == 60 and estimate["seconds"] > 0
    text = summarize(docs, "--dry-run", "--format", "text").stdout
    assert "document tokens" in text and "time, from 3 documents" in text
    assert sorted(cli_folder.iterdir()) == before


def test_a_dry_run_says_what_of_a_long_document_it_summarized(summarize, cli_folder):
    (cli_folder / "book.txt").write_text("The cat sat on the mat. " * 400)
    estimate = json.loads(summarize("book.txt", "--dry-run").stdout)
    assert estimate["timed_parts"] == MAX_TIMED_PARTS < estimate["tried_parts"] == estimate["parts"]
    text = summarize("book.txt", "--dry-run", "--format", "text").stdout
    assert f"time, from {MAX_TIMED_PARTS} of {estimate['parts']} parts of 1 document" in text


# What is asked for


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_a_style_is_an_instruction_to_a_model_that_takes_some(tiny_tokenizer):
    chat = with_template(tiny_tokenizer, CHAT)
    assert Prompting(chat).render("One.") == f"[user]{INSTRUCTION.replace('{document}', 'One.')}[bot]"
    for style, instruction in STYLES.items():
        assert Prompting(chat, SummaryRequest(style=style)).render("One.") == f"[user]{instruction}\n\nOne.[bot]"


def test_a_prompt_of_ones_own_goes_before_the_document_or_around_it(tiny_tokenizer):
    chat = with_template(tiny_tokenizer, CHAT)
    before, around = SummaryRequest(prompt="In French:\n"), SummaryRequest(prompt="Text: {document} Who is in it?")
    assert Prompting(chat, before).render("One.") == "[user]In French:\n\nOne.[bot]"
    assert Prompting(chat, around).render("One.") == "[user]Text: One. Who is in it?[bot]"
    assert Prompting(tiny_tokenizer, before).render("One.") == "In French:\n\nOne.\n\nSummary:"
    assert Prompting(tiny_tokenizer, around).render("One.") == "Text: One. Who is in it?"


def test_a_prompt_file_decides_what_the_model_reads(summarize, cli_folder):
    (cli_folder / "prompt.txt").write_text("Who is in it?")
    plain, asked = (summarize("a.txt", *options) for options in ([], ["--prompt-file", "prompt.txt"]))
    plain, asked = json.loads(plain.stdout), json.loads(asked.stdout)
    assert asked["stats"]["prompt_tokens"] == plain["stats"]["prompt_tokens"] + len("Who is in it?") + 1
    assert asked["fingerprint"] != plain["fingerprint"]


def test_what_documents_hold_does_not_command_the_terminal(summarize, cli_folder):
    escape = "\x1b]0;evil\x07\x9b31m"
    documents = [{"id": f"{escape}a", "text": "One text."}, {"id": f"{escape}b", f"body{escape}": "Another."}]
    (cli_folder / "docs.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    done = summarize("docs.jsonl", "--format", "text", "--compare")
    assert "\ufffd31ma" in done.stdout and "\ufffd31m" in done.stderr
    assert not {"\x1b", "\x07", "\x9b"} & {*done.stdout, *done.stderr}


# How summaries end, and what is not read


def test_a_summary_that_was_cut_off_is_marked_everywhere(summarize, cli_folder):
    result = summarize("a.txt", "--format", "text")
    assert "; cut at 12 tokens; --max-new-tokens raises it" in result.stdout
    result = summarize("a.txt", "b.txt", "-o", "out.jsonl")
    assert "; 2 cut at the token limit, --max-new-tokens raises it" in result.stderr
    assert [record["finish_reason"] for record in records("out.jsonl")] == ["length", "length"]
    summarize("a.txt", "-o", "out.parquet")
    assert pyarrow.parquet.read_table("out.parquet")["finish_reason"].to_pylist() == ["length"]


def test_results_of_a_release_that_did_not_tell_how_summaries_end_are_gone_on_with(summarize, cli_folder):
    summarize("a.txt", "-o", "out.jsonl")
    (record,) = records("out.jsonl")
    del record["finish_reason"]
    (cli_folder / "out.jsonl").write_text(json.dumps(record) + "\n")
    resumed = summarize("a.txt", "b.txt", "-o", "out.jsonl", "--resume")
    assert "1 document summarized, 1 finished before" in resumed.stderr
    assert ["finish_reason" in each for each in records("out.jsonl")] == [False, True]
    assert summarize("a.txt", "b.txt", "-o", "out.parquet").exit_code == 0


def test_files_of_a_folder_that_are_not_read_are_named_a_few_and_counted(summarize, cli_folder):
    (cli_folder / "docs").mkdir()
    (cli_folder / "docs" / "a.txt").write_text("One.")
    for number in range(23):
        (cli_folder / "docs" / f"{number:02}.png").write_bytes(b"")
    result = summarize("docs", "-o", "out.jsonl")
    assert result.exit_code == 0
    named = [line for line in result.stderr.splitlines() if line.startswith("skipped: ")]
    assert named[0] == "skipped: docs/00.png: files with suffix .png are not read"
    assert named[20:] == ["skipped: 3 more files, 23 in all"]
    assert "1 document summarized, 23 files skipped" in result.stderr
