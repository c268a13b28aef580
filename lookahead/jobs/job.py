"""Many documents: what fails is put aside, what is done is written, what was done before is passed over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lookahead.documents.decode_text import Document, DocumentId, Reject
from lookahead.jobs.identity import JobIdentity, text_hash
from lookahead.jobs.journal import Journal
from lookahead.jobs.output_location import OutputPaths
from lookahead.jobs.result_stream import Sink, Stream
from lookahead.stats import DecodingStats
from lookahead.summarization.greedy import total_in_sequence

if TYPE_CHECKING:
    from lookahead.summarization.baseline import PlainFigures
    from lookahead.summarization.summarizer import Summarized


Book = Journal | Stream


class Worker(Protocol):
    """What summarizes documents."""

    def summarize_all(self, documents: Iterable[Document], rows: int | None) -> Iterator[Summarized | Reject]:
        """Summarize documents, up to `rows` of them together; they come as they are finished."""


class JobObserver(Protocol):
    """Watches a job, to show how it goes; called when the line of a document is written."""

    def summarized(self, done: Summarized, totals: JobTotals) -> None:
        """A document is summarized."""

    def passed(self, name: DocumentId, totals: JobTotals) -> None:
        """A document needed no work: it was finished before, or has the text of another."""

    def rejected(self, reject: Reject, totals: JobTotals) -> None:
        """A document could not be read or summarized."""


@dataclass(slots=True)
class JobTotals:
    """What a job has done so far.

    Attributes:
        summarized: Documents summarized.
        copied: Documents that got the summary of another with the same text.
        earlier: Documents that an earlier run had finished.
        rejected: Documents that could not be, those that an earlier run put aside included.
        skipped: Files of folders that were not read.
        cut: Summaries that the token limit cut off.
        document_tokens: Tokens of the documents summarized.
        stats: What decoding did.
        plain: What plain decoding did, where it was asked for.
        different: Documents that plain decoding summarized differently.
        notes: What else a user should know, in words.
    """

    summarized: int = 0
    copied: int = 0
    earlier: int = 0
    rejected: int = 0
    skipped: int = 0
    cut: int = 0
    document_tokens: int = 0
    stats: DecodingStats = field(default_factory=DecodingStats)
    plain: PlainFigures | None = None
    different: list[DocumentId] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def written(self) -> int:
        """Lines of results that this run wrote."""
        return self.summarized + self.copied

    def add(self, done: Summarized) -> None:
        """Count a summary."""
        summary = done.summary
        self.summarized += 1
        self.cut += summary.finish_reason == "length"
        self.document_tokens += summary.document_tokens
        self.stats = total_in_sequence([self.stats, summary.stats])
        if summary.plain is not None:
            self.plain = summary.plain if self.plain is None else self.plain + summary.plain
            if not summary.plain.identical:
                self.different.append(done.document.id)


def run_job(
    documents: Iterable[Document | Reject],
    worker: Worker,
    paths: OutputPaths,
    identity: JobIdentity,
    *,
    totals: JobTotals,
    observer: JobObserver,
    rows: int | None = None,
    retry_rejects: bool = False,
    is_part: bool = False,
    shown: Sink | None = None,
) -> None:
    """Summarize documents, writing a line for each as soon as it is done; at the end the lines are put in order.

    A line of results has `id`, the fields of `Summary.to_dict`, the hash of the document, the model and the job's
    fingerprint; a line of rejects `id` and `error`. What an earlier run finished is passed over where the paths say
    that they resume it. Equal texts are summarized once.

    Args:
        documents: The documents, read as they are needed.
        worker: What summarizes them.
        paths: Files to write, checked.
        identity: Tells this job from others.
        totals: Counted up as documents finish, so that it tells what is done when the job is stopped.
        observer: Told of each document.
        rows: Most documents that are summarized together; None leaves it to the worker.
        retry_rejects: Whether documents that failed in an earlier run are tried again.
        is_part: Whether the inputs hold documents besides these, of which there may be lines too.
        shown: Gets the lines of results where `paths` has no file for them.

    Raises:
        ConfigError: A file cannot be created, or the results are another job's.
        OSError: A line could not be written; those before it are whole.
    """
    if paths.is_journal:
        book: Book = Journal(paths, identity, retry_rejects=retry_rejects, is_part=is_part)
    else:
        book = Stream(paths, identity, shown)
    with book:
        totals.notes += book.take_notes()
        _Run(book, totals, observer).work(documents, worker, rows)
        book.finish()
        totals.notes += book.take_notes()


class _Run:
    """One run of a job.

    Args:
        book: Where its lines go.
        totals: Counted up.
        observer: Told of each document.
    """

    def __init__(self, book: Book, totals: JobTotals, observer: JobObserver) -> None:
        self._book, self._totals, self._observer = book, totals, observer
        self._twins: dict[bytes, list[DocumentId]] = {}  # of documents being summarized, by the hash of their text

    def work(self, documents: Iterable[Document | Reject], worker: Worker, rows: int | None) -> None:
        """Summarize what is not finished."""
        for outcome in worker.summarize_all(self._missing(documents), rows):
            if isinstance(outcome, Reject):
                self._put_aside(outcome)
            else:
                self._book.write(outcome.document, outcome.summary.to_dict())
                self._totals.add(outcome)
                self._observer.summarized(outcome, self._totals)
                content = bytes.fromhex(text_hash(outcome.document.text))
                for twin in self._twins.pop(content, []):
                    self._copy(twin, content)

    def _missing(self, documents: Iterable[Document | Reject]) -> Iterator[Document]:
        """The documents that have to be summarized; the others are dealt with on the way."""
        for document in documents:
            if isinstance(document, Reject):
                self._put_aside(document)
                continue
            content, before = self._book.take(document)
            if before is not None:
                self._totals.earlier += before == "finished"
                self._totals.rejected += before == "rejected"
                self._observer.passed(document.id, self._totals)
            elif content is None:
                yield document
            elif content in self._twins:
                self._twins[content].append(document.id)
            elif self._book.has(content):
                self._copy(document.id, content)
            else:
                self._twins[content] = []
                yield document

    def _copy(self, name: DocumentId, content: bytes) -> None:
        """Give a document the summary of another with the same text."""
        self._book.copy(name, content)
        self._totals.copied += 1
        self._observer.passed(name, self._totals)

    def _put_aside(self, reject: Reject) -> None:
        """Write down what failed, and those with the same text, which fail for the same reason."""
        content = bytes.fromhex(text_hash(reject.document.text)) if reject.document else None
        twins = self._twins.pop(content, []) if content else []
        for each in (reject, *(Reject(name, reject.error) for name in twins)):
            self._book.reject(each, content)
            self._totals.rejected += 1
            self._observer.rejected(each, self._totals)
