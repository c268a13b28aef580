"""What the command line shows: progress, errors, summaries to read, tables, and the exit status of an error."""

from __future__ import annotations

import functools
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lookahead.errors import LookaheadError
from lookahead.jobs import job_figures as report
from lookahead.models.loading import convert_once, is_gguf, locate_model

if TYPE_CHECKING:
    from lookahead.documents.decode_text import DocumentId, Reject
    from lookahead.jobs.job import JobTotals
    from lookahead.jobs.job_options import ModelOptions
    from lookahead.models.loading import LoadedModel
    from lookahead.pools.build_pool import PoolTotals
    from lookahead.summarization.summarizer import Summarized

MOST_TABLE_ROWS = 20
MOST_SKIPPED = 20  # files that are named
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line breaks

_SILENT_S = 1.0  # seconds of preparation that are not worth a line
_COMPILING = "compiling what drafts and attends, once after an install: about 20 s"
_MEASURING = "measuring what steps cost, once for this model on this machine"


def console(file: TextIO) -> Console:
    """A console that prints text as it is."""
    return Console(file=file, highlight=False, markup=False, emoji=False)


def harmless(text: str) -> str:
    """Text of others without what commands a terminal."""
    return _CONTROL.sub("\ufffd", text)


def say(kind: str, message: str) -> None:
    """Print one line to stderr."""
    line = Text.assemble((f"{kind}: ", "bold red"), harmless(" ".join(message.splitlines())))
    console(sys.stderr).print(line, soft_wrap=True)


def say_skipped(files: Sequence[str]) -> None:
    """Name the files of folders that are not read, one a line."""
    for file in files[:MOST_SKIPPED]:
        say("skipped", file)
    if len(files) > MOST_SKIPPED:
        say("skipped", f"{len(files) - MOST_SKIPPED:,} more files, {len(files):,} in all")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn what goes wrong before the work, or stops it, into one line on stderr and an exit status.

    What is warned of is one line too, without the place in the code.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say("warning", str(message))
            yield
    except LookaheadError as error:
        say("error", str(error))
        raise typer.Exit(2) from error
    except BrokenPipeError:  # typer knows what to do with a closed stdout
        raise
    except OSError as error:
        # A file is told by its name and was refused before the work; without a name it is stdout.
        say("error", f"{error.filename or 'writing failed'}: {error.strerror or error}")
        raise typer.Exit(2 if error.filename else 1) from error
    except KeyboardInterrupt as error:
        say("interrupted", "stopped before anything was finished")
        raise typer.Exit(130) from error
    finally:
        _end_compilation()


@functools.cache
def watch_compilation() -> Any:
    """Say in one line that code is being compiled, once that has taken a second; later processes load it from disk.

    It lasts as long as the command (`usage_errors`).

    Returns:
        A listener of Numba's that knows the seconds `spent` so far.
    """
    from numba.core import event

    class Notice(event.Listener):
        def __init__(self) -> None:
            self.spent, self._depth, self._since, self._told = 0.0, 0, 0.0, False

        def on_start(self, event: Any) -> None:
            """Of one function; it compiles those it calls on the way."""
            if self._depth == 0:
                self._since = time.perf_counter()
            self._depth += 1
            if not self._told and self.spent + time.perf_counter() - self._since > _SILENT_S:
                self._told = True
                say("note", _COMPILING)

        def on_end(self, event: Any) -> None:
            """Count the seconds of the outermost one."""
            self._depth -= 1
            if self._depth == 0:
                self.spent += time.perf_counter() - self._since

    notice = Notice()
    event.register("numba:compile", notice)
    return notice


