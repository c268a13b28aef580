"""Running an engine to its end: text as it becomes final, piece by piece, or all tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from lookahead.engine.engine import Engine
from lookahead.engine.fallback import PlainLoop
from lookahead.engine.outputs import Carried
from lookahead.stats import DecodingStats
from lookahead.verification.stopping import FinishReason


class PieceStreamer(TextStreamer):
    """transformers' incremental detokenizer, collecting the text instead of printing it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **decode_kwargs: Any) -> None:
        super().__init__(tokenizer, **decode_kwargs)
        self._ready: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Keep a piece whose text can no longer change."""
        self._ready.append(text)

    def take(self) -> list[str]:
        """The non-empty pieces since the last call."""
        ready, self._ready = self._ready, []
        return [piece for piece in ready if piece]


class TextStream(Iterator[str]):
    """The text of one prompt, piece by piece, as soon as its tokens are verified.

    Args:
        engine: Of one row.
        tokenizer: Makes text of its tokens.
        finish: Called when the output has ended, and not when it is closed before.

    Attributes:
        token_ids: The new tokens so far, an end-of-sequence token included.
        finish_reason: Why the output ended, as in `GenerationResult`; None before.
    """

    def __init__(
        self, engine: Engine | PlainLoop, tokenizer: PreTrainedTokenizerBase, finish: Callable[[], None]
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._finish = finish
        self._pieces = self._run(tokenizer)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the output here."""
        self._pieces.close()

    def serving(self) -> AbstractContextManager[None]:
        """Keep the model in service for a whole block, for a loop over the pieces that will not pause."""
        return self._engine.serving()

    @property
    def stats(self) -> DecodingStats:
        """What decoding did so far."""
        return self._engine.stats[0]

    def _run(self, tokenizer: PreTrainedTokenizerBase) -> Generator[str, None, None]:
        """Turn the tokens of every step into text, whole words at a time."""
        streamer: Any = PieceStreamer(tokenizer, skip_special_tokens=True)
        for step_outputs in self._engine.run():
            for step_output in step_outputs:
                self.token_ids += step_output.tokens.tolist()
                self.finish_reason = step_output.finish_reason
                streamer.put(torch.from_numpy(step_output.tokens))
                yield from streamer.take()
        self._finish()
        streamer.end()
        yield from streamer.take()


def collect(
    engine: Engine | PlainLoop, streamer: Any = None, pad: Tensor | None = None
) -> tuple[list[list[int]], list[FinishReason]]:
    """Run an engine to its end; the new tokens of every row and why it ended.

    A streamer is shown them a column at a time, as transformers does.
    """
    outputs: list[list[int]] = [[] for _ in engine.stats]
    reasons: list[FinishReason] = ["length" for _ in engine.stats]
    running = set(range(len(outputs)))
    shown = 0
    try:
        with engine.serving():
            for step_outputs in engine.run():
                for step_output in step_outputs:
                    outputs[step_output.row].extend(step_output.tokens.tolist())
                    if step_output.finish_reason is not None:
                        reasons[step_output.row] = step_output.finish_reason
                        running.discard(step_output.row)
                whole = min(map(len, (outputs[row] for row in running))) if running else max(map(len, outputs))
                for step in range(shown, whole if streamer is not None else shown):
                    streamer.put(torch.tensor([row[step] if step < len(row) else int(pad or 0) for row in outputs]))
                shown = whole
    except Carried as carried:
        assert carried.__cause__ is not None
        raise carried.__cause__ from None
    if streamer is not None:
        streamer.end()
    return outputs, reasons
