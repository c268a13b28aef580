"""Paths of llama-server (`/completion`, `/infill`, `/props`, `/slots`), translated to completions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from pydantic import Field

import lookahead
from lookahead.serving.answers import Answer
from lookahead.serving.forms import AnswerForm, Event
from lookahead.serving.request_schemas import CompletionBody, GenerationBody, TokenIds, translated
from lookahead.serving.served_models import ServedModel


class LlamaBody(GenerationBody):
    """A request to `/completion`."""

    ignores = GenerationBody.ignores | {"cache_prompt", "id_slot", "n_threads", "samplers", "timings_per_token"}
    prompt: str | TokenIds
    n_predict: int | None = Field(None, ge=-1)
    n: Literal[1] | None = None
    prompt_logprobs: None = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=10)
    json_schema: dict[str, Any] | None = None

    def completion(self, **fields: Any) -> CompletionBody:
        """The completion that this request means."""
        limit = self.max_tokens if self.n_predict in (None, -1) else self.n_predict
        fields = {"prompt": self.prompt, "max_tokens": limit, "repetition_penalty": self.repeat_penalty, **fields}
        return translated(CompletionBody, self, guided_json=self.json_schema, **fields)


class InfillBody(LlamaBody):
    """A request to `/infill`."""

    prompt: Literal[""] = ""
    input_prefix: str
    input_suffix: str

    def completion(self, **fields: Any) -> CompletionBody:
        return super().completion(prompt=self.input_prefix, suffix=self.input_suffix)


class LlamaForm(AnswerForm):
    """An answer.

    Args:
        answer: That of the completion, before it begins.
    """

    end = ""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def whole(self, answer: Event) -> Event:
        return {**next(iter(self.finish())), "content": answer["choices"][0]["text"]}

    def add(self, chunk: Event) -> Iterator[Event]:
        for choice in chunk["choices"]:
            if choice["text"]:
                yield {"index": 0, "content": choice["text"], "tokens": [], "stop": False}

    def finish(self) -> Iterator[Event]:
        (choice,), usage = self._answer.choices, self._answer.usage()
        ended = "limit" if choice.finish_reason == "length" else "eos" if choice.stop is None else "word"
        yield {
            "index": 0, "content": "", "tokens": [], "stop": True, "stop_type": ended, "model": self._answer.model,
            "stopping_word": choice.stop or "", "truncated": False, "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"], "lookahead": usage["lookahead"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
        }  # fmt: skip


def props(served: ServedModel) -> dict[str, Any]:
    """What `/props` tells about a model."""
    tokenizer, reads = served.tokenizer, partial(hasattr, served.processor)
    return {
        "default_generation_settings": {"n_ctx": served.translator.context}, "total_slots": served.loop.rows,
        "model_alias": served.name, "chat_template": tokenizer.chat_template or "", "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "modalities": {"vision": reads("image_processor"), "audio": reads("feature_extractor")},
        "build_info": f"lookahead {lookahead.__version__}",
    }  # fmt: skip


def slots(served: ServedModel) -> list[dict[str, Any]]:
    """What `/slots` tells about the rows of a model."""
    running, context = served.loop.figures()["running"], served.translator.context
    return [{"id": i, "n_ctx": context, "is_processing": i < running} for i in range(served.loop.rows)]
