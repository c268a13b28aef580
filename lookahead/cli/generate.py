"""The command `lookahead generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import lookahead
from lookahead import LookaheadConfig
from lookahead.cli.habits import log_answer
from lookahead.cli.option_files import KeptOptions
from lookahead.cli.options import (
    DraftingOptions,
    ModelOptions,
    OnePromptOptions,
    SamplingOptions,
    new_tokens_option,
    option,
    read_prompt_file,
)
from lookahead.cli.terminal import console, harmless, load, memory_file_saved_at_exit, reading, say, table
from lookahead.config import ACCEPTANCES, check_seed
from lookahead.errors import count
from lookahead.loading.loading import locate_model

if TYPE_CHECKING:
    from lookahead.decoding.text_stream import TextStream


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(OnePromptOptions, SamplingOptions, DraftingOptions, KeptOptions, ModelOptions):
    prompt: str | None = option(
        None, "A question or a text to continue, or - for stdin. (default: stdin)", argument=True, metavar="PROMPT",
        show_default=False,
    )  # fmt: skip
    max_new_tokens: int = new_tokens_option(128)
    prediction: list[str] | None = option(
        None, "File with a text close to the expected output, to draft from; may be repeated.", metavar="FILE"
    )
    json_schema: str | None = option(None, "File with a JSON schema that the output follows.", metavar="FILE")
    regex: str | None = option(None, "Regular expression that the output matches.", metavar="REGEX")
    grammar: str | None = option(None, "File with a Lark grammar that the output follows.", metavar="FILE")
    num_beams: int | None = option(
        None, "Number of beams; the text is shown at the end. (default: the model's own, or 1)", min=1, max=1024
    )
    stats: bool = option(False, "Show decoding statistics on stderr.")
    as_json: bool = option(False, "Print one JSON object: text, tokens, finish reason, times and statistics.", "--json")
    draft_model: str | None = option(None, "Draft with this model too.", metavar="MODEL")
    acceptance: str = option("exact", "; ".join(f"{name}: {what}" for name, what in ACCEPTANCES.items()) + ".")


def generate(options: GenerateOptions) -> None:
    """Answer or continue a prompt, with the tokens of transformers.

    If the tokenizer has a chat template, the prompt is a user's message; with --raw, and for other models, it is text
    to continue.

    For example:

      lookahead generate "What is the capital of France?"
      lookahead generate - --system "Translate into French." < letter.txt
      lookahead generate "Once upon a time" --model ./my-model
      lookahead generate "Once upon a time" --temperature 0.8 --seed 7 --stats
      lookahead generate -n 64 < prompt.txt
      lookahead generate -m ./my-model -p "Once upon a time" --stop . --json
      lookahead generate "Once upon a time" --num-beams 4
      lookahead generate - --prediction code.py --max-new-tokens 2000 < edit.txt
      lookahead generate "Call the weather tool for Oslo." --json-schema tool.json
      lookahead generate "Is Oslo in Norway?" --regex "yes|no"
      lookahead generate "Dear Sir" --model ./large --draft-model ./small
      lookahead generate "Dear Sir" --proposers none --heads ./heads --stats
    """
    config = options.config()
    if options.acceptance != "exact":
        config = replace(config or LookaheadConfig(), acceptance=cast(Any, options.acceptance))
    check_seed(options.seed)
    text = options.read_prompt()
    predictions = [read_prompt_file(name) for name in options.prediction or ()]
    decoding: dict[str, Any] = options.sampling | _grammar_of(options)
    if options.draft_model is not None:
        locate_model(options.draft_model)
    loaded = load(options)
    if options.draft_model is not None:
        draft, tokenizer = load(options, options.draft_model, measures_costs=False)
        config = config or LookaheadConfig()
        config = replace(config, proposers=(*config.proposers, lookahead.DraftModel(draft, tokenizer=tokenizer)))
    if options.num_beams is not None:
        decoding["num_beams"] = options.num_beams
    with memory_file_saved_at_exit(options, loaded.model), reading() as on_prefill:
        prompt = options.prompt_of(loaded.tokenizer, text)
        pieces = lookahead.stream(
            *loaded, prompt, on_prefill=on_prefill, config=config, seed=options.seed, truncate=options.truncate,
            prediction=predictions, max_new_tokens=options.max_new_tokens, **decoding,
        )  # fmt: skip
        said = _shown(pieces, on_prefill, quietly=options.as_json)
    if options.as_json:
        ended = {"token_ids": pieces.token_ids, "finish_reason": pieces.finish_reason, "loops": pieces.loops}
        print(json.dumps({"model": options.model, "text": said, **ended, **pieces.stats.to_dict()}))
    log_answer("generate", options.model, text, said)
    if pieces.finish_reason == "length":
        written = len(pieces.token_ids)
        is_limit = written >= options.max_new_tokens
        why = "cut at --max-new-tokens," if is_limit else "the model's context is full"
        say("note", f"{why} after {count(written, 'new token')}")
    if pieces.loops:
        say("note", "the output loops: try --no-repeat-ngram-size 8, or --repetition-penalty 1.1")
    if options.stats:
        rows = []
        for name, value in {**pieces.stats.to_dict(), "finish_reason": pieces.finish_reason}.items():
            counts = ", ".join(f"{key}: {n}" for key, n in value.items()) if isinstance(value, dict) else str(value)
            rows.append((name, counts or "-"))
        console(sys.stderr).print(table(rows))


def _grammar_of(options: GenerateOptions) -> dict[str, str]:
    """The grammars, by the arguments that take them, each checked before a model is loaded."""
    grammars, places = {"regex": options.regex}, {"regex": "--regex"}
    for name, file in (("json_schema", options.json_schema), ("grammar", options.grammar)):
        grammars[name] = None if file is None else read_prompt_file(file)
        places[name] = f"--{name.replace('_', '-')}: {file}"
    named = {name: text for name, text in grammars.items() if text is not None}
    for name, text in named.items():
        from lookahead.plugins.grammar.grammar_text import grammar_text

        grammar_text(name, text, place=places[name])
    return named


def _shown(pieces: TextStream, on_prefill: Callable[[int, int], None], *, quietly: bool) -> str:
    """Print a text as it comes, unless `quietly`, and return it."""
    said = []
    with pieces.serving():
        try:
            for piece in pieces:
                on_prefill(1, 1)  # a model that cannot score trees does not report its prefill
                said.append(piece)
                if not quietly:
                    print(harmless(piece), end="", flush=True)
        finally:
            if not quietly:
                print(flush=True)  # an interrupted text ends with its line, too
    return "".join(said)
