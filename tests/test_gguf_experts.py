"""Mixtures of experts in GGUF files: the weights of transformers, and experts that keep the blocks of the file."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.cpu.layer_jobs import LayerJobs
from lookahead.backend.cpu.routing import Routing, weights_of
from lookahead.errors import ConfigError, UnsupportedModelError
from lookahead.kernels import block_formats, block_product
from lookahead.loading import gguf_files
from lookahead.loading.gguf_plan import planned_once
from lookahead.loading.quantized import QuantizedLinear, weight_count
from lookahead.loading.quantized_experts import PARTS, QuantizedExperts, are_gated
from lookahead.model.families.operations import Experts
from tests.support.tiny_gguf import blocks, write_gguf

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
        reason="reading GGUF files needs gguf and accelerate",
    ),
    pytest.mark.skipif(not block_product.is_supported(), reason="this CPU does not convert float16"),
]
EXPERTS, USED, INNER, SIZE = 4, 2, 768, 256  # inner sizes of experts are not in the files that transformers reads
KINDS = dict.fromkeys(("token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output"), "Q5_K")
MIXED = "Q4_K", "Q4_K", "Q6_K"  # of gates, of what they scale, and last
PROMPT = "abcdabcdabcabcd"


def mixture_of(kinds: tuple[str, ...]) -> QuantizedExperts:
    """Random experts of these types."""
    config = Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=SIZE, moe_intermediate_size=INNER)
    experts = QuantizedExperts(Qwen3MoeExperts(config), kinds)
    sizes = (INNER, SIZE), (INNER, SIZE), (SIZE, INNER)
    for seed, (part, kind, (outputs, inputs)) in enumerate(zip(PARTS, kinds, sizes, strict=True)):
        raw = [blocks(kind, outputs, inputs, EXPERTS * seed + i) for i in range(EXPERTS)]
        laid_out = torch.stack([block_formats.lay_out(one, kind) for one in raw])
        experts.register_parameter(f"{part}_blocks", nn.Parameter(laid_out, requires_grad=False))
    return experts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder."""
    monkeypatch.setattr(gguf_files, "user_cache_path", lambda name, **_: tmp_path / "cache" / name)


def write_mixture(
    path: Path, kinds: tuple[str, ...] = MIXED, edit: Callable[[Any], object] = lambda writer: None
) -> Path:
    """A tiny Qwen3 of two layers with experts of these types."""
    import gguf

    def with_experts(writer: Any) -> None:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(USED)
        for layer in range(2):
            for part, kind in zip(PARTS, kinds, strict=True):
                del writer.tensors[0][f"blk.{layer}.ffn_{part}.weight"]
                rows, inputs = (SIZE, INNER) if part == "down" else (INNER, SIZE)
                raw = blocks(kind, EXPERTS * rows, inputs, seed=layer).reshape(EXPERTS, rows, -1)
                name = f"blk.{layer}.ffn_{part}_exps.weight"
                writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
            router = np.random.default_rng(layer).normal(size=(EXPERTS, SIZE)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
        edit(writer)

    return write_gguf(path, "qwen3moe", edit=with_experts, size=SIZE, kinds=KINDS, depth=2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_mixture_has_the_weights_that_transformers_reads(tmp_path: Path, dtype: str) -> None:
    file = write_mixture(tmp_path / "mixture.gguf", ("Q4_K", "Q2_K", "Q6_K"))
    model = lookahead.load(file, device="cpu", dtype=dtype).model
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.bfloat16).state_dict()
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name].to(model.dtype)) for name, weight in state.items())


def test_experts_keep_their_blocks_and_write_nearly_what_transformers_dequantizes(tmp_path: Path) -> None:
    file = write_mixture(tmp_path / "mixture.gguf")
    model, tokenizer = lookahead.load(file, device="cpu", quantize="gguf", dtype="fp32")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    experts: Any = model.model.layers[1].mlp.experts
    assert isinstance(experts, QuantizedExperts) and experts.kind == "Q4_K/Q4_K/Q6_K"
    assert weight_count(model) == plain.num_parameters()
    assert sum(weight.nbytes for weight in model.parameters()) == planned_once(file)[1].sizes()[1] + 2 * sum(
        weight.numel() for weight in model.parameters() if weight.is_floating_point()
    )
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    with torch.inference_mode():
        x = torch.randn(5, SIZE)
        places, scales = torch.tensor([[0, 1], [1, 3], [3, 2], [2, 0], [1, 0]]), torch.rand(5, USED)
        own, expected = (each.model.layers[1].mlp.experts(x, places, scales) for each in (model, plain))
        assert bool((own - expected).norm() < 0.02 * expected.norm())
        alone = torch.cat([experts(x[[i]], places[[i]], scales[[i]]) for i in range(5)])
        assert torch.equal(own, alone), "a token has the same output in any company"
        own, expected = model(ids).logits, plain(ids).logits
    assert bool((own - expected).norm() < 0.05 * expected.norm())


def test_a_mixture_as_it_is_stored_writes_the_tokens_of_its_own_generate(tmp_path: Path) -> None:
    model, tokenizer = lookahead.load(write_mixture(tmp_path / "mixture.gguf"), device="cpu", quantize="gguf")
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    for config in (LookaheadConfig(proposers=()), LookaheadConfig()):
        got = lookahead.generate(model, tokenizer, ids[0], config=config, max_new_tokens=24, do_sample=False)
        assert got.token_ids[0] == expected
        assert got.stats.exactness == "bitwise"
    report = str(lookahead.backend_report(model))
    assert "2 of Q4_K/Q4_K/Q6_K" in report and "passes as one call: yes" in report


