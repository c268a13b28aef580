"""Inputs of `model.generate`: prompt lengths, padding, stopping rules and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lookahead.errors import PromptError, UnsupportedModelError
from lookahead.generation.validation import check_token_ids, resolved
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


def stateful_reason(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig, rows: int, is_lossy: bool
) -> str:
    """Why a processor or criterion would see other calls than those of `model.generate`, or an empty string.

    Rows of a batch advance at different rates, and where tokens are sampled, typical acceptance asks processors about
    tokens that may not be emitted.
    """
    if rows > 1 and (name := stateful_name(processors, criteria, config)):
        return (
            f"{name} may keep a state, or look at other rows, so it must see every step of the whole batch: the {rows} "
            "rows are decoded plainly; a prompt by itself is drafted for"
        )
    if is_lossy and config.do_sample and (name := foreign_processor(processors, config, is_tentative=True)):
        return (
            f"{name} may keep a state, and acceptance='typical' would ask it about tokens that are not emitted: the "
            "call is decoded plainly; with acceptance='exact' a prompt by itself is drafted for"
        )
    return ""


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
    return StoppingRule(max_length=min(limits), eos_tokens=frozenset(eos), custom=custom)


def pad_prompts(prompts: Sequence[list[int]], pad: int, *, on_the_right: bool) -> tuple[Tensor, Tensor]:
    """Prompts, int64 `[batch, tokens]`, and their mask; a decoder's are padded left, an encoder's on the right."""
    ids = [torch.tensor(prompt, device="cpu") for prompt in prompts]
    fill = partial(pad_sequence, batch_first=True, padding_side="right" if on_the_right else "left")
    return fill(ids, padding_value=pad), fill([torch.ones_like(each) for each in ids])


def serve_stop_strings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: GenerationConfig | None,
    generate_kwargs: dict[str, Any],
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """The configuration and arguments for `model.generate` with stop strings as the stopping criterion they mean.

    It cannot do that itself, since it hands no tokenizer to a custom method.
    """
    stop_strings = resolved(model, generation_config, generate_kwargs, "stop_strings")
    if stop_strings is None or tokenizer is None:
        return generation_config, generate_kwargs
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings)])
    criteria.extend(generate_kwargs.get("stopping_criteria") or [])
    if generation_config is not None and generation_config.stop_strings is not None:
        generation_config = copy(generation_config)
        generation_config.stop_strings = None
    kept = {name: value for name, value in generate_kwargs.items() if name != "stop_strings"}
    if model.generation_config.stop_strings is not None:
        kept["stop_strings"] = None  # else the model's own would take their place
    return generation_config, {**kept, "stopping_criteria": criteria}
