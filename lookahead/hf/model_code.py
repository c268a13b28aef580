"""The code that the passes of a model run: its identity, and whether transformers and torch ship it.

A verdict about a model, and a kernel that replaces some of its code, are valid only for that code. So both are bound to
the identity of every function that a pass can reach through a class, a module, a hook or a registry, and to the flags
that these functions read.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules import module as modules_of_torch
from transformers import Conv1D, masking_utils
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.utils.shipped import is_shipped

_PRIMITIVE = frozenset((bool, int, float, str, type(None)))
_DATA = _PRIMITIVE | {dict, list, set, frozenset, tuple, ModuleType}
_FUNCTIONS = FunctionType, BuiltinFunctionType, torch.Tensor
_SHARED: tuple[Any, ...] = (torch.nn.functional, sdpa_attention, masking_utils)  # every model's layers call these
_LINEARS = frozenset((nn.Linear, Conv1D))
_CALLS = ("forward", "_call_impl")  # instance attributes that change how a module is called
_PACKAGES = "torch", "transformers", "lookahead"
_USUAL_FLAGS = True, True
_RECORDS_OUTPUTS = "transformers.utils.output_capturing"


class Code(NamedTuple):
    """The functions that modules of some classes can call."""

    number: int  # constant while no function is replaced
    foreign: tuple[Any, ...]  # functions and other callables that neither transformers nor torch ships
    held: list[Any]  # keeps alive the objects whose ids make up the number


_known: dict[frozenset[type], Code] = {}


def code_of(classes: frozenset[type]) -> Code:
    """The code of modules of some classes: their methods, inherited ones included, and the globals of their files."""
    bases = list(dict.fromkeys(base for kind in classes for base in kind.__mro__ if base is not object))
    shared = _SHARED if any(issubclass(kind, nn.Module) for kind in classes) else ()
    own: list[Mapping[str, Any]] = [*map(vars, bases), *map(vars, shared)]
    spaces = own + [vars(module) if _is_shipped_in(module) else _called(kind) for kind, module in _files_of(classes)]
    values = [value for space in spaces for value in list(space.values()) if type(value) not in _DATA]
    held = values + [value.__code__ for value in values if type(value) is FunctionType]
    number = hash(tuple(map(id, held)))
    known = _known.get(classes)
    if known is None or known.number != number:
        called = [*own, *(_called(kind) for kind, _ in _files_of(classes))]
        found = [each for space in called for value in list(space.values()) for each in callables_in(value)]
        known = _known[classes] = Code(number, tuple(each for each in found if not is_shipped(each)), held)
    return known


def shipped_code(model: Any) -> dict[str, Any] | None:
    """The functions and classes that the passes of a model can reach, by location.

    None if anything else is involved: a hook, a compiled module, a `forward` set on a module, or code that is shipped
    neither by transformers and torch nor by this package.
    """
    modules = list(model.modules())
    kinds = frozenset(map(type, modules))
    attention = [each for functions in attention_code(model, modules) for each in functions]
    placed = [each for _, each in _hooks_of(modules)] + [vars(each)[name] for each in modules for name in set_on(each)]
    compiled = any(each._compiled_call_impl is not None for each in modules)
    foreign = [each for each in (*attention, *code_of(kinds).foreign) if not is_shipped(each, or_ours=True)]
    others = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _PACKAGES]
    if compiled or foreign or others or not all(map(is_ours, placed)):
        return None
    bases = {base for kind in kinds for base in kind.__mro__ if base is not object}
    spaces = {f"{base.__module__}.{base.__qualname__}": base for base in bases}
    spaces |= {each.__name__: each for each in (*_SHARED, *(module for _, module in _files_of(kinds)))}
    found = {
        f"{name}: {key}": value
        for name, space in sorted(spaces.items())
        for key, value in sorted(vars(space).items())
        if type(value) not in _DATA
    }
    return {**found, **{f"attention {at}": each for at, each in enumerate(attention)}}


def _files_of(classes: Iterable[type]) -> Iterator[tuple[type, ModuleType]]:
    for kind in classes:
        if kind.__module__ in sys.modules:
            yield kind, sys.modules[kind.__module__]


def _is_shipped_in(module: ModuleType) -> bool:
    """Whether a file belongs to torch or transformers. A user's may be a notebook, whose globals come and go."""
    return module.__name__.partition(".")[0] in ("torch", "transformers")


