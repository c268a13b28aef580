"""The command that shows what became of a job: arguments in, a page out. The work is done by `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lookahead.cli.terminal import console, say, usage_errors

Results = Annotated[
    Path,
    typer.Argument(metavar="RESULTS", help="What 'lookahead summarize -o RESULTS' wrote: JSON lines, or .parquet."),
]
Page = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="PAGE", help="The page. (default: RESULTS.report.html)")
]
Rejects = Annotated[Path | None, typer.Option(help="File of documents that failed. (default: RESULTS.rejects.jsonl)")]


def report(results: Results, output: Page = None, rejects: Rejects = None) -> None:
    """Show the results of a job as one HTML page.

    Speedups, acceptance by source, tokens per pass, time by length, speed over the
    job, failures by reason, totals, and the documents that took longest or gained
    most and least with their summaries. The page needs nothing else, no network
    either. What the results do not hold is left out; lines that are none are named.
    It may be made while the job runs. An earlier report is replaced, no other file.

    For example:

      lookahead report summaries.jsonl
      lookahead report summaries.jsonl -o report.html

    Exit status: 0 the page is written; 2 there is nothing to report, or a file
    cannot be read or written.
    """
    from lookahead.reporting.write_page import write_report

    with usage_errors():
        done = write_report(results, output, rejects)
        for problem in done.problems:
            say("warning", problem)
        documents = f"{done.documents:,} document{'' if done.documents == 1 else 's'}"
        failed = f", {done.failed:,} failed" if done.failed else ", no failures"
        console(sys.stderr).print(f"{documents}{failed}; written to {done.path}", soft_wrap=True)
