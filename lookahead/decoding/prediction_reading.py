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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, predictions: Any, prompts: int
) -> list[tuple[IntArray, ...]]:
    """The token ids of the predictions of every prompt, int32 `[tokens]` each; empty ones are left out.

    Args:
        model: The model that generates.
        tokenizer: Encodes text without special tokens; None if all predictions are token ids.
        predictions: `Predictions`.
        prompts: Number of prompts.

    Raises:
        PromptError: There is not one entry for each prompt, or an entry is neither text nor token ids.
    """
    is_entry = isinstance(predictions, list | tuple) and len(predictions) == 1 and not _is_id(predictions[0])
    if prompts == 1 and not is_entry:
        return [read_prediction(model, tokenizer, predictions, "prediction")]
    if predictions is None:
        return [()] * prompts
    if isinstance(predictions, str | Mapping) or not isinstance(predictions, Sequence | Tensor | np.ndarray):
        raise PromptError(
            f"prediction must be a list with an entry for each of the {prompts} prompts, got {_got(predictions)}"
        )
    if len(predictions) != prompts:
        raise PromptError(f"prediction must have an entry for each of the {prompts} prompts, got {len(predictions)}")
    return [
        read_prediction(model, tokenizer, prediction, f"prediction {i}") for i, prediction in enumerate(predictions)
    ]


def read_prediction(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, prediction: Any, name: str
) -> tuple[IntArray, ...]:
    """The token ids of the predictions of one prompt: none, one, or several; errors call them `name`."""
    if prediction is None:
        return ()
    is_several = isinstance(prediction, list | tuple) and not (prediction and _is_id(prediction[0]))
    texts = [_ids(model, tokenizer, text, name) for text in (prediction if is_several else [prediction])]
    return tuple(ids for ids in texts if len(ids))


def _ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, text: Any, name: str) -> IntArray:
    if isinstance(text, str):
        if tokenizer is None:
            raise PromptError(f"{name} is text: pass the tokenizer too, or its token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"{name} must be text, got half of a surrogate pair as character {error.start}") from None
        text = tokenizer(**{kind_of(model).text: text}, add_special_tokens=False, verbose=False)["input_ids"]
    if isinstance(text, Tensor):
        text = np.asarray(text.tolist())
    if isinstance(text, list | tuple | range) and not all(map(_is_id, text)):
        raise PromptError(f"{name} must be text or token ids, got {_got(text)}")
    if not isinstance(text, list | tuple | range | np.ndarray):
        raise PromptError(f"{name} must be text or token ids, got {_got(text)}")
    ids = np.asarray(text) if np.size(text) else np.zeros(0, np.int64)
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
