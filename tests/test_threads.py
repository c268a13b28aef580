"""One model on several threads: every call gives what it gives alone, whatever the others do meanwhile."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier, Event, get_ident
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

import lookahead
from lookahead import LookaheadConfig

FIXED = LookaheadConfig(draft="fixed")
IDS = torch.tensor([[1, 5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9]])
PADDED = {
    "input_ids": torch.tensor([[0, 0, 5, 9, 31, 5], [7, 8, 9, 7, 8, 9]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}
OPTIONS: dict[str, Any] = {"pad_token_id": 0, "do_sample": False}
PATIENCE_S = 30.0


def ours(model: Any, **options: Any) -> torch.Tensor:
    """Speculative decoding with drafts in every step that has any."""
    kwargs: dict[str, Any] = {**OPTIONS, "max_new_tokens": 40, "lookahead_config": FIXED, **options}
    tokens: torch.Tensor = model.generate(IDS, **kwargs, custom_generate=lookahead.decode)
    return tokens


@torch.no_grad()
def forward(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(**PADDED).logits
    return logits


USES: dict[str, Callable[[Any], torch.Tensor]] = {
    "lookahead": ours,
    "generate": lambda model: model.generate(IDS, **OPTIONS, max_new_tokens=20),
    "batch": lambda model: model.generate(**PADDED, **OPTIONS, max_new_tokens=20),
    "one token": lambda model: model.generate(IDS, **OPTIONS, max_new_tokens=1, custom_generate=lookahead.decode),
    "beams": lambda model: model.generate(IDS, **OPTIONS, max_new_tokens=8, num_beams=3),
    "forward": forward,
}


class Blocking(LogitsProcessor):
    """Changes nothing, and waits on its third call."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.calls, self.wait = 0, wait

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.calls += 1
        if self.calls == 3:
            self.wait()
        return scores


class Pause:
    """A decode on a thread of its own that stands still within a step until it is let go on."""

    def __init__(self) -> None:
        self.reached, self.opened = Event(), Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    @contextmanager
    def inside(self, model: Any, where: str) -> Iterator[Any]:
        """Yield the future of a decode that stands in a pass over a tree, or in a logits processor."""
        pool, hook = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)), None
        thread = pool.submit(get_ident).result()
        options: dict[str, Any] = {}
        if where == "processor":
            options["logits_processor"] = [Blocking(self.wait)]
        else:
            widths: list[int] = []

            def wait_in_a_tree(_: Any, args: tuple[torch.Tensor], __: Any) -> None:
                if get_ident() == thread and not self.reached.is_set():
                    widths.append(args[0].shape[1])
                    if len(widths) > 1 and widths[-1] > 1:  # the first one is the prompt's
                        self.wait()

            hook = model.model.layers[0].mlp.register_forward_hook(wait_in_a_tree)
            options["lookahead_config"] = replace(FIXED, trust_user_code=True)
            ours(model, **options)  # which probes it with the hook, or the decode would stand in a pass of the probe
        decode = pool.submit(ours, model, **options)
        try:
            assert self.reached.wait(PATIENCE_S), decode.exception()
            yield decode
        finally:
            self.opened.set()
            pool.shutdown()
            if hook is not None:
                hook.remove()


def copied(model: LlamaForCausalLM, attention: str = "sdpa") -> LlamaForCausalLM:
    """The same weights, never met before, without the hooks that transformers leaves, which cannot be pickled."""
    fresh = LlamaForCausalLM(copy.deepcopy(model.config)).eval()
    fresh.load_state_dict(model.state_dict())
    fresh.set_attn_implementation(attention)
    return fresh


def is_as_it_was(model: Any, attention: str) -> bool:
    configs = [module.config for module in model.modules() if "config" in vars(module)]
    return all(config is model.config for config in configs) and model.config._attn_implementation == attention


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("where", ["pass", "processor"])
def test_a_model_in_the_middle_of_a_decode_is_for_other_threads_as_it_was(
    looping_llama: LlamaForCausalLM, where: str, attention: str
) -> None:
    model = copied(looping_llama, attention)
    alone = {name: use(model) for name, use in USES.items()}
    with Pause().inside(model, where) as decode:
        for name, use in USES.items():
            assert torch.equal(use(model), alone[name]), name
        twin = copy.deepcopy(model)
        unpickled = pickle.loads(pickle.dumps(model)) if where == "processor" else twin
    assert torch.equal(decode.result(), alone["lookahead"])
    assert all(is_as_it_was(each, attention) for each in (model, twin, unpickled))
    for module in twin.modules():
        module._forward_hooks.clear()
    assert torch.equal(forward(twin), alone["forward"]) and torch.equal(ours(twin), alone["lookahead"])


@pytest.mark.parametrize("where", ["pass", "processor"])
def test_two_models_of_one_configuration_object_do_not_see_each_other(
    looping_llama: LlamaForCausalLM, where: str
) -> None:
    model = copied(looping_llama)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        other = LlamaForCausalLM(model.config).eval()
    assert other.config is model.config
    alone = {name: use(other) for name, use in USES.items()}
    expected = ours(model)
    with Pause().inside(model, where) as decode:
        assert other.config._attn_implementation == "sdpa"
        for name, use in USES.items():
            assert torch.equal(use(other), alone[name]), name
    assert torch.equal(decode.result(), expected)


