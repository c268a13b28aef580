"""Calibration of drafts: the probabilities of drafted tokens against the tokens that the target chose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypedDict

import numpy as np

from lookahead.engine.row import StepOutput

LEARNED = 2_000
"""Tokens after which drafts must be calibrated."""
_DEPTHS = {1: "1", 2: "2", 3: "3-4", 5: "5-8", 9: "9+"}  # by smallest depth


class Kept(TypedDict):
    """The sum of the probabilities of drafted tokens, and the number of them that the target chose."""

    promised: float
    accepted: int


class Calibration:
    """Counts promised and accepted tokens by source and depth.

    A drafted token counts only if the target chose its parent. It promises its probability given the parent, and is
    accepted if the target chose it next. A token of several sources counts for "several".

    Args:
        learned: The number of first tokens that are not counted.
    """

    def __init__(self, learned: int = LEARNED) -> None:
        self._left = learned
        self._kept: dict[str, dict[str, Kept]] = defaultdict(
            lambda: {depth: Kept(promised=0.0, accepted=0) for depth in ("all", *_DEPTHS.values())}
        )

    def count(self, names: Sequence[str], output: StepOutput) -> None:
        """Count one row's step; `names` are the sources in bit order."""
        self._left, is_learning = self._left - len(output.tokens), self._left > 0
        if is_learning or output.draft is None:
            return
        tree, reach = output.draft.tree, output.draft.path_probs
        before = reach[tree.parents]
        chances = np.divide(reach, before, out=np.zeros(len(tree)), where=before > 0)
        chosen = dict(zip(output.path.tolist(), output.tokens.tolist(), strict=False))  # the token after each node
        for node in range(1, len(tree)):
            if (token := chosen.get(int(tree.parents[node]))) is None:
                continue
            bits = int(tree.sources[node])
            source = "several" if bits & bits - 1 else names[bits.bit_length() - 1]
            depth = _DEPTHS[max(least for least in _DEPTHS if least <= tree.depths[node])]
            for cell in (self._kept[who][where] for who in ("all", source) for where in ("all", depth)):
                cell["promised"] += float(chances[node])
                cell["accepted"] += int(tree.tokens[node] == token)

    def report(self) -> dict[str, dict[str, Kept]]:
        """Promised and accepted tokens by source and by depth."""
        return {
            source: {depth: Kept(promised=round(each["promised"], 1), accepted=each["accepted"]) for depth, each in row}
            for source, row in ((source, depths.items()) for source, depths in self._kept.items())
        }

    def lines(self) -> Iterator[str]:
        """A table of accepted tokens per promised token, with the promised tokens in brackets."""
        if self._kept:
            yield f"{'accepted/promised':18}" + "".join(f"{depth:>16}" for depth in ("all", *_DEPTHS.values()))
        for source, depths in self._kept.items():
            cells = ((each["accepted"] / max(each["promised"], 1e-9), each["promised"]) for each in depths.values())
            yield f"{source:18}" + "".join(f"{ratio:9.3f} {f'({many:.0f})':>6}" for ratio, many in cells)
