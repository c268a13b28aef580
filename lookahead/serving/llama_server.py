"""Paths of llama-server (`/completion`, `/infill`, `/props`, `/slots`): completions with other names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field

import lookahead
from lookahead.serving.answers import Answer, Event
from lookahead.serving.parsing import BY_TYPE
from lookahead.serving.request_schemas import CompletionBody, Schema, TokenIds
from lookahead.serving.requests import Update
from lookahead.serving.served_models import ServedModel


class LlamaBody(CompletionBody):
    """A request to `/completion`."""

    ignores = CompletionBody.ignores | {"cache_prompt", "id_slot", "n_threads", "samplers", "timings_per_token"}
    prompt: Annotated[str | TokenIds, BY_TYPE]
    max_tokens: Annotated[int | None, AfterValidator(lambda tokens: None if tokens == -1 else tokens)] = Field(
        None, ge=-1, validation_alias=AliasChoices("n_predict", "max_tokens")
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=10, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    guided_json: Schema | None = Field(None, validation_alias=AliasChoices("json_schema", "guided_json"))
    n: Literal[1] = 1
    echo: Literal[False] = False
    logprobs: None = None
    prompt_logprobs: None = None
    suffix: None = None


class InfillBody(LlamaBody):
    """A request to `/infill`."""

    prompt: str = Field(alias="input_prefix")
    suffix: str = Field(alias="input_suffix")  # type: ignore[assignment]
    nothing: Literal[""] = Field("", alias="prompt")


class LlamaAnswer(Answer):
    """An answer."""

    end = ""

    def whole(self) -> Event:
        return {**next(iter(self.finish())), "content": self.choices[0].reader.text}

    def begin(self) -> Iterable[Event]:
        return ()

    def add(self, i: int, update: Update) -> Iterator[Event]:
        for delta in self.choices[i].add(update):
            yield {"index": 0, "content": delta["content"], "tokens": [], "stop": False}

    def finish(self) -> Iterator[Event]:
        (choice,), usage = self.choices, self.usage()
        ended = "limit" if choice.finish_reason == "length" else "eos" if choice.stop is None else "word"
        yield {
            "index": 0, "content": "", "tokens": [], "stop": True, "stop_type": ended, "model": self._model,
            "stopping_word": choice.stop or "", "truncated": False, "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"], "lookahead": usage["lookahead"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
        }  # fmt: skip


def tokenized(served: ServedModel, tokens: list[int]) -> Event:
    """What `/tokenize` answers, as vLLM and llama-server do."""
    return {"tokens": tokens, "count": len(tokens), "max_model_len": served.translator.context}


def detokenized(served: ServedModel, tokens: list[int]) -> Event:
    """What `/detokenize` answers."""
    text = served.tokenizer.decode(tokens)
    return {"prompt": text, "content": text}


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
