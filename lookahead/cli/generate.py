"""The command `lookahead generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, cast

import lookahead
from lookahead.cli.options import (
    DraftingOptions,
    ModelOptions,
    PromptOptions,
    SamplingOptions,
    new_tokens_option,
    option,
    read_prompt_file,
)
from lookahead.cli.terminal import console, harmless, load, memory_file_saved_at_exit, reading, say, table
from lookahead.config import LookaheadConfig
from lookahead.documents.byte_sources import STDIN
from lookahead.errors import ConfigError, PromptError


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PromptOptions, SamplingOptions, DraftingOptions, ModelOptions):
    prompt: str = option(help="A question or a text to continue, or - for stdin.", argument=True, metavar="PROMPT")
    max_new_tokens: int = new_tokens_option(128)
    prediction: list[str] | None = option(
        None, "File with what the output will largely be, a source of drafts; may be repeated.", metavar="FILE"
    )
    json_schema: str | None = option(None, "File with a JSON schema that the output follows.", metavar="FILE")
    regex: str | None = option(None, "Regular expression that the output matches.", metavar="REGEX")
    grammar: str | None = option(
        None, "File with a grammar, as Lark writes them, that the output follows.", metavar="FILE"
    )
    num_beams: int | None = option(
        None, "Search with so many beams; the text comes at the end. (default: the model's own, or 1)", min=1, max=1024
    )
    system: str | None = option(None, "System message for a chat model.", metavar="TEXT")
    stats: bool = option(False, "Show decoding statistics on stderr.")
    draft_model: str | None = option(None, "Draft with this model too.", metavar="MODEL")
    acceptance: str = option(
        "exact", "exact; rejection: other tokens from the same distribution; typical: another distribution, lossy."
    )


def generate(options: GenerateOptions) -> None:
    """Answer a prompt or continue it, token for token as transformers does.

    If the tokenizer has a chat template, the prompt is a user's message to the
    model; with --raw, and for other models, it is text to continue.

    For example:

      lookahead generate "What is the capital of France?"
      lookahead generate - --system "Translate into French." < letter.txt
      lookahead generate "Once upon a time" --model ./my-model
      lookahead generate "Once upon a time" --temperature 0.8 --seed 7 --stats
      lookahead generate - --max-new-tokens 64 < prompt.txt
      lookahead generate "Once upon a time" --num-beams 4
      lookahead generate - --prediction code.py --max-new-tokens 2000 < edit.txt
      lookahead generate "Call the weather tool for Oslo." --json-schema tool.json
      lookahead generate "Is Oslo in Norway?" --regex "yes|no"
      lookahead generate "Dear Sir" --model ./large --draft-model ./small
      lookahead generate "Dear Sir" --proposers none --heads ./heads --stats
    """
    if options.raw and options.system is not None:
        raise ConfigError("--system is part of the chat template, which --raw leaves out")
    config = options.config()
    if options.acceptance != "exact":
        config = replace(config or LookaheadConfig(), acceptance=cast(Any, options.acceptance))
    text = read_prompt_file(STDIN) if options.prompt == STDIN else options.prompt
    if not text:
        raise PromptError("the prompt is empty")
    predictions = [read_prompt_file(name) for name in options.prediction or ()]
    decoding: dict[str, Any] = {
        **options.sampling,
        "json_schema": None if options.json_schema is None else read_prompt_file(options.json_schema),
        "regex": options.regex,
        "grammar": None if options.grammar is None else read_prompt_file(options.grammar),
    }
    loaded = load(options)
    if options.draft_model is not None:
        draft, tokenizer = load(options, options.draft_model, measures_costs=False)
        config = config or LookaheadConfig()
        config = replace(config, proposers=(*config.proposers, lookahead.DraftModel(draft, tokenizer=tokenizer)))
    from lookahead.generation.prompts import as_chat

    if options.num_beams is not None:
        decoding["num_beams"] = options.num_beams
    with memory_file_saved_at_exit(options, loaded.model), reading() as on_prefill:
        prompt = text if options.raw else as_chat(loaded.tokenizer, text, options.system)
        pieces = lookahead.stream(
            *loaded, prompt, on_prefill=on_prefill, config=config, seed=options.seed, truncate=options.truncate,
            prediction=predictions, max_new_tokens=options.max_new_tokens, **decoding,
        )  # fmt: skip
        with pieces.serving():
            try:
                for piece in pieces:
                    on_prefill(1, 1)  # a model that cannot score trees does not report its prefill
                    print(harmless(piece), end="", flush=True)
            finally:
                print(flush=True)  # an interrupted text ends with its line, too
    if pieces.finish_reason == "length" and len(pieces.token_ids) < options.max_new_tokens:
        say("note", f"the model's context is full after {len(pieces.token_ids)} new tokens")
    if options.stats:
        rows = []
        for name, value in {**pieces.stats.to_dict(), "finish_reason": pieces.finish_reason}.items():
            counts = ", ".join(f"{key}: {n}" for key, n in value.items()) if isinstance(value, dict) else str(value)
            rows.append((name, counts or "-"))
        console(sys.stderr).print(table(rows))
