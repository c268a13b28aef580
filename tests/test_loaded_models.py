"""Models as transformers loads them, quantised, offloaded, tied, of mixed types: the tokens are those of `generate`."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTJConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TorchAoConfig,
)

import lookahead
from lookahead import LookaheadConfig
from tests.support.engines import engine_of

DRAFTING = LookaheadConfig(draft="fixed")  # asked for, so that decoding plainly instead would be refused
ONE = {"input_ids": torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])}
RAGGED = {
    "input_ids": torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]]),
    "attention_mask": torch.tensor([[0] * 8 + [1] * 4, [1] * 12]),
}
SEVERAL_ENDS = {**RAGGED, "eos_token_id": [10, 35, 67, 90]}
HALF_ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "lm_head": "cpu",
}
DEVICE_MAPS: dict[str, Any] = {
    "half on disk": HALF_ON_DISK,
    "its embedding on disk": {**HALF_ON_DISK, "model.embed_tokens": "disk"},
    "all on disk": {"model": "disk", "lm_head": "disk"},
}


@pytest.fixture(scope="module")
def folder(looping_llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk."""
    path = tmp_path_factory.mktemp("model")
    looping_llama.save_pretrained(path)
    return path


def load(folder: Path, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    if model.device.type == "meta" and not hasattr(model, "_hf_hook"):
        pytest.skip(f"transformers {transformers.__version__} never reads the weights of a model that is all on disk")
    return model


def compare(model: PreTrainedModel) -> None:
    """One prompt greedily, and several whose rows end at different steps sampled."""
    for options in ({**ONE, "do_sample": False}, {**SEVERAL_ENDS, "do_sample": True, "top_k": 20}):
        arguments: dict[str, Any] = {**options, "max_new_tokens": 24}
        torch.manual_seed(1)
        expected = model.generate(**arguments)
        torch.manual_seed(1)
        got = model.generate(**arguments, custom_generate=lookahead.decode, lookahead_config=DRAFTING)
        assert torch.equal(got, expected)
    torch.manual_seed(1)
    again = model.generate(**arguments)
    assert torch.equal(again, expected), "the model is not as it was"


def accepted_tokens(model: PreTrainedModel) -> int:
    """How many drafted tokens were accepted of one greedy output."""
    arguments: dict[str, Any] = {**ONE, "max_new_tokens": 40, "do_sample": False}
    engine = engine_of(model, **arguments, lookahead_config=DRAFTING)
    for _ in engine.run():
        pass
    return int(engine.stats[0].accepted_tokens)


@pytest.mark.parametrize("when", ["quantised on loading", "saved quantised"])
def test_int8_weights_of_torchao_give_the_tokens_of_generate(folder: Path, tmp_path: Path, when: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    model = load(folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig(version=2)))
    if when == "saved quantised":
        model.save_pretrained(tmp_path)
        model = load(tmp_path)
    weight = model.get_submodule("model.layers.0.mlp.up_proj").weight
    assert type(weight) is not torch.nn.Parameter, "it is not quantised"
    compare(model)
    assert accepted_tokens(model) > 0


@pytest.mark.parametrize("device_map", DEVICE_MAPS.values(), ids=DEVICE_MAPS.keys())
def test_weights_offloaded_to_disk_give_the_tokens_of_generate(
    folder: Path, tmp_path: Path, device_map: dict[str, str]
) -> None:
    model = load(folder, device_map=device_map, offload_folder=tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters()), "nothing is offloaded"
    compare(model)
    assert accepted_tokens(model) > 0


def test_weights_offloaded_to_the_host_give_the_tokens_of_generate(folder: Path) -> None:
    model = cpu_offload(load(folder), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters()), "not everything is offloaded"
    compare(model)
    assert accepted_tokens(model) > 0


def test_text_goes_in_and_out_of_a_model_that_is_all_on_disk(
    folder: Path, tmp_path: Path, looping_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    model = load(folder, device_map=DEVICE_MAPS["all on disk"], offload_folder=tmp_path)
    arguments: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    got = lookahead.generate(model, tiny_tokenizer, ["the cat sat on the cat", "a b"], **arguments)
    in_memory = lookahead.generate(looping_llama, tiny_tokenizer, ["the cat sat on the cat", "a b"], **arguments)
    assert got.token_ids == in_memory.token_ids


@pytest.mark.parametrize("device_map", ["cpu", DEVICE_MAPS["all on disk"]], ids=["in memory", "on disk"])
def test_an_embedding_tied_to_the_head_gives_the_tokens_of_generate(
    tmp_path: Path, looping_llama: PreTrainedModel, device_map: Any
) -> None:
    config = deepcopy(looping_llama.config)
    config.tie_word_embeddings = True
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path, device_map=device_map, offload_folder=tmp_path / "offloaded")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    compare(model)
    assert accepted_tokens(model) > 0


@pytest.mark.parametrize("family", [GPT2Config, GPTJConfig], ids=["registered attention", "prepared masks"])
def test_bfloat16_weights_with_float32_norms_choose_among_the_likeliest_tokens(family: Any, tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.4}
    rotary = {"rotary_dim": 4} if family is GPTJConfig else {}
    config = family(vocab_size=101, **sizes, **rotary, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
    for inputs in (ONE, RAGGED):
        arguments: dict[str, Any] = {**inputs, "max_new_tokens": 24, "do_sample": False}
        got = model.generate(**arguments, custom_generate=lookahead.decode, lookahead_config=DRAFTING)
        # Half precision rounds with the shape of a pass, so the tokens need not be those of one token a pass.
        mask = torch.cat([inputs.get("attention_mask", torch.ones(1, 12).long()), torch.ones(len(got), 24).long()], 1)
        with torch.no_grad():
            logits = model(got, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits.float()
        of_next = logits[:, 11:-1]
        lost = of_next.max(-1).values - of_next.gather(2, got[:, 12:, None])[..., 0]
        assert float((lost / of_next.std(-1)).max()) < 0.1


def test_a_model_wrapped_for_compilation_has_a_switch_too(looping_llama: PreTrainedModel) -> None:
    model: Any = torch.compile(deepcopy(looping_llama))  # its `generate` compiles nothing, so this is quick
    arguments: dict[str, Any] = {**RAGGED, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**arguments)
    with lookahead.enable(model):
        with lookahead.enable(model):
            assert torch.equal(model.generate(**arguments), expected)
        assert "generate" in vars(model._orig_mod)
        assert torch.equal(model.generate(**arguments), expected)
    assert "generate" not in vars(model._orig_mod)
    assert torch.equal(model.generate(**arguments), expected)


@pytest.mark.exhaustive
def test_layers_that_the_caller_compiled_give_the_tokens_of_generate(looping_llama: PreTrainedModel) -> None:
    model: Any = deepcopy(looping_llama)
    del model.model.layers[1:]  # every layer is traced anew
    model.config.num_hidden_layers = 1
    arguments: dict[str, Any] = {**ONE, "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**arguments)
    model.model.layers[0].compile(backend="eager")
    assert torch.equal(
        model.generate(**arguments, custom_generate=lookahead.decode, lookahead_config=DRAFTING), expected
    )
