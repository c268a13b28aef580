"""One model over two processes, as transformers spreads it: every process emits what `model.generate` emits there."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import UnsupportedModelError
from lookahead.model.model_state import state_of
from lookahead.model.tensor_parallel import tensor_parallel_group, validate_tensor_parallel
from tests.support.products import kept_choice

distributed = pytest.importorskip("torch.distributed")
PROCESSES = 2
PROMPTS = ["the cat sat on the cat", "a b"]


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model that can be cut in two, its head too, and its tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer) + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def compare(model: Any, tokenizer: Any, rank: int) -> None:
    """Greedy and sampled, one prompt and several, drafts sized by seconds that no two processes agree on."""
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    one = tokenizer(PROMPTS[:1], return_tensors="pt")
    for batch in (one, inputs):
        for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5}):
            arguments: dict[str, Any] = {**batch, **options, "max_new_tokens": 16, "pad_token_id": 0}
            torch.manual_seed(1)
            expected = model.generate(**arguments)
            for trial in range(2):
                state_of(model).learned.cost.calibrate(
                    [1, 8, 32], [1.0, 1.0 + (rank + trial) % 2 * 5, 9.0], rows=len(expected), context=10
                )
                torch.manual_seed(1)
                got = model.generate(**arguments, custom_generate=lookahead.decode)
                assert torch.equal(got, expected), (rank, options)


def work(rank: int, folder: Path) -> None:
    """One process: its share of the model, and what it is asked for."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    # Passes over different trees would wait for each other: until then.
    patience = timedelta(minutes=5)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES, timeout=patience)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
        tp_group = tensor_parallel_group(model)
        assert tp_group is not None and tp_group.leads == (rank == 0)
        # Every process measures whether oneDNN is faster, and no two need find the same.
        with kept_choice(folder / f"cache{rank}", *["onednn"][rank:]):
            compare(model, tokenizer, rank)
            fixed = LookaheadConfig(draft="fixed")
            alone = [lookahead.generate(model, tokenizer, text, config=fixed, max_new_tokens=30) for text in PROMPTS]
            assert rank > 0 or alone[0].stats.accepted_tokens > 0, "nothing was drafted"
            many = lookahead.stream_many(model, tokenizer, PROMPTS, rows=2, max_new_tokens=30)
            assert {each.index: each.token_ids for each in many} == {i: one.token_ids[0] for i, one in enumerate(alone)}
    finally:
        distributed.destroy_process_group()
    (folder / f"done{rank}").touch()


def test_every_process_of_a_model_emits_the_tokens_of_generate(folder: Path) -> None:
    # Forked, so that they import nothing anew.
    torch.multiprocessing.start_processes(work, args=(folder,), nprocs=PROCESSES, start_method="fork")
    assert {path.name for path in folder.glob("done*")} == {"done0", "done1"}


def test_a_model_that_one_process_holds_is_no_group(tiny_llama: Any) -> None:
    assert tensor_parallel_group(tiny_llama) is None


@pytest.mark.parametrize(
    ("what", "words"),
    [({"reads_hidden": True, "by_rejection": False}, "hidden"), ({"reads_hidden": False, "by_rejection": True}, "rej")],
)
def test_what_one_process_alone_would_run_is_refused(tiny_llama: Any, what: dict[str, bool], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM is spread over several processes.*{words}"):
        validate_tensor_parallel(tiny_llama, **what)
    validate_tensor_parallel(tiny_llama, reads_hidden=False, by_rejection=False)
