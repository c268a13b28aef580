"""The names of types and quantizations, checked without torch, which takes seconds to import."""

from __future__ import annotations

from lookahead.errors import ConfigError

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
