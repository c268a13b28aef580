"""Known code and a user's own code: what of a model is run as `generate` runs it, and by whom it was written.

Known code is what torch, transformers, accelerate, peft, the quantizers of docs/models.md and this package ship, the
libraries that transformers' models call, and the remote code of a checkpoint. It is recognised by the file of a
function and the package of a class. Everything else on the way of a pass is the user's own: nothing looks inside it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import sysconfig
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from transformers import (
    Conv1D,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PretrainedConfig,
    StoppingCriteriaList,
    StopStringCriteria,
    cache_utils,
    masking_utils,
)
from transformers.integrations import moe, sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

KNOWN_PACKAGES = frozenset(
    {
        *("torch", "transformers", "accelerate", "peft", "lookahead"),
        "transformers_modules",  # the remote code of checkpoints
        *("torchao", "bitsandbytes", "optimum", "compressed_tensors", "gptqmodel", "auto_round", "awq", "hqq"),
        *("aqlm", "eetq", "fbgemm_gpu", "fp_quant", "quark", "sinq", "spqr_quant", "vptq"),
        # What the files of models import.
        *("numpy", "einops", "causal_conv1d", "mamba_ssm", "fla", "flash_attn", "kernels", "triton", "scipy"),
        *("huggingface_hub", "safetensors", "tokenizers", "packaging", "tqdm", "PIL", "typing_extensions"),
    }
)
# Names that a script's own folder may have too: only what is installed counts.
_COMMON_NAMES = frozenset(("optimum", "awq", "hqq", "aqlm", "eetq", "quark", "sinq", "vptq", "fla", "kernels"))
_DECORATORS = contextlib.__file__, functools.__file__, typing.__file__  # what they wrap counts
_AUTOCAST = os.path.join("torch", "amp", "autocast_mode.py")  # as a decorator it changes what it wraps
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_PRIMITIVE = frozenset((bool, int, float, str, type(None)))
_DATA = _PRIMITIVE | {dict, list, set, frozenset, tuple, ModuleType}
_DATA_OWNERS = ModuleType, type
# Every model's layers call these.
_SHARED: tuple[Any, ...] = (torch, torch.Tensor, torch._C._nn, torch.nn.functional, sdpa_attention, masking_utils, moe)
_LINEARS = frozenset((nn.Linear, Conv1D))
_CLASSES = [value for value in vars(cache_utils).values() if getattr(value, "__module__", "") == cache_utils.__name__]
# Caches and their layers; a mapping between layers has methods of the standard library.
_CACHES = frozenset(kind for kind in _CLASSES if isinstance(kind, type) and not issubclass(kind, Mapping))
CRITERIA = frozenset((EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria))
"""Stopping criteria that treat every row separately and keep no state. A subclass may differ."""
AROUND = _CACHES | {LogitsProcessorList, StoppingCriteriaList} | CRITERIA
"""Classes that every call of `generate` uses."""
_CALLS = "forward", "_call_impl"  # instance attributes that change how a module is called
_UNCALLED = frozenset(("generate", "extra_repr"))  # attributes that no pass calls
_CALLABLES = frozenset((FunctionType, MethodType, BuiltinFunctionType, functools.partial))
_USUAL_FLAGS = True, True
_MAX_CODES = 64  # that are remembered: a notebook may define its classes anew again and again


@functools.lru_cache(maxsize=4096)
def _is_known_file(file: str) -> bool:
    """Whether a source file belongs to a known package, or to Python."""
    if file.startswith(_STANDARD_LIBRARY):
        return "-packages" + os.sep not in file
    return not file.endswith(_AUTOCAST) and any(
        file.startswith(folder) for name in KNOWN_PACKAGES for folder in _folders(name)
    )


def _folders(package: str) -> list[str]:
    """The folders of a known package, or the file of a single module."""
    module: Any = sys.modules.get(package)
    folders = [folder + os.sep for folder in getattr(module, "__path__", ())]
    folders = folders or [file for file in (getattr(module, "__file__", None),) if file is not None]
    return [folder for folder in folders if package not in _COMMON_NAMES or "-packages" + os.sep in folder]


@functools.lru_cache(maxsize=4096)
def _is_known_package(name: str) -> bool:
    package = name.partition(".")[0]
    return package in KNOWN_PACKAGES and bool(_folders(package))


def is_known_class(kind: type) -> bool:
    """Whether a class is of a known package. The methods that somebody replaced in it are found by `code_of`."""
    return _is_known_package(kind.__module__)


def is_known(function: Any) -> bool:
    """Whether a callable, everything that it wraps and everything that it is bound to are known."""
    while function is not None:
        if isinstance(function, functools.partial | functools.partialmethod):
            arguments = (*function.args, *function.keywords.values())
            if not all(map(_is_known_argument, arguments)):
                return False
            function = function.func
        elif isinstance(function, MethodType):
            owner = function.__self__
            if not is_known_class(owner if isinstance(owner, type) else type(owner)):
                return False
            function = function.__func__
        elif type(function) is FunctionType:
            file = function.__code__.co_filename
            wrapped = getattr(function, "__wrapped__", None)
            hides = file in _DECORATORS and wrapped is None and function.__closure__ is not None
            # What `exec` makes, as libraries do for dataclasses, has no file.
            if hides or not (_is_known_file(file) if file[0] != "<" else _is_known_package(_home_of(function))):
                return False
            function = wrapped
        elif hasattr(function, "__wrapped__") and not isinstance(function, nn.Module):  # a functools cache
            function = function.__wrapped__
        elif type(function).__module__ == "builtins":  # compiled; `list.append` is of an object of a user's
            is_free = type(getattr(function, "__self__", None)) in (*_DATA_OWNERS, type(None))
            return is_free or _is_known_package(str(getattr(function, "__module__", "")))
        elif type(function).__module__ in ("typing", "functools"):
            return True
        else:  # an object that is called
            called = vars(type(function)).get("__call__")
            return is_known_class(type(function)) and (type(called) is not FunctionType or is_known(called))
    return True


def _home_of(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__", ""))


def is_known_hook(hook: Any) -> bool:
    """Whether a hook is known, and of a library that places hooks: `print` is known code, and a user's choice."""
    function = getattr(hook, "func", hook)
    function = getattr(function, "__func__", function)
    home = _home_of(function) if type(function) is FunctionType else type(function).__module__
    return is_known(hook) and _is_known_package(home)


