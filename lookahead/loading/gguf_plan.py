"""The tensors of a GGUF file, their parameters, and which of them are multiplied as they are stored.

A linear layer or an embedding, scaled or not, keeps its blocks if their type is one of `block_formats.FORMATS` and
transformers at most reorders the rows of its tensor. Other tensors are dequantized. The configuration, the tokenizer
and the plan of tensors take seconds to read, and are kept in a small folder.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.errors import UnsupportedModelError
from lookahead.loading.checkpoints import OTHER_SHAPES, auto_class, check_fit, fault
from lookahead.loading.gguf_files import (
    check_places,
    kept_once,
    main_kind,
    one_error,
    open_checked,
    read_parts,
    set_end_token,
)
from lookahead.utils.locks import locked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERSION = "parts-4"
_S = 10  # to read a configuration and a tokenizer
_FILE = "tensors.json"
_SHARE = 0.5  # smallest share of a file's elements in kept tensors
_EXPERTS = re.compile(r".*\.ffn_(gate|up|down)_exps\.weight")
_FLOATS = {"F32", "F16", "BF16", "F64"}


class PlacedTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: Its name in the file.
        place: The name of the model's parameter.
        kind: The type of its blocks or numbers, in the file's terms.
        shape: Shape in torch's order.
        offset: Offset of its first byte in the file.
        nbytes: Size in bytes.
        is_kept: Whether its blocks are multiplied as they are.
    """

    name: str
    place: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    is_kept: bool

    @property
    def layer(self) -> str:
        """The name of the layer of its parameter."""
        return self.place.rpartition(".")[0]

    @property
    def experts_part(self) -> str:
        """The part of experts that it is, one of `quantized_experts.PARTS`; empty for other tensors."""
        match = _EXPERTS.fullmatch(self.name)
        return match[1] if match and len(self.shape) == 3 else ""

    @property
    def shape_of_place(self) -> tuple[int, ...]:
        """The shape of the parameter, which may hold a tensor of experts and another one behind it."""
        experts, *sizes = self.shape
        is_half = self.experts_part and self.place.endswith("gate_up_proj")
        return (experts, 2 * sizes[0], sizes[1]) if is_half else self.shape

    @property
    def numbers(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Plan(NamedTuple):
    """The tensors of a file, and the layers that keep their blocks."""

    architecture: str  # the file's name for it
    reason: str  # why no blocks are kept; empty if some are
    tensors: list[PlacedTensor]  # empty if only transformers can read them
    layers: dict[str, str]  # block types by layer name

    @property
    def main_kind(self) -> str:
        """The type of most weights."""
        return main_kind((tensor.kind, tensor.numbers) for tensor in self.tensors)

    def sizes(self) -> tuple[int, int]:
        """The number of weights, and the bytes that they take if layers keep their blocks and the rest is in bf16."""
        from lookahead.kernels.block_formats import packed_shape

        kept = [tensor for tensor in self.tensors if tensor.is_kept]
        count, in_blocks = (sum(tensor.numbers for tensor in tensors) for tensors in (self.tensors, kept))
        words = sum(math.prod((*tensor.shape[:-2], *packed_shape(tensor.kind, *tensor.shape[-2:]))) for tensor in kept)
        return count, 4 * words + 2 * (count - in_blocks)

    @property
    def dequantized(self) -> list[str]:
        """The block types of the dequantized tensors."""
        return sorted({tensor.kind for tensor in self.tensors if not tensor.is_kept} - _FLOATS)


def planned_once(file: Path, announce: Callable[[str], None] | None = None) -> tuple[Path, Plan]:
    """The folder with the configuration and the tokenizer of a file, and its plan; made unless an earlier call did.

    `announce` is called with one line of text before that work.

    Raises:
        UnsupportedModelError: The file is truncated, or transformers does not support its model.
    """
    make = partial(_describe, file, announce)
    folder = kept_once(file, _VERSION, make)
    try:
        return folder, _read(folder)
    except (OSError, ValueError, TypeError, KeyError):  # a damaged file
        with locked(folder, timeout_s=-1):
            shutil.rmtree(folder, ignore_errors=True)
        folder = kept_once(file, _VERSION, make)
        return folder, _read(folder)


def has_plan(folder: str | Path) -> bool:
    """Whether a folder is one of `planned_once`."""
    return (Path(folder) / _FILE).is_file()


def _read(folder: Path) -> Plan:
    plan = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    tensors = [PlacedTensor(*tensor)._replace(shape=tuple(tensor[3])) for tensor in plan["tensors"]]
    return Plan(plan["architecture"], plan["reason"], tensors, dict(plan["layers"]))


def _describe(file: Path, announce: Callable[[str], None] | None, folder: Path) -> None:
    """Save the configuration, the tokenizer and the plan of a file."""
    import torch

    reader = open_checked(file)
    if announce is not None:
        announce(f"reading what {file.name} holds, once (about {_S} seconds)")
    with one_error(file):
        config, tokenizer = read_parts(file, sum(int(tensor.n_elements) for tensor in reader.tensors))
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        plan = plan_of(reader, model)
        if announce is not None and not plan.reason:
            count, in_blocks = plan.sizes()
            wide, half, own = (f"{size / 1e9:.2f} GB" for size in (4 * count, 2 * count, in_blocks))
            announce(f"its weights take {wide} in fp32, {half} in bf16, and {own} with --quantize gguf")
        set_end_token(model, tokenizer)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / _FILE).write_text(json.dumps(plan._asdict()), encoding="utf-8")


