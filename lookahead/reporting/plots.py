"""The plots of a report, each with a line of words and figures; what the results do not hold is said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lookahead.reporting.aggregate import Figures, Tally
from lookahead.reporting.axes import Scale, exact, scale_from_zero
from lookahead.reporting.charts import MOST_POINTS, Axes, Bars, bar, bars_of, histogram, scatter, series
from lookahead.reporting.formatting import shown

_STRETCHES = 60  # points of a line over the job
_LEAST = 5  # documents, of which a plot shows more than words do


@dataclass(frozen=True, slots=True)
class Card:
    """A plot on the page.

    Attributes:
        title: What it shows.
        picture: The plot, as HTML; empty where there is nothing to plot.
        caption: What to know about it, as HTML.
    """

    title: str
    picture: str
    caption: str


def all_plots(tally: Tally) -> list[Card]:
    """Every plot of a job."""
    return [
        _speedups(tally),
        _acceptance_lengths(tally),
        _sources(tally),
        _speed_over_the_job(tally),
        _time(tally, "document_tokens", "Time by length of the document", "tokens of the document"),
        _time(tally, "summary_tokens", "Time by length of the summary", "tokens of the summary"),
    ]


def _missing(title: str, why: str) -> Card:
    """The place of a plot that cannot be made."""
    return Card(title, "", f"Not in these results: {why}.")


def _speedups(tally: Tally) -> Card:
    """How many times faster each document was."""
    title = "Speedup over plain decoding"
    (figures,) = tally.known("speedup")
    if not figures.size:
        return _missing(title, "they were made without <code>--compare</code>")
    bars, median = bars_of(figures), float(np.median(figures))
    lines = [("median", median), ("plain", 1.0)]
    picture = _if_many(figures, histogram(title, bars, "times as many tokens a second", lines=lines))
    slower = int((figures < 1).sum())
    median_key, plain_key = (f'<span class="key {name}"></span>' if picture else "" for name in ("median", "plain"))
    caption = (
        f"{median_key}median {exact(median)}×, from {exact(figures.min())}× to {exact(figures.max())}×; "
        f"{plain_key}1× is plain decoding, {slower:,} of {figures.size:,} documents were slower."
    )
    if tally.speedup is not None:
        caption += f" All of them together: {exact(tally.speedup)}×."
    return Card(title, picture, caption + _tail(bars, picture))


def _acceptance_lengths(tally: Tally) -> Card:
    """How many tokens a pass gave, by document."""
    title = "Tokens per pass"
    (figures,) = tally.known("acceptance_length")
    if not figures.size:
        return _missing(title, "no line has a mean acceptance length")
    bars, median = bars_of(figures), float(np.median(figures))
    lines = [("median", median)]
    picture = _if_many(figures, histogram(title, bars, "mean acceptance length of a document", lines=lines))
    median_key = '<span class="key median"></span>' if picture else ""
    span = f"from {exact(figures.min())} to {exact(figures.max())}"
    caption = f"{median_key}median {exact(median)}, {span}; plain decoding has 1."
    overall = tally.ratio("decoded", "forwards")
    if overall is not None:
        caption += f" All passes together: {exact(overall)}."
    return Card(title, picture, caption + _tail(bars, picture))


def _if_many(figures: Figures, picture: str) -> str:
    """A histogram of so many figures, or nothing where there is nothing to see in it."""
    return picture if figures.size >= _LEAST and np.unique(figures).size > 1 else ""


def _tail(bars: Bars, picture: str) -> str:
    """What the last bar of a histogram holds beyond its end."""
    if not (picture and bars.beyond):
        return ""
    return f" The last bar counts {bars.beyond:,} documents above {exact(float(bars.edges[-1]))} too."


def _sources(tally: Tally) -> Card:
    """Which drafts were accepted."""
    title = "Acceptance by source of the drafts"
    drafted = {name: figures for name, figures in tally.sources.items() if figures.drafted}
    if not drafted:
        return _missing(title, "no line tells what was drafted")
    rows = []
    for name, figures in sorted(drafted.items(), key=lambda item: -item[1].drafted):
        share, expected = figures.accepted / figures.drafted, figures.expected / figures.drafted
        rows.append(
            f"<tr><th>{shown(name)}</th><td class='figures'>{exact(figures.accepted)} of {exact(figures.drafted)}</td>"
            f"<td>{share:.1%}</td><td class='wide'>{bar(share, expected or None)}</td></tr>"
        )
    picture = f"<table><tr><th></th><th>accepted</th><th>rate</th><th></th></tr>{''.join(rows)}</table>"
    caption = (
        'Draft tokens that were emitted, of those the model verified; <span class="key mark"></span> what the source '
        "expected. A token that two sources offered counts for both."
    )
    return Card(title, picture, caption)


def _speed_over_the_job(tally: Tally) -> Card:
    """Tokens a second, along the file."""
    title = "Tokens per second over the job"
    ours = _stretches(tally.column("decoded"), tally.column("decode_s"))
    if ours is None:
        return _missing(title, "no line tells how long decoding took")
    plain = _stretches(tally.column("plain_decoded"), tally.column("plain_decode_s"))
    speeds = [ours[1], *([plain[1]] if plain else [])]
    axes = Axes(
        Scale(0.0, float(max(tally.documents, 2)), least_step=1.0),
        scale_from_zero(max(float(each.max()) for each in speeds)),
        "documents, in the order of the file",
        "tokens per second",
    )
    lines = [("ours", *ours)] + ([("plain-line", *plain)] if plain else [])
    caption = '<span class="key ours"></span>lookahead'
    if plain:
        caption += ', <span class="key plain-line"></span>plain decoding of the same documents'
    many = -(-int(np.isfinite(tally.column("decode_s")).sum()) // _STRETCHES)
    each = "each document" if many == 1 else f"about {many:,} documents in a row"
    shared = "" if plain else " The seconds of a document were spent on those decoded beside it too."
    return Card(title, series(title, axes, lines), f"{caption}: of {each}, prefill left out.{shared}")


def _stretches(decoded: Figures, seconds: Figures) -> tuple[Figures, Figures] | None:
    """Tokens a second of documents in a row: the middle of each stretch along the file, and its speed."""
    known = np.flatnonzero(np.isfinite(decoded) & np.isfinite(seconds) & (seconds > 0))
    if not known.size:
        return None
    parts = np.array_split(known, min(_STRETCHES, known.size))
    speeds = np.array([decoded[part].sum() / seconds[part].sum() for part in parts])
    return np.array([part.mean() + 1 for part in parts]), speeds


def _time(tally: Tally, column: str, title: str, name: str) -> Card:
    """How long documents took, by a length."""
    lengths, seconds = tally.known(column, "seconds")
    if not lengths.size:
        return _missing(title, "no line tells both the tokens and the seconds")
    whole = np.isfinite(tally.column(column)) & np.isfinite(tally.column("seconds"))
    names = [each for each, is_whole in zip(tally.names, whole.tolist(), strict=False) if is_whole]
    if lengths.size > MOST_POINTS:
        caption = f"{lengths.size:,} documents, binned: the stronger the colour of a cell, the more of them."
    else:
        caption = "A point for each document."
    caption += " Seconds with lookahead, prefill included, parts of long documents added up."
    return Card(title, scatter(title, lengths, seconds, names, name, "seconds"), caption)
