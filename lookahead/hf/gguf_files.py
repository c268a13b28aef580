"""GGUF files. transformers dequantizes one whenever it reads it, which takes longer than most requests.

So it is converted once, to a folder of the platform's cache folder whose name holds a hash of the file. Nothing is kept
before it is checked: the sizes that the metadata states, and that every tensor has found its place.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import xxhash
from platformdirs import user_cache_path

from lookahead.errors import UnsupportedModelError, first_line
from lookahead.hf.checkpoints import auto_class, load_weights, no_bars
from lookahead.hf.gguf_metadata import check_metadata
from lookahead.utils.cache_folders import writable_folder
from lookahead.utils.locks import locked

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_VERSION = 2  # of conversions; those of version 1 were not checked and may hold random weights
# Tensors that transformers reads in another way or derives: scales of rotary embeddings, tied outputs, and experts.
_DROPPED = re.compile(r"rope_.*|output\.weight|.*\.ffn_\w+_(exps|projs)\.weight")
_S_PER_MB = 0.2  # of a quantized file, on one thread


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return Path(path).suffix.lower() == ".gguf" and os.path.isfile(path)


def convert_once(file: Path, announce: Callable[[str], None] | None = None) -> Path:
    """Convert a GGUF file to safetensors with its tokenizer, or find the folder of an earlier conversion.

    The folder is in the platform's cache folder, or in a temporary one if that cannot be written. Quantized weights
    become bf16, others keep their dtype. A lock lets one process convert a file and others wait. `announce` is called
    with one line of text before a conversion.
    """
    kept = user_cache_path("lookahead", appauthor=False) / "models"
    folder = kept / f"{file.stem}-{_VERSION}-{_hash_of(file)[:16]}"
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
            dtype, sizes = _check(file)
            if announce is not None:
                seconds = max(5, round(file.stat().st_size / 1e6 * _S_PER_MB, -1))
                announce(f"converting {file.stem.partition('.Q')[0]} once (about {seconds:.0f} seconds)")
            for left in folder.parent.glob(f".{glob.escape(folder.name)}.*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as place:
                made = Path(place) / "model"
                _convert(file, made, dtype, sizes)
                made.replace(folder)  # so a folder with this name is whole
    return folder


def _convert(file: Path, folder: Path, dtype: torch.dtype, sizes: dict[str, int]) -> None:
    """Save what a GGUF file holds, tensors of these sizes, as transformers saves any model."""
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(file.parent, **options)
        _check_size(config, sum(sizes.values()))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
        if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = load_weights(config, file.parent, dtype=dtype, **options)
        _check_names(sizes, model)
        assert model.generation_config is not None
        if model.generation_config.eos_token_id is None:
            model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {file.name}: {error}") from error
    except Exception as error:  # transformers, tokenizers and safetensors raise dozens of unrelated types here
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; transformers raises others without a number
        reason = f"its metadata lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise UnsupportedModelError(f"model {file.name} cannot be read by transformers: {reason}") from error


def _check(file: Path) -> tuple[torch.dtype, dict[str, int]]:
    """The dtype that a GGUF file is converted to, that of most weights, and the size of each tensor.

    All of it must be there, and the metadata must fit the tensors.
    """
    import torch
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except Exception as error:  # NumPy's errors, and the reader's own, for bytes that are missing or mean nothing
        raise UnsupportedModelError(f"model {file.name} is truncated or no GGUF file: {first_line(error)}") from error
    check_metadata(file.name, reader)
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    weights: Counter[str] = Counter()
    for tensor in reader.tensors:
        weights[tensor.tensor_type.name] += sizes[tensor.name]
    (main, _), *_ = weights.most_common(1) or [("", 0)]
    return {"F32": torch.float32, "F16": torch.float16}.get(main, torch.bfloat16), sizes


def _check_size(config: Any, numbers: int) -> None:
    """Refuse a configuration of far more parameters than a file has numbers, before they are allocated."""
    import torch

    with torch.device("meta"):
        described = auto_class(config).from_config(config).num_parameters()
    if described > 2 * numbers:  # where some are missing, an error names them later
        raise UnsupportedModelError(
            f"its metadata describes a model of {described:,} parameters, and its tensors hold {numbers:,}"
        )


def _check_names(sizes: dict[str, int], model: PreTrainedModel) -> None:
    """Refuse tensors that transformers drops without a word, as the biases of a model that has none there."""
    if sum(size for name, size in sizes.items() if not name.startswith("rope_")) == model.num_parameters():
        return
    try:
        from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

        places = get_gguf_hf_weights_map(model, TensorProcessor())
    except (ImportError, NotImplementedError):  # what is read in transformers' new way was checked
        return
    if dropped := sorted(name for name in sizes.keys() - places if not _DROPPED.fullmatch(name)):
        raise UnsupportedModelError(f"transformers has no place for {', '.join(dropped)} in {type(model).__name__}")


def _hash_of(file: Path) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(2**22):
            state.update(chunk)
    return state.hexdigest()
