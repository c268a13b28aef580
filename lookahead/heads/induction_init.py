"""How heads begin that look back: they look up where a token stood before, and say what stands there.

Trained from random weights, heads find this out only after far more text than it takes to train the rest of them, and
until then they guess by the newest token alone.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads" (what is built here); that attention can be begun
    with it is our own observation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.heads.base_model import hidden_states, lm_head
from lookahead.heads.eagle import FusedEagleHead
from lookahead.heads.layers import DraftLayer, Rotation

FAINT = 0.1
"""Share of what is not set here, so that it does not hide what is."""

_MATCH = 36.0  # attention score of a place that holds the token sought; others have 0, give or take a sixth of it
_STEADY = 1 / 512  # radians a token: dimensions that turn no faster tell tokens apart over hundreds of places
_ROWS = 8192  # of the tables of tokens that are compared, at most


@torch.no_grad()
def begin_looking_up(
    layer: DraftLayer, rotation: Rotation, *, sought: Tensor, known: Tensor, said: Tensor, spoken: Tensor
) -> None:
    """Set the attention of an untrained layer so that it finds places by a token, and says the one that stands there.

    Tokens are vectors `[hidden]` with a mean square of 1 here. Queries and keys turn them by the same random matrix.

    Args:
        layer: The layer.
        rotation: Its positions.
        sought: `[hidden, reads]`, the token to look for, of what attention reads.
        known: Likewise the token that a place is found by.
        said: Likewise the token to say.
        spoken: `[hidden, hidden]`, from that to what the layer adds.
    """
    attention, dim, device = layer.self_attn, layer.self_attn.head_dim, layer.self_attn.q_proj.weight.device
    sought, known, said, spoken = (each.to(device) for each in (sought, known, said, spoken))
    hidden, steady = len(spoken), _steady_dimensions(rotation).to(device)
    heads, kv_heads = (proj.out_features // dim for proj in (attention.q_proj, attention.k_proj))
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, layer.mlp.down_proj):
        projection.weight.mul_(FAINT)
    size = (_MATCH * dim**0.5 / len(steady)) ** 0.5
    part = nn.init.orthogonal_(torch.empty(kv_heads * dim, hidden, device=device))
    attention.v_proj.weight += part @ said
    for index in range(kv_heads):
        turned = size * nn.init.orthogonal_(torch.empty(len(steady), hidden, device=device))
        attention.k_proj.weight[index * dim + steady] += turned @ known
        back = spoken @ part[index * dim : (index + 1) * dim].T * kv_heads / heads
        for sharing in range(index * heads // kv_heads, (index + 1) * heads // kv_heads):
            attention.q_proj.weight[sharing * dim + steady] += turned @ sought
            attention.o_proj.weight[:, sharing * dim : (sharing + 1) * dim] += back


@torch.no_grad()
def begin_fused(head: FusedEagleHead, model: PreTrainedModel) -> None:
    """Let a head look up what followed the newest token, whose lowest hidden states are the model's embeddings.

    It reads pairs of what the model made of a token, and the embedding of the token after it: the pairs behind earlier
    occurrences of the newest token are known by the former, and the latter is what followed.

    Args:
        head: Untrained; its vocabulary may be a part of the model's.
        model: Its model.
    """
    hidden = head.config.hidden_size
    one, none = torch.eye(hidden), torch.zeros(hidden, hidden)
    head.fc.weight.zero_()
    head.fc.weight[:, :hidden] = one * FAINT / _size_of_embeddings(model)
    before, after = torch.cat((none, one), 1), torch.cat((one, none), 1)
    spoken = _spoken(model)
    begin_looking_up(head.midlayer, head.rotation, sought=after, known=before, said=after, spoken=spoken)


def evened(vectors: Tensor) -> Tensor:
    """Vectors `[..., size]` with a mean square of 1."""
    return vectors * vectors.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()


def _steady_dimensions(rotation: Rotation) -> Tensor:
    """The dimensions of an attention head that positions hardly turn, int64 `[n]`; at least a quarter of them."""
    frequencies = rotation._rotary.inv_freq
    half = len(frequencies)
    count = max(int((frequencies.cpu() <= _STEADY).sum()), half // 4, 1)
    slowest = torch.arange(half - count, half)
    return torch.cat((slowest, slowest + half))


def _size_of_embeddings(model: PreTrainedModel) -> float:
    """The root mean square of what the first layer reads."""
    weight = lm_head(model).weight
    ids = torch.arange(min(len(weight), 64), device=weight.device)
    return max(1e-6, float(hidden_states(model, ids[None], (0,)).float().square().mean().sqrt()))


def _spoken(model: PreTrainedModel) -> Tensor:
    """The linear map from embeddings, their sizes made equal, to what the LM head knows tokens by: `[hidden, hidden]`.

    Where the two share their weights it leaves the direction of an embedding nearly as it is.
    """
    weight: Tensor = lm_head(model).weight
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    count = min(len(weight), len(table))
    rows = torch.linspace(0, count - 1, min(count, _ROWS)).long()
    embedded, spoken = (each[rows.to(each.device)].float().cpu() for each in (table, weight))
    mapped: Tensor = torch.linalg.lstsq(evened(embedded), spoken, driver="gelsd").solution.T
    return mapped * (len(mapped) / mapped.square().sum()) ** 0.5
