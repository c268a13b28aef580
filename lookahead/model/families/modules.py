"""Operations by the names that most families give to the modules."""

from __future__ import annotations

from typing import Any

from lookahead.model.families.operations import (
    Mlp,
    Norm,
    Product,
    Recurrence,
    Rope,
    SelfAttention,
    UndeclaredError,
    sizes_of,
)


def whole(linear: Any) -> Product:
    """The product with all outputs of a linear layer."""
    return Product(linear, 0, sizes_of(linear)[1])


def split(linear: Any, *outputs: int) -> tuple[Product, ...]:
    """The products with consecutive outputs of a linear layer."""
    firsts = [sum(outputs[:at]) for at in range(len(outputs))]
    if sum(outputs) != sizes_of(linear)[1]:
        raise UndeclaredError(f"{sizes_of(linear)[1]} outputs are not {' + '.join(map(str, outputs))}")
    return tuple(Product(linear, *place) for place in zip(firsts, outputs, strict=True))


def attention(
    module: Any, norms: tuple[Norm, ...] = (), rope: Rope | None = None, output: str = "o_proj", **options: Any
) -> SelfAttention:
    """Attention with a linear layer each for queries, keys, values and the output.

    Args:
        module: The attention layer, with `q_proj`, `k_proj`, `v_proj`, `head_dim` and `scaling`.
        norms: Norms of queries and keys.
        rope: The rotary embedding; of whole heads if None.
        output: The name of the linear layer of the output.
        **options: What it passes to the registered attention function, besides `dropout` and `scaling`.
    """
    query, key, value, last = (whole(getattr(module, name)) for name in ("q_proj", "k_proj", "v_proj", output))
    options = {"dropout": 0.0, "scaling": module.scaling, **options}
    return SelfAttention(module, query, key, value, last, options, rope or Rope("", module.head_dim), norms)


def recurrence(
    module: Any, inputs: tuple[str, ...], gates: tuple[str, ...], output: str, cache: str, inner: tuple[str, ...]
) -> Recurrence:
    """A mixer with states, by the names of its submodules; its attributes may be replaced during a call.

    Args:
        module: The mixer.
        inputs: Linear layers of its input.
        gates: Those with few outputs.
        output: The linear layer of its output.
        cache: See `Recurrence`.
        inner: Other submodules.
    """
    own = module._modules
    products = tuple(whole(own[name]) for name in inputs)
    few, others = (tuple(own[name] for name in names) for names in (gates, inner))
    return Recurrence(module, products, few, whole(own[output]), cache, others)


def gated(module: Any) -> Mlp:
    """An MLP with `gate_proj`, `up_proj`, `down_proj` and `act_fn`."""
    return Mlp(module, whole(module.gate_proj), whole(module.up_proj), whole(module.down_proj), module.act_fn)


def plain(module: Any) -> Mlp:
    """An MLP with `up_proj`, `act_fn` and `down_proj`, one after the other."""
    return Mlp(module, whole(module.up_proj), None, whole(module.down_proj), module.act_fn)


def gated_at_once(module: Any, both: Any, down: Any, activation: Any) -> Mlp:
    """An MLP whose linear layer `both` has the outputs of the gate, and then those of its factor."""
    gate, up = split(both, down.in_features, down.in_features)
    return Mlp(module, gate, up, whole(down), activation)
