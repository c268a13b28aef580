"""Layers of others' code, as quantizers make them: a draft shares a pass only where no row depends on another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import DynamicCache, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.backend.support import Support, support_of
from lookahead.model.foreign_layers import foreign_layers
from tests.support.adversarial_proposers import always_wrong, drafting_by, perfect, random_trees

SINGLE, HALF = torch.float32, torch.bfloat16
IDS = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
SCALES = "scale activations by all tokens of a pass, so drafts would change them"
ROUNDS = "round their inputs, which enlarges other rounding; load it with dtype='bf16'"
Product = Callable[[Tensor, Tensor], Tensor]


def rounded(x: Tensor, largest: Tensor, steps: int = 127) -> Tensor:
    step = largest / steps
    return ((x / step).round() * step).to(x.dtype)


def product_of(x: Tensor, weight: Tensor) -> Tensor:
    """Rows that have the same bits in any company on any CPU."""
    return linear(x.double(), weight.double()).to(x.dtype)


def by_tensor(x: Tensor, weight: Tensor) -> Tensor:
    return product_of(rounded(x, x.abs().max()), weight)


def by_token(x: Tensor, weight: Tensor) -> Tensor:
    return product_of(rounded(x, x.abs().amax(-1, keepdim=True)), weight)


def by_fixed_scale(x: Tensor, weight: Tensor) -> Tensor:
    return product_of(rounded(x, torch.tensor(8.0)), weight)


def but_for_outliers(x: Tensor, weight: Tensor) -> Tensor:
    """Columns that are large in any row are not rounded, as in LLM.int8()."""
    columns = (x.abs() > 6).flatten(0, -2).any(0)
    return product_of(torch.where(columns, x, rounded(x, x.abs().amax(-1, keepdim=True))), weight)


def centred(x: Tensor, weight: Tensor) -> Tensor:
    return product_of(x - 1e-3 * x.flatten(0, -2).mean(0), weight)


def of_weights_alone(x: Tensor, weight: Tensor) -> Tensor:
    return product_of(x, rounded(weight, weight.abs().amax(-1, keepdim=True)))


def in_half_precision(x: Tensor, weight: Tensor) -> Tensor:
    return product_of(x.bfloat16(), weight.bfloat16()).to(x.dtype)


def one_row_otherwise(x: Tensor, weight: Tensor) -> Tensor:
    """Another kernel for one row, which adds in another order."""
    if x[..., 0].numel() > 1:
        return product_of(x, weight)
    half = x.shape[-1] // 2
    return product_of(x[..., :half], weight[:, :half]) + product_of(x[..., half:], weight[:, half:])


def one_row_in_full(x: Tensor, weight: Tensor) -> Tensor:
    """Activations of several rows are rounded, those of one are not, as by kernels for decoding and for prompts."""
    largest = x.abs().amax(-1, keepdim=True)
    return product_of(x if x[..., 0].numel() == 1 else rounded(x, largest, 7), weight)


def rounded_beyond(x: Tensor, weight: Tensor) -> Tensor:
    """Activations of many rows are rounded, by a kernel that a pass of a single row never reaches."""
    is_many = x[..., 0].numel() > 100
    return product_of(rounded(x, x.abs().amax(-1, keepdim=True), 7) if is_many else x, weight)


def of_few_rows(x: Tensor, weight: Tensor) -> Tensor:
    if x[..., 0].numel() > 50:
        raise ValueError("too many rows")
    return product_of(x, weight)


def outside_inference_mode(x: Tensor, weight: Tensor) -> Tensor:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("an inference tensor has no version")
    return linear(x, weight)


class OwnLinear(nn.Module):
    """Weights in a buffer, as packed ones are."""

    def __init__(self, layer: nn.Linear, product: Product) -> None:
        super().__init__()
        self.product = product
        self.register_buffer("packed", layer.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.packed)


class OwnWeight(nn.Parameter):
    """A weight that multiplies by a function of its own, as torchao's do."""

    product: Product

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = args[1] if function is linear else None
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(weight, cls):
                return weight.product(args[0], weight.as_subclass(Tensor))
            return function(*args, **(kwargs or {}))


def as_module(parent: nn.Module, name: str, product: Product) -> None:
    setattr(parent, name, OwnLinear(getattr(parent, name), product))


def as_weight(parent: nn.Module, name: str, product: Product) -> None:
    layer = getattr(parent, name)
    layer.weight = OwnWeight(layer.weight.detach(), requires_grad=False)
    layer.weight.product = product


