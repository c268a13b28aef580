"""Weights in the blocks of a GGUF file: its numbers, the same tokens with drafts, and what is refused by name."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor
from typer.testing import CliRunner

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.step_costs import identity
from lookahead.cli.app import app
from lookahead.errors import ConfigError, HeadsError, UnsupportedModelError
from lookahead.kernels import block_formats, block_product, microkernel, packed_product
from lookahead.kernels.block_formats import FORMATS
from lookahead.kernels.block_rows import round_floats, round_halves
from lookahead.kernels.block_tiles import tile_of_blocks
from lookahead.kernels.jobs import run
from lookahead.loading import gguf_files
from lookahead.loading.gguf_plan import RowOrders, plan_of, planned_once
from lookahead.loading.quantized import QUANTIZED_LAYERS, QuantizedEmbedding, QuantizedLinear, weight_count
from lookahead.plugins.heads.target import lm_head
from lookahead.utils.fingerprints import model_fingerprint
from tests.support.tiny_gguf import WORDS, blocks, write_gguf

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
        reason="reading GGUF files needs gguf and accelerate",
    ),
    pytest.mark.skipif(not block_product.is_supported(), reason="this CPU does not convert float16"),
]
MIXED = {
    "token_embd": "Q5_0", "output": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_1", "attn_v": "Q6_K",
    "attn_output": "Q5_K", "ffn_gate": "Q8_0", "ffn_up": "Q5_1", "ffn_down": "Q4_0",
}  # fmt: skip
MEDIUM = {  # as a file has them that is named Q4_K_M: not all layers have the same
    **dict.fromkeys(MIXED, "Q4_K"),
    **{"token_embd": "Q5_0", "output": "Q8_0", "attn_v": "Q6_K", "blk.1.attn_v": "Q4_K", "ffn_down": "Q6_K"},
}
PROMPT = "abcdabcdabcabcd"
KINDS = [kind for kind in FORMATS if kind != "int8"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; where parts of models go in it."""
    monkeypatch.setattr(gguf_files, "user_cache_path", lambda name, **_: tmp_path / "cache" / name)
    return tmp_path / "cache" / "lookahead" / "models"


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A model with a tensor of every type."""
    others = {"attn_q": "MXFP4", "attn_k": "Q3_K", "ffn_up": "IQ4_NL", "ffn_down": "IQ4_XS"}
    kinds = {**MIXED, **{f"blk.1.{name}": kind for name, kind in others.items()}}
    return write_gguf(tmp_path / "mixed.gguf", size=256, kinds=kinds, depth=2)


@pytest.fixture
def medium(tmp_path: Path) -> Path:
    """A model of two layers."""
    return write_gguf(tmp_path / "medium.gguf", size=256, kinds=MEDIUM, depth=2)


def load_blocks(file: Path, **options: Any) -> lookahead.LoadedModel:
    """The model of a file, with its weights as they are."""
    return lookahead.load(file, device="cpu", quantize="gguf", **options)


def dequantized(made: Any, kind: str) -> Tensor:
    """What `gguf` makes of blocks, float32 `[outputs, inputs]`."""
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(made, gguf.GGMLQuantizationType[kind]))


def rounded(x: Tensor) -> Tensor:
    """Rows of which every 32 numbers are whole multiples of their largest over 127, float64."""
    parts = x.float().unflatten(1, (-1, 32))
    largest = parts.abs().amax(2, keepdim=True)
    factor = torch.tensor(127.0) / largest  # a number over a tensor is a reciprocal, times the number
    return (torch.where(largest > 0, (parts * factor).round(), 0.0).double() * (largest / 127)).flatten(1)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_type_are_those_that_gguf_dequantizes(kind: str) -> None:
    made, order = blocks(kind, 70, 512), np.random.default_rng(0).permutation(70)
    packed = block_formats.lay_out(made, kind, order)
    assert torch.equal(block_formats.rows_of(packed, kind, torch.arange(70)), dequantized(made[order], kind))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_rounded_rows_and_the_weights_of_the_file(kind: str, dtype: torch.dtype) -> None:
    made, x, bias = blocks(kind, 70, 768), torch.randn(19, 768).to(dtype), torch.randn(70).to(dtype)
    x[3], x[4, :40] = 0, 0
    weight, own = dequantized(made, kind).double(), block_product.weight_of(block_formats.lay_out(made, kind), kind, 70)
    got, exact = packed_product.multiply(own, x, bias), rounded(x) @ weight.T + bias.double()
    most = rounded(x).abs() @ weight.abs().T + bias.double().abs()
    assert bool(((got.double() - exact).abs() <= 1e-6 * most + torch.finfo(dtype).eps * exact.abs()).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_product_in_any_company(kind: str) -> None:
    own = block_product.weight_of(block_formats.lay_out(blocks(kind, 40, 512), kind), kind, 40)
    x = torch.randn(20, 512)
    x[2, 5], x[9, 300] = torch.nan, torch.inf
    alone = torch.cat([packed_product.multiply(own, row, None) for row in x.split(1)])
    for rows in range(1, 21):
        got = packed_product.multiply(own, x[:rows], None)
        assert torch.equal(got.isnan(), alone[:rows].isnan())
        assert torch.equal(got.nan_to_num(), alone[:rows].nan_to_num())
    assert alone[[2, 9]].isnan().all() and alone[[0, 1, *range(3, 9)]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_of_a_type_are_added_exactly(kind: str) -> None:
    made = np.full((33, 512 // FORMATS[kind].inputs * FORMATS[kind].nbytes), 255, np.uint8)
    of_blocks = made.reshape(33, -1, FORMATS[kind].nbytes)
    place = FORMATS[kind].scale_at
    of_blocks[..., place : place + 2] = np.array([1], np.float16).view(np.uint8)
    if FORMATS[kind].has_minimum:
        of_blocks[..., 2:4] = np.array([-1], np.float16).view(np.uint8)
    own = block_product.weight_of(block_formats.lay_out(made, kind), kind, 33)
    for x in (torch.full((1, 512), 127.0), torch.full((1, 512), -127.0)):
        exact = x.double() @ dequantized(made, kind).double().T
        assert torch.allclose(packed_product.multiply(own, x, None).double(), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "parts"), [(32, 1), (32, 2), (64, 1)])
def test_rows_are_rounded_block_by_block_with_what_their_sums_begin_with(size: int, parts: int, dtype: Any) -> None:
    x, words = torch.randn(5, 2 * size + 7), size // 4 + 4
    x[1, :size], x[2, size:], x[3] = 1e-31, 0.0, x[3] * 1e30
    x = x.to(dtype)
    out, function = torch.empty(3, 5, words, dtype=torch.int32), round_floats if dtype.itemsize == 4 else round_halves
    run((function, 5, (x.data_ptr(), out.data_ptr(), x.shape[1], 3 * words, size, 9, parts), (x, out)))
    blocks = torch.nn.functional.pad(x.float(), (0, size - 7)).unflatten(1, (3, size)).transpose(0, 1)
    largest = blocks.abs().amax(2, keepdim=True)
    whole = torch.where(largest > 1e-30, (blocks * (torch.tensor(127.0) / largest)).round(), 0.0)
    assert torch.equal(out[..., :-4].contiguous().view(torch.int8).float(), whole)
    assert torch.equal(out[..., -4 : parts - 4], -9 * whole.unflatten(2, (parts, -1)).sum(3).int())
    scale = largest[..., 0] / torch.tensor(127.0)
    assert torch.equal(out.view(torch.float32)[..., -2:], torch.stack([scale, whole.sum(2) * scale], 2))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cpu_without_dot_products_of_bytes_computes_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group, rows, columns = FORMATS[kind].group, microkernel.ROWS, packed_product.COLUMNS
    words, lines, x = group.row_words, group.lines, torch.randn(rows, group.blocks * group.size)
    prepared = torch.empty(rows * group.blocks * words, dtype=torch.int32)
    numbers = *x.shape[1:], group.blocks * words, group.size, group.zero, group.parts
    run((round_floats, rows, (x.data_ptr(), prepared.data_ptr(), *numbers), x))
    weight = np.random.default_rng(0).integers(0, 256, (lines, 4 * columns), dtype=np.uint8)
    if group.bits == 8:  # no weight is -128
        weight[: group.main] |= 1
    weight[-1].view(np.float32 if group.steps == "single" else np.float16)[:] = 0.5
    products = []
    none = {"avx512vnni": False, "avxvnni": False}
    for features in ({}, {**microkernel.FEATURES, **none}, microkernel.FEATURES):
        monkeypatch.setattr(microkernel, "FEATURES", features)
        tile = tile_of_blocks(group)

        @numba.njit
        def product(left, right, out, tile=tile):
            tile((left, 0, rows * words), (right, 0, columns), (out, 0, columns), rows, lines)

        products.append(np.ones(rows * columns, np.float32))
        product(prepared.numpy(), weight.ravel().view(np.int32), products[-1])
    expected = packed_product.multiply(
        block_product.weight_of(torch.from_numpy(weight.view(np.int32))[None].clone(), kind, columns), x, None
    )
    torch.testing.assert_close(torch.from_numpy(products[0]).view(rows, columns), 1 + expected, rtol=1e-4, atol=1e-2)
    assert all(np.array_equal(product, products[0]) for product in products)


def test_a_file_keeps_its_blocks_and_writes_nearly_what_transformers_dequantizes(mixed: Path) -> None:
    model, tokenizer = load_blocks(mixed, dtype="fp32")
    assert type(model.get_input_embeddings()) is QuantizedEmbedding
    assert type(model.get_output_embeddings()) is QuantizedLinear
    assert sum(isinstance(each, QuantizedLinear) for each in model.modules()) == 15
    plain = AutoModelForCausalLM.from_pretrained(mixed.parent, gguf_file=mixed.name, dtype=torch.float32)
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    with torch.inference_mode():
        assert torch.equal(model.get_input_embeddings()(ids), plain.get_input_embeddings()(ids))
        own, expected = model(ids).logits, plain(ids).logits
    assert bool((own - expected).norm() < 0.02 * expected.norm())
    assert weight_count(model) == plain.num_parameters()
    assert model.generation_config.eos_token_id == plain.generation_config.eos_token_id


@pytest.mark.parametrize("others", [{}, {"ffn_up": "Q2_K"}], ids=["all kept", "some dequantized"])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}], ids=str)
def test_drafts_change_no_token_of_a_file(tmp_path: Path, options: dict[str, Any], others: dict[str, str]) -> None:
    file = write_gguf(tmp_path / "medium.gguf", size=256, kinds={**MEDIUM, **others}, depth=2)
    model, tokenizer = load_blocks(file)
    assert model.dtype == torch.bfloat16
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    torch.manual_seed(0)
    expected = model.generate(ids, max_new_tokens=32, **options)[0, ids.shape[1] :].tolist()
    for config in (LookaheadConfig(proposers=()), LookaheadConfig(memory="request")):
        torch.manual_seed(0)
        got = lookahead.generate(model, tokenizer, ids[0], config=config, max_new_tokens=32, **options)
        assert got.token_ids[0] == expected


def test_a_report_names_the_types_of_layers_that_are_one_call(medium: Path) -> None:
    report = str(lookahead.backend_report(load_blocks(medium).model))
    counted = "1 of Q5_0, 11 of Q4_K, 3 of Q6_K, 1 of Q8_0"
    assert f"quantized layers: yes, {counted}" in report and "passes as one call: yes" in report


def test_a_head_without_a_tensor_shares_the_blocks_of_the_embedding(tmp_path: Path) -> None:
    kinds = {**dict.fromkeys(MIXED, "Q4_1"), "token_embd": "Q8_0"}

    def edit(writer: Any) -> None:
        writer.tensors[0].pop("output.weight")

    model, _ = load_blocks(write_gguf(tmp_path / "tied.gguf", size=64, kinds=kinds, edit=edit))
    head: Any = model.get_output_embeddings()
    assert head.weight is model.get_input_embeddings().weight and head.kind == "Q8_0"
    x = torch.randn(2, 64)
    rows = model.get_input_embeddings().to(torch.float32)(torch.arange(len(WORDS)))
    assert torch.allclose(head(x).double(), rounded(x) @ rows.double().T, atol=1e-5)


def test_types_that_are_not_multiplied_are_dequantized_and_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "some.gguf", size=256, kinds={**MEDIUM, "ffn_up": "Q2_K"})
    model, _ = load_blocks(file)
    up = model.model.layers[0].mlp.up_proj
    assert type(up) is torch.nn.Linear
    assert torch.equal(up.weight, dequantized(blocks("Q2_K", 256, 256), "Q2_K").bfloat16())
    assert "dequantized: Q2_K" in str(lookahead.backend_report(model))


def test_a_file_of_other_types_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "other.gguf", size=256, kinds=dict.fromkeys(MIXED, "Q2_K"))
    told = r"other\.gguf: most of its weights .*, first of all those of lm_head \(Linear\): .* of Q2_K are not"
    with pytest.raises(ConfigError, match=told):
        load_blocks(file)


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"quantize": "int8"}], ids=str)
def test_a_file_is_dequantized_unless_it_is_asked_to_stay_as_it_is(mixed: Path, options: dict[str, str]) -> None:
    model = lookahead.load(mixed, device="cpu", **options).model
    kinds = {layer.kind for layer in model.modules() if isinstance(layer, QUANTIZED_LAYERS)}
    assert kinds == ({options["quantize"]} if "quantize" in options else set())


@pytest.mark.parametrize("architecture", [*TENSOR_PROCESSORS, "qwen2"])
def test_rows_are_reordered_as_transformers_does_or_a_tensor_is_dequantized(architecture: str) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "hidden_size": 64}
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=sizes)
    orders, kept, options = (
        RowOrders(processor),
        set[str](),
        {"tensor_key_mapping": {}, "parsed_parameters": {"tensors": {}}},
    )
    for name in (
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_qkv",
        "attn_output",
        "ffn_up",
        "ffn_down",
        "ffn_gate_inp_shexp",
        "ssm_a",
    ):
        values = np.random.default_rng(0).normal(size=(192 if name == "attn_qkv" else 64, 64)).astype(np.float32)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                order = orders.of(f"blk.7.{name}.weight", values.shape)
        except ValueError:
            continue
        moved = processor.process(values, name=f"blk.7.{name}.weight", **options)
        assert np.array_equal(moved.weights, values[order])
        kept.add(name)
    assert ("ffn_down" in kept) == (architecture != "gpt2")


@pytest.mark.parametrize("architecture", ["gpt2", "lfm2", "qwen35", "unheard-of"])
def test_an_architecture_whose_tensors_become_others_is_refused_by_name(architecture: str) -> None:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2)
    named = SimpleNamespace(contents=lambda: architecture)
    reader: Any = SimpleNamespace(fields={"general.architecture": named}, tensors=[])
    plan = plan_of(reader, AutoModelForCausalLM.from_config(config))
    other = "no tensor of a gpt2 file has the name of model.layers.0.self_attn.q_proj.weight in LlamaForCausalLM"
    assert plan.reason == (other if architecture == "gpt2" else f"transformers reads {architecture} in another way")


def test_quantize_gguf_is_for_gguf_files(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "plain.gguf")
    with pytest.raises(ConfigError, match=r"quantize='gguf' is not for plain.gguf: .* weights of F32 are not"):
        load_blocks(file)
    folder = gguf_files.convert_once(file)
    with pytest.raises(ConfigError, match="quantize='gguf' is for a GGUF file, got"):
        load_blocks(folder)


def test_what_needs_plain_weights_is_refused_by_name(medium: Path, tmp_path: Path) -> None:
    model, _ = load_blocks(medium)
    with pytest.raises(HeadsError, match="is quantized; heads take one of fp32 or bf16: load it with such a dtype"):
        lm_head(model)
    with pytest.raises(ValueError, match="lookahead_gguf"):
        model.save_pretrained(tmp_path / "saved")
    layer: Any = model.model.layers[0].mlp.up_proj
    with pytest.raises(UnsupportedModelError, match="weights of 4 bits have no gradient"):
        layer(torch.ones(1, 256, requires_grad=True))
    with pytest.raises(IndexError, match=f"ids must be from 0 to {len(WORDS) - 1}, got 0 to {len(WORDS)}"):
        model(torch.tensor([[0, len(WORDS)]]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "MXFP4"])  # every exponent is one
def test_a_step_that_is_no_number_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    made = blocks(kind, 2, 256)
    place = FORMATS[kind].scale_at
    made[1, place : place + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match=f"a step of a {kind} block is not a number, or too large"):
        block_formats.lay_out(made, kind)
    if kind == "Q4_0":

        def edit(writer: Any) -> None:
            writer.tensors[0]["blk.0.attn_q.weight"].tensor[0, :2] = 255

        file = write_gguf(tmp_path / "hostile.gguf", size=64, kinds=dict.fromkeys(MIXED, kind), edit=edit)
        with pytest.raises(
            UnsupportedModelError, match=r"blk\.0\.attn_q\.weight: a step of a Q4_0 block is not a number"
        ):
            load_blocks(file)


def test_a_torn_plan_is_made_again(mixed: Path) -> None:
    folder, plan = planned_once(mixed)
    for torn in ("", "{}", json.dumps({"architecture": "llama", "reason": "", "tensors": [[1]], "layers": {}})):
        (folder / "tensors.json").write_text(torn)
        assert planned_once(mixed) == (folder, plan)


def test_a_file_is_planned_once_and_nothing_large_is_kept(mixed: Path, cache: Path) -> None:
    load_blocks(mixed)
    kept = [each for each in cache.rglob("*") if each.is_file()]
    assert sum(each.is_dir() for each in cache.iterdir()) == 1 and sum(each.stat().st_size for each in kept) < 100_000
    before = {each: each.stat().st_mtime_ns for each in kept}
    load_blocks(mixed)
    assert {each: each.stat().st_mtime_ns for each in kept} == before


def test_costs_are_of_the_types_and_heads_of_the_numbers_of_a_file(tmp_path: Path) -> None:
    kinds = dict.fromkeys(MIXED, "Q5_1")
    files = [
        write_gguf(tmp_path / f"{kind}.gguf", size=256, kinds={**kinds, "attn_q": kind}) for kind in ("Q5_0", "Q5_K")
    ]
    models = [load_blocks(file, dtype=dtype).model for file in files for dtype in ("fp32", "bf16")]
    assert len({json.dumps(identity(model)) for model in models}) == 4
    plain = lookahead.load(files[0], device="cpu", dtype="bf16").model
    assert model_fingerprint(models[1]) == model_fingerprint(plain)


def test_the_command_line_says_what_it_reads(medium: Path) -> None:
    arguments = ["generate", PROMPT, "--model", str(medium), "--device", "cpu", "--max-new-tokens", "4", "--raw"]
    arguments += ["--quantize", "gguf"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "reading what medium.gguf holds, once" in result.stderr
    assert re.search(r"take 0\.00 GB in fp32, 0\.00 GB in bf16, and 0\.00 GB with --quantize gguf", result.stderr)
    assert "once" not in CliRunner().invoke(app, arguments).stderr


def test_the_server_takes_a_file_as_it_is(medium: Path) -> None:
    pytest.importorskip("fastapi")
    from lookahead.serving.requests import GenerationRequest, Update
    from lookahead.serving.served_models import ServedModel

    loaded = lookahead.load(medium, device="cpu", quantize="gguf")
    served = ServedModel("medium", loaded, config=None, max_new_tokens=64, decoding={"rows": 2})
    assert isinstance(served.model.get_output_embeddings(), QuantizedLinear)
    ids = torch.tensor([served.tokenizer(PROMPT).input_ids])
    expected = load_blocks(medium).model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    updates, ended = list[Update](), Event()
    request = GenerationRequest(ids=ids[0].tolist(), options={"max_new_tokens": 8, "do_sample": False})
    served.loop.submit(request, lambda update: (updates.append(update), update.is_last and ended.set()))
    assert ended.wait(60) and [token for update in updates for token in update.tokens] == expected
    served.loop.close()