def plan_of(reader: Any, model: PreTrainedModel) -> Plan:
    """Assign the tensors of a file to the parameters of a model, which may be on the meta device."""
    from lookahead.kernels import block_product
    from lookahead.loading.quantized_experts import PARTS

    architecture = reader.fields["general.architecture"].contents()
    processor = processor_of(architecture, model.config)
    if processor is None:
        return Plan(architecture, f"transformers reads {architecture} in another way", [], {})
    places, unnamed = _places_of(architecture, processor, model)
    if unnamed:
        reason = f"no tensor of a {architecture} file has the name of {unnamed[0]} in {type(model).__name__}"
        return Plan(architecture, reason, [], {})
    orders, parameters = RowOrders(processor), dict(model.named_parameters())  # tied ones once
    tensors = [_placed(tensor, places[tensor.name]) for tensor in reader.tensors if tensor.name in places]
    shapes = {tensor.place: tensor.shape_of_place for tensor in tensors}
    lacking = {place for name, place in places.items() if name not in {tensor.name for tensor in tensors}}
    others = _other_shapes(shapes, parameters)
    check_fit(model, [*fault("lacks", parameters.keys() & lacking), *fault(OTHER_SHAPES, others)])
    check_places((tensor.name for tensor in reader.tensors), places, model)
    if not block_product.is_supported():
        return Plan(architecture, "this CPU has no instructions for float16", tensors, {})
    obstacles = _obstacles(tensors, model, orders)
    placed = [tensor._replace(is_kept=not obstacles[tensor.name]) for tensor in tensors]
    kept, all_of_them = (
        sum(tensor.numbers for tensor in placed if tensor.is_kept or counts) for counts in (False, True)
    )
    if kept < _SHARE * all_of_them:
        return Plan(architecture, _largest_obstacle(placed, obstacles, model), tensors, {})
    layers = {tensor.layer: tensor.kind for tensor in placed if tensor.is_kept and not tensor.experts_part}
    parts = {(tensor.layer, tensor.experts_part): tensor.kind for tensor in placed if tensor.is_kept}
    layers |= {name: "/".join(parts[name, part] for part in PARTS) for name, part in parts if part}
    return Plan(architecture, "", placed, {**layers, **_tied(model, layers)})


