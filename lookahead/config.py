"""The options of speculative decoding, validated when they are created."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from lookahead.drafting.sizes import DEFAULT_NODES, MAX_NODES_LIMIT, BranchSize
from lookahead.errors import ConfigError

if TYPE_CHECKING:
    from lookahead.drafting.proposal import ProposerFactory

_F = TypeVar("_F", bound=Callable[..., Any])

PROPOSERS = ("prompt", "outputs", "corpus", "recycled", "jacobi", "self")
ACCEPTANCES = {
    "exact": "the tokens of the target",
    "rejection": "other tokens of the same distribution",
    "typical": "another distribution (lossy)",
}
"""The names of the acceptances, and what each of them gives."""
_CHOICES: dict[str, tuple[str | bool, ...]] = {
    "draft": ("auto", "fixed"),
    "acceptance": tuple(ACCEPTANCES),
    "trust_user_code": (True, False),
}

REMOVED = {
    "allow_any_model": "a server serves the models that it is started with",
    "compile": "packed passes are faster on every CPU measured",
    "continuous_batching": "a server always decodes requests together",
    "cuda_graphs": "passes on a GPU are recorded wherever that works",
    "keep_parts": "a line of results holds the summary of the whole document",
    "job": "-t FILE.toml takes the options of a file",
    "joint": "training heads leaves the model as it is",
    "enable_cors": "--cors-origin names the origins that may call a server",
    "exactness": "the bits of decoding alone are kept wherever a comparison shows that this works",
    "guesses": "window=(W, N, G) or --window W,N,G sets G",
    "max_ngram": "contexts of up to 16 tokens are looked up",
    "min_ngram": "contexts from 1 token on are looked up",
    "model_timeout": "the models that a server is started with stay loaded",
    "ngram_size": "window=(W, N) or --window W,N sets N",
    "overlap": "parts of a long document are cut between sections or sentences, and repeat nothing",
    "pack": "weights are packed where that is faster and takes at most a quarter of the memory",
    "pool_from_prompt": "n-grams of the prompt are always among the guesses of the window",
    "price_per_hour": "--dry-run prints the time, which your price multiplies",
    "show_job": "--save FILE.toml keeps the options that a command is called with",
    "sample": "--limit takes the first documents, and 'shuf -n' draws lines or names of files",
}
"""Options removed since the last release, with the reason; each is refused by name for one release."""
_WINDOW_SIZES = (("W", 1, 64), ("N", 2, 16), ("G", 0, 64))  # what a tuple of `window` holds, with its range


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadConfig:
    """Options of drafting and verification.

    Only `acceptance` changes the distribution. In half precision on a CPU passes are bitwise equal to decoding the
    prompt alone, token by token, if a comparison on the model's first use shows that this works;
    `DecodingStats.exactness` reports it. Elsewhere, and in the padded batch of one call, passes score drafts under one
    mask and may round differently, which can change a token where two are about equally likely.

    Attributes:
        proposers: Names of the proposers: `"prompt"` (n-grams of the prompt and the output so far), `"outputs"`
            (n-grams of earlier requests, their outputs and the other rows of the call), `"corpus"` (n-grams of a pool
            file), `"recycled"` (the target's most likely tokens after the same context), `"jacobi"` (the lookahead
            branch) and `"self"` (a copy of the model with weights of 4 bits, made at the first call). A custom proposer
            is any callable, such as a class, that takes a `lookahead.drafting.proposal.Call`
            and returns a `Proposer`. Empty means plain decoding.
        pool: Path of a pool file, made by `lookahead pool build`, to draft from. It adds `"corpus"` to the proposers.
        draft: `"auto"` drafts only nodes that pay for themselves at the measured cost of a step; `"fixed"` drafts all
            that `max_nodes` and `min_probability` allow.
        acceptance: `"exact"` accepts the tokens that the target chooses: the output equals the output of
            `model.generate`, with sampling under the same seed too. `"rejection"` applies speculative sampling to the
            draws of draft models: it accepts more and keeps the distribution, but a seed gives different tokens. It
            requires proposers that draw (`lookahead.DraftModel`) and allows none of the names. `"typical"` is lossy:
            with sampling it accepts drafts that the target finds likely enough, which changes the distribution;
            `DecodingStats.divergence` measures by how much.
        max_nodes: Maximum draft nodes of one row's tree, the root excluded, 1 to 512. `None` means 64, plus the window
            and the guesses while the lookahead branch runs; one less where passes are recorded as CUDA graphs, since
            trees with their root are then padded to powers of two.
        min_probability: Minimum probability that a draft node is reached, 0 to 1. With `draft="auto"` the measured cost
            of a step decides how many of these nodes are verified.
        memory: `"shared"` keeps the data of `"outputs"` and `"recycled"` for all later calls on the same model in this
            process, at most 1,048,576 tokens and 262,144 contexts (57 MiB). The text of one request then changes the
            speed of another, never its tokens: a timing side channel. `"request"` starts every call with an empty
            memory, which its rows share; only hit rates and costs are kept. Under `lookahead.enable` the segments of an
            audio are one call. The path of a memory file, `*.lkm`, keeps the data as `"shared"` does, separate from
            other calls, and starts from the contexts in the file if it exists; `lookahead.save_memory` writes it back.
        window: Columns W of the Jacobi window, 1 to 64: the lookahead branch always runs. A tuple `(W, N)` or
            `(W, N, G)` also sets N, the length of the n-grams that it produces, 2 to 16 and by default 5, and G, the
            maximum number of n-grams verified in a step, 0 to 64 and by default 7. `"auto"`: 7 columns, and the branch
            runs only while it pays at the measured costs (always with `draft="fixed"`, which measures none). A window
            adds `"jacobi"` to the proposers. If they include `"jacobi"`, `None` means `"auto"`.
        trust_user_code: States that your own code on the way of a pass (hooks, modules of your classes, replaced
            functions) treats every token by itself and keeps no state. It is then served like known code, after a
            comparison with the model's own passes at the first use. Without it transformers' own loop decodes such a
            model, with one warning, so that your code sees the calls that `generate` makes.

    Raises:
        ConfigError: A value is out of its range.

    Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §3
        (W, N and G); Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding" (rejection);
        Cai et al. 2024, "Medusa", §2.3.1 (typical);
        Saxena 2023, "Prompt Lookup Decoding" (n-grams of the prompt as drafts);
        Luo et al. 2024, "Token Recycling" (the target's most likely tokens as drafts).
    """

    proposers: Sequence[str | ProposerFactory] = ("prompt", "outputs", "recycled")
    pool: str | os.PathLike[str] | None = None
    draft: Literal["auto", "fixed"] = "auto"
    acceptance: Literal["exact", "rejection", "typical"] = "exact"
    max_nodes: int | None = None
    min_probability: float = 0.002
    memory: str | os.PathLike[str] = "shared"
    window: int | tuple[int, int] | tuple[int, int, int] | Literal["auto"] | None = None
    trust_user_code: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.proposers, str):
            raise ConfigError(f'proposers must be a sequence of names such as ("prompt",), got {self.proposers!r}')
        proposers = tuple(self.proposers)
        if self.pool is not None:
            if not (path := _path_of(self.pool)):
                raise ConfigError(f"pool must be the path of a pool file, got {self.pool!r}")
            object.__setattr__(self, "pool", path)
        elif "corpus" in proposers:
            raise ConfigError("the proposer 'corpus' needs a pool, the path of a pool file, got None")
        for name, option in (("corpus", self.pool), ("jacobi", self.window)):
            if option is not None and name not in proposers:
                proposers = (*proposers, name)
        object.__setattr__(self, "proposers", proposers)
        for i, proposer in enumerate(proposers):
            if isinstance(proposer, str) and proposer not in PROPOSERS:
                raise ConfigError(f"proposers must be of {', '.join(PROPOSERS)}, got {proposer!r}")
            if not callable(proposer) and not isinstance(proposer, str):
                raise ConfigError(f"proposers must be names or callables that return a Proposer, got {proposer!r}")
            if any(proposer is other or proposer == other for other in proposers[:i]):
                raise ConfigError(f"proposers must not repeat one, got {proposers!r}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not any(value == choice and isinstance(value, type(choice)) for choice in allowed):  # 1 is not True
                raise ConfigError(f"{name} must be {' or '.join(map(str, allowed))}, got {value!r}")
        names = [proposer for proposer in proposers if isinstance(proposer, str) and proposer != "self"]
        if names and self.acceptance == "rejection":
            raise ConfigError(
                f"acceptance='rejection' takes proposers that draw, such as DraftModel(...), and {names[0]!r} does "
                "not: leave it out"
            )
        if self.memory not in ("shared", "request"):
            if not (path := _path_of(self.memory)) or not path.endswith(".lkm"):
                raise ConfigError(f"memory must be shared, request or the path of a file *.lkm, got {self.memory!r}")
            if "recycled" not in proposers:
                raise ConfigError(f"the memory file {path} needs the proposer 'recycled', got {proposers!r}")
            object.__setattr__(self, "memory", path)
        if self.max_nodes is not None:
            check_whole("max_nodes", self.max_nodes, 1, MAX_NODES_LIMIT)
        least: Any = self.min_probability
        if not isinstance(least, Real) or not 0.0 <= float(least) <= 1.0:
            raise ConfigError(f"min_probability must be from 0 to 1, got {least!r}")
        if isinstance(self.window, tuple):
            if len(self.window) not in (2, 3):
                raise ConfigError(f"window must be auto, W, (W, N) or (W, N, G), got {self.window!r}")
            for value, (name, low, high) in zip(self.window, _WINDOW_SIZES, strict=False):
                check_whole(f"{name} of window", value, low, high)
        elif self.window not in (None, "auto"):
            check_whole("window", self.window, 1, 64, instead="auto, a tuple (W, N) or (W, N, G), or ")
        size, most = self.branch_size, self.max_nodes or MAX_NODES_LIMIT
        if size is not None and size.window_nodes > most:
            raise ConfigError(
                f"max_nodes must hold the Jacobi window, at least W * (N - 1) - 1 = {size.window_nodes}, "
                f"got {self.max_nodes}"
            )

    @property
    def demands(self) -> str:
        """The option that asks for drafts of a kind that not every model can verify, or an empty string."""
        own = next((proposer for proposer in self.proposers if not isinstance(proposer, str)), None)
        if own is not None:
            return f"proposers=({getattr(own, '__qualname__', type(own).__qualname__)},)"
        return "" if self.window in (None, "auto") else f"window={self.window}"

    @property
    def decides_branch(self) -> bool:
        """Whether measured costs decide if the lookahead branch runs."""
        return "jacobi" in self.proposers and self.window in (None, "auto") and self.draft == "auto"

    @property
    def branch_size(self) -> BranchSize | None:
        """The size of the lookahead branch; None without it."""
        if "jacobi" not in self.proposers:
            return None
        if isinstance(self.window, str | None):
            return BranchSize()
        return BranchSize(*(self.window if isinstance(self.window, tuple) else (self.window,)))

    @property
    def node_budget(self) -> int:
        """Maximum draft nodes of one row's tree, `max_nodes=None` resolved; excludes a branch that runs by costs."""
        if self.max_nodes is not None:
            return self.max_nodes
        budget = 0 if tuple(self.proposers) in ((), ("jacobi",)) else DEFAULT_NODES
        if "jacobi" in self.proposers and not self.decides_branch and (size := self.branch_size) is not None:
            budget += size.nodes
        return min(budget, MAX_NODES_LIMIT)


def refuse_removed(options: Iterable[str], where: str = "") -> None:
    """Raise ConfigError if an option was removed; `where` is the start of the message."""
    for name in options:
        if name in REMOVED:
            raise ConfigError(f"{where}{name} was removed: {REMOVED[name]}; leave it out")


def refuses_removed(function: _F) -> _F:
    """Make a function refuse removed options by name, as `refuse_removed` does."""

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        refuse_removed(options)
        return function(*args, **options)

    return cast(_F, checked)


def _refuses_unknown(function: _F) -> _F:
    """Make the initializer of `LookaheadConfig` refuse removed and unknown options by name."""

    @wraps(function)
    def checked(self: Any, /, **options: Any) -> None:
        refuse_removed(options)
        names = [field.name for field in fields(LookaheadConfig)]
        for name in options:
            if name not in names:
                raise ConfigError(f"LookaheadConfig has no option {name!r}{did_you_mean(name, names)}")
        function(self, **options)

    return cast(_F, checked)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest of the known names, or all if none is near."""
    near = get_close_matches(name, names := list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it must be of {', '.join(names)}"


# The signature, which `wraps` keeps, names no removed option.
LookaheadConfig.__init__ = _refuses_unknown(LookaheadConfig.__init__)  # type: ignore[method-assign]


def _path_of(value: Any) -> str | None:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return path if isinstance(path, str) else None


def check_seed(seed: Any) -> None:
    """Raise ConfigError for a seed that `torch.manual_seed` does not take."""
    is_whole = isinstance(seed, Integral) and not isinstance(seed, bool)
    if seed is not None and not (is_whole and -(1 << 63) <= seed < 1 << 64):
        raise ConfigError(f"seed must be a whole number from -2^63 to 2^64 - 1, got {seed!r}")


def check_whole(name: str, value: Any, least: int, most: int | None = None, *, instead: str = "") -> None:
    """Check an option that is a whole number.

    Args:
        name: The option.
        value: Its value.
        least: The least allowed value.
        most: The largest allowed value; None if there is none.
        instead: Other allowed values, for the message: `"auto or "`.

    Raises:
        ConfigError: The value is not a whole number, or out of its range.
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} must be {instead}a whole number {span}, got {value!r}")


DEFAULTS = LookaheadConfig()
"""The options of a call without a configuration."""
