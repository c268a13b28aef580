"""First weights of heads that attend: they look up where a token stood before, and predict what followed it.

Trained from random weights, heads learn this only from far more text than the rest of what they learn, and until then
they guess by the last token alone.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads" (what is built here); that attention can be
    initialized with it is our own observation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.heads.base_model import hidden_states, lm_head
from lookahead.heads.eagle import FusedEagleHead, fused_layers
from lookahead.heads.layers import DraftLayer, Rotation, layer_config
from lookahead.heads.mtp import MtpHeads

_FAINT = 0.1  # scale of the random weights that stay, so that they do not hide what is set
_MATCH = 36.0  # attention score of a position with the token sought; others have 0, give or take a sixth of it
_SLOW = 1 / 512  # radians a token: dimensions that turn no faster tell tokens apart over hundreds of positions
_ROWS = 8192  # maximum number of rows of the embeddings that are compared
_TOKENS = 50_000  # maximum number of tokens of examples that are read
_CERTAINTY = 12.0  # logit of the token that is found
_SHRINKAGE = 1e-3  # of the least squares, relative to the mean square of what is read


@torch.no_grad()
def fresh_fused(model: PreTrainedModel, tokens: Sequence[int]) -> FusedEagleHead:
    """An untrained EAGLE-3 head with the model's LM head; that of a small model looks up the last token.

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
        _begin_fused(head, model)
    return head


def _begin_fused(head: FusedEagleHead, model: PreTrainedModel) -> None:
    """Let a head that reads the model's embeddings look up what followed the last token.

    It reads pairs of a token and the embedding of the token after it: a position is found by the former, and predicts
    the latter.
    """
    hidden, weight = head.config.hidden_size, lm_head(model).weight
    ids = torch.arange(min(len(weight), 64), device=weight.device)
    size = max(1e-6, float(hidden_states(model, ids[None], (0,)).float().square().mean().sqrt()))
    one, none = torch.eye(hidden), torch.zeros(hidden, hidden)
    head.fc.weight.zero_()
    head.fc.weight[:, :hidden] = one * _FAINT / size
    before, after = torch.cat((none, one), 1), torch.cat((one, none), 1)
    _look_up(head.midlayer, head.rotation, sought=after, known=before, said=after, spoken=_embedding_to_lm_head(model))


@torch.no_grad()
def begin_mtp(heads: MtpHeads, model: PreTrainedModel, examples: Iterable[Mapping[str, Tensor]]) -> None:
    """Let untrained heads look up the next token: head k predicts what stood k + 1 positions behind it.

    The model's last hidden states tell the next token, its low ones the tokens at and before a position. The linear
    maps from states to tokens are found by least squares on the examples.

    Args:
        heads: Untrained.
        model: Their model.
        examples: `input_ids` int64 `[tokens]` and `wanted` bool `[tokens]`; the first ones are read.
    """
    weight = lm_head(model).weight.float()
    vectors, hidden, read = _unit(weight), weight.shape[1], 0
    following, own = _LeastSquares(hidden), _LeastSquares(hidden)
    before = [_LeastSquares(hidden) for _ in range(len(heads))]
    for example in examples:
        ids, wanted = example["input_ids"].to(weight.device), example["wanted"].to(weight.device)
        states = hidden_states(model, ids[None], heads.hidden_layers)[0].float()
        low, last = (_unit(each) for each in states.chunk(2, dim=-1))
        following.add(last[:-1][wanted[1:]], vectors[ids[1:][wanted[1:]]])
        own.add(low, vectors[ids])
        for index, squares in enumerate(before, start=1):
            squares.add(low[index:], vectors[ids[:-index]])
        read += len(ids)
        if read >= _TOKENS:
            break
    none = torch.zeros(hidden, hidden)
    spoken = torch.eye(hidden) * _CERTAINTY / float(hidden**0.5 * weight.norm(dim=-1).mean())
    for index, squares in enumerate(before):
        _look_up(
            heads.head(index),
            heads.rotation,
            sought=torch.cat((none, following.solve()), 1),
            known=torch.cat((squares.solve(), none), 1),
            said=torch.cat((own.solve(), none), 1),
            spoken=spoken,
        )
        heads.head(index).kept.fill_(_FAINT / 2)


