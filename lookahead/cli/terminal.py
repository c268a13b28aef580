"""What the commands print: messages, tables, progress bars, and the exit status of an error."""

from __future__ import annotations

import functools
import gc
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import lookahead
from lookahead.cli.options import FASTEST, DeviceOptions, DraftingOptions, ModelOptions
from lookahead.documents.inputs import Input, find_inputs
from lookahead.errors import ConfigError, LookaheadError, PromptTooLongError, is_out_of_memory, one_line
from lookahead.loading import loading
from lookahead.loading.checkpoints import reads_sound
from lookahead.loading.early_checks import kind_of_folder

MAX_SKIPPED_FILES = 20  # files that are named
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # except tabs and line breaks

_COMMANDS = {
    "sound": "'lookahead transcribe' transcribes it",
    "text": "'lookahead generate' answers a prompt with it",
}  # by what a model reads
_LEAST_GAIN = 1.1  # of bf16, below which the type that "auto" takes stays


@functools.lru_cache(maxsize=8)
def console(file: IO[str]) -> Console:
    """The console of a stream: it prints text unchanged, above a status line or a progress bar."""
    if isinstance(file, FileProxy):  # that rich puts in place of stderr while it shows a status line or a bar
        return console(file.rich_proxied_file)
    return Console(file=file, highlight=False, markup=False, emoji=False)


def harmless(text: str) -> str:
    """Untrusted text with U+FFFD in place of control characters."""
    return _CONTROL.sub("\ufffd", text)


def show_line(file: IO[str], line: str | Text) -> None:
    """Print a line: broken between words on a terminal, whole for a program that reads it."""
    out = console(file)
    out.print(line, soft_wrap=not out.is_terminal)


def say(kind: str, message: str) -> None:
    """Print one line to stderr."""
    line = Text.assemble((f"{kind}: ", "bold red"), harmless(" ".join(message.splitlines())))
    show_line(sys.stderr, line)


def find_sources(
    arguments: Sequence[str], leave_out: Collection[Path] = (), **named: str | None
) -> tuple[list[Input], int]:
    """The inputs by `find_inputs`, and the number of files of folders that are not read, of which some are named."""
    skipped: list[str] = []
    sources = find_inputs(arguments, leave_out=leave_out, on_skip=skipped.append, **named)
    for file in skipped[:MAX_SKIPPED_FILES]:
        say("skipped", file)
    if len(skipped) > MAX_SKIPPED_FILES:
        say("skipped", f"{len(skipped) - MAX_SKIPPED_FILES:,} more files, {len(skipped):,} in all")
    return sources, len(skipped)


