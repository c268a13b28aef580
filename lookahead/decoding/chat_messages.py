"""Chat messages: their form, contents that are lists of parts, and the turns that fit a context."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lookahead.errors import ConfigError, PromptError

# Arguments of `apply_chat_template` for the template; the others decide the form of the result.
_OF_TEMPLATE = {"tools", "documents", "chat_template", "kwargs"}


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
    contents = [message.get("content") if isinstance(message, Mapping) else None for message in messages]
    texts = [
        "".join(_text_of(part, f"message {number} of prompt {index}") for part in content)
        if isinstance(content, list | tuple)
        else None
        for number, content in enumerate(contents)
    ]
    if not any(text is not None for text in texts):
        return messages
    joined = [
        message if text is None else {**message, "content": text} for message, text in zip(messages, texts, strict=True)
    ]
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


def template_options(kwargs: Any) -> dict[str, Any]:
    """The `chat_template_kwargs` of a call; ConfigError if they are not a mapping, or set the form of the result."""
    if not isinstance(kwargs, Mapping | None):
        raise ConfigError(f"chat_template_kwargs must be a dict or None, got {kwargs!r}")
    options = dict(kwargs or {})
    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    if refused := (names - _OF_TEMPLATE) & options.keys():
        raise ConfigError(f"chat_template_kwargs cannot set {', '.join(sorted(refused))}")
    return options


def check_messages(messages: Any, name: str) -> None:
    """Refuse anything but a sequence of messages with a role and a content by a PromptError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        got = type(messages).__name__
        raise PromptError(f"{name} must be a list of messages, dicts with 'role' and 'content', got {got}")
    for number, message in enumerate(messages):
        where = f"message {number} of {name}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            got = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
            raise PromptError(f"{where} must be a dict with 'role' and 'content', got {got}")
        if "content" not in message and "tool_calls" not in message:
            raise PromptError(f"{where}, role {message['role']!r}, has no 'content'")


def newest_turns(
    messages: Sequence[Mapping[str, Any]], fits: Callable[[list[Mapping[str, Any]]], bool], *, is_long: bool
) -> list[Mapping[str, Any]]:
    """A chat without its oldest turns: as many of the newest ones as fit, all system messages and the last message.

    If the chat is much longer than the context, the time depends on the context and not on the length of the chat.

    Args:
        messages: The messages, at least one.
        fits: Whether some of the messages fit.
        is_long: Whether the chat is probably much longer than what fits; it only decides what is tried first.
    """
    *before, _ = messages
    turns, is_open = list[list[int]](), False  # the places of the messages of each turn
    for place, message in enumerate(before):
        is_system = message["role"] == "system"
        if not is_system and is_open and message["role"] != "user":
            turns[-1].append(place)
        elif not is_system:
            turns.append([place])
        is_open = not is_system

    def without(count: int) -> list[Mapping[str, Any]]:
        gone = {place for turn in turns[:count] for place in turn}
        return [message for place, message in enumerate(messages) if place not in gone]

    if not is_long and fits(list(messages)):
        return list(messages)
    too_few, enough, step = -1 if is_long else 0, len(turns), 1  # numbers of dropped turns
    while enough - too_few > 1:
        count = max(0, enough - step) if too_few < 0 else (too_few + enough) // 2
        if fits(without(count)):
            enough, step = count, 2 * step
        else:
            too_few = count
    return without(enough)
