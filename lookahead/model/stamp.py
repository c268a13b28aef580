"""The stamp of a model: a number that changes with everything that decides what its passes compute.

Whatever outlives a call (verdicts, packed weights, kept prefixes, recorded graphs) is valid for one stamp. The stamp
covers parameters and buffers, the code of modules, hooks and functions, plain attributes, configurations and torch's
flags. Weights may be written without a trace, for example by `weight.data.copy_(new)`, so their contents count: of
large matrices on a CPU a word of 8 bytes of every row and of every column, and of small arrays every byte.
"""

from __future__ import annotations

import ctypes
import marshal
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from lookahead.model.known_code import (
    AROUND,
    arithmetic_flags,
    attention_code,
    code_of,
    global_hooks,
    hooks_of,
    is_ours,
    torch_modes,
)

_PLAIN = frozenset((bool, int, float, str))  # None is as good as no attribute: a state may be None before a pass
_GROUPS = frozenset((list, tuple, dict, set, torch.dtype, torch.device, torch.Size))
STANDARD = (frozenset(vars(nn.Module())) - {"training"}) | {
    *("gradient_checkpointing", "generate"),
    *("in_features", "out_features", "_is_hf_initialized"),  # as the weights have them
}
"""Attributes that every module has, which are read separately, that passes and `lookahead.enable` set, or that say
nothing else than weights."""
_NUMBERS = int, float, np.generic
_COUNTED = "max_seq_len_cached"  # of rotary embeddings, whose frequencies are a buffer
_WORD = 8  # bytes
_WHOLE_MODEL = 1 << 24  # bytes of weights, up to which every byte is read
_WHOLE = 1 << 15  # the same of one array
_SAMPLES = 1024  # numbers of an array that is not on a CPU, or not contiguous
_MEMORY = frozenset((Tensor, nn.Parameter, nn.Buffer))


class Form(NamedTuple):
    """What a model is but for the contents of its weights.

    Attributes:
        number: Changes if a module, an attribute, a hook, a tensor, a configuration or a setting of torch does. Equal
            only while the same modules hold the same tensors: what is made of modules once is valid for it.
        structure: A number for the classes and sizes of the modules alone.
        parts: What the number of a stamp is made of besides contents.
        tensors: Parameters and buffers by `id`.
        places: The address and the bytes of each, 0 for what is not plain memory.
        code: The classes and functions whose ids are part of the numbers. The list keeps them alive.
    """

    number: int
    structure: int
    parts: tuple[Any, ...]
    tensors: dict[int, Tensor]
    places: list[tuple[int, int]]
    code: list[Any]


class Stamp(NamedTuple):
    """A number for a model's weights and code.

    Attributes:
        number: Equal stamps of one process have equal numbers.
        structure: A number for the classes and sizes of the modules alone.
        contents: A digest of every parameter and buffer, by `id`.
        code: The classes and functions whose ids are part of the number. The list keeps them alive.
        form: The number of the model's `Form`.
    """

    number: int
    structure: int
    contents: dict[int, int]
    code: list[Any]
    form: int


def stamp_of(model: Any) -> Stamp:
    """The stamp of a model now, in some milliseconds: it reads a small part of the weights."""
    form = form_of(model)
    tensors, table = list(form.tensors.values()), _tables.get(model)
    if table is None or table.ids != [*form.tensors] or table.places != form.places:
        table = _tables[model] = ContentTable.of(tensors, form.places)
    contents = table.contents(tensors)
    # What operations and assignments leave: torch's count of writes, and the address of each.
    written = [at for at, is_whole in enumerate(table.is_whole) if not is_whole]
    traces = [0 if tensors[at].is_inference() else tensors[at]._version for at in written]
    number = hash((*form.parts, *contents, *traces, *(table.places[at][0] for at in written)))
    return Stamp(number, form.structure, dict(zip(form.tensors, contents, strict=True)), form.code, form.number)


