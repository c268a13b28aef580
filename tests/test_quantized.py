"""Weights of 8 and 4 bits: the tokens of the quantized model's own `generate`, and what is refused by name."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import lookahead
from lookahead import ConfigError, LookaheadConfig, UnsupportedModelError
from lookahead.backend.cpu.cpu_pass import CpuPass, running
from lookahead.backend.cpu.linears import packed_weights
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.cli.app import app
from lookahead.errors import HeadsError
from lookahead.kernels import block_formats, packed_product
from lookahead.loading.quantized import Int4Config, Int8Config, QuantizedLinear, resolve_quantize
from tests.support.adversarial_proposers import always_wrong, drafting_by, perfect, random_trees
from tests.support.families import ENCODER_DECODERS, FAMILIES, build, for_cpus
from tests.support.small_layers import serving

HALF, SINGLE = torch.bfloat16, torch.float32
CONFIGS, KINDS = {8: Int8Config, 4: Int4Config}, {8: "int8", 4: "Q4_1"}
widths = pytest.mark.parametrize("bits", CONFIGS)
DRAFTED = LookaheadConfig(draft="fixed", min_probability=0.0)
PROMPT = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])
RAGGED = {
    "input_ids": torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]]),
    "attention_mask": torch.tensor([[0] * 8 + [1] * 4, [1] * 12]),
}


def quantized(folder: Path, dtype: torch.dtype = HALF, bits: int = 8, kind: Any = AutoModelForCausalLM) -> Any:
    """The model of a folder as transformers quantizes it."""
    return for_cpus(kind.from_pretrained(folder, dtype=dtype, quantization_config=CONFIGS[bits]())).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, looping_llama: LlamaForCausalLM) -> dict[str, Path]:
    """Models on disk: one whose drafts are accepted, of several kinds of layers, and encoder-decoder ones."""
    models: dict[str, PreTrainedModel] = {"looping": looping_llama}
    models |= {name: build(FAMILIES[name]) for name in ("Qwen3", "Gemma2", "Phi3", "Mixtral")}
    models |= {name: build(ENCODER_DECODERS[name]) for name in ("Bart", "T5")}
    place = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(place / name)
    return {name: place / name for name in models}


def compare(model: Any, *configs: LookaheadConfig, **options: Any) -> None:
    """Tokens, and in half precision logits, of lookahead and of transformers."""
    kwargs = {"max_new_tokens": 24, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True} | options
    torch.manual_seed(5)
    expected = model.generate(**kwargs)
    for config in configs or (DRAFTED,):
        torch.manual_seed(5)
        got = model.generate(**kwargs, custom_generate=lookahead.decode, lookahead_config=config)
        assert torch.equal(got.sequences, expected.sequences)
        if len(expected.sequences) == 1 and model.dtype == HALF and keeps_solo_bits(model):
            assert all(map(torch.equal, got.logits, expected.logits))


@pytest.mark.covering(2)
@widths
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize("name", ["looping", "Qwen3", "Gemma2", "Phi3"])
def test_drafts_give_the_tokens_of_the_same_models_generate(name, sampling, bits, folders):
    model = quantized(folders[name], HALF, bits)
    assert keeps_solo_bits(model)
    compare(model, DRAFTED, LookaheadConfig(proposers=()), input_ids=PROMPT, **sampling)


@widths
def test_drafts_that_are_always_wrong_or_right_change_no_token(bits, folders):
    model = quantized(folders["looping"], HALF, bits)
    answers = model.generate(PROMPT, max_new_tokens=24, do_sample=False).tolist()
    for offer in (perfect(answers), always_wrong(answers, 101), random_trees(101)):
        with drafting_by(offer):
            compare(model, input_ids=PROMPT, do_sample=False)


@widths
@pytest.mark.parametrize("inputs", [{"input_ids": PROMPT}, RAGGED], ids=["one", "ragged"])
def test_in_fp32_drafts_would_change_tokens_so_there_are_none_and_a_warning_says_why(inputs, bits, folders):
    model, options = quantized(folders["looping"], SINGLE, bits), {"max_new_tokens": 24, "do_sample": False, **inputs}
    with pytest.warns(UserWarning, match="QuantizedLinear layers round their inputs, .*; load it with dtype='bf16'"):
        got = model.generate(**options, custom_generate=lookahead.decode)
    assert torch.equal(got, model.generate(**options))
    demanding = LookaheadConfig(window=3)
    with pytest.raises(UnsupportedModelError, match="load it with dtype='bf16'"):
        model.generate(**options, custom_generate=lookahead.decode, lookahead_config=demanding)


@widths
def test_a_long_prompt_gives_the_tokens_of_generate(bits, folders):
    ids = torch.randint(5, 100, (1, 150), generator=torch.Generator().manual_seed(1))
    compare(quantized(folders["looping"], HALF, bits), input_ids=ids, do_sample=False)


@pytest.mark.parametrize(("name", "bits"), [("Bart", 8), ("T5", 4)])
def test_an_encoder_decoder_model_gives_the_tokens_of_generate(name, bits, folders):
    from transformers import AutoModelForSeq2SeqLM

    model = quantized(folders[name], HALF, bits, AutoModelForSeq2SeqLM)
    assert sum(isinstance(each, QuantizedLinear) for each in model.modules()) > 12
    compare(model, input_ids=PROMPT, do_sample=False)


@widths
@pytest.mark.parametrize("name", ["T5", "UMT5", "SwitchTransformers"])
def test_layers_that_the_code_of_their_model_takes_for_floats_are_not_rounded(name, bits, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    plain = build(ENCODER_DECODERS[name]).float().eval()
    plain.save_pretrained(tmp_path)
    model = quantized(tmp_path, SINGLE, bits, AutoModelForSeq2SeqLM)
    rows = []
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].dtype))
    with torch.inference_mode():
        got, expected = (each(PROMPT, decoder_input_ids=PROMPT[:, :3]).logits for each in (model, plain))
    assert len(rows) > 12 and all(dtype.is_floating_point for dtype in rows)
    assert 0.5 < got.norm() / expected.norm() < 2


def test_a_mixture_of_experts_keeps_their_weights_and_gives_the_tokens_of_generate(folders):
    compare(quantized(folders["Mixtral"]), LookaheadConfig(proposers=()), input_ids=PROMPT, do_sample=False)


@widths
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_layers_with_quantized_products_are_fused_with_the_same_bits(dtype, bits, folders):
    model = quantized(folders["Qwen3"], dtype, bits)
    with torch.inference_mode():
        expected = model(PROMPT).logits
    layer = model.model.layers[0]
    with serving(model), torch.inference_mode(), running(CpuPass(BitPolicy.SOLO)):
        assert "forward" in layer.__dict__
        linears = layer.self_attn.q_proj, layer.mlp.down_proj
        assert len(packed_weights(linears, torch.empty(3, 4, dtype=dtype), {})) == 2, "one call with the others"
        got = model(PROMPT).logits
    assert torch.equal(got, expected) if dtype == HALF else (got - expected).abs().max() < 1e-4


def rounded(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Every so many numbers of a row as multiples, from -127 to 127, of a step."""
    blocks = nn.functional.pad(numbers.float(), (0, -numbers.shape[-1] % size)).unflatten(-1, (-1, size))
    largest = blocks.abs().amax(-1, keepdim=True)
    whole = (blocks * (127 / largest.clamp_min(1e-30))).round()
    return (whole.double() * (largest / 127)).flatten(-2)[..., : numbers.shape[-1]]


