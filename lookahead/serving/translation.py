"""Translates requests of clients into requests to the decoding loop."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.decoding.prompts import PromptReader
from lookahead.decoding.validation import resolved
from lookahead.errors import ConfigError, PromptError, PromptTooLongError
from lookahead.model.calls import kind_of
from lookahead.model.facts import context_limit
from lookahead.serving.api_errors import ApiError, invalid
from lookahead.serving.media import MediaReader
from lookahead.serving.message_schemas import Message, size_of, text_of
from lookahead.serving.parsing import Body
from lookahead.serving.plain_text import PlainText
from lookahead.serving.request_schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    StructuredOutputs,
    TokenizeBody,
    Tool,
)
from lookahead.serving.requests import GenerationRequest
from lookahead.serving.tool_calls import schema_of_call
from lookahead.verification.rules import end_tokens

_TOKEN = re.compile("0|[1-9][0-9]{0,9}")  # one way to write each token
_PLACES = {"logit_bias": "keys", "stop_token_ids": "entries", "tokens": "entries"}
_INFILL = (  # before a prompt, between it and a suffix, and after that
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)  # fmt: skip
_REACH = 16  # characters of a prediction for each token of an output, which may leave parts out
_AS_THEY_ARE = "temperature", "top_p", "top_k", "min_p", "repetition_penalty"


class CountPenalties(LogitsProcessor):
    """Lowers the scores of tokens in the output: once by `presence`, and by `frequency` for every occurrence.

    Source: the OpenAI API, `presence_penalty` and `frequency_penalty`.

    Args:
        prompt_tokens: Number of tokens of the prompt, which do not count.
        presence: Penalty of a token in the output.
        frequency: Penalty per occurrence.
    """

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._begin, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores `[rows, vocab]` after ids `[rows, tokens]`."""
        counts = torch.zeros_like(scores)
        new = input_ids[:, self._begin :]
        counts.scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._presence * (counts > 0) - self._frequency * counts


