"""Beam search: the sequences and scores of `model.generate`, and its time and memory.

    python -m bench.beams --families all
    python -m bench.beams --model DIR --prompts spec_bench.jsonl --dtype bf16
    python -m bench.beams --encoder-decoder

With `--families` tiny models of many architectures search with 2, 4 and 8 beams, one prompt and three ragged ones, with
the options of beam search. Sequences must be the same, beam indices too, and scores within 1e-5; the command fails where
they are not. Otherwise one model searches on one thread of one core, transformers and lookahead in turn on every prompt,
and their order rotates; in fp32, and in bf16 where a row keeps its bits, a difference ends the run before any figure.
Memory is that of keys and values, counted from shapes. `--encoder-decoder` takes a model of BART-base's shape with
random weights and inputs of 700 tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel

import lookahead
from bench.exactness import ROWS, batches
from bench.llm import as_chat, processor
from bench.llm_peers import read_clocks
from bench.prompts import read_texts
from bench.report import publish
from lookahead import LookaheadConfig, UnsupportedModelError
from lookahead.models.loading import load
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
    given = {"custom_generate": lookahead.decode} if ours else {}
    out = model.generate(**options, **given, return_dict_in_generate=True, output_scores=True)
    return out.sequences.tolist(), out.beam_indices.tolist(), out.sequences_scores


def agree(got: Outcome, expected: Outcome) -> bool:
    """Whether two searches found the same."""
    return got[:2] == expected[:2] and bool(((got[2] - expected[2]).abs() <= 1e-5).all())


def check_family(family: Family) -> tuple[int, list[str]]:
    """Compare every option, number of beams and batch in fp32; the runs and those that differ."""
    model, runs, failures = build(family), 0, []
    for batch, inputs in batches():
        for beams in BEAMS:
            for name, options in OPTIONS.items():
                shared = {**inputs, "num_beams": beams, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
                call = partial(outcome, model, **{**shared, "eos_token_id": ENDS, "do_sample": False, **options})
                try:
                    got = call(ours=True)
                except UnsupportedModelError as error:
                    print(f"{family.name}: {error}")
                    return runs, failures
                runs += 1
                if not agree(got, call(ours=False)):
                    failures.append(f"{family.name}, {batch}, {beams} beams, {name}")
    return runs, failures


def check_families(names: str) -> dict[str, Any]:
    """Compare all families, or some of them."""
    table = {**FAMILIES, **ENCODER_DECODERS}
    chosen = [each for each in table.values() if each.decoded == "trees" or each.name in ENCODER_DECODERS]
    chosen = chosen if names == "all" else [table[name] for name in names.split(",")]
    runs, failures = 0, []
    for family in chosen:
        family_runs, family_failures = check_family(family)
        print(f"{family.name:24} {family_runs - len(family_failures):3} of {family_runs} identical", flush=True)
        runs, failures = runs + family_runs, failures + family_failures
    return {"families": len(chosen), "runs": runs, "identical": runs - len(failures), "failures": failures}
