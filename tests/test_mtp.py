"""The MTP layer that a checkpoint brings along."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    modeling_layers,
)

import lookahead
from lookahead import Heads, LookaheadConfig
from lookahead.errors import HeadsError
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.plugins.heads.native_mtp import NativeDrafter, open_native
from lookahead.plugins.heads.target import hidden_states
from tests.support.declared import made

needs_mtp_layers = pytest.mark.skipif(
    not hasattr(modeling_layers, "MtpModel"), reason=f"transformers {transformers.__version__} has no MTP layers"
)
FIXED = {"draft": "fixed", "min_probability": 0.0, "max_nodes": 20}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    """A DeepSeek-V3 of 61 tiny layers, which is where transformers looks for its MTP layer, the 62nd."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=61,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        first_k_dense_replace=60,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("deepseek")
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.60.")}
    mtp = {name.replace(".60.", ".61."): torch.randn_like(tensor) * 0.3 for name, tensor in last.items()}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        mtp[f"model.layers.61.{norm}.weight"] = torch.ones(16)
    mtp["model.layers.61.eh_proj.weight"] = torch.randn(16, 32) * 0.3
    save_file({**tensors, **mtp}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def deepseek_model(deepseek):
    return AutoModelForCausalLM.from_pretrained(deepseek, dtype=torch.float32).eval()


@needs_mtp_layers
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9}], ids=["greedy", "sampled"])
def test_the_layer_of_a_checkpoint_drafts_and_changes_no_token(deepseek_model, options, accepted):
    kwargs = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    kwargs["input_ids"] = torch.tensor([[0, 5, 9, 31], [3, 4, 5, 6]])
    kwargs["attention_mask"] = (kwargs["input_ids"] > 0).long()
    config = LookaheadConfig(proposers=(Heads("native"),), **FIXED)
    torch.manual_seed(0)
    expected = deepseek_model.generate(**kwargs)
    torch.manual_seed(0)
    got = deepseek_model.generate(**kwargs, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, expected)
    assert accepted[0] > 0


@needs_mtp_layers
@torch.no_grad()
def test_what_the_layer_promises_is_what_transformers_computes_for_the_whole_text(deepseek_model):
    from transformers.cache_utils import MtpCache

    network = open_native(deepseek_model)
    ids = [5, 9, 31, 7, 8, 60, 2]
    states = hidden_states(deepseek_model, torch.tensor([ids]))[:, :-1]
    drafter = NativeDrafter(network, deepseek_model, AcceptanceTable(4), None)
    following = torch.tensor(ids[1:])
    drafter.read([0], [following[:2]], [states[0, :2]])
    drafter.draft([0], 30)  # what is guessed leaves nothing behind
    drafter.read([0], [following[2:]], [states[0, 2:]])
    (tree,) = drafter.draft([0], 30)
    node, out, grown = 0, states, list(ids[1:])
    for depth in range(int(tree.kinds[:, 0].max()) + 1):
        positions = torch.arange(1, 1 + len(grown))[None]
        fresh = MtpCache(config=network.config)
        said = network.forward_layer(0, out, positions, fresh, input_ids=torch.tensor([grown]))
        chances = deepseek_model.lm_head(said[0, -1]).softmax(-1)
        children = [i for i in range(1, len(tree.tokens)) if tree.parents[i] == node]
        for i in children:
            assert tree.draft_probs[i] == pytest.approx(float(chances[tree.tokens[i]]), rel=1e-4)
        node = max(children, key=lambda i: tree.draft_probs[i])
        grown.append(int(tree.tokens[node]))
        out = torch.cat((out, said[:, -1:]), 1)
        assert depth < 4


@needs_mtp_layers
def test_loading_the_layer_leaves_the_model_as_it_was(deepseek_model):
    flags = [(parameter.requires_grad, parameter.dtype) for parameter in deepseek_model.parameters()]
    modes = [module.training for module in deepseek_model.modules()]
    open_native(deepseek_model)
    assert [(parameter.requires_grad, parameter.dtype) for parameter in deepseek_model.parameters()] == flags
    assert [module.training for module in deepseek_model.modules()] == modes


@needs_mtp_layers
def test_a_model_without_such_a_layer_is_told_what_to_do(tiny_llama):
    with pytest.raises(HeadsError, match=r"no num_mtp_layers.*lookahead train"):
        open_native(tiny_llama)