def form_of(model: Any) -> Form:
    """The form of a model now: one loop over its modules, for every call and every block of service asks for it."""
    modules, is_stateful = modules_of(model), getattr(model, "_is_stateful", False)  # its passes set attributes
    attributes, tensors, code, ids = list[Any](), dict[int, Tensor](), list[Any](), list[int]()
    for module in modules:
        own = module.__dict__
        for name in sorted(own.keys() - STANDARD):
            value = own.get(name)
            if (kind := type(value)) in _PLAIN:
                attributes.append((name, value))
            elif value is None:
                continue
            elif name == "config" and kind not in _GROUPS:
                ids.append(id(getattr(value, "_viewed", value)))  # the view of a pass stands for it
            elif kind in _GROUPS or isinstance(value, _NUMBERS):
                attributes.append((name, repr(sorted(map(repr, value)) if kind is set else value)))
            elif isinstance(value, Tensor):
                if not (is_stateful or name.endswith(_COUNTED)):
                    tensors[id(value)] = value
            elif callable(value) and not (isinstance(value, nn.Module) or is_ours(value)):
                code.append(_code_in(value))
                arguments = (*getattr(value, "args", ()), *getattr(value, "keywords", {}).values())  # of a partial
                attributes += [(name, argument) for argument in arguments if type(argument) in _PLAIN]
        # A scripted module has methods instead of these attributes.
        for group in (own.get("_parameters", module._parameters), own.get("_buffers", module._buffers)):
            tensors.update({id(tensor): tensor for tensor in group.values() if tensor is not None})
        if module._forward_hooks or module._forward_pre_hooks:
            code += [type(module), *map(_code_in, hooks_of(module))]
            attributes += [sorted(getattr(hook, "keywords", ())) for hook in hooks_of(module)]
    code += [*map(_code_in, global_hooks()), *torch_modes()]
    kinds = list(map(type, modules))
    code += [*kinds, *map(_code_in, attention_code(model, modules))]
    places = [(tensor.data_ptr(), tensor.nbytes) if type(tensor) in _MEMORY else (0, 0) for tensor in tensors.values()]
    sizes = [attribute[1] for attribute in attributes if attribute[:1] == ("num_embeddings",)]
    structure = hash((*map(id, kinds), *sizes, getattr(model, "dtype", None)))
    # A transposed view has the address and the shape of its square matrix.
    strides = [tensor.stride() if tensor.layout is torch.strided else () for tensor in tensors.values()]
    shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors.values()]
    plain = xxhash.xxh3_64_intdigest(marshal.dumps(attributes, 2))  # `hash` has the same value for -1 and -2
    called = code_of(frozenset(kinds)).number, code_of(AROUND).number
    parts = structure, *shapes, *strides, *called, *map(id, code), plain, *_settings_of(model)
    number = hash((*parts, *map(id, modules), *tensors, *places, *ids))
    return Form(number, structure, parts, tensors, places, code)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and its submodules, each once, like `nn.Module.modules` in a third of its time."""
    modules = dict[int, nn.Module]()
    waiting: list[Any] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            waiting += module._modules.values()
    return list(modules.values())


def digest_of(model: Any) -> str | None:
    """32 hexadecimal digits for the weights, attributes and settings of a model, equal in every process.

    None if a tensor is not plain memory of the CPU.
    """
    modules = dict(model.named_modules())
    described: list[Any] = [_settings_of(model), torch.get_num_threads()]
    for name, module in modules.items():
        own = [(key, value) for key, value in vars(module).items() if key not in STANDARD]
        plain = {key: value for key, value in own if type(value) in _PLAIN or type(value) in _GROUPS}
        items = (*module._parameters.items(), *module._buffers.items())
        tensors = {key: value for key, value in items if value is not None}
        if not all(map(_is_memory, tensors.values())):
            return None
        arrays = list(tensors.values())
        contents = ContentTable.of(arrays, reads_all=False).contents(arrays)
        kinds = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors.values()]
        kind = type(module)
        described.append(
            (
                name,
                kind.__module__,
                kind.__qualname__,
                sorted((key, repr(sorted(map(repr, v)) if isinstance(v, set) else v)) for key, v in plain.items()),
                [*tensors],
                kinds,
                contents,
            )
        )
    shown = repr(described)
    return None if " at 0x" in shown else xxhash.xxh3_128_hexdigest(shown.encode())


def _settings_of(model: Any) -> tuple[str, ...]:
    """The configuration of a model, and torch's settings that change its passes."""
    values = []
    for config in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
        for name, value in list(vars(config).items()):
            kind = type(value)
            is_shown = value is None or kind in _PLAIN or kind in _GROUPS
            values.append((name, value if is_shown else kind.__qualname__))
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return repr(values), repr(autocast), repr(arithmetic_flags()), repr(torch.get_default_dtype())


