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
from lookahead.serving.tool_calls import CallReader
from lookahead.stats import DecodingStats, total


class Choice:
    """One output of an answer, as it grows.

    Args:
        stops: Finds the texts that end it.
        reader: Reads its tool calls; None if it can have none.

    Attributes:
        text: Its text so far.
        tokens: Number of its tokens.
        finish_reason: Why it ended; None until then.
        stats: Its counters.
    """

    def __init__(self, stops: StopTexts, reader: CallReader | None = None) -> None:
        self._stops, self.reader, self.text, self.tokens = stops, reader, "", 0
        self.logprobs = list[TokenLogprobs]()
        self.offset = 0  # characters of the tokens with reported log-probabilities
        self.finish_reason: str | None = None
        self.stats = DecodingStats()

    def add(self, update: Update) -> list[dict[str, Any]]:
        """Add an update; returns what is new and final, as deltas of a message."""
        piece = self._stops.put(update.text, is_last=update.is_last)
        self.text += piece
        self.tokens += len(update.tokens)
        self.logprobs += update.logprobs
        self.stats = update.stats
        if self.has_stopped or update.end is not None:
            self.finish_reason = "length" if update.end == "length" and not self.has_stopped else "stop"
        if self.reader is None:
            return [{"content": piece}] if piece else []
        deltas = self.reader.put(piece, is_last=update.is_last or self.has_stopped)
        if self.finish_reason and self.reader.calls and not self.reader.is_cut:
            self.finish_reason = "tool_calls"
        return deltas

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
        prompts: Token ids of each of its prompts.
        logprobs: Those of each prompt, if requested.
    """

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[list[int]],
        logprobs: Sequence[list[TokenLogprobs]] = (),
    ) -> None:
        self._body, self._tokenizer, self._prompts, self.model = body, tokenizer, prompts, model
        self._prompt_logprobs, self._texts = logprobs, dict[int, str]()
        self._is_chat = isinstance(body, ChatBody)
        names, forced = list[str](), body.forced_tools if isinstance(body, ChatBody) else None
        if isinstance(body, ChatBody) and body.tool_choice != "none":
            names = [tool.function.name for tool in forced or body.tools or []]
        self.choices = [
            Choice(
                StopTexts(body.stops, keeps=body.include_stop_str_in_output),
                CallReader(names, is_forced=forced is not None) if names else None,
            )
            for _ in range(len(prompts) * body.choices)
        ]
        for i, choice in enumerate(self.choices):
            at = i // body.choices
            if isinstance(body, CompletionBody) and body.echo:
                given = body.prompts[at]
                is_whole = isinstance(given, str) and body.truncate_prompt_tokens is None
                choice.text = given if is_whole else str(tokenizer.decode(prompts[at]))
                choice.logprobs += logprobs[at] if body.logprobs is not None else []
            if body.max_tokens == 0:
                choice.finish_reason = "length"
        kind = "chat.completion" if self._is_chat else "text_completion"
        name = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """The whole answer, after all its outputs have ended."""
        choices = [self._choice(i, each) for i, each in enumerate(self.choices)]
        told = {"prompt_logprobs": choices[0]["prompt_logprobs"]} if self._is_chat and self._prompt_logprobs else {}
        return {**self._head, "choices": choices, "usage": self.usage(), **told}

    def usage(self) -> dict[str, Any]:
        """Token counts; drafting counters are under `lookahead`."""
        stats = total([choice.stats for choice in self.choices])
        prompt, new = sum(map(len, self._prompts)), sum(choice.tokens for choice in self.choices)
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
        if self._is_chat:
            return [self._chunk(i, {"role": "assistant", "content": ""}, None, []) for i in range(len(self.choices))]
        begun = [(i, each) for i, each in enumerate(self.choices) if each.text or each.finish_reason]
        return [self._chunk(i, {"content": each.text}, each.finish_reason, each.logprobs) for i, each in begun]

    def add(self, i: int, update: Update) -> list[dict[str, Any]]:
        """Add an update of an output; returns its chunks for a stream."""
        choice = self.choices[i]
        deltas = choice.add(update)
        if update.logprobs and not (deltas and "content" in deltas[0]):
            deltas = [{"content": ""}, *deltas]
        logprobs = [update.logprobs, *([] for _ in deltas)]
        chunks = [self._chunk(i, delta, None, logs) for delta, logs in zip(deltas, logprobs, strict=False)]
        if update.is_last or choice.has_stopped:
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
        if self._body.prompt_logprobs is not None:
            read = self._prompt_logprobs[i // self._body.choices]
            made["prompt_logprobs"] = [None, *(self._of_prompt(each) for each in read[1:])]
        if not self._is_chat:
            return made | {"text": choice.text}
        text = choice.text if choice.reader is None else choice.reader.text
        calls = [] if choice.reader is None else choice.reader.calls
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        return made | {"message": {**message, "tool_calls": calls} if calls else message}

    def _logprobs(self, choice: Choice, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if self._is_chat:
            return {"content": [self._entry(each) for each in found], "refusal": None}
        texts = [self._text(each.token) for each in found]
        *offsets, choice.offset = accumulate(map(len, texts), initial=choice.offset)
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [
                None if each.logprob is None else {self._text(token): log for token, log in each.top} for each in found
            ],
            "text_offset": offsets,
        }

    def _of_prompt(self, each: TokenLogprobs) -> dict[str, Any]:
        """A token of a prompt, in the words of vLLM."""
        ranks = {token: at + 1 for at, (token, _) in enumerate(each.top)}
        logprobs = dict([(each.token, each.logprob), *each.top[: self._body.prompt_logprobs]])
        return {
            str(token): {"logprob": log, "rank": ranks.get(token), "decoded_token": self._text(token)}
            for token, log in logprobs.items()
        }

    def _entry(self, each: TokenLogprobs) -> dict[str, Any]:
        entry = self._named(each.token, each.logprob)
        return entry | {"top_logprobs": [self._named(token, log) for token, log in each.top]}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        # A token may be part of a character; its text then does not show its bytes.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token]))
        return self._texts[token]
