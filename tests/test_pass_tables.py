"""The numbers of a pass's table: how they grow is found once for all tables of a form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lookahead
from lookahead.backend.cpu import pass_table
from tests.support.small_layers import HALF, PACKED, SINGLE, attends, made


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_later_tables_have_the_numbers_that_are_read_from_their_own_jobs(name, dtype, tiny_tokenizer, monkeypatch):
    if not attends(dtype):
        pytest.skip("the kernel does not attend here")
    init, found = pass_table.PassTable.__init__, list[tuple[int, int]]()

    def checked(self: Any, parts: Any, weights: Any, of_head: Any, cache: Any, hidden: Any, *others: Any, **more: Any):
        known = len(more["slopes"])
        init(self, parts, weights, of_head, cache, hidden, *others, **more)
        for tokens, slot in ((1, 0), (4, 2), (2, 9)):
            written = hidden.new_empty(tokens, self.outputs)
            numbers = np.empty_like(self._affine[0])
            pass_table._lay_out(self._affine, tokens, slot, written.data_ptr(), numbers)
            assert numbers.tolist() == self._numbers(cache, tokens, slot, written).tolist()
        found.append((self.rows, known))

    monkeypatch.setattr(pass_table.PassTable, "__init__", checked)
    model = made(name, dtype, **PACKED)
    for rows in (1, 3, 1, 3, 2):
        for length in (5, 120):
            prompts = torch.randint(6, 100, (rows, length)).tolist()
            lookahead.generate(model, tiny_tokenizer, prompts, max_new_tokens=12, do_sample=False)
    assert {rows for rows, _ in found} == ({1, 2, 3} if dtype == SINGLE else {1})  # rows in half precision keep bits
    assert len(found) >= 10 and max(known for _, known in found) <= 6  # forms, not tables