def as_forward(parent: nn.Module, name: str, product: Product) -> None:
    layer = getattr(parent, name)
    layer.forward = lambda x: product(x, layer.weight)


def made(model: PreTrainedModel, product: Product, dtype: torch.dtype = SINGLE, how: Any = as_module) -> Any:
    """A copy of a model with the last projections of its MLPs made so."""
    copy: Any = deepcopy(model).to(dtype)
    for layer in copy.model.layers:
        how(layer.mlp, "down_proj", product)
    return copy


TRUSTED = LookaheadConfig(trust_user_code=True)  # the classes here stand for those of quantizers
DRAFTED = LookaheadConfig(draft="fixed", min_probability=0.0, trust_user_code=True)


def found(model: Any) -> Support:
    return support_of(model, shortest=4, max_length=60, trusted=True)


def decodes_exactly(model: Any, config: LookaheadConfig | None) -> bool:
    """Whether scripted drafts of all kinds leave the tokens of `generate`, greedy and sampled."""
    for options in (GREEDY, {**GREEDY, "do_sample": True, "temperature": 1.3}):
        torch.manual_seed(3)
        expected = model.generate(IDS, **options)
        for offer in (perfect(expected.tolist()), always_wrong(expected.tolist(), 101), random_trees(101)):
            torch.manual_seed(3)
            with drafting_by(offer), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = model.generate(IDS, **options, custom_generate=lookahead.decode, lookahead_config=config)
            if not torch.equal(got, expected):
                return False
    return True


@pytest.mark.parametrize("how", [as_module, as_weight, as_forward])
@pytest.mark.parametrize("dtype", [SINGLE, HALF, torch.float16], ids=str)
@pytest.mark.parametrize("product", [by_tensor, but_for_outliers, centred])
@pytest.mark.covering(2)
def test_where_a_row_depends_on_others_nothing_is_drafted_and_a_warning_says_so(product, dtype, how, looping_llama):
    model = made(looping_llama, product, dtype, how)
    assert found(model).reason.endswith(SCALES), found(model)
    with pytest.warns(UserWarning, match=f"its (OwnLinear|Linear.*) layers {SCALES}"):
        got = model.generate(IDS, **GREEDY, custom_generate=lookahead.decode, lookahead_config=TRUSTED)
    assert torch.equal(got, model.generate(IDS, **GREEDY))


def test_one_layer_of_many_that_depends_on_other_rows_is_enough(looping_llama):
    model = made(looping_llama, of_weights_alone)
    assert found(model).shape == "trees"
    mlp = model.model.layers[1].mlp
    mlp.down_proj = OwnLinear(looping_llama.model.layers[1].mlp.down_proj, by_tensor)
    assert found(model).reason == f"its OwnLinear layers {SCALES}"


@pytest.mark.parametrize("dtype", [SINGLE, HALF, torch.float16], ids=str)
def test_where_several_rows_are_rounded_and_one_is_not_nothing_is_drafted(dtype, looping_llama):
    model = made(looping_llama, one_row_in_full, dtype)
    assert found(model).reason == "its OwnLinear layers compute several tokens differently from one"
    assert decodes_exactly(model, TRUSTED)


@pytest.mark.parametrize("how", [as_module, as_weight, as_forward])
@pytest.mark.parametrize("product", [by_token, by_fixed_scale, in_half_precision])
def test_in_fp32_rounded_inputs_would_enlarge_rounding_so_nothing_is_drafted(product, how, looping_llama):
    assert found(made(looping_llama, product, how=how)).reason.endswith(ROUNDS)


@pytest.mark.parametrize("how", [as_module, as_weight, as_forward])
@pytest.mark.parametrize("product", [by_token, by_fixed_scale, of_weights_alone])
def test_in_bf16_rows_that_keep_their_bits_are_drafted_for_bit_by_bit(product, how, looping_llama):
    model = made(looping_llama, product, HALF, how)
    assert found(model).shape == "trees" and keeps_solo_bits(model)
    assert decodes_exactly(model, DRAFTED)


@pytest.mark.parametrize("product", [of_weights_alone, one_row_otherwise])
def test_in_fp32_weights_alone_and_other_sums_for_one_row_are_rounding_only(product, looping_llama):
    model = made(looping_llama, product)
    assert found(model).shape == "trees"
    assert decodes_exactly(model, DRAFTED)


