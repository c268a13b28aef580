"""Stand-ins for the parts of a job that need a model or a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lookahead.documents.decode_text import Document, Reject
from lookahead.stats import DecodingStats
from lookahead.summarization.summarizer import Summarized, Summary


class StandIn:
    """Summarizes without a model: the first words of a document, in upper case."""

    def summarize_all(self, documents: Iterable[Document]) -> Iterator[Summarized | Reject]:
        """Summarize documents one by one, with some work for each."""
        for document in documents:
            words = document.text.upper().split()
            yield Summarized(document, Summary(" ".join(words[:8]), len(words), 8, 1, "none", DecodingStats()))
