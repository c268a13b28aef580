"""A device that calls itself `cuda` and computes on the CPU, for tests of what a GPU's host does.

Tensors of the device say `cuda:0` or `cuda:1`. As a GPU does, it refuses operations on tensors of two devices and,
while a graph is captured, whatever the host would wait for. A captured graph is replayed on the same memory. Copies,
waits and launches are counted. New memory holds NaN until it is written.

It cannot show speed, the rounding of a GPU's kernels, races between streams, or a kernel that reads a wrong address.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.cpp_extension import include_paths

from lookahead.kernels import dispatch

_aten = torch.ops.aten
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_COPYING = {_aten._to_copy, _aten.copy_}
_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_EMPTY = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
_MASKS = (torch.bool, torch.uint8)
_FREE = {_aten._unsafe_view, _aten.lift_fresh, *_EMPTY}  # no kernel
_MATH = 0  # the attention that torch composes of products

# What torch's core asks of a device before it makes a tensor.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""


def missing() -> str | None:
    """Why there can be no such device here, or None."""
    if torch.version.cuda is not None:
        return "this build of torch has real GPUs"
    return None if shutil.which("g++") else "it needs g++"


@cache
def _register_guard() -> None:
    """Compile and load the device's guard, once a process."""
    folder, libraries = Path(mkdtemp()), Path(torch.__file__).parent / "lib"
    (folder / "guard.cpp").write_text(_GUARD)
    flags = [
        "-O0",
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    includes = [f"-I{path}" for path in include_paths()]
    links = [f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}"]
    files = [str(folder / "guard.cpp"), "-o", str(folder / "guard.so")]
    subprocess.run(["g++", *flags, *includes, *files, *links], check=True)
    ctypes.CDLL(str(folder / "guard.so"), mode=ctypes.RTLD_GLOBAL)
    shutil.rmtree(folder)


class FakeTensor(Tensor):
    """A tensor of the device; `memory` is its contents on the CPU."""

    memory: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory: Tensor, device: torch.device) -> FakeTensor:
        """A tensor on `device` that shares the memory of a CPU tensor."""
        layout = {"strides": memory.stride(), "storage_offset": memory.storage_offset(), "dtype": memory.dtype}
        made: FakeTensor = Tensor._make_wrapper_subclass(cls, memory.size(), **layout, device=device)
        made.memory = memory
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation outside the device's mode, as a destructor may."""
        return _gpu().run(function, args, kwargs or {})

    def data_ptr(self) -> int:
        """The address in the device's memory."""
        return self.memory.data_ptr()

    def untyped_storage(self) -> Any:
        """The device's memory."""
        return self.memory.untyped_storage()

    def tolist(self) -> Any:
        """Copied to the host first."""
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as by torch."""
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def __deepcopy__(self, memo: Any) -> FakeTensor:
        return FakeTensor(self.memory.clone(), self.device)


class Graph:
    """The operations of a pass, done again on the same memory."""

    def __init__(self) -> None:
        self.steps: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def replay(self) -> None:
        """Do them, and write every result where it was recorded."""
        _gpu().counts["replays"] += 1
        for function, args, kwargs, recorded in self.steps:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.numel() and not _share(old, new):
                    old.copy_(new)


class _Stream:
    """A stream, in which everything is done at once."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """Nothing is left to wait for."""


class FakeGpu:
    """The device, while its block is entered: counters, and the graph that is captured.

    Attributes:
        counts: "copies to the device", "copies to the host", "copies between devices", "waits" of the host, "launches"
            of kernels, "captures" and "replays".
        kernels: The launches of each of Triton's kernels.
        capability: The compute capability.
    """

    def __init__(self, devices: int, capability: tuple[int, int]) -> None:
        self.counts, self.devices, self.capability = Counter[str](), devices, capability
        self.kernels = Counter[str]()
        self.capturing: Graph | None = None
        self.out_of_memory = False  # whether the next capture lacks memory

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation of torch: on the CPU's memory if a tensor of the device takes part."""
        packet, tensors = function.overloadpacket, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        own = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        target = _indexed(kwargs.get("device")) or (own[0].device if own else torch.device("cpu"))
        if not own and target.type == "cpu":
            return function(*args, **kwargs)
        if packet is _aten._fused_sdp_choice:
            return _MATH
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
            with _Operations():  # inference mode leaves these whole
                return function.decompose(*args, **kwargs)
        if packet in _COPYING:
            source, end = (args[0].device, target) if packet is _aten._to_copy else (args[1].device, args[0].device)
            may_return = kwargs.get("non_blocking") or (packet is _aten.copy_ and len(args) > 2 and args[2])
            self._copy(source, end, str(packet), bool(may_return))
        else:
            self._check(packet, args, tensors, own)
        waits = not _WAITING_TAGS.isdisjoint(function.tags) or packet is _aten.equal
        if waits and packet not in _INDEXING:
            self._wait(str(packet))
        self.counts["launches"] += not (packet in _FREE or _is_view(function))
        moved = tree_map(_to_memory, kwargs)
        if "pin_memory" in moved:
            moved["pin_memory"] = None
        made = self._do(function, tree_map(_to_memory, args), moved)
        if packet in _EMPTY and made.is_floating_point():
            made.fill_(torch.nan)
        known = {id(tensor.memory): tensor for tensor in own}
        return tree_map_only(Tensor, lambda result: self._up(result, target, known), made)

    def _up(self, result: Tensor, target: torch.device, known: dict[int, FakeTensor]) -> Tensor:
        """A result as the device's, itself if it is an argument."""
        if target.type == "cpu":
            return result
        return known[id(result)] if id(result) in known else FakeTensor(result, target)

    def _do(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do it, and remember it for the graph that is captured."""
        made = function(*args, **kwargs)
        if getattr(function, "overloadpacket", None) is _aten._to_copy and _share(made, args[0]):
            made = made.clone()
        if self.capturing is not None:
            self.capturing.steps.append((function, args, kwargs, made))
        return made

    def launch(self, name: str, kernel: Any, args: Any, kwargs: Any) -> None:
        """Launch an interpreted kernel of Triton."""
        self.counts["launches"] += 1
        self.kernels[name] += 1
        self._do(kernel, tree_map(_to_memory, args), tree_map(_to_memory, kwargs))

    def _copy(self, source: torch.device, end: torch.device, name: str, may_return: bool) -> None:
        """Count a copy; the host waits for one from the device, and for one to it unless it may return early."""
        if source == end:
            return
        if "cpu" not in (source.type, end.type):
            self.counts["copies between devices"] += 1
            return
        self.counts["copies to the device" if source.type == "cpu" else "copies to the host"] += 1
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} copies")
        if end.type == "cpu" or not may_return:
            self._wait(name)

    def _check(self, packet: Any, args: Any, tensors: list[Tensor], own: list[FakeTensor]) -> None:
        """Refuse tensors of two devices; count what indexing with the host's values copies."""
        hosts = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor) and tensor.dim()]
        if len({tensor.device for tensor in own}) > 1 or (own and hosts and packet not in _INDEXING):
            found = sorted({str(tensor.device) for tensor in tensors})
            raise RuntimeError(f"expected all tensors to be on the same device, found {found} in {packet}")
        if packet in _INDEXING:
            if not isinstance(args[0], FakeTensor):
                raise RuntimeError(f"indices should be on the device of the indexed tensor: {packet}")
            for _ in hosts:
                self._copy(torch.device("cpu"), args[0].device, str(packet), False)
            if any(isinstance(index, Tensor) and index.dtype in _MASKS for index in args[1]):
                self._wait(f"{packet} with a mask")

    def _wait(self, name: str) -> None:
        self.counts["waits"] += 1
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} waits")

    @contextmanager
    def capture(self, graph: Graph, **options: Any) -> Iterator[None]:
        """What `torch.cuda.graph` is."""
        if self.out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.counts["captures"] += 1
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None


