"""Requests: prompts that arrive one by one are checked and become rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteriaList

from lookahead.config import LookaheadConfig
from lookahead.engine.engine import Engine
from lookahead.engine.fallback import PlainLoop
from lookahead.engine.row import Row
from lookahead.errors import UnsupportedModelError
from lookahead.generation.api import prepare_ids
from lookahead.generation.hf import prepare
from lookahead.generation.prompts import Prompt, PromptReader, Truncation
from lookahead.generation.request import serve_stop_strings, stateful_name, stopping_rule
from lookahead.generation.validation import check_options, check_pair, resolved, validate_call
from lookahead.models.support import support_of
from lookahead.models.target import input_device, prefills_at_once
from lookahead.verification.sampling import TokenChooser
from lookahead.verification.stopping import StoppingRule


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its options: its `row`, None if it must be decoded alone, and the most `slots` that it may need."""

    index: int
    ids: list[int]
    max_new_tokens: int | None
    row: Row | None = None
    slots: int = 0


class RequestReader:
    """Turns prompts into requests, for one model and the same options; the arguments are those of `stream_many`.

    A prompt is decoded alone where nothing else is exact: if tokens are sampled, with a user's own processors, criteria
    or sources of drafts, and with models that score no trees.

    With `shares_batches` prompts without a row may be decoded together, each with the tokens it has alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: LookaheadConfig,
        *,
        generation_config: GenerationConfig | None = None,
        add_special_tokens: bool = True,
        truncate: Truncation | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_pair(model, tokenizer, stacklevel=6)
        check_options(model, tokenizer, config, generation_config, options)
        _validate_stateless(options)
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self.reader = PromptReader(
            model, tokenizer, generation_config, add_special_tokens, truncate, chat_template_kwargs, options
        )
        own = any(options.get(name) for name in ("logits_processor", "stopping_criteria"))
        own = own or not all(isinstance(each, str) for each in config.proposers)
        # A user's objects are made for the rows of one call. An encoder would read the prompt only to resolve options.
        self._alone = own or prefills_at_once(model) or model.config.is_encoder_decoder
        self._settings = serve_stop_strings(model, tokenizer, generation_config, options)
        names = "do_sample", "num_beams", "max_time"
        asked = [resolved(model, generation_config, options, name) for name in names]
        # A draw, a beam or a limit of time belongs to its call.
        self.shares_batches = (
            model.config.is_encoder_decoder
            and not (own or self._settings[1].get("stopping_criteria") or asked[0] or asked[2])
            and (asked[1] or 1) == 1
            and config.acceptance == "exact"
            and support_of(model, shortest=1, max_length=1).shape != "none"
        )

    def take(self, index: int, prompt: Prompt, max_new_tokens: int | None) -> Request:
        """Read a prompt; PromptError if it cannot be continued."""
        ids = self.reader.read(prompt, index)
        if not self._alone:
            processors, stopping, do_sample = self._prepared([ids], max_new_tokens, _resolved)
            most = stopping.max_length
            if not do_sample and support_of(self._model, shortest=len(ids), max_length=most).shape == "trees":
                chooser = TokenChooser(processors, do_sample=False, batch_size=1)
                row = Row(index, ids, chooser, stopping, device=input_device(self._model))
                return Request(index, ids, max_new_tokens, row, most + self._config.node_budget + 1)
        return Request(index, ids, max_new_tokens)

    def engine(self, requests: Sequence[Request]) -> Engine | PlainLoop:
        """What decodes prompts without a row; several have the same limit, and may share a batch."""
        prepared = self._prepared([request.ids for request in requests], requests[0].max_new_tokens, prepare)
        return cast(Engine | PlainLoop, prepared)

    def _prepared(self, encoded: list[list[int]], max_new_tokens: int | None, method: Callable[..., Any]) -> Any:
        config, options = self._settings
        if max_new_tokens is not None:
            options = {**options, "max_new_tokens": max_new_tokens}
        return prepare_ids(self._model, self._tokenizer, encoded, self._config, config, None, options, method)


def _validate_stateless(options: dict[str, Any]) -> None:
    """Refuse processors and criteria that may keep a state from one prompt to another."""
    given = LogitsProcessorList(options.get("logits_processor") or ())
    name = stateful_name(given, StoppingCriteriaList(options.get("stopping_criteria") or ()), GenerationConfig())
    name = name or ("prefix_allowed_tokens_fn" if options.get("prefix_allowed_tokens_fn") is not None else "")
    if name:
        raise UnsupportedModelError(
            f"{name} may keep a state, which would go from one prompt to another; call lookahead.generate for one "
            "prompt at a time, each with an object of its own"
        )


def _resolved(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig,
    lookahead_tokenizer: PreTrainedTokenizerBase,
    lookahead_context: int | None,
    **model_kwargs: Any,
) -> tuple[LogitsProcessorList, StoppingRule, bool]:
    """A custom method of `model.generate`, called as `prepare` is, that returns the options as they are resolved."""
    validate_call(model, generation_config, model_kwargs)
    rule = stopping_rule(stopping_criteria, generation_config)
    rule = rule if lookahead_context is None else rule.within(lookahead_context)
    return logits_processor, rule, bool(generation_config.do_sample)
