"""Converts prompts to token ids: text, chat messages, ids, tensors, or the output of a tokenizer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from os import PathLike
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.config import DEFAULTS, LookaheadConfig
from lookahead.decoding import validation
from lookahead.decoding.chat_messages import check_messages, newest_turns, template_options, text_messages
from lookahead.decoding.plan import RequestPlan, plan_request
from lookahead.decoding.prediction_reading import read_prediction, read_predictions
from lookahead.drafting.proposal import IntArray
from lookahead.errors import ConfigError, PromptError, PromptTooLongError
from lookahead.model.calls import ResolvedCall, kind_of
from lookahead.model.facts import inputs_of
from lookahead.model.model_state import ModelPlan, recognise

Message: TypeAlias = Mapping[str, Any]
"""`{"role": ..., "content": ...}`; the content may be a list of parts, `{"type": "text", "text": ...}`."""

Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int] | Tensor | NDArray[np.integer[Any]] | Mapping[str, Any]"
"""Text, chat messages, token ids `[tokens]`, or the output of a tokenizer or a processor for one text."""

Prompts: TypeAlias = "Prompt | Iterable[Prompt]"
"""One prompt or several; ids, tensors and the output of a tokenizer or a processor may be `[batch, tokens]`."""

Truncation: TypeAlias = Literal["left", "right"]
_KINDS = "a string, chat messages or token ids"
# Entries of a mapping that are not further inputs of the model.
_APART = frozenset(("input_ids", "attention_mask", "labels"))
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_LONG = 8  # characters per token of the context, in a chat that is probably longer


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer renders chats; one without a default template does not."""
    template: Any = tokenizer.chat_template
    return bool(template) and (isinstance(template, str) or "default" in template)


def _are_usual(positions: Any, mask: Any) -> bool:
    """Whether positions `[..., tokens]` count the unmasked tokens from 0; the mask has the same shape."""
    seen = np.ones(positions.shape, bool) if mask is None else np.asarray(mask, bool)
    return bool((np.asarray(positions) == seen.cumsum(-1) - 1)[seen].all())


