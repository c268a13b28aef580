"""The `Backend` protocol between the engine and a model, and the report of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.model.cache import TreeCache

Shape = Literal["trees", "chains"]
OnPrefill = Callable[[int, int], None]
"""Called with the tokens read of the longest prompt, and the length of that prompt."""


class BitPolicy(Enum):
    """Which bits the logits of a row have in half precision on a CPU. On other devices and dtypes all are `ROUNDED`."""

    SOLO = "those of decoding token by token"
    """The bits of decoding the row alone, token by token."""
    BATCH = "those of a batch of transformers"
    """The bits of decoding the nodes of a pass as rows of one batch of transformers."""
    ROUNDED = "equal up to the rounding of sums"
    """Equal up to the rounding of sums."""


@dataclass(frozen=True, slots=True)
class PathReport:
    """One faster implementation of a part of a model."""

    path: str
    serves: bool
    reason: str = ""  # why it does not serve, or which part it serves


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Which implementation serves each part of a model, and why not a faster one."""

    backend: str
    model: str
    paths: tuple[PathReport, ...]  # the fastest last
    bits: str = ""  # of the logits of a row
    dtype: str = ""  # of the model

    @property
    def summary(self) -> str:
        """The backend and the fastest path that serves, such as "CpuBackend: passes as one call"."""
        serving = [path.path for path in self.paths if path.serves]
        return ": ".join([self.backend, *serving[-1:]])

    def __str__(self) -> str:
        lines = [f"{self.model} is served by {self.backend}"]
        for path in self.paths:
            lines.append(f"  {path.path}: {'yes' if path.serves else 'no'}{f', {path.reason}' if path.reason else ''}")
        return "\n".join([*lines, *([f"  bits: {self.bits}"] if self.bits else [])])


class Backend(Protocol):
    """Scores the token trees of some rows with one model. `cache` holds the keys and values of each row.

    Attributes:
        cache: Committed tokens of the rows, and the nodes of their trees after them.
        positions: Size of the model's position table; None if it has no limit.
        counts_nodes: Whether a tree needs a position for every node, not only for every depth.
        is_read_whole: Whether the newest `read` took a single prompt in one pass, as transformers does.
        is_cold: Whether the newest pass included one-time work, such as packing.
        is_ragged: Whether the newest pass computed only the nodes of its trees. If False, rows are padded to the size
            of the largest tree.
        ragged_nodes: Nodes that such a pass may have, all its trees together.
        keeps_hidden: Whether later passes keep hidden states.
        keeps_logits: Whether the logits of later passes are read. If not, a pass that makes `ranks` may return logits
            of no token.
        reads_top: How many likeliest tokens a node's `ranks` have in later passes.
        ranks: `ranked` logits of the newest pass until the next one, if it made them.
        hidden: Hidden states of the newest pass by layer, `[active, nodes of the largest tree, size]`. After `read`
            it holds only the last tokens, `[prompts, 1, size]`.
        prompt_hidden: Hidden states of the newest prompts by layer, `[tokens read, size]` each.
        packs_prompts: Whether `read` takes several prompts without padding, each as if it were alone.
        reused_tokens: Tokens of the newest prompts that were copied from rows which begin alike.
    """

    cache: TreeCache
    positions: int | None
    counts_nodes: bool
    is_read_whole: bool
    is_cold: bool
    is_ragged: bool
    ragged_nodes: int
    keeps_hidden: bool
    keeps_logits: bool
    reads_top: int
    ranks: Tensor | None
    hidden: dict[int, Tensor]
    prompt_hidden: list[dict[int, Tensor]]
    packs_prompts: bool
    reused_tokens: list[int]

    def serving(self, *, is_alone: bool = False) -> AbstractContextManager[None]:
        """Prepare the model for passes. All passes must run inside this block; blocks may be nested.

        Other calls of the model, on this thread or another, are not affected. With `is_alone` no code of a user's runs
        in the block that could change the model: what a pass has checked, later ones do not check again.
        """

    def has_changed(self) -> bool:
        """Whether the model is another one than at the first call of this method, in the same `serving` block.

        From then on passes run the model's own code. A user's processor or criterion may change it between steps.
        """

    def reads_alone(self, policy: BitPolicy) -> bool:
        """Whether prompts must be read one at a time, so that their rows keep their bits."""

    def read(
        self,
        prompts: Sequence[IntArray],
        first: int = 0,
        *,
        encoded: Any = None,
        texts: Sequence[IntArray] | None = None,
        as_whole: bool = False,
        on_prefill: OnPrefill | None = None,
    ) -> Tensor:
        """Read prompts into the cache. The last token of each is the first root, and is not committed yet.

        Recurrent states are those after the root, which is committed before trees are scored.

        Args:
            prompts: int32 `[tokens]` for each active row from `first` on, longer than the row's cached prefix.
            first: The first of these rows.
            encoded: Encoder outputs of these rows, which join the batch with it.
            texts: Tokens in the cache for each row before `first`, from its beginning. A prompt copies the keys and
                values of the text, or earlier prompt, that begins most like it. None if it must not.
            as_whole: Whether half-precision prompts have the bits of a pass over the whole behind their cached
                prefixes, which have these bits.
            on_prefill: Called before the first pass and after every pass.

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
            scored: int64 `[active]`, at least 1: the first `scored[row]` nodes of each tree already have their KV in
                their slots and get no logits. Reading a prompt scores the root.

        Returns:
            `[active, nodes of the largest tree, vocab]`.
        """

    def retire(self, row: int) -> int:
        """Remove a finished row from the passes; returns the last row, which takes its place."""

    def report(self, policy: BitPolicy = BitPolicy.ROUNDED) -> BackendReport:
        """Which implementation serves each part of the model, and why not a faster one; rows have a policy."""
