"""What came of a document: its summary, and those of its parts on the way there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lookahead.documents.decode_text import Document
from lookahead.errors import DocumentError
from lookahead.summarization.baseline import PlainFigures
from lookahead.summarization.chunking import Split

if TYPE_CHECKING:
    from lookahead.stats import DecodingStats
    from lookahead.verification.stopping import FinishReason


@dataclass(frozen=True, slots=True)
class PartSummary:
    """The summary of a part of a document.

    Attributes:
        chars: Where the part stands in the document: its first character, and the one behind its last.
        tokens: Likewise in tokens of the document.
        summary: Its summary; where one summary was refined from part to part, that of all up to here.
        children: The summaries of the level below that it was made of, the first and the one behind the last; `None`
            where it was made of the document.
    """

    chars: tuple[int, int]
    tokens: tuple[int, int]
    summary: str
    children: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The summary as a JSON-ready dict."""
        record: dict[str, Any] = {"chars": list(self.chars), "tokens": list(self.tokens)}
        if self.children is not None:
            record["children"] = list(self.children)
        return {**record, "summary": self.summary}


# The summaries of the parts of a document, of what came of those, and so on up to the last one alone.
Tree = tuple[tuple[PartSummary, ...], ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one document.

    Attributes:
        text: The summary.
        document_tokens: Tokens of the document.
        summary_tokens: Tokens of the summary, an end-of-sequence token included.
        parts: How many parts the document was cut into; 1 where it fitted.
        split: `"none"`, `"sections"`, `"sentences"`, or `"hard"` where a stretch had no sentence or line end to cut at.
        stats: What decoding did, the summaries of the parts included.
        plain: What plain decoding did for the same prompts, where it was asked for.
        tree: The summaries of the parts, where they were to be kept.
        finish_reason: `"length"` where the token limit cut the summary off, `"stop"` where the model ended it.
    """

    text: str
    document_tokens: int
    summary_tokens: int
    parts: int
    split: Split
    stats: DecodingStats
    plain: PlainFigures | None = None
    tree: Tree | None = None
    finish_reason: FinishReason = "stop"

    def __str__(self) -> str:
        return self.text

    def check(self) -> Summary:
        """This summary, if it says anything.

        Raises:
            DocumentError: It is empty.
        """
        if not self.text:
            raise DocumentError(f"the model wrote no summary of the document's {self.document_tokens} tokens")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The summary as a JSON-ready dict."""
        record: dict[str, Any] = {
            "summary": self.text,
            "document_tokens": self.document_tokens,
            "summary_tokens": self.summary_tokens,
            "parts": self.parts,
            "split": self.split,
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
        }
        if self.tree is not None:
            record["tree"] = [[part.to_dict() for part in level] for level in self.tree]
        if self.plain is not None:
            speedup = self.plain.speedup(self.stats)
            record["plain"] = self.plain.to_dict()
            record["speedup"] = None if speedup is None else round(speedup, 3)
            record["identical"] = self.plain.identical
        return record


@dataclass(frozen=True, slots=True)
class Summarized:
    """A document and its summary."""

    document: Document
    summary: Summary
