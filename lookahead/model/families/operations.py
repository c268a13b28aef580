"""The operations of a decoder layer, in which the families of models are declared.

A layer is a sequence of residuals: `hidden + factor * after(mixer(before(hidden)))`. A declaration names the modules
whose weights an operation reads, and computes nothing. `lookahead.backend.cpu` turns it into the jobs of a pass, and
compares these with the model's own code once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from transformers import Conv1D

from lookahead.kernels.norm_rows import LAYER, PLUS_ONE, ROUNDED, WIDE

__all__ = ["LAYER", "PLUS_ONE", "ROUNDED", "WIDE"]


class UndeclaredError(Exception):
    """A layer is set up in a way that its declaration leaves out; the message says how."""


class Norm(NamedTuple):
    """An RMSNorm, or a layer norm.

    Attributes:
        module: It has the `weight`, and maybe a `bias`.
        kind: `ROUNDED`, `WIDE`, `PLUS_ONE` or `LAYER` of `lookahead.kernels.layer_ops`.
        epsilon: The name of its epsilon.
        ones: The weight of a module without one.
    """

    module: Any
    kind: int = ROUNDED
    epsilon: str = "variance_epsilon"
    ones: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """`[size]`."""
        weight: Tensor = self.module._parameters["weight"] if self.ones is None else self.ones
        return weight

    @property
    def bias(self) -> Tensor | None:
        """`[size]`, of a layer norm."""
        return self.module._parameters.get("bias") if self.kind == LAYER else None

    @property
    def eps(self) -> float:
        """Added to the mean square."""
        return float(getattr(self.module, self.epsilon))


def sizes_of(linear: Any) -> tuple[int, int]:
    """The inputs and the outputs of a linear layer."""
    if isinstance(linear, Conv1D):
        return linear.nx, linear.nf
    return linear.in_features, linear.out_features


class Product(NamedTuple):
    """A product with some outputs of a linear layer.

    Attributes:
        module: The linear layer.
        first: Its first output that counts.
        outputs: The number of outputs.
    """

    module: Any
    first: int
    outputs: int


class Rope(NamedTuple):
    """A rotary embedding.

    Attributes:
        kind: The type of layers that the rotary module takes; empty if it takes none.
        size: Numbers of a head that are rotated.
        shares: Whether both numbers of a pair share a cosine.
        is_wide: Whether cosines are float32, and only results are rounded.
        are_neighbours: Whether the numbers of a pair are side by side; else one is in each half.
    """

    kind: str
    size: int
    shares: bool = False
    is_wide: bool = False
    are_neighbours: bool = False

    @property
    def angles(self) -> int:
        """Cosines of a token."""
        return self.size // 2 if self.shares else self.size


class SelfAttention(NamedTuple):
    """Attention to the KV cache.

    Attributes:
        module: The attention layer.
        query: The product of the queries.
        key: The product of the keys; None if they are of the first product, or another layer's.
        value: The product of the values; None if they are the keys before their norm, or another layer's.
        output: The product of what was attended to.
        options: What the layer passes to the registered attention function.
        rope: The rotary embedding; None for none.
        norms: Of queries, keys and values, whole or by head; may be empty.
        norms_last: Whether norms come after the rotary embedding.
        has_gate: Whether the first product has a query of each head and then its gate, whose sigmoid is the factor of
            what the head attended to.
        gates: Linear layers of its input with an output for each head, whose sigmoid is such a factor.
        has_keys: Whether the first product has a query of each head, its key and its value.
        source: The layer whose keys and values it reads; None for its own.
        shared: The name under which layers share keys and values; empty if this one neither reads nor lends any.
        reach: The first position at which it computes otherwise than declared; None if there is none.
    """

    module: Any
    query: Product
    key: Product | None
    value: Product | None
    output: Product
    options: dict[str, Any]
    rope: Rope | None
    norms: tuple[Norm, ...] = ()
    norms_last: bool = False
    has_gate: bool = False
    has_keys: bool = False
    source: int | None = None
    shared: str = ""
    reach: int | None = None
    gates: tuple[Any, ...] = ()

    @property
    def width(self) -> int:
        """Numbers of the queries of a token."""
        return self.query.outputs // (2 if self.has_gate else 3 if self.has_keys else 1)

    @property
    def dim(self) -> int:
        """Numbers of a head."""
        return int(getattr(self.module, "head_dim", None) or self.module.head_size)

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of queries, and of keys and values."""
        heads = self.width // self.dim
        if self.key is not None:
            return heads, self.key.outputs // self.dim
        return heads, heads if self.has_keys else heads // self.module.num_key_value_groups

    @property
    def inputs(self) -> tuple[Product, ...]:
        """The products of its input."""
        return tuple(part for part in (self.query, self.key, self.value) if part is not None)

    @property
    def products(self) -> tuple[Product, ...]:
        """All products."""
        return *self.inputs, self.output

    @property
    def parts(self) -> tuple[Any, ...]:
        """The modules whose code it replaces, without linear layers and norms."""
        return (self.module,)


