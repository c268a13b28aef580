"""Whether tokens equal `model.generate`: every family, adversarial drafts, greedy and sampled, ragged prompts.

    python -m bench.exactness
    python -m bench.exactness --families Llama,Bloom
    python -m bench.exactness --encoder-decoders
    python -m bench.exactness --model FOLDER --prompts spec_bench.jsonl --field turns --limit 6

In fp32 every output must be the same, seed for seed; the command fails and names every difference. In half precision a
pass over several tokens rounds differently from a pass over one, unless every node attends alone. Models that pass
lookahead's own check of bits must give the same outputs too. For the others the command reports the share of prompts
that diverge from greedy decoding, and the gap of the two likeliest logits there. With `proposers=()` no prompt may
diverge. `--model` compares only that model, on prompts spread over the file; they are also decoded together, and each
must give the same tokens as alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

import lookahead
from bench.command import parser_of, publish, use_one_thread
from bench.prompts import agreed, as_chat, read_texts
from lookahead import LookaheadConfig
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.loading.loading import LoadedModel, load
from tests.support.adversarial_proposers import always_wrong, drafting_by, nothing, perfect
from tests.support.families import ENCODER_DECODERS, FAMILIES, Family, build
from tests.support.stateful import DoneTracker, Grammar, calls_of

NEW_TOKENS = 24
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "warm": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "hot": {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
}
ROWS = ([5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31], [44, 17, 44, 17, 44], [5, 9, 31, 5, 9, 31, 5, 9])
# Objects with state, created for every call by its number of rows.
STATEFUL: dict[str, Callable[[int], dict[str, Any]]] = {
    "grammar": lambda rows: {"logits_processor": [Grammar()]},
    "done tracker": lambda rows: {"stopping_criteria": [DoneTracker([5], rows)]},
}
DRAFTS = ("empty", "perfect", "always wrong", "real")
CONFIG = LookaheadConfig(draft="fixed", min_probability=0.0, max_nodes=16)
PLAIN = LookaheadConfig(proposers=())
OURS = {"custom_generate": lookahead.decode}
WAYS = ("without_drafts", "lookahead", "sampled")  # of decoding in half precision


def seeded(model: PreTrainedModel, **options: Any) -> Any:
    """The output of `model.generate` after a fixed seed."""
    torch.manual_seed(7)
    return model.generate(**options)


@dataclass(slots=True)
class Divergence:
    """Divergence of half precision from greedy decoding token by token."""

    runs: int = 0  # prompts compared
    gaps: list[float] = field(default_factory=list)  # of the two likeliest logits, where a prompt diverged

    def note(self, whole: Any, begin: int, sequence: torch.Tensor) -> bool:
        """Compare a sequence with an output of `model.generate` from token `begin` on; returns whether they differ."""
        self.runs += 1
        expected, got = whole.sequences[0, begin:].tolist(), sequence[0, begin:].tolist()
        if expected == got:
            return False
        at = min(agreed(expected, got), len(expected) - 1, len(got) - 1)
        likeliest, second = whole.logits[at][0].float().topk(2).values.tolist()
        self.gaps.append(likeliest - second)
        return True

    def report(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "identical": self.runs - len(self.gaps),
            "divergence_rate": round(len(self.gaps) / max(1, self.runs), 4),
            "top2_gap_median": round(median(self.gaps), 4) if self.gaps else None,
            "top2_gap_max": round(max(self.gaps), 4) if self.gaps else None,
        }


def batches() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """One prompt, and three ragged, left-padded prompts."""
    yield "one", {"input_ids": torch.tensor([ROWS[0]])}
    longest = max(map(len, ROWS))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in ROWS])
    yield "ragged", {"input_ids": ids, "attention_mask": (ids != 0).long()}


def texts_of(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    padding = [0] * len(outputs)
    if "attention_mask" in inputs:
        padding = (inputs["attention_mask"] == 0).sum(1).tolist()
    return [row[pad:] for row, pad in zip(outputs.tolist(), padding, strict=True)]


def check_family(family: Family) -> tuple[int, list[dict[str, str]]]:
    """Compare every draft, batch and mode in fp32; returns the number of runs and the differing runs."""
    model, runs, failures = build(family), 0, []
    vocab_size = model.config.get_text_config().vocab_size
    for batch, inputs in batches():
        for mode, options in MODES.items():
            kwargs = {**inputs, **options, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
            expected = seeded(model, **kwargs)
            answers = texts_of(expected, inputs)
            if family.name in ENCODER_DECODERS:  # proposers see the encoder's input, then the decoder's text
                read = texts_of(inputs["input_ids"], inputs)
                answers = [ids + said for ids, said in zip(read, expected.tolist(), strict=True)]
            offers = (nothing, perfect(answers), always_wrong(answers, vocab_size), None)
            is_alone = family.decoded == "chains" and family.name not in ENCODER_DECODERS
            is_plain = family.decoded == "plain" or (is_alone and batch == "ragged")
            for name, offer in zip(DRAFTS, offers, strict=True):
                if is_plain and offer is not None:
                    continue  # nothing is drafted here
                with drafting_by(offer) if offer is not None else nullcontext():
                    got = seeded(model, **kwargs, **OURS, lookahead_config=None if is_plain else CONFIG)
                runs += 1
                if not torch.equal(got, expected):
                    failures.append({"family": family.name, "batch": batch, "mode": mode, "draft": name})
        for name, make in STATEFUL.items():
            runs += 1
            if len({str(stateful_outcome(model, inputs, make, ours)) for ours in (False, True)}) > 1:
                failures.append({"family": family.name, "batch": batch, "mode": name, "draft": "real"})
    if family.name in ENCODER_DECODERS:
        return runs, failures  # several have a separate embedding for the decoder
    # Last, since it changes the model: nothing learned with the larger vocabulary may be drafted.
    model.resize_token_embeddings(vocab_size - 20)
    ids = torch.tensor([[token % (vocab_size - 20) for token in ROWS[0]]])
    kwargs = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    runs += 1
    if not torch.equal(model.generate(ids, **kwargs), model.generate(ids, **kwargs, **OURS)):
        failures.append({"family": family.name, "batch": "one", "mode": "greedy", "draft": "real, resized"})
    return runs, failures


def is_exact(model: PreTrainedModel) -> bool:
    """Whether a model must give the tokens of `model.generate`: in fp32, or where passes keep their bits."""
    return model.dtype == torch.float32 or (not model.config.is_encoder_decoder and keeps_solo_bits(model))


@dataclass(slots=True)
class Divergences:
    """Divergence without drafts, with drafts, and sampled with drafts."""

    ways: dict[str, Divergence] = field(default_factory=lambda: {way: Divergence() for way in WAYS})
    promised: int = 0  # outputs that diverged although the model is exact

    def compare(self, model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> list[int]:
        """Decode one prompt in every way and record where each diverges; returns the new tokens of greedy decoding."""
        kwargs = {"pad_token_id": 0, **options}
        begin = 1 if model.config.is_encoder_decoder else ids.shape[1]
        is_promised = is_exact(model)
        greedy: list[int] = []
        for mode in ("greedy", "warm"):
            kwargs |= MODES[mode]
            whole = seeded(model, inputs=ids, **kwargs, return_dict_in_generate=True, output_logits=True)
            ours = partial(seeded, model, inputs=ids, **kwargs, **OURS)
            has_parted = self.ways["lookahead" if mode == "greedy" else "sampled"].note(whole, begin, ours())
            self.promised += has_parted and is_promised
            if mode == "greedy":
                greedy = whole.sequences[0, begin:].tolist()
                self.ways["without_drafts"].note(whole, begin, ours(lookahead_config=PLAIN))
        return greedy

    def report(self) -> dict[str, Any]:
        return {name: each.report() for name, each in self.ways.items()}

    def failures(self, family: str) -> list[dict[str, str]]:
        """A failure for every output that diverged without drafts or against the check of bits."""
        drafts = ["none"] * len(self.ways["without_drafts"].gaps) + ["real"] * self.promised
        return [{"family": family, "batch": "one", "mode": "alone", "draft": draft} for draft in drafts]


def stateful_outcome(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], make: Callable[[int], dict[str, Any]], ours: bool
) -> tuple[list[list[int]], list[Any]]:
    """The tokens of a call with a stateful object, and the calls that the object saw."""
    options = {**inputs, **make(len(inputs["input_ids"])), "do_sample": False, "max_new_tokens": NEW_TOKENS}
    return model.generate(**options, pad_token_id=0, **(OURS if ours else {})).tolist(), calls_of(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns 1 if any fp32 output differs."""
    parser = parser_of(__doc__, dtype="bf16")
    parser.add_argument("--families", help="names, comma separated; all when left out")
    parser.add_argument("--encoder-decoders", action="store_true", help="those rows instead of the causal models")
    parser.add_argument("--model", help="a folder: decoding with it in --dtype, greedy and sampled, and nothing else")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="of --model")
    parser.add_argument(
        "--prompts", type=Path, help="a .jsonl file of prompts for --model, or a text file of one a line"
    )
    parser.add_argument("--field", default="turns", help="of a line")
    parser.add_argument("--limit", type=int, default=50, help="prompts")
    arguments = parser.parse_args(argv)
    use_one_thread()
    warnings.simplefilter("ignore", UserWarning)
    if arguments.model:
        if arguments.prompts is None:
            parser.error("--model needs --prompts")
        loaded = load(arguments.model, dtype=arguments.dtype, device="cpu")
        texts = list(read_texts(arguments.prompts, arguments.field))
        chosen = texts[:: max(1, len(texts) // arguments.limit)][: arguments.limit]
        prompts = [as_chat(text, loaded.tokenizer) for text in chosen]
        figures, failures = check_prompts(loaded, prompts, arguments.max_new_tokens)
        report = {"model": Path(arguments.model).name, arguments.dtype: figures, "failures": failures}
        publish(report, arguments.output)
        return 1 if failures else 0
    table = ENCODER_DECODERS if arguments.encoder_decoders else FAMILIES
    names = arguments.families.split(",") if arguments.families else list(table)
    if unknown := set(names) - set(table):
        parser.error(f"--families: {', '.join(sorted(unknown))} is not one of {', '.join(table)}")
    runs, failures, half = 0, list[dict[str, str]](), Divergences()
    for name in names:
        family = table[name]
        family_runs, family_failures = check_family(family)
        runs, failures = runs + family_runs, failures + family_failures
        print(f"{name:24} {family.decoded:7} {family_runs - len(family_failures):3} of {family_runs} identical")
        if family.decoded != "plain":
            model = build(family).to(torch.bfloat16)
            for row in ROWS:
                half.compare(model, torch.tensor([row]), max_new_tokens=NEW_TOKENS)
    report = {"families": len(names), "fp32": {"runs": runs, "identical": runs - len(failures)}}
    report["bf16"] = half.report()
    failures += half.failures("tiny")
    publish(report | {"failures": failures}, arguments.output)
    return 1 if failures else 0


def check_prompts(
    loaded: LoadedModel, prompts: Sequence[torch.Tensor], new: int
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Continue prompts alone and together; returns the figures and what failed."""
    model, half = loaded.model, Divergences()
    alone = [half.compare(model, ids, max_new_tokens=new) for ids in prompts]
    rows = [ids[0].tolist() for ids in prompts]
    done = lookahead.stream_many(*loaded, rows, max_new_tokens=new, do_sample=False)
    together = sum(output.token_ids == alone[output.index] for output in done)
    report = {**half.report(), "together": {"runs": len(prompts), "identical": together}}
    for name, counts in report.items():
        print(f"{name:16} {counts['identical']:3} of {counts['runs']} identical, {model.dtype}")
    failures = half.failures(type(model).__name__)
    if together < len(prompts) and is_exact(model):
        failures.append({"family": type(model).__name__, "batch": "together", "mode": "greedy", "draft": "real"})
    return report, failures


if __name__ == "__main__":
    sys.exit(main())
