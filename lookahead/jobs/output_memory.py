"""The memory of earlier outputs, kept in a pool file from one job to the next."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lookahead.errors import PoolError
from lookahead.models.model_state import state_of
from lookahead.models.support import vocabulary_size
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.pool_file import read_header, write_pool
from lookahead.pools.pool_files import open_pool, pool_errors
from lookahead.proposers import ProposerState
from lookahead.utils.fingerprints import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAVE_EVERY_S = 300.0
Item = TypeVar("Item")


def is_memory(path: str | os.PathLike[str]) -> bool:
    """Whether a pool file is a memory of outputs or does not exist yet; else it is a corpus."""
    with pool_errors(os.fspath(path)):
        return not os.path.lexists(path) or read_header(path).learned == 1


class OutputMemory:
    """A model's memory of earlier outputs, in a pool file. PoolError if that is damaged, or of another tokenizer."""

    def __init__(self, path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.path = path
        self.loaded = 0  # tokens read from the file
        self._outputs: ChainIndex = state_of(model).learned.of(ProposerState, ProposerState).memory.outputs
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._saved_at = time.monotonic()
        if path.exists():
            pool = open_pool(str(path), fingerprint=self._fingerprint, vocabulary=vocabulary_size(model))
            self._outputs.append_documents(np.array(pool.tokens[1:]))
            self.loaded = pool.header.tokens

    @property
    def tokens(self) -> int:
        """Tokens in memory; a full memory drops its older half."""
        return int(np.count_nonzero(self._outputs.tokens >= 0))

    def save(self) -> None:
        """Write the memory to its file, atomically; PoolError if it cannot be written."""
        self._saved_at = time.monotonic()
        tokens = np.array(self._outputs.tokens[1:])
        if np.any(tokens >= 0):
            with pool_errors(str(self.path)):
                write_pool(self.path, tokens, self._fingerprint, is_learned=True)

    def save_while(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of a job, and save now and then if that can be done, so that a killed job loses little."""
        for item in items:
            if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
                with suppress(PoolError):
                    self.save()
            yield item
