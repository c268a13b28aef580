"""The trace of a decoding as rows of tables and as an HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lookahead.reporting.charts import render

if TYPE_CHECKING:
    from lookahead import Trace


def step_rows(trace: Trace) -> list[dict[str, str]]:
    """A row for each step, with cells by heading."""
    return [
        {
            "step": str(number),
            "drafted": str(step.drafted),
            "expected": f"{step.expected:.2f}",
            "accepted": str(step.accepted),
            "ms": f"{1e3 * step.seconds:.2f}",
        }
        for number, step in enumerate(trace.steps)
    ]


def source_rows(trace: Trace) -> list[dict[str, str]]:
    """A row for each proposer that drafted, and a row of sums, with cells by heading."""
    stats = trace.stats
    drafted, expected, accepted = stats.drafted_by_source, stats.expected_by_source, stats.accepted_by_source
    rows = [
        (name, stats.forwards_by_source[name], drafted[name], expected[name], accepted[name], error)
        for name, error in stats.calibration_error_by_source.items()
        if drafted[name]
    ]
    sums = stats.drafted_tokens, stats.expected_tokens, stats.accepted_tokens
    rows.append(("all", stats.target_forwards, *sums, stats.calibration_error))
    headings = ("source", "passes", "drafted", "expected", "accepted", "calibration error")
    cells = [(name, str(n), str(d), f"{e:.1f}", str(a), f"{x:+.3f}") for name, n, d, e, a, x in rows]
    return [dict(zip(headings, row, strict=True)) for row in cells]


def total_line(trace: Trace) -> str:
    """One line with the totals of a trace."""
    stats, plain = trace.stats, trace.plain
    compared = ""
    if plain is not None and plain.tokens_per_s > 0.0:
        factor = stats.tokens_per_s / plain.tokens_per_s
        compared = f" ({factor:.2f}x of {plain.tokens_per_s:.1f} tokens/s without drafts)"
    return (
        f"{stats.emitted_tokens} tokens from {stats.target_forwards} passes and the prefill, "
        f"{stats.mean_acceptance_length:.2f} tokens per pass, {stats.tokens_per_s:.1f} tokens/s{compared}; "
        f"{stats.drafted_tokens} drafted, {stats.expected_tokens:.1f} expected and {stats.accepted_tokens} accepted"
    )


def render_trace(trace: Trace) -> str:
    """A self-contained HTML page: the text coloured by source, all steps, and the totals."""
    sources, steps = source_rows(trace), step_rows(trace)
    return render("trace.html.j2", trace=trace, total=total_line(trace), source_rows=sources, step_rows=steps)
