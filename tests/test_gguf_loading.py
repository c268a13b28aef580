"""GGUF files that are dequantized: the weights of transformers, read tensor by tensor, and nothing large is kept."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead.kernels import block_product, block_values
from lookahead.kernels.block_formats import FORMATS
from lookahead.loading import gguf_files, gguf_plan
from lookahead.loading.gguf_files import convert_once
from lookahead.loading.gguf_plan import planned_once
from lookahead.loading.quantized import QUANTIZED_LAYERS
from tests.support.tiny_gguf import blocks, write_gguf

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
    reason="reading GGUF files needs gguf and accelerate",
)
LAYERS = "token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
DTYPES = {"F32": torch.float32, "F16": torch.float16}
KINDS = [kind for kind in FORMATS if kind != "int8"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; where parts of models go in it."""
    monkeypatch.setattr(gguf_files, "user_cache_path", lambda name, **_: tmp_path / "cache" / name)
    return tmp_path / "cache" / "lookahead" / "models"


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_dequantized_to_the_bits_of_gguf_rounded_to_bfloat16(kind: str) -> None:
    import gguf

    made, order = blocks(kind, 70, 512), np.random.default_rng(0).permutation(70)
    expected = torch.from_numpy(gguf.quants.dequantize(made[order], gguf.GGMLQuantizationType[kind])).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((70, 512), torch.nan, dtype=dtype)
        block_values.dequantize(made, kind, order, out)
        assert torch.equal(out, expected.to(dtype)) and torch.equal(out.signbit(), expected.signbit())


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q2_K", "F16", "F32"])
def test_a_model_has_the_weights_that_transformers_reads_in_the_dtype_of_most(
    tmp_path: Path, architecture: str, kind: str, dtype: str
) -> None:
    kinds = {} if kind == "F32" else dict.fromkeys(LAYERS, kind)
    file = write_gguf(tmp_path / "any.gguf", architecture, size=256, kinds=kinds, depth=2)
    model = lookahead.load(file, device="cpu", dtype=dtype).model
    own = DTYPES.get(kind, torch.bfloat16)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=own).state_dict()
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name].to(model.dtype)) for name, weight in state.items())
    assert not any(isinstance(each, QUANTIZED_LAYERS) for each in model.modules())


def test_nothing_large_is_kept_of_a_file_that_is_dequantized(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "large.gguf", size=512, kinds=dict.fromkeys(LAYERS, "Q8_0"))
    assert file.stat().st_size > 1_000_000
    lookahead.load(file, device="cpu")
    assert sum(each.stat().st_size for each in cache.rglob("*")) < 100_000


def test_a_file_that_only_transformers_can_read_is_converted_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "other.gguf", size=64, kinds=dict.fromkeys(LAYERS, "Q8_0"))
    expected = lookahead.load(file, device="cpu").model.state_dict()
    for plan in cache.rglob("tensors.json"):
        plan.unlink()
    monkeypatch.setattr(gguf_plan, "processor_of", lambda architecture, config: None)
    model = lookahead.load(file, device="cpu").model
    assert model.config.name_or_path == str(convert_once(file, lambda line: pytest.fail(line)))
    state = model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.skipif(not block_product.is_supported(), reason="this CPU does not convert float16")
def test_the_sizes_of_a_plan_are_those_of_the_loaded_models(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "sizes.gguf", size=64, kinds=dict.fromkeys(LAYERS, "Q4_1"), depth=2)
    count, in_blocks = planned_once(file)[1].sizes()
    whole, kept = (lookahead.load(file, device="cpu", quantize=each).model for each in (None, "gguf"))
    assert count == whole.num_parameters()
    assert in_blocks == sum(weight.nbytes for weight in kept.parameters())


MEASURED = """
import sys, lookahead, torch
from pathlib import Path

def memory(key):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if key in line)

small, large = sys.argv[1:]
lookahead.load(small, device="cpu")
before = memory("VmRSS:")
model = lookahead.load(large, device="cpu").model
print((memory("VmHWM:") - before) * 1024 / sum(weight.nbytes for weight in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from Linux")
def test_a_model_takes_little_more_memory_than_its_weights_while_it_is_loaded(tmp_path: Path) -> None:
    kinds: dict[str, Any] = dict.fromkeys(LAYERS, "Q4_K")
    small, large = (write_gguf(tmp_path / f"{size}.gguf", size=size, kinds=kinds, depth=4) for size in (256, 1536))
    settings = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", MEASURED, str(small), str(large)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.3


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_tokenizer_of_a_file_is_that_of_transformers(tmp_path: Path, architecture: str) -> None:
    def edit(writer: Any) -> None:
        writer.add_key_length(16)
        writer.add_value_length(16)

    file = write_gguf(tmp_path / "tokens.gguf", architecture, edit=edit)
    _, own = gguf_files.read_parts(file, 10_000)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name, local_files_only=True)
    assert type(own) is type(expected) and own.init_kwargs == expected.init_kwargs
    assert own.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
