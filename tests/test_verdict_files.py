"""Verdicts about a model are found by a later process, where all that they depend on is the same."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

import lookahead
from lookahead.backend.support import Support
from lookahead.loading.quantized import QuantizedLinear
from lookahead.model import model_state, state_scope
from lookahead.model.known_code import users_code
from lookahead.model.model_state import recognise, state_of
from lookahead.model.state_layers import KEEPS_STATES
from lookahead.model.state_scope import Mixers, mixers_of
from lookahead.model.verdict_files import verdict_file
from lookahead.utils.kept_values import truth
from tests.conftest import _random_llama
from tests.support.families import FAMILIES, build

Change = Callable[[Any, pytest.MonkeyPatch], object]


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let verdicts be kept, which other tests do without; the folder of their files."""
    monkeypatch.setattr(model_state, "verdict_file", verdict_file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lookahead" / "verdicts"


def llama() -> LlamaForCausalLM:
    """The same model as another process would load it: a new object, with new state."""
    torch.manual_seed(0)
    return _random_llama().eval()


def is_probed(model: Any, verdict: Any = True, parse: Any = truth, name: str = "a verdict") -> bool:
    """Whether a verdict is probed; it is the verdict, too, whether it is or not."""
    calls: list[int] = []
    recognise(model, trusted=True)
    assert state_of(model).probed(name, model, lambda: (calls.append(1), verdict)[1], parse) == verdict
    return bool(calls)


def test_a_file_is_named_without_asking_all_distributions_for_their_packages(monkeypatch):
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: pytest.fail("it takes a second"))
    assert verdict_file(llama()) is not None


@pytest.mark.parametrize("verdict", [True, False])
def test_a_later_process_finds_a_verdict(verdict):
    assert is_probed(llama(), verdict)
    assert not is_probed(llama(), verdict)
    assert is_probed(llama(), verdict, name="another verdict")


@pytest.mark.parametrize(
    "verdict",
    [Support("trees"), Support("chains", "it says so", behind_own=True), Support("none", "", (("dynamic", 9),))],
)
def test_what_a_model_can_verify_is_found_as_it_was_kept(verdict):
    assert is_probed(llama(), verdict, Support.of)
    assert not is_probed(llama(), verdict, Support.of)


def test_a_verdict_without_a_form_in_json_is_probed_by_every_process(kept):
    assert is_probed(llama(), parse=None) and is_probed(llama(), parse=None)
    assert not kept.exists()


def test_another_process_gives_a_model_the_same_file(tmp_path):
    own, name = verdict_file(llama()), tmp_path / "name"
    code = f"from tests.test_verdict_files import *; open({str(name)!r}, 'w').write(str(verdict_file(llama())))"
    subprocess.run([sys.executable, "-c", f"import torch; torch.set_num_threads(1); {code}"], check=True)
    assert name.read_text() == str(own)


def _scale_one_weight(model: Any, _: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1, -1] *= 1 + 2**-20


