"""What a job would take, from a few of its documents."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lookahead.documents.decode_text import Document, Reject
from lookahead.errors import LookaheadError
from lookahead.jobs.identity import text_hash

if TYPE_CHECKING:
    from lookahead.jobs.job import Worker
    from lookahead.jobs.job_options import JobOptions
    from lookahead.summarization.chunking import Parts
    from lookahead.summarization.prompt_fitter import PromptFitter

TRIED = 3
MOST_PARTS = 8  # of a document that are summarized to measure the time


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job would take.

    Attributes:
        documents: Documents that can be read.
        failed: Documents that cannot.
        copies: Documents with the text of another, which cost nothing.
        document_tokens: Tokens of those that have to be summarized.
        parts: Parts they are cut into, each summarized by itself; more than documents where some are long.
        most_new_tokens: Tokens the job may write at most, the summaries of parts not counted.
        tried: Documents that were summarized to measure the time.
        tried_parts: Parts they have.
        timed_parts: Parts that were summarized of them: neighbours, at most `MOST_PARTS` of a document.
        seconds: How long the job would take on this machine; `None` where nothing could be measured.
        cost: What that costs at a price an hour, in its currency; `None` without a price.
    """

    documents: int
    failed: int
    copies: int
    document_tokens: int
    parts: int
    most_new_tokens: int
    tried: int
    tried_parts: int
    timed_parts: int
    seconds: float | None
    cost: float | None

    def to_dict(self) -> dict[str, Any]:
        """The estimate as a JSON-ready dict."""
        return asdict(self)


def estimate_job(
    documents: Iterable[Document | Reject],
    fitter: PromptFitter,
    worker: Worker,
    options: JobOptions,
) -> Estimate:
    """Read and cut all documents, and extrapolate from the time of a few at random; nothing is written.

    Of a long document some parts are summarized, and their time is scaled by tokens to the whole.

    Args:
        documents: The documents of the job.
        fitter: Cuts them as the job would.
        worker: Summarizes them as the job would.
        options: Those of the job.
    """
    draw, price_per_hour = random.Random(options.seed), options.price_per_hour
    seen: set[str] = set()
    counted = failed = tokens = parts = 0
    tried: list[_Trial] = []
    for document in documents:
        if isinstance(document, Reject):
            failed += 1
            continue
        counted += 1
        content = text_hash(document.text)
        if content in seen:
            continue
        try:
            fitted = fitter.fit(document.text).parts
        except LookaheadError:
            counted, failed = counted - 1, failed + 1
            continue
        seen.add(content)
        tokens += fitted.tokens
        parts += len(fitted.texts)
        if len(tried) < TRIED:
            tried.append(_Trial.of(document, fitted, draw))
        elif (place := draw.randrange(len(seen))) < TRIED:  # each is drawn with the same chance
            tried[place] = _Trial.of(document, fitted, draw)
    seconds = _seconds(tried, worker, tokens, len(seen), options.rows)
    return Estimate(
        documents=counted,
        failed=failed,
        copies=counted - len(seen),
        document_tokens=tokens,
        parts=parts,
        most_new_tokens=len(seen) * options.max_new_tokens,
        tried=len(tried),
        tried_parts=sum(trial.parts for trial in tried),
        timed_parts=sum(min(trial.parts, MOST_PARTS) for trial in tried),
        seconds=seconds,
        cost=None if seconds is None or price_per_hour is None else round(seconds / 3600 * price_per_hour, 4),
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    """What is summarized of a document to measure the time, how many tokens that has, and how many the document."""

    excerpt: Document
    excerpt_tokens: int
    tokens: int
    parts: int

    @classmethod
    def of(cls, document: Document, fitted: Parts, draw: random.Random) -> _Trial:
        """All of a document, or some neighbouring parts of one that has more than those."""
        parts = len(fitted.parts)
        if parts <= MOST_PARTS:
            return cls(document, fitted.tokens, fitted.tokens, parts)
        begin = draw.randrange(parts - MOST_PARTS + 1)
        first, last = fitted.parts[begin], fitted.parts[begin + MOST_PARTS - 1]
        excerpt = Document(document.id, document.text[first.chars[0] : last.chars[1]])
        return cls(excerpt, last.tokens[1] - first.tokens[0], fitted.tokens, parts)


def _seconds(trials: list[_Trial], worker: Worker, tokens: int, documents: int, rows: int | None) -> float | None:
    """Seconds for all, half of them by documents and half by tokens: summaries are of one length, prompts are not."""
    if not trials:
        return None
    start = time.perf_counter()
    for _ in worker.summarize_all([trial.excerpt for trial in trials], rows):
        pass
    measured = time.perf_counter() - start
    tried_tokens = max(1, sum(trial.tokens for trial in trials))
    # Of the documents, had they been summarized whole.
    measured *= tried_tokens / max(1, sum(trial.excerpt_tokens for trial in trials))
    by_documents = measured / len(trials) * documents
    by_tokens = measured / tried_tokens * tokens
    return round((by_documents + by_tokens) / 2, 3)
