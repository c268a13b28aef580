"""Recurrent layers in trees: every node has states of its own, and no token changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, cache_utils

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend import torch_backend
from lookahead.backend.choice import backend_for
from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.probes import own_pass, step_logits
from lookahead.backend.protocol import BitPolicy
from lookahead.decoding.conversation import Conversation
from lookahead.drafting.tree import TokenTree
from lookahead.model.state_layers import KEEPS_STATES, states_in
from lookahead.model.state_scope import mixers_of, most_nodes
from tests.support.adversarial_proposers import always_wrong, drafting_by, perfect, random_trees
from tests.support.architectures import STATES
from tests.support.families import FAMILIES, build, cases
from tests.test_chat import answers
from tests.test_families import FIXED, ONE, RAGGED, generate, texts_of

pytestmark = pytest.mark.skipif(not KEEPS_STATES, reason="states are not in caches of this transformers")
FAMILIES_OF_STATES = [FAMILIES[name] for name in STATES]
OFFERS: dict[str, Callable[[list[list[int]]], Any]] = {
    "perfect": perfect,
    "wrong": lambda answers: always_wrong(answers, 101),
    "random": lambda answers: random_trees(101),
}
ROOT = np.zeros(1, np.int32)


@pytest.mark.covering(1)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("family", cases(FAMILIES_OF_STATES, by_feature=True))
def test_no_draft_changes_a_token(family: Any, offer: str, inputs: dict[str, Any], do_sample: bool) -> None:
    model = build(family)
    expected = generate(model, inputs, do_sample=do_sample, max_new_tokens=24)
    with drafting_by(OFFERS[offer](texts_of(expected, inputs))):
        got = generate(
            model,
            inputs,
            do_sample=do_sample,
            max_new_tokens=24,
            custom_generate=lookahead.decode,
            lookahead_config=FIXED,
        )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
def test_layers_with_states_and_windows_beside_others_have_masks_of_their_own(inputs: Any, dtype: torch.dtype) -> None:
    model = build(FAMILIES["Zaya"]).to(dtype)  # its windows are shorter than the text
    options = {"do_sample": False, "max_new_tokens": 24, "custom_generate": lookahead.decode}
    expected = generate(model, inputs, do_sample=False, max_new_tokens=24)
    assert torch.equal(generate(model, inputs, **options, lookahead_config=LookaheadConfig(proposers=())), expected)
    got = generate(model, inputs, **options)
    assert dtype != torch.float32 or torch.equal(got, expected)


def test_a_cache_with_layers_of_an_unknown_kind_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown(cache_utils.LinearAttentionLayer):
        pass

    assert mixers_of(build(FAMILIES["Lfm2"]))
    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "conv", Unknown)
    model = build(FAMILIES["Lfm2"])
    expected = generate(model, ONE, max_new_tokens=8)
    with pytest.warns(UserWarning, match="decoded plainly"):
        got = generate(model, ONE, max_new_tokens=8, custom_generate=lookahead.decode)
    assert not mixers_of(model) and torch.equal(got, expected)


@pytest.mark.parametrize("family", cases(FAMILIES_OF_STATES, by_feature=True))
def test_the_logits_of_every_node_are_those_of_reading_its_path_token_by_token(family: Any) -> None:
    model, rng, is_double = build(family), np.random.default_rng(3), "MoE" not in family.features
    if is_double:  # in which rounding hides nothing
        model = model.double()
    texts = [rng.integers(3, 101, length).tolist() for length in (9, 4)]
    prompts = [list(text) for text in texts]
    backend = backend_for(model, rows=2, capacity=16)
    with backend.serving():
        backend.read([np.array(text, np.int32) for text in texts])
        for row in range(2):
            backend.cache.commit(row, ROOT)
        for size in (7, 1, 12):
            parents = [0, *(int(rng.integers(node)) for node in range(1, size))]
            trees = [TokenTree.from_parents(rng.integers(3, 101, size), parents) for _ in texts]
            scores = backend.score(trees)
            for row, tree in enumerate(trees):
                paths: list[list[int]] = []
                for node in range(size):
                    paths.append([*(paths[parents[node]] if node else []), node])
                    tokens = [*texts[row][len(prompts[row]) :], *tree.tokens[paths[-1]].tolist()]
                    [own] = step_logits(model, prompts[row], tokens)
                    torch.testing.assert_close(scores[row, node], own, rtol=1e-3, atol=1e-5 if is_double else 1e-3)
                taken = paths[int(rng.integers(size))]
                texts[row] += tree.tokens[taken].tolist()
                backend.cache.commit(row, np.array(taken, np.int32))


def test_a_batch_is_decoded_plainly_where_padding_changes_states() -> None:
    model = build(FAMILIES["Qwen3_5"])
    mixer: Any = model.get_submodule(next(iter(mixers_of(model).layers)))
    with torch.no_grad():  # the padding of these layers is then no zero to the recurrence
        mixer.conv1d.bias = torch.nn.Parameter(torch.ones(mixer.conv1d.weight.shape[0]))
    options: Any = {"do_sample": False, "max_new_tokens": 16}
    expected = generate(model, RAGGED, **options)
    with pytest.warns(UserWarning, match="padding of a batch.*decoded plainly"):
        assert torch.equal(generate(model, RAGGED, **options, custom_generate=lookahead.decode), expected)
    assert torch.equal(
        generate(model, ONE, **options, custom_generate=lookahead.decode, lookahead_config=FIXED),
        generate(model, ONE, **options),
    )


@pytest.mark.parametrize("name", ["Mamba", "Bamba"])
def test_a_single_prompt_behind_padding_gives_the_tokens_of_generate(name: str) -> None:
    model, padded = build(FAMILIES[name]), {key: each[:1] for key, each in RAGGED.items()}
    expected = generate(model, padded, do_sample=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoded plainly")
        assert torch.equal(generate(model, padded, do_sample=False, custom_generate=lookahead.decode), expected)


def test_a_tree_whose_root_was_read_with_the_prompt_is_refused() -> None:
    backend = backend_for(build(FAMILIES["Mamba"]), rows=1, capacity=16)
    with backend.serving():
        backend.read([np.array([5, 9, 31], np.int32)])
        with pytest.raises(RuntimeError, match="not committed"):
            backend.score([TokenTree.root(31)])


@pytest.mark.parametrize("name", ["Qwen3_5", "Mamba2"])
def test_an_end_token_inside_an_accepted_draft_ends_the_output_there(name: str) -> None:
    model = build(FAMILIES[name])
    answer = generate(model, ONE, do_sample=False, max_new_tokens=24)
    end = int(answer[0, ONE["input_ids"].shape[1] + 9])
    expected = generate(model, ONE, do_sample=False, max_new_tokens=24, eos_token_id=end)
    with drafting_by(perfect(answer.tolist())):
        got = generate(
            model, ONE, do_sample=False, max_new_tokens=24, eos_token_id=end, custom_generate=lookahead.decode
        )
    assert torch.equal(got, expected) and expected.shape[1] < answer.shape[1]


def test_drafts_end_where_the_context_is_full(tiny_tokenizer: Any) -> None:
    model, ids = build(FAMILIES["Qwen3_5"]), ONE["input_ids"]
    model.config.max_position_embeddings = ids.shape[1] + 9
    answer = generate(model, ONE, do_sample=False, max_new_tokens=24)
    with drafting_by(perfect(answer.tolist())):
        result = lookahead.generate(model, tiny_tokenizer, ids[0], config=FIXED, max_new_tokens=24, do_sample=False)
    assert result.token_ids[0] == answer[0, ids.shape[1] :][:10].tolist()  # the last is read by none
    assert result.stats.target_forwards == 1  # behind the prompt


@pytest.mark.filterwarnings("ignore:the tokenizer '' may belong to another model")
@pytest.mark.parametrize("name", ["FalconH1", "Lfm2"])
def test_rows_that_join_and_leave_keep_their_own_states(name: str, tiny_tokenizer: Any) -> None:
    model, prompts = build(FAMILIES[name]), ["abc", "The cat sat", "a", "The dog ran far", "xyz abc"]
    options: Any = {"max_new_tokens": 12, "do_sample": False}
    alone = [lookahead.generate(model, tiny_tokenizer, prompt, **options).token_ids[0] for prompt in prompts]
    done = lookahead.stream_many(model, tiny_tokenizer, prompts, rows=2, **options)
    assert {each.index: each.token_ids for each in done} == dict(enumerate(alone))


def test_the_model_runs_its_own_code_between_the_steps_of_an_output(tiny_tokenizer: Any) -> None:
    model = build(FAMILIES["Qwen3_5"])
    expected = generate(model, ONE, do_sample=False)
    own = {name: vars(model.get_submodule(name)).get("forward") for name in mixers_of(model).layers}
    pieces = lookahead.stream(model, tiny_tokenizer, ONE["input_ids"][0], max_new_tokens=12, do_sample=False)
    for _ in pieces:
        assert torch.equal(generate(model, ONE, do_sample=False), expected)
    assert own == {name: vars(model.get_submodule(name)).get("forward") for name in own}
    assert pieces.token_ids == expected[0, ONE["input_ids"].shape[1] :].tolist()[:12]


def test_what_keeps_states_elsewhere_is_found_to_have_no_such_layers() -> None:
    assert not mixers_of(build(FAMILIES["MiniMax"])) and not mixers_of(build(FAMILIES["RecurrentGemma"]))
    assert not mixers_of(build(FAMILIES["Llama"]))


@pytest.mark.parametrize("name", ["FalconH1", "Qwen3_5", "Mamba"])
def test_in_half_precision_the_bits_are_those_of_single_tokens(name: str) -> None:
    model = build(FAMILIES[name]).to(torch.bfloat16)
    for seed in range(3):
        torch.manual_seed(seed)
        ids = {"input_ids": torch.randint(3, 101, (1, 9 + seed))}
        expected = generate(model, ids, do_sample=True, max_new_tokens=24, return_dict_in_generate=False)
        for offer in (perfect(expected.tolist()), random_trees(101)):
            with drafting_by(offer):
                got = generate(model, ids, do_sample=True, max_new_tokens=24, custom_generate=lookahead.decode)
            assert torch.equal(got, expected)


def test_in_half_precision_the_bits_do_not_depend_on_how_many_nodes_share_a_parent() -> None:
    sizes = {"hidden_size": 128, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    family = FAMILIES["Qwen3_5"]
    model = build(replace(family, options={**family.options, **sizes})).to(torch.bfloat16)
    prompt, past = np.array([5, 9, 31, 77], np.int32), DynamicCache(config=model.config)
    tree = TokenTree.from_parents(np.arange(3, 3 + MAX_ROWS, dtype=np.int32), [0] * MAX_ROWS)
    backend = backend_for(model, rows=1, capacity=64)
    with backend.serving():
        backend.read([prompt])
        backend.cache.commit(0, ROOT)
        scores = backend.score([tree], BitPolicy.SOLO)[0]
        own_pass(model, prompt, past, 0)
        own_pass(model, tree.tokens[:1], past, 4)
        for node in range(1, MAX_ROWS):
            held = deepcopy(past)
            assert torch.equal(own_pass(model, tree.tokens[node : node + 1], held, 5), scores[node])
            made = backend.cache.states[0].states_after(0, backend.cache.levels, np.array([0, node], np.int32))
            for key, states in states_in(held.layers[0]).items():
                assert torch.equal(states[0], made[key])


def test_a_pass_in_half_precision_says_that_it_is_exact(tiny_tokenizer: Any) -> None:
    model = build(FAMILIES["Qwen3_5"]).to(torch.bfloat16)
    options: Any = {"config": LookaheadConfig(draft="fixed"), "max_new_tokens": 8, "do_sample": False}
    result = lookahead.generate(model, tiny_tokenizer, ONE["input_ids"][0], **options)
    assert result.stats.exactness == "bitwise"
    assert ("states by depth", True) in [(each.path, each.serves) for each in lookahead.backend_report(model).paths]


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        *((name, torch.float32, [64, 128, 150]) for name in ("Lfm2", "Qwen3Next", "Mamba2", "FalconH1")),
        ("Mamba", torch.float32, [150]),  # it resets its states in every pass over several tokens
        ("Qwen3Next", torch.bfloat16, [150]),  # in parts it would have other bits
    ],
)
def test_a_long_prompt_is_read_in_parts_where_no_token_changes(
    name: str, dtype: torch.dtype, sizes: list[int], tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "PREFILL_CHUNK", 64)
    model, told = build(FAMILIES[name]).to(dtype), list[int]()
    prompt = torch.from_numpy(np.random.default_rng(0).integers(3, 60, (1, 150)))
    expected: Any = model.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)
    options: Any = {"do_sample": False, "max_new_tokens": 12, "on_prefill": lambda done, of: told.append(done)}
    result = lookahead.generate(model, tiny_tokenizer, prompt[0], **options)
    assert told == [0, *sizes]
    assert result.token_ids[0] == expected[0, 150:].tolist()


@pytest.mark.parametrize("name", ["Qwen3_5", "FalconH1"])
def test_a_text_is_gone_on_with_from_a_cache_with_states(name: str) -> None:
    model = build(FAMILIES[name])
    options: Any = {"do_sample": False, "return_dict_in_generate": True}

    def turns(**extra: Any) -> list[list[int]]:
        ids, past, texts = ONE["input_ids"], None, []
        for asked in ([7, 8, 9], [11], [4, 4]):
            given = {} if past is None else {"past_key_values": past}
            mask = torch.ones_like(ids)
            output: Any = generate(model, {"input_ids": ids, "attention_mask": mask}, **options, **given, **extra)
            past = output.past_key_values
            assert past.get_seq_length() == output.sequences.shape[1] - 1
            texts.append(output.sequences[0].tolist())
            ids = torch.cat([output.sequences, torch.tensor([asked])], 1)
        return texts

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoded plainly")
        expected = turns()
        assert turns(custom_generate=lookahead.decode) == expected
        with drafting_by(perfect([expected[-1]])):
            got: Any = generate(model, ONE, **options, custom_generate=lookahead.decode)
    assert got.sequences[0].tolist() == expected[0]
    asked = {"input_ids": torch.tensor([expected[1]]), "attention_mask": torch.ones(1, len(expected[1])).long()}
    gone_on = generate(model, {**asked, "past_key_values": got.past_key_values}, do_sample=False)
    assert torch.equal(gone_on, generate(model, asked, do_sample=False))


def test_linear_layers_of_a_recurrent_layer_run_once_a_pass_at_any_depth() -> None:
    model = build(FAMILIES["Qwen3_5"])
    mixer: Any = model.get_submodule(next(iter(mixers_of(model).layers)))
    linears, calls = [each for each in mixer.children() if isinstance(each, torch.nn.Linear)], list[torch.nn.Module]()
    handles = [each.register_forward_hook(lambda module, *_: calls.append(module)) for each in linears]
    backend = backend_for(model, rows=1, capacity=16)
    tree = TokenTree.from_parents([5, 9, 31, 77, 2], [0, 0, 1, 2, 3])
    with backend.serving():
        backend.read([np.array([5, 9, 31], np.int32)])
        backend.cache.commit(0, ROOT)
        backend.score([tree])  # which shows the layer that makes the output
        calls.clear()
        backend.score([tree])
    for handle in handles:
        handle.remove()
    assert len(linears) > 3 and sorted(map(id, calls)) == sorted(map(id, linears))


def test_the_states_of_a_pass_bound_its_nodes_unless_the_options_do() -> None:
    large = {**FAMILIES["Mamba2"].options, "state_size": 16384}
    model = build(replace(FAMILIES["Mamba2"], options=large))
    most, offered = most_nodes(model, 1), list[int]()
    assert most_nodes(model, 2) == most // 2 and 2 <= most < 16

    def offer(row: int, text: list[int], max_nodes: int) -> Any:
        offered.append(max_nodes)

    for config in (None, LookaheadConfig(max_nodes=24)):
        with drafting_by(offer):
            generate(model, ONE, do_sample=False, custom_generate=lookahead.decode, lookahead_config=config)
    assert {*offered} == {most, 24}


@pytest.mark.parametrize("name", ["Qwen3_5", "Mamba", "Jamba", "Zamba"])
def test_every_answer_of_a_chat_is_that_of_the_whole_history(name: str, chat_tokenizer: Any) -> None:
    model, questions = build(FAMILIES[name]), ["abab", "what?", "and xyz"]
    conversation = Conversation(model, chat_tokenizer, max_new_tokens=12, do_sample=False, pad_token_id=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ["".join(conversation.ask(question)) for question in questions]
        assert got == answers(model, chat_tokenizer, *questions)
        conversation.messages[1]["content"] = "never said"  # which the states hold otherwise, and cannot take back
        edited = [*conversation.messages, {"role": "user", "content": "so?"}]
        expected = lookahead.generate(model, chat_tokenizer, edited, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert ["".join(conversation.ask("so?"))] == expected.texts
