"""What a job has to say at its end, as words and rows; drawing them is left to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookahead.stats import DecodingStats
    from lookahead.summarize.comparison import PlainFigures
    from lookahead.summarize.job import Totals
    from lookahead.summarize.summarizer import Summary

COMPARISON_HEADINGS = (
    "document",
    "new\ntokens",
    "plain\ntokens/s",
    "lookahead\ntokens/s",
    "speedup",
    "tokens\nper pass",
    "identical",
)


def describe_speed(stats: DecodingStats) -> str:
    """Speed in words."""
    return f"{stats.tokens_per_s:.1f} tokens/s, {stats.mean_acceptance_length:.2f} tokens per pass"


def describe_summary(summary: Summary) -> str:
    """The figures of one summary, in a line."""
    parts = f" in {summary.parts} parts" if summary.parts > 1 else ""
    return (
        f"{summary.document_tokens} tokens{parts} summarized in {summary.summary_tokens}, "
        f"{describe_speed(summary.stats)}"
    )


def describe_totals(totals: Totals) -> str:
    """What a job did, in a line."""
    failed = f", {totals.rejected} failed" if totals.rejected else ""
    emitted = f"; {totals.stats.emitted_tokens} tokens at {describe_speed(totals.stats)}" if totals.summarized else ""
    return f"{count(totals.summarized, 'document')} summarized{failed}{emitted}"


def describe_stop(totals: Totals, output: Path | None) -> str:
    """What there is of a job that was stopped early."""
    where = "stdout" if output is None else str(output)
    return f"{count(totals.summarized, 'finished summary', 'finished summaries')} in {where}"


def describe_difference(totals: Totals, *, exact: bool) -> str:
    """Which documents plain decoding summarized differently, and what to make of it."""
    names = ", ".join(map(str, totals.different))
    why = (
        "in fp32 that is a bug, please report it"
        if exact
        else "half precision rounds by the shape of a batch; --dtype fp32 is exact"
    )
    return f"plain decoding wrote other tokens for {names}; {why}"


def comparison_row(name: str, stats: DecodingStats, plain: PlainFigures) -> tuple[str, ...]:
    """One row under `COMPARISON_HEADINGS`."""
    speedup = plain.speedup(stats)
    return (
        name,
        str(stats.emitted_tokens),
        f"{plain.tokens_per_s:.1f}",
        f"{stats.tokens_per_s:.1f}",
        "-" if speedup is None else f"{speedup:.2f}x",
        f"{stats.mean_acceptance_length:.2f}",
        "yes" if plain.identical else "NO",
    )


def stats_rows(stats: DecodingStats) -> list[tuple[str, str]]:
    """Every figure of decoding with its name."""
    rows = []
    for name, value in stats.to_dict().items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}: {number}" for key, number in value.items()) or "-"
        rows.append((name, str(value)))
    return rows


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 document`, `2 documents`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
