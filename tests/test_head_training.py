"""Training heads: examples, losses, checkpoints, and what is left of the model."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import shutil
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lookahead.errors import DocumentError, LookaheadError, TrainingError
from lookahead.loading.loading import LoadedModel
from lookahead.plugins.heads.medusa import MedusaHeads
from lookahead.plugins.heads.training import train_heads as training
from lookahead.plugins.heads.training.learners import DECAY, DraftStarts, MedusaLearner
from lookahead.plugins.heads.training.train_heads import (
    answer_prompts,
    collate,
    make_batches,
    make_example,
    make_examples,
    split_examples,
    train_heads,
)
from lookahead.plugins.heads.training.train_inputs import Record, Settings, read_records
from tests.support.answered_prompts import write_answered

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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("Once upon a time", "data.jsonl:1: not valid JSON, and the data must be JSON lines"),
        ('{"text": "a"}\n{"document": "b"}', "data.jsonl:2: must be an object with"),
        ('{"prompt": 3}', "data.jsonl:1: 'prompt' must be a string that is not empty, got 3"),
        ('{"prompt": "a", "output": ""}', "data.jsonl:1: 'output' must be a string that is not empty"),
        ('{"text": null}', "data.jsonl:1: must be an object with"),
        ("\n", "nothing to train on"),
        ("\udcff", "not UTF-8 text"),
    ],
)
def test_a_line_that_is_none_of_these_is_named(tmp_path, content, says):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(LookaheadError, match=says):
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
    starts, asked = DraftStarts.of(**batch), {}
    last = batch["input_ids"].gather(1, starts.positions)
    for ahead in (1, 2, 3, 4):
        kept, labels = starts.labels(ahead - 2)
        asked[ahead] = list(zip(last[kept].tolist(), labels.tolist(), strict=True))
    assert asked[1] == [(2, 3), (3, 4), (5, 6), (6, 7), (7, 8)]
    assert asked[2] == [(2, 4), (5, 7), (6, 8)]
    assert asked[3] == [(5, 8)]
    assert asked[4] == []


def test_batches_hold_examples_of_similar_length():
    examples = [make_example([1], range(2, 2 + length), 99) for length in (5, 1, 4, 2, 3)]
    batches = make_batches(examples, 2)
    assert [batch["input_ids"].shape for batch in batches] == [(2, 3), (2, 5), (1, 6)]
    assert batches[0]["wanted"].tolist() == [[False, True, False], [False, True, True]]


def test_an_answer_is_what_the_model_generates_and_a_second_start_goes_on(tmp_path, loaded, monkeypatch):
    prompts, file = ["ab", "c", "dd"], tmp_path / "answers.json"
    answers = answer_prompts(loaded, prompts, file, 9)
    assert answers.keys() == {*prompts}
    for prompt, answer in answers.items():
        ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
        expected = loaded.model.generate(ids, max_new_tokens=9, do_sample=False)
        assert answer == expected[0, ids.shape[1] :].tolist()
    file.write_text(json.dumps({"c": answers["c"]}))  # killed after an answer
    asked, many = [], training.stream_many
    monkeypatch.setattr(training, "stream_many", lambda *args, **rest: asked.append(args[2]) or many(*args, **rest))
    assert answer_prompts(loaded, prompts, file, 9) == answers
    assert answer_prompts(loaded, prompts, file, 9) == answers
    assert asked == [["ab", "dd"], []]


BAD_ANSWERS = {
    "nested": (b"[" * 100_000, "cannot be read: nested too deeply"),
    "cut": (b'{"a": [1, 2', "cannot be read"),
    "no UTF-8": (b'"\xff"', "cannot be read: 'utf-8' codec can't decode byte 0xff"),
    "no object": (b"[[1]]", "must hold a JSON object, got list"),
    "no list": (b'{"a": 1}', "must hold lists of token ids from 0 to 100, got 1"),
    "no numbers": (b'{"a": [1, true]}', "must hold lists of token ids from 0 to 100"),
    "strangers": (b'{"a": [1, 101]}', "must hold lists of token ids from 0 to 100"),
    "a pipe": (None, "cannot be read: .*not a regular file"),
}


@pytest.mark.parametrize(("content", "says"), BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_a_damaged_file_of_answers_is_refused_by_name(tmp_path, loaded, content, says):
    file = tmp_path / "answers.json"
    os.mkfifo(file) if content is None else file.write_bytes(content)
    with pytest.raises(TrainingError, match=rf"answers\.json: {says}"):
        answer_prompts(loaded, ["ab", "c"], file, 3)


def test_data_through_a_pipe_is_read_and_given_up_where_nothing_comes(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=[b'{"text": "ab"}\n'], daemon=True).start()
    assert read_records(path) == [Record(None, "ab")]
    monkeypatch.setattr("lookahead.documents.byte_sources.TIMEOUT_S", 0.2)
    with pytest.raises(DocumentError, match="no data came through this pipe"):
        read_records(path)


def test_a_line_of_data_ends_at_its_line_break_and_not_within_its_text(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"text": "a\u2028b\x85c"}\r\n{"text": "d"}\n'.encode())
    assert read_records(path) == [Record(None, "a\u2028b\x85c"), Record(None, "d")]


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_heads_of_a_model_in_half_precision_can_be_trained(tmp_path, loaded, data, kind):
    loaded.model.bfloat16()
    metrics = train_heads(loaded, data, tmp_path / "heads", replace(SETTINGS, kind=kind))
    assert 0 <= metrics["eval_accuracy_1"] <= 1
    assert _weights(tmp_path / "heads")


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
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
        assert metrics[f"eval_accuracy_{place}"] <= 1
    after = loaded.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.requires_grad for parameter in loaded.model.parameters()) and not loaded.model.training


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
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


def test_a_run_of_several_epochs_that_was_killed_goes_on_to_the_very_same_heads(tmp_path, loaded, data):
    settings = replace(SETTINGS, kind="eagle3", steps=14, batch_size=8)
    train_heads(loaded, data, tmp_path / "whole", settings)

    def kill(line):
        if line.startswith("step 9 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_heads(loaded, data, tmp_path / "cut", settings, say=kill)
    train_heads(loaded, data, tmp_path / "cut", settings, resume=True)
    whole, cut = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("whole", "cut"))
    assert whole == cut


def test_a_folder_with_a_run_is_refused(tmp_path, loaded, data):
    train_heads(loaded, data, tmp_path / "heads", SETTINGS)
    with pytest.raises(TrainingError, match="already holds a run: pass --resume"):
        train_heads(loaded, data, tmp_path / "heads", SETTINGS)


def test_finished_heads_are_not_overwritten_and_a_run_that_did_nothing_is_begun_anew(tmp_path, loaded, data):
    (tmp_path / "heads").mkdir()
    train_heads(loaded, data, tmp_path / "heads", SETTINGS)
    shutil.rmtree(tmp_path / "heads" / "checkpoints")
    with pytest.raises(TrainingError, match="already holds a run: pass --resume"):
        train_heads(loaded, data, tmp_path / "heads", SETTINGS)


def medusa_batch(vocab, tokens):
    ids, wanted = torch.randint(0, vocab, (1, tokens)), torch.ones(1, tokens, dtype=torch.bool)
    return {"input_ids": ids, "wanted": wanted}


def test_one_head_at_a_time_needs_the_memory_of_one_head_whatever_their_number(tiny_llama):
    """What a head keeps for its way back is gone when the next head begins."""
    vocab, tokens = 4096, 256
    config = type(tiny_llama.config)(**{**tiny_llama.config.to_dict(), "vocab_size": vocab})
    model, batch = type(tiny_llama)(config).requires_grad_(False), medusa_batch(vocab, tokens)

    def peak(heads):
        learner = MedusaLearner(MedusaHeads.fresh(model, heads=heads), model)
        for parameter in learner.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        others = [*model.parameters(), *learner.parameters(), *(each.grad for each in learner.parameters())]
        with PeakMemory(others) as memory:
            learner(**batch)["loss"].backward()
        return memory.peak

    assert peak(8) - peak(2) < 0.1 * 4 * vocab * tokens  # of the logits of one head


def test_the_loss_of_medusa_is_the_cross_entropy_of_every_head(tiny_llama):
    batch = medusa_batch(101, 9)
    batch["wanted"] = torch.arange(9)[None] > 2
    learner = MedusaLearner(MedusaHeads(32, 101, heads=3), tiny_llama)
    loss = learner(**batch)["loss"]
    loss.backward()
    states = tiny_llama.model(batch["input_ids"]).last_hidden_state[0].detach()
    expected = 0.0
    for index, head in enumerate(learner.heads):
        labels = batch["input_ids"][0, 4 + index :]
        logits = head(states[2 : 2 + len(labels)])
        expected = expected + DECAY**index * torch.nn.functional.cross_entropy(logits, labels)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    gradients = torch.autograd.grad(expected, list(learner.parameters()))
    assert all(torch.allclose(p.grad, g, atol=1e-6) for p, g in zip(learner.parameters(), gradients, strict=True))


def test_without_accelerate_the_error_names_the_extra(tmp_path, loaded, data, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "accelerate" else find(name, *rest)
    )
    with pytest.raises(TrainingError, match=r"pip install 'lookahead-decoding\[train\]'"):
        train_heads(loaded, data, tmp_path / "heads", SETTINGS)
    assert not (tmp_path / "heads").exists()


def test_too_few_examples_are_refused(tmp_path, loaded):
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "output": "bcd"}\n')
    with pytest.raises(TrainingError, match="1 examples with something to guess are too few"):
        train_heads(loaded, tmp_path / "one.jsonl", tmp_path / "heads", SETTINGS)
