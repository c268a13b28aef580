"""Models that are read from the mapped GGUF file, tensor by tensor: weights stay in its blocks or are dequantized.

Large tensors are dequantized by some rows at a time, so that a model takes little more memory than its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from lookahead.errors import UnsupportedModelError
from lookahead.kernels import block_formats, block_values
from lookahead.kernels.packed_product import COLUMNS
from lookahead.loading.checkpoints import load_weights
from lookahead.loading.gguf_files import dtype_of
from lookahead.loading.gguf_plan import PlacedTensor, RowOrders, planned_once, processor_of, tensor_bytes
from lookahead.loading.quantized import BlockConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

_AT_ONCE = 1 << 22  # numbers that are dequantized at a time


def load_file(
    file: Path, dtype: torch.dtype | str, keeps_blocks: bool, quantization: QuantizationConfigMixin | None = None
) -> PreTrainedModel:
    """Load a model on the CPU from a file whose plan has tensors.

    Args:
        file: The GGUF file.
        dtype: Dtype of hidden states and of dequantized weights; `"auto"` for that of most of the file's weights.
        keeps_blocks: Whether weights stay in blocks, for which `planned_once` gives no reason against it. Otherwise
            quantized weights are rounded to bf16, and then become `dtype`.
        quantization: How the dequantized model is quantized.

    Raises:
        UnsupportedModelError: A tensor is missing, or contains invalid numbers.
    """
    folder, plan = planned_once(file)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    reading, stored = _Reading(file, processor_of(plan.architecture, config)), dtype_of(plan.main_kind)
    dtype = stored if isinstance(dtype, str) else dtype
    state = dict[str, Tensor]()
    for tensor in plan.tensors:
        if keeps_blocks and tensor.is_kept:
            place = f"{tensor.layer}.{tensor.experts_part}_blocks" if tensor.experts_part else tensor.place
            state[place] = reading.laid_out(tensor)
        elif tensor.experts_part:
            whole = state.setdefault(tensor.place, torch.empty(tensor.shape_of_place, dtype=dtype))
            reading.fill_experts(tensor, dtype if keeps_blocks else stored, whole)
        else:
            state |= reading.dequantized(tensor, dtype if keeps_blocks else stored, dtype)
    if keeps_blocks:
        quantization = BlockConfig(plan.layers, plan.dequantized)
    options: dict[str, Any] = {} if quantization is None else {"quantization_config": quantization}
    kind = getattr(transformers, config.architectures[0])  # auto classes need a name
    options |= {"state_dict": state, "dtype": dtype, "local_files_only": True}
    model: PreTrainedModel = load_weights(config, None, kind, **options)
    model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    model.name_or_path = model.config.name_or_path = str(file)
    model.eval()
    return model


class _Reading:
    """Reads the tensors of a file as transformers' processor of its architecture would."""

    def __init__(self, file: Path, processor: Any) -> None:
        self._file, self._processor, self._orders = file, processor, RowOrders(processor)

    def laid_out(self, tensor: PlacedTensor) -> Tensor:
        """The blocks of a tensor in panels, for each expert if it is of experts."""
        blocks = tensor_bytes(self._file, tensor).reshape(*tensor.shape[:-1], -1)
        try:
            if tensor.experts_part:
                count, outputs = tensor.shape[:2]
                own = np.arange(-(-outputs // COLUMNS) * COLUMNS).clip(max=outputs - 1)  # fills the last panel
                order = (np.arange(count)[:, None] * outputs + own).ravel()
                packed = block_formats.lay_out(blocks.reshape(count * outputs, -1), tensor.kind, order)
                return packed.view(count, -1, *packed.shape[1:])
            return block_formats.lay_out(blocks, tensor.kind, self._orders.of(tensor.name, tensor.shape))
        except ValueError as error:
            raise UnsupportedModelError(f"model {self._file.name}: {tensor.name}: {error}") from error

    def fill_experts(self, tensor: PlacedTensor, stored: torch.dtype, whole: Tensor) -> None:
        """Dequantize a part of experts into their parameter `[experts, outputs, inputs]`: gates come first."""
        outputs = tensor.shape[1]
        first = outputs if tensor.experts_part == "up" else 0
        blocks = tensor_bytes(self._file, tensor).reshape(*tensor.shape[:-1], -1)
        for own, into in zip(blocks, whole, strict=True):
            _fill(own, tensor.kind, np.arange(outputs), stored, into[first : first + outputs])

    def dequantized(self, tensor: PlacedTensor, stored: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters that transformers makes from a tensor, rounded to `stored`, in `dtype`."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        numbers = tensor_bytes(self._file, tensor)
        try:
            order = self._orders.of(tensor.name, tensor.shape)
        except ValueError:
            made = {"tensors": dict[str, Tensor]()}
            values = dequantize(numbers.reshape(*tensor.shape[:-1], -1), GGMLQuantizationType[tensor.kind])
            result = self._processor.process(
                values.reshape(tensor.shape),
                name=tensor.name,
                tensor_key_mapping={tensor.name: tensor.place},
                parsed_parameters=made,
            )
            if result.name is not None:
                made["tensors"][tensor.place] = torch.tensor(result.weights)
            return {place: weight.to(stored).to(dtype) for place, weight in made["tensors"].items()}
        parameter = torch.empty(tensor.shape, dtype=dtype)
        _fill(numbers.reshape(len(order), -1), tensor.kind, order, stored, parameter)
        return {tensor.place: parameter}


def _fill(rows: NDArray[np.uint8], kind: str, order: NDArray[np.int64], stored: torch.dtype, out: Tensor) -> None:
    """Dequantize rows of a type in an order, rounded to `stored`, to `out` `[outputs, inputs]`."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if stored == torch.bfloat16 and kind in block_formats.FORMATS and out.dtype in (torch.float32, stored):
        block_values.dequantize(rows, kind, order, out)
        return
    size = max(1, _AT_ONCE // out.shape[1])
    for part, into in zip(torch.from_numpy(order).split(size), out.split(size), strict=True):
        into.copy_(torch.from_numpy(dequantize(rows[part.numpy()], GGMLQuantizationType[kind])).to(stored))
