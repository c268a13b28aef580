"""What the model says of a training example is computed once: where it is kept, how much of it, and for how long."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lookahead.jobs.training import heads_trainer
from lookahead.jobs.training.examples import collate, make_example
from lookahead.jobs.training.heads_trainer import room_for
from lookahead.jobs.training.learners import DECAY, DraftStarts, FusedEagleLearner, unroll
from lookahead.jobs.training.train_heads import Settings, _prepare, train_heads
from lookahead.loading.loading import LoadedModel
from lookahead.plugins.heads.induction_init import begin_fused, fresh_fused
from lookahead.plugins.heads.layers import hidden_states, unembed

SETTINGS = Settings(kind="eagle3", heads=2, steps=14, batch_size=8, learning_rate=1e-2, max_new_tokens=12)


@pytest.fixture
def loaded(looping_llama, tiny_tokenizer):
    return LoadedModel(copy.deepcopy(looping_llama), tiny_tokenizer)


@pytest.fixture
def data(tmp_path):
    """Forty texts of different lengths."""
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(f'{{"text": "{chr(97 + i % 16) * (3 + i % 7)}bcd"}}' for i in range(40)))
    return path


@pytest.fixture
def read(monkeypatch):
    """The examples that the model has read, as text ids without padding."""
    texts: list[tuple[int, ...]] = []

    def counting(model, input_ids, layers=()):
        texts.extend(tuple(row[row != 0].tolist()) for row in input_ids)
        return hidden_states(model, input_ids, layers)

    monkeypatch.setattr(heads_trainer, "hidden_states", counting)
    return texts


def losses(lines):
    return [float(line.rpartition(" ")[2]) for line in lines if ": loss" in line]


@pytest.mark.parametrize("kind", ["medusa", "mtp", "eagle3"])
@pytest.mark.parametrize("bound", [heads_trainer.KEPT_IN_MEMORY, 0], ids=["memory", "file"])
def test_kept_hidden_states_give_the_losses_of_recomputed_ones_and_are_read_once(
    tmp_path, loaded, data, read, monkeypatch, kind, bound
):
    settings, kept, recomputed = replace(SETTINGS, kind=kind), [], []
    monkeypatch.setattr(heads_trainer, "KEPT_IN_MEMORY", bound)
    train_heads(loaded, data, tmp_path / "kept", settings, say=kept.append)
    assert len(read) == 40 and sum(line.startswith("the model reads") for line in kept) == 1
    monkeypatch.setattr(heads_trainer, "room_for", lambda *size: None)
    train_heads(loaded, data, tmp_path / "recomputed", settings, say=recomputed.append)
    assert len(read) > 40 + 2 * 38
    assert len(losses(kept)) == 14
    assert losses(kept) == pytest.approx(losses(recomputed), rel=0.02)


def test_a_single_epoch_keeps_only_what_is_held_out(tmp_path, loaded, data, read):
    train_heads(loaded, data, tmp_path / "heads", replace(SETTINGS, kind="medusa", steps=4))
    assert len(read) == 2 + 4 * 8


def test_a_model_that_is_trained_too_reads_every_time(tmp_path, loaded, data, read):
    train_heads(loaded, data, tmp_path / "heads", replace(SETTINGS, kind="medusa", is_joint=True))
    assert len(read) > 14 * 7


def test_a_run_of_several_epochs_that_was_killed_goes_on_to_the_very_same_heads(tmp_path, loaded, data):
    train_heads(loaded, data, tmp_path / "whole", SETTINGS)

    def kill(line):
        if line.startswith("step 9 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_heads(loaded, data, tmp_path / "cut", SETTINGS, say=kill)
    train_heads(loaded, data, tmp_path / "cut", SETTINGS, resume=True)
    whole, cut = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("whole", "cut"))
    assert whole == cut


def test_an_interrupted_run_leaves_neither_hidden_states_nor_heads(tmp_path, loaded, data, monkeypatch):
    monkeypatch.setattr(heads_trainer, "KEPT_IN_MEMORY", 0)

    def interrupt(line):
        if line.startswith("step 3 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_heads(loaded, data, tmp_path / "heads", SETTINGS, say=interrupt)
    assert {each.name for each in (tmp_path / "heads").iterdir()} == {"run.json", "checkpoints"}


def test_what_memory_has_no_room_for_lies_in_a_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(heads_trainer, "KEPT_IN_MEMORY", 4000)
    assert not _is_mapped(tmp_path, room_for(20, 100, tmp_path))
    held = room_for(21, 100, tmp_path)
    held[:] = 1.5
    assert held.shape == (21, 100) and held.dtype == torch.bfloat16 and bool((held == 1.5).all())
    assert _is_mapped(tmp_path, held) and list(tmp_path.iterdir()) == []


def test_what_would_take_more_than_half_of_the_disk_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(heads_trainer, "KEPT_IN_MEMORY", 0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=4000))
    assert room_for(10, 100, tmp_path) is not None and room_for(11, 100, tmp_path) is None


def _is_mapped(folder, tensor):
    """Whether the memory of a tensor is that of a file in a folder."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    for line in maps.read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return str(folder) in line
    raise AssertionError


