"""A job added up from its lines, in memory that grows by some numbers a document and by no text."""

from __future__ import annotations

import heapq
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lookahead.reporting.record import MOST_NAME, Line, SourceFigures, words

COLUMNS = (
    *("document_tokens", "summary_tokens", "forwards", "decoded", "drafted", "accepted", "prefill_s", "decode_s"),
    *("seconds", "acceptance_length", "plain_decoded", "plain_decode_s", "speedup"),
)
MOST_SHOWN = 5  # documents of a list
MOST_NAMED = 500  # documents whose ids are kept for the plots
MOST_DIFFERENT = 20  # ids of documents that plain decoding summarized differently
MOST_REASONS = 1000  # kinds of failures told apart
MOST_EXAMPLES = 3  # ids by kind
MOST_KINDS = 50  # models, and proposers, told apart
_PLACE = re.compile(r"^(?:(?!: ).)*:\d+: ")  # `docs.jsonl:12: `, where a message stands for a line of a file

Figures: TypeAlias = NDArray[np.float64]


class Ranking:
    """The lines with the largest figures, the first of equals first.

    Args:
        figure: Gives a line's figure, or `None` where it has no place in the ranking.
    """

    def __init__(self, figure: Callable[[Line], float | None]) -> None:
        self._figure = figure
        self._heap: list[tuple[float, int, Line]] = []

    def add(self, place: int, line: Line) -> None:
        """Rank a line; `place` is its own in the file."""
        figure = self._figure(line)
        if figure is None:
            return
        entry = (figure, -place, line)
        if len(self._heap) < MOST_SHOWN:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    @property
    def lines(self) -> list[Line]:
        """The largest first."""
        return [line for _, _, line in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


class Failures:
    """Failures by reason; reasons that differ in places, ids and numbers alone are one.

    Attributes:
        total: Failures.
        count: Failures by reason, as far as they are told apart.
        first: The first message of each reason.
        examples: Some ids of each reason.
    """

    def __init__(self) -> None:
        self.total = 0
        self.count: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.examples: dict[str, list[str]] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Count a line of rejects."""
        name, message = words(record.get("id")), str(record["error"])
        message = _PLACE.sub("", message.removeprefix(f"{name}: ")).strip()[:MOST_NAME]
        reason = re.sub(r"\d+", "#", message.replace(name, "…") if name else message)
        if reason not in self.count and len(self.count) >= MOST_REASONS:
            reason = message = "other reasons"
        self.total += 1
        self.count[reason] += 1
        self.first.setdefault(reason, message)
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MOST_EXAMPLES:
            examples.append(name[:MOST_NAME])


class Tally:
    """What the lines of a file of results come to.

    Attributes:
        documents: Lines.
        copies: Of them those with the summary of an equal document.
        known_ends: Lines that tell whether the token limit cut their summary off.
        cut: Of them those that it did.
        names: Ids of the first lines.
        compared: Lines that tell whether plain decoding wrote the same.
        different: How many it wrote differently.
        names_of_different: The first of them.
        models: Lines by model.
        sources: Draft nodes by proposer.
        longest: Documents that took the most seconds.
        most_speedup: Documents with the largest speedups.
        least_speedup: With the smallest.
        most_accepted: With the most tokens a pass.
        least_accepted: With the fewest.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self.documents = self.copies = self.compared = self.different = self.known_ends = self.cut = 0
        self.names: list[str] = []
        self.names_of_different: list[str] = []
        self.models: Counter[str] = Counter()
        self.sources: dict[str, SourceFigures] = {}
        self.longest = Ranking(lambda line: line.seconds)
        self.most_speedup = Ranking(lambda line: line.speedup)
        self.least_speedup = Ranking(lambda line: None if line.speedup is None else -line.speedup)
        self.most_accepted = Ranking(lambda line: line.acceptance_length)
        self.least_accepted = Ranking(lambda line: None if line.acceptance_length is None else -line.acceptance_length)
        self._columns = {name: array("d") for name in COLUMNS}
        for line in lines:
            self._add(line)

    def column(self, name: str) -> Figures:
        """A figure of every line in the order of the file; where a line has none it is not a number."""
        return np.array(self._columns[name], np.float64)

    def known(self, *names: str) -> list[Figures]:
        """Figures of those lines that have all of them."""
        columns = [self.column(name) for name in names]
        whole = np.isfinite(columns).all(axis=0)
        return [column[whole] for column in columns]

    def sum(self, name: str) -> float | None:
        """A figure of all lines together; `None` where none has it."""
        (known,) = self.known(name)
        return float(known.sum()) if known.size else None

    def ratio(self, above: str, below: str) -> float | None:
        """Two figures added up over the lines that have both, divided."""
        tops, bottoms = self.known(above, below)
        return float(tops.sum() / bottoms.sum()) if bottoms.sum() else None

    @property
    def speedup(self) -> float | None:
        """Tokens a second over those of plain decoding, of all documents that were decoded both ways."""
        ours, ours_s, plain, plain_s = (
            each.sum() for each in self.known("decoded", "decode_s", "plain_decoded", "plain_decode_s")
        )
        return float((ours / ours_s) / (plain / plain_s)) if ours_s and plain_s and plain else None

    def _add(self, line: Line) -> None:
        """Count a line."""
        for name, column in self._columns.items():
            figure = getattr(line, name)
            column.append(np.nan if figure is None else figure)
        for ranking in (
            *(self.longest, self.most_speedup, self.least_speedup),
            *(self.most_accepted, self.least_accepted),
        ):
            ranking.add(self.documents, line)
        if len(self.names) < MOST_NAMED:
            self.names.append(line.name)
        self.documents += 1
        self.copies += line.is_copy
        self.known_ends += line.is_cut is not None
        self.cut += bool(line.is_cut)
        if line.identical is not None:
            self.compared += 1
            if not line.identical:
                self.different += 1
                self.names_of_different += [line.name] * (len(self.names_of_different) < MOST_DIFFERENT)
        if line.model is not None:
            self.models[_kind(line.model, self.models)] += 1
        for name, figures in line.sources.items():
            kind = _kind(name, self.sources)
            self.sources[kind] = self.sources.get(kind, SourceFigures()) + figures


def _kind(name: str, known: Mapping[str, object]) -> str:
    """A name that is counted by itself, or what all are counted as that come too late."""
    return name if name in known or len(known) < MOST_KINDS else "others"