_entered: list[FakeGpu] = []


def _gpu() -> FakeGpu:
    return _entered[-1]


class _Operations(TorchDispatchMode):
    """Every operation of torch below the Python level."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _gpu().run(function, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """`torch.tensor` and its like fill a tensor before an operation is dispatched."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = _indexed(kwargs.get("device"))
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and device is not None and device.type == "cuda":
            del kwargs["device"]
            return function(*args, **kwargs).to(device)
        if function is Tensor.__getitem__ and isinstance(
            args[1], tuple
        ):  # lists are copied, as tensors of the host are
            args = args[0], tuple(torch.tensor(part) if isinstance(part, list) else part for part in args[1])
        if function is Tensor.cuda:
            return args[0].to("cuda:0")
        if function is Tensor.to:
            args = tuple(_indexed(arg) if isinstance(arg, (str, torch.device)) else arg for arg in args)
        return function(*args, **(kwargs if device is None else {**kwargs, "device": device}))


# Recognition asks a class for its package, and a GPU's are torch's.
for _kind in (FakeTensor, _Operations, _Factories):
    _kind.__module__ = "torch"


class _Launcher:
    """An interpreted kernel, which takes the memory of the device's tensors."""

    def __init__(self, name: str, kernel: Any) -> None:
        self._name, self._kernel = name, kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: _gpu().launch(self._name, self._kernel[grid], args, kwargs)


