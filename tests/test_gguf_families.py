"""GGUF files of families whose layers are not those of a Llama, with weights in the blocks of the file."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import ConfigError
from lookahead.kernels import block_product
from lookahead.loading import gguf_files
from lookahead.loading.gguf_plan import Plan, plan_of
from lookahead.loading.quantized import QuantizedEmbedding, QuantizedLinear, replacement_of, scale_of
from tests.support.tiny_gguf import write_gguf

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
        reason="reading GGUF files needs gguf and accelerate",
    ),
    pytest.mark.skipif(not block_product.is_supported(), reason="this CPU does not convert float16"),
]
LAYERS = "token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
SIZE = 96  # its square root, by which Gemma scales its embedding, is rounded differently in every type
PROMPT = "abcdabcdabcabcd"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder."""
    monkeypatch.setattr(gguf_files, "user_cache_path", lambda name, **_: tmp_path / "cache" / name)


def gemma(folder: Path, architecture: str, kind: str = "Q8_0") -> Path:
    """A tiny Gemma of two layers."""
    return write_gguf(
        folder / f"{architecture}.gguf", architecture, size=SIZE, kinds=dict.fromkeys(LAYERS, kind), depth=2
    )


def scaled_classes() -> list[Any]:
    """The scaled embeddings of some families."""
    families = ("gemma2", "gemma3", "bart", "minicpm3")
    files = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in families]
    return [kind for file in files for name, kind in vars(file).items() if name.endswith("ScaledWordEmbedding")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_gemma_keeps_its_blocks_and_its_embedding_is_that_of_transformers(
    tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    file = gemma(tmp_path, architecture)
    model, tokenizer = lookahead.load(file, device="cpu", quantize="gguf", dtype=dtype)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, QuantizedEmbedding) and isinstance(head, QuantizedLinear)
    assert head.weight is embedding.weight
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=dtype)
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    with torch.inference_mode():
        assert torch.equal(embedding(ids), plain.get_input_embeddings()(ids))
        own, expected = model(ids).logits, plain(ids).logits
        assert bool((own - expected).norm() < 0.02 * expected.norm())
        assert torch.equal(embedding.bfloat16()(ids), plain.get_input_embeddings().bfloat16()(ids))


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_drafts_change_no_token_of_a_gemma_file(tmp_path: Path, architecture: str) -> None:
    model, tokenizer = lookahead.load(gemma(tmp_path, architecture), device="cpu", quantize="gguf")
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    expected = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :].tolist()
    config = LookaheadConfig(draft="fixed", min_probability=0.0)
    got = lookahead.generate(model, tokenizer, ids[0], config=config, max_new_tokens=32, do_sample=False)
    assert got.token_ids[0] == expected and got.stats.drafted_tokens > 0


@pytest.mark.parametrize("kind", scaled_classes(), ids=lambda kind: kind.__name__)
def test_a_scale_is_read_from_any_class_that_only_multiplies(kind: Any) -> None:
    with torch.device("meta"):
        layer = kind(5, 4, 0, embed_scale=16.0)
    before = torch.get_rng_state()
    assert scale_of(layer) == 16.0 and replacement_of(layer) is QuantizedEmbedding
    assert torch.equal(torch.get_rng_state(), before)


def test_a_class_that_does_more_than_multiply_is_no_scaled_embedding() -> None:
    class Shifted(nn.Embedding):
        def __init__(self, *sizes: int, embed_scale: float) -> None:
            super().__init__(*sizes)
            self.embed_scale = embed_scale

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * self.embed_scale + 1e-3

    class Unscaled(nn.Embedding):
        pass

    for layer in (Shifted(5, 4, 0, embed_scale=2.0), Unscaled(5, 4)):
        assert replacement_of(layer) is None
        with pytest.raises(ValueError, match=f"{type(layer).__name__} is not a scaled embedding"):
            scale_of(layer)


def test_a_refusal_names_the_layer_its_class_and_the_type_that_is_not_multiplied(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        lookahead.load(write_gguf(tmp_path / "gemma3.gguf", "gemma3"), device="cpu", quantize="gguf")
    assert str(caught.value).endswith(
        "is not for gemma3.gguf: most of its weights would be dequantized, first of all those of "
        "model.layers.0.self_attn.q_proj (Linear): weights of F32 are not multiplied as they are stored"
    )


def placed(architecture: int, model: Any, shape_of: Callable[[str, Any], Any]) -> Plan:
    """The plan of a file with every tensor of a model, of the type Q8_0."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    names, kind = get_tensor_name_map(architecture, 2), SimpleNamespace(name="Q8_0")
    tensors = []
    for place, weight in model.named_parameters():
        stem, suffix = place, ""
        if place.endswith((".weight", ".bias")):
            stem, _, suffix = place.rpartition(".")
        name = f"{names.get_name(stem)}.{suffix}".rstrip(".")
        shape = shape_of(place, weight.shape)[::-1]
        tensors.append(SimpleNamespace(name=name, shape=shape, tensor_type=kind, data_offset=0, n_bytes=0))
    named = SimpleNamespace(contents=lambda: MODEL_ARCH_NAMES[architecture])
    return plan_of(SimpleNamespace(fields={"general.architecture": named}, tensors=tensors), model)


def test_a_refusal_names_a_class_of_layers_that_keeps_no_blocks() -> None:
    from gguf import MODEL_ARCH

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32))
    turned = "c_attn.weight", "c_fc.weight", "c_proj.weight"
    plan = placed(MODEL_ARCH.GPT2, model, lambda place, shape: shape[::-1] if place.endswith(turned) else shape)
    assert plan.reason == (
        "most of its weights would be dequantized, first of all those of transformer.h.0.attn.c_attn (Conv1D): "
        "a layer of this class does not keep blocks"
    )


def test_a_head_to_whose_dtype_its_model_casts_keeps_no_blocks_and_so_its_embedding() -> None:
    from gguf import MODEL_ARCH

    model = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=64, num_hidden_layers=2, state_size=32))
    plan = placed(MODEL_ARCH.MAMBA, model, lambda place, shape: shape[::2] if "conv1d.weight" in place else shape)
    assert {"backbone.layers.0.mixer.in_proj", "backbone.layers.1.mixer.out_proj"} <= plan.layers.keys()
    assert not {"lm_head", "backbone.embeddings"} & plan.layers.keys()