def weights_of(layer: QuantizedLinear) -> torch.Tensor:
    """The weights that a layer holds."""
    rows = block_formats.rows_of(layer.weight, layer.kind, torch.arange(layer.out_features))
    return rows.double()[:, : layer.in_features]


@widths
@pytest.mark.parametrize("dtype", [HALF, SINGLE, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "bias"), [(40, 3500, False), (37, 1030, True), (5, 63, True), (1, 2, False)]
)
def test_a_product_is_that_of_what_is_rounded_and_a_row_is_the_same_in_any_company(outputs, inputs, bias, dtype, bits):
    torch.manual_seed(outputs)
    own = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    with torch.inference_mode():
        layer = QuantizedLinear(own, KINDS[bits])
        size, weight = {8: 64, 4: 32}[bits], weights_of(layer)
        if bits == 8:
            assert torch.equal(weight.float(), rounded(own.weight, 64).float())
        x = torch.randn(20, inputs).to(dtype)
        x[::8, inputs // 2] = 30.0
        expected = linear(rounded(x, size), weight, None if own.bias is None else own.bias.double())
        error = {HALF: 0.005, torch.float16: 1e-3, SINGLE: 2e-6 if bits == 8 else 8e-6}[dtype]
        alone = torch.cat([layer(row) for row in x.split(1)])
        assert alone.dtype == dtype and (alone - expected).abs().max() <= error * expected.abs().max()
        for rows in range(1, 21):
            assert torch.equal(layer(x[None, -rows:])[0], alone[-rows:]), rows


def test_weights_of_4_bits_are_nearer_than_16_equal_steps():
    torch.manual_seed(0)
    own = nn.Linear(1536, 48, bias=False)
    with torch.no_grad():
        own.weight.normal_()
        own.weight[3], own.weight[:, 0] = 0.25, 9.0
        weights, near = (
            each.unflatten(1, (-1, 32)) for each in (own.weight, weights_of(QuantizedLinear(own, KINDS[4])))
        )
    least, most = weights.aminmax(dim=2, keepdim=True)
    step = ((most - least) / 15).clamp_min(1e-30)
    plain = ((weights - least) / step).round() * step + least
    errors, bound = ((each - weights).square().sum(2) for each in (near, plain))
    assert (errors <= 1.2 * bound + 1e-4 * weights.square().sum(2)).all() and errors.sum() < 0.95 * bound.sum()


@widths
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_stay_visible(wrong, bits):
    x, layer = torch.randn(3, 130), QuantizedLinear(nn.Linear(130, 5), KINDS[bits])
    x[1, 100] = wrong
    with torch.inference_mode():
        got = layer(x)
    assert not got[1].isfinite().any() and got[[0, 2]].isfinite().all()


@widths
def test_products_on_several_threads_have_the_same_bits(bits):
    layer, x = QuantizedLinear(nn.Linear(1536, 2000).bfloat16(), KINDS[bits]), torch.randn(17, 1536).bfloat16()
    before, products = torch.get_num_threads(), list[torch.Tensor]()
    with torch.inference_mode():
        for threads in (1, 3):
            torch.set_num_threads(threads)
            products += [layer(x) for _ in range(4)]
    torch.set_num_threads(before)
    assert all(torch.equal(each, products[0]) for each in products)


@widths
def test_an_output_without_weights_is_its_bias(bits):
    own = nn.Linear(8, 3)
    with torch.no_grad():
        own.weight[1] = 0.0
        assert torch.equal(QuantizedLinear(own, KINDS[bits])(torch.randn(2, 8))[:, 1], own.bias[1].expand(2))


@widths
def test_what_a_quantized_layer_cannot_do_is_an_error(bits):
    layer = QuantizedLinear(nn.Linear(8, 4), KINDS[bits])
    with pytest.raises(UnsupportedModelError, match=f"weights of {bits} bits have no gradient"):
        layer(torch.randn(2, 8, requires_grad=True))
    with pytest.raises(UnsupportedModelError, match="are multiplied on a CPU, got a tensor on meta"):
        layer(torch.randn(2, 8, device="meta"))
    with pytest.raises(ValueError, match="rows of 8 numbers, got 9"):
        layer(torch.randn(2, 9))


@pytest.mark.parametrize(
    ("bits", "twin"), [(8, copy.deepcopy), (4, lambda model: pickle.loads(pickle.dumps(model)))], ids=["8", "4"]
)
def test_a_copy_of_a_quantized_model_gives_the_same_tokens(twin, bits, folders):
    model = quantized(folders["looping"], HALF, bits)
    expected = model.generate(PROMPT, max_new_tokens=20, do_sample=False)
    assert torch.equal(twin(model).generate(PROMPT, max_new_tokens=20, do_sample=False), expected)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory, tiny_llama: LlamaForCausalLM, tiny_tokenizer: Any) -> Path:
    """A folder with a model and its tokenizer."""
    folder = tmp_path_factory.mktemp("named")
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@widths
def test_a_model_is_quantized_by_name_and_its_output_layer_to_8_bits(bits, named):
    model, tokenizer = lookahead.load(named, dtype="bf16", device="cpu", quantize=f"int{bits}")
    assert model.dtype == HALF and model.is_quantized
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    kinds = [layer.kind for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    assert kinds == [KINDS[bits]] * 14 + ["int8"]
    compare(model, **tokenizer("abcabc", return_tensors="pt"), do_sample=False)


def test_without_a_dtype_a_quantized_model_is_loaded_in_bf16_where_it_is_drafted_for(named):
    assert lookahead.load(named, device="cpu", quantize="int4").model.dtype == HALF
    assert lookahead.load(named, device="cpu", dtype="fp32", quantize="int4").model.dtype == SINGLE


def test_a_weight_of_8_bits_reads_half_of_the_bytes_and_one_of_4_a_third():
    sizes = [QuantizedLinear(nn.Linear(1024, 64), KINDS[bits]).weight.nbytes for bits in CONFIGS]
    assert sizes == [1024 * 64 * 17 // 16, 1024 * 64 * 5 // 8]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_quantized_model_cannot_be_saved(name, named, tmp_path):
    with pytest.raises(ValueError, match=f"lookahead_{name} and is not serializable"):
        lookahead.load(named, device="cpu", quantize=name).model.save_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["int2", 8, ["int8"]])
def test_an_unknown_name_is_refused_before_the_model_is_loaded(name, named, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=re.escape(f"quantize must be int8, int4 or gguf, got {name!r}")):
        lookahead.load(named, device="cpu", quantize=name)


def test_a_gpu_is_refused_before_the_model_is_loaded():
    with pytest.raises(ConfigError, match="quantize='int8' is for a CPU, got the device cuda:1"):
        resolve_quantize("int8", torch.device("cuda:1"))


def test_a_model_that_comes_quantized_is_not_quantized_again(named, tmp_path):
    for file in named.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="its weights are already quantized; quantize must be None, got 'int8'"):
        lookahead.load(tmp_path, device="cpu", quantize="int8")


