"""The Responses API of OpenAI (`/v1/responses`): chats with other names."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from lookahead.serving.answers import Event, PartsAnswer
from lookahead.serving.api_errors import ApiError, invalid
from lookahead.serving.message_schemas import Message, Parts, TextPart, text_of
from lookahead.serving.parsing import BY_TYPE, Body, read_as
from lookahead.serving.request_schemas import ChatBody, Effort, Metadata, ResponseFormat, Verbosity

Included = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]
_MOST_KEPT, _MOST_BYTES = 1000, 64 << 20
_ECHOED = frozenset((
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "reasoning",
    "store", "temperature", "text", "tool_choice", "tools", "top_p",
))  # fmt: skip


class InputItem(Body):
    """A message, a call of a function, its result, or what the model thought."""

    ignores = frozenset(("encrypted_content", "id", "phase", "status"))
    needs: ClassVar[Mapping[str, Sequence[str]]] = {
        "message": ["role", "content"], "function_call": ["call_id", "name", "arguments"],
        "function_call_output": ["call_id", "output"],
    }  # fmt: skip
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: Annotated[list[TextPart], Field(fail_fast=True)] | None = None


class Reasoning(Body):
    """How much to think."""

    ignores = frozenset(("generate_summary", "summary"))
    effort: Effort | None = None


class TextOptions(Body):
    """Options of the text."""

    format: ResponseFormat | None = None
    verbosity: Verbosity | None = None


def _messages_of(items: str | list[InputItem]) -> list[Message]:
    """The input as messages; calls belong to the message of the assistant before them."""
    messages, reasoning = list[Message](), ""
    for item in [InputItem(role="user", content=items)] if isinstance(items, str) else items:
        if item.type == "reasoning":
            reasoning = "".join(part.text for part in item.summary or ()) or text_of(item.content)
        elif item.type == "function_call_output":
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
        elif item.type == "message":
            messages.append(Message(role=item.role or "user", content=item.content))
        else:
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant"))
            calls = messages[-1].tool_calls = messages[-1].tool_calls or []
            calls.append(_call_of(item.model_dump()))
        if reasoning and messages and messages[-1].role == "assistant":
            messages[-1].reasoning_content, reasoning = reasoning, ""
    return messages


Items = Annotated[str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)], BY_TYPE]


class ResponsesBody(ChatBody):
    """A request to `/v1/responses`; some of its fields are echoed as they were sent."""

    ignores = ChatBody.ignores - {"metadata", "store"}
    _echoed: dict[str, Any] = PrivateAttr()
    messages: Annotated[list[Message], read_as(Items, _messages_of)] = Field(alias="input")
    max_completion_tokens: int | None = Field(None, ge=1, alias="max_output_tokens")
    instructions: str | None = None
    max_tokens: None = None
    prompt_logprobs: None = None
    n: Literal[1] = 1
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _with_echo(cls, fields: Any, handler: Any) -> Any:
        body = handler(fields)
        body._echoed = {name: value for name, value in fields.items() if name in _ECHOED and value is not None}
        return body

    @model_validator(mode="after")
    def _as_chat(self) -> ResponsesBody:
        if self.text is not None:
            self.verbosity, self.response_format = self.text.verbosity, self.text.format
        if self.reasoning is not None:
            self.reasoning_effort = self.reasoning.effort
        if self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ()):
            self.logprobs = True
        return self

    def follow(self, earlier: Sequence[Message]) -> list[Message]:
        """Put earlier messages before its own, and its instructions before all; returns those without instructions."""
        messages = [*earlier, *self.messages]
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        self.messages = [*system, *messages]
        return messages


class ResponsesAnswer(PartsAnswer):
    """A response; its parts are its items.

    Args:
        keep: Called with the response's id and the model's message, for requests that follow.
        body: The request.
        arguments: As for other answers.
    """

    def __init__(self, keep: Callable[[str, Message], None], body: ResponsesBody, *arguments: Any) -> None:
        super().__init__(body, *arguments)
        self._id, self._keep, self._numbers = f"resp_{uuid.uuid4().hex}", keep, itertools.count()
        self._head = {
            "id": self._id, "object": "response", "created_at": int(time.time()), "model": self._model, "error": None,
            "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True,
            "temperature": None, "tool_choice": "auto", "tools": [], "top_p": None, "truncation": "disabled",
            "usage": None, **body._echoed,
        }  # fmt: skip

    def grow(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        item = self.parts[-1]
        if item["type"] == "message":
            (part,) = item["content"]
            part |= {"text": part["text"] + text, "logprobs": [*part["logprobs"], *logprobs]}
            yield self._of_part("output_text.delta", delta=text, logprobs=logprobs)
        elif text:
            item["arguments"] += text
            yield self._of_part("function_call_arguments.delta", delta=text)

    def begin(self) -> Iterable[Event]:
        response = {**self._head, "status": "in_progress", "output": []}
        return [self._event(kind, response=response) for kind in ("created", "in_progress")]

    def open(self, call: Event | None) -> Iterator[Event]:
        at, name = len(self.parts), uuid.uuid4().hex
        item: Event = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": []}
        if call is not None:
            function = {"name": call["function"]["name"], "arguments": "", "call_id": call["id"]}
            item = {"type": "function_call", "id": f"fc_{name}", **function}
        self.parts.append({**item, "status": "completed"})
        yield self._event("output_item.added", output_index=at, item={**item, "status": "in_progress"})
        if call is None:
            text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.parts[at]["content"] = [text]
            yield self._of_part("content_part.added", part={**text})

    def close(self) -> Iterator[Event]:
        if not self.parts:
            return
        item = self.parts[-1]
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._of_part("output_text.done", text=part["text"], logprobs=part["logprobs"])
            yield self._of_part("content_part.done", part=part)
        else:
            call = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_part("function_call_arguments.done", **call)
        yield self._event("output_item.done", output_index=len(self.parts) - 1, item=item)

    def finish(self) -> Iterator[Event]:
        response = self.answer()
        yield from self.close()
        yield self._event(response["status"], response=response)

    def answer(self) -> Event:
        text = "".join(item["content"][0]["text"] for item in self.parts if item["type"] == "message")
        calls = [_call_of(item) for item in self.parts if item["type"] == "function_call"]
        if self._head.get("store", True):
            self._keep(self._id, Message(role="assistant", content=text, tool_calls=calls or None))
        is_cut, usage = self.choices[0].finish_reason == "length", self.usage()
        state: Event = {"status": "incomplete" if is_cut else "completed", "output": self.parts}
        if is_cut:
            state["incomplete_details"] = {"reason": "max_output_tokens"}
            for item in self.parts[-1:]:
                item["status"] = "incomplete"
        state["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "lookahead": usage["lookahead"],
        }
        return {**self._head, **state}

    def failed(self, error: ApiError) -> Event:
        told = error.body["error"]
        state = {"status": "failed", "error": {"code": told["code"] or told["type"], "message": told["message"]}}
        return self._event("failed", response={**self._head, **state, "output": self.parts})

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        """An event of the last item."""
        item = self.parts[-1]
        place = {"content_index": 0} if item["type"] == "message" else {}
        return self._event(kind, item_id=item["id"], output_index=len(self.parts) - 1, **place, **fields)


class KeptMessages:
    """The messages of earlier responses, for `previous_response_id`: the latest ones, in memory."""

    def __init__(self) -> None:
        self._kept, self._bytes = OrderedDict[tuple[str, str], tuple[list[Message], int]](), 0

    def put(self, owner: str, messages: list[Message], name: str, answer: Message) -> None:
        """Keep the messages of a client's response, and drop the oldest ones that are too many."""
        messages = [*messages, answer]
        size = sum(len(message.model_dump_json(exclude_none=True)) for message in messages)
        self._kept[owner, name] = messages, size
        self._bytes += size
        while len(self._kept) > _MOST_KEPT or self._bytes > _MOST_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1][1]

    def get(self, owner: str, name: str | None) -> list[Message]:
        """The messages of a response to the same client, none without a name; ApiError if they are not kept."""
        if name is None:
            return []
        if (owner, name) not in self._kept:
            raise invalid("previous_response_id", f"must be that of a response that is kept, got {name[:100]!r}")
        return self._kept[owner, name][0]


def _call_of(item: dict[str, Any]) -> dict[str, Any]:
    """An item as the tool call of a chat."""
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}
