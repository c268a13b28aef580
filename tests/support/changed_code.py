"""Changes that users make to a model's code, hooks and flags. Each is undone at the end of its block."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationMixin, MaxLengthCriteria
from transformers.activations import SiLUActivation
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

Change = Callable[[Any], AbstractContextManager[Any]]
CHANGES: dict[str, Change] = {}


def change(kind: Callable[[Any], Iterator[None]]) -> Callable[[Any], Iterator[None]]:
    CHANGES[kind.__name__.replace("_", " ")] = contextmanager(kind)
    return kind


@contextmanager
def patched(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by `wrap` of it within the block. An inherited attribute is inherited again afterwards."""
    is_own, own = name in vars(owner), getattr(owner, name)
    setattr(owner, name, wrap(own))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, own)
        else:
            delattr(owner, name)


def code_of(model: Any) -> Any:
    """The module of transformers that defines the model."""
    return sys.modules[type(model).__module__]


def kind_of(model: Any, part: str) -> Any:
    """A class of the model's family, such as its `MLP`."""
    return getattr(code_of(model), type(model).__name__.removesuffix("ForCausalLM") + part)


def scaled(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function with slightly larger results."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        return tuple(map(grown, out)) if isinstance(out, tuple) else grown(out)

    return forward


def grown(out: Any) -> Any:
    return out * 1.3 if isinstance(out, Tensor) else out


def scaled_under_its_name(own: Callable[..., Any]) -> Callable[..., Any]:
    """The same with `functools.wraps`, which copies the name of the wrapped function."""
    return functools.wraps(own)(scaled(own))


METHODS = ("MLP", "RMSNorm", "Attention", "DecoderLayer", "Model", "RotaryEmbedding")
GLOBALS = ("apply_rotary_pos_emb", "rotate_half", "repeat_kv", "eager_attention_forward")
TORCH = ("linear", "silu", "scaled_dot_product_attention")


def _method(part: str, wrap: Any) -> Change:
    def scaled_method(model: Any) -> AbstractContextManager[None]:
        first = part in ("DecoderLayer", "Model")
        return patched(kind_of(model, part), "forward", longer_by_a_vector if first else wrap)

    return scaled_method


def longer_by_a_vector(own: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose hidden states are shifted by a vector."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        states = getattr(out, "last_hidden_state", out)
        states += torch.linspace(-1, 1, states.shape[-1], dtype=torch.float32).to(states.dtype)
        return out

    return forward


for _part in METHODS:
    CHANGES[f"class method of {_part}"] = _method(_part, scaled)
CHANGES["class method of MLP under its name"] = _method("MLP", scaled_under_its_name)
for _name in GLOBALS:
    CHANGES[f"global {_name}"] = lambda model, name=_name: patched(code_of(model), name, scaled)
for _name in TORCH:
    CHANGES[f"torch {_name}"] = lambda model, name=_name: patched(nn.functional, name, scaled)
CHANGES["linear layers of torch"] = lambda model: patched(nn.Linear, "forward", scaled)
CHANGES["activations of transformers"] = lambda model: patched(SiLUActivation, "forward", scaled)
CHANGES["a partial as a method"] = lambda model: patched(
    kind_of(model, "MLP"), "forward", lambda own: _Bound(scaled(own))
)


class _Bound:
    """A callable object that binds like a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, owner: Any, kind: Any) -> Any:
        return functools.partial(self.function, owner)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


@change
def the_code_of_a_method(model: Any) -> Iterator[None]:
    """The function object stays the same, with other code."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)

    own = kind_of(model, "MLP").forward
    while hasattr(own, "__wrapped__"):
        own = own.__wrapped__
    code, own.__code__ = own.__code__, forward.__code__
    try:
        yield
    finally:
        own.__code__ = code


@change
def attention_registered_anew(model: Any) -> Iterator[None]:
    def attend(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)[0] * 1.3, None

    name, mapping = model.config._attn_implementation, AttentionInterface._global_mapping
    had, own = name in mapping, mapping.get(name)
    AttentionInterface.register(name, scaled(own) if own else attend)
    try:
        yield
    finally:
        if had:
            AttentionInterface.register(name, own)
        else:
            del mapping[name]


@change
def masks_registered_anew(model: Any) -> Iterator[None]:
    """Every token attends only to the last four tokens."""

    def near(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.pop("mask_function")
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(*args, mask_function=lambda b, h, q, kv: mask(b, h, q, kv) & (kv > q - 4), **kwargs)

    mapping = AttentionMaskInterface._global_mapping
    own = mapping["sdpa"]
    AttentionMaskInterface.register("sdpa", near)
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", own)


def _loop(order: Callable[[Any], list[Any]]) -> Change:
    """A model's `forward` that runs its layers in another order."""

    def forward(self: Any, **kwargs: Any) -> Any:
        kept = self.layers
        self.layers = nn.ModuleList(order(kept))
        try:
            return type(self).forward(self, **kwargs)
        finally:
            self.layers = kept

    return lambda model: patched(model.model, "forward", lambda own: MethodType(forward, model.model))


@change
def a_loop_with_a_steering_vector(model: Any) -> Iterator[None]:
    """transformers' own loop, rewritten, with a vector added after a layer."""
    from transformers import DynamicCache
    from transformers.masking_utils import create_causal_mask
    from transformers.modeling_outputs import BaseModelOutputWithPast

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any):
        hidden, past = self.embed_tokens(input_ids), kwargs.pop("past_key_values", None)
        past = DynamicCache(config=self.config) if past is None else past
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1])[None] + past.get_seq_length()
        mask = create_causal_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, past_key_values=past,
            position_ids=position_ids,
        )  # fmt: skip
        places = self.rotary_emb(hidden, position_ids=position_ids)
        for at, layer in enumerate(self.layers):
            hidden = layer(
                hidden, attention_mask=mask, position_embeddings=places, position_ids=position_ids,
                past_key_values=past, **kwargs,
            )  # fmt: skip
            if at == 1:
                hidden = hidden + torch.linspace(-2, 2, hidden.shape[-1], dtype=torch.float32).to(hidden.dtype)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past)

    with patched(model.model, "forward", lambda own: MethodType(forward, model.model)):
        yield