def test_a_decode_that_fails_leaves_one_on_another_thread_alone(looping_llama: LlamaForCausalLM) -> None:
    model = copied(looping_llama)
    expected = ours(model)

    def fail() -> None:
        raise RuntimeError("on purpose")

    with Pause().inside(model, "pass") as decode:
        with pytest.raises(RuntimeError, match="on purpose"):
            ours(model, logits_processor=[Blocking(fail)])
        assert torch.equal(ours(model), expected)
    assert torch.equal(decode.result(), expected)
    assert is_as_it_was(model, "sdpa")


def test_threads_that_meet_a_model_together_probe_it_once(
    looping_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lookahead.backend import support

    model, expected = copied(looping_llama), ours(copied(looping_llama))
    probe, probes, barrier = support._probe, [], Barrier(4)
    monkeypatch.setattr(support, "_probe", lambda *args: probes.append(get_ident()) or probe(*args))

    def meet(_: int) -> torch.Tensor:
        torch.set_num_threads(1)
        barrier.wait(PATIENCE_S)
        return ours(model)

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(tokens, expected) for tokens in pool.map(meet, range(4)))
    assert len(probes) == 1
    assert support.support_of(model, shortest=4, max_length=60).shape == "trees"


def test_four_threads_that_do_everything_at_once_get_what_each_gets_alone(looping_llama: LlamaForCausalLM) -> None:
    model = copied(looping_llama)
    alone = {name: use(model) for name, use in USES.items()}
    names, barrier = list(USES), Barrier(4)

    def work(number: int) -> list[str]:
        torch.set_num_threads(1)
        barrier.wait(PATIENCE_S)
        order = names[number:] + names[:number]
        return [name for name in order * 3 if not torch.equal(USES[name](model), alone[name])]

    with warnings.catch_warnings(), lookahead.enable(model, FIXED), ThreadPoolExecutor(4) as pool:
        warnings.simplefilter("ignore", UserWarning)  # beams are decoded by transformers, which is said
        assert list(pool.map(work, range(4))) == [[]] * 4
    assert is_as_it_was(model, "sdpa")


def test_a_paused_stream_leaves_its_thread_the_model_as_it_was(
    looping_llama: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = copied(looping_llama)
    alone = {name: use(model) for name, use in USES.items()}
    options: dict[str, Any] = {"config": FIXED, "max_new_tokens": 40, "do_sample": False}
    text = lookahead.generate(model, tiny_tokenizer, "abcab", **options).texts[0]
    pieces = lookahead.stream(model, tiny_tokenizer, "abcab", **options)
    parts = [next(pieces)]
    assert is_as_it_was(model, "sdpa")
    for name, use in USES.items():
        assert torch.equal(use(model), alone[name]), name
    assert "".join([*parts, *pieces]) == text


class Watched:
    """A proposer that another thread's proposer must not work beside."""

    sources = ("watched",)
    needs_argmax = needs_top = False
    hidden_layers = ()

    def __init__(self, entered: dict[int, Event]) -> None:
        self.entered = entered

    def start(self, row: int, prompt: Any) -> None:
        pass

    def propose(self, row: int, max_nodes: int) -> None:
        own = get_ident()
        self.entered.setdefault(own, Event()).set()
        others = [event for thread, event in list(self.entered.items()) if thread != own]
        assert not any(event.is_set() for event in others), "two threads draft for one model at once"
        Event().wait(0.002)  # lets other threads run
        self.entered[own].clear()
        return None

    def observe(self, row: int, feedback: Any, placed: Any) -> None:
        pass

    def finish(self, row: int) -> None:
        pass


def test_what_is_learned_of_a_model_is_for_one_thread_at_a_time(looping_llama: LlamaForCausalLM) -> None:
    model, entered = copied(looping_llama), {}
    config = LookaheadConfig(draft="fixed", proposers=(lambda call: Watched(entered),))
    expected = ours(model)
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        runs = [pool.submit(ours, model, lookahead_config=config) for _ in range(2)]
        assert all(torch.equal(run.result(), expected) for run in runs)


class Attributes(dict[str, Any]):
    """The attributes of a module; notes which of them were taken away, however briefly."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.gone: list[str] = []

    def pop(self, name: str, *default: Any) -> Any:
        self.gone.append(name)
        return super().pop(name, *default)

    def __delitem__(self, name: str) -> None:
        self.gone.append(name)
        super().__delitem__(name)


def test_a_module_is_never_without_its_configuration(tiny_llama):
    model = copy.deepcopy(tiny_llama)
    modules = [each for each in model.modules() if "config" in vars(each)]
    for each in modules:
        each.__dict__ = Attributes(vars(each))
    expected = model.generate(IDS, **OPTIONS, max_new_tokens=20)
    assert torch.equal(ours(model, max_new_tokens=20), expected)
    assert len(modules) > 2 and not any("config" in vars(each).gone for each in modules)
