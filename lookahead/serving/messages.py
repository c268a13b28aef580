"""The Messages API of Anthropic (`/v1/messages`), translated to chats."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from lookahead.serving.answers import Answer
from lookahead.serving.api_errors import ApiError
from lookahead.serving.forms import Event, PartsForm
from lookahead.serving.message_schemas import Content, ImageSource, Message, MessagePart, Parts, text_of
from lookahead.serving.parsing import Body
from lookahead.serving.request_schemas import ChatBody, Function, GenerationBody, ResponseFormat, StopText, translated

_JSON = TypeAdapter[Any](Any)
_LARGEST = {"Infinity": sys.float_info.max, "-Infinity": -sys.float_info.max}  # for numbers that overflow, as 1e999
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Block(Body):
    """A text, an image, a thought, a call of a tool, or its result."""

    ignores = frozenset(("cache_control", "caller", "citations", "data", "is_error", "signature"))
    needs: ClassVar[Mapping[str, Sequence[str]]] = {
        "text": ["text"], "image": ["source"], "thinking": ["thinking"], "tool_use": ["id", "name", "input"],
        "tool_result": ["tool_use_id"],
    }  # fmt: skip
    type: Literal["text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    source: ImageSource | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Parts | None = None


class BlockMessage(Body):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class BlockTool(Function):
    """A tool that the model may use."""

    ignores = frozenset(("cache_control", "eager_input_streaming", "input_examples"))
    type: Literal["custom"] | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")


class BlockChoice(Body):
    """Whether to use a tool, and which."""

    ignores = frozenset(("disable_parallel_tool_use",))
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None


class OutputConfig(Body):
    """Options of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: ResponseFormat | None = None


class CountBody(GenerationBody):
    """A request to `/v1/messages/count_tokens`."""

    ignores = GenerationBody.ignores | {"cache_control", "thinking"}
    messages: Annotated[list[BlockMessage], Field(min_length=1, fail_fast=True)]
    system: Content | None = None
    tools: Annotated[list[BlockTool], Field(fail_fast=True)] | None = None
    tool_choice: BlockChoice | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    output_config: OutputConfig | None = None
    n: Literal[1] | None = None
    prompt_logprobs: None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]

    def chat(self) -> ChatBody:
        """The chat that this request means."""
        messages = [Message(role="system", content=text_of(self.system))] if self.system else []
        messages += [message for each in self.messages for message in _messages_of(each)]
        fields: dict[str, Any] = {"messages": messages, "stop": self.stop_sequences or self.stop, "service_tier": None}
        if self.tools:
            fields["tools"] = [{"type": "function", **tool.model_dump(exclude={"type"})} for tool in self.tools]
        if self.tool_choice is not None:
            named = {"type": "function", "name": self.tool_choice.name}
            fields["tool_choice"] = _CHOICES.get(self.tool_choice.type, named)
        if self.output_config is not None:
            effort = self.output_config.effort
            fields["reasoning_effort"] = "xhigh" if effort == "max" else effort
            fields["response_format"] = self.output_config.format
        return translated(ChatBody, self, **fields)


class MessagesBody(CountBody):
    """A request to `/v1/messages`."""

    max_tokens: int = Field(ge=1)


class MessagesForm(PartsForm):
    """An answer; its parts are its blocks.

    Args:
        answer: The answer of the chat, before it begins.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._chat = answer
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": answer.model}

    def part(self, call: dict[str, Any] | None) -> dict[str, Any]:
        if call is None:
            return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": ""}

    def grow(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        block = self.parts[-1]
        is_text = block["type"] == "text"
        block["text" if is_text else "input"] += text
        delta = {"type": "text_delta", "text": text} if is_text else {"type": "input_json_delta", "partial_json": text}
        if text:
            yield self._of_part("delta", delta=delta)

    def begin(self) -> Iterable[Event]:
        self.usage = self._chat.usage()
        ended = {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        message: dict[str, Any] = {**self._head, "content": [], **ended}
        return [{"type": "message_start", "message": message}]

    def open(self) -> Iterable[Event]:
        block = self.parts[-1]
        return [self._of_part("start", content_block={**block, **({"input": {}} if "input" in block else {})})]

    def close(self) -> Iterable[Event]:
        return [self._of_part("stop")] if self.parts else []

    def finish(self) -> Iterator[Event]:
        yield from self.close()
        yield {"type": "message_delta", "delta": self._ended(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def answer(self) -> Event:
        for block in self.parts:
            if "input" in block:
                block["input"] = _object_of(block["input"] or "{}")
        return {**self._head, "content": self.parts, **self._ended(), "usage": self._usage()}

    def failed(self, error: ApiError) -> Event:
        return error.body_at("/v1/messages")

    def _ended(self) -> dict[str, Any]:
        """Why it ended."""
        stop, reason = self.choice["stop_reason"], self.choice["finish_reason"]
        is_text = isinstance(stop, str)
        return {"stop_reason": "stop_sequence" if is_text else _REASONS.get(reason, "end_turn"), "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]}
        kept = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
        return {**counts, **kept, "lookahead": usage["lookahead"]}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return {"type": f"content_block_{kind}", "index": len(self.parts) - 1, **fields}


def _object_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which may be cut; if they are no JSON object, their text as the API's docs wrap it."""
    try:
        read = _JSON.validate_json(arguments, experimental_allow_partial="trailing-strings")
        read = json.loads(json.dumps(read), parse_constant=_LARGEST.get)
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {"INVALID_JSON": arguments}


def _messages_of(message: BlockMessage) -> list[Message]:
    """A message as those of a chat: each result of a tool has its own."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    made, parts, thoughts, calls = list[Message](), list[MessagePart](), list[str](), list[dict[str, Any]]()
    for block in message.content:
        if block.type == "tool_result":
            made.append(Message(role="tool", tool_call_id=block.tool_use_id, content=block.content or ""))
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type in ("text", "image"):
            parts.append(MessagePart(type=block.type, text=block.text, source=block.source))
        else:
            thoughts.append(block.thinking or "")
    if parts or thoughts or calls or not made:
        own = Message(
            role=message.role,
            content=parts if any(part.source for part in parts) else text_of(parts),
            tool_calls=calls or None,
        )
        own.reasoning_content = "".join(thoughts) or None
        made.append(own)
    return made
