"""The text of one prompt, piece by piece."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager

from transformers import PreTrainedTokenizerBase

from lookahead.decoding.hf_outputs import return_cache
from lookahead.decoding.loops import loops
from lookahead.decoding.plan import Loop
from lookahead.decoding.scheduler import Scheduler
from lookahead.decoding.text_pieces import TextPieces
from lookahead.stats import DecodingStats
from lookahead.verification.rules import FinishReason


class TextStream(Iterator[str]):
    """The text of one prompt, piece by piece, as soon as its tokens are verified.

    The pieces add up to `tokenizer.decode(token_ids, skip_special_tokens=True)`; a piece holds no text that later
    tokens may change (`lookahead.decoding.text_pieces`).

    Attributes:
        token_ids: The new tokens so far, including an end-of-sequence token.
        finish_reason: Why the output ended, as in `GenerationResult`; None until then.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        loop: Loop,  # of one row, which the scheduler follows
        tokenizer: PreTrainedTokenizerBase,
        past: object = None,  # a cache that gets the new keys and values, unless the output is closed early
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._loop, self._past = loop, past
        self._pieces = self._decode(scheduler, tokenizer)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the output here."""
        self._pieces.close()

    def serving(self) -> AbstractContextManager[None]:
        """Keep the model in service for a block, for a loop over the pieces without pauses."""
        return self._loop.serving()

    @property
    def stats(self) -> DecodingStats:
        """The counters so far."""
        return self._loop.stats[0]

    @property
    def loops(self) -> bool:
        """Whether the output so far repeats one phrase up to its end (`lookahead.decoding.loops`)."""
        return loops(self.token_ids)

    def _decode(self, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase) -> Generator[str, None, None]:
        """Decode the tokens of every step into text."""
        text = TextPieces(tokenizer)
        while not scheduler.is_idle:
            for last in (request.last for requests in scheduler.steps() for request in requests):
                assert last is not None
                tokens = last.tokens.tolist()
                self.token_ids += tokens
                self.finish_reason = last.finish_reason
                if piece := text.put(tokens):
                    yield piece
        return_cache(self._loop, self._past)
        if piece := text.end():
            yield piece
