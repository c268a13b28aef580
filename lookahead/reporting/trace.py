"""What every step of a decoding drafted, expected and accepted, and where each token came from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.config import LookaheadConfig
from lookahead.engine.row import StepOutput
from lookahead.generation.api import prepare_ids
from lookahead.generation.prompts import Prompt, Truncation, reader_of
from lookahead.generation.validation import check_options
from lookahead.models.support import validate_model
from lookahead.stats import DecodingStats

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of a character whose other bytes are to come


@dataclass(frozen=True, slots=True)
class TracePiece:
    """One emitted token.

    Attributes:
        text: What it adds to the text; empty for a special token, and where a later one completes a character.
        sources: The proposers that drafted it; none where the model itself gave it.
        special: The name of a special token, which adds no text.
    """

    text: str
    sources: tuple[str, ...] = ()
    special: str = ""

    @property
    def visible(self) -> str:
        """The text with its line breaks and tabs marked, and its spaces where it is blank; a special token's name."""
        marked = self.text.replace("\t", "⇥\t").replace("\n", "⏎\n")
        return (marked.replace(" ", "␣") if self.text.isspace() else marked) or self.special


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the model; the first is the prefill, whose token no draft gave.

    Attributes:
        pieces: The tokens it emitted, in order.
        drafted: Draft nodes verified.
        expected: Draft nodes expected to be accepted, by their chances.
        accepted: Draft nodes accepted.
        seconds: From the step's begin to its end.
    """

    pieces: list[TracePiece]
    drafted: int
    expected: float
    accepted: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """One prompt's decoding.

    Attributes:
        prompt: As given; where that is no text, what the model reads.
        sources: The names of all proposers.
        steps: In order.
        stats: Their sums.
        model: What was asked, in words; empty where that is not known.
        plain: What decoding without drafts did with the same prompt, where it was tried.
    """

    prompt: str
    sources: list[str]
    steps: list[Step]
    stats: DecodingStats
    model: str = ""
    plain: DecodingStats | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(piece.text for step in self.steps for piece in step.pieces)


def trace(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    config: LookaheadConfig | None = None,
    truncate: Truncation | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **generate_kwargs: Any,
) -> Trace:
    """Generate from one prompt, text or chat messages, and keep what every step did.

    The arguments are those of `lookahead.generate`; `clock` gives seconds.
    """
    validate_model(model)
    check_options(model, config, None, generate_kwargs, None)
    ids = reader_of(model, tokenizer, None, True, truncate, None, generate_kwargs).read(prompt, 0)
    engine = prepare_ids(model, tokenizer, [ids], config, None, None, generate_kwargs)
    names = list(getattr(engine, "sources", ()))
    texts = _Texts(tokenizer)
    steps = []
    with engine.serving():
        begin = clock()
        for step_outputs in engine.run():
            seconds = clock() - begin
            steps.append(_step(step_outputs[0], names, texts, seconds))
            begin = clock()
    read = prompt if isinstance(prompt, str) else str(tokenizer.decode(ids))
    return Trace(read, names, steps, engine.stats[0])


def _step(step_output: StepOutput, names: list[str], texts: _Texts, seconds: float) -> Step:
    """One row's part of a step."""
    tokens = step_output.tokens.tolist()
    if step_output.draft is None:
        return Step([texts.add(token) for token in tokens], 0, 0.0, 0, seconds)
    origins = step_output.draft.tree.sources[step_output.path[1:]].tolist()
    # The last token is no draft's, and a stop leaves out what was behind it.
    pieces = [
        texts.add(token, tuple(name for bit, name in enumerate(names) if origin >> bit & 1))
        for token, origin in zip(tokens, [*origins, 0], strict=False)
    ]
    expected = float(np.sum(step_output.draft.path_probs)) - 1.0
    return Step(pieces, len(step_output.draft.tree) - 1, expected, len(step_output.path) - 1, seconds)


class _Texts:
    """Turns tokens into pieces of text that add up to the text of all of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = ""
        self._specials = set(tokenizer.all_special_ids)

    def add(self, token: int, sources: tuple[str, ...] = ()) -> TracePiece:
        """What one more token adds."""
        self._tokens.append(token)
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        if text.endswith(_UNFINISHED):
            return TracePiece("", sources)
        piece, self._told = text[len(self._told) :], text
        special = str(self._tokenizer.convert_ids_to_tokens(token)) if token in self._specials and not piece else ""
        return TracePiece(piece, sources, special)
