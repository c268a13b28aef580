"""Documents in, a pool file out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import Input
from lookahead.documents.readers import DEFAULT_LIMIT, read_documents
from lookahead.errors import PoolError
from lookahead.ngram.chains import SEPARATOR, IntArray
from lookahead.ngram.pool_file import Pool, PoolHeader, write_pool
from lookahead.pools.open_pool import pool_errors
from lookahead.utils.fingerprints import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class PoolTotals:
    """What was read for a pool so far.

    Attributes:
        documents: Documents taken.
        tokens: Their tokens.
        rejected: Documents that could not be read, or hold no token.
        is_full: Whether documents were left out because the pool has all the tokens it may have.
    """

    documents: int = 0
    tokens: int = 0
    rejected: int = 0
    is_full: bool = False


class PoolObserver(Protocol):
    """Watches a pool in the making, to show how it goes."""

    def taken(self, totals: PoolTotals) -> None:
        """A document was taken."""

    def rejected(self, reject: Reject) -> None:
        """A document could not be."""

    def writing(self) -> None:
        """All documents were read, and the pool is made of them now."""


def build_pool(
    path: str,
    inputs: Sequence[Input],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    limit: int = DEFAULT_LIMIT,
    totals: PoolTotals,
    observer: PoolObserver,
) -> PoolHeader:
    """Make a pool of the documents of all inputs; what is at `path` is replaced when all is done.

    Args:
        path: The file to write.
        inputs: Where the documents are.
        tokenizer: What makes tokens of them.
        max_tokens: Most tokens to take; the document that goes beyond is cut, those after it are not read.
        limit: Most bytes of a document.
        totals: Counted up as documents are read.
        observer: Told of each.

    Raises:
        PoolError: There is no document to take, or the file cannot be written; none is left behind.
    """
    documents = _read(inputs, tokenizer, max_tokens, limit, totals, observer)
    if not documents:
        raise PoolError(f"{path}: no document to make it of, {totals.rejected} could not be used")
    return _write(path, documents, tokenizer, observer)


def add_to_pool(
    path: str,
    inputs: Sequence[Input],
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int = DEFAULT_LIMIT,
    totals: PoolTotals,
    observer: PoolObserver,
) -> PoolHeader:
    """Add the documents of all inputs to a pool: a new file takes the place of the old one when all is done.

    The arguments are those of `build_pool`.

    Raises:
        PoolError: The pool cannot be opened or was made with another tokenizer, there is no document to take, or the
            file cannot be written; the old one is left as it was.
    """
    with pool_errors(path):
        before = np.array(Pool.open(path, tokenizer_fingerprint(tokenizer)).tokens[1:])
    documents = _read(inputs, tokenizer, None, limit, totals, observer)
    if not documents:
        raise PoolError(f"{path}: no document to add, {totals.rejected} could not be used")
    return _write(path, [before, *documents], tokenizer, observer)


def _write(
    path: str, documents: Sequence[IntArray], tokenizer: PreTrainedTokenizerBase, observer: PoolObserver
) -> PoolHeader:
    """Index documents and write them."""
    observer.writing()
    separator = np.array([SEPARATOR], np.int32)
    parted = [part for document in documents for part in (document, separator)][:-1]
    with pool_errors(path):
        return write_pool(path, np.concatenate(parted), tokenizer_fingerprint(tokenizer))


def _read(
    inputs: Sequence[Input],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    limit: int,
    totals: PoolTotals,
    observer: PoolObserver,
) -> list[IntArray]:
    """The documents of all inputs as int32 `[tokens]` each, at most `max_tokens` together."""
    documents: list[IntArray] = []
    for document in _tokenized(inputs, tokenizer, limit):
        if isinstance(document, Reject):
            totals.rejected += 1
            observer.rejected(document)
            continue
        if max_tokens is not None and totals.tokens + document.size > max_tokens:
            totals.is_full = True
            document = document[: max_tokens - totals.tokens]
        if document.size > 0:
            documents.append(document)
            totals.documents += 1
            totals.tokens += document.size
            observer.taken(totals)
        if totals.is_full:
            break
    return documents


def _tokenized(inputs: Sequence[Input], tokenizer: PreTrainedTokenizerBase, limit: int) -> Iterator[IntArray | Reject]:
    """Read and tokenize one document after the other."""
    for document in read_documents(inputs, limit=limit):
        yield document if isinstance(document, Reject) else _tokens_of(document, tokenizer)


def _tokens_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> IntArray | Reject:
    """The tokens of a document, without those a tokenizer puts around it, or why there are none."""
    try:
        ids: Any = tokenizer(document.text, add_special_tokens=False)["input_ids"]
    except Exception as error:
        # Whatever a tokenizer makes of one document (a panic in Rust, say), the others still get their turn.
        return Reject(document.id, f"{document.id}: {type(error).__name__}: {' '.join(str(error).split())}")
    if not ids:
        return Reject(document.id, f"{document.id}: the document has no tokens")
    return np.array(ids, np.int32)
