"""Requests: prompts that arrive one by one are checked and become rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteriaList

from lookahead.config import LookaheadConfig
from lookahead.engine.engine import Engine
from lookahead.engine.fallback import PlainLoop
from lookahead.engine.row import Row
from lookahead.errors import PromptError, UnsupportedModelError
from lookahead.generation.api import prepare_ids
from lookahead.generation.prompts import Prompt, PromptReader, Truncation, pad_token_of
from lookahead.generation.request import serve_stop_strings, stateful_name, stopping_rule
from lookahead.generation.validation import check_options, check_pair, check_token_ids, context_limit, validate_call
from lookahead.models.support import support_of, validate_model, vocabulary_size
from lookahead.models.target import input_device, prefills_at_once
from lookahead.pools.open_pool import pool_of
from lookahead.utils.fingerprints import tokenizer_fingerprint
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
        validate_model(model)
        check_options(model, config, generation_config, options)
        _validate_stateless(options)
        pool_of(config, fingerprint=tokenizer_fingerprint(tokenizer))
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._context = context_limit(model)
        self.reader = PromptReader(
            model, tokenizer, generation_config, add_special_tokens, truncate, chat_template_kwargs, options
        )
        self._given = generation_config, options
        own = any(options.get(name) for name in ("logits_processor", "stopping_criteria"))
        own = own or not all(isinstance(each, str) for each in config.proposers)
        # A user's objects are made for the rows of one call. An encoder would read the prompt only to resolve options.
        self._alone = own or prefills_at_once(model) or model.config.is_encoder_decoder
        if "pad_token_id" not in options and model.generation_config.pad_token_id is None:
            options = {**options, "pad_token_id": pad_token_of(tokenizer)}
        self._settings = serve_stop_strings(model, tokenizer, generation_config, options)
        defaults = generation_config if generation_config is not None else model.generation_config
        asked = [options.get(name, getattr(defaults, name)) for name in ("do_sample", "num_beams", "max_time")]
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
        check_token_ids(np.array(ids), index, vocabulary_size(self._model))
        options = self._with_limit(self._settings[1], max_new_tokens)
        config = self._settings[0]
        if options.get("max_new_tokens") is None and getattr(config, "max_new_tokens", None) is None:
            limit = options.get("max_length") or getattr(config, "max_length", None)
            if limit is not None and limit <= len(ids):
                raise PromptError(f"max_length must be more than the {len(ids)} tokens of prompt {index}, got {limit}")
        if not self._alone:
            causal_lm: Any = self._model
            tokens = torch.tensor([ids], device=input_device(self._model))
            processors, stopping, do_sample = causal_lm.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=config,
                custom_generate=_resolved,
                **options,
            )
            stopping = stopping if self._context is None else stopping.within(self._context)
            most = stopping.max_length
            if not do_sample and support_of(self._model, shortest=len(ids), max_length=most).shape == "trees":
                chooser = TokenChooser(processors, do_sample=False, batch_size=1)
                row = Row(index, ids, chooser, stopping, device=input_device(self._model))
                return Request(index, ids, max_new_tokens, row, most + self._config.node_budget + 1)
        return Request(index, ids, max_new_tokens)

    def engine(self, requests: Sequence[Request]) -> Engine | PlainLoop:
        """What decodes prompts without a row; several have the same limit, and may share a batch."""
        generation_config, options = self._given
        options = self._with_limit(options, requests[0].max_new_tokens)
        ids = [request.ids for request in requests]
        return prepare_ids(self._model, self._tokenizer, ids, self._config, generation_config, None, options)

    def _with_limit(self, options: dict[str, Any], max_new_tokens: int | None) -> dict[str, Any]:
        return options if max_new_tokens is None else {**options, "max_new_tokens": max_new_tokens}


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
    **model_kwargs: Any,
) -> tuple[LogitsProcessorList, StoppingRule, bool]:
    """A custom method of `model.generate` that returns the options as they are resolved there."""
    validate_call(model, generation_config, model_kwargs)
    rule = stopping_rule(stopping_criteria, generation_config)
    return logits_processor, rule, bool(generation_config.do_sample)