@pytest.mark.parametrize("how", [as_module, as_weight, as_forward])
def test_in_bf16_another_kernel_for_one_row_changes_bits_so_nothing_is_drafted(how, looping_llama):
    model = made(looping_llama, one_row_otherwise, HALF, how)
    assert not keeps_solo_bits(model)
    assert found(model).reason.endswith("round several tokens differently from one")
    assert decodes_exactly(model, TRUSTED)


def test_prompts_are_read_one_by_one_where_layers_are_of_others_code(looping_llama, tiny_tokenizer):
    model = made(looping_llama, rounded_beyond)
    prompts = torch.randint(1, 100, (12, 40), generator=torch.Generator().manual_seed(1)).tolist()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = [model.generate(torch.tensor([each]), **options)[0, 40:].tolist() for each in prompts]
    done = {
        each.index: each.token_ids for each in lookahead.stream_many(model, tiny_tokenizer, prompts, rows=12, **options)
    }
    assert [done[at] for at in range(12)] == expected


def test_layers_that_take_no_more_than_some_rows_are_decoded_plainly(looping_llama):
    model = made(looping_llama, of_few_rows)
    with pytest.warns(UserWarning, match="compute several tokens differently from one.*decoded plainly"):
        got = model.generate(IDS, **GREEDY, custom_generate=lookahead.decode, lookahead_config=TRUSTED)
    assert torch.equal(got, model.generate(IDS, **GREEDY))


def test_layers_that_do_not_run_in_inference_mode_are_decoded_plainly(looping_llama):
    model = made(looping_llama, outside_inference_mode)
    assert found(model).reason.startswith("its layers do not run in torch.inference_mode, as passes over drafts do")
    assert decodes_exactly(model, TRUSTED)


class OwnNorm(nn.Module):
    """A smooth function that is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class OwnMLP(nn.Module):
    """One with kinks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) - torch.relu(-0.5 * x)


def test_norms_and_activations_of_others_code_are_no_rounding(looping_llama):
    model: Any = deepcopy(looping_llama)
    for layer in model.model.layers:
        layer.post_attention_layernorm, layer.mlp.act_fn = OwnNorm(), OwnMLP()
    assert len(foreign_layers(model)) == 4
    assert found(model).shape == "trees"
    assert decodes_exactly(model, DRAFTED)


class OwnRotary(nn.Module):
    """A module of two outputs, which takes numbers for its own model alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner[0](x, position_ids)
        return cos, sin


class OwnHalves(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] == 64 or x.abs().max() > 100:
            raise ValueError("it takes no such rows")
        return super().forward(x)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_modules_that_cannot_be_called_by_themselves_are_judged_by_passes_alone(dtype, looping_llama):
    model: Any = deepcopy(looping_llama).to(dtype)
    model.model.rotary_emb = OwnRotary(model.model.rotary_emb)
    model.model.layers[0].mlp.act_fn = OwnHalves()
    assert len(foreign_layers(model)) == 2
    found(model), keeps_solo_bits(model)
    drafts = DRAFTED if found(model).shape == "trees" else TRUSTED
    assert decodes_exactly(model, drafts)


def test_layers_of_torch_and_transformers_are_not_tried_wherever_their_weights_are(tiny_llama):
    model = deepcopy(tiny_llama)
    assert not foreign_layers(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert not foreign_layers(model), "accelerate moves weights, and multiplies by torch"


def test_a_probe_leaves_no_hook_and_no_random_number_behind(looping_llama):
    model = made(looping_llama, of_weights_alone, HALF)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found(model), keeps_solo_bits(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(each._forward_pre_hooks for each in model.modules())


@pytest.fixture
def cache_method() -> Iterator[Callable[[str], None]]:
    """Sets a method on transformers' class of caches, which a library may do when it is imported."""
    names: list[str] = []

    def put(name: str) -> None:
        names.append(name)
        setattr(DynamicCache, name, lambda self, *args, **kwargs: 0)

    yield put
    for name in names:
        delattr(DynamicCache, name)


@pytest.mark.parametrize(("name", "shape"), [("get_usable_length", "trees"), ("get_seq_length", "none")])
def test_a_method_is_added_to_caches_with_no_harm_unless_transformers_calls_it(name, shape, tiny_llama, cache_method):
    cache_method(name)
    assert found(tiny_llama).shape == shape
    cache = DynamicCache(config=tiny_llama.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if shape == "trees" else "ignore")
        if shape == "trees":
            tiny_llama.generate(IDS, **GREEDY, past_key_values=cache, custom_generate=lookahead.decode)
