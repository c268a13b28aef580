"""From a document to the prompt that asks this model for its summary."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUMMARIZE_TEMPLATE = "summarize"
INSTRUCTION = "Summarize the following text in a few sentences."

_WHITESPACE = re.compile(r"\s+")


class Prompting:
    """How one tokenizer's model is asked for a summary.

    A chat template named `"summarize"` gets the bare document; any other chat template gets an instruction and
    the document as a user's message; without one the prompt is the document and `Summary:`. An encoder-decoder model
    reads the document itself, behind the prefix its configuration names (T5's `summarize: `).

    Args:
        tokenizer: The tokenizer whose templates are used.
        model: Its model; one with an encoder needs no prompt.

    Attributes:
        template: `"encoder"`, `"summarize"`, `"chat"` or `"plain"`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None) -> None:
        self._tokenizer = tokenizer
        self._prefix = ""
        templates = tokenizer.chat_template
        if model is not None and model.config.is_encoder_decoder:
            self.template = "encoder"
            self._prefix = summary_prefix(model)
        elif isinstance(templates, dict) and SUMMARIZE_TEMPLATE in templates:
            self.template = SUMMARIZE_TEMPLATE
        elif templates and (isinstance(templates, str) or "default" in templates):
            self.template = "chat"
        else:
            self.template = "plain"
        markers = {*tokenizer.all_special_tokens, *_special_added_tokens(tokenizer)}
        longest_first = sorted((marker for marker in markers if len(marker) > 1), key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer must add its own special tokens, as no template wrote any."""
        return self.template in ("plain", "encoder")

    def clean(self, text: str) -> str:
        """Bring a piece of a document into the form the model knows; every document passes here once.

        The bundled model has seen every run of whitespace as one space. A special token that stands in the text
        (`<|endoftext|>` in an article on language models) is spelled out, so that it cannot end the prompt early.
        """
        if self.template == SUMMARIZE_TEMPLATE:
            text = _WHITESPACE.sub(" ", text)
        if self._markers is None:
            return text
        return self._markers.sub(lambda marker: f"{marker[0][0]} {marker[0][1:]}", text)

    def render(self, document: str) -> str:
        """The whole prompt for a cleaned document."""
        if self.template == "encoder":
            return self._prefix + document
        if self.template == "plain":
            return f"{document}\n\nSummary:"
        named = self.template == SUMMARIZE_TEMPLATE
        content = document if named else f"{INSTRUCTION}\n\n{document}"
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
