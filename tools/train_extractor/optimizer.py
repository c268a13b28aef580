"""Muon for the hidden matrices and AdamW for the rest, over fp32 masters of bf16 weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lookahead.errors import TrainingError

WARMUP_STEPS = 100
DECAY_FROM = 0.4
"""Share of the token budget after which the learning rate falls linearly to 2%."""


class MasterOptimizer:
    """Steps fp32 master weights from bf16 gradients and copies them back into the model.

    bf16 keeps 8 bits of mantissa, too few to add small updates to; forward and backward do not mind.
    Hidden matrices take Muon (Jordan et al. 2024), which needs about half the tokens of AdamW here;
    embeddings and norms take AdamW.
    """

    def __init__(self, model: nn.Module, *, muon_lr: float = 4e-3, adam_lr: float = 2e-3) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise TrainingError(
                f"training needs a PyTorch with torch.optim.Muon, 2.9 or newer, got {torch.__version__}"
            )
        self.working = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in self.working]
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        pairs = list(zip(names, self.masters, strict=True))
        hidden = [master for name, master in pairs if ".layers." in name and master.ndim == 2]
        others = [master for name, master in pairs if not (".layers." in name and master.ndim == 2)]
        self.muon = torch.optim.Muon(hidden, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.rates = (muon_lr, adam_lr)

    def step(self, scale: float) -> None:
        """Apply the gradients at `scale` times the learning rates, and clear them."""
        for working, master in zip(self.working, self.masters, strict=True):
            master.grad = None if working.grad is None else working.grad.float()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        for optimizer, rate in zip((self.muon, self.adam), self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
        self._write_back()
        for working in self.working:
            working.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Masters and moments by name, flat, as safetensors stores them."""
        tensors = {f"master.{i}": master.detach() for i, master in enumerate(self.masters)}
        for name, parameter, state in self._states():
            tensors |= {f"{name}.{key}": value for key, value in state[parameter].items()}
        return tensors

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what `state_dict` gave; the model's weights are overwritten.

        Raises:
            LookupError: A tensor is missing.
            RuntimeError: A tensor has another shape.
        """
        with torch.no_grad():
            for i, master in enumerate(self.masters):
                master.copy_(tensors[f"master.{i}"])
        for name, parameter, state in self._states():
            prefix = f"{name}."
            found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            state[parameter].update(found)
        self._write_back()

    def _states(self) -> Iterator[tuple[str, Tensor, Any]]:
        """A name for every parameter of both optimizers, the parameter, and the state it is a key of."""
        for kind, optimizer in (("muon", self.muon), ("adam", self.adam)):
            for i, parameter in enumerate(optimizer.param_groups[0]["params"]):
                yield f"{kind}.{i}", parameter, optimizer.state

    @torch.no_grad()
    def _write_back(self) -> None:
        for working, master in zip(self.working, self.masters, strict=True):
            working.copy_(master)


def rate_scale(step: int, tokens: int, budget: int) -> float:
    """Linear warm-up over steps, a plateau, then a linear fall over tokens to 2%."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    done = min(1.0, tokens / budget)
    fall = 1.0 if done < DECAY_FROM else max(0.02, (1.0 - done) / (1.0 - DECAY_FROM))
    return warm * fall
