"""Comparison of model-backed proposers: tokens per target pass, speed, drafted nodes, and identity of outputs.

    python -m bench.proposers --model DIR --draft DIR --pair-heads DIR --output proposers.json
    python -m bench.proposers --heads DIR --documents squality_dev.jsonl --output proposers.json

With a pair of models the ways are:

- `plain`: no drafts
- `names`: the sources that need no other model
- `draft_model`: a draft model
- `specinfer`: the draft model and a second one in one tree, the target's first layers with its norm and head
- `medusa`, `mtp`, `eagle` and `eagle3`: the heads of the target, in one subfolder per kind
- `hybrid`: `names` with both draft models and the EAGLE head

With heads of the tests' summarizer, the ways without draft models are measured on it (`summarizer_eagle3`), on passages
of documents that were not in the training data. `summarizer_hybrid` is `names` with the last of its heads.

Every way decodes every prompt in turn, greedily and at temperature 1, with at most `--nodes` draft nodes per step and
without a cost model, so that tokens per pass do not depend on the machine; then greedily with the cost model ("auto"),
which may turn drafting off. Ways that can sample their drafts also decode at temperature 1 by rejection sampling. All
ways that draft also decode by typical acceptance, which is lossy; `divergence` measures the loss. In these two modes
the outputs differ from the same seed without drafts, so `identical` has no meaning. Memory is fresh for each prompt.
Figures of other models in the `--output` file are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.command import parser_of, publish, use_one_thread
from bench.prompts import OPENINGS, SUMMARIZER, read_texts, summary_prompts
from lookahead import DraftModel, Heads, LookaheadConfig
from lookahead.backend.calibration import pass_seconds
from lookahead.decoding.comparison import Score, compare
from lookahead.drafting.proposal import ProposerFactory
from lookahead.loading.loading import load

NAMES = ("prompt", "outputs", "recycled")
KINDS = ("medusa", "mtp", "eagle", "eagle3")  # of heads, and names of their folders
DRAWING = ("draft_model", "specinfer")
LOSSY = ("rejection", "typical")

Way = Callable[[], Sequence[str | ProposerFactory]]


class Stage(NamedTuple):
    """A target, its prompts, and the ways of drafting for it."""

    target: PreTrainedModel
    tokenizer: Any
    prompts: Sequence[str]
    ways: Mapping[str, Way]  # recreated for every mode, so that no mode learns from another

    def measure(self, nodes: int, tokens: int) -> dict[str, dict[str, Score]]:
        fixed = {"draft": "fixed", "max_nodes": nodes, "min_probability": 0.0, "memory": "request"}
        sampling = {"max_new_tokens": tokens, "do_sample": True, "temperature": 1.0, "top_k": 0}
        greedy = {"max_new_tokens": tokens, "do_sample": False}
        drawing = [name for name in self.ways if name in DRAWING]
        drafting = [name for name in self.ways if not name.endswith("plain")]
        return {
            "greedy": self._compare(self.ways, fixed, greedy),
            "temperature_1": self._compare(self.ways, fixed, sampling),
            "auto": self._compare(self.ways, {"memory": "request"}, greedy),
            "rejection": self._compare(drawing, {**fixed, "acceptance": "rejection"}, sampling),
            "typical": self._compare(drafting, {**fixed, "acceptance": "typical"}, sampling),
        }

    def _compare(self, ways: Sequence[str] | Mapping[str, Way], drafting: Any, generating: Any) -> dict[str, Score]:
        """Compare ways with the same drafting and generation options."""
        if not ways:
            return {}
        configs = {name: LookaheadConfig(proposers=self.ways[name](), **drafting) for name in ways}
        scores = compare(self.target, self.tokenizer, self.prompts, configs, **generating)
        return {name: scores[name] for name in configs}


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A copy of a model with only its first layers, its norm and its head."""
    shorter = deepcopy(model)
    shorter.model.layers = shorter.model.layers[:layers]
    shorter.config.num_hidden_layers = layers
    return shorter


def heads_in(folder: Path | None) -> dict[str, Callable[[], tuple[ProposerFactory, ...]]]:
    folders = [folder / kind for kind in KINDS] if folder is not None else []
    return {each.name: lambda each=each: (Heads(each),) for each in folders if each.is_dir()}


