"""Models with PEFT adapters: whichever are on, and however they change, the tokens are those of `generate`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import UnsupportedModelError
from tests.support.engines import engine_of

DRAFTING = LookaheadConfig(draft="fixed")
ONE = {"input_ids": torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])}
RAGGED = {
    "input_ids": torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]]),
    "attention_mask": torch.tensor([[0] * 8 + [1] * 4, [1] * 12]),
}
CALLS: list[dict[str, Any]] = [
    {**ONE, "do_sample": False, "max_new_tokens": 20},
    {**RAGGED, "eos_token_id": [10, 35, 67, 90], "do_sample": True, "top_k": 20, "max_new_tokens": 20},
]
Adapter = tuple[str, dict[str, Any]]
"""The name of a class of configurations, and its arguments."""


def lora_of(target_modules: str | list[str], **options: Any) -> Adapter:
    return "LoraConfig", {"r": 4, "init_lora_weights": False, "target_modules": target_modules, **options}


def adapted(model: PreTrainedModel, *adapters: Adapter) -> Any:
    """A copy of a model with adapters of random weights, named first and second; the first one is on."""
    import peft

    configs = [getattr(peft, name)(task_type="CAUSAL_LM", **options) for name, options in adapters]
    with torch.random.fork_rng():
        torch.manual_seed(6)
        wrapped = peft.get_peft_model(deepcopy(model), configs[0], adapter_name="first")
        for config in configs[1:]:
            wrapped.add_adapter("second", config)
    return wrapped.eval()


@pytest.fixture
def lora(looping_llama: PreTrainedModel) -> Any:
    """Two LoRA adapters, one on every linear layer and one on two of attention and on the embedding."""
    return adapted(looping_llama, lora_of("all-linear"), lora_of(["q_proj", "v_proj", "embed_tokens"]))


def served(model: Any, **kwargs: Any) -> list[torch.Tensor]:
    """What `generate` gives for every call, from the same seed."""
    outputs = []
    for call in CALLS:
        torch.manual_seed(1)
        outputs.append(model.generate(**call, **kwargs))
    return outputs


def drafted(model: Any) -> list[torch.Tensor]:
    """The same with drafts, which are asked for: decoding plainly instead would be refused."""
    return served(model, custom_generate=lookahead.decode, lookahead_config=DRAFTING)


def all_equal(outputs: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(output, other) for output, other in zip(outputs, others, strict=True))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Nothing is decoded plainly, or by transformers alone, behind our back."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoded (plainly|by transformers)")
        yield


@contextmanager
def merged(model: Any) -> Iterator[None]:
    model.merge_adapter()
    yield
    model.unmerge_adapter()


@contextmanager
def switched_to(model: Any, adapter: str) -> Iterator[None]:
    before = model.active_adapter
    model.set_adapter(adapter)
    yield
    model.set_adapter(before)


STATES: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "on": lambda model: nullcontext(),
    "off": lambda model: model.disable_adapter(),
    "another": lambda model: switched_to(model, "second"),
    "merged": merged,
}


def test_adapters_may_change_between_the_calls_of_one_switch(lora: Any) -> None:
    expected = {}
    for name, state in STATES.items():
        with state(lora):
            expected[name] = served(lora)
    assert not all_equal(expected["on"], expected["off"])
    assert not all_equal(expected["on"], expected["another"])
    with lookahead.enable(lora, DRAFTING), without_warnings():
        for name in (*STATES, "on"):
            with STATES[name](lora):
                assert all_equal(served(lora), expected[name])
    assert all_equal(served(lora), expected["on"])
    assert "generate" not in vars(lora)


def test_adapters_may_change_between_calls_with_the_custom_method(lora: Any) -> None:
    for name in (*STATES, "on"):
        with STATES[name](lora):
            expected = served(lora)
            assert all_equal(drafted(lora), expected)


def test_a_switch_on_the_base_model_serves_its_adapters(lora: Any) -> None:
    expected = served(lora)
    with lookahead.enable(lora.get_base_model(), DRAFTING), without_warnings():
        assert all_equal(served(lora), expected)


def test_drafts_are_accepted_with_an_adapter_on(lora: Any) -> None:
    arguments: dict[str, Any] = {**ONE, "max_new_tokens": 60, "do_sample": False}
    engine = engine_of(lora, **arguments, lookahead_config=DRAFTING)
    for _ in engine.run():
        pass
    assert engine.stats[0].accepted_tokens > 0


def test_text_goes_in_and_out_of_an_adapted_model(lora: Any, tiny_tokenizer: Any) -> None:
    prompts = ["the cat sat on the cat", "a b"]
    got = lookahead.generate(lora, tiny_tokenizer, prompts, max_new_tokens=24, do_sample=False)
    for prompt, new in zip(prompts, got.token_ids, strict=True):
        ids = torch.tensor([tiny_tokenizer(prompt)["input_ids"]])
        assert new == lora.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()


def test_an_adapter_that_transformers_loads_itself_gives_the_tokens_of_generate(
    lora: Any, looping_llama: PreTrainedModel, tmp_path: Path
) -> None:
    looping_llama.save_pretrained(tmp_path / "base")
    lora.peft_config["first"].base_model_name_or_path = str(tmp_path / "base")
    lora.save_pretrained(tmp_path, selected_adapters=["first"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    expected = served(model)
    assert all_equal(expected, served(lora))
    assert all_equal(drafted(model), expected)
    model.disable_adapters()
    assert all_equal(drafted(model), served(looping_llama))


def test_float32_adapters_on_bfloat16_weights_are_drafted_for(looping_llama: PreTrainedModel) -> None:
    model = adapted(deepcopy(looping_llama).bfloat16(), lora_of("all-linear"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
    arguments: dict[str, Any] = {**RAGGED, "max_new_tokens": 60, "do_sample": False}
    engine = engine_of(model, **arguments, lookahead_config=DRAFTING)
    for _ in engine.run():
        pass
    assert [stats.emitted_tokens for stats in engine.stats] == [60, 60]
    assert sum(stats.accepted_tokens for stats in engine.stats) > 0


PLAIN: dict[str, Adapter] = {
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 5}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 5}),
    "adapters from a token on": lora_of("all-linear", alora_invocation_tokens=[9, 31]),
    "dropout left on": lora_of("all-linear", lora_dropout=0.5),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_what_no_draft_could_be_verified_with_is_decoded_plainly_and_says_so(
    looping_llama: PreTrainedModel, kind: str
) -> None:
    model = adapted(looping_llama, PLAIN[kind])
    if kind == "dropout left on":  # as adapters just put onto a model leave it
        for module in model.modules():
            module.train(isinstance(module, torch.nn.Dropout))
    expected = served(model)
    assert not all_equal(expected, served(looping_llama))
    with pytest.warns(UserWarning, match="decoded plainly"):
        assert all_equal(served(model, custom_generate=lookahead.decode), expected)
    with lookahead.enable(model), pytest.warns(UserWarning, match="decoded plainly"):
        assert all_equal(served(model), expected)
    assert all_equal(served(model), expected)


def test_demanding_drafts_with_prompt_tuning_is_refused(looping_llama: PreTrainedModel) -> None:
    model = adapted(looping_llama, PLAIN["prompt tuning"])
    options: dict[str, Any] = {**CALLS[0], "custom_generate": lookahead.decode}
    with pytest.raises(UnsupportedModelError, match="prompt tuning"):
        model.generate(**options, lookahead_config=LookaheadConfig(window=3))


@pytest.mark.parametrize("config", [None, DRAFTING], ids=["default", "drafts demanded"])
def test_an_adapter_per_row_is_left_to_transformers_by_the_switch(lora: Any, config: LookaheadConfig | None) -> None:
    call: dict[str, Any] = {**CALLS[-1], "adapter_names": ["second", "__base__"]}
    torch.manual_seed(1)
    expected = lora.generate(**call)
    assert not torch.equal(expected, served(lora)[-1])
    torch.manual_seed(1)
    with lookahead.enable(lora, config), pytest.warns(UserWarning, match="transformers alone"):
        assert torch.equal(lora.generate(**call), expected)
    # PEFT's hooks for the rows are gone, and nothing was learned from them.
    plain = served(lora)
    with lookahead.enable(lora), without_warnings():
        assert all_equal(served(lora), plain)


def test_an_adapter_per_row_is_decoded_plainly_by_the_custom_method(lora: Any) -> None:
    call: dict[str, Any] = {**CALLS[-1], "adapter_names": ["second", "__base__"]}
    torch.manual_seed(1)
    expected = lora.generate(**call)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="adapter_names"):
        assert torch.equal(lora.generate(**call, custom_generate=lookahead.decode), expected)
