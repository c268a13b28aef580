"""Draft-free speculative decoding for HuggingFace causal LMs: the same tokens in fewer passes.

import lookahead

model, tokenizer = lookahead.load("PATH_OR_ID")
out = model.generate(**inputs, max_new_tokens=256, custom_generate=lookahead.decode)
result = lookahead.generate(model, tokenizer, ["..."], max_new_tokens=256)
for piece in lookahead.stream(model, tokenizer, "..."):
    print(piece, end="")
for done in lookahead.stream_many(model, tokenizer, prompts, max_new_tokens=256):
    print(done.index, done.text)
print(lookahead.summarize("a long text ..."))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead.config import LookaheadConfig
    from lookahead.errors import (
        ClusterError,
        ConfigError,
        DocumentError,
        HeadsError,
        LookaheadError,
        PoolError,
        PromptError,
        ProposerError,
        TrainingError,
        UnsupportedModelError,
    )
    from lookahead.generation.api import GenerationResult, generate, stream, stream_many
    from lookahead.generation.enable import enable
    from lookahead.generation.hf import decode
    from lookahead.generation.model_memory import save_memory
    from lookahead.generation.scheduler import Completion
    from lookahead.models.loading import LoadedModel, load
    from lookahead.models.step_costs import calibrate_costs, load_costs, prepare_costs, save_costs
    from lookahead.proposers.draft_model import DraftModel
    from lookahead.proposers.heads import Heads
    from lookahead.stats import DecodingStats
    from lookahead.summarization.summarize_text import summarize

__version__ = "0.1.0.dev0"

__all__ = [
    "ClusterError",
    "Completion",
    "ConfigError",
    "DecodingStats",
    "DocumentError",
    "DraftModel",
    "GenerationResult",
    "Heads",
    "HeadsError",
    "LoadedModel",
    "LookaheadConfig",
    "LookaheadError",
    "PoolError",
    "PromptError",
    "ProposerError",
    "TrainingError",
    "UnsupportedModelError",
    "calibrate_costs",
    "decode",
    "enable",
    "generate",
    "load",
    "load_costs",
    "prepare_costs",
    "save_costs",
    "save_memory",
    "stream",
    "stream_many",
    "summarize",
]

# The modules of the public names, imported on first use: torch, transformers and Numba take seconds.
_NAMES_BY_MODULE = {
    "config": ["LookaheadConfig"],
    "errors": [name for name in __all__ if name.endswith("Error")],
    "generation.api": ["GenerationResult", "generate", "stream", "stream_many"],
    "generation.enable": ["enable"],
    "generation.hf": ["decode"],
    "generation.model_memory": ["save_memory"],
    "generation.scheduler": ["Completion"],
    "models.step_costs": ["calibrate_costs", "load_costs", "prepare_costs", "save_costs"],
    "models.loading": ["LoadedModel", "load"],
    "proposers.draft_model": ["DraftModel"],
    "proposers.heads": ["Heads"],
    "stats": ["DecodingStats"],
    "summarization.summarize_text": ["summarize"],
}
_HOME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names and the attributes of every module."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
