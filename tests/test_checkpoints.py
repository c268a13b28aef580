"""Checkpoints that do not fit their model are refused by the names of the tensors, and what is legal is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.errors import UnsupportedModelError

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


def llama(kind: Any = LlamaForCausalLM, **changes: Any) -> PreTrainedModel:
    made: PreTrainedModel = kind(LlamaConfig(**{**SIZES, **changes}))
    return made


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=32, n_layer=1, n_head=2))


def gptj() -> PreTrainedModel:
    return GPTJForCausalLM(GPTJConfig(vocab_size=101, n_embd=32, n_layer=1, n_head=2, rotary_dim=8))


def neo() -> PreTrainedModel:
    kinds = [[["global", "local"], 1]]
    return GPTNeoForCausalLM(
        GPTNeoConfig(vocab_size=101, hidden_size=32, num_layers=2, num_heads=2, attention_types=kinds)
    )


def deepseek() -> PreTrainedModel:
    """Two layers, behind which its checkpoints have one for multi-token prediction."""
    sizes = {**SIZES, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **ranks, **experts))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=101, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2))


def bart() -> PreTrainedModel:
    sides = ("encoder", "decoder")
    sizes = {f"{side}_{name}": size for side in sides for name, size in (("layers", 1), ("ffn_dim", 32))}
    heads = {f"{side}_attention_heads": 2 for side in sides}
    return BartForConditionalGeneration(BartConfig(vocab_size=101, d_model=32, **sizes, **heads))


def saved(
    folder: Path,
    tokenizer: Any,
    model: PreTrainedModel,
    edit: Callable[[Tensors], object] = lambda tensors: None,
    **options: Any,
) -> Path:
    """A folder with a model, and the tensors of each of its files edited."""
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, {"format": "pt"})
    return folder


def without(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name, None) for name in names]


def with_more(**shapes: tuple[int, ...]) -> Callable[[Tensors], object]:
    added = {name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()}
    return lambda tensors: tensors.update(added)


def renamed(tensors: Tensors) -> None:
    if UP in tensors:
        tensors[UP.replace("up", "upper")] = tensors.pop(UP)


def reshaped(tensors: Tensors) -> None:
    if NORM in tensors:
        tensors[NORM] = torch.ones(7)


DAMAGES: dict[str, tuple[Callable[[Tensors], object], list[str]]] = {
    "missing": (without(UP), [f"lacks 1 tensor: {UP}"]),
    "two missing": (without(UP, NORM), [f"lacks 2 tensors: {UP}, {NORM}"]),
    "renamed": (renamed, [f"lacks 1 tensor: {UP}", "1 tensor: model.layers.1.mlp.upper_proj.weight"]),
    "another shape": (reshaped, [f"other shapes .*{NORM} is \\(7,\\) instead of \\(32,\\)"]),
    "unexpected": (with_more(v_head__weight=(3,)), ["beyond the model, 1 tensor: v_head.weight"]),
    "a bias": (with_more(model__layers__0__mlp__up_proj__bias=(48,)), ["1 tensor: model.layers.0.mlp.up_proj.bias"]),
}


@pytest.mark.parametrize("shards", [None, "10KB"], ids=["one file", "several files"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_names_of_its_tensors(
    tmp_path: Path, tiny_tokenizer: Any, damage: str, shards: str | None
) -> None:
    edit, told = DAMAGES[damage]
    options = {} if shards is None else {"max_shard_size": shards}
    folder = saved(tmp_path, tiny_tokenizer, llama(), edit, **options)
    assert (len([*folder.glob("*.safetensors")]) > 1) == (shards is not None)
    for each in told:
        with pytest.raises(UnsupportedModelError, match=f"does not fit LlamaForCausalLM: .*{each}"):
            lookahead.load(folder, device="cpu")
    with pytest.raises(UnsupportedModelError, match=told[0]):
        lookahead.load(folder, device="cpu", quantize="int8")


def test_the_command_line_tells_a_missing_tensor_in_one_line(tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = saved(tmp_path, tiny_tokenizer, llama(), without(UP))
    result = CliRunner().invoke(app, ["generate", "abc", "--model", str(folder), "--device", "cpu"])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and UP in result.stderr and "Traceback" not in result.stderr


def test_of_many_tensors_some_are_named_and_all_are_counted(tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = saved(tmp_path, tiny_tokenizer, llama(), lambda tensors: [tensors.pop(name) for name in [*tensors][1:]])
    with pytest.raises(UnsupportedModelError, match=r"lacks 20 tensors: model.embed_tokens.weight, .* and 12 more$"):
        lookahead.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: llama(LlamaForSequenceClassification), "lacks 1 tensor: lm_head.weight; .*: score.weight"),
        (lambda: llama(LlamaForSequenceClassification, tie_word_embeddings=True), "1 tensor: score.weight"),
        (lambda: llama(LlamaModel), "lacks 1 tensor: lm_head.weight"),
    ],
    ids=["classifier", "tied classifier", "no head"],
)
def test_a_model_for_another_task_is_refused(tmp_path: Path, tiny_tokenizer: Any, model: Any, told: str) -> None:
    folder = saved(tmp_path, tiny_tokenizer, model())
    with pytest.raises(UnsupportedModelError, match=told):
        lookahead.load(folder, device="cpu")


def test_a_missing_expert_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    lost = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    lookahead.load(saved(tmp_path / "whole", tiny_tokenizer, mixtral()), device="cpu")
    with pytest.raises(UnsupportedModelError, match="as those of experts, are missing"):
        lookahead.load(saved(tmp_path / "damaged", tiny_tokenizer, mixtral(), without(lost)), device="cpu")


def test_fewer_layers_in_the_configuration_than_in_the_checkpoint_are_refused(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    folder = saved(tmp_path, tiny_tokenizer, llama())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(UnsupportedModelError, match=r"beyond the model, 9 tensors: model.layers.1"):
        lookahead.load(folder, device="cpu")


def test_as_many_layers_for_multi_token_prediction_are_left_out_as_configured(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    folder = saved(tmp_path, tiny_tokenizer, deepseek(), with_more(model__layers__3__eh_proj__weight=(32, 64)))
    with pytest.raises(UnsupportedModelError, match=r"beyond the model, 1 tensor: model.layers.3.eh_proj.weight"):
        lookahead.load(folder, device="cpu")


H = "transformer__h__0__attn__"
LEGAL: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[Tensors], object]]] = {
    "tied": (lambda: llama(tie_word_embeddings=True), without("lm_head.weight")),
    "tied, saved without its head": (lambda: llama(LlamaModel, tie_word_embeddings=True), without()),
    "rotary frequencies": (llama, with_more(model__layers__0__self_attn__rotary_emb__inv_freq=(8,))),
    "masks of GPT-2": (gpt2, with_more(**{f"{H}bias": (1, 1, 4, 4), f"{H}masked_bias": ()})),
    "masks of GPT-J": (gptj, with_more(**{f"{H}bias": (1, 1, 4, 4), f"{H}masked_bias": ()})),
    "masks of GPT-Neo": (
        neo,
        with_more(**{f"{H}attention__bias": (1, 1, 4, 4), f"{H}attention__masked_bias": ()}),
    ),
    "multi-token prediction": (deepseek, with_more(model__layers__2__eh_proj__weight=(32, 64))),
    "T5": (t5, without("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")),
    "BART": (bart, without("final_logits_bias")),
}


@pytest.mark.parametrize("kind", LEGAL)
def test_what_transformers_derives_or_leaves_out_by_design_is_not_missed(
    tmp_path: Path, tiny_tokenizer: Any, kind: str
) -> None:
    make, edit = LEGAL[kind]
    model = make().eval()
    for quantize in (None, "int8"):
        loaded = lookahead.load(saved(tmp_path, tiny_tokenizer, model, edit), device="cpu", quantize=quantize).model
        if quantize is None:
            own, kept = loaded.state_dict(), model.state_dict()
            assert all(torch.equal(own[name], kept[name]) for name in own.keys() & kept.keys())


def test_the_scales_of_a_quantized_checkpoint_are_not_unexpected(tmp_path: Path, tiny_tokenizer: Any) -> None:
    def in_eight_bits(tensors: Tensors) -> None:
        for name in [name for name in tensors if "proj" in name]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)

    folder = saved(tmp_path, tiny_tokenizer, llama(), in_eight_bits)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "dequantize": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    model, tokenizer = lookahead.load(folder, device="cpu")
    assert lookahead.generate(model, tokenizer, "abab", max_new_tokens=4).token_ids
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"lacks 1 tensor: {UP}"):
        lookahead.load(folder, device="cpu")


def test_a_model_with_an_adapter_in_its_folder_is_loaded(tmp_path: Path, tiny_tokenizer: Any) -> None:
    import peft

    folder = saved(tmp_path, tiny_tokenizer, llama())
    base = AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear")).save_pretrained(folder)
    assert any("lora" in name for name, _ in lookahead.load(folder, device="cpu").model.named_parameters())
