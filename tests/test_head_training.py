"""Training heads: examples, losses, checkpoints, and what is left of the model."""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import re
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lookahead.errors import TrainingError
from lookahead.jobs.training import examples as training_examples
from lookahead.jobs.training.examples import (
    Record,
    answer_prompts,
    collate,
    make_example,
    make_examples,
    read_records,
    split_examples,
)
from lookahead.jobs.training.learners import DraftStarts, IndependentHeadsLearner
from lookahead.jobs.training.train_heads import Settings, train_heads
from lookahead.loading.loading import LoadedModel
from lookahead.plugins.heads.head_files import open_heads
from lookahead.plugins.heads.independent_heads import MedusaHeads, MtpHeads
from tests.support.answered_prompts import write_answered

MORE_KINDS = [pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("eagle", "mtp")]
SETTINGS = Settings(kind="medusa", heads=2, steps=6, batch_size=4, learning_rate=1e-2, max_new_tokens=24)


@pytest.fixture
def loaded(looping_llama, tiny_tokenizer):
    """A model of its own for every test, since training may change it."""
    return LoadedModel(copy.deepcopy(looping_llama), tiny_tokenizer)


@pytest.fixture(scope="module")
def data(looping_llama, tiny_tokenizer, tmp_path_factory):
    """Forty prompts with what the model answers."""
    prompts = [chr(97 + i % 16) * (1 + i // 16) for i in range(40)]
    return write_answered(tmp_path_factory.mktemp("data") / "data.jsonl", looping_llama, tiny_tokenizer, prompts, 24)


def _weights(folder):
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


class PeakMemory(TorchDispatchMode):
    """Bytes of all tensors made while it is on that were alive at once, at most; those of `others` are left out."""

    def __init__(self, others):
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in others}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self._known.discard(key)
        self.now -= size


def test_a_line_is_a_prompt_with_its_output_a_prompt_or_a_text(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "output": "b"}\n\n{"prompt": "c"}\n{"text": "d\\n  e"}\n')
    assert read_records(path) == [Record("a", "b"), Record("c", None), Record(None, "d\n  e")]
    (tmp_path / "plain.txt").write_text("one\ntwo")
    assert read_records(tmp_path / "plain.txt") == [Record(None, "one\ntwo")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "data.jsonl:1: not valid JSON"),
        ('{"text": "a"}\n{"document": "b"}', "data.jsonl:2: must be an object with"),
        ('{"prompt": 3}', "data.jsonl:1: 'prompt' must be a string"),
        ('{"prompt": "a", "output": ""}', "data.jsonl:1: 'output' must be a string that is not empty"),
        ('{"text": null}', "data.jsonl:1: 'prompt' or 'text' must be a string"),
        ("\n", "nothing to train on"),
        ("\udcff", "not UTF-8 text"),
    ],
)
def test_a_line_that_is_none_of_these_is_named(tmp_path, content, says):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(TrainingError, match=says):
        read_records(path)


def test_only_what_the_model_would_write_is_wanted(tiny_tokenizer):
    records = [Record("e", None), Record("ab", "cd")]
    answered, given = make_examples(records, tiny_tokenizer, {"e": [7, 8]}, max_length=100)
    assert tiny_tokenizer.decode(given["input_ids"]) == "abcd<eos>"
    assert given["wanted"].tolist() == [False, False, True, True, True]
    assert answered["input_ids"].tolist()[1:] == [7, 8] and answered["wanted"].tolist() == [False, True, True]
    pieces = make_examples([Record(None, "abcde")], tiny_tokenizer, {}, max_length=2)
    assert [tiny_tokenizer.decode(piece["input_ids"]) for piece in pieces] == ["ab", "cd", "e"]
    assert [piece["wanted"].tolist() for piece in pieces] == [[False, True], [False, True], [False]]


