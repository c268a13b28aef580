"""The form of an answer: that of the OpenAI API itself, or of another API, which has parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from lookahead.serving.api_errors import ApiError

Event = dict[str, Any]


class AnswerForm:
    """The answers of chats and completions as they are.

    Attributes:
        end: What ends a stream.
    """

    end = "data: [DONE]\n\n"

    def whole(self, answer: Event) -> Event:
        """A whole answer."""
        return answer

    def begin(self) -> Iterable[Event]:
        """The first events of a stream."""
        return ()

    def add(self, chunk: Event) -> Iterable[Event]:
        """The events of a chunk of the OpenAI API; the last chunk of other APIs has the usage."""
        return (chunk,)

    def finish(self) -> Iterable[Event]:
        """The last events of a stream."""
        return ()

    def failed(self, error: ApiError) -> Event:
        """The last event of a stream that ends with an error."""
        return error.body


class FunctionForm(AnswerForm):
    """The answers of chats with `functions`, the older form of tools: a message has one call."""

    def whole(self, answer: Event) -> Event:
        return self._renamed(answer, "message")

    def add(self, chunk: Event) -> Iterable[Event]:
        return (self._renamed(chunk, "delta"),)

    def _renamed(self, answer: Event, name: str) -> Event:
        for choice in answer["choices"]:
            for call in choice[name].pop("tool_calls", ())[:1]:
                if not call.get("index"):
                    choice[name]["function_call"] = call["function"]
            if choice["finish_reason"] == "tool_calls":
                choice["finish_reason"] = "function_call"
        return answer


class PartsForm(AnswerForm):
    """The answer of an API that has a chat's text and tool calls as parts, each with a beginning and an end.

    Attributes:
        parts: The parts so far.
        choice: The latest choice of the chat; the last one says why it ended.
        usage: The token counts, at the end.
    """

    end = ""

    def __init__(self) -> None:
        self.parts, self.choice, self.usage = list[dict[str, Any]](), dict[str, Any](), dict[str, Any]()

    def whole(self, answer: Event) -> Event:
        _ = [*self.add(answer), *self.close()]
        return self.answer()

    def add(self, chunk: Event) -> Iterator[Event]:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            delta, pieces = choice.get("delta") or choice.get("message") or {}, list[tuple[Any, str]]()
            if delta.get("content") or choice["logprobs"]:  # the text of a token may come with a later one
                pieces.append((None, delta.get("content") or ""))
            pieces += [(call, call["function"]["arguments"]) for call in delta.get("tool_calls") or ()]
            for call, text in pieces:
                if not self.parts or (call is not None and "id" in call):
                    yield from self.close()
                    self.parts.append(self.part(call))
                    yield from self.open()
                yield from self.grow(text, (choice["logprobs"] or {}).get("content") or [])
            self.choice = choice

    @abstractmethod
    def part(self, call: dict[str, Any] | None) -> dict[str, Any]:
        """A new part: of a tool call of the chat, or of text."""

    @abstractmethod
    def grow(self, text: str, logprobs: list[Any]) -> Iterable[Event]:
        """Add text with its log-probabilities, or arguments, to the last part."""

    @abstractmethod
    def open(self) -> Iterable[Event]:
        """The events at the beginning of the last part."""

    @abstractmethod
    def close(self) -> Iterable[Event]:
        """The events at the end of the last part, if there is one."""

    @abstractmethod
    def answer(self) -> Event:
        """The whole answer, at its end."""