def _called(kind: type) -> dict[str, Any]:
    """The globals of a class's file that its methods name, and the globals that these name in turn."""
    space, found = vars(sys.modules[kind.__module__]), dict[str, Any]()
    waiting = [each for value in list(vars(kind).values()) for each in callables_in(value)]
    while waiting:
        function = inspect.unwrap(waiting.pop())
        for name in getattr(getattr(function, "__code__", None), "co_names", ()):
            value = space.get(name)
            # Other callables may be models, and must not be kept alive.
            if name not in found and isinstance(value, FunctionType | BuiltinFunctionType):
                found[name] = value
                waiting.append(value)
    return found


def callables_in(value: Any) -> Iterator[Any]:
    """The callables in a class attribute or a global. Classes are skipped: their own attributes count."""
    if isinstance(value, property):
        yield from filter(None, (value.fget, value.fset))
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif (callable(value) or hasattr(type(value), "__get__")) and not isinstance(value, type):
        yield value


def multiplies_as_shipped() -> bool:
    """Whether linear layers multiply by torch's own code, and in the precision of their dtype."""
    return arithmetic_flags()[: len(_USUAL_FLAGS)] == _USUAL_FLAGS and not code_of(_LINEARS).foreign


def arithmetic_flags() -> tuple[Any, ...]:
    """Torch's global settings that change the sums of products and of attention on a CPU."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9
    precision = torch.get_float32_matmul_precision() if matmul is None else matmul.fp32_precision
    attention = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()  # apply to CPUs too
    return precision in ("highest", "none", "ieee"), torch.backends.mkldnn.enabled, *attention


class AttentionCode(NamedTuple):
    """The attention and mask functions of a model's layers."""

    attention: list[Callable[..., Any]]
    masks: list[Callable[..., Any]]


def attention_code(model: Any, modules: Iterable[nn.Module]) -> AttentionCode:
    """The attention and mask functions that the modules of a model call according to its configuration."""
    common = model.config.get_text_config()._attn_implementation or "eager"
    layers = [each for each in modules if "layer_idx" in each.__dict__]
    own = [getattr(each.__dict__.get("config"), "_attn_implementation", None) for each in layers]
    kinds = {(type(each).__module__, name or common) for each, name in zip(layers, own, strict=True)}
    found: list[Any] = []
    masks: list[Any] = [masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(common)]
    for file, name in sorted(kinds):
        space = vars(sys.modules[file]) if file in sys.modules else {}
        registry = space.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        found.append(registry.get(name, space.get("eager_attention_forward")))
        masks += [value for key, value in list(space.items()) if key.startswith("create_") and key.endswith("_mask")]
    return AttentionCode(*([each for each in functions if each is not None] for functions in (found, masks)))


def changed_attention(model: nn.Module) -> str:
    """The name of a module that mixes tokens with a `forward` other than transformers ships for it, or an empty string.

    Such modules are attention, the modules around it, and rotary embeddings. A user's own class is not a change.
    """
    named = dict(model.named_modules())
    config: Any = model.config
    encoder = {*cast(Any, model).get_encoder().modules()} if config.is_encoder_decoder else set()  # runs before passes
    attention = [name for name, each in named.items() if "layer_idx" in each.__dict__]
    # The model's own `forward` is around a whole pass, and is compared like other code.
    around = {name[:end] for name in attention for end in range(1, len(name) + 1) if name[end:][:1] in ("", ".")}
    for name, module in named.items():
        placed = [key for key in set_on(module) if not is_ours(vars(module)[key])]
        own = [forward_under(module) if key == "forward" else vars(module)[key] for key in placed]
        is_own = not all(map(is_shipped, own))
        is_patched = type(module).__module__.startswith("transformers.") and not is_shipped(type(module).forward)
        mixes = name in around or "rope_type" in module.__dict__
        if mixes and module not in encoder and (is_own or is_patched):
            return name or type(module).__qualname__
    return ""


