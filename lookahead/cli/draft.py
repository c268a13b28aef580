"""Draft models on the command line: arguments in, a table out. The work is done by `picking`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.cli.terminal import console, load, table, usage_errors
from lookahead.config import LookaheadConfig
from lookahead.errors import ConfigError
from lookahead.models.locating import DEFAULT_MODEL

if TYPE_CHECKING:
    from lookahead.generation.draft_selection import Pick

Model = Annotated[str, typer.Option(help="The target: a folder, a GGUF file, a name on the Hub, or smollm2.")]
Candidates = Annotated[str, typer.Option(metavar="MODEL,...", help="Draft models to try, named likewise.")]
Prompts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What to continue, a prompt a line. (default: a few of all kinds)")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "--max-tokens", min=2, help="Most tokens to write for each prompt.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sample at this temperature; 0 takes the likeliest.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16, or auto: the checkpoint's own on a GPU, fp32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. (default: as PyTorch chooses)")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_HEADINGS = ("", "parameters", "ms/pass", "tokens/pass", "drafted/pass", "tokens/s", "same")


def pick_draft(
    candidates: Candidates,
    model: Model = DEFAULT_MODEL,
    prompts: Prompts = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Try draft models with a target, and say which one makes it fastest, if any.

    Each is tried beside the sources that need no draft model, and these are
    tried without it: a draft model has to be faster than none.

    For example:

      lookahead pick-draft --model ./large --candidates ./small,./smaller
      lookahead pick-draft --model ./large --candidates ./small --prompts mine.txt --json
    """
    with usage_errors():
        names = [name.strip() for name in candidates.split(",") if name.strip()]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"candidates must be models, each named once, got {candidates!r}")
        texts = _read_prompts(prompts)
        loaded = load(model, dtype, device, threads, measures_costs=False)
        from lookahead.generation.draft_selection import PROMPTS, pick_draft
        from lookahead.proposers.draft_model import DraftModel

        drafts = {}
        for name in names:
            draft, tokenizer = load(name, dtype, device, threads, measures_costs=False)
            drafts[name] = DraftModel(draft, tokenizer=tokenizer, name=name)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        with console(sys.stderr).status("measuring"):
            pick = pick_draft(*loaded, drafts, texts or PROMPTS, max_new_tokens=max_new_tokens, **sampling)
        if as_json:
            print(json.dumps(pick.to_dict()))
        else:
            _draw(pick)


def with_draft_model(
    config: LookaheadConfig | None, model: str, dtype: str, device: str | None, threads: int | None
) -> LookaheadConfig:
    """The options on drafting, with a draft model beside the other sources; it is loaded for that."""
    draft, tokenizer = load(model, dtype, device, threads, measures_costs=False)
    from lookahead.proposers.draft_model import DraftModel

    config = config if config is not None else LookaheadConfig()
    return replace(config, proposers=(*config.proposers, DraftModel(draft, tokenizer=tokenizer)))


def _read_prompts(path: Path | None) -> list[str]:
    """The lines of a file; none where there is no file."""
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


def _draw(pick: Pick) -> None:
    """Print the figures and what follows."""
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
