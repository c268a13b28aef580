"""From files of results to a file with the page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lookahead.errors import ConfigError, DocumentError
from lookahead.reporting.aggregate import Failures, Tally
from lookahead.reporting.page import MARK, render_page
from lookahead.reporting.read_results import Reading, read_rejects, read_results
from lookahead.reporting.record import Line, read_line
from lookahead.utils.atomic import write_atomically

_HEAD = 1000  # bytes of a page in which its mark stands


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """A page that was written.

    Attributes:
        path: Where.
        documents: Documents it tells of.
        failed: Documents that failed, `None` where no file tells.
        problems: What could not be read, in words.
    """

    path: Path
    documents: int
    failed: int | None
    problems: list[str]


def write_report(results: Path, output: Path | None = None, rejects: Path | None = None) -> WrittenReport:
    """Read the results of `lookahead summarize` and write a page about them, as a whole or not at all.

    Args:
        results: JSON lines, or Parquet where the name ends in `.parquet`.
        output: The page; `None` is `RESULTS.report.html`. An earlier report is replaced, another file never.
        rejects: Documents that failed; `None` is `RESULTS.rejects.jsonl`, if it is there.

    Raises:
        ConfigError: `output` cannot be written, or would destroy a file.
        DocumentError: `results` is empty or holds something else.
        OSError: A file cannot be read; its name is in the error.
    """
    page = Path(f"{results}.report.html") if output is None else output
    _check_page(page)
    readings = {results.name: Reading()}
    tally = Tally(_lines(results, readings[results.name]))
    beside = Path(f"{results}.rejects.jsonl") if rejects is None else rejects
    failures = None
    if rejects is not None or beside.exists():
        reading = readings.setdefault(beside.name, Reading())
        failures = Failures()
        for record in read_rejects(beside, reading):
            failures.add(record)
    if not tally.documents and not (failures and failures.total):
        raise DocumentError(f"{results} is empty: there are no results in it to report")
    text = render_page(tally, failures, name=results.name, rejects_name=beside.name, readings=readings)
    try:
        write_atomically(page, text)
    except OSError as error:
        raise ConfigError(f"output {page} cannot be written: {error.strerror}") from error
    problems = [f"{name}: {reading.describe()}" for name, reading in readings.items() if reading.malformed]
    return WrittenReport(page, tally.documents, failures.total if failures else None, problems)


def _lines(path: Path, reading: Reading) -> Iterator[Line]:
    """The lines of a file of results."""
    return (read_line(record) for record in read_results(path, reading))


def _check_page(path: Path) -> None:
    """Refuse, before the work, a page that could not be written after it or would destroy a file."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"output must be a file in a folder that exists, got {str(path)!r}")
    if path.exists():
        if not path.is_file() or not _is_report(path):
            raise ConfigError(f"output {path} exists and is no report; name another file with --output")
    elif not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"output {path} cannot be written: permission denied")


def _is_report(path: Path) -> bool:
    """Whether a file is a page that was made here."""
    with path.open("rb") as file:
        return MARK.encode() in file.read(_HEAD)
