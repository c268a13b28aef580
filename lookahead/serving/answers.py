"""Answers in the format of the OpenAI API: whole ones, and the chunks of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from lookahead.serving.request_schemas import ChatBody, CompletionBody
from lookahead.serving.requests import TokenLogprobs, Update
from lookahead.serving.stop_texts import StopTexts
from lookahead.serving.tool_calls import calls_in
from lookahead.stats import DecodingStats, total


class Choice:
    """One output of an answer, as it grows.

    Attributes:
        text: Its text so far.
        tokens: Number of its tokens.
        finish_reason: Why it ended; None until then.
        stats: Its counters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self.text, self.tokens = StopTexts(stops), "", 0
        self.logprobs = list[TokenLogprobs]()
        self.offset = 0  # characters of the tokens with reported log-probabilities
        self.finish_reason: str | None = None
        self.stats = DecodingStats()

    def add(self, update: Update) -> str:
        """Add an update; returns the new text that is final."""
        piece = self._stops.put(update.text, is_last=update.is_last)
        self.text += piece
        self.tokens += len(update.tokens)
        self.logprobs += update.logprobs
        self.stats = update.stats
        if self.has_stopped or update.end is not None:
            self.finish_reason = "length" if update.end == "length" and not self.has_stopped else "stop"
        return piece

    @property
    def has_stopped(self) -> bool:
        """Whether a stop text was found, which ends the output."""
        return self.stop is not None

    @property
    def stop(self) -> str | None:
        """The stop text that was found."""
        return self._stops.stop


class Answer:
    """The answer to one request.

    Args:
        body: The request.
        model: The model name in the answer.
        tokenizer: The tokenizer.
        prompt_tokens: Tokens of each of its prompts.
    """

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        prompt_tokens: Sequence[int],
    ) -> None:
        self._body, self._tokenizer, self._prompt_tokens, self.model = body, tokenizer, prompt_tokens, model
        self._is_chat = isinstance(body, ChatBody)
        self.choices = [Choice(body.stops) for _ in range(len(prompt_tokens) * body.choices)]
        self._tools: list[str] = []
        if isinstance(body, ChatBody) and body.tool_choice != "none":
            self._tools = [tool.function.name for tool in body.tools or []]
        kind = "chat.completion" if self._is_chat else "text_completion"
        name = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """The whole answer, after all its outputs have ended."""
        choices = [self._choice(i, each) for i, each in enumerate(self.choices)]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Token counts; drafting counters are under `lookahead`."""
        stats = total([choice.stats for choice in self.choices])
        prompt, new = sum(self._prompt_tokens), sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(choice.stats.reused_tokens for choice in self.choices)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.accepted_prediction_tokens,
                "rejected_prediction_tokens": stats.rejected_prediction_tokens,
            },
            "lookahead": {
                "passes": stats.target_forwards,
                "drafted_tokens": stats.drafted_tokens,
                "accepted_tokens": stats.accepted_tokens,
                "drafted": dict(stats.drafted_by_source),
                "accepted": dict(stats.accepted_by_source),
            },
        }

    def begin(self) -> list[dict[str, Any]]:
        """The first chunks of a stream."""
        if not self._is_chat:
            return []
        return [self._chunk(i, {"role": "assistant", "content": ""}, None, []) for i in range(len(self.choices))]

    def add(self, i: int, update: Update) -> list[dict[str, Any]]:
        """Add an update of an output; returns its chunks for a stream."""
        choice = self.choices[i]
        piece = choice.add(update)
        is_last = update.is_last or choice.has_stopped
        if self._tools:  # a call can be recognized only at the end
            if not is_last:
                return []
            piece, calls = calls_in(choice.text, self._tools)
            chunks = [self._chunk(i, {"content": piece}, None, choice.logprobs)] if piece else []
            if calls:
                numbered = [{"index": at, **call} for at, call in enumerate(calls)]
                chunks.append(self._chunk(i, {"tool_calls": numbered}, None, []))
            return [*chunks, self._chunk(i, {}, "tool_calls" if calls else choice.finish_reason, [])]
        chunks = []
        if piece or update.logprobs:
            chunks.append(self._chunk(i, {"content": piece}, None, update.logprobs))
        if is_last:
            chunks.append(self._chunk(i, {}, choice.finish_reason, []))
        return chunks

    def end(self) -> list[dict[str, Any]]:
        """The last chunk of a stream, if usage was requested."""
        if not self._body.includes_usage:
            return []
        return [{**self._head, "object": self._chunk_kind, "choices": [], "usage": self.usage()}]

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(
        self, i: int, delta: dict[str, Any], reason: str | None, logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        told = self._logprobs(self.choices[i], logprobs) if logprobs else None
        choice: dict[str, Any] = {"index": i, "logprobs": told, "finish_reason": reason}
        choice["stop_reason"] = None if reason is None else self.choices[i].stop
        choice |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return {**self._head, "object": self._chunk_kind, "choices": [choice]}

    def _choice(self, i: int, choice: Choice) -> dict[str, Any]:
        told = self._logprobs(choice, choice.logprobs) if choice.logprobs else None
        made: dict[str, Any] = {"index": i, "finish_reason": choice.finish_reason, "logprobs": told}
        made["stop_reason"] = choice.stop
        if not self._is_chat:
            return made | {"text": choice.text}
        text, calls = calls_in(choice.text, self._tools) if self._tools else (choice.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if calls:
            message["tool_calls"], made["finish_reason"] = calls, "tool_calls"
        return made | {"message": message}

    def _logprobs(self, choice: Choice, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if self._is_chat:
            return {"content": [self._entry(each) for each in found], "refusal": None}
        texts = [self._text(each.token) for each in found]
        *offsets, choice.offset = accumulate(map(len, texts), initial=choice.offset)
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [{self._text(token): log for token, log in each.top} for each in found],
            "text_offset": offsets,
        }

    def _entry(self, each: TokenLogprobs) -> dict[str, Any]:
        entry = self._named(each.token, each.logprob)
        return entry | {"top_logprobs": [self._named(token, log) for token, log in each.top]}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        # A token may be part of a character; its text then does not show its bytes.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))