class Translator:
    """Translates the requests of clients for one model.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        max_new_tokens: Maximum tokens of an output.
        most_outputs: Maximum outputs of a request; None for any number.
        plain_user_text: Whether special tokens in messages of users and tools are text.
        processor: Reads images and sounds; None if the model reads text only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        most_outputs: int | None = None,
        *,
        plain_user_text: bool = False,
        processor: Any = None,
    ) -> None:
        self._media = None if processor is None else MediaReader(processor)
        self._plain = PlainText(tokenizer) if plain_user_text else None
        # Arguments that pad or cut prompts, or replace the template, are not template variables.
        readers: list[Any] = [tokenizer] if processor is None else [tokenizer, processor]
        self._no_variables = {"messages"}.union(*(inspect.signature(r.apply_chat_template).parameters for r in readers))
        self._model, self._tokenizer, self._most, self._most_outputs = model, tokenizer, max_new_tokens, most_outputs
        self.context = None if kind_of(model).has_encoder else context_limit(model)
        self._limit = kind_of(model).prompt_limit(model)
        # Bytes of the longest token; in a vocabulary of bytes each is written as one character.
        is_of_bytes = "ByteLevel" in repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
        self._longest = max(map(len if is_of_bytes else size_of, tokenizer.get_vocab()), default=1)

    def check(self, body: Body) -> None:
        """Refuse what can never be served, by counting: nothing is tokenized.

        A text has at least its bytes divided by those of the longest token as tokens.
        """
        prompts: list[Any] = body.prompts if isinstance(body, CompletionBody) else [getattr(body, "prompt", None) or ""]
        texts = [part.text or "" for message in getattr(body, "messages", None) or () for part in message.parts]
        if isinstance(body, GenerationBody):
            outputs, most = body.n * max(1, len(prompts)), self._most_outputs
            if most is not None and outputs > most:
                raise invalid("n", f"the server takes at most {most} outputs at once, got {outputs}")
            if body.truncate_prompt_tokens:
                return
        sizes = [("messages", sum(map(size_of, texts)))]
        sizes += [
            ("prompt", size_of(prompt) if isinstance(prompt, str) else len(prompt) * self._longest)
            for prompt in prompts
        ]
        for field, size in sizes:
            least = -(-size // self._longest)
            if self._limit is not None and least > self._limit:
                raise _too_long(field, f"the prompt has at least {least} tokens, and the model's context {self._limit}")

    def of_chat(self, body: ChatBody) -> list[GenerationRequest]:
        """The request of a chat."""
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs", "is for logprobs=true")
        if body.forced_tools == []:
            names = [tool.function.name for tool in body.tools or []]
            raise invalid("tool_choice", f"must name one of the tools {names}, got {body.tool_choice!r}")
        kwargs = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
        kwargs |= body.chat_template_kwargs or {}
        tools = None if body.tool_choice == "none" else body.tools
        ids, inputs = self._render(body.messages, kwargs, tools, body.truncate_prompt_tokens)
        if inputs and body.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "are those of texts alone")
        for name, value in (("continue_final_message", body.continues), ("add_generation_prompt", not body.continues)):
            if getattr(body, name) not in (None, value):
                raise invalid(name, f"must be {value} here: a final message of the assistant is continued")
        return [self._request(body, ids, (body.top_logprobs or 0) if body.logprobs else None, inputs)]

    def of_completion(self, body: CompletionBody) -> list[GenerationRequest]:
        """A request for every prompt."""
        if not body.prompts:
            raise invalid("prompt", "must hold a prompt, got none")
        prompts, cut = body.prompts, body.truncate_prompt_tokens
        if body.suffix is not None:
            vocabulary = self._tokenizer.get_added_vocab()
            infill = next((tokens for tokens in _INFILL if vocabulary.keys() >= {*tokens}), None)
            if infill is None:
                raise invalid("suffix", "the model has no tokens for infilling that are known here")
            before, between, after = infill
            if not all(isinstance(prompt, str) for prompt in prompts):
                raise invalid("prompt", "must be text to be continued before a suffix")
            prompts = [f"{before}{prompt}{between}{body.suffix}{after}" for prompt in prompts]
        return [self._request(body, ids, body.logprobs) for ids in [self._read(prompt, cut) for prompt in prompts]]

    def tokens_of(self, body: TokenizeBody | DetokenizeBody | ChatBody) -> list[int]:
        """The token ids of a text or a chat, or those of the body itself."""
        if isinstance(body, DetokenizeBody):
            return [self._token(str(token), "tokens") for token in body.tokens]
        if isinstance(body, ChatBody):
            return self.of_chat(body)[0].ids
        if body.messages is not None:
            return self._render(body.messages)[0]
        return self._read(body.prompt, add_special_tokens=body.add_special_tokens)

    def _render(
        self,
        messages: Sequence[Message],
        kwargs: dict[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        cut: int | None = None,
    ) -> tuple[list[int], dict[str, Any]]:
        """The token ids of a chat, and all inputs of the model if there are images or sounds."""
        kwargs = dict(kwargs or {})
        if refused := [name for name in kwargs if name in self._no_variables]:
            raise invalid(f"chat_template_kwargs.{refused[0]}", "cannot be set by clients")
        media = [part for message in messages for part in message.parts if part.text is None]
        if media and self._media is None:
            raise invalid(f"messages.content.{media[0].type}", "the model reads text only")
        if media and cut is not None:
            raise invalid("truncate_prompt_tokens", "cuts texts alone")
        chat = [_with_objects(message.for_template()) for message in messages]
        is_plain = self._plain is not None and self._plain.holds_special(chat)
        if media and is_plain:
            raise invalid("messages.content", "has special tokens, which are read as text only in chats of text")

        def read(**variables: Any) -> tuple[list[int], dict[str, Any]]:
            if self._media is None:
                return self._read(chat, cut, chat_template_kwargs=variables), {}
            inputs = self._media.inputs(chat, [message.parts for message in messages], variables)
            ids = inputs["input_ids"][0].tolist()
            return (ids, inputs) if media else (self._read(ids, cut), {})

        ids, inputs = read(**kwargs)
        if tools:
            kwargs["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
            without, (ids, inputs) = ids, read(**kwargs)
            if ids == without:
                raise invalid("tools", "the chat template of the model takes none")
        if self._plain is not None and is_plain:
            return self._read(self._plain.ids(chat, kwargs), cut), {}
        return ids, inputs

    def _read(self, prompt: Any, cut: int | None = None, **options: Any) -> list[int]:
        """The token ids of a prompt; with `cut` the last ones."""
        field = "messages" if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) else "prompt"
        try:
            reader = PromptReader(self._model, self._tokenizer, recognises=False, **options)
            reader.limit = reader.limit if cut is None else None
            return reader.read(prompt, 0)[-(cut or 0) :]
        except PromptTooLongError as error:
            raise _too_long(field, str(error)) from error
        except (ConfigError, PromptError) as error:
            raise invalid(field, str(error)) from error

    def _prediction(self, body: GenerationBody, most: int | None) -> list[int] | None:
        """The tokens of the expected output, as far as an output can reach."""
        text = "" if body.prediction is None else text_of(body.prediction.content)
        text = text[: min(most or self._most, self._most) * min(self._longest, _REACH)]
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else None

    def _request(
        self, body: GenerationBody, ids: list[int], logprobs: int | None, inputs: Mapping[str, Any] | None = None
    ) -> GenerationRequest:
        name = "max_tokens" if getattr(body, "max_completion_tokens", None) is None else "max_completion_tokens"
        most = getattr(body, name)
        options: dict[str, Any] = {name: value for name in _AS_THEY_ARE if (value := getattr(body, name)) is not None}
        if options.get("top_k") == -1:
            options["top_k"] = 0
        is_random = any(options.get(name) for name in ("temperature", "top_p", "top_k", "min_p"))
        is_random |= body.seed is not None or body.n > 1
        if options.get("temperature") == 0:
            options = {"do_sample": False} | ({"repetition_penalty": rp} if (rp := body.repetition_penalty) else {})
        elif is_random:
            options["do_sample"] = True
        options["max_new_tokens"] = self._new_tokens(ids, most, name)
        # Special tokens are not part of the text, so a special stop token is not found there.
        special = self._tokenizer.get_added_vocab()
        ends = [special[stop] for stop in body.stop if stop in special]
        ends += [self._token(str(token), "stop_token_ids") for token in body.stop_token_ids or ()]
        if body.ignore_eos or ends:
            own = [] if body.ignore_eos else end_tokens(resolved(self._model, None, {}, "eos_token_id"))
            options["eos_token_id"] = [*ends, *own]
        if body.min_tokens:
            if body.min_tokens > options["max_new_tokens"]:
                raise invalid("min_tokens", f"must be at most {options['max_new_tokens']}, got {body.min_tokens}")
            options["min_new_tokens"] = body.min_tokens
        if body.logit_bias:
            options["sequence_bias"] = {(self._token(token),): bias for token, bias in body.logit_bias.items()}
        if body.presence_penalty or body.frequency_penalty:
            penalties = body.presence_penalty or 0.0, body.frequency_penalty or 0.0
            options["logits_processor"] = [CountPenalties(len(ids), *penalties)]
        return GenerationRequest(
            ids=ids, inputs=inputs or {}, options=options | _grammar_of(body), choices=body.n, seed=body.seed,
            prediction=self._prediction(body, most),
            top_logprobs=logprobs, drafts=body.lookahead is None or body.lookahead.draft,
            hidden_ends=() if body.include_stop_str_in_output else body.stop_token_ids or (),
        )  # fmt: skip

    def _new_tokens(self, ids: list[int], most: int | None, name: str) -> int:
        if most == 0:  # only the prompt is read
            return 1
        room = self._most if self.context is None else max(0, min(self._most, self.context - len(ids)))
        if room == 0:
            message = f"the prompt has {len(ids)} tokens, and the model's context {self.context}: no token is left"
            raise _too_long("messages", message)
        if most is not None and most > room:
            message = f"{name}: must be from 1 to {room} for a prompt of {len(ids)} tokens, got {most}"
            raise _too_long(name, message)
        return most or room

    def _token(self, token: str, field: str = "logit_bias") -> int:
        if not _TOKEN.fullmatch(token) or int(token) >= self._model.config.get_text_config().vocab_size:
            raise invalid(field, f"{_PLACES[field]} must be token ids of the model, got {token[:20]!r}")
        return int(token)


def _grammar_of(body: GenerationBody) -> dict[str, Any]:
    """The form that the output must have, as an option of `generate`."""
    form, outputs = body.response_format, body.structured_outputs or StructuredOutputs.model_construct()
    schema, tools = None, body.forced_tools if isinstance(body, ChatBody) else None
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise invalid("response_format.json_schema", "is missing for the type 'json_schema'")
        schema = form.json_schema.schema_
    elif form is not None and form.type == "json_object":
        schema = {"type": "object"}
    choice = outputs.choice and "|".join(map(re.escape, outputs.choice))
    forms = [
        ("tool_choice", "json_schema", schema_of_call(tools) if tools else None),
        ("response_format", "json_schema", schema), ("guided_json", "json_schema", body.guided_json),
        ("regex", "regex", body.regex), ("grammar", "grammar", body.grammar),
        ("structured_outputs.json", "json_schema", outputs.json_),
        ("structured_outputs.json_object", "json_schema", {"type": "object"} if outputs.json_object else None),
        ("structured_outputs.regex", "regex", outputs.regex), ("structured_outputs.choice", "regex", choice),
        ("structured_outputs.grammar", "grammar", outputs.grammar),
    ]  # fmt: skip
    forms = [form for form in forms if form[2] is not None]
    if len(forms) > 1:
        raise invalid(forms[1][0], f"cannot be combined with {forms[0][0]}")
    return {kind: value for _, kind, value in forms}


def _too_long(field: str, message: str) -> ApiError:
    return ApiError(400, message, param=field, code="context_length_exceeded")


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its tool calls as objects, as templates expect; what is not JSON stays text."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(function["arguments"])
    return message
