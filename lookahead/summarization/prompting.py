"""The prompts that ask a model for the summary of a document of any length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from lookahead.errors import ConfigError, DocumentError
from lookahead.summarization.chunking import MeasuredText, Part, Parts, cut, truncate
from lookahead.summarization.segmentation import Break, Piece, split_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUMMARIZE_TEMPLATE: Final = "summarize"
# The task stands before the document and after it: small models follow the last instruction, and read better if they
# know the task.
INSTRUCTION = "Summarize this article:\n\n{document}\n\nSummary of the article in two sentences:"
STYLES = {
    "bullets": "Summarize the following text as a list of three to six bullet points, each on a line of its own.",
    "paragraph": "Summarize the following text in one paragraph.",
    "headline": "Write one headline of at most fifteen words for the following text. Answer with the headline alone.",
}
REFINING = (
    "A long text is read in parts, and one summary is kept of all that was read so far. It says:\n\n{summary}\n\n"
    "Write that summary anew, so that it also tells what is new in the next part. What was asked for, with that part:"
)
PLACEHOLDER = "{document}"
MIN_DOCUMENT_TOKENS = 16
DEFAULT_SAMPLING: Final = {"no_repeat_ngram_size": 8}
"""Options of `model.generate` for the default model. Most of its summaries loop without them."""

_NO_LIMIT = 10**9  # tokenizers without a limit state 10**30
_WHITESPACE = re.compile(r"\s+")
# Why a model cannot follow an instruction, by template.
_NO_CHAT = {
    SUMMARIZE_TEMPLATE: "this model was made to summarize and follows no instructions",
    "encoder": "the model reads documents, not chats",
    "plain": "the model's tokenizer has no chat template",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRequest:
    """The instruction for the model, and how a document longer than a prompt is read.

    The default instruction asks for two sentences. Without `refine`, all parts are summarized, then their summaries.
    """

    prompt: str | None = None  # `{document}` stands for the document; without it the document comes last
    style: str | None = None  # a key of `STYLES`
    refine: bool = False  # read parts in order, each with the summary so far; needs a model that follows instructions
    part_tokens: int | None = None  # of a prompt with its output, at most; None: as many as the model's context

    def __post_init__(self) -> None:
        if self.prompt is not None and not self.prompt.strip():
            raise ConfigError("the prompt is empty")
        if self.style is not None and self.style not in STYLES:
            raise ConfigError(f"style must be {', '.join(STYLES)}, got {self.style!r}")
        if self.prompt is not None and self.style is not None:
            raise ConfigError("a prompt and a style exclude each other; pass one of them")
        if self.part_tokens is not None and not (isinstance(self.part_tokens, int) and self.part_tokens > 0):
            raise ConfigError(f"part_tokens must be at least 1, or None, got {self.part_tokens!r}")


class Prompting:
    """Renders the prompts for one tokenizer.

    A chat template named `"summarize"` gets the bare document. Any other chat template gets the instruction and the
    document as a user message. Without a chat template the prompt is the document and `Summary:`. An encoder-decoder
    model reads the document after the prefix in its configuration (T5's `summarize: `).

    Raises:
        ConfigError: The request needs a model that follows instructions, and this one does not.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        request: SummaryRequest | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        from lookahead.model.calls import kind_of

        self._tokenizer = tokenizer
        self.request = request or SummaryRequest()
        self._prefix = ""
        templates = tokenizer.chat_template
        self.template: Literal["encoder", "summarize", "chat", "plain"]
        if model is not None and kind_of(model).has_encoder:
            self.template = "encoder"
            tasks = getattr(model.config, "task_specific_params", None) or {}
            self._prefix = str((tasks.get("summarization") or {}).get("prefix") or "")
        elif isinstance(templates, dict) and SUMMARIZE_TEMPLATE in templates:
            self.template = SUMMARIZE_TEMPLATE
        elif templates and (isinstance(templates, str) or "default" in templates):
            self.template = "chat"
        else:
            self.template = "plain"
        self.add_special_tokens = self.template in ("plain", "encoder")  # no template wrote them
        # Without a template, a model can follow a prompt but not a style.
        if (reason := _NO_CHAT.get(self.template)) is not None:
            style, named = self.request.style, self.template == SUMMARIZE_TEMPLATE
            if style or (self.request.prompt and named):
                own = "" if named else ", or write a prompt of your own with --prompt-file"
                asked = f"style {style!r}" if style else "prompt"
                raise ConfigError(f"{reason}, so a {asked} has no effect; give --model an instruction model{own}")
            if self.request.refine:
                raise ConfigError(
                    f"{reason}, so it cannot refine a summary part by part; give --model an instruction model, or "
                    "leave --refine out"
                )
        # Some markers, such as `<|im_start|>`, are special but not among the named special tokens.
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        markers = {marker for marker in (*tokenizer.all_special_tokens, *added) if len(marker) > 1}
        longest_first = sorted(markers, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def clean(self, text: str) -> str:
        """Prepare a piece of a document for the model. Every document passes here once.

        For a template named `"summarize"`, every run of whitespace becomes one space. A special token in the text
        (`<|endoftext|>` in an article about language models) is split by a space, so that it cannot end the prompt.
        """
        if self.template == SUMMARIZE_TEMPLATE:
            text = _WHITESPACE.sub(" ", text)
        return self._markers.sub(lambda marker: f"{marker[0][0]} {marker[0][1:]}", text)

    def render(self, document: str, summary: str | None = None) -> str:
        """The prompt for a cleaned document, or for a part of it with the summary so far (chat templates only)."""
        style, named = self.request.style, self.template == SUMMARIZE_TEMPLATE
        is_chat = named or self.template == "chat"
        if self.request.prompt is None and not is_chat:
            return self._prefix + document if self.template == "encoder" else f"{document}\n\nSummary:"
        instruction = (self.request.prompt or (STYLES[style] if style else INSTRUCTION)).strip()
        has_place = PLACEHOLDER in instruction
        asked = instruction.replace(PLACEHOLDER, document) if has_place else f"{instruction}\n\n{document}"
        if not is_chat:
            return asked if has_place or self.template == "encoder" else f"{asked}\n\nSummary:"
        if summary is not None:
            asked = f"{REFINING.replace('{summary}', summary)}\n\n{asked}"
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": document if named else asked}],
            chat_template=SUMMARIZE_TEMPLATE if named else None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # thoughts would use up the tokens of the summary
        )
        return str(rendered)

    def count_tokens(self, prompt: str) -> int:
        """Tokens of a rendered prompt, including special tokens."""
        encoded = self._tokenizer(prompt, add_special_tokens=self.add_special_tokens, verbose=False)
        return len(encoded["input_ids"])


class PromptFitter(Prompting):
    """Renders documents to prompts that leave room for a summary. For the arguments see `Summarizer`.

    Raises:
        ConfigError: No document would fit, or the model cannot follow the request.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        request: SummaryRequest | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        super().__init__(tokenizer, request, model)
        self.max_new_tokens = max_new_tokens
        context, has_encoder = context_length(model, tokenizer), self.template == "encoder"
        asked = self.request.part_tokens or context
        is_asked, context = asked < context, min(asked, context)
        # The encoder's context holds only the document; the summary is in the decoder's context.
        self._prompt_limit = context - (0 if has_encoder else max_new_tokens)
        self._document_limit = self._prompt_limit - self.count_tokens(self.render(""))
        self.partial_summary_limit = self._document_limit // 4  # tokens of a part's summary, so that the rounds end
        self._part_limit = self._document_limit  # for a document that does not fit as a whole
        if self.request.refine:
            self._part_limit = self._prompt_limit - max_new_tokens - self.count_tokens(self.render("", ""))
        missing = MIN_DOCUMENT_TOKENS - min(self._document_limit, self._part_limit)
        if missing > 0 and is_asked:
            raise ConfigError(
                f"part_tokens must be at least {context + missing} to leave room for text and a summary of "
                f"{max_new_tokens} tokens, got {context}"
            )
        if missing > 0 and has_encoder:
            raise ConfigError(
                f"the model's encoder must read at least {context + missing} tokens, and it reads {context}"
            )
        # Refining needs room for two summaries: the summary so far and the new one.
        beside = "the summary so far and a part"
        for limit, what, times in ((self._document_limit, "a document", 1), (self._part_limit, beside, 2)):
            if limit < MIN_DOCUMENT_TOKENS:
                raise ConfigError(
                    f"max_new_tokens must be at most {max_new_tokens + (limit - MIN_DOCUMENT_TOKENS) // times} to "
                    f"leave room for {what} in the model's context of {context} tokens, got {max_new_tokens}"
                )

    def fit(self, document: str) -> Parts:
        """Cut a document that is not blank into parts whose prompts all fit; DocumentError if no part fits."""
        measured = MeasuredText(split_pieces(document.strip()), self._tokenizer, self.clean)
        return self._fit(measured, refine=self.request.refine)

    def prompts(self, parts: Sequence[Part]) -> list[str]:
        """The prompt for each part."""
        return [self.render(part.text) for part in parts]

    def fit_summaries(self, summaries: list[str]) -> Parts:
        """Put as many summaries of parts, none blank, into each prompt as fit.

        Each is first truncated to `partial_summary_limit`: a text can encode to more tokens than were generated.
        """
        limit = self.partial_summary_limit
        *others, last = (truncate(summary, self._tokenizer, limit).strip() for summary in summaries)
        pieces = [Piece(text, Break.PARAGRAPH) for text in (*(f"{summary}\n\n" for summary in others), last)]
        return self._fit(MeasuredText(pieces, self._tokenizer, self.clean))

    def refining_prompt(self, part: Part, summary: str) -> str:
        """The prompt for a part with the summary of the parts before it (may be empty), truncated to fit."""
        if not summary:
            return self.render(part.text)
        text, keep = self.clean(summary), self.max_new_tokens
        while True:
            prompt = self.render(part.text, truncate(text, self._tokenizer, keep))
            excess = self.count_tokens(prompt) - self._prompt_limit
            if excess <= 0 or keep == 0:
                return prompt
            keep = max(0, keep - excess)

    def _fit(self, measured: MeasuredText, *, refine: bool = False) -> Parts:
        limit, room, summary = self._document_limit, self._prompt_limit, None
        while True:
            if refine and summary is None and measured.tokens > limit:
                limit, room, summary = self._part_limit, room - self.max_new_tokens, ""
            parts = cut(measured, limit)
            prompts = (self.render(part.text, summary) for part in parts.parts)
            # A part alone can have a few more tokens than within the document.
            excess = max(map(self.count_tokens, prompts)) - room
            if excess <= 0:
                return parts
            limit -= excess
            if limit <= 0:
                raise DocumentError(f"no part of the document fits a prompt of {self._prompt_limit} tokens")


def context_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Maximum tokens of a prompt with its output, or of an encoder's input; a billion if there is no stated limit."""
    text_config = model.config.get_text_config()
    names = ("max_encoder_position_embeddings", "max_position_embeddings")
    stated = (tokenizer.model_max_length, *(getattr(text_config, name, None) for name in names))
    return min((length for length in stated if isinstance(length, int) and 0 < length < _NO_LIMIT), default=_NO_LIMIT)