def is_chat(prompt: object) -> bool:
    """Whether a prompt is chat messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def as_chat(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None = None) -> str | list[Message]:
    """A text as a user message if the tokenizer has a chat template, else unchanged."""
    if has_chat_template(tokenizer):
        messages: list[Message] = [{"role": "user", "content": text}]
        return messages if system is None else [{"role": "system", "content": system}, *messages]
    if system is not None:
        raise PromptError("the tokenizer has no chat template, so the model cannot read a system message")
    return text


def pad_prompts(
    prompts: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase, *, on_the_right: bool
) -> tuple[Tensor, Tensor, int]:
    """Prompts and their mask, int64 `[batch, tokens]`, and the token that pads them; any works, since it is masked.

    Decoders take padding on the left, encoders on the right.
    """
    pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    ids = [torch.tensor(prompt, device="cpu") for prompt in prompts]
    fill = partial(pad_sequence, batch_first=True, padding_side="right" if on_the_right else "left")
    return fill(ids, padding_value=pad), fill([torch.ones_like(row) for row in ids]), pad


class PromptReader:
    """Reads the prompts of a call and plans their decoding, with the arguments of `lookahead.generate`.

    A prompt has at most `limit` tokens, or `room` to leave space for its output; None for no limit. `further` are
    inputs of the model that came with the tokens, such as images; inputs `[batch, tokens]` are lists without padding.
    `facts` is the plan of the model, as it is now or, unless it `recognises`, as a call saw it last.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: LookaheadConfig | None = None,
        generation_config: GenerationConfig | None = None,
        seed: int | None = None,
        add_special_tokens: bool = True,
        truncate: Truncation | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        recognises: bool = True,
        **options: Any,
    ) -> None:
        validation.check_pair(model, tokenizer)
        arguments = model, tokenizer, config, generation_config, options, seed
        self.facts = validation.check_options(*arguments, recognises=recognises)
        if truncate not in (None, "left", "right"):
            raise ConfigError(f"truncate must be 'left', 'right' or None, got {truncate!r}")
        self.config, self.model, self.tokenizer, self._seed = config, model, tokenizer, seed
        self.given, self._generation_config, self.options = options, generation_config, options
        self.option = partial(validation.resolved, model, generation_config, options)
        """An option of the call, by its name, as `model.generate` resolves it."""
        if self.option("stop_strings") is not None:
            served = validation.serve_stop_strings(model, tokenizer, generation_config, options)
            self._generation_config, self.options = served
        self._special, self._truncate, self.further = add_special_tokens, truncate, dict[str, Any]()
        self._chat_kwargs = {} if chat_template_kwargs is None else template_options(chat_template_kwargs)
        self._kind = kind_of(model)
        self._encode: Callable[..., Any] = partial(cast(Any, tokenizer), verbose=False)
        self.limit = self.facts.part("prompt limit", self.facts.form, partial(self._kind.prompt_limit, model))
        reserved = self.option("max_new_tokens") or 1
        self.room = self.limit if self._kind.has_encoder or self.limit is None else self.limit - reserved
        if truncate is not None and self.room is not None and self.room < 1:
            raise ConfigError(
                f"max_new_tokens must be less than the model's context of {self.limit} tokens to truncate a prompt, "
                f"got {reserved}"
            )

    def plan(
        self,
        encoded: Sequence[list[int]],
        max_new_tokens: int | None = None,
        predictions: Any = None,
        facts: ModelPlan | None = None,
    ) -> RequestPlan:
        """Pad prompts and plan their request; `model.generate` resolves its options.

        New tokens are limited to the room after the shortest prompt.

        Args:
            encoded: Token ids of the prompts.
            max_new_tokens: Replaces the option of that name; None keeps the option.
            predictions: The expected outputs, `lookahead.decoding.prediction_reading.Predictions`.
            facts: The plan of the model as it is now; recognised if None.
        """
        facts = facts or recognise(self.model, trusted=(self.config or DEFAULTS).trust_user_code)
        arguments = self.model, self.tokenizer, predictions, len(encoded)
        expected = () if predictions is None else read_predictions(*arguments)
        device, has_encoder = facts.device, self._kind.has_encoder
        padded, mask, pad = pad_prompts(encoded, self.tokenizer, on_the_right=has_encoder)
        longest, context = (1, None) if has_encoder else (padded.shape[1], self.limit)
        options = dict(self.options)
        new, total = max_new_tokens or self.option("max_new_tokens"), self.option("max_length")
        if new is None and total is not None and total <= longest:
            raise PromptError(f"max_length must be more than the longest prompt, {longest} tokens, got {total}")
        room = math.inf if context is None else context + 1 - min(map(len, encoded))
        if max_new_tokens is not None or (new is not None and new > room):
            options["max_new_tokens"] = min(new, room)
        elif new is None and total is not None and total > longest + room:
            options["max_length"] = longest + room
        if self.option("pad_token_id") is None:
            options["pad_token_id"] = pad
        if self._seed is not None:
            torch.manual_seed(self._seed)
        call = ResolvedCall.resolve(
            self.model,
            padded.to(device),
            attention_mask=mask.to(device),
            generation_config=self._generation_config,
            **{**options, **(self._padded_further(device) if self.further else {})},
        )
        # Within the context no position is missing, and `read` has checked the tokens.
        is_checked = context is not None and not self.further and call.input_ids.shape == padded.shape
        lengths = np.array([*map(len, encoded)]) if is_checked else None
        plan = plan_request(call, self.config, self.tokenizer, context, lengths=lengths, facts=facts)
        return replace(plan, predictions=expected)

    def read_prediction(self, prediction: Any, index: int) -> tuple[IntArray, ...]:
        """The expected output of one prompt as token ids; `index` is the number of the prompt."""
        return read_prediction(self.model, self.tokenizer, prediction, f"prediction {index}")

    def separate(self, prompts: object) -> Iterable[Any]:
        """Split the argument into prompts for `read`; several may come from a stream."""
        if isinstance(prompts, str) or is_chat(prompts) or _are_ids(prompts):
            return [prompts]
        if isinstance(prompts, Tensor | np.ndarray):
            prompts = {"input_ids": prompts}
        if isinstance(prompts, Mapping):
            if "input_ids" not in prompts:
                hint = "; a chat is a list of messages" if "role" in prompts else ""
                raise PromptError(f"prompts must be {_KINDS}, got a dict of {', '.join(map(str, prompts))}{hint}")
            mask = prompts.get("attention_mask")
            self.further = self._further_of(prompts, mask)
            return self._rows(prompts["input_ids"], mask)
        if isinstance(prompts, bytes | PathLike) or not isinstance(prompts, Iterable):
            raise PromptError(f"prompts must be {_KINDS}, or several of them, got {_got(prompts)}")
        return prompts

    def _further_of(self, output: Mapping[str, Any], mask: Any) -> dict[str, Any]:
        """Inputs of the model in a mapping other than tokens and their mask."""
        if self._kind.has_encoder:
            return {}
        taken, shape = inputs_of(self.model), np.shape(output["input_ids"])
        others = {name: value for name, value in output.items() if name not in _APART and value is not None}
        further: dict[str, Any] = {}
        for name, value in others.items():
            array = value if isinstance(value, Tensor) else np.asarray(value)
            if name not in taken:
                if array.ndim > 1 and "float" in str(array.dtype):
                    raise PromptError(f"{type(self.model).__name__} does not read {name}")
                continue
            is_of_tokens, is_place = tuple(array.shape) == shape, name == "position_ids"
            if is_place and not is_of_tokens:
                raise PromptError(f"position_ids must have the shape of input_ids, {shape}, got {tuple(array.shape)}")
            is_usual = _are_usual(array, mask) if is_place else is_of_tokens and not array.any()
            if is_usual:  # the default token types or positions
                continue
            further[name] = self._rows(value, mask) if is_of_tokens else torch.as_tensor(array)
        if further and mask is None and len(shape) > 1 and shape[0] > 1:
            raise PromptError(f"several prompts with {', '.join(further)} need their attention_mask")
        if further and self._truncate is not None:
            raise PromptError(f"truncate must be None for a prompt with {', '.join(further)}, got {self._truncate!r}")
        return further

    def _padded_further(self, device: torch.device) -> dict[str, Tensor]:
        """The further inputs; per-token inputs are padded like the tokens."""
        fill = partial(pad_sequence, batch_first=True, padding_side="left")
        tensors = {
            name: fill([torch.tensor(row, device="cpu") for row in value]) if isinstance(value, list) else value
            for name, value in self.further.items()
        }
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    def _rows(self, ids: Any, mask: Any) -> list[list[int]]:
        """Ids `[tokens]` or `[batch, tokens]` without the masked ones; the mask has the same shape."""
        rows, pad = _nested(ids), self.tokenizer.pad_token_id
        if mask is not None:
            # Masks may be booleans or floats.
            hidden = _nested((mask != 0) * 1 if isinstance(mask, Tensor | np.ndarray) else mask)
            if [len(row) for row in hidden] != [len(row) for row in rows]:
                raise PromptError("attention_mask must have the shape of input_ids")
            return [list(compress(row, seen)) for row, seen in zip(rows, hidden, strict=True)]
        if len(rows) < 2 or pad is None or pad == self.tokenizer.eos_token_id:
            return rows
        kept = [[i for i, token in enumerate(row) if token != pad] for row in rows]
        # As `model.generate` does without a mask.
        return [row[at[0] : at[-1] + 1] if at else [] for row, at in zip(rows, kept, strict=True)]

    def read(self, prompt: Any, index: int) -> list[int]:
        """The token ids of one prompt: text, chat messages or ids. `index` is its number, for error messages."""
        if not isinstance(prompt, str) and is_chat(prompt):
            prompt = text_messages(prompt, index, self.tokenizer, self._chat_kwargs)
        if isinstance(prompt, str):
            _check_text(prompt, f"prompt {index}")
            ids: list[int] = self._encode(prompt, add_special_tokens=self._special)["input_ids"]
        else:
            ids = self.render(prompt, index) if is_chat(prompt) else self._ids(prompt, index)
        if not ids:
            shown = f": {prompt!r}" if isinstance(prompt, str) else ""
            raise PromptError(f"prompt {index} has no tokens{shown}; a prompt needs at least one")
        if not self.further:  # their placeholders may be outside the vocabulary
            validation.check_token_ids(np.array(ids), index, self.facts.embeddings)
        if self._truncate is not None and self.room is not None and len(ids) > self.room:
            return self._shorten_chat(prompt, index) if is_chat(prompt) else self._shorten(prompt, ids)
        if self.limit is not None and len(ids) > self.limit:
            raise PromptTooLongError(
                f"{self._kind.nouns[0]} {index} has {len(ids)} tokens and the {self._kind.nouns[1]} has {self.limit} "
                "positions"
            )
        return ids

    def _ids(self, prompt: Any, index: int) -> list[int]:
        is_array = isinstance(prompt, Tensor | np.ndarray) or (isinstance(prompt, Mapping) and "input_ids" in prompt)
        rows = list(self.separate(prompt)) if is_array else [prompt]
        if isinstance(prompt, Mapping) and self.further:
            names = ", ".join(self.further)
            raise PromptError(f"prompt {index} holds {names}: pass the processor's output for all prompts, not a list")
        if len(rows) != 1:
            raise PromptError(f"prompt {index} must be one prompt, got {len(rows)}")
        if not _are_ids(rows[0]) and rows[0] not in ([], ()):
            raise PromptError(f"prompt {index} must be {_KINDS}, got {_got(prompt)}")
        return [int(token) for token in rows[0]]

    def render(self, messages: Sequence[Message], index: int = 0) -> list[int]:
        """The token ids of chat messages by the tokenizer's template. A final assistant message is continued."""
        if not has_chat_template(self.tokenizer) and "chat_template" not in self._chat_kwargs:
            raise PromptError(
                f"prompt {index} is chat messages, and the tokenizer has no chat template; pass a string, or set "
                "tokenizer.chat_template"
            )
        check_messages(messages, f"prompt {index}")
        for number, message in enumerate(messages):
            if isinstance(message.get("content"), str):
                _check_text(message["content"], f"message {number} of prompt {index}")
        continues = messages[-1]["role"] == "assistant"
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=not continues,
                continue_final_message=continues,
                return_dict=True,
                **self._chat_kwargs,
            )
        except Exception as error:  # a template may raise anything
            raise PromptError(f"the chat template does not take prompt {index}: {error}") from error
        ids: list[int] = encoded["input_ids"]
        return ids

    def fit_chat(self, messages: Sequence[Message], index: int = 0) -> list[Message]:
        """Drop the oldest turns until the messages fit; system messages and the last message stay."""
        check_messages(messages, f"prompt {index}")
        if (room := self.room) is None:
            return list(messages)
        is_long = sum(len(str(message.get("content"))) for message in messages) > _LONG * room
        return newest_turns(messages, lambda kept: len(self.render(kept, index)) <= room, is_long=is_long)

    def _shorten_chat(self, messages: Sequence[Message], index: int) -> list[int]:
        """Drop the oldest turns of a chat, then the beginning or the end of its last message."""
        assert self.room is not None
        *before, last = self.fit_chat(messages, index)
        content = last.get("content")
        ids = self.render([*before, last], index)
        tokens = self._encode(content, add_special_tokens=False)["input_ids"] if isinstance(content, str) else []
        keep = len(tokens)
        while len(ids) > self.room and keep:
            keep = max(0, keep - (len(ids) - self.room))
            content = str(self.tokenizer.decode(self._cut(tokens, keep)))
            ids = self.render([*before, {**last, "content": content}], index)
        if len(ids) > self.room:
            raise PromptError(
                f"prompt {index} has {len(ids)} tokens without its older turns and the text of its last message, and "
                f"there is room for {self.room}"
            )
        return ids

    def _shorten(self, prompt: object, ids: list[int]) -> list[int]:
        """Cut the beginning or the end of a prompt, but keep special tokens around a text."""
        assert self.room is not None
        bare = self._encode(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else ids
        begin = next((i for i in range(len(ids) - len(bare) + 1) if ids[i : i + len(bare)] == bare), None)
        if begin is None:
            return self._cut(ids, self.room)
        end = begin + len(bare)
        room = max(0, self.room - (len(ids) - len(bare)))
        return [*ids[:begin], *self._cut(bare, room), *ids[end:]][: self.room]

    def _cut(self, ids: list[int], keep: int) -> list[int]:
        """The last or the first ids, depending on `truncate`."""
        return ids[len(ids) - keep :] if self._truncate == "left" else ids[:keep]


def _check_text(text: str, name: str) -> None:
    """Refuse halves of surrogate pairs, which no tokenizer encodes."""
    if half := _LONE_SURROGATE.search(text):
        place = f"character {half.start()}"
        raise PromptError(f"{name} must be text, got {half[0]!r}, half of a surrogate pair, as {place}")


def _are_ids(prompt: object) -> bool:
    """Whether a prompt is a sequence of whole numbers."""
    if not isinstance(prompt, list | tuple | range) or not prompt:
        return False
    return all(isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prompt)


def _nested(values: Any) -> list[list[int]]:
    """Whole numbers `[n]` or `[rows, n]` as lists of rows."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu" or values.ndim not in (1, 2):
            got = f"{values.dtype} {'x'.join(map(str, values.shape))}"
            raise PromptError(f"token ids must be whole numbers [tokens] or [batch, tokens], got {got}")
        values = values.tolist()
    rows = values if isinstance(values, list | tuple) and not _are_ids(values) else [values]
    rows = [row.tolist() if isinstance(row, Tensor | np.ndarray) else row for row in rows]
    for row in rows:
        if not _are_ids(row) and row not in ([], ()):
            raise PromptError(f"token ids must be whole numbers, got {row!r:.60}")
    return [list(row) for row in rows]


def _got(value: object) -> str:
    """The type of a value that is not a prompt, and how to make it one."""
    if value is None:
        return "None"
    hint = "; decode it first" if isinstance(value, bytes) else "; read the file" if isinstance(value, PathLike) else ""
    return f"{type(value).__name__}{hint}"