def _is_known_argument(value: Any) -> bool:
    """Whether a partial's argument is data, a module, or a known method; a function may be a user's choice."""
    return type(value) in _DATA or isinstance(value, nn.Module) or (type(value) is MethodType and is_known(value))


class Code(NamedTuple):
    """The functions that modules of some classes can call."""

    number: int  # constant while no function is replaced
    foreign: tuple[Any, ...]  # functions and other callables that are not known
    values: list[Any]  # attributes of classes and globals of files; keeps alive the objects whose ids are the number
    functions: list[FunctionType]  # among the values
    codes: list[CodeType]  # of the functions


_found: dict[frozenset[type], Code] = {}
_CODE_OF = attrgetter("__code__")


def code_of(classes: frozenset[type]) -> Code:
    """The code of modules of some classes: their methods, inherited ones included, and the globals of their files."""
    kinds = sorted(classes, key=id)  # equal sets may have other orders
    bases = list(dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base is not object))
    shared = _SHARED if any(issubclass(kind, nn.Module) for kind in kinds) else ()
    own: list[Mapping[str, Any]] = [*map(vars, bases), *map(vars, shared)]
    files = [(kind, sys.modules[kind.__module__]) for kind in kinds if kind.__module__ in sys.modules]
    # A file that is not of a package may be a notebook, whose globals come and go.
    is_shipped = [kind.__module__.startswith(("torch.", "transformers.")) for kind, _ in files]
    pairs = zip(files, is_shipped, strict=True)
    spaces = own + [vars(file) if whole else _called((kind,), file) for (kind, file), whole in pairs]
    values = list(chain.from_iterable([list(space.values()) for space in spaces]))
    code = _found.get(classes)
    if (  # comparing objects takes a quarter of the time of making their number
        code is not None
        and len(values) == len(code.values)
        and all(map(is_, values, code.values))
        and all(map(is_, map(_CODE_OF, code.functions), code.codes))
    ):
        return code
    objects = [value for value in values if type(value) not in _DATA]
    functions = [value for value in objects if type(value) is FunctionType]
    codes = list(map(_CODE_OF, functions))
    number = hash(tuple(map(id, objects + codes)))
    foreign = () if code is None else code.foreign
    if code is None or code.number != number:
        called = [*own, *(_called(kinds, file) for file in {file.__name__: file for _, file in files}.values())]
        reached = [function for space in called for value in list(space.values()) for function in callables_in(value)]
        foreign = tuple(function for function in reached if not is_known(function))
    code = _found[classes] = Code(number, foreign, values, functions, codes)
    while len(_found) > _MAX_CODES:
        _found.pop(next(iter(_found)), None)
    return code