def _exchange_activation(model: Any, _: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


_PAIR = "rotate_half", "repeat_kv"
SAME_CODE: dict[str, Change] = {
    "one weight": _scale_one_weight,
    "one weight by .data": lambda model, _: model.lm_head.weight.data[0, 0].neg_(),
    "type": lambda model, _: model.bfloat16(),
    "buffer": lambda model, _: model.model.rotary_emb.inv_freq.mul_(1 + 2**-20),
    "class of a module": _exchange_activation,
    "attribute of a layer": lambda model, _: setattr(model.model.layers[1].self_attn, "scaling", 0.5),
    "list in a module": lambda model, _: setattr(model.model.layers[1], "places", [1, 2]),
    "configuration": lambda model, _: setattr(model.config, "rms_norm_eps", 1e-4),
    "attention": lambda model, _: model.set_attn_implementation("eager"),
    "threads": lambda model, _: torch.set_num_threads(2),
    "another of transformers' functions": lambda model, patch: patch.setattr(
        modeling_llama.LlamaMLP, "forward", modeling_llama.LlamaRMSNorm.forward
    ),
    "two functions exchanged": lambda model, patch: [
        patch.setattr(modeling_llama, *pair)
        for pair in zip(_PAIR, [vars(modeling_llama)[name] for name in reversed(_PAIR)], strict=True)
    ],
    "torch's precision": lambda model, patch: patch.setattr(torch.backends.mkldnn, "enabled", False),
    "sources": lambda model, patch: patch.setattr("lookahead.model.verdict_files.sources_digest", lambda _: b"others"),
    "machine": lambda model, patch: patch.setattr(
        "lookahead.model.verdict_files.machine_fingerprint", lambda: "another"
    ),
}


@pytest.mark.parametrize("change", SAME_CODE.values(), ids=SAME_CODE)
def test_a_verdict_is_probed_again_where_anything_that_it_depends_on_changed(change, monkeypatch):
    assert is_probed(llama())
    model = llama()
    change(model, monkeypatch)
    assert is_probed(model)
    assert not is_probed(model)


class UsersMLP(modeling_llama.LlamaMLP):
    """Code of a user's, whose attributes may hold anything."""


def _users_function(self: Any, x: Any) -> Any:
    return x


HERE_ALONE: dict[str, Change] = {
    "hook": lambda model, _: model.lm_head.register_forward_hook(lambda *_: None),
    "hook before": lambda model, _: model.model.layers[0].register_forward_pre_hook(lambda *_: None),
    "forward of a module's own": lambda model, _: setattr(model.lm_head, "forward", model.lm_head.forward),
    "class of a user": lambda model, _: setattr(model.model.layers[0].mlp, "__class__", UsersMLP),
    "method of a user": lambda model, patch: patch.setattr(modeling_llama.LlamaMLP, "forward", _users_function),
    "function of a user": lambda model, patch: patch.setattr(modeling_llama, "rotate_half", lambda x: x),
    "compiled module": lambda model, _: model.model.layers[0].mlp.compile(),
    "weights elsewhere": lambda model, _: model.lm_head.to("meta"),
}


@pytest.mark.parametrize("change", HERE_ALONE.values(), ids=HERE_ALONE)
def test_nothing_is_kept_where_another_process_could_not_tell_what_runs(change, monkeypatch, kept):
    model = llama()
    change(model, monkeypatch)
    assert is_probed(model) and not kept.exists()


def _quantized() -> LlamaForCausalLM:
    model = llama().bfloat16()
    model.set_submodule("lm_head", QuantizedLinear(model.lm_head, "int8"))
    return model


def test_layers_of_this_package_are_known_code_unless_a_user_changes_them(kept, monkeypatch):
    assert not users_code(_quantized())
    assert is_probed(_quantized()) and not is_probed(_quantized())
    files = len(list(kept.iterdir()))

    @functools.wraps(QuantizedLinear.forward)
    def changed(self: Any, x: Any) -> Any:
        return changed.__wrapped__(self, x) * 2

    monkeypatch.setattr(QuantizedLinear, "forward", changed)
    assert users_code(_quantized()).startswith("QuantizedLinear.forward, ")
    assert is_probed(_quantized()) and len(list(kept.iterdir())) == files


def test_a_hook_of_all_modules_keeps_verdicts_from_files(kept):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert is_probed(llama()) and not kept.exists()
    finally:
        handle.remove()


def test_a_verdict_that_came_with_a_problem_is_told_by_every_process(kept):
    def probe() -> bool:
        state.note_problem("a path", "it raised")
        return False

    for _ in range(2):
        model = llama()
        state = state_of(model)
        for _ in range(2):  # the second time the problem is known
            recognise(model)
            assert state.probed("a verdict", model, probe, truth) is False
            with torch.no_grad():
                model.lm_head.weight += 0.5
        assert state.problems == {"a path": "it raised"} and not kept.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 9999, '{"values": 3}', '{"values": {"a verdict": 1}}', '{"values": {"a verdict": {}}}'],
)
def test_a_file_of_verdicts_that_holds_something_else_is_written_anew(text, kept):
    assert is_probed(llama())
    (file,) = kept.glob("*.json")
    file.write_text(text)
    assert is_probed(llama()) and not is_probed(llama())


@pytest.mark.parametrize("values", ["trees", 3, {}, {"shape": "none", "reason": "", "ropes": [], "behind_own": 1}])
def test_a_value_that_is_no_support_is_refused(values):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Support.of(values)


@pytest.mark.skipif(not KEEPS_STATES, reason="states are not in caches of this transformers")
def test_the_modules_with_states_are_found_once_for_all_processes(monkeypatch):
    found = mixers_of(build(FAMILIES["Lfm2"]))
    monkeypatch.setattr(state_scope, "_find_mixers", lambda *_: pytest.fail("they are found again"))
    assert found.layers and mixers_of(build(FAMILIES["Lfm2"])) == found


@pytest.mark.parametrize("value", [3, [], [{}], [3, 4], [{"layers.0": [0]}, "4"], [{"layers.0": ["0"]}, 4]])
def test_a_value_that_names_no_modules_with_states_is_refused(value):
    with pytest.raises((TypeError, ValueError)):
        Mixers.of(value)


def test_a_folder_that_cannot_be_written_costs_a_probe_in_every_process(kept):
    kept.parent.mkdir(parents=True)
    kept.write_text("no folder")
    assert is_probed(llama()) and is_probed(llama())


def test_tokens_are_those_of_transformers_by_verdicts_that_were_found(kept):
    ids = torch.arange(1, 9)[None]
    alone = f"support for a row alone, {torch.get_num_threads()} threads"
    for dtype, name in {torch.float32: "support", torch.bfloat16: alone}.items():
        for _ in range(2):
            model: Any = llama().to(dtype)
            given = {"input_ids": ids, "max_new_tokens": 24, "do_sample": False}
            expected = model.generate(**given)
            assert torch.equal(model.generate(**given, custom_generate=lookahead.decode), expected)
        assert not is_probed(llama().to(dtype), Support("trees"), Support.of, name)


def test_a_model_has_the_same_file_after_torch_compiled_code_of_its_class():
    own = verdict_file(llama())
    torch.compile(modeling_llama.rotate_half, backend="eager")(torch.ones(1, 4))
    assert any(name.startswith("__compiled_fn") for name in vars(modeling_llama))
    assert verdict_file(llama()) == own
