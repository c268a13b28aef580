"""Private names of transformers and torch: where they stand, and what happens where a release drops one."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import lookahead
from lookahead.model import private_names
from lookahead.model.calls import ResolvedCall, mask_length
from lookahead.model.private_names import OTHERS, TORCH, TRANSFORMERS, PrivateName, missing_names
from tests.test_layering import MODULES

PRIVATE = re.compile(r"_[a-zA-Z]\w*")
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
# Names that this package defines too, to take the place of those of transformers.
OVERRIDDEN = {
    *("_attn_implementation", "_modules", "_prefill", "_process_model_after_weight_loading"),
    *("_update_model_kwargs_for_generation", "_version"),
}
ROOMS_OF_TRANSFORMERS = ("model", "loading")
ROOMS_OF_TORCH = ("model", "loading", "backend.cpu", "backend.gpu", "kernels")
# What stands elsewhere: a subclass of Trainer calls what subclasses may.
ELSEWHERE = {
    # It stands in for a model in transformers' own beam search.
    "plugins.beams.beam_tree": {"_prefill", "_reorder_cache", "_update_model_kwargs_for_generation"},
    # The base class of the outputs of encoders.
    "plugins.encoder_decoder.encoded_rows": {"transformers.utils.generic"},
    "plugins.encoder_decoder.encoding": {"transformers.utils.generic"},
    # The names under which a checkpoint keeps a layer that its model drops.
    "plugins.heads.native_mtp": {
        "transformers.modeling_layers",
        "transformers.core_model_loading",
        "_keys_to_ignore_on_load_unexpected",
    },
    "ngram.pool_file": {"_version"},  # its own
}
# Modules whose names the documentation of transformers promises, and those of models.
PUBLIC = {
    "transformers", "transformers.cache_utils", "transformers.generation",
    "transformers.generation.configuration_utils", "transformers.generation.logits_process",
    "transformers.generation.stopping_criteria",
    "transformers.generation.streamers", "transformers.modeling_outputs", "transformers.models",
}  # fmt: skip


@cache
def uses() -> dict[str, set[str]]:
    """The rooms that use each private name that this package does not define."""
    found, own = defaultdict[str, set[str]](set), set[str]()
    for module in MODULES:
        pieces = {id(each) for node in ast.walk(module.tree) if isinstance(node, ast.JoinedStr) for each in node.values}
        for node in ast.walk(module.tree):
            if id(node) in pieces:
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
                if node.name in OVERRIDDEN:
                    found[node.name].add(module.room)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                own.add(node.attr)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                found[node.attr].add(module.room)
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and module.room != "model.private_names"
            ):
                found[node.value].add(module.room)
    strange = {name for name in found if PRIVATE.fullmatch(name)} - NAMED_TUPLES - (own - OVERRIDDEN)
    return {name: found[name] for name in strange if name in OVERRIDDEN or not name.endswith("_by_source")}


def _rooms_beside(name: str, allowed: tuple[str, ...]) -> set[str]:
    rooms = {room for room in uses()[name] if not room.startswith(allowed)}
    return {room for room in rooms if name not in ELSEWHERE.get(room, ())}


def test_private_names_of_transformers_stand_where_models_are_loaded_and_known() -> None:
    names = TRANSFORMERS.keys() & uses().keys()
    assert not {name: rooms for name in names if (rooms := _rooms_beside(name, ROOMS_OF_TRANSFORMERS))}


def test_private_names_of_torch_stand_where_passes_are_made() -> None:
    assert not {name: rooms for name in TORCH.keys() & uses().keys() if (rooms := _rooms_beside(name, ROOMS_OF_TORCH))}


def test_every_private_name_has_a_line_and_every_line_is_of_a_name_in_use() -> None:
    assert uses().keys() == TRANSFORMERS.keys() | TORCH.keys() | OTHERS.keys()


def test_inner_modules_of_transformers_are_imported_where_models_are_known() -> None:
    strangers = defaultdict[str, set[str]](set)
    for module in MODULES:
        for node in ast.walk(module.tree):
            name = node.module if isinstance(node, ast.ImportFrom) else None
            if name is None or not name.startswith("transformers") or module.room.startswith(ROOMS_OF_TRANSFORMERS):
                continue
            allowed = PUBLIC | ELSEWHERE.get(module.room, set())
            if not any(name == each or (each != "transformers" and name.startswith(f"{each}.")) for each in allowed):
                strangers[module.room].add(name)
    assert not strangers


def test_the_installed_libraries_have_every_name() -> None:
    assert missing_names() == ()


@pytest.mark.parametrize("names", [TRANSFORMERS, TORCH], ids=["transformers", "torch"])
def test_where_a_name_is_gone_every_call_goes_to_transformers_with_a_warning(
    looping_llama: Any, monkeypatch: pytest.MonkeyPatch, names: dict[str, PrivateName]
) -> None:
    ids, options = torch.tensor([[5, 9, 31, 77]]), {"max_new_tokens": 20, "do_sample": False}
    expected = looping_llama.generate(ids, **options)
    place = "transformers.PreTrainedModel" if names is TRANSFORMERS else "torch.nn.Module"
    monkeypatch.setitem(names, "_of_another_release", PrivateName(place, "9.9"))
    private_names.missing_names.cache_clear()
    try:
        with pytest.warns(UserWarning, match=f"lack what drafts need, {place}._of_another_release"):
            got = looping_llama.generate(ids, **options, custom_generate=lookahead.decode)
    finally:
        monkeypatch.undo()
        private_names.missing_names.cache_clear()
    assert torch.equal(got, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(looping_llama.generate(ids, **options, custom_generate=lookahead.decode), expected)


def test_without_the_token_of_padding_as_a_tensor_that_of_the_configuration_pads(looping_llama: Any) -> None:
    options = {"max_new_tokens": 3, "pad_token_id": 7}
    call = ResolvedCall.resolve(looping_llama, torch.tensor([[5, 9]]), **options)
    assert call.pad_token is not None and int(call.pad_token) == 7
    bare = GenerationConfig(pad_token_id=7)
    assert not hasattr(bare, "_pad_token_tensor")
    pad = call._replace(generation_config=bare).pad_token
    assert pad is not None and int(pad) == 7
    assert ResolvedCall(*call[:4], GenerationConfig(), None, {}).pad_token is None


def test_without_the_length_of_the_mask_that_of_the_ids_counts() -> None:
    assert mask_length(GenerationConfig(), 12) == 12
