"""Where the engine meets the kernels: with references in their place, a CPU checks all that is handed over."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, PreTrainedModel

import lookahead
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.backend.tree_pass import AttentionSpan, FixedShapePass, TreePass, TreeTensors
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import dispatch
from lookahead.kernels.dispatch import COMPACTION, KernelVariant, Verdict
from lookahead.model.cache import TreeCache, TreeSlots
from tests.support import kernel_reference as reference
from tests.support.families import for_cpus
from tests.support.random_trees import ancestor_mask

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
MIXED_LAYERS = ["sliding_attention", "full_attention"]
MLA = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 16}
# One family for each thing the kernel is told: windows, softcapping, sinks, chunks, values smaller than keys.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    # Before transformers 5.21 its default is SDPA, which applies no softcapping.
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "attn_implementation": "eager",
    },
    "GptOss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "layer_types": MIXED_LAYERS},
    "DeepseekV3": {**MLA, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2},
    "Llama4": {
        **{"head_dim": 16, "attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]},
        **{"num_local_experts": 2, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]},
    },
}
CLASSES = {"Llama4": ("Llama4TextConfig", "Llama4ForCausalLM")}
TEXTS = {
    "input_ids": torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]]),
    "attention_mask": torch.tensor([[0] * 8 + [1] * 4, [1] * 12]),
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Lets the references stand in for the kernels, behind the kernels' own checks; counts what was told to them."""
    told: Counter[str] = Counter()

    def attention(query: Tensor, keys: Tensor, values: Tensor, **arguments: Any) -> Tensor:
        (rows, heads, width, _), sinks = query.shape, arguments["sinks"]
        shapes = {"lengths": (rows,), "nodes": (rows,), "depths": (rows, width)}
        shapes["words"] = rows, width, -(-width // 64)
        for name, shape in shapes.items():
            tensor, dtype = arguments[name], torch.int64 if name == "words" else torch.int32
            assert (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, query.device), name
            assert tensor.is_contiguous(), name
        assert sinks is None or (sinks.shape == (heads,) and sinks.is_floating_point())
        told.update(name for name, argument in arguments.items() if argument is not None)
        return reference.tree_attention(query, keys, values, **arguments, dtype=torch.float32).to(query.dtype)

    def attention_for(
        query: Tensor, keys: Tensor, values: Tensor, options: Mapping[str, Any], *how: Any
    ) -> Callable[..., Tensor]:
        assert dispatch.is_supported(query, keys, values)

        def announced(*tensors: Tensor, sinks: Tensor | None, **tree: Tensor) -> Tensor:
            # Chosen for one layer, it serves all that are alike; sinks are a layer's own.
            assert (sinks is None) == (options["sinks"] is None)
            return attention(*tensors, **{**options, "sinks": sinks}, **tree)

        return announced

    def compactor_for(buffers: Sequence[Tensor]) -> Callable[..., None]:
        assert dispatch.takes_slots(buffers)
        told["bindings"] += 1

        def compact(**plan: Tensor) -> None:
            assert all(part.dtype == torch.int32 and part.is_contiguous() for part in plan.values())
            told["compactions"] += 1
            for buffer in buffers:
                reference.compact(buffer, **plan)

        return compact

    monkeypatch.setattr(dispatch, "attention_for", attention_for)
    monkeypatch.setattr(dispatch, "compactor_for", compactor_for)
    return told


def build(family: str) -> PreTrainedModel:
    config_class, model_class = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config = getattr(transformers, config_class)(**{**SIZES, **FAMILIES[family]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = for_cpus(getattr(transformers, model_class)(config)).float().eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def wide_llama() -> PreTrainedModel:
    return build("Llama")


def random_tree(seed: int, nodes: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    return TokenTree.from_parents(
        rng.permutation(101)[:nodes], [int(rng.integers(max(0, i - 3), max(1, i))) for i in range(nodes)]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_hands_its_trees_to_the_kernel_gives_the_tokens_of_generate(
    family: str, stand_ins: Counter[str], foretell: Callable[..., None]
) -> None:
    model = build(family)
    expected = model.generate(**TEXTS, max_new_tokens=30, do_sample=False)
    foretell(expected, TEXTS["attention_mask"])
    got = model.generate(**TEXTS, max_new_tokens=30, do_sample=False, custom_generate=lookahead.decode)
    assert torch.equal(got, expected)
    assert stand_ins["words"] > 0
    for name, families in {
        "window": ("Mistral", "Gemma2", "GptOss"),
        "softcap": ("Gemma2",),
        "sinks": ("GptOss",),
        "chunk": ("Llama4",),
    }.items():
        assert (stand_ins[name] > 0) == (family in families), name


@pytest.mark.parametrize(
    "span",
    [AttentionSpan(), AttentionSpan(window=3), AttentionSpan(window=20), AttentionSpan(chunk=7), AttentionSpan(30, 16)],
    ids=str,
)
def test_the_tensors_of_a_pass_say_what_its_mask_says(span: AttentionSpan) -> None:
    slots = TreeSlots(rows=3, capacity=120)
    slots.lengths[:] = (0, 17, 40)
    trees = [random_tree(1, 70), random_tree(2, 1), random_tree(3, 33)]
    slots.begin(70)
    device = torch.device("cpu")
    tree_pass = TreePass(slots, device, trees)
    mask = tree_pass.mask(1, span, torch.float32, device)[:, 0] == 0
    sees = reference.tree_mask(slots.kv_length, *tree_pass.tensors(device), *span)
    for row, tree in enumerate(trees):
        assert torch.equal(sees[row, : len(tree)], mask[row, : len(tree)])
        assert not sees[row, len(tree) :].any()
    assert tree_pass.tensors(device) is tree_pass.tensors(device), "made once per pass"
    assert mask.any(-1).all(), "padding sees something"
    packed = tree_pass.mask(2, span, torch.bfloat16, device)
    assert torch.equal(packed[:, 0, ::2] == 0, mask) and torch.equal(packed[:, 0, 1::2] == 0, mask)


@pytest.mark.parametrize("span", [AttentionSpan(), AttentionSpan(window=3), AttentionSpan(window=20, chunk=7)], ids=str)
def test_nodes_that_a_tree_gained_see_what_they_see_when_all_of_it_is_scored(span: AttentionSpan) -> None:
    trees, texts, scored = [random_tree(1, 60), random_tree(2, 5)], np.array([9, 100]), np.array([58, 2])
    slots, device = TreeSlots(rows=2, capacity=200), torch.device("cpu")
    slots.lengths[:] = texts
    slots.begin(60)
    whole = TreePass(slots, device, trees).mask(2, span, torch.float32, device)
    slots.begin(3, scored)
    gained = TreePass(slots, device, trees, scored).mask(2, span, torch.float32, device)
    for row, (tree, first) in enumerate(zip(trees, scored.tolist(), strict=True)):
        new = len(tree) - first
        mine = whole[row, 0, 2 * first : 2 * len(tree), : gained.shape[3]]
        assert torch.equal(gained[row, 0, : 2 * new, : mine.shape[1]], mine)
        assert (gained[row, 0, : 2 * new, mine.shape[1] :] == -torch.inf).all()
    assert (gained == 0).any(-1).all(), "padding sees something"


class Transfers(TorchDispatchMode):
    """Counts copies from the host to the meta device, which stands in for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sources = [each for each in args if isinstance(each, Tensor) and each.device.type == "cpu"]
        if sources and isinstance(made, Tensor) and made.is_meta:
            self.bytes.append(sum(each.nbytes for each in sources))
        return made


@pytest.mark.parametrize("serves", ["kernel", "masks"])
def test_what_a_pass_reads_of_the_host_does_not_grow_with_the_context(
    serves: str, wide_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = torch.device("meta")

    def kernel(query: Tensor, keys: Tensor, values: Tensor, **arguments: Any) -> Tensor:
        assert all(arguments[name].device == meta for name in TreeTensors._fields)
        return query.transpose(1, 2).contiguous()

    monkeypatch.setattr(dispatch, "attention_for", lambda *_: kernel if serves == "kernel" else None)
    monkeypatch.setattr("lookahead.backend.torch_backend.PREFILL_CHUNK", 64)
    target = GpuBackend(wide_llama.to(meta), rows=3, capacity=200)
    with target.serving():
        target.read([np.zeros(n, np.int32) for n in (150, 10, 100)])
        for nodes in ((1, 1, 1), (5, 1, 9)):
            with Transfers() as transfers:
                target.score([random_tree(n, n) for n in nodes])
            assert len(transfers.bytes) <= 7 and sum(transfers.bytes) < 2000
        with Transfers() as transfers:
            target.cache.commit(0, np.array([0, 2, 4], np.int32))
        assert len(transfers.bytes) == 1, "once for all layers: every copy waits for the GPU"
        static = FixedShapePass(target.cache.slots, 4, 16, meta)
        with Transfers() as transfers:
            static.fill([random_tree(n, n) for n in (5, 1, 9)])
        assert len(transfers.bytes) <= 7
        target.cache.slots.lengths[:] = 0  # rows of one length need no mask but one of few numbers
        with Transfers() as transfers:
            target.read([np.zeros(128, np.int32)] * 3)
    assert len(transfers.bytes) <= 12 and max(transfers.bytes) < 10_000


def test_further_parts_of_a_prompt_need_no_mask_where_flash_attention_takes_them(
    wide_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [np.arange(3, 3 + n, dtype=np.int32) for n in (37, 50)]
    logits = []
    for size in (64, 16):
        monkeypatch.setattr("lookahead.backend.torch_backend.PREFILL_CHUNK", size)
        target = GpuBackend(wide_llama, rows=2, capacity=64)
        with target.serving():
            logits.append(target.read(prompts))
        monkeypatch.setattr(dispatch, "takes_flash", lambda *_: True)
        monkeypatch.setattr(TreePass, "mask", None)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_a_commit_takes_compaction_as_soon_as_it_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    tested, moved, compaction = [False], [], KernelVariant(torch.device("cpu"), kernel=COMPACTION)
    compactor = lambda **plan: moved.append(plan["counts"].tolist())  # noqa: E731
    monkeypatch.setattr(dispatch, "compactor_for", lambda _: compactor if tested[0] else None)
    cache = TreeCache(rows=1, capacity=40)
    cache.slots.begin(9)
    cache.update(*torch.randn(2, 1, 2, 9, 8), 0)
    for tested[0] in (False, True):
        monkeypatch.setattr(dispatch, "verdicts", {compaction: Verdict()} if tested[0] else {})
        cache.commit(0, np.array([0, 4], np.int32))
    assert moved == [[2]]


def test_commits_by_compaction_leave_the_cache_that_moving_each_layer_leaves(
    wide_llama: PreTrainedModel, stand_ins: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[TreeCache, list[Tensor]]:
        target = GpuBackend(wide_llama, rows=3, capacity=30)  # too small: it has to grow
        with target.serving():
            target.read([np.arange(3, 3 + n, dtype=np.int32) for n in (1, 9, 23)])
            for step in range(4):
                trees = [random_tree(10 * step + row, nodes) for row, nodes in enumerate((1, 12, 40))]
                logits = target.score(trees)
                scored = [logits[row, : len(tree)] for row, tree in enumerate(trees)]
                for row, tree in enumerate(trees):
                    target.cache.commit(row, np.flatnonzero(ancestor_mask(tree)[-1]).astype(np.int32))
        return target.cache, scored

    with_kernel, scored = run()
    assert stand_ins["compactions"] > 2
    assert 1 < stand_ins["bindings"] < stand_ins["compactions"], "bound anew when the slots grow, not at every commit"
    monkeypatch.undo()
    without, expected = run()
    torch.testing.assert_close(scored, expected, rtol=1e-4, atol=1e-4)
    for row in range(3):
        kept, wanted = (cache.extract_row(row).kv for cache in (with_kernel, without))
        for got, want in zip(kept.values(), wanted.values(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "width", "dim", "dtype", "slots", "start"),
    [
        pytest.param(4, 3, 72, torch.half, 300, 0, id="head size"),
        pytest.param(4, 257, 64, torch.half, 300, 0, id="nodes"),
        pytest.param(4, 3, 64, torch.double, 300, 0, id="double precision"),
        pytest.param(3, 3, 64, torch.half, 300, 0, id="heads"),
        pytest.param(4, 3, 64, torch.half, 2, 0, id="slots"),
        pytest.param(4, 3, 64, torch.half, 300, 1, id="alignment"),
    ],
)
def test_the_kernel_takes_no_tensors_of_other_forms(heads, width, dim, dtype, slots, start) -> None:
    def is_supported(heads, width, dim, dtype, slots, start) -> bool:
        keys = torch.zeros(2 * slots * 2 * dim + start, dtype=dtype)[start:].view(2, slots, 2, dim)
        return dispatch.is_supported(torch.zeros(2, heads, width, dim, dtype=dtype), keys, keys)

    assert is_supported(4, 3, 64, torch.half, 300, 0)
    assert not is_supported(heads, width, dim, dtype, slots, start)


def test_compaction_takes_aligned_buffers_of_one_shape() -> None:
    buffers = [torch.zeros(2, 8, 1, 8), torch.zeros(2, 8, 2, 8)]
    assert dispatch.takes_slots(buffers)
    for other in (torch.zeros(2, 9, 1, 8), torch.zeros(2, 8, 1, 3), torch.zeros(2, 8, 2, 8).transpose(2, 3)):
        assert not dispatch.takes_slots([*buffers, other])


def test_prompts_and_models_the_kernel_cannot_take_stay_with_sdpa(tiny_llama: LlamaForCausalLM) -> None:
    odd = torch.zeros(1, 4, 3, 24)
    assert dispatch.attention_for(odd, odd.transpose(1, 2), odd.transpose(1, 2), {}) is None
    ids = torch.tensor([[5, 9, 31, 5, 9]])
    expected = tiny_llama.generate(ids, max_new_tokens=9, do_sample=False)
    got = tiny_llama.generate(ids, max_new_tokens=9, do_sample=False, custom_generate=lookahead.decode)
    assert torch.equal(got, expected)


def test_a_cpu_and_a_machine_without_triton_are_served_without_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dispatch.runs_on(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not dispatch.runs_on.__wrapped__(torch.device("cuda"))


@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError"])
def test_a_triton_that_cannot_be_imported_is_as_none(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "triton.py").write_text(f"raise {error}('libtriton.so')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not dispatch.runs_on.__wrapped__(torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize("lengths", [(7, 7, 7), (2, 9, 5)])
def test_every_row_writes_its_nodes_behind_its_own_committed_slots(dtype, width: int, lengths) -> None:
    cache = TreeCache(rows=3, capacity=40)
    cache.slots.lengths[:] = lengths
    cache.slots.begin(width)
    TreePass(cache.slots, torch.device("cpu"), [random_tree(1, width)] * 3)
    states = [torch.randn(3, width, 2, dim).to(dtype).transpose(1, 2) for dim in (8, 4)]
    seen = cache.update(*states, 0)
    for kept, written in zip(seen, states, strict=True):
        for row, length in enumerate(lengths):
            assert torch.equal(kept[row, :, length : length + width], written[row])
            assert not kept[row, :, :length].any()


@pytest.mark.parametrize("groups", [1, 4])
def test_rows_of_different_length_see_their_own_slots_in_a_plain_step(groups: int) -> None:
    slots = TreeSlots(rows=3, capacity=40)
    slots.lengths[:] = (2, 9, 5)
    slots.begin(1)
    tree_pass = TreePass(slots, torch.device("cpu"), [TokenTree.root(1)] * 3)
    assert not tree_pass.sees_all
    mask = tree_pass.mask(groups, AttentionSpan(), torch.bfloat16, torch.device("cpu"))
    assert mask.shape == (3, 1, groups, 10)
    for row, length in enumerate((2, 9, 5)):
        assert (mask[row] == 0).sum() == groups * (length + 1)
        assert (mask[row, :, :, : length + 1] == 0).all()
        assert (mask[row, :, :, length + 1 :] == -torch.inf).all()
