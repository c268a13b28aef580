"""Totals of results and rejects. Reading is lenient: a malformed line is counted and reported, a missing figure is NaN.

Memory grows by a few numbers per document. Only a bounded number of texts is kept.
"""

from __future__ import annotations

import math
import re
import stat
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lookahead.errors import DocumentError
from lookahead.jobs.line import Line, read_entries, read_rows
from lookahead.reporting.charts import Values

MAX_LISTED_DOCUMENTS = 5  # documents in a list
MAX_DIFFERENT_IDS = 20  # ids kept of documents whose plain decoding gave other tokens
MAX_REASONS = 1000  # distinct failure reasons
MAX_IDS_PER_REASON = 3
MAX_KINDS = 50  # distinct models, and distinct proposers; the rest is counted as "others"
MAX_TEXT_CHARS = 1200  # characters kept of a summary
MAX_ID_CHARS = 200  # characters kept of an id
MAX_NUMBER = 1e15  # largest number accepted
MAX_LINE_BYTES = 64 << 20
MAX_COMPLAINTS = 5
PATIENCE = 1000  # malformed lines without a valid one until reading stops
_LOCATION = re.compile(r"^(?:(?!: ).)*:\d+: ")  # `docs.jsonl:12: `
_LENGTH = re.compile("[0-9]{1,9}")
_OF_STATS = ("target_forwards", "drafted_tokens", "accepted_tokens", "mean_acceptance_length", "prefill_s", "decode_s")
_BY_SOURCE = ("drafted", "accepted", "expected")  # draft nodes of a proposer
_RANKED = ("seconds", "speedup", "mean_acceptance_length")


class Result(NamedTuple):
    """The shown part of a line of results. A figure that is missing or has a wrong type is NaN."""

    name: str  # the id
    text: str
    figures: dict[str, float]


@dataclass(slots=True)
class Reading:
    """A file being read, and the counts of its lines."""

    path: Path
    taken: int = 0  # valid lines
    malformed: int = 0  # other lines
    complaints: list[str] = field(default_factory=list)  # messages about the first malformed lines
    is_torn: bool = False  # the last line is incomplete

    def __post_init__(self) -> None:
        if not stat.S_ISREG(self.path.stat().st_mode):  # a pipe would block
            raise DocumentError(f"{self.path}: not a regular file")

    def describe(self) -> str:
        """A message about the malformed lines."""
        more = "; …" if self.malformed > len(self.complaints) else ""
        torn = " The last line is incomplete: the job was stopped, or is writing it." if self.is_torn else ""
        lines = "1 line was" if self.malformed == 1 else f"{self.malformed:,} lines were"
        return f"{self.path.name}: {lines} left out: {'; '.join(self.complaints)}{more}.{torn}"

    def lines(self, *, is_reject: bool = False) -> Iterator[Line]:
        """The lines of results or of rejects; all others are counted as malformed."""
        read = partial(Line.from_json, is_reject=is_reject, leaves_gaps=True)
        is_parquet = self.path.suffix.lower() == ".parquet"
        lenient = partial(read_entries, is_lenient=True, most_bytes=MAX_LINE_BYTES)
        for entry in (read_rows if is_parquet else lenient)(self.path, read):
            if entry.line is not None:
                self.taken += 1
                yield entry.line
                continue
            self.malformed += 1
            self.is_torn = entry.is_torn
            if len(self.complaints) < MAX_COMPLAINTS:
                self.complaints.append(
                    f"line {entry.number} {'is torn, the last one' if self.is_torn else entry.problem}"
                )
            if not self.taken and self.malformed >= PATIENCE:
                break


def read_results(reading: Reading) -> Iterator[Line]:
    """The lines of a results file, JSON or `.parquet`; DocumentError if it has none, OSError if it is unreadable."""
    yield from reading.lines()
    if not reading.taken and reading.malformed:
        raise DocumentError(
            f"{reading.path} holds no results of 'lookahead summarize', which have id, summary and stats: "
            f"{reading.complaints[0]}"
        )


class Failures:
    """The lines of a rejects file by reason. Reasons that differ only in locations, ids and numbers are one."""

    def __init__(self, reading: Reading) -> None:
        self.count: Counter[str] = Counter()
        self.shown: dict[str, tuple[str, list[str]]] = {}  # the first message and the first ids of each reason
        for line in reading.lines(is_reject=True):
            name, error = str(line.id), line.error or ""
            message = _LOCATION.sub("", error.removeprefix(f"{name}: ")).strip()[:MAX_ID_CHARS]
            reason = re.sub(r"\d+", "#", message.replace(name, "…") if name else message)
            if reason not in self.count and len(self.count) >= MAX_REASONS:
                reason = message = "other reasons"
            self.count[reason] += 1
            _, examples = self.shown.setdefault(reason, (message, []))
            if len(examples) < MAX_IDS_PER_REASON:
                examples.append(name[:MAX_ID_CHARS])
        self.total = self.count.total()


