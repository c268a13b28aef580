"""GGUF files, converted once to a folder that transformers loads in seconds: `platformdirs` says where that is kept.

transformers dequantizes a GGUF file every time it reads one, which takes longer than most requests. The folder's name
holds a hash of the file, and its manifest, written last, the size and the hash of everything in it: what was damaged
or left unfinished is converted again.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import xxhash
from filelock import FileLock
from platformdirs import user_cache_path

from lookahead.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

_MANIFEST = "manifest.json"
_VERSION = 1
_CHUNK = 2**22
_S_PER_MB = 0.2  # of a quantized file, on one thread
_NEEDED = ("gguf", "accelerate")


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
        raise UnsupportedModelError(f"model {file.name} cannot be read by transformers: {_one_line(error)}") from error


def _check(file: Path) -> torch.dtype:
    """The dtype that most weights of a GGUF file are converted to, after checking that all of it is there."""
    import torch
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(file).tensors
    except Exception as error:  # NumPy's errors, and the reader's own, for bytes that are missing or mean nothing
        raise UnsupportedModelError(f"model {file.name} is truncated or no GGUF file: {_one_line(error)}") from error
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


def _one_line(error: Exception) -> str:
    """The message of an error in one line, or its type where it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__
