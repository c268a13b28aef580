"""Gemma 4's assistants as drafters: small models that attend to the keys and values of their target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lookahead.errors import HeadsError
from lookahead.model.cache import TreeCache
from lookahead.plugins.heads.guess_tree import GrowingDrafter, GuessTree
from lookahead.plugins.heads.native_mtp import NATIVE_DEPTH
from lookahead.plugins.heads.target import lm_head

ASSISTANTS = "gemma4_assistant", "gemma4_unified_assistant"
"""The types of models that `open_assistant` opens."""


def open_assistant(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Load an assistant for a model, in its dtype and on its device, or raise a `HeadsError`."""
    head = lm_head(model).weight
    options: Any = {"dtype": head.dtype, "use_safetensors": True, "local_files_only": True}
    assistant: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    own, target = assistant.config.get_text_config(), model.config.get_text_config()
    kinds = set(target.layer_types[: _layers_with_keys(target)]) if hasattr(target, "num_kv_shared_layers") else set()
    sizes = {
        "hidden states": (assistant.config.backbone_hidden_size, target.hidden_size),
        "tokens": (own.vocab_size, len(head)),
        "kinds of layers": (sorted(set(own.layer_types)), sorted(kinds)),
    }
    for what, (wanted, size) in sizes.items():
        if wanted != size:
            raise HeadsError(f"an assistant of another model: it reads {what} of {wanted}, and this model has {size}")
    return assistant.to(head.device).eval().requires_grad_(False)  # type: ignore[no-any-return]


def _layers_with_keys(config: Any) -> int:
    """The number of layers of a target that have keys of their own; the others read those of an earlier one."""
    return int(config.num_hidden_layers - config.num_kv_shared_layers)


class AssistantDrafter(GrowingDrafter):
    """Drafts with an assistant: a chain of its most likely guesses, and the other guesses at each level.

    It attends to the keys and values of the target's last layer of each kind, so it reads no text itself, and stays at
    the position of the last token. Rows run one after the other.

    Source: Google 2026, Gemma 4's assistants for multi-token prediction; `SinglePositionMultiTokenCandidateGenerator`
        of transformers.
    """

    shares_cache = True
    _cache: TreeCache

    def share_cache(self, cache: TreeCache) -> None:
        """Read the keys and values of the target here."""
        self._cache = cache

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self._last.update((row, new[None, -1:]) for row, new in zip(rows, states, strict=True))

    def draft(self, rows: Sequence[int], max_nodes: int) -> list[GuessTree]:
        trees = []
        for at, row in enumerate(rows):  # as in the cache
            position = torch.tensor([[int(self._cache.slots.lengths[at])]], device=self._device)  # of the root
            inputs = {"position_ids": position, "shared_kv_states": self._keys_of(at)}

            def run(level: int, tokens: Tensor, out: Tensor, parents: Tensor, inputs: Any = inputs) -> Tensor:
                embedded: Any = self._model.get_input_embeddings()(tokens)
                read = torch.cat((embedded, out[..., : embedded.shape[-1]]), -1)
                said = self._heads(inputs_embeds=read, **inputs)
                return torch.cat((said.last_hidden_state, said.logits), -1)

            root = torch.tensor([[self._rows[row].root]], device=self._device)
            trees += self._grow(run(0, root, self._last[row], root), run, depth=NATIVE_DEPTH, width=1)
        return trees

    def _keys_of(self, at: int) -> dict[str, tuple[Tensor, ...]]:
        """Keys and values of the committed tokens of a row, `[1, heads, tokens, dim]`, by the kind of their layer."""
        config, length = self._model.config.get_text_config(), int(self._cache.slots.lengths[at])
        last = dict(zip(config.layer_types[: _layers_with_keys(config)], self._cache.layers, strict=False))
        shown = {kind: [states[at : at + 1, :length] for states in (kv.keys, kv.values)] for kind, kv in last.items()}
        return {kind: tuple(states.transpose(1, 2).to(self._device) for states in kv) for kind, kv in shown.items()}

    def _guesses(self, out: Tensor, most: int) -> tuple[Tensor, Tensor]:
        return self._guess(out[..., self._heads.config.backbone_hidden_size :], most)
