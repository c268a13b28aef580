"""The schemas of requests: each field is honoured, or refused by its name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from lookahead.serving.api_errors import ApiError, invalid

MAX_CHOICES = 128
# Listing the errors of a million entries takes seconds.
_MOST_FIELDS, _MOST_ENTRIES = 64, 1024
_SHOULD = "Input should be "  # how pydantic's messages about types begin
_LEAST_TEMPERATURE = 1e-6  # smaller ones make scores overflow


def _are_few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _MOST_ENTRIES:
        raise ValueError(f"must have at most {_MOST_ENTRIES} entries, got {len(given)}")
    return given


def _is_no_overflow(temperature: float) -> float:
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"must be 0, or from {_LEAST_TEMPERATURE} to 2")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_is_no_overflow)]
Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_are_few)]
Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
OptionalText = Annotated[str, StringConstraints(max_length=200)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Verbosity = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Body(BaseModel):
    """A JSON object of a client, whose fields are known; those in `ignores` have no effect."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignores: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > _MOST_FIELDS:
            raise ValueError(f"an object has at most {_MOST_FIELDS} fields here, got {len(given)}")
        # An unknown field that is null is absent, as clients send what they got.
        names = _names_of(cls)
        return {
            name: each for name, each in given.items() if name in names or not (each is None or name in cls.ignores)
        }


class TextPart(Body):
    """A part of a message, in the words of several APIs."""

    ignores = frozenset(("annotations", "cache_control", "citations", "logprobs"))
    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class _Nested(Body):
    """What names a function; the Responses API has its fields here."""

    @model_validator(mode="before")
    @classmethod
    def _is_nested(cls, given: Any) -> Any:
        if isinstance(given, dict) and "function" not in given and "name" in given:
            return {"type": given.get("type"), "function": {name: given[name] for name in given if name != "type"}}
        return given


class Function(Body):
    """A function that the model may call."""

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Nested):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: Text


class NamedTool(_Nested):
    """The tool that the model must use."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Message(Body):
    """A message of a chat."""

    ignores = frozenset(("annotations", "cache_control"))
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
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
    def size(self) -> int:
        """Bytes of its content."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or ()]
        return sum(map(size_of, parts))

    def for_template(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        given = self.model_dump(exclude_none=True, exclude={"refusal", "reasoning"})
        given["content"] = text_of(self.content) or self.refusal or ""
        if self.reasoning is not None:
            given.setdefault("reasoning_content", self.reasoning)
        given["role"] = "system" if self.role == "developer" else self.role
        return given


class Prediction(Body):
    """The expected output."""

    type: Literal["content"]
    content: Content


class JsonSchema(Body):
    """A schema that the output follows."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Drafting(Body):
    """Options of this server."""

    draft: bool = True


class GenerationBody(Body):
    """The common fields of chats and completions."""

    ignores = frozenset(("metadata", "priority", "prompt_cache_key", "safety_identifier", "store", "user"))
    model: str | None = None
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: Biases | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: OptionalText | Annotated[list[StopText], Field(max_length=16)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    regex: Text | None = None
    grammar: Text | None = None
    prediction: Prediction | None = None
    lookahead: Drafting | None = None
    cache_salt: OptionalText | None = None
    # The others of these have no effect.
    verbosity: Verbosity | None = None
    modalities: list[Literal["text"]] | None = None
    skip_special_tokens: Literal[True] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def choices(self) -> int:
        """Number of outputs per prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """Texts that end an output and are not part of it."""
        return [self.stop] if self.stop and isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(GenerationBody):
    """A request to `/v1/chat/completions`."""

    ignores = GenerationBody.ignores | {"parallel_tool_calls"}
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None  # for templates

    @property
    def forced_tools(self) -> list[Tool] | None:
        """The tools one of which must be called; None if none must."""
        if self.tool_choice in (None, "none", "auto"):
            return None
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return [tool for tool in self.tools or [] if name in (None, tool.function.name)]


class CompletionBody(GenerationBody):
    """A request to `/v1/completions`."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts, one or several: texts, or token ids."""
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if is_one else list(self.prompt)


class TokenizeBody(Body):
    """A request to `/tokenize`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = True


def chat_of(body: GenerationBody, **fields: Any) -> ChatBody:
    """A chat with the common options of a request of another API, and its own fields."""
    common = {name: value for name in GenerationBody.model_fields if (value := getattr(body, name)) is not None}
    chat: ChatBody = parsed(ChatBody, {**common, "stream_options": {"include_usage": True}, **fields})
    return chat


def text_of(content: Content | None) -> str:
    """The text of a message's content, which may have parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


def size_of(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))


def parsed(kind: type[Any], body: bytes | dict[str, Any]) -> Any:
    """Parse the request in a body, or check its fields; ApiError names the first invalid one."""
    try:
        return kind.model_validate_json(body) if isinstance(body, bytes) else kind.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first, reason = _of_fitting_branch(errors)
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body must be JSON: {first['msg']}", code="invalid_json") from None
        field = ".".join(map(str, _path(first)))
        got = "" if first["type"] in ("missing", "extra_forbidden") else f", got {shortened(first['input'])}"
        raise invalid(field or None, f"{reason}{got}") from None


def _of_fitting_branch(errors: Sequence[Any]) -> tuple[Any, str]:
    """The first error, and its message.

    A field that may have several types has errors of each. The first error of the type that the value fits is furthest
    in the value, or is not about the type; if there is no such type, the message lists them all.
    """
    start = _path(errors[0])
    at, branches = len(start), dict[tuple[Any, ...], Any]()
    for each in errors:
        if _path(each)[:at] == start:
            branches.setdefault(each["loc"][at : at + 1], each)

    def fit(error: Any) -> tuple[list[int], int, bool]:
        inner = _path(error)[at:]
        return [part for part in inner if isinstance(part, int)], len(inner), not _is_of_type(error)

    best = max(branches.values(), key=fit)
    if best["type"] == "extra_forbidden":
        return best, "unknown field"
    others = [branch["msg"] for branch in branches.values() if fit(branch) == fit(best)] if _is_of_type(best) else []
    first, *more = dict.fromkeys(others or [best["msg"]])
    return best, " or ".join([first.removeprefix("Value error, "), *(each.removeprefix(_SHOULD) for each in more)])


def _is_of_type(error: Any) -> bool:
    """Whether a value has another type than the branch of an error."""
    is_other_literal = error["type"] == "literal_error" and not isinstance(error["input"], str)
    return is_other_literal or error["type"].rpartition("_")[2] == "type"


def _path(error: Any) -> list[str | int]:
    """The fields and indices that lead to an error; the branches between are named after types."""
    *outer, last = error["loc"] or [""]
    path = [part for part in outer if isinstance(part, int) or part in _field_names()]
    is_named = isinstance(last, int) or last in _field_names() or error["type"] == "extra_forbidden"
    return [*path, last] if is_named else path


@functools.cache
def _field_names() -> frozenset[str]:
    """The names of the fields of all bodies and their parts."""
    kinds, names = [Body], set[str]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        names |= _names_of(kind)
    return frozenset(names)


@functools.cache
def _names_of(kind: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def shortened(value: object) -> str:
    """The repr of a client's value, in at most 120 characters."""
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:110]}...{shown[-6:]}"
