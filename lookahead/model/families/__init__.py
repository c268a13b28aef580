"""Families of models, each declared by the operations of its decoder layer (`lookahead.model.families.operations`)."""

from __future__ import annotations

from typing import Any

from lookahead.model.families import (
    deepseek,
    gemma,
    glm,
    granite,
    hybrid,
    layer_norms,
    learned_positions,
    llama,
    mixtures,
    olmo,
    phi,
)
from lookahead.model.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES, *gemma.FAMILIES, *olmo.FAMILIES, *phi.FAMILIES, *mixtures.FAMILIES,
    *deepseek.FAMILIES, *glm.FAMILIES, *granite.FAMILIES, *hybrid.FAMILIES, *layer_norms.FAMILIES,
    *learned_positions.FAMILIES,
)  # fmt: skip
WRAPPERS = {
    "gemma3": ("Gemma3", "language_model"),
    "gemma4": ("Gemma4", "language_model"),
    "mistral3": ("Mistral3", "language_model"),
    "llava": ("Llava", "language_model"),
    "internvl": ("InternVL", "language_model"),
    "idefics3": ("Idefics3", "text_model"),
    "smolvlm": ("SmolVLM", "text_model"),
    "voxtral": ("Voxtral", "language_model"),
    "qwen2_audio": ("Qwen2Audio", "language_model"),
}
"""Models that read images or sound: by the module in transformers the first part of the class names, and the name of
the decoder, whose passes over text are those of its family."""
_BY_LAYER = {(family.file, f"{family.name}{family.kind}"): family for family in FAMILIES}


def family_of(layer: Any) -> Family | None:
    """The family to which a decoder layer belongs, by its class; None for other modules."""
    kind = type(layer)
    return _BY_LAYER.get((kind.__module__, kind.__qualname__))
