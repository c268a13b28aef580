"""Run a job: summarize every document once, write a line for each, and skip what an earlier run finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lookahead.documents.decode_text import Document, DocumentId, Reject
from lookahead.jobs.identity import JobIdentity, text_hash
from lookahead.jobs.journal import Journal, OutputPaths, Sink, Stream
from lookahead.jobs.result_lines import Record, copy_of
from lookahead.stats import DecodingStats, total_in_sequence

if TYPE_CHECKING:
    from lookahead.summarization.summarizer import PlainFigures, Summarized


# Takes documents, and yields them as they finish: of a `Summarizer` in this process, or of a `WorkerPool` on a cluster.
SummarizeAll = Callable[[Iterable[Document]], Iterator["Summarized | Reject"]]


class JobObserver(Protocol):
    """Shows the progress of a job. Each method is called after the line of a document is written."""

    def summarized(self, done: Summarized, totals: JobTotals) -> None:
        """A document was summarized."""

    def passed(self, name: DocumentId, totals: JobTotals) -> None:
        """A document needed no work: it was finished before, or its text equals another."""

    def rejected(self, reject: Reject, totals: JobTotals) -> None:
        """A document could not be read or summarized."""


@dataclass(slots=True)
class JobTotals:
    """What a job has done so far, in documents."""

    summarized: int = 0  # they have `document_tokens` tokens
    copied: int = 0  # with the text of another, whose summary was copied
    earlier: int = 0  # finished by an earlier run
    rejected: int = 0  # failed, in this run or an earlier one
    skipped: int = 0  # files of folders that were not read
    cut: int = 0  # summaries cut off at the token limit
    document_tokens: int = 0
    stats: DecodingStats = field(default_factory=DecodingStats)
    plain: PlainFigures | None = None  # of plain decoding, if it was asked for
    different: list[DocumentId] = field(default_factory=list)  # plain decoding gave other tokens
    notes: list[str] = field(default_factory=list)  # for the user

    @property
    def written(self) -> int:
        """Lines of results written by this run."""
        return self.summarized + self.copied


def run_job(
    documents: Iterable[Document | Reject],
    summarize_all: SummarizeAll,
    paths: OutputPaths,
    identity: JobIdentity,
    *,
    totals: JobTotals,
    observer: JobObserver,
    is_part: bool = False,
    shown: Sink | None = None,
) -> None:
    """Summarize documents and write a line for each as soon as it is finished; sort the lines at the end.

    A line of results has `id`, the fields of `Summary.to_dict`, the hash of the text, the model and the fingerprint of
    the job; a line of rejects has `id` and `error`. If `paths` resumes an earlier run, its documents are skipped, and
    those that failed too unless they are to be retried. With `is_part` the inputs hold more documents, whose lines are
    kept. `shown` gets the results if `paths` names no file. `totals` are right at any time, also if the job is
    interrupted.

    ConfigError if a file cannot be created, or the results are of another job; OSError if a line cannot be written, and
    those before it are whole.
    """
    writer: Journal | Stream
    writer = Journal(paths, identity, totals.notes, is_part=is_part) if paths.is_journal else Stream(paths, shown)
    with writer:
        run = _Run(writer, {"model": identity.model, "fingerprint": identity.fingerprint}, totals, observer)
        try:
            for outcome in summarize_all(run.unfinished(documents)):
                if isinstance(outcome, Reject):
                    run.reject(outcome)
                else:
                    run.write(outcome)
        except KeyboardInterrupt:  # it may come between a line and its count
            totals.summarized += writer.lines - totals.written
            raise
        if isinstance(writer, Journal):
            writer.finish()


class _Run:
    def __init__(self, writer: Journal | Stream, job: Record, totals: JobTotals, observer: JobObserver) -> None:
        self._writer, self._totals, self._observer = writer, totals, observer
        self._job = job  # fields of every line
        self._twins: dict[bytes, list[DocumentId]] = {}  # documents that wait for an equal text, by its hash

    def unfinished(self, documents: Iterable[Document | Reject]) -> Iterator[Document]:
        """The documents to summarize; the others are handled on the way."""
        for document in documents:
            if isinstance(document, Reject):
                self.reject(document)
                continue
            content, before = self._writer.take(document)
            if before is not None:
                self._totals.earlier += before == "finished"
                self._totals.rejected += before == "rejected"
                self._observer.passed(document.id, self._totals)
            elif content is not None and content in self._twins:
                self._twins[content].append(document.id)
            elif content is not None and (line := self._writer.line_of(content)) is not None:
                self._copy(line, document.id, content)
            else:
                if content is not None:
                    self._twins[content] = []
                yield document

    def write(self, done: Summarized) -> None:
        content = text_hash(done.document.text)
        line = {"id": done.document.id, **done.summary.to_dict(), "document": content.hex(), **self._job}
        self._writer.append(line, content)
        totals, summary = self._totals, done.summary
        totals.summarized += 1
        totals.cut += summary.finish_reason == "length"
        totals.document_tokens += summary.document_tokens
        totals.stats = total_in_sequence([totals.stats, summary.stats])
        if summary.plain is not None:
            totals.plain = summary.plain if totals.plain is None else totals.plain + summary.plain
            totals.different += [done.document.id] * (not summary.plain.identical)
        self._observer.summarized(done, self._totals)
        for twin in self._twins.pop(content, []):
            self._copy(line, twin, content)

    def reject(self, reject: Reject) -> None:
        """Write a document that failed, and those that waited for it: equal texts fail for the same reason."""
        content = text_hash(reject.document.text) if reject.document else None
        twins = self._twins.pop(content, []) if content else []
        for each in (reject, *(Reject(name, reject.error) for name in twins)):
            self._writer.reject(each, content)
            self._totals.rejected += 1
            self._observer.rejected(each, self._totals)

    def _copy(self, line: Record, name: DocumentId, content: bytes) -> None:
        self._writer.append(copy_of(line, name), content)
        self._totals.copied += 1
        self._observer.passed(name, self._totals)
