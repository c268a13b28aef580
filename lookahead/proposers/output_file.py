"""The memory of earlier outputs, kept in a pool file for later jobs. Several jobs may add to it concurrently."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lookahead.errors import PoolError
from lookahead.model.facts import vocabulary_size
from lookahead.model.model_state import state_of
from lookahead.ngram.chains import SEPARATOR, ChainIndex, IntArray
from lookahead.ngram.pool_file import Pool, PoolHeader, write_pool
from lookahead.proposers import ProposerState
from lookahead.proposers.ngram import OUTPUT_TOKENS
from lookahead.proposers.pool_files import changing, join_documents, open_pool, pool_errors
from lookahead.utils.fingerprints import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAVE_EVERY_S = 300.0
Item = TypeVar("Item")


class OutputFile:
    """A model's memory of earlier outputs in a pool file. PoolError if it is damaged or of another tokenizer."""

    def __init__(self, path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.path = path
        self.loaded = 0  # tokens read from the file
        self._outputs: ChainIndex = state_of(model).learned.of(ProposerState, ProposerState).memory.outputs
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._saved_at = time.monotonic()
        self._saved: Counter[bytes] = Counter()  # outputs that were loaded or saved, by their tokens
        if path.exists():
            pool = open_pool(str(path), fingerprint=self._fingerprint, vocabulary=vocabulary_size(model))
            self._outputs.append_documents(np.array(pool.tokens[1:]))
            self._saved.update(map(_key, _documents_of(pool.tokens)))
            self.loaded = pool.header.tokens

    @staticmethod
    def takes(path: str | os.PathLike[str]) -> bool:
        """Whether a pool file is for outputs, or does not exist yet; otherwise it is a corpus."""
        with pool_errors(os.fspath(path)):
            return not os.path.lexists(path) or PoolHeader.read(path).learned == 1

    @property
    def tokens(self) -> int:
        """Tokens in memory; a full memory drops its older half."""
        return int(np.count_nonzero(self._outputs.tokens >= 0))

    def save(self) -> None:
        """Add the outputs since the last save to the file, under its lock and atomically; PoolError if that fails.

        Outputs of other jobs are kept. If there are more outputs than a memory holds, the oldest are dropped. If the
        file was removed, all outputs are written.
        """
        self._saved_at = time.monotonic()
        outputs = _documents_of(self._outputs.tokens)
        with changing(str(self.path)):
            stored = _documents_of(self._read()) if os.path.lexists(self.path) else []
            known = self._saved if stored else Counter[bytes]()
            left, new = known.copy(), []
            for i, output in enumerate(outputs):
                left[key := _key(output)] -= 1
                # The first output may be the end of a saved one whose beginning was dropped.
                if left[key] < 0 and (i or not any(each.endswith(key) for each in known)):
                    new.append(output)
            if new:
                tokens = join_documents(stored + new)
                newest = tokens if tokens.size < OUTPUT_TOKENS else tokens[-OUTPUT_TOKENS // 2 :]
                write_pool(self.path, newest, self._fingerprint, is_learned=True)
        self._saved = Counter(map(_key, outputs))

    def _read(self) -> IntArray:
        pool = Pool.open(self.path, self._fingerprint)
        if not pool.header.learned:
            raise ValueError(f"{self.path}: replaced by a corpus while the job ran; its outputs are not added")
        return pool.tokens

    def save_while(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of a job, and save every `SAVE_EVERY_S` seconds, so that a killed job loses little."""
        for item in items:
            if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
                with suppress(PoolError):
                    self.save()
            yield item


def _documents_of(tokens: IntArray) -> list[IntArray]:
    """The documents of an arena, int32 `[tokens]` each, without empty ones."""
    parts = np.split(tokens, np.flatnonzero(tokens == SEPARATOR))
    return [np.array(part[1:]) for part in parts[1:] if part.size > 1]


def _key(document: IntArray) -> bytes:
    return document.tobytes()
