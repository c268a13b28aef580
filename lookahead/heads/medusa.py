"""Medusa heads: every head guesses one later token from the hidden state of the newest one."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.errors import HeadsError
from lookahead.heads.base_model import lm_head
from lookahead.heads.head_files import HeadsConfig, check_base, read_heads, write_heads

KIND = "medusa"
WEIGHTS = "medusa_lm_head.safetensors"
_PREFIX = "medusa_head."  # of the names in checkpoints that hold the model too


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), which is x as long as W and b are zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """Heads on the hidden state that the LM head reads; head k guesses the token k + 2 places behind it.

    Each is some residual blocks and a projection to the vocabulary. The names of the weights are those of published
    checkpoints: `0.0.linear.weight` is the first block of head 0, `0.1.weight` its projection.

    Args:
        hidden_size: Of the model.
        vocab_size: Of the model.
        heads: How many.
        blocks: Residual blocks of each.

    Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
        §2.1.1.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, heads: int, blocks: int = 1) -> None:
        super().__init__(
            nn.Sequential(
                *(ResidualBlock(hidden_size) for _ in range(blocks)), nn.Linear(hidden_size, vocab_size, bias=False)
            )
            for _ in range(heads)
        )
        self.blocks = blocks

    @classmethod
    @torch.no_grad()
    def fresh(cls, model: PreTrainedModel, *, heads: int, blocks: int = 1) -> MedusaHeads:
        """Heads that say what the model's LM head says: its projection behind blocks that change nothing."""
        weight = lm_head(model).weight
        made = cls(weight.shape[1], weight.shape[0], heads=heads, blocks=blocks)
        for parameter in made.parameters():
            parameter.zero_()
        for head in made:
            head[-1].weight.copy_(weight)  # type: ignore[index]
        return made.to(weight.device, weight.dtype)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: PreTrainedModel) -> MedusaHeads:
        """Read heads of a folder or of the Hub for a model, with its dtype and on its device, ready to guess.

        Args:
            folder: As `write` left it, or as published: `medusa_lm_head.safetensors` beside a `config.json`.
            model: The model they were trained for.

        Raises:
            HeadsError: There are none, they are damaged, or they belong to another model.
        """
        config, tensors = read_heads(folder, KIND, (WEIGHTS, "model.safetensors"))
        if any(name.startswith(_PREFIX) for name in tensors):
            tensors = {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}
        heads, blocks, (vocab, hidden) = _sizes(folder, tensors)
        check_base(folder, config, model, hidden=hidden, vocab=vocab)
        with torch.device("meta"):  # weights made at random would draw from the seed of whoever is decoding
            made = cls(hidden, vocab, heads=heads, blocks=blocks)
        try:
            made.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            raise HeadsError(f"{folder}: {' '.join(str(error).split())}") from error
        weight = lm_head(model).weight
        return made.to(weight.device, weight.dtype).eval().requires_grad_(False)

    def write(self, folder: str | os.PathLike[str], model: PreTrainedModel) -> None:
        """Write the heads in bfloat16, and what model they are of, into a folder.

        Raises:
            OSError: They cannot be written.
        """
        sizes = {"medusa_num_heads": len(self), "medusa_num_layers": self.blocks}
        tensors = {name: tensor.bfloat16() for name, tensor in self.state_dict().items()}
        write_heads(folder, HeadsConfig.of(KIND, model, sizes), WEIGHTS, tensors)

    def guess(self, model: PreTrainedModel, head: int, states: Tensor, places: Tensor) -> Tensor:
        """Logits `[n, vocab]` of one head at places, int64 `[n]`, of flattened states `[batch, tokens, hidden]`."""
        logits: Tensor = self[head](states.flatten(0, 1)[places])
        return logits

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of every head, `[heads, ..., vocab]` of hidden states `[..., hidden]`."""
        return torch.stack([head(hidden) for head in self])


def _sizes(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> tuple[int, int, torch.Size]:
    """Heads, blocks a head, and the shape of a projection; a published configuration may say otherwise than the file.

    Raises:
        HeadsError: The weights are not those of Medusa heads.
    """
    blocks = sum(name.startswith("0.") and name.endswith(".linear.weight") for name in tensors)
    places = [name.partition(".")[0] for name in tensors]
    if f"0.{blocks}.weight" not in tensors or not all(place.isdigit() for place in places):
        raise HeadsError(f"{folder}: no Medusa heads; it holds {', '.join(sorted(tensors)[:4])}")
    heads, shape = len(set(places)), tensors[f"0.{blocks}.weight"].shape
    if set(map(int, places)) != set(range(heads)) or len(shape) != 2:
        raise HeadsError(
            f"{folder}: no Medusa heads: they are numbered from 0 on and project to [vocabulary, hidden], got "
            f"{', '.join(sorted(set(places))[:8])} and {list(shape)}"
        )
    return heads, blocks, shape
