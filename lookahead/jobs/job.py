"""Run a job, which summarizes every document once and skips documents finished by an earlier run; estimate its time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lookahead.documents.decode_text import Document, DocumentId, Reject
from lookahead.errors import LookaheadError
from lookahead.jobs.identity import JobIdentity, text_hash
from lookahead.jobs.journal import Journal, OutputPaths, Sink, Stream
from lookahead.jobs.line import Line
from lookahead.stats import DecodingStats, total_in_sequence

if TYPE_CHECKING:
    from lookahead.summarization.chunking import Parts
    from lookahead.summarization.prompting import PromptFitter
    from lookahead.summarization.summarizer import PlainFigures, Summarized


TRIED = 3  # documents that are summarized to measure the time
MAX_TIMED_PARTS = 8  # maximum parts summarized of each

# Yields documents as they finish: `summarize_all` of a `Summarizer` in this process or of a `WorkerPool` on a cluster.
SummarizeAll = Callable[[Iterable[Document]], Iterator["Summarized | Reject"]]


@dataclass(slots=True)
class JobTotals:
    """The progress of a job, in documents."""

    summarized: int = 0
    copied: int = 0  # whose summary was copied from a document with the same text
    earlier: int = 0  # finished by an earlier run
    rejected: int = 0  # failed, in this run or an earlier one
    skipped: int = 0  # files in folders that were not read
    cut: int = 0  # summaries cut off at the token limit
    loops: int = 0  # summaries that repeat one phrase up to their end
    stats: DecodingStats = field(default_factory=DecodingStats)
    plain: PlainFigures | None = None  # figures of plain decoding, if requested
    different: list[DocumentId] = field(default_factory=list)  # documents whose plain decoding gave other tokens
    notes: list[str] = field(default_factory=list)  # for the user

    @property
    def written(self) -> int:
        """Lines of results written by this run."""
        return self.summarized + self.copied


# Receives the outcome of a document after its line is written: its id alone if it was finished earlier or copied.
JobObserver = Callable[["Summarized | Reject | DocumentId", JobTotals], None]


def run_job(
    documents: Iterable[Document | Reject],
    summarize_all: SummarizeAll,
    paths: OutputPaths,
    identity: JobIdentity,
    *,
    totals: JobTotals,
    observer: JobObserver = lambda *_: None,
    is_part: bool = False,
    shown: Sink | None = None,
) -> None:
    """Summarize documents and write a line for each as soon as it is finished; sort the lines at the end.

    A document gets a `Line`: with its summary, or in the rejects with its error.

    Args:
        documents: The documents, and rejects for unreadable ones.
        summarize_all: Summarizes documents, like `Summarizer.summarize_all`.
        paths: The files to write. If they resume an earlier run, its finished documents are skipped, and its failed
            documents too unless `retry_rejects` is set.
        identity: The settings that the summaries depend on.
        totals: Is updated with every document. It is correct at any time, even if the job is interrupted.
        observer: Receives the outcome of each document after its line is written.
        is_part: Whether the inputs hold more documents than `documents`; the lines of the others are kept.
        shown: Receives the JSON objects of the results if `paths` has no results file.

    Raises:
        ConfigError: A file cannot be created, or the results belong to another job.
        OSError: A line cannot be written; the lines before it are whole.
        ResultsError: Another program changed the files meanwhile; the lines are kept.
    """
    writer: Journal | Stream
    writer = Journal(paths, identity, totals.notes, is_part=is_part) if paths.is_journal else Stream(paths, shown)
    with writer:
        run = _Run(writer, identity, totals, observer)
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
    def __init__(
        self, writer: Journal | Stream, identity: JobIdentity, totals: JobTotals, observer: JobObserver
    ) -> None:
        self._writer, self._identity, self._totals, self._observer = writer, identity, totals, observer
        self._twins: dict[bytes, list[DocumentId]] = {}  # documents waiting for an equal text, by its hash

    def unfinished(self, documents: Iterable[Document | Reject]) -> Iterator[Document]:
        """Yield the documents to summarize, and handle all others."""
        for document in documents:
            if isinstance(document, Reject):
                self.reject(document)
                continue
            content, earlier = self._writer.register(document)
            if earlier is not None:
                self._totals.earlier += earlier == "finished"
                self._totals.rejected += earlier == "rejected"
                self._observer(document.id, self._totals)
            elif content is None:
                yield document
            elif content in self._twins:
                self._twins[content].append(document.id)
            elif (line := self._writer.line_of(content)) is not None:
                self._copy(line, document.id, content)
            else:
                self._twins[content] = []
                yield document

    def write(self, done: Summarized) -> None:
        content = text_hash(done.document.text)
        line = Line.of(done, content, self._identity)
        self._writer.append(line, content)
        totals, summary = self._totals, done.summary
        totals.summarized += 1
        totals.cut += summary.finish_reason == "length"
        totals.loops += summary.loops
        totals.stats = total_in_sequence([totals.stats, summary.stats])
        if (plain := summary.plain) is not None:
            totals.plain = plain if totals.plain is None else totals.plain + plain
            totals.different += [done.document.id] * (not plain.identical)
        self._observer(done, self._totals)
        for twin in self._twins.pop(content, []):
            self._copy(line, twin, content)

    def reject(self, reject: Reject) -> None:
        """Write the line of a failed document, and of the documents with the same text, which would fail too."""
        content = text_hash(reject.document.text) if reject.document else None
        twins = self._twins.pop(content, []) if content else []
        for twin in (reject, *(Reject(name, reject.error) for name in twins)):
            self._writer.reject(twin, content)
            self._totals.rejected += 1
            self._observer(twin, self._totals)

    def _copy(self, line: Line, name: DocumentId, content: bytes) -> None:
        self._writer.append(line.copied(name), content)
        self._totals.copied += 1
        self._observer(name, self._totals)


@dataclass(slots=True)
class Estimate:
    """The estimated size and time of a job."""

    documents: int = 0  # readable documents
    failed: int = 0  # documents that cannot be read or fitted into prompts
    copies: int = 0  # documents with the same text as an earlier one; they take no time
    document_tokens: int = 0  # of the documents that are not copies
    parts: int = 0  # of the documents that are not copies
    most_new_tokens: int = 0  # maximum written tokens, without summaries of parts
    tried: int = 0  # documents that were summarized to measure the time
    tried_parts: int = 0  # parts of the tried documents
    timed_parts: int = 0  # parts that were summarized: adjacent ones, at most `MAX_TIMED_PARTS` of a document
    seconds: float | None = None  # on this machine; `None` without documents


def estimate_job(
    documents: Iterable[Document | Reject],
    fitter: PromptFitter,
    summarize_all: SummarizeAll,
    *,
    seed: int = 0,
) -> Estimate:
    """Read and cut all documents, summarize a few random ones, or parts of them, and extrapolate their time."""
    draw, estimate = random.Random(seed), Estimate()
    seen: set[bytes] = set()
    tried: list[tuple[Document, Parts]] = []
    for document in documents:
        if isinstance(document, Reject):
            estimate.failed += 1
            continue
        content = text_hash(document.text)
        if content in seen:
            estimate.copies += 1
            continue
        try:
            fitted = fitter.fit(document.text)
        except LookaheadError:
            estimate.failed += 1
            continue
        seen.add(content)
        estimate.document_tokens += fitted.tokens
        estimate.parts += len(fitted.parts)
        # Reservoir sampling: every document is equally likely.
        place = len(tried) if len(tried) < TRIED else draw.randrange(len(seen))
        if place < TRIED:
            tried[place : place + 1] = [(document, fitted)]
    estimate.documents = len(seen) + estimate.copies
    estimate.most_new_tokens = len(seen) * fitter.max_new_tokens
    estimate.tried = len(tried)
    estimate.tried_parts = sum(len(fitted.parts) for _, fitted in tried)
    estimate.timed_parts = sum(min(len(fitted.parts), MAX_TIMED_PARTS) for _, fitted in tried)
    if tried:
        # The mean of scaling by documents and by tokens, since only the prompts vary in length.
        by_documents = sum(fitted.tokens for _, fitted in tried) / len(tried) * len(seen)
        tokens = (by_documents + estimate.document_tokens) / 2
        estimate.seconds = round(_seconds_per_token(tried, summarize_all, draw) * tokens, 3)
    return estimate


def _seconds_per_token(tried: list[tuple[Document, Parts]], summarize_all: SummarizeAll, draw: random.Random) -> float:
    """Summarize documents, at most `MAX_TIMED_PARTS` adjacent parts of each; returns the seconds per document token."""
    excerpts, tokens = [], 0
    for document, fitted in tried:
        begin = draw.randrange(max(0, len(fitted.parts) - MAX_TIMED_PARTS) + 1)
        parts = fitted.parts[begin : begin + MAX_TIMED_PARTS]
        is_whole = len(parts) == len(fitted.parts)
        excerpts.append(document if is_whole else Document(document.id, "\n\n".join(part.text for part in parts)))
        tokens += fitted.tokens if is_whole else sum(part.tokens for part in parts)
    start = time.perf_counter()
    list(summarize_all(excerpts))
    return (time.perf_counter() - start) / max(1, tokens)
