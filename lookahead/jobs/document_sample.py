"""Some of the documents of a job: the first ones, or some at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import Input
from lookahead.documents.readers import DEFAULT_LIMIT, read_documents
from lookahead.errors import ConfigError


def select_documents(
    inputs: Sequence[Input],
    *,
    first: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    limit: int = DEFAULT_LIMIT,
) -> Iterator[Document | Reject]:
    """The documents of all inputs, or some of them, in their order.

    Args:
        inputs: Where they are.
        first: Only so many from the beginning; with `sample` those of the sample.
        sample: Only so many, drawn evenly from all; the inputs are read once more for it.
        seed: The same seed draws the same ones from the same inputs.
        limit: Most bytes of a document.

    Raises:
        ConfigError: A sample is to be drawn from standard input, which cannot be read twice.
    """
    if sample is None:
        return islice(read_documents(inputs, limit=limit), first)
    if any(source.is_stdin for source in inputs):
        raise ConfigError("a sample is drawn by reading the inputs twice, and - cannot be; write it to a file first")
    count = sum(1 for _ in read_documents(inputs, limit=limit))
    drawn = set(random.Random(seed).sample(range(count), min(sample, count)))
    chosen = (document for i, document in enumerate(read_documents(inputs, limit=limit)) if i in drawn)
    return islice(chosen, first)