def _end_compilation() -> None:
    """Take the listener away, where a command has one: the next command in this process gets its own."""
    if watch_compilation.cache_info().currsize:
        from numba.core import event

        event.unregister("numba:compile", watch_compilation())
        watch_compilation.cache_clear()


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str] | None = None) -> Table:
    """A table with its figures to the right, and a last row set apart."""
    drawn = Table(show_header=any(headings), show_footer=total is not None, box=SIMPLE)
    for i, heading in enumerate(headings):
        figures = i > 0
        footer = total[i] if total else ""
        drawn.add_column(heading, footer, justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _bar(words: str, *, shown: bool) -> Progress:
    """A bar on stderr, where that is a terminal, with some words about the task behind its numbers."""
    stderr = console(sys.stderr)
    return Progress(
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(words),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        redirect_stdout=False,  # rich would send what is printed meanwhile to stderr
        disable=not (shown and stderr.is_terminal),
    )


def load(options: ModelOptions, model: str | None = None, *, measures_costs: bool = True) -> LoadedModel:
    """Load a model and what its steps cost, with a status line for the seconds that takes.

    Args:
        options: Which model, and how; it is looked for before torch is imported.
        model: Another model, loaded in the same way.
        measures_costs: Whether costs that no file holds are measured quickly, and kept.
    """
    name = options.model if model is None else model
    location, _ = locate_model(name)
    from lookahead.generation.step_costs import load_costs, prepare_costs
    from lookahead.models import loading

    compilation = watch_compilation()
    out = console(sys.stderr)
    with out.status("loading the model") as status:
        loading.prepare_process(options.threads)
        convert(location)
        loaded = loading.load(name, dtype=options.dtype, device=options.device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if measures_costs:
                status.update(_MEASURING)
                started, known = time.perf_counter() - compilation.spent, False
                try:
                    known = prepare_costs(loaded.model)
                except OSError as error:
                    warnings.warn(f"step costs are not kept for the next time: {error}", stacklevel=1)
                seconds = time.perf_counter() - compilation.spent - started
                if known and seconds > _SILENT_S and not out.is_terminal:
                    say("note", f"{_MEASURING}: {seconds:.1f} s")
            else:
                load_costs(loaded.model)
    for warning in caught:
        say("warning", str(warning.message))
    return loaded


def convert(location: str) -> None:
    """Convert what was located, where it is a GGUF file and this was not done before, and say so."""
    if is_gguf(location):
        convert_once(Path(location), lambda line: say("note", line))


@contextmanager
def reading() -> Iterator[Callable[[int, int], None]]:
    """A line on stderr, where that is a terminal, that tells how far a prompt is read, and goes when it is.

    Call what this gives with equal numbers before anything is printed.
    """
    status = console(sys.stderr).status("reading the prompt")

    def show(done: int, tokens: int) -> None:
        if done < tokens:
            status.update(f"reading the prompt: {done:,} of {tokens:,} tokens")
        else:
            status.stop()

    with status:
        yield show


class Display:
    """Shows a job: progress and errors on stderr, and on stdout the summaries to read, if they are wanted.

    Args:
        total: Documents to come, `None` if unknown.
        as_text: Whether to show the summaries.
        with_bar: Whether to show the bar, where stderr is a terminal.

    Attributes:
        progress: The bar; it is there while this is entered.
    """

    def __init__(self, total: int | None, *, as_text: bool, with_bar: bool) -> None:
        self.as_text = as_text
        self._rows: list[tuple[str, ...]] = []
        self._started = time.monotonic()
        words = "documents, {task.fields[speed]:.0f} tokens/s, {task.fields[accepted]:.2f} a pass{task.fields[read]}"
        self.progress = _bar(words, shown=with_bar)
        self._task = self.progress.add_task("", total=total, speed=0.0, accepted=0.0, read="")

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Take the progress bar away while something is printed."""
        self.progress.stop()
        yield
        self.progress.start()

    def say(self, kind: str, message: str) -> None:
        """Print one line to stderr."""
        with self._aside():
            say(kind, message)

    def reading(self, done: int, tokens: int) -> None:
        """Show how far a prompt is read."""
        read = f", reading: {done:,} of {tokens:,} tokens" if done < tokens else ""
        self.progress.update(self._task, read=read)

    def summarized(self, done: Summarized, totals: JobTotals) -> None:
        """Show a summary, and how far the job is."""
        name, summary = harmless(str(done.document.id)), done.summary
        if self.as_text:
            with self._aside():
                out = console(sys.stdout)
                out.print(Rule(Text(name, "bold"), align="left"))
                out.print(Text(harmless(summary.text)))
                out.print(Text(report.describe_summary(summary) + "\n", "dim"))
        if summary.plain is not None and len(self._rows) < MOST_TABLE_ROWS:
            self._rows.append(report.comparison_row(name, summary.stats, summary.plain))
        speed = report.speed_of(totals, time.monotonic() - self._started)
        accepted = totals.stats.mean_acceptance_length
        self.progress.update(self._task, advance=1, speed=speed, accepted=accepted)

    def passed(self, name: DocumentId, totals: JobTotals) -> None:
        """Show that a document needed no work."""
        self.progress.update(self._task, advance=1)

    def rejected(self, reject: Reject, totals: JobTotals) -> None:
        """Show why a document failed."""
        self.say("error", reject.error)
        self.progress.update(self._task, advance=1)

    def conclude(self, totals: JobTotals, *, exact: bool) -> None:
        """Show how the job went: after the summaries where they are shown, else on stderr."""
        out, seconds = console(sys.stdout if self.as_text else sys.stderr), time.monotonic() - self._started
        if totals.plain is not None:
            everything = report.comparison_row("all", totals.stats, totals.plain)
            out.print(table(report.COMPARISON_HEADINGS, self._rows, everything if totals.summarized > 1 else None))
        for note in totals.notes:
            say("note", note)
        if totals.written > 1 and not self.as_text:
            out.print(table(("", ""), report.totals_rows(totals, seconds)))
        out.print(report.describe_totals(totals, seconds), soft_wrap=True)
        if totals.different:
            say("NOT IDENTICAL", report.describe_difference(totals, exact=exact))


class PoolDisplay:
    """Shows a pool in the making: progress and errors on stderr.

    Args:
        total: Documents to come, `None` if unknown.

    Attributes:
        progress: The bar; it is there while this is entered.
    """

    def __init__(self, total: int | None) -> None:
        self.progress = _bar("documents, {task.fields[tokens]:,} tokens{task.fields[stage]}", shown=True)
        self._task = self.progress.add_task("", total=total, tokens=0, stage="")

    def taken(self, totals: PoolTotals) -> None:
        """Show how many documents and tokens were taken."""
        self.progress.update(self._task, advance=1, tokens=totals.tokens)

    def rejected(self, reject: Reject) -> None:
        """Show why a document was not."""
        self.progress.stop()
        say("error", reject.error)
        self.progress.start()
        self.progress.update(self._task, advance=1)

    def writing(self) -> None:
        """Show that the pool is made of them now."""
        self.progress.update(self._task, stage=", indexing and writing")
