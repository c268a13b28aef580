"""What a job shows: its progress, and its figures as lines of text and rows of tables."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.rule import Rule
from rich.text import Text

from lookahead.cli.terminal import ProgressBar, console, harmless, say, show_line, table
from lookahead.documents.decode_text import DocumentId, Reject
from lookahead.errors import ResultsError, count
from lookahead.jobs.job import JobTotals

if TYPE_CHECKING:
    from lookahead.jobs.job import Estimate
    from lookahead.stats import DecodingStats
    from lookahead.summarization.summarizer import PlainFigures, Summarized, Summary

MAX_TABLE_ROWS = 20
_RAISE = "--max-new-tokens raises it"
_AGAINST_LOOPS = "--repetition-penalty and --no-repeat-ngram-size are against that"


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
        speed = speed_of(totals, time.monotonic() - self._started)
        self.update(self._task, advance=1, speed=speed, accepted=totals.stats.mean_acceptance_length)

    def _show(self, name: str, summary: Summary) -> None:
        if self.as_text:
            self.stop()
            out = console(sys.stdout)
            out.print(Rule(Text(name, "bold"), align="left"))
            show_line(out.file, harmless(summary.text))
            show_line(out.file, Text(describe_summary(summary) + "\n", "dim"))
            self.start()
        if summary.plain is not None and len(self._rows) < MAX_TABLE_ROWS:
            file = name.rpartition("/")[2] or name  # results and headings have the whole name
            self._rows.append(comparison_row(file, summary.stats, summary.plain))

    def conclude(self, totals: JobTotals, *, exact: bool) -> None:
        """Show the figures of the job: on stdout after the summaries, else on stderr."""
        out, seconds = console(sys.stdout if self.as_text else sys.stderr), time.monotonic() - self._started
        if totals.plain is not None:
            total = comparison_row("all", totals.stats, totals.plain) if totals.summarized > 1 else None
            out.print(table(self._rows, total))
        for note in totals.notes:
            say("note", note)
        show_line(out.file, describe_totals(totals, seconds))
        if totals.different:
            say("NOT IDENTICAL", describe_difference(totals, exact=exact))


def describe_summary(summary: Summary) -> str:
    """One line about a summary."""
    parts = f" in {summary.parts} parts" if summary.parts > 1 else ""
    cut = f"; cut at {summary.summary_tokens} tokens; {_RAISE}" if summary.finish_reason == "length" else ""
    loops = f"; it loops: it repeats one phrase to its end; {_AGAINST_LOOPS}" if summary.loops else ""
    return (
        f"{summary.document_tokens} tokens{parts} summarized in {summary.summary_tokens}, "
        f"{_describe_speed(summary.stats, summary.stats.tokens_per_s)}{cut}{loops}"
    )


def speed_of(totals: JobTotals, seconds: float) -> float:
    """Tokens per second of a job that took `seconds` of wall time.

    Wall time counts since documents are decoded together. For one document, or if the job also decoded plainly, it is
    the decoding speed.
    """
    if totals.plain is not None or totals.summarized <= 1 or not seconds:
        return totals.stats.tokens_per_s
    return totals.stats.emitted_tokens / seconds


def describe_totals(totals: JobTotals, seconds: float) -> str:
    """One line about a job that took `seconds`."""
    copied = f", {totals.copied} with the same text as another" if totals.copied else ""
    earlier = f", {totals.earlier} finished before" if totals.earlier else ""
    failed = f", {totals.rejected} failed" if totals.rejected else ""
    skipped = f", {count(totals.skipped, 'file')} skipped" if totals.skipped else ""
    cut = f"; {totals.cut} cut at the token limit, {_RAISE}" if totals.cut else ""
    speed = _describe_speed(totals.stats, speed_of(totals, seconds))
    emitted = f"; {totals.stats.emitted_tokens} tokens at {speed}" if totals.summarized else ""
    verb = "loops: it repeats" if totals.loops == 1 else "loop: they repeat"
    loops = f"; {totals.loops} {verb} one phrase to the end; {_AGAINST_LOOPS}" if totals.loops else ""
    return f"{count(totals.summarized, 'document')} summarized{copied}{earlier}{failed}{skipped}{emitted}{cut}{loops}"


def describe_stop(totals: JobTotals, output: Path | None) -> str:
    """The number of finished summaries of a stopped job, and where they are."""
    finished = count(totals.written + totals.earlier, "finished summary", "finished summaries")
    if output is None:
        return f"{finished} in stdout; a job with --output can be resumed"
    is_device = output.exists() and not output.is_file()
    return f"{finished} in {output}{'' if is_device else '; --resume continues'}"


def describe_failure(error: OSError) -> str:
    """The file that could not be written, and why."""
    name = error.filename2 or error.filename  # filename2 is the new name of a rename
    return f"writing {f'{name} ' if name else ''}failed: {error.strerror or error}"


def describe_changes(error: ResultsError, output: Path | None) -> list[str]:
    """The files of a job that another program changed, in order of detection, and how to continue."""
    changes: list[str] = []
    cause: BaseException | None = error
    while isinstance(cause, ResultsError):
        changes.insert(0, str(cause))
        cause = cause.__context__
    changes[-1] += "" if output is None else "; --resume does the rest"
    return changes


def estimate_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """Names and figures of an estimate."""
    time = "-" if estimate.seconds is None else f"{estimate.seconds:,.1f} s ({estimate.seconds / 3600:,.2f} h)"
    measured = count(estimate.tried, "document")
    if estimate.timed_parts < estimate.tried_parts:
        measured = f"{estimate.timed_parts:,} of {estimate.tried_parts:,} parts of {measured}"
    return [
        ("documents", f"{estimate.documents:,}"),
        ("of them with the same text as another", f"{estimate.copies:,}"),
        ("failed", f"{estimate.failed:,}"),
        ("document tokens", f"{estimate.document_tokens:,}"),
        ("parts", f"{estimate.parts:,}"),
        ("most new tokens", f"{estimate.most_new_tokens:,}"),
        (f"time, from {measured}", time),
    ]


def describe_difference(totals: JobTotals, *, exact: bool) -> str:
    """The documents for which plain decoding gave other tokens, and a possible reason."""
    names = ", ".join(map(str, totals.different))
    half = "half precision rounds by the shape of a batch; --dtype fp32 is exact"
    why = "in fp32 that is a bug, please report it" if exact else half
    return f"plain decoding wrote other tokens for {names}; {why}"


def comparison_row(name: str, stats: DecodingStats, plain: PlainFigures) -> dict[str, str]:
    """Table cells, by heading, for a document decoded both ways or for all documents."""
    speedup = plain.speedup(stats)
    return {
        "document": name,
        "new\ntokens": str(stats.emitted_tokens),
        "plain\ntokens/s": f"{plain.stats.tokens_per_s:.1f}",
        "lookahead\ntokens/s": f"{stats.tokens_per_s:.1f}",
        "speedup": "-" if speedup is None else f"{speedup:.2f}x",
        "tokens\nper pass": f"{stats.mean_acceptance_length:.2f}",
        "identical": ("yes" if plain.identical else "NO") + (", loops" if plain.loops else ""),
    }


def _describe_speed(stats: DecodingStats, tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f} tokens/s, {stats.mean_acceptance_length:.2f} tokens per pass"
