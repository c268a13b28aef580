"""Small plots as SVG, coloured by the style sheet of the page around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lookahead.reporting.aggregate import Figures
from lookahead.reporting.axes import Scale, brief, exact, round_step, scale_from_zero, scale_of
from lookahead.reporting.formatting import shown

WIDTH, HEIGHT = 420, 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 402, 24, 196  # of the field, in the units of the picture
_BINS = (8, 24)  # about as many bars, or half as many more, of few documents and of many
_TAIL = 100  # figures, from where the largest hundredth of them may be put in one bar
_CELLS = (48, 30)  # of a density
MOST_POINTS = 500
_SHADES = 5


@dataclass(frozen=True, slots=True)
class Axes:
    """The field of a plot.

    Attributes:
        x: The axis below.
        y: The axis at the left.
        x_name: What is on it, with its unit.
        y_name: Likewise.
    """

    x: Scale
    y: Scale
    x_name: str
    y_name: str

    def left(self, figure: float) -> str:
        """The place of a figure from the left of the picture."""
        return _place(_LEFT + (_RIGHT - _LEFT) * self.x.place(figure))

    def top(self, figure: float) -> str:
        """The place of a figure from its top."""
        return _place(_BOTTOM - (_BOTTOM - _TOP) * self.y.place(figure))

    def draw(self, title: str, *shapes: str) -> str:
        """The plot, with what stands in its field."""
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{shown(title)}">']
        for mark in self.y.marks():
            top = self.top(mark)
            parts.append(f'<path class="grid" d="M{_LEFT} {top}H{_RIGHT}"/>')
            parts.append(f'<text class="y" x="{_LEFT - 6}" y="{top}" dy=".35em">{brief(mark)}</text>')
        parts += shapes
        parts.append(f'<path class="axis" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>')
        for mark in self.x.marks():
            left = self.left(mark)
            parts.append(f'<path class="axis" d="M{left} {_BOTTOM}v4"/>')
            parts.append(f'<text class="x" x="{left}" y="{_BOTTOM + 17}">{brief(mark)}</text>')
        parts.append(f'<text x="0" y="11">{shown(self.y_name)}{_log(self.y)}</text>')
        name = f"{shown(self.x_name)}{_log(self.x)}"
        parts.append(f'<text class="x" x="{(_LEFT + _RIGHT) // 2}" y="{HEIGHT - 6}">{name}</text>')
        return "".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram.

    Attributes:
        edges: Ends of the bars, one more than there are bars.
        counts: Figures in each.
        beyond: How many of the last bar's are larger than its upper end.
    """

    edges: Figures
    counts: list[int]
    beyond: int


def bars_of(figures: Figures) -> Bars:
    """Sort figures into bars of a round width; a long tail is counted with the last bar.

    Args:
        figures: One at least.
    """
    low, high = float(figures.min()), float(figures.max())
    if figures.size >= _TAIL and high - low > 2 * (cut := float(np.quantile(figures, 0.99)) - low):
        high = low + cut if cut else high
    about = float(np.clip(2 * figures.size ** (1 / 3), *_BINS))
    width = round_step((high - low) / about / 1.6 or max(abs(low), 1.0) / 10)
    first = math.floor(low / width + 1e-9)
    count = max(1, math.ceil(high / width - 1e-9) - first)
    edges = np.asarray((first + np.arange(count + 1)) * width, np.float64)
    bins = np.clip(np.floor(figures / width + 1e-9).astype(np.int64) - first, 0, count - 1)
    beyond = int((figures > edges[-1] + 1e-9 * width).sum())
    return Bars(edges, [int(n) for n in np.bincount(bins, minlength=count)], beyond)


