"""A proposer for vLLM that drafts with lookahead.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 16,
        "model": "lookahead.plugins.vllm.LookaheadProposer"}'

This module imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.config import check_whole
from lookahead.drafting.chain_lengths import ChainLengths
from lookahead.errors import ConfigError
from lookahead.ngram.chain_proposer import NEVER, SAMPLES, ChainProposer, ChainRequest, begins
from lookahead.ngram.chains import IntArray

_log = logging.getLogger(__name__)
_MOST_ON_CPU = 8  # requests of a batch that drafts: 16 new texts at a time lost 5% on a CPU
_SHARED_EARLY = 16  # tokens after which concurrent requests may draft from an unfinished output


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Options of `LookaheadProposer`: the object `lookahead` of vLLM's `additional_config`.

    Attributes:
        pool: A pool file to draft from, made with the tokenizer of the model.
        memory_tokens: Maximum number of tokens of earlier outputs, at least 1,024. When full, the oldest half is
            dropped.
        min_probability: Minimum acceptance probability of a drafted token, from 0 to below 1.
        max_requests: Maximum number of requests in a batch that drafts, at least 1; nothing is drafted for a larger
            one. None means 8 if the model runs on the CPU, and no limit elsewhere.

    Raises:
        ConfigError: A value is out of range.
    """

    pool: str | None = None
    memory_tokens: int = 1 << 20
    min_probability: float = 0.02
    max_requests: int | None = None

    def __post_init__(self) -> None:
        if self.pool is not None and not isinstance(self.pool, str):
            raise ConfigError(f"lookahead.pool must be the name of a file, got {self.pool!r}")
        check_whole("lookahead.memory_tokens", self.memory_tokens, 1024)
        if type(self.min_probability) not in (int, float) or not 0.0 <= self.min_probability < 1.0:
            raise ConfigError(f"lookahead.min_probability must be from 0 to below 1, got {self.min_probability!r}")
        if self.max_requests is not None:
            check_whole("lookahead.max_requests", self.max_requests, 1, instead="null or ")

    @classmethod
    def of(cls, vllm_config: Any) -> VllmOptions:
        """The options in a `VllmConfig`."""
        additional = getattr(vllm_config, "additional_config", None)
        options = additional.get("lookahead", {}) if isinstance(additional, Mapping) else {}
        if not isinstance(options, Mapping):
            raise ConfigError(f"additional_config.lookahead must be an object, got {options!r}")
        names = [field.name for field in fields(cls)]
        if unknown := [str(name) for name in options if name not in names]:
            raise ConfigError(f"additional_config.lookahead knows {', '.join(names)}, got {', '.join(unknown)}")
        return cls(**options)


