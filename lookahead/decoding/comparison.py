"""Compares methods: transformers' loops and lookahead on the same prompts, with speed and equality of tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from lookahead.config import LookaheadConfig
from lookahead.decoding.api import generate
from lookahead.decoding.loops import loops
from lookahead.decoding.prompts import PromptReader, pad_prompts
from lookahead.model.calls import kind_of
from lookahead.model.model_state import LearnedState, use_learned
from lookahead.stats import DecodingStats, total_in_sequence
from lookahead.verification.rules import end_tokens

TRANSFORMERS = "transformers"
"""The name of `model.generate`, the reference of the comparison."""

_WARM_UP = "One fine day"  # not a measured prompt, whose output would be drafted from memory
# The default prompts.
PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "The history of the steam engine begins",
    "Dear Sir or Madam, I am writing to you because",
    "def fibonacci(n):\n    ",
    "Question: A train leaves at 9 o'clock and travels 120 miles in two hours. How fast is it?\nAnswer:",
    "To make a good soup, first",
    "In this paper we show that",
    "The three most important things to know about gardening are",
)


@dataclass(slots=True)
class Score:
    """The results of one method over all prompts."""

    prompts: int = 0
    identical: int = 0
    loops: int = 0  # outputs that repeat one phrase to their end, which drafts follow with ease
    stats: DecodingStats = field(default_factory=DecodingStats)
    stats_without_loops: DecodingStats = field(default_factory=DecodingStats)

    @property
    def drafted_per_step(self) -> float:
        """Draft nodes per pass of the target."""
        return self.stats.drafted_tokens / max(1, self.stats.target_forwards)

    @property
    def call_s(self) -> float:
        """Seconds of the calls, including prefill."""
        return self.stats.prefill_s + self.stats.decode_s

    def add(self, stats: DecodingStats, *, is_identical: bool, is_loop: bool) -> None:
        """Count one prompt."""
        self.prompts += 1
        self.identical += is_identical
        self.loops += is_loop
        self.stats = total_in_sequence((self.stats, stats))
        if not is_loop:
            self.stats_without_loops = total_in_sequence((self.stats_without_loops, stats))

    def to_dict(self) -> dict[str, Any]:
        """The figures, JSON-ready; the divergence from the target's distribution only if it is not 0."""
        lossy = {"divergence": round(self.stats.divergence, 4)} if self.stats.total_variation else {}
        return {
            **lossy,
            "mean_acceptance_length": round(self.stats.mean_acceptance_length, 4),
            "tokens_per_s": round(self.stats.tokens_per_s, 2),
            "drafted_per_step": round(self.drafted_per_step, 2),
            "draft_acceptance_rate": round(self.stats.draft_acceptance_rate, 4),
            "identical": self.identical,
            "loops": self.loops,
            "prompts": self.prompts,
        }


def decode_plainly(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], max_new_tokens: int, **options: Any
) -> tuple[list[list[int]], DecodingStats]:
    """The new tokens of each prompt by `model.generate`, up to its end-of-sequence token, and the counters.

    Args:
        model: The model.
        tokenizer: The tokenizer of `model`.
        prompts: Token ids, decoded together with padding.
        max_new_tokens: Maximum new tokens of each, at least 1.
        options: Options of `model.generate`; greedy by default.
    """
    has_encoder = kind_of(model).has_encoder
    ids, mask, pad = pad_prompts(prompts, tokenizer, on_the_right=has_encoder)
    ticks: list[tuple[float, int]] = []  # time and length after each pass; the first ends the prefill

    def tick(input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        ticks.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    start = time.perf_counter()
    output: torch.Tensor = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        stopping_criteria=StoppingCriteriaList([tick]),
        **({"tokenizer": tokenizer} if options.get("stop_strings") else {}),
        **{"do_sample": False, **options},
    )
    begin_s, end = ticks[0][0], time.perf_counter()
    seconds: Any = {"prefill_s": begin_s - start, "decode_s": end - begin_s}
    stop_ids = end_tokens(getattr(model.generation_config, "eos_token_id", None))
    begin = 1 if has_encoder else len(ids[0])  # an encoder-decoder's output begins with its start token
    rows = [
        row[: next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))]
        for row in output[:, begin:].tolist()
    ]
    emitted = sum(map(len, rows))
    passes = Counter({1: emitted - len(rows)})  # the prefill gives the first token of each row
    if len(rows) == 1:  # its passes may emit several tokens, by transformers' drafts
        lengths = [min(length, begin + emitted) for _, length in ticks]
        passes = Counter(after - before for before, after in pairwise(lengths))
    counters: Any = {"emitted_tokens": emitted, "target_forwards": sum(passes.values())}
    return rows, DecodingStats(acceptance_histogram=passes, **counters, **seconds)


