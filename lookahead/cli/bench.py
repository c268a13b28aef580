"""The command that compares lookahead with transformers on a user's own prompts."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from lookahead import LookaheadConfig
from lookahead.cli.options import (
    DocumentOptions,
    DraftingOptions,
    ModelOptions,
    PromptOptions,
    new_tokens_option,
    option,
)
from lookahead.cli.terminal import console, find_sources, load, say, show_line, table
from lookahead.documents.byte_sources import MEGABYTE
from lookahead.documents.decode_text import Reject
from lookahead.documents.readers import read_documents
from lookahead.errors import PromptError, count
from lookahead.loading.loading import locate_model

if TYPE_CHECKING:
    from lookahead.decoding.comparison import Score

_LOOKUP = {"transformers' prompt lookup": {"prompt_lookup_num_tokens": 10}}
_NO_DRAFTS, _NO_COPY, _OURS = "lookahead without drafts", "lookahead without the copy", "lookahead"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(PromptOptions, DocumentOptions, DraftingOptions, ModelOptions):
    prompts: list[str] | None = option(
        None,
        "File with a prompt (.txt, .md) or many (.jsonl); may be repeated. (default: built-in prompts)",
        metavar="FILE",
    )
    max_new_tokens: int = new_tokens_option(128, "Most new tokens for each prompt.", min=2)
    as_json: bool = option(False, "Print one JSON object.", "--json")


def bench(options: BenchOptions) -> None:
    """Compare lookahead with transformers on your own prompts: speed and tokens.

    Every prompt is decoded greedily by transformers, by its prompt lookup, by lookahead without drafts and by
    lookahead. Their order rotates. With --self-draft lookahead is measured without it too. If the tokenizer has a chat
    template, a prompt is a user's message; with --raw, and for other models, it is text to continue. --field names the
    field of JSON lines that holds the prompt.

    "ms a token" is the time of each token after the first. "times" is the speed relative to transformers, and "with
    the prompt" the same for whole calls. lookahead learns from each prompt and drafts from it for the next ones.
    Nothing is written.

    For example:

      lookahead bench --model ./my-model --dtype bf16
      lookahead bench --prompts mine.txt --model ./my-model
      lookahead bench --prompts mine.jsonl --field prompt --json

    Exit status: 0 all outputs equal the outputs of transformers; 1 one differs; 2 an argument is wrong.
    """
    locate_model(options.model)
    config, texts = options.config(), _read_prompts(options)
    loaded = load(options, measures_costs=False)
    from lookahead.decoding.comparison import PROMPTS, TRANSFORMERS, compare

    prompts = [options.prompt_of(loaded.tokenizer, text) for text in texts or PROMPTS]
    settings: Any = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "num_beams": 1}
    configs = {_NO_DRAFTS: LookaheadConfig(proposers=()), _OURS: config}
    if config is not None and "self" in config.proposers:
        configs[_NO_COPY] = replace(config, proposers=[proposer for proposer in config.proposers if proposer != "self"])
    with console(sys.stderr).status("measuring"):
        scores = compare(*loaded, prompts, configs, baselines=_LOOKUP, truncate=options.truncate, **settings)
    plain = scores[TRANSFORMERS]

    def figures(score: Score) -> dict[str, Any]:
        ours, seconds = score.stats.tpot_s, score.call_s
        return {
            "ms_per_token": round(1e3 * ours, 3),
            "times": round(plain.stats.tpot_s / ours, 3) if ours else None,
            "times_with_prompt": round(plain.call_s / seconds, 3) if seconds else None,
            "times_without_loops": _without_loops(plain, score),
            **score.to_dict(),
        }

    methods = {name: figures(score) for name, score in scores.items()}
    if options.as_json:
        model, dtype = loaded.model.name_or_path, str(loaded.model.dtype).removeprefix("torch.")
        shown = {"max_new_tokens": options.max_new_tokens, "backend": scores[_OURS].stats.backend}
        print(json.dumps({"model": model, "dtype": dtype, **shown, "methods": methods}))
    else:
        rows = [
            {
                "": name,
                "ms a\ntoken": f"{score['ms_per_token']:.2f}",
                "times": _shown(score["times"]),
                "with the\nprompt": _shown(score["times_with_prompt"]),
                "tokens\na pass": f"{score['mean_acceptance_length']:.2f}",
                "same": f"{scores[name].identical}/{scores[name].prompts}",
            }
            for name, score in methods.items()
        ]
        console(sys.stdout).print(table(rows))
        if plain.loops:
            times = _shown(methods[_OURS]["times_without_loops"])
            looping = f"{plain.loops} of {count(plain.prompts, 'output')} loop, where drafts are nearly always right"
            show_line(sys.stdout, f"{looping}; without them lookahead is {times} times as fast as transformers")
        if _NO_COPY in methods and (least := methods[_OURS]["ms_per_token"]):
            gain = methods[_NO_COPY]["ms_per_token"] / least
            show_line(sys.stdout, f"with --self-draft {gain:.2f} times as fast as without it")
    if differ := [name for name in configs if scores[name].identical < plain.prompts]:
        say("NOT IDENTICAL", f"{' and '.join(differ)} wrote other tokens than transformers")
        raise typer.Exit(1)


def _read_prompts(options: BenchOptions) -> list[str]:
    """The texts of the files, none without a file; an error if one cannot be read."""
    if options.prompts is None:
        return []
    sources, _ = find_sources(options.prompts, field=options.field)
    texts = []
    for document in read_documents(sources, limit=int(options.max_document_mb * MEGABYTE)):
        if isinstance(document, Reject):
            raise PromptError(document.error)
        texts.append(document.text)
    return texts


def _without_loops(plain: Score, score: Score) -> float | None:
    """The speed relative to transformers without the outputs that loop; None if all do."""
    ours = score.stats_without_loops.tpot_s
    return round(plain.stats_without_loops.tpot_s / ours, 3) if ours else None


def _shown(times: float | None) -> str:
    return "-" if times is None else f"{times:.2f}"