@needs_mtp_layers
def test_a_checkpoint_that_lacks_the_layers_weights_is_refused(deepseek, tmp_path):
    tensors = load_file(deepseek / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".61." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((deepseek / "config.json").read_text())
    with pytest.raises(HeadsError, match=r"the MTP layer of .* cannot be loaded: .*missing"):
        open_native(AutoModelForCausalLM.from_pretrained(tmp_path))


@needs_mtp_layers
def test_more_than_one_layer_is_refused(deepseek_model):
    model = copy.deepcopy(deepseek_model)
    model.config.num_mtp_layers = 2
    with pytest.raises(HeadsError, match="one MTP layer are served, that of this DeepseekV3ForCausalLM has 2"):
        open_native(model)


@pytest.mark.skipif(hasattr(modeling_layers, "MtpModel"), reason="they are served")
def test_layers_that_transformers_does_not_have_are_refused_by_name(tiny_llama):
    with pytest.raises(HeadsError, match="MTP layers of checkpoints need a newer transformers"):
        open_native(tiny_llama)


QWEN = "Qwen3_5", "Qwen3_5Moe", "Qwen3Next"


def qwen_folder(name: str, folder: Path) -> Path:
    """A small Qwen with an MTP layer in its checkpoint, which transformers drops."""
    made(
        name, torch.float32, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    ).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    attending = {key.partition(".layers.1.")[2]: tensor for key, tensor in tensors.items() if ".layers.1." in key}
    mtp = {f"mtp.layers.0.{key}": torch.randn_like(tensor) * 0.3 for key, tensor in attending.items()}
    mtp |= {f"mtp.{norm}.weight": torch.randn(64) * 0.1 for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    mtp |= {"mtp.norm.weight": torch.randn(64) * 0.1, "mtp.fc.weight": torch.randn(64, 128) * 0.3}
    save_file({**tensors, **mtp}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@needs_mtp_layers
@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9}], ids=["greedy", "sampled"])
def test_a_layer_that_transformers_drops_drafts_and_changes_no_token(name, options, tmp_path, accepted):
    model = AutoModelForCausalLM.from_pretrained(qwen_folder(name, tmp_path), dtype=torch.float32).eval()
    config = LookaheadConfig(proposers=(Heads("native"),), **FIXED)
    ids = torch.tensor([[5, 9, 31, 9, 31]])
    kwargs: dict[str, Any] = {"input_ids": ids, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options}
    outputs = list[Any]()
    for ours in ({}, {"custom_generate": lookahead.decode, "lookahead_config": config}):
        torch.manual_seed(0)
        outputs.append(model.generate(**kwargs, **ours))
    assert torch.equal(*outputs)
    assert accepted[0] > 0


@needs_mtp_layers
@torch.no_grad()
def test_qwens_layer_computes_what_its_weights_say(tmp_path):
    folder = qwen_folder("Qwen3_5", tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = load_file(folder / "model.safetensors")
    ids = [5, 9, 31, 7, 8, 60, 2]
    states = hidden_states(model, torch.tensor([ids]))[:, :-1]
    drafter = NativeDrafter(open_native(model), model, AcceptanceTable(4), None)
    drafter.read([0], [torch.tensor(ids[1:])], [states[0]])
    (tree,) = drafter.draft([0], 30)

    def norm(x: torch.Tensor, key: str) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return scaled * (1 + tensors[key])

    embedded = norm(model.get_input_embeddings()(torch.tensor([ids[1:]])), "mtp.pre_fc_norm_embedding.weight")
    x = linear(torch.cat((embedded, norm(states, "mtp.pre_fc_norm_hidden.weight")), -1), tensors["mtp.fc.weight"])
    layer, start = copy.deepcopy(model.model.layers[1]), "mtp.layers.0."
    layer.load_state_dict({key.removeprefix(start): each for key, each in tensors.items() if key.startswith(start)})
    rotation = model.model.rotary_emb(x, torch.arange(len(ids) - 1)[None])  # only distances count
    mask = torch.ones(len(ids) - 1, len(ids) - 1).tril().bool()[None, None]
    out = norm(layer(x, position_embeddings=rotation, attention_mask=mask), "mtp.norm.weight")
    chances = model.lm_head(out[0, -1]).softmax(-1)
    children = [i for i in range(1, len(tree.tokens)) if tree.kinds[i, 0] == 0]
    assert children
    for i in children:
        assert tree.draft_probs[i] == pytest.approx(float(chances[tree.tokens[i]]), rel=1e-4)


@needs_mtp_layers
def test_a_qwen_without_the_layer_in_its_checkpoint_is_refused(tmp_path):
    made("Qwen3_5", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(HeadsError, match=r"the MTP layer of .* cannot be loaded: .*missing"):
        open_native(AutoModelForCausalLM.from_pretrained(tmp_path))
