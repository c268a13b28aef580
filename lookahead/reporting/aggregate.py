"""Totals of a results file. Memory grows by a few numbers per document and by no text."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lookahead.reporting.charts import Values
from lookahead.reporting.results_file import MOST_NAME, Result, SourceCounts, as_text

MOST_SHOWN = 5  # documents of a list
MOST_NAMED = 500  # documents whose ids are kept for the scatter plots
MOST_DIFFERENT = 20  # ids kept of documents with other tokens by plain decoding
MOST_REASONS = 1000  # distinct failure reasons
MOST_EXAMPLES = 3  # ids per reason
MOST_KINDS = 50  # distinct models, and proposers
_LOCATION = re.compile(r"^(?:(?!: ).)*:\d+: ")  # `docs.jsonl:12: `


def _rank(ranking: list[Result], result: Result, column: str, sign: int = 1) -> None:
    """Keep the `MOST_SHOWN` results with the largest values, or the smallest; the earlier of equal values."""
    if result.figures[column] is not None:
        ranking.append(result)
        ranking.sort(key=lambda each: -sign * (each.figures[column] or 0.0))
        del ranking[MOST_SHOWN:]


class Failures:
    """Failures by reason. Reasons that differ only in locations, ids and numbers are one."""

    def __init__(self) -> None:
        self.total = 0
        self.count: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # message of each reason
        self.examples: dict[str, list[str]] = {}  # the first ids of each reason

    def add(self, record: dict[str, Any]) -> None:
        """Count a line of a rejects file."""
        name, message = as_text(record.get("id")), str(record["error"])
        message = _LOCATION.sub("", message.removeprefix(f"{name}: ")).strip()[:MOST_NAME]
        reason = re.sub(r"\d+", "#", message.replace(name, "…") if name else message)
        if reason not in self.count and len(self.count) >= MOST_REASONS:
            reason = message = "other reasons"
        self.total += 1
        self.count[reason] += 1
        self.first.setdefault(reason, message)
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MOST_EXAMPLES:
            examples.append(name[:MOST_NAME])


class Aggregate:
    """Totals, columns and rankings of the lines of a results file."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.documents = self.copies = 0  # lines, and those with the summary of an equal document
        self.known_ends = self.cut = 0  # lines that say whether the token limit cut them off, and those where it did
        self.compared = self.different = 0  # lines compared with plain decoding, and those that differ from it
        self.names: list[str] = []  # of the first lines
        self.names_of_different: list[str] = []  # of the first of those
        self.models: Counter[str] = Counter()
        self.sources: dict[str, SourceCounts] = {}  # by proposer
        self.longest: list[Result] = []
        # By speedup and by tokens per pass, the largest and the smallest.
        self.gains: dict[str, tuple[list[Result], list[Result]]] = {"speedup": ([], []), "acceptance_length": ([], [])}
        self._columns = {name: array("d") for name in Result.from_record({}).figures}
        for result in results:
            self._add(result)

    def column(self, name: str) -> Values:
        """A value of every line, in the order of the file; NaN if a line has none."""
        return np.array(self._columns[name], np.float64)

    def known(self, *names: str) -> list[Values]:
        """Columns of the lines that have all of these values."""
        columns = [self.column(name) for name in names]
        whole = np.isfinite(columns).all(axis=0)
        return [column[whole] for column in columns]

    def sum(self, name: str) -> float | None:
        """Sum of a column; `None` if no line has it."""
        (known,) = self.known(name)
        return float(known.sum()) if known.size else None

    def ratio(self, above: str, below: str) -> float | None:
        """Quotient of the sums of two columns, over the lines that have both."""
        tops, bottoms = self.known(above, below)
        return float(tops.sum() / bottoms.sum()) if bottoms.sum() else None

    @property
    def speedup(self) -> float | None:
        """Tokens per second over those of plain decoding, of all documents decoded both ways."""
        columns = self.known("decoded", "decode_s", "plain_decoded", "plain_decode_s")
        ours, ours_s, plain, plain_s = (column.sum() for column in columns)
        return float((ours / ours_s) / (plain / plain_s)) if ours_s and plain_s and plain else None

    def _add(self, result: Result) -> None:
        for name, column in self._columns.items():
            value = result.figures[name]
            column.append(np.nan if value is None else value)
        _rank(self.longest, result, "seconds")
        for name, (most, least) in self.gains.items():
            _rank(most, result, name)
            _rank(least, result, name, -1)
        if len(self.names) < MOST_NAMED:
            self.names.append(result.name)
        self.documents += 1
        self.copies += result.is_copy
        self.known_ends += result.is_cut is not None
        self.cut += bool(result.is_cut)
        self.compared += result.identical is not None
        if result.identical is False:
            self.different += 1
            self.names_of_different += [result.name] * (len(self.names_of_different) < MOST_DIFFERENT)
        if result.model is not None:
            self.models[_kind(result.model, self.models)] += 1
        for name, counts in result.sources.items():
            kind = _kind(name, self.sources)
            earlier = self.sources.get(kind, SourceCounts())
            self.sources[kind] = SourceCounts(*map(sum, zip(earlier, counts, strict=True)))


def _kind(name: str, known: Mapping[str, object]) -> str:
    """The name, or `others` if too many names are counted already."""
    return name if name in known or len(known) < MOST_KINDS else "others"
