"""Whatever changes what a model computes changes its stamp, and nothing kept outlives it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import lookahead
from lookahead.decoding.conversation import Conversation
from lookahead.model import stamp
from lookahead.model.facts import CACHE
from lookahead.model.model_state import recognise, state_of
from lookahead.model.stamp import ContentTable, digest_of, modules_of, stamp_of
from tests.support.families import FAMILIES, build

DOCUMENT = [*range(5, 85)]
QUESTIONS = [[*DOCUMENT, 20, 21, 22], [*DOCUMENT, 40, 41]]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
ROOM = 1 << 26


@functools.cache
def original() -> LlamaForCausalLM:
    """Too large to be read whole: matrices of more than 32 KiB, of 20 MiB together."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=101, num_key_value_heads=8, initializer_range=0.1, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config).eval()


def down(model: Any) -> Any:
    return model.model.layers[1].mlp.down_proj


def grown(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach() * 1.5 + 0.01


def by_numpy(model: Any) -> None:
    down(model).weight.detach().numpy()[:] *= 1.5


def by_an_optimizer(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(input_ids=torch.tensor([DOCUMENT]), labels=torch.tensor([DOCUMENT])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def by_shared_memory(model: Any) -> None:
    weight = down(model).weight
    torch.frombuffer(weight.detach().numpy(), dtype=torch.float32).mul_(1.5)


def by_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        down(model).weight.data.mul_(1.5)


@torch.no_grad()
def without_gradients(model: Any) -> None:
    down(model).weight[3, 5] += 40  # a single number


def of_buffers(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(0.7)


def by_another_buffer(model: Any) -> None:
    model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq * 0.7, persistent=False)


def by_transposing(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.t()  # the same memory, as square


def by_expanding(model: Any) -> None:
    weight = model.model.norm.weight
    weight.data = weight.data[:1].expand(len(weight))


def by_merging_an_adapter(model: Any) -> None:
    torch.manual_seed(1)
    down(model).weight.data += torch.randn(512, 2) @ torch.randn(2, 1024) * 0.05


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data.copy_": lambda model: down(model).weight.data.copy_(grown(down(model).weight)),
    "data of another tensor": lambda model: setattr(down(model).weight, "data", grown(down(model).weight)),
    "data.mul_": lambda model: down(model).weight.data.mul_(1.5),
    "a view of numpy": by_numpy,
    "shared memory": by_shared_memory,
    "inference mode": by_inference_mode,
    "detach().mul_": lambda model: down(model).weight.detach().mul_(1.5),
    "one number without gradients": without_gradients,
    "a row": lambda model: model.lm_head.weight.data[9].mul_(-2),
    "a row of the embedding": lambda model: model.model.embed_tokens.weight.data[7].mul_(-2),
    "a column": lambda model: down(model).weight.data[:, 77].add_(2),
    "a block of a head": lambda model: model.model.layers[0].self_attn.v_proj.weight.data[64:128, 128:192].mul_(-3),
    "a norm": lambda model: model.model.norm.weight.data.mul_(1.7),
    "one number of a norm": lambda model: model.model.norm.weight.data[17:18].mul_(30),
    "a transposed view": by_transposing,
    "an expanded norm": by_expanding,
    "a norm's size": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "a buffer": of_buffers,
    "another buffer": by_another_buffer,
    "another parameter": lambda model: setattr(
        down(model), "weight", torch.nn.Parameter(grown(down(model).weight))
    ),
    "a state dict": lambda model: model.load_state_dict(
        {name: grown(each) for name, each in model.state_dict().items()}
    ),
    "an optimizer": by_an_optimizer,
    "an adapter that is merged": by_merging_an_adapter,
    "an initialisation": lambda model: torch.nn.init.normal_(down(model).weight, std=0.2),
    "three quarters of a wide matrix": lambda model: model.model.layers[2].mlp.down_proj.weight.data[:, 256:].mul_(-1),
    "a number of numpy": lambda model: setattr(model.model.norm, "variance_epsilon", np.float32(0.5)),
    "a tensor of a module": lambda model: setattr(
        model.model.layers[0].self_attn, "scaling", torch.tensor(0.4)
    ),
    "another scale": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.4),
    "another module": lambda model: setattr(
        model.model.layers[2], "mlp", copy.deepcopy(model.model.layers[0].mlp)
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_torch_offers_changes_the_stamp(change: str) -> None:
    model = copy.deepcopy(original())
    before = stamp_of(model).number
    assert stamp_of(model).number == before
    CHANGES[change](model)
    assert stamp_of(model).number != before


def alone(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    tokens: list[int] = model.generate(ids, **GREEDY, pad_token_id=0)[0, len(prompt) :].tolist()
    return tokens


def test_a_row_of_a_transposed_weight_is_read_too() -> None:
    model = copy.deepcopy(original())
    down(model).weight = torch.nn.Parameter(down(model).weight.detach().t().contiguous().t())
    numbers = [stamp_of(model).number]
    for row in range(0, 512, 16):
        down(model).weight.data[row].mul_(-2)
        numbers.append(stamp_of(model).number)
    assert len(set(numbers)) == len(numbers)


def test_minus_one_and_minus_two_are_different_numbers() -> None:
    model = copy.deepcopy(original())
    model.model.layers[0].mlp.act_fn = torch.nn.Hardtanh()
    before = stamp_of(model).number
    model.model.layers[0].mlp.act_fn.min_val = -2.0
    assert stamp_of(model).number != before


OF_A_KIND = (
    "data.copy_", "data of another tensor", "a row of the embedding", "an expanded norm", "a buffer", "another module",
    "another scale", "a norm's size",
)  # fmt: skip


@pytest.mark.parametrize("change", OF_A_KIND)
def test_a_text_read_with_other_weights_is_read_again(change: str, tiny_tokenizer: Any) -> None:
    model = copy.deepcopy(original())

    def outputs(prompts: Any) -> tuple[list[list[int]], list[int]]:
        done = list(lookahead.stream_many(model, tiny_tokenizer, prompts, rows=1, prefix_bytes=ROOM, **GREEDY))
        return [each.token_ids for each in done], [each.stats.reused_tokens for each in done]

    assert outputs(QUESTIONS)[1] == [0, len(DOCUMENT)]
    CHANGES[change](model)
    with torch.no_grad():
        expected = [alone(model, prompt) for prompt in QUESTIONS]
    assert outputs(QUESTIONS) == (expected, [0, len(DOCUMENT)])


def test_a_change_in_the_middle_of_many_prompts_is_noticed_at_the_next_one(tiny_tokenizer: Any) -> None:
    model = copy.deepcopy(original())
    done = lookahead.stream_many(model, tiny_tokenizer, iter(QUESTIONS * 2), rows=1, prefix_bytes=ROOM, **GREEDY)
    assert [next(done).token_ids for _ in range(2)] == [alone(model, prompt) for prompt in QUESTIONS]
    CHANGES["data.copy_"](model)
    assert [each.token_ids for each in done] == [alone(model, prompt) for prompt in QUESTIONS]


@pytest.mark.parametrize("change", ["data.copy_", "a buffer", "a row of the embedding"])
def test_a_conversation_goes_on_with_new_weights(change: str, chat_tokenizer: Any) -> None:
    model = copy.deepcopy(original())
    own = Conversation(model, chat_tokenizer, **{**GREEDY, "pad_token_id": 0})
    "".join(own.ask("abab"))
    CHANGES[change](model)
    fresh = Conversation(copy.deepcopy(model), chat_tokenizer, **{**GREEDY, "pad_token_id": 0})
    fresh.history, fresh.messages = ([dict(each) for each in own.history] for _ in range(2))
    assert "".join(own.ask("cdcd")) == "".join(fresh.ask("cdcd"))


def test_a_cache_of_the_callers_own_is_his_to_drop() -> None:
    model = copy.deepcopy(original())
    ids = torch.tensor([DOCUMENT])
    outputs = []
    for options in ({}, {"custom_generate": lookahead.decode}):
        model, past = copy.deepcopy(original()), DynamicCache(config=model.config)
        first = model.generate(ids, **GREEDY, **{CACHE: past}, **options)
        CHANGES["data.copy_"](model)
        outputs.append(model.generate(torch.cat([first, ids], 1), **GREEDY, **{CACHE: past}, **options))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mixtral", "Qwen3_5", "GPT2", "GptOss"])
def test_calls_passes_and_probes_leave_the_stamp_as_it_is(name: str) -> None:
    model = build(FAMILIES[name])
    before = stamp_of(model).number
    recognise(model)
    model.generate(torch.tensor([DOCUMENT[:20]]), **GREEDY, custom_generate=lookahead.decode)
    with lookahead.enable(model):
        assert stamp_of(model).number == before
    assert state_of(model).plan is not None and state_of(model).stamp_number == before


def test_a_plan_that_comes_back_brings_its_verdicts_and_no_texts() -> None:
    model = copy.deepcopy(original())
    first = recognise(model)
    first.prefixes = object()
    scaling, model.model.layers[0].self_attn.scaling = model.model.layers[0].self_attn.scaling, 0.4
    assert recognise(model) is not first
    model.model.layers[0].self_attn.scaling = scaling
    assert recognise(model) is first
    assert first.prefixes is None


def test_a_digest_is_the_same_in_every_copy_and_of_plain_memory_alone() -> None:
    model = original()
    assert digest_of(model) == digest_of(copy.deepcopy(model))
    other = copy.deepcopy(model)
    CHANGES["a row"](other)
    assert digest_of(other) != digest_of(model)
    assert digest_of(copy.deepcopy(model).to("meta")) is None


def test_modules_are_those_of_torch_whatever_is_shared_or_missing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    model.add_module("again", model[0])
    model.register_module("none", None)
    assert set(modules_of(model)) == set(model.modules()) and len(modules_of(model)) == len(list(model.modules()))


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 31])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 16])
def test_every_row_and_every_column_has_a_sample(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp, "_WHOLE", 0)
    array = torch.zeros(rows, width, dtype=torch.int64)
    table = ContentTable.of([array], reads_all=False)
    before = table.contents([array])
    sampled = torch.zeros_like(array, dtype=torch.bool)
    for place in np.ndindex(*array.shape):
        array[place] = 1
        sampled[place] = table.contents([array]) != before
        array[place] = 0
    assert sampled.any(1).all() and sampled.any(0).all()
    assert sampled.sum() == max(rows, width)