class Mlp(NamedTuple):
    """`down(activation(gate(x)) * up(x))`; without `up`, `down(activation(gate(x)))`.

    Attributes:
        module: The MLP.
        gate: The product of the activated numbers.
        up: The product of their factors; None for a plain MLP.
        down: The product of the result.
        activation: The module of the activation.
        is_beside: Whether the layer's second input takes the place of `up(x)`.
    """

    module: Any
    gate: Product
    up: Product | None
    down: Product
    activation: Any
    norms: tuple[Norm, ...] = ()
    is_beside: bool = False

    @property
    def products(self) -> tuple[Product, ...]:
        """All products."""
        return (self.gate, self.down) if self.up is None else (self.gate, self.up, self.down)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The modules whose code it replaces, without linear layers and norms."""
        return self.module, self.activation


class ClampedGlu(NamedTuple):
    """`gate * sigmoid(factor * gate) * (up + 1)`, of gates up to `limit` and of `up` from `-limit` to `limit`."""

    limit: float
    factor: float


class Experts(NamedTuple):
    """The weighted sum of the results of the experts that a router chooses for each token.

    Attributes:
        module: The mixture.
        router: It has a `weight`, `[experts, inputs]`, and maybe a `bias`.
        experts: The module of `gate_up_proj`, `[experts, 2 * inner, inputs]`, and `down_proj`, or of blocks.
        chosen: Experts per token.
        route: The factors and the indices of the chosen experts, `[tokens, chosen]`, for logits `[tokens, experts]`.
        activation: The module of the activation, or a clamped GLU.
        is_wide: Whether weighted results are added in float32 without being rounded.
        is_transposed: Whether weights are `[experts, inputs, outputs]`, where outputs for gates and factors alternate.
        shared: The expert that gets every token; its result is added.
        gates: A linear layer with one output, if the sigmoid of it is the factor of that result.
        has_wide_router: Whether the router multiplies in float32.
        of_router: Submodules of the router, which `route` calls.
    """

    module: Any
    router: Any
    experts: Any
    chosen: int
    route: Callable[[Tensor], tuple[Tensor, Tensor]]
    activation: Any
    is_wide: bool = False
    is_transposed: bool = False
    norms: tuple[Norm, ...] = ()
    shared: Mlp | None = None
    gates: tuple[Any, ...] = ()
    has_wide_router: bool = False
    of_router: tuple[Any, ...] = ()

    @property
    def products(self) -> tuple[Product, ...]:
        """Those of the shared expert."""
        return () if self.shared is None else self.shared.products

    @property
    def is_quantized(self) -> bool:
        """Whether the weights of the experts are blocks."""
        return "gate_blocks" in self.experts._parameters

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of experts, and the numbers of their inner and of their outer rows."""
        if self.is_quantized:
            return self.experts.num_experts, self.experts.intermediate_dim, self.experts.hidden_dim
        count, both, size = self.weights[0].shape
        return count, both // 2, size

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights of the experts."""
        return tuple(self.experts._parameters) if self.is_quantized else ("gate_up_proj", "down_proj")

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights of experts without blocks, `[experts, outputs, inputs]`, transposed if they are stored so."""
        first, second = (self.experts._parameters[name] for name in self.names)
        return (first.mT, second.mT) if self.is_transposed else (first, second)

    @property
    def biases(self) -> list[Tensor | None]:
        """The biases of the experts by weight, `[experts, outputs]`."""
        return [self.experts._parameters.get(f"{name}_bias") for name in self.names]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it reads: the weight of the router, those of the experts, and the biases."""
        router, own = self.router._parameters, self.experts._parameters
        tensors = router["weight"], *map(own.get, self.names), router.get("bias"), *self.biases
        return tuple(tensor for tensor in tensors if tensor is not None)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The modules whose code it replaces, without linear layers and norms."""
        activation = () if isinstance(self.activation, ClampedGlu) else (self.activation,)
        shared = () if self.shared is None else self.shared.parts
        return self.module, self.router, *self.of_router, self.experts, *activation, *shared


