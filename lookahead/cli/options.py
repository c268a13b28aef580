"""How options are declared, each once, and the options that several commands share.

The flags of the commands and the keys of a job file are read from these dataclasses. A field without a help text is no
option.
"""

from __future__ import annotations

import os
import sys
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar, Literal

import lookahead
from lookahead import LookaheadConfig
from lookahead.documents.byte_sources import STDIN, opened
from lookahead.documents.decode_text import decode_bytes
from lookahead.errors import ConfigError, HeadsError, PromptError, pool_errors
from lookahead.loading.early_checks import check_names
from lookahead.loading.loading import resolve_device
from lookahead.loading.suggested_models import default_name
from lookahead.utils.atomic import check_folder

INPUTS = (
    "Files (.txt .md .html .pdf .docx .jsonl .csv .tsv .parquet), folders, patterns such as 'notes/*.md', URLs of any "
    "kind fsspec knows (https:// s3:// hf:// ...), - for stdin."
)

MODEL_HELP = (
    "Folder of a saved model, a GGUF file, a name on the Hub (OWNER/NAME, hf://OWNER/NAME/FILE.gguf), or smollm2."
)


def option(default: Any = MISSING, help: str = "", *flags: str, **details: Any) -> Any:
    """A field that is an option; without a default it is required.

    The flags are its names on the command line, none for `--name`. The details are those of `typer.Option` (`min`,
    `max`, `metavar`, ...), with `argument=True` those of an argument.
    """
    return field(default=default, metadata={"help": help, "flags": flags, **details})


def new_tokens_option(default: int, help: str = "Most tokens to write.", *, min: int = 1, **details: Any) -> Any:
    """The option that limits new tokens, under its names."""
    return option(default, help, "--max-new-tokens", "--max-tokens", "-n", min=min, **details)


def model_option(default: Any = MISSING, help: str = MODEL_HELP, **details: Any) -> Any:
    """The option that names a model, under its names."""
    return option(default, help, "--model", "-m", **details)


