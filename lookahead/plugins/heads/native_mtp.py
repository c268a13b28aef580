"""The MTP layer of a model's own checkpoint (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5), run by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.errors import HeadsError, one_line
from lookahead.model.facts import attention_name
from lookahead.plugins.heads.guess_tree import GrowingDrafter, GuessTree
from lookahead.plugins.heads.target import unembed

if TYPE_CHECKING:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

NATIVE_DEPTH = 4  # tokens guessed in a row; the layer is trained for one, and continues from its output as EAGLE does


# Weights of a layer that transformers drops, Qwen's, and their names in its `MtpModel`.
_QWEN_NAMES = {
    r"^mtp\.fc\.": "layers.0.eh_proj.",
    r"^mtp\.pre_fc_norm_embedding\.": "layers.0.enorm.",
    r"^mtp\.pre_fc_norm_hidden\.": "layers.0.hnorm.",
    r"^mtp\.norm\.": "layers.0.post_norm.",
    r"^mtp\.layers\.0\.": "layers.0.mtp_block.",
}


def open_native(model: PreTrainedModel) -> MtpModel:
    """Load the MTP layer of the checkpoint that a model was loaded from, or raise a `HeadsError`."""
    name, config = type(model).__name__, model.config.get_text_config()
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise HeadsError("MTP layers of checkpoints need a newer transformers, one that has MtpModel") from error
    is_qwen = "^mtp.*" in (getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    layers = getattr(config, "num_mtp_layers", None) or getattr(config, "mtp_num_hidden_layers", is_qwen)
    if not layers:
        raise HeadsError(
            f"{name} has no MTP layers that are served: its configuration has no num_mtp_layers, and weights of such "
            "layers, if there are any in the checkpoint, are dropped; train heads with 'lookahead train'"
        )
    if layers > 1:
        raise HeadsError(f"checkpoints with one MTP layer are served, that of this {name} has {layers}")
    try:
        network: MtpModel = _open_qwen(MtpModel, model) if is_qwen else MtpModel.from_pretrained(model)
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise HeadsError(f"the MTP layer of {config.name_or_path!r} cannot be loaded: {one_line(error)}") from error
    if attention_name(network.config) not in ("eager", "sdpa"):
        network.set_attn_implementation("sdpa")
    network.layers.eval()  # not the embedding and the LM head, which are the model's
    return network


def _open_qwen(kind: type[MtpModel], model: Any) -> MtpModel:
    """Load Qwen's layer, one of full attention, which has other names than the layers that transformers loads."""
    from transformers.core_model_loading import WeightRenaming

    class QwenMtp(kind):  # type: ignore[misc, valid-type] # a base that only newer transformers have
        def get_weight_conversions(self, main_model: Any) -> list[Any]:
            # The last are the model's own, for weights of experts; they apply to names of the model's layers.
            return [*(WeightRenaming(*names) for names in _QWEN_NAMES.items()), *super().get_weight_conversions(model)]

    decoder, config = model.get_decoder(), deepcopy(model.config.get_text_config())
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    config.name_or_path = model.config.name_or_path  # a wrapper of a text model has it
    layer = next(layer for layer in decoder.layers if hasattr(layer, "self_attn"))
    shown = SimpleNamespace(
        config=config,
        get_decoder=lambda: SimpleNamespace(layers=[layer], rotary_emb=decoder.rotary_emb),
        get_input_embeddings=model.get_input_embeddings,
        lm_head=model.get_output_embeddings(),
        _keys_to_ignore_on_load_unexpected=[r"^mtp\."],
    )
    network: MtpModel = QwenMtp.from_pretrained(shown)
    return network


class NativeDrafter(GrowingDrafter):
    """Drafts with the MTP layer: a chain of its most likely guesses, and the other guesses at each level.

    Rows run one after the other: transformers' masks for these layers do not support padding.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", §2.2.
    """

    _past: dict[int, MtpCache]

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        from transformers.cache_utils import MtpCache

        for row, new, state in zip(rows, tokens, states, strict=True):
            if row not in self._past:
                cache = self._past[row] = MtpCache(config=self._heads.config)
                cache.activate_past_recording()
            self._last[row] = self._run(row, new[None], state[None])[:, -1:]

    def draft(self, rows: Sequence[int], max_nodes: int) -> list[GuessTree]:
        trees = []
        for row in rows:

            def run(level: int, tokens: Tensor, features: Tensor, parents: Tensor, row: int = row) -> Tensor:
                return self._run(row, tokens, features)

            trees += self._grow(self._last[row], run, depth=NATIVE_DEPTH, width=1)
            self._past[row].crop(-int(trees[-1].kinds[-1, 0]))
        return trees

    def _guesses(self, out: Tensor, most: int) -> tuple[Tensor, Tensor]:
        return self._guess(unembed(self._model, out), most)

    def _run(self, row: int, tokens: Tensor, states: Tensor) -> Tensor:
        """Run the layer over pairs of tokens `[1, n]` and states `[1, n, hidden]`, after the cached ones."""
        cache = self._past[row]
        begin = 1 + cache.get_seq_length()
        positions = torch.arange(begin, begin + tokens.shape[1], device=states.device)[None]
        out: Tensor = self._heads.forward_layer(0, states, positions, cache, input_ids=tokens)
        return out
