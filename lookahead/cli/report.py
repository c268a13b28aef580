"""The command that shows the results of a job as an HTML page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lookahead.cli.terminal import console, say
from lookahead.jobs.job_options import option


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `lookahead report`."""

    results: Path = option(
        help="What 'lookahead summarize -o RESULTS' wrote: JSON lines, or .parquet.", argument=True, metavar="RESULTS"
    )
    output: Path | None = option(None, "The page. (default: RESULTS.report.html)", "--output", "-o", metavar="PAGE")
    rejects: Path | None = option(None, "File of documents that failed. (default: RESULTS.rejects.jsonl)")


def report(options: ReportOptions) -> None:
    """Show the results of a job as one HTML page.

    Speedups, acceptance by source, tokens per pass, time by length, speed over the
    job, failures by reason, totals, and the summaries of the documents that took
    longest or gained most and least. The page is one file and needs no network.
    What the results do not hold is left out; malformed lines are named. It may be
    made while the job runs. An earlier report is replaced, but no other file.

    For example:

      lookahead report summaries.jsonl
      lookahead report summaries.jsonl -o report.html

    Exit status: 0 the page is written; 2 there is nothing to report, or a file
    cannot be read or written.
    """
    from lookahead.reporting.report_page import write_report

    done = write_report(options.results, options.output, options.rejects)
    for problem in done.problems:
        say("warning", problem)
    documents = f"{done.documents:,} document{'' if done.documents == 1 else 's'}"
    failed = f", {done.failed:,} failed" if done.failed else ", no failures"
    console(sys.stderr).print(f"{documents}{failed}; written to {done.path}", soft_wrap=True)
