"""Diagnosis of an installation: the machine, the packages, the caches, and the decoding paths of a model."""

from __future__ import annotations

import os
import platform
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from platformdirs import user_cache_path

from lookahead.backend.calibration import measure_machine
from lookahead.backend.cpu.product_bits import linear_layers, matrix_of
from lookahead.decoding.comparison import PROMPTS, compare
from lookahead.decoding.path_report import backend_report
from lookahead.errors import ProposerError
from lookahead.kernels import scalars
from lookahead.kernels.microkernel import FEATURES
from lookahead.loading.loading import LoadedModel
from lookahead.loading.quantized import QuantizedLinear, weight_count
from lookahead.model.facts import reads_text
from lookahead.model.model_state import state_of
from lookahead.model.private_names import missing_names
from lookahead.ngram import search
from lookahead.utils.machine import processor
from lookahead.utils.seams import plugin_for

Facts = dict[str, Any]
"""JSON-ready facts. Sizes are in bytes. Unknown values are None."""

EXTRAS = {
    "documents": "PDF and Word files",
    "gguf": "GGUF files, the default model's too",
    "grammar": "outputs that follow a grammar",
    "html": "the main text of web pages",
    "images": "images in chats of a server",
    "ray": "lookahead summarize --ray",
    "remote": "documents at https and s3 URLs",
    "serve": "lookahead serve",
    "speech": "lookahead transcribe",
    "tables": "Parquet files",
    "train": "lookahead train",
}
"""The extras of the package, and the features that need them."""

_PACKAGE = "lookahead-decoding"
_FEATURES = (
    *("avx2", "avx512f", "avx512bf16", "avx512vnni", "avxvnni", "avxneconvert"),
    *("amx-tile", "amx-bf16", "amx-int8", "neon", "bf16", "i8mm", "sve"),
)
_CACHES = ("products", "kernels", "costs", "models", "verdicts")
_COPIED = 1 << 28  # bytes copied to measure the bandwidth if no model is loaded
_TEST_S = 2.0
_TEST_TOKENS = 32  # of each prompt


def diagnose(device: torch.device, dtype: torch.dtype | str, loaded: LoadedModel | None = None) -> Facts:
    """All facts, including the model if one is loaded, and all faults.

    The device is measured in the model's dtype; without a model in `dtype`, or in bfloat16 for `"auto"`.
    """
    facts: Facts = {**package_facts(), "caches": cache_facts()}
    if loaded is None:
        facts["machine"] = _machine(device, dtype if isinstance(dtype, torch.dtype) else torch.bfloat16, _COPIED)
    else:
        facts["model"] = model_facts(loaded)
        facts["machine"] = _machine(device, loaded.model.dtype, facts["model"]["weights"])
    return {**facts, "faults": faults(facts)}


def _machine(device: torch.device, dtype: torch.dtype, weights: int) -> Facts:
    memory = dict[str, int]()
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        memory = {name: int(size.split()[0]) << 10 for name, _, size in (line.partition(":") for line in lines)}
    return {
        "cpu": processor(),
        "features": [name for name in _FEATURES if FEATURES.get(name)],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": memory.get("MemTotal"),
        "free_memory": memory.get("MemAvailable"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        **asdict(measure_machine(device, dtype, weights)),
    }


def package_facts() -> Facts:
    """The versions of packages, the missing packages of each extra, and missing private names in other packages."""
    lacking: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    with suppress(metadata.PackageNotFoundError):  # not installed, run from source
        for requirement in map(Requirement, metadata.requires(_PACKAGE) or ()):
            for extra, lacks in lacking.items():
                is_asked = requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
                version = _installed(requirement.name)
                if is_asked and (version is None or not requirement.specifier.contains(version, prereleases=True)):
                    lacks.append(str(requirement).partition(";")[0])
    packages = (_PACKAGE, "torch", "transformers", "numba", "triton")
    versions = {name: version for name in packages if (version := _installed(name)) is not None}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "missing_extras": {extra: lacks for extra, lacks in lacking.items() if lacks},
        "missing_names": list(missing_names()),
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cache_facts() -> dict[str, Facts]:
    """The folder of each cache, its size, and whether it can be written."""
    root = user_cache_path("lookahead", appauthor=False)
    files = {name: (root / name, "*") for name in _CACHES}
    for name, function in (("numba, indexes", search.grow), ("numba, kernels", scalars.exp)):
        if (folder := function.stats.cache_path) is not None:
            files[name] = Path(folder), "*.nb[ci]"
    return {
        name: {
            "folder": str(folder),
            "bytes": sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file()),
            "is_writable": _is_writable(folder),
        }
        for name, (folder, pattern) in files.items()
    }


