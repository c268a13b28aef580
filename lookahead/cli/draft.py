"""The command that measures draft models."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.cli.terminal import console, load, table
from lookahead.errors import ConfigError
from lookahead.jobs.job_options import ModelOptions, new_tokens_option, option

if TYPE_CHECKING:
    from lookahead.generation.draft_selection import Pick

_HEADINGS = ("", "parameters", "ms/pass", "tokens/pass", "drafted/pass", "tokens/s", "same")


@dataclass(frozen=True, kw_only=True)
class PickDraftOptions(ModelOptions):
    """Options of `lookahead pick-draft`."""

    candidates: str = option(help="Draft models to try, named as --model is.", metavar="MODEL,...")
    prompts: Path | None = option(
        None, "Prompts to continue, one a line. (default: a few of several kinds)", metavar="FILE"
    )
    max_new_tokens: int = new_tokens_option(128, "Most tokens to write for each prompt.", min=2)
    temperature: float = option(0.0, "Sample at this temperature; 0 takes the likeliest token.", min=0.0)
    as_json: bool = option(False, "Print one JSON object.", "--json")


def pick_draft(options: PickDraftOptions) -> None:
    """Try draft models with a target, and say which one makes it fastest, if any.

    Each is tried beside the sources that need no draft model, and these are
    tried without it: a draft model has to be faster than none.

    For example:

      lookahead pick-draft --model ./large --candidates ./small,./smaller
      lookahead pick-draft --model ./large --candidates ./small --prompts mine.txt --json
    """
    names = [name.strip() for name in options.candidates.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"candidates must be models, each named once, got {options.candidates!r}")
    texts = _read_prompts(options.prompts)
    loaded = load(options, measures_costs=False)
    from lookahead.generation.draft_selection import PROMPTS, pick_draft
    from lookahead.proposers.draft_model import DraftModel

    drafts = {}
    for name in names:
        draft, tokenizer = load(options, name, measures_costs=False)
        drafts[name] = DraftModel(draft, tokenizer=tokenizer, name=name)
    temperature = options.temperature
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with console(sys.stderr).status("measuring"):
        pick = pick_draft(*loaded, drafts, texts or PROMPTS, max_new_tokens=options.max_new_tokens, **sampling)
    if options.as_json:
        print(json.dumps(pick.to_dict()))
    else:
        _print_pick(pick)


def _read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return []
    from lookahead.documents.byte_sources import opened
    from lookahead.documents.decode_text import decode_bytes

    with opened(str(path)) as file:
        text = decode_bytes(file.read(), str(path))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} holds no prompt: it is empty")
    return lines


def _print_pick(pick: Pick) -> None:
    rows = [
        (
            each.name.rstrip("/").rpartition("/")[2],
            f"{each.parameters:,}" if each.parameters else "",
            f"{1e3 * each.pass_s:.2f}" if each.pass_s else "",
            f"{each.score.stats.mean_acceptance_length:.2f}",
            f"{each.score.drafted_per_step:.1f}",
            f"{each.score.stats.tokens_per_s:.1f}",
            f"{each.score.identical}/{each.score.prompts}",
        )
        for each in pick.candidates
    ]
    out = console(sys.stdout)
    out.print(table(_HEADINGS, rows))
    out.print(
        f"a pass of the target: {1e3 * pick.target_pass_s:.2f} ms; same: outputs that are those of model.generate"
    )
    out.print(f"fastest: {pick.best}", soft_wrap=True)
