"""EAGLE-3 heads against layers of transformers that are given everything anew at every step."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from lookahead.drafting.proposal import Proposal
from lookahead.errors import HeadsError
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.plugins.heads.eagle import EagleDrafter, EagleHead, fused_layers
from lookahead.plugins.heads.guess_tree import GuessTree
from lookahead.plugins.heads.head_files import open_heads, write_heads
from lookahead.plugins.heads.target import hidden_states, unembed
from lookahead.plugins.heads.training.learners import DECAY, DraftStarts, EagleLearner
from lookahead.plugins.heads.training.train_heads import collate, frequent_tokens, make_example
from tests.support.families import FAMILIES, build, cases


@pytest.fixture
def head(tiny_llama) -> EagleHead:
    """A head with random weights, some of them wide, so that nothing is nearly zero."""
    torch.manual_seed(5)
    made = EagleHead.fresh(tiny_llama, range(1, 101, 2))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.25) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
        made.lm_head.weight.mul_(4)  # a tree of even guesses would be one level deep
    return made.requires_grad_(False)


def naive(head: EagleHead, model, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
    """What the head says after the last pair of a token and a feature, `[hidden]`, by layers of transformers."""
    config = LlamaConfig.from_dict(head.config.to_dict())
    config._attn_implementation = "eager"
    embedded = model.get_input_embeddings()(torch.tensor([tokens]))
    n = len(tokens)
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    rotation = head.rotation(features, torch.arange(n)[None])
    own, layer = LlamaAttention(config, 0), head.midlayer
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(own, name, getattr(layer.self_attn, name))
    read = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(features[None])), -1)
    hidden = features[None] + own(read, position_embeddings=rotation, attention_mask=mask)[0]
    return (hidden + layer.mlp(layer.post_attention_layernorm(hidden)))[0, -1]


def _features(head: EagleHead, model, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states a head reads at every token, and what it makes of them."""
    states = hidden_states(model, torch.tensor([ids]), head.hidden_layers)[0]
    return states, head.enter(states)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_what_a_tree_promises_is_what_the_head_says_when_given_the_whole_path_anew(head, tiny_llama, temperature):
    warp = None if temperature is None else lambda logits: logits / temperature
    texts = {0: [5, 9, 31, 77, 5, 9, 2, 8, 60], 2: [7, 8, 9]}
    drafter = EagleDrafter(head, tiny_llama, AcceptanceTable(6), warp)
    pairs = {row: (text[1:], *(each[:-1] for each in _features(head, tiny_llama, text))) for row, text in texts.items()}
    ids, states = ([torch.tensor(each[0]) for each in pairs.values()], [each[1] for each in pairs.values()])
    drafter.read([0], [ids[0][:3]], [states[0][:3]])  # rows begin apart, and grow by different lengths
    drafter.read([0, 2], [ids[0][3:], ids[1]], [states[0][3:], states[1]])
    drafter.draft([2], 30)  # what is guessed leaves nothing behind
    for row, guesses in zip([0, 2], drafter.draft([0, 2], 30), strict=True):
        tree = Proposal(*guesses.best(texts[row][-1], AcceptanceTable(6), 30))
        tokens, _, features = pairs[row]
        says: dict[int, torch.Tensor] = {}

        def path_of(node, tree=tree):
            return [] if node == 0 else [*path_of(tree.parents[node]), node]

        for node in range(1, len(tree.tokens)):
            for parent in [0, *path_of(int(tree.parents[node]))]:
                if parent not in says:
                    nodes = path_of(parent)
                    grown = torch.stack([*features, *(says[int(tree.parents[each])] for each in nodes)])
                    says[parent] = naive(
                        head, tiny_llama, [*tokens, *(int(tree.tokens[each]) for each in nodes)], grown
                    )
            logits = head.logits(says[int(tree.parents[node])])
            chances = (logits if warp is None else warp(logits)).softmax(-1)
            place = int((head.token_ids(torch.arange(len(chances))) == int(tree.tokens[node])).nonzero())
            assert tree.probabilities[node] == pytest.approx(min(0.99, float(chances[place])), rel=1e-3)
        assert max(len(path_of(node)) for node in range(31)) >= 3
        assert len(tree.tokens) == 31 and len(says) > 3


