"""The schemas of requests: each field is honoured, or refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, StringConstraints, model_validator

from lookahead.serving.message_schemas import Content, FunctionName, Message, Text
from lookahead.serving.parsing import BY_TYPE, Body, read_as

MAX_CHOICES = 128
_MOST_ENTRIES = 1024
_LEAST_TEMPERATURE = 1e-6  # smaller ones make scores overflow


def _are_few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MOST_ENTRIES:
        raise ValueError(f"must have at most {_MOST_ENTRIES} entries, got {len(value)}")
    return value


def _is_no_overflow(temperature: float) -> float:
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"must be 0, or from {_LEAST_TEMPERATURE} to 2")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_is_no_overflow)]
Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_are_few)]
Metadata = Annotated[dict[str, str], BeforeValidator(_are_few)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
OptionalText = Annotated[str, StringConstraints(max_length=200)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Stops = Annotated[OptionalText | Annotated[list[StopText], Field(max_length=16)], BY_TYPE]
StopTexts = Annotated[list[str], read_as(Stops, lambda stop: [stop] if stop and isinstance(stop, str) else [*stop])]
Schema = Annotated[dict[str, Any] | str, BY_TYPE]
Verbosity = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Function(Body):
    """A function that the model may call."""

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may use; flat in the Responses API."""

    nests = ("function", "name")
    type: Literal["function"]
    function: Function


class NamedTool(Body):
    """The tool that the model must use."""

    nests = ("function", "name")
    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, BY_TYPE]


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
    """The form of the output; flat in other APIs."""

    nests = ("json_schema", "schema")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """The form of the output, in the words of vLLM."""

    json_: Schema | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = None
    grammar: Text | None = None


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
    stop: StopTexts = Field([])
    n: int = Field(1, ge=1, le=MAX_CHOICES)  # outputs per prompt
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    regex: Text | None = None
    grammar: Text | None = None
    prediction: Prediction | None = None
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    lookahead: Drafting | None = None
    cache_salt: OptionalText | None = None
    # The others of these have no effect.
    verbosity: Verbosity | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    skip_special_tokens: Literal[True] | None = None
    service_tier: Literal["auto", "default"] | None = None


class ChatBody(GenerationBody):
    """A request to `/v1/chat/completions`."""

    ignores = GenerationBody.ignores | {"parallel_tool_calls"}
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    functions: Annotated[list[Function], Field(fail_fast=True)] | None = None  # the older form of tools
    function_call: Annotated[Literal["none", "auto"] | FunctionName, BY_TYPE] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: Effort | None = None  # for templates

    @model_validator(mode="after")
    def _with_tools(self) -> ChatBody:
        if self.functions and self.tools:
            raise ValueError("functions cannot be combined with tools")
        if self.functions:
            self.tools = [Tool(type="function", function=function) for function in self.functions]
        if isinstance(self.function_call, FunctionName):
            self.tool_choice = NamedTool(type="function", function=self.function_call)
        elif self.function_call is not None:
            self.tool_choice = self.function_call
        return self

    @property
    def continues(self) -> bool:
        """Whether the last message is continued, not answered."""
        return self.messages[-1].role == "assistant"

    @property
    def forced_tools(self) -> list[Tool] | None:
        """The tools one of which must be called; None if none must."""
        if self.tool_choice in (None, "none", "auto"):
            return None
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return [tool for tool in self.tools or [] if name in (None, tool.function.name)]


class CompletionBody(GenerationBody):
    """A request to `/v1/completions`."""

    prompt: Annotated[str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)], BY_TYPE]
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    suffix: str | None = None
    best_of: Literal[1] | None = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts, one or several: texts, or token ids."""
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if is_one else list(self.prompt)


class TokenizeBody(Body):
    """A request to `/tokenize`, or `/apply-template`; llama-server says `content`."""

    model: str | None = None
    prompt: str | None = Field(None, validation_alias=AliasChoices("prompt", "content"))
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of prompt and messages is needed")
        return self


class DetokenizeBody(Body):
    """A request to `/detokenize`."""

    model: str | None = None
    tokens: TokenIds
