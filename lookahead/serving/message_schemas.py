"""The schemas of messages: their texts, images, sounds and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, StringConstraints, model_validator

from lookahead.serving.parsing import BY_TYPE, Body

_ROLES = {"developer": "system", "function": "tool"}  # in templates
Text = Annotated[str, StringConstraints(min_length=1)]
TextType = Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
_TEXTS = get_args(TextType)


class TextPart(Body):
    """A text, in the words of several APIs."""

    ignores = frozenset(("annotations", "cache_control", "citations", "logprobs"))
    type: TextType
    text: str


Content = Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)], BY_TYPE]


class ImageUrl(Body):
    """An image as a data URL."""

    ignores = frozenset(("detail",))
    url: str


class Sound(Body):
    """A sound."""

    data: str
    format: Literal["wav", "mp3"]


class ImageSource(Body):
    """An image in the Messages API."""

    ignores = frozenset(("media_type",))
    type: Literal["base64"]
    data: str


class MessagePart(TextPart):
    """A part of a message, in the words of several APIs: a text, an image or a sound."""

    ignores = TextPart.ignores | {"detail"}
    needs: ClassVar[Mapping[str, Sequence[str]]] = {
        "image_url": ["image_url"], "input_image": ["image_url"], "image": ["source"], "input_audio": ["input_audio"],
        **{name: ["text"] for name in _TEXTS},
    }  # fmt: skip
    type: Literal[TextType, "image_url", "input_image", "image", "input_audio"]  # type: ignore[assignment]
    text: str | None = None  # type: ignore[assignment]
    image_url: Annotated[ImageUrl | str, BY_TYPE] | None = None
    source: ImageSource | None = None
    input_audio: Sound | None = None


Parts = Annotated[str | Annotated[list[MessagePart], Field(fail_fast=True)], BY_TYPE]


class FunctionName(Body):
    """The name of a function."""

    name: Text


class FunctionCall(FunctionName):
    """A call of a function, in the older form of tool calls."""

    arguments: str


class Message(Body):
    """A message of a chat."""

    ignores = frozenset(("annotations", "cache_control"))
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Parts | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    # In answers of this and other servers that clients send back.
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.role != "assistant" and not self.content and self.content != "":
            raise ValueError(f"a message of the role {self.role!r} needs content")
        return self

    @property
    def parts(self) -> list[MessagePart]:
        """The parts of its content, or of what stands for it."""
        if isinstance(self.content, list) and self.content:
            return self.content
        return [MessagePart(type="text", text=text_of(self.content) or self.refusal or "")]

    def for_template(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        values = self.model_dump(exclude_none=True, exclude={"refusal", "reasoning", "function_call"})
        values["content"] = text_of(self.content) or self.refusal or ""
        if self.reasoning is not None:
            values.setdefault("reasoning_content", self.reasoning)
        if self.function_call is not None:
            values["tool_calls"] = [{"type": "function", "function": self.function_call.model_dump()}]
        values["role"] = _ROLES.get(self.role, self.role)
        return values


def text_of(content: Content | Parts | None) -> str:
    """The text of a message's content, which may have parts."""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or [])


def size_of(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))
