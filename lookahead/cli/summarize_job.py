"""How the command that summarizes runs a job: with a summarizer here or workers on a cluster, and shown as it goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from lookahead.cli.terminal import Display, console
from lookahead.errors import ClusterError, ConfigError, LookaheadError
from lookahead.jobs import job_figures as report

if TYPE_CHECKING:
    from lookahead.documents.decode_text import Document, Reject
    from lookahead.jobs.identity import JobIdentity
    from lookahead.jobs.job import Worker
    from lookahead.jobs.output_location import OutputPaths
    from lookahead.jobs.output_memory import OutputMemory

Ray = Annotated[bool, typer.Option("--ray", help="Let workers on a Ray cluster do it, or several on this machine.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="The cluster: HOST:PORT, auto (on this machine), local (of this job). (default: auto, else local)",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Workers, each with the model. (default: one a GPU, without GPUs one a machine)"
    ),
]


@dataclass(slots=True)
class Staff:
    """Who does a job.

    Attributes:
        worker: Summarizes.
        identity: Tells the job from others.
        rows: Most documents that are summarized together; None leaves it to the worker.
        memory: The earlier outputs that are kept, if they are.
        notes: What there is to say about it at the end.
    """

    worker: Worker
    identity: JobIdentity
    rows: int | None = None
    memory: OutputMemory | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether the model computes in fp32, where plain decoding must give the very same tokens."""
        return self.identity.dtype == "float32"


def full_path(path: str | None) -> str | None:
    """A path on this machine that means the same wherever a worker is; other names as they are."""
    return str(Path(path).expanduser().absolute()) if path is not None and Path(path).expanduser().exists() else path


@contextmanager
def ray_staff(
    address: str | None, workers: int | None, threads: int | None, memory: Path | None, *, model: str, **options: Any
) -> Iterator[Staff]:
    """Workers on a Ray cluster, there until this is left.

    Args:
        address: As `lookahead.jobs.ray_cluster.connect` takes it.
        workers: How many; None decides.
        threads: CPU threads of each; None decides.
        memory: A file for outputs, which workers cannot share.
        model: As the user named it.
        **options: The other `WorkerOptions`.
    """
    from lookahead.jobs.ray_cluster import OwnStdout, connect, plan_workers
    from lookahead.jobs.ray_worker import WorkerOptions
    from lookahead.jobs.ray_workers import Crew
    from lookahead.models.locating import DEFAULT_MODEL, locate_model

    if memory is not None:
        raise ConfigError(
            f"pool {memory} keeps the outputs of one process; with --ray give one of 'lookahead pool build'"
        )
    place, is_local = locate_model(model)
    if is_local:  # the machines of a cluster may have the package in another place, and work in other folders
        place = DEFAULT_MODEL if model == DEFAULT_MODEL else str(Path(place).absolute())
    status = console(sys.stderr).status("connecting to Ray")
    with redirect_stdout(cast(TextIO, OwnStdout(sys.stdout))), status, connect(address) as ray:
        plan = plan_workers(ray, workers, threads, options["device"])
        crew = Crew(ray, WorkerOptions(model=place, name=model, threads=plan.threads, **options), plan)
        with crew:
            status.update(f"waiting for the first of {report.count(plan.workers, 'worker')}")
            identity = crew.introduce().identity
            status.stop()
            yield Staff(crew, identity, notes=crew.notes)


class Runner:
    """Runs a job and shows how it goes.

    Args:
        staff: Who does it.
        paths: Where it writes, checked.
        display: Shows it.
        retry_rejects: Whether documents that failed in an earlier run are tried again.
        is_part: Whether there may be documents in the inputs that it leaves out.
        skipped: Files of folders that are not read.
    """

    def __init__(
        self,
        staff: Staff,
        paths: OutputPaths,
        display: Display,
        *,
        retry_rejects: bool,
        is_part: bool,
        skipped: int = 0,
    ) -> None:
        self._staff, self._paths, self._display = staff, paths, display
        self._retry, self._is_part, self._skipped = retry_rejects, is_part, skipped

    def run(self, documents: Iterator[Document | Reject], *, as_text: bool) -> int:
        """Summarize the documents; the exit status."""
        from lookahead.jobs.job import JobTotals, run_job
        from lookahead.jobs.json_results import JsonLinesStdout
        from lookahead.jobs.output_memory import Remembering

        totals, display, memory = JobTotals(skipped=self._skipped), self._display, self._staff.memory
        with display.progress:
            try:
                run_job(
                    documents,
                    self._staff.worker,
                    self._paths,
                    self._staff.identity,
                    totals=totals,
                    observer=Remembering(memory, display) if memory else display,
                    rows=self._staff.rows,
                    retry_rejects=self._retry,
                    is_part=self._is_part,
                    shown=None if as_text else JsonLinesStdout(),
                )
            except KeyboardInterrupt:
                self._save_memory()
                display.say("interrupted", report.describe_stop(totals, self._paths.results))
                return 130
            except ClusterError as error:
                display.say("error", f"{error}; {report.describe_stop(totals, self._paths.results)}")
                return 1
            except OSError as error:
                if not isinstance(error, BrokenPipeError):  # a reader such as `head` has seen enough
                    done = report.describe_stop(totals, self._paths.results)
                    display.say("error", f"writing failed: {error.strerror}; {done}")
                return 1
        saved = self._save_memory()
        totals.notes += self._staff.notes
        display.conclude(totals, exact=self._staff.exact)
        if saved and memory is not None:
            words = report.describe_memory(str(memory.path), memory.loaded, memory.tokens, totals)
            console(sys.stderr).print(words, soft_wrap=True)
        failed = totals.rejected or (totals.different and self._staff.exact)
        return 1 if failed or not saved else 0

    def _save_memory(self) -> bool:
        """Save what later jobs can draft from, if they are to; whether nothing went wrong."""
        try:
            if self._staff.memory is not None:
                self._staff.memory.save()
        except LookaheadError as error:
            self._display.say("error", str(error))
            return False
        return True
