"""What the benchmarks share: the command line, cores and clocks, engines, and the figures as one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from lookahead import LookaheadConfig
from lookahead.decoding.plan import plan_request
from lookahead.engine.engine import Engine
from lookahead.loading.quantized import OWN_BLOCKS, QUANTIZED
from lookahead.model.calls import ResolvedCall
from lookahead.utils.machine import processor


def parser_of(
    page: str | None,
    *,
    model: str | None = None,
    dtype: str | None = None,
    core: bool = False,
    threads: bool = False,
    quantize: bool = False,
) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a benchmark, with `--output` and other common options.

    `model` and `dtype` are defaults of their options. `core` and `threads` add the options for `stay_on_cores`.
    """
    page = f"{page}\nThe last line printed is one JSON object."
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="also write the JSON object here")
    if model is not None:
        parser.add_argument("--model", default=model, help=f"a folder, or a name on the Hub (default {model})")
    if dtype is not None:
        parser.add_argument("--dtype", choices=("fp32", "bf16"), default=dtype)
    if core:
        parser.add_argument("--core", type=int, help="the core to stay on; the last one when left out")
    if threads:
        parser.add_argument(
            "--threads", type=int, default=1, help="with several, on as many cores, the wall's seconds count"
        )
    if quantize:
        parser.add_argument("--quantize", choices=(*QUANTIZED, OWN_BLOCKS), help="weights of the linear layers")
    return parser


def use_one_thread() -> None:
    """Use one thread, and turn off warnings and progress bars of transformers."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def stay_on_cores(core: int | None, threads: int = 1) -> None:
    """Use `threads` threads and, if the system supports it, pin the process and its children to as many cores.

    One thread stays on `core`, by default the last. Several threads use the last cores.
    """
    use_one_thread()
    torch.set_num_threads(threads)
    if core is not None and threads > 1:
        sys.exit(f"--core {core}: several threads need several cores, got --threads {threads}")
    if hasattr(os, "sched_setaffinity"):
        last = sorted(os.sched_getaffinity(0))[-threads:]
        if len(last) < threads:
            sys.exit(f"--threads {threads}: there are {len(last)} cores")
        try:
            os.sched_setaffinity(0, last if core is None else {core})
        except OSError as error:
            sys.exit(f"--core {core}: {error}")


def clock_of(threads: int) -> str:
    """The clock of the figures: wall time for several threads, whose CPU times would add up, else CPU time."""
    return "cpu" if threads == 1 else "wall"


def timer_of(threads: int) -> Callable[[], float]:
    """Reads the clock of the figures, in seconds."""
    return time.process_time if clock_of(threads) == "cpu" else time.perf_counter


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of one call, by default of CPU time."""
    begin = clock()
    work()
    return clock() - begin


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The names, from another one on for every number, so that no method is always the first."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def make_engine(model: Any, ids: torch.Tensor, config: LookaheadConfig | None, **options: Any) -> Engine:
    """An engine for prompts without padding, int64 `[rows, tokens]`, not started yet; greedy by default."""
    shared = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    engine = plan_request(ResolvedCall.resolve(model, ids, **shared), config).begin()
    assert isinstance(engine, Engine)
    return engine


def setting_of(arguments: argparse.Namespace, *options: str) -> dict[str, Any]:
    """The setting of a measurement: model, dtype, device, threads, and the values of `options`."""
    setting = {"model": Path(arguments.model).name, "dtype": arguments.dtype, "device": f"cpu, {processor()}"}
    setting["threads"] = getattr(arguments, "threads", 1)
    return setting | {name: getattr(arguments, name) for name in options}


def command_line() -> str:
    """The command of this process, with the names of files without their folders."""
    words = (re.sub(r"[^\s:=]*/", "", word) for word in sys.argv[1:])
    return f"python -m bench.{Path(sys.argv[0]).stem} {shlex.join(words)}".strip()


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect the figures."""
    found = {"python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for package in ("torch", "transformers", "numba", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def publish(report: Mapping[str, Any], output: Path | None) -> None:
    """Print command, figures and versions as the last line, and write them to `output`."""
    report = {"command": command_line(), **report, "versions": versions()}
    if output:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))
