"""Streamers: they are shown what `model.generate` would have shown them, under the switch and without it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty
from typing import Any

import pytest
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    LogitsProcessor,
    PreTrainedModel,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import ConfigError, UnsupportedModelError
from tests.support.adversarial_proposers import Scripted, nothing

IDS = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])
RAGGED: dict[str, Any] = {
    "inputs": torch.cat([torch.tensor([[0] * 5 + [41, 42, 41, 42, 41, 42, 41]]), IDS]),
    "attention_mask": torch.tensor([[0] * 5 + [1] * 7, [1] * 12]),
}
# Every draft there is room for is verified, whatever it costs: the outcome depends on no clock.
DRAFTING = LookaheadConfig(draft="fixed", min_probability=0.0, max_nodes=8)
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
Generate = Callable[..., torch.Tensor]


@pytest.fixture(params=["under the switch", "beside custom_generate"])
def generate(request: pytest.FixtureRequest, looping_llama: PreTrainedModel) -> Iterator[Generate]:
    """Our `generate` of the model, taking `streamer` as transformers' own does."""
    if request.param == "under the switch":
        with lookahead.enable(looping_llama, DRAFTING):
            yield looping_llama.generate
    else:

        def decoding(*args: Any, streamer: Any = None, **kwargs: Any) -> torch.Tensor:
            ours = {"custom_generate": lookahead.decode, "lookahead_config": DRAFTING, "lookahead_streamer": streamer}
            return looping_llama.generate(*args, **kwargs, **ours)

        yield decoding
    assert "generate" not in looping_llama.__dict__
    assert looping_llama.config._attn_implementation == "sdpa"