def odd_window(model: Any, modules: Iterable[nn.Module]) -> str:
    """A layer whose window differs from the configuration's, which masks follow, as text; or an empty string."""
    config = model.config.get_text_config(decoder=True)
    common, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    for each in modules:
        at = each.__dict__.get("layer_idx")
        if "sliding_window" not in each.__dict__ or not isinstance(at, int):
            continue
        expected = common if kinds is None or "sliding" in kinds[at] else None
        window = each.__dict__["sliding_window"] if each.__dict__.get("is_sliding", True) else None
        if window != expected:
            return f"layer {at} has a sliding_window of {window} instead of {expected}"
    return ""


class Version(NamedTuple):
    """A number for the weights and the code of a pass, and references to the objects that it was computed from.

    The references keep the ids from being reused, without keeping weights and code alive.
    """

    number: int
    references: list[Any]
    users: list[str]  # the names of functions that neither transformers, torch nor this package ships


def version_of(model: Any) -> Version:
    """A version that changes with a model's weights, and with the code and the flags of its passes.

    The code is that of its classes and their files, its hooks and torch's global hooks, registered attention, and a
    `forward` set on a module. The flags are the plain values in the configuration and in attention layers, the values
    that hooks and user functions read, autocast, and torch's arithmetic settings. Every in-place operation increments
    the version of a tensor.
    """
    modules = list(model.modules())
    # Offloaded weights are other objects after every pass or access; inference tensors have no version.
    held = [each._parameters for each in modules if isinstance(each._parameters, dict)]
    weights = [each for parameters in held for each in parameters.values() if each is not None]
    weights = [each for each in weights if not each.is_meta and not each.is_inference()]
    owns = [(at, vars(each)[name]) for at, each in enumerate(modules) for name in set_on(each)]
    owns = [(at, each) for at, each in owns if not is_ours(each)]
    compiled = [each for module in modules if (each := module._compiled_call_impl) is not None]
    hooks = [(at, each) for at, each in _hooks_of(modules) if not is_ours(each)]
    placed = [each for _, each in (*owns, *hooks)]
    attention = [each for functions in attention_code(model, modules) for each in functions]
    kinds = frozenset(map(type, modules))
    foreign = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _PACKAGES]
    code = code_of(kinds)
    users = [each for each in (*placed, *attention, *code.foreign) if not is_shipped(each, or_ours=True)]
    configs = {id(each): each for each in (model.config, model.config.get_text_config())}.values()
    flags = [
        [_plain(value) for each in configs for value in list(vars(each).values())],
        [
            [value for value in list(each.__dict__.values()) if type(value) in _PRIMITIVE]
            for each in modules
            if "layer_idx" in each.__dict__ or "is_causal" in each.__dict__
        ],
        [(each["rope_type"], each.get("original_max_seq_len")) for each in map(vars, modules) if "rope_type" in each],
        [at for at, _ in (*owns, *hooks)],
        [*map(_switches_of, users)],
        [
            [
                _size_of(value)
                for value in (*vars(each).values(), *vars(type(each)).values())
                if type(value) in _PRIMITIVE
            ]
            for each in (modules if foreign else ())
            if type(each) in foreign
        ],
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        arithmetic_flags(),
    ]
    codes = [each for _, each in owns] + [_code_in(each) for _, each in hooks]
    # Packed weights are buffers. Their versions do not count, since a quantizer may count calls in a buffer.
    packed = [each for module in modules if type(module) in foreign for each in module._buffers.values()]
    references = [_reference(each) for each in (*weights, *codes, *compiled, *attention, *packed)]
    versions = [each._version for each in weights]
    return Version(
        hash((code.number, *map(id, references), *versions, repr(flags))), [*references, code], [*map(_name_of, users)]
    )