class Recurrence(NamedTuple):
    """A mixer with states, which `lookahead.backend.cpu.tree_mixers` computes between its products.

    Attributes:
        module: The mixer.
        inputs: Products of its input.
        gates: Linear layers of its input with few outputs.
        output: The product of the result.
        cache: The name under which its code takes the cache.
        inner: Its submodules besides linear layers.
    """

    module: Any
    inputs: tuple[Product, ...]
    gates: tuple[Any, ...]
    output: Product
    cache: str
    inner: tuple[Any, ...]
    norms: tuple[Norm, ...] = ()

    @property
    def products(self) -> tuple[Product, ...]:
        """All products."""
        return *self.inputs, self.output

    @property
    def parts(self) -> tuple[Any, ...]:
        """The modules whose code it replaces, without linear layers."""
        return self.module, *self.inner


class Called(NamedTuple):
    """A mixer that runs its own code, which gets all that its layer passes on.

    Attributes:
        module: The mixer. Its result is the first one.
        angles: Cosines of a token.
        is_complex: Whether positions are complex numbers.
        rotate: The rotary embedding of latent attention, for queries, a shared key and positions; else None.
    """

    module: Any
    angles: int
    is_complex: bool = False
    rotate: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]] | None = None
    products: tuple[Product, ...] = ()

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those of latent attention: of latents, and of what queries are made of, if they are not made at once."""
        if self.rotate is None:
            return ()
        norms = (self.module.kv_a_layernorm, *([self.module.q_a_layernorm] if self.module.q_lora_rank else []))
        return tuple(map(Norm, norms))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The modules whose code is not only called."""
        return () if self.rotate is None else (self.module,)

    @property
    def latent_products(self) -> tuple[Product, ...]:
        """Those of latent attention: of output, queries, latents, shared keys, keys and values, queries of low rank."""
        if self.rotate is None:
            return ()
        module, rank = self.module, self.module.kv_lora_rank
        queries = (module.q_a_proj, module.q_b_proj) if module.q_lora_rank else (module.q_proj,)
        linears = module.o_proj, module.kv_b_proj, *queries
        out, heads, query, *second = (Product(linear, 0, linear.out_features) for linear in linears)
        both, shared = module.kv_a_proj_with_mqa, module.qk_rope_head_dim
        return out, query, Product(both, 0, rank), Product(both, rank, shared), heads, *second


Mixer = SelfAttention | Mlp | Experts | Recurrence | Called


class Residual(NamedTuple):
    """`scale * (hidden + factor * after(mixer(before(hidden))))`.

    Attributes:
        mixer: The operation.
        before: A norm, or None; so is `after`.
        factor: Of the result.
        scaled: The buffers that have the scale, `[1]`, and its name in them; None for 1.
        is_parallel: Whether it reads what the residual before it reads.
        is_last: Whether a parallel result is added to the sum, else to the result of the residual before it.
    """

    mixer: Mixer
    before: Norm | None
    after: Norm | None = None
    factor: float = 1.0
    scaled: tuple[dict[str, Any], str] | None = None
    is_parallel: bool = False
    is_last: bool = False

    @property
    def scale(self) -> float:
        """The factor of the sum."""
        return 1.0 if self.scaled is None else float(self.scaled[0][self.scaled[1]])

    @property
    def norms(self) -> Iterator[Norm]:
        """All norms."""
        yield from (norm for norm in (self.before, self.after, *self.mixer.norms) if norm is not None)
