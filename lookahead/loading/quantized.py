"""Linear layers and embeddings with quantized weights on a CPU, and the transformers quantizers that install them.

Weights are rounded while a model is loaded, or are those of a GGUF file. Activations are rounded too: every block of a
row to integers from -127 to 127 times a scale. A pass over few tokens is bound by reading the weights, which are half
as large as in bfloat16, or little more than a quarter. A pass over many tokens multiplies bytes, at least twice as many
at a time. A row's product does not depend on other rows, so `model.generate`, prompts and drafts have the same bits.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lookahead.errors import ConfigError, UnsupportedModelError
from lookahead.kernels import block_formats, block_product
from lookahead.kernels.packed_product import PackedWeight
from lookahead.loading.early_checks import check_names
from lookahead.loading.quantized_experts import QuantizedExperts
from lookahead.loading.quantized_products import DTYPES, multiply, packed_weight

_ROWS = 8  # of the embedding that shows what its class does


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights, for inference on a CPU. It shares the original's bias.

    Attributes:
        kind: The format of its weights, one of `FORMATS`.
        weight: int32, in the layout of `block_formats`.
    """

    def __init__(self, linear: nn.Linear, kind: str, weight: nn.Parameter | None = None) -> None:
        """Round the weights of a linear layer, or take a parameter with the blocks of a file."""
        super().__init__()
        self.kind, self.in_features, self.out_features = kind, linear.in_features, linear.out_features
        if weight is None:
            weight = nn.Parameter(block_formats.quantize(linear.weight, kind), requires_grad=False)
        self.weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", linear.bias)

    def extra_repr(self) -> str:
        """The sizes, for the model's `repr`."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.kind}"

    def forward(self, x: Tensor) -> Tensor:
        """The product with rows `[..., in_features]`, in their dtype."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x must have rows of {self.in_features} numbers, got {x.shape[-1]}")
        return multiply(x, self.weight, self.kind, self.out_features, self.bias)

    def packed(self) -> PackedWeight:
        """The weight in the form of `kernels.packed_product`.

        Raises:
            UnsupportedModelError: The weight was unpickled, and has the layout of another CPU.
        """
        return packed_weight(self.weight, self.kind, self.out_features)

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether the kernel accepts rows of a dtype, and the bias as it is."""
        return dtype in DTYPES and (self.bias is None or self.bias.dtype == dtype)


class QuantizedEmbedding(nn.Module):
    """An embedding with the weights of a GGUF file, which the output layer may share.

    Its rows are those of `gguf.quants.dequantize`, rounded to the dtype of the model, times the scale of an embedding
    that has one.
    """

    def __init__(self, embedding: nn.Embedding, kind: str, weight: nn.Parameter) -> None:
        super().__init__()
        self.kind, self.num_embeddings, self.embedding_dim = kind, embedding.num_embeddings, embedding.embedding_dim
        self.weight, self.factor = weight, scale_of(embedding)
        # Follows the dtype of the model, as a weight would.
        scale = torch.empty((), dtype=embedding.weight.dtype, device="cpu")
        self.register_buffer("scale", scale, persistent=False)
        self.fill_scale()

    def fill_scale(self) -> None:
        """Set the scale, which transformers forgets while it loads weights."""
        cast(Tensor, self.scale).fill_(1.0 if self.factor is None else self.factor)

    def extra_repr(self) -> str:
        """The sizes, for the model's `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.kind}"

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ids `[...]`: `[..., embedding_dim]`."""
        rows = ids.reshape(-1)
        least, most = map(int, rows.aminmax()) if rows.numel() else (0, 0)
        if least < 0 or most >= self.num_embeddings:
            raise IndexError(f"ids must be from 0 to {self.num_embeddings - 1}, got {least} to {most}")
        scale = cast(Tensor, self.scale)
        values = block_formats.rows_of(self.weight, self.kind, rows).to(scale.dtype)
        values = values.view(*ids.shape, self.embedding_dim)
        return values if self.factor is None else values * scale


def scale_of(embedding: nn.Embedding) -> float | None:
    """The number by which a class of transformers multiplies the rows of its embedding; None for a plain embedding.

    Raises:
        ValueError: The class does something else, as a small embedding of it shows.
    """
    kind: Any = type(embedding)
    if kind is nn.Embedding:
        return None
    scales = (getattr(embedding, name, None) for name in ("scalar_embed_scale", "embed_scale"))
    scale = next((scale for scale in scales if isinstance(scale, float)), None)
    try:
        with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
            small, ids = kind(_ROWS, _ROWS, 0, embed_scale=scale), torch.arange(_ROWS)
            for dtype in DTYPES:
                rows = small.to(dtype).weight.copy_(torch.linspace(-1, 3, _ROWS**2).view(_ROWS, _ROWS))
                if not torch.equal(small(ids), rows * torch.tensor(scale).to(dtype)):
                    raise ValueError("its rows are not those of its weight times its scale")
    except Exception as error:  # of any class's own code
        raise ValueError(f"{kind.__name__} is not a scaled embedding: {error}") from error
    return scale


def replacement_of(layer: nn.Module) -> type[QuantizedLinear] | type[QuantizedEmbedding] | None:
    """The class that keeps the blocks of a layer; None if the class of the layer does more than these."""
    if type(layer) is nn.Linear:
        return QuantizedLinear
    if not isinstance(layer, nn.Embedding):
        return None
    try:
        scale_of(layer)
    except ValueError:
        return None
    return QuantizedEmbedding


QUANTIZED_LAYERS = QuantizedLinear, QuantizedEmbedding, QuantizedExperts
"""The layers with a `kind`, the format of their weights."""


def casts_to_weight(module: nn.Module, path: str) -> bool:
    """Whether the code around a layer casts numbers to the dtype of its weight, as T5's: blocks are whole numbers.

    The methods of the modules that contain the layer count.
    """
    names = path.split(".")
    around: list[Any] = [type(module.get_submodule(".".join(names[:depth]))) for depth in range(len(names))]
    return any(_casts_to_weight(kind, names[-1]) for kind in around)


@functools.cache
def _casts_to_weight(kind: type, name: str) -> bool:
    """Whether a method of a class reads `NAME.weight.dtype`."""
    for base in kind.__mro__:
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and {name, "weight", "dtype"} <= {*code.co_names}:
                loads = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_ATTR"]
                if (name, "weight", "dtype") in zip(loads, loads[1:], loads[2:], strict=False):
                    return True
    return False


def quantize_linears(module: nn.Module, kind_of: Callable[[nn.Linear], str]) -> int:
    """Round linear layers of a module in place to the format `kind_of(layer)`, unless empty; returns their number."""
    rounded: dict[nn.Module, QuantizedLinear] = {}  # for layers used in several places
    for path, parent in list(module.named_modules()):
        for name, layer in parent._modules.items():
            if type(layer) is not nn.Linear or casts_to_weight(module, f"{path}.{name}".lstrip(".")):
                continue
            if kind := kind_of(layer):
                try:
                    rounded[layer] = rounded.get(layer) or QuantizedLinear(layer, kind)
                except ValueError as error:
                    raise UnsupportedModelError(f"its layer {name} cannot be quantized: {error}") from error
                parent._modules[name] = rounded[layer]
    return len(rounded)


def weight_count(model: nn.Module) -> int:
    """Number of weights of a model. An element of a quantized parameter holds several."""
    counts = dict[int, int]()
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            counts[id(layer.weight)] = layer.in_features * layer.out_features
        elif isinstance(layer, QuantizedEmbedding):
            counts[id(layer.weight)] = layer.num_embeddings * layer.embedding_dim
        elif isinstance(layer, QuantizedExperts):
            counts |= {id(weight): layer.weights_of_a_part for weight in layer.parameters()}
    return sum(counts.get(id(weight), weight.numel()) for weight in model.parameters())


def kinds_in_words(model: nn.Module) -> str:
    """The number of layers per format, and the dequantized formats of a file; empty if there are none."""
    kinds = Counter(layer.kind for layer in model.modules() if isinstance(layer, QUANTIZED_LAYERS))
    counts = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    config: Any = getattr(model, "config", None)
    others = getattr(getattr(config, "quantization_config", None), "dequantized", ())
    return f"{counts}; dequantized: {', '.join(others)}" if others else counts


class _Config(QuantizationConfigMixin):
    name: str
    kind: str

    def __init__(self, **kwargs: Any) -> None:
        self.quant_method: Any = f"lookahead_{self.name}"


@register_quantization_config("lookahead_int8")
class Int8Config(_Config):
    """The argument `quantization_config` of `from_pretrained` for weights of 8 bits."""

    name, kind = "int8", "int8"


@register_quantization_config("lookahead_int4")
class Int4Config(_Config):
    """The same for weights of 4 bits; the output layer, which decides between tokens, gets 8 bits."""

    name, kind = "int4", "Q4_1"


QUANTIZED = {config.name: config for config in (Int8Config, Int4Config)}
OWN_BLOCKS = "gguf"
"""The `quantize` name for weights in the blocks of a GGUF file."""


class _InferenceQuantizer(HfQuantizer):
    """A transformers quantizer for models that are neither saved nor trained; save the original model instead."""

    def is_serializable(self, **kwargs: Any) -> bool:
        """False: quantizing a model again takes little longer than reading it."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: rounded weights have no gradient."""
        return False


