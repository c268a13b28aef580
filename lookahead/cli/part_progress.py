"""How far a long document is, and about how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lookahead.cli.terminal import JobDisplay

if TYPE_CHECKING:
    from lookahead.documents.decode_text import DocumentId, Reject
    from lookahead.jobs.job import JobTotals
    from lookahead.summarization.pipeline import Progress
    from lookahead.summarization.summarizer import Summarized


class PartProgress:
    """Words about the document that is being summarized: the part, what is read of it, and an estimate.

    The estimate takes every output for as much work as another, and reading a prompt for as much as writing behind it.

    Args:
        clock: The time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Forget what was told: the next document begins."""
        self._begun = self._clock()
        self._progress: Progress | None = None
        self._read, self._tokens = 0, 0  # of the prompt that is being read

    def advance(self, progress: Progress) -> None:
        """Take how far the document is."""
        self._progress = progress

    def read(self, done: int, tokens: int) -> None:
        """Take how far the prompt is read."""
        self._read, self._tokens = done, tokens

    def describe(self) -> str:
        """The words, with a comma before them; empty before anything is known."""
        reading = f"reading {self._read:,} of {self._tokens:,} tokens" if self._read < self._tokens else ""
        progress, words = self._progress, [reading]
        if progress is not None:
            is_merging = progress.parts_done == progress.parts
            part = "all parts together" if is_merging else f"part {progress.parts_done + 1} of {progress.parts}"
            words = [part if progress.parts > 1 else "", reading, self._describe_rest(progress)]
        return "".join(f", {word}" for word in words if word)

    def _describe_rest(self, progress: Progress) -> str:
        read = self._read / self._tokens if self._tokens else 0.0
        done = progress.parts_done + (read + (progress.written if read == 1 else 0.0)) / 2
        if not done:
            return ""
        seconds = (self._clock() - self._begun) / done * max(0.0, progress.steps - done)
        return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"


class PartDisplay(JobDisplay):
    """Shows a job, and how far a long document is."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._parts = PartProgress()
        super().__init__(*arguments, **options)

    def reading(self, done: int, tokens: int) -> None:
        """Show how far a prompt is read."""
        self._parts.read(done, tokens)
        self._update()

    def parts(self, progress: Progress) -> None:
        """Show how far the document is."""
        self._parts.advance(progress)
        self._update()

    def __call__(self, done: Summarized | Reject | DocumentId, totals: JobTotals) -> None:
        """Show what became of a document, and the progress."""
        self._parts.begin()
        self._update()
        super().__call__(done, totals)

    def _update(self) -> None:
        self.update(self._task, read=self._parts.describe())
