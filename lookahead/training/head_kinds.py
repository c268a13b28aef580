"""The kinds of heads: how each begins, is trained, and is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from lookahead.heads.base_model import lm_head
from lookahead.heads.eagle_files import fresh_eagle, fresh_fused, write_eagle
from lookahead.heads.medusa import MedusaHeads
from lookahead.heads.mtp import MtpHeads
from lookahead.training.eagle_learner import EagleLearner, FusedEagleLearner
from lookahead.training.examples import Examples
from lookahead.training.induction_start import begin_mtp
from lookahead.training.learner import Learner
from lookahead.training.parallel_learner import ParallelLearner


class Beginning(NamedTuple):
    """Untrained heads.

    Attributes:
        learner: What trains them, in fp32 on the model's device.
        write: Writes them into a folder.
    """

    learner: Learner
    write: Callable[[Path], None]


def begin(
    kind: str, model: PreTrainedModel, train: Examples, *, heads: int, is_joint: bool, draft_vocab: int
) -> Beginning:
    """Untrained heads of a kind, and how to train and write them.

    Args:
        kind: `"medusa"`, `"mtp"`, `"eagle"` or `"eagle3"`.
        model: Their model.
        train: What they will be trained on.
        heads: How many tokens they guess.
        is_joint: Whether the model is trained as well.
        draft_vocab: Tokens an EAGLE-3 head can propose.
    """
    if kind == "medusa":
        medusa = MedusaHeads.fresh(model, heads=heads)
        learner: Learner = ParallelLearner(medusa, heads, is_joint=is_joint)
        return Beginning(learner.float(), lambda folder: medusa.write(folder, model))
    if kind == "mtp":
        mtp = MtpHeads.fresh(model, heads=heads).float()
        begin_mtp(mtp, model, train)
        learner = ParallelLearner(mtp, heads, layers=mtp.hidden_layers, is_joint=is_joint)
        return Beginning(learner, lambda folder: mtp.write(folder, model))
    if kind == "eagle":
        learner = EagleLearner(fresh_eagle(model), heads)
    else:
        learner = FusedEagleLearner(fresh_fused(model, frequent_tokens(train, model, draft_vocab)), heads)
    head = learner.head
    return Beginning(learner.float().to(lm_head(model).weight.device), lambda folder: write_eagle(head, folder, model))


def frequent_tokens(examples: Examples, model: PreTrainedModel, most: int) -> list[int]:
    """The tokens that the model writes most in some examples, ascending; all there are where there are no more."""
    vocab = len(lm_head(model).weight)
    counts = np.zeros(vocab, np.int64)
    for i in range(len(examples)):
        example = examples[i]
        counts += np.bincount(example["input_ids"][example["wanted"]].numpy(), minlength=vocab)
    chosen: list[int] = np.sort(np.argsort(-counts, kind="stable")[:most]).tolist()
    return chosen