def _is_scaled_by_tie(model: PreTrainedModel) -> bool:
    """Whether a model scales the input of its head if that shares the embedding's weight, as UMT5 does."""
    names = getattr(getattr(inspect.unwrap(type(model).forward), "__code__", None), "co_names", ())
    return bool(model.config.tie_word_embeddings) and "tie_word_embeddings" in names


@register_quantizer("lookahead_int8")
@register_quantizer("lookahead_int4")
class _Quantizer(_InferenceQuantizer):
    """Quantizes the linear layers of a loaded model, including the output layer."""

    quantization_config: _Config

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        head, kind = model.get_output_embeddings(), self.quantization_config.kind
        of_head = "" if _is_scaled_by_tie(model) else "int8"
        if not quantize_linears(model, lambda layer: of_head if layer is head else kind):
            raise UnsupportedModelError(f"{type(model).__name__} has no linear layers to quantize")
        for config in (model.config, model.config.get_text_config()) if of_head else ():
            config.tie_word_embeddings = False  # the embedding is not quantized
        return model.requires_grad_(False)


@register_quantization_config("lookahead_gguf")
class BlockConfig(QuantizationConfigMixin):
    """The argument `quantization_config` of `from_pretrained` for weights in the blocks of a GGUF file.

    Args:
        kinds: Formats by layer name; the three of the parts of experts with slashes.
        dequantized: Other formats, whose tensors are dequantized.
    """

    def __init__(self, kinds: dict[str, str] | None = None, dequantized: Sequence[str] = (), **kwargs: Any) -> None:
        self.quant_method: Any = "lookahead_gguf"
        self.kinds, self.dequantized = dict(kinds or {}), list(dequantized)


