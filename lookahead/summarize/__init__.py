"""Summaries of documents of any length, decoded speculatively.

The modules: `sentences` and `sections` find where a document may be cut, `measuring` counts its tokens, `parts` cuts
it, `prompting` renders prompts, `fitting` fits them to a model, `course` leads from parts to one summary, `decoding`
and `comparison` generate, `summarizer` turns one document into a `summary`, `together` several at a time.
`lookahead.jobs` runs many of them.

Importing this package imports none of them, nor torch, so that `import lookahead` stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lookahead.config import LookaheadConfig
    from lookahead.summarize.summarizer import Summary

__all__ = ["summarize"]


def summarize(
    text: str,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_new_tokens: int = 128,
    config: LookaheadConfig | None = None,
    overlap: int = 0,
    refine: bool = False,
    keep_parts: bool = False,
) -> Summary:
    """Summarize a text of any length.

    A text longer than the model's context is cut between sections or sentences, its parts are summarized, then
    the summaries of the parts together. Decoding is greedy, so the same text gives the same summary.

    Args:
        text: The document.
        model: Any causal language model; the default one of `lookahead.load` where neither it nor a tokenizer is given.
            That one is loaded once per process.
        tokenizer: The tokenizer of `model`.
        max_new_tokens: Most tokens of the summary.
        config: How drafts are made; it changes the speed, never the summary.
        overlap: Tokens that a part repeats of the end of the part before.
        refine: Whether one part is read after the other, each with the summary so far; takes a model that follows
            instructions.
        keep_parts: Whether the summary's `tree` tells the summaries of the parts, level by level.

    Returns:
        The summary; `str()` of it is its text.

    Raises:
        ConfigError: `max_new_tokens` or `overlap` is out of range, the model cannot refine, or only one of `model` and
            `tokenizer` was given.
        DocumentError: The text is empty.
        UnsupportedModelError: The model cannot be served, or the default one is not installed.
    """
    from lookahead.errors import ConfigError
    from lookahead.loading import load_default
    from lookahead.summarize.fitting import Approach
    from lookahead.summarize.summarizer import Summarizer

    approach = Approach(overlap=overlap, refine=refine)
    if (model is None) != (tokenizer is None):
        given, missing = ("tokenizer", "model") if model is None else ("model", "tokenizer")
        raise ConfigError(f"model and tokenizer must be given together, got a {given} but no {missing}")
    if model is None or tokenizer is None:
        model, tokenizer = load_default()
    summarizer = Summarizer(
        model, tokenizer, max_new_tokens=max_new_tokens, config=config, approach=approach, keep_parts=keep_parts
    )
    return summarizer.summarize(text)