@contextmanager
def usage_errors(*, truncates: bool = False) -> Iterator[None]:
    """Print an error as one line and exit with its status, and warnings too; `truncates`: there is `--truncate`."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say("warning", str(message))
            yield
    except LookaheadError as error:
        if isinstance(error, PromptTooLongError):
            cut = ", or cut off its beginning with --truncate left or its end with --truncate right"
            error.remedy = f"shorten it{cut if truncates else ''}"
        say("error", str(error))
        raise typer.Exit(2) from error
    except BrokenPipeError:  # typer handles a closed stdout
        raise
    except OSError as error:
        # An input or output file has a name and fails before the work; without a name it is stdout.
        say("error", f"{error.filename or 'writing failed'}: {error.strerror or error}")
        raise typer.Exit(2 if error.filename else 1) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say("error", f"too little memory: {one_line(error)}")
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        say("interrupted", "stopped before it was finished")
        raise typer.Exit(status_of(error)) from error


class Terminated(KeyboardInterrupt):
    """A signal that ends a command as Ctrl-C does, with its closing line; its number is the argument."""


def raise_on_signals() -> None:
    """Raise `Terminated` from now on when the process is asked to end, or its terminal is closed.

    Only the main thread hears of that. What `nohup` ignores stays ignored.
    """

    def end(number: int, _: object) -> None:
        raise Terminated(number)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, end)


def status_of(interrupt: KeyboardInterrupt) -> int:
    """The exit status of a command that was interrupted, as shells count signals."""
    return 128 + (interrupt.args[0] if isinstance(interrupt, Terminated) else signal.SIGINT)


def table(rows: Sequence[Mapping[str, str] | tuple[str, str]], total: Mapping[str, str] | None = None) -> Table:
    """A table of rows by their headings, or of names and figures: numbers are aligned right, totals below a line."""
    named = [row if isinstance(row, Mapping) else {"": row[0], " ": row[1]} for row in rows]
    first = named[0] if named else total or {}
    drawn = Table(show_header=not named or first is rows[0], show_footer=total is not None, box=SIMPLE)
    drawn.show_edge = drawn.pad_edge = False  # the figures of a document fit 80 columns
    for i, heading in enumerate(first):
        drawn.add_column(heading, total[heading] if total else "", justify="right" if i else "left", overflow="fold")
    for row in named:
        drawn.add_row(*row.values())
    return drawn


def load(
    options: ModelOptions, model: str | None = None, *, measures_costs: bool = True, reads: str = "text"
) -> loading.LoadedModel:
    """Load a model, or another one in the same way, and its step costs, with a status line meanwhile.

    It is located before torch is imported. Costs that no file holds are measured quickly, and saved, if asked for. A
    model that does not read `reads`, "text" or "sound", is refused with the command for it; "any" takes both.
    """
    name = options.model if model is None else model
    location, _ = loading.locate_model(name)
    _check_kind(name, reads, kind_of_folder(location))
    with _without_collection(), console(sys.stderr).status("loading the model") as shown:
        prepare(options, location, shown.update)
        if reads != "any":
            _check_kind(name, reads, "sound" if reads_sound(loading.load_config(name)) else "text")
    with _without_collection(), console(sys.stderr).status("loading the model") as shown:
        loaded = _load_fastest(options, name) if options.dtype == FASTEST else _load(options, name, options.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # a line each, whatever Python is told to do with warnings
            if not measures_costs:
                lookahead.load_costs(loaded.model)
                return loaded
            shown.update("measuring the cost of steps, once for this model on this machine")
            try:
                lookahead.prepare_costs(loaded.model)
            except OSError as error:
                say("warning", f"step costs are not kept for the next time: {one_line(error)}")
    return loaded


def _check_kind(name: str, reads: str, kind: str | None) -> None:
    if kind is not None and reads not in ("any", kind):
        raise ConfigError(f"model {name!r} reads {kind}: {_COMMANDS[kind]}")


def tell_if_demonstration(model: str) -> None:
    """Say that the default model only demonstrates, and how to choose a better one."""
    if model == loading.DEFAULT_MODEL:
        better = "-m names a better one, and 'lookahead models --suggest' lists those that fit this machine"
        say("note", f"{model} has 135 million parameters and is only for demonstration: {better}")


def _load(options: ModelOptions, name: str, dtype: str) -> loading.LoadedModel:
    return loading.load(name, dtype=dtype, device=options.device, quantize=options.quantize)


def _load_fastest(options: ModelOptions, name: str) -> loading.LoadedModel:
    """Load a model in the bf16 of its checkpoint if this CPU is faster in it, and say so; any other as by "auto".

    A model is loaded in bf16 only if passes over trees have the bits of passes over one token: tokens would change.
    """
    import torch

    from lookahead.backend.cpu.product_choice import bfloat16_gain
    from lookahead.backend.self_check import keeps_solo_bits

    if options.quantize is not None or loading.resolve_device(options.device).type != "cpu":
        return _load(options, name, "auto")
    config = loading.load_config(name)
    is_own = getattr(config.get_text_config(), "dtype", None) == torch.bfloat16 and not config.is_encoder_decoder
    if is_own and getattr(config, "quantization_config", None) is None:
        gain = bfloat16_gain()
        if gain > _LEAST_GAIN:
            loaded = _load(options, name, "bf16")
            if keeps_solo_bits(loaded.model):
                why = f"the checkpoint's type, in which this CPU multiplies {gain:.1f} times as fast"
                say("note", f"decoding in bf16, {why}; --dtype fp32 selects fp32, --quantize int8 takes less memory")
                return loaded
    return _load(options, name, "auto")


@contextmanager
def _without_collection() -> Iterator[None]:
    """Put off the collection of garbage, which takes a fifth of the time of imports, and leave out what they made."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def prepare(options: DeviceOptions, location: str, update: Callable[[str], None] = lambda _: None) -> None:
    """Prepare the process for a model, refuse wrong options before a GGUF file is read, and `update` a status line."""
    from lookahead.loading.quantized import resolve_quantize

    loading.prepare_process(options.threads)
    resolve_quantize(options.quantize, loading.resolve_device(options.device))

    def announce(line: str) -> None:
        say("note", line)
        update(line)

    loading.prepare_files(location, options.quantize, announce)


@contextmanager
def memory_file_saved_at_exit(options: DraftingOptions, model: Any) -> Iterator[None]:
    """Open the memory file of a command, if it has one, and save it at the end, an early end included."""
    if options.memory is not None:
        from lookahead.decoding.memory_building import open_memory

        open_memory(model, options.memory)
    try:
        yield
    finally:
        if options.memory is not None:
            lookahead.save_memory(model, options.memory)


@contextmanager
def reading() -> Iterator[Callable[[int, int], None]]:
    """A status line about reading the prompt; yields its function, to be called with equal numbers before any print."""
    with console(sys.stderr).status("checking the model") as shown:

        def update(done: int, tokens: int) -> None:
            if done < tokens:
                shown.update(f"reading the prompt: {done:,} of {tokens:,} tokens")
            else:
                shown.stop()

        yield update


class ProgressBar(Progress):
    """A progress bar on stderr, shown if that is a terminal."""

    def __init__(self, template: str, total: int | None, *, is_shown: bool = True, **values: Any) -> None:
        stderr = console(sys.stderr)
        times = (TimeElapsedColumn(), "left", TimeRemainingColumn())
        # With `redirect_stdout` rich would print that to stderr.
        options: Any = {"transient": True, "redirect_stdout": False, "disable": not (is_shown and stderr.is_terminal)}
        super().__init__(
            SpinnerColumn(), BarColumn(), MofNCompleteColumn(), template, *times, console=stderr, **options
        )
        self._task = self.add_task("", total=total, **values)
