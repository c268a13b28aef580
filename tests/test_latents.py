"""Latent attention whose keys and values are kept: outputs are those of transformers, whatever happens to the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import lookahead
from lookahead.backend.choice import backend_for
from lookahead.backend.cpu import fused_layers, latents, layer_checks
from lookahead.backend.protocol import BitPolicy
from lookahead.drafting.tree import TokenTree
from lookahead.model import families
from lookahead.model.facts import CACHE
from tests.support.adversarial_proposers import always_wrong, among_decoys, drafting_by, random_trees
from tests.support.declared import both, has_kernels, made, prompt
from tests.support.small_layers import HALF, SINGLE, on_x86

pytestmark = [on_x86, has_kernels]
NAMES = "DeepseekV2", "DeepseekV3", "Glm4MoeLite"
SIZES: dict[str, dict[str, Any]] = {
    "alike": {}, "other": {"v_head_dim": 32}, "halves": {"rope_interleave": False},
    "packed": {"v_head_dim": 32, "q_lora_rank": 256, "kv_lora_rank": 224},
    "packed, alike": {"q_lora_rank": None, "kv_lora_rank": 224, "attention_bias": True},
}  # fmt: skip
KINDS = [(name, size) for name in NAMES for size in SIZES if size != "halves" or name != "DeepseekV2"]
TEXT = np.arange(7, 47, dtype=np.int32)
TREE = TokenTree.from_parents([46, 9, 8, 7, 30, 31], [0, 0, 0, 1, 2, 3])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens of every call that makes keys and values of latents."""
    made, own = list[int](), latents._expand
    monkeypatch.setattr(latents, "_expand", lambda *args: (made.append(args[1].shape[1]), own(*args))[1])
    yield made


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The latent attentions whose products are jobs of a pass."""
    parts, own = list[Any](), latents.add_projections
    monkeypatch.setattr(latents, "add_projections", lambda *args: (parts.append(args[0]), own(*args))[1])
    return parts


def latent(name: str, size: str = "other", dtype: torch.dtype = HALF) -> Any:
    return made(name, dtype, **SIZES[size])


def own_logits(model: Any, cache: DynamicCache, tokens: Any) -> torch.Tensor:
    """The last logits of a pass of transformers."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(map(int, tokens))]), **{CACHE: cache}).logits
    return logits[0, -1]


def assert_alike(ours: torch.Tensor, own: torch.Tensor) -> None:
    # Prompts behind a text have other sums; keys and values of other tokens change logits by their own size.
    torch.testing.assert_close(ours, own, rtol=0, atol=0.04 * float(own.std()) if own.dtype == HALF else 1e-3)


class Conversation:
    """A text in a backend of ours and in a cache of transformers."""

    def __init__(self, model: Any) -> None:
        self.model, self.own = model, DynamicCache(config=model.config)
        self.backend, self.text = backend_for(model, rows=1, capacity=64), list[int]()

    def read(self, tokens: Any) -> None:
        with self.backend.serving():
            self.text += tokens.tolist()
            ours = self.backend.read([np.array(self.text, np.int32)])
            self.backend.cache.commit(0, np.zeros(1, np.int32))
        assert_alike(ours.flatten(), own_logits(self.model, self.own, tokens))

    def verify(self, tree: TokenTree, path: list[int]) -> None:
        with self.backend.serving():
            policy = BitPolicy.SOLO if self.model.dtype == HALF else BitPolicy.ROUNDED
            ours = self.backend.score([tree], policy)[0]
            self.backend.cache.commit(0, np.array(path, np.int32))
        self.text += tree.tokens[path].tolist()
        for node in path:
            assert_alike(ours[node], own_logits(self.model, self.own, tree.tokens[node : node + 1]))

    def cut(self, length: int) -> None:
        with torch.inference_mode():
            self.backend.cache.wipe(0, length)
        self.own.crop(length - self.own.get_seq_length())
        del self.text[length:]


@pytest.mark.parametrize(("name", "size"), KINDS)
def test_keys_and_values_are_made_once_with_the_bits_of_generate(name, size, calls, rows, products):
    model = latent(name, size)
    own, ours = both(model, prompt(), do_sample=False)
    assert all(map(torch.equal, own.logits, ours.logits)) and torch.equal(own.sequences, ours.sequences)
    assert calls and rows and bool(products) is size.startswith("packed"), lookahead.backend_report(model)
    rows.clear(), calls.clear()
    own, ours = both(model, prompt(90), do_sample=False)
    assert all(map(torch.equal, own.logits, ours.logits))
    assert max(rows) >= 89 and sum(rows) < model.config.num_hidden_layers * (90 + 2 * sum(calls))


