"""The working folder of a training run: tokenizer, token streams, settings, checkpoint, log."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from lookahead.errors import TrainingError
from tools.train_extractor.corpus import read_documents, split_held_out
from tools.train_extractor.phases import TRAINED_LENGTH
from tools.train_extractor.stream import Stream
from tools.train_extractor.tokenizer import train_tokenizer, wrap

_TOKENIZER_SHARE = 3  # every third document trains the tokenizer; more changes little


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What defines a run; a resumed run must have the same, but for `tokens`."""

    tokens: int  # to train on
    seed: int = 0  # of the weights and of every row drawn
    vocab_size: int = 4096
    layers: int = 4
    hidden_size: int = 256  # a multiple of 128
    positions: int = 2048  # tokens of the longest input the model declares
    hold_out_every: int = 20  # documents, of which one is kept for evaluation

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise TrainingError(f"tokens must be at least 1, got {self.tokens}")
        if self.hidden_size < 128 or self.hidden_size % 128:
            raise TrainingError(f"hidden_size must be a multiple of 128, got {self.hidden_size}")
        if self.layers < 1:
            raise TrainingError(f"layers must be at least 1, got {self.layers}")


@dataclass(frozen=True, slots=True)
class Workspace:
    """Files of one run."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        """Weights, optimizer state and progress."""
        return self.folder / "checkpoint.safetensors"

    @property
    def log(self) -> Path:
        """One JSON object a line."""
        return self.folder / "log.jsonl"

    def prepare(
        self, text: Sequence[Path], settings: Settings, say: Callable[[str], None]
    ) -> tuple[PreTrainedTokenizerFast, Stream, Stream]:
        """Train the tokenizer and encode the text, or load what an earlier start left here.

        Returns the tokenizer, the stream to train on and the held-out stream, which is the first again if the text is
        a single document.
        """
        stored = self.folder / "settings.json"
        if stored.exists():
            self._check(settings)
            say(f"continuing in {self.folder}")
            return self.tokenizer(), Stream.load(self.folder / "train.npz"), self.held_out()
        documents = read_documents(text)
        train, held_out = split_held_out(documents, settings.hold_out_every)
        say(f"read {len(train)} documents to train on and {len(held_out)} held out")
        tokenizer = train_tokenizer(
            (document.text for document in train[::_TOKENIZER_SHARE]),
            vocab_size=settings.vocab_size,
            max_length=min(settings.positions, TRAINED_LENGTH),
        )
        tokenizer.backend_tokenizer.save(str(self.folder / "tokenizer.json"))
        stream = Stream.encode(train, tokenizer)
        kept = Stream.encode(held_out, tokenizer) if held_out else stream
        stream.save(self.folder / "train.npz")
        kept.save(self.folder / "held_out.npz")
        say(f"{len(stream.tokens):,} tokens in {len(stream.sentences) - 1:,} sentences")
        partial = stored.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")
        os.replace(partial, stored)
        return tokenizer, stream, kept

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The run's tokenizer."""
        settings = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        stored = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        return wrap(stored, max_length=min(settings["positions"], TRAINED_LENGTH))

    def held_out(self) -> Stream:
        """The held-out stream."""
        return Stream.load(self.folder / "held_out.npz")

    def _check(self, settings: Settings) -> None:
        before = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        for name, value in asdict(settings).items():
            if name != "tokens" and before.get(name) != value:
                raise TrainingError(
                    f"{self.folder} holds a run with {name} = {before.get(name)}, not {value}: "
                    "repeat its options or choose another --work folder"
                )