def test_a_head_is_asked_only_where_drafting_can_begin_and_only_for_what_is_wanted():
    short, long = make_example([1, 2], [3, 4], 9), make_example([5], [6, 7, 8], 9)
    train, _ = split_examples([short, long, long, long], 4)
    batch = collate(train[:2])
    starts, asked = DraftStarts.of(batch), {}
    last = batch["input_ids"].gather(1, starts.positions)
    for ahead in (1, 2, 3, 4):
        kept, labels = starts.labels(ahead - 2)
        asked[ahead] = list(zip(last[kept].tolist(), labels.tolist(), strict=True))
    assert asked[1] == [(2, 3), (3, 4), (5, 6), (6, 7), (7, 8)]
    assert asked[2] == [(2, 4), (5, 7), (6, 8)]
    assert asked[3] == [(5, 8)]
    assert asked[4] == []


def test_an_answer_is_what_the_model_generates_and_a_second_start_goes_on(tmp_path, loaded, monkeypatch):
    prompts, file = ["ab", "c", "dd"], tmp_path / "answers.jsonl"
    answers = answer_prompts(loaded, prompts, file, max_new_tokens=9)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
        expected = loaded.model.generate(ids, max_new_tokens=9, do_sample=False)
        assert answer == expected[0, ids.shape[1] :].tolist()
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], lines[2][:3]]))  # killed in the middle of a line
    asked, many = [], training_examples.stream_many
    monkeypatch.setattr(
        training_examples, "stream_many", lambda *args, **rest: asked.append(args[2]) or many(*args, **rest)
    )
    assert answer_prompts(loaded, prompts, file, max_new_tokens=9) == answers
    assert asked == [prompts[1:]] and len(file.read_text().splitlines()) == 4
    with pytest.raises(TrainingError, match="answers of another run"):
        answer_prompts(loaded, ["other"], file, max_new_tokens=9)


BAD_LINES = {
    "nested": (b"[" * 100_000, "not valid JSON: nested too deeply"),
    "cut": (b"[1, 2", "not valid JSON"),
    "no UTF-8": (b'"\xff"', "not valid JSON: 'utf-8' codec can't decode byte 0xff"),
    "no list": (b'{"a": 1}', "must be a list of token ids from 0 to 100"),
    "no numbers": (b"[1, true]", "must be a list of token ids from 0 to 100"),
    "strangers": (b"[1, 101]", "must be a list of token ids from 0 to 100"),
}


@pytest.mark.parametrize(("line", "says"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_damaged_file_of_answers_is_refused_with_its_line(tmp_path, loaded, line, says):
    file = tmp_path / "answers.jsonl"
    answer_prompts(loaded, ["ab", "c"], file, max_new_tokens=3)
    whole = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*whole[:2], line, b""]))
    with pytest.raises(TrainingError, match=rf"answers\.jsonl:3: {re.escape(says)}"):
        answer_prompts(loaded, ["ab", "c"], file, max_new_tokens=3)
    file.write_bytes(b"\n".join([line, b""]))
    with pytest.raises(TrainingError, match=r"answers\.jsonl:( holds answers of another run|1: not valid JSON)"):
        answer_prompts(loaded, ["ab", "c"], file, max_new_tokens=3)


def test_more_answers_than_prompts_are_those_of_another_run_and_a_pipe_is_none(tmp_path, loaded):
    file = tmp_path / "answers.jsonl"
    answer_prompts(loaded, ["ab"], file, max_new_tokens=3)
    file.write_bytes(file.read_bytes() + b"[1]\n")
    with pytest.raises(TrainingError, match="answers of another run"):
        answer_prompts(loaded, ["ab"], file, max_new_tokens=3)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(TrainingError, match=r"answers\.jsonl: cannot be read: not a regular file"):
        answer_prompts(loaded, ["ab"], file, max_new_tokens=3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": ' + b"[" * 100_000, "cannot be read: nested too deeply"),
        (b"\xff{}", "cannot be read: 'utf-8' codec"),
        (b"", "cannot be read"),
        (b"[]", "must hold a JSON object, got list"),
        (None, "cannot be read: .*not a regular file"),
    ],
    ids=["nested", "no UTF-8", "empty", "no object", "a pipe"],
)
def test_a_damaged_file_of_settings_is_refused_by_name(tmp_path, loaded, data, content, says):
    (tmp_path / "heads").mkdir()
    if content is None:
        os.mkfifo(tmp_path / "heads" / "run.json")
    else:
        (tmp_path / "heads" / "run.json").write_bytes(content)
    with pytest.raises(TrainingError, match=rf"run\.json: {says}"):
        train_heads(loaded, data, tmp_path / "heads", SETTINGS, resume=True)