def _look_up(
    layer: DraftLayer, rotation: Rotation, *, sought: Tensor, known: Tensor, said: Tensor, spoken: Tensor
) -> None:
    """Set the attention of an untrained layer so that it finds positions by a token, and gives the one to predict.

    Tokens are vectors `[hidden]` with a mean square of 1 here. Queries and keys turn them by the same random matrix.

    Args:
        layer: The layer.
        rotation: Its rotary embedding.
        sought: `[hidden, reads]`, the token to look for, of what attention reads.
        known: Likewise the token that a position is found by.
        said: Likewise the token to predict.
        spoken: `[hidden, hidden]`, from that to what the layer adds.
    """
    attention, dim, device = layer.self_attn, layer.self_attn.head_dim, layer.self_attn.q_proj.weight.device
    sought, known, said, spoken = (each.to(device) for each in (sought, known, said, spoken))
    hidden, slow = len(spoken), _slow_dimensions(rotation).to(device)
    heads, kv_heads = (proj.out_features // dim for proj in (attention.q_proj, attention.k_proj))
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, layer.mlp.down_proj):
        projection.weight.mul_(_FAINT)
    size = (_MATCH * dim**0.5 / len(slow)) ** 0.5
    part = nn.init.orthogonal_(torch.empty(kv_heads * dim, hidden, device=device))
    attention.v_proj.weight += part @ said
    for index in range(kv_heads):
        turned = size * nn.init.orthogonal_(torch.empty(len(slow), hidden, device=device))
        attention.k_proj.weight[index * dim + slow] += turned @ known
        back = spoken @ part[index * dim : (index + 1) * dim].T * kv_heads / heads
        for sharing in range(index * heads // kv_heads, (index + 1) * heads // kv_heads):
            attention.q_proj.weight[sharing * dim + slow] += turned @ sought
            attention.o_proj.weight[:, sharing * dim : (sharing + 1) * dim] += back


def _slow_dimensions(rotation: Rotation) -> Tensor:
    """The dimensions of an attention head that positions hardly turn, int64 `[n]`; at least a quarter of them."""
    frequencies = rotation.inv_freq
    half = len(frequencies)
    count = max(int((frequencies.cpu() <= _SLOW).sum()), half // 4, 1)
    slowest = torch.arange(half - count, half)
    return torch.cat((slowest, slowest + half))


def _unit(vectors: Tensor) -> Tensor:
    """Vectors `[..., size]` with a mean square of 1."""
    return vectors * vectors.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()


def _embedding_to_lm_head(model: PreTrainedModel) -> Tensor:
    """The linear map `[hidden, hidden]` from embeddings of unit size to the rows of the LM head.

    Where the two share their weights it leaves the direction of an embedding nearly as it is.
    """
    weight: Tensor = lm_head(model).weight
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    count = min(len(weight), len(table))
    rows = torch.linspace(0, count - 1, min(count, _ROWS)).long()
    embedded, spoken = (each[rows.to(each.device)].float().cpu() for each in (table, weight))
    mapped: Tensor = torch.linalg.lstsq(_unit(embedded), spoken, driver="gelsd").solution.T
    return mapped * (len(mapped) / mapped.square().sum()) ** 0.5


class _LeastSquares:
    """Least squares of vectors `[n, size]` on others, added up batch by batch."""

    def __init__(self, size: int) -> None:
        self._moments = torch.zeros(size, size)
        self._products = torch.zeros(size, size)

    def add(self, given: Tensor, wanted: Tensor) -> None:
        self._moments += (given.T @ given).cpu()
        self._products += (wanted.T @ given).cpu()

    def solve(self) -> Tensor:
        """The matrix `[size, size]` from the given to the wanted vectors."""
        size = len(self._moments)
        least = _SHRINKAGE * self._moments.trace().clamp(min=1e-6) / size
        solved: Tensor = torch.linalg.solve(self._moments + least * torch.eye(size), self._products.T).T
        return solved