class ContentTable(NamedTuple):
    """Where the contents of some tensors are read.

    Attributes:
        ids: The `id` of each.
        places: The address and the bytes of each, 0 for what is not plain memory.
        views: Views of the memory of each that are read; empty for what is not plain memory.
        is_whole: Whether all bytes of a tensor are read, so that no trace of a write is needed.
        odd: The tensors whose views are empty, or leave out their last bytes.
    """

    ids: list[int]
    places: list[tuple[int, int]]
    views: list[list[NDArray[np.uint64]]]
    is_whole: list[bool]
    odd: list[int]

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], places: Sequence[tuple[int, int]] = (), *, reads_all: bool = True
    ) -> ContentTable:
        """The table of tensors; with `reads_all` all bytes of a small model are read, not only of its small arrays."""
        reads_all = reads_all and sum(tensor.nbytes for tensor in tensors) <= _WHOLE_MODEL
        limit = _WHOLE_MODEL if reads_all else _WHOLE
        views, is_whole, odd = list[list[NDArray[np.uint64]]](), list[bool](), list[int]()
        for at, tensor in enumerate(tensors):
            tensor = _in_order(tensor)
            is_readable = _is_memory(tensor) and tensor.is_contiguous()
            is_whole.append(is_readable and tensor.nbytes <= limit)
            views.append(_views_of(tensor, is_whole=is_whole[-1]) if is_readable else [])
            if not is_readable or tensor.nbytes % _WORD:
                odd.append(at)
        return cls([*map(id, tensors)], list(places), views, is_whole, odd)

    def contents(self, tensors: Sequence[Tensor]) -> list[int]:
        """The digests of the tensors."""
        digests = list[int]()
        for views in self.views:
            digest = xxhash.xxh3_64()
            for view in views:
                digest.update(np.ascontiguousarray(view).data)
            digests.append(digest.intdigest())
        if self.odd:
            for at, sample in zip(self.odd, _digests_of_samples([tensors[at] for at in self.odd]), strict=True):
                digests[at] ^= sample
        return digests


_tables: WeakKeyDictionary[Any, ContentTable] = WeakKeyDictionary()  # the newest of every model


def _views_of(tensor: Tensor, *, is_whole: bool) -> list[NDArray[np.uint64]]:
    """Views of all words of a tensor, or of one word of every row of the last dimension, and of every column of words.

    The latter are the diagonals of the squares into which a matrix is cut along its longer side. The views keep no
    memory alive.
    """
    count, size = tensor.nbytes // _WORD, tensor.shape[-1] * tensor.itemsize if tensor.dim() > 1 else 0
    if not count:
        return []
    memory: Any = (ctypes.c_uint64 * count).from_address(tensor.data_ptr())
    words: NDArray[np.uint64] = np.frombuffer(memory, np.uint64)
    if is_whole:
        return [words]
    width = size // _WORD if size and size % _WORD == 0 else _WHOLE // _WORD
    rows = count // width
    matrix = words[: rows * width].reshape(rows, width)
    longer = matrix if rows > width else matrix.T
    side = longer.shape[1]
    whole = len(longer) // side * side
    return [longer[:whole].reshape(-1, side, side).diagonal(axis1=1, axis2=2), longer[whole:].diagonal()]


def _in_order(tensor: Tensor) -> Tensor:
    """A view with the dimensions in the order of their strides: a transposed matrix is stored by its columns."""
    if type(tensor) not in _MEMORY or tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda at: -strides[at])
    return nn.Parameter(tensor.detach().permute(order), requires_grad=False)


def _is_memory(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory of the CPU."""
    return type(tensor) in _MEMORY and tensor.device.type == "cpu" and tensor.layout is torch.strided


@torch.no_grad()
def _digests_of_samples(tensors: Sequence[Tensor]) -> list[int]:
    """Digests of evenly spaced numbers and the last ones of tensors, with one copy to the host for each device."""
    samples = [(at, sample) for at, tensor in enumerate(tensors) for sample in _samples_of(tensor)]
    digests = [0] * len(tensors)
    for device in {sample.device for _, sample in samples}:
        here = [(at, sample) for at, sample in samples if sample.device == device]
        whole = torch.cat([sample for _, sample in here]).cpu().numpy()
        ends = np.cumsum([len(sample) for _, sample in here])[:-1]
        for (at, _), data in zip(here, np.split(whole, ends), strict=True):
            digests[at] = hash((digests[at], xxhash.xxh3_64_intdigest(data.data)))
    return digests


def _samples_of(tensor: Tensor) -> list[Tensor]:
    """Numbers of a tensor, or of its parts, as uint8 `[bytes]` on its device; none of one without memory."""
    if tensor.is_meta or not tensor.numel():
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [sample for part in parts if isinstance(part, Tensor) for sample in _samples_of(part)]
    flat = _in_order(tensor).detach().flatten()
    parts = [flat[:: -(-len(flat) // _SAMPLES)], flat[-_WORD:]]
    return [part.contiguous().view(torch.uint8) for part in parts]


def version_of(tensor: Tensor) -> int:
    """Torch's count of writes to a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def _code_in(value: Any) -> Any:
    """The code that identifies a hook: one that is made anew around every call of `generate` keeps its code."""
    value = getattr(value, "func", value)
    value = getattr(value, "__func__", value)
    return getattr(value, "__code__", type(value))
