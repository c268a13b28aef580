"""Answers: those of the OpenAI API, and what the answers of other APIs, which have parts, share."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from lookahead.serving.api_errors import ApiError
from lookahead.serving.request_schemas import ChatBody, CompletionBody
from lookahead.serving.requests import TokenLogprobs, Update
from lookahead.serving.tool_calls import CallReader, StopTexts
from lookahead.stats import DecodingStats, total

Event = dict[str, Any]


class Choice:
    """One output of an answer, as it grows.

    Args:
        stops: Finds the texts that end it.
        reader: Reads its text and its tool calls.

    Attributes:
        tokens: Number of its tokens.
        logprobs: Those of its tokens, if requested.
        offset: Characters of the tokens with reported log-probabilities.
        finish_reason: Why it ended; None until then.
        stats: Its counters.
    """

    def __init__(self, stops: StopTexts, reader: CallReader) -> None:
        self._stops, self.reader, self.tokens, self.offset = stops, reader, 0, 0
        self.logprobs, self.stats = list[TokenLogprobs](), DecodingStats()
        self.finish_reason: str | None = None

    def add(self, update: Update) -> list[dict[str, Any]]:
        """Add an update; returns what is new and final, as deltas of a message: the first has the log-probabilities."""
        piece = self._stops.put(update.text, is_last=update.is_last)
        self.tokens += len(update.tokens)
        self.logprobs += update.logprobs
        self.stats = update.stats
        has_stopped = self.stop is not None
        deltas = self.reader.put(piece, is_last=update.is_last or has_stopped)
        if has_stopped or update.end is not None:
            self.finish_reason = "length" if update.end == "length" and not has_stopped else "stop"
            if self.reader.calls and not self.reader.is_cut:
                self.finish_reason = "tool_calls"
        is_late = update.logprobs and not (deltas and "content" in deltas[0])  # text of a token comes with another
        return [{"content": ""}, *deltas] if is_late else deltas

    @property
    def stop(self) -> str | None:
        """The stop text that was found, which ends the output."""
        return self._stops.stop


class Answer:
    """The answer to one request.

    Args:
        body: The request.
        model: The model name in the answer.
        tokenizer: The tokenizer.
        prompts: Token ids of each of its prompts.
        logprobs: Those of each prompt, if requested.

    Attributes:
        choices: Its outputs.
        end: What ends a stream.
    """

    end = "data: [DONE]\n\n"

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[list[int]],
        logprobs: Sequence[list[TokenLogprobs]] = (),
    ) -> None:
        self._body, self._prompts, self._model, self._prompt_logprobs = body, prompts, model, logprobs
        self._text = cache(lambda token: str(tokenizer.decode([token])))
        self._is_chat = isinstance(body, ChatBody)
        names, forced = list[str](), body.forced_tools if isinstance(body, ChatBody) else None
        if isinstance(body, ChatBody) and body.tool_choice != "none":
            names = [tool.function.name for tool in forced or body.tools or []]
        self.choices = list[Choice]()
        for i in range(len(prompts) * body.n):
            stops = StopTexts(body.stop, keeps=body.include_stop_str_in_output)
            choice, at = Choice(stops, CallReader(names, is_forced=forced is not None)), i // body.n
            if isinstance(body, CompletionBody) and body.echo:
                prompt = body.prompts[at]
                is_whole = isinstance(prompt, str) and body.truncate_prompt_tokens is None
                choice.reader.text = prompt if is_whole else str(tokenizer.decode(prompts[at]))
                choice.logprobs += logprobs[at] if body.logprobs is not None else []
            if body.max_tokens == 0:
                choice.finish_reason = "length"
            self.choices.append(choice)
        self._kind = "chat.completion" if self._is_chat else "text_completion"
        name = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head: Event = {"id": name, "created": int(time.time()), "model": model}

    def begin(self) -> Iterable[Event]:
        """The first events of a stream."""
        if self._is_chat:
            return [self._chunk(i, {"role": "assistant", "content": ""}, None, []) for i in range(len(self.choices))]
        begun = [(i, choice) for i, choice in enumerate(self.choices) if choice.reader.text or choice.finish_reason]
        return [
            self._chunk(i, {"content": choice.reader.text}, choice.finish_reason, choice.logprobs)
            for i, choice in begun
        ]

    def add(self, i: int, update: Update) -> Iterable[Event]:
        """Add an update of an output; returns its events in a stream."""
        choice = self.choices[i]
        logprobs = [update.logprobs]
        for delta in choice.add(update):
            yield self._chunk(i, delta, None, logprobs.pop() if logprobs else [])
        if choice.finish_reason is not None:
            yield self._chunk(i, {}, choice.finish_reason, [])

    def finish(self) -> Iterable[Event]:
        """The last events of a stream."""
        options = self._body.stream_options
        return [{**self._chunked([]), "usage": self.usage()}] if options and options.include_usage else []

    def failed(self, error: ApiError) -> Event:
        """The last event of a stream that ends with an error."""
        return error.body

    def whole(self) -> Event:
        """The whole answer, after all its outputs have ended."""
        choices = list[Event]()
        for i, choice in enumerate(self.choices):
            text, calls = choice.reader.text, choice.reader.calls
            message: Event = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
            message |= {"tool_calls": calls} if calls else {}
            choices.append(self._choice(i, "message", message, choice.finish_reason, choice.logprobs))
            if self._body.prompt_logprobs is not None:
                read = self._prompt_logprobs[i // self._body.n]
                choices[i]["prompt_logprobs"] = [None, *(self._of_prompt(token) for token in read[1:])]
        told = {"prompt_logprobs": choices[0]["prompt_logprobs"]} if self._is_chat and self._prompt_logprobs else {}
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.usage(), **told}

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

    def _chunk(self, i: int, delta: Event, reason: str | None, logprobs: Sequence[TokenLogprobs]) -> Event:
        return self._chunked([self._choice(i, "delta", delta, reason, logprobs)])

    def _chunked(self, choices: list[Event]) -> Event:
        return {**self._head, "object": f"{self._kind}.chunk" if self._is_chat else self._kind, "choices": choices}

    def _choice(
        self, i: int, name: str, content: Event, reason: str | None, logprobs: Sequence[TokenLogprobs]
    ) -> Event:
        """A choice with a message, or a delta of one."""
        choice = self.choices[i]
        if isinstance(self._body, ChatBody) and self._body.functions:  # the older form of tools: there is one call
            for call in content.pop("tool_calls", ())[:1]:
                if not call.get("index"):
                    content["function_call"] = call["function"]
            reason = "function_call" if reason == "tool_calls" else reason
        told: Event = {name: content} if self._is_chat else {"text": content.get("content", "")}
        told["logprobs"] = self._logprobs(choice, logprobs) if logprobs else None
        return {"index": i, **told, "finish_reason": reason, "stop_reason": choice.stop if reason else None}

    def _logprobs(self, choice: Choice, tokens: Sequence[TokenLogprobs]) -> Event:
        if self._is_chat:
            return {"content": self._entries(tokens), "refusal": None}
        texts = [self._text(token.token) for token in tokens]
        *offsets, choice.offset = accumulate(map(len, texts), initial=choice.offset)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None if entry.logprob is None else {self._text(token): log for token, log in entry.top}
                for entry in tokens
            ],
            "text_offset": offsets,
        }

    def _of_prompt(self, entry: TokenLogprobs) -> dict[str, Any]:
        """A token of a prompt, in the words of vLLM."""
        ranks = {token: at + 1 for at, (token, _) in enumerate(entry.top)}
        logprobs = dict([(entry.token, entry.logprob), *entry.top[: self._body.prompt_logprobs]])
        return {
            str(token): {"logprob": log, "rank": ranks.get(token), "decoded_token": self._text(token)}
            for token, log in logprobs.items()
        }

    def _entries(self, tokens: Sequence[TokenLogprobs]) -> list[Event]:
        """Tokens of a chat with their log-probabilities."""
        return [
            self._named(token.token, token.logprob) | {"top_logprobs": [self._named(*top) for top in token.top]}
            for token in tokens
        ]

    def _named(self, token: int, logprob: float | None) -> Event:
        text = self._text(token)
        # A token may be part of a character; its text then does not show its bytes.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class PartsAnswer(Answer):
    """The answer of an API that has a chat's text and tool calls as parts, each with a beginning and an end.

    Attributes:
        parts: The parts so far.
    """

    end = ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.parts = list[Event]()

    def add(self, i: int, update: Update) -> Iterator[Event]:
        return self._grow(self.choices[i].add(update), self._entries(update.logprobs))

    def whole(self) -> Event:
        choice, read = self.choices[0], self.choices[0].reader
        deltas: list[Event] = [{"content": read.text}] if read.text or choice.logprobs else []
        _ = [*self._grow([*deltas, *({"tool_calls": [call]} for call in read.calls)], self._entries(choice.logprobs))]
        return self.answer()

    def _grow(self, deltas: Sequence[Event], logprobs: list[Event]) -> Iterator[Event]:
        for delta in deltas:
            for call in delta.get("tool_calls", [None]):
                if not self.parts or (call is not None and "id" in call):
                    yield from self.close()
                    yield from self.open(call)
                yield from self.grow(delta["content"] if call is None else call["function"]["arguments"], logprobs)
                logprobs = []

    @abstractmethod
    def grow(self, text: str, logprobs: list[Event]) -> Iterable[Event]:
        """Add text with its log-probabilities, or arguments, to the last part."""

    @abstractmethod
    def open(self, call: Event | None) -> Iterable[Event]:
        """Add a part, of a tool call of the chat or of text; returns the events at its beginning."""

    @abstractmethod
    def close(self) -> Iterator[Event]:
        """The events at the end of the last part, if there is one."""

    @abstractmethod
    def answer(self) -> Event:
        """The whole answer, at its end."""
