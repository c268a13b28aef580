"""The progress of a job: the document, its part, and the tokens read."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.rule import Rule
from rich.text import Text

from lookahead.cli.terminal import ProgressBar, console, harmless, say, show_line, table
from lookahead.documents.decode_text import DocumentId, Reject
from lookahead.jobs import job_figures
from lookahead.jobs.job import JobTotals

if TYPE_CHECKING:
    from lookahead.summarization.summarizer import Summarized, Summary

MAX_TABLE_ROWS = 20


class JobDisplay(ProgressBar):
    """Shows a job: progress and errors on stderr, and the summaries on stdout if `as_text`."""

    def __init__(self, total: int | None, *, as_text: bool, with_bar: bool) -> None:
        self.as_text = as_text
        self._rows: list[dict[str, str]] = []
        self._part, self._read = "", ""  # of the document that is being summarized
        self._started = time.monotonic()
        words = "documents, {task.fields[speed]:.0f} tokens/s, {task.fields[accepted]:.2f} a pass{task.fields[read]}"
        super().__init__(words, total, is_shown=with_bar, speed=0.0, accepted=0.0, read="")

    def reading(self, done: int, tokens: int) -> None:
        """Show that `done` of `tokens` of a prompt are read."""
        self._read = f", reading {done:,} of {tokens:,} tokens" if done < tokens else ""
        self._update()

    def parts(self, done: int, parts: int) -> None:
        """Show the progress within a document of which `done` parts are summarized."""
        part = "all parts together" if done == parts else f"part {done + 1} of {parts}"
        self._part = f", {part}" if parts > 1 else ""
        self._update()

    def _update(self) -> None:
        self.update(self._task, read=self._part + self._read)

    def __call__(self, done: Summarized | Reject | DocumentId, totals: JobTotals) -> None:
        """Show the result of a document, and the progress."""
        self._part = self._read = ""
        self._update()
        if isinstance(done, Reject):
            say("error", done.error)
        elif not isinstance(done, str | int):
            self._show(harmless(str(done.document.id)), done.summary)
        speed = job_figures.speed_of(totals, time.monotonic() - self._started)
        self.update(self._task, advance=1, speed=speed, accepted=totals.stats.mean_acceptance_length)

    def _show(self, name: str, summary: Summary) -> None:
        if self.as_text:
            self.stop()
            out = console(sys.stdout)
            out.print(Rule(Text(name, "bold"), align="left"))
            show_line(out.file, harmless(summary.text))
            show_line(out.file, Text(job_figures.describe_summary(summary) + "\n", "dim"))
            self.start()
        if summary.plain is not None and len(self._rows) < MAX_TABLE_ROWS:
            file = name.rpartition("/")[2] or name  # results and headings have the whole name
            self._rows.append(job_figures.comparison_row(file, summary.stats, summary.plain))

    def conclude(self, totals: JobTotals, *, exact: bool) -> None:
        """Show the figures of the job: on stdout after the summaries, else on stderr."""
        out, seconds = console(sys.stdout if self.as_text else sys.stderr), time.monotonic() - self._started
        if totals.plain is not None:
            total = job_figures.comparison_row("all", totals.stats, totals.plain) if totals.summarized > 1 else None
            out.print(table(self._rows, total))
        for note in totals.notes:
            say("note", note)
        show_line(out.file, job_figures.describe_totals(totals, seconds))
        if totals.different:
            say("NOT IDENTICAL", job_figures.describe_difference(totals, exact=exact))
