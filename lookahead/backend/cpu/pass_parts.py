"""The modules of a model whose passes run as one call, what users may change of them, and what runs between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lookahead.backend.cpu.exact_attention import PerNodeAttention
from lookahead.backend.cpu.fused_layers import name_of
from lookahead.backend.cpu.layer_jobs import DeclaredLayer
from lookahead.backend.cpu.product_parts import has_own_panels
from lookahead.backend.cpu.tree_mixers import TreeMixer
from lookahead.kernels.packed_product import PackedWeight
from lookahead.kernels.row_attention import AttentionLimits
from lookahead.model.cache import TreeCache
from lookahead.model.families import WRAPPERS
from lookahead.model.families.family import Family
from lookahead.model.families.operations import Mlp, Norm
from lookahead.model.state_layers import States


class PassParts(NamedTuple):
    """The modules of a model whose passes run as one call."""

    layers: list[DeclaredLayer]
    norm: Norm  # after the last layer
    head: Any  # the output layer; None if it is called as a module
    limits: list[AttentionLimits]  # of the attention of each layer; empty if the kernel does not attend
    mixers: Mapping[Any, TreeMixer] = {}
    latent: Sequence[Any] = ()  # the linear layers of latent attention, if the kernel multiplies by their weights

    @property
    def is_eager(self) -> bool:
        """Whether the kernel attends with the bits of the layers' eager function."""
        pairs = zip(self.layers, self.limits, strict=False)
        kinds = {limits.is_eager for layer, limits in pairs if layer.attention}
        return kinds == {True}

    @property
    def linears(self) -> list[Any]:
        """The linear layers of all layers."""
        return [*(linear for layer in self.layers for linear in layer.linears), *self.latent]

    @property
    def slotted(self) -> list[int]:
        """The layers that have keys and values of their own."""
        parts = [layer.attention for layer in self.layers]
        return [at for at, part in enumerate(parts) if part is not None and part.source is None]

    @property
    def reach(self) -> int | None:
        """The first position at which a layer runs its own code; None if there is none."""
        return min((layer.reach for layer in self.layers if layer.reach is not None), default=None)

    @property
    def beside(self) -> int:
        """Numbers of a token in the second input of every layer."""
        mixers = [part.mixer for layer in self.layers for part in layer.residuals]
        return max((part.gate.outputs for part in mixers if isinstance(part, Mlp) and part.is_beside), default=0)


class PassContext(NamedTuple):
    """What runs between the calls of a pass.

    Attributes:
        cache: The cache, within a pass over trees.
        firsts: The first token of each row.
        before: The states of the rows, by module.
        positions: The positions as the model's own layers take them.
        per_node: How the nodes attend, if each attends alone.
    """

    cache: TreeCache
    firsts: Sequence[int]
    before: Mapping[Any, list[States]]
    positions: Any
    per_node: PerNodeAttention | None = None


def latent_linears(layers: Sequence[DeclaredLayer], may_pack: Callable[[Any], bool]) -> list[Any]:
    """The linear layers of latent attention; empty if the kernel does not multiply by the weights of all."""
    products = [product for layer in layers if layer.called for product in layer.called.latent_products]
    is_packed = all(has_own_panels(part) and may_pack(part.module) for part in products)
    return list(dict.fromkeys(part.module for part in products)) if is_packed else []


def owners_of(model: Any, family: Family) -> list[Any] | str:
    """A model and the modules in it that lead to the decoder, which is the last one; or why it has none."""
    owners = [model]
    for name in family.decoder.split("."):
        owners.append(getattr(owners[-1], name, None))
    names = [(family.file, f"{family.name}{rest}") for rest in (family.causal, *family.text.split("."))]
    for module, (name, decoder) in WRAPPERS.items():
        file = f"transformers.models.{module}.modeling_{module}"
        if name_of(model) == (file, f"{name}ForConditionalGeneration"):
            owners.append(getattr(owners[1], decoder, None))
            names = [name_of(model), (file, f"{name}Model"), names[1]]
    return owners if list(map(name_of, owners)) == names else f"it is not {family.name}{family.causal} of transformers"


def placeholders_of(config: Any) -> set[int]:
    """The tokens that stand for images or sound, which models may embed otherwise than text."""
    kinds = (f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))
    ids = (getattr(config, kind, None) for kind in kinds)
    return {token for token in ids if isinstance(token, int)}


class Watched(NamedTuple):
    """What a table holds and users may change: addresses of norms, biases and experts, epsilons and scales."""

    tensors: list[tuple[Any, str]]  # dictionaries of parameters, and their keys
    contents: list[tuple[Any, str]]  # likewise, of those whose values are copied
    numbers: list[tuple[Any, str]]  # modules, and their attributes

    @classmethod
    def of(cls, parts: PassParts) -> Watched:
        """What to watch of the modules of a pass."""
        norms = [parts.norm, *(norm for layer in parts.layers for norm in layer.norms)]
        linears = [*parts.linears, *([parts.head] if parts.head else [])]
        mixtures = [layer.experts for layer in parts.layers if layer.experts]
        tensors = [(norm.module._parameters, name) for norm in norms for name in ("weight", "bias")]
        tensors += [(linear._parameters, "bias") for linear in linears]
        owners = [part._parameters for mixture in mixtures for part in (mixture.router, mixture.experts)]
        tensors += [(parameters, name) for parameters in owners for name in parameters if name.endswith("bias")]
        contents = [(mixture.router._parameters, "weight") for mixture in mixtures]
        contents += [(mixture.experts._parameters, name) for mixture in mixtures for name in mixture.names]
        contents += [part.scaled for layer in parts.layers for part in layer.residuals if part.scaled]
        numbers = [(norm.module, norm.epsilon) for norm in norms]
        numbers += [(layer.attention.module, "scaling") for layer in parts.layers if layer.attention]
        return cls([*tensors, *contents], contents, numbers)


def settings_of(watched: Watched) -> list[float]:
    """The addresses, versions and numbers of what a table holds now."""
    tensors = [values.get(name) for values, name in watched.tensors]
    copied = [values[name] for values, name in watched.contents]
    return [
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(0 if tensor.is_inference() else tensor._version for tensor in copied),
        *(getattr(module, name) for module, name in watched.numbers),
    ]


def are_same(weights: Sequence[PackedWeight], others: Sequence[PackedWeight]) -> bool:
    """Whether packed weights are the same objects."""
    return all(weight.packed is other.packed for weight, other in zip(weights, others, strict=True))


def padded(flat: Tensor, places: Tensor, rows: int, width: int) -> Tensor:
    """Scatter concatenated rows, `[1, tokens, size]`, to their places in `[rows, width, size]`."""
    out = flat.new_empty(rows, width, flat.shape[2])
    out.flatten(0, 1).index_copy_(0, places, flat[0])
    return out