def pair_stage(options: argparse.Namespace) -> tuple[Stage, dict[str, float]]:
    """A target with a draft model, and the pass times of all models in milliseconds."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (options.model, options.draft)
    )
    skipping = first_layers(target, options.layers)
    heads = heads_in(options.pair_heads)

    def drafts() -> tuple[ProposerFactory, ...]:
        return DraftModel(draft), DraftModel(skipping, name="first layers")

    ways: dict[str, Way] = {"plain": lambda: (), "names": lambda: NAMES}
    ways |= {"draft_model": lambda: drafts()[:1], "specinfer": drafts, **heads}
    ways["hybrid"] = lambda: (*NAMES, *drafts(), *heads.get("eagle", tuple)())
    prompts = list(islice(read_texts(options.file, options.field), options.prompts))
    models = {"target": target, "draft": draft, "first_layers": skipping}
    passes = {name: round(1e3 * pass_seconds(model), 4) for name, model in models.items()}
    return Stage(target, AutoTokenizer.from_pretrained(options.model), prompts, ways), passes


def heads_stage(options: argparse.Namespace) -> Stage:
    """The summarizer of the tests with heads for it."""
    model, tokenizer = load(SUMMARIZER, dtype="fp32", device="cpu")
    texts = read_texts(options.documents, "document")
    prompts = summary_prompts(texts, tokenizer, limit=options.prompts, shortest=200, longest=900)
    heads = heads_in(options.heads)
    ways: dict[str, Way] = {"summarizer_plain": lambda: (), "summarizer_names": lambda: NAMES}
    ways |= {f"summarizer_{kind}": way for kind, way in heads.items()}
    ways["summarizer_hybrid"] = lambda: (*NAMES, *list(heads.values())[-1]())
    return Stage(model, tokenizer, prompts, ways)


def figures(scores: Mapping[str, Mapping[str, Score]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The greedy figures of every way, with the figures of other modes nested in them."""
    for name, score in scores["greedy"].items():
        others = {mode: by_way[name].to_dict() for mode, by_way in scores.items() if name in by_way}
        del others["greedy"]
        yield name, {**score.to_dict(), **others}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="folder of a HuggingFace causal LM")
    parser.add_argument("--draft", help="folder of a smaller one with its tokenizer")
    parser.add_argument("--layers", type=int, default=4, help="of the target in the second draft model (default 4)")
    parser.add_argument("--file", type=Path, default=OPENINGS, help="prompts, one a line, or JSON lines")
    parser.add_argument("--field", default="prompt", help="field of the JSON lines that holds the prompt")
    parser.add_argument("--pair-heads", type=Path, help="folder with heads of the target, by their kinds")
    parser.add_argument("--heads", type=Path, help="folder with heads of the tests' summarizer, by their kinds")
    parser.add_argument("--documents", type=Path, help="JSON lines with documents for it to summarize")
    parser.add_argument("--prompts", type=int, default=20, help="how many prompts (default 20)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt (default 128)")
    parser.add_argument("--nodes", type=int, default=32, help="most draft nodes a step (default 32)")
    options = parser.parse_args(argv)
    if (options.model is None) != (options.draft is None) or (options.heads is None) != (options.documents is None):
        parser.error("--model goes with --draft, and --heads with --documents")
    use_one_thread()
    warnings.filterwarnings("ignore", message="the draft model has")
    result: dict[str, Any] = {"settings": {}, "proposers": {}}
    if options.output is not None and options.output.exists():
        result = json.loads(options.output.read_text(encoding="utf-8"))
    stages, is_exact = {}, True
    if options.model is not None:
        stages["pair"], result["pass_ms"] = pair_stage(options)
    if options.heads is not None:
        stages["heads"] = heads_stage(options)
    for what, stage in stages.items():
        asked = {name: getattr(options, name) for name in ("tokens", "nodes")}
        result["settings"][what] = {"prompts": len(stage.prompts), **asked}
        scores = stage.measure(options.nodes, options.tokens)
        for mode, by_way in scores.items():
            for name, score in by_way.items():
                print(f"{mode:14} {name:14} {score.to_dict()}", flush=True)
                is_exact &= mode in LOSSY or score.identical == score.prompts
        result["proposers"] |= dict(figures(scores))
    publish(result, options.output)
    return int(not is_exact)


if __name__ == "__main__":
    sys.exit(main())
