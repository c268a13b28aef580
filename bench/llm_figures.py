"""Evaluation of the runs of `bench.llm`: the gate, and the figures of every method."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bench.prompts import agreed, loops

GREEDY, OURS = "greedy", "lookahead"
CONFIGS: dict[str, dict[str, Any]] = {
    OURS: {},
    "prompt alone": {"proposers": ("prompt",)},
    "recycled alone": {"proposers": ("recycled",)},
    "outputs alone": {"proposers": ("outputs",)},
    "window": {"window": "auto"},
    "no drafts": {"proposers": ()},
    "self": {"proposers": ("prompt", "outputs", "recycled", "self")},
}
LOOKUPS = {f"prompt lookup {length}": length for length in (3, 10, 20)}
CLOCKS = ("cpu", "wall")


@dataclass(slots=True)
class Run:
    """The run of one method on one prompt."""

    tokens: list[int]  # new tokens
    first: int  # new tokens of the prefill
    passes: int  # of the model after the prefill
    prefill: dict[str, float]  # seconds to the first token, by clock
    total: dict[str, float]  # seconds of the call, by clock
    gaps: list[float] = field(default_factory=list)  # of the two likeliest logits, for greedy in half precision only
    is_bitwise: bool = False  # the stats say that every pass kept the bits of `model.generate`

    def decode(self, clock: str) -> float:
        return self.total[clock] - self.prefill[clock]

    @property
    def decoded(self) -> int:
        return len(self.tokens) - self.first


class Prompt(NamedTuple):
    """A prompt's category and token ids, int64 `[1, length]`."""

    category: str
    ids: torch.Tensor


def differences(runs: Sequence[Run], greedy: Sequence[Run]) -> list[dict[str, Any]]:
    parted = []
    for i, (run, other) in enumerate(zip(runs, greedy, strict=True)):
        if run.tokens != other.tokens:
            place = agreed(run.tokens, other.tokens)
            gap = round(other.gaps[place], 4) if place < len(other.gaps) else None
            parted.append({"prompt": i, "position": place, "gap": gap})
    return parted


def check_lossless(runs: Sequence[Run], greedy: Sequence[Run], dtype: str, what: str) -> None:
    """The gate: exit if a method of ours differs from `model.generate` in fp32, or although its stats are bitwise."""
    parted = [each for each in differences(runs, greedy) if dtype == "fp32" or runs[each["prompt"]].is_bitwise]
    if parted:
        sys.exit(f"not lossless: {what} differs from model.generate on {parted}; no speed is reported")


def summarize(runs: Sequence[Run], greedy: Sequence[Run], places: Sequence[int]) -> dict[str, Any]:
    """The figures of one method on the prompts at `places`."""

    def total(some: Sequence[Run], clock: str) -> float:
        return sum(some[i].total[clock] for i in places) / max(1, sum(len(some[i].tokens) for i in places))

    def per_token(some: Sequence[Run], clock: str) -> float:
        return sum(some[i].decode(clock) for i in places) / max(1, sum(some[i].decoded for i in places))

    return {
        "ms_per_token": {clock: round(1e3 * per_token(runs, clock), 3) for clock in CLOCKS},
        "speedup": {clock: ratio(per_token(greedy, clock), per_token(runs, clock)) for clock in CLOCKS},
        "end_to_end": {clock: ratio(total(greedy, clock), total(runs, clock)) for clock in CLOCKS},
        "tokens_per_pass": ratio(sum(runs[i].decoded for i in places), sum(runs[i].passes for i in places)),
    }


def ratio(above: float, below: float) -> float | None:
    """A ratio rounded to three decimals; None if nothing was decoded."""
    return round(above / below, 3) if below and above else None


