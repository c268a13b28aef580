"""Packed weights of a decoder behind an encoder: right tokens and bits, no useless copies, a choice by CPU time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.choice import backend_for
from lookahead.backend.cpu import cpu_backend, cpu_pass, linears, product_bits, product_choice
from lookahead.backend.cpu.cpu_pass import CpuPass
from lookahead.backend.cpu.product_bits import Layout, Packed
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.backend.support import support_of
from lookahead.drafting.tree import TokenTree
from lookahead.plugins.encoder_decoder.decoder_inputs import EncoderInputs
from lookahead.plugins.encoder_decoder.encoding import encode
from tests.support.families import ENCODER_DECODERS, build
from tests.support.products import kept_choice
from tests.test_encoder_decoder import NEW_TOKENS, ONE, READ, WANDERING, generate

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def packs_small_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Layers of any size are packed, by oneDNN."""
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", 1)
    with kept_choice(tmp_path, "onednn"):
        yield


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_a_decoder_packs_the_weights_of_its_passes_and_none_that_read_the_input(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, packed, pack = ENCODER_DECODERS[name], [], linears._pack
    more = {"max_position_embeddings": 160} if name == "Bart" else {}

    def recorded(weight: torch.Tensor, *rest: Any, **options: Any) -> Packed | None:
        packed.append(weight.data_ptr())
        return pack(weight, *rest, **options)

    monkeypatch.setattr(linears, "_pack", recorded)
    long = {"input_ids": torch.randint(3, 101, (2, 140), generator=torch.Generator().manual_seed(0))}
    once = {".encoder_attn.k_proj", ".encoder_attn.v_proj", ".EncDecAttention.k", ".EncDecAttention.v"}
    one = {name: each[:1] for name, each in long.items()}
    for inputs, options in ((one, WANDERING), (one, {"do_sample": True}), (long, WANDERING), (one, {"num_beams": 3})):
        model: Any = build(replace(family, options={**family.options, **more}))
        expected = generate(model, inputs, **options, return_dict_in_generate=True)
        got: Any = generate(model, inputs, **options, return_dict_in_generate=True, custom_generate=lookahead.decode)
        assert torch.equal(got.sequences, expected.sequences)
        layers = {id(each): name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
        decoder = [each for each in model.get_decoder().modules() if id(each) in layers]
        used = [each for each in decoder if not any(layers[id(each)].endswith(end) for end in once)]
        assert sorted(packed) == sorted(each.weight.data_ptr() for each in (*used, model.lm_head))
        packed.clear()


def test_a_pass_that_packs_weights_is_no_measure_of_later_ones() -> None:
    model = build(ENCODER_DECODERS["Bart"])
    encoded = encode(model, [np.array(READ, np.int32)])
    backend = backend_for(model, rows=1, capacity=64, make_inputs=partial(EncoderInputs, encoded=encoded))
    with backend.serving():
        backend.read([np.array([2], np.int32)])
        cold = []
        for _ in range(2):
            backend.score([TokenTree.from_parents([2, 9, 31], [0, 0, 1])])
            cold.append(backend.is_cold)
    assert cold == [True, False]


@pytest.mark.parametrize("fewest", [1, 1 << 16], ids=["whole products", "rows of small layers one by one"])
def test_passes_without_drafts_have_the_bits_of_generate_in_half_precision(
    fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[BitPolicy, bool]] = []

    def recorded(each: CpuPass, **options: bool) -> Any:
        seen.append((each.policy, each.is_prompt))
        return cpu_pass.running(each, **options)

    monkeypatch.setattr(cpu_backend, "running", recorded)
    monkeypatch.setattr(product_bits, "FEWEST_WEIGHTS", fewest)
    model = build(ENCODER_DECODERS["Bart"]).to(torch.bfloat16)
    wanted = {**WANDERING, "return_dict_in_generate": True, "output_logits": True}
    expected: Any = generate(model, ONE, **wanted)
    support_of(model, shortest=1, max_length=NEW_TOKENS)
    is_solo = keeps_solo_bits(model)
    if fewest == 1 and not is_solo:
        pytest.skip("so few numbers a row are multiplied in another order on this CPU")
    seen.clear()
    config = LookaheadConfig(proposers=())
    got: Any = generate(model, ONE, **wanted, custom_generate=lookahead.decode, lookahead_config=config)
    assert seen == [(BitPolicy.BATCH, True)] + [(BitPolicy.SOLO, False)] * (NEW_TOKENS - 1)
    assert torch.equal(got.sequences, expected.sequences)
    assert all(torch.equal(*pair) for pair in zip(got.logits, expected.logits, strict=True))


@pytest.mark.skipif(os.name != "posix", reason="the clock of a thread is too coarse")
def test_a_product_that_waits_for_other_processes_is_not_taken_for_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[int, torch.Tensor] = {}

    # The product takes no time of this thread, and waits as if another process ran meanwhile.
    def lay_out(weight: torch.Tensor, layout: Layout) -> Packed:
        def product(x: torch.Tensor, bias: None) -> torch.Tensor:
            if len(x) not in results:
                results[len(x)] = linear(x, weight)
            time.sleep(0.02)
            return results[len(x)]

        return Packed(layout, product)

    monkeypatch.setattr(product_choice, "lay_out", lay_out)
    assert "onednn" in product_choice.measure(torch.float32)
