"""A report on few documents, or without failures, says so and draws nothing that shows nothing."""

from __future__ import annotations

import html
import json
import re

import pytest
from typer.testing import CliRunner

from lookahead.cli.app import app
from lookahead.jobs.line import Line
from lookahead.reporting.results_file import Aggregate


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Reports some lines of results: the page as HTML, its words, and what stands on stderr."""
    monkeypatch.chdir(tmp_path)

    def make(lines):
        records = [{"id": f"story-{i}", "summary": "A story.", **line} for i, line in enumerate(lines)]
        (tmp_path / "out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        result = CliRunner().invoke(app, ["report", "out.jsonl"])
        assert result.exit_code == 0, result.output
        page = (tmp_path / "out.jsonl.report.html").read_text()
        words = " ".join(html.unescape(re.sub("<[^>]*>", " ", page.split("</style>")[1])).split())
        return page, words, result.stderr

    return make


def test_a_histogram_is_drawn_where_there_is_something_to_see(report):
    named = 'aria-label="Tokens per pass"'
    differing = [{"stats": {"mean_acceptance_length": 1.5 + number / 4}} for number in range(5)]
    assert named in report(differing)[0]
    page, words, _ = report(differing[:4])
    assert named not in page
    assert "median 1.88, from 1.5 to 2.25; plain decoding has 1." in words
    assert named not in report(differing[:1] * 9)[0]


def test_where_no_file_tells_of_failures_there_are_none(report):
    _, words, stderr = report([{}])
    assert "No failures: out.jsonl.rejects.jsonl does not exist." in words
    assert "documents that failed 0" in words
    assert stderr == "1 document, no failures; written to out.jsonl.report.html\n"


def test_summaries_that_the_token_limit_cut_off_are_counted_and_marked(report):
    stats = {"prefill_s": 1.0, "decode_s": 1.0}
    ends = [{"finish_reason": "length", "stats": stats}, {"finish_reason": "stop"}, {}, {"finish_reason": 7}]
    _, words, _ = report(ends)
    assert "summaries cut at the token limit 1 of 2" in words  # lines of earlier releases do not tell
    assert "cut at the token limit · 2 s" in words


def test_summaries_that_loop_are_counted_and_the_speed_is_given_without_them(report):
    def line(decoded, passes, plain_s, **fields):
        stats = {"acceptance_histogram": {"1": decoded}, "target_forwards": passes, "decode_s": 1.0, "prefill_s": 1.0}
        stats["mean_acceptance_length"] = decoded / passes
        plain = {"tokens_per_s": decoded / plain_s, "decode_s": plain_s}
        return {"stats": stats, "plain": plain, "speedup": plain_s, **fields}

    looping, straight = line(100, 10, 9.0, loops=True), line(100, 50, 2.0, loops=False)
    _, words, _ = report([looping, straight, line(100, 100, 1.0)])  # a line of an earlier release does not tell
    assert "4× the speed of plain decoding, prefill excluded 2× without summaries that loop" in words
    assert "All of them together: 4×, and 2× without summaries that loop." in words
    assert "All passes together: 1.88, and 2 without summaries that loop." in words
    assert "summaries that loop: they repeat one phrase to the end 1 of 2" in words
    assert "speedup 4× speedup without summaries that loop 2×" in words
    assert "· loops ·" in words or "loops · 2 s" in words
    _, words, _ = report([straight])
    assert "summaries that loop: they repeat one phrase to the end 0 of 1" in words and "without" not in words


def test_a_file_of_any_number_of_names_has_a_table_of_fifty(report):
    sources = [{f"source-{file}-{number}": 2 for number in range(30)} for file in range(3)]
    lines = [{"model": f"model-{number}", "stats": {"drafted_by_source": sources[number % 3]}} for number in range(60)]
    _, words, _ = report(lines)
    assert "source-1-19 " in words and "source-1-20 " not in words and "source-2" not in words and "others " in words
    models = Aggregate(Line.from_json(line, leaves_gaps=True) for line in lines).models
    assert len(models) == 51 and models["others"] == 10
