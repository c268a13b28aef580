"""What `return_dict_in_generate` gives, and chats that go on from their own cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel, StaticCache

import lookahead
from lookahead.errors import UnsupportedModelError
from lookahead.model import facts as cache_module
from lookahead.model.facts import CACHE, cache_in, tokens_in
from tests.support.families import ENCODER_DECODERS, FAMILIES, build

IDS = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])
RAGGED = {
    "input_ids": torch.tensor([[0] * 5 + [5, 9, 31, 5, 9, 31, 77], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]]),
    "attention_mask": torch.tensor([[0] * 5 + [1] * 7, [1] * 12]),
}


@pytest.fixture(scope="module")
def sliding() -> PreTrainedModel:
    """A model whose first layer keeps a window of 8 tokens only."""
    config = Gemma2Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        initializer_range=0.4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(params=["llama", "sliding"])
def model(request: pytest.FixtureRequest, tiny_llama: PreTrainedModel, sliding: PreTrainedModel) -> PreTrainedModel:
    return tiny_llama if request.param == "llama" else sliding


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 9, "temperature": 0.7}])
@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, RAGGED], ids=["one", "ragged"])
def test_scores_and_logits_are_those_of_generate(
    tiny_llama: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 20}
    torch.manual_seed(0)
    expected = tiny_llama.generate(**inputs, **wanted, **options)
    torch.manual_seed(0)
    got = tiny_llama.generate(**inputs, **wanted, **options, custom_generate=lookahead.decode)
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(got[name]) == len(expected[name]) == 20
        torch.testing.assert_close(torch.stack(got[name]), torch.stack(expected[name]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pads", ["with the end", "with another token"])
@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "top_k": 9}, {"repetition_penalty": 1.2}]
)
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_transition_scores_are_those_of_generate_and_zero_behind_the_end_of_a_row(
    name: str, options: dict[str, Any], pads: str
) -> None:
    model = build({**FAMILIES, **ENCODER_DECODERS}[name])
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 20}
    begin = 1 if name == "T5" else IDS.shape[1]

    def call(**more: Any) -> Any:
        torch.manual_seed(0)
        return model.generate(**RAGGED, **asked, **options, **more)

    free = call(eos_token_id=None, pad_token_id=0).sequences[:, begin:]
    end = next(token for token in free[1, 2:].tolist() if token not in free[0].tolist())
    ends = {"eos_token_id": end, "pad_token_id": end if pads == "with the end" else 3}
    expected, got = call(**ends), call(**ends, custom_generate=lookahead.decode)
    assert torch.equal(got.sequences, expected.sequences)
    new = got.sequences[:, begin:]
    length = new[1].tolist().index(end) + 1
    assert length < new.shape[1] == 20
    for kept in ("scores", "logits"):
        for normalized in (False, True):
            ours, theirs = (
                model.compute_transition_scores(out.sequences, out[kept], normalize_logits=normalized)
                for out in (got, expected)
            )
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(ours[1, :length], theirs[1, :length], rtol=1e-3, atol=1e-4)
            assert not ours[1, length:].any()


def test_logits_show_what_a_processor_wrote_in_place_as_those_of_generate_do(tiny_llama: PreTrainedModel) -> None:
    def forbid(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] -= 50
        return scores

    options: dict[str, Any] = {"logits_processor": [forbid], "return_dict_in_generate": True, "output_logits": True}
    expected = tiny_llama.generate(IDS, max_new_tokens=9, do_sample=False, **options)
    got = tiny_llama.generate(IDS, max_new_tokens=9, do_sample=False, **options, custom_generate=lookahead.decode)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_the_cache_that_comes_out_is_that_of_generate(model: PreTrainedModel) -> None:
    for inputs in ({"input_ids": IDS}, RAGGED):
        options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
        expected = model.generate(**inputs, **options)[CACHE]
        got = model.generate(**inputs, **options, custom_generate=lookahead.decode)[CACHE]
        mask = inputs.get("attention_mask")
        assert got.get_seq_length() == expected.get_seq_length()
        for ours, theirs in zip(got.layers, expected.layers, strict=True):
            for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                assert a.shape == b.shape
                if mask is not None and a.shape[2] > mask.shape[1]:
                    a, b = (x[:, :, 5:] for x in (a, b))  # what stands at padding is never attended to
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled beams": {"num_beams": 3, "do_sample": True},
}


def parts_of(cache: Any) -> list[Any]:
    """The cache itself, or both of an encoder-decoder model."""
    return [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)]


def assert_same_cache(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert getattr(ours, "is_updated", None) == getattr(theirs, "is_updated", None)
    for mine, other in zip(parts_of(ours) or [ours], parts_of(theirs) or [theirs], strict=True):
        assert type(mine) is type(other) and mine.get_seq_length() == other.get_seq_length()
        for layer, expected in zip(mine.layers, other.layers, strict=True):
            assert type(layer) is type(expected)
            torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(layer.values, expected.values, rtol=1e-3, atol=1e-3)


@pytest.mark.covering(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Bart", "T5", "M2M100"])
def test_a_cache_that_comes_out_is_transformers_own_and_works_as_it_does(name: str, rows: int, mode: str) -> None:
    model: Any = build({**FAMILIES, **ENCODER_DECODERS}[name])
    options = {**MODES[mode], "max_new_tokens": 9, "return_dict_in_generate": True, "eos_token_id": None}
    caches = []
    for method in ({}, {"custom_generate": lookahead.decode}):
        torch.manual_seed(0)
        caches.append(model.generate(IDS.repeat(rows, 1), **options, **method)[CACHE])
    assert_same_cache(*caches)
    copies = len(parts_of(caches[0])[0].layers[0].keys if parts_of(caches[0]) else caches[0].layers[0].keys)
    order, tokens = torch.arange(copies).flip(0), torch.full((copies, 1), 7)
    read = {"encoder_outputs": model.get_encoder()(IDS.repeat(copies, 1))} if name in ENCODER_DECODERS else {}
    logits = []
    for cache in caches:
        for part in parts_of(cache)[1:]:
            part.layers[0].keys.mul_(1.5)  # every row has memory of its own
        cache.reorder_cache(order)
        if name != "Gemma3":  # of a full window transformers crops nothing
            cache.crop(-2)
        logits.append(model(**{"decoder_input_ids" if read else "input_ids": tokens, **read, CACHE: cache}).logits)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(order)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)
    assert_same_cache(*caches)


@pytest.mark.parametrize("name", ["Llama", "Bart"])
@pytest.mark.parametrize("mode", MODES)
def test_without_a_cache_none_comes_out(name: str, mode: str) -> None:
    model: Any = build({**FAMILIES, **ENCODER_DECODERS}[name])
    options = {**MODES[mode], "max_new_tokens": 4, "return_dict_in_generate": True, "use_cache": False}
    got = model.generate(IDS, **options, custom_generate=lookahead.decode)
    assert CACHE not in got and getattr(got, CACHE) is None


@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, RAGGED], ids=["one", "ragged"])
def test_a_chat_goes_on_from_its_own_cache(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    def chat(**extra: Any) -> tuple[torch.Tensor, DynamicCache]:
        cache, ids, mask = DynamicCache(config=model.config), inputs["input_ids"], inputs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        for turn in range(3):
            out = model.generate(
                ids,
                attention_mask=mask,
                **{CACHE: cache},
                max_new_tokens=15,
                do_sample=False,
                return_dict_in_generate=True,
                **extra,
            )
            assert out[CACHE] is cache
            asked = torch.full((len(ids), 3), 20 + turn)
            ids = torch.cat([out.sequences, asked], 1)
            mask = torch.cat([mask, torch.ones(len(ids), ids.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
        return ids, cache

    expected, theirs = chat()
    got, ours = chat(custom_generate=lookahead.decode)
    assert torch.equal(got, expected)
    assert ours.get_seq_length() == theirs.get_seq_length()
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        padding = 5 if a.keys.shape[2] > 12 else 0  # a full window has left the padding behind
        torch.testing.assert_close(a.values[:, :, padding:], b.values[:, :, padding:], rtol=1e-4, atol=1e-4)


def test_a_chat_goes_on_from_a_cache_with_layers_that_read_those_of_others() -> None:
    model = build(FAMILIES["Gemma3n"])
    cache, ids = DynamicCache(config=model.config), IDS
    for _ in range(3):
        options: dict[str, Any] = {CACHE: cache, "max_new_tokens": 9, "do_sample": False}
        ids = model.generate(ids, **options, custom_generate=lookahead.decode)
    assert torch.equal(ids, model.generate(IDS, max_new_tokens=27, do_sample=False))


@pytest.mark.parametrize("ours_first", [True, False])
def test_turns_may_be_taken_by_either(tiny_llama: PreTrainedModel, ours_first: bool) -> None:
    cache, ids = DynamicCache(), IDS
    for turn in range(4):
        extra: dict[str, Any] = {"custom_generate": lookahead.decode} if (turn % 2 == 0) == ours_first else {}
        ids = tiny_llama.generate(ids, **{CACHE: cache}, max_new_tokens=10, do_sample=False, **extra)
    assert torch.equal(ids, tiny_llama.generate(IDS, max_new_tokens=40, do_sample=False))


def test_a_cache_of_another_type_is_continued_by_transformers(tiny_llama: PreTrainedModel) -> None:
    cache = StaticCache(config=tiny_llama.config, max_cache_len=64)
    tiny_llama.generate(IDS, **{CACHE: cache}, max_new_tokens=3, do_sample=False)
    ids = torch.cat([IDS, torch.full((1, 5), 7)], 1)
    with pytest.warns(UserWarning, match="StaticCache"):
        tiny_llama.generate(ids, **{CACHE: cache}, max_new_tokens=3, custom_generate=lookahead.decode)


@pytest.mark.parametrize("make", [lambda ids: (ids.repeat(2, 1), torch.float32), lambda ids: (ids, torch.bfloat16)])
def test_a_cache_of_other_rows_or_of_a_narrower_type_is_refused_by_name(tiny_llama: PreTrainedModel, make: Any) -> None:
    cache, (ids, dtype) = DynamicCache(config=tiny_llama.config), make(IDS)
    tiny_llama(IDS[:, :9], **{CACHE: cache})
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    with pytest.raises(UnsupportedModelError, match=r"1 rows, got input_ids of 2|bfloat16.* narrower .*float32"):
        tiny_llama.generate(ids, **{CACHE: cache}, max_new_tokens=3, custom_generate=lookahead.decode)


def test_a_text_shorter_than_its_cache_is_refused(tiny_llama: PreTrainedModel) -> None:
    cache = DynamicCache()
    tiny_llama.generate(IDS, **{CACHE: cache}, max_new_tokens=9, do_sample=False)
    with pytest.raises(UnsupportedModelError, match=r"whole text|the shape of input_ids"):
        tiny_llama.generate(
            IDS,
            attention_mask=torch.ones(1, 32),
            **{CACHE: cache},
            max_new_tokens=3,
            custom_generate=lookahead.decode,
        )


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_found_by_the_name_of_every_release_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "CACHE", "cache")
    cache = DynamicCache()
    assert cache_in({"cache": None, "past_key_values": None, name: cache}) is cache
    assert cache_in({}) is None


def test_a_cache_that_counts_no_tokens_holds_none(tiny_llama: PreTrainedModel) -> None:
    class States(DynamicCache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            raise ValueError("no layer of attention")

    filled = DynamicCache()
    tiny_llama(torch.tensor([[5, 6, 7]]), **{CACHE: filled})
    assert [tokens_in(cache) for cache in (None, DynamicCache(), filled, States())] == [0, 0, 3, 0]
