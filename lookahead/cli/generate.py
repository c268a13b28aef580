"""The command that answers or continues a prompt."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, cast

from lookahead.cli.options import PromptOptions, SamplingOptions, truncation_named
from lookahead.cli.terminal import console, harmless, load, reading, remembering, say, table
from lookahead.config import LookaheadConfig
from lookahead.errors import ConfigError
from lookahead.jobs.job_figures import stats_rows
from lookahead.jobs.job_options import DraftingOptions, ModelOptions, new_tokens_option, option


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PromptOptions, SamplingOptions, DraftingOptions, ModelOptions):
    """Options of `lookahead generate`."""

    prompt: str = option(help="A question or a text to continue, or - for stdin.", argument=True, metavar="PROMPT")
    max_new_tokens: int = new_tokens_option(128)
    num_beams: int | None = option(
        None, "Search with so many beams; the text comes at the end. (default: the model's own, or 1)", min=1
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
      lookahead generate "Dear Sir" --model ./large --draft-model ./small
      lookahead generate "Dear Sir" --proposers none --heads ./heads --stats
    """
    from lookahead.documents.readers import read_prompt
    from lookahead.summarization.prompt_fitter import check_max_new_tokens

    check_max_new_tokens(options.max_new_tokens)
    if options.raw and options.system is not None:
        raise ConfigError("--system is part of the chat template, which --raw leaves out")
    config = options.config()
    if options.acceptance != "exact":
        config = replace(config or LookaheadConfig(), acceptance=cast(Any, options.acceptance))
    text = read_prompt(options.prompt)
    loaded = load(options)
    if options.draft_model is not None:
        draft, tokenizer = load(options, options.draft_model, measures_costs=False)
        from lookahead.proposers.draft_model import DraftModel

        config = config or LookaheadConfig()
        config = replace(config, proposers=(*config.proposers, DraftModel(draft, tokenizer=tokenizer)))
    from lookahead.generation.api import stream
    from lookahead.generation.prompts import as_chat

    decoding = options.sampling if options.num_beams is None else {**options.sampling, "num_beams": options.num_beams}
    with remembering(options, loaded.model), reading() as on_prefill:
        prompt = text if options.raw else as_chat(loaded.tokenizer, text, options.system)
        with truncation_named():
            pieces = stream(
                *loaded, prompt, on_prefill=on_prefill, config=config, seed=options.seed, truncate=options.truncate,
                max_new_tokens=options.max_new_tokens, **decoding,
            )  # fmt: skip
        with pieces.serving():
            for piece in pieces:
                on_prefill(1, 1)  # a model that cannot score trees does not report its prefill
                print(harmless(piece), end="", flush=True)
    print(flush=True)
    if pieces.finish_reason == "length" and len(pieces.token_ids) < options.max_new_tokens:
        say("note", f"the model's context is full after {len(pieces.token_ids)} new tokens")
    if options.stats:
        rows = [*stats_rows(pieces.stats), ("finish_reason", str(pieces.finish_reason))]
        console(sys.stderr).print(table(("", ""), rows))
