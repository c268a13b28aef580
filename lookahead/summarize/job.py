"""Many documents, one after the other: what fails is put aside, what is done is written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lookahead.errors import LookaheadError
from lookahead.files.documents import Document, DocumentId, Reject, read_documents
from lookahead.files.inputs import Input
from lookahead.stats import DecodingStats
from lookahead.summarize.decoding import total_in_sequence
from lookahead.summarize.results import JsonLinesFile, OutputPaths

if TYPE_CHECKING:
    from lookahead.summarize.comparison import PlainFigures
    from lookahead.summarize.summarizer import Summarizer, Summary


class Sink(Protocol):
    """Where lines go."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one line, whole or not at all."""


@dataclass(frozen=True, slots=True)
class Summarized:
    """A document and its summary."""

    document: Document
    summary: Summary


class Observer(Protocol):
    """Watches a job, to show how it goes; called when the line of a document is written."""

    def summarized(self, done: Summarized, totals: Totals) -> None:
        """A document is summarized."""

    def rejected(self, reject: Reject, totals: Totals) -> None:
        """A document could not be read or summarized."""


@dataclass(slots=True)
class Totals:
    """What a job has done so far.

    Attributes:
        summarized: Documents summarized.
        rejected: Documents that could not be.
        stats: What decoding did.
        plain: What plain decoding did, where it was asked for.
        different: Documents that plain decoding summarized differently.
    """

    summarized: int = 0
    rejected: int = 0
    stats: DecodingStats = field(default_factory=DecodingStats)
    plain: PlainFigures | None = None
    different: list[DocumentId] = field(default_factory=list)

    def add(self, done: Summarized) -> None:
        """Count a summary."""
        summary = done.summary
        self.summarized += 1
        self.stats = total_in_sequence([self.stats, summary.stats])
        if summary.plain is not None:
            self.plain = summary.plain if self.plain is None else self.plain + summary.plain
            if not summary.plain.identical:
                self.different.append(done.document.id)


def run_job(
    inputs: Sequence[Input],
    summarizer: Summarizer,
    paths: OutputPaths,
    *,
    totals: Totals,
    observer: Observer,
    shown: Sink | None = None,
) -> None:
    """Summarize the documents of all inputs, writing a line for each as soon as it is done.

    A line of results has `id` and the fields of `Summary.to_dict`, a line of rejects `id` and `error`.

    Args:
        inputs: Where the documents are.
        summarizer: What summarizes them.
        paths: Files to write, checked.
        totals: Counted up as documents finish, so that it tells what is done when the job is stopped.
        observer: Told of each document.
        shown: Gets the lines of results where `paths` has no file for them.

    Raises:
        ConfigError: A file cannot be created.
        OSError: A line could not be written; those before it are whole.
    """
    paths.clear_rejects()
    with ExitStack() as files:
        rejects = files.enter_context(JsonLinesFile(paths.rejects, lazy=True)) if paths.rejects else None
        results = files.enter_context(JsonLinesFile(paths.results)) if paths.results else shown
        for document in read_documents(inputs):
            outcome = document if isinstance(document, Reject) else _summarize(document, summarizer)
            if isinstance(outcome, Reject):
                if rejects is not None:
                    rejects.write({"id": outcome.id, "error": outcome.error})
                totals.rejected += 1
                observer.rejected(outcome, totals)
            else:
                if results is not None:
                    results.write({"id": outcome.document.id, **outcome.summary.to_dict()})
                totals.add(outcome)
                observer.summarized(outcome, totals)


def _summarize(document: Document, summarizer: Summarizer) -> Summarized | Reject:
    """Summarize one document, or say why not."""
    try:
        return Summarized(document, summarizer.summarize(document.text))
    except LookaheadError as error:
        return Reject(document.id, f"{document.id}: {error}")
    except Exception as error:
        # Whatever one document meets (out of memory, a tokenizer's panic), the others still get their turn.
        message = " ".join(str(error).split())
        return Reject(document.id, f"{document.id}: {type(error).__name__}: {message}")
