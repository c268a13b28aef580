"""Training rows: what each kind of row teaches, and how rows become batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.train_extractor.extractive import central_sentences
from tools.train_extractor.stream import Stream

PAD_ID, EOS_ID, DOC_ID, SUM_ID = 0, 1, 2, 3
"""Ids of `tokenizer.SPECIAL_TOKENS`."""

IGNORED = -100
"""Label of a position that carries no loss."""

CHANCE = 3
"""First tokens of a copied piece that are not wanted: too short a context to say which piece it is."""

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training sequence."""

    ids: Tokens
    wanted: npt.NDArray[np.bool_]  # which tokens the model is asked to predict from those before them


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Right-padded rows of similar length, int64 (rows, length)."""

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]  # the *next* token, or `IGNORED`


@dataclass(frozen=True, slots=True, eq=False)
class RowMaker:
    """Draws rows of every kind from one stream."""

    stream: Stream
    idf: npt.NDArray[np.float64]  # weight of each token id, for the extract

    def make(self, kind: str, size: int, rng: np.random.Generator) -> Row:
        """Draw one row of a kind in `KINDS`, about `size` tokens long."""
        return KINDS[kind](self, size, rng)

    def language(self, size: int, rng: np.random.Generator) -> Row:
        """Plain text; every token is wanted."""
        ids = self._window(size, rng)
        return Row(ids, np.arange(len(ids)) > 0)

    def tiled(self, size: int, rng: np.random.Generator) -> Row:
        """A chunk of 6-64 tokens of real text, half the time shuffled, repeated to fill the row.

        Only the repetitions are wanted: they can be predicted by copying and by nothing else.
        """
        chunk = self._window(int(rng.integers(6, max(7, min(65, size // 2 + 1)))), rng)
        if rng.random() < 0.5:
            chunk = rng.permutation(chunk)
        return Row(np.resize(chunk, size), np.arange(size) > len(chunk))

    def ambiguous(self, size: int, rng: np.random.Generator) -> Row:
        """Chunks that share planted n-grams, then most of them again in another order.

        The shared 1-3 tokens continue differently in each chunk, so only a longer context tells which
        one is being copied; a third of the chunks is shuffled, so that no language model helps.
        """
        chunks = [self._window(int(rng.integers(12, 41)), rng).copy() for _ in range(max(2, size // 45))]
        chunks = [rng.permutation(chunk) if rng.random() < 0.3 else chunk for chunk in chunks]
        for _ in range(max(1, len(chunks) // 3)):
            shared = self._window(int(rng.integers(1, 4)), rng)
            for index in rng.choice(len(chunks), size=min(len(chunks), 4), replace=False):
                place = int(rng.integers(3, len(chunks[index]) - len(shared)))
                chunks[index][place : place + len(shared)] = shared
        again = rng.permutation(len(chunks))[: max(1, (2 * len(chunks)) // 3)]
        copies = [chunks[index] for index in again]
        return _copy_row([*chunks], copies, DOC_ID)

    def copy(self, size: int, rng: np.random.Generator) -> Row:
        """`<doc>` passage `<doc>` some of its sentences, at most two thirds, in order `<eos>`.

        Which sentence comes next is chance, so the first `CHANCE` tokens of each are not wanted.
        """
        passage = self._passage(size, rng)
        count = min(max(1, 2 * len(passage) // 3), int(rng.integers(3, 13)))
        chosen = np.sort(rng.choice(len(passage), size=count, replace=False))
        return _copy_row(passage, [passage[index] for index in chosen], DOC_ID)

    def summary(self, size: int, rng: np.random.Generator) -> Row:
        """`<doc>` passage `<sum>` its central sentences `<eos>`; all of the extract is wanted."""
        passage = self._passage(size, rng)
        extract = [passage[index] for index in central_sentences(passage, self.idf)]
        ids = np.concatenate(([DOC_ID], *passage, [SUM_ID], *extract, [EOS_ID])).astype(np.int32)
        return Row(ids, np.arange(len(ids)) >= 2 + sum(map(len, passage)))

    def _window(self, size: int, rng: np.random.Generator) -> Tokens:
        """`size` consecutive tokens from anywhere, fewer if the stream is shorter."""
        begin = int(rng.integers(0, max(1, len(self.stream.tokens) - size)))
        return self.stream.tokens[begin : begin + size]

    def _passage(self, size: int, rng: np.random.Generator) -> list[Tokens]:
        """Consecutive sentences of one document, about `size` tokens."""
        passage: list[Tokens] = []
        for _ in range(20):
            first = int(rng.integers(0, len(self.stream.sentences) - 1))
            passage = self.stream.passage(first, size)
            if len(passage) >= 3 and 2 * sum(map(len, passage)) >= size:
                break
        return [sentence[:size] for sentence in passage]


KINDS: Mapping[str, Callable[[RowMaker, int, np.random.Generator], Row]] = {
    "language": RowMaker.language,
    "tiled": RowMaker.tiled,
    "ambiguous": RowMaker.ambiguous,
    "copy": RowMaker.copy,
    "summary": RowMaker.summary,
}


def make_batches(rows: Sequence[Row], batch_tokens: int, rng: np.random.Generator) -> list[Batch]:
    """Sort rows by length, cut them into batches of about `batch_tokens`, shuffle the batches."""
    batches: list[Batch] = []
    pending: list[Row] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if pending and (len(pending) + 1) * len(pending[0].ids) > batch_tokens:
            batches.append(pad(pending))
            pending = []
        pending.append(row)
    if pending:
        batches.append(pad(pending))
    return [batches[index] for index in rng.permutation(len(batches))]


def pad(rows: Sequence[Row]) -> Batch:
    """Right-pad rows to the longest and shift the wanted tokens into labels."""
    length = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), length), PAD_ID, dtype=np.int64)
    labels = np.full((len(rows), length), IGNORED, dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        labels[index, : len(row.ids) - 1] = np.where(row.wanted, row.ids, IGNORED)[1:]
    return Batch(ids, labels)


def _copy_row(passage: Sequence[Tokens], copies: Sequence[Tokens], separator: int) -> Row:
    """`<doc>` passage separator copies `<eos>`, the first `CHANCE` tokens of each copy not wanted."""
    ids = np.concatenate(([DOC_ID], *passage, [separator], *copies, [EOS_ID])).astype(np.int32)
    wanted = np.zeros(len(ids), dtype=np.bool_)
    position = 2 + sum(map(len, passage))
    for piece in copies:
        wanted[position + CHANCE : position + len(piece)] = True
        position += len(piece)
    return Row(ids, wanted)
