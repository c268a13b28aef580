"""Short generations under random settings, each compared with `model.generate`; no difference and no crash may occur.

    python -m bench.fuzz --runs 10000

Each run is three generations: one under random settings; one with a model whose code, hooks or flags were changed, with
its text as a stream; and one with a user's code that keeps a state, or with weights written between two prompts.

Every case is seeded by its number, so that a failing case can be run alone (`--first N --runs 1`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import lookahead
from bench.command import parser_of, publish, use_one_thread
from lookahead import LookaheadConfig
from lookahead.model.facts import vocabulary_size
from tests.support.adversarial_proposers import drafting_by, random_trees
from tests.support.changed_code import CHANGES
from tests.support.families import FAMILIES, build
from tests.support.small_layers import MODELS as LAYERED
from tests.support.small_layers import made
from tests.support.stateful import DoneTracker, Grammar, calls_of
from tests.support.stateful_code import PLACES, STATES, Seen, recorded
from tests.support.text_tokenizers import TOKENIZERS

# Full attention, sliding windows, sinks and prepared masks, which differ in tree attention.
MODELS = ("Llama", "Gemma2", "GptOss", "GPTJ")


class StopAtMultiple(StoppingCriteria):
    """A custom criterion: stop when the sum of the ids is a multiple of a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(1) % self.number == 0


@cache
def model_of(name: str) -> PreTrainedModel:
    return build(FAMILIES[name])


