"""Results and rejects, read leniently: a malformed line is counted and named, a missing figure is NaN; their totals.

Memory grows by a few numbers per document and by no text.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lookahead.documents.byte_sources import bounded_lines
from lookahead.documents.readers import parquet_records
from lookahead.errors import DocumentError
from lookahead.reporting.charts import Values
from lookahead.utils.atomic import parse_json

MOST_SHOWN = 5  # documents of a list
MOST_NAMED = 500  # documents whose ids are kept for the scatter plots
MOST_DIFFERENT = 20  # ids kept of documents with other tokens by plain decoding
MOST_REASONS = 1000  # distinct failure reasons
MOST_EXAMPLES = 3  # ids per reason
MOST_KINDS = 50  # distinct models, and proposers; further ones are "others"
_LOCATION = re.compile(r"^(?:(?!: ).)*:\d+: ")  # `docs.jsonl:12: `
MOST_TEXT = 1200  # characters kept of a summary
MOST_NAME = 200  # characters kept of an id
MOST = 1e15  # largest number accepted
MOST_BYTES = 64 << 20  # of a line
MOST_COMPLAINTS = 5
PATIENCE = 1000  # malformed lines after which a file without a valid one is given up
_AS_JSON = ("stats", "plain")  # columns that a Parquet file holds as JSON strings
_LENGTH = re.compile("[0-9]{1,9}")
_RANKED = ("seconds", "speedup", "acceptance_length")  # columns


class SourceCounts(NamedTuple):
    """Draft nodes of one proposer."""

    drafted: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of results. A figure that the line lacks, or holds with another type, is NaN."""

    name: str  # the id
    text: str
    figures: dict[str, float]  # by name: tokens, draft nodes, passes after the prefill, seconds, 1 for yes
    model: str | None
    sources: dict[str, SourceCounts]  # by proposer

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Result:
        """The valid fields of a line."""
        stats = _mapping(record.get("stats"))
        columns = [_mapping(stats.get(f"{which}_by_source")) for which in ("drafted", "accepted", "expected")]
        text = record["summary"] if isinstance(record.get("summary"), str) else ""
        return cls(
            name=as_text(record.get("id"))[:MOST_NAME],
            text=text if len(text) <= MOST_TEXT else text[:MOST_TEXT].rstrip() + " […]",
            figures=_figures(record, stats, _mapping(record.get("plain"))),
            model=as_text(record["model"])[:MOST_NAME] if record.get("model") is not None else None,
            sources={
                str(name)[:MOST_NAME]: SourceCounts(*(_number(column.get(name), 0.0) for column in columns))
                for name in columns[0]
            },
        )


def _figures(record: Mapping[str, Any], stats: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, float]:
    prefill_s, decode_s = _number(stats.get("prefill_s")), _number(stats.get("decode_s"))
    plain_decode_s, histogram = _number(plain.get("decode_s")), stats.get("acceptance_histogram")
    identical, reason = record.get("identical"), record.get("finish_reason")
    if isinstance(histogram, Mapping):
        counts = [(key, _number(passes, 0.0)) for key, passes in histogram.items() if _LENGTH.fullmatch(str(key))]
        decoded = sum(int(length) * passes for length, passes in counts)
    else:
        decoded = _number(stats.get("tokens_per_s")) * decode_s
    return {
        "document_tokens": _number(record.get("document_tokens")),
        "summary_tokens": _number(record.get("summary_tokens")),
        "forwards": _number(stats.get("target_forwards")),
        "drafted": _number(stats.get("drafted_tokens")),
        "accepted": _number(stats.get("accepted_tokens")),
        "acceptance_length": _number(stats.get("mean_acceptance_length")) or math.nan,
        "prefill_s": prefill_s,  # until the first token
        "decode_s": decode_s,  # after it
        "seconds": prefill_s + decode_s,
        "decoded": decoded,  # tokens after the first
        "tokens_per_s": decoded / decode_s if decoded and decode_s else math.nan,
        "plain_decoded": _number(plain.get("tokens_per_s")) * plain_decode_s,
        "plain_decode_s": plain_decode_s,
        "speedup": _number(record.get("speedup")),
        "identical": float(identical) if isinstance(identical, bool) else math.nan,  # to plain decoding
        "is_cut": float(reason == "length") if reason in ("stop", "length") else math.nan,  # by the token limit
        "is_copy": float(record.get("copy_of") is not None),  # of an equal document; then there are no statistics
    }


def as_text(value: Any) -> str:
    """A field of any type as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _number(value: Any, missing: float = math.nan) -> float:
    """A number from 0 to `MOST`, else `missing`; below 1 / `MOST` it is 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:  # false for NaN
        return missing
    return float(value) if value >= 1 / MOST else 0.0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(slots=True)
class Reading:
    """Counts of the lines of a file."""

    taken: int = 0  # valid lines
    malformed: int = 0  # other lines
    complaints: list[str] = field(default_factory=list)  # what is wrong with the first of those
    is_torn: bool = False  # the last line is incomplete

    def complain(self, number: int, what: str) -> None:
        """Count a malformed line; `number` begins at 1."""
        self.malformed += 1
        if len(self.complaints) < MOST_COMPLAINTS:
            self.complaints.append(f"line {number} {what}")

    def describe(self) -> str:
        """The lines that could not be read."""
        more = "; …" if self.malformed > len(self.complaints) else ""
        torn = " The last line is incomplete: the job was stopped, or is writing it." if self.is_torn else ""
        lines = "1 line was" if self.malformed == 1 else f"{self.malformed:,} lines were"
        return f"{lines} left out: {'; '.join(self.complaints)}{more}.{torn}"


