"""Mixtures of experts in passes: their weights for the kernels, and which rows go to which expert."""

from __future__ import annotations

from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from lookahead.backend.cpu.cpu_pass import CpuPass, thread
from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.cpu.product_bits import best_layout
from lookahead.backend.cpu.product_choice import LAYOUTS
from lookahead.backend.protocol import BitPolicy
from lookahead.kernels import experts, packed_product
from lookahead.kernels.experts import ExpertWeight
from lookahead.kernels.packed_product import PackedWeight
from lookahead.loading.quantized import QuantizedLinear
from lookahead.model.families.operations import Experts
from lookahead.utils.jit import njit

UNPACKED_PASSES = 64  # over mixtures as they are, which save more time than packing and comparing take


class MixtureWeights(NamedTuple):
    """The weights of a mixture, as the kernels take them."""

    router: PackedWeight | None  # None if torch must multiply by it, as it adds few outputs in another order
    inner: tuple[ExpertWeight | PackedWeight, ...]  # for gates and their factors, which blocks have apart
    down: ExpertWeight | PackedWeight
    wide: Tensor | None  # the weight of a router that multiplies in float32, if the model's is of another type


def multiplies(part: Experts) -> bool:
    """Whether the kernels multiply by the weights of a mixture, in half precision with the bits of single rows."""
    router = part.router._parameters["weight"]
    if part.chosen > experts.MOST_CHOSEN or not (part.has_wide_router or packed_product.is_supported(router)):
        return False
    if part.is_quantized:
        return router.dtype in (torch.float32, torch.bfloat16)
    gate_up, down = part.weights
    is_supported = all(map(experts.multiplies, (gate_up, down)))
    has_biases = all(bias is None or bias.is_contiguous() for bias in part.biases)
    read = part.tensors[1:] if part.has_wide_router else part.tensors
    blocks = (_block_of(weight) for weight in (gate_up[0], down[0]))
    return is_supported and has_biases and len({tensor.dtype for tensor in read}) == 1 and all(blocks)


def _block_of(weight: Tensor, bias: Tensor | None = None) -> int:
    """Inputs of a block of sums, with which the kernel has torch's bits for single rows; 0 if there is none."""
    if weight.dtype == torch.float32:
        return LAYOUTS["packed"].block
    layout, most = best_layout(weight, bias, BitPolicy.SOLO, ("packed",))
    return layout.block if most == MAX_ROWS else 0


def serves(dtype: torch.dtype, mode: CpuPass | None) -> bool:
    """Whether mixtures run by kernels in a pass: `generate` reads prompts and batches with other bits."""
    if mode is None:
        return True  # a comparison
    return not mode.is_prompt and (dtype == torch.float32 or mode.policy is not BitPolicy.BATCH)


def weights_of(part: Experts, cache: dict[Any, Any], *, packs: bool = False) -> MixtureWeights:
    """The weights of a mixture, made anew when they have changed; kept in `cache`.

    Args:
        part: The mixture.
        cache: What is kept of its layer.
        packs: Whether to make packed copies, if there are none.
    """
    router, *_ = tensors = part.tensors
    versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    kept: Any = cache.get("mixture")
    is_old = kept is None or kept[1] != versions or any(map(is_not, kept[0][1], tensors))
    if is_old or (packs and not kept[2]):
        thread.is_cold = packs or getattr(thread, "is_cold", False)
        with torch.inference_mode():
            *inner, down = (
                part.experts.weights()
                if part.is_quantized
                else [
                    experts.weight_of(weight, _block_of(weight[0]), packs=packs and not weight.is_inference())
                    for weight in part.weights
                ]
            )
            is_half = part.is_quantized or part.weights[0].dtype != torch.float32
            is_wide = part.has_wide_router and is_half
            block = 0 if is_wide else _block_of(router, part.router._parameters.get("bias"))
            packed = packed_product.pack(router, block) if block else None
            made = MixtureWeights(packed, tuple(inner), down, router.float() if is_wide else None)
        kept = cache["mixture"] = (made, tensors), versions, packs
    weights: MixtureWeights = kept[0][0]
    return weights


