"""Texts that end an output."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Cuts a stream of text at the first stop text; a possible beginning of one is held back.

    Args:
        stops: The stop texts.
        keeps: Whether the stop text is part of the output.

    Attributes:
        stop: The one that was found.
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        self._stops, self._keeps, self._held = stops, keeps, ""
        self.stop: str | None = None

    def put(self, piece: str, *, is_last: bool = False) -> str:
        """Add a piece; returns the text that is final."""
        if self.stop is not None:
            return ""
        self._held += piece
        ends = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            end, self.stop = min(ends)
            return self._held[: end + len(self.stop) * self._keeps]
        keep = 0 if is_last else max((overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop text starts with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
