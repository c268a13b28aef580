"""Making, writing and reading EAGLE heads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from lookahead.errors import HeadsError
from lookahead.heads.base_model import lm_head
from lookahead.heads.eagle import EagleHead, FusedEagleHead
from lookahead.heads.head_files import HeadsConfig, check_base, read_heads, write_heads
from lookahead.heads.induction_init import begin_fused
from lookahead.heads.layers import Rotation, layer_config, read_sizes, try_out, write_sizes

KIND = "eagle"
WEIGHTS = "model.safetensors"
_FILES = (WEIGHTS, "pytorch_model.safetensors")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_SHARED = ("embed_tokens.weight", "t2d")  # the model's own, and what d2t says the other way round


def fresh_eagle(model: PreTrainedModel) -> EagleHead:
    """An untrained head with a layer like those of the model."""
    return EagleHead(layer_config(model))


@torch.no_grad()
def fresh_fused(model: PreTrainedModel, tokens: Sequence[int]) -> FusedEagleHead:
    """An untrained head that reads three layers and begins with the model's LM head.

    That of a small model begins by looking up what followed the newest token before.

    Args:
        model: The model.
        tokens: The token ids that it can propose, ascending.
    """
    head = FusedEagleHead(layer_config(model), hidden_layers=fused_layers(model), draft_vocab=len(tokens))
    chosen = torch.tensor(tokens)
    head.d2t.copy_(chosen - torch.arange(len(tokens)))
    weight = lm_head(model).weight
    head.lm_head.weight.copy_(weight[chosen.to(weight.device)])
    # It begins undecided, with logits near 1: to unlearn wrong certainty takes longer than to learn.
    head.norm.weight.fill_(1.0 / float(head.lm_head.weight.norm(dim=-1).mean()))
    if head.hidden_layers[0] == 0:
        begin_fused(head, model)
    return head


def fused_layers(model: PreTrainedModel) -> tuple[int, int, int]:
    """A low, a middle and a high layer: as published; of a small model its embeddings, its first layer and its last.

    The later layers of a small model keep little of the tokens themselves, which a head looks for further up.
    """
    layers: int = model.config.get_text_config().num_hidden_layers
    return (2, layers // 2, layers - 3) if layers >= 8 else (0, 1, layers)


def write_eagle(head: EagleHead, folder: str | os.PathLike[str], model: PreTrainedModel) -> None:
    """Write a head in bfloat16, and what model it is of, into a folder.

    Raises:
        OSError: It cannot be written.
    """
    sizes = write_sizes(head.config)
    if isinstance(head, FusedEagleHead):
        sizes |= {"draft_vocab_size": len(head.d2t), _LAYERS: list(head.hidden_layers)}
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in head.state_dict().items()
    }
    write_heads(folder, HeadsConfig.of(KIND, model, sizes), WEIGHTS, tensors)


def load_eagle(folder: str | os.PathLike[str], model: PreTrainedModel) -> EagleHead:
    """Read a head of a folder for a model, with its dtype and on its device, ready to guess.

    Args:
        folder: As `write_eagle` left it, or as published for EAGLE-1, 2 (`fc` and `layers.0`) or 3 (`midlayer`), its
            weights in safetensors.
        model: The model it was trained for.

    Raises:
        HeadsError: There is none, it is damaged, of an architecture that is not served, or of another model.
    """
    config, tensors = read_heads(folder, KIND, _FILES)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _SHARED}
    sizes = _layer_sizes(folder, config.sizes, tensors)
    base: Any = model.config.get_text_config()
    check_base(folder, config, model, hidden=sizes.hidden_size, vocab=config.sizes.get("vocab_size", base.vocab_size))
    fused = "midlayer.hidden_norm.weight" in tensors
    layers = _fused_layers(folder, config.sizes, sizes, tensors, model) if fused else (-1,)
    with torch.device("meta"):  # weights made at random would draw from the seed of whoever is decoding
        head = (
            FusedEagleHead(sizes, hidden_layers=layers, draft_vocab=len(tensors["d2t"]))
            if fused
            else EagleHead(sizes, bias="fc.bias" in tensors)
        )
    try:
        head.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise HeadsError(
            f"{folder}: no EAGLE head of an architecture that is served: {' '.join(str(error).split())}"
        ) from error
    weight = lm_head(model).weight
    head.rotation = Rotation(sizes)  # what it holds is no weight, and was made on meta with the rest
    head = head.to(weight.device, weight.dtype).eval().requires_grad_(False)
    try_out(head.layer, head.rotation)
    return head


def _layer_sizes(folder: Any, given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LlamaConfig:
    """The sizes of the layer, as the configuration has them, once it is one that is served."""
    if given.get("hidden_act", "silu") != "silu":
        raise HeadsError(f"{folder}: hidden_act must be silu, got {given['hidden_act']!r}")
    if (layers := given.get("num_hidden_layers", 1)) != 1:
        raise HeadsError(f"{folder}: EAGLE heads of one layer are served, this one has {layers}")
    if given.get("target_hidden_size", given.get("hidden_size")) != given.get("hidden_size"):
        raise HeadsError(f"{folder}: EAGLE heads as wide as their model are served, this one differs from it")
    return read_sizes(folder, {**given, "attention_bias": any(name.endswith("q_proj.bias") for name in tensors)})


def _fused_layers(
    folder: Any, given: Mapping[str, Any], sizes: LlamaConfig, tensors: Mapping[str, Tensor], model: PreTrainedModel
) -> tuple[int, ...]:
    """The layers an EAGLE-3 head reads, once its own vocabulary is checked."""
    if "lm_head.weight" not in tensors or "d2t" not in tensors:
        raise HeadsError(f"{folder}: an EAGLE-3 head needs lm_head.weight and d2t")
    if (
        tensors["d2t"].dtype not in (torch.int64, torch.int32)
        or tensors["d2t"].shape != tensors["lm_head.weight"].shape[:1]
    ):
        raise HeadsError(
            f"{folder}: d2t must hold a whole number for every row of lm_head.weight, got {tensors['d2t'].dtype} of "
            f"shape {tuple(tensors['d2t'].shape)} for {tuple(tensors['lm_head.weight'].shape)}"
        )
    tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    if int(tokens.min()) < 0 or int(tokens.max()) >= sizes.vocab_size:
        raise HeadsError(f"{folder}: d2t names tokens beyond the model's {sizes.vocab_size}")
    named = given.get(_LAYERS) or (given.get("eagle_config") or {}).get(_LAYERS)
    if not named:
        return fused_layers(model)
    most = model.config.get_text_config().num_hidden_layers
    if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer <= most for layer in named):
        raise HeadsError(f"{folder}: {_LAYERS} must be a list of the model's layers, 0 to {most}, got {named!r}")
    return tuple(named)