class Aggregate:
    """Totals, columns and rankings of the lines of a results file."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.documents = 0
        self.names_of_different: list[str] = []  # of the first lines whose plain decoding gave other tokens
        self.models: Counter[str] = Counter()
        self.sources: dict[str, dict[str, float]] = {}  # draft nodes by proposer
        # The lines with the smallest values of a column (sign 1) or the largest (sign -1); of equal values the earlier.
        self.ranked: dict[tuple[str, int], list[Result]] = {(name, sign): [] for name in _RANKED for sign in (1, -1)}
        empty = Line(id="")
        self._columns = {name: array("d") for name in _figures(empty)}
        for line in lines:
            self._add(line)

    def column(self, name: str) -> Values:
        """A value of every line, in file order; NaN if a line has none."""
        return np.array(self._columns[name], np.float64)

    def known(self, *names: str) -> Values:
        """Columns of the lines that have all of these values, `[names, lines]`."""
        columns = np.array([self.column(name) for name in names])
        return columns[:, np.isfinite(columns).all(axis=0)]

    def count(self, name: str) -> int:
        """Number of lines that have a value."""
        return self.known(name).size

    def sum(self, name: str) -> float:
        """Sum of a column; NaN if no line has it."""
        values = self.known(name)
        return float(values.sum()) if values.size else math.nan

    def ratio(self, above: str, below: str, *names: str, is_straight: bool = False) -> float:
        """Ratio of the sums of two columns over lines with both and `names`, if `is_straight` without loops; or NaN."""
        columns = self.known(above, below, *names, *["is_looping"] * is_straight)
        if is_straight:
            columns = columns[:, columns[-1] == 0]
        above_sum, below_sum, *_ = columns.sum(axis=1).tolist()
        return above_sum / below_sum if below_sum else math.nan

    def speedup(self, *, is_straight: bool = False) -> float:
        """Speedup in tokens per second over plain decoding, for all documents decoded both ways."""
        ours, plain = ("decoded", "decode_s"), ("plain_decoded", "plain_decode_s")
        plain_speed = self.ratio(*plain, *ours, is_straight=is_straight)
        return self.ratio(*ours, *plain, is_straight=is_straight) / (plain_speed or math.nan)

    def _add(self, line: Line) -> None:
        text, stats = line.summary or "", line.stats or {}
        if len(text) > MAX_TEXT_CHARS:
            text = text[:MAX_TEXT_CHARS].rstrip() + " […]"
        result = Result(str(line.id)[:MAX_ID_CHARS], text, _figures(line))
        for name, figure in result.figures.items():
            self._columns[name].append(figure)
        for (name, sign), ranking in self.ranked.items():
            if math.isfinite(result.figures[name]):
                ranking.append(result)
                ranking.sort(key=lambda document: sign * document.figures[name])
                del ranking[MAX_LISTED_DOCUMENTS:]
        self.documents += 1
        if result.figures["is_identical"] == 0.0 and len(self.names_of_different) < MAX_DIFFERENT_IDS:
            self.names_of_different.append(result.name)
        if line.model is not None:
            self.models[_kind(line.model, self.models)] += 1
        for source in _mapping(stats, "drafted_by_source"):
            counts = self.sources.setdefault(_kind(str(source), self.sources), dict.fromkeys(_BY_SOURCE, 0.0))
            for what in _BY_SOURCE:
                counts[what] += _number(_mapping(stats, f"{what}_by_source").get(source), 0.0)


def _figures(line: Line) -> dict[str, float]:
    """Figures of a line: tokens, draft nodes, passes after the prefill, seconds, 1 for yes."""
    stats, plain, reason = line.stats or {}, line.plain or {}, line.finish_reason
    figures = {name: _number(stats.get(name)) for name in _OF_STATS}
    decode_s, plain_decode_s = figures["decode_s"], _number(plain.get("decode_s"))
    decoded = _number(stats.get("tokens_per_s")) * decode_s
    if isinstance(histogram := stats.get("acceptance_histogram"), Mapping):
        lengths = [length for length in histogram if _LENGTH.fullmatch(str(length))]
        decoded = sum(int(length) * _number(histogram[length], 0.0) for length in lengths)
    return figures | {
        "document_tokens": _number(line.document_tokens),
        "summary_tokens": _number(line.summary_tokens),
        "speedup": _number(line.speedup),
        "mean_acceptance_length": figures["mean_acceptance_length"] or math.nan,
        "seconds": figures["prefill_s"] + decode_s,  # until the first token, and after it
        "decoded": decoded,  # tokens after the first
        "tokens_per_s": decoded / decode_s if decoded and decode_s else math.nan,
        "plain_decoded": _number(plain.get("tokens_per_s")) * plain_decode_s,
        "plain_decode_s": plain_decode_s,
        "is_identical": math.nan if line.identical is None else float(line.identical),  # to plain decoding
        "is_cut": float(reason == "length") if reason in ("stop", "length") else math.nan,  # by the token limit
        "is_looping": math.nan if line.loops is None else float(line.loops),  # repeats one phrase to its end
        "is_copy": float(line.copy_of is not None),  # of the summary of an equal document; without statistics
    }


def _number(value: Any, missing: float = math.nan) -> float:
    """A number from 0 to `MAX_NUMBER`, else `missing`. Values below 1 / `MAX_NUMBER` become 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:  # false for NaN
        return missing
    return float(value) if value >= 1 / MAX_NUMBER else 0.0


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, Mapping) else {}


def _kind(name: str, kinds: Mapping[str, Any]) -> str:
    """The name to count under, `"others"` after `MAX_KINDS` names: a file may hold any number of names."""
    name = name[:MAX_ID_CHARS]
    return name if name in kinds or len(kinds) < MAX_KINDS else "others"
