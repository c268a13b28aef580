"""Model-backed proposers side by side: tokens per target pass, speed, nodes drafted, and are outputs those of generate?

    python -m bench.proposers --model DIR --draft DIR --json proposers.json

Ways of drafting (`WAYS`): `draft_model` is one draft model; `specinfer` two of them in one tree, the second made of
the target's own first layers with its norm and head; `hybrid` the draft model beside the sources that need none, which
`names` are alone; `plain` drafts nothing. Another way is a line in `WAYS`.

Every way decodes every prompt in turn, greedily and at temperature 1, with `--nodes` draft nodes a step at most and no
cost model, so that tokens per pass do not depend on the machine; then greedily with the cost model ("auto"), which may
turn drafting off; those that can draw also at temperature 1 by rejection sampling, where outputs are other ones than
from the same seed and `identical` says nothing. Memory is fresh for each prompt. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.jacobi import OPENINGS
from bench.prompts import read_texts
from lookahead import DraftModel, LookaheadConfig
from lookahead.contest import Score, compare, pass_seconds
from lookahead.proposers.base import ProposerFactory

NAMES = ("prompt", "outputs", "recycled")


@dataclass(frozen=True, slots=True)
class Models:
    """What ways of drafting are made of.

    Attributes:
        target: The model to be drafted for.
        draft: A small one with its tokenizer.
        first_layers: The target's own first layers.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    first_layers: PreTrainedModel

    def drafting(self) -> DraftModel:
        return DraftModel(self.draft)

    def skipping(self) -> DraftModel:
        return DraftModel(self.first_layers, name="first layers")


Way = Callable[[Models], Sequence[str | ProposerFactory]]
WAYS: Mapping[str, Way] = {
    "plain": lambda models: (),
    "names": lambda models: NAMES,
    "draft_model": lambda models: (models.drafting(),),
    "specinfer": lambda models: (models.drafting(), models.skipping()),
    "hybrid": lambda models: (*NAMES, models.drafting()),
}
DRAWING = ("draft_model", "specinfer")


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A copy of a model that goes from its first layers straight to its norm and head."""
    shorter = deepcopy(model)
    shorter.model.layers = shorter.model.layers[:layers]
    shorter.config.num_hidden_layers = layers
    return shorter


def measure(
    models: Models, tokenizer: Any, prompts: Sequence[str], ways: Sequence[str], fixed: dict[str, Any], **options: Any
) -> dict[str, Score]:
    """All ways with the same options of drafting and of generating."""
    configs = {name: LookaheadConfig(proposers=WAYS[name](models), **fixed) for name in ways}
    return compare(models.target, tokenizer, prompts, configs, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; 1 where an output that should be identical is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a HuggingFace causal LM")
    parser.add_argument("--draft", required=True, help="folder of a smaller one with its tokenizer")
    parser.add_argument("--layers", type=int, default=4, help="of the target in the second draft model (default 4)")
    parser.add_argument("--file", type=Path, default=OPENINGS, help="prompts, one a line, or JSON lines")
    parser.add_argument("--field", default="prompt", help="field of the JSON lines that holds the prompt")
    parser.add_argument("--prompts", type=int, default=20, help="how many prompts (default 20)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt (default 128)")
    parser.add_argument("--nodes", type=int, default=32, help="most draft nodes a step (default 32)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)} (default all)")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args(argv)
    ways = options.ways.split(",")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="the draft model has")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (options.model, options.draft)
    )
    models = Models(target, draft, first_layers(target, options.layers))
    prompts = list(islice(read_texts(options.file, options.field), options.prompts))
    fixed = {"draft": "fixed", "max_nodes": options.nodes, "min_probability": 0.0, "memory": "request"}
    sampling = {"max_new_tokens": options.tokens, "do_sample": True, "temperature": 1.0, "top_k": 0}
    greedy = {"max_new_tokens": options.tokens, "do_sample": False}
    drawing = [name for name in ways if name in DRAWING]
    scores = {
        "greedy": measure(models, tokenizer, prompts, ways, fixed, **greedy),
        "temperature_1": measure(models, tokenizer, prompts, ways, fixed, **sampling),
        "auto": measure(models, tokenizer, prompts, ways, {"memory": "request"}, **greedy),
        "rejection": measure(models, tokenizer, prompts, drawing, {**fixed, "acceptance": "rejection"}, **sampling),
    }
    proposers: dict[str, dict[str, Any]] = {
        name: {
            **scores["greedy"][name].to_dict(),
            **{mode: by_way[name].to_dict() for mode, by_way in scores.items() if mode != "greedy" and name in by_way},
        }
        for name in ways
    }
    for mode, by_way in scores.items():
        for name, score in by_way.items():
            print(f"{mode:14} {name:12} {score.to_dict()}")
    result = {
        "model": options.model,
        "draft": options.draft,
        "prompts": len(prompts),
        "tokens": options.tokens,
        "nodes": options.nodes,
        "pass_ms": {
            name: round(1e3 * pass_seconds(getattr(models, name)), 4) for name in ("target", "draft", "first_layers")
        },
        "proposers": proposers,
    }
    print(json.dumps(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    exact = [score for mode, by_way in scores.items() if mode != "rejection" for score in by_way.values()]
    return int(any(score.identical < score.prompts for score in exact))


if __name__ == "__main__":
    sys.exit(main())