def options_of(kind: type) -> list[tuple[Field[Any], type]]:
    """The options of a dataclass with the classes that declare them; a class comes before its bases."""
    classes = kind.__mro__
    owners = {name: i for i, owner in enumerate(classes) for name in get_annotations(owner)}
    ordered = sorted(fields(kind), key=lambda option: owners[option.name])
    return [(option, classes[owners[option.name]]) for option in ordered if option.metadata.get("help")]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    panel: ClassVar[str] = "Model"

    dtype: str = option(
        "auto", "fp32, bf16, fp16, or auto: the checkpoint's own on a GPU, fp32 on a CPU, bf16 with --quantize."
    )
    quantize: str | None = option(
        None,
        "Linear layers with weights of 8 bits (int8), 4 (int4) or as a GGUF file has them (gguf), on a CPU.",
        metavar="int8|int4|gguf",
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    threads: int | None = option(None, "CPU threads. (default: as PyTorch chooses)", min=1, max=1024)

    def check_place(self) -> None:
        """Refuse a type or a device that there is not, before anything that takes seconds is imported."""
        check_names("auto" if self.dtype == FASTEST else self.dtype, self.quantize)
        # The workers of a cluster have devices of their own.
        if self.device not in (None, "cpu") and not getattr(self, "ray", False):
            resolve_device(self.device)


FASTEST = "fastest"
"""The type of a model that a command chooses: on a CPU the checkpoint's own bf16 where that is faster, else "auto"."""


def fastest_option() -> Any:
    """The option of the type, for commands that decode."""
    return option(
        FASTEST,
        "fp32, bf16, fp16; auto: fp32 on a CPU; fastest: on a CPU the checkpoint's bf16 if that is faster, else auto.",
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DeviceOptions):
    panel: ClassVar[str] = "Model"

    dtype: str = fastest_option()
    model: str = model_option(default_name())


@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    panel: ClassVar[str] = "Drafting"

    proposers: str = option(
        ",".join(map(str, LookaheadConfig().proposers)),
        "Sources of drafts: any of prompt, outputs, corpus, recycled, jacobi, self; or none.",
    )
    self_draft: bool = option(
        False, "Draft with a copy of the model with 4-bit weights too, on a CPU: for text that repeats nothing."
    )
    pool: str | None = option(None, "Draft from a corpus too, made by 'lookahead pool build'.", metavar="FILE")
    memory: str | None = option(
        None,
        "Draft from the predictions of earlier commands with this model, and add to them.",
        metavar="FILE.lkm",
    )
    heads: str | None = option(None, "Draft with heads too: a folder of 'lookahead train', or native.", metavar="DIR")
    max_nodes: int | None = option(None, "Most draft tokens a step verifies. (default: by the proposers)")
    window: str | None = option(
        None,
        "Draft from a Jacobi window of W columns too, with up to G n-grams of N tokens a step, by default 7 of 5; "
        "auto: 7 columns, only while they pay.",
        metavar="W[,N[,G]]|auto",
    )
    trust_user_code: bool = option(
        False, "Your own code in the model treats every token by itself and keeps no state: draft beside it too."
    )

    def check_files(self) -> None:
        """Refuse files to draft from that are none, or a memory that could not be written at the end."""
        if self.pool is not None:
            check_draft_file("pool", self.pool)
        if self.memory is not None:
            with pool_errors(f"{self.memory}: cannot be written"):
                check_folder(Path(os.path.realpath(self.memory)).parent)
            if os.path.lexists(self.memory):
                check_draft_file("memory", self.memory)
        if self.heads not in (None, "native") and not os.path.isdir(os.path.expanduser(self.heads)):
            raise HeadsError(f"{self.heads}: not a folder of heads, nor 'native', the layer of the model's checkpoint")

    def config(self) -> LookaheadConfig | None:
        """The configuration, checked; `None` for defaults alone, with which any model is decoded, if only plainly."""
        sources: list[Any] = [] if self.proposers == "none" else [name.strip() for name in self.proposers.split(",")]
        if self.self_draft and "self" not in sources:
            sources.append("self")
        if self.heads is not None:
            if (quantize := getattr(self, "quantize", None)) is not None:
                raise ConfigError(f"heads draft for a model that is not quantized, got --quantize {quantize}")
            sources.append(lookahead.Heads(self.heads))
        config = LookaheadConfig(
            proposers=sources,
            pool=self.pool,
            max_nodes=self.max_nodes,
            window=_window_of(self.window),
            trust_user_code=self.trust_user_code,
            memory="shared" if self.memory is None else self.memory,
        )
        return None if config == LookaheadConfig() else config


def check_draft_file(kind: Literal["pool", "memory"], path: str) -> None:
    """PoolError for a file without the header of a pool or a memory."""
    from lookahead.ngram.memory_file import MemoryHeader
    from lookahead.ngram.pool_file import PoolHeader

    with pool_errors(path):
        header: Any = PoolHeader if kind == "pool" else MemoryHeader
        header.read(path)


def _window_of(text: str | None) -> Any:
    """The sizes in a text such as `7` or `7,5,7`; a text of another kind as it is, which the configuration refuses."""
    sizes = [] if text is None else text.split(",")
    if not sizes or not all(size.strip().isdecimal() for size in sizes):
        return text
    numbers = tuple(map(int, sizes))
    return numbers if len(numbers) > 1 else numbers[0]


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    panel: ClassVar[str] = "Documents"

    field: str | None = option(
        None, "Field or column with the text; stdin then holds JSON lines. (default: text)", "--field", "--text-field"
    )
    max_document_mb: float = option(64.0, "Longest document, in megabytes.", min=0.001, max=1_000_000)


@dataclass(frozen=True, kw_only=True)
class RepetitionOptions:
    """Options against loops, and texts that end an output, for every command that decodes."""

    panel: ClassVar[str] = "Sampling"

    repetition_penalty: float | None = option(
        None, "Above 1, tokens of the prompt and the text so far are less likely; 1 is off.", min=0.01, max=10.0
    )
    no_repeat_ngram_size: int | None = option(
        None, "Never write N tokens in a row that the prompt or the text so far holds; 0 is off.", min=0
    )
    min_p: float | None = option(
        None, "Sample from tokens whose probability is at least this share of the highest.", min=0.0, max=1.0
    )
    stop: list[str] | None = option(None, "Text that ends the output and stays in it; may be repeated.", metavar="TEXT")

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `model.generate`: greedy without an option that samples, or with temperature 0."""
        if self.stop is not None and not all(self.stop):
            raise ConfigError("--stop must be a text of at least one character, got ''")
        names = ("repetition_penalty", "no_repeat_ngram_size"), ("min_p", "temperature", "top_k", "top_p")
        against_loops, drawing = ({name: getattr(self, name, None) for name in group} for group in names)
        if drawing["temperature"] == 0:
            drawing = {}
        values = against_loops | drawing | {"stop_strings": self.stop or None}
        is_drawn = any(value is not None for value in drawing.values())
        return {"do_sample": is_drawn, **{name: value for name, value in values.items() if value is not None}}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(RepetitionOptions):
    panel: ClassVar[str] = "Sampling"

    temperature: float | None = option(None, "Sample at this temperature; 0 takes the likeliest token.", min=0.0)
    top_k: int | None = option(None, "Sample from the k likeliest tokens.", min=1)
    top_p: float | None = option(None, "Sample from the likeliest tokens of this total probability.", min=0.0, max=1.0)
    seed: int | None = option(None, "The same seed samples the same text.")


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    system: str | None = option(None, "System message for a chat model.", metavar="TEXT")
    raw: bool = option(False, "Continue the text as it is, without the chat template.")
    truncate: Literal["left", "right"] | None = option(
        None, "End of a prompt that is cut off if the prompt is longer than the model's context."
    )

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise ConfigError("--system is part of the chat template, which --raw leaves out")

    def prompt_of(self, tokenizer: Any, text: str) -> Any:
        """A text as the model is asked: a user's message where the tokenizer has a chat template."""
        from lookahead.decoding.prompts import as_chat

        return text if self.raw else as_chat(tokenizer, text, self.system)


@dataclass(frozen=True, kw_only=True)
class OnePromptOptions(PromptOptions):
    prompt: str | None = None
    prompt_text: str | None = option(None, "The prompt, or - for stdin.", "--prompt", "-p", metavar="TEXT")

    def read_prompt(self, *, names_file: bool = False) -> str:
        """The text of the argument or the option, or of stdin; `names_file`: the argument is the name of a file."""
        if self.prompt is not None and self.prompt_text is not None:
            raise ConfigError("name one prompt: the argument or --prompt, got both")
        text = self.prompt_text if self.prompt is None else self.prompt
        if text is None:
            if sys.stdin is not None and sys.stdin.isatty():
                raise ConfigError("no prompt: pass it as the argument, by --prompt, or through a pipe")
            text = STDIN
        if text == STDIN or (names_file and self.prompt is not None):
            return read_prompt_file(text)
        if not text:
            raise PromptError("the prompt is empty")
        return text


def read_prompt_file(name: str) -> str:
    """The text of a file or a URL, or of standard input for the name `-`."""
    with opened(name) as file:
        text = decode_bytes(file.read(), name)
    if not text.strip():
        raise PromptError(f"{name} has no prompt: it is empty")
    return text
