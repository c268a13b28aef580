"""GGUF files. transformers dequantizes one whenever it reads it, which takes longer than most requests.

So a file is converted once, to a cache folder whose name contains a hash of the file. It is checked first: the sizes in
the metadata must be plausible, and every tensor must be used.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import io
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import xxhash
from platformdirs import user_cache_path

from lookahead.errors import UnsupportedModelError, first_line
from lookahead.loading.checkpoints import auto_class, load_weights, no_bars
from lookahead.loading.gguf_metadata import check_metadata
from lookahead.utils.cache_folders import writable_folder
from lookahead.utils.locks import locked

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_VERSION = 2  # of conversions; version 1 was not checked and may contain random weights
# Tensors that transformers reads differently or derives: scales of rotary embeddings, tied outputs, and experts.
_DROPPED = re.compile(r"rope_.*|output\.weight|.*\.ffn_\w+_(exps|projs)\.weight")
_S_PER_MB = 0.2  # of a quantized file, on one thread


def is_gguf(path: str | Path) -> bool:
    """Whether a path names an existing GGUF file, judging by its suffix."""
    return Path(path).suffix.lower() == ".gguf" and os.path.isfile(path)


def convert_once(file: Path, announce: Callable[[str], None] | None = None) -> Path:
    """Convert a GGUF file to safetensors with its tokenizer, or find the folder of an earlier conversion.

    Quantized weights become bf16, others keep their dtype. `announce` is called with one line of text before a
    conversion.
    """
    return kept_once(file, _VERSION, functools.partial(_convert, file, announce))


def kept_models() -> Path:
    """The folder of conversions of GGUF files."""
    return user_cache_path("lookahead", appauthor=False) / "models"


def kept_once(file: Path, kind: object, make: Callable[[Path], None]) -> Path:
    """The folder of something derived from a GGUF file, which is made unless an earlier call did.

    The folder is in the platform's cache folder, or in a temporary one if that is not writable. A lock makes other
    processes wait for the one that makes it.

    Args:
        file: The file; the name of the folder contains a hash of it.
        kind: What is derived, and its version.
        make: Makes the contents in a folder that does not exist yet.

    Raises:
        UnsupportedModelError: A package that reads GGUF files is missing.
    """
    kept = kept_models()
    folder = kept / f"{file.stem}-{kind}-{_hash_of(file)[:16]}"
    if folder.is_dir():
        return folder
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedModelError(
            f"model {file.name} is a GGUF file, and reading it needs {' and '.join(missing)}: "
            "pip install 'lookahead-decoding[gguf]'"
        )
    folder = writable_folder(kept, "converted models") / folder.name
    with locked(folder, timeout_s=-1), no_bars():  # a large model takes minutes
        if not folder.is_dir():
            for left in folder.parent.glob(f".{glob.escape(folder.name)}.*"):  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)
            with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as place:
                made = Path(place) / "model"
                make(made)
                made.replace(folder)  # atomic: a folder with this name is complete
    return folder


def _convert(file: Path, announce: Callable[[str], None] | None, folder: Path) -> None:
    """Save a GGUF file's model in the format of transformers."""
    import transformers

    reader = open_checked(file)
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    if announce is not None:
        seconds = max(5, round(file.stat().st_size / 1e6 * _S_PER_MB, -1))
        wide, half = (f"{size * sum(sizes.values()) / 1e9:.2f} GB" for size in (4, 2))
        takes = f"its weights take {wide} in fp32, {half} in bf16"
        announce(f"converting {file.name} once (about {seconds:.0f} seconds); {takes}")
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    with one_error(file), _bars_only_on_a_terminal():
        config, tokenizer = read_parts(file, sum(sizes.values()))
        if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = load_weights(config, file.parent, dtype=_dtype_of(reader), **options)
        _check_names(sizes, model)
        set_end_token(model, tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _bars_only_on_a_terminal() -> Iterator[None]:
    """Keep the bar of transformers, which redraws itself at every tensor, out of logs; other lines are passed on."""
    if sys.stderr is None or sys.stderr.isatty():
        yield
        return
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    finally:
        sys.stderr.writelines(f"{line}\n" for line in said.getvalue().split("\n") if line and "\r" not in line)


def read_parts(file: Path, numbers: int) -> tuple[Any, Any]:
    """The configuration of a GGUF file with `numbers` tensor elements, and its tokenizer."""
    from transformers import TOKENIZER_MAPPING, AutoConfig, PreTrainedTokenizerFast

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(file.parent, **options, trust_remote_code=False)
    _check_size(config, numbers)
    # AutoTokenizer would use this class, but spends seconds on reading all metadata again to find it.
    kind: Any = TOKENIZER_MAPPING.get(type(config), None) or PreTrainedTokenizerFast
    return config, kind.from_pretrained(file.parent, **options)


def set_end_token(model: PreTrainedModel, tokenizer: Any) -> None:
    """Use the tokenizer's end token for a model without one."""
    assert model.generation_config is not None
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id


@contextmanager
def one_error(file: Path) -> Iterator[None]:
    """Turn the dozens of unrelated errors of transformers, tokenizers and safetensors about a file into one."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {file.name}: {error}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a disk error; transformers' own have no number
        reason = f"its metadata lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise UnsupportedModelError(f"model {file.name} cannot be read by transformers: {reason}") from error


def open_checked(file: Path) -> Any:
    """The `GGUFReader` of a file; UnsupportedModelError unless it is complete and its metadata fit its tensors."""
    import numpy as np
    from gguf import GGUFReader

    class PlainReader(GGUFReader):
        """Reads a plain array: it takes hundreds of thousands of slices, which cost thrice as much from a memmap."""

        def _get(self, *args: Any, **kwargs: Any) -> Any:
            self.data: Any = self.data.view(np.ndarray)
            return super()._get(*args, **kwargs)

    try:
        reader = PlainReader(file)
    except Exception as error:  # errors of NumPy and of the reader for missing or invalid bytes
        raise UnsupportedModelError(f"model {file.name} {_fault_of(file, error)}") from error
    check_metadata(file.name, reader)
    return reader


def _fault_of(file: Path, error: Exception) -> str:
    """Why a file cannot be read, as a predicate."""
    with file.open("rb") as stream:
        magic, version = stream.read(4), int.from_bytes(stream.read(4), "little")
    if magic != b"GGUF":
        return f"is not a GGUF file: it begins with {magic!r}, not with b'GGUF'"
    if "version" in str(error):
        return f"has version {version} of the GGUF format, which the package gguf does not read"
    return f"is incomplete or damaged: it ends after {file.stat().st_size:,} bytes; copy or download it again"


def _dtype_of(reader: Any) -> torch.dtype:
    """The dtype that a GGUF file is converted to, by the type of most weights."""
    return dtype_of(main_kind((tensor.tensor_type.name, int(tensor.n_elements)) for tensor in reader.tensors))


def main_kind(tensors: Iterable[tuple[str, int]]) -> str:
    """The type of most numbers of tensors, each given by its type and its numbers."""
    numbers: Counter[str] = Counter()
    for kind, count in tensors:
        numbers[kind] += count
    (main, _), *_ = numbers.most_common(1) or [("", 0)]
    return main


def dtype_of(main: str) -> torch.dtype:
    """The dtype that a file is dequantized to, by the type of most weights."""
    import torch

    return {"F32": torch.float32, "F16": torch.float16}.get(main, torch.bfloat16)


def _check_size(config: Any, numbers: int) -> None:
    """Refuse a configuration with far more parameters than a file has, before they are allocated."""
    import torch

    with torch.device("meta"):
        described = auto_class(config).from_config(config).num_parameters()
    if described > 2 * numbers:  # smaller gaps are reported later by name
        raise UnsupportedModelError(
            f"its metadata describes a model of {described:,} parameters, and its tensors hold {numbers:,}"
        )


def _check_names(sizes: dict[str, int], model: PreTrainedModel) -> None:
    """Refuse tensors that transformers drops silently, such as biases of layers without a bias."""
    if sum(size for name, size in sizes.items() if not name.startswith("rope_")) == model.num_parameters():
        return
    try:
        from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

        places = get_gguf_hf_weights_map(model, TensorProcessor())
    except (ImportError, NotImplementedError):  # models of transformers' new reader were checked before
        return
    check_places(sizes, places, model)


def check_places(tensors: Iterable[str], places: Mapping[str, str], model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for tensors without a place in a model."""
    if dropped := sorted(name for name in {*tensors} - {*places} if not _DROPPED.fullmatch(name)):
        raise UnsupportedModelError(f"transformers has no place for {', '.join(dropped)} in {type(model).__name__}")


def _hash_of(file: Path) -> str:
    status = file.stat()
    return _hash(file, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _hash(file: Path, *_: int) -> str:
    """The hash of a file, cached by its status: a command needs it several times, and reading takes seconds."""
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(2**22):
            state.update(chunk)
    return state.hexdigest()
