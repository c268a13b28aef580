"""Where plug-ins meet the core: a plug-in fills a seam under a name, and is loaded when the name is first asked for.

The core names no plug-in but here. Draft models and heads need no entry: a user passes them as proposers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    ("kind", "encoder-decoder"): "lookahead.plugins.encoder_decoder.decoder_kind",
    ("loop", "beam_search"): "lookahead.plugins.beams.beam_search",
    ("loop", "beam_sample"): "lookahead.plugins.beams.beam_search",
    ("processor", "grammar"): "lookahead.plugins.grammar.grammar",
    ("proposer", "self"): "lookahead.plugins.draft_models.self_draft",
}
# What the core calls. A kind answers what it asks about a model, as `ModelKind` does for a causal one. A loop is made
# for a call whose generation mode has its name, a processor for options of one, a proposer's factory for a model.
_METHODS = {
    "kind": (
        *("make_inputs", "probe", "inputs_of_text", "heeds_padding", "modules_beside", "prompt_limit", "positions"),
        *("encoded", "encode_for_drafts", "shares_encoder", "cache_of", "trees_reason"),
    ),
    "loop": ("run", "serving", "report_prefill", "end_if"),
    "processor": ("objects",),
    "proposer": ("of", "bytes_for"),
}
_filled: dict[tuple[str, str], Any] = {}


def register(seam: str, name: str, plugin: type[Any]) -> None:
    """Fill a seam with a plug-in, a class, in the place of an earlier one of this name.

    Raises:
        ValueError: There is no such seam.
        TypeError: The class lacks a method that the core calls.
    """
    if seam not in _METHODS:
        raise ValueError(f"seam must be one of {', '.join(_METHODS)}, got {seam!r}")
    missing = [method for method in _METHODS[seam] if not callable(getattr(plugin, method, None))]
    if missing:
        raise TypeError(f"{plugin.__qualname__} cannot be the {seam} {name!r}: it has no {', '.join(missing)}")
    _filled[seam, name] = plugin


def plugin_for(seam: str, name: str) -> Any:
    """The class that fills a seam under a name; None if there is no such plug-in."""
    key = seam, name
    if key not in _filled and key in _HOMES:
        import_module(_HOMES[key])  # registers it
    return _filled.get(key)