def histogram(title: str, bars: Bars, x_name: str, *, lines: Sequence[tuple[str, float]] = ()) -> str:
    """A histogram of documents, with lines across: the class and the place of each."""
    ends = [float(bars.edges[0]), float(bars.edges[-1]), *(place for _, place in lines)]
    axes = Axes(Scale(min(ends), max(ends)), _counts(max(bars.counts)), x_name, "documents")
    shapes = []
    for i, count in enumerate(bars.counts):
        if count:
            left, right = float(axes.left(bars.edges[i])), float(axes.left(bars.edges[i + 1]))
            top, width = axes.top(count), max(right - left - 1, 0.5)
            place = f"{exact(bars.edges[i])} to {exact(bars.edges[i + 1])}"
            if bars.beyond and i == len(bars.counts) - 1:
                place = f"{exact(bars.edges[i])} and more"
            shapes.append(
                f'<rect class="bar" x="{left + 0.5:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{_place(_BOTTOM - float(top))}"><title>{place}: {count:,}</title></rect>'
            )
    shapes += [f'<path class="{kind}" d="M{axes.left(place)} {_TOP}V{_BOTTOM}"/>' for kind, place in lines]
    return axes.draw(title, *shapes)


def scatter(title: str, x: Figures, y: Figures, names: Sequence[str], x_name: str, y_name: str) -> str:
    """A point for every document; where there are many, darker cells where there are more of them.

    Args:
        title: For those who do not see the picture.
        x: A figure of each document, one document at least.
        y: Another.
        names: Ids, of the first documents at least; for the points.
        x_name: What `x` is, with its unit.
        y_name: What `y` is.
    """
    axes = Axes(scale_of(x.min(), x.max()), scale_of(y.min(), y.max()), x_name, y_name)
    if x.size <= MOST_POINTS:
        return axes.draw(
            title,
            *(
                f'<circle class="point" cx="{axes.left(a)}" cy="{axes.top(b)}" r="3.5">'
                f"<title>{shown(name)}: {exact(a)}, {exact(b)}</title></circle>"
                for a, b, name in zip(x.tolist(), y.tolist(), names, strict=False)
            ),
        )
    return axes.draw(title, *_cells(axes, x, y))


def series(title: str, axes: Axes, lines: Sequence[tuple[str, Figures, Figures]]) -> str:
    """Lines through points: the class of each, and its figures on both axes."""
    shapes = []
    for kind, xs, ys in lines:
        points = [(axes.left(x), axes.top(y)) for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]
        shapes.append(f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>')
        if len(points) == 1:
            shapes.append(f'<circle class="point" cx="{points[0][0]}" cy="{points[0][1]}" r="3.5"/>')
    return axes.draw(title, *shapes)


def bar(share: float, mark: float | None = None) -> str:
    """A bar that fills a share, from 0 to 1, of its place, with a mark at another."""
    line = "" if mark is None else f'<path class="mark" d="M{_place(100 * min(mark, 1.0))} 0V10"/>'
    return (
        '<svg class="share" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rest" width="100" height="10"/><rect class="bar" width="{_place(100 * min(share, 1.0))}" '
        f'height="10"/>{line}</svg>'
    )


def _cells(axes: Axes, x: Figures, y: Figures) -> list[str]:
    """How many documents are where, as cells of five shades by the logarithm of their number."""
    across, up = _CELLS
    columns = np.clip([int(axes.x.place(each) * across) for each in x.tolist()], 0, across - 1)
    rows = np.clip([int(axes.y.place(each) * up) for each in y.tolist()], 0, up - 1)
    counts = np.bincount(columns * up + rows, minlength=across * up)
    width, height = (_RIGHT - _LEFT) / across, (_BOTTOM - _TOP) / up
    shapes = []
    for cell in np.flatnonzero(counts).tolist():
        column, row, count = cell // up, cell % up, int(counts[cell])
        shade = 1 + int((_SHADES - 1) * math.log(count) / math.log(max(int(counts.max()), 2)))
        shapes.append(
            f'<rect class="shade-{shade}" x="{_place(_LEFT + column * width)}" '
            f'y="{_place(_BOTTOM - (row + 1) * height)}" width="{_place(width)}" height="{_place(height)}">'
            f"<title>{count:,}</title></rect>"
        )
    return shapes


def _counts(largest: int) -> Scale:
    """An axis of whole numbers."""
    return Scale(0.0, scale_from_zero(largest).high if largest >= 5 else float(largest), least_step=1.0)


def _log(scale: Scale) -> str:
    """A word about an axis that is no ordinary one."""
    return ", logarithmic" if scale.is_log else ""


def _place(units: float) -> str:
    """A place in the picture, as short as it may be."""
    return f"{units:.1f}".removesuffix(".0")
