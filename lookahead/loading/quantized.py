"""Weights of 8 or 4 bits for the linear layers of a model on a CPU, quantized by transformers while loading.

Every 64 weights of an output, and every 64 activations of a row, share a scale: they are integers from -127 to 127
times the scale. 4-bit weights are an offset plus integers from 0 to 15 times the scale. A pass over few tokens is bound
by reading the weights, which are half as large as in bfloat16, or little more than a quarter. A pass over many tokens
multiplies bytes, at least twice as many at a time. A row's product does not depend on other rows, so `model.generate`,
prompts and drafts have the same bits.

Source of both block formats: Q8_0 and Q4_1 of llama.cpp, which have blocks of 32 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lookahead.errors import ConfigError, UnsupportedModelError
from lookahead.kernels import packed_product
from lookahead.kernels.packed_product import PackedWeight

_DTYPES = torch.float32, torch.bfloat16  # dtypes of rows that the kernel accepts


class QuantizedLinear(nn.Module):
    """A linear layer with weights of 8 or 4 bits, for inference on a CPU. It shares the original's bias."""

    def __init__(self, linear: nn.Linear, bits: int = 8) -> None:
        super().__init__()
        self.bits, self.kind = bits, f"int{bits}"
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # uint8 or int8, in the layout of `kernels.packed_product`
        self.weight = nn.Parameter(packed_product.quantize(linear.weight, bits), requires_grad=False)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", linear.bias)

    def extra_repr(self) -> str:
        """The sizes, for the model's `repr`."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.kind}"

    def forward(self, x: Tensor) -> Tensor:
        """The product with rows `[..., in_features]`, in their dtype."""
        weights = f"weights of {self.bits} bits"
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x must have rows of {self.in_features} numbers, got {x.shape[-1]}")
        if x.device.type != "cpu" or self.weight.device.type != "cpu":
            raise UnsupportedModelError(f"{weights} are multiplied on a CPU, got a tensor on {x.device}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedModelError(f"{weights} have no gradient; call the model within torch.no_grad()")
        rows = x if x.dtype in _DTYPES else x.float()
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return packed_product.multiply(self.packed(), rows, bias).to(x.dtype)

    def packed(self) -> PackedWeight:
        """The weight in the form of `kernels.packed_product`."""
        self.check_layout()
        return PackedWeight.of(self.weight, self.out_features)

    def check_layout(self) -> None:
        """Raise UnsupportedModelError for unpickled weights with the layout of another CPU."""
        if self.weight.shape[2] * self.weight.itemsize != 4 * packed_product.COLUMNS:
            raise UnsupportedModelError("these weights are laid out for another CPU; load and quantize the model here")

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether the kernel accepts rows of a dtype, and the bias as it is."""
        return dtype in _DTYPES and (self.bias is None or self.bias.dtype == dtype)


def quantize_linears(module: nn.Module, bits_of: Callable[[nn.Linear], int]) -> int:
    """Quantize a module's linear layers in place to `bits_of(layer)` bits: 8, 4 or 0 for none; returns their number."""
    made: dict[nn.Module, QuantizedLinear] = {}  # for layers used in several places
    for parent in list(module.modules()):
        for name, layer in parent._modules.items():
            if type(layer) is nn.Linear and (bits := bits_of(layer)):
                made[layer] = made.get(layer) or QuantizedLinear(layer, bits)
                parent._modules[name] = made[layer]
    return len(made)


class _Config(QuantizationConfigMixin):
    bits: int

    def __init__(self, **kwargs: Any) -> None:
        self.quant_method: Any = f"lookahead_int{self.bits}"


@register_quantization_config("lookahead_int8")
class Int8Config(_Config):
    """The argument `quantization_config` of `from_pretrained` for weights of 8 bits."""

    bits = 8


@register_quantization_config("lookahead_int4")
class Int4Config(_Config):
    """The same for weights of 4 bits; the output layer, which decides between tokens, gets 8 bits."""

    bits = 4


QUANTIZED = {"int8": Int8Config, "int4": Int4Config}
OWN_BLOCKS = "gguf"
"""The `quantize` name for weights in the blocks of a GGUF file."""


class InferenceQuantizer(HfQuantizer):
    """A transformers quantizer for models that are neither saved nor trained; save the original model instead."""

    def is_serializable(self, **kwargs: Any) -> bool:
        """False: quantizing a model again takes little longer than reading it."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: rounded weights have no gradient."""
        return False


@register_quantizer("lookahead_int8")
@register_quantizer("lookahead_int4")
class _Quantizer(InferenceQuantizer):
    """Quantizes the linear layers of a loaded model, including the output layer."""

    quantization_config: _Config

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        head, bits = model.get_output_embeddings(), self.quantization_config.bits
        if not quantize_linears(model, lambda layer: 8 if layer is head else bits):
            raise UnsupportedModelError(f"{type(model).__name__} has no linear layers to quantize")
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False  # the embedding is not quantized
        return model.requires_grad_(False)


def resolve_quantize(name: str | None, device: torch.device) -> _Config | None:
    """The `quantization_config` for `from_pretrained`; ConfigError if unknown or not for the device.

    None for `"gguf"`, whose weights are already quantized.
    """
    if name is None:
        return None
    if name not in (*QUANTIZED, OWN_BLOCKS):
        raise ConfigError(f"quantize must be {', '.join(QUANTIZED)} or {OWN_BLOCKS}, got {name!r}")
    if device.type != "cpu":
        remedy = "name the device cpu, or a model whose weights come quantized"
        raise ConfigError(f"quantize={name!r} is for a CPU, got the device {device}: {remedy}")
    return QUANTIZED[name]() if name in QUANTIZED else None