def _called(classes: Iterable[type], file: ModuleType) -> dict[str, Any]:
    """The globals of a file that the methods of its classes name, and the globals that these name in turn."""
    space, functions = vars(file), dict[str, Any]()
    kinds = [kind for kind in classes if kind.__module__ == file.__name__]
    waiting = [function for kind in kinds for value in list(vars(kind).values()) for function in callables_in(value)]
    while waiting:
        function = inspect.unwrap(waiting.pop())
        for name in getattr(getattr(function, "__code__", None), "co_names", ()):
            value = space.get(name)
            # Other callables may be models, and must not be kept alive.
            if name not in functions and isinstance(value, FunctionType | BuiltinFunctionType):
                functions[name] = value
                waiting.append(value)
    return functions


def callables_in(value: Any) -> Iterator[Any]:
    """The callables in a class attribute or a global. Classes are skipped: their own attributes count."""
    if isinstance(value, property):
        yield from filter(None, (value.fget, value.fset))
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif (callable(value) or hasattr(type(value), "__get__")) and not isinstance(value, type):
        yield value


def users_code(model: Any) -> str:
    """The first code of a user's own that a pass of the model may run and where it hangs, or an empty string."""
    named = list(model.named_modules())
    for hook in global_hooks():
        if not is_known_hook(hook):
            return f"{name_of(hook)}, a hook on all modules"
    for path, module in named:
        place = path or type(module).__name__
        if not is_known_class(type(module)):
            return f"{type(module).__qualname__}, the class of {place}"
        for hook in hooks_of(module):
            if not is_known_hook(hook):
                return f"{name_of(hook)}, a hook on {place}"
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and not is_known_class(type(config)):
            return f"{type(config).__qualname__}, the class of the configuration of {place}"
        for key, value in list(vars(module).items()):
            is_called = key == "_hf_hook" or (callable(value) and not isinstance(value, type | nn.Module))
            if is_called and not (is_ours(value) or key in _UNCALLED or _is_known_attribute(value)):
                return f"{name_of(value)}, the {key} of {place}"
            if isinstance(value, Tensor) and not is_known_class(type(value)):
                return f"{type(value).__qualname__}, the class of {place}.{key}"
        for key, weight in (*module._parameters.items(), *module._buffers.items()):
            if weight is not None and not is_known_class(type(weight)):
                return f"{type(weight).__qualname__}, the class of {place}.{key}"
    modules = [module for _, module in named]
    for function in (*attention_code(model, modules), *code_of(frozenset(map(type, modules))).foreign):
        if not is_known(function):
            return f"{name_of(function)}, which replaces a function of the model's code"
    modes = [mode for mode in torch_modes() if not is_known_class(mode)]
    return f"{modes[0].__qualname__}, a mode of torch" if modes else ""


def _is_known_attribute(value: Any) -> bool:
    """Whether a callable attribute of a module, or a hook of accelerate, is known."""
    if callable(value):
        return is_known(value)
    for part in (value, *(getattr(value, "hooks", None) or ())):  # accelerate's own sequence of hooks
        kind, own = type(part), [value for value in vars(part).values() if type(value) in _CALLABLES]
        if not (is_known_class(kind) and all(map(is_known, own))) or code_of(frozenset((kind,))).foreign:
            return False
    return True


def torch_modes() -> list[type]:
    """The classes of torch's modes that this thread has entered, and that see every operation."""
    functions, operations = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    modes = [torch._C._get_function_stack_at(at) for at in range(functions)]
    modes += [torch._C._get_dispatch_stack_at(at) for at in range(operations)]
    return list(map(type, modes))