def _placed(tensor: Any, place: str) -> PlacedTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    kind = tensor.tensor_type.name
    return PlacedTensor(tensor.name, place, kind, shape, int(tensor.data_offset), int(tensor.n_bytes), is_kept=False)


def _other_shapes(shapes: dict[str, tuple[int, ...]], parameters: dict[str, Any]) -> list[str]:
    """Matrices, and those of experts, whose shape differs from their parameter's.

    transformers may transpose a matrix, or add a dimension to a tensor.
    """
    return [
        f"{name} is {shape} instead of {tuple(parameters[name].shape)}"
        for name, shape in shapes.items()
        if name in parameters and len(shape) == parameters[name].dim() in (2, 3)
        if sorted(shape) != sorted(parameters[name].shape)
    ]


def _places_of(architecture: str, processor: Any, model: PreTrainedModel) -> tuple[dict[str, str], list[str]]:
    """The parameters and buffers of a model by tensor name, and parameters that no tensor of a file is for."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    if architecture not in numbers:
        return {}, [place for place, _ in model.named_parameters()]
    names = get_tensor_name_map(numbers[architecture], model.config.get_text_config().num_hidden_layers)
    places, named, others = dict[str, str](), set[int](), dict[str, int]()
    for place, parameter in model.state_dict(keep_vars=True).items():
        stem, suffix = place, ""
        if place.endswith((".weight", ".bias")):
            stem, _, suffix = place.rpartition(".")
        places_of = dict[str, str]()
        if (name := names.get_name(processor.preprocess_name(stem))) is not None:
            places_of[f"{name}.{suffix}".rstrip(".")] = place
        else:
            processor.perform_fallback_tensor_mapping(places_of, "", "", place)
        places |= {f"{name}.weight" if name.endswith("exps") else name: place for name in places_of}
        if places_of:
            named.add(id(parameter))
        elif parameter.requires_grad:
            others[place] = id(parameter)
    return places, [place for place, parameter in others.items() if parameter not in named]


def processor_of(architecture: str, config: Any) -> Any:
    """transformers' processor of an architecture's tensors during dequantization; None if not supported here."""
    try:
        from transformers.modeling_gguf_pytorch_utils import (
            GGUF_SUPPORTED_ARCHITECTURES,
            TENSOR_PROCESSORS,
            TensorProcessor,
        )
    except ImportError:
        return None
    # The former names some architectures as transformers does.
    is_known = architecture in GGUF_SUPPORTED_ARCHITECTURES or architecture in TENSOR_PROCESSORS
    if not is_known or architecture in _read_otherwise():
        return None
    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    return kind(config=config.to_dict())


def _read_otherwise() -> Any:
    """The architectures whose tensors newer versions of transformers map differently."""
    try:
        from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
    except ImportError:
        return ()
    return GGUF_ARCHS


class RowOrders:
    """The order in which transformers reads the rows of tensors such as a query's, found by sending row numbers."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._known: dict[Any, NDArray[np.int64] | None] = {}

    def of(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """The tensor row for each row of the parameter; ValueError if more than the order changes."""
        key = re.sub(r"\d+", "0", name), shape
        if key not in self._known:
            self._known[key] = self._find(name, shape)
        if (order := self._known[key]) is None:
            raise ValueError(f"{name} is more than reordered")
        return order

    def _find(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        rows, columns = (np.arange(size, dtype=np.int32) for size in shape)
        try:
            with np.errstate(all="ignore"):  # some processors take logarithms
                moved, kept = (
                    self._processor.process(
                        np.broadcast_to(index, shape),
                        name=name,
                        tensor_key_mapping={},
                        parsed_parameters={"tensors": {}},
                    )
                    for index in (rows[:, None], columns)
                )
            is_order = (
                moved.name == name
                and moved.weights.shape == kept.weights.shape == shape
                and np.array_equal(np.sort(moved.weights[:, 0]), rows)
                and bool((moved.weights == moved.weights[:, :1]).all() and (kept.weights == columns).all())
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):  # unexpected sizes or settings
            return None
        return moved.weights[:, 0].astype(np.int64) if is_order else None


def _obstacles(tensors: Sequence[PlacedTensor], model: PreTrainedModel, orders: RowOrders) -> dict[str, str]:
    """The obstacle of every tensor by name. Experts keep the blocks of all of their parts or of none."""
    shared = dict[int, list[str]]()  # layers by the id of a parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    obstacles = {tensor.name: _obstacle(tensor, model, orders, shared) for tensor in tensors}
    experts = {tensor.layer: obstacles[tensor.name] for tensor in tensors if tensor.experts_part}
    experts |= {
        tensor.layer: obstacles[tensor.name] for tensor in tensors if tensor.experts_part and obstacles[tensor.name]
    }
    return obstacles | {tensor.name: experts[tensor.layer] for tensor in tensors if tensor.experts_part}


def _obstacle(tensor: PlacedTensor, model: PreTrainedModel, orders: RowOrders, shared: dict[int, list[str]]) -> str:
    """Why the layer of a tensor cannot use its blocks unchanged except for the order of rows; empty if it can."""
    from lookahead.kernels.block_formats import FORMATS
    from lookahead.loading.quantized import casts_to_weight, replacement_of
    from lookahead.loading.quantized_experts import are_gated

    layer: Any = model.get_submodule(tensor.layer)
    of_kind, parameter = FORMATS.get(tensor.kind), tensor.place.rpartition(".")[2]
    is_matrix = parameter == "weight" and replacement_of(layer) is not None
    if not (are_gated(layer) if tensor.experts_part else is_matrix):
        return "a layer of this class does not keep blocks"
    if any(casts_to_weight(model, name) for name in shared[id(getattr(layer, parameter))]):
        return "its model casts numbers to the dtype of its weight"
    if of_kind is None:
        return f"weights of {tensor.kind} are not multiplied as they are stored"
    if tuple(getattr(layer, parameter).shape) != tensor.shape_of_place:
        return "transformers reads their tensor in another shape"
    if tensor.shape[-1] % of_kind.inputs:
        return f"their {tensor.shape[-1]} inputs are not a multiple of {of_kind.inputs}, as blocks of {tensor.kind} are"
    try:
        if not tensor.experts_part:
            orders.of(tensor.name, tensor.shape)
    except ValueError:
        return "transformers changes more of them than the order of rows"
    return ""


def _largest_obstacle(tensors: Sequence[PlacedTensor], obstacles: Mapping[str, str], model: PreTrainedModel) -> str:
    """The obstacle and the class of layers of most of the weights that cannot stay in blocks, with the first layer."""
    sizes, first = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
    for tensor in tensors:
        key = obstacles[tensor.name], type(model.get_submodule(tensor.layer)).__name__
        sizes[key] += tensor.numbers * (not tensor.is_kept)
        first.setdefault(key, tensor.layer)
    ((key, _),) = sizes.most_common(1)
    return f"most of its weights would be dequantized, first of all those of {first[key]} ({key[1]}): {key[0]}"


def _tied(model: PreTrainedModel, layers: dict[str, str]) -> dict[str, str]:
    """The block type of an output layer that shares the embedding's blocks."""
    import torch

    weights = {id(getattr(model.get_submodule(name), "weight", None)): kind for name, kind in layers.items()}
    return {
        name: weights[id(module.weight)]
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and name not in layers and id(module.weight) in weights
    }


def tensor_bytes(file: Path, tensor: PlacedTensor) -> NDArray[np.uint8]:
    """The mapped bytes of a tensor; UnsupportedModelError if the file is too short."""
    if tensor.offset + tensor.nbytes > file.stat().st_size:
        raise UnsupportedModelError(f"model {file.name} is truncated: it ends within {tensor.name}")
    return np.memmap(file, np.uint8, "r", tensor.offset, (tensor.nbytes,))
