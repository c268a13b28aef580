"""Digests of the contents of many arrays, by a sample of words of 8 bytes.

Every row gives a word, and every column of words gives one: the sampled word moves to the right from row to row. So a
change of a whole row, a whole column, or many numbers of a matrix changes its digest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.kernels.scalars import jit_part
from lookahead.utils.addresses import array_at
from lookahead.utils.jit import njit

WORD = 8
"""Bytes of a word."""
_FACTOR = np.uint64(0x9FB21C651E98DF25)
_HALF = np.uint64(32)


def digests(table: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A digest of every array.

    Args:
        table: int64 `[arrays, 4]`: the address, the rows, the distance of two rows in words, and the columns of words:
            row r gives word `r % columns`, and with fewer rows than columns further ones, `rows` apart. The arrays must
            stay alive during the call.

    Returns:
        uint64 `[arrays]`.

    Example:
        >>> array = np.arange(6, dtype=np.int64).reshape(3, 2)
        >>> table = np.array([[array.ctypes.data, 3, 2, 2]])
        >>> before = digests(table)
        >>> array[1] = 7
        >>> bool((digests(table) != before).all())
        True

    Raises:
        ValueError: The table has another form.
    """
    if table.ndim != 2 or table.shape[1] != 4 or table.dtype != np.int64:
        raise ValueError(f"table must be int64 [arrays, 4], got {table.dtype} {list(table.shape)}")
    out = np.zeros(len(table), np.uint64)
    _digest(table, out)
    return out


@jit_part
def _mixed(state: Any, word: Any) -> Any:
    state = (state ^ word) * _FACTOR
    return state ^ (state >> _HALF)


@jit_part
def _wrapped(place: Any, places: Any) -> Any:
    return place if place < places else place % places


@njit(nogil=True)
def _digest(table: Any, out: Any) -> None:
    """Four chains of rows at a time, since a chain waits for memory at every word."""
    for at in range(len(table)):
        address, rows, step, places = table[at]
        words = array_at(address, rows * step, np.uint64)
        one = two = three = four = np.uint64(rows)
        for turn in range(1, -(-places // max(rows, 1))):  # columns beyond the number of rows
            for row in range(min(rows, places - turn * rows)):
                two = _mixed(two, words[row * step + turn * rows + row])
        place = row = 0
        while row + 4 <= rows:
            second, third, fourth = place + 1, place + 2, place + 3
            if places == 1:
                second = third = fourth = 0
            elif fourth >= places:
                second, third = _wrapped(second, places), _wrapped(third, places)
                fourth = _wrapped(fourth, places)
            first = row * step
            one = _mixed(one, words[first + place])
            two = _mixed(two, words[first + step + second])
            three = _mixed(three, words[first + 2 * step + third])
            four = _mixed(four, words[first + 3 * step + fourth])
            row, place = row + 4, 0 if places == 1 else _wrapped(place + 4, places)
        while row < rows:
            one = _mixed(one, words[row * step + row % places])
            row += 1
        out[at] = _mixed(_mixed(_mixed(one, two), three), four)
