"""A report: its figures are those of the lines, text stays text, and what is no result is told, not fatal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from lookahead.cli.app import app
from lookahead.reporting import results_file as tallies
from lookahead.reporting.charts import bin_values, brief, exact, scale_from_zero
from lookahead.reporting.report_page import write_report
from lookahead.reporting.results_file import PATIENCE
from tests.support.outline import Outline

HOSTILE = '<script>alert("1")</script> & <b>\x00\ud800\u202e'
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def line(number=0, *, lengths=(4, 4, 1), seconds=0.5, compared=True, **fields):
    """A line of results whose passes gave so many tokens each."""
    decoded = sum(lengths)
    stats = {
        "target_forwards": len(lengths),
        "drafted_tokens": 8 * len(lengths),
        "accepted_tokens": decoded - len(lengths),
        "mean_acceptance_length": round(decoded / len(lengths), 4),
        "drafted_by_source": {"prompt": 6 * len(lengths), "outputs": 2 * len(lengths)},
        "accepted_by_source": {"prompt": decoded - len(lengths)},
        "expected_by_source": {"prompt": float(len(lengths)), "outputs": 0.5},
        "acceptance_histogram": {str(length): lengths.count(length) for length in lengths},
        "prefill_s": 0.25,
        "decode_s": seconds,
        "tokens_per_s": round(decoded / seconds, 3),
    }
    record = {"id": f"story-{number}", "summary": f"Summary {number}.", "document_tokens": 100 + number}
    record |= {"summary_tokens": decoded + 1, "parts": 1, "split": "none", "stats": stats}
    if compared:
        plain_s = decoded * 0.1
        record["plain"] = {"emitted_tokens": decoded + 1, "decode_s": plain_s, "tokens_per_s": 10.0}
        record |= {"speedup": round(decoded / seconds / 10, 3), "identical": True}
    return record | fields


@pytest.fixture
def report(tmp_path):
    """Writes lines and rejects, and gives the page about them."""

    def make(lines, rejects=None):
        results = tmp_path / "out.jsonl"
        written = [each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in lines]
        results.write_bytes(b"".join(written))
        if rejects is not None:
            beside = tmp_path / "out.jsonl.rejects.jsonl"
            beside.write_text("".join(json.dumps(each) + "\n" for each in rejects))
        return write_report(results).path.read_text(encoding="utf-8")

    return make


def words(page: str) -> str:
    """The text of a page, rows of tables apart, spaces squeezed."""
    return " ".join(Outline(re.sub(r"<style>.*?</style>", "", page, flags=re.S).replace("<", " <")).text.split())


# What the page says


def test_the_figures_of_the_page_are_those_of_the_lines(report) -> None:
    lines = [line(1, lengths=(4, 4, 1), seconds=0.5), line(2, lengths=(2, 2, 2, 2), seconds=1.0)]
    lines.append(line(3, lengths=(1, 1), seconds=0.4, identical=False))
    shown = words(report(lines, []))
    # 19 tokens of 9 passes in 1.9 s; plain decoding took 1.9 s at 10 tokens a second, so the same.
    assert "3 documents summarized" in shown
    assert "10 tokens per second, prefill excluded 2.11 tokens per pass 1× the speed of plain decoding" in shown
    assert "median 0.8×, from 0.5× to 1.8×" in shown
    assert "2 of 3 documents were slower. All of them together: 1×." in shown
    assert "median 2, from 1 to 3; plain decoding has 1. All passes together: 2.11." in shown
    assert "prompt 10 of 54 18.5%" in shown
    assert "outputs 0 of 18 0.0%" in shown
    assert "tokens of the documents 306 tokens of the summaries 22 passes of the model 9" in shown
    assert "draft tokens verified 72 of them accepted 10 (13.9%)" in shown
    assert "prefill, all documents added up 0.75 s decoding, all documents added up 1.9 s" in shown
    assert "identical to plain decoding 2 of 3" in shown
    assert "Plain decoding wrote other tokens for story-3." in shown
    assert "No failures: out.jsonl.rejects.jsonl is empty." in shown
    assert "beside" not in shown
    shown = words(report([line(1, compared=False)], []))  # decoded in rows, so that its seconds were others' too
    assert "tokens per second of each document in a batch" in shown and "decoded together share" in shown


def test_the_speed_beside_plain_decoding_is_that_of_the_documents_decoded_both_ways(report) -> None:
    fast = line(2, lengths=(4, 4, 4), seconds=0.01, compared=False)
    shown = words(report([line(1, lengths=(4, 4, 1), seconds=0.45), fast], []))
    assert "2× the speed of plain decoding" in shown


def test_the_slowest_and_most_and_least_gaining_documents_come_with_summaries(report) -> None:
    shown = words(report([line(number, seconds=1.0 + number) for number in range(12)]))
    longest, most, least = re.split("Gained most, by speedup|Gained least, by speedup", shown.split("Took longest")[1])
    assert re.findall(r"Summary (\d+)\.", longest) == ["11", "10", "9", "8", "7"]
    assert re.findall(r"Summary (\d+)\.", most) == ["0", "1", "2", "3", "4"]
    assert re.findall(r"Summary (\d+)\.", least) == ["11", "10", "9", "8", "7"]


def test_of_few_documents_each_stands_once_among_those_that_gained(report) -> None:
    shown = words(report([line(number, seconds=1.0 + number, compared=False) for number in range(3)]))
    gains = shown.split("Gained most, by tokens per pass")[1]
    assert sorted(re.findall(r"Summary (\d+)\.", gains)) == ["0", "1", "2"]


def test_failures_that_differ_in_numbers_and_ids_have_one_reason(report) -> None:
    rejects = [{"id": f"d{n}", "error": f"d{n}: out of memory, {n} MiB short"} for n in range(20, 24)]
    rejects.append({"id": "x", "error": "a folder/docs.jsonl:7: the document is empty"})
    shown = words(report([line()], rejects))
    assert "5 failed" in shown
    assert "4 out of memory, 20 MiB short d20, d21, d22, …" in shown
    assert "1 the document is empty x" in shown


def test_a_document_with_the_summary_of_an_equal_one_counts_but_has_no_figures(report) -> None:
    copy = line(2, compared=False, stats=None, copy_of="story-1")
    shown = words(report([line(1), copy]))
    assert "documents summarized 2 of them with the summary of an equal document 1" in shown
    assert "passes of the model 3" in shown


def test_the_model_is_named_and_models_that_mix_are_seen(report) -> None:
    shown = words(report([line(1, model="tiny"), line(2, model="tiny"), line(3, model={"name": "other"})]))
    assert 'model tiny (2 documents) model {"name": "other"} (1 document)' in shown


# Text of others


def test_text_is_shown_as_text_wherever_it_stands(report) -> None:
    stats = line()["stats"] | {"drafted_by_source": {HOSTILE: 3}, "accepted_by_source": {HOSTILE: 1}}
    hostile = line(id=HOSTILE, summary=HOSTILE, stats=stats, model=HOSTILE, identical=False)
    outline = Outline(report([hostile], [{"id": HOSTILE, "error": HOSTILE}]))
    assert not {"script", "b"} & set(outline.tags)
    visible = HOSTILE[: HOSTILE.index("\x00")] + "\ufffd\ufffd\ufffd"
    # The source; the failure twice; the model; not identical; the lists' worth of two.
    assert outline.text.count(visible) >= 8
    assert not re.search("[\x00\ud800\u202e]", outline.text)


def test_the_page_needs_nothing_from_elsewhere_and_has_a_dark_side_and_a_printed_one(report) -> None:
    page = report([line(number) for number in range(3)], [])
    outline = Outline(page)
    assert not {"link", "img", "iframe", "script", "object"} & set(outline.tags)
    assert not {"src", "href"} & {name for name, _ in outline.attributes}
    assert not re.search(r"url\(|@import|https?:", page)
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


# What the results do not hold


def test_results_without_a_comparison_say_so_and_have_all_other_plots(report) -> None:
    page = report([line(number, compared=False) for number in range(3)])
    assert words(page).split("Not in these results")[1].startswith(": they were made without --compare")
    assert page.count("<svg viewBox") == 1  # of three documents there is no histogram


@pytest.mark.parametrize(
    "fields",
    [
        {"stats": None},
        {"stats": "none", "plain": 3, "speedup": "fast", "identical": "yes", "document_tokens": [], "id": None},
        {"stats": {}, "plain": {}, "speedup": None, "summary": None, "document_tokens": -4},
        {"stats": {"decode_s": float("nan"), "acceptance_histogram": {"x": 1, "9" * 5000: 2, "2": "3"}}},
        {"stats": {"drafted_by_source": {"prompt": 0}, "accepted_by_source": [1]}, "speedup": float("inf")},
        {"stats": {"decode_s": 0, "prefill_s": 0, "target_forwards": 0}, "document_tokens": 0, "speedup": 0},
        {"document_tokens": 10**400, "summary_tokens": 10**300, "speedup": 1e300, "model": 3, "summary": "x" * 9999},
        {"stats": {"decode_s": 1e-308, "prefill_s": 1e308, "acceptance_histogram": {"9": 1e308}}, "speedup": 1e-308},
    ],
    ids=["none", "other_types", "empty", "not_a_number", "infinite", "zeros", "huge", "boundless"],
)
def test_fields_that_are_missing_or_strange_leave_a_gap_and_no_error(report, fields) -> None:
    assert "1 document summarized" in words(report([line() | fields]))
    assert "3 documents summarized" in words(report([line(1), line() | fields, line(2)]))


def test_lines_that_are_none_are_counted_and_named(report) -> None:
    torn = json.dumps(line(2)).encode()[:50]
    shown = words(report([b"\xef\xbb\xbf", line(1), b"\n", b"{broken\n", b"[1]\n", b"\xff\n", {"other": 1}, torn]))
    assert "1 document summarized" in shown
    assert "out.jsonl: 5 lines were left out: line 3 is not JSON" in shown
    assert "line 4 is a list, not a JSON object" in shown
    assert "line 5 is not UTF-8 text" in shown
    assert "line 6 has neither summary nor stats, but 'other'" in shown
    assert "line 7 is torn, the last one." in shown


def test_a_last_line_without_its_line_break_counts_where_it_is_whole(report) -> None:
    page = report([line(1), json.dumps(line(2)).encode()])
    assert "2 documents summarized" in words(page)
    assert "torn" not in page


def test_a_last_line_with_its_line_break_is_not_called_torn(report) -> None:
    shown = words(report([line(1), b"{edited\n"]))
    assert "line 2 is not JSON" in shown and "torn" not in shown


def test_a_job_of_which_every_document_failed_has_a_report(report) -> None:
    shown = words(report([], [{"id": "a", "error": "a: the document is empty"}]))
    assert "0 documents summarized 1 failed" in shown


# Many lines


def test_many_documents_make_a_small_page_that_says_how(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tallies, "MAX_REASONS", 20)
    results = tmp_path / "out.jsonl"
    whole = [json.dumps(line(n, lengths=(1 + n % 7,) * 3, seconds=0.1 + n % 11)) + "\n" for n in range(5000)]
    results.write_text("".join(whole))
    letters = [chr(0x4E00 + n) for n in range(5000)]
    (tmp_path / "out.jsonl.rejects.jsonl").write_text(
        "".join(json.dumps({"id": each, "error": f"strange {each * 2} {chr(65 + n % 40)}"}) + "\n"
                for n, each in enumerate(letters))
    )  # fmt: skip
    page = write_report(results).path.read_text()
    assert len(page) < 200_000
    assert "of about 84 documents in a row" in words(page)
    assert "5,000 failed" in words(page) and " 2,500 other reasons " in words(page)


@pytest.mark.parametrize("figures", [[3.0], [2.0, 2.0], [0.0], [0.1, 0.2, 0.3], [1e-9, 1.0], [1.0] * 99 + [1e6]])
def test_a_histogram_counts_every_figure_once_between_its_ends(figures) -> None:
    bars = bin_values(np.array(figures))
    assert sum(bars.counts) == len(figures)
    assert bars.edges[0] <= min(figures)
    assert bars.beyond == sum(figure > bars.edges[-1] * (1 + 1e-9) for figure in figures)
    by_hand = [figure for figure in figures if bars.edges[0] <= figure < bars.edges[1] - 1e-12]
    if len(bars.counts) > 1:
        assert bars.counts[0] == len(by_hand)


def test_a_long_tail_is_one_bar_and_does_not_flatten_the_others() -> None:
    bars = bin_values(np.array([*np.linspace(1, 3, 999), 5000.0]))
    assert bars.edges[-1] < 4
    assert (bars.beyond, sum(bars.counts)) == (1, 1000)


def test_an_axis_holds_its_figures_and_has_a_few_round_marks() -> None:
    for largest in (0.0, 0.9, 50, 200, 12_345_678, 1e-6):
        scale = scale_from_zero(largest)
        assert 0 <= scale.place(largest) <= 1 + 1e-9
        assert 2 <= len(scale.marks()) <= 7
    assert [brief(figure) for figure in (0.5, 250, 1500, 2e6)] == ["0.5", "250", "1.5k", "2M"]
    assert [exact(figure) for figure in (np.nan, 12345, 12.3, 0.0457)] == ["–", "12,345", "12.3", "0.0457"]


# Parquet


def test_parquet_gives_the_page_of_the_lines_it_was_made_of(report, tmp_path) -> None:
    lines = [line(number, seconds=1.0 + number) for number in range(4)]
    rows = [each | {"stats": json.dumps(each["stats"]), "plain": json.dumps(each["plain"])} for each in lines]
    for name, table in (("strings", rows), ("objects", lines)):
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        page = write_report(path).path.read_text()
        assert page.replace(path.name, "out.jsonl") == report(lines)


# The command


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "out.jsonl").write_text(json.dumps(line()) + "\n{")
    return lambda *arguments: CliRunner().invoke(app, ["report", *arguments])


def test_the_command_writes_the_page_whole_and_says_what_it_could_not_read(run, tmp_path) -> None:
    result = run("out.jsonl")
    assert result.exit_code == 0, result.output
    assert "1 document, no failures; written to out.jsonl.report.html" in result.stderr
    assert "warning: out.jsonl: 1 line was left out: line 2 is torn" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.report.html"]
    assert run("out.jsonl", "-o", "page.html").exit_code == 0
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")


def test_a_report_replaces_a_report_and_no_other_file(run, tmp_path) -> None:
    assert run("out.jsonl").exit_code == run("out.jsonl").exit_code == 0
    (tmp_path / "mine.html").write_text("mine")
    result = run("out.jsonl", "-o", "mine.html")
    assert (result.exit_code, (tmp_path / "mine.html").read_text()) == (2, "mine")
    assert "mine.html exists and is not a page of report; name another file with --output" in result.stderr
    assert run("out.jsonl", "-o", "out.jsonl").exit_code == 2


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.jsonl", None, "none.jsonl: No such file"),
        ("empty.jsonl", b"", "empty.jsonl is empty: there are no results in it"),
        ("blank.jsonl", b"\n\n", "blank.jsonl is empty"),
        ("docs.jsonl", b'{"id": 1, "text": "x"}\n' * 3, "line 1 has neither summary nor stats, but 'id', 'text'"),
        ("prose.txt", b"Once upon a time", "holds no results of 'lookahead summarize'"),
        ("rejects.jsonl", b'{"id": 1, "error": "x"}\n', "line 1 belongs to a file of rejects"),
        ("picture.png", bytes(range(256)) * 40, "line 1 is not JSON"),
        ("long.jsonl", b"no\n" * (PATIENCE + 5) + json.dumps(line()).encode(), "line 1 is not JSON"),
        ("bad.parquet", b"PAR1 and nothing else", "bad.parquet: cannot be read as Parquet: "),
        ("none.parquet", None, "none.parquet: No such file"),
    ],
)
def test_what_is_no_file_of_results_is_one_line_and_no_page(run, tmp_path, name, content, told) -> None:
    if name == "bad.parquet":
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = run(name, "-o", "page.html")
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_other_rejects_and_places_that_cannot_be_written_are_told(run, tmp_path, monkeypatch) -> None:
    (tmp_path / "failed.jsonl").write_text('{"id": "a", "error": "a: broken"}\n')
    assert "1 document, 1 failed; written" in run("out.jsonl", "--rejects", "failed.jsonl").stderr
    assert "none.jsonl: No such file" in run("out.jsonl", "--rejects", "none.jsonl").stderr
    assert "a folder that exists, got 'none/page.html'" in run("out.jsonl", "-o", "none/page.html").stderr
    monkeypatch.setattr(
        "lookahead.reporting.report_page.write_atomically", Mock(side_effect=OSError(28, "No space left"))
    )
    assert run(".").exit_code == 2 and "report.html cannot be written: No space" in run("out.jsonl").stderr


def test_help_shows_an_example() -> None:
    result = CliRunner().invoke(app, ["report", "--help"])
    assert result.exit_code == 0
    assert "lookahead report " in result.stdout.split("For example")[1]


# A browser


def test_a_browser_draws_the_page_with_no_sideways_scrolling(report, tmp_path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    long = "w" * 300
    lines = [line(i, lengths=(2 + i, 1), id=long, summary=long, model=long) for i in range(40)]
    report(lines, [{"id": long, "error": long}])
    page = tmp_path / "out.jsonl.report.html"
    measure = "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth + ' ' + "
    measure += "[...document.querySelectorAll('svg[role]')].filter(s => s.getBBox().height > 100).length</script>"
    for width in (500, 1200):
        probe = tmp_path / "probe.html"
        probe.write_text(page.read_text().replace("</body>", measure + "</body>"))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path}/browser"]
        drawn = subprocess.run(
            [browser, *options, f"--window-size={width},900", probe.as_uri()],
            capture_output=True,
            text=True,
            timeout=300,
        )
        scroll, inner, plots = map(int, re.search(r"<title>(\d+) (\d+) (\d+)</title>", drawn.stdout).groups())
        assert inner == width
        assert scroll <= inner
        assert plots == 5
