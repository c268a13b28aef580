"""The models on this machine: the default model, those in the Hub's cache, and converted GGUF files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead.errors import UnsupportedModelError, one_line, warn
from lookahead.loading.gguf_files import kept_models
from lookahead.loading.loading import DEFAULT_MODEL, HUB, locate_model
from lookahead.utils.atomic import read_json

_WEIGHTS = (".safetensors", ".bin")
_GGUF_TYPE = re.compile(r"(?:^|[-._])(I?Q\d\w*|BF16|F16|F32|MXFP4)$", re.I)
_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: The name for `--model` and `lookahead.load`.
        bytes: Its size on disk.
        dtype: The type of its weights; None if its files do not say.
        path: Its location.
    """

    name: str
    bytes: int
    dtype: str | None
    path: str


def local_models() -> list[LocalModel]:
    """The models on this machine: the default model first, the others by name."""
    models = sorted([*_in_hub_cache(), *_converted()], key=lambda model: model.name)
    with suppress(UnsupportedModelError):  # it is not installed
        file = Path(locate_model(DEFAULT_MODEL)[0])
        models.insert(0, _gguf(DEFAULT_MODEL, file))
    return models


def _in_hub_cache() -> Iterator[LocalModel]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    folder = constants.HF_HUB_CACHE
    try:
        repositories = scan_cache_dir(folder).repos
    except CacheNotFound:
        return
    except (OSError, RuntimeError, ValueError) as error:  # no folder, one that cannot be read, or a damaged one
        reason = "it is a file" if os.path.isfile(folder) else one_line(error)
        warn(f"the models in the cache of the Hugging Face Hub, {folder}, are not listed: {reason}")
        return
    for repository in repositories:
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
        files = {file.file_path.relative_to(newest.snapshot_path).as_posix(): file for file in newest.files}
        if "config.json" in files and any(name.endswith(_WEIGHTS) for name in files):
            dtype = _dtype_of(newest.snapshot_path)
            yield LocalModel(repository.repo_id, newest.size_on_disk, dtype, str(newest.snapshot_path))
        for name, file in files.items():
            if name.endswith(".gguf"):
                yield _gguf(f"{HUB}{repository.repo_id}/{name}", file.file_path)


def _converted() -> Iterator[LocalModel]:
    for folder in kept_models().glob("[!.]*"):
        weights = [file for file in folder.glob("*.safetensors") if file.is_file()]
        if weights:
            yield LocalModel(str(folder), sum(file.stat().st_size for file in weights), _dtype_of(folder), str(folder))


def _gguf(name: str, file: Path) -> LocalModel:
    named = _GGUF_TYPE.search(file.stem)
    return LocalModel(name, file.stat().st_size, named and named[1].upper(), str(file))


def _dtype_of(folder: Path) -> str | None:
    """The dtype in a configuration, or its quantization method."""
    try:
        config: Any = read_json(folder / "config.json")
        quantized = (config.get("quantization_config") or {}).get("quant_method")
        parts = config, config.get("text_config") or {}
        named = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
    except (OSError, ValueError, AttributeError):
        return None
    dtype = quantized or named
    return None if dtype is None else _TYPES.get(str(dtype), str(dtype))