def test_a_model_without_linear_layers_is_refused(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    model.transformer.save_pretrained(tmp_path)
    from transformers import GPT2Model

    with pytest.raises(UnsupportedModelError, match="GPT2Model has no linear layers to quantize"):
        GPT2Model.from_pretrained(tmp_path, quantization_config=Int8Config())


def test_heads_of_a_quantized_model_are_refused_by_name(folders):
    from lookahead.plugins.heads.target import lm_head

    with pytest.raises(HeadsError, match="the LM head of this LlamaForCausalLM is quantized"):
        lm_head(quantized(folders["looping"]))


@pytest.mark.parametrize(
    ("command", "dtype", "name"),
    [
        (["generate", "3 4 5", "--max-new-tokens", "4"], "bf16", "int8"),
        (["generate", "3 4 5", "--max-new-tokens", "4"], "fp32", "int4"),
    ],
)
def test_commands_take_a_quantized_model(command, dtype, name, named, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = [*command, "--model", str(named), "--device", "cpu", "--quantize", name, "--dtype", dtype]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [["generate", "3 4 5"], ["chat"], ["serve"]])
def test_a_command_says_in_one_line_what_cannot_be_quantized_so(command, named):
    model = [str(named)] if command == ["serve"] else ["--model", str(named)]
    result = CliRunner().invoke(app, [*command, *model, "--quantize", "int2"])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "quantize must be int8, int4 or gguf, got 'int2'" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "3 4 5", "--heads", "native"],
        ["chat", "--heads", "native"],
        ["train", "medusa", "--data", "gone.txt", "-o", "heads"],
    ],
    ids=" ".join,
)
def test_heads_beside_a_quantized_model_are_refused_before_it_is_loaded(command, named, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    result = CliRunner().invoke(app, [*command, "--model", str(named), "--quantize", "int8"])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "for a model that is not quantized, got --quantize int8" in result.stderr


def test_step_costs_and_jobs_of_a_quantized_model_are_kept_apart(named, tmp_path):
    from lookahead.backend.step_costs import cost_path
    from lookahead.utils.fingerprints import weights_fingerprint

    models = [lookahead.load(named, device="cpu", quantize=each).model for each in (None, "int8", "int4")]
    assert len({cost_path(each, tmp_path) for each in models}) == 3
    assert len({weights_fingerprint(each) for each in models}) == 3, "so are jobs"


def test_weights_that_are_laid_out_for_another_cpu_are_refused(monkeypatch):
    layer = QuantizedLinear(nn.Linear(64, 40), "int8")
    monkeypatch.setattr(packed_product, "COLUMNS", packed_product.COLUMNS * 2)
    with pytest.raises(UnsupportedModelError, match="load and quantize the model here"):
        layer(torch.ones(1, 64))
