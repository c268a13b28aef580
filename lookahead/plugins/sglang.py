"""A speculative algorithm for SGLang that drafts with lookahead.

    python -m sglang.launch_server --model-path MODEL --speculative-algorithm LOOKAHEAD

SGLang finds `register` by the entry point `sglang.srt.plugins` of this package. Its worker for n-grams verifies the
drafts with SGLang's own kernels and graphs; only the source of the drafts is ours. This module imports neither SGLang
nor torch until an algorithm is registered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.errors import ConfigError
from lookahead.ngram.chain_proposer import NEVER, ChainProposer, ChainRequest
from lookahead.ngram.chains import IntArray

NAME = "LOOKAHEAD"
_SHARED_EARLY = 16  # tokens after which concurrent requests may draft from an unfinished output
_log = logging.getLogger(__name__)


class DraftCorpus:
    """Chains for SGLang's n-gram worker, in the place of its `NgramCorpus`.

    A draft has the same number of nodes for every request: the newest token, a chain behind it, and padding. `nodes` is
    SGLang's `speculative_num_draft_tokens`, at least 2, or it is a ConfigError.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._told: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Forget all requests and outputs. SGLang calls it when its cache is flushed."""
        try:
            self._proposer = ChainProposer(self._nodes - 1)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"speculative_num_draft_tokens must be from 2 to 1025, got {self._nodes!r}") from error
        self._requests: dict[str, ChainRequest] = {}

    def meet(self, requests: Sequence[Any]) -> None:
        """Index the texts of SGLang's requests that are new here, or came back."""
        for request in requests:
            if request.rid not in self._requests:
                text = np.array([*request.origin_input_ids_unpadded, *request.output_ids], np.int32)
                self._requests[request.rid] = self._proposer.start(text)

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draft for every request of a batch.

        The tail of a request has at least its tokens that are new since the last call, and its length counts all
        tokens.

        Returns:
            Tokens, int64 `[requests * nodes]`, and whether a node attends to another one of its request, bool
            `[requests * nodes * nodes]`. As in SGLang, padding is a child of the newest token.
        """
        rows, nodes = len(req_ids), self._nodes
        drafts = np.zeros((rows, nodes), np.int64)
        mask = np.broadcast_to(np.eye(nodes, dtype=bool), (rows, nodes, nodes)).copy()
        mask[:, :, 0] = True
        for row, (name, tail, total) in enumerate(zip(req_ids, batch_tokens, total_lens, strict=True)):
            drafts[row, 0] = tail[-1]
            try:
                chain = self._chain(name, tail, total, _SHARED_EARLY if rows > 1 else NEVER)
            except Exception as error:
                self._requests.pop(name, None)  # its text is read again
                self._tell(error)
                continue
            end = 1 + len(chain)
            drafts[row, 1:end], mask[row, :end, :end] = chain, np.tri(end, dtype=bool)
        return drafts.reshape(-1), mask.reshape(-1)

    def _chain(self, name: str, tail: Sequence[int], total: int, shared: int) -> IntArray:
        """The chain behind a request's newest token, int32 `[n]`."""
        request = self._requests[name]
        new = total - len(request)
        if not 0 <= new <= len(tail):
            raise ValueError(f"request {name} has {total} tokens, {len(request)} of them known, and names {len(tail)}")
        text = np.concatenate((request.text.tokens[1:], np.array(tail[len(tail) - new :], np.int32)))
        longest = total + self._nodes - 1
        chains, _, sizes = self._proposer.step([request], text[None], np.array([total]), longest, shared)
        return chains[0, : max(0, *sizes)] if sizes else chains[0, :0]

    def erase_match_state(self, req_ids: Sequence[str]) -> None:
        """Keep the outputs of requests that left."""
        for name in req_ids:
            if name in self._requests:
                self._proposer.finish(self._requests.pop(name))

    def synchronize(self) -> None:
        """Do nothing: every call is done when it returns."""

    def batch_put(self, batch_tokens: object) -> None:
        """Do nothing: `batch_get` learns too."""

    def list_external_corpora(self) -> dict[str, int]:
        """None: there are only texts of requests."""
        return {}

    def load_external_corpus_named(self, corpus_id: str, chunks: object) -> int:
        """Refuse a corpus of SGLang's."""
        raise ConfigError(f"{NAME} takes no external corpus, got {corpus_id!r}")

    def _tell(self, error: Exception) -> None:
        """Log a fault, once for each type of exception."""
        if type(error).__name__ not in self._told:
            self._told.add(type(error).__name__)
            _log.error("lookahead drafts nothing where this happens: %s", error, exc_info=error)


def worker_of(ngram_worker: type[Any]) -> type[Any]:
    """SGLang's worker for n-grams, with our drafts."""

    class LookaheadWorker(ngram_worker):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            nodes: int = self.draft_token_num
            self.max_trie_depth: int = max(self.max_trie_depth, nodes)  # a step adds at most as many tokens
            self.ngram_corpus = DraftCorpus(nodes)

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            self.ngram_corpus.meet(batch.reqs)
            return super()._prepare_draft_tokens(batch)

    return LookaheadWorker


def register() -> None:
    """Register the algorithm `LOOKAHEAD` with SGLang, unless it is registered."""
    registry: Any = import_module("sglang.srt.speculative.spec_registry")
    algorithms: Any = import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm

    class LookaheadAlgorithm(registry.CustomSpecAlgo):  # type: ignore[misc]
        """What SGLang asks about an algorithm is answered as for n-grams."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            algorithms.NGRAM.handle_server_args(server_args)

        def __getattr__(self, name: str) -> Any:
            return getattr(algorithms.NGRAM, name)  # what algorithms of plug-ins lack

    def factory(server_args: Any) -> type[Any]:
        return worker_of(import_module("sglang.srt.speculative.ngram_worker").NGRAMWorker)

    if registry.get_spec(NAME) is None:
        algorithms.register(NAME, supports_overlap=True, spec_class=LookaheadAlgorithm)(factory)
