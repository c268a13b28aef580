"""The MTP layer that a checkpoint brings along, as DeepSeek-V3 and GLM-4.5 do, loaded and run by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.errors import HeadsError
from lookahead.heads.base_model import unembed
from lookahead.heads.eagle_drafter import LEAST, WIDTH, rerank
from lookahead.heads.guess_tree import GuessTree, HeadDrafter, Warp
from lookahead.heads.hit_rates import HeadRates

if TYPE_CHECKING:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

KIND = "mtp"
DEPTH = 4
"""Tokens guessed at most. The layer was trained for one, and goes on from its own output as EAGLE does."""


def open_native(model: PreTrainedModel) -> MtpModel:
    """Load the MTP layer of the checkpoint that a model was loaded from.

    transformers leaves those weights out when it loads a model, and reads them again here.

    Raises:
        HeadsError: This version of transformers cannot, or there is no such layer, or more than one.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise HeadsError("MTP layers of checkpoints need a newer transformers, one that has MtpModel") from error
    layers = getattr(config, "num_mtp_layers", None)
    if not layers:
        raise HeadsError(
            f"{name} has no MTP layers that transformers loads: its configuration has no num_mtp_layers, and weights "
            "of such layers, if there are any in the checkpoint, are dropped; train heads with 'lookahead train'"
        )
    if layers > 1:
        raise HeadsError(f"checkpoints with one MTP layer are served, that of this {name} has {layers}")
    try:
        network: MtpModel = MtpModel.from_pretrained(model)
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        said = " ".join(str(error).split())
        raise HeadsError(f"the MTP layer of {config.name_or_path!r} cannot be loaded: {said}") from error
    if network.config._attn_implementation not in ("eager", "sdpa"):
        network.set_attn_implementation("sdpa")
    network.layers.eval()  # these alone: its embedding and its LM head are the model's
    return network


class NativeDrafter(HeadDrafter):
    """Lets the layer read what the model said, then guess on along the likeliest chain, the next best beside it.

    Rows run one after the other, as transformers' masks for such layers have no padding.

    Args:
        network: The layer.
        model: Its model, for the LM head.
        rates: How far guesses can be trusted, by depth.
        warp: What sampling does to logits; None where the likeliest token is taken.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", §2.2.
    """

    hidden_layers = (-1,)
    reads_all = True

    def __init__(self, network: MtpModel, model: PreTrainedModel, rates: HeadRates, warp: Warp | None) -> None:
        self._network = network
        self._model = model
        self._rates = rates
        self._warp = warp
        self._caches: dict[int, MtpCache] = {}
        self._newest: dict[int, Tensor] = {}

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Run the layer over the pairs of new tokens and the hidden states they were chosen from."""
        from transformers.cache_utils import MtpCache

        for row, new, state in zip(rows, tokens, states, strict=True):
            if row not in self._caches:
                cache = self._caches[row] = MtpCache(config=self._network.config)
                cache.activate_past_recording()
            self._newest[row] = self._run(row, new[None], state[None])[:, -1:]

    def draft(self, rows: Sequence[int], roots: Sequence[int], room: int) -> list[GuessTree]:
        """What may follow the newest token of each of some rows."""
        return [self._grow(row, root, room) for row, root in zip(rows, roots, strict=True)]

    def forget(self, row: int) -> None:
        """Forget a row."""
        self._caches.pop(row, None)
        self._newest.pop(row, None)

    def _grow(self, row: int, root: int, room: int) -> GuessTree:
        """A chain of first guesses with the others as leaves."""
        out, reach = self._newest[row], 1.0
        tokens: list[Tensor] = []
        promised: list[Tensor] = []
        for depth in range(DEPTH):
            if depth > 0:
                out = self._run(row, tokens[-1][None, :1], out)
            chances, guesses = self._guess(out[0, 0])
            tokens.append(guesses)
            promised.append(chances)
            reach *= float(chances[0])
            if reach < LEAST:
                break
        self._caches[row].crop(1 - len(tokens))
        width = len(tokens[0])
        kinds = np.indices((len(tokens), width), np.int32).reshape(2, -1).T.copy()
        # Node 0 is the root; the first guess of each level is what the next level follows.
        parents = np.repeat(np.array([0, *range(1, width * (len(tokens) - 1), width)], np.int32), width)
        said = torch.cat(promised).cpu().numpy()
        written = torch.cat(tokens).int().cpu().numpy()
        return rerank(root, written, parents, self._rates.calibrate(kinds, said), kinds, said, room)

    def _guess(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and tokens of the likeliest guesses, `[guesses]` each, of a hidden state `[hidden]`."""
        logits = unembed(self._model, hidden[None])
        if self._warp is not None:
            logits = self._warp(logits.float())
        best = logits[0].softmax(-1, dtype=torch.float32).topk(min(WIDTH, logits.shape[-1]))
        return best.values, best.indices

    def _run(self, row: int, tokens: Tensor, states: Tensor) -> Tensor:
        """One pass over pairs of tokens `[1, n]` and states `[1, n, hidden]` behind those that are there."""
        cache = self._caches[row]
        begin = 1 + cache.get_seq_length()
        positions = torch.arange(begin, begin + tokens.shape[1], device=states.device)[None]
        layer: Any = self._network
        out: Tensor = layer.forward_layer(0, states, positions, cache, input_ids=tokens)
        return out
