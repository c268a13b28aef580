"""What can be told without torch and transformers, which take seconds to import."""

from __future__ import annotations

from pathlib import Path

from lookahead.errors import ConfigError
from lookahead.utils.atomic import read_json

LONG_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES = ("auto", *LONG_NAMES)
QUANTIZATIONS = ("int8", "int4", "gguf")


def check_names(dtype: object, quantize: str | None) -> None:
    """ConfigError for a dtype or a quantization that `load` does not take."""
    if str(dtype).removeprefix("torch.") not in (*DTYPES, *LONG_NAMES.values()):
        raise ConfigError(f"dtype must be {', '.join(DTYPES)}, got {dtype!r}")
    if quantize not in (None, *QUANTIZATIONS):
        *first, last = QUANTIZATIONS
        raise ConfigError(f"quantize must be {', '.join(first)} or {last}, got {quantize!r}")


def kind_of_folder(folder: str) -> str | None:
    """What the model of a folder reads, "text" or "sound", if its config.json says so at once; else None."""
    try:
        config = dict(read_json(Path(folder) / "config.json"))
    except (OSError, ValueError, TypeError):  # a GGUF file, a name on the Hub, or what loading complains of
        return None
    if config.get("model_type") == "whisper":
        return "sound"
    return "text" if str(config.get("architectures")).endswith("ForCausalLM']") else None
