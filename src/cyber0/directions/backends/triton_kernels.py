"""Directions, perturbation and commit in Triton: kernels that give the bits of definition.py.

A program owns BLOCK coordinates. Philox runs on BLOCK / 4 counters and yields four words each; sums are kept
as four quarter-sized tensors and interleaved once, in registers, before w is touched. Kernels are launched
with enable_fp_fusion=False: a fused multiply-add would round once where the definition rounds twice. The device of the
tensors must be the current one: the backend sees to that.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from cyber0.directions.backends.base import PackedSteps
from cyber0.directions.backends.numba_kernels import to_float32
from cyber0.directions.definition import (
    BYTE_CENTRE,
    BYTE_WEIGHTS,
    HALF_WORDS,
    LARGEST,
    NAN16,
    NAN32,
    NORM_GRID,
    POLYNOMIAL,
)
from cyber0.directions.philox import INDEX_BITS, KEY_INCREMENTS, MULTIPLIERS, PHILOX_ROUNDS, Stream

_M0, _M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_W0, _W1 = tl.constexpr(KEY_INCREMENTS[0]), tl.constexpr(KEY_INCREMENTS[1])
_ROUNDS = tl.constexpr(PHILOX_ROUNDS)
_A, _B, _C, _D = (tl.constexpr(c) for c in POLYNOMIAL)
_WEIGHTS = tl.constexpr(sum(w << 8 * i for i, w in enumerate(BYTE_WEIGHTS)))
# The bits of 1.5 * 2^23: an integer added to them is that integer added to the float, so the sum of the
# bytes becomes a float by one subtraction instead of a conversion (which runs at a quarter of the rate).
_MAGIC = tl.constexpr(0x4B400000)
_UNMAGIC = tl.constexpr(12582912.0 - BYTE_CENTRE)
_GRID = tl.constexpr(NORM_GRID)
_NAN16, _NAN32 = tl.constexpr(NAN16), tl.constexpr(NAN32)
_LARGEST, _LEAST = tl.constexpr(LARGEST), tl.constexpr(-LARGEST)
_ROUNDING = tl.constexpr(Stream.ROUNDING << INDEX_BITS)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
GAUSSIAN, RADEMACHER, SPHERE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CODES = {"gaussian": 0, "rademacher": 1, "sphere": 2}  # what a launch passes; the same numbers

WARPS = 4
MAX_ROWS = 65_535  # what CUDA takes in the second dimension of a grid
BLOCK = {torch.float32: 1024, torch.float16: 4096, torch.bfloat16: 4096}  # coordinates a program, by measurement


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10. The counter words that are scalars stay so for the first rounds, which costs less."""
    for _ in tl.static_range(_ROUNDS):
        p0 = c0.to(tl.uint64) * _M0
        p1 = c2.to(tl.uint64) * _M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = k0 + _W0
        k1 = k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def _gaussian(word):
    total = tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [word, tl.full((), _WEIGHTS, tl.int32), tl.full((), _MAGIC, tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    x = total.to(tl.float32, bitcast=True) - _UNMAGIC
    t = x * x
    return x * (_A + t * (_B + t * (_C + t * _D)))


@triton.jit
def _interleave(a, b, c, d):
    """Return the tensor a0 b0 c0 d0 a1 b1 ..."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _signs(low, high, round, index, k0, k1, BLOCK: tl.constexpr):
    """Return BLOCK Rademacher coordinates from BLOCK / 128 Philox blocks."""
    lane = tl.arange(0, BLOCK // 128).to(tl.uint32)
    w0, w1, w2, w3 = _philox(low + lane, high, round, index, k0, k1)
    words = _interleave(w0, w1, w2, w3)
    bits = words[:, None] >> tl.arange(0, 32).to(tl.uint32)[None, :]
    patterns = tl.reshape((bits << 31) | 0x3F800000, (BLOCK,))
    return patterns.to(tl.float32, bitcast=True)


@triton.jit
def _split_block(first, PER: tl.constexpr, BLOCK: tl.constexpr):
    """Return the low and high words of the number of the program's first Philox block."""
    number = first.to(tl.uint64) * (BLOCK // PER)
    return number.to(tl.uint32), (number >> 32).to(tl.uint32)


@triton.jit
def _direction(tile, round, index, k0, k1, scale, DISTRIBUTION: tl.constexpr, BLOCK: tl.constexpr):
    """Return BLOCK consecutive coordinates of one direction."""
    if DISTRIBUTION == RADEMACHER:
        low, high = _split_block(tile, 128, BLOCK)
        return _signs(low, high, round, index, k0, k1, BLOCK)
    low, high = _split_block(tile, 4, BLOCK)
    lane = tl.arange(0, BLOCK // 4).to(tl.uint32)
    w0, w1, w2, w3 = _philox(low + lane, high, round, index, k0, k1)
    z = _interleave(_gaussian(w0), _gaussian(w1), _gaussian(w2), _gaussian(w3))
    if DISTRIBUTION == SPHERE:
        z = z * scale
    return z


@triton.jit
def _unsigned(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _float(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _update(tile, s, K, meta, coefficients, scales, DISTRIBUTION: tl.constexpr, BLOCK: tl.constexpr):
    """Return u = sum_r c_r z_r of step s, summed in order."""
    k0, k1 = _unsigned(tl.load(meta + 5 * s)), _unsigned(tl.load(meta + 5 * s + 1))
    round, first = _unsigned(tl.load(meta + 5 * s + 2)), _unsigned(tl.load(meta + 5 * s + 3))
    if DISTRIBUTION == RADEMACHER:
        u = tl.zeros((BLOCK,), tl.float32)
        for r in range(K):
            c = tl.load(coefficients + s * K + r)
            u = u + c * _direction(tile, round, first + tl.cast(r, tl.uint32), k0, k1, 1.0, DISTRIBUTION, BLOCK)
        return u
    low, high = _split_block(tile, 4, BLOCK)
    lane = low + tl.arange(0, BLOCK // 4).to(tl.uint32)
    u0 = tl.zeros((BLOCK // 4,), tl.float32)
    u1 = tl.zeros((BLOCK // 4,), tl.float32)
    u2 = tl.zeros((BLOCK // 4,), tl.float32)
    u3 = tl.zeros((BLOCK // 4,), tl.float32)
    for r in range(K):
        c = tl.load(coefficients + s * K + r)
        w0, w1, w2, w3 = _philox(lane, high, round, first + tl.cast(r, tl.uint32), k0, k1)
        z0, z1, z2, z3 = _gaussian(w0), _gaussian(w1), _gaussian(w2), _gaussian(w3)
        if DISTRIBUTION == SPHERE:
            scale = tl.load(scales + s * K + r)
            z0, z1, z2, z3 = z0 * scale, z1 * scale, z2 * scale, z3 * scale
        u0, u1, u2, u3 = u0 + c * z0, u1 + c * z1, u2 + c * z2, u3 + c * z3
    return _interleave(u0, u1, u2, u3)


@triton.jit
def _canonical(x):
    """Give every NaN one bit pattern."""
    return tl.where(x == x, x.to(tl.uint32, bitcast=True), _NAN32).to(tl.float32, bitcast=True)


@triton.jit
def _moved(w, u):
    """Return w - u, or w where that is not a number. Rounding to 16 bits clamps by itself."""
    x = w - u
    return tl.where(x == x, x, w)


@triton.jit
def _moved32(w, u):
    """Return the same within the finite range of float32. What min and max make of a NaN is not used."""
    x = w - u
    return tl.where(x == x, tl.maximum(tl.minimum(x, _LARGEST), _LEAST), w)


@triton.jit
def _narrow(x, DTYPE: tl.constexpr):
    """Round to nearest even, overflow to infinity."""
    if tl.float32 == DTYPE:
        stored = _canonical(x)
    else:
        stored = x.to(DTYPE)  # a NaN becomes NAN16 by itself
    return stored


@triton.jit
def _narrow_stochastically(x, word, DTYPE: tl.constexpr):
    """Round to 16 bits, up with the probability of the fraction, saturating at the largest finite value."""
    bits = x.to(tl.uint32, bitcast=True)
    sign, a = (bits >> 31) << 15, bits & 0x7FFFFFFF
    if tl.bfloat16 == DTYPE:
        magnitude = tl.minimum((a >> 16) + (word < (a << 16)).to(tl.uint32), 0x7F7F)
    else:
        exponent = a >> 23
        normal = exponent >= 113
        implicit = tl.where(exponent > 0, 0x800000, 0).to(tl.uint32)
        kept = tl.where(normal, a - (112 << 23), (a & 0x7FFFFF) | implicit)
        # Below 2^-126 the fraction of fp16's smallest value is under 2^-32: a shift of 63 says so too.
        below = tl.where(normal, 13, tl.where(exponent > 0, 126 - exponent, 63)).to(tl.uint32)
        shift = tl.minimum(below, 31)
        lo = kept >> shift
        rest = kept - (lo << shift)
        left = rest << (32 - tl.minimum(below, 32)).to(tl.uint32)
        right = rest >> tl.minimum(below - tl.minimum(below, 32), 31)
        threshold = tl.where(below <= 32, left, right)
        magnitude = tl.minimum(lo + (word < threshold).to(tl.uint32), 0x7BFF)
    return tl.where(x == x, sign | magnitude, _NAN16).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def _rounding_words(tile, round, index, k0, k1, HALVES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the words that round BLOCK coordinates; ones below a half make it a word that rounds as it does."""
    if HALVES:
        low, high = _split_block(tile, 8, BLOCK)
        lane = low + tl.arange(0, BLOCK // 8).to(tl.uint32)
        r0, r1, r2, r3 = _philox(lane, high, round, index | _ROUNDING, k0, k1)
        shared = _interleave(r0, r1, r2, r3)
        return tl.interleave((shared << 16) | 0xFFFF, shared | 0xFFFF)
    low, high = _split_block(tile, 4, BLOCK)
    lane = low + tl.arange(0, BLOCK // 4).to(tl.uint32)
    r0, r1, r2, r3 = _philox(lane, high, round, index | _ROUNDING, k0, k1)
    return _interleave(r0, r1, r2, r3)


@triton.jit
def _apply_tile(
    source, out, base, count, tile, S, K, meta, coefficients, scales, probe,
    PROBE: tl.constexpr, STEPS: tl.constexpr, HALVES: tl.constexpr, MASKED: tl.constexpr, DISTRIBUTION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    if MASKED:
        mask = (base + lane >= 0) & (base + lane < count)
        stored = tl.load(source + base + lane, mask=mask)
    else:
        stored = tl.load(source + base + lane)
    DTYPE: tl.constexpr = stored.dtype
    if STEPS:
        if tl.float32 == DTYPE:
            stored = _canonical(stored)  # once: no step makes a NaN
        for s in range(S):
            u = _update(tile, s, K, meta, coefficients, scales, DISTRIBUTION, BLOCK)
            if tl.float32 == DTYPE:
                stored = _moved32(stored, u)
            else:
                x = _moved(stored.to(tl.float32), u)
                seed0, seed1 = _unsigned(tl.load(meta + 5 * s)), _unsigned(tl.load(meta + 5 * s + 1))
                t, n = _unsigned(tl.load(meta + 5 * s + 2)), _unsigned(tl.load(meta + 5 * s + 4))
                stored = _narrow_stochastically(x, _rounding_words(tile, t, n, seed0, seed1, HALVES, BLOCK), DTYPE)
    if PROBE:
        k0, k1 = _unsigned(tl.load(probe)), _unsigned(tl.load(probe + 1))
        round, index = _unsigned(tl.load(probe + 2)), _unsigned(tl.load(probe + 3))
        factor, scale = _float(tl.load(probe + 4)), _float(tl.load(probe + 5))
        z = _direction(tile, round, index, k0, k1, scale, DISTRIBUTION, BLOCK)
        stored = _narrow(stored.to(tl.float32) + factor * z, out.dtype.element_ty)
    if MASKED:
        tl.store(out + base + lane, stored, mask=mask)
    else:
        tl.store(out + base + lane, stored)


@triton.jit(do_not_specialize=["tile0", "S", "K"])
def _apply_kernel(
    source, out, count, tile0, shift, S, K, meta, coefficients, scales, probe,
    PROBE: tl.constexpr, STEPS: tl.constexpr, HALVES: tl.constexpr, DISTRIBUTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    base = pid * BLOCK - shift
    if (base >= 0) & (base + BLOCK <= count):  # a whole tile goes without a mask, which doubles its speed
        _apply_tile(
            source, out, base, count, pid + tile0, S, K, meta, coefficients, scales, probe,
            PROBE, STEPS, HALVES, False, DISTRIBUTION, BLOCK,
        )  # fmt: skip
    else:
        _apply_tile(
            source, out, base, count, pid + tile0, S, K, meta, coefficients, scales, probe,
            PROBE, STEPS, HALVES, True, DISTRIBUTION, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tile0", "k0", "k1", "round", "rounding"])
def _move_kernel(stored, by, count, tile0, shift, k0, k1, round, rounding, HALVES: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offset = pid * BLOCK - shift + tl.arange(0, BLOCK)
    mask = (offset >= 0) & (offset < count)
    w, u = tl.load(stored + offset, mask=mask), tl.load(by + offset, mask=mask)
    DTYPE: tl.constexpr = w.dtype
    if tl.float32 == DTYPE:
        result = _moved32(_canonical(w), u)
    else:
        t, index, seed0, seed1 = _unsigned(round), _unsigned(rounding), _unsigned(k0), _unsigned(k1)
        words = _rounding_words(pid + tile0, t, index, seed0, seed1, HALVES, BLOCK)
        result = _narrow_stochastically(_moved(w.to(tl.float32), u), words, DTYPE)
    tl.store(stored + offset, result, mask=mask)


@triton.jit(do_not_specialize=["tile0", "k0", "k1", "round", "first"])
def _fill_kernel(
    out, count, tile0, shift, k0, k1, round, first, scales, DISTRIBUTION: tl.constexpr, BLOCK: tl.constexpr
):
    pid, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offset = pid * BLOCK - shift + tl.arange(0, BLOCK)
    scale = tl.load(scales + row)
    index = _unsigned(first + row)
    z = _direction(pid + tile0, _unsigned(round), index, _unsigned(k0), _unsigned(k1), scale, DISTRIBUTION, BLOCK)
    tl.store(out + row.to(tl.int64) * count + offset, z, mask=(offset >= 0) & (offset < count))


@triton.jit(do_not_specialize=["count", "k0", "k1", "round", "index"])
def _norm_kernel(out, count, k0, k1, round, index, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offset = pid * BLOCK + tl.arange(0, BLOCK)
    z = _direction(pid, _unsigned(round), _unsigned(index), _unsigned(k0), _unsigned(k1), 1.0, GAUSSIAN, BLOCK)
    units = (z * z * _GRID + 0.5).to(tl.int32).to(tl.int64)
    tl.atomic_add(out, tl.sum(tl.where(offset < count, units, 0), axis=0))


def _signed(word: int) -> int:
    """Return the int32 with the bits of a 32-bit word, so that a launch never meets another integer type."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _key(seed: int) -> tuple[int, int]:
    return _signed(seed), _signed(seed >> 32)


def fill(
    out: torch.Tensor, start: int, seed: int, round: int, first: int, distribution: int, scales: torch.Tensor
) -> None:
    """Write coordinates start, start + 1, ... of directions first, first + 1, ... to the rows of float32 `out`."""
    block = BLOCK[torch.float32]
    rows, count = out.shape
    tile0, shift = divmod(start, block)
    for row in range(0, rows, MAX_ROWS):
        _fill_kernel[(-(-(shift + count) // block), min(MAX_ROWS, rows - row))](
            out[row:], count, tile0, shift, *_key(seed), _signed(round), first + row, scales[row:],
            DISTRIBUTION=distribution, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def squared_norm_units(count: int, seed: int, round: int, index: int, device: torch.device) -> int:
    """Return the sum of z^2 over the first `count` coordinates of a Gaussian direction, in integer units."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    block = BLOCK[torch.float32]
    _norm_kernel[(-(-count // block),)](
        total, count, *_key(seed), _signed(round), index, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False
    )
    return int(total.item())


class LaunchTable:
    """What one pass needs, in device memory: the probe, and all steps.

    A captured launch reads it from there, so its graph can be replayed for another pass of the same shape. Every part
    begins at a multiple of 16 bytes, which a compiled kernel relies on.
    """

    def __init__(self, steps: Any, probe: Any, device: torch.device) -> None:
        self.probing, self.shape, self.halves = bool(probe[0]), steps[4].shape, _halves(steps)
        host = self._packed(steps, probe)
        self._words = torch.from_numpy(host).to(device, non_blocking=True)  # pageable: free to go at once
        parts = (self._words[begin:] for begin in _begins(*self.shape)[:4])
        self.probe, self.meta, coefficients, scales = parts
        self.coefficients, self.scales = coefficients.view(torch.float32), scales.view(torch.float32)

    def write(self, steps: Any, probe: Any) -> None:
        """Overwrite it for another pass, in the order of the stream."""
        if (bool(probe[0]), steps[4].shape, _halves(steps)) != (self.probing, self.shape, self.halves):
            raise ValueError(f"this table is for {self.shape} coefficients and its rounding, not {steps[4].shape}")
        self._words.copy_(torch.from_numpy(self._packed(steps, probe)), non_blocking=True)

    @staticmethod
    def _packed(steps: Any, probe: Any) -> NDArray[np.int32]:
        keys, rounds, firsts, roundings, coefficients, scales = steps
        _, key, round, index, factor, scale = probe
        S, K = coefficients.shape
        _, meta, first_coefficient, first_scale, size = _begins(S, K)
        packed = np.zeros(size, dtype=np.uint32)
        packed[:4] = (key & _LOW, key >> _HALF, round, index)
        # Rounded by our own code: numpy would flush a denormal where the user's mode says so.
        packed[4:5] = to_float32(np.float64(factor)).view(np.uint32)
        packed[5:6] = np.array([scale], dtype=np.float32).view(np.uint32)
        rows = packed[meta : meta + 5 * S].reshape(S, 5)
        for column, values in enumerate((keys & _LOW, keys >> _HALF, rounds, firsts, roundings & _LOW)):
            rows[:, column] = values
        packed[first_coefficient : first_coefficient + S * K] = coefficients.reshape(-1).view(np.uint32)
        packed[first_scale : first_scale + S * K] = scales.reshape(-1).view(np.uint32)
        return packed.view(np.int32)


def _halves(steps: Any) -> bool:
    """Return whether steps, which all round alike, round by half a word a weight."""
    roundings = steps[3]
    return bool(len(roundings) and int(roundings[0]) & HALF_WORDS)


def _begins(S: int, K: int) -> list[int]:
    """Return where probe, steps, coefficients and scales begin, and where they end."""
    return [0, *itertools.accumulate([8, *(max(4, -(-count // 4) * 4) for count in (5 * S, S * K, S * K))])]


def apply(source: torch.Tensor, out: torch.Tensor, start: int, table: LaunchTable, distribution: int) -> None:
    """Write source after all steps of the table, perturbed by its probe, to out (which may be source)."""
    count, block = source.numel(), BLOCK[source.dtype]
    tile0, shift = divmod(start, block)
    S, K = table.shape
    _apply_kernel[(-(-(shift + count) // block),)](
        source, out, count, tile0, shift, S, K, table.meta, table.coefficients, table.scales, table.probe,
        PROBE=table.probing, STEPS=S > 0, HALVES=table.halves, DISTRIBUTION=distribution, BLOCK=block, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def move_by(stored: torch.Tensor, by: torch.Tensor, start: int, step: PackedSteps) -> None:
    """Move stored weights (coordinates start, ...) by float32 `by` in place, rounded by the words of the only step."""
    count, block = stored.numel(), BLOCK[stored.dtype]
    tile0, shift = divmod(start, block)
    keys, rounds, _, roundings, _, _ = step
    _move_kernel[(-(-(shift + count) // block),)](
        stored, by, count, tile0, shift, *_key(int(keys[0])), _signed(int(rounds[0])), _signed(int(roundings[0])),
        HALVES=_halves(step), BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
