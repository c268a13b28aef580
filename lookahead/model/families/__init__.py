"""Families of models, each declared by the operations of its decoder layer (`lookahead.model.families.operations`)."""

from __future__ import annotations

from typing import Any

from lookahead.model.families import gemma, glm, granite, hybrid, llama, mixtures, olmo, phi
from lookahead.model.families.operations import Family

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES, *gemma.FAMILIES, *olmo.FAMILIES, *phi.FAMILIES, *mixtures.FAMILIES,
    *glm.FAMILIES, *granite.FAMILIES, *hybrid.FAMILIES,
)  # fmt: skip
_BY_LAYER = {(family.file, f"{family.name}{family.kind}"): family for family in FAMILIES}


def family_of(layer: Any) -> Family | None:
    """The family to which a decoder layer belongs, by its class; None for other modules."""
    kind = type(layer)
    return _BY_LAYER.get((kind.__module__, kind.__qualname__))
