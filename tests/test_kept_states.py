"""What the model says of a training example is computed once, and kept for the epochs that follow."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from lookahead.loading.loading import LoadedModel
from lookahead.plugins.heads.eagle import EagleHead
from lookahead.plugins.heads.target import hidden_states, unembed
from lookahead.plugins.heads.training import learners
from lookahead.plugins.heads.training.examples import collate, make_example
from lookahead.plugins.heads.training.learners import DECAY, DraftStarts, EagleLearner
from lookahead.plugins.heads.training.train_heads import Settings, train_heads

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

    monkeypatch.setattr(learners, "hidden_states", counting)
    return texts


def losses(lines):
    return [float(line.rpartition(" ")[2]) for line in lines if ": loss" in line]


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_kept_hidden_states_give_the_losses_of_recomputed_ones_and_are_read_once(
    tmp_path, loaded, data, read, monkeypatch, kind
):
    settings, kept, recomputed = replace(SETTINGS, kind=kind), [], []
    train_heads(loaded, data, tmp_path / "kept", settings, say=kept.append)
    assert len(read) == 40
    monkeypatch.setattr(learners, "KEPT_BYTES", 4000)
    train_heads(loaded, data, tmp_path / "recomputed", settings, say=recomputed.append)
    assert len(read) > 40 + 2 * 38
    assert len(losses(kept)) == 14
    assert losses(kept) == losses(recomputed)


def test_no_more_is_kept_than_there_is_room_for(tiny_llama, monkeypatch):
    learner = EagleLearner(EagleHead.fresh(tiny_llama, range(101)), tiny_llama, 1)
    ids = torch.arange(3, 23)[None]
    monkeypatch.setattr(learners, "KEPT_BYTES", 3 * 20 * 4 * 32 * 2)  # three batches of four layers in bfloat16
    for number in range(5):
        learner(ids, ids > 5, torch.tensor(number))
    assert list(learner._kept) == [0, 1, 2] and learner._kept[0].dtype == torch.bfloat16


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


def test_the_loss_of_eagle3_is_the_cross_entropy_with_the_model_at_every_step(tiny_llama):
    torch.manual_seed(3)
    known = [*range(4, 60)]
    examples = [make_example([5, 9, 31], [7, 5, 90, 2, 8, 4], 99), make_example([7], [8, 9, 40, 41], 99)]
    batch, head = collate(examples), EagleHead.fresh(tiny_llama, known)
    learner = EagleLearner(head, tiny_llama, 3)
    with torch.no_grad():
        loss = learner(**batch, number=torch.tensor(0))["loss"]
        states = hidden_states(tiny_llama, batch["input_ids"], learner.layers).bfloat16().float()
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
