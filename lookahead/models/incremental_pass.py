"""Passes over trees that grow level by level: what the new nodes may look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.tree import TokenTree
from lookahead.models.attention import Reach, TreePass
from lookahead.models.cache import TreeSlots


class LevelPass(TreePass):
    """A pass over the nodes that trees gained since an earlier pass, which left the others' KV in their slots.

    Args:
        slots: Where the rows stand, the nodes scored before counted as committed; its pass must have begun.
        trees: One per active row, whole.
        scored: int64 `[active]`; how many of its nodes, the first ones, were scored before.
        has_softcap: As for `TreePass`.
    """

    def __init__(
        self, slots: TreeSlots, trees: Sequence[TokenTree], scored: NDArray[np.int64], *, has_softcap: bool = True
    ) -> None:
        super().__init__(slots, None, has_softcap=has_softcap)
        self._grown = trees
        self._scored = scored
        self._made: dict[tuple[int, Reach, torch.dtype, torch.device], Tensor] = {}
        self.is_from_empty = False
        self.sees_all = self.sees_all and all(int(tree.depths[-1]) == len(tree) - 1 for tree in trees)

    def mask(self, groups: int, reach: Reach, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Additive mask `[active, 1, width * groups, kv]`, laid out as that of `TreePass`."""
        key = (groups, reach, dtype, device)
        if key not in self._made:
            slots = self._slots
            seen = np.zeros((slots.active, 1, slots.width, slots.kv_length), np.bool_)
            for row, tree in enumerate(self._grown):
                self._look(seen[row, 0], tree, int(self._scored[row]), int(slots.lengths[row]), reach)
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
            self._made[key] = mask.repeat_interleave(groups, 2).to(device, non_blocking=True)
        return self._made[key]

    @staticmethod
    def _look(seen: NDArray[np.bool_], tree: TokenTree, scored: int, end: int, reach: Reach) -> None:
        """Say what each new node of a row sees, bool `[width, kv]`; its own slot and those of padding come after `end`.

        A node sees the committed slots and its ancestors, as far as `reach` goes.
        """
        committed, new = end - scored, len(tree) - scored
        seen[new:, committed] = True  # padding looks at the root, so that its softmax stays finite
        if not new:
            return
        positions: NDArray[np.int64] = np.concatenate((np.arange(committed), committed + tree.depths))
        own = positions[end:, None]
        allowed = np.concatenate((np.ones((new, committed), np.bool_), tree.ancestor_mask()[scored:]), 1)
        if reach.window is not None:
            allowed &= positions > own - reach.window
        if reach.chunk is not None:
            allowed &= positions // reach.chunk == own // reach.chunk
        seen[:new, : len(positions)] = allowed
