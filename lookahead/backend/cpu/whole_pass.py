"""Passes over one token tree that run all layers of a model as one call of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from lookahead.backend.cpu.exact_attention import attends_by_kernel
from lookahead.backend.cpu.fused_layers import FAMILIES, is_bare, name_of, takes
from lookahead.backend.cpu.layer_jobs import FEWEST_SLOTS, MAX_TABLE_NODES, LayerParts, LayerTable
from lookahead.backend.cpu.linears import packed_weights
from lookahead.backend.pass_attention import span_of
from lookahead.backend.tree_pass import TreePass
from lookahead.hf.attention import real_config
from lookahead.hf.cache import TreeCache
from lookahead.hf.facts import own_attention
from lookahead.hf.model_code import code_of


class WholePass:
    """The passes of a model whose decoder layers are alike, and which runs them by the code that transformers ships.

    The embedding, the rotary positions, the last norm and the head are called as modules: hooks of these run.
    """

    def __init__(self, model: Any, layers: Sequence[LayerParts]) -> None:
        self._model, self._decoder, self._layers = model, model.model, list(layers)
        self._linears = [each for parts in layers for each in parts.linears]
        spans = [(each.options.get("sliding_window", span_of(each.attention, {}).window), each) for each in layers]
        self._by_window = {  # the attention of layers, by how far they look back
            window: own_attention(each.attention, real_config(each.attention.config)) for window, each in spans
        }
        self._known: dict[Any, Any] = {}  # of `packed_weights`

    def __call__(self, tree_pass: TreePass, cache: TreeCache) -> Tensor | None:
        """The logits of all nodes, `[1, nodes, vocab]`; None for a pass that the kernels do not serve.

        The pass runs within `cpu_pass.running`.
        """
        if (
            len(tree_pass.tokens) > 1
            or cache.slots.capacity < FEWEST_SLOTS
            or len(cache.layers) != len(self._layers)
            or self._decoder.config.num_hidden_layers != len(self._layers)
            or cache.places(0) is None
        ):
            return None
        hidden = self._decoder.embed_tokens(tree_pass.tokens)
        weights = packed_weights(self._linears, hidden, self._known)
        is_served = weights and takes(hidden, self._layers[0].norms[0])
        if not is_served or not self._attends(tree_pass, cache, weights[0].outputs):
            return None
        positions = self._decoder.rotary_emb(hidden, position_ids=tree_pass.positions)
        table: Any = cache.table
        if table is None or not table.serves(weights):
            table = cache.table = LayerTable(self._layers, weights, cache, hidden, positions[0].shape[-1])
        if not table.is_right:
            return None
        hidden = table.run(hidden, positions, tree_pass.per_node)
        logits: Tensor = self._model.lm_head(self._decoder.norm(hidden))
        return logits

    def _attends(self, tree_pass: TreePass, cache: TreeCache, outputs: int) -> bool:
        """Whether the kernel attends in all layers, whose queries have so many numbers."""
        layer, per_node = cache.layers[0], tree_pass.per_node
        heads = outputs // layer.keys.shape[3]
        slots, is_exact = (layer.keys, layer.values), tree_pass.attends_per_node
        return len(per_node.trees[0]) <= MAX_TABLE_NODES and all(
            attends_by_kernel(own, *slots, heads, window, per_node, is_exact=is_exact)
            for window, own in self._by_window.items()
        )


def whole_pass(model: nn.Module, layers: Sequence[LayerParts]) -> WholePass | str:
    """The passes of a model with these fused layers, or why they are not one call."""
    if not layers:
        return "no layer is fused"
    kinds = {(type(parts.layer), *(each.weight.shape for each in parts.linears)) for parts in layers}
    if len(kinds) > 1 or [parts.attention.layer_idx for parts in layers] != list(range(len(layers))):
        return "its layers are not alike"
    file, family = type(layers[0].layer).__module__, FAMILIES[name_of(layers[0].layer)]
    decoder, names = getattr(model, "model", None), (f"{family}ForCausalLM", f"{family}Model")
    if decoder is None or [name_of(model), name_of(decoder)] != [(file, name) for name in names]:
        return f"it is no {names[0]} of transformers"
    held = decoder._modules.get("layers")
    if type(held) is not nn.ModuleList or len(held) != len(layers):
        return "some of its layers are not fused"
    if not all(map(is_, held, (parts.layer for parts in layers))):
        return "its layers stand in another order"
    owners = (model, decoder, held)
    if code_of(frozenset(map(type, owners))).foreign or not (is_bare(model) and is_bare(decoder)):
        return "hooks or code of a user's stand around its layers"
    return WholePass(model, layers)
