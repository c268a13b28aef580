"""Products of a model's rows with quantized weights on a CPU, and what they cannot be."""

from __future__ import annotations

import torch
from torch import Tensor

from lookahead.errors import UnsupportedModelError
from lookahead.kernels import block_product, packed_product
from lookahead.kernels.block_formats import FORMATS
from lookahead.kernels.packed_product import PackedWeight

DTYPES = torch.float32, torch.bfloat16
"""Dtypes of rows that the kernels accept."""


def packed_weight(weight: Tensor, kind: str, outputs: int) -> PackedWeight:
    """A weight, int32 in the layout of `block_formats`, in the form of `kernels.packed_product`.

    Raises:
        UnsupportedModelError: The weight was unpickled, and has the layout of another CPU.
    """
    if weight.shape[2] != packed_product.COLUMNS:
        raise UnsupportedModelError("these weights are laid out for another CPU; load and quantize the model here")
    return block_product.weight_of(weight, kind, outputs)


def multiply(x: Tensor, weight: Tensor, kind: str, outputs: int, bias: Tensor | None = None) -> Tensor:
    """The products of rows and a quantized weight, `[..., outputs]` in the dtype of the rows.

    Args:
        x: Rows `[..., inputs]`.
        weight: int32, in the layout of `block_formats`.
        kind: The format of the weight.
        outputs: Number of its outputs.
        bias: Added to each row; None for none.

    Raises:
        UnsupportedModelError: See `rows_for`.
    """
    rows = rows_for(weight, kind, x)
    own = None if bias is None else bias.to(rows.dtype)
    return packed_product.multiply(packed_weight(weight, kind, outputs), rows, own).to(x.dtype)


def rows_for(weight: Tensor, kind: str, x: Tensor) -> Tensor:
    """Rows in a dtype that the kernels of a quantized weight accept.

    Raises:
        UnsupportedModelError: A tensor is not on a CPU, or the rows need a gradient.
    """
    weights = f"weights of {FORMATS[kind].group.bits} bits"
    if x.device.type != "cpu" or weight.device.type != "cpu":
        raise UnsupportedModelError(f"{weights} are multiplied on a CPU, got a tensor on {x.device}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise UnsupportedModelError(f"{weights} have no gradient; call the model within torch.no_grad()")
    return x if x.dtype in DTYPES else x.float()
