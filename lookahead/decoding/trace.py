"""A decoding step by step: the source of every token, and the figures of every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.config import LookaheadConfig
from lookahead.decoding.prompts import Prompt, PromptReader, Truncation
from lookahead.decoding.text_pieces import TextPieces
from lookahead.engine.row import StepOutput
from lookahead.stats import DecodingStats


@dataclass(frozen=True, slots=True)
class TracePiece:
    """One emitted token."""

    text: str  # the text that it completes; empty for a special token or an incomplete character
    sources: tuple[str, ...] = ()  # the proposers that drafted it; empty if the model chose it
    special: str = ""  # name of a special token

    @property
    def visible(self) -> str:
        """The text with marks for line breaks, tabs and blank tokens, or the name of a special token."""
        marked = self.text.replace("\t", "⇥\t").replace("\n", "⏎\n")
        return (marked.replace(" ", "␣") if self.text.isspace() else marked) or self.special


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the model. The first is the prefill, which emits one token without a draft."""

    pieces: list[TracePiece]
    drafted: int  # draft nodes verified
    expected: float  # expected number of accepted nodes: the sum of their path probabilities
    accepted: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The decoding of one prompt."""

    prompt: str  # chat messages are rendered as the model reads them
    sources: list[str]  # names of all proposers
    steps: list[Step]
    stats: DecodingStats
    model: str = ""  # one line about the model, if known
    plain: DecodingStats | None = None  # of decoding without drafts, if measured


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
    """Generate like `lookahead.generate`, and record every step.

    Args:
        model: The model.
        tokenizer: The tokenizer of `model`.
        prompt: A text or chat messages.
        config: How drafts are made.
        truncate: Which end to cut off a prompt that is too long.
        clock: Returns the time in seconds.
        **generate_kwargs: Arguments of `model.generate`.

    Raises:
        LookaheadError: See `lookahead.generate`.
    """
    reader = PromptReader(model, tokenizer, config, truncate=truncate, **generate_kwargs)
    ids = reader.read(prompt, 0)
    engine = reader.plan([ids], facts=reader.facts).begin()
    names = list(getattr(engine, "sources", ()))
    text, steps = TextPieces(tokenizer), []
    with engine.serving():
        begin = clock()
        for step_outputs in engine.run():
            seconds = clock() - begin
            steps.append(_step(step_outputs[0], names, tokenizer, text, seconds))
            begin = clock()
    if rest := text.end():
        _add_text(steps, rest)
    read = prompt if isinstance(prompt, str) else str(tokenizer.decode(ids))
    return Trace(read, names, steps, engine.stats[0])


def _step(
    step_output: StepOutput, names: list[str], tokenizer: PreTrainedTokenizerBase, text: TextPieces, seconds: float
) -> Step:
    origins, drafted, expected = [], 0, 0.0
    if (draft := step_output.draft) is not None:
        origins = draft.tree.sources[step_output.path[1:]].tolist()
        drafted, expected = len(draft.tree) - 1, float(np.sum(draft.path_probs)) - 1.0
    pieces = []
    # The last token, and every token without a draft, is the model's own. A stop leaves fewer tokens than origins.
    for token, origin in zip(step_output.tokens.tolist(), chain(origins, repeat(0)), strict=False):
        added = text.put([token])
        is_special = not added and token in tokenizer.all_special_ids
        special = str(tokenizer.convert_ids_to_tokens(token)) if is_special else ""
        pieces.append(TracePiece(added, tuple(name for bit, name in enumerate(names) if origin >> bit & 1), special))
    return Step(pieces, drafted, expected, len(step_output.path) - 1, seconds)


def _add_text(steps: list[Step], text: str) -> None:
    """Add pending text to the last token that is not special."""
    places = [(step.pieces, i) for step in steps for i, piece in enumerate(step.pieces) if not piece.special]
    pieces, at = places[-1] if places else (steps[-1].pieces, -1)
    pieces[at] = replace(pieces[at], text=pieces[at].text + text)
