"""Logits processors per row, so that rows with a state can advance at different rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessor

from lookahead.drafting.proposal import Proposal
from lookahead.errors import ConfigError, UnsupportedModelError

Processor = Callable[[LongTensor, FloatTensor], FloatTensor]
"""A logits processor: takes ids `[1, tokens]` and scores `[1, vocab]`, returns scores `[1, vocab]`."""


class ForcingProcessor(LogitsProcessor):
    """A processor of one row that knows which tokens must follow, so that they are drafted; derive from it."""

    def constrain(
        self, ids: Tensor, offers: Sequence[Proposal | None], max_nodes: int, least: float
    ) -> tuple[list[Proposal | None], Proposal | None]:
        """The proposals of a row without the nodes that it forbids, and one of the tokens that it forces; None if none.

        Args:
            ids: int64 `[tokens]`, the ids of the row.
            offers: The proposals, None for an empty one; they are not modified.
            max_nodes: Maximum nodes that are forced.
            least: Minimum probability of reaching a node to check it.
        """
        raise NotImplementedError


class PerRow(LogitsProcessor):
    """Gives every row of a call its own logits processor, which may keep a state.

    A row's object is called only with that row, once for every emitted token, in order. So rows need not advance
    together, and batches and `stream_many` can draft. Every call of `generate` and every prompt of `stream_many` gets
    new objects.

    In transformers' own loop it calls the object of each row in turn, also after the end of a row, until all rows have
    ended. Ids that extend the last seen ids by one token belong to the same call. Beam search is not supported: beams
    are copied between rows, and a state cannot be.

    Args:
        factory: Makes the processor of a row, a new object at every call.

    Example:
        `model.generate(**inputs, logits_processor=[lookahead.PerRow(MyProcessor)], custom_generate=lookahead.decode)`

    Raises:
        ConfigError: The factory is not callable. At the start of a call also: it returns an object twice, or one that
            is not callable.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        if not callable(factory):
            raise ConfigError(f"per_row must be a function that makes a logits processor, got {factory!r:.60}")
        self._factory = factory
        self._made: list[Processor] = []  # the latest, kept alive so that identities stay unique
        self._seen: Tensor | None = None  # ids of the latest call of transformers' own loop
        self._prompt_width = 0

    def objects(self, rows: int) -> list[Processor]:
        """New processors for the rows of a call."""
        made: list[Processor] = []
        for _ in range(rows):
            processor = self._factory()
            if not callable(processor):
                raise ConfigError(f"per_row must make logits processors, got {processor!r:.60}")
            if any(processor is other for other in (*made, *self._made)):
                raise ConfigError(
                    f"per_row must make a new logits processor whenever it is called, got one "
                    f"{type(processor).__qualname__} twice"
                )
            made.append(cast(Processor, processor))
        self._made, self._seen = made, None
        return made

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        """Process the scores `[rows, vocab]` of all rows in transformers' own loop."""
        if not self._goes_on(input_ids):
            self._prompt_width = input_ids.shape[1]
            self.objects(len(input_ids))
        self._seen = input_ids
        rows = [
            processor(cast(LongTensor, ids[None]), cast(FloatTensor, row_scores[None]))
            for processor, ids, row_scores in zip(self._made, input_ids, scores, strict=True)
        ]
        return cast(FloatTensor, torch.cat(cast(list[Tensor], rows)))

    def _goes_on(self, ids: Tensor) -> bool:
        """Whether ids extend the last seen ids by one token per row; UnsupportedModelError if rows changed."""
        seen = self._seen
        if seen is None or len(ids) != len(self._made) or ids.shape != (len(seen), seen.shape[1] + 1):
            return False
        if torch.equal(ids[:, :-1], seen):
            return True
        if torch.equal(ids[:, : self._prompt_width], seen[:, : self._prompt_width]):
            raise UnsupportedModelError("processors per row cannot follow beams, whose rows are copied to each other")
        return False


def is_per_row(processor: object) -> bool:
    """Whether a processor is a `PerRow` with this package's `__call__`."""
    return isinstance(processor, PerRow) and type(processor).__call__ is PerRow.__call__
