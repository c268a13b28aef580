"""Chat messages whose content is a list of parts, as clients of the OpenAI API write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lookahead.errors import PromptError


def text_messages(
    messages: Sequence[Any], index: int, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> Sequence[Any]:
    """Messages with text in place of their parts, unless the chat template reads only parts.

    Args:
        messages: Chat messages, whose content may be `[{"type": "text", "text": ...}, ...]`.
        index: The number of the prompt, for error messages.
        tokenizer: The tokenizer.
        template_kwargs: Further arguments of its chat template.

    Raises:
        PromptError: A part is not text.
    """
    contents = [each.get("content") if isinstance(each, Mapping) else None for each in messages]
    texts = [
        "".join(_text_of(part, f"message {number} of prompt {index}") for part in content)
        if isinstance(content, list | tuple)
        else None
        for number, content in enumerate(contents)
    ]
    if not any(text is not None for text in texts):
        return messages
    joined = [each if text is None else {**each, "content": text} for each, text in zip(messages, texts, strict=True)]
    try:
        shown = str(tokenizer.apply_chat_template(joined, tokenize=False, **template_kwargs))
    except Exception:  # a template may raise anything, and raises again if it does not take parts
        return messages
    # A template that reads parts iterates over the characters of a text and outputs none.
    return joined if all(text.strip() in shown for text in texts if text is not None) else messages


def _text_of(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        got = f"type {kind!r}" if isinstance(kind, str) and kind != "text" else repr(part)[:60]
        raise PromptError(
            f"{where}: parts of a content must be {{'type': 'text', 'text': ...}}, got {got}; images and sound go "
            "through the model's processor, whose output is a prompt too"
        )
    return text
