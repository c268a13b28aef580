"""Heads on disk: what is written, what is read back, and what is refused by name."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from lookahead.errors import HeadsError
from lookahead.plugins.heads.eagle import EagleHead
from lookahead.plugins.heads.head_files import open_heads, write_heads
from lookahead.plugins.heads.medusa import MedusaHeads
from lookahead.plugins.heads.target import hidden_states, unembed
from lookahead.utils.fingerprints import model_fingerprint
from tests.support.forked import status_of

TINY = {"vocab_size": 101, "num_hidden_layers": 2, "hidden_size": 16}


@pytest.fixture
def heads(tiny_llama):
    """Medusa heads with weights of their own."""
    torch.manual_seed(3)
    made = MedusaHeads.fresh(tiny_llama, heads=3, blocks=2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    return made


@pytest.fixture
def folder(tmp_path, heads, tiny_llama):
    """The same in a folder."""
    write_heads(heads, str(tmp_path / "heads"), tiny_llama)
    return tmp_path / "heads"


def _rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_heads_read_back_guess_what_they_guessed(folder, heads, tiny_llama):
    hidden = torch.randn(5, 32)
    _, read = open_heads(str(folder), tiny_llama)
    assert torch.equal(read(hidden), heads.bfloat16().float()(hidden))
    assert (len(read), read.blocks) == (3, 2)


def test_heads_that_could_not_be_written_leave_those_before_and_nothing_beside(folder, heads, tiny_llama, monkeypatch):
    before = (folder / "medusa_lm_head.safetensors").read_bytes()

    def fail(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("lookahead.utils.atomic.os.fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            write_heads(heads, str(folder), tiny_llama)
    assert (folder / "medusa_lm_head.safetensors").read_bytes() == before
    assert sorted(os.listdir(folder)) == ["config.json", "medusa_lm_head.safetensors"]


def test_what_a_killed_process_left_of_heads_is_removed_when_they_are_written_again(tmp_path, tiny_llama):
    def killed():
        os.replace = lambda *_: os._exit(9)
        write_heads(MedusaHeads.fresh(tiny_llama, heads=1), tmp_path / "heads", tiny_llama)

    assert status_of(killed) == 9
    (left,) = os.listdir(tmp_path / "heads")
    write_heads(MedusaHeads.fresh(tiny_llama, heads=1), tmp_path / "heads", tiny_llama)
    assert sorted(os.listdir(tmp_path / "heads")) == ["config.json", "medusa_lm_head.safetensors"]
    assert left.startswith(".medusa_lm_head.safetensors.")


def test_fresh_heads_say_what_the_lm_head_says(tiny_llama):
    hidden = torch.randn(5, 32)
    with torch.no_grad():
        for logits in MedusaHeads.fresh(tiny_llama, heads=2)(hidden):
            assert torch.equal(logits, tiny_llama.lm_head(hidden))


def test_a_published_checkpoint_has_as_many_heads_as_its_weights(tmp_path, tiny_llama):
    tensors = {}
    for head in range(5):
        tensors[f"{head}.0.linear.weight"] = torch.randn(32, 32)
        tensors[f"{head}.0.linear.bias"] = torch.randn(32)
        tensors[f"{head}.1.weight"] = torch.randn(101, 32)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    published = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert len(open_heads(str(tmp_path), tiny_llama)[1]) == 5


def test_heads_are_found_in_a_checkpoint_that_holds_the_model_too(tmp_path, folder, heads, tiny_llama):
    own = load_file(folder / "medusa_lm_head.safetensors")
    whole = {"model.norm.weight": torch.ones(32), **{f"medusa_head.{name}": own[name] for name in own}}
    save_file(whole, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    hidden = torch.randn(2, 32)
    assert torch.equal(open_heads(str(tmp_path), tiny_llama)[1](hidden), heads.bfloat16().float()(hidden))


def test_heads_of_another_model_are_refused_by_its_fingerprint(folder, looping_llama, tiny_llama):
    with pytest.raises(HeadsError, match=rf"heads of another model .*{model_fingerprint(tiny_llama)}.*this model"):
        open_heads(str(folder), looping_llama)


@pytest.mark.parametrize(("hidden", "vocab"), [(16, 101), (32, 99)])
def test_heads_of_another_size_are_refused_even_without_a_fingerprint(tmp_path, tiny_llama, hidden, vocab):
    tensors = {
        "0.0.linear.weight": torch.zeros(hidden, hidden),
        "0.0.linear.bias": torch.zeros(hidden),
        "0.1.weight": torch.zeros(vocab, hidden),
    }
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HeadsError, match=r"heads of another model .unnamed.*(16.*32|99.*101)"):
        open_heads(str(tmp_path), tiny_llama)


@pytest.mark.parametrize("direct", [True, False])
def test_a_pickle_is_not_opened_and_the_message_says_how_to_convert_it(tmp_path, tiny_llama, direct, monkeypatch):
    path = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": torch.zeros(32, 32)}, path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(HeadsError, match=r"a pickle.*safetensors.torch import save_file.*medusa_lm_head.safetensors"):
        open_heads(str(path if direct else tmp_path), tiny_llama)


def test_the_conversion_that_the_message_names_works(tmp_path, heads, tiny_llama, folder, monkeypatch):
    import re

    torch.save(dict(load_file(folder / "medusa_lm_head.safetensors")), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HeadsError) as caught:
        open_heads(str(tmp_path), tiny_llama)
    script = re.search(r'python -c "(.*)"', str(caught.value)).group(1)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    hidden = torch.randn(2, 32)
    assert torch.equal(open_heads(str(tmp_path), tiny_llama)[1](hidden), heads.bfloat16().float()(hidden))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "must hold a JSON object, got list"),
        (lambda folder: (folder / "medusa_lm_head.safetensors").write_bytes(b"\0" * 20), "cannot be read"),
        (lambda folder: (folder / "medusa_lm_head.safetensors").unlink(), "no medusa heads: looked for"),
        (lambda folder: _rewrite_config(folder, lookahead_heads="eagle"), "no eagle heads: looked for"),
        (
            lambda folder: save_file({"fc.weight": torch.zeros(1)}, folder / "medusa_lm_head.safetensors"),
            "no Medusa heads; it holds fc.weight",
        ),
    ],
    ids=["no config", "config of another shape", "damaged", "no weights", "another kind", "other weights"],
)
def test_what_is_wrong_with_a_folder_is_said(folder, tiny_llama, spoil, says):
    spoil(folder)
    with pytest.raises(HeadsError, match=says):
        open_heads(str(folder), tiny_llama)


HOSTILE_SIZES = [
    *({"num_attention_heads": heads} for heads in (0, -4, 3, "4", 10**30)),
    *({"num_key_value_heads": heads} for heads in (0, 3, -1, [2])),
    *({"head_dim": size} for size in (7, -8, 10**30)),
    *({"intermediate_size": size} for size in (-1, 10**15, 10**30, {})),
    *({"rms_norm_eps": eps} for eps in ("small", [1], {})),
    *({"rope_parameters": rope} for rope in ("plain", {"rope_type": "none"}, {"rope_type": "yarn"}, [1])),
    *({"vocab_size": size} for size in ("101", 10**30)),
    *({"hidden_size": size} for size in (0, "32", 10**30)),
]


@pytest.fixture(scope="module")
def eagle(tmp_path_factory, tiny_llama):
    """A folder of an EAGLE-3 head."""
    folder = tmp_path_factory.mktemp("eagle")
    torch.manual_seed(3)
    write_heads(EagleHead.fresh(tiny_llama, range(20)), folder, tiny_llama)
    return folder


@pytest.mark.parametrize("sizes", HOSTILE_SIZES, ids=str)
def test_sizes_that_nobody_would_write_are_refused_at_once_by_one_kind_of_error(eagle, tmp_path, tiny_llama, sizes):
    (tmp_path / "model.safetensors").symlink_to(eagle / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((eagle / "config.json").read_text()) | sizes))
    with pytest.raises(HeadsError, match=str(tmp_path)):
        open_heads(tmp_path, tiny_llama)


def test_heads_of_a_removed_kind_are_refused_with_the_kinds_that_stay(folder, tiny_llama):
    _rewrite_config(folder, lookahead_heads="mtp")
    advice = "'mtp', which lookahead trained, were removed: 'lookahead train' trains Medusa"
    with pytest.raises(HeadsError, match=advice):
        open_heads(folder, tiny_llama)
    _rewrite_config(folder, lookahead_heads="hydra")
    with pytest.raises(HeadsError, match="heads of an unknown kind, 'hydra'"):
        open_heads(folder, tiny_llama)


def test_a_folder_does_not_become_native_by_its_name(folder, tiny_llama, monkeypatch):
    folder.rename(folder.with_name("native"))
    monkeypatch.chdir(folder.parent)
    assert open_heads("./native", tiny_llama)[0] == "medusa"
    with pytest.raises(HeadsError, match=r"has no MTP layers|need a newer transformers"):
        open_heads("native", tiny_llama)


def test_a_config_nested_without_end_or_a_pipe_in_its_place_is_refused(folder, tiny_llama):
    (folder / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(HeadsError, match=r"config\.json: cannot be read: nested too deeply"):
        open_heads(folder, tiny_llama)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(HeadsError, match=r"config\.json: cannot be read.*not a regular file"):
        open_heads(folder, tiny_llama)


@pytest.mark.parametrize("shape", [(), (0,), (20, 20), (19,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["d2t", "lm_head.weight", "fc.weight", "midlayer.self_attn.k_proj.weight"])
def test_a_tensor_of_any_other_shape_is_refused(eagle, tmp_path, tiny_llama, name, shape, dtype):
    tensors = load_file(eagle / "model.safetensors")
    save_file({**tensors, name: torch.zeros(shape, dtype=dtype)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(eagle / "config.json")
    with pytest.raises(HeadsError, match=str(tmp_path)):
        open_heads(tmp_path, tiny_llama)


@pytest.mark.parametrize("layers", [[99, 0, 1], [-5, 0, 1], ["low", 0, 1], 7, {"low": 0}, [0, 1]], ids=str)
def test_layers_that_the_model_has_not_are_refused(eagle, tmp_path, tiny_llama, layers):
    (tmp_path / "model.safetensors").symlink_to(eagle / "model.safetensors")
    config = json.loads((eagle / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": layers}))
    with pytest.raises(HeadsError, match=str(tmp_path)):
        open_heads(tmp_path, tiny_llama)


@pytest.mark.parametrize("number", ["999999999", "-1", "²", "x"])
def test_medusa_heads_are_as_many_as_there_are_tensors_of(folder, tiny_llama, number):
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    tensors[f"{number}.2.weight"] = torch.zeros(101, 32)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    with pytest.raises(HeadsError, match="heads"):
        open_heads(folder, tiny_llama)


def test_a_head_that_lacks_a_tensor_is_refused(folder, tiny_llama):
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    del tensors["1.1.linear.bias"]
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    with pytest.raises(HeadsError, match=r"1\.1\.linear\.bias"):
        open_heads(str(folder), tiny_llama)


def test_a_copy_in_another_precision_has_the_same_fingerprint_and_no_trained_one(tiny_llama, looping_llama):
    import copy

    assert model_fingerprint(copy.deepcopy(tiny_llama).bfloat16()) == model_fingerprint(tiny_llama)
    trained = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        trained.model.layers[1].post_attention_layernorm.weight[3] += 0.1
    assert len({model_fingerprint(model) for model in (tiny_llama, looping_llama, trained)}) == 3


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(logit_scale=0.3, bos_token_id=1, eos_token_id=2),
        GraniteConfig(logits_scaling=4.0),
        Gemma2Config(final_logit_softcapping=5.0, head_dim=8),
    ],
    ids=lambda config: config.model_type,
)
def test_hidden_states_become_the_logits_of_the_model_itself(config):
    for name, value in {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}.items():
        setattr(config, name, value)
    config.num_attention_heads, config.num_key_value_heads, config.pad_token_id = 4, 2, 0
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[:2]
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 50, (2, 7))
    with torch.no_grad():
        states, logits = hidden_states(model, ids), model(ids).logits
        assert torch.allclose(unembed(model, states), logits, atol=1e-6)
        some = torch.tensor([4, 5, 41])
        assert torch.allclose(unembed(model, states, some), logits[..., some], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MambaForCausalLM(MambaConfig(**TINY)), "MambaForCausalLM has no attention, so it takes heads of Med"),
        (
            lambda: OPTForCausalLM(OPTConfig(**TINY, word_embed_proj_dim=8, num_attention_heads=2)),
            "OPTForCausalLM reads 8 numbers, and its layers have 16",
        ),
    ],
    ids=["no attention", "narrow LM head"],
)
def test_a_model_that_takes_no_head_of_eagle_is_told_why(make, says):
    with pytest.raises(HeadsError, match=says):
        EagleHead.fresh(make(), range(20))
