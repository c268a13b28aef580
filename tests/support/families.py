"""The tested architecture families: one tiny random model of each, and how it is decoded.

    python -m tests.support.families
    python -m tests.support.families --write

prints docs/families.md, or writes it. `tests/test_families.py` compares every row with `model.generate`, and
`bench.exactness` does so with more drafts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from lookahead.model.state_layers import KEEPS_STATES
from tests.support import feature_encoders
from tests.support.architectures import CHAINS, CLASSES, OWN_SIZES, PLAIN, SIZES, STATES, TREES, Options, Rows
from tests.support.encoder_decoders import (
    BART_SIZES,
    DECODER_PLAIN,
    DECODER_TREES,
    ENCODER_DECODER_CLASSES,
    ENCODER_DECODER_SIZES,
)
from tests.support.feature_encoders import FEATURE_PLAIN, FEATURE_TREES
from tests.support.vision_models import SEEING, Seeing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
SEED = 2
INTRODUCTION = """\
# Architecture families

This page lists the tested architectures and how lookahead decodes each. With every model here lookahead gives the
tokens of `model.generate`, greedy or sampled. The models differ in the drafts that one pass can verify:

- **trees:** drafts that branch, for one prompt or a batch;
- **chains:** drafts without branches. A causal model verifies them for one prompt at a time, and decodes batches
  plainly;
- **plain:** decoding token by token by transformers itself, after a warning that gives the reason.

Recurrent layers, such as Mamba's, are called once for every depth of a tree, and every node has its own states. The
prompts of a batch are read one after the other. Every row is a test: a tiny random model of the class is compared with
`model.generate`. A model that is not listed is probed with a few tokens at its first use.

A family is plain if a node would depend on more than its path: MiniMax and RecurrentGemma keep states outside of the
cache, indexers pick the keys that a query sees (AXK2, DeepSeek V3.2, GLM DSA, HYV4) or blocks of them (MiniMax M3),
Inkling attends by distances between slots, OpenAI GPT and FSMT have no cache to continue from, experts of NLLB-MoE and
Switch take a fixed number of tokens of a pass, and ProphetNet takes one token a pass. Beams of models with states go to
transformers, with a warning.

`python -m tests.support.families --write` writes this page."""
ENCODER_DECODERS_TOO = """\
## Encoder-decoder models

The encoder reads the input once, as in transformers. The decoder verifies trees, for one input or a batch; it is plain
if its positions depend on more than the depth of a node. Drafts come first of all from the input's own tokens. Batches
of LED and Mvp, which have their own attention functions, are decoded plainly. On a CPU the decoder's passes use packed
weights, as in causal models. The third column describes the decoder's attention to its own text."""

SEEING_TOO = """\
## Models that read images or sound

The model reads the prompt in its own first pass, as in `model.generate`. The tokens after it are verified as the table
shows, for one prompt or a batch. `tests/test_images.py` compares every row with `model.generate`."""

FEATURES_TOO = """\
## Encoders of sound and images

The input of these encoders has no tokens. Drafts come from the decoder's own prompt and output, from earlier outputs,
including the earlier segments of a sound, or from a draft model that reads the sound or image too (`DraftModel`). Call
`model.generate` under `lookahead.enable(model)`. Transducers (RNN-T, TDT) and CTC have no such decoder and are refused
by name."""

