"""GGUF files that do not say what their model is, or lack a part of it, are refused before anything is kept of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.errors import UnsupportedModelError
from lookahead.loading import gguf_files
from lookahead.loading.gguf_files import convert_once
from lookahead.loading.gguf_metadata import check_metadata
from tests.support.tiny_gguf import write_gguf

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
    reason="reading GGUF files needs gguf and accelerate",
)
Edit = Callable[[Any], object]
Q = "blk.0.attn_q.weight"
OF_Q = re.escape("model.layers.0.self_attn.q_proj.weight")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; where converted models go in it."""
    monkeypatch.setattr(gguf_files, "user_cache_path", lambda name, **_: tmp_path / "cache" / name)
    return tmp_path / "cache" / "lookahead" / "models"


def folders(cache: Path) -> list[str]:
    """What is kept, whole or in part."""
    return [each.name for each in cache.glob("*") if each.is_dir()] if cache.exists() else []


def refused(tmp_path: Path, edit: Edit) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        lookahead.load(write_gguf(tmp_path / "tiny.gguf", edit=edit), device="cpu")
    return str(caught.value)


def tensors(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Change the tensors of a `GGUFWriter` by name."""
    return lambda writer: change(writer.tensors[0])


def key(name: str, value: Any) -> Edit:
    """Set a key to a value of the type that Python has for it; to none, leave it out."""

    def edit(writer: Any) -> None:
        from gguf import GGUFValueType

        writer.kv_data[0].pop(name, None)
        if value is not None:
            kind = GGUFValueType.INT64 if type(value) is int else GGUFValueType.get_type(value)
            writer.add_key_value(name, value, kind)

    return edit


def reshape(writer: Any) -> None:
    del writer.tensors[0][Q]
    writer.add_tensor(Q, np.ones((16, 32), np.float32))


DAMAGES: dict[str, tuple[Edit, str]] = {
    "missing": (tensors(lambda held: held.pop(Q)), f"lacks 1 tensor: {OF_Q}$"),
    "renamed": (tensors(lambda held: held.update({"blk.0.attn_qq.weight": held.pop(Q)})), f"lacks 1 tensor: {OF_Q}$"),
    "another shape": (reshape, rf"{OF_Q} is \(16, 32\) instead of \(32, 32\)$"),
    "unexpected": (
        lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32)),
        r"no place for blk\.0\.attn_q\.bias in LlamaForCausalLM$",
    ),
    "a further block": (
        lambda writer: writer.add_tensor("blk.1.attn_q.weight", np.ones((32, 32), np.float32)),
        r"llama\.block_count must be 2, the number of blocks among its tensors, got 1$",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_does_not_fit_its_model_is_refused_by_name_and_not_kept(
    tmp_path: Path, cache: Path, damage: str
) -> None:
    edit, told = DAMAGES[damage]
    assert re.search(told, refused(tmp_path, edit))
    assert folders(cache) == []
    arguments = ["generate", "abc", "--model", str(tmp_path / "tiny.gguf"), "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and re.search(told, result.stderr.rstrip()) and "Traceback" not in result.stderr
    assert folders(cache) == []


@pytest.mark.parametrize(
    "edit",
    [
        tensors(lambda held: held.pop("output.weight")),
        lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
        key("llama.attention.head_count_kv", None),
        key("llama.rope.freq_base", None),
        key("llama.vocab_size", None),
        key("general.name", None),
    ],
    ids=["tied", "scales of rotary embeddings", "as many keys as queries", "default base", "counted tokens", "no name"],
)
def test_what_a_file_may_leave_out_is_not_missed(tmp_path: Path, cache: Path, edit: Edit) -> None:
    assert lookahead.load(write_gguf(tmp_path / "tiny.gguf", edit=edit), device="cpu").model.num_parameters() > 0


NEEDED = [f"llama.{name}" for name in ("block_count", "context_length", "embedding_length", "feed_forward_length")]
NEEDED += ["llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon"]


@pytest.mark.parametrize("name", [*NEEDED, "general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens"])
def test_a_key_that_is_missing_is_named(tmp_path: Path, cache: Path, name: str) -> None:
    assert refused(tmp_path, key(name, None)) == f"model tiny.gguf: its metadata lacks {name}"
    assert folders(cache) == []


@pytest.mark.parametrize("value", [10**9, -1, 0, 1.5, "two", True])
@pytest.mark.parametrize("name", [*NEEDED, "llama.attention.head_count_kv", "llama.vocab_size", "llama.rope.freq_base"])
def test_a_value_of_another_type_or_out_of_range_is_named_with_the_range(
    tmp_path: Path, cache: Path, name: str, value: Any
) -> None:
    is_number = name.endswith(("epsilon", "base"))
    if (name.endswith("context_length") and value == 10**9) or (is_number and value in (10**9, 1.5)):
        return  # large, and possible
    said = refused(tmp_path, key(name, value))
    expected = "a positive number" if is_number else r"(a whole number from 1 to \d+|1, the number of blocks .*)"
    assert re.fullmatch(rf"model tiny\.gguf: {re.escape(name)} must be {expected}, got {value!r}", said)
    assert folders(cache) == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("llama.embedding_length", 32, 48), ("llama.feed_forward_length", 48, 32), ("llama.block_count", 1, 2)],
)
def test_a_size_that_the_tensors_contradict_is_named_with_theirs(
    tmp_path: Path, cache: Path, name: str, right: int, wrong: int
) -> None:
    assert re.search(rf"{name} must be {right}, .*, got {wrong}$", refused(tmp_path, key(name, wrong)))


def test_a_model_far_larger_than_its_tensors_is_refused_before_it_is_allocated(tmp_path: Path, cache: Path) -> None:
    def many_tokens(writer: Any) -> None:  # each size alone is a dimension of a tensor
        writer.add_tensor("unused.weight", np.ones((10_000_000, 1), np.float16))
        key("llama.vocab_size", 10_000_000)(writer)

    said = refused(tmp_path, many_tokens)
    assert re.search(r"describes a model of 640,0\d\d,\d{3} parameters, and its tensors hold 10,0\d\d,\d{3}$", said)


def test_a_conversion_of_an_earlier_version_which_was_not_checked_is_not_used(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    earlier = cache / f"tiny-{gguf_files._hash_of(file)[:16]}"
    earlier.mkdir(parents=True)
    made = convert_once(file)
    assert made != earlier and (made / "model.safetensors").exists() and [*earlier.iterdir()] == []


ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "stablelm", "starcoder2"), ()),
    **dict.fromkeys(("qwen2moe", "qwen3moe", "gpt-oss", "minimax-m2"), ("expert_count", "expert_used_count")),
    "lfm2": ("shortconv.l_cache",),
    "t5": ("attention.relative_buckets_count",),
}
WITHOUT_LAYERS = {
    "gpt2": ("block_count", "context_length", "embedding_length", "attention.head_count"),
    "bloom": ("block_count", "embedding_length", "attention.head_count"),
    "mamba": ("block_count", "embedding_length", "ssm.conv_kernel", "ssm.state_size", "ssm.inner_size"),
}


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *WITHOUT_LAYERS])
def test_the_keys_of_every_architecture_are_needed_in_its_files(tmp_path: Path, architecture: str) -> None:
    from gguf import GGUFReader

    usual = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
    names = WITHOUT_LAYERS.get(architecture, (*usual, *ARCHITECTURES.get(architecture, ())))

    def checked(path: Path, left_out: str | None) -> None:
        def edit(writer: Any) -> None:
            from transformers.integrations import GGUF_CONFIG_MAPPING

            table = GGUF_CONFIG_MAPPING[{"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}.get(architecture) or plain]
            for each in [each for each in writer.kv_data[0] if each.startswith(f"{architecture}.")]:
                del writer.kv_data[0][each]
            for each in {*table} - {left_out}:
                value = 1e-5 if "epsilon" in each else {"embedding_length": 32, "feed_forward_length": 48}.get(each, 1)
                key(f"{architecture}.{each}", value)(writer)

        check_metadata("a.gguf", GGUFReader(write_gguf(path, architecture, edit=edit)))

    plain = architecture.replace("-", "_")
    checked(tmp_path / "whole.gguf", None)
    for name in names:
        with pytest.raises(UnsupportedModelError, match=re.escape(f"its metadata lacks {architecture}.{name}")):
            checked(tmp_path / "part.gguf", name)


def test_keys_are_named_for_both_readers_and_a_foreign_architecture_is_told(tmp_path: Path, cache: Path) -> None:
    # Older releases of transformers do not know qwen35.
    told_of = {"qwen35": r"(lacks .qwen35\.\w|architecture qwen35)", "mammoth": "architecture mammoth"}
    for architecture, told in told_of.items():
        file = write_gguf(tmp_path / "other.gguf", architecture, edit=key(f"{architecture}.feed_forward_length", None))
        with pytest.raises(UnsupportedModelError, match=f"cannot be read by transformers: .*{told}"):
            lookahead.load(file, device="cpu")


@pytest.mark.parametrize(("numbers", "is_legal"), [([0, 2, 0], True), ([2, -1], False), ([1.5], False)])
def test_a_size_may_be_a_number_for_each_block(tmp_path: Path, numbers: list[Any], is_legal: bool) -> None:
    from gguf import GGUFReader

    name = "llama.attention.head_count_kv"
    reader = GGUFReader(write_gguf(tmp_path / "tiny.gguf", edit=key(name, numbers)))
    if is_legal:
        return check_metadata("a.gguf", reader)
    with pytest.raises(UnsupportedModelError, match=f"{re.escape(name)} must be"):
        check_metadata("a.gguf", reader)
