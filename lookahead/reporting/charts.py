"""HTML pages from Jinja2 templates with all values escaped, and charts, drawn as SVG by `charts.html.j2`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray

from lookahead.errors import ConfigError
from lookahead.utils.atomic import check_folder

Values = NDArray[np.float64]

_BINS = (8, 24)  # range of the target number of bins
_TAIL = 100  # number of values from which the largest 1% may share the last bin
_MARK = '<meta name="generator" content="lookahead {}">'  # of the templates
_MARK_WITHIN = 1000  # bytes
# Control characters, lone surrogates and noncharacters are invalid in HTML. Direction marks reorder the text around
# them.
_INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis."""

    low: float
    high: float
    least_step: float = 0.0  # minimum distance of marks, 1 for counts

    def place(self, value: float) -> float:
        """The position of a value, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def marks(self, most: int = 6) -> list[float]:
        """About `most` round values for labels."""
        step = max(round_step((self.high - self.low) / most), self.least_step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of 10 that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((step * power for step in (1.0, 2.0, 5.0) if step * power >= least * (1 - 1e-9)), 10.0 * power)


def scale_from_zero(largest: float, least_step: float = 0.0) -> Scale:
    """A linear axis from 0 to a round value that is not below `largest`."""
    step = max(round_step((largest or 1.0) / 5), least_step)
    return Scale(0.0, step * max(1, math.ceil(largest / step - 1e-9)), least_step=least_step)


def exact(value: float) -> str:
    """A count or a rounded value in full: `12,345`, `12.3`, `0.0457`; a dash for NaN."""
    if math.isnan(value):
        return "–"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{2 if abs(value) >= 1 else 4}f}".rstrip("0").rstrip(".")


def brief(value: float) -> str:
    """An axis label: `0.5`, `250`, `1.5k`, `2M`."""
    power = sum(abs(value) >= size for size in (1e3, 1e6, 1e9, 1e12))
    return f"{value / 1000**power:.4g}{('', 'k', 'M', 'G', 'T')[power]}"


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours; a dash for NaN."""
    if math.isnan(seconds):
        return "–"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


class Bins(NamedTuple):
    """A histogram: `[bins + 1]` edges, the counts, and the number of values above the last edge."""

    edges: Values
    counts: list[int]
    beyond: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A plot of values. Its size and positions are in SVG units, from the top left."""

    WIDTH, HEIGHT = 420, 236
    LEFT, RIGHT, TOP, BOTTOM = 46, 402, 24, 196  # of the axes

    x: Scale
    y: Scale
    x_name: str
    y_name: str
    bins: Bins | None = None  # drawn as bars
    rules: Mapping[str, float] = field(default_factory=dict)  # vertical lines, by style
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)  # by style

    def left(self, value: float) -> float:
        """Horizontal position of a value."""
        return round(self.LEFT + (self.RIGHT - self.LEFT) * self.x.place(value), 1)

    def top(self, value: float) -> float:
        """Vertical position of a value."""
        return round(self.BOTTOM - (self.BOTTOM - self.TOP) * self.y.place(value), 1)


def bin_values(values: Values) -> Bins:
    """A histogram of at least one value, with bins of a round width. The last bin includes a long tail."""
    low, high = float(values.min()), float(values.max())
    if values.size >= _TAIL and high - low > 2 * (cut := float(np.quantile(values, 0.99)) - low):
        high = low + cut if cut else high
    about = float(np.clip(2 * values.size ** (1 / 3), *_BINS))
    width = round_step((high - low) / about / 1.6 or max(abs(low), 1.0) / 10)
    first = math.floor(low / width + 1e-9)
    count = max(1, math.ceil(high / width - 1e-9) - first)
    edges = np.asarray((first + np.arange(count + 1)) * width, np.float64)
    bins = np.clip(np.floor(values / width + 1e-9).astype(np.int64) - first, 0, count - 1)
    beyond = int((values > edges[-1] + 1e-9 * width).sum())
    return Bins(edges, [int(n) for n in np.bincount(bins, minlength=count)], beyond)


_TEMPLATES = Environment(
    loader=PackageLoader("lookahead.reporting"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)
_TEMPLATES.filters |= {function.__name__: function for function in (brief, duration, exact)}
_TEMPLATES.filters |= {"count": "{:,}".format, "percent": "{:.1%}".format}
_TEMPLATES.tests["known"] = math.isfinite


def render(template: str, **values: Any) -> str:
    """Render a template of `templates/`. Text is escaped. Characters that are invalid in HTML become U+FFFD."""
    return _INVALID.sub("\ufffd", _TEMPLATES.get_template(template).render(values))


def check_page(path: Path, option: str, command: str) -> None:
    """Raise a ConfigError, before any work, for a page that cannot be written or replaces a file of another kind."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} must be a file in a folder that exists, got {str(path)!r}")
    if not path.exists():
        try:
            check_folder(path.absolute().parent)
        except OSError as error:
            raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from error
        return
    if path.is_file():
        with path.open("rb") as file:
            if _MARK.format(command).encode() in file.read(_MARK_WITHIN):
                return
    raise ConfigError(f"{option} {path} exists and is not a page of {command}; name another file with --{option}")