def _is_writable(folder: Path) -> bool:
    """Whether files can be created in a folder, which may have to be created first."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return place.is_dir() and os.access(place, os.W_OK)


def model_facts(loaded: LoadedModel) -> Facts:
    """The properties of a model, the paths that serve it, and its speed with and without drafts."""
    model = loaded.model
    speed = _speed(loaded) if reads_text(model) else None
    return {
        "name": model.name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": weight_count(model),
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "resident": _resident_bytes("VmRSS"),
        "resident_files": _resident_bytes("RssFile"),
        "products": _products(model),
        "packed_weights": sum(linear.nbytes for linear in state_of(model).linears.values()),
        "self_draft": _self_draft(model),
        "report": asdict(backend_report(model)),
        "problems": state_of(model).problems,
        "speed": speed,
    }


def _self_draft(model: Any) -> Facts:
    """The memory of a copy that drafts for the model, or why there can be none."""
    try:
        return {"bytes": plugin_for("proposer", "self").bytes_for(model), "reason": ""}
    except ProposerError as error:
        return {"bytes": 0, "reason": str(error)}


def _products(model: Any) -> list[Facts]:
    """The linear layers by shape and kind of product. Products are known after the first pass."""
    packed = state_of(model).linears
    layers: Any = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    kinds = Counter((layer.out_features, layer.in_features, "quantized") for layer in layers)
    for layer in linear_layers(model):
        outputs, inputs = matrix_of(layer).shape
        kinds[outputs, inputs, packed[layer].product if layer in packed else "torch"] += 1
    fields = "outputs", "inputs", "product"
    return [{"layers": count, **dict(zip(fields, kind, strict=True))} for kind, count in kinds.items()]


def _resident_bytes(kind: str) -> int | None:
    """Resident memory of this process in bytes: all of it, or pages of files, by the name of a line of its status."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith(f"{kind}:")).split()[1]) << 10
    return None


def _speed(loaded: LoadedModel) -> Facts:
    """Milliseconds per token after the first, for `model.generate` and `generate`, over two seconds of prompts."""
    options: Any = {"max_new_tokens": _TEST_TOKENS, "do_sample": False, "num_beams": 1}
    plain, ours = compare(*loaded, PROMPTS, {"lookahead": None}, seconds=_TEST_S, **options).values()
    return {
        "prompts": ours.prompts,
        "same_tokens": ours.identical,
        "plain_ms": 1e3 * plain.stats.tpot_s,
        "lookahead_ms": 1e3 * ours.stats.tpot_s,
        "counters": ours.stats.to_dict(),
    }


def faults(facts: Facts) -> list[str]:
    """The faults: missing private names, and tokens in float32 that differ from `model.generate`."""
    problems = []
    if names := facts["missing_names"]:
        problems.append(f"nothing is drafted, as torch or transformers lack {', '.join(names)}")
    model = facts.get("model")
    speed = None if model is None or model["dtype"] != "float32" else model["speed"]
    if speed is not None and speed["same_tokens"] < speed["prompts"]:
        problems.append("the tokens differ from model.generate in float32: please report it")
    return problems
