"""Texts that end an output, and are no part of it."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Cuts a text that comes in pieces at the first of some texts; what may begin one is held back.

    Args:
        stops: The texts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.has_stopped = stops, "", False

    def put(self, piece: str, *, is_last: bool = False) -> str:
        """Take a piece; returns the text that is certain now."""
        if self.has_stopped:
            return ""
        self._held += piece
        ends = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.has_stopped = True
            return self._held[: min(ends)]
        keep = 0 if is_last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop text begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
