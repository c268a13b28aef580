"""The command that checks an installation and shows how a model is served."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import typer
from rich.filesize import decimal

import lookahead
from lookahead.cli.options import FASTEST, DeviceOptions, ModelOptions, fastest_option, model_option, option
from lookahead.cli.terminal import console, load, say, show_line
from lookahead.errors import ConfigError
from lookahead.loading import loading

_PRODUCTS = {
    "kernel": "packed, multiplied by a kernel of lookahead",
    "onednn": "packed, multiplied by oneDNN",
    "stored": "as the model holds them, multiplied by a kernel of lookahead",
    "quantized": "quantized, multiplied by a kernel of lookahead",
    "torch": "multiplied by torch",
}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(DeviceOptions):
    model: str | None = model_option(None, "Show how this model is served too, and how fast. (default: none is loaded)")
    dtype: str = fastest_option()
    as_json: bool = option(False, "Print one JSON object.", "--json")


def doctor(options: DoctorOptions) -> None:
    """Check this installation, and with --model show how a model is served and how fast.

    The report has the CPU and its speed, versions, missing extras, and the caches. With a model it names the path that
    serves it, why faster paths do not, and the time of a token with lookahead and without, measured for two seconds.

    For example:

      lookahead doctor
      lookahead doctor --model ./my-model --dtype bf16 --json

    Exit status: 0 nothing is broken; 1 a part is broken, and a line names it; 2 an argument is wrong.
    """
    loaded = None
    if options.model is not None:
        shared = {field.name: getattr(options, field.name) for field in fields(ModelOptions)}
        loaded = load(ModelOptions(**shared), reads="any")
    elif options.quantize is not None:
        raise ConfigError(f"quantize is for a model: name one with --model, got --quantize {options.quantize} alone")
    loading.prepare_process(options.threads)
    device = loading.resolve_device(options.device)
    dtype = loading.resolve_dtype("auto" if options.dtype == FASTEST else options.dtype, device)
    with console(sys.stderr).status("measuring"):
        from lookahead.decoding.diagnosis import EXTRAS

        facts = lookahead.diagnose(device, dtype, loaded)
    if options.as_json:
        print(json.dumps(facts))
    else:
        for line in _lines(facts, EXTRAS):
            show_line(sys.stdout, line)
    for fault in facts["faults"]:
        say("broken", fault)
    if facts["faults"]:
        raise typer.Exit(1)


def _lines(facts: dict[str, Any], extras: dict[str, str]) -> Iterator[str]:
    """The facts for a reader; `extras` says what needs each extra."""
    machine, versions = facts["machine"], facts["versions"]
    yield "machine"
    yield f"  CPU: {machine['cpu']}, with {', '.join(machine['features']) or 'no feature that matters'}"
    yield f"  cores: {machine['cores']}, threads of torch: {machine['threads']}"
    if machine["memory"] is not None:
        yield f"  memory: {decimal(machine['memory'])}, free: {decimal(machine['free_memory'])}"
    yield f"  GPU: {', '.join(machine['gpus']) or 'none'}"
    speed = f"{machine['flops'] / 1e9:.1f} GFLOP/s and {machine['bytes_per_s'] / 1e9:.1f} GB/s"
    yield f"  speed on {machine['device']} in {machine['dtype']}: {speed}"
    yield "packages"
    yield f"  {', '.join(' '.join(item) for item in versions.items())}"
    for extra, packages in facts["missing_extras"].items():
        yield f"  not installed, for {extras[extra]}: {', '.join(packages)}: pip install 'lookahead-decoding[{extra}]'"
    yield "caches"
    for name, cache in facts["caches"].items():
        writable = "writable" if cache["is_writable"] else "not writable"
        yield f"  {name}: {decimal(cache['bytes'])}, {writable}, {cache['folder']}"
    if "model" in facts:
        yield from _model_lines(facts["model"], machine["bytes_per_s"])


def _model_lines(model: dict[str, Any], bytes_per_s: float) -> Iterator[str]:
    speed, report, weights = model["speed"], model["report"], model["weights"]
    yield f"model: {model['name']}"
    yield f"  {report['model']}, {model['parameters']:,} parameters, {model['dtype']}"
    packed = f"packed copies of weights: {decimal(model['packed_weights'])}"
    yield f"  weights: {decimal(weights)}, read in {1e3 * weights / bytes_per_s:.2f} ms at best; {packed}"
    if model["resident"] is not None:
        files = f"{decimal(model['resident_files'] or 0)} of it pages of files, which the system can drop"
        yield f"  memory of this process: {decimal(model['resident'])}, {files}"
    copied = model["self_draft"]
    yield f"  {copied['reason'] or 'the copy of --self-draft would take ' + decimal(copied['bytes'])}"
    for entry in model["products"]:
        by = _PRODUCTS[entry["product"]]
        yield f"  {entry['layers']} linear layers of {entry['outputs']} x {entry['inputs']}: {by}"
    yield f"  served by {report['backend']}"
    for entry in report["paths"]:
        yield f"    {entry['path']}: {'yes' if entry['serves'] else 'no'}{entry['reason'] and ', ' + entry['reason']}"
    if report["bits"]:
        yield f"    bits: {report['bits']}"
    for path, problem in model["problems"].items():
        yield f"  problem: {path}: {problem}"
    if speed is None:
        yield "  speed: not measured, as it reads sound; 'lookahead transcribe' shows that of a sound"
        return
    yield f"  ms a token: {speed['plain_ms']:.2f} by model.generate, {speed['lookahead_ms']:.2f} by lookahead"
    yield f"  tokens a pass: {speed['counters']['mean_acceptance_length']:.2f}, by {speed['counters']['backend']}"
    yield f"  same tokens: {speed['same_tokens']} of {speed['prompts']} texts"