def _indexed(device: Any) -> torch.device | None:
    """A device with its index."""
    device = None if device is None else torch.device(device)
    return torch.device("cuda", 0) if device is not None and (device.type, device.index) == ("cuda", None) else device


def _to_memory(value: Any) -> Any:
    """The CPU's tensor or device in place of the fake one."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value.memory if isinstance(value, FakeTensor) else value


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _is_view(function: Any) -> bool:
    """Whether an operation only looks at its input in another way."""
    returns = function._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


@contextmanager
def fake_gpu(devices: int = 1, capability: tuple[int, int] = (9, 0), *, kernels: bool = False) -> Iterator[FakeGpu]:
    """A block with some devices; with `kernels` Triton's kernels, which must be interpreted, run on them."""
    _register_guard()
    gpu, properties = FakeGpu(devices, capability), SimpleNamespace(name="NVIDIA Fake", multi_processor_count=132)
    properties.major, properties.minor = capability
    properties.total_memory = 80 << 30
    stream = _Stream()
    replaced: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: devices,
        "current_device": lambda: 0, "set_device": lambda _: None, "_lazy_init": lambda: None,
        "get_device_name": lambda *_: properties.name, "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: capability, "mem_get_info": lambda *_: (70 << 30, 80 << 30),
        "device": lambda _: nullcontext(), "device_of": lambda _: nullcontext(), "stream": lambda _: nullcontext(),
        "Stream": _Stream, "current_stream": lambda *_: stream, "empty_cache": lambda: None,
        "synchronize": lambda *_: gpu._wait("synchronize"), "is_current_stream_capturing": lambda: bool(gpu.capturing),
        "CUDAGraph": Graph, "graph": gpu.capture, "graph_pool_handle": lambda: (0, 1),
        # Random numbers of all devices are the CPU's.
        "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda *_: None,
        "manual_seed_all": lambda _: None,
    }  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **replaced))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0" if kernels else None))
        if kernels:
            from lookahead.kernels import compaction, tree_attention

            for module, names in ((tree_attention, ("attend", "merge")), (compaction, ("_compact",))):
                for name in names:
                    stack.enter_context(patch.object(module, name, _Launcher(name, getattr(module, name))))
        dispatch.runs_on.cache_clear()
        stack.callback(dispatch.runs_on.cache_clear)
        for known in (dispatch.verdicts, dispatch.served, dispatch.wanted):  # of these devices
            stack.callback(known.clear)
        _entered.append(gpu)
        stack.callback(_entered.pop)
        stack.enter_context(_Factories())
        stack.enter_context(_Operations())
        yield gpu


def move(model: nn.Module, place: Callable[[str], int] = lambda name: 0) -> nn.Module:
    """Move a model's tensors to the device that `place` gives for the name of their module."""
    moved: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for name, module in model.named_modules():
        device = torch.device("cuda", place(name))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                tensor = FakeTensor(parameter.data, device)
                module._parameters[key] = moved.setdefault(id(parameter), nn.Parameter(tensor, requires_grad=False))
        for owner in (module._buffers, vars(module)):
            for key, value in list(owner.items()):
                if isinstance(value, Tensor):
                    owner[key] = FakeTensor(value, device)
    return model
