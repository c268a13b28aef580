"""Layers with weights in the blocks of a GGUF file, and the transformers quantizer that installs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lookahead.kernels import gguf_blocks, gguf_product
from lookahead.kernels.packed_product import PackedWeight
from lookahead.loading.quantized import InferenceQuantizer, QuantizedLinear


class BlockLinear(QuantizedLinear):
    """A linear layer with the weights of a GGUF file, for inference on a CPU. It shares the original's bias.

    Only activations are rounded: every 32 numbers to 8 bits.
    """

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        nn.Module.__init__(self)
        self.kind, self.bits = kind, gguf_blocks.TYPES[kind].group.bits
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = _without_numbers(kind, self.out_features, self.in_features)
        self.register_parameter("bias", linear.bias)

    def packed(self) -> PackedWeight:
        """The weight in the form of `kernels.packed_product`."""
        self.check_layout()
        return gguf_product.weight_of(self.weight, self.kind, self.out_features)


class BlockEmbedding(nn.Module):
    """An embedding with the weights of a GGUF file, which the output layer may share.

    Its rows are those of `gguf.quants.dequantize`, rounded to the dtype of the model.
    """

    def __init__(self, embedding: nn.Embedding, kind: str) -> None:
        super().__init__()
        self.kind, self.num_embeddings, self.embedding_dim = kind, embedding.num_embeddings, embedding.embedding_dim
        self.weight = _without_numbers(kind, self.num_embeddings, self.embedding_dim)
        # Follows the dtype of the model, as a weight would.
        self.register_buffer("like", torch.empty(0, dtype=embedding.weight.dtype, device="cpu"), persistent=False)

    def extra_repr(self) -> str:
        """The sizes, for the model's `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.kind}"

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ids `[...]`: `[..., embedding_dim]`."""
        rows = ids.reshape(-1)
        least, most = map(int, rows.aminmax()) if rows.numel() else (0, 0)
        if least < 0 or most >= self.num_embeddings:
            raise IndexError(f"ids must be from 0 to {self.num_embeddings - 1}, got {least} to {most}")
        found = gguf_blocks.rows_of(self.weight, self.kind, rows).to(cast(Tensor, self.like).dtype)
        return found.view(*ids.shape, self.embedding_dim)


QUANTIZED_LAYERS = QuantizedLinear, BlockEmbedding
"""The layers with a `kind`, the type of their weights."""


def weight_count(model: nn.Module) -> int:
    """Number of weights of a model. An element of a quantized parameter holds several."""
    held = {
        id(each.weight): each.in_features * each.out_features
        for each in model.modules()
        if isinstance(each, QuantizedLinear)
    }
    held |= {
        id(each.weight): each.num_embeddings * each.embedding_dim
        for each in model.modules()
        if isinstance(each, BlockEmbedding)
    }
    return sum(held.get(id(each), each.numel()) for each in model.parameters())


def kinds_in_words(model: nn.Module) -> str:
    """The number of layers per quantized weight type, and the dequantized types of a file; empty if there are none."""
    kinds = Counter(each.kind for each in model.modules() if isinstance(each, QUANTIZED_LAYERS))
    counted = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    config: Any = getattr(model, "config", None)
    others = getattr(getattr(config, "quantization_config", None), "dequantized", ())
    return f"{counted}; dequantized: {', '.join(others)}" if others else counted


def _without_numbers(kind: str, outputs: int, inputs: int) -> nn.Parameter:
    shape = gguf_blocks.packed_shape(kind, outputs, inputs)
    return nn.Parameter(torch.empty(shape, dtype=torch.int32, device="meta"), requires_grad=False)


@register_quantization_config("lookahead_gguf")
class BlockConfig(QuantizationConfigMixin):
    """The argument `quantization_config` of `from_pretrained` for weights in the blocks of a GGUF file.

    Args:
        kinds: Block types by layer name.
        dequantized: Other types, whose tensors are dequantized.
    """

    def __init__(self, kinds: dict[str, str] | None = None, dequantized: Sequence[str] = (), **kwargs: Any) -> None:
        self.quant_method: Any = "lookahead_gguf"
        self.kinds, self.dequantized = dict(kinds or {}), list(dequantized)


@register_quantizer("lookahead_gguf")
class _BlockQuantizer(InferenceQuantizer):
    """Replaces linear layers and embeddings by block layers before weights are loaded."""

    quantization_config: BlockConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, kind in self.quantization_config.kinds.items():
            layer = model.get_submodule(name)
            if type(layer) is nn.Embedding:
                model.set_submodule(name, BlockEmbedding(layer, kind))
            else:
                model.set_submodule(name, BlockLinear(cast(nn.Linear, layer), kind))
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        return model.requires_grad_(False)
