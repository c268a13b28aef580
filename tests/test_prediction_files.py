"""Predictions on the command line: files for `generate`, and a column of the documents of a job."""

from __future__ import annotations

import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from lookahead.cli.app import app
from lookahead.documents.decode_text import Document
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import read_documents


def records(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read(name, **options):
    return list(read_documents(find_inputs([name], **options), limit=1 << 20))


@pytest.fixture
def generate(cli_folder, model_folder):
    """Runs `lookahead generate` with a tiny model."""

    def run(*arguments):
        options = ["--model", str(model_folder), "--max-new-tokens", "20"]
        return CliRunner().invoke(app, ["generate", *options, *arguments])

    return run


def test_generate_drafts_from_files_that_hold_about_its_output(generate, cli_folder):
    plain = generate("Once upon")
    (cli_folder / "right.txt").write_text(plain.stdout[:-1])
    (cli_folder / "wrong.txt").write_text("The cat sat on the mat.")
    result = generate("Once upon", "--prediction", "wrong.txt", "--prediction", "right.txt", "--stats")
    assert result.stdout == plain.stdout
    assert re.search(r"accepted_by_source .*prediction: ", result.stderr)
    (cli_folder / "bytes.txt").write_bytes(b"\xff\xfe\xfd")
    for name, message in (("gone.txt", "gone.txt: No such file"), ("bytes.txt", "bytes.txt: not UTF-16 text")):
        refused = generate("Once", "--prediction", name)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert message in refused.stderr and refused.stderr.count("\n") == 1


def test_a_column_may_hold_what_is_written_about_a_document(cli_folder):
    (cli_folder / "a.csv").write_text('id,text,old\nx,One.,"Uno, dos."\ny,Two.,\n')
    (cli_folder / "a.jsonl").write_text(
        '{"text": "One.", "old": "Uno."}\n{"text": "Two.", "old": null}\n{"text": "Three.", "old": 3}\n'
        '{"text": "Four."}\n{"text": "Five.", "old": "\\ud800 x"}\n'
    )
    table = pyarrow.table({"text": ["One.", "Two."], "old": ["Uno.", None]})
    pyarrow.parquet.write_table(table, cli_folder / "a.parquet")
    assert read("a.csv", prediction_field="old") == [Document("x", "One.", "Uno, dos."), Document("y", "Two.", "")]
    one, two, three, four, five = read("a.jsonl", prediction_field="old")
    assert [one.prediction, two.prediction, five.prediction] == ["Uno.", None, "? x"]
    assert three.error == "a.jsonl:3: field 'old' must hold a string or nothing, got int"
    assert "no field 'old'" in four.error and "(--prediction-field names one)" in four.error
    assert [each.prediction for each in read("a.parquet", prediction_field="old")] == ["Uno.", None]
    assert read("a.csv")[0] == Document("x", "One.")
    (reject,) = read("a.parquet", prediction_field="gone")
    assert "no column 'gone'" in reject.error


def test_a_job_is_resumed_with_predictions_or_without(summarize, cli_folder):
    known = [{"id": f"d{i}", "text": f"Text number {i}."} for i in range(5)]
    (cli_folder / "docs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in known))
    summarize("docs.jsonl", "-o", "whole.jsonl")
    whole = records(cli_folder / "whole.jsonl")
    older = {record["id"]: record["summary"] for record in whole}
    (cli_folder / "docs.jsonl").write_text(
        "".join(json.dumps({**each, "old": older[each["id"]]}) + "\n" for each in known)
    )
    field = ("--prediction-field", "old")
    for first, second in (((), field), (field, ())):
        summarize("docs.jsonl", "-o", "out.jsonl", "--overwrite", "--limit", "3", *first)
        resumed = summarize("docs.jsonl", "-o", "out.jsonl", "--resume", *second)
        assert resumed.exit_code == 0 and "3 finished before" in resumed.stderr
        assert [{**each, "stats": None} for each in records(cli_folder / "out.jsonl")] == [
            {**each, "stats": None} for each in whole
        ]
        for at, each in enumerate(records(cli_folder / "out.jsonl")):  # measured times decide how much is drafted
            assert each["stats"]["accepted_by_source"].get("prediction", 0) == 0 or (first if at < 3 else second)
    assert "no field 'gone'" in summarize("docs.jsonl", "-o", "none.jsonl", "--prediction-field", "gone").stderr