def _hooks_of(modules: Sequence[nn.Module]) -> Iterator[tuple[int, Any]]:
    """The hooks around the calls of modules, with the module's index; -1 for torch's global hooks."""
    for at, module in enumerate(modules):
        if module._forward_hooks or module._forward_pre_hooks:
            yield from ((at, hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
    for hooks in (modules_of_torch._global_forward_hooks, modules_of_torch._global_forward_pre_hooks):
        yield from ((-1, hook) for hook in list(hooks.values()))


def has_global_hooks() -> bool:
    """Whether torch has hooks for all modules."""
    return bool(modules_of_torch._global_forward_hooks or modules_of_torch._global_forward_pre_hooks)


def pre_hooks_of(module: nn.Module) -> list[Any]:
    """The forward pre-hooks of a module."""
    return list(module._forward_pre_hooks.values())


def user_hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of a module, except those of transformers for recording outputs, which our passes do not request."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in hooks if getattr(hook, "__module__", None) != _RECORDS_OUTPUTS]


def edits_inputs(model: nn.Module) -> bool:
    """Whether a user's hook sees the keyword inputs of a module, including masks."""
    hooked = ((each._forward_pre_hooks, each._forward_pre_hooks_with_kwargs) for each in model.modules())
    return any(not is_ours(hooks[key]) for hooks, shown in hooked for key in shown if key in hooks)


def forward_under(module: nn.Module) -> Any:
    """The forward that accelerate or compressed-tensors wrapped to move tensors, else the one set on a module."""
    own = vars(module)
    return own.get("_old_forward", own.get("_original_forward_func", own.get("forward")))


def is_ours(function: Any) -> bool:
    """Whether a hook or a `forward` belongs to this package, which sets them during a pass of any thread."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", "")).startswith("lookahead.")


def set_on(module: nn.Module) -> list[str]:
    """The instance attributes of a module that change how it is called."""
    return [name for name in _CALLS if name in module.__dict__]


def is_set_by_user(module: nn.Module) -> bool:
    """Whether a module has such attributes that are not from this package."""
    return not all(is_ours(module.__dict__[name]) for name in set_on(module))


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)  # the same object while one is alive
    except TypeError:
        return value


def _code_in(hook: Any) -> Any:
    """The code that identifies a hook: one that is redefined around every call of `generate` keeps its code."""
    hook = getattr(hook, "func", hook)
    hook = getattr(hook, "__func__", hook)
    return getattr(hook, "__code__", type(hook))


def _plain(value: Any) -> Any:
    """A comparable form of a configuration value."""
    return value if type(value) in _PRIMITIVE or isinstance(value, dict | list | tuple) else id(value)


def _switches_of(function: Any, depth: int = 1) -> list[Any]:
    """The values that a user's function reads and that may decide how it treats a pass, as far as they are visible.

    These are strings, booleans, the magnitude of numbers such as a strength, and the functions that it calls.
    """
    given = (*getattr(function, "args", ()), *getattr(function, "keywords", {}).values())  # of a partial
    function = getattr(function, "func", function)
    owner = getattr(function, "__self__", None if isinstance(function, _FUNCTIONS) else function)
    function = getattr(function, "__func__", function)
    values = [*given, *([] if isinstance(owner, type) else getattr(owner, "__dict__", {}).values())]
    if type(function) is FunctionType:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                values.append(cell.cell_contents)
        values += [function.__globals__.get(name) for name in function.__code__.co_names]
        values += function.__defaults__ or ()
    called = [each for each in values if type(each) is FunctionType]
    codes = [id(each.__code__) for each in called]
    deeper = [_switches_of(each, depth - 1) for each in called if depth and not is_shipped(each)]
    return [codes, deeper, [_size_of(each) for each in values if type(each) in _PRIMITIVE]]


def _size_of(value: Any) -> Any:
    """A plain value; for a number its sign and rough magnitude, so that a counter seldom changes it."""
    if type(value) not in (int, float):
        return value
    return (value > 0) - (value < 0), math.frexp(min(abs(value), 1e300))[1] // 3 if value == value else None