def called(part: Experts, x: Tensor) -> Tensor:
    """The result of the module of a mixture, which may return what its router computed too, and of a shared expert."""
    out: Any = part.module(x)
    result: Tensor = out[0] if isinstance(out, tuple) else out
    if part.shared is None or part.shared.module in part.module.children():
        return result
    return result + part.shared.module(x)  # type: ignore[no-any-return]


class Routing:
    """Which rows of a pass go to which expert.

    Attributes:
        rows: `[most, size]`, the rows of the pass, for torch.
        numbers: int64 `[most]`, the numbers from 0 on.
        logits: `[most, experts]`, what the router computes.
        factors: float32 `[most, chosen]`.
        shares: `[most]`, factors of the results of the shared expert.
        places: int64 `[most, chosen]`, the rows of the results of a token.
        sources: int64 `[most * chosen]`, the tokens of the rows, which are grouped by experts.
        chosen: int64 `[most * chosen, 3]`, as `kernels.experts.products` takes them.
        prepared: For the rows of experts in blocks; else None.
    """

    def __init__(self, part: Experts, most: int, dtype: torch.dtype) -> None:
        count, (total, _, size) = part.chosen, part.sizes
        blocks = part.experts.weights() if part.is_quantized else []
        self.prepared = packed_product.prepared_rows(blocks, most * count) if blocks else None
        self.rows = torch.empty(most, size, dtype=dtype, device="cpu")
        self.numbers = torch.arange(most, device="cpu")
        self.logits = torch.empty(most, total, dtype=dtype, device="cpu")
        self.shares = torch.empty(most, dtype=torch.float32, device="cpu")
        self.factors = torch.empty(most, count, dtype=torch.float32, device="cpu")
        self.places, self.sources, self.chosen, self._counts = (
            torch.zeros(shape, dtype=torch.int64, device="cpu")
            for shape in ((most, count), (most * count,), (most * count, 3), (total,))
        )

    def multiply(self, module: Any, tokens: int) -> Tensor:
        """Multiply the first tokens by the weight of a module by torch, each row alone: `[tokens, outputs]`."""
        if isinstance(module, QuantizedLinear):
            result: Tensor = module(self.rows[:tokens])  # which has the bits of single rows
            return result
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        return torch.cat([linear(row, weight, bias) for row in self.rows[:tokens].split(1)])

    def fill(self, part: Experts, weights: MixtureWeights, tokens: int) -> None:
        """Choose the experts of the first tokens, and group their rows."""
        logits, wide = self.logits[:tokens], weights.wide
        if wide is not None:
            logits = torch.cat([linear(row, wide) for row in self.rows[:tokens].float().split(1)])
        elif weights.router is None:
            logits = self.multiply(part.router, tokens)
        for gate in part.gates:
            self.shares[:tokens] = torch.sigmoid(self.multiply(gate, tokens))[:, 0]
        factors, indices = part.route(logits)
        self.factors[:tokens] = factors
        tensors = self._counts, self.places, self.sources, self.chosen
        _group(indices.contiguous().view(-1).numpy(), indices.shape[1], *(tensor.numpy() for tensor in tensors))


@njit()
def _group(ids, count, ends, places, sources, chosen):
    """Group rows by experts; `ends` has room for a number per expert."""
    ends[:] = 0
    for expert in ids:
        ends[expert] += 1
    end = used = 0
    for expert in range(len(ends)):
        rows = ends[expert]
        ends[expert] = end
        if rows:
            chosen[used, 0], chosen[used, 1], chosen[used, 2] = expert, end, rows
            used, end = used + 1, end + rows
    chosen[used:] = 0
    for i in range(len(ids)):
        row = ends[ids[i]]
        ends[ids[i]] += 1
        places[i // count, i % count], sources[row] = row, i // count
