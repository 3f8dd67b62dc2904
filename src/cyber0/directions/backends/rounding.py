"""Between stored weights and float32, on the CPU: the bits of definition.widen and its two roundings.

Sixteen-bit weights are uint16 patterns here: numba has no 16-bit floats, and integers leave nothing to chance.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, uint32, uint64

from cyber0.directions.definition import LARGEST, NAN16, NAN32
from cyber0.kernels.compiled import inline, kernel

FLOAT16, BFLOAT16 = 1, 2

_TINY = np.float32(2.0**-24)
_NAN16, _NAN32 = np.uint32(NAN16), np.uint32(NAN32)
_LARGEST = np.float32(LARGEST)


@inline
def canonical(x):
    return x if x == x else np.float32(np.nan)


@inline
def moved(w, u):
    """Return w - u, or w where that is not a number. Rounding to 16 bits clamps by itself."""
    x = w - u
    return x if x == x else w


@inline
def moved32(w, u):
    """Return the same within the finite range of float32. By comparisons: min and max disagree about NaN."""
    x = moved(w, u)
    x = _LARGEST if x > _LARGEST else x
    return canonical(-_LARGEST if x < -_LARGEST else x)


@kernel
def widen_tile(stored, low, n, x, storage):
    bits = x.view(np.uint32)
    if storage == BFLOAT16:
        for i in range(n):
            bits[i] = uint32(stored[low + i]) << uint32(16)
        return
    for i in range(n):
        h = uint32(stored[low + i])
        magnitude = h & uint32(0x7FFF)
        if magnitude < uint32(0x400):  # subnormal: an exact product, free of float32 denormals
            x[i] = float32(int32(magnitude)) * _TINY
        elif magnitude < uint32(0x7C00):
            bits[i] = (magnitude << uint32(13)) + uint32(112 << 23)
        else:
            bits[i] = uint32(0x7F800000) | (magnitude << uint32(13))
        bits[i] |= (h >> uint32(15)) << uint32(31)


@inline
def _fp16_parts(a):
    """Split |x| into the integer to shift and the number of bits below fp16's last one."""
    exponent = int32(a >> uint32(23))
    if exponent >= int32(113):
        return a - uint32(112 << 23), uint32(13)
    if exponent == int32(0):
        return a & uint32(0x7FFFFF), uint32(125)
    return (a & uint32(0x7FFFFF)) | uint32(0x800000), uint32(int32(126) - exponent)


@kernel
def narrow_tile(x, stored, low, n, storage):
    """Round to nearest even, overflow to infinity."""
    bits = x.view(np.uint32)
    for i in range(n):
        w = bits[i]
        sign, a = (w >> uint32(31)) << uint32(15), w & uint32(0x7FFFFFFF)
        nan = a > uint32(0x7F800000)
        if storage == BFLOAT16:
            m = (a + uint32(0x7FFF) + ((a >> uint32(16)) & uint32(1))) >> uint32(16)
            stored[low + i] = np.uint16(_NAN16 if nan else sign | m)
        else:
            kept, below = _fp16_parts(a)
            if below > uint32(25):
                m = uint32(0)
            else:
                lo = kept >> below
                rest = kept - (lo << below)
                half = uint32(1) << (below - uint32(1))
                m = lo + uint32(1) if rest > half or (rest == half and lo & uint32(1)) else lo
            m = min(m, uint32(0x7C00))
            stored[low + i] = np.uint16(_NAN16 if nan else sign | m)


@inline
def _stored_bfloat16(w, magnitude):
    """Return the pattern of bfloat16 with that magnitude, which the largest value limits, and the sign of w."""
    m = uint32(0x7F7F) if magnitude > uint32(0x7F7F) else magnitude
    m = uint32(m | (uint32(w >> uint32(16)) & uint32(0x8000)))
    return np.uint16(_NAN16 if uint32(w & uint32(0x7FFFFFFF)) > uint32(0x7F800000) else m)


@kernel
def narrow_stochastically_tile(x, words, stored, low, n, storage):
    """Round up with the probability of the fraction, saturating at the largest finite value.

    `words` are of 32 or 16 bits: 16 are below floor(f * 2^16) exactly if, followed by ones, they are below f * 2^32.
    """
    bits, out = x.view(np.uint32), stored[low : low + n]  # a slice: with low + i, nothing would be vectorised
    if storage == BFLOAT16 and words.itemsize == 2:
        for i in range(n):  # 16 bits lie below the last one: w + (2^16 - 1 - word) has a carry if word is below them
            a = uint32(bits[i] & uint32(0x7FFFFFFF))
            m = uint32(uint32(a + (uint32(words[i]) ^ uint32(0xFFFF))) >> uint32(16))
            out[i] = _stored_bfloat16(bits[i], m)
    elif storage == BFLOAT16:
        for i in range(n):
            a = uint32(bits[i] & uint32(0x7FFFFFFF))
            up = uint32(1) if words[i] < uint32(a << uint32(16)) else uint32(0)
            out[i] = _stored_bfloat16(bits[i], uint32(uint32(a >> uint32(16)) + up))
    else:
        shift, ones = uint32(32 - 8 * words.itemsize), uint32(0xFFFF if words.itemsize == 2 else 0)
        for i in range(n):
            word = uint32((uint32(words[i]) << shift) | ones)
            sign, a = (bits[i] >> uint32(31)) << uint32(15), bits[i] & uint32(0x7FFFFFFF)
            kept, below = _fp16_parts(a)
            lo = kept >> below if below < uint32(32) else uint32(0)
            rest = kept - (lo << below) if below < uint32(32) else kept
            if below <= uint32(32):
                threshold = uint64(rest) << uint64(uint32(32) - below)
            else:
                threshold = uint64(rest) >> uint64(below - uint32(32)) if below < uint32(60) else uint64(0)
            m = lo + (uint32(1) if uint64(word) < threshold else uint32(0))
            out[i] = np.uint16(_NAN16 if a > uint32(0x7F800000) else sign | min(m, uint32(0x7BFF)))
