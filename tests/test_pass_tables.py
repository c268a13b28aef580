"""The numbers of a pass's table: how they grow is read from the jobs once for a model, and never trusted unseen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lookahead
from lookahead.backend.cpu import pass_table
from tests.support.small_layers import HALF, PACKED, SINGLE, attends, made


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("slopes", ["kept", "wrong", "too few"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_table_has_the_numbers_of_its_own_jobs(name, slopes, dtype, calls, tiny_tokenizer, monkeypatch):
    if not attends(dtype):
        pytest.skip("the kernel does not attend here")
    init, kept = pass_table.PassTable.__init__, list[bool]()

    def checked(self: Any, parts: Any, weights: Any, head: Any, cache: Any, hidden: Any, *others: Any, **more: Any):
        rows, places, known = others
        kept.append(known is not None)
        if known is not None and slopes != "kept":
            known = known[:, 1:] if slopes == "too few" else known + (np.arange(known.shape[1]) % 7 == 3)
        init(self, parts, weights, head, cache, hidden, rows, places, known, **more)
        assert self.is_right and (self.slopes is known) is (known is not None and slopes == "kept")
        for tokens, slot in ((1, 0), (4, 2), (2, 9)):
            written = hidden.new_empty(tokens, self.outputs)
            numbers = np.empty_like(self._affine[0])
            pass_table.lay_out(self._affine, tokens, slot, written.data_ptr(), numbers)
            assert numbers.tolist() == self._numbers(cache, tokens, slot, written).tolist()

    monkeypatch.setattr(pass_table.PassTable, "__init__", checked)
    model = made(name, dtype, **PACKED)
    for rows in (1, 3, 1, 2):
        for length in (5, 120):
            prompts = torch.randint(6, 100, (rows, length)).tolist()
            lookahead.generate(model, tiny_tokenizer, prompts, max_new_tokens=12, do_sample=False)
    assert calls and not kept[0] and any(kept)
