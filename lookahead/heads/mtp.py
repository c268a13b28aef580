"""MTP heads: every head is a decoder layer on the model's hidden states and guesses one later token."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, PreTrainedModel

from lookahead.errors import HeadsError
from lookahead.heads.base_model import lm_head, unembed
from lookahead.heads.draft_cache import DraftCache, take
from lookahead.heads.guess_tree import Warp
from lookahead.heads.head_files import HeadsConfig, check_base, read_heads, write_heads
from lookahead.heads.hit_rates import HeadRates
from lookahead.heads.layers import DraftLayer, Norm, Rotation, attend, layer_config, read_sizes, try_out, write_sizes
from lookahead.heads.parallel_heads import ParallelDrafter

KIND = "mtp"
WEIGHTS = "model.safetensors"


class MtpHead(DraftLayer):
    """A decoder layer that reads a low layer's hidden states beside the last ones, each through a norm.

    What it says is added to the last ones, each dimension of which counts as much as it learns to let it.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.low_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.kept = nn.Parameter(torch.ones(config.hidden_size))

    def enter(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads and what it is added to, `[..., 2 · hidden]` and `[..., hidden]`, of both states."""
        low, last = states.chunk(2, dim=-1)
        return torch.cat((self.low_layernorm(low), self.input_layernorm(last)), dim=-1), last * self.kept


class MtpHeads(nn.Module):
    """Heads side by side on the same hidden states, in front of the model's own LM head.

    Head k guesses the token k + 2 places behind a hidden state, and looks back at all hidden states before.

    Args:
        config: Sizes of a layer, as of a Llama.
        heads: How many.
        low_layer: The layer they read beside the last one, which keeps little of the tokens that were read.

    Attributes:
        hidden_layers: Both, numbered as by `output_hidden_states`.

    Source: Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token Prediction", §2. There the
        heads and the trunk are trained together from the beginning; here they are added to a trained model, which may
        stay as it is, so each begins as one that changes nothing.
    """

    def __init__(self, config: LlamaConfig, *, heads: int, low_layer: int) -> None:
        super().__init__()
        self.config = config
        self.hidden_layers = (low_layer, -1)
        self.heads = nn.ModuleList(MtpHead(config) for _ in range(heads))
        self.rotation = Rotation(config)

    def __len__(self) -> int:
        return len(self.heads)

    def head(self, index: int) -> MtpHead:
        """One of them."""
        head = self.heads[index]
        assert isinstance(head, MtpHead)
        return head

    @classmethod
    @torch.no_grad()
    def fresh(cls, model: PreTrainedModel, *, heads: int) -> MtpHeads:
        """Untrained heads with layers like those of the model, which say what its LM head says."""
        made = cls(layer_config(model), heads=heads, low_layer=low_layer(model))
        for index in range(heads):
            made.head(index).self_attn.o_proj.weight.zero_()
            made.head(index).mlp.down_proj.weight.zero_()
        return made.to(lm_head(model).weight.device)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: PreTrainedModel) -> MtpHeads:
        """Read heads of a folder for a model, with its dtype and on its device, ready to guess.

        Raises:
            HeadsError: There are none, they are damaged, or they belong to another model.
        """
        config, tensors = read_heads(folder, KIND, (WEIGHTS,))
        sizes = read_sizes(folder, config.sizes)
        check_base(folder, config, model, hidden=sizes.hidden_size, vocab=sizes.vocab_size)
        count = config.sizes.get("num_heads")
        held = len({name.split(".")[1] for name in tensors if name.startswith("heads.")})
        if type(count) is not int or not 1 <= count == held:  # before so many are made
            raise HeadsError(f"{folder}: num_heads must be the number of heads in {WEIGHTS}, {held}, got {count!r}")
        low = config.sizes.get("low_layer")
        if not isinstance(low, int) or not 0 <= low <= model.config.get_text_config().num_hidden_layers:
            raise HeadsError(f"{folder}: low_layer must be one of the model's layers, got {low!r}")
        with torch.device("meta"):  # weights made at random would draw from the seed of whoever is decoding
            made = cls(sizes, heads=count, low_layer=low)
        try:
            made.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            raise HeadsError(f"{folder}: {' '.join(str(error).split())}") from error
        made.rotation = Rotation(sizes)  # what it holds is no weight, and was made on meta with the rest
        weight = lm_head(model).weight
        made = made.to(weight.device, weight.dtype).eval().requires_grad_(False)
        try_out(made.head(0), made.rotation)
        return made

    def write(self, folder: str | os.PathLike[str], model: PreTrainedModel) -> None:
        """Write the heads in bfloat16, and what model they are of, into a folder.

        Raises:
            OSError: They cannot be written.
        """
        sizes = {**write_sizes(self.config), "num_heads": len(self), "low_layer": self.hidden_layers[0]}
        tensors = {name: tensor.bfloat16() for name, tensor in self.state_dict().items()}
        write_heads(folder, HeadsConfig.of(KIND, model, sizes), WEIGHTS, tensors)

    def guess(self, model: PreTrainedModel, head: int, states: Tensor, places: Tensor) -> Tensor:
        """Logits `[n, vocab]` of one head at places, int64 `[n]`, of flattened states `[batch, tokens, 2 · hidden]`.

        Keys and values are made of all states, queries of those at the places alone.
        """
        layer, (batch, tokens) = self.head(head), states.shape[:2]
        position = torch.arange(tokens, device=states.device).expand(batch, -1)
        read, kept = layer.enter(states)
        keys, values = layer.keys_values(read, self.rotation(states, position))
        counts = torch.bincount(places // tokens, minlength=batch).tolist()
        at = pad_sequence((places % tokens).split(counts), batch_first=True)
        query = layer.query(take(read, at), self.rotation(states, at))
        out = layer.finish(take(kept, at), attend(query, keys, values, position[:, None] <= at[..., None]))
        return unembed(model, torch.cat([row[:count] for row, count in zip(out, counts, strict=True)]))


def low_layer(model: PreTrainedModel) -> int:
    """A layer whose hidden states still tell the tokens, and the ones before them."""
    layers: int = model.config.get_text_config().num_hidden_layers
    return 2 if layers >= 8 else 1


class MtpDrafter(ParallelDrafter):
    """MTP heads at work, each with keys and values of every token.

    Args:
        heads: The heads.
        model: Their model, for its LM head.
        rates: How far their guesses can be trusted.
        rows: How many rows there may be.
        warp: What sampling does to logits; None where the likeliest token is taken.
    """

    reads_all = True

    def __init__(self, heads: MtpHeads, model: PreTrainedModel, rates: HeadRates, rows: int, warp: Warp | None) -> None:
        super().__init__(rates, warp)
        self.hidden_layers = heads.hidden_layers
        self._heads = heads
        self._model = model
        self._caches = [DraftCache(rows) for _ in range(len(heads))]
        self._newest: dict[int, Tensor] = {}

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Let every head look at the new hidden states, and guess at the last of each row."""
        padded, new = pad_sequence(list(states), batch_first=True), [len(each) for each in states]
        outs = []
        for index, cache in enumerate(self._caches):
            layer = self._heads.head(index)
            outs.append(cache.extend(layer, self._heads.rotation, rows, new, *layer.enter(padded)))
        self._newest.update(zip(rows, torch.stack(outs, 1), strict=True))

    def forget(self, row: int) -> None:
        """Forget a row."""
        for cache in self._caches:
            cache.forget(row)
        self._newest.pop(row, None)

    def _logits(self, rows: Sequence[int]) -> Tensor:
        """What every head says, `[heads, rows, vocab]`."""
        return unembed(self._model, torch.stack([self._newest[row] for row in rows], 1))
