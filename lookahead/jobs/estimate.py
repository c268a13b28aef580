"""What a job would take, from a few of its documents."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lookahead.errors import LookaheadError
from lookahead.files.text import Document, Reject
from lookahead.jobs.identity import text_hash

if TYPE_CHECKING:
    from lookahead.jobs.job import Worker
    from lookahead.summarize.fitting import PromptFitter

TRIED = 3


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
    seconds: float | None
    cost: float | None

    def to_dict(self) -> dict[str, Any]:
        """The estimate as a JSON-ready dict."""
        return asdict(self)


def estimate_job(
    documents: Iterable[Document | Reject],
    fitter: PromptFitter,
    worker: Worker,
    *,
    max_new_tokens: int,
    rows: int | None = None,
    price_per_hour: float | None = None,
    seed: int = 0,
) -> Estimate:
    """Read and cut all documents, summarize a few at random, and reckon from their time; nothing is written.

    Args:
        documents: The documents of the job.
        fitter: Cuts them as the job would.
        worker: Summarizes them as the job would.
        max_new_tokens: Most tokens of a summary.
        rows: Most documents that are summarized together; None leaves it to the worker.
        price_per_hour: What an hour of this machine costs.
        seed: Draws the few.
    """
    draw = random.Random(seed)
    seen: set[str] = set()
    counted = failed = tokens = parts = 0
    tried: list[tuple[Document, int]] = []
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
            tried.append((document, fitted.tokens))
        elif (place := draw.randrange(len(seen))) < TRIED:  # each is drawn with the same chance
            tried[place] = (document, fitted.tokens)
    seconds = _seconds(tried, worker, tokens, len(seen), rows)
    cost = None if seconds is None or price_per_hour is None else round(seconds / 3600 * price_per_hour, 4)
    return Estimate(
        counted, failed, counted - len(seen), tokens, parts, len(seen) * max_new_tokens, len(tried), seconds, cost
    )


def _seconds(
    tried: list[tuple[Document, int]], worker: Worker, tokens: int, documents: int, rows: int | None
) -> float | None:
    """Seconds for all, half of them by documents and half by tokens: summaries are of one length, prompts are not."""
    if not tried:
        return None
    start = time.perf_counter()
    for _ in worker.summarize_all([document for document, _ in tried], rows):
        pass
    measured = time.perf_counter() - start
    by_documents = measured / len(tried) * documents
    by_tokens = measured / max(1, sum(length for _, length in tried)) * tokens
    return round((by_documents + by_tokens) / 2, 3)