def multiplies_as_shipped() -> bool:
    """Whether linear layers multiply by torch's own code, and in the precision of their dtype."""
    return arithmetic_flags()[: len(_USUAL_FLAGS)] == _USUAL_FLAGS and not code_of(_LINEARS).foreign


def arithmetic_flags() -> tuple[Any, ...]:
    """Torch's global settings that change the sums of products and of attention on a CPU."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9
    precision = torch.get_float32_matmul_precision() if matmul is None else matmul.fp32_precision
    attention = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()  # apply to CPUs too
    return precision in ("highest", "none", "ieee"), torch.backends.mkldnn.enabled, *attention


def attention_code(model: Any, modules: Sequence[nn.Module]) -> list[Callable[..., Any]]:
    """The attention and mask functions that the modules of a model call according to its configuration."""
    common = model.config.get_text_config()._attn_implementation or "eager"
    layers = [module for module in modules if "layer_idx" in module.__dict__]
    own = [getattr(layer.__dict__.get("config"), "_attn_implementation", None) for layer in layers]
    kinds = {(type(layer).__module__, name or common) for layer, name in zip(layers, own, strict=True)}
    functions: list[Any] = [masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(common)]
    functions.append(
        moe.ALL_EXPERTS_FUNCTIONS.get(getattr(model.config.get_text_config(), "_experts_implementation", None))
    )
    for file, name in sorted(kinds):
        space = vars(sys.modules[file]) if file in sys.modules else {}
        registry = space.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        functions.append(registry.get(name, space.get("eager_attention_forward")))
        functions += [value for key, value in list(space.items()) if key.startswith("create_") and key.endswith("mask")]
    return [function for function in functions if function is not None]


def changed_caches() -> str:
    """The name of a function that replaces one of transformers' caches, or an empty string."""
    return _changed_in(_CACHES)


def changed_cache(cache: Any) -> str:
    """The same for a cache passed to a call, whose class or `update` may be a user's; empty without a cache."""
    if cache is None:
        return ""
    parts = [cache, *(getattr(cache, "layers", None) or ())]
    items = [item for part in parts for item in list(vars(part).items())]
    own = [name for name, value in items if callable(value) and not isinstance(value, type | torch.dtype)]
    return own[0] if own else _changed_in(frozenset(map(type, parts)))


def _changed_in(kinds: frozenset[type]) -> str:
    """A method added under a name that transformers' caches do not use is harmless: they never call it."""
    if not (foreign := code_of(kinds).foreign):
        return ""
    used = frozenset(re.findall(r"\w+", inspect.getsource(cache_utils)))
    spaces = [vars(base) for kind in kinds for base in kind.__mro__ if base is not object]
    names = {
        id(function): name for space in spaces for name, value in space.items() for function in callables_in(value)
    }
    added = {at for at, name in names.items() if not name.startswith("__") and name not in used}
    return next((name_of(function) for function in foreign if id(function) not in added), "")


def global_hooks() -> list[Any]:
    """Torch's hooks for all modules."""
    hooks = modules_of_torch._global_forward_hooks, modules_of_torch._global_forward_pre_hooks
    return [hook for registry in hooks for hook in registry.values()]


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks around the calls of a module."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return []
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def working_hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of a module, except those of transformers for recording outputs, which our passes do not request."""
    recording = "transformers.utils.output_capturing"
    return [hook for hook in hooks_of(module) if getattr(hook, "__module__", None) != recording]


def forward_under(module: nn.Module) -> Any:
    """The forward that accelerate or compressed-tensors wrapped to move tensors, else the one set on a module."""
    own = vars(module)
    return own.get("_old_forward", own.get("_original_forward_func", own.get("forward")))


def is_ours(function: Any) -> bool:
    """Whether a `forward` or another attribute belongs to this package, which sets them during a pass of any thread."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", "")).startswith("lookahead.")


def is_set_by_user(module: nn.Module) -> bool:
    """Whether a module has instance attributes that change how it is called and are not from this package."""
    return not all(is_ours(module.__dict__[name]) for name in _CALLS if name in module.__dict__)


def name_of(value: Any) -> str:
    """The name of a function, or the class of another object."""
    value = getattr(value, "func", value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))