def draw_call(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments of `model.generate`: prompts, limits, sampling and stopping."""
    alphabet = rng.integers(3, 101, size=int(rng.integers(2, 12)))  # few distinct tokens, so that texts repeat
    lengths = rng.integers(1, 40, size=int(rng.choice([1, 1, 2, 4])))
    longest = int(lengths.max())
    ids = torch.tensor(np.stack([np.r_[np.zeros(longest - n, int), rng.choice(alphabet, n)] for n in lengths]))
    call: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pad_token_id": 0}
    call["max_new_tokens"] = int(rng.integers(1, 24))
    if rng.random() < 0.5:
        call |= {"do_sample": True, "temperature": float(rng.choice([0.3, 1.0, 2.0]))}
        call |= {"top_k": int(rng.choice([0, 1, 5, 50]))}
        call |= {name: float(rng.uniform(0.2, 1.0)) for name in ("top_p", "min_p", "typical_p") if rng.random() < 0.3}
    else:
        call["do_sample"] = False
    choices: dict[str, Any] = {
        "repetition_penalty": float(rng.uniform(0.8, 1.5)),
        "no_repeat_ngram_size": int(rng.integers(1, 4)),
        "min_new_tokens": int(rng.integers(0, 12)),
        "eos_token_id": rng.choice(101, 8, replace=False).tolist(),
        "suppress_tokens": rng.choice(101, 5, replace=False).tolist(),
        "bad_words_ids": rng.integers(1, 101, (2, 2)).tolist(),
        "forced_eos_token_id": int(rng.integers(1, 101)),
        "num_return_sequences": int(rng.integers(1, 3)) if call["do_sample"] else 1,
        "stopping_criteria": StoppingCriteriaList([StopAtMultiple(int(rng.integers(2, 30)))]),
    }
    return call | {name: value for name, value in choices.items() if rng.random() < 0.25}


def draw_state(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """The call, in some cases with a stateful processor or criterion."""
    rng = np.random.default_rng([number, 1])
    rows = len(call["input_ids"]) * call.get("num_return_sequences", 1)
    if rng.random() < 0.1:
        call = {**call, "logits_processor": [Grammar()]}
    if rng.random() < 0.1:
        sequence = rng.choice(np.unique(call["input_ids"]), int(rng.integers(1, 3))).tolist()
        call = {**call, "stopping_criteria": [DoneTracker(sequence, rows, by_row=bool(rng.integers(2)))]}
    return call


def used(model: PreTrainedModel, number: int, call: dict[str, Any], config: LookaheadConfig) -> PreTrainedModel:
    """The model, or in some cases a copy that decoded the call before its vocabulary was shrunk.

    In other cases the shrunk model is another one that shares the copy's configuration.
    """
    is_resized, is_sharing = (np.random.default_rng([number, kind]).random() <= 0.05 for kind in (2, 3))
    for is_same, is_wanted in ((True, is_resized), (False, is_sharing)):
        if is_wanted:
            model = deepcopy(model)
            shrinking: Any = model if is_same else type(model)(model.config).eval()  # type: ignore[call-arg]
            plain = {name: call[name] for name in ("input_ids", "attention_mask", "pad_token_id")}
            ours = {"custom_generate": lookahead.decode, "lookahead_config": config}
            shrinking.generate(**plain, **ours, max_new_tokens=24, do_sample=False)
            shrinking.resize_token_embeddings(int(call["input_ids"].max()) + 1)
    return model


def draw_config(rng: np.random.Generator) -> LookaheadConfig:
    choices = ["prompt", "jacobi", "prompt jacobi", "", "prompt outputs recycled", "recycled jacobi"]
    proposers = choices[int(rng.integers(len(choices)))].split()
    window = int(rng.integers(1, 6)), int(rng.integers(2, 6)), int(rng.integers(0, 6))
    return LookaheadConfig(
        proposers=proposers,
        memory="request" if rng.random() < 0.5 else "shared",
        draft="fixed" if rng.random() < 0.5 else "auto",
        min_probability=float(rng.choice([0.0, 0.02, 0.3])),
        window=window if "jacobi" in proposers and rng.random() < 0.8 else None,
        max_nodes=int(rng.integers(32, 65)),
    )


def check_case(number: int) -> str:
    """The failure of a case, or an empty string."""
    rng = np.random.default_rng(number)
    model = model_of(str(rng.choice(MODELS)))
    call, config = draw_call(rng), draw_config(rng)
    call = draw_state(number, call)
    model = used(model, number, call, config)
    scope = drafting_by(random_trees(vocabulary_size(model))) if rng.random() < 0.2 else nullcontext()
    ours = {"custom_generate": lookahead.decode, "lookahead_config": config}
    expected = outcome_of(model, number, deepcopy(call))
    with scope:
        got = outcome_of(model, number, {**deepcopy(call), **ours})
        # Threads share torch's random numbers, so sampled outputs of threads are not reproducible.
        if not call["do_sample"] and np.random.default_rng([number, 4]).random() < 0.2:
            with ThreadPoolExecutor(3) as pool:
                many = pool.map(lambda _: outcome_of(model, number, {**deepcopy(call), **ours}), range(3))
                got = next((each for each in many if each != expected), got)
    return "" if got == expected else f"{got} instead of {expected}"


class Broken(LogitsProcessor):
    """A custom processor that returns bad scores at some step."""

    def __init__(self, value: float, at: int, tokens: Sequence[int]) -> None:
        self.value, self.at, self.tokens = value, at, list(tokens)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] >= self.at:
            scores = cast(torch.FloatTensor, scores.clone())
            scores[:, self.tokens or slice(None)] = self.value
        return scores


@cache
def changeable(name: str, dtype: torch.dtype) -> Any:
    """A model with packed and fused layers that has decoded unchanged."""
    model = made(name, dtype, hidden_size=512, intermediate_size=1024, num_attention_heads=8, head_dim=64)
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, custom_generate=lookahead.decode)
    return model


@cache
def tokenizer_of(name: str) -> Any:
    return TOKENIZERS[name]()


def check_changed(number: int) -> str:
    """The failure of a prompt with a model whose code, hooks or flags were changed, or an empty string.

    In bfloat16, tokens are compared only if the stats report bitwise equality.
    """
    rng = np.random.default_rng([number, 5])
    name, dtype = str(rng.choice([*LAYERED])), (torch.bfloat16, torch.float32)[int(rng.integers(2))]
    model = changeable(name, dtype)
    if rng.random() < 0.2:
        model = deepcopy(model)  # a copy that has not decoded yet
    change = str(rng.choice([*CHANGES])) if rng.random() < 0.6 else ""
    ids = torch.tensor(rng.choice(rng.integers(3, 101, 9), (1, int(rng.integers(2, 24)))))
    call: dict[str, Any] = {"max_new_tokens": int(rng.integers(2, 14)), "do_sample": bool(rng.random() < 0.3)}
    broken = rng.integers(0, 101, int(rng.integers(3))).tolist()
    ways: list[dict[str, Any]] = [
        {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": int(rng.integers(1, 9))},
        {"num_return_sequences": 2, "do_sample": True}, {"output_scores": True, "return_dict_in_generate": True},
        {"logits_processor": [Broken(float(rng.choice([np.nan, np.inf, -np.inf])), ids.shape[1] + 2, broken)]},
    ]  # fmt: skip
    if rng.random() < 0.6:
        call |= ways[int(rng.integers(len(ways)))]
    with CHANGES[change](model) if change else nullcontext():
        expected = outcome_of(model, number, {"input_ids": ids, **deepcopy(call)})
        got = outcome_of(model, number, {"input_ids": ids, **deepcopy(call), "custom_generate": lookahead.decode})
        if isinstance(expected, str):  # transformers cannot decode it either
            return ""
        complaint = "" if got == expected or dtype == torch.bfloat16 else f"{got} instead of {expected}"
        if not complaint and not call.keys() & {"num_return_sequences", "output_scores"}:
            complaint = check_text(model, number, ids, call, expected, rng)
    return f"{name}, {dtype}, {change or 'unchanged'}, {call}: {complaint}" if complaint else ""


def check_text(
    model: Any,
    number: int,
    ids: torch.Tensor,
    call: dict[str, Any],
    expected: tuple[list[list[int]], list[Any]],
    rng: np.random.Generator,
) -> str:
    """The failure of `generate` and `stream` with a tokenizer, or an empty string."""
    tokenizer = tokenizer_of(str(rng.choice([*TOKENIZERS])))
    try:
        result = lookahead.generate(model, tokenizer, ids, seed=number, **deepcopy(call))
        stream = lookahead.stream(model, tokenizer, ids, seed=number, **deepcopy(call))
        pieces = "".join(stream)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    said = [ids[0].tolist() + result.token_ids[0]]
    if result.stats.exactness == "bitwise" and said != expected[0]:
        return f"said to be bitwise: {said} instead of {expected}"
    whole = tokenizer.decode(stream.token_ids, skip_special_tokens=True)
    return "" if pieces == whole else f"streamed {pieces!r} instead of {whole!r}"


WRITES: dict[str, Callable[[Any], Any]] = {
    "data.copy_": lambda weight: weight.data.copy_(weight * 1.3 + 0.01),
    "data": lambda weight: setattr(weight, "data", weight.detach() * 1.3),
    "data.mul_": lambda weight: weight.data.mul_(0.7),
    "numpy": lambda weight: np.negative(bits := weight.detach().view(torch.int16).numpy()[..., :8], out=bits),
    "row": lambda weight: weight.data[:1].mul_(-2),
}


def check_kept(number: int) -> str:
    """The failure of prompts with a user's code that keeps a state, or after a silent write to a weight; or empty."""
    rng = np.random.default_rng([number, 6])
    name, dtype = str(rng.choice(["llama", "qwen3"])), (torch.bfloat16, torch.float32)[int(rng.integers(2))]
    model, tokenizer = deepcopy(changeable(name, dtype)), tokenizer_of(min(TOKENIZERS))
    document = rng.choice(rng.integers(3, 101, 12), 40).tolist()
    prompts = [[*document, *rng.integers(3, 101, 3).tolist()] for _ in range(2)]
    call: dict[str, Any] = {"max_new_tokens": int(rng.integers(2, 20)), "do_sample": False, "pad_token_id": 0}
    if rng.random() < 0.5:
        trusted, place = bool(rng.random() < 0.3), str(rng.choice([*PLACES]))
        state = "a recorder" if trusted else str(rng.choice([*STATES]))
        call |= {"input_ids": torch.tensor(prompts[:1])}
        config = LookaheadConfig(trust_user_code=trusted)
        found = []
        for ours in ({}, {"custom_generate": lookahead.decode, "lookahead_config": config}):
            seen: Seen = []
            with PLACES[place](model, recorded(STATES[state](), seen)):
                found.append((outcome_of(model, number, {**call, **ours}), [] if trusted else seen))
        complaint = f"{state} in {place}, trusted: {trusted}: {found[1]} instead of {found[0]}"
        return "" if found[0] == found[1] else f"{name}, {dtype}, {complaint}"
    write, parameters = str(rng.choice([*WRITES])), [*model.parameters(), *model.buffers()]
    for _ in range(2):
        done = list(lookahead.stream_many(model, tokenizer, prompts, rows=1, prefix_bytes=1 << 24, **call))
        got = [prompt + each.token_ids for prompt, each in zip(prompts, done, strict=True)]
        plain = [outcome_of(model, number, {"input_ids": torch.tensor([prompt]), **call})[0][0] for prompt in prompts]
        if got != plain and dtype == torch.float32:
            return f"{name}, {dtype}, after {write}: {got} instead of {plain}"
        WRITES[write](parameters[int(rng.integers(len(parameters)))])
    return ""


def outcome_of(model: PreTrainedModel, seed: int, call: dict[str, Any]) -> tuple[list[list[int]], list[Any]] | str:
    """The tokens of a call and the calls of its objects, or the error message for contradictory settings."""
    torch.manual_seed(seed)
    try:
        found = model.generate(**call)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    tokens: list[list[int]] = getattr(found, "sequences", found).tolist()
    return tokens, calls_of(call)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args(argv)
    use_one_thread()
    warnings.simplefilter("ignore", UserWarning)
    failures: list[int] = []
    for number in range(arguments.first, arguments.first + arguments.runs):
        complaint = check_case(number) or check_changed(number) or check_kept(number)
        if complaint:
            failures.append(number)
            print(f"case {number}: {complaint}")
        elif number % 500 == 0:
            print(f"case {number} of {arguments.first + arguments.runs}", flush=True)
    publish({"runs": arguments.runs, "first": arguments.first, "failures": failures}, arguments.output)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