@torch.no_grad()
def test_the_steps_of_training_are_those_of_drafting(head, tiny_llama):
    texts = [[5, 9, 31, 77, 5, 9, 2, 8], [7, 8, 9, 40, 41]]
    batch = collate([make_example(text[:3], text[3:], 99) for text in texts])
    states, features = (
        torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
        for each in zip(*(_features(head, tiny_llama, text) for text in texts), strict=True)
    )
    starts = DraftStarts.of(**batch)
    assert starts.positions.tolist() == [[2, 3, 4, 5, 6], [2, 3, 0, 0, 0]]
    outs = list(EagleLearner(head, tiny_llama, 3).unroll(states, starts))
    for row, text in enumerate(texts):
        for slot, at in enumerate(starts.positions[row][starts.is_start[row]].tolist()):
            tokens, grown = text[1 : at + 2], features[row, : at + 1]
            for step in range(min(3, len(text) - at - 1)):
                says = naive(head, tiny_llama, tokens, grown)
                assert torch.allclose(outs[step][row, slot], says, atol=2e-4, rtol=1e-3)
                tokens, grown = [*tokens, [*text, 0][at + 2 + step]], torch.cat((grown, says[None]))


def test_untrained_steps_have_losses_with_gradients_for_every_weight(tiny_llama):
    examples = [make_example([4, 5], range(10, 22), 99), make_example([3], range(30, 37), 99)]
    batch = collate(examples)
    learner = EagleLearner(EagleHead.fresh(tiny_llama, frequent_tokens(examples, tiny_llama, 40)), tiny_llama, 3)
    learner(**batch)["loss"].backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in learner.parameters())
    assert all(parameter.grad is None for parameter in tiny_llama.parameters())
    assert learner.eval()(**batch)["hits"][0, :, 1].tolist() == [17, 15, 13]


def test_the_loss_of_eagle3_is_the_cross_entropy_with_the_model_at_every_step(tiny_llama):
    torch.manual_seed(3)
    known = [*range(4, 60)]
    examples = [make_example([5, 9, 31], [7, 5, 90, 2, 8, 4], 99), make_example([7], [8, 9, 40, 41], 99)]
    batch, head = collate(examples), EagleHead.fresh(tiny_llama, known)
    learner = EagleLearner(head, tiny_llama, 3)
    with torch.no_grad():
        loss = learner(**batch)["loss"]
        states = hidden_states(tiny_llama, batch["input_ids"], learner.layers)
        starts, expected = DraftStarts.of(**batch), 0.0
        for step, out in enumerate(learner.unroll(states[..., :-32], starts)):
            terms = []
            for row, example in enumerate(examples):
                text = example["input_ids"].tolist()
                for slot, at in enumerate(starts.positions[row][starts.is_start[row]].tolist()):
                    if at + 2 + step < len(text) and text[at + 2 + step] in known:
                        logits = unembed(tiny_llama, states[row, at + 1 + step, -32:])[known]
                        guess = head.logits(out[row, slot]).log_softmax(-1)
                        terms.append(-(logits.softmax(-1) * guess).sum())
            expected += DECAY**step * sum(terms) / len(terms)
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)


def test_the_last_hidden_states_are_the_same_by_either_name(tiny_llama):
    ids = torch.tensor([[4, 5, 6]])
    assert torch.equal(hidden_states(tiny_llama, ids, (-1,)), hidden_states(tiny_llama, ids))


def test_a_reduced_vocabulary_holds_the_tokens_written_most(tiny_llama):
    examples = [make_example([9] * 20, [4, 4, 4, 7, 7, 5], 99)]
    assert frequent_tokens(examples, tiny_llama, 2) == [4, 7]
    head = EagleHead.fresh(tiny_llama, [4, 7])
    assert head.token_ids(torch.tensor([0, 1])).tolist() == [4, 7]
    assert torch.equal(head.lm_head.weight, tiny_llama.lm_head.weight[[4, 7]])
    assert len(frequent_tokens(examples, tiny_llama, 10_000)) == 101


@pytest.mark.parametrize("seed", range(5))
def test_reranking_keeps_the_nodes_likeliest_to_be_reached_with_their_parents(seed):
    rng = np.random.default_rng(seed)
    n = 60
    parents = np.array([rng.integers(0, i + 1) for i in range(n)], np.int32)
    chances, tokens = rng.uniform(0.0, 0.98, n).astype(np.float32), np.arange(n, dtype=np.int32) + 100
    kinds = np.zeros((n, 2), np.int32)
    tree = GuessTree.of(tokens, parents, kinds, chances)
    out_tokens, out_parents, out_chances = tree.best(7, AcceptanceTable(1), 20)
    reach = np.ones(n + 1)
    for i in range(n):
        reach[i + 1] = reach[parents[i]] * chances[i]
    assert out_tokens[0] == 7 and len(out_tokens) == 21
    assert set(out_tokens[1:] - 100 + 1) == set((np.argsort(-reach[1:])[:20] + 1).tolist())
    for place in range(1, 21):
        i = out_tokens[place] - 100
        assert out_chances[place] == chances[i] and out_parents[place] < place
        assert out_tokens[out_parents[place]] == (7 if parents[i] == 0 else parents[i] - 1 + 100)