def figures_of(
    runs: Mapping[str, Sequence[Run]], prompts: Sequence[Prompt], clock: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """The figures of every method: on all prompts, without loops, by category, and on its worst prompt."""
    greedy = runs[GREEDY]
    everywhere = range(len(prompts))
    straight = [i for i in everywhere if not any(loops(each[i].tokens) for each in runs.values())]
    figures = {}
    for name, each in runs.items():
        parted = differences(each, greedy)
        long = [i for i in everywhere if each[i].decoded >= 16]
        figures[name] = {
            **summarize(each, greedy, everywhere),
            "without_loops": summarize(each, greedy, straight) if straight else None,
            "identical": len(prompts) - len(parted),
            "parted": parted,
            "lowest": min((summarize(each, greedy, [i])["speedup"][clock] or 0.0 for i in long), default=None),
            "by_category": {
                category: summarize(each, greedy, [i for i in everywhere if prompts[i].category == category])
                for category in dict.fromkeys(prompt.category for prompt in prompts)
            },
        }
    return figures


def cold_figures(
    cold: Sequence[Run], runs: Mapping[str, Sequence[Run]], places: Sequence[int], dtype: str, clock: str
) -> dict[str, Any]:
    """Figures of fresh processes and of the warm one on the same prompts."""
    greedy, warm = ([runs[name][i] for i in places] for name in (GREEDY, OURS))
    check_lossless(cold, greedy, dtype, "a fresh process")
    some = range(len(places))
    figures = {name: summarize(each, greedy, some) for name, each in (("cold", cold), ("warm", warm))}
    passes = [figures[name]["tokens_per_pass"] for name in ("cold", "warm")]
    lowest = min(summarize(cold, greedy, [i])["speedup"][clock] or 0.0 for i in some)
    median_s = round(statistics.median(run.total[clock] for run in cold), 2)
    of_warm = ratio(*passes) if all(passes) else None
    found = {"tokens_per_pass_of_warm": of_warm, "lowest": lowest, "median_call_s": median_s}
    return {"prompts": len(places), **figures, **found}


def headline(methods: Mapping[str, Mapping[str, Any]], clock: str) -> dict[str, Any]:
    """The main figures."""
    lookups = [name for name in methods if name in LOOKUPS]
    best = min(lookups, key=lambda name: methods[name]["ms_per_token"][clock], default=None)
    figures: dict[str, Any] = {"best_prompt_lookup": best}
    for key, name in (("lookahead", OURS), ("prompt_lookup", best)):
        if name in methods:
            each = methods[name]
            without = each["without_loops"] or {"speedup": {clock: None}}
            figures[key] = {what: each[what][clock] for what in ("speedup", "end_to_end", "ms_per_token")}
            figures[key] |= {what: each[what] for what in ("tokens_per_pass", "identical", "lowest")}
            figures[key]["without_loops"] = without["speedup"][clock]
    return figures


def print_table(result: Mapping[str, Any], clock: str = "cpu") -> None:
    prompts = result["prompts"]
    print(f"{'':26} {'ms/token':>9} {'(wall)':>8} {'x greedy':>9} {'no loops':>9} {'end to end':>11} "
          f"{'lowest':>7} {'tok/pass':>9} {'identical':>10}")  # fmt: skip
    for name, each in result["methods"].items():
        without = (each["without_loops"] or {"speedup": {clock: None}})["speedup"][clock]
        cells = (each["speedup"][clock], without, each["end_to_end"][clock], each["lowest"], each["tokens_per_pass"])
        gain, straight, whole, lowest, passes = ("-" if cell is None else f"{cell:.2f}" for cell in cells)
        print(f"{name:26} {each['ms_per_token'][clock]:9.2f} {each['ms_per_token']['wall']:8.2f} {gain:>9} "
              f"{straight:>9} {whole:>11} {lowest:>7} {passes:>9} {each['identical']:5d}/{prompts}")  # fmt: skip
    if cold := result.get("cold"):
        print(f"fresh processes, {cold['prompts']} prompts: {cold['cold']['speedup'][clock]}x greedy, "
              f"{cold['cold']['tokens_per_pass']} tokens/pass, {cold['tokens_per_pass_of_warm']} of warm")  # fmt: skip