@register_quantizer("lookahead_gguf")
class _BlockQuantizer(_InferenceQuantizer):
    """Replaces linear layers and embeddings before weights are loaded."""

    quantization_config: BlockConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, kind in self.quantization_config.kinds.items():
            layer = cast(Any, model.get_submodule(name))
            if len(parts := kind.split("/")) > 1:
                model.set_submodule(name, QuantizedExperts(layer, parts))
                continue
            shape = block_formats.packed_shape(kind, *layer.weight.shape)
            weight = nn.Parameter(torch.empty(shape, dtype=torch.int32, device="meta"), requires_grad=False)
            replacement = QuantizedLinear if type(layer) is nn.Linear else QuantizedEmbedding
            model.set_submodule(name, replacement(layer, kind, weight))
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for layer in model.modules():
            if isinstance(layer, QuantizedEmbedding):
                layer.fill_scale()
        return model.requires_grad_(False)


def resolve_quantize(name: str | None, device: torch.device) -> _Config | None:
    """The `quantization_config` for `from_pretrained`; ConfigError if unknown or not for the device.

    None for `"gguf"`, whose weights are already quantized.
    """
    if name is None:
        return None
    check_names("auto", name)
    if device.type != "cpu":
        remedy = "name the device cpu, or a model whose weights are already quantized"
        raise ConfigError(f"quantize={name!r} is for a CPU, got the device {device}: {remedy}")
    if name == "int4" and not block_product.is_supported():
        raise ConfigError("quantize='int4' needs a CPU with instructions for float16; quantize must be int8 or None")
    return QUANTIZED[name]() if name in QUANTIZED else None
