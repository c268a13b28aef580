"""Gemma 4's assistants, which attend to their target's keys and values, as proposers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation import candidate_generator

import lookahead
from lookahead import Heads, LookaheadConfig
from lookahead.errors import HeadsError
from lookahead.model.cache import TreeCache
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.plugins.heads.assistant import AssistantDrafter, open_assistant
from tests.support.declared import made

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "Gemma4AssistantConfig") or transformers.__version__.startswith("5.23"),
    reason="this transformers cannot make assistants",
)
KINDS = ["sliding_attention", "full_attention"]
FIXED = {"draft": "fixed", "min_probability": 0.0, "max_nodes": 20}


def assistant_folder(folder: Path, **options: Any) -> Path:
    """A small assistant for `made("Gemma4")`, which often guesses that the last token is repeated."""
    text = transformers.Gemma4TextConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        global_head_dim=128,
        layer_types=KINDS,
        sliding_window=16,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=2,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=1,
    )
    config = transformers.Gemma4AssistantConfig(text_config=text, **{"backbone_hidden_size": 256, **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assistant: Any = transformers.Gemma4AssistantForCausalLM(config)
        embedded = made("Gemma4", torch.float32).get_input_embeddings()(torch.arange(101))
        shrink = torch.randn(32, embedded.shape[1]) / 16
        with torch.no_grad():
            assistant.pre_projection.weight[:, : config.backbone_hidden_size] = shrink[:, : config.backbone_hidden_size]
            assistant.get_input_embeddings().weight.copy_(embedded @ shrink.T)
        assistant.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return assistant_folder(tmp_path_factory.mktemp("assistant"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9}], ids=["greedy", "sampled"])
def test_an_assistant_drafts_and_changes_no_token(folder, dtype, options, accepted):
    model = made("Gemma4", dtype)
    ids = torch.tensor([[5, 9, 31, 9, 31] * 5])  # longer than the window
    kwargs: dict[str, Any] = {"input_ids": ids, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **options}
    config = LookaheadConfig(proposers=(Heads(folder),), **FIXED)
    outputs = list[Any]()
    for ours in ({}, {"custom_generate": lookahead.decode, "lookahead_config": config}):
        torch.manual_seed(0)
        outputs.append(model.generate(**kwargs, **ours))
    assert torch.equal(*outputs)
    assert accepted[0] > 0


def test_rows_of_other_lengths_with_an_assistant_get_the_tokens_of_generate(folder, accepted):
    model, ids = made("Gemma4", torch.float32), torch.randint(3, 100, (3, 30))
    mask = torch.ones_like(ids)
    for row, length in enumerate((0, 7, 21)):
        ids[row, :length], mask[row, :length] = 0, 0
    kwargs: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "eos_token_id": [7, 9]}
    config = LookaheadConfig(proposers=(Heads(folder),), **FIXED)
    expected = model.generate(ids, **kwargs)
    got = model.generate(ids, **kwargs, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, expected)
    assert accepted[0] > 0


@torch.no_grad()
@pytest.mark.parametrize("length", [9, 40], ids=["within the window", "behind it"])
def test_an_assistant_guesses_what_transformers_lets_it_guess(folder, length):
    model: Any = made("Gemma4", torch.float32)
    assistant: Any = open_assistant(folder, model)
    assistant.generation_config.num_assistant_tokens = 4
    ids = torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(4))
    read = model(ids, output_hidden_states=True, return_shared_kv_states=True)
    text = torch.cat((ids, read.logits[:, -1:].argmax(-1)), 1)
    kind: Any = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    theirs = kind(assistant, model.get_input_embeddings(), transformers.GenerationConfig(max_length=200))
    guessed, _ = theirs.get_candidates(text, {}, read, is_first_iteration=False, n_last_matches=0)

    drafter = AssistantDrafter(assistant, model, AcceptanceTable(4), None)
    cache = TreeCache(rows=1, capacity=64)
    drafter.share_cache(cache)
    full = [read.shared_kv_states[kind] for kind in KINDS]
    last = dict(zip(KINDS, full, strict=True))
    kinds = model.config.layer_types[: model.config.num_hidden_layers - model.config.num_kv_shared_layers]
    cache.copy_prefix_from(0, [(last[kind][0][0], last[kind][1][0]) for kind in kinds], length)
    drafter.start(0, text[0].numpy().astype(np.int32))
    drafter.read([0], [text[0, -1:]], [read.hidden_states[-1][0, -1:]])
    (tree,) = drafter.draft([0], 30)
    node, chain = 0, list[int]()
    while children := [i for i in range(1, len(tree.tokens)) if tree.parents[i] == node]:
        node = max(children, key=lambda i: tree.draft_probs[i])
        chain.append(int(tree.tokens[node]))
    assert chain == guessed[0, length + 1 :].tolist()[: len(chain)]
    assert len(chain) > 1


def test_an_assistant_of_another_model_is_refused(folder, tmp_path):
    heads = Heads(assistant_folder(tmp_path, backbone_hidden_size=128))
    for model, wrong in ((made("Gemma4"), heads), (made("Gemma3"), Heads(folder))):
        config = LookaheadConfig(proposers=(wrong,))
        with pytest.raises(HeadsError, match="an assistant of another model: it reads"):
            model.generate(torch.tensor([[5, 9]]), custom_generate=lookahead.decode, lookahead_config=config)
