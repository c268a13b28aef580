"""Models whose weights stay in the blocks of a GGUF file, loaded from the mapped file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from lookahead.errors import UnsupportedModelError
from lookahead.kernels import block_formats
from lookahead.loading.checkpoints import load_weights
from lookahead.loading.gguf_plan import PlacedTensor, RowOrders, planned_once, processor_of, tensor_bytes
from lookahead.loading.quantized import BlockConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_blocks(file: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model on the CPU that keeps the blocks of a file.

    Args:
        file: The GGUF file, for which `planned_once` gives no reason against it.
        dtype: Dtype of hidden states and of dequantized weights.

    Raises:
        UnsupportedModelError: A tensor is missing, or contains invalid numbers.
    """
    folder, plan = planned_once(file)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    processor = processor_of(plan.architecture, config)
    orders, state = RowOrders(processor), dict[str, Tensor]()
    for tensor in plan.tensors:
        if tensor.is_kept:
            state[tensor.place] = _laid_out(file, tensor, orders)
        else:
            state |= _dequantized(file, tensor, processor, dtype)
    kind = getattr(transformers, config.architectures[0])  # auto classes need a name
    options: dict[str, Any] = {"state_dict": state, "dtype": dtype, "local_files_only": True}
    model: PreTrainedModel = load_weights(
        config, None, kind, quantization_config=BlockConfig(plan.layers, plan.dequantized), **options
    )
    model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    model.name_or_path = model.config.name_or_path = str(file)
    model.eval()
    return model


def _laid_out(file: Path, tensor: PlacedTensor, orders: RowOrders) -> Tensor:
    blocks = tensor_bytes(file, tensor).reshape(tensor.shape[0], -1)
    try:
        return block_formats.lay_out(blocks, tensor.kind, orders.of(tensor.name, tensor.shape))
    except ValueError as error:
        raise UnsupportedModelError(f"model {file.name}: {tensor.name}: {error}") from error


def _dequantized(file: Path, tensor: PlacedTensor, processor: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters that transformers makes from a tensor."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind, made = GGMLQuantizationType[tensor.kind], {"tensors": dict[str, Tensor]()}
    numbers = tensor_bytes(file, tensor)
    values = dequantize(numbers.reshape(*tensor.shape[:-1], -1), kind).reshape(tensor.shape)
    found = processor.process(
        values, name=tensor.name, tensor_key_mapping={tensor.name: tensor.place}, parsed_parameters=made
    )
    if found.name is not None:
        made["tensors"][tensor.place] = torch.tensor(found.weights)
    return {place: each.to(dtype) for place, each in made["tensors"].items()}
