"""Experts with the weights of a GGUF file on a CPU, multiplied as they are stored."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lookahead.kernels import block_formats
from lookahead.kernels.packed_product import PackedWeight
from lookahead.loading.quantized_products import multiply, packed_weight

PARAMETERS = "gate_up_proj", "down_proj"
PARTS = "gate", "up", "down"
_EXPERTS, _SIZE = 3, 8  # of the small experts that show what their class does


class QuantizedExperts(nn.Module):
    """The experts of a layer, for inference on a CPU.

    Attributes:
        kind: The formats of the weights of gates, of the products that gates scale, and of the last products.
        gate_blocks: int32 `[experts, ...]`, each expert in the layout of `block_formats`; likewise `up_blocks` and
            `down_blocks`.
    """

    def __init__(self, experts: nn.Module, kinds: Sequence[str]) -> None:
        """Make parameters on the meta device for the blocks of a file, in the order of `PARTS`."""
        super().__init__()
        of: Any = experts
        self.kind, self.kinds, self.act_fn = "/".join(kinds), tuple(kinds), of.act_fn
        self.num_experts, self.hidden_dim, self.intermediate_dim = of.down_proj.shape
        for part, kind, sizes in zip(PARTS, kinds, self._sizes(), strict=True):
            shape = self.num_experts, *block_formats.packed_shape(kind, *sizes)
            blocks = nn.Parameter(torch.empty(shape, dtype=torch.int32, device="meta"), requires_grad=False)
            self.register_parameter(f"{part}_blocks", blocks)

    def weights(self) -> list[PackedWeight]:
        """The weights of the first expert, in the order of `PARTS`; those of the others follow them."""
        blocks = (self.get_parameter(f"{part}_blocks")[0] for part in PARTS)
        sizes = (outputs for outputs, _ in self._sizes())
        return [packed_weight(*each) for each in zip(blocks, self.kinds, sizes, strict=True)]

    def _sizes(self) -> list[tuple[int, int]]:
        inner, outer = self.intermediate_dim, self.hidden_dim
        return [(inner, outer), (inner, outer), (outer, inner)]

    @property
    def weights_of_a_part(self) -> int:
        """The number of weights of each parameter."""
        return int(self.num_experts * self.hidden_dim * self.intermediate_dim)

    def extra_repr(self) -> str:
        """The sizes, for the model's `repr`."""
        return (
            f"{self.num_experts}, hidden_dim={self.hidden_dim}, intermediate_dim={self.intermediate_dim}, {self.kind}"
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum over the experts `top_k_index`, `[tokens, k]`, of each token, times `top_k_weights`.

        Results are added in the order of `top_k_index`, in float32, and rounded before that if the factors are.
        """
        results = hidden_states.new_zeros(*top_k_index.shape, self.hidden_dim)
        for expert in top_k_index.unique().tolist():
            if expert < self.num_experts:  # else of another process
                tokens, places = torch.where(top_k_index == expert)
                rows = hidden_states[tokens]
                inner = self.act_fn(self._product(0, expert, rows)) * self._product(1, expert, rows)
                results[tokens, places] = self._product(2, expert, inner)
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for result, factor in zip(results.unbind(1), top_k_weights.unbind(1), strict=True):
            out += result * factor[:, None]
        return out.to(hidden_states.dtype)

    def _product(self, part: int, expert: int, x: Tensor) -> Tensor:
        blocks = self.get_parameter(f"{PARTS[part]}_blocks")[expert]
        return multiply(x, blocks, self.kinds[part], self._sizes()[part][0])


def are_gated(experts: nn.Module) -> bool:
    """Whether a layer's experts multiply by gates, by what these scale, and last, as small experts of it show."""
    if {name for name, _ in experts.named_parameters()} != {*PARAMETERS}:
        return False
    small: Any = copy.copy(experts)
    source = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        both, last, x = (
            torch.randn(shape, generator=source)
            for shape in ((_EXPERTS, 4 * _SIZE, _SIZE), (_EXPERTS, _SIZE, 2 * _SIZE), (4, _SIZE))
        )
        places, scales = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]]), torch.rand(4, 2, generator=source)
        small.__dict__["_parameters"] = {"gate_up_proj": nn.Parameter(both), "down_proj": nn.Parameter(last)}
        small.num_experts, small.hidden_dim, small.intermediate_dim = _EXPERTS, _SIZE, 2 * _SIZE
        expected = torch.zeros_like(x)
        try:
            for token, k in ((token, k) for token in range(4) for k in range(2)):
                expert = places[token, k]
                gate, up = (both[expert] @ x[token]).chunk(2)
                expected[token] += last[expert] @ (small.act_fn(gate) * up) * scales[token, k]
            return bool(torch.allclose(small(x, places, scales), expected, rtol=1e-3, atol=1e-4))
        except Exception:  # of any class's own code
            return False
