"""MTP heads, trained beside a model or brought along by its checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    modeling_layers,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import lookahead
from lookahead import Heads, LookaheadConfig
from lookahead.errors import HeadsError
from lookahead.jobs.training.examples import make_example
from lookahead.ngram.acceptance import AcceptanceTable
from lookahead.plugins.heads.head_files import open_heads, write_heads
from lookahead.plugins.heads.independent_heads import MtpDrafter, MtpHeads
from lookahead.plugins.heads.induction_init import begin_mtp
from lookahead.plugins.heads.layers import hidden_states
from lookahead.plugins.heads.native_mtp import NativeDrafter, open_native

needs_mtp_layers = pytest.mark.skipif(
    not hasattr(modeling_layers, "MtpModel"), reason=f"transformers {transformers.__version__} has no MTP layers"
)
FIXED = {"draft": "fixed", "min_probability": 0.0, "max_nodes": 20}


@pytest.fixture
def heads(tiny_llama) -> MtpHeads:
    """Three heads with random weights."""
    torch.manual_seed(6)
    made = MtpHeads.fresh(tiny_llama, heads=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.25) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return made.requires_grad_(False)


def naive(heads: MtpHeads, model, states: torch.Tensor) -> torch.Tensor:
    """What every head says after each of `[tokens, 2 · hidden]`, `[heads, tokens, vocab]`, by parts of transformers."""
    n, (low, last) = len(states), states.chunk(2, -1)
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    rotation = heads.rotation(states, torch.arange(n)[None])
    config, logits = type(heads.config).from_dict(heads.config.to_dict()), []
    config._attn_implementation = "eager"
    for head in heads.heads:
        attention = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(attention, name, getattr(head.self_attn, name))
        read = torch.cat((head.low_layernorm(low), head.input_layernorm(last)), -1)[None]
        hidden = last * head.kept + attention(read, position_embeddings=rotation, attention_mask=mask)[0][0]
        logits.append(model.lm_head(hidden + head.mlp(head.post_attention_layernorm(hidden))))
    return torch.stack(logits)


@torch.no_grad()
def test_training_and_drafting_say_what_attention_of_transformers_says(heads, tiny_llama):
    texts = [[5, 9, 31, 77, 5, 9, 2, 8, 60], [7, 8, 9, 40]]
    states = [hidden_states(tiny_llama, torch.tensor([text]), heads.hidden_layers)[0] for text in texts]
    expected = [naive(heads, tiny_llama, each) for each in states]
    padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    places, asked = torch.tensor([[0, 3, 8], [1, 3, 0]]), torch.tensor([[True, True, True], [True, True, False]])
    for head in range(3):
        says = heads.guess(tiny_llama, head, padded, places, asked)
        right = torch.cat((expected[0][head][[0, 3, 8]], expected[1][head][[1, 3]]))
        assert torch.allclose(says, right, atol=1e-3, rtol=1e-3)
    drafter = MtpDrafter(heads, tiny_llama, AcceptanceTable(3), None)
    nothing = [torch.zeros(0), torch.zeros(0)]
    drafter.read([1], nothing[:1], [states[0][:2]])
    drafter.read([0, 1], nothing, [states[1], states[0][2:]])
    says = drafter._logits([0, 1])
    assert torch.allclose(says, torch.stack((expected[1][:, -1], expected[0][:, -1]), 1), atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_untrained_heads_say_what_the_lm_head_says(tiny_llama):
    fresh = MtpHeads.fresh(tiny_llama, heads=2)
    states = hidden_states(tiny_llama, torch.tensor([[4, 5, 6, 7]]), fresh.hidden_layers)
    says = fresh.guess(tiny_llama, 1, states, torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool))
    assert torch.allclose(says, tiny_llama.lm_head(states[0].chunk(2, -1)[1]))


@torch.no_grad()
def test_heads_begin_training_by_saying_what_followed_the_next_token_before():
    """The model's last states tell the next token, its low ones the token, the one before and the one before that."""
    torch.manual_seed(8)
    sizes = {"vocab_size": 101, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, rope_parameters=rope)
    model = LlamaForCausalLM(config).eval()
    vectors = model.lm_head.weight
    turned = [vectors @ torch.nn.init.orthogonal_(torch.empty(256, 256)) for _ in range(3)]

    def states_of(ids):
        low = sum(turned[back][ids.roll(back)] for back in range(3))
        return torch.cat((low, vectors[ids.roll(-1)]), -1)

    texts = [torch.randint(4, 101, (60,)).tolist() for _ in range(200)]
    heads = MtpHeads.fresh(model, heads=2)
    examples = [make_example(text[:1], text[1:], 99) for text in texts]
    begin_mtp(heads, model, examples, lambda example: states_of(example["input_ids"]))
    right = [0, 0]
    for seed in range(20):
        text = torch.randperm(100, generator=torch.Generator().manual_seed(seed))[:40].tolist()
        states = states_of(torch.tensor([*text, 100, text[seed]]))[None]
        for head in range(2):
            says = heads.guess(model, head, states[:, :-1], torch.tensor([[40]]), torch.tensor([[True]])).argmax()
            right[head] += int(says) == text[seed + 1 + head]
    assert min(right) >= 6  # by chance one in a hundred is


def test_heads_read_back_as_they_were_written_without_a_random_number(heads, tiny_llama, looping_llama, tmp_path):
    write_heads(heads, tmp_path, tiny_llama)
    before = torch.get_rng_state()
    _, read = open_heads(tmp_path, tiny_llama)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(t, heads.state_dict()[n].bfloat16().float()) for n, t in read.state_dict().items())
    with pytest.raises(HeadsError, match="heads of another model"):
        open_heads(tmp_path, looping_llama)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_heads": 4}))
    with pytest.raises(HeadsError, match=r"num_heads must be the number of heads in model.safetensors, 3, got 4"):
        open_heads(tmp_path, tiny_llama)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_heads": None}))
    with pytest.raises(HeadsError, match=r"num_heads must be the number of heads in model.safetensors, 3, got None"):
        open_heads(tmp_path, tiny_llama)
    (tmp_path / "config.json").write_text(json.dumps({**config, "low_layer": 99}))
    with pytest.raises(HeadsError, match="low_layer must be one of the model's layers, got 99"):
        open_heads(tmp_path, tiny_llama)


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
def test_what_the_layer_promises_is_what_transformers_computes_for_the_whole_text_anew(deepseek_model):
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