Decoded = Literal["trees", "chains", "plain"]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture in one configuration.

    Attributes:
        name: The architecture, and after a hyphen the special feature of the configuration.
        model_class: Its class in transformers.
        options: Options of its configuration class.
        decoded: The drafts that one pass can verify; plain verifies none.
        features: The features of its attention.
    """

    name: str
    model_class: str
    options: Options
    decoded: Decoded
    features: str


# How releases of transformers before the named one decode a family.
_EARLIER: dict[str, tuple[str, Decoded]] = {"CTRL": ("5.13", "chains"), "Doge": ("5.18", "plain")}
IS_NEWEST = KEEPS_STATES and all(Version(transformers.__version__) >= Version(since) for since, _ in _EARLIER.values())


def _families(decoded: Decoded, rows: Rows) -> Iterator[Family]:
    """Rows with their classes and sizes, as decoded by the installed transformers."""
    for name, (features, options) in rows.items():
        architecture = name.partition("-")[0]
        model_class = CLASSES.get(architecture, f"{architecture}ForCausalLM")
        sizes = OWN_SIZES.get(architecture, SIZES)
        since, before = _EARLIER.get(name, ("0", decoded))
        here = before if Version(transformers.__version__) < Version(since) else decoded
        yield Family(name, model_class, {**sizes, **options}, here, features)


def _encoder_decoders(decoded: Decoded, rows: Rows) -> Iterator[Family]:
    """Rows of encoder-decoder models with their classes and sizes."""
    for name, (features, options) in rows.items():
        architecture = name.partition("-")[0]
        model_class = ENCODER_DECODER_CLASSES.get(architecture, f"{architecture}ForConditionalGeneration")
        sizes = ENCODER_DECODER_SIZES.get(architecture, BART_SIZES)
        yield Family(name, model_class, {**sizes, **options}, decoded, features)


def _feature_encoders(decoded: Decoded, rows: Rows) -> Iterator[Family]:
    """Rows of models whose encoder reads sound or images, with their classes and sizes."""
    for name, (features, options) in rows.items():
        architecture = name.partition("-")[0]
        model_class = feature_encoders.CLASSES.get(architecture, f"{architecture}ForConditionalGeneration")
        yield Family(name, model_class, {**feature_encoders.SIZES[architecture], **options}, decoded, features)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *_families("trees", TREES),
        *_families("trees" if KEEPS_STATES else "plain", STATES),
        *_families("chains", CHAINS),
        *_families("plain", PLAIN),
    )
}

ENCODER_DECODERS: dict[str, Family] = {
    family.name: family
    for family in (
        *_encoder_decoders("trees", DECODER_TREES),
        *_encoder_decoders("plain", DECODER_PLAIN),
    )
}


FEATURE_ENCODERS: dict[str, Family] = {
    family.name: family
    for family in (
        *_feature_encoders("trees", FEATURE_TREES),
        *_feature_encoders("plain", FEATURE_PLAIN),
    )
}


# Features that change neither the keys that a node attends to nor their positions.
_OTHER_FEATURES = {
    *("MHA", "GQA", "MQA", "MoE", "QK norm", "biases", "tied embeddings", "parallel residual", "gated"),
    *("norm behind attention", "clipped QKV"),
}
# Run by default although another family represents their kind of attention.
_WELL_KNOWN = {"Qwen2", "Qwen3", "Mixtral", "DeepseekV3", "Gemma3", "T5"}


def cases(families: Iterable[Family], *, by_feature: bool = False) -> list[Any]:
    """Test parameters: one family for every kind of attention, and the others marked `exhaustive`.

    A kind is a set of features. With `by_feature`, a family runs only if it has a feature that no earlier family has.
    Families that the installed transformers lacks are skipped.
    """
    seen: set[Any] = set()
    known = frozenset(transformers.__all__)
    made: list[Any] = []
    for family in families:
        kind = frozenset(family.features.split(", ")) - _OTHER_FEATURES
        runs = bool(kind - seen) if by_feature else kind not in seen or family.name in _WELL_KNOWN
        seen |= kind if by_feature else {kind}
        marks = [] if runs else [pytest.mark.exhaustive]
        if family.model_class not in known:
            marks.append(pytest.mark.skip(f"transformers {transformers.__version__} has no {family.model_class}"))
        made.append(pytest.param(family, id=family.name, marks=marks))
    return made


# Without it in torch, transformers multiplies experts by a function that may not run on CPUs.
HAS_GROUPED_PRODUCTS = hasattr(torch.nn.functional, "grouped_mm")


def for_cpus(model: Any) -> Any:
    """The model, with an implementation of experts that runs on a CPU with any torch."""
    if not HAS_GROUPED_PRODUCTS and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def build(family: Family) -> PreTrainedModel:
    """A family's tiny model: fp32 on the CPU, with fixed weights and no end-of-sequence token."""
    model_class: Any = getattr(transformers, family.model_class)
    config = model_class.config_class(**{"bos_token_id": 1, "pad_token_id": 0, **family.options})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(SEED)
        model: PreTrainedModel = for_cpus(model_class(config)).float().eval()
        for parameter in model.parameters():
            # Biases, norms and the like begin as zeros or ones, which would hide a wrong use of them.
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        if family in ENCODER_DECODERS.values() and family.decoded != "plain":
            _let_wander(model)
    model.generation_config.eos_token_id = None
    return model


def _let_wander(model: Any) -> None:
    """Make a decoder's output depend on its text; otherwise one token would be the likeliest everywhere.

    Attention is focused on single tokens, and the component common to all texts is removed from the head.
    """
    for name, parameter in model.get_decoder().named_parameters():
        if name.endswith(("q_proj.weight", ".q.weight")):
            parameter.mul_(8.0)
    head, seen = model.get_output_embeddings(), []
    read, written = torch.randint(3, 101, (2, 1, 64)).unbind()
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(input_ids=read, decoder_input_ids=written)
    handle.remove()
    mean = seen[0].flatten(0, 1).mean(0)
    head.weight.sub_(torch.outer(head.weight @ mean, mean) / mean.dot(mean))
    head.weight.mul_(2.0 / model(input_ids=read, decoder_input_ids=written).logits.std())


def page() -> str:
    """The text of docs/families.md."""
    parts = (
        (INTRODUCTION, _table(FAMILIES.values())),
        (SEEING_TOO, _table(SEEING.values(), "Prompt")),
        (ENCODER_DECODERS_TOO, _table(ENCODER_DECODERS.values())),
        (FEATURES_TOO, _table(FEATURE_ENCODERS.values())),
    )
    return "\n".join(line for text, table in parts for line in (text, "", *table, ""))


def _table(families: Iterable[Family | Seeing], features: str = "Attention") -> list[str]:
    """Families as a Markdown table."""
    rows = [f"| {each.name} | `{each.model_class}` | {each.features} | {each.decoded} |" for each in families]
    return [f"| Configuration | Class | {features} | Decoded as |", "| --- | --- | --- | --- |", *rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/families.md instead of printing it")
    if parser.parse_args(argv).write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
