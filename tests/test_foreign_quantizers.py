"""Models that others' libraries quantize: drafted for with the tokens of their own `generate`, or decoded plainly."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
    TorchAoConfig,
)

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.layer_probes import layers_with_solo_bits
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.backend.support import support_of
from lookahead.model.foreign_layers import foreign_layers
from tests.support.adversarial_proposers import always_wrong, drafting_by, perfect, random_trees
from tests.support.engines import engine_of

SINGLE, HALF, SIZE = torch.float32, torch.bfloat16, 128
DRAFTING = LookaheadConfig(draft="fixed", min_probability=0.0)
ONE: dict[str, Any] = {"input_ids": torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])}
RAGGED = {
    "input_ids": torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]]),
    "attention_mask": torch.tensor([[0] * 8 + [1] * 4, [1] * 12]),
}
SAMPLED = {"do_sample": True, "temperature": 1.3}
SCALES, ROUNDS = "scale activations by all tokens of a pass", "round their inputs"
Quantize = Callable[[str, Tensor], dict[str, Tensor]]


def torchao(name: str, **options: Any) -> Callable[[], TorchAoConfig]:
    def make() -> TorchAoConfig:
        quantization = pytest.importorskip("torchao.quantization")
        given = {key: value() if callable(value) else value for key, value in options.items()}
        return TorchAoConfig(getattr(quantization, name)(**given))

    return make


def granularity(name: str, *args: int) -> Callable[[], Any]:
    return lambda: getattr(pytest.importorskip("torchao.quantization"), name)(*args)


def bits_and_bytes(**options: Any) -> Callable[[], BitsAndBytesConfig]:
    def make() -> BitsAndBytesConfig:
        pytest.importorskip("bitsandbytes")
        return BitsAndBytesConfig(**options)

    return make


def quanto(weights: str) -> Callable[[], QuantoConfig]:
    def make() -> QuantoConfig:
        pytest.importorskip("optimum.quanto")
        return QuantoConfig(weights=weights)

    return make


ON_LOADING: dict[str, Callable[[], Any]] = {
    "torchao int8": torchao("Int8WeightOnlyConfig", version=2),
    "torchao int4": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=granularity("PerGroup", 32)),
    "torchao fp8": torchao("Float8WeightOnlyConfig"),
    "torchao int8 by token": torchao("Int8DynamicActivationInt8WeightConfig", version=2),
    "torchao int8 by tensor": torchao(
        "Int8DynamicActivationInt8WeightConfig", version=2, granularity=granularity("PerTensor")
    ),
    "torchao int4 by token": torchao(
        "Int8DynamicActivationIntxWeightConfig",
        weight_dtype=torch.int4,
        weight_granularity=granularity("PerGroup", 32),
    ),
    "bitsandbytes int8": bits_and_bytes(load_in_8bit=True),
    "bitsandbytes nf4": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes fp4": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
    "bitsandbytes nf4 in bf16": bits_and_bytes(load_in_4bit=True, bnb_4bit_compute_dtype=HALF),
    "quanto int8": quanto("int8"),
    "quanto int4": quanto("int4"),
    "quanto fp8": quanto("float8"),
}


def in_int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}


def in_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}


def with_input_scale(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {**in_int8(name, weight), f"{name}.input_scale": torch.tensor([0.05])}


def in_trits(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().mean()
    whole = (weight / scale).round().clamp(-1, 1).to(torch.int64) + 1
    packed = sum(part << (2 * place) for place, part in enumerate(whole.chunk(4)))
    assert isinstance(packed, Tensor)
    return {f"{name}.weight": packed.to(torch.uint8), f"{name}.weight_scale": (1 / scale)[None]}


def compressed(form: str, kind: str, strategy: str, *, dynamic: bool = True) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint that compressed-tensors wrote."""
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    inputs = {**common, "strategy": strategy, "dynamic": dynamic}
    group = {"targets": ["Linear"], "weights": {**common, "strategy": "channel"}, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**config, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


SAVED: dict[str, tuple[str, Quantize, dict[str, Any]]] = {
    "int8 by token": ("compressed_tensors", in_int8, compressed("int-quantized", "int", "token")),
    "int8 by tensor": ("compressed_tensors", in_int8, compressed("int-quantized", "int", "tensor")),
    "int8 fixed": ("compressed_tensors", with_input_scale, compressed("int-quantized", "int", "tensor", dynamic=False)),
    "fp8 by token": ("compressed_tensors", in_fp8, compressed("float-quantized", "float", "token")),
    "BitNet": ("accelerate", in_trits, {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk that likes to count, of widths that all libraries take."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(20)
        model = LlamaForCausalLM(config)
        embedding = model.get_input_embeddings().weight
        model.lm_head.weight[(torch.arange(SIZE) + 1) % 16] += 2 * embedding
        embedding.mul_(30)
    model.save_pretrained(path)
    return path


def quantized(folder: Path, name: str, dtype: torch.dtype) -> Any:
    config = ON_LOADING[name]()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config).eval()


def saved(folder: Path, target: Path, name: str, dtype: torch.dtype) -> Any:
    """A model of a checkpoint that was saved quantized."""
    library, quantize, config = SAVED[name]
    pytest.importorskip(library)
    tensors = dict[str, Tensor]()
    for key, weight in load_file(folder / "model.safetensors").items():
        tensors |= quantize(key[: -len(".weight")], weight) if key.endswith("_proj.weight") else {key: weight}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    described = {**json.loads((folder / "config.json").read_text()), "quantization_config": config}
    (target / "config.json").write_text(json.dumps(described))
    return AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()


def verdict(model: Any) -> str:
    """Why nothing is drafted, or an empty string."""
    found = support_of(model, shortest=4, max_length=60)
    return "" if found.shape == "trees" else found.reason


def compare(model: Any) -> None:
    """One prompt, and others where a batch keeps the tokens; by scripted drafts, and by real ones."""
    assert foreign_layers(model)
    reason = verdict(model)
    config = None if reason else DRAFTING
    # The padded batches of half precision round otherwise, whatever multiplies.
    for inputs in (ONE, RAGGED) if model.dtype == SINGLE or reason else (ONE,):
        for options in ({"do_sample": False}, SAMPLED):
            arguments = {**inputs, **options, "max_new_tokens": 20, "pad_token_id": 0}
            torch.manual_seed(5)
            expected = model.generate(**arguments)
            masks = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
            answers = [ids[int((mask == 0).sum()) :] for ids, mask in zip(expected.tolist(), masks, strict=True)]
            offers = () if reason else (perfect(answers), always_wrong(answers, SIZE), random_trees(SIZE))
            for offer in (None, *offers):
                torch.manual_seed(5)
                with warnings.catch_warnings(), drafting_by(offer) if offer else warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    got = model.generate(**arguments, custom_generate=lookahead.decode, lookahead_config=config)
                assert torch.equal(got, expected), (inputs is RAGGED, options, offer)
    if not reason:
        engine = engine_of(model, **ONE, max_new_tokens=40, do_sample=False, lookahead_config=DRAFTING)
        for _ in engine.run():
            pass
        assert engine.stats[0].accepted_tokens > 0


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("name", ON_LOADING)
def test_a_model_that_is_quantized_on_loading_gives_the_tokens_of_its_generate(name, dtype, folder):
    compare(quantized(folder, name, dtype))


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("name", SAVED)
def test_a_model_that_was_saved_quantized_gives_the_tokens_of_its_generate(name, dtype, folder, tmp_path):
    compare(saved(folder, tmp_path, name, dtype))


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("name", ["torchao int8 by tensor", "bitsandbytes int8", "int8 by tensor"])
def test_layers_that_scale_all_tokens_of_a_pass_together_are_named(name, dtype, folder, tmp_path):
    model = quantized(folder, name, dtype) if name in ON_LOADING else saved(folder, tmp_path, name, dtype)
    assert SCALES in verdict(model)


@pytest.mark.parametrize(
    "name",
    [
        *("torchao int8 by token", "torchao int4 by token", "bitsandbytes nf4 in bf16"),
        *("int8 by token", "int8 fixed", "fp8 by token", "BitNet"),
    ],
)
def test_layers_that_round_their_inputs_are_named_in_fp32(name, folder, tmp_path):
    model = quantized(folder, name, SINGLE) if name in ON_LOADING else saved(folder, tmp_path, name, SINGLE)
    assert ROUNDS in verdict(model)


@pytest.mark.parametrize("name", ["torchao int8", "torchao int4", "torchao fp8", "quanto int8", "quanto fp8"])
def test_models_whose_weights_alone_are_rounded_are_drafted_for_in_fp32(name, folder):
    assert not verdict(quantized(folder, name, SINGLE))


@pytest.mark.parametrize("name", ["torchao int8", "bitsandbytes nf4", "quanto int8"])
def test_adapters_on_quantized_weights_give_the_tokens_of_generate(name, folder):
    import peft

    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    with torch.random.fork_rng():
        torch.manual_seed(6)
        compare(peft.get_peft_model(quantized(folder, name, HALF), config).eval().base_model.model)


@pytest.mark.parametrize("name", ["torchao int8", "torchao int8 by token", "bitsandbytes nf4", "quanto int8"])
def test_in_bf16_passes_have_the_bits_of_single_tokens_where_layers_keep_them(name, folder):
    model = quantized(folder, name, HALF)
    assert not verdict(model) and keeps_solo_bits(model) == (layers_with_solo_bits(model) is not None)
