"""A conversation with a chat model: its history, cut when the context is full, and its KV cache."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import takewhile
from typing import Any

from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend.probes import continues_texts
from lookahead.config import LookaheadConfig, check_whole
from lookahead.decoding.api import stream
from lookahead.decoding.chat_messages import check_messages
from lookahead.decoding.prediction_reading import Predictions
from lookahead.decoding.prompts import Message, PromptReader, has_chat_template
from lookahead.decoding.session_file import SessionFile, read_session
from lookahead.decoding.text_stream import TextStream
from lookahead.decoding.validation import check_pair, resolved
from lookahead.errors import ConfigError, PromptError
from lookahead.model.facts import CACHE, context_limit, tokens_in
from lookahead.model.model_state import recognise
from lookahead.model.state_layers import counts_tokens, has_states


class Conversation:
    """A chat with a model that keeps the history and its KV cache.

    Args:
        model: The model.
        tokenizer: Its tokenizer, with a chat template.
        system: The system message, or None.
        config: How to draft; the defaults if None.
        max_new_tokens: Maximum tokens of an answer, at least 1.
        chat_template_kwargs: Options of the chat template.
        options: As in `lookahead.stream`.

    Attributes:
        history: Every message, including the system message.
        messages: The messages that the model reads: those that fit the context.
        dropped: Number of messages that the last question left out because the context was full.
        stream: The stream of the last answer, with its stats and finish reason; None before the first.

    Example:
        >>> conversation = lookahead.Conversation(model, tokenizer, system="Be brief.")  # doctest: +SKIP
        >>> for piece in conversation.ask("What is a lemma?"):  # doctest: +SKIP
        ...     print(piece, end="")
        >>> conversation.save("chat.json")  # doctest: +SKIP

    Raises:
        PromptError: The tokenizer has no chat template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        config: LookaheadConfig | None = None,
        max_new_tokens: int = 512,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_pair(model, tokenizer)
        if not has_chat_template(tokenizer):
            raise PromptError(
                f"the tokenizer of {model.config.name_or_path or type(model).__name__!r} has no chat template; chat "
                "with an instruction model"
            )
        check_whole("max_new_tokens", max_new_tokens, 1)
        if CACHE in options:
            raise ConfigError(f"{CACHE} is not an option of a conversation, which keeps its own cache")
        if "prefix_bytes" in options:
            raise ConfigError("prefix_bytes was removed from conversations; stream_many keeps common beginnings")
        self._config, self._stamp = config, 0  # the model's stamp at the last question
        context = context_limit(model)
        reserved = max_new_tokens if context is None else min(max_new_tokens, max(1, context // 4))
        self._model, self._tokenizer = model, tokenizer
        fitting: Any = {"truncate": "left", "max_new_tokens": reserved}
        self._reader = PromptReader(model, tokenizer, chat_template_kwargs=chat_template_kwargs, **fitting)
        self._options: dict[str, Any] = {"config": config, "max_new_tokens": max_new_tokens, **options}
        self._open: Generator[str, None, None] | None = None  # the last answer, which may still be written
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._has_own_system = system is not None
        self.stream: TextStream | None = None
        self.reset()

    def reset(self) -> None:
        """Clear the history and the cache. An open answer ends."""
        self._set_history(self._system)
        self._cache = DynamicCache(config=self._model.config)
        self._held: list[int] = []  # the tokens whose keys and values the cache holds

    def undo(self) -> Message | None:
        """Remove the last question and its answer; returns the question, or None if there is none.

        An open answer ends.
        """
        self._end_answer()
        last = max((i for i, message in enumerate(self.history) if message["role"] == "user"), default=None)
        if last is None:
            return None
        question = self.history[last]
        self._set_history(self.history[:last])
        return question

    def restore(self, messages: Sequence[Message]) -> None:
        """Continue from the messages of another conversation; an open answer ends.

        A system message given here replaces theirs. Raises PromptError if these are not chat messages.
        """
        check_messages(messages, "the conversation")
        theirs = list(takewhile(lambda message: message["role"] == "system", messages))
        if not self._has_own_system:
            self._system = theirs
        self._set_history([*self._system, *messages[len(theirs) :]])

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the history to a JSON file; SessionError if it holds something else, or cannot be written."""
        SessionFile(file).write(self.history)

    def load(self, file: str | os.PathLike[str]) -> None:
        """Continue from the history of a saved file, as by `restore`; SessionError if it holds none."""
        self.restore(read_session(file))

    def ask(self, question: str, prediction: Predictions = None) -> Generator[str, None, None]:
        """The answer to a message, piece by piece.

        If it is closed early, the history keeps the pieces so far. The next question closes it, and so do `undo`,
        `reset`, `restore` and `load`. `prediction` is the expected answer, as in `lookahead.stream`.
        """
        self._end_answer()
        messages = [*self.messages, {"role": "user", "content": question}]
        fitting = self._reader.fit_chat(messages)
        ids = self._reader.render(fitting)
        if self._reader.room is not None and len(ids) > self._reader.room:
            raise PromptError(f"the message has {len(ids)} tokens, and there is room for {self._reader.room}")
        self.dropped = len(messages) - len(fitting)
        self._continue_from(ids)
        # A cache of states alone has no token count, so every question is read with the whole history.
        is_kept = counts_tokens(self._cache) and not self._has_other_cache()
        options = {**self._options, **({CACHE: self._cache} if is_kept else {})}
        if prediction is not None:
            options["prediction"] = prediction
        self.stream = stream(self._model, self._tokenizer, ids, **options)
        self._open = self._answer(self.stream, fitting, ids)
        return self._open

    def _end_answer(self) -> None:
        """Close an answer that is still open: its keys and values would be mixed with the next ones."""
        if self._open is None:
            return
        if getgeneratorstate(self._open) == GEN_RUNNING:  # in another thread, or in the caller's own processor
            raise PromptError("the last answer is being written; wait for its next piece")
        self._open.close()

    def _has_other_cache(self) -> bool:
        """Whether options ask for another way to keep keys and values than the cache of this conversation."""
        usual = {"num_beams": 1, "cache_implementation": None, "use_cache": True}
        call = self._model, self._options.get("generation_config"), self._options
        return any(resolved(*call, name) not in (None, value) for name, value in usual.items())

    def _set_history(self, messages: Sequence[Message]) -> None:
        self._end_answer()
        self.history: list[Message] = list(messages)
        self.messages: list[Message] = list(messages)
        self.dropped = 0

    def _answer(self, pieces: TextStream, messages: list[Message], ids: list[int]) -> Generator[str, None, None]:
        said = []
        self.messages = messages
        self.history.append(messages[-1])
        try:
            for piece in pieces:
                said.append(piece)
                yield piece
            self._held = [*ids, *pieces.token_ids[:-1]]
        finally:
            pieces.close()
            answer = {"role": "assistant", "content": "".join(said)}
            self.messages.append(answer)
            self.history.append(answer)

    def _continue_from(self, ids: list[int]) -> None:
        """Cut the cache to the prefix it shares with a prompt; start an empty one if it cannot be cut."""
        plan = recognise(self._model, trusted=bool(self._config and self._config.trust_user_code))
        if plan.stamp.number != self._stamp:  # keys and values of other weights
            self._cache, self._held = DynamicCache(config=self._model.config), []
        self._stamp = plan.stamp.number
        is_same = [token == wanted for token, wanted in zip(self._held, ids[:-1], strict=False)]
        shared = is_same.index(False) if False in is_same else len(is_same)
        is_whole = tokens_in(self._cache) == len(self._held)
        is_cut, layers = shared < len(self._held), self._cache.layers
        is_sliding = any(getattr(layer, "is_sliding", False) for layer in layers)
        cannot = any(map(has_states, layers)) and (is_cut or not continues_texts(self._model))
        if not shared or not is_whole or cannot or is_sliding:
            self._cache, self._held = DynamicCache(config=self._model.config), []
        elif is_cut:
            self._cache.crop(shared - len(self._held))
            self._held = self._held[:shared]
