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

from lookahead.errors import ClusterError as ClusterError
from lookahead.errors import ConfigError as ConfigError
from lookahead.errors import DocumentError as DocumentError
from lookahead.errors import HeadsError as HeadsError
from lookahead.errors import LookaheadError as LookaheadError
from lookahead.errors import PoolError as PoolError
from lookahead.errors import PromptError as PromptError
from lookahead.errors import ProposerError as ProposerError
from lookahead.errors import ResultsError as ResultsError
from lookahead.errors import SessionError as SessionError
from lookahead.errors import TrainingError as TrainingError
from lookahead.errors import UnsupportedModelError as UnsupportedModelError

if TYPE_CHECKING:
    from lookahead.backend.step_costs import load_costs as load_costs
    from lookahead.backend.step_costs import prepare_costs as prepare_costs
    from lookahead.backend.step_costs import save_costs as save_costs
    from lookahead.config import LookaheadConfig as LookaheadConfig
    from lookahead.decoding.api import GenerationResult as GenerationResult
    from lookahead.decoding.api import generate as generate
    from lookahead.decoding.api import stream as stream
    from lookahead.decoding.api import stream_many as stream_many
    from lookahead.decoding.conversation import Conversation as Conversation
    from lookahead.decoding.decode import decode as decode
    from lookahead.decoding.diagnosis import diagnose as diagnose
    from lookahead.decoding.enable import enable as enable
    from lookahead.decoding.memory_building import save_memory as save_memory
    from lookahead.decoding.path_report import backend_report as backend_report
    from lookahead.decoding.request import Completion as Completion
    from lookahead.decoding.trace import Trace as Trace
    from lookahead.decoding.trace import trace as trace
    from lookahead.loading.loading import LoadedModel as LoadedModel
    from lookahead.loading.loading import load as load
    from lookahead.loading.loading import prepare_process as prepare_process
    from lookahead.plugins.draft_models.draft_model import DraftModel as DraftModel
    from lookahead.plugins.grammar.grammar import Grammar as Grammar
    from lookahead.plugins.heads.head_files import Heads as Heads
    from lookahead.stats import DecodingStats as DecodingStats
    from lookahead.summarization.summarize_text import summarize as summarize
    from lookahead.verification.per_row import PerRow as PerRow

__version__ = "0.1.0.dev0"

# The modules of the public names, imported on first use: torch, transformers and Numba take seconds.
_NAMES_BY_MODULE = {
    "config": ["LookaheadConfig"],
    "decoding.api": ["GenerationResult", "generate", "stream", "stream_many"],
    "decoding.diagnosis": ["diagnose"],
    "decoding.enable": ["enable"],
    "decoding.conversation": ["Conversation"],
    "decoding.decode": ["decode"],
    "decoding.memory_building": ["save_memory"],
    "decoding.path_report": ["backend_report"],
    "decoding.request": ["Completion"],
    "decoding.trace": ["Trace", "trace"],
    "backend.step_costs": ["load_costs", "prepare_costs", "save_costs"],
    "loading.loading": ["LoadedModel", "load", "prepare_process"],
    "plugins.draft_models.draft_model": ["DraftModel"],
    "plugins.heads.head_files": ["Heads"],
    "stats": ["DecodingStats"],
    "summarization.summarize_text": ["summarize"],
    "plugins.grammar.grammar": ["Grammar"],
    "verification.per_row": ["PerRow"],
}
_HOME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
_REMOVED = {
    "OutputFile": "'lookahead pool build' makes a pool of the outputs of a job",
    "calibrate_costs": "prepare_costs(model) measures the costs of drafts",
}
__all__ = sorted({*_HOME, *(name for name in globals() if name.endswith("Error"))})


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name in _REMOVED:
        raise AttributeError(f"{name} was removed: {_REMOVED[name]}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names and the attributes that every module has."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
