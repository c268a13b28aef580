"""Options that several commands share: which model, how fast, and drafted from what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from lookahead.config import LookaheadConfig
from lookahead.errors import ConfigError, PromptTooLongError


class Side(str, Enum):
    """Which end of a prompt is left out."""

    left = "left"
    right = "right"


Model = Annotated[str, typer.Option(help="Folder of a saved model, a GGUF file, a name on the Hub, or smollm2.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "--max-tokens", help="Most tokens to write.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16, or auto: the checkpoint's own on a GPU, fp32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. (default: as PyTorch chooses)")]
Proposers = Annotated[str, typer.Option(help="Drafts' sources, of prompt, outputs, corpus, recycled, jacobi; or none.")]
TrainedHeads = Annotated[
    str | None,
    typer.Option("--heads", metavar="DIR", help="And from these, see 'lookahead train'; or native."),
]
MaxNodes = Annotated[int | None, typer.Option(help="Most draft tokens a step verifies. (default: by the proposers)")]
Window = Annotated[
    str | None, typer.Option(help="Draft from a Jacobi window of W columns too, or auto: while it pays, W chosen.")
]
NgramSize = Annotated[int | None, typer.Option(help="N, length of its n-grams. (default: 5, or as suits auto)")]
Guesses = Annotated[int | None, typer.Option(help="G, most of them a step verifies. (default: 7, or as suits auto)")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="Sample at this temperature; 0 takes the likeliest.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this mass.")]
Seed = Annotated[int | None, typer.Option(help="The same seed samples the same text.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="What the system's message tells a chat model.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")]
Truncate = Annotated[Side | None, typer.Option(help="What a prompt longer than the model's context loses.")]
MaxDocument = Annotated[
    float, typer.Option("--max-document-mb", min=0.001, max=1_000_000, help="Longest document, in megabytes.")
]
Overlap = Annotated[int, typer.Option(help="Tokens a part of a long document repeats of the part before.")]
Refine = Annotated[
    bool, typer.Option("--refine", help="Read parts one by one beside the summary so far; takes an instruction model.")
]
KeepParts = Annotated[bool, typer.Option("--keep-parts", help="Write the summaries of parts too, level by level.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the model on the way: for long outputs and many.")]
Graphs = Annotated[bool, typer.Option("--cuda-graphs", help="Record its passes as CUDA graphs, on a GPU.")]


class _BareFlags:
    """Shows flags without a type in the help: they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, as help lists them."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the class this is mixed into
        for parameter in parameters:
            if getattr(parameter, "is_bool_flag", False):
                parameter.metavar = ""
        return parameters


class _Command(_BareFlags, TyperCommand):
    """A command."""


class _Group(_BareFlags, TyperGroup):
    """A group of commands."""


class App(typer.Typer):
    """A Typer application whose help shows flags without a type."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """As that of Typer."""
        return super().command(name, cls=_Command, **settings)


@contextmanager
def truncation_named() -> Iterator[None]:
    """Let the error on a prompt that is too long name the option of the command line."""
    try:
        yield
    except PromptTooLongError as error:
        remedy = "shorten it, or leave out its beginning with --truncate left or its end with --truncate right"
        raise PromptTooLongError(error.lengths, remedy) from error


def read_window(text: str | None) -> Any:
    """A window as an option gives it: digits are a number, and the configuration checks the rest."""
    return int(text) if text is not None and text.isdecimal() else text


def drafting_config(
    proposers: str,
    pool: str | None,
    heads: str | None,
    max_nodes: int | None,
    window: str | None,
    ngram_size: int | None,
    guesses: int | None,
    compile: bool,
    cuda_graphs: bool,
    acceptance: str = "exact",
) -> LookaheadConfig | None:
    """The options on drafting as a configuration, which checks them; None where all are the defaults.

    Asking for nothing in particular lets a model that cannot verify drafts be decoded plainly.
    """
    sources: list[Any] = [] if proposers == "none" else [name.strip() for name in proposers.split(",")]
    if heads is not None:
        from lookahead.proposers.heads import Heads

        sources.append(Heads(heads))
    columns = read_window(window)
    config = LookaheadConfig(
        proposers=sources, pool=pool, max_nodes=max_nodes, window=columns, ngram_size=ngram_size, guesses=guesses,
        compile=compile, cuda_graphs=cuda_graphs, acceptance=cast(Any, acceptance),
    )  # fmt: skip
    return None if config == LookaheadConfig() else config


def sampling_options(temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """The options of `model.generate` for these; greedy where none is given, or the temperature is 0."""
    chosen = {"temperature": temperature or None, "top_k": top_k, "top_p": top_p}
    sampling = {name: value for name, value in chosen.items() if value is not None and temperature != 0}
    return {"do_sample": bool(sampling), **sampling}


def split_pool(pool: str | None, proposers: str) -> tuple[str | None, Path | None]:
    """A pool file as a corpus to draft from or as a memory to draft from and add to, whichever it is."""
    if pool is None:
        return None, None
    from lookahead.jobs.output_memory import check_memory, is_memory

    if not is_memory(pool):
        return pool, None
    if "outputs" not in proposers:
        raise ConfigError(f"pool {pool} is for earlier outputs; --proposers must name outputs, got {proposers!r}")
    check_memory(Path(pool))
    return None, Path(pool)
