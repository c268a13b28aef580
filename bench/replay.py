"""Tokens per step with drafts on recorded outputs. No model runs; the recorded output stands for its choices.

    python -m bench.replay --tokenizer DIR --pairs outputs.jsonl
    python -m bench.replay --tokenizer DIR --pairs stories.jsonl --budgets 16 --limit 100

Every line of the file holds pairs in one of three forms: `prompt` and `output`; `turns` and `reference` of a summary
(other categories, whose references are notes, are left out); or `document` and `questions` with `responses`. A step
emits the correctly drafted tokens and one more token.

For comparison: transformers' own prompt lookup (`hf_prompt_lookup`), the longest suffix (`longest_suffix`, vLLM's rule)
and the automaton of first occurrences (`first_occurrence`, SAM decoding). `ours@16` drafts at most 16 nodes per step,
with fresh memory for each pair; `ours_shared@16` also drafts from earlier pairs; `outputs@16` only from earlier pairs.
Hit rates are learned from the first pair on. `calibration` counts promised and accepted tokens after the first 2,000.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase

from bench.baselines import ChainRule, IntArray, first_occurrence, longest_suffix, prompt_lookup
from bench.calibration import LEARNED
from bench.command import parser_of, publish
from lookahead.drafting.proposal import Feedback, Proposer
from lookahead.ngram.acceptance import HitRates
from lookahead.proposers.ngram import Memory, NgramProposer

Pair = tuple[IntArray, ...]
"""A prompt, an output, and any predictions of the output (`Proposer.expect`)."""
_NOTHING = np.zeros(0, np.int32)


def read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield prompts and outputs of a JSON lines file, in any of the three forms above."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry: dict[str, Any] = json.loads(line)
            if "output" in entry:
                yield entry["prompt"], entry["output"]
            elif "questions" in entry:
                for question in entry["questions"]:
                    for response in question["responses"]:
                        yield f"{entry['document']}\n\n{question['question_text']}\n", response["response_text"]
            elif entry.get("category") == "summarization":
                yield entry["turns"][0] + "\n", entry["reference"][0]


def ours(sources: Sequence[str], *, shared: bool) -> Callable[[], Proposer]:
    """A factory of our proposer for every pair."""
    rates, memory = HitRates(), Memory()
    return lambda: NgramProposer(sources, memory if shared else Memory(), rates)


def replay(make: Callable[[], Proposer], pairs: Sequence[Pair], budget: int = 64) -> Counter[str]:
    """Replay every pair alone, with at most `budget` nodes per step. Promises count after `LEARNED` tokens."""
    return replay_batches(make, [[pair] for pair in pairs], budget)


def replay_batches(make: Callable[[], Proposer], batches: Sequence[Sequence[Pair]], budget: int = 64) -> Counter[str]:
    """`replay` of batches, one after the other. The pairs of a batch are the rows of one call and step together."""
    tally = Counter[str]()
    for pairs in batches:
        proposer, at = make(), [0] * len(pairs)
        for row, (prompt, _, *predictions) in enumerate(pairs):
            proposer.start(row, prompt)
            if predictions:
                proposer.expect(row, predictions)
        while rows := [row for row, pair in enumerate(pairs) if at[row] < len(pair[1])]:
            proposals = [proposer.propose(row, budget) for row in rows]
            for row, proposal in zip(rows, proposals, strict=True):
                output = pairs[row][1][at[row] :]
                emitted, drafted, promised = 1, 0, 0.0
                if proposal is not None:
                    emitted, drafted, promised = _walk(
                        proposal.tokens, proposal.parents, proposal.probabilities, output
                    )
                if tally["tokens"] >= LEARNED:
                    tally.update(promised=promised, accepted=emitted - 1)
                tally.update(tokens=emitted, steps=1, drafted=drafted)
                proposer.observe(row, Feedback(output[:emitted], _NOTHING, _NOTHING), _NOTHING)
                at[row] += emitted
                if emitted == len(output):
                    proposer.finish(row)
    return tally


@njit(cache=True)
def _walk(tokens, parents, probabilities, output):
    """The accepted tokens of a tree until `output` leaves it or ends, its nodes, and the tokens that it promised.

    Nodes too deep to be accepted before the end do not count as drafted.
    """
    reach, depths = np.ones(len(tokens)), np.zeros(len(tokens), np.int64)
    drafted, promised = 0, 0.0
    for node in range(1, len(tokens)):
        depths[node] = depths[parents[node]] + 1
        reach[node] = reach[parents[node]] * probabilities[node]
        if depths[node] < len(output):
            drafted += 1
            promised += reach[node]
    at, emitted = 0, 0
    for node in range(1, len(tokens)):
        if parents[node] == at and tokens[node] == output[emitted] and emitted + 1 < len(output):
            at = node
            emitted += 1
    return emitted + 1, drafted, promised


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. A folder with only vocab.json and merges.txt is read as GPT-2."""
    if not (Path(folder) / "tokenizer.json").exists() and (Path(folder) / "merges.txt").exists():
        return GPT2Tokenizer.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer")
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines")
    parser.add_argument("--budgets", default="8,16,32,64", help="draft nodes a step (default 8,16,32,64)")
    parser.add_argument("--limit", type=int, help="how many pairs (default: all)")
    options = parser.parse_args(argv)
    tokenizer = load_tokenizer(options.tokenizer)
    pairs = [
        tuple(np.array(tokenizer(text, verbose=False)["input_ids"], np.int32) for text in pair)
        for pair in islice(read_pairs(options.pairs), options.limit)
    ]
    pairs = [(prompt, output) for prompt, output in pairs if len(prompt) and len(output)]
    rules = {"hf_prompt_lookup": prompt_lookup, "longest_suffix": longest_suffix, "first_occurrence": first_occurrence}
    tallies = {name: replay(partial(ChainRule, rule()), pairs) for name, rule in rules.items()}
    for budget in map(int, options.budgets.split(",")):
        tallies[f"ours@{budget}"] = replay(ours(["prompt"], shared=False), pairs, budget)
        tallies[f"outputs@{budget}"] = replay(ours(["outputs"], shared=True), pairs, budget)
        tallies[f"ours_shared@{budget}"] = replay(ours(["prompt", "outputs"], shared=True), pairs, budget)
    print(f"{'method':20} {'tokens/step':>12} {'drafted/step':>13} {'promised':>9} {'accepted':>9}")
    methods, calibration = {}, {}
    for name, tally in tallies.items():
        tokens, drafted = (tally[what] / max(1, tally["steps"]) for what in ("tokens", "drafted"))
        methods[name] = {"tokens_per_step": round(tokens, 4), "drafted_per_step": round(drafted, 3)}
        kept = ""
        if "@" in name:
            calibration[name] = {"promised": round(tally["promised"], 1), "accepted": tally["accepted"]}
            kept = f"{tally['promised']:9.0f} {tally['accepted']:9d}"
        print(f"{name:20} {tokens:12.3f} {drafted:13.2f} {kept}")
    result = {"pairs": len(pairs), "tokens": sum(len(output) for _, output in pairs)}
    publish({**result, "methods": methods, "calibration": calibration}, options.output)


if __name__ == "__main__":
    main()
