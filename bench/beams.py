"""Beam search: whether sequences and scores equal `model.generate`, and its time and memory.

    python -m bench.beams --families all
    python -m bench.beams --model DIR --prompts spec_bench.jsonl --dtype bf16
    python -m bench.beams --encoder-decoder

With `--families`, tiny models of many architectures search with 2, 4 and 8 beams, for one prompt and for three ragged
prompts, with the options of beam search. The command fails if sequences or beam indices differ, or scores differ by
more than 1e-5. Otherwise one model searches on one core, with transformers and lookahead in turn on every prompt, in
rotating order. A difference ends the run in fp32, and in bf16 if rows keep their bits. KV memory is the peak size of
the caches of a search. `--encoder-decoder` uses a model of BART-base's shape with random weights, and inputs of 700
tokens.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, PreTrainedModel

import lookahead
from bench.command import parser_of, publish, setting_of, stay_on_cores, use_one_thread
from bench.exactness import batches
from bench.llm import as_chat
from bench.llm_peers import read_clocks
from bench.prompts import read_texts
from lookahead import LookaheadConfig, UnsupportedModelError
from lookahead.decoding import hf_outputs
from lookahead.loading.loading import DEFAULT_MODEL, load
from lookahead.model.call_caches import CACHE
from lookahead.plugins.beams import beam_search
from lookahead.plugins.beams.beam_search import has_bits_of_beams
from lookahead.plugins.beams.beam_tree import BeamModel
from tests.support.families import ENCODER_DECODERS, FAMILIES, Family, build

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "length penalty": {"length_penalty": 2.0, "early_stopping": "never"},
    "no repeat": {"no_repeat_ngram_size": 3},
    "min length": {"min_new_tokens": 8},
    "early stopping": {"early_stopping": True, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}
BEAMS = (2, 4, 8)
NEW_TOKENS = 16
ENDS = [5, 9]  # frequent tokens of the tiny models, so that beams end at different lengths
Outcome = tuple[list[list[int]], list[list[int]], torch.Tensor]


def outcome(model: PreTrainedModel, ours: bool, **options: Any) -> Outcome:
    """Sequences, beam indices and scores of one search."""
    torch.manual_seed(3)
    given = {"custom_generate": lookahead.decode, "lookahead_config": LookaheadConfig()} if ours else {}
    out = model.generate(**options, **given, return_dict_in_generate=True, output_scores=True)
    return out.sequences.tolist(), out.beam_indices.tolist(), out.sequences_scores


def check_family(family: Family) -> tuple[int, list[str]]:
    """Compare every option, number of beams and batch in fp32; returns the number of runs and the differing runs."""
    model, runs, failures = build(family), 0, []
    for batch, inputs in batches():
        for count in BEAMS:
            for name, options in OPTIONS.items():
                shared = {**inputs, "num_beams": count, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
                call = partial(outcome, model, **{**shared, "eos_token_id": ENDS, "do_sample": False, **options})
                try:
                    got = call(ours=True)
                except UnsupportedModelError as error:
                    print(f"{family.name}: {error}")
                    return runs, failures
                runs, expected = runs + 1, call(ours=False)
                if got[:2] != expected[:2] or not ((got[2] - expected[2]).abs() <= 1e-5).all():
                    failures.append(f"{family.name}, {batch}, {count} beams, {name}")
    return runs, failures


def held(cache: Any) -> int:
    layers = [layer for layer in getattr(cache, "layers", ()) if layer.is_initialized]
    return sum(
        each.nbytes for layer in layers for each in getattr(layer, "buffers", None) or (layer.keys, layer.values)
    )


@contextmanager
def watched() -> Iterator[Callable[[Any], dict[str, int]]]:
    """Watch a search. The yielded function returns the bytes of keys and values, given the output of the search."""
    searches: list[BeamModel] = []
    at_prefill: list[int] = []
    prefill = BeamModel._prefill

    def read(self: BeamModel, *args: Any, **kwargs: Any) -> Any:
        searches.append(self)
        return prefill(self, *args, **kwargs)

    def copy_prefix_from(past: Any, cache: Any, skipped: Any, **options: Any) -> None:
        at_prefill.append(held(past))
        hf_outputs.copy_prefix_from(past, cache, skipped, **options)
        at_prefill.append(held(past) + held(cache))

    def figures(out: Any) -> dict[str, int]:
        if not searches:
            return {"kv_bytes": held(out[CACHE])} if isinstance(out.get(CACHE), DynamicCache) else {}
        return {"kv_bytes": max([*at_prefill, held(searches[-1]._cache)])}

    with (
        mock.patch.object(BeamModel, "_prefill", read),
        mock.patch.object(beam_search, "copy_prefix_from", copy_prefix_from),
    ):
        yield figures


def search(model: PreTrainedModel, ids: torch.Tensor, options: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
    """Run one timed search; returns its output, and its seconds by clock with the bytes of its caches if known."""
    with watched() as figures:
        begin = read_clocks()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **options
        )
        end = read_clocks()
    return out, {**{clock: end[clock] - begin[clock] for clock in end}, **figures(out)}


def compare(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], ways: Mapping[str, Mapping[str, Any]], must_agree: str
) -> list[dict[str, Any]]:
    """Search for every prompt in every way, in turn. The first way is transformers.

    A difference between it and the way `must_agree` ends the run.
    """
    names, rows = list(ways), []
    for i, ids in enumerate(prompts):
        found = {name: search(model, ids, ways[name]) for name in names[i % len(names) :] + names[: i % len(names)]}
        (theirs, _), begin = found[names[0]], 0 if model.config.is_encoder_decoder else ids.shape[1]
        row: dict[str, Any] = {"prompt_tokens": ids.shape[1], "new_tokens": theirs.sequences.shape[1] - begin}
        for name, (out, seconds) in found.items():
            is_same = torch.equal(out.sequences, theirs.sequences)
            if name == must_agree and not is_same:
                sys.exit(f"prompt {i}: {name} found another sequence than transformers")
            difference = float((out.sequences_scores - theirs.sequences_scores).abs().max()) if is_same else None
            row[name] = {**seconds, "identical": is_same, "score_difference": difference}
        rows.append(row)
        speeds = ", ".join(f"{row[names[0]]['cpu'] / row[name]['cpu']:.2f}x {name}" for name in names[1:])
        print(f"{i + 1}/{len(prompts)}: {ids.shape[1]} tokens of prompt, {speeds}", file=sys.stderr, flush=True)
    return rows


def kv_share(rows: Sequence[Mapping[str, Any]], theirs: str, name: str) -> dict[str, float]:
    """Bytes of keys and values relative to transformers, the maximum over prompts."""
    shares = [row[name]["kv_bytes"] / row[theirs]["kv_bytes"] for row in rows if "kv_bytes" in row[name]]
    return {"kv_share": round(max(shares), 3)} if shares else {}


def summary(rows: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> dict[str, Any]:
    """Total speeds, and the number of prompts with the same sequences."""
    total = {name: {clock: sum(row[name][clock] for row in rows) for clock in ("cpu", "wall")} for name in ways}
    return {
        name: {
            **{f"speedup_{clock}": round(total[ways[0]][clock] / total[name][clock], 3) for clock in ("cpu", "wall")},
            "cpu_s": round(total[name]["cpu"], 2),
            **kv_share(rows, ways[0], name),
            "identical": sum(row[name]["identical"] for row in rows),
            "score_difference": max((row[name]["score_difference"] or 0.0 for row in rows), default=0.0),
        }
        for name in ways
    }


def bart_base() -> PreTrainedModel:
    """A model of the shape of facebook/bart-base with random weights; the config's defaults are bart-large."""
    config = BartConfig(
        d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, vocab_size=50265, forced_eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BartForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="fp32", core=True)
    parser.add_argument("--families", help="names, comma separated, or all: the comparison on tiny models")
    parser.add_argument("--encoder-decoder", action="store_true", help="a model of BART-base's shape instead")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a category, as Spec-Bench has them")
    parser.add_argument("--categories", default="summarization,rag", help="comma separated")
    parser.add_argument("--limit", type=int, default=3, help="prompts of a category")
    parser.add_argument("--offset", type=int, default=0, help="prompts of each category to leave out")
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore", UserWarning)
    if arguments.families:
        use_one_thread()
        names, table = arguments.families, {**FAMILIES, **ENCODER_DECODERS}
        chosen = [each for each in table.values() if each.decoded == "trees" or each.name in ENCODER_DECODERS]
        chosen = chosen if names == "all" else [table[name] for name in names.split(",")]
        runs, failures = 0, list[dict[str, Any]]()
        for family in chosen:
            tried, failed = check_family(family)
            print(f"{family.name:24} {tried - len(failed):3} of {tried} identical", flush=True)
            runs, failures = runs + tried, failures + failed
        report = {"families": len(chosen), "runs": runs, "identical": runs - len(failures), "failures": failures}
        publish(report, arguments.output)
        return 1 if failures else 0
    stay_on_cores(arguments.core)
    if arguments.encoder_decoder:
        model, name = bart_base(), "BART-base's shape, random weights"
        prompts = [torch.randint(5, 50265, (1, 700)) for _ in range(arguments.limit)]
    elif arguments.prompts is None:
        parser.error("--prompts is missing")
    else:
        loaded = load(arguments.model, dtype=arguments.dtype, device="cpu")
        model, name, prompts = loaded.model, Path(arguments.model).name, []
        for category in arguments.categories.split(","):
            texts = list(read_texts(arguments.prompts, "turns", category))
            chosen = texts[arguments.offset : arguments.offset + arguments.limit]
            prompts += [as_chat(text, loaded.tokenizer) for text in chosen]
    shared = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    ways: dict[str, dict[str, Any]] = {"transformers": shared}
    ways["lookahead"] = {**shared, "custom_generate": lookahead.decode}
    for way in ways.values():  # probes and packed weights come first
        search(model, prompts[0][:, :40], {**way, "max_new_tokens": 16})
    is_exact = arguments.dtype == "fp32" or has_bits_of_beams(model, arguments.num_beams)
    rows = compare(model, prompts, ways, must_agree="lookahead" if is_exact else "")
    report = {**setting_of(arguments), "model": name, "beams": arguments.num_beams, "prompts": len(prompts)}
    report |= {"prompt_tokens": [row["prompt_tokens"] for row in rows], "max_new_tokens": arguments.max_new_tokens}
    publish(report | {"summary": summary(rows, list(ways)), "rows": rows}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
