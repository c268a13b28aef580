"""Attention over keys that an indexer picks: trees through its own code, and plain decoding where that is not known."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import PreTrainedModel

import lookahead
from lookahead.backend.probes import heeds_padding, picking_few
from lookahead.backend.support import support_of
from lookahead.model.facts import picks_keys
from lookahead.model.model_state import recognise
from tests.support.families import FAMILIES, IS_NEWEST, build
from tests.test_families import FIXED, ONE, generate

pytestmark = pytest.mark.skipif(not IS_NEWEST, reason="transformers has no such layers")
NAME = "DeepseekV32"


def indexers(model: PreTrainedModel) -> list[Any]:
    return [each for each in model.modules() if "index_topk" in vars(each)]


def shape_of(model: PreTrainedModel) -> str:
    return support_of(model, shortest=1, max_length=64).shape


def test_a_copy_that_picks_few_keys_has_the_weights_of_the_model_and_leaves_it_alone() -> None:
    model = build(FAMILIES[NAME])
    copied = picking_few(model)
    assert copied is not None
    assert [each.index_topk for each in indexers(copied)] == [4, 4]
    assert [each.index_topk for each in indexers(model)] == [6, 6]
    own = {name: each.data_ptr() for name, each in model.named_parameters()}
    assert {name: each.data_ptr() for name, each in copied.named_parameters()} == own
    assert picking_few(build(FAMILIES["Llama"])) is None


def test_an_indexer_that_counts_slots_is_found_with_short_probes() -> None:
    family = replace(FAMILIES[NAME], options={**FAMILIES[NAME].options, "index_topk": 64})
    assert shape_of(build(family)) == "trees"
    model = build(family)
    kind = type(indexers(model)[0])

    class Newest(kind):  # type: ignore[misc,valid-type]
        def forward(
            self, hidden_states: Any, q_resid: Any, positions: Any, mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            super().forward(hidden_states, q_resid, positions, mask, *args, **kwargs)
            slots = torch.arange(mask.shape[-1]).expand(*hidden_states.shape[:2], -1)
            return slots.topk(min(self.index_topk, mask.shape[-1])).indices.to(torch.int32)

    for each in indexers(model):
        each.__class__ = Newest
    assert shape_of(model) != "trees"


def test_an_indexer_of_which_no_number_of_keys_is_known_is_decoded_plainly() -> None:
    model = build(FAMILIES[NAME])
    for each in indexers(model):
        each.picked = vars(each).pop("index_topk")
        each.__class__ = type("Renamed", (type(each),), {"index_topk": property(lambda self: self.picked)})
    assert picks_keys(model) and shape_of(model) == "none"


@pytest.mark.parametrize("how", ["a lock", "offloaded"])
def test_a_model_that_cannot_be_copied_without_its_weights_is_decoded_plainly(how: str) -> None:
    model = build(FAMILIES[NAME])
    expected = generate(model, ONE, do_sample=False)
    if how == "a lock":
        model.lock = Lock()  # type: ignore[assignment]
    else:
        cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.warns(UserWarning, match="an indexer picks.*decoded plainly"):
        assert torch.equal(generate(model, ONE, do_sample=False, custom_generate=lookahead.decode), expected)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"return_dict_in_generate": True}], ids=["beams", "its cache"])
def test_what_needs_the_keys_of_its_indexer_elsewhere_goes_to_transformers_by_name(options: dict[str, Any]) -> None:
    model = build(FAMILIES[NAME])
    expected: Any = generate(model, ONE, do_sample=False, **options)
    with pytest.warns(UserWarning, match="indexer"):
        got: Any = generate(model, ONE, do_sample=False, **options, custom_generate=lookahead.decode)
    for each in (expected, got):
        assert torch.equal(getattr(each, "sequences", each), getattr(expected, "sequences", expected))


def test_a_batch_is_padded_only_where_the_indexer_picks_no_padding() -> None:
    model = build(FAMILIES[NAME])
    assert heeds_padding(model)
    kind = type(indexers(model)[0])

    class Careless(kind):  # type: ignore[misc,valid-type]
        def forward(
            self, hidden_states: Any, q_resid: Any, positions: Any, mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            least = torch.finfo(hidden_states.dtype).min
            every = torch.full(mask.shape, least).triu(1 + mask.shape[-1] - mask.shape[-2])
            return super().forward(hidden_states, q_resid, positions, every, *args, **kwargs)

    for each in indexers(model):
        each.__class__ = Careless
    recognise(model, trusted=True)
    assert not heeds_padding(model)


def test_rows_of_one_length_are_decoded_with_trees() -> None:
    model, inputs = build(FAMILIES[NAME]), {"input_ids": ONE["input_ids"].repeat(3, 1)}
    inputs["input_ids"][1:, 3] = torch.tensor([8, 19])
    expected = generate(model, inputs, do_sample=True)
    got = generate(model, inputs, do_sample=True, custom_generate=lookahead.decode, lookahead_config=FIXED)
    assert torch.equal(got, expected)
