"""Answers to the questions of a chat, each asked with the whole conversation so far."""

from __future__ import annotations

from typing import Any

import lookahead

GREEDY = {"do_sample": False, "pad_token_id": 0}


def answers(model: Any, tokenizer: Any, *questions: str, system: str | None = None, **options: Any) -> list[str]:
    """The answer to every question of a chat, each asked in a new call with the whole conversation so far."""
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    said = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = lookahead.generate(model, tokenizer, messages, **{**GREEDY, "max_new_tokens": 12, **options}).texts[0]
        messages.append({"role": "assistant", "content": text})
        said.append(text)
    return said