class LookaheadProposer:
    """Drafts for vLLM. It is named in `speculative_config` with the method `custom_class`.

    Chains come from the text of each request, from outputs of earlier requests, and from a pool. The draft lengths are
    chosen for the whole batch from measured step times; nothing is drafted if drafts do not pay, or for a batch of more
    than `max_requests`. vLLM accepts or rejects every drafted token, so drafts change only the speed.

    vLLM passes the tokens of every row of its batch without request ids, so a request is recognized by its tokens.
    `propose` raises no exception: each type of fault is logged once, and nothing is drafted.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        clock: Returns the time in seconds. The default is the CPU time of this process if the model runs on the CPU, so
            that other processes do not count, else wall time.

    Raises:
        ConfigError: `num_speculative_tokens` or an option of `VllmOptions` is out of range.
        PoolError: The pool file cannot be read, is damaged, or holds tokens outside the model's vocabulary.
    """

    def __init__(self, vllm_config: Any, *, clock: Callable[[], float] | None = None) -> None:
        options = VllmOptions.of(vllm_config)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._pool = None
        if options.pool is not None:
            from lookahead.proposers.pool_files import open_pool

            self._pool = open_pool(options.pool, vocabulary=int(vllm_config.model_config.get_vocab_size()))
        try:
            self._proposer = ChainProposer(
                vllm_config.speculative_config.num_speculative_tokens,
                memory_tokens=options.memory_tokens,
                pool=self._pool,
                min_probability=options.min_probability,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"num_speculative_tokens: {error}") from error
        self._known = KnownRequests(int(vllm_config.scheduler_config.max_num_seqs), options.memory_tokens)
        self._lengths = ChainLengths()
        device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
        self._most_requests = options.max_requests or (_MOST_ON_CPU if device == "cpu" else sys.maxsize)
        self._clock = clock or (time.process_time if device == "cpu" else time.perf_counter)
        self._told: set[str] = set()
        # State of the last call: tokens of each row (empty if a row had no new tokens), drafted tokens of all rows,
        # seconds of drafting, and the time of the return.
        self._before: tuple[list[int], int, float | None, float] = ([], 0, None, 0.0)
        # Compile, or load from the cache, all functions that a step calls.
        proposer, requests, lengths = ChainProposer(2), KnownRequests(1, 1), ChainLengths()
        tokens, counts = np.arange(2048, dtype=np.int32)[None] % 8, np.array([2048])
        requests.rows = [proposer.start(tokens[0, :2])]
        requests.match(tokens, counts, [True])
        _, path_probs, _ = proposer.step(requests.rows, tokens, counts, 4096, 1)  # the index grows
        lengths.observe(rows=1, drafted=0, emitted=1, seconds=1.0)
        lengths.choose(path_probs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no draft model. vLLM calls this method."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft for every row of the batch, at most `num_speculative_tokens` tokens each.

        Args:
            sampled_token_ids: The tokens of the last step for each row; empty while its prompt is being read.
            num_tokens_no_spec: int32 `[rows or more]`, the number of tokens of each row, including the last step.
            token_ids_cpu: int32 `[rows or more, max_model_len]`, the tokens.
            slot_mappings: Not used.
        """
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception as error:
            self._tell(error)
            self._known.rows, self._before = [], ([], 0, None, 0.0)
            return [[] for _ in sampled_token_ids] if isinstance(sampled_token_ids, Sequence) else []

    def _propose(self, sampled: Sequence[Sequence[int]], counts: NDArray[Any], tokens: NDArray[Any]) -> list[list[int]]:
        now, rows = self._clock(), len(sampled)
        counts = np.array(counts[:rows], np.int64)  # a copy: vLLM changes the array in place
        if tokens.dtype != np.int32 or tokens.ndim != 2 or counts.shape != (rows,) or len(tokens) < rows:
            raise ValueError(f"{rows} rows need int32 tokens and as many counts, got {tokens.dtype} {tokens.shape}")
        lengths = counts.tolist()
        if rows and not 0 <= min(lengths) <= max(lengths) <= tokens.shape[1]:
            raise ValueError(f"rows hold 0 to {tokens.shape[1]} tokens, got {min(lengths)} to {max(lengths)}")
        before, drafted, host_s, then = self._before
        # A step is timed if it only decoded the rows of the previous step. A row without a token in the previous step
        # may have read the end of its prompt in this one.
        if rows and all(sampled) and before == [n - len(new) for n, new in zip(lengths, sampled, strict=True)]:
            emitted = sum(lengths) - sum(before)
            self._lengths.observe(rows=rows, drafted=drafted, emitted=emitted, seconds=now - then, host_s=host_s)
        drafts: list[list[int]] = [[] for _ in range(rows)]
        asked = 0 < rows <= self._most_requests and self._lengths.drafts(rows)
        if asked:
            self._draft(sampled, counts, tokens, drafts)
        then = self._clock()
        decoded = lengths if all(sampled) else []
        self._before = (decoded, sum(map(len, drafts)), then - now if asked else None, then)
        return drafts

    def _draft(
        self, sampled: Sequence[Sequence[int]], counts: NDArray[np.int64], tokens: IntArray, drafts: list[list[int]]
    ) -> None:
        if self._pool is not None and not self._pool.is_intact:
            self._tell(RuntimeError(f"{self._pool.path}: changed while it was in use; no more is drafted from it"))
            self._pool = None
        longest, shared = self._max_length - 1, _SHARED_EARLY if len(sampled) > 1 else NEVER
        rows, sizes = self._known.rows, list[int]()
        if len(rows) == len(sampled) and None not in rows and all(sampled):
            chains, path_probs, sizes = self._proposer.step(rows, tokens, counts, longest, shared)
        if not sizes:  # requests came, went or moved
            rows = self._match(sampled, counts, tokens)
            chains, path_probs, sizes = self._proposer.step(rows, tokens, counts, longest, shared)
        for row, size in enumerate(sizes):
            if size < 0:
                self._tell(ValueError("token ids must not be negative"))
                self._known.rows[row] = None
        texts = chains.tolist()
        for row, length in enumerate(self._lengths.choose(path_probs)):
            if length:
                drafts[row] = texts[row][:length]

    def _match(
        self, sampled: Sequence[Sequence[int]], counts: NDArray[np.int64], tokens: IntArray
    ) -> list[ChainRequest | None]:
        """The request of every row with new tokens. Requests that left are finished, and new ones are started."""
        for gone in self._known.match(tokens, counts, sampled):
            self._proposer.finish(gone)
        rows = self._known.rows
        for row, (request, new) in enumerate(zip(rows, sampled, strict=True)):
            if request is None and new:
                try:
                    rows[row] = self._proposer.start(tokens[row, : counts[row]])
                except Exception as error:
                    self._tell(error)
        return [request if new else None for request, new in zip(rows, sampled, strict=True)]

    def _tell(self, error: Exception) -> None:
        """Log a fault, once for each type of exception."""
        name = type(error).__name__
        if name not in self._told:
            self._told.add(name)
            _log.error("lookahead drafts nothing where this happens: %s", error, exc_info=error)


class KnownRequests:
    """The requests in the rows of a batch, and requests that left it and may return.

    A row belongs to the request whose tokens it begins with. If the request of a row is unchanged, about 32 tokens are
    compared, else all. A request that is in no row is set aside, since it may return: the engine does not report
    whether it was finished, aborted or preempted. Beyond `max_aside` requests and `aside_tokens` tokens the longest
    absent go first.
    """

    def __init__(self, max_aside: int, aside_tokens: int) -> None:
        self.rows: list[ChainRequest | None] = []  # None for a row without a request
        self.aside: list[ChainRequest] = []  # requests in no row, the longest absent first
        self._max_aside, self._aside_tokens = max_aside, aside_tokens

    def match(self, tokens: IntArray, counts: NDArray[np.int64], wanted: Sequence[object]) -> list[ChainRequest]:
        """Find the request of every row; returns the requests that left their rows in this call.

        Args:
            tokens: int32 `[rows or more, columns]`, the tokens of each row.
            counts: int64 `[rows]`, the number of tokens of each row.
            wanted: For each row, whether to look for its request among the requests that left.
        """
        rows: list[ChainRequest | None] = [None] * counts.size
        left = []
        for row, request in enumerate(self.rows):
            if request is None:
                continue
            if row < counts.size and begins(request.address, tokens[row], counts[row], SAMPLES):
                rows[row] = request
            else:
                left.append(request)
        loose = self.aside + left
        for row in range(counts.size):
            if rows[row] is None and wanted[row] and loose:
                whole = tokens[row], counts[row], int(counts[row]) + 1
                matches = [request for request in loose if begins(request.address, *whole)]
                rows[row] = max(matches, key=len, default=None)
                loose = [request for request in loose if request is not rows[row]]
        self.rows = rows
        gone = [request for request in left if any(request is other for other in loose)]
        # Drop the longest absent requests beyond the limits.
        totals = np.cumsum([len(request) for request in reversed(loose)])
        kept = min(self._max_aside, int((totals <= self._aside_tokens).sum()))
        self.aside = loose[len(loose) - kept :]
        return gone
