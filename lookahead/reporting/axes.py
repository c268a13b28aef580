"""Axes: where a figure stands between its ends, where the marks are, and how figures are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 5.0, 10.0)
_WIDE = 100.0  # times the smallest figure that the largest is, from where an axis is logarithmic


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis.

    Attributes:
        low: Its lower end.
        high: Its upper end, above `low`.
        is_log: Whether equal factors are equally far apart; then `low` is above 0.
        least_step: The least from one mark to the next, 1 for what is counted.
    """

    low: float
    high: float
    is_log: bool = False
    least_step: float = 0.0

    def place(self, figure: float) -> float:
        """Where a figure stands, from 0 to 1."""
        if self.is_log:
            return math.log(figure / self.low) / math.log(self.high / self.low)
        return (figure - self.low) / (self.high - self.low)

    def marks(self, most: int = 6) -> list[float]:
        """Round figures to write at the axis."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            every = -(-len(powers) // most)
            return [10.0**power for power in powers][::every]
        step = max(round_step((self.high - self.low) / most), self.least_step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, … and their tenths that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((step * power for step in _STEPS if step * power >= least * (1 - 1e-9)), 10.0 * power)


def scale_from_zero(largest: float) -> Scale:
    """An axis from 0 to a round figure that holds the largest."""
    step = round_step((largest or 1.0) / 5)
    return Scale(0.0, step * max(1, math.ceil(largest / step - 1e-9)))


def scale_of(smallest: float, largest: float) -> Scale:
    """An axis for figures of any size: from 0, or logarithmic between powers of 10 where they differ widely."""
    if smallest > 0 and largest / smallest >= _WIDE:
        return Scale(
            10.0 ** math.floor(math.log10(smallest) + 1e-9), 10.0 ** math.ceil(math.log10(largest) - 1e-9), is_log=True
        )
    return scale_from_zero(largest)


def exact(figure: float | None) -> str:
    """A count or a rounded figure in full: `12,345`, `12.3`, `0.0457`; a dash where there is none."""
    if figure is None:
        return "–"
    if figure == int(figure) or abs(figure) >= 1000:
        return f"{figure:,.0f}"
    return f"{figure:.{2 if abs(figure) >= 1 else 4}f}".rstrip("0").rstrip(".")


def brief(figure: float) -> str:
    """A figure at an axis: `0.5`, `250`, `1.5k`, `2M`."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(figure) >= size:
            return f"{figure / size:.4g}{suffix}"
    return f"{figure:.4g}"


def duration(seconds: float | None) -> str:
    """Seconds in the units that one would say them in; a dash where there are none."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"
