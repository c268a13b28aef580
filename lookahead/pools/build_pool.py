"""Making pool files from documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import Input
from lookahead.documents.readers import DEFAULT_LIMIT, read_documents
from lookahead.errors import PoolError, one_line
from lookahead.ngram.chains import SEPARATOR, IntArray
from lookahead.ngram.pool_file import Pool, PoolHeader, write_pool
from lookahead.pools.open_pool import count_of_documents, pool_errors
from lookahead.utils.fingerprints import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class PoolTotals:
    """What was read for a pool so far."""

    documents: int = 0
    tokens: int = 0
    rejected: int = 0  # documents that could not be read or have no tokens
    is_full: bool = False  # whether documents were left out because the pool has its most tokens

    def __str__(self) -> str:
        skipped = f", {self.rejected:,} skipped" if self.rejected else ""
        full = "; the pool has its most tokens, and the rest was not read" if self.is_full else ""
        return f"{self.tokens:,} tokens of {count_of_documents(self.documents)} taken{skipped}{full}"


class PoolObserver(Protocol):
    """Is told of the progress of making a pool."""

    def taken(self, totals: PoolTotals) -> None:
        """A document was taken."""

    def rejected(self, reject: Reject) -> None:
        """A document was rejected."""

    def writing(self) -> None:
        """All documents were read, and the pool is written next."""


def build_pool(
    path: str,
    inputs: Sequence[Input],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add: bool = False,  # the documents of the existing pool are kept
    max_tokens: int | None = None,  # the document that exceeds them is cut, and later ones are not read
    limit: int = DEFAULT_LIMIT,  # bytes of a document
    totals: PoolTotals,
    observer: PoolObserver,
) -> PoolHeader:
    """Make a pool of the documents of all inputs. An existing file is replaced when the new one is complete."""
    fingerprint = tokenizer_fingerprint(tokenizer)
    with pool_errors(path):
        before = [np.array(Pool.open(path, fingerprint).tokens[1:])] if add else []
    documents = list(read_tokens(inputs, tokenizer, max_tokens, limit, totals, observer))
    if not documents:
        raise PoolError(f"{path}: no document to {'add' if add else 'make it of'}, {totals.rejected} could not be used")
    observer.writing()
    separator = np.array([SEPARATOR], np.int32)
    separated = [part for document in before + documents for part in (document, separator)][:-1]
    with pool_errors(path):
        return write_pool(path, np.concatenate(separated), fingerprint)


def read_tokens(
    inputs: Sequence[Input],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    limit: int,
    totals: PoolTotals,
    observer: PoolObserver,
) -> Iterator[IntArray]:
    """The documents of all inputs as int32 `[tokens]` each, at most `max_tokens` together."""
    for document in read_documents(inputs, limit=limit):
        ids = document if isinstance(document, Reject) else _tokens_of(document, tokenizer)
        if isinstance(ids, Reject):
            totals.rejected += 1
            observer.rejected(ids)
            continue
        if max_tokens is not None and totals.tokens + ids.size > max_tokens:
            totals.is_full = True
            ids = ids[: max_tokens - totals.tokens]
        if ids.size > 0:
            yield ids
            totals.documents += 1
            totals.tokens += ids.size
            observer.taken(totals)
        if totals.is_full:
            break


def _tokens_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> IntArray | Reject:
    try:
        ids: Any = tokenizer(document.text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # any error, such as a panic of a Rust tokenizer: the other documents go on
        return Reject(document.id, f"{document.id}: {type(error).__name__}: {one_line(error)}")
    if not ids:
        return Reject(document.id, f"{document.id}: the document has no tokens")
    return np.array(ids, np.int32)
