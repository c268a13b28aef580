"""Proposers for vLLM on recorded outputs: tokens per step, and microseconds per request and step. No model runs.

    python -m bench.vllm_replay --outputs outputs.json
    python -m bench.vllm_replay --outputs outputs.json --batch 1,16,128 --token-cost 0.02

`outputs.json` is written by `bench.vllm_peer --record`: `outputs` is a list of `category`, `prompt` and `output` as
token ids; other fields are copied to the figures. A stub of vLLM's model runner passes a proposer the arguments of vLLM
and verifies its drafts. Methods: vLLM's n-gram rule (2 to 5 tokens, 10 drafted), the suffix decoding of
arctic-inference with vLLM's options if installed, and lookahead with at most 16 tokens. "No loops" excludes, for every
method, outputs that repeat 16 of their own tokens, which flatter n-grams.

A step costs 1 plus `--token-cost` times the mean number of drafted tokens of a request. Lookahead's clock runs by this
cost. `gain` is tokens per cost, over plain decoding. Prefills are left out.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.baselines import longest_suffix
from bench.command import parser_of, publish
from bench.prompts import loops
from lookahead.plugins.vllm import LookaheadProposer
from tests.support.row_engine import RowEngine, StubRequest, stub_config

LONGEST_DRAFT = 16
_SUFFIX_DEPTH, _SUFFIX_REQUESTS = 24, 10_000  # vLLM's defaults; its other two equal arctic-inference's


@dataclass(eq=False)
class Recorded(StubRequest):
    """A request whose output is known."""

    category: str = ""
    prompt: int = 0
    script: list[int] = field(default_factory=list)
    steps: int = 0


class ReplayEngine(RowEngine):
    """Decodes recorded outputs on a simulated clock."""

    seconds = host_s = 0.0
    calls = 0

    def __init__(self, make: Callable[[ReplayEngine, Any], Any], config: Any, token_cost: float) -> None:
        super().__init__(self, lambda tokens: 0, config, chunk=1 << 30)
        self._token_cost = token_cost
        self._drafts_of = make(self, config)

    def following(self, request: Any) -> int:
        return int(request.script[len(request.tokens)])

    def propose(self, sampled: list[list[int]], counts: Any, tokens: Any, slot_mappings: Any) -> list[list[int]]:
        begin = time.thread_time()
        drafts: list[list[int]] = self._drafts_of.propose(sampled, counts, tokens, slot_mappings)
        self.host_s += time.thread_time() - begin
        self.calls += len(sampled)
        return drafts

    def step(self) -> None:
        """Run one pass, and advance the clock by its cost."""
        self.seconds += 1.0 + self._token_cost * sum(len(request.draft) for request in self.rows) / len(self.rows)
        for request in self.rows:
            request.steps += 1
        super().step()


class NgramRows:
    def __init__(self, engine: ReplayEngine, config: Any) -> None:
        self._draft = longest_suffix()

    def propose(self, sampled: list[list[int]], counts: Any, tokens: Any, slot_mappings: Any) -> list[list[int]]:
        return [self._draft(tokens[row, : counts[row]]).tolist() for row in range(len(sampled))]


class SuffixRows:
    """Suffix decoding with the interface that vLLM calls."""

    def __init__(self, engine: ReplayEngine, config: Any) -> None:
        cache = importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache
        self._cache = cache(max_tree_depth=_SUFFIX_DEPTH, max_cached_requests=_SUFFIX_REQUESTS)
        self._engine, self._names = engine, dict[StubRequest, int]()

    def propose(self, sampled: list[list[int]], counts: Any, tokens: Any, slot_mappings: Any) -> list[list[int]]:
        drafts, active = [], set()
        for row, new in enumerate(sampled):
            name = self._names.setdefault(self._engine.rows[row], len(self._names))
            active.add(name)
            if name not in self._cache.active_requests:
                self._cache.start_request(name, tokens[row, : counts[row] - len(new)])
            self._cache.add_active_response(name, new)
            pattern = tokens[row, max(0, counts[row] - _SUFFIX_DEPTH) : counts[row]]
            drafts.append(self._cache.speculate(name, pattern, max_spec_tokens=_SUFFIX_DEPTH).token_ids)
        for name in self._cache.active_requests - active:
            self._cache.stop_request(name)
        return drafts


def replay(
    make: Callable[[ReplayEngine, Any], Any], pairs: Sequence[dict[str, Any]], batch: int, token_cost: float
) -> dict[str, Any]:
    """Decode all outputs, `batch` at a time, and return the figures."""
    longest = max(len(pair["prompt"]) + len(pair["output"]) for pair in pairs) + 2 * _SUFFIX_DEPTH
    config = stub_config(_SUFFIX_DEPTH if make is SuffixRows else LONGEST_DRAFT, longest, batch)
    engine = ReplayEngine(make, config, token_cost)
    requests = []
    for pair in pairs:
        prompt, known = pair["prompt"], pair["prompt"] + pair["output"]
        requests.append(Recorded(list(prompt), len(known), category=pair["category"], prompt=len(prompt), script=known))
    waiting = list(requests)
    while waiting or engine.rows:
        for ended in [each for each in engine.rows if len(each.tokens) >= each.limit]:
            engine.remove(ended)
        while waiting and len(engine.rows) < batch:
            engine.add(waiting.pop(0))
        if engine.rows:
            engine.step()
    tokens = sum(len(pair["output"]) - 1 for pair in pairs)
    steps = sum(request.steps - 1 for request in requests)
    categories = dict.fromkeys(request.category for request in requests)
    straight = [each for each in requests if not loops(each.script[each.prompt :])]
    return {
        "tokens_per_step": per_step(requests),
        "without_loops": per_step(straight) if straight else None,
        "drafted_per_step": round(engine.drafted / steps, 3),
        "gain": round(tokens / (steps + token_cost * engine.drafted), 4),
        "us_per_request": round(1e6 * engine.host_s / engine.calls, 2),
        "by_category": {name: per_step([each for each in requests if each.category == name]) for name in categories},
    }


def per_step(requests: Sequence[Recorded]) -> float:
    """Tokens per step of requests, without prefills."""
    tokens = sum(len(each.tokens) - each.prompt - 1 for each in requests)
    return round(tokens / max(1, sum(each.steps - 1 for each in requests)), 4)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--outputs", type=Path, required=True, help="a file of bench.vllm_peer --record")
    parser.add_argument("--batch", default="1,16", help="requests at a time, commas between (default 1,16)")
    parser.add_argument("--token-cost", type=float, default=0.015, help="of a drafted token, in steps (default 0.015)")
    options = parser.parse_args(argv)
    setting = json.loads(options.outputs.read_text(encoding="utf-8"))
    pairs = [pair for pair in setting.pop("outputs") if len(pair["output"]) > 1]
    methods: dict[str, Callable[[ReplayEngine, Any], Any]] = {
        "n-gram": NgramRows,
        "lookahead": lambda engine, config: LookaheadProposer(config, clock=lambda: engine.seconds),
    }
    if find_spec("arctic_inference"):
        methods["suffix"] = SuffixRows
    else:
        print("suffix: left out, arctic-inference is not installed")
    result: dict[str, Any] = {**setting, "outputs": len(pairs), "token_cost": options.token_cost, "batches": {}}
    print("batch method      tokens/step  no loops  drafted/step   gain  us/request")
    for batch in map(int, options.batch.split(",")):
        rows = result["batches"][batch] = {}
        for name, make in methods.items():
            rows[name] = row = replay(make, pairs, batch, options.token_cost)
            straight = "-" if row["without_loops"] is None else f"{row['without_loops']:.3f}"
            print(
                f"{batch:5d} {name:10} {row['tokens_per_step']:12.3f} {straight:>9} {row['drafted_per_step']:13.2f} "
                f"{row['gain']:6.3f} {row['us_per_request']:11.2f}"
            )
    publish(result, options.output)


if __name__ == "__main__":
    main()