def read_results(path: Path, reading: Reading) -> Iterator[Result]:
    """The lines of a results file, JSON or `.parquet`; DocumentError if it holds none, OSError if unreadable."""
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_lines(path, reading)
    for number, record in rows:
        if "summary" in record or "stats" in record:
            reading.taken += 1
            yield Result.from_record(record)
        elif "error" in record:
            reading.complain(number, "is of a file of rejects")
        else:
            keys = ", ".join(map(repr, islice(record, 4))) or "nothing"
            reading.complain(number, f"has neither summary nor stats, but {keys}")
    if not reading.taken and reading.malformed:
        raise DocumentError(
            f"{path} holds no results of 'lookahead summarize', which have id, summary and stats: "
            f"{reading.complaints[0]}"
        )


def _opened(path: Path) -> BinaryIO:
    """Open a file, but no device, and no pipe, which would block."""
    if path.exists() and not path.is_file():
        raise DocumentError(f"{path}: not a regular file")
    return open(path, "rb")


def _json_lines(path: Path, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file with their line numbers; empty lines are skipped."""
    with _opened(path) as file:
        for number, (_, line) in enumerate(bounded_lines(file, MOST_BYTES), start=1):
            if line is None:
                reading.complain(number, f"is longer than {MOST_BYTES >> 20} MiB")
            elif line.strip():
                try:
                    yield number, _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                except ValueError as error:
                    reading.is_torn = not line.endswith(b"\n")
                    reading.complain(number, "is torn, the last one" if reading.is_torn else str(error))
            if not reading.taken and reading.malformed >= PATIENCE:
                break


def _parse(line: bytes) -> dict[str, Any]:
    """The object of a line; ValueError with what the line is instead."""
    try:
        record = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is no UTF-8 text: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"is no JSON object but a {type(record).__name__}")
    return record


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    _opened(path).close()  # a missing file raises the same error as for JSON lines
    for number, record in enumerate(parquet_records(path), start=1):
        for name in record.keys() & _AS_JSON:
            with suppress(ValueError, TypeError):  # it is no string, or holds no JSON
                record[name] = parse_json(record[name])
        yield number, record


def _kind(name: str, known: Mapping[str, Any]) -> str:
    """The name to count under: a results file may hold any number of names."""
    return name if name in known or len(known) < MOST_KINDS else "others"


class Failures:
    """The lines of a rejects file by reason. Reasons that differ only in locations, ids and numbers are one."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.count: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # message of each reason
        self.examples: dict[str, list[str]] = {}  # the first ids of each reason
        for number, record in _json_lines(path, reading):
            if isinstance(record.get("error"), str):
                reading.taken += 1
                self._add(as_text(record.get("id")), record["error"])
            else:
                reading.complain(number, "has no error")
        self.total = self.count.total()

    def _add(self, name: str, message: str) -> None:
        message = _LOCATION.sub("", message.removeprefix(f"{name}: ")).strip()[:MOST_NAME]
        reason = re.sub(r"\d+", "#", message.replace(name, "…") if name else message)
        if reason not in self.count and len(self.count) >= MOST_REASONS:
            reason = message = "other reasons"
        self.count[reason] += 1
        self.first.setdefault(reason, message)
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MOST_EXAMPLES:
            examples.append(name[:MOST_NAME])


class Aggregate:
    """Totals, columns and rankings of the lines of a results file."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.documents = 0  # lines
        self.names: list[str] = []  # of the first lines
        self.names_of_different: list[str] = []  # of the first lines with other tokens by plain decoding
        self.models: Counter[str] = Counter()
        self.sources: dict[str, SourceCounts] = {}  # by proposer
        # The lines with the smallest values of a column, or with sign -1 the largest; the earlier of equal values.
        self.ranked: dict[tuple[str, int], list[Result]] = {(name, sign): [] for name in _RANKED for sign in (1, -1)}
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

    def count(self, name: str) -> int:
        """Number of lines that have a value."""
        return self.known(name)[0].size

    def sum(self, name: str) -> float:
        """Sum of a column; NaN if no line has it."""
        (known,) = self.known(name)
        return float(known.sum()) if known.size else math.nan

    def ratio(self, above: str, below: str) -> float:
        """Quotient of the sums of two columns, over the lines that have both; NaN if there is none."""
        tops, bottoms = self.known(above, below)
        return float(tops.sum() / bottoms.sum()) if bottoms.sum() else math.nan

    @property
    def speedup(self) -> float:
        """Tokens per second over those of plain decoding, of all documents decoded both ways."""
        columns = self.known("decoded", "decode_s", "plain_decoded", "plain_decode_s")
        ours, ours_s, plain, plain_s = (column.sum() for column in columns)
        return float((ours / ours_s) / (plain / plain_s)) if ours_s and plain_s and plain else math.nan

    def _add(self, result: Result) -> None:
        for name, column in self._columns.items():
            column.append(result.figures[name])
        for (name, sign), ranking in self.ranked.items():
            if math.isfinite(result.figures[name]):
                ranking.append(result)
                ranking.sort(key=lambda each: sign * each.figures[name])
                del ranking[MOST_SHOWN:]
        if len(self.names) < MOST_NAMED:
            self.names.append(result.name)
        self.documents += 1
        if result.figures["identical"] == 0.0 and len(self.names_of_different) < MOST_DIFFERENT:
            self.names_of_different.append(result.name)
        if result.model is not None:
            self.models[_kind(result.model, self.models)] += 1
        for source, counts in result.sources.items():
            name = _kind(source, self.sources)
            earlier = self.sources.get(name, SourceCounts())
            self.sources[name] = SourceCounts(*map(sum, zip(earlier, counts, strict=True)))
