"""Documents of any length to prompts that fit the model's context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookahead.errors import ConfigError, DocumentError, PromptError
from lookahead.summarize.parts import Parts, split_document, truncate
from lookahead.summarize.prompting import Prompting, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MIN_DOCUMENT_TOKENS = 16
_NO_LIMIT = 10**9  # tokenizers that know no limit say 10**30


@dataclass(frozen=True, slots=True)
class FittedDocument:
    """A document as prompts.

    Attributes:
        parts: How it was cut.
        prompts: One rendered prompt per part.
    """

    parts: Parts
    prompts: list[str]


class PromptFitter:
    """Renders documents to prompts that leave room for a summary.

    Args:
        model: Its configuration tells the context length.
        tokenizer: Counts tokens and renders templates; its `model_max_length` limits the context too.
        max_new_tokens: Tokens to leave room for.
        request: What the model is asked for; `None` for a summary in a few sentences.

    Raises:
        ConfigError: No document would fit, or the model does not understand the request.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        request: Request | None = None,
    ) -> None:
        check_max_new_tokens(max_new_tokens)
        self._tokenizer = tokenizer
        self._prompting = Prompting(tokenizer, request, model)
        self._prompt_limit: int | None = None
        self._document_limit: int | None = None
        context = context_length(model, tokenizer)
        if context is not None:
            template_tokens = self._prompting.count_tokens(self._prompting.render(""))
            # An encoder's context holds the document alone; the summary has the decoder's.
            self._prompt_limit = context - (0 if model.config.is_encoder_decoder else max_new_tokens)
            self._document_limit = self._prompt_limit - template_tokens
            if self._document_limit < MIN_DOCUMENT_TOKENS and model.config.is_encoder_decoder:
                least = template_tokens + MIN_DOCUMENT_TOKENS
                raise ConfigError(f"the model's encoder must read at least {least} tokens, and it reads {context}")
            if self._document_limit < MIN_DOCUMENT_TOKENS:
                most = context - template_tokens - MIN_DOCUMENT_TOKENS
                raise ConfigError(
                    f"max_new_tokens must be at most {most} to leave room for a document in the model's context of "
                    f"{context} tokens, got {max_new_tokens}"
                )

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens to the prompts: not where a template wrote them."""
        return self._prompting.add_special_tokens

    @property
    def partial_summary_limit(self) -> int | None:
        """Most tokens of the summary of a part, `None` for no limit.

        With a quarter of what a prompt holds, the summaries of the parts together are always shorter than the
        document, so that summarizing them in turn comes to an end.
        """
        return None if self._document_limit is None else self._document_limit // 4

    def fit(self, document: str) -> FittedDocument:
        """Cut a document into parts whose prompts all fit.

        Args:
            document: Any text that is not blank.
        """
        limit = self._document_limit
        while True:
            parts = split_document(document, self._tokenizer, limit, self._prompting.clean)
            prompts = [self._prompting.render(part) for part in parts.texts]
            if limit is None or self._prompt_limit is None:
                return FittedDocument(parts, prompts)
            # On its own a part can have a few tokens more than it had within the whole.
            excess = max(map(self._prompting.count_tokens, prompts)) - self._prompt_limit
            if excess <= 0:
                return FittedDocument(parts, prompts)
            limit -= excess
            if limit < 1:
                raise DocumentError(f"no part of the document fits a prompt of {self._prompt_limit} tokens")

    def join(self, summaries: list[str]) -> str:
        """One document of the summaries of parts, each kept to `partial_summary_limit`.

        Text can have more tokens than it was generated with, so they are counted again.
        """
        limit = self.partial_summary_limit
        if limit is not None:
            summaries = [truncate(summary, self._tokenizer, limit) for summary in summaries]
        return "\n\n".join(summary.strip() for summary in summaries if summary.strip())


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Raise ConfigError unless a summary may have a token."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")


def check_room(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int) -> None:
    """Refuse a prompt that does not fit the model's context together with its continuation.

    Raises:
        PromptError: With the lengths.
    """
    context = context_length(model, tokenizer)
    tokens = len(tokenizer(prompt, verbose=False)["input_ids"])
    if model.config.is_encoder_decoder:
        if context is not None and tokens > context:
            raise PromptError(f"the prompt has {tokens} tokens, and the model's encoder reads at most {context}")
        return
    if context is not None and tokens + max_new_tokens > context:
        room = f"max_new_tokens must be at most {context - tokens}, got {max_new_tokens}"
        raise PromptError(
            f"the prompt has {tokens} tokens of the {context} that the model's context holds: "
            f"{room if tokens < context else 'there is no room for a new one'}"
        )


def context_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Most tokens of a prompt and its output together, as the model or its tokenizer states; `None` if neither.

    Of an encoder-decoder model: most tokens its encoder reads.
    """
    text_config = model.config.get_text_config()
    names = ("max_encoder_position_embeddings", "max_position_embeddings")
    stated = (tokenizer.model_max_length, *(getattr(text_config, name, None) for name in names))
    return min((length for length in stated if isinstance(length, int) and 0 < length < _NO_LIMIT), default=None)
