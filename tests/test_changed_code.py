"""Whatever a user changes of a model's code, hooks and flags, the tokens are those of `model.generate`."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from functools import cache
from types import MethodType
from typing import Any

import pytest
import torch

import lookahead
from lookahead import LookaheadConfig, UnsupportedModelError
from lookahead.backend.cpu import whole_pass
from lookahead.decoding import plan
from lookahead.kernels import layer_ops
from lookahead.model.model_state import state_of
from lookahead.proposers.base import Proposer
from tests.support.adversarial_proposers import drafting_by, random_trees
from tests.support.changed_code import CHANGES, PLACES, Switched, patched
from tests.support.products import kept_choice
from tests.support.small_layers import HALF, MODELS, PACKED, SINGLE, attends, made, serving

DRAFTED = LookaheadConfig(draft="fixed")
TRUSTED = LookaheadConfig(trust_user_code=True)
IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9]])
FAMILIES = [name for name in MODELS if "window" not in name]


def tokens(model: Any, **options: Any) -> list[int]:
    with warnings.catch_warnings(), drafting_by(random_trees(101)):
        warnings.simplefilter("ignore")  # it may be decoded plainly
        found: list[int] = model.generate(IDS, max_new_tokens=8, do_sample=False, **options)[0].tolist()
    return found


def ours(model: Any, **options: Any) -> list[int]:
    options["custom_generate"] = lookahead.decode
    try:
        return tokens(model, lookahead_config=DRAFTED, **options)
    except UnsupportedModelError:  # drafts were asked for, and cannot be served
        return tokens(model, **options)


@cache
def used(name: str, dtype: torch.dtype) -> Any:
    """A model that was decoded from as it is."""
    model = made(name, dtype, **PACKED)
    assert ours(model) == tokens(model)
    return model


@pytest.fixture(scope="module", autouse=True)
def unchanged() -> Iterator[None]:
    """After all changes were undone, a model has the tokens that it had."""
    before = {(name, dtype): ours(used(name, dtype)) for name, dtype in (("llama", HALF), ("qwen3", SINGLE))}
    yield
    assert all(ours(used(*which)) == tokens(used(*which)) == said for which, said in before.items())
    used.cache_clear()


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_changed_after_a_first_use_is_what_runs(change, dtype, name):
    model = used(name, dtype)
    with CHANGES[change](model):
        assert ours(model) == tokens(model)


# What shows at once in other numbers is found by the same comparison, whatever it is.
SUBTLE = [
    name for name in CHANGES if not name.startswith(("global", "torch", "class method")) and "everywhere" not in name
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", SUBTLE)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_what_was_changed_before_a_first_use_is_what_runs(change, dtype):
    model = made("llama", dtype, **PACKED)
    with CHANGES[change](model):
        assert ours(model) == tokens(model)
    assert ours(model) == tokens(model)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("place", ["an MLP", "its body"])
def test_a_hook_that_is_switched_on_after_a_first_use_is_heard(place, dtype):
    model, hook = made("llama", dtype, **PACKED), Switched()
    PLACES[place](model).register_forward_hook(hook)
    assert ours(model) == tokens(model)
    hook.strength = 40
    assert ours(model) == tokens(model)


def test_kernels_that_compute_something_else_serve_no_pass_and_the_log_says_so(monkeypatch, caplog, own_cache_folder):
    run = whole_pass.PassTable.run
    monkeypatch.setattr(whole_pass.PassTable, "run", lambda *arguments: run(*arguments).neg())
    with kept_choice(own_cache_folder, "packed"):
        for dtype in (HALF, SINGLE):
            model = made("llama", dtype, **PACKED)
            assert ours(model) == tokens(model)
            assert ours(model) == tokens(model)
    named = [each for each in caplog.messages if "LlamaForCausalLM is decoded without kernels" in each]
    assert len(named) == 1 + attends(HALF)  # once for every model with such passes


def test_an_error_that_turns_a_faster_path_off_is_logged_once_with_its_place(caplog):
    def picky(self: Any, x: Any) -> Any:
        if x.shape[1] == 5:
            raise TypeError("not five tokens at a time")
        return forward(self, x)

    model = made("llama", SINGLE)
    mlp = model.model.layers[0].mlp
    forward, mlp.forward = type(mlp).forward, MethodType(picky, mlp)
    for _ in range(2):
        with pytest.warns(UserWarning, match="not five tokens at a time"):
            options = {"custom_generate": lookahead.decode, "lookahead_config": TRUSTED}
            model.generate(IDS[:, :3], max_new_tokens=4, **options)
    told = [each for each in caplog.records if "not five tokens at a time" in each.getMessage()]
    assert {each.levelname for each in told} == {"WARNING"}
    assert len({each.getMessage() for each in told}) == len(told) > 0
    assert all("in picky)" in each.getMessage() and __file__ in each.getMessage() for each in told)


OTHERWISE: list[dict[str, Any]] = [
    {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4},
    {"num_beams": 2, "use_cache": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OTHERWISE, ids=str)
def test_what_generate_computes_otherwise_is_not_promised_bit_for_bit(options, tiny_tokenizer):
    model = made("llama", HALF)
    plain = lookahead.generate(model, tiny_tokenizer, IDS, max_new_tokens=8)
    assert plain.stats.exactness == "bitwise"
    result = lookahead.generate(model, tiny_tokenizer, IDS, max_new_tokens=8, seed=1, **options)
    assert result.stats.exactness == "rounding"


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs a signal of one's own")
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_a_signal_handler_may_decode_wherever_it_interrupts(dtype):
    model = made("llama", dtype)
    expected, calls = tokens(model), []

    def handle(*_: Any) -> None:
        calls.append(ours(model))

    before = signal.signal(signal.SIGUSR1, handle)
    seen = [0]
    try:
        for at in (1, 2, 5, 9, 14, 20, 26):

            def hook(module: Any, args: Any, at: int = at) -> None:
                seen[0] += 1
                if seen[0] == at:
                    signal.raise_signal(signal.SIGUSR1)

            seen[0] = 0
            handle_of_hook = model.model.embed_tokens.register_forward_pre_hook(hook)
            assert ours(model) == expected
            handle_of_hook.remove()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert calls and all(each == expected for each in calls)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs a signal of one's own")
def test_a_signal_handler_leaves_what_its_thread_is_changing_alone(monkeypatch):
    model, used, own = made("llama", SINGLE), [], plan.assemble
    expected, learned = tokens(model), state_of(model).learned

    def assemble(*arguments: Any, **options: Any) -> Any:
        used.append(state_of(model).learned is learned)
        return own(*arguments, **options)

    monkeypatch.setattr(plan, "assemble", assemble)
    before = signal.signal(signal.SIGUSR1, lambda *_: used.append(ours(model) == expected))
    try:
        with learned.lock:  # as while a step learns
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert used == [False, True, True, True] and state_of(model).learned is learned


@pytest.mark.parametrize("new", [4, 20])
def test_a_users_loop_that_sees_beyond_a_sliding_window_is_what_runs(new):
    model = made("mistral with a window", SINGLE, sliding_window=16)
    with CHANGES["a loop with a steering vector"](model):  # whose mask is that of full attention
        plain = model.generate(IDS, max_new_tokens=new, do_sample=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = model.generate(IDS, max_new_tokens=new, do_sample=False, custom_generate=lookahead.decode)
        assert torch.equal(got, plain)


def test_layers_that_cannot_be_compared_are_named_in_the_log(caplog):
    def picky(own: Any) -> Any:
        def rotation(*args: Any, **options: Any) -> Any:
            raise ValueError("no hidden states today")

        return rotation

    model = made("llama", SINGLE, hidden_size=96, head_dim=16)
    with torch.inference_mode(), patched(layer_ops, "rotation", picky), serving(model):
        pass
    assert any("layers of LlamaDecoderLayer are not fused: ValueError" in each for each in caplog.messages)


class Guest:
    """A user's object that doubles a weight of a model after its third token, as a streamer, processor or proposer."""

    def __init__(self, model: Any) -> None:
        self._weight, self._tokens = model.model.layers[1].mlp.down_proj.weight, 0

    def see(self) -> None:
        self._tokens += 1
        if self._tokens == 3:
            with torch.no_grad():
                self._weight.mul_(2)

    def put(self, value: Any) -> None:
        if value.numel() == 1:
            self.see()

    def end(self) -> None:
        pass

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.see()
        return scores


