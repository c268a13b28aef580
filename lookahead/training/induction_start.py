"""How MTP heads begin: each looks up what stood so many places behind the next token before.

What the model's hidden states tell of the tokens is found by least squares on some of the text that is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.heads.base_model import hidden_states, lm_head
from lookahead.heads.induction_init import FAINT, begin_looking_up, evened
from lookahead.heads.mtp import MtpHeads
from lookahead.training.examples import Examples, collate

_TOKENS = 50_000  # of examples that are read, at most
_CERTAINTY = 12.0  # logit of the token that is found
_SHRINKAGE = 1e-3  # of the least squares, over the mean square of what is read


@torch.no_grad()
def begin_mtp(heads: MtpHeads, model: PreTrainedModel, train: Examples) -> None:
    """Let untrained heads look up what followed the next token before, instead of saying what the LM head says.

    The model's last hidden states tell of the next token, its low ones of the tokens at and before a place.

    Args:
        heads: Untrained.
        model: Their model.
        train: What they will be trained on.
    """
    weight = lm_head(model).weight.float()
    vectors, hidden = evened(weight), weight.shape[1]
    following, own = _Squares(hidden), _Squares(hidden)
    before = [_Squares(hidden) for _ in range(len(heads))]
    for ids, wanted, states in _read(model, train, heads.hidden_layers):
        low, last = (evened(each) for each in states.chunk(2, dim=-1))
        following.add(last[:-1][wanted[1:]], vectors[ids[1:][wanted[1:]]])
        own.add(low, vectors[ids])
        for index, squares in enumerate(before, start=1):
            squares.add(low[index:], vectors[ids[:-index]])
    nothing = torch.zeros(hidden, hidden)
    spoken = torch.eye(hidden) * _CERTAINTY / float(hidden**0.5 * weight.norm(dim=-1).mean())
    for index, squares in enumerate(before):
        begin_looking_up(
            heads.head(index),
            heads.rotation,
            sought=torch.cat((nothing, following.solve()), 1),
            known=torch.cat((squares.solve(), nothing), 1),
            said=torch.cat((own.solve(), nothing), 1),
            spoken=spoken,
        )
        heads.head(index).kept.fill_(FAINT / 2)


def _read(model: PreTrainedModel, train: Examples, layers: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of some examples the ids, which of them are wanted, and the model's hidden states `[tokens, size]`, in fp32."""
    device, read = lm_head(model).weight.device, 0
    for index in range(len(train)):
        batch = {name: value.to(device) for name, value in collate([train[index]]).items()}
        yield batch["input_ids"][0], batch["wanted"][0], hidden_states(model, batch["input_ids"], layers)[0].float()
        read += batch["input_ids"].numel()
        if read >= _TOKENS:
            return


class _Squares:
    """Least squares of vectors on others, taken in bit by bit."""

    def __init__(self, size: int) -> None:
        self._moments = torch.zeros(size, size)
        self._products = torch.zeros(size, size)

    def add(self, given: Tensor, wanted: Tensor) -> None:
        """Take in `[n, size]` and what is to be told from it, `[n, size]`."""
        self._moments += (given.T @ given).cpu()
        self._products += (wanted.T @ given).cpu()

    def solve(self) -> Tensor:
        """The matrix `[size, size]` from the one to the other."""
        size = len(self._moments)
        least = _SHRINKAGE * self._moments.trace().clamp(min=1e-6) / size
        solved: Tensor = torch.linalg.solve(self._moments + least * torch.eye(size), self._products.T).T
        return solved