def test_data_through_a_pipe_is_read_and_given_up_where_nothing_comes(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=[b'{"text": "ab"}\n'], daemon=True).start()
    assert read_records(path) == [Record(None, "ab")]
    monkeypatch.setattr("lookahead.documents.byte_sources.TIMEOUT_S", 0.2)
    with pytest.raises(TrainingError, match="no data came through this pipe"):
        read_records(path)


def test_a_line_of_data_ends_at_its_line_break_and_not_within_its_text(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"text": "a\u2028b\x85c"}\r\n{"text": "d"}\n'.encode())
    assert read_records(path) == [Record(None, "a\u2028b\x85c"), Record(None, "d")]


@pytest.mark.parametrize("kind", ["medusa", *MORE_KINDS, "eagle3"])
def test_heads_of_a_model_in_half_precision_can_be_trained(tmp_path, loaded, data, kind):
    loaded.model.bfloat16()
    metrics = train_heads(loaded, data, tmp_path / "heads", replace(SETTINGS, kind=kind))
    assert 0 <= metrics["eval_accuracy_1"] <= 1
    assert _weights(tmp_path / "heads")


@pytest.mark.parametrize("kind", ["medusa", *MORE_KINDS, "eagle3"])
def test_training_raises_held_out_accuracy_and_leaves_the_model_alone(tmp_path, loaded, data, kind):
    before = copy.deepcopy(loaded.model.state_dict())
    settings = replace(SETTINGS, kind=kind, steps=60, batch_size=8)
    lines: list[str] = []
    metrics = train_heads(loaded, data, tmp_path / "heads", settings, say=lines.append)
    untrained = train_heads(loaded, data, tmp_path / "fresh", replace(settings, steps=1, learning_rate=1e-9))
    losses = [float(line.rpartition(" ")[2]) for line in lines if ": loss" in line]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    for place in (1, 2):
        assert metrics[f"eval_accuracy_{place}"] > untrained[f"eval_accuracy_{place}"] + 0.1
        assert 1 >= metrics[f"eval_top_5_{place}"] >= metrics[f"eval_accuracy_{place}"]
    after = loaded.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.requires_grad for parameter in loaded.model.parameters()) and not loaded.model.training
    assert not (tmp_path / "heads" / "model").exists()


@pytest.mark.parametrize("kind", ["medusa", *MORE_KINDS, "eagle3"])
def test_a_run_that_was_killed_goes_on_to_the_very_same_heads(tmp_path, loaded, data, kind):
    settings = replace(SETTINGS, kind=kind)
    train_heads(loaded, data, tmp_path / "whole", settings)

    class Killed(Exception):
        pass

    def kill(line):
        if line.startswith("step 4 "):
            raise Killed

    with pytest.raises(Killed):
        train_heads(loaded, data, tmp_path / "killed", settings, say=kill)
    torn = tmp_path / "killed" / "checkpoints" / "checkpoint-5"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    torch.manual_seed(99)
    train_heads(loaded, data, tmp_path / "killed", settings, resume=True)
    whole, resumed = _weights(tmp_path / "whole"), _weights(tmp_path / "killed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_folder_with_another_run_is_refused(tmp_path, loaded, data):
    train_heads(loaded, data, tmp_path / "heads", SETTINGS)
    with pytest.raises(TrainingError, match="already holds a run: pass --resume"):
        train_heads(loaded, data, tmp_path / "heads", SETTINGS)
    with pytest.raises(TrainingError, match="heads = 2, not 3"):
        train_heads(loaded, data, tmp_path / "heads", replace(SETTINGS, heads=3), resume=True)


def test_a_model_trained_with_its_heads_is_written_beside_them_and_they_belong_to_it(tmp_path, loaded, data):
    from transformers import AutoModelForCausalLM

    before = copy.deepcopy(loaded.model)
    settings = Settings(kind="medusa", heads=2, is_joint=True, steps=12, batch_size=4, learning_rate=4e-3)
    train_heads(loaded, data, tmp_path / "heads", settings)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "heads" / "model")
    open_heads(tmp_path / "heads", trained)
    changed = [
        name for name, tensor in trained.state_dict().items() if not torch.equal(tensor, before.state_dict()[name])
    ]
    assert len(changed) == len(before.state_dict())


