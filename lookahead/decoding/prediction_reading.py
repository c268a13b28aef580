"""Predictions, the expected outputs, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.drafting.proposal import IntArray
from lookahead.errors import PromptError
from lookahead.model.calls import kind_of
from lookahead.model.facts import decoder_vocabulary

Prediction: TypeAlias = "str | Sequence[int] | Tensor | NDArray[np.integer[Any]]"
"""Text, or token ids `[tokens]`."""

Predictions: TypeAlias = "Prediction | Sequence[Prediction] | Sequence[Prediction | Sequence[Prediction] | None] | None"
"""For one prompt: one prediction or several. For several prompts: an entry for each, None for none."""


def read_predictions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, given: Any, prompts: int
) -> list[tuple[IntArray, ...]]:
    """The token ids of the predictions of every prompt, int32 `[tokens]` each; empty ones are left out.

    Args:
        model: The model that generates.
        tokenizer: Encodes text without special tokens; None if all predictions are token ids.
        given: `Predictions`.
        prompts: Number of prompts.

    Raises:
        PromptError: There is not one entry for each prompt, or an entry is neither text nor token ids.
    """
    is_entry = isinstance(given, list | tuple) and len(given) == 1 and not _is_id(given[0])
    if prompts == 1 and not is_entry:
        return [read_prediction(model, tokenizer, given, "prediction")]
    if given is None:
        return [()] * prompts
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence | Tensor | np.ndarray):
        raise PromptError(
            f"prediction must be a list with an entry for each of the {prompts} prompts, got {_got(given)}"
        )
    if len(given) != prompts:
        raise PromptError(f"prediction must have an entry for each of the {prompts} prompts, got {len(given)}")
    return [read_prediction(model, tokenizer, each, f"prediction {i}") for i, each in enumerate(given)]


def read_prediction(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, given: Any, name: str
) -> tuple[IntArray, ...]:
    """The token ids of the predictions of one prompt: none, one, or several; errors call them `name`."""
    if given is None:
        return ()
    is_several = isinstance(given, list | tuple) and not (given and _is_id(given[0]))
    texts = [_ids(model, tokenizer, each, name) for each in (given if is_several else [given])]
    return tuple(ids for ids in texts if len(ids))


def _ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, given: Any, name: str) -> IntArray:
    if isinstance(given, str):
        if tokenizer is None:
            raise PromptError(f"{name} is text: pass the tokenizer too, or its token ids")
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"{name} must be text, got half of a surrogate pair as character {error.start}") from None
        given = tokenizer(**{kind_of(model).text: given}, add_special_tokens=False, verbose=False)["input_ids"]
    if isinstance(given, Tensor):
        given = np.asarray(given.tolist())
    if isinstance(given, list | tuple | range) and not all(map(_is_id, given)):
        raise PromptError(f"{name} must be text or token ids, got {_got(given)}")
    if not isinstance(given, list | tuple | range | np.ndarray):
        raise PromptError(f"{name} must be text or token ids, got {_got(given)}")
    ids = np.asarray(given) if np.size(given) else np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        shape = "x".join(map(str, ids.shape))
        raise PromptError(f"{name} must be whole numbers [tokens], got {ids.dtype} [{shape}]")
    vocabulary = decoder_vocabulary(model)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise PromptError(f"{name} must hold token ids from 0 to {vocabulary - 1}, got {wrong}")
    return np.ascontiguousarray(ids, np.int32)


def _is_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _got(value: object) -> str:
    """The type of a value, and of its first element if it is a list."""
    kind = type(value).__name__
    return f"{kind} of {type(value[0]).__name__}" if isinstance(value, list | tuple) and value else kind
