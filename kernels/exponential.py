"""The exponential function as code that a compiler turns into vector instructions; a call of libm it cannot."""

from __future__ import annotations

import numpy as np
from numba import njit

_F = np.float32
_LOG2E = _F(1.4426950408889634)
# ln 2 in two parts: a multiple of the first is exact, so that what is left of x loses nothing.
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
_SMALLEST = _F(-87.0)  # beyond it float32 has no normal number for the outcome


@njit(cache=True, fastmath={"contract", "nsz"}, error_model="numpy")
def exp(x):
    """The exponential of a float32 of at most 0, to 1e-7 of it; 0 below -87, NaN of NaN.

    Source: Moshier 1989, "Methods and Programs for Mathematical Functions", the polynomial of Cephes' expf.
    """
    whole = np.floor(x * _LOG2E + _F(0.5))
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    series = _F(1.9875691500e-4)
    series = series * rest + _F(1.3981999507e-3)
    series = series * rest + _F(8.3334519073e-3)
    series = series * rest + _F(4.1665795894e-2)
    series = series * rest + _F(1.6666665459e-1)
    series = series * rest + _F(5.0000001201e-1)
    series = series * rest * rest + rest + _F(1.0)
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)  # 2 to the whole
    return _F(0.0) if x < _SMALLEST else series * power
