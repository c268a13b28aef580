"""The commands that summarize documents and show the results as an HTML page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import typer

from lookahead.cli.job_display import (
    JobDisplay,
    describe_changes,
    describe_failure,
    describe_stop,
    estimate_rows,
)
from lookahead.cli.job_options import JobOptions
from lookahead.cli.options import option
from lookahead.cli.terminal import (
    console,
    find_sources,
    load,
    memory_file_saved_at_exit,
    raise_on_signals,
    say,
    show_line,
    status_of,
    table,
    tell_if_demonstration,
)
from lookahead.documents.byte_sources import MEGABYTE
from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.readers import count_documents, read_documents
from lookahead.errors import ClusterError, ConfigError, ResultsError, count
from lookahead.jobs.identity import JobIdentity
from lookahead.jobs.job import JobTotals, estimate_job, run_job
from lookahead.jobs.journal import OutputPaths
from lookahead.jobs.line_file import print_line

if TYPE_CHECKING:
    from lookahead.jobs.identity import JobSettings
    from lookahead.jobs.job import SummarizeAll
    from lookahead.jobs.worker_pool import WorkerPool
    from lookahead.summarization.summarizer import Summarizer


def summarize(options: JobOptions) -> None:
    """Summarize documents of any length.

    A document longer than the model's context is cut between sections or sentences. Its parts are summarized, and then
    their summaries together. With --refine each part is read with the summary so far. A document that cannot be read is
    reported and goes to the rejects.

    With --output every finished summary is on the disk at once. After a kill or a power failure, the same command with
    --resume does the rest. At the end the lines are in the order of the inputs.

    A summary that repeats one phrase to its end is flagged as a loop. Most summaries of the default model would loop,
    so it gets --no-repeat-ngram-size 8 unless you pass that option or --repetition-penalty; 0 turns it off. Any other
    model follows its own generation configuration.

    For example:

      lookahead summarize article.txt --compare
      lookahead summarize article.txt 'notes/*.md' -o summaries.jsonl
      lookahead summarize docs/ s3://bucket/more.parquet -o out.parquet --resume
      cat article.txt | lookahead summarize -
      lookahead summarize docs.jsonl --text-field body -o out.jsonl
      lookahead summarize -t job.toml --dry-run

    Exit status: 0 all documents are summarized; 1 a document failed, a file could not be written or was changed by
    another program, or --compare found a difference in fp32; 2 an argument is wrong, and nothing was written; 130,
    143 or 129 ended by Ctrl-C, SIGTERM or a closed terminal, and finished summaries are kept.
    """
    inputs = options.inputs
    if not inputs:
        raise ConfigError("no input: name files, folders or URLs, or - for stdin")
    settings = options.settings()
    options.check()
    paths = OutputPaths(options.output, options.rejects, options.overwrite, options.resume, options.retry_rejects)
    rejects = [] if paths.rejects is None else [paths.rejects]  # the other files of a job are known by its manifest
    fields = {name: getattr(options, name) for name in ("field", "id_field", "prediction_field")}
    sources, skipped = find_sources(inputs, rejects, **fields)
    if not options.dry_run:
        paths.check(sources)
    limit = int(options.max_document_mb * MEGABYTE)
    documents = islice(read_documents(sources, limit=limit), options.limit)
    with ExitStack() as stack:
        if options.ray:
            pool = stack.enter_context(_worker_pool(options, settings))
            summarize_all: SummarizeAll = pool.summarize_all
            identity, notes = pool.wait_ready(), pool.notes
        else:
            loaded = load(options)
            if not options.dry_run:
                stack.enter_context(memory_file_saved_at_exit(options, loaded.model))
            summarizer = settings.summarizer(loaded)
            summarize_all = partial(summarizer.summarize_all, rows=settings.rows)
            identity, notes = JobIdentity.of(settings, *loaded), list[str]()
            with console(sys.stderr).status("warming up"):
                summarizer.warm_up()
            if options.dry_run:
                raise typer.Exit(_estimate(options, documents, summarizer))
        tell_if_demonstration(options.model)
        count = count_documents(sources)
        total = min((number for number in (count, options.limit) if number is not None), default=None)
        is_stdout, is_text = options.output is None, _prints_text(options)
        shows_bar = not is_stdout or is_text or not sys.stdout.isatty()
        display = JobDisplay(total if count is not None else None, as_text=is_stdout and is_text, with_bar=shows_bar)
        if not options.ray:
            summarizer.on_prefill, summarizer.on_progress = display.reading, display.parts
        totals = JobTotals(skipped=skipped, notes=notes)
        run = partial(run_job, documents, summarize_all, paths, identity, totals=totals, is_part=total != count)
        status = _run(run, options, totals, display, is_exact=identity.dtype == "float32")
    raise typer.Exit(status)


def _prints_text(options: JobOptions) -> bool:
    """Whether stdout gets text, not JSON."""
    is_chosen = options.as_json or options.format != "auto"
    return options.format == "text" if is_chosen else sys.stdout.isatty()


@contextmanager
def _worker_pool(options: JobOptions, settings: JobSettings) -> Iterator[WorkerPool]:
    """Workers on a Ray cluster while the context lasts, the first of them ready."""
    from lookahead.jobs.worker_pool import OwnStdout, WorkerPool, connect, plan_workers

    settings = options.for_workers(settings)
    status = console(sys.stderr).status("connecting to Ray")
    with redirect_stdout(cast(TextIO, OwnStdout(sys.stdout))), status, connect(options.ray_address) as ray:
        workers, threads, gpus = plan_workers(ray, options.workers, options.threads, options.device)
        with WorkerPool(ray, replace(settings, threads=threads), workers, gpus) as pool:
            status.update(f"waiting for the first of {count(workers, 'worker')}")
            pool.wait_ready()
            status.stop()
            raise_on_signals()  # Ray has its own handler
            yield pool


def _estimate(options: JobOptions, documents: Iterator[Document | Reject], summarizer: Summarizer) -> int:
    """Print what the job would take; returns the exit status."""
    with console(sys.stderr).status("counting"):
        summarize_all = partial(summarizer.summarize_all, rows=options.rows)
        estimate = estimate_job(documents, summarizer.fitter, summarize_all, seed=options.seed)
    if _prints_text(options):
        console(sys.stdout).print(table(estimate_rows(estimate)))
    else:
        print(json.dumps(asdict(estimate)))
    return 1 if estimate.failed else 0


def _run(
    run: Callable[..., None],
    options: JobOptions,
    totals: JobTotals,
    display: JobDisplay,
    *,
    is_exact: bool,
) -> int:
    """Run a job and show it; returns the exit status."""
    with display:
        try:
            run(observer=display, shown=None if display.as_text else print_line)
        except ResultsError as error:
            for what in describe_changes(error, options.output):
                say("error", what)
            return 1
        except (KeyboardInterrupt, ClusterError, OSError) as error:
            stopped = describe_stop(totals, OutputPaths(options.output).running)
            if isinstance(error, KeyboardInterrupt):
                say("interrupted", stopped)
                return status_of(error)
            if not isinstance(error, BrokenPipeError):  # a reader such as `head` has seen enough
                what = describe_failure(error) if isinstance(error, OSError) else str(error)
                say("error", f"{what}; {stopped}")
            return 1
    display.conclude(totals, exact=is_exact)
    return 1 if totals.rejected or (totals.different and is_exact) else 0


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    results: Path = option(
        help="The output of 'lookahead summarize -o RESULTS': JSON lines, or .parquet.",
        argument=True,
        metavar="RESULTS",
    )
    output: Path | None = option(
        None, "File of the page. (default: RESULTS.report.html)", "--output", "-o", metavar="PAGE"
    )
    rejects: Path | None = option(None, "File of documents that failed. (default: RESULTS.rejects.jsonl)")


def report(options: ReportOptions) -> None:
    """Show the results of a job as one HTML page.

    The page shows speedups, acceptance by source, tokens per pass, speed over the job, failures by reason, totals, and
    the summaries of the documents that took longest or gained most and least. It is one file and needs no network.
    Missing figures are left out, and malformed lines are named. The page can be made while the job runs. An earlier
    report is replaced, but no other file.

    For example:

      lookahead report summaries.jsonl
      lookahead report summaries.jsonl -o report.html

    Exit status: 0 the page is written; 2 there is nothing to report, or a file cannot be read or written.
    """
    from lookahead.reporting.report_page import write_report

    done = write_report(options.results, options.output, options.rejects)
    for problem in done.problems:
        say("warning", problem)
    failed = f"{done.failed:,} failed" if done.failed else "no failures"
    documents = count(done.documents, "document")
    show_line(sys.stderr, f"{documents}, {failed}; written to {done.path}")
