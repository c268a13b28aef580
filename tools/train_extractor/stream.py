"""A corpus as one flat token stream that remembers its sentences and documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numba import njit
from transformers import PreTrainedTokenizerFast

from lookahead.errors import TrainingError
from lookahead.summarization.segmentation import split_sentences
from tools.train_extractor.corpus import Document

_ENCODE_BATCH = 4096  # sentences handed to the tokenizer at once


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Tokens of whole documents, one after the other."""

    tokens: npt.NDArray[np.int32]  # each sentence begins with its leading space
    sentences: npt.NDArray[np.int64]  # where each begins in `tokens`, plus the end of the last
    documents: npt.NDArray[np.int64]  # where each begins in `sentences`, plus the number of sentences

    @classmethod
    def encode(cls, documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast) -> Stream:
        """Tokenize documents sentence by sentence.

        Sentences meet at a space, where byte-level BPE never merges, so this gives the same tokens
        as the whole text would.
        """
        pieces: list[npt.NDArray[np.int32]] = []
        starts = [0]
        for document in documents:
            sentences = [f" {sentence}" for sentence in bare_sentences(document.text)]
            for first in range(0, len(sentences), _ENCODE_BATCH):
                batch = tokenizer.backend_tokenizer.encode_batch_fast(
                    sentences[first : first + _ENCODE_BATCH], add_special_tokens=False
                )
                pieces += [np.asarray(encoded.ids, dtype=np.int32) for encoded in batch]
            starts.append(len(pieces))
        if not pieces:
            raise TrainingError("no sentence found in the training text")
        bounds = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        return cls(np.concatenate(pieces), bounds, np.asarray(starts, dtype=np.int64))

    @classmethod
    def load(cls, file: Path) -> Stream:
        """Read what `save` wrote."""
        with np.load(file) as arrays:
            return cls(arrays["tokens"], arrays["sentences"], arrays["documents"])

    def save(self, file: Path) -> None:
        """Write the stream as an .npz file."""
        np.savez(file, tokens=self.tokens, sentences=self.sentences, documents=self.documents)

    def sentence(self, index: int) -> npt.NDArray[np.int32]:
        """The tokens of one sentence."""
        return self.tokens[self.sentences[index] : self.sentences[index + 1]]

    def passage(self, first: int, size: int) -> list[npt.NDArray[np.int32]]:
        """Consecutive sentences from `first` on, at most `size` tokens together, never across documents.

        A first sentence longer than `size` is returned alone.
        """
        document = int(np.searchsorted(self.documents, first, side="right"))
        last = int(self.documents[document])
        end = int(np.searchsorted(self.sentences, self.sentences[first] + size, side="right")) - 1
        return [self.sentence(index) for index in range(first, max(first + 1, min(end, last)))]


def inverse_document_frequency(stream: Stream, vocab_size: int) -> npt.NDArray[np.float64]:
    """ln((1 + sentences) / (1 + sentences that hold the token)) for every token id.

    Sentences play the part of documents, so words found everywhere weigh next to nothing.
    """
    held_by = _sentences_that_hold(stream.tokens, stream.sentences, vocab_size)
    frequency: npt.NDArray[np.float64] = np.log(len(stream.sentences) / (1.0 + held_by))
    return frequency


@njit(cache=True)
def _sentences_that_hold(tokens, sentences, vocab_size):
    """In how many sentences each token id stands at least once."""
    held_by = np.zeros(vocab_size, dtype=np.int64)
    last = np.full(vocab_size, -1, dtype=np.int64)
    for sentence in range(len(sentences) - 1):
        for position in range(sentences[sentence], sentences[sentence + 1]):
            if last[tokens[position]] != sentence:
                last[tokens[position]] = sentence
                held_by[tokens[position]] += 1
    return held_by


def bare_sentences(text: str) -> list[str]:
    """The sentences of a text in order, without the whitespace between them.

    >>> bare_sentences('Mr. J. Hale went out. "Why?" It rained.')
    ['Mr. J. Hale went out.', '"Why?"', 'It rained.']
    """
    return [sentence.strip() for sentence in split_sentences(text)]