@pytest.mark.parametrize("size", ["alike", "other", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_in_float32_the_tokens_are_those_of_generate(name, size, calls, rows):
    model = latent(name, size, SINGLE)
    for length in (3, 36, 150):
        own, ours = both(model, prompt(length), do_sample=False)
        assert torch.equal(own.sequences, ours.sequences), length
    assert calls and rows


@pytest.mark.parametrize("name", NAMES)
def test_sampled_tokens_are_those_of_generate(name, rows):
    own, ours = both(latent(name), prompt(), do_sample=True, temperature=1.3)
    assert torch.equal(own.sequences, ours.sequences) and rows


@pytest.mark.parametrize(("name", "size"), [("DeepseekV2", "other"), *((name, "packed") for name in NAMES)])
def test_hostile_drafts_change_no_bit(name, size, rows):
    model = latent(name, size)
    options = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    own = model.generate(prompt(), **options)
    answers = own.sequences.tolist()
    for offer in (always_wrong(answers, 101), among_decoys(answers, 101), random_trees(101)):
        with drafting_by(offer):
            ours = model.generate(prompt(), **options, custom_generate=lookahead.decode)
        assert all(map(torch.equal, own.logits, ours.logits))
    assert rows


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize(("name", "size"), [("DeepseekV2", "other"), *((name, "packed") for name in NAMES)])
def test_a_text_that_is_cut_and_continued_is_attended_to_as_it_is(name, size, dtype, rows):
    talk = Conversation(latent(name, size, dtype))
    talk.read(TEXT[:-1])
    talk.verify(TREE, [0, 1, 3, 5])
    talk.verify(TREE, [0, 2, 4])
    talk.cut(20)
    talk.read(TEXT[5:25])
    talk.verify(TREE, [0, 1])
    talk.cut(39)
    talk.verify(TREE, [0, 2, 4])
    talk.cut(0)
    talk.read(TEXT[::-1])
    talk.verify(TREE, [0])
    assert rows


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_a_beginning_that_is_copied_from_another_text_is_attended_to(dtype, rows):
    model = latent("DeepseekV3", "packed", dtype)
    source, talk = Conversation(model), Conversation(model)
    talk.read(TEXT[::-1])
    talk.verify(TREE, [0, 1])
    talk.cut(0)
    source.read(TEXT[:-1])
    source.verify(TREE, [0, 1])
    with torch.inference_mode():
        copy = source.backend.cache.extract_row(0)
        kept = [tuple(part[:, :38] for part in copy.kv[at]) for at in sorted(copy.kv)]
        talk.backend.cache.copy_prefix_from(0, kept, 38, copy.origin)
    talk.own = source.own
    talk.own.crop(38 - talk.own.get_seq_length())
    talk.verify(TREE, [0, 1])
    assert rows


@pytest.mark.parametrize("name", NAMES)
def test_conversations_in_turn_through_one_engine_get_their_own_tokens(name, tiny_tokenizer, rows):
    model = latent(name, dtype=SINGLE)
    texts = [prompt(length, seed=seed)[0].tolist() for length, seed in ((36, 1), (21, 2), (45, 1), (12, 3))]
    for count in (1, 2):
        for _ in range(2):  # again, with texts that are kept
            done = list(
                lookahead.stream_many(
                    model, tiny_tokenizer, texts, rows=count, prefix_bytes=1 << 24, max_new_tokens=12, do_sample=False
                )
            )
            for each in done:
                own = model.generate(torch.tensor([texts[each.index]]), max_new_tokens=12, do_sample=False)
                assert each.token_ids == own[0, len(texts[each.index]) :].tolist()
    assert rows


def test_rows_of_other_lengths_get_the_tokens_of_generate(rows):
    model, ids = latent("DeepseekV3", dtype=SINGLE), prompt(rows=3)
    mask = torch.ones_like(ids)
    for row, length in enumerate((0, 7, 20)):
        ids[row, :length], mask[row, :length] = 0, 0
    options = {"output_logits": False, "return_dict_in_generate": False, "do_sample": False}
    own, ours = both(model, ids, attention_mask=mask, **options)
    assert torch.equal(own, ours)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_a_changed_weight_makes_all_keys_and_values_anew(dtype):
    model = latent("DeepseekV3", "packed", dtype)
    talk = Conversation(model)
    talk.read(TEXT[:-1])
    talk.verify(TREE, [0, 1])
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.self_attn.kv_b_proj.weight.neg_()
    talk.verify(TREE, [0, 1])


@pytest.mark.parametrize("size", ["other", "packed"])
def test_what_does_not_fit_in_memory_is_made_in_every_pass(size, monkeypatch, calls, rows):
    model = latent("DeepseekV3", size)
    monkeypatch.setattr(latents, "memory_bytes", lambda: 0)
    own, ours = both(model, prompt(), do_sample=False)
    assert all(map(torch.equal, own.logits, ours.logits))
    assert calls and max(rows, default=0) <= 3  # of the comparison of a layer


def test_code_of_another_release_runs_as_it_is(monkeypatch):
    own = modeling_deepseek_v3.DeepseekV3Attention.forward

    def forward(self: Any, hidden_states: torch.Tensor, **options: Any) -> Any:
        out, weights = own(self, hidden_states, **options)
        return out * 0.5, weights

    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3Attention, "forward", forward)
    model = latent("DeepseekV3", dtype=SINGLE)
    expected, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(expected.sequences, ours.sequences)
    found = fused_layers.find_fused(model)
    assert not found.layers and found.reason == "the code that they replace is not as shipped"


def test_another_rotation_than_the_models_is_found_by_comparison(monkeypatch):
    family = next(family for family in families.FAMILIES if family.name == "DeepseekV3")
    rotate = modeling_deepseek_v3.apply_rotary_pos_emb

    def wrong(layer: Any) -> Any:
        part, *others = family.layer(layer)
        mixer = part.mixer._replace(rotate=lambda query, key, positions: rotate(query, key, *positions))
        return part._replace(mixer=mixer), *others

    monkeypatch.setattr(families, "_BY_LAYER", {(family.file, "DeepseekV3DecoderLayer"): family._replace(layer=wrong)})
    monkeypatch.setattr(layer_checks, "_probed", {})
    model = latent("DeepseekV3", dtype=SINGLE)
    own, ours = both(model, prompt(), do_sample=False)
    assert torch.equal(own.sequences, ours.sequences)
    assert "compute differently from their declaration" in fused_layers.find_fused(model).reason


@pytest.mark.parametrize("shape", [(8, 64, 32), (16, 96, 64), (16, 192, 128), (3, 48, 80)])
def test_torch_multiplies_heads_of_two_sizes_in_float32(shape):
    assert latents._has_bits_in_float32(*shape, ())
