"""Special tokens in texts of users, read as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_ROLES = "user", "tool"
_MARKS = range(0xE000, 0xF8FF)  # characters for private use


class PlainText:
    """Renders chats so that special tokens in messages of users and tools are text.

    A mark splits each of them after its first character. The text that the chat template makes is tokenized in the
    parts between the marks, none of which holds a special token of a user.

    Args:
        tokenizer: A tokenizer with a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        texts = sorted((token.content for token in added if token.special and len(token.content) > 1), key=len)
        self._special = re.compile("|".join(map(re.escape, reversed(texts))) or "(?!)")

    def holds_special(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a message of a user or a tool has a special token in its text."""
        return any(message["role"] in _ROLES and self._special.search(message["content"]) for message in messages)

    def ids(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> list[int]:
        """The token ids of a chat that the template is known to take; `kwargs` are the variables of the template."""
        used = {character for message in messages for character in message["content"]}
        mark = next(chr(code) for code in _MARKS if chr(code) not in used)
        marked = [
            {**message, "content": self._split(message["content"], mark)}
            if message["role"] in _ROLES
            else dict(message)
            for message in messages
        ]
        continues = messages[-1]["role"] == "assistant"
        text = self._tokenizer.apply_chat_template(
            marked, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues, **kwargs
        )
        parts = self._tokenizer(text.split(mark), add_special_tokens=False, verbose=False)["input_ids"]
        return [token for part in parts for token in part]

    def _split(self, text: str, mark: str) -> str:
        while (match := self._special.search(text)) is not None:
            at = match.start() + 1
            text = text[:at] + mark + text[at:]
        return text
