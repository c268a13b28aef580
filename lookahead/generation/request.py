"""Inputs of `model.generate`: prompt lengths, padding, stopping rules and stop strings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lookahead.errors import PromptError, UnsupportedModelError
from lookahead.generation.validation import check_token_ids
from lookahead.verification.sampling import foreign_processor
from lookahead.verification.stopping import StoppingRule, reason_of


def prompt_lengths(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> NDArray[np.int64]:
    """Number of tokens of each prompt without its left padding; checks that all are in the vocabulary."""
    batch_size, longest = input_ids.shape
    if not batch_size:
        raise PromptError("input_ids hold no prompt")
    if not longest:
        raise PromptError("prompt 0 has no tokens: a prompt needs at least one")
    if input_ids.is_floating_point():
        raise PromptError(f"input_ids must be whole numbers, got a tensor of {input_ids.dtype}")
    mask = np.ones((batch_size, longest), bool)
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            shapes = f"{[*input_ids.shape]}, got {[*attention_mask.shape]}"
            raise UnsupportedModelError(f"attention_mask must have the shape of input_ids, {shapes}")
        mask = attention_mask.bool().cpu().numpy()
    lengths: NDArray[np.int64] = mask.sum(1)
    if not (mask == (np.arange(longest) >= (longest - lengths)[:, None])).all():
        raise UnsupportedModelError("attention_mask must be left-padded: zeros first, then ones, in every row")
    if (lengths == 0).any():
        raise UnsupportedModelError(
            f"attention_mask of prompt {int(lengths.argmin())} is all zeros: a prompt needs at least one token; "
            "leave out custom_generate for it"
        )
    for row, ids in enumerate(input_ids.cpu().numpy()):
        check_token_ids(ids[longest - lengths[row] :], row, vocab_size)
    return lengths


# Criteria that treat every row by itself and keep nothing from step to step. A subclass may do otherwise.
_ROW_WISE = frozenset({EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria})

_MOST_INT32 = int(np.iinfo(np.int32).max)


def stateful_name(processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig) -> str:
    """The name of the first processor or criterion that may keep a state or look across rows, or an empty string."""
    others = [criterion for criterion in criteria if type(criterion) not in _ROW_WISE]
    names = [str(getattr(each, "__qualname__", type(each).__qualname__)) for each in others]  # it may be a function
    return next(iter(names), "") or foreign_processor(processors, config)


def warn_if_stateful(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    rows: int,
    acceptance: str,
) -> bool:
    """Warn of a processor or criterion that would see other calls than those of `model.generate`; returns if so.

    Such a call is decoded plainly. Rows of a batch advance at different rates, and where tokens are sampled, typical
    acceptance asks processors about tokens that may not be emitted.
    """
    name = stateful_name(processors, criteria, config) if rows > 1 else ""
    why = (
        f"or look at other rows, so it must see every step of the whole batch: the {rows} rows are decoded plainly; "
        "a prompt by itself is drafted for"
    )
    if not name and acceptance == "typical" and config.do_sample:
        name = foreign_processor(processors, config, is_tentative=True)
        why = (
            "and acceptance='typical' would ask it about tokens that are not emitted: the call is decoded plainly; "
            "with acceptance='exact' a prompt by itself is drafted for"
        )
    if name:
        warnings.warn(f"{name} may keep a state, {why}", stacklevel=3)
    return bool(name)


def stopping_rule(criteria: StoppingCriteriaList, config: GenerationConfig) -> StoppingRule:
    """Separate the criteria that count tokens from those that must be called."""
    eos = [int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1)]
    eos = [token if 0 <= token <= _MOST_INT32 else -1 for token in eos]  # no token has the others
    limits = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    others = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
    shows_scores = config.return_dict_in_generate and config.output_scores

    def ask(criterion: StoppingCriteriaList, ids: Tensor, scores: Sequence[Tensor]) -> bool:
        steps = tuple(cast(Any, step[None]) for step in scores) if shows_scores else None
        return bool(criterion(cast(torch.LongTensor, ids), steps))

    custom = tuple((reason_of(c), partial(ask, StoppingCriteriaList([c]))) for c in others)
    return StoppingRule(max_length=min(limits), eos_tokens=np.array(eos, np.int32), custom=custom)


def pad_prompts(
    prompts: Sequence[list[int]], pad: int, *, on_the_right: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of one length, and their masks; a decoder's are padded on the left, an encoder's on the right."""
    longest = max(map(len, prompts))

    def fill(ids: list[int], value: int) -> list[int]:
        padding = [value] * (longest - len(ids))
        return ids + padding if on_the_right else padding + ids

    return [fill(ids, pad) for ids in prompts], [fill([1] * len(ids), 0) for ids in prompts]


def serve_stop_strings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: GenerationConfig | None,
    generate_kwargs: dict[str, Any],
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """The configuration and arguments for `model.generate` with stop strings as the stopping criterion they mean.

    It cannot do that itself, since it hands no tokenizer to a custom method.
    """
    options = generation_config if generation_config is not None else model.generation_config
    stop_strings = generate_kwargs.get("stop_strings", options.stop_strings)
    if stop_strings is None or tokenizer is None:
        return generation_config, generate_kwargs
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings)])
    criteria.extend(generate_kwargs.get("stopping_criteria") or [])
    if options.stop_strings is not None:
        generation_config = copy(options)
        generation_config.stop_strings = None
    kept = {name: value for name, value in generate_kwargs.items() if name != "stop_strings"}
    return generation_config, {**kept, "stopping_criteria": criteria}
