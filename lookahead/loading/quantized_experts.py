"""Experts with the weights of a GGUF file on a CPU, multiplied as they are stored."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lookahead.kernels import block_formats
from lookahead.kernels.jobs import Job, run
from lookahead.kernels.packed_product import PackedWeight, prepared_rows, product
from lookahead.loading.quantized_products import packed_weight, rows_for

PARAMETERS = "gate_up_proj", "down_proj"
PARTS = "gate", "up", "down"
_EXPERTS, _SIZE = 3, 8  # of the small experts that show what their class does
_TOGETHER = 1024  # tokens whose rows are multiplied by each expert at a time, which bounds memory


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
        return [packed_weight(*part) for part in zip(blocks, self.kinds, sizes, strict=True)]

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
        parts = (some.split(_TOGETHER) for some in (hidden_states, top_k_index, top_k_weights))
        return torch.cat([self._sums(*some) for some in zip(*parts, strict=True)])

    def _sums(self, hidden: Tensor, indices: Tensor, factors: Tensor) -> Tensor:
        """The results of some tokens, whose rows are grouped by experts: each is read once for all its rows."""
        experts, order = indices.flatten().sort(stable=True)
        used, counts = experts.unique_consecutive(return_counts=True)
        chosen = torch.stack((used, counts.cumsum(0) - counts, counts), 1)[used < self.num_experts]  # of this process
        rows = rows_for(self.get_parameter("gate_blocks"), self.kinds[0], hidden)[order // indices.shape[1]]
        weights, sizes = self.weights(), [(len(rows), outputs) for outputs, _ in self._sizes()]
        gate, up, down = (rows.new_zeros(size) for size in sizes)
        run(*(job for at, out in enumerate((gate, up)) for job in self._product(weights[at], rows, out, chosen)))
        run(*self._product(weights[2], self.act_fn(gate) * up, down, chosen))
        out, places = torch.zeros_like(hidden, dtype=torch.float32), order.argsort().view_as(indices)
        for place, factor in zip(places.unbind(1), factors.unbind(1), strict=True):
            out += down[place].to(hidden.dtype) * factor[:, None]
        return out.to(hidden.dtype)

    def _product(self, weight: PackedWeight, rows: Tensor, out: Tensor, chosen: Tensor) -> list[Job]:
        return product([weight], rows, [None], [out], prepared_rows([weight], len(rows)), chosen)


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
