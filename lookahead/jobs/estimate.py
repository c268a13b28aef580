"""Which documents of the inputs a job takes, and how long they would take."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.documents.byte_sources import STDIN
from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import Input
from lookahead.documents.readers import DEFAULT_LIMIT, read_documents
from lookahead.errors import ConfigError, LookaheadError
from lookahead.jobs.identity import text_hash

if TYPE_CHECKING:
    from lookahead.jobs.job import SummarizeAll
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


@dataclass(slots=True)
class Estimate:
    """What a job would take."""

    documents: int = 0  # that can be read
    failed: int = 0  # documents that cannot
    copies: int = 0  # documents whose text equals that of another; they take no time
    document_tokens: int = 0  # of the other documents
    parts: int = 0  # they are cut into, each summarized by itself
    most_new_tokens: int = 0  # written, summaries of parts excluded
    tried: int = 0  # documents that were summarized to measure the time
    tried_parts: int = 0  # parts of those
    timed_parts: int = 0  # parts that were summarized: neighbours, at most `MOST_PARTS` of a document
    seconds: float | None = None  # on this machine; `None` without documents
    cost: float | None = None  # of that time; `None` without a price


def estimate_job(
    documents: Iterable[Document | Reject], fitter: PromptFitter, summarize_all: SummarizeAll, options: JobOptions
) -> Estimate:
    """Read and cut all documents, summarize a few at random, and extrapolate their time. Nothing is written.

    Of a long document some parts are summarized; their time is scaled to the document by tokens.
    """
    draw, estimate = random.Random(options.seed), Estimate()
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
        # Reservoir sampling: every document is as likely.
        place = len(tried) if len(tried) < TRIED else draw.randrange(len(seen))
        if place < TRIED:
            tried[place : place + 1] = [(document, fitted)]
    estimate.documents = len(seen) + estimate.copies
    estimate.most_new_tokens = len(seen) * options.max_new_tokens
    estimate.tried = len(tried)
    estimate.tried_parts = sum(len(fitted.parts) for _, fitted in tried)
    estimate.timed_parts = sum(min(len(fitted.parts), MOST_PARTS) for _, fitted in tried)
    if tried:
        # The mean of scaling by documents and by tokens, since only prompts vary in length.
        by_documents = sum(fitted.tokens for _, fitted in tried) / len(tried) * len(seen)
        tokens = (by_documents + estimate.document_tokens) / 2
        estimate.seconds = round(_seconds_per_token(tried, summarize_all, draw) * tokens, 3)
        if options.price_per_hour is not None:
            estimate.cost = round(estimate.seconds / 3600 * options.price_per_hour, 4)
    return estimate


def _seconds_per_token(tried: list[tuple[Document, Parts]], summarize_all: SummarizeAll, draw: random.Random) -> float:
    """Summarize documents, of a long one `MOST_PARTS` neighbouring parts; seconds per token of what was summarized."""
    excerpts, tokens = [], 0
    for document, fitted in tried:
        spare = len(fitted.parts) - MOST_PARTS
        if spare <= 0:
            excerpts.append(document)
            tokens += fitted.tokens
        else:
            begin = draw.randrange(spare + 1)
            first, last = fitted.parts[begin], fitted.parts[begin + MOST_PARTS - 1]
            excerpts.append(Document(document.id, document.text[first.chars[0] : last.chars[1]]))
            tokens += last.tokens[1] - first.tokens[0]
    start = time.perf_counter()
    list(summarize_all(excerpts))
    return (time.perf_counter() - start) / max(1, tokens)
