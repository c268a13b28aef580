"""Activations of MLPs and experts: which have a formula, or a table of their results."""

from __future__ import annotations

from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations

from lookahead.kernels import layer_ops
from lookahead.model.families.operations import ClampedGlu
from lookahead.model.known_code import arithmetic_flags

_FORMULAS: dict[Any, int] = {
    nn.Sigmoid: layer_ops.SIGMOID,
    activations.SiLUActivation: layer_ops.SILU,
    nn.SiLU: layer_ops.SILU,
    ClampedGlu: layer_ops.SILU,
    activations.GELUTanh: layer_ops.GELU_TANH,
    activations.NewGELUActivation: layer_ops.GELU_TANH,
    activations.GELUActivation: layer_ops.GELU,
    nn.ReLU: layer_ops.RELU,
    activations.ReLUSquaredActivation: layer_ops.RELU_SQUARED,
}
ACTIVATIONS = frozenset(_FORMULAS)
"""The classes of activations that have a formula in float32."""
VECTORS = 64
"""Numbers that torch computes by the same vectors wherever such a block begins; those after it one by one."""


def has_formula(activation: Any) -> bool:
    """Whether an activation is one of `ACTIVATIONS`, computed by torch at once: in Python every step rounds."""
    is_in_steps = isinstance(getattr(activation, "act", None), MethodType)
    return type(activation) in ACTIVATIONS and not is_in_steps


def activation_of(module: Any, dtype: torch.dtype) -> tuple[int, Tensor | None]:
    """The formula of an activation, or the table of its results."""
    kind = module if isinstance(module, ClampedGlu) else type(module)
    return _activation(kind, dtype, arithmetic_flags())  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def _activation(kind: Any, dtype: torch.dtype, flags: tuple[Any, ...]) -> tuple[int, Tensor | None]:
    is_glu = isinstance(kind, ClampedGlu)
    formula = _FORMULAS[ClampedGlu if is_glu else kind]
    if dtype != torch.bfloat16 or (formula == layer_ops.SILU and not is_glu):
        return formula, None
    numbers = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    with torch.inference_mode():
        if not is_glu:
            return layer_ops.TABLE, kind()(numbers)
        gates = numbers.clamp(max=kind.limit)
        return layer_ops.TABLE, gates * torch.sigmoid(gates * kind.factor)