def test_the_loss_of_eagle3_is_the_cross_entropy_with_the_model_at_every_step_of_every_start(tiny_llama):
    torch.manual_seed(3)
    known = [*range(4, 60)]
    examples = [make_example([5, 9, 31], [7, 5, 90, 2, 8, 4], 99), make_example([7], [8, 9, 40, 41], 99)]
    batch, head = collate(examples), fresh_fused(tiny_llama, known)
    learner = FusedEagleLearner(head, 3)
    with torch.no_grad():
        states = hidden_states(tiny_llama, batch["input_ids"], learner.layers)
        (loss,) = learner.losses(tiny_llama, states, batch)
        starts, expected = DraftStarts.of(batch), 0.0
        outs = unroll(head, tiny_llama, head.enter(states[..., :-32]), starts, 3)
        for step, out in enumerate(outs):
            each = []
            for row, example in enumerate(examples):
                text = example["input_ids"].tolist()
                for slot, at in enumerate(starts.positions[row][starts.is_start[row]].tolist()):
                    if at + 2 + step < len(text) and text[at + 2 + step] in known:
                        logits = unembed(tiny_llama, states[row, at + 1 + step, -32:])[known]
                        guess = head.logits(tiny_llama, out[row, slot]).log_softmax(-1)
                        each.append(-(logits.softmax(-1) * guess).sum())
            expected += DECAY**step * sum(each) / len(each)
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)


@torch.no_grad()
def test_a_fused_head_of_a_larger_model_begins_with_what_is_linear_in_its_layers_and_the_next_token():
    torch.manual_seed(4)
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    texts = [make_example(text[:1], text[1:], 99) for text in torch.randint(4, 101, (60, 40)).tolist()]
    head = fresh_fused(model, range(101))
    learner = FusedEagleLearner(head, 1)

    def right():
        batch = collate(texts[:8])
        states = hidden_states(model, batch["input_ids"], learner.layers)
        starts = DraftStarts.of(batch)
        (guesses,) = (each.argmax(-1) for each in learner.logits(model, states, starts))
        truth = unembed(model, states[:, 1:-1, -64:]).argmax(-1).flatten()
        return float((guesses == truth).float().mean())

    before = right()
    begin_fused(head, model, texts, lambda example: hidden_states(model, example["input_ids"][None], learner.layers)[0])
    assert before < 0.1 and right() > 0.3


@pytest.mark.parametrize(("layers", "rate"), [(8, 1e-4), (2, 1e-3)])
def test_a_head_that_begins_with_a_linear_map_learns_slowly_unless_told_otherwise(layers, rate, tmp_path):
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    texts = [make_example(text[:1], text[1:], 99) for text in torch.randint(4, 101, (40, 9)).tolist()]

    def rate_of(**options):
        settings = Settings(kind="eagle3", heads=1, steps=1, **options)
        return _prepare(model, texts, tmp_path, settings, lambda _: None)[0].args.learning_rate

    assert rate_of() == rate
    assert rate_of(learning_rate=0.5) == 0.5