def test_a_head_reads_back_as_it_was_written(head, tiny_llama, tmp_path):
    write_heads(head, tmp_path, tiny_llama)
    _, read = open_heads(tmp_path, tiny_llama)
    assert type(read) is type(head) and read.hidden_layers == head.hidden_layers
    expected = {n: t.bfloat16().float() if t.is_floating_point() else t for n, t in head.state_dict().items()}
    assert read.state_dict().keys() == expected.keys()
    assert all(torch.equal(read.state_dict()[name], expected[name]) for name in expected)
    assert read.config.rope_parameters == head.config.rope_parameters


def test_reading_a_head_draws_no_random_numbers(head, tiny_llama, tmp_path):
    write_heads(head, tmp_path, tiny_llama)
    before = torch.get_rng_state()
    open_heads(tmp_path, tiny_llama)
    assert torch.equal(torch.get_rng_state(), before)


def _publish(folder, head, **changes):
    """A checkpoint as published: embeddings inside, names and keys of old, no fingerprint."""
    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in head.state_dict().items()
    }
    save_file({**tensors, "embed_tokens.weight": torch.zeros(101, 32)}, folder / "model.safetensors")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    others = {"vocab_size": 101, "rms_norm_eps": 1e-6, "hidden_act": "silu", "num_hidden_layers": 1, "rope_theta": 5e5}
    rope = {"factor": 8.0, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = {"rope_scaling": {**rope, "original_max_position_embeddings": 64}, "max_position_embeddings": 512}
    published = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **others, **scaled}
    (folder / "config.json").write_text(json.dumps(published | changes))


def test_a_published_checkpoint_is_read_with_its_scaled_positions(head, tiny_llama, tmp_path):
    _publish(tmp_path, head, draft_vocab_size=50)
    _, read = open_heads(tmp_path, tiny_llama)
    assert read.config.rope_parameters["rope_type"] == "llama3" and read.config.rope_parameters["rope_theta"] == 5e5
    assert torch.equal(read.fc.weight, head.fc.weight.half().float())
    assert read.hidden_layers == fused_layers(tiny_llama)


def test_a_published_head_of_eagle_1_or_2_is_refused_by_name(head, tiny_llama, tmp_path):
    _publish(tmp_path, head)
    tensors = load_file(tmp_path / "model.safetensors")
    older = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items() if name != "d2t"}
    save_file(older, tmp_path / "model.safetensors")
    with pytest.raises(HeadsError, match="heads of EAGLE-1 and EAGLE-2 were removed: 'lookahead train' trains Medusa"):
        open_heads(tmp_path, tiny_llama)


def test_a_published_head_may_name_its_layers(tiny_llama, tmp_path):
    head = EagleHead.fresh(tiny_llama, range(20))
    _publish(tmp_path, head, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 1]})
    assert open_heads(tmp_path, tiny_llama)[1].hidden_layers == (0, 1, 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"num_hidden_layers": 2}, "EAGLE heads of one layer are served, this one has 2"),
        ({"target_hidden_size": 64}, "as wide as their model"),
        ({"hidden_size": 64}, "they read hidden states of 64"),
        ({"vocab_size": 99}, "they know 99 tokens, and this model 101"),
        ({"num_attention_heads": 8, "head_dim": 8}, "no eagle heads of an architecture that is served.*q_proj"),
        ({"hidden_size": "wide"}, "names no sizes of a layer|heads of another model"),
    ],
)
def test_an_architecture_that_is_not_served_is_refused(tiny_llama, tmp_path, changes, says):
    _publish(tmp_path, EagleHead.fresh(tiny_llama, range(101)), **changes)
    with pytest.raises(HeadsError, match=says):
        open_heads(tmp_path, tiny_llama)


def test_a_vocabulary_beyond_the_models_is_refused(tiny_llama, tmp_path):
    write_heads(EagleHead.fresh(tiny_llama, range(20)), tmp_path, tiny_llama)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "d2t": tensors["d2t"] + 90}, tmp_path / "model.safetensors")
    with pytest.raises(HeadsError, match="d2t names tokens beyond the model's 101"):
        open_heads(tmp_path, tiny_llama)


def test_a_pickle_is_refused(tiny_llama, tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HeadsError, match=r"a pickle.*pytorch_model.safetensors"):
        open_heads(tmp_path, tiny_llama)


@pytest.mark.parametrize("family", cases(FAMILIES[name] for name in ("Gemma3n", "Gemma4", "Gemma4-MoE")))
def test_where_layers_differ_in_size_a_head_has_those_of_the_first(family):
    model = build(family)
    first, layer = model.model.layers[0], EagleHead.fresh(model, range(20)).midlayer
    assert layer.self_attn.k_proj.out_features == first.self_attn.k_proj.out_features
    assert layer.self_attn.o_proj.in_features == first.self_attn.o_proj.in_features
    assert layer.mlp.up_proj.out_features == first.mlp.up_proj.out_features
