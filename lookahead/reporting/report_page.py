"""The HTML page about a results file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lookahead.errors import ConfigError, DocumentError
from lookahead.reporting import charts
from lookahead.reporting.results_file import Aggregate, Failures, Reading, Result, read_results
from lookahead.utils.atomic import write_atomically

_MAX_REASON_ROWS = 12  # rows of the table of failures
_MAX_SPEED_POINTS = 60  # points of the speed over the job
_LEAST_VALUES = 5  # minimum number of values for a histogram


class WrittenReport(NamedTuple):
    """A written page, the number of summarized and failed documents, and problems with reading the files."""

    path: Path
    documents: int
    failed: int | None  # None without a rejects file
    problems: list[str]


def write_report(results: Path, output: Path | None = None, rejects: Path | None = None) -> WrittenReport:
    """Write an HTML page about the results of `lookahead summarize`, atomically.

    Raises:
        ConfigError: The page cannot be written, or exists and is not a report.
        DocumentError: The file holds no results.
        OSError: A file cannot be read.
    """
    page = Path(f"{results}.report.html") if output is None else output
    charts.check_page(page, "output", "report")
    readings = [Reading(results)]
    aggregate = Aggregate(read_results(readings[0]))
    beside = Path(f"{results}.rejects.jsonl") if rejects is None else rejects
    failures = None
    if rejects is not None or beside.exists():
        readings.append(Reading(beside))
        failures = Failures(readings[1])
    if not aggregate.documents and not (failures and failures.total):
        raise DocumentError(f"{results} is empty: there are no results in it to report")
    problems = [reading.describe() for reading in readings if reading.malformed]
    drafted = [(name, counts) for name, counts in aggregate.sources.items() if counts["drafted"]]
    text = charts.render(
        "report.html.j2",
        name=results.name,
        rejects_name=beside.name,
        problems=problems,
        totals=aggregate,
        failures=failures,
        reasons=failures.count.most_common(_MAX_REASON_ROWS) if failures else [],
        speedups=_distribution(aggregate, "speedup", "times as many tokens a second", {"plain": 1.0}),
        lengths=_distribution(aggregate, "mean_acceptance_length", "mean acceptance length of a document", {}),
        sources=sorted(drafted, key=lambda item: -item[1]["drafted"]),
        job_speed=_job_speed(aggregate),
        document_lists=_document_lists(aggregate),
    )
    try:
        write_atomically(page, text)
    except OSError as error:
        raise ConfigError(f"output {page} cannot be written: {error.strerror}") from error
    return WrittenReport(page, aggregate.documents, failures.total if failures else None, problems)


def _distribution(aggregate: Aggregate, column: str, x_name: str, rules: dict[str, float]) -> dict[str, Any] | None:
    """A column and its histogram, with lines at the median and at `rules`; `None` if no line has a value."""
    (values,) = aggregate.known(column)
    if not values.size:
        return None
    bins, median = charts.bin_values(values), float(np.median(values))
    rules, chart = {"median": median} | rules, None
    if values.size >= _LEAST_VALUES and np.unique(values).size > 1:
        ends = [float(bins.edges[0]), float(bins.edges[-1]), *rules.values()]
        x, y = charts.Scale(min(ends), max(ends)), charts.scale_from_zero(max(bins.counts), least_step=1.0)
        chart = charts.Chart(x=x, y=y, x_name=x_name, y_name="documents", bins=bins, rules=rules)
    return {"values": values, "median": median, "chart": chart, "bins": bins}


def _job_speed(aggregate: Aggregate) -> dict[str, Any] | None:
    """Tokens per second over the course of the file, averaged over `stretch` documents."""
    lines = {}
    for style, prefix in (("ours", ""), ("plain-line", "plain_")):
        decoded, seconds = aggregate.column(f"{prefix}decoded"), aggregate.column(f"{prefix}decode_s")
        if (points := np.flatnonzero(np.isfinite(decoded) & (seconds > 0))).size:
            parts = np.array_split(points, min(_MAX_SPEED_POINTS, points.size))
            lines[style] = [(float(part.mean() + 1), decoded[part].sum() / seconds[part].sum()) for part in parts]
    if "ours" not in lines:
        return None
    chart = charts.Chart(
        x=charts.Scale(0.0, float(max(aggregate.documents, 2)), least_step=1.0),
        y=charts.scale_from_zero(max(speed for line in lines.values() for _, speed in line)),
        x_name="documents, in the order of the file",
        y_name="tokens per second",
        lines=lines,
    )
    return {"chart": chart, "stretch": -(-aggregate.count("decode_s") // _MAX_SPEED_POINTS)}


def _document_lists(aggregate: Aggregate) -> list[tuple[str, list[Result]]]:
    ranked = aggregate.ranked
    column, what = ("speedup", "speedup") if ranked["speedup", 1] else ("mean_acceptance_length", "tokens per pass")
    best = ranked[column, -1][: (aggregate.count(column) + 1) // 2]
    worst = [
        document for document in ranked[column, 1] if not any(document is other for other in best)
    ]  # none is in both lists
    lists = {"Took longest": ranked["seconds", -1], f"Gained most, by {what}": best, f"Gained least, by {what}": worst}
    return [(title, results) for title, results in lists.items() if results]
