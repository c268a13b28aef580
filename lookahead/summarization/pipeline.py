"""The course of a document from its parts to one summary, whoever decodes the prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lookahead.stats import DecodingStats
from lookahead.summarization.greedy import total_in_sequence
from lookahead.summarization.prompt_fitter import FittedDocument, PromptFitter
from lookahead.summarization.summary import PartSummary, Summary

if TYPE_CHECKING:
    from lookahead.verification.stopping import FinishReason


class Course(ABC):
    """A document on its way to a summary, in rounds of prompts that may be decoded beside each other.

    Args:
        fitted: The document as prompts.
        fitter: What fitted it.
        keep_parts: Whether the summary tells those of the parts.

    Attributes:
        prompts: Those of the present round; none at the end.
        limit: Most new tokens of each.
        summary: The summary, at the end.
    """

    def __init__(self, fitted: FittedDocument, fitter: PromptFitter, *, keep_parts: bool) -> None:
        self.summary: Summary | None = None
        self.prompts: list[str] = []
        self._whole, self._fitter, self._keeps = fitted, fitter, keep_parts
        self._rounds: list[DecodingStats] = []
        self._levels: list[tuple[PartSummary, ...]] = []

    @property
    def limit(self) -> int:
        """Most new tokens of each prompt."""
        return self._fitter.max_new_tokens

    def take(self, texts: Sequence[str], stats: DecodingStats, finish_reason: FinishReason = "stop") -> None:
        """Take what the prompts were continued with, and go on to the next round.

        Args:
            texts: New text of each prompt.
            stats: What decoding did, all prompts together.
            finish_reason: Why the text of the last prompt ended.
        """
        self._rounds.append(stats)
        self._advance([text.strip() for text in texts], finish_reason)

    @abstractmethod
    def _advance(self, texts: list[str], finish_reason: FinishReason) -> None:
        """Make the prompts of the next round, or end."""

    def _end(self, text: str, tokens: int, finish_reason: FinishReason) -> None:
        """Be done with a summary of so many tokens."""
        self.prompts = []
        self.summary = Summary(
            text=text,
            document_tokens=self._whole.parts.tokens,
            summary_tokens=tokens,
            parts=len(self._whole.parts.parts),
            split=self._whole.parts.split,
            stats=total_in_sequence(self._rounds),
            tree=tuple(self._levels) if self._keeps else None,
            finish_reason=finish_reason,
        )


class _Merging(Course):
    """All parts are summarized, then what came of them together, until that is one prompt."""

    def __init__(self, fitted: FittedDocument, fitter: PromptFitter, *, keep_parts: bool) -> None:
        super().__init__(fitted, fitter, keep_parts=keep_parts)
        self._leaves = [PartSummary(part.chars, part.tokens, "") for part in fitted.parts.parts]
        self._round_of(fitted, self._leaves)

    @property
    def limit(self) -> int:
        """Most new tokens of each prompt: fewer of a part, so that the parts' summaries are shorter than the parts."""
        most = self._fitter.max_new_tokens
        return most if len(self.prompts) == 1 else min(most, self._fitter.partial_summary_limit or most)

    def _advance(self, texts: list[str], finish_reason: FinishReason) -> None:
        level = tuple(
            PartSummary(node.chars, node.tokens, text, node.children)
            for node, text in zip(self._nodes, texts, strict=True)
        )
        self._levels.append(level)
        if len(texts) == 1:
            self._end(texts[0], self._rounds[-1].emitted_tokens, finish_reason)
            return
        said = [number for number, text in enumerate(texts) if text]
        if not said:
            # A model with nothing to say of any part may still have something to say of the first.
            self._round_of(self._whole.first, self._leaves[:1])
            return
        fitted = self._fitter.fit_summaries([texts[number] for number in said])
        ends = [said[part.pieces[1] - 1] + 1 for part in fitted.parts.parts[:-1]]
        nodes = _above(level, [*ends, len(level)])
        if len(nodes) >= len(texts):  # what does not become shorter is left out, for there must be an end
            fitted, nodes = fitted.first, nodes[:1]
        self._round_of(fitted, nodes)

    def _round_of(self, fitted: FittedDocument, nodes: list[PartSummary]) -> None:
        """Let prompts be decoded that stand for some nodes."""
        self.prompts, self._nodes = fitted.prompts, nodes


class _Refining(Course):
    """The first part is summarized, then each of the others together with the summary so far."""

    def __init__(self, fitted: FittedDocument, fitter: PromptFitter, *, keep_parts: bool) -> None:
        super().__init__(fitted, fitter, keep_parts=keep_parts)
        self.prompts = fitted.prompts[:1]
        self._steps: list[PartSummary] = []
        self._text, self._tokens = "", 0
        self._finish_reason: FinishReason = "stop"

    def _advance(self, texts: list[str], finish_reason: FinishReason) -> None:
        parts, number = self._whole.parts.parts, len(self._steps)
        if texts[0] or not self._text:  # a model with nothing to say of a part leaves the summary as it is
            self._text, self._tokens = texts[0], self._rounds[-1].emitted_tokens
            self._finish_reason = finish_reason
        self._steps.append(PartSummary(parts[number].chars, parts[number].tokens, self._text))
        if number + 1 < len(parts):
            self.prompts = [self._fitter.refining_prompt(self._whole, number + 1, self._text)]
        else:
            self._levels.append(tuple(self._steps))
            self._end(self._text, self._tokens, self._finish_reason)


def start_course(text: str, fitter: PromptFitter, *, keep_parts: bool) -> Course:
    """Set out with a document.

    Args:
        text: The document, not blank.
        fitter: Cuts it and renders its prompts.
        keep_parts: Whether the summary tells those of the parts.

    Raises:
        DocumentError: No part of it fits a prompt.
    """
    kind = _Refining if fitter.approach.refine else _Merging
    return kind(fitter.fit(text), fitter, keep_parts=keep_parts)


def _above(level: Sequence[PartSummary], ends: Sequence[int]) -> list[PartSummary]:
    """What summaries of summaries stand for, without a text yet; each reaches up to one of the `ends`."""
    nodes = []
    begin = 0
    for end in ends:
        begin = min(begin, end - 1)
        chars = level[begin].chars[0], level[end - 1].chars[1]
        tokens = level[begin].tokens[0], level[end - 1].tokens[1]
        nodes.append(PartSummary(chars, tokens, "", (begin, end)))
        begin = end
    return nodes