class Recording(BaseStreamer):
    """A user's streamer that keeps what it is shown, and fails when it was told to."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.shown: list[list[Any]] = []
        self.ends = 0
        self.fails_at = fails_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.shown) == self.fails_at:
            raise BrokenPipeError("nobody listens")
        self.shown.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


class Pieces(TextStreamer):
    """A text streamer that keeps its pieces in order."""

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self.pieces: list[tuple[str, bool]] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append((text, stream_end))


class Gate(LogitsProcessor):
    """Holds generation up at a length until it is opened."""

    def __init__(self, length: int = 0) -> None:
        self.length, self.reached, self.opened = length, threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] >= self.length:
            self.reached.set()
            assert self.opened.wait(60)
        return scores


def same_from_both(model: PreTrainedModel, generate: Generate, make: Callable[[], Any], **options: Any) -> Any:
    """Two streamers from `make`: one that transformers showed its tokens, one that we showed ours."""
    streamers = []
    for call in (partial(type(model).generate, model), generate):
        torch.manual_seed(3)
        streamers.append(make())
        call(**{"inputs": IDS, **GREEDY, **options}, streamer=streamers[-1])
    return streamers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 1.5},
        {"eos_token_id": 58, "pad_token_id": 0},
        {"max_new_tokens": 1},
        {"repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_every_token_is_shown_in_order_and_the_end_once(
    looping_llama: PreTrainedModel, generate: Generate, accepted: list[int], options: dict[str, Any]
) -> None:
    theirs, ours = same_from_both(looping_llama, generate, Recording, **options)
    assert ours.shown == theirs.shown
    assert ours.ends == theirs.ends == 1
    assert len(accepted) == (options.get("max_new_tokens") != 1)  # nothing is drafted for a single token
    if not options:
        assert accepted[0] > 0


@pytest.mark.parametrize("options", [{}, {"skip_prompt": True}, {"skip_special_tokens": True}], ids=str)
def test_text_comes_in_the_same_pieces_and_adds_up_to_the_whole(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, generate: Generate, options: dict[str, Any]
) -> None:
    theirs, ours = same_from_both(looping_llama, generate, lambda: Pieces(tiny_tokenizer, **options))
    assert ours.pieces == theirs.pieces
    assert [is_end for _, is_end in ours.pieces] == [False] * (len(ours.pieces) - 1) + [True]
    begin = IDS.shape[1] if "skip_prompt" in options else 0
    special = {"skip_special_tokens": options.get("skip_special_tokens", False)}
    whole = tiny_tokenizer.decode(generate(IDS, **GREEDY)[0, begin:], **special)
    assert "".join(piece for piece, _ in ours.pieces) == whole


def test_text_is_printed_with_a_line_end_behind_it(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, generate: Generate, capsys: pytest.CaptureFixture[str]
) -> None:
    output = generate(IDS, **GREEDY, streamer=TextStreamer(tiny_tokenizer))
    assert capsys.readouterr().out == tiny_tokenizer.decode(output[0]) + "\n"


def in_a_thread(generate: Generate, **options: Any) -> threading.Thread:
    thread = threading.Thread(target=generate, args=(IDS,), kwargs={**GREEDY, **options})
    thread.start()
    return thread


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_an_iterator_gives_the_text_while_another_thread_generates(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, generate: Generate, skip_prompt: bool
) -> None:
    whole = generate(IDS, **GREEDY)[0, IDS.shape[1] if skip_prompt else 0 :]
    streamer = TextIteratorStreamer(tiny_tokenizer, skip_prompt=skip_prompt, timeout=60)
    thread = in_a_thread(generate, streamer=streamer)
    text = "".join(streamer)
    thread.join()
    assert text == tiny_tokenizer.decode(whole)


@pytest.mark.skipif(not hasattr(asyncio, "timeout"), reason="the streamer itself needs Python 3.11")
def test_an_asynchronous_iterator_gives_the_text_while_another_thread_generates(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, generate: Generate
) -> None:
    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(tiny_tokenizer, timeout=60)
        thread = in_a_thread(generate, streamer=streamer)
        text = "".join([piece async for piece in streamer])
        await asyncio.to_thread(thread.join)
        return text

    assert asyncio.run(read()) == tiny_tokenizer.decode(generate(IDS, **GREEDY)[0])


def test_an_iterator_that_waits_in_vain_says_so_and_the_generation_goes_on(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, generate: Generate
) -> None:
    gate, streamer = Gate(), TextIteratorStreamer(tiny_tokenizer, skip_prompt=True, timeout=0.01)
    thread = in_a_thread(generate, streamer=streamer, logits_processor=[gate])
    with pytest.raises(Empty):
        next(streamer)
    gate.opened.set()
    thread.join()
    whole = tiny_tokenizer.decode(generate(IDS, **GREEDY)[0, IDS.shape[1] :])
    assert "".join(streamer) == whole


def test_tokens_are_shown_while_the_output_is_still_growing(looping_llama: PreTrainedModel, generate: Generate) -> None:
    gate, streamer = Gate(IDS.shape[1] + 30), Recording()
    thread = in_a_thread(generate, streamer=streamer, logits_processor=[gate])
    assert gate.reached.wait(60)
    early = list(streamer.shown)
    gate.opened.set()
    thread.join()
    assert 2 < len(early) < len(streamer.shown) == 41
    assert early == streamer.shown[: len(early)]


@pytest.mark.parametrize("fails_at", [0, 1, 20])
def test_a_streamer_that_fails_fails_the_call_and_nothing_after_it(
    looping_llama: PreTrainedModel, generate: Generate, fails_at: int
) -> None:
    expected = generate(IDS, **GREEDY)
    streamer = Recording(fails_at)
    with pytest.raises(BrokenPipeError, match="nobody listens"):
        generate(IDS, **GREEDY, streamer=streamer)
    assert (len(streamer.shown), streamer.ends) == (fails_at, 0)
    assert looping_llama.config._attn_implementation == "sdpa"
    assert torch.equal(generate(IDS, **GREEDY), expected)


@pytest.mark.parametrize("inputs", [RAGGED, {"inputs": IDS, "num_return_sequences": 2, "do_sample": True}])
def test_a_text_streamer_refuses_several_rows(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, generate: Generate, inputs: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="only supports batch size 1"):
        generate(**{**GREEDY, **inputs}, streamer=TextStreamer(tiny_tokenizer))


@pytest.mark.parametrize("options", [{}, {"eos_token_id": [58, 48], "pad_token_id": 0}], ids=["length", "token"])
def test_a_streamer_of_several_rows_is_shown_a_column_at_a_time(
    looping_llama: PreTrainedModel, generate: Generate, options: dict[str, Any]
) -> None:
    theirs, ours = same_from_both(looping_llama, generate, Recording, **RAGGED, **options)
    assert ours.shown == theirs.shown
    assert ours.ends == 1


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("inputs", [{"inputs": IDS}, RAGGED], ids=["one", "ragged"])
def test_a_call_that_turns_out_not_to_be_served_is_shown_once_from_its_beginning(
    looping_llama: PreTrainedModel, inputs: dict[str, Any], do_sample: bool
) -> None:
    class Deep(Scripted):
        hidden_layers = (7,)  # the model has no such layer, which the first pass finds out

    config = LookaheadConfig(proposers=(lambda call: Deep(nothing),), draft="fixed")
    options = {**inputs, **GREEDY, "do_sample": do_sample}
    with lookahead.enable(looping_llama, config), pytest.warns(UserWarning, match="transformers alone"):
        theirs, ours = same_from_both(looping_llama, looping_llama.generate, Recording, **options)
    assert ours.shown == theirs.shown
    assert ours.ends == theirs.ends == 1


def test_what_was_shown_is_not_shown_again_after_an_error_that_comes_late(looping_llama: PreTrainedModel) -> None:
    def refuse(row: int, text: list[int], room: int) -> None:
        if len(text) > IDS.shape[1] + 5:
            raise UnsupportedModelError("no draft here")

    streamer, config = Recording(), LookaheadConfig(proposers=(lambda call: Scripted(refuse),), draft="fixed")
    expected = type(looping_llama).generate(looping_llama, IDS, **GREEDY)[0, IDS.shape[1] :].tolist()
    with lookahead.enable(looping_llama, config), pytest.raises(UnsupportedModelError, match="no draft here"):
        looping_llama.generate(IDS, **GREEDY, streamer=streamer)
    prompt, *tokens = streamer.shown
    assert prompt == IDS.tolist()
    assert tokens == [[token] for token in expected[: len(tokens)]] and len(tokens) >= 5


def test_a_streamer_given_beside_beams_is_refused_as_it_would_have_been(looping_llama: PreTrainedModel) -> None:
    with (
        lookahead.enable(looping_llama, DRAFTING),
        pytest.warns(UserWarning, match="transformers alone"),
        pytest.raises(ValueError, match="cannot be used with beam search"),
    ):
        looping_llama.generate(IDS, **GREEDY, num_beams=2, streamer=Recording())


def test_text_in_takes_no_streamer_for_it_would_never_end(looping_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="streamer"):
        lookahead.generate(looping_llama, tiny_tokenizer, "hello", **GREEDY, streamer=Recording())
