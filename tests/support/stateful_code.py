"""Users' code that keeps a state, and the places where it hangs: what it saw of a call is kept in `seen`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

Seen = list[tuple[tuple[int, ...], str]]
Edit = Callable[[Tensor], Tensor]


def steered(x: Tensor) -> Tensor:
    return x + 40 * torch.linspace(-1, 1, x.shape[-1], dtype=torch.float32).to(x.dtype)


def from_the_fourth_to_the_eighth_call() -> Edit:
    calls = []

    def edit(x: Tensor) -> Tensor:
        calls.append(1)
        return steered(x) if 4 <= len(calls) <= 8 else x

    return edit


def a_flag_after_nine_calls() -> Edit:
    class Flag:
        calls, is_set = 0, False

        def __call__(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.is_set = self.is_set or self.calls >= 9
            return steered(x) if self.is_set else x

    return Flag()


def a_counter_in_a_tensor() -> Edit:
    count = torch.zeros(())

    def edit(x: Tensor) -> Tensor:
        count.add_(1)
        return steered(x) if count.item() % 3 == 0 else x

    return edit


def a_nonlocal_number() -> Edit:
    tokens = 0

    def edit(x: Tensor) -> Tensor:
        nonlocal tokens
        tokens += x.shape[1]
        return steered(x) if tokens % 5 == 0 else x

    return edit


def an_attribute_of_a_class() -> Edit:
    class Counter:
        calls = 0

        def edit(self, x: Tensor) -> Tensor:
            Counter.calls += 1
            return steered(x) if Counter.calls % 4 == 0 else x

    return Counter().edit


def a_running_mean() -> Edit:
    means: list[Tensor] = []

    def edit(x: Tensor) -> Tensor:
        means.append(x[:, -1:].detach().clone())
        return x + torch.stack(means).mean(0)

    return edit


def a_norm_of_the_last_call() -> Edit:
    last: list[Tensor] = []

    def edit(x: Tensor) -> Tensor:
        before = last.pop() if last else x.new_zeros(())
        last.append(x.float().norm().to(x.dtype))
        return x + before * 0.05

    return edit


STATES: dict[str, Callable[[], Edit]] = {
    made.__name__.replace("_", " "): made
    for made in (
        from_the_fourth_to_the_eighth_call,
        a_flag_after_nine_calls,
        a_counter_in_a_tensor,
        a_nonlocal_number,
        an_attribute_of_a_class,
        a_running_mean,
        a_norm_of_the_last_call,
    )
}
STATES["a recorder"] = lambda: lambda x: x


def recorded(edit: Edit, seen: Seen) -> Edit:
    """The edit, with the shape and a sum of every tensor that it was shown."""

    def run(x: Tensor) -> Tensor:
        seen.append((tuple(x.shape), f"{float(x.float().sum()):.2f}"))
        return edit(x)

    return run


def _hook(place: Callable[[Any], Any]) -> Callable[[Any, Edit], Any]:
    @contextmanager
    def hang(model: Any, edit: Edit) -> Iterator[None]:
        handle = place(model).register_forward_hook(lambda module, args, out: edit(out))
        yield
        handle.remove()

    return hang


@contextmanager
def _pre_hook(model: Any, edit: Edit) -> Iterator[None]:
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (edit(args[0]), *args[1:]))
    yield
    handle.remove()


@contextmanager
def _global_hook(model: Any, edit: Edit) -> Iterator[None]:
    mlp = model.model.layers[0].mlp
    handle = register_module_forward_hook(lambda module, args, out: edit(out) if module is mlp else None)
    yield
    handle.remove()


@contextmanager
def _wrapped_module(model: Any, edit: Edit) -> Iterator[None]:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return edit(self.inner(x))

    layer = model.model.layers[1]
    own, layer.mlp = layer.mlp, Wrapped(layer.mlp)
    yield
    layer.mlp = own


@contextmanager
def _forward(model: Any, edit: Edit) -> Iterator[None]:
    mlp = model.model.layers[1].mlp
    mlp.forward = MethodType(lambda self, x: edit(type(self).forward(self, x)), mlp)
    yield
    del mlp.forward


@contextmanager
def _class_method(model: Any, edit: Edit) -> Iterator[None]:
    kind, last = type(model.model.layers[1].mlp), model.model.layers[1].mlp
    own = kind.forward
    kind.forward = lambda self, x: edit(own(self, x)) if self is last else own(self, x)
    yield
    kind.forward = own


@contextmanager
def _attribute(model: Any, edit: Edit) -> Iterator[None]:
    """A function among the attributes of a module that its code calls: the activation."""
    mlp = model.model.layers[1].mlp
    own = mlp._modules.pop("act_fn")
    mlp.__dict__["act_fn"] = lambda x: edit(own(x))
    yield
    del mlp.__dict__["act_fn"]
    mlp.act_fn = own


@contextmanager
def _typed_in(model: Any, edit: Edit) -> Iterator[None]:
    """A method that was typed into an interpreter, which has no file."""
    kind, last = type(model.model.layers[1].mlp), model.model.layers[1].mlp
    own, space = kind.forward, {"edit": edit, "last": last, "own": kind.forward, "__name__": "__main__"}
    exec("def forward(self, x):\n    return edit(own(self, x)) if self is last else own(self, x)", space)
    kind.forward = space["forward"]
    yield
    kind.forward = own


@contextmanager
def _torch_function(model: Any, edit: Edit) -> Iterator[None]:
    own = torch.rsqrt
    torch.rsqrt = lambda x: own(x) if x.shape[1] == 0 else edit(own(x).expand(*x.shape[:-1], 2)).narrow(-1, 0, 1)
    yield
    torch.rsqrt = own


@contextmanager
def _tensor_method(model: Any, edit: Edit) -> Iterator[None]:
    own = torch.Tensor.pow
    torch.Tensor.pow = lambda x, by: edit(own(x, by))  # norms take squares by it
    yield
    torch.Tensor.pow = own


class Called:
    """An object that is no module, and is called by one."""

    def __init__(self, own: Any, edit: Edit) -> None:
        self.own, self.edit = own, edit

    def __call__(self, x: Tensor) -> Tensor:
        return self.edit(self.own(x))


@contextmanager
def _called_object(model: Any, edit: Edit) -> Iterator[None]:
    mlp = model.model.layers[1].mlp
    own = mlp._modules.pop("act_fn")
    mlp.act_fn = Called(own, edit)
    yield
    del mlp.act_fn
    mlp.act_fn = own


@contextmanager
def _hook_of_accelerate(model: Any, edit: Edit) -> Iterator[None]:
    hook: Any = ModelHook()
    hook.post_forward = lambda module, out: edit(out)
    add_hook_to_module(model.model.layers[1].mlp, hook)
    yield
    remove_hook_from_module(model.model.layers[1].mlp)


PLACES: dict[str, Callable[[Any, Edit], Any]] = {
    "a hook on an MLP": _hook(lambda model: model.model.layers[1].mlp),
    "a hook on a product": _hook(lambda model: model.model.layers[0].self_attn.o_proj),
    "a hook on the embedding": _hook(lambda model: model.model.embed_tokens),
    "a hook on the head": _hook(lambda model: model.lm_head),
    "a pre-hook": _pre_hook,
    "a hook on all modules": _global_hook,
    "a module of a class": _wrapped_module,
    "a forward": _forward,
    "a method of a class": _class_method,
    "an attribute": _attribute,
    "a method without a file": _typed_in,
    "a function of torch": _torch_function,
    "a method of tensors": _tensor_method,
    "an object that is called": _called_object,
    "a hook of accelerate": _hook_of_accelerate,
}
