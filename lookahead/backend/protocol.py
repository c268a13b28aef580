"""How a model scores token trees: the protocol that the engine knows, and what a backend says of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.hf.cache import TreeCache
from lookahead.hf.encoded_rows import Encoded

Shape = Literal["trees", "chains"]
OnPrefill = Callable[[int, int], None]
"""Called with the tokens read of the longest prompt, and its length."""


class BitPolicy(Enum):
    """Which bits the logits of a row have, in half precision on a CPU; elsewhere all are `ROUNDED`."""

    SOLO = "solo"
    """Those of decoding the row alone, token by token."""
    BATCH = "batch"
    """Those of decoding the nodes of a pass as the rows of one batch of transformers."""
    ROUNDED = "rounded"
    """Any: only the rounding of sums differs."""


@dataclass(frozen=True, slots=True)
class PathReport:
    """One way to serve a part of a model faster."""

    path: str
    serves: bool
    reason: str = ""  # why it does not serve, or what it serves


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Which path serves what of a model, and why not a faster one."""

    backend: str
    model: str
    paths: tuple[PathReport, ...]  # the fastest last

    @property
    def summary(self) -> str:
        """The backend and the fastest path that serves, such as "CpuBackend: passes as one call"."""
        serving = [each.path for each in self.paths if each.serves]
        return ": ".join([self.backend, *serving[-1:]])

    def __str__(self) -> str:
        lines = [f"{self.model} is served by {self.backend}"]
        for each in self.paths:
            lines.append(f"  {each.path}: {'yes' if each.serves else 'no'}{f', {each.reason}' if each.reason else ''}")
        return "\n".join(lines)


class Backend(Protocol):
    """How one model scores the token trees of some rows. Each row has its keys and values in `cache`.

    Attributes:
        cache: Committed tokens of the rows, and the nodes of their trees behind them.
        positions: Positions that the model has a table for; None for any number.
        counts_nodes: Whether a tree needs a position for every node, not only for every depth.
        is_aligned: Whether rows must accept equally many tokens, so that they keep one length.
        is_read_whole: Whether the newest prompts were read as transformers reads each alone.
        is_cold: Whether the newest pass did work, such as packing, that later ones do not repeat.
        is_ragged: Whether the newest pass computed the nodes of its trees alone; else those of every row are padded to
            those of the largest tree.
        keeps_hidden: Whether later passes keep hidden states.
        hidden: Hidden states of the newest pass by layer, `[active, nodes of the largest tree, size]`; behind `read`
            those of the last tokens, `[prompts, 1, size]`.
        prompt_hidden: Those of the newest prompts by layer, `[tokens read, size]` each.
    """

    cache: TreeCache
    positions: int | None
    counts_nodes: bool
    is_aligned: bool
    is_read_whole: bool
    is_cold: bool
    is_ragged: bool
    keeps_hidden: bool
    hidden: dict[int, Tensor]
    prompt_hidden: list[dict[int, Tensor]]

    def serving(self) -> AbstractContextManager[None]:
        """Hold what serves the model ready for passes, which all must run inside; blocks may be nested.

        Other calls of the model, on this thread or another, are not affected.
        """

    def reads_alone(self, policy: BitPolicy) -> bool:
        """Whether prompts must be read one at a time, so that their rows keep their bits."""

    def read(
        self,
        prompts: Sequence[IntArray],
        first: int = 0,
        *,
        encoded: Encoded | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> Tensor:
        """Read prompts into the cache. The last token of each is the first root, and is not committed yet.

        Where layers keep states, these are those behind the root: it is committed before trees are scored.

        Args:
            prompts: int32 `[tokens]`, those of the active rows from `first` on, each longer than what the cache holds
                of its row.
            first: The first of these rows.
            encoded: What an encoder has read for these rows, which join with it.
            on_prefill: Called before the first pass and behind every one.

        Returns:
            The logits after their last tokens, `[prompts, 1, vocab]`.
        """

    def score(
        self,
        trees: Sequence[TokenTree],
        policy: BitPolicy = BitPolicy.ROUNDED,
        scored: NDArray[Any] | None = None,
    ) -> Tensor:
        """Logits after every node, in one pass.

        Args:
            trees: One per active row.
            policy: Which bits the logits have.
            scored: int64 `[active]`, at least 1: as many first nodes of each tree have their KV in their slots since
                an earlier pass, and no logits are returned of them. Reading a prompt scores the root.

        Returns:
            `[active, nodes of the largest tree, vocab]`.
        """

    def commit(self, row: int, path: IntArray) -> None:
        """Keep the KV of an accepted path (int32 `[a]`, from node 0) of a row's tree."""

    def retire(self, row: int) -> int:
        """Remove a finished row from the passes; returns the row that took its place."""

    def report(self) -> BackendReport:
        """Which path serves what of the model, and why not a faster one."""
