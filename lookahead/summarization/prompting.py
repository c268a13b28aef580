"""From a document to the prompt that asks this model for its summary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookahead.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUMMARIZE_TEMPLATE = "summarize"
INSTRUCTION = "{document}\n\nSummarize the text above in two sentences."  # small models heed what stands last
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

_WHITESPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRequest:
    """What a model is asked for, where the usual summary is not wanted.

    Attributes:
        prompt: The instruction in words; `{document}` in it stands for the document, which else follows it.
        style: `"bullets"`, `"paragraph"` or `"headline"`.

    Raises:
        ConfigError: The prompt is blank, there is no such style, or both are given.
    """

    prompt: str | None = None
    style: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and not self.prompt.strip():
            raise ConfigError("the prompt is empty")
        if self.style is not None and self.style not in STYLES:
            raise ConfigError(f"style must be {', '.join(STYLES)}, got {self.style!r}")
        if self.prompt is not None and self.style is not None:
            raise ConfigError("a prompt and a style both say what to ask for; give one of them")

    @property
    def instruction(self) -> str:
        """The instruction in words."""
        return (self.prompt or (STYLES[self.style] if self.style else INSTRUCTION)).strip()


class Prompting:
    """How one tokenizer's model is asked for a summary.

    A chat template named `"summarize"` gets the bare document; any other chat template gets an instruction and
    the document as a user's message; without one the prompt is the document and `Summary:`. An encoder-decoder model
    reads the document itself, behind the prefix its configuration names (T5's `summarize: `).

    Args:
        tokenizer: The tokenizer whose templates are used.
        request: What to ask for; `None` for a summary in two sentences.
        model: Its model; one with an encoder needs no prompt.

    Attributes:
        template: `"encoder"`, `"summarize"`, `"chat"` or `"plain"`.

    Raises:
        ConfigError: The model does not follow instructions, and it is asked for something else than a summary.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        request: SummaryRequest | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request or SummaryRequest()
        self._prefix = ""
        templates = tokenizer.chat_template
        if model is not None and model.config.is_encoder_decoder:
            self.template = "encoder"
            self._refuse_style("model reads documents, not chats")
            self._prefix = summary_prefix(model)
        elif isinstance(templates, dict) and SUMMARIZE_TEMPLATE in templates:
            self.template = SUMMARIZE_TEMPLATE
            if self._request.prompt is not None or self._request.style is not None:
                asked = "prompt" if self._request.prompt is not None else f"style {self._request.style!r}"
                raise ConfigError(
                    f"this model was made to summarize and follows no instructions, so a {asked} means nothing to it; "
                    "give --model an instruction model"
                )
        elif templates and (isinstance(templates, str) or "default" in templates):
            self.template = "chat"
        else:
            self.template = "plain"
            self._refuse_style("model's tokenizer has no chat template")
        markers = {*tokenizer.all_special_tokens, *_special_added_tokens(tokenizer)}
        longest_first = sorted((marker for marker in markers if len(marker) > 1), key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer must add its own special tokens, as no template wrote any."""
        return self.template in ("plain", "encoder")

    def _refuse_style(self, reason: str) -> None:
        """Say that only a prompt of one's own tells the model how to summarize."""
        if self._request.style is not None:
            raise ConfigError(
                f"the {reason}, so a style {self._request.style!r} means nothing to it; give --model an instruction "
                "model, or ask in your own words with --prompt-file"
            )

    def check_refining(self) -> None:
        """Refuse a model that would not know what to do with a summary beside a document.

        Raises:
            ConfigError: The model follows no instructions.
        """
        reasons = {
            SUMMARIZE_TEMPLATE: "this model was made to summarize and follows no instructions",
            "encoder": "the model reads documents, not chats",
            "plain": "the model's tokenizer has no chat template",
        }
        if self.template in reasons:
            raise ConfigError(
                f"{reasons[self.template]}, so it cannot refine a summary part by part; give --model an instruction "
                "model, or leave --refine out"
            )

    def clean(self, text: str) -> str:
        """Bring a piece of a document into the form the model knows; every document passes here once.

        A model with a template named `"summarize"` reads every run of whitespace as one space. A special token that
        stands in the text (`<|endoftext|>` in an article on language models) is spelled out, so that it cannot end
        the prompt early.
        """
        if self.template == SUMMARIZE_TEMPLATE:
            text = _WHITESPACE.sub(" ", text)
        if self._markers is None:
            return text
        return self._markers.sub(lambda marker: f"{marker[0][0]} {marker[0][1:]}", text)

    def render(self, document: str, summary: str | None = None) -> str:
        """The whole prompt for a cleaned document.

        Args:
            document: The document, or the next part of it.
            summary: What the parts before say together; `None` where there are none. For chats alone.
        """
        if self.template == "encoder" and self._request.prompt is None:
            return self._prefix + document
        instruction = self._request.instruction
        if PLACEHOLDER in instruction:
            asked = instruction.replace(PLACEHOLDER, document)
        else:
            asked = f"{instruction}\n\n{document}"
        if self.template == "encoder":
            return asked
        if self.template == "plain":
            if self._request.prompt is None:
                return f"{document}\n\nSummary:"
            return asked if PLACEHOLDER in instruction else f"{asked}\n\nSummary:"
        if summary is not None:
            asked = f"{REFINING.replace('{summary}', summary)}\n\n{asked}"
        named = self.template == SUMMARIZE_TEMPLATE
        content = document if named else asked
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=SUMMARIZE_TEMPLATE if named else None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # templates that know it would spend the summary's tokens on a draft of thoughts
        )
        return str(rendered)

    def count_tokens(self, prompt: str) -> int:
        """Tokens of a rendered prompt, special ones included."""
        encoded = self._tokenizer(prompt, add_special_tokens=self.add_special_tokens, verbose=False)
        return len(encoded["input_ids"])


def summary_prefix(model: PreTrainedModel) -> str:
    """What an encoder-decoder model wants to see before a document, by its configuration; often nothing."""
    tasks = getattr(model.config, "task_specific_params", None) or {}
    return str((tasks.get("summarization") or {}).get("prefix") or "")


def _special_added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Markers such as `<|im_start|>` that are special without a role among the named special tokens."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
