"""Keys and values of a head's layer, for many rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lookahead.heads.layers import DraftLayer, Rotation, attend

_GROWTH = 1.5


class DraftCache:
    """Keys and values of one layer: those of committed tokens first, those of a tree of guesses behind them.

    Args:
        rows: How many rows there may be.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._states: tuple[Tensor, Tensor] | None = None
        self.lengths = [0] * rows

    def write(self, rows: Sequence[int], first: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Put keys and values `[rows, kv heads, n, dim]` into the n slots from `first` on of each row."""
        end = max(first) + keys.shape[2]
        if self._states is None or self._states[0].shape[1] < end:
            self._grow(end, keys)
        assert self._states is not None
        for held, new in zip(self._states, (keys, values), strict=True):
            for i, (row, slot) in enumerate(zip(rows, first, strict=True)):
                held[row, slot : slot + new.shape[2]] = new[i].transpose(0, 1)

    def read(self, rows: Sequence[int], end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows, `[rows, kv heads, end, dim]` each."""
        assert self._states is not None
        keys, values = (self._pick(held, rows)[:, :end].transpose(1, 2) for held in self._states)
        return keys, values

    def extend(
        self, layer: DraftLayer, rotation: Rotation, rows: Sequence[int], new: Sequence[int], read: Tensor, add: Tensor
    ) -> Tensor:
        """Put what is new behind the committed tokens of some rows, and ask the layer at the last of each row.

        Args:
            layer: The layer.
            rotation: Its positions.
            rows: The rows.
            new: How many tokens are new in each.
            read: `[rows, most, reads]`, what attention reads; shorter rows are padded on the right, where trees stand.
            add: `[rows, most, hidden]`, what it is added to.

        Returns:
            `[rows, hidden]`.
        """
        first = [self.lengths[row] for row in rows]
        positions = torch.tensor(first, device=read.device)[:, None] + torch.arange(max(new), device=read.device)
        self.write(rows, first, *layer.keys_values(read, rotation(read, positions)))
        for row, n in zip(rows, new, strict=True):
            self.lengths[row] += n
        last = torch.tensor(new, device=read.device)[:, None] - 1
        end = max(self.lengths[row] for row in rows)
        at = positions.gather(1, last)
        query = layer.query(take(read, last), rotation(read, at))
        mask = torch.arange(end, device=read.device) <= at[..., None]
        return layer.finish(take(add, last), attend(query, *self.read(rows, end), mask))[:, 0]

    def forget(self, row: int) -> None:
        """Empty a row."""
        self.lengths[row] = 0

    def _pick(self, held: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows; nothing is copied where they stand side by side."""
        if list(rows) == list(range(rows[0], rows[0] + len(rows))):
            return held[rows[0] : rows[0] + len(rows)]
        return held[torch.tensor(rows, device=held.device)]

    def _grow(self, end: int, like: Tensor) -> None:
        """Make room for `end` slots a row, keeping what is there."""
        capacity = int(end * _GROWTH)
        old = self._states
        # Zeros, because a masked slot still takes part in 0 · value.
        keys, values = (like.new_zeros(self._rows, capacity, like.shape[1], like.shape[3]) for _ in range(2))
        if old is not None:
            keys[:, : old[0].shape[1]], values[:, : old[1].shape[1]] = old
        self._states = keys, values


def take(states: Tensor, index: Tensor) -> Tensor:
    """States `[rows, n, size]` at int64 places `[rows, n]` of `[rows, tokens, size]`."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
