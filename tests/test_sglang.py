"""Drafts for SGLang: its registry, as far as it imports without a GPU, and a stand-in for its worker.

The registry is tested where SGLang's own package is: `pip install --no-deps sglang==0.5.23`, and beside it orjson,
pybase64, msgspec, pyzmq, IPython and traitlets. The worker needs CUDA, so a stand-in calls the corpus as it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookahead.errors import ConfigError
from lookahead.plugins.sglang import NAME, DraftCorpus, register, worker_of

Target = Callable[[list[int]], int]


class StubWorker:
    """The parts of `NGRAMWorker` of SGLang 0.5.23 that ask for drafts, and a target that verifies them.

    With overlap the tokens of a step are in `output_ids` one step later, and are spliced in.
    """

    def __init__(self, target: Target, nodes: int, *, overlaps: bool) -> None:
        self.max_trie_depth, self.draft_token_num, self.overlaps = 18, nodes, overlaps
        self.ngram_corpus: Any = None
        self._target, self._before = target, set[str]()

    def _prepare_draft_tokens(self, batch: Any) -> tuple[Any, Any]:
        self.ngram_corpus.synchronize()
        names, tails, totals = [], [], []
        for request in batch.reqs:
            new = request.pending if self.overlaps else []
            text = [*request.origin_input_ids_unpadded, *request.output_ids, *new]
            names.append(request.rid)
            tails.append(text[-self.max_trie_depth :])
            totals.append(len(text))
        return self.ngram_corpus.batch_get(names, tails, totals)

    def step(self, requests: Sequence[Any]) -> None:
        """Verify the drafts of running requests."""
        nodes = self.draft_token_num
        drafts, mask = self._prepare_draft_tokens(SimpleNamespace(reqs=requests))
        assert drafts.shape == (len(requests) * nodes,) and mask.shape == (len(requests) * nodes**2,)
        assert mask.dtype == np.bool_
        for request, tokens, sees in zip(
            requests, drafts.reshape(-1, nodes), mask.reshape(-1, nodes, nodes), strict=True
        ):
            parents = [max(np.flatnonzero(row[:node]), default=-1) for node, row in enumerate(sees)]
            text = [*request.origin_input_ids_unpadded, *request.output_ids, *request.pending]
            assert tokens[0] == text[-1]
            node, emitted = 0, list[int]()
            while node is not None:
                emitted.append(self._target(text + emitted))
                node = next((n for n in range(1, nodes) if parents[n] == node and tokens[n] == emitted[-1]), None)
            request.output_ids += request.pending
            request.pending = emitted
            if not self.overlaps:
                request.output_ids, request.pending = request.output_ids + emitted, []
        self.ngram_corpus.batch_put([])
        now = {request.rid for request in requests}
        if self._before - now:
            self.ngram_corpus.erase_match_state(list(self._before - now))
        self._before = now


def request_of(name: str, prompt: list[int]) -> Any:
    return SimpleNamespace(rid=name, origin_input_ids_unpadded=prompt, output_ids=[], pending=[])


def periodic(tokens: list[int]) -> int:
    """A target that repeats its text with a period of 7."""
    return tokens[-7] if len(tokens) >= 7 else 1 + len(tokens)


def output_of(request: Any) -> list[int]:
    return request.output_ids + request.pending


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("nodes", [2, 8, 32])
def test_a_worker_with_our_drafts_writes_what_the_target_writes_in_fewer_steps(nodes: int, overlaps: bool) -> None:
    worker = worker_of(StubWorker)(periodic, nodes, overlaps=overlaps)
    requests = [request_of("a", [1, 2, 3, 4, 5, 6, 7]), request_of("b", [9, 8, 7, 6, 5, 4, 3, 2])]
    steps = 0
    while min(len(output_of(request)) for request in requests) < 150:
        worker.step(requests)
        steps += 1
    for request in requests:
        text = list(request.origin_input_ids_unpadded)
        while len(text) < 8 + 150:
            text.append(periodic(text))
        assert output_of(request)[:150] == text[len(request.origin_input_ids_unpadded) :][:150]
    assert steps < 150 / min(nodes, 5) + 20


def test_an_output_that_left_is_drafted_for_later_requests() -> None:
    story = np.random.default_rng(0).integers(0, 1000, 160).tolist()
    worker, steps = worker_of(StubWorker)(lambda tokens: story[len(tokens)], 8, overlaps=False), []
    for name in "ab":
        request, count = request_of(name, story[:4]), 0
        while len(output_of(request)) < 100:
            worker.step([request])
            count += 1
        worker.step([request_of("other", [5, 6])])  # the first one leaves
        steps.append(count)
    assert steps[0] > 80 > 30 > steps[1]


def test_a_request_that_comes_back_with_more_text_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    worker = worker_of(StubWorker)(periodic, 8, overlaps=False)
    request = request_of("a", [1, 2, 3, 4, 5, 6, 7])
    worker.step([request])
    for _ in range(60):  # elsewhere, and nobody told the corpus
        request.output_ids.append(periodic([*request.origin_input_ids_unpadded, *request.output_ids]))
    with caplog.at_level(logging.ERROR, "lookahead"):
        for _ in range(6):
            before = len(request.output_ids)
            worker.step([request])
    assert len(request.output_ids) - before == 8
    assert caplog.text.count("lookahead drafts nothing where this happens") == 1


def test_a_flushed_corpus_forgets_its_requests_and_refuses_others_corpora() -> None:
    corpus = DraftCorpus(4)
    corpus.meet([request_of("a", [1, 2, 3, 1, 2, 3])])
    assert corpus.batch_get(["a"], [[3]], [6])[0].tolist() == [3, 1, 2, 3]
    corpus.reset()
    assert corpus.batch_get(["a"], [[3]], [6])[0].tolist() == [3, 0, 0, 0]
    with pytest.raises(ConfigError, match="takes no external corpus, got 'news'"):
        corpus.load_external_corpus_named("news", [])
    assert corpus.list_external_corpora() == {}
    with pytest.raises(ConfigError, match="speculative_num_draft_tokens must be from 2 to 1025, got 1"):
        DraftCorpus(1)


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglang_takes_the_algorithm_and_treats_it_as_its_n_grams() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    register()
    register()  # SGLang loads plug-ins in each of its processes
    ours, ngram = SpeculativeAlgorithm.from_string(NAME.lower()), SpeculativeAlgorithm.NGRAM
    asked = [name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_", "has_", "carries_"))]
    assert "is_ngram" in asked and "has_draft_kv" in asked
    for name in [*asked, "need_topk"]:
        assert getattr(ours, name)() == getattr(ngram, name)(), name
    assert callable(ours.create_future_map)