def passed(experts: QuantizedExperts, x: Tensor, scales: Tensor, places: Tensor) -> Tensor:
    """What a pass computes of `[tokens, SIZE]` with these experts."""
    router: Any = nn.Linear(SIZE, EXPERTS, bias=False).to(x.dtype)
    part = Experts(experts, router, experts, USED, lambda logits: (scales, places), experts.act_fn)
    jobs = LayerJobs(
        lambda name, size: x.new_empty(1, len(x), size),
        *({}, None, {}, Any, lambda part: Routing(part, len(x), x.dtype)),
    )
    jobs.mixture = weights_of(part, {})
    out: Tensor = jobs.mixed(part, x[None])
    jobs.run()
    return out[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kinds", [("Q4_K", "Q5_K", "Q6_K"), ("Q8_0", "Q8_0", "Q8_0")], ids="/".join)
def test_experts_in_a_pass_have_the_bits_of_each_row_alone(kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    experts, every = mixture_of(kinds), torch.arange(EXPERTS)
    for seed in range(8):
        torch.manual_seed(seed)
        places = torch.stack([every.roll(int(turn))[:USED] for turn in torch.randint(2, (11,))])  # 2 has no row
        inputs = torch.randn(11, SIZE).to(dtype), torch.rand(11, USED).to(dtype), places
        rows = list(zip(*(some.split(1) for some in inputs), strict=True))
        together = passed(experts, *inputs)
        assert torch.equal(together, torch.cat([passed(experts, *row) for row in rows]))
        own = torch.cat([experts(x, chosen, scales) for x, scales, chosen in rows])
        # In float32 a gate may differ in its last bit, and so may what is rounded to whole numbers after it.
        if dtype == torch.bfloat16:
            assert torch.equal(together, own)
        torch.testing.assert_close(together, own, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_that_read_many_rows_have_the_bits_of_each_alone(dtype: torch.dtype) -> None:
    experts = mixture_of(MIXED)
    torch.manual_seed(0)
    x, scales = torch.randn(1030, SIZE).to(dtype), torch.rand(1030, USED)
    places = torch.rand(1030, EXPERTS + 1).argsort(1)[:, :USED]  # the last expert is of another process
    together = experts(x, places, scales)
    for row in (*range(8), 1023, 1024, 1029):
        some = slice(row, row + 1)
        assert torch.equal(together[some], experts(x[some], places[some], scales[some]))
        one = [scales[row, k] * experts(x[some], places[some, k : k + 1], torch.ones(1, 1)) for k in range(USED)]
        assert (together[some] - sum(one)).norm() < 0.02 * together[some].norm()
    elsewhere = places == EXPERTS
    assert elsewhere.any() and not experts(x, places, elsewhere.float()).any()


def test_experts_of_which_a_part_is_of_another_type_are_dequantized_whole(tmp_path: Path) -> None:
    file = write_mixture(tmp_path / "mixture.gguf", ("Q4_K", "Q2_K", "Q6_K"))
    with pytest.raises(ConfigError) as caught:
        lookahead.load(file, device="cpu", quantize="gguf")
    told = (
        "first of all those of model.layers.0.mlp.experts (Qwen3MoeExperts): weights of Q2_K are not multiplied as they"
    )
    assert told in str(caught.value)


def test_experts_without_a_part_are_refused_by_name(tmp_path: Path) -> None:
    file = write_mixture(
        tmp_path / "mixture.gguf", edit=lambda writer: writer.tensors[0].pop("blk.1.ffn_up_exps.weight")
    )
    with pytest.raises(UnsupportedModelError, match=r"lacks 1 tensor: model\.layers\.1\.mlp\.experts\.gate_up_proj$"):
        lookahead.load(file, device="cpu")


@pytest.mark.parametrize(
    ("kind", "config", "is_kept"),
    [
        (Qwen3MoeExperts, Qwen3MoeConfig(num_experts=4, hidden_size=32, moe_intermediate_size=32), True),
        (Qwen2MoeExperts, Qwen2MoeConfig(num_experts=4, hidden_size=32, moe_intermediate_size=32), True),
        (MixtralExperts, MixtralConfig(num_local_experts=4, hidden_size=32, intermediate_size=32), True),
        (GptOssExperts, GptOssConfig(num_local_experts=4, hidden_size=32, intermediate_size=32), False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_experts_keep_blocks_if_small_ones_of_their_class_multiply_as_ours(
    kind: Any, config: Any, is_kept: bool
) -> None:
    config._experts_implementation = "eager"
    with torch.device("meta"):
        experts = kind(config)
    assert are_gated(experts) == is_kept
    assert experts.num_experts == 4 and all(weight.is_meta for weight in experts.parameters())
    if is_kept:
        changed = copy.copy(experts)
        changed.act_fn, changed.forward = nn.Identity(), lambda x, *_: x
        assert not are_gated(changed)
    assert not are_gated(nn.Linear(3, 3)) and not isinstance(experts, QuantizedLinear)
