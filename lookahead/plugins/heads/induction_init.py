"""Initial weights of attention heads: an induction head, which finds an earlier token and copies its continuation.

Learning this from random weights needs far more text than learning the rest.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads"; that attention can be initialized as one is our
    own observation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lookahead.plugins.heads.eagle import FusedEagleHead, fused_layers
from lookahead.plugins.heads.independent_heads import MtpHeads
from lookahead.plugins.heads.layers import DraftLayer, hidden_states, layer_config, lm_head

_FAINT = 0.1  # scale of the remaining random weights
_MATCH = 36.0  # attention score of a matching position; others have 0, with noise up to a sixth of it
_SLOW = 1 / 512  # radians per token: slower dimensions match tokens over hundreds of positions
_TOKENS = 50_000  # maximum tokens read from examples
_CERTAINTY = 12.0  # logit of the found token
_SHRINKAGE = 1e-3  # ridge of the least squares, relative to the mean square of each input
_SHRINKAGE_OF_LAYERS = 1e-2  # the same for maps from several layers
_SURE = 0.7  # length of a predicted state relative to the model's, for less certainty

Example = Mapping[str, Tensor]
Read = Callable[[Example], Tensor]
"""Returns the hidden states `[tokens, layers · hidden]` of a training example."""


@torch.no_grad()
def fresh_fused(model: PreTrainedModel, tokens: Sequence[int]) -> FusedEagleHead:
    """An untrained EAGLE-3 head for the token ids in `tokens`, ascending, with the model's LM head.

    For a small model its attention is an induction head: it looks up the earlier successor of the last token.
    """
    head = FusedEagleHead(layer_config(model), hidden_layers=fused_layers(model), draft_vocab=len(tokens))
    chosen = torch.tensor(tokens)
    head.d2t.copy_(chosen - torch.arange(len(tokens)))
    weight = lm_head(model).weight
    head.lm_head.weight.copy_(weight[chosen.to(weight.device)])
    # Logits start near 1, since wrong certainty takes longer to unlearn.
    head.norm.weight.fill_(1.0 / float(head.lm_head.weight.norm(dim=-1).mean()))
    if head.hidden_layers[0] != 0:
        return head
    # The input is a token and the embedding of the next token: keys hold the former, values the latter.
    hidden, ids = head.config.hidden_size, torch.arange(min(len(weight), 64), device=weight.device)
    size = max(1e-6, float(hidden_states(model, ids[None], (0,)).float().square().mean().sqrt()))
    one, none = torch.eye(hidden), torch.zeros(hidden, hidden)
    head.fc.weight.zero_()
    head.fc.weight[:, :hidden] = one * _FAINT / size
    token, following = torch.cat((none, one), 1), torch.cat((one, none), 1)
    # The output maps embeddings of unit size to the rows of the LM head.
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    squares, count = _LeastSquares(hidden, hidden), min(len(weight), len(table))
    squares.add(_unit(table[:count].float()), weight[:count].float().to(table.device))
    output = squares.solve()
    output *= (hidden / output.square().sum()) ** 0.5
    _set_induction(head.midlayer, head.rotation, query=following, key=token, value=following, output=output)
    return head


@torch.no_grad()
def begin_fused(head: FusedEagleHead, model: PreTrainedModel, examples: Iterable[Example], read: Read) -> None:
    """Initialize an EAGLE-3 head of a larger model to predict the next input of the LM head by a linear map.

    The map takes the layers that the head reads and the embedding of the next token; it is found by least squares on
    the first examples. The layers go through `fc`, the embedding through attention to positions of the same token.
    """
    hidden, table = head.config.hidden_size, model.get_input_embeddings()
    squares, count, size = _LeastSquares(4 * hidden, hidden), 0, 0.0
    for example in examples:
        ids = example["input_ids"].to(head.d2t.device)
        layers, last = read(example).split((3 * hidden, hidden), dim=-1)
        # Skip the first position: there the hidden states of many models are a hundred times as large.
        squares.add(torch.cat((layers[1:-1], _unit(table(ids[2:]).float())), -1), last[2:])
        count, size = count + len(ids), size + float(last[2:].square().mean(-1).sqrt().sum())
        if count >= _TOKENS:
            break
    solved = squares.solve(_SHRINKAGE_OF_LAYERS).to(head.d2t.device)
    head.fc.weight.copy_(solved[:, : 3 * hidden])
    head.norm.weight.fill_(_SURE * size / count)
    own = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1).to(solved.device)
    # Attention keeps the values with the largest singular values, as many as fit.
    left, scale, right = torch.linalg.svd(solved[:, 3 * hidden :])
    most = head.midlayer.self_attn.v_proj.out_features
    value, output = right[:most] @ own, (left * scale)[:, :most]
    _set_induction(head.midlayer, head.rotation, query=own, key=own, value=value, output=output)


@torch.no_grad()
def begin_mtp(heads: MtpHeads, model: PreTrainedModel, examples: Iterable[Example], read: Read) -> None:
    """Initialize heads to look up the next token: head k predicts the token k + 1 positions after its last occurrence.

    The model's last hidden states encode the next token, its low ones the tokens at and before a position. The linear
    maps from states to tokens are found by least squares on the first examples.
    """
    weight = lm_head(model).weight.float()
    vectors, hidden, count = _unit(weight), weight.shape[1], 0
    following, own = _LeastSquares(hidden, hidden), _LeastSquares(hidden, hidden)
    before = [_LeastSquares(hidden, hidden) for _ in range(heads.depth)]
    for example in examples:
        ids, wanted = example["input_ids"].to(weight.device), example["wanted"].to(weight.device)
        low, last = (_unit(each) for each in read(example).chunk(2, dim=-1))
        following.add(last[:-1][wanted[1:]], vectors[ids[1:][wanted[1:]]])
        own.add(low, vectors[ids])
        for index, squares in enumerate(before, start=1):
            squares.add(low[index:], vectors[ids[:-index]])
        count += len(ids)
        if count >= _TOKENS:
            break
    none = torch.zeros(hidden, hidden)
    output = torch.eye(hidden) * _CERTAINTY / float(hidden**0.5 * weight.norm(dim=-1).mean())
    for index, squares in enumerate(before):
        _set_induction(
            heads.head(index),
            heads.rotation,
            query=torch.cat((none, following.solve()), 1),
            key=torch.cat((squares.solve(), none), 1),
            value=torch.cat((own.solve(), none), 1),
            output=output,
        )
        heads.head(index).kept.fill_(_FAINT / 2)


def _set_induction(
    layer: DraftLayer, rotation: LlamaRotaryEmbedding, *, query: Tensor, key: Tensor, value: Tensor, output: Tensor
) -> None:
    """Set the attention of an untrained layer to find positions by a token and add the token to predict.

    Tokens are vectors `[hidden]` with a mean square of 1. Queries and keys share a random rotation of them. `query`,
    `key` `[hidden, reads]` and `value` `[values, reads]` map the input of attention to the token to look for, the token
    that identifies a position, and the token to predict; `output` `[hidden, values]` maps the latter to the layer's
    output.
    """
    attention, dim, device = layer.self_attn, layer.self_attn.head_dim, layer.self_attn.q_proj.weight.device
    query, key, value, output = (each.to(device) for each in (query, key, value, output))
    # Dimensions that rotate slowly with the position, at least a quarter of all.
    hidden, half = len(output), len(rotation.inv_freq)
    count = max(int((rotation.inv_freq <= _SLOW).sum()), half // 4, 1)
    slow = torch.arange(half - count, half, device=device).repeat(2)
    slow[count:] += half
    heads, kv_heads = (proj.out_features // dim for proj in (attention.q_proj, attention.k_proj))
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, layer.mlp.down_proj):
        projection.weight.mul_(_FAINT)
    size = (_MATCH * dim**0.5 / len(slow)) ** 0.5
    part = nn.init.orthogonal_(torch.empty(kv_heads * dim, len(value), device=device))
    attention.v_proj.weight += part @ value
    for index in range(kv_heads):
        turned = size * nn.init.orthogonal_(torch.empty(len(slow), hidden, device=device))
        attention.k_proj.weight[index * dim + slow] += turned @ key
        back = output @ part[index * dim : (index + 1) * dim].T * kv_heads / heads
        for sharing in range(index * heads // kv_heads, (index + 1) * heads // kv_heads):
            attention.q_proj.weight[sharing * dim + slow] += turned @ query
            attention.o_proj.weight[:, sharing * dim : (sharing + 1) * dim] += back


def _unit(vectors: Tensor) -> Tensor:
    """Vectors `[..., size]` with a mean square of 1."""
    return vectors * vectors.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()


class _LeastSquares:
    """Least squares from vectors `[n, size]` to others `[n, out]`, accumulated over batches."""

    def __init__(self, size: int, out: int) -> None:
        self._moments = torch.zeros(size, size)
        self._products = torch.zeros(out, size)

    def add(self, given: Tensor, wanted: Tensor) -> None:
        self._moments += (given.T @ given).cpu()
        self._products += (wanted.T @ given).cpu()

    def solve(self, shrinkage: float = _SHRINKAGE) -> Tensor:
        """The matrix `[out, size]` from given to wanted vectors."""
        least = shrinkage * self._moments.diagonal().clamp(min=1e-6)
        solved: Tensor = torch.linalg.solve(self._moments + least.diag(), self._products.T).T
        return solved
