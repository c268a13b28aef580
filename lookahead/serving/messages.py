"""The Messages API of Anthropic (`/v1/messages`): chats with other names."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field, TypeAdapter, model_validator

from lookahead.serving.answers import Event, PartsAnswer
from lookahead.serving.api_errors import ApiError
from lookahead.serving.message_schemas import Content, FunctionName, ImageSource, Message, MessagePart, Parts, text_of
from lookahead.serving.parsing import BY_TYPE, Body, read_as
from lookahead.serving.request_schemas import ChatBody, Function, NamedTool, ResponseFormat, StopTexts, Tool, ToolChoice

_JSON = TypeAdapter[Any](Any)
_LARGEST = {"Infinity": sys.float_info.max, "-Infinity": -sys.float_info.max}  # for numbers that overflow, as 1e999
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
    content: Annotated[str | Annotated[list[Block], Field(fail_fast=True)], BY_TYPE]


Blocks = Annotated[list[BlockMessage], Field(min_length=1, fail_fast=True)]


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


def _chat_of(messages: list[BlockMessage]) -> list[Message]:
    """The messages of the chat: each result of a tool has its own."""
    chat = list[Message]()
    for message in messages:
        parts, thoughts, calls, before = list[MessagePart](), list[str](), list[dict[str, Any]](), len(chat)
        blocks = message.content if isinstance(message.content, list) else [Block(type="text", text=message.content)]
        for block in blocks:
            if block.type == "tool_result":
                chat.append(Message(role="tool", tool_call_id=block.tool_use_id, content=block.content or ""))
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif block.type in ("text", "image"):
                parts.append(MessagePart(type=block.type, text=block.text, source=block.source))
            else:
                thoughts.append(block.thinking or "")
        if parts or thoughts or calls or len(chat) == before:
            content = parts if any(part.source for part in parts) else text_of(parts)
            said = Message(role=message.role, content=content, tool_calls=calls or None)
            said.reasoning_content = "".join(thoughts) or None
            chat.append(said)
    return chat


def _tool_of(tool: BlockTool) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))


def _choice_of(choice: BlockChoice) -> ToolChoice:
    if choice.type == "tool":
        return NamedTool(type="function", function=FunctionName(name=choice.name or ""))
    return "required" if choice.type == "any" else choice.type


class CountBody(ChatBody):
    """A request to `/v1/messages/count_tokens`."""

    ignores = ChatBody.ignores | {"cache_control", "thinking"}
    messages: Annotated[list[Message], read_as(Blocks, _chat_of)]
    system: Content | None = None
    tools: Annotated[list[Annotated[Tool, read_as(BlockTool, _tool_of)]], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[ToolChoice, read_as(BlockChoice, _choice_of)] | None = None
    stop: StopTexts = Field([], validation_alias=AliasChoices("stop_sequences", "stop"))
    output_config: OutputConfig | None = None
    n: Literal[1] = 1
    prompt_logprobs: None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]

    @model_validator(mode="after")
    def _as_chat(self) -> CountBody:
        if self.system:
            self.messages.insert(0, Message(role="system", content=text_of(self.system)))
        if self.output_config is not None:
            effort = self.output_config.effort
            self.reasoning_effort = "xhigh" if effort == "max" else effort
            self.response_format = self.output_config.format
        return self


class MessagesBody(CountBody):
    """A request to `/v1/messages`."""

    max_tokens: int = Field(ge=1)


class MessagesAnswer(PartsAnswer):
    """An answer; its parts are its blocks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": self._model}

    def grow(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        block = self.parts[-1]
        is_text = block["type"] == "text"
        block["text" if is_text else "input"] += text
        delta = {"type": "text_delta", "text": text} if is_text else {"type": "input_json_delta", "partial_json": text}
        if text:
            yield self._of_part("delta", delta=delta)

    def begin(self) -> Iterable[Event]:
        ended: Event = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._counts()}
        return [{"type": "message_start", "message": {**self._head, **ended}}]

    def open(self, call: Event | None) -> Iterator[Event]:
        block: Event = {"type": "text", "text": ""}
        if call is not None:
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        self.parts.append(block)
        yield self._of_part("start", content_block={**block})
        if call is not None:
            block["input"] = ""

    def close(self) -> Iterator[Event]:
        if self.parts:
            yield self._of_part("stop")

    def finish(self) -> Iterator[Event]:
        yield from self.close()
        yield {"type": "message_delta", "delta": self._ended(), "usage": self._counts()}
        yield {"type": "message_stop"}

    def answer(self) -> Event:
        for block in self.parts:
            if "input" in block:
                block["input"] = _object_of(block["input"] or "{}")
        return {**self._head, "content": self.parts, **self._ended(), "usage": self._counts()}

    def failed(self, error: ApiError) -> Event:
        return error.body_at("/v1/messages")

    def _ended(self) -> dict[str, Any]:
        """Why it ended."""
        stop, reason = self.choices[0].stop, self.choices[0].finish_reason or ""
        return {"stop_reason": "stop_sequence" if stop else _REASONS.get(reason, "end_turn"), "stop_sequence": stop}

    def _counts(self) -> dict[str, Any]:
        usage = self.usage()
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