def test_tied_embeddings_of_a_jointly_trained_model_survive_a_kill(tmp_path, loaded, data):
    loaded.model.config.tie_word_embeddings = True
    loaded.model.tie_weights()
    settings = Settings(kind="medusa", heads=1, is_joint=True, steps=6, batch_size=4, max_new_tokens=8)
    train_heads(LoadedModel(copy.deepcopy(loaded.model), loaded.tokenizer), data, tmp_path / "whole", settings)

    def kill(line):
        if line.startswith("step 4 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_heads(
            LoadedModel(copy.deepcopy(loaded.model), loaded.tokenizer), data, tmp_path / "cut", settings, say=kill
        )
    train_heads(loaded, data, tmp_path / "cut", settings, resume=True)
    whole, resumed = (load_file(tmp_path / each / "model" / "model.safetensors") for each in ("whole", "cut"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("kind", ["medusa", "mtp"])
def test_one_head_at_a_time_needs_the_memory_of_one_head_whatever_their_number(tiny_llama, kind):
    """What a head keeps for its way back is gone when the next head begins; all heads at once keep all their logits."""
    vocab, hidden, tokens = 4096, 32, 256
    config = type(tiny_llama.config)(**{**tiny_llama.config.to_dict(), "vocab_size": vocab})
    model = type(tiny_llama)(config).requires_grad_(False)
    batch = {"input_ids": torch.randint(0, vocab, (1, tokens)), "wanted": torch.ones(1, tokens, dtype=torch.bool)}
    states = torch.randn(1, tokens, hidden if kind == "medusa" else 2 * hidden)

    def peak(heads, in_turn):
        made = (MedusaHeads if kind == "medusa" else MtpHeads).fresh(model, heads=heads)
        learner = IndependentHeadsLearner(made)
        for parameter in learner.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        others = [*model.parameters(), *learner.parameters(), *(each.grad for each in learner.parameters())]
        with PeakMemory(others) as memory:
            losses = learner.losses(model, states, batch)
            if in_turn:
                while (loss := next(losses, None)) is not None:
                    loss.backward()
            else:
                sum(losses).backward()
        return memory.peak

    logits = 4 * vocab * tokens
    assert peak(8, in_turn=True) - peak(2, in_turn=True) < 0.1 * logits
    assert peak(8, in_turn=False) - peak(2, in_turn=False) > 5 * logits


def test_losses_sent_back_in_turn_give_the_gradients_of_their_sum(tiny_llama):
    batch = collate([{"input_ids": torch.arange(9) + 3, "wanted": torch.arange(9) > 2}] * 2)
    states = torch.randn(2, 9, 32)
    gradients = []
    for in_turn in (True, False):
        torch.manual_seed(0)
        learner = IndependentHeadsLearner(MedusaHeads(32, 101, heads=3))
        losses = learner.losses(tiny_llama, states, batch)
        if in_turn:
            for loss in losses:
                loss.backward()
        else:
            sum(losses).backward()
        gradients.append([parameter.grad for parameter in learner.parameters()])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*gradients, strict=True))


def test_without_accelerate_the_error_names_the_extra(tmp_path, loaded, data, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "accelerate" else find(name, *rest)
    )
    with pytest.raises(TrainingError, match=r"pip install 'lookahead-decoding\[train\]'"):
        train_heads(loaded, data, tmp_path / "heads", SETTINGS)
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "hydra"}, "the kind of heads must be medusa, eagle"),
        ({"kind": "eagle", "is_joint": True}, "only heads of medusa and mtp"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"seed": -1}, r"seed must be from 0 to 2\^32 - 1, got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be more than 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be more than 0"),
    ],
)
def test_settings_out_of_range_are_refused(options, says):
    with pytest.raises(TrainingError, match=says):
        Settings(**{"kind": "medusa", **options})


def test_too_few_examples_are_refused(tmp_path, loaded):
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "output": "bcd"}\n')
    with pytest.raises(TrainingError, match="1 examples with something to guess are too few"):
        train_heads(loaded, tmp_path / "one.jsonl", tmp_path / "heads", SETTINGS)
