"""One line of results, as far as it holds what it should."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_TEXT = 1200  # characters of a summary that are kept
MOST_NAME = 200  # of an id
MOST = 1e15  # of any figure
_LENGTH = re.compile("[0-9]{1,9}")  # tokens that a pass gave


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """Draft nodes of one proposer."""

    drafted: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0

    def __add__(self, other: SourceFigures) -> SourceFigures:
        return SourceFigures(
            self.drafted + other.drafted, self.accepted + other.accepted, self.expected + other.expected
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A document and what became of it; what its line does not hold, or holds as something else, is `None`.

    Attributes:
        name: Its id.
        text: Its summary, cut where it is very long.
        document_tokens: Tokens of the document.
        summary_tokens: Tokens of the summary.
        forwards: Passes of the model that verified drafts or gave a token.
        decoded: Tokens those passes gave.
        drafted: Draft nodes verified.
        accepted: Draft nodes accepted.
        prefill_s: Seconds until the first tokens.
        decode_s: Seconds from there on.
        acceptance_length: Tokens a pass, `None` where there was no pass.
        plain_decoded: Tokens that plain decoding's steps gave.
        plain_decode_s: Seconds they took.
        speedup: Tokens a second, over those of plain decoding.
        identical: Whether plain decoding wrote the same.
        is_cut: Whether the token limit cut the summary off; of a copy too.
        is_copy: Whether it has the summary of an equal document, and so no figures.
        model: The model.
        sources: Draft nodes by proposer.
    """

    name: str
    text: str
    document_tokens: float | None
    summary_tokens: float | None
    forwards: float | None
    decoded: float | None
    drafted: float | None
    accepted: float | None
    prefill_s: float | None
    decode_s: float | None
    acceptance_length: float | None
    plain_decoded: float | None
    plain_decode_s: float | None
    speedup: float | None
    identical: bool | None
    is_cut: bool | None
    is_copy: bool
    model: str | None
    sources: dict[str, SourceFigures] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        """Seconds of prefill and decoding."""
        return None if self.prefill_s is None or self.decode_s is None else self.prefill_s + self.decode_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first per decode second."""
        return self.decoded / self.decode_s if self.decoded and self.decode_s else None


def read_line(record: Mapping[str, Any]) -> Line:
    """Take from a line what is there; nothing about it is an error."""
    stats, plain = _mapping(record.get("stats")), _mapping(record.get("plain"))
    decode_s, plain_decode_s = number(stats.get("decode_s")), number(plain.get("decode_s"))
    forwards, decoded = number(stats.get("target_forwards")), _decoded(stats, decode_s)
    identical, text, reason = record.get("identical"), record.get("summary"), record.get("finish_reason")
    return Line(
        name=words(record.get("id"))[:MOST_NAME],
        text=_cut(text) if isinstance(text, str) else "",
        document_tokens=number(record.get("document_tokens")),
        summary_tokens=number(record.get("summary_tokens")),
        forwards=forwards,
        decoded=decoded,
        drafted=number(stats.get("drafted_tokens")),
        accepted=number(stats.get("accepted_tokens")),
        prefill_s=number(stats.get("prefill_s")),
        decode_s=decode_s,
        acceptance_length=(number(stats.get("mean_acceptance_length")) or None),
        plain_decoded=_product(number(plain.get("tokens_per_s")), plain_decode_s),
        plain_decode_s=plain_decode_s,
        speedup=number(record.get("speedup")),
        identical=identical if isinstance(identical, bool) else None,
        is_cut=None if reason not in ("stop", "length") else reason == "length",
        is_copy=record.get("copy_of") is not None,
        model=words(record["model"])[:MOST_NAME] if record.get("model") is not None else None,
        sources=_sources(stats),
    )


def number(value: Any) -> float | None:
    """A number from 0 to what a job can come to, or `None`; what is smaller than a job can measure is 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        figure = float(value)
    except OverflowError:
        return None
    if not 0 <= figure <= MOST:  # nor is it no number
        return None
    return figure if figure >= 1 / MOST else 0.0


def words(value: Any) -> str:
    """Whatever a field holds, as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _mapping(value: Any) -> Mapping[str, Any]:
    """An object, or an empty one in its place."""
    return value if isinstance(value, Mapping) else {}


def _cut(text: str) -> str:
    """The beginning of a text, marked where it is not all."""
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT].rstrip() + " […]"


def _product(left: float | None, right: float | None) -> float | None:
    """Two figures multiplied, if both are there."""
    return None if left is None or right is None else left * right


def _decoded(stats: Mapping[str, Any], decode_s: float | None) -> float | None:
    """Tokens that counted passes gave: exactly by the histogram, else from the speed."""
    histogram = stats.get("acceptance_histogram")
    if not isinstance(histogram, Mapping):
        return _product(number(stats.get("tokens_per_s")), decode_s)
    counts = [(key, number(passes) or 0.0) for key, passes in histogram.items() if _LENGTH.fullmatch(str(key))]
    return sum(int(length) * passes for length, passes in counts)


def _sources(stats: Mapping[str, Any]) -> dict[str, SourceFigures]:
    """Draft nodes by proposer."""
    drafted, accepted, expected = (
        _mapping(stats.get(f"{which}_by_source")) for which in ("drafted", "accepted", "expected")
    )
    return {
        str(name)[:MOST_NAME]: SourceFigures(
            number(drafted[name]) or 0.0, number(accepted.get(name)) or 0.0, number(expected.get(name)) or 0.0
        )
        for name in drafted
    }
