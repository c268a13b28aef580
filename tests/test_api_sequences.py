"""Whatever is called in whatever order: every output stays that of a twin model nobody ever touched."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.decoding.enable import Enabled
from lookahead.model.facts import CACHE
from tests.support.default_run import examples

CONFIGS = st.sampled_from(
    [
        None,
        LookaheadConfig(draft="fixed", min_probability=0.0, max_nodes=20),
        LookaheadConfig(proposers=("prompt", "jacobi"), window=(3, 3, 3)),
        LookaheadConfig(proposers=()),
    ]
)
PROMPTS = st.lists(st.lists(st.integers(6, 12), min_size=1, max_size=9), min_size=1, max_size=3)
CHOICES = st.sampled_from([{"do_sample": False}, {"do_sample": True}, {"do_sample": True, "top_k": 5, "num_beams": 1}])


class Interrupted(Exception):
    """Raised on purpose, inside a call."""


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


class Session(RuleBasedStateMachine):
    """One model with lookahead, its untouched twin, and a user who does things in any order."""

    original: PreTrainedModel
    tokenizer: Any

    def __init__(self) -> None:
        super().__init__()
        self.model, self.twin = deepcopy(self.original), deepcopy(self.original)
        self.attention = self.model.config._attn_implementation
        self.switches: list[Enabled] = []
        self.streams: list[Iterator[str]] = []
        self.caches = (DynamicCache(), DynamicCache())
        self.text = torch.empty(1, 0, dtype=torch.long)

    def both(self, seed: int, **kwargs: Any) -> None:
        extra: dict[str, Any] = {} if self.switches else {"custom_generate": lookahead.decode}
        torch.manual_seed(seed)
        expected = self.twin.generate(**kwargs)
        torch.manual_seed(seed)
        got = self.model.generate(**kwargs, **extra)
        assert torch.equal(got, expected)

    @rule(config=CONFIGS)
    def enable(self, config: LookaheadConfig | None) -> None:
        self.switches.append(lookahead.enable(self.model, config))

    @precondition(lambda self: self.switches)
    @rule(which=st.integers(0, 9), again=st.booleans())
    def disable_any_of_them(self, which: int, again: bool) -> None:
        switch = self.switches.pop(which % len(self.switches))
        switch.disable()
        if again:
            switch.disable()

    @rule(prompts=PROMPTS, options=CHOICES, limit=st.integers(1, 12), seed=st.integers(0, 99))
    def generate(self, prompts: list[list[int]], options: dict[str, Any], limit: int, seed: int) -> None:
        self.both(seed, **padded(prompts), **options, max_new_tokens=limit)

    @rule(after=st.integers(1, 5))
    def a_processor_that_raises(self, after: int) -> None:
        calls = []

        def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            calls.append(ids)
            if len(calls) == after:
                raise Interrupted
            return scores

        extra: dict[str, Any] = {} if self.switches else {"custom_generate": lookahead.decode}
        with pytest.raises(Interrupted):
            self.model.generate(
                torch.tensor([[7, 8, 7]]),
                max_new_tokens=9,
                do_sample=False,
                logits_processor=LogitsProcessorList([interrupt]),
                **extra,
            )

    @rule(taken=st.integers(0, 3))
    def a_stream_left_in_the_middle(self, taken: int) -> None:
        stream = lookahead.stream(self.model, self.tokenizer, "abcabc", max_new_tokens=9, do_sample=False)
        for _, _piece in zip(range(taken), stream, strict=False):
            pass
        self.streams.append(stream)

    @rule(turn=st.lists(st.integers(6, 12), min_size=1, max_size=5), limit=st.integers(1, 6))
    def a_turn_of_a_chat_on_its_own_cache(self, turn: list[int], limit: int) -> None:
        self.text = torch.cat([self.text, torch.tensor([turn])], 1)
        extra: dict[str, Any] = {} if self.switches else {"custom_generate": lookahead.decode}
        # The model may have said its pad token: left to guess, transformers would mask it.
        kwargs = {"max_new_tokens": limit, "do_sample": False, "attention_mask": torch.ones_like(self.text)}
        expected = self.twin.generate(self.text, **{CACHE: self.caches[0]}, **kwargs)
        got = self.model.generate(self.text, **{CACHE: self.caches[1]}, **kwargs, **extra)
        assert torch.equal(got, expected)
        assert self.caches[1].get_seq_length() == self.caches[0].get_seq_length()
        self.text = got

    @rule()
    def beams_with_a_switch_or_without(self) -> None:
        self.both(0, **padded([[7, 8, 9]]), num_beams=2, max_new_tokens=4, do_sample=False)

    @invariant()
    def the_model_is_as_it_was(self) -> None:
        assert self.model.config._attn_implementation == self.attention
        assert ("generate" in self.model.__dict__) == bool(self.switches)


def test_any_sequence_of_calls_gives_the_outputs_of_an_untouched_twin(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    class OurSession(Session):
        original, tokenizer = tiny_llama, tiny_tokenizer

    run_state_machine_as_test(OurSession, settings=settings(max_examples=examples(60), stateful_step_count=12))