Prompt = str | list[Any]
"""A text, or the messages of a chat."""


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt],
    configs: Mapping[str, LookaheadConfig | None],
    *,
    baselines: Mapping[str, Mapping[str, Any]] | None = None,
    truncate: Any = None,
    seconds: float | None = None,
    **generate_kwargs: Any,
) -> dict[str, Score]:
    """Decode every prompt with every method, in rotating order; each lookahead method has its own learned state.

    A warm-up text is decoded first and not counted. Every prompt has its own seed.

    Args:
        model: The target model.
        tokenizer: Its tokenizer.
        prompts: The prompts.
        configs: The configurations of lookahead by name.
        baselines: Options of further calls of `model.generate` by name, such as prompt lookup.
        truncate: As in `lookahead.generate`.
        seconds: Seconds after which no further prompt starts.
        generate_kwargs: Options of both `model.generate` and `lookahead.generate`, including `max_new_tokens`.

    Returns:
        The results by name, `model.generate` first. `identical` counts prompts with the tokens of `model.generate`.
    """

    def by_transformers(ids: list[int], seed: int, **options: Any) -> tuple[list[int], DecodingStats]:
        torch.manual_seed(seed)
        options = {**generate_kwargs, **options}
        if reader.limit is not None and not kind_of(model).has_encoder:  # lookahead ends there
            options["max_new_tokens"] = min(options["max_new_tokens"], reader.limit + 1 - len(ids))
        (tokens,), stats = decode_plainly(model, tokenizer, [ids], **options)
        return tokens, stats

    def by_lookahead(
        ids: list[int], seed: int, config: LookaheadConfig | None, learned: LearnedState
    ) -> tuple[list[int], DecodingStats]:
        with use_learned(model, learned):
            result = generate(model, tokenizer, ids, config=config, seed=seed, **generate_kwargs)
        return result.token_ids[0], result.stats

    reader = PromptReader(model, tokenizer, None, truncate=truncate, **generate_kwargs)
    methods: dict[str, Callable[[list[int], int], tuple[list[int], DecodingStats]]] = {TRANSFORMERS: by_transformers}
    methods |= {name: partial(by_transformers, **options) for name, options in (baselines or {}).items()}
    methods |= {name: partial(by_lookahead, config=config, learned=LearnedState()) for name, config in configs.items()}
    encoded, names = [reader.read(prompt, at) for at, prompt in enumerate(prompts)], list(methods)
    scores, begin = {name: Score() for name in names}, time.perf_counter()
    for number, ids in enumerate([reader.read(_WARM_UP, 0), *encoded]):
        turn = number % len(names)
        done = {name: methods[name](ids, number) for name in names[turn:] + names[:turn]}
        if number == 0:  # the warm-up packs and compiles
            begin = time.perf_counter()
            continue
        for name, (tokens, stats) in done.items():
            scores[name].add(stats, is_identical=tokens == done[TRANSFORMERS][0], is_loop=loops(tokens))
        if seconds is not None and time.perf_counter() - begin > seconds:
            break
    return scores
