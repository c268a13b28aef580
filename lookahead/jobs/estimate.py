"""Which documents of the inputs a job takes, and how long they would take."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lookahead.documents.byte_sources import STDIN
from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import Input
from lookahead.documents.readers import DEFAULT_LIMIT, read_documents
from lookahead.errors import ConfigError, LookaheadError
from lookahead.jobs.identity import text_hash

if TYPE_CHECKING:
    from lookahead.jobs.job import Worker
    from lookahead.jobs.job_options import JobOptions
    from lookahead.summarization.chunking import Parts
    from lookahead.summarization.prompting import PromptFitter

TRIED = 3  # documents that are summarized to measure the time
MOST_PARTS = 8  # parts of each that are summarized


def select_documents(
    inputs: Sequence[Input],
    *,
    first: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    limit: int = DEFAULT_LIMIT,
) -> Iterator[Document | Reject]:
    """All documents of the inputs, or the first of them or of a random sample, in their order.

    A sample is drawn by reading the inputs once more. `limit` is the largest size of a document, in bytes.
    """
    if sample is None:
        return islice(read_documents(inputs, limit=limit), first)
    for path in (source.path for source in inputs):
        if path == STDIN or Path(path).is_fifo():
            raise ConfigError(
                f"a sample is drawn by reading the inputs twice, and {path} cannot be; write it to a file first"
            )
    count = sum(1 for _ in read_documents(inputs, limit=limit))
    drawn = set(random.Random(seed).sample(range(count), min(sample, count)))
    chosen = (document for i, document in enumerate(read_documents(inputs, limit=limit)) if i in drawn)
    return islice(chosen, first)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job would take."""

    documents: int  # that can be read
    failed: int  # documents that cannot
    copies: int  # documents whose text equals that of another; they take no time
    document_tokens: int  # of the other documents
    parts: int  # they are cut into, each summarized by itself
    most_new_tokens: int  # written, summaries of parts excluded
    tried: int  # documents that were summarized to measure the time
    tried_parts: int  # parts of those
    timed_parts: int  # parts that were summarized: neighbours, at most `MOST_PARTS` of a document
    seconds: float | None  # on this machine; `None` without documents
    cost: float | None  # of that time; `None` without a price


def estimate_job(
    documents: Iterable[Document | Reject], fitter: PromptFitter, worker: Worker, options: JobOptions
) -> Estimate:
    """Read and cut all documents, summarize a few at random, and extrapolate their time. Nothing is written.

    Of a long document some parts are summarized; their time is scaled to the document by tokens.
    """
    draw, price_per_hour = random.Random(options.seed), options.price_per_hour
    seen: set[bytes] = set()
    readable = failed = tokens = parts = 0
    trials: list[_Trial] = []
    for document in documents:
        if isinstance(document, Reject):
            failed += 1
            continue
        content = text_hash(document.text)
        if content in seen:
            readable += 1
            continue
        try:
            fitted = fitter.fit(document.text)
        except LookaheadError:
            failed += 1
            continue
        readable += 1
        seen.add(content)
        tokens += fitted.tokens
        parts += len(fitted.parts)
        if len(trials) < TRIED:
            trials.append(_Trial.of(document, fitted, draw))
        elif (place := draw.randrange(len(seen))) < TRIED:  # reservoir sampling: every document is as likely
            trials[place] = _Trial.of(document, fitted, draw)
    seconds = _extrapolate(trials, worker, tokens, len(seen), options.rows)
    return Estimate(
        documents=readable,
        failed=failed,
        copies=readable - len(seen),
        document_tokens=tokens,
        parts=parts,
        most_new_tokens=len(seen) * options.max_new_tokens,
        tried=len(trials),
        tried_parts=sum(trial.parts for trial in trials),
        timed_parts=sum(min(trial.parts, MOST_PARTS) for trial in trials),
        seconds=seconds,
        cost=None if seconds is None or price_per_hour is None else round(seconds / 3600 * price_per_hour, 4),
    )


class _Trial(NamedTuple):  # the part of a document that is summarized to measure the time, and the size of the whole
    excerpt: Document
    excerpt_tokens: int
    tokens: int
    parts: int

    @classmethod
    def of(cls, document: Document, fitted: Parts, draw: random.Random) -> _Trial:
        """The whole document, or `MOST_PARTS` neighbouring parts of a longer one."""
        parts = len(fitted.parts)
        if parts <= MOST_PARTS:
            return cls(document, fitted.tokens, fitted.tokens, parts)
        begin = draw.randrange(parts - MOST_PARTS + 1)
        first, last = fitted.parts[begin], fitted.parts[begin + MOST_PARTS - 1]
        excerpt = Document(document.id, document.text[first.chars[0] : last.chars[1]])
        return cls(excerpt, last.tokens[1] - first.tokens[0], fitted.tokens, parts)


def _extrapolate(trials: list[_Trial], worker: Worker, tokens: int, documents: int, rows: int | None) -> float | None:
    """Seconds for all documents: the mean of scaling by documents and by tokens, since only prompts vary in length."""
    if not trials:
        return None
    start = time.perf_counter()
    for _ in worker.summarize_all([trial.excerpt for trial in trials], rows):
        pass
    measured = time.perf_counter() - start
    tried_tokens = max(1, sum(trial.tokens for trial in trials))
    measured *= tried_tokens / max(1, sum(trial.excerpt_tokens for trial in trials))  # from excerpts to documents
    by_documents = measured / len(trials) * documents
    by_tokens = measured / tried_tokens * tokens
    return round((by_documents + by_tokens) / 2, 3)
