"""Text as it becomes final, piece by piece."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase, TextStreamer


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
