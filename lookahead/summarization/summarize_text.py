"""`lookahead.summarize`. This module does not import torch at load time, so that `import lookahead` stays fast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.config import refuses_removed
from lookahead.documents.decode_text import Reject
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import read_documents
from lookahead.errors import ConfigError, DocumentError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lookahead.config import LookaheadConfig
    from lookahead.summarization.summarizer import Summary

__all__ = ["summarize"]

_LONGEST_PATH = 1024  # characters


@refuses_removed
def summarize(
    text: str | os.PathLike[str],
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_new_tokens: int = 200,
    num_beams: int | None = None,
    config: LookaheadConfig | None = None,
    refine: bool = False,
    part_tokens: int | None = None,
) -> Summary:
    """Summarize a text of any length.

    A text longer than the model's context is cut between sections or sentences. Its parts are summarized, then their
    summaries together. Nothing is sampled, so the same text gives the same summary.

    Args:
        text: The document, or the `pathlib.Path` of its file: text, HTML, PDF or Word. A string is always the text
            itself.
        model: Any causal language model. Without model and tokenizer, the default of `lookahead.load` is used and
            loaded once per process. It is decoded with `no_repeat_ngram_size=8`, since most of its summaries would
            loop. A model that you pass follows its own generation configuration.
        tokenizer: The tokenizer of `model`.
        max_new_tokens: Maximum number of tokens of the summary.
        num_beams: Beams of the search, at least 1; `None` uses the model's own number, usually 1.
        config: How drafts are made; it changes the speed, not the summary.
        refine: Whether the parts are read in order, each with the summary so far. The model must follow instructions.
        part_tokens: Most tokens of a prompt with its summary, above which a text is cut; `None` uses the model's
            context.

    Returns:
        The summary; `str()` of it is its text.

    Raises:
        ConfigError: `max_new_tokens`, `num_beams` or `part_tokens` is out of range, the model cannot refine, only one
            of `model` and `tokenizer` was given, or an argument has a wrong type.
        DocumentError: The text has no letter or digit or is the name of a file, the file cannot be read, or the summary
            is empty.
        UnsupportedModelError: The model cannot be served, or the default one is not installed.
    """
    from lookahead.decoding.validation import check_config, check_pair
    from lookahead.loading.loading import load_default
    from lookahead.model.facts import check_model
    from lookahead.summarization.prompting import DEFAULT_SAMPLING, SummaryRequest
    from lookahead.summarization.summarizer import Summarizer

    request = SummaryRequest(refine=refine, part_tokens=part_tokens)
    document = _read(text)
    check_config("config", config)
    options: Any = {"num_beams": num_beams, "config": config, "request": request}
    if model is None and tokenizer is None:
        model, tokenizer = load_default()
        options["sampling"] = DEFAULT_SAMPLING
    elif model is None:
        raise ConfigError("model and tokenizer must be given together, got a tokenizer but no model")
    elif tokenizer is None:
        check_model(model)
        raise ConfigError("model and tokenizer must be given together, got a model but no tokenizer")
    check_pair(model, tokenizer)
    return Summarizer(model, tokenizer, max_new_tokens=max_new_tokens, **options).summarize(document)


def _read(text: Any) -> str:
    if isinstance(text, os.PathLike):
        path = Path(text)
        if not path.is_file():
            raise DocumentError(f"{path} is not a file; text must be a string or the pathlib.Path of a file")
        sources = find_inputs([str(path)])
        if sources[0].field is not None:
            raise DocumentError(f"{path} holds one document per line or row; 'lookahead summarize' reads such files")
        (document,) = read_documents(sources)
        if isinstance(document, Reject):
            raise DocumentError(document.error)
        return document.text
    if isinstance(text, list | tuple):
        raise ConfigError(
            f"text must be one document, got a {type(text).__name__} of {len(text)}; call summarize for each, or "
            "lookahead.summarization.summarizer.Summarizer(model, tokenizer).summarize_all for several at a time"
        )
    if not isinstance(text, str):
        raise ConfigError(f"text must be a string or a pathlib.Path, got {type(text).__name__}")
    name = text.strip()
    if len(name) <= _LONGEST_PATH and name.isprintable() and os.path.isfile(name):
        raise DocumentError(f"{name!r} is the name of a file, not its text; pass pathlib.Path({name!r}) to read it")
    return text