class GuestProposer(Proposer):
    """Offers nothing."""

    sources = ("guest",)

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def propose(self, row: int, max_nodes: int) -> None:
        return None

    def observe(self, row: int, feedback: Any, placed: Any) -> None:
        self._guest.see()


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("place", ["streamer", "processor", "proposer"])
def test_a_weight_that_a_guest_of_the_loop_changes_is_read_by_the_next_step(place, dtype):
    outputs = []
    for is_ours in (False, True):
        guest = Guest(model := made("llama", dtype, **PACKED))
        ways: dict[str, Any] = {"streamer": guest}
        if is_ours:
            proposers = (lambda call, guest=guest: GuestProposer(guest),) if place == "proposer" else ()
            ways = {"lookahead_config": LookaheadConfig(proposers=proposers), "custom_generate": lookahead.decode}
            if place == "streamer":
                ways["lookahead_streamer"] = guest
            elif place == "processor":
                ways["logits_processor"] = [lookahead.PerRow(lambda guest=guest: guest)]
        outputs.append(model.generate(IDS, max_new_tokens=12, do_sample=False, **ways)[0].tolist())
        assert guest._tokens >= 11
    assert outputs[0] == outputs[1] != ours(made("llama", dtype, **PACKED))


@pytest.mark.parametrize("ways", [lookahead.generate, lookahead.stream, lookahead.stream_many])
def test_every_call_of_the_api_sees_what_changed_of_the_model_before_it(ways: Any, tiny_tokenizer: Any) -> None:
    model = made("llama", SINGLE)
    prompt, options = IDS[0].tolist(), {"max_new_tokens": 8, "do_sample": False}
    given = prompt if ways is lookahead.stream else [prompt]

    def call() -> list[int]:
        result = ways(model, tiny_tokenizer, given, **options)
        if ways is lookahead.stream_many:
            (done,) = result
            if done.error is not None:
                raise done.error
            return list(done.token_ids)
        _ = "".join(result) if ways is lookahead.stream else None
        return list(result.token_ids if ways is lookahead.stream else result.token_ids[0])

    def own() -> list[int]:
        return list(model.generate(IDS, **options)[0, IDS.shape[1] :].tolist())

    assert call() == own()
    hook = model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: out * 3 if out.shape[1] == 1 else out)
    with pytest.warns(UserWarning, match="is your own code"):
        assert call() == own()
    hook.remove()
    assert call() == own()
    model.config.max_position_embeddings = 8
    with pytest.raises(lookahead.PromptError, match="has 8 positions"):
        call()
