"""The command `lookahead tokens`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from lookahead.cli.draft_files import load_tokenizer_of
from lookahead.cli.options import OnePromptOptions, model_option, option
from lookahead.loading.suggested_models import default_name


@dataclass(frozen=True, kw_only=True)
class TokensOptions(OnePromptOptions):
    prompt: str | None = option(
        None, "A text file, or - for stdin. (default: stdin)", argument=True, metavar="FILE", show_default=False
    )
    model: str = model_option(default_name(), "The model whose tokenizer counts: only that is loaded.")
    as_json: bool = option(False, "Print one JSON object: tokens, ids, and the text of each.", "--json")


def tokens(options: TokensOptions) -> None:
    """Count the tokens of a text, as the model reads it.

    If the tokenizer has a chat template, the text is a user's message in it; with --raw it stands alone.

    For example:

      lookahead tokens article.txt
      lookahead tokens article.txt -m ./my-model --raw
      echo "Hello there" | lookahead tokens --json
    """
    text = options.read_prompt(names_file=True)
    tokenizer = load_tokenizer_of(options.model)
    prompt = options.prompt_of(tokenizer, text)
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    if options.as_json:
        print(json.dumps({"tokens": len(ids), "ids": ids, "texts": [tokenizer.decode([token]) for token in ids]}))
    else:
        print(len(ids))