CHANGES["a loop that leaves a layer out"] = _loop(lambda layers: [layers[0], layers[2]])
CHANGES["a loop from the last layer to the first"] = _loop(lambda layers: layers[::-1])


@change
def fewer_layers_by_the_configuration(model: Any) -> Iterator[None]:
    with patched(model.config, "num_hidden_layers", lambda own: own - 1):
        yield


@change
def a_scale_of_attention(model: Any) -> Iterator[None]:
    with patched(model.model.layers[1].self_attn, "scaling", lambda own: own * 2):
        yield


@change
def an_epsilon(model: Any) -> Iterator[None]:
    with patched(model.model.layers[1].input_layernorm, "variance_epsilon", lambda own: 0.5):
        yield


def _states(out: Any) -> Tensor:
    """The hidden states that a module returns, not a copy."""
    states = getattr(out, "logits", getattr(out, "last_hidden_state", out))
    return states[0] if isinstance(states, tuple) else states


def _at_the_end(module: Any, args: Any, out: Any) -> None:
    """Change only the last token of a pass, as steering code does."""
    states = _states(out)
    states[:, -1] = states[:, -1].roll(7, -1)


def _everywhere(module: Any, args: Any, out: Any) -> None:
    states = _states(out)
    states[:] = states.roll(7, -1)


PLACES: dict[str, Callable[[Any], Any]] = {
    "the model": lambda model: model,
    "its body": lambda model: model.model,
    "a layer": lambda model: model.model.layers[1],
    "an attention": lambda model: model.model.layers[1].self_attn,
    "an MLP": lambda model: model.model.layers[1].mlp,
    "a norm": lambda model: model.model.layers[1].input_layernorm,
    "an activation": lambda model: model.model.layers[1].mlp.act_fn,
    "a linear layer": lambda model: model.model.layers[1].self_attn.v_proj,
    "the embedding": lambda model: model.model.embed_tokens,
    "the head": lambda model: model.lm_head,
}


def _hooked(place: Callable[[Any], Any], hook: Any) -> Change:
    @contextmanager
    def hooked(model: Any) -> Iterator[None]:
        handle = place(model).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    return hooked


for _name, _place in PLACES.items():
    CHANGES[f"a hook on {_name}, everywhere"] = _hooked(_place, _everywhere)
    CHANGES[f"a hook on {_name}, at the end"] = _hooked(_place, _at_the_end)


@change
def a_hook_for_all_modules(model: Any) -> Iterator[None]:
    norms = kind_of(model, "RMSNorm")
    handle = register_module_forward_hook(lambda module, args, out: out * 1.3 if isinstance(module, norms) else None)
    yield
    handle.remove()


@change
def a_hook_before_all_modules(model: Any) -> Iterator[None]:
    def doubled(module: Any, args: Any) -> Any:
        return (args[0] * 2,) if isinstance(module, SiLUActivation) else None

    handle = register_module_forward_pre_hook(doubled)
    yield
    handle.remove()


@change
def a_mode_of_functions(model: Any) -> Iterator[None]:
    class Grows(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 1.3 if func is nn.functional.linear else out

    with Grows():
        yield


@change
def a_mode_of_operators(model: Any) -> Iterator[None]:
    class Grows(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 1.3 if func is torch.ops.aten.silu.default else out

    with Grows():
        yield


class Switched:
    """A hook that is registered early and switched on later."""

    def __init__(self) -> None:
        self.strength = 0

    def __call__(self, module: Any, args: Any, out: Any) -> None:
        states = _states(out)
        states[:, -1] += self.strength * torch.linspace(-1, 1, states.shape[-1], dtype=torch.float32).to(states.dtype)


def _patch(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Change:
    return lambda model: patched(owner, name, wrap)


def _grown_values(own: Callable[..., Any]) -> Callable[..., Any]:
    """The `update` of a cache with slightly larger values."""

    def update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, keys, values * 1.3, *args, **kwargs)

    return update


def _ending_early(own: Callable[..., Any]) -> Callable[..., Any]:
    """A criterion that ends all outputs at 15 tokens."""

    def ends(self: Any, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return own(self, input_ids, scores, **kwargs) | (input_ids.shape[1] >= 15)

    return ends


def _reversed_inputs(own: Callable[..., Any]) -> Callable[..., Any]:
    """Inputs with other tokens."""

    def prepare(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = own(self, input_ids, *args, **kwargs)
        inputs["input_ids"] = (inputs["input_ids"] + 1) % 101
        return inputs

    return prepare


CHANGES["layers of caches"] = _patch(DynamicLayer, "update", _grown_values)
CHANGES["caches"] = _patch(DynamicCache, "update", _grown_values)
CHANGES["a criterion of transformers"] = _patch(MaxLengthCriteria, "__call__", _ending_early)
CHANGES["inputs of all models"] = _patch(GenerationMixin, "prepare_inputs_for_generation", _reversed_inputs)
CHANGES["inputs of a class"] = lambda model: patched(type(model), "prepare_inputs_for_generation", _reversed_inputs)
CHANGES["a loop of generate"] = _patch(GenerationMixin, "_prefill", scaled)


@change
def another_kernel_of_attention(model: Any) -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


@change
def products_without_oneDNN(model: Any) -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield
