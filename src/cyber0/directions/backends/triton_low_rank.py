"""Low-rank directions in Triton: kernels that give the bits of low_rank.py.

The numbers that a piece of w needs are drawn into device memory, one row a direction, by a launch that reads keys and
rounds from the pass's table; so the launches of a pass can be captured and replayed for another one. What a piece
consists of is copied to the device once (`_on_device`), at the first pass, which is never captured.

Steps go through tiles of a matrix: a row of a tile shares b and a column shares a, and the tile stays in registers for
all steps. Probes, entries, and 16-bit matrices whose rows don't begin with a block of rounding words go through tiles
of consecutive coordinates, as in triton_kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from cyber0.directions.backends.factors import BEGIN, COLUMNS, END, RANK, ROWS, SKIPPED, A, B, Piece, Table, pieces
from cyber0.directions.backends.triton_kernels import (
    _LARGEST,
    BLOCK,
    GAUSSIAN,
    WARPS,
    LaunchTable,
    _canonical,
    _direction,
    _float,
    _moved,
    _moved32,
    _narrow,
    _narrow_stochastically,
    _rounding_words,
    _unsigned,
)
from cyber0.directions.backends.triton_rounded import WORD_BLOCK, steps_in_16_bits
from cyber0.directions.low_rank import LowRankLayout

FACTOR_BYTES = 1 << 26  # numbers of low-rank directions that are in memory at a time
MAX_DRAWS = 65_535 * 1024  # of one run: what CUDA takes in the second dimension of a grid
UNROLLED = 4  # steps whose factors are read at once: one after the other they would be waited for
ENTRY_BLOCK = 512  # entries that a program takes through all steps: there are few, so by many programs
MOST_TOGETHER = 8  # factors of a step's directions that are read at once, for the same reason
FEW_TOGETHER = 2  # the same of 16-bit matrices, which have more to do meanwhile: 8 took most of a minute to compile

# Columns of a part on the device: those of `Piece.parts`, and where its programs begin.
_BEGIN, _END, _RANK, _COLUMNS = (tl.constexpr(c) for c in (BEGIN, END, RANK, COLUMNS))
_SKIPPED, _ROWS, _B, _A = (tl.constexpr(c) for c in (SKIPPED, ROWS, B, A))
_FIRST, _WIDTH = tl.constexpr(8), tl.constexpr(9)


@triton.jit
def _part_of(parts, program, P, PARTS: tl.constexpr):
    """Return the part that a program works on."""
    lane = tl.arange(0, PARTS)
    firsts = tl.load(parts + lane * _WIDTH + _FIRST, mask=lane < P, other=9223372036854775807)
    return parts + (tl.sum((firsts <= program).to(tl.int32), axis=0) - 1) * _WIDTH


@triton.jit(do_not_specialize=["width", "tile0", "shift", "count", "place", "K", "step0"])
def _draw_kernel(
    numbers, width, tile0, shift, count, place, K, step0, meta, PROBE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write a run of numbers for each direction: `meta` has the steps, or the one probe."""
    row, pid = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if PROBE:
        at, index = meta, _unsigned(tl.load(meta + 3))
    else:
        at = meta + 5 * (step0 + row // K)
        index = _unsigned(tl.load(at + 3)) + (row % K).to(tl.uint32)
    k0, k1, round = _unsigned(tl.load(at)), _unsigned(tl.load(at + 1)), _unsigned(tl.load(at + 2))
    z = _direction(pid + tile0, round, index, k0, k1, 1.0, GAUSSIAN, BLOCK)
    offset = pid * BLOCK - shift + tl.arange(0, BLOCK)
    tl.store(numbers + row * width + place + offset, z, mask=(offset >= 0) & (offset < count))


@triton.jit
def _coordinates(
    numbers, rows, columns, begin_b, begin_a, o, i, mask, factored, scale, ENTRIES: tl.constexpr,
    LAYOUT_RANK: tl.constexpr,
):  # fmt: skip
    """Return coordinates in rows o and columns i of a part, from the numbers of one direction.

    Entries, which are not `factored`, are one row, whose b is 1: the product is exact. ENTRIES says that there are no
    others.
    """
    bs, as_ = numbers + begin_b, numbers + begin_a
    z = tl.load(as_ + i, mask=mask, other=0.0)
    if not ENTRIES:
        z = tl.load(bs + o, mask=factored, other=1.0) * z
        for r in range(1, LAYOUT_RANK):
            b = tl.load(bs + r * rows + o, mask=factored, other=0.0)
            a = tl.load(as_ + r * columns + i, mask=factored, other=0.0)
            z = tl.where(factored, z + b * a, z)
        if LAYOUT_RANK > 1:
            z = tl.where(factored, z * scale, z)
    return z


@triton.jit
def _places(part, tile, start, BLOCK: tl.constexpr):
    """Return where the coordinates of a tile are.

    Their offsets in the weights given; the row of the first one in the part, and how many rows further each is; their
    columns; and which are in the part. A tile is short, so 32 bits are enough to divide.
    """
    begin, end, columns = tl.load(part + _BEGIN), tl.load(part + _END), tl.load(part + _COLUMNS)
    lane = tl.arange(0, BLOCK)
    coordinate = tile * BLOCK + lane
    mask = (coordinate >= begin) & (coordinate < end)
    position = tl.maximum(tile * BLOCK, begin) - begin + tl.load(part + _SKIPPED)  # of the first one in the part
    row = position // columns
    ahead = tl.minimum(tile * BLOCK - begin, 0).to(tl.int32)  # lanes before the part, as a negative number
    along = tl.maximum(lane + ahead, 0) + (position - row * columns).to(tl.int32)
    down = along // columns.to(tl.int32)
    return tile * BLOCK - start + lane, row, down, along - down * columns.to(tl.int32), mask


@triton.jit(do_not_specialize=["start", "P", "width", "step0", "S", "K"])
def _apply_kernel(
    source, out, start, parts, P, numbers, probe_numbers, width, scale, step0, S, K, meta, coefficients, probe,
    PROBE: tl.constexpr, STEPS: tl.constexpr, HALVES: tl.constexpr, ENTRIES: tl.constexpr, ONE: tl.constexpr,
    UNROLL: tl.constexpr, TOGETHER: tl.constexpr, LAYOUT_RANK: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps, then a probe, for a tile of consecutive coordinates in one part."""
    program = tl.program_id(0).to(tl.int64)
    part = _part_of(parts, program, P, PARTS)
    tile = tl.load(part + _BEGIN) // BLOCK + program - tl.load(part + _FIRST)
    offset, row, o, i, mask = _places(part, tile, start, BLOCK)
    rows, columns = tl.load(part + _ROWS), tl.load(part + _COLUMNS)
    begin_b, begin_a = tl.load(part + _B) + row, tl.load(part + _A)
    factored = mask & (tl.load(part + _RANK) > 0)
    stored = tl.load(source + offset, mask=mask)
    DTYPE: tl.constexpr = stored.dtype
    if STEPS:
        if tl.float32 == DTYPE:
            stored = _canonical(stored)  # once: no step makes a NaN
        for first in range(0, S, UNROLL):
            for more in tl.static_range(UNROLL):
                s = first + more
                u = tl.zeros((BLOCK,), tl.float32)
                for some in range(0, 1 if ONE else K, TOGETHER):
                    for n in tl.static_range(TOGETHER):
                        drawn = numbers + (s * K + some + n).to(tl.int64) * width
                        z = _coordinates(
                            drawn, rows, columns, begin_b, begin_a, o, i, mask, factored, scale, ENTRIES, LAYOUT_RANK
                        )  # fmt: skip
                        u = u + tl.load(coefficients + (step0 + s) * K + some + n) * z
                if tl.float32 == DTYPE:
                    stored = _moved32(stored, u)
                else:
                    x = _moved(stored.to(tl.float32), u)
                    at = meta + 5 * (step0 + s)
                    seed0, seed1 = _unsigned(tl.load(at)), _unsigned(tl.load(at + 1))
                    t, index = _unsigned(tl.load(at + 2)), _unsigned(tl.load(at + 4))
                    words = _rounding_words(tile, t, index, seed0, seed1, HALVES, BLOCK)
                    stored = _narrow_stochastically(x, words, DTYPE)
    if PROBE:
        z = _coordinates(
            probe_numbers, rows, columns, begin_b, begin_a, o, i, mask, factored, scale, ENTRIES, LAYOUT_RANK
        )
        stored = _narrow(stored.to(tl.float32) + _float(tl.load(probe + 4)) * z, out.dtype.element_ty)
    tl.store(out + offset, stored, mask=mask)


@triton.jit
def _matrix_update(
    numbers, rows, columns, begin_b, begin_a, width, s, step0, K, coefficients, o, i, oks, iks, scale,
    ONE: tl.constexpr, TOGETHER: tl.constexpr, LAYOUT_RANK: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return u of one step for a tile of a matrix: rows o, columns i. ONE says that K is 1."""
    u = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for some in range(0, 1 if ONE else K, TOGETHER):  # in the definition's order: one direction after the other
        for n in tl.static_range(TOGETHER):
            row = numbers + (s * K + some + n).to(tl.int64) * width
            b = tl.load(row + begin_b + o, mask=oks, other=0.0)
            a = tl.load(row + begin_a + i, mask=iks, other=0.0)
            z = b[:, None] * a[None, :]
            for q in range(1, LAYOUT_RANK):
                b = tl.load(row + begin_b + q * rows + o, mask=oks, other=0.0)
                a = tl.load(row + begin_a + q * columns + i, mask=iks, other=0.0)
                z = z + b[:, None] * a[None, :]
            if LAYOUT_RANK > 1:
                z = z * scale
            u = u + tl.load(coefficients + (step0 + s) * K + some + n) * z
    return u


@triton.jit
def _matrix_tile(
    source, out, first, start, part, numbers, width, scale, step0, S, K, meta, coefficients, left, o, i, oks, iks,
    MASKED: tl.constexpr, HALVES: tl.constexpr, ONE: tl.constexpr, UNROLL: tl.constexpr, TOGETHER: tl.constexpr,
    LAYOUT_RANK: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Steps for a tile of a matrix: rows o and columns i, the first coordinate is `first`.

    Of 16-bit weights `i` has the first of each 8 columns.

    Places in a tile are 32 bits wide, because wider ones take registers.

    In float32 first without what `_moved32` does about numbers that are not finite: once a weight is infinite or no
    number it stays so, and then the tile is computed again.
    """
    rows, columns = tl.load(part + _ROWS), tl.load(part + _COLUMNS)
    begin_b, begin_a = tl.load(part + _B), tl.load(part + _A)
    offset = tl.arange(0, R)[:, None] * columns.to(tl.int32) + tl.arange(0, C)[None, :]
    source, out = source + (first - start), out + (first - start)
    if MASKED:
        begin, end = tl.load(part + _BEGIN) - first, tl.load(part + _END) - first
        mask = (offset >= begin) & (offset < end) & (left + tl.arange(0, C) < columns)[None, :]
        stored = tl.load(source + offset, mask=mask, other=0.0)
    else:
        stored = tl.load(source + offset)
    DTYPE: tl.constexpr = stored.dtype
    if tl.float32 == DTYPE:
        x = stored
        for some in range(0, S, UNROLL):
            for n in tl.static_range(UNROLL):
                x = x - _matrix_update(
                    numbers, rows, columns, begin_b, begin_a, width, some + n, step0, K, coefficients, o, i, oks, iks,
                    scale, ONE, TOGETHER, LAYOUT_RANK, R, C,
                )  # fmt: skip
        odd = tl.where(tl.abs(x) <= _LARGEST, 0, 1)
        if MASKED:
            odd = odd * mask.to(tl.int32)
        if tl.max(tl.max(odd, axis=1), axis=0) > 0:
            if MASKED:  # read again: to keep it would take registers from all tiles
                stored = tl.load(source + offset, mask=mask, other=0.0)
            else:
                stored = tl.load(source + offset)
            x = _canonical(stored)
            for s in range(S):
                u = _matrix_update(
                    numbers, rows, columns, begin_b, begin_a, width, s, step0, K, coefficients, o, i, oks, iks, scale,
                    ONE, 1, LAYOUT_RANK, R, C,
                )  # fmt: skip
                x = _moved32(x, u)
        stored = x
    else:
        stored = steps_in_16_bits(
            stored, first, numbers, rows, columns, begin_b, begin_a, width, scale, step0, S, K, meta, coefficients, o,
            i, oks, iks, HALVES, ONE, UNROLL, TOGETHER, LAYOUT_RANK, R, C // 8,
        )  # fmt: skip
    if MASKED:
        tl.store(out + offset, stored, mask=mask)
    else:
        tl.store(out + offset, stored)


@triton.jit(do_not_specialize=["start", "P", "width", "step0", "S", "K"])
def _matrix_kernel(
    source, out, start, parts, P, numbers, width, scale, step0, S, K, meta, coefficients, HALVES: tl.constexpr,
    ONE: tl.constexpr, UNROLL: tl.constexpr, TOGETHER: tl.constexpr, LAYOUT_RANK: tl.constexpr, PARTS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Steps for one tile of a matrix.

    Masks are left out by code of its own. With one code for all tiles, which only reads and writes in two ways, the
    compiler no longer read the factors of all steps first: a replay took 3.9 s on an H200 and takes about 2.
    """
    program = tl.program_id(0).to(tl.int64)
    part = _part_of(parts, program, P, PARTS)
    begin, end, columns = tl.load(part + _BEGIN), tl.load(part + _END), tl.load(part + _COLUMNS)
    skipped, rows = tl.load(part + _SKIPPED), tl.load(part + _ROWS)
    across = (columns + TILE_COLUMNS - 1) // TILE_COLUMNS
    local = program - tl.load(part + _FIRST)
    top, left = local // across * TILE_ROWS, local % across * TILE_COLUMNS
    EACH: tl.constexpr = 1 if tl.float32 == source.dtype.element_ty else 8
    o, i = top + tl.arange(0, TILE_ROWS), left + tl.arange(0, TILE_COLUMNS // EACH) * EACH
    oks, iks = o < rows, i < columns
    corner = top * columns + left - skipped  # the tile's first place in the part
    final = corner + (TILE_ROWS - 1) * columns + TILE_COLUMNS
    if (corner >= 0) & (left + TILE_COLUMNS <= columns) & (final <= end - begin):
        _matrix_tile(
            source, out, begin + corner, start, part, numbers, width, scale, step0, S, K, meta, coefficients, left, o,
            i, oks, iks, False, HALVES, ONE, UNROLL, TOGETHER, LAYOUT_RANK, TILE_ROWS, TILE_COLUMNS,
        )  # fmt: skip
    else:
        _matrix_tile(
            source, out, begin + corner, start, part, numbers, width, scale, step0, S, K, meta, coefficients, left, o,
            i, oks, iks, True, HALVES, ONE, UNROLL, TOGETHER, LAYOUT_RANK, TILE_ROWS, TILE_COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "start", "P", "width"])
def _fill_kernel(
    out, count, start, parts, P, numbers, width, scale, LAYOUT_RANK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    direction, program = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    part = _part_of(parts, program, P, PARTS)
    tile = tl.load(part + _BEGIN) // BLOCK + program - tl.load(part + _FIRST)
    offset, row, o, i, mask = _places(part, tile, start, BLOCK)
    z = _coordinates(
        numbers + direction * width, tl.load(part + _ROWS), tl.load(part + _COLUMNS), tl.load(part + _B) + row,
        tl.load(part + _A), o, i, mask, mask & (tl.load(part + _RANK) > 0), scale, False, LAYOUT_RANK,
    )  # fmt: skip
    tl.store(out + direction * count + offset, z, mask=mask)


Rows = NDArray[np.bool_]


class Tile(NamedTuple):
    """The part of a matrix that a program holds in registers."""

    rows: int
    columns: int


def together(k: int, rank: int) -> int:
    """Return how many of k directions are read at once: a divisor of k for which registers suffice."""
    return math.gcd(k, max(MOST_TOGETHER // rank, 1))


def tile_of(dtype: torch.dtype, steps: int) -> Tile:
    """Return the fastest on an H200 for so many steps."""
    if dtype == torch.float32:
        return Tile(4, 256) if steps == 1 else Tile(4, 512)
    return Tile(16, 128) if steps == 1 else Tile(8, 256)


class Programs(NamedTuple):
    """Parts in device memory, how many there are, and how many programs work on them."""

    parts: torch.Tensor
    number: int
    programs: int

    @property
    def block(self) -> int:
        """How many parts a program looks at to find its own: a power of two."""
        return 1 << max(self.number - 1, 0).bit_length()


def programs_of(parts: Table, counts: Table, device: torch.device) -> Programs:
    """Return parts with so many programs each; entries are one row, where numbers are their columns."""
    table = np.zeros((len(parts), 9), np.int64)
    table[:, :8] = parts
    entries = parts[:, RANK] == 0
    table[entries, COLUMNS] = parts[entries, END] - parts[entries, BEGIN]
    table[entries, A] = parts[entries, B]
    table[1:, 8] = np.cumsum(counts)[:-1]
    return Programs(torch.from_numpy(table).to(device), len(table), int(counts.sum()))


def by_tiles(piece: Piece, block: int, device: torch.device, *, chosen: Rows | None = None) -> Programs:
    """Return parts of a piece, all or those chosen, with one program for each tile of consecutive coordinates."""
    parts = piece.parts if chosen is None else piece.parts[chosen]
    return programs_of(parts, (parts[:, END] - 1) // block - parts[:, BEGIN] // block + 1, device)


def by_matrices(piece: Piece, tile: Tile, device: torch.device, chosen: Rows) -> Programs:
    """Return the chosen matrices of a piece with one program for each tile of rows and columns."""
    parts = piece.parts[chosen]
    down, across = -(-parts[:, ROWS] // tile.rows), -(-parts[:, COLUMNS] // tile.columns)
    return programs_of(parts, down * across, device)


def in_tiles_of_matrices(piece: Piece, *, rounded: bool) -> Rows:
    """Return which parts are matrices that steps go through by rows and columns.

    Where weights are rounded, each row must begin with a block of rounding words.
    """
    aligned = (piece.parts[:, [BEGIN, END, COLUMNS, SKIPPED]] % WORD_BLOCK == 0).all(axis=1)
    narrow = piece.parts[:, COLUMNS] < 1 << 24  # places in a tile are 32 bits wide
    found: Rows = (piece.parts[:, RANK] > 0) & narrow & (aligned if rounded else True)
    return found


class _OnDevice(NamedTuple):
    piece: Piece
    tiles: Programs
    matrices: Programs
    entries: Programs
    others: Programs
    """Matrices that steps go through by consecutive coordinates."""

    @classmethod
    def of(cls, piece: Piece, dtype: torch.dtype, tile: Tile, device: torch.device) -> _OnDevice:
        """Return a piece of weights of this type."""
        chosen, block = in_tiles_of_matrices(piece, rounded=dtype != torch.float32), BLOCK[dtype]
        entries = piece.parts[:, RANK] == 0
        return cls(piece, by_tiles(piece, block, device), by_matrices(piece, tile, device, chosen),
                   by_tiles(piece, ENTRY_BLOCK, device, chosen=entries),
                   by_tiles(piece, block, device, chosen=~chosen & ~entries))  # fmt: skip


@cache
def _on_device(
    layout: LowRankLayout, begin: int, end: int, most: int, dtype: torch.dtype, tile: Tile, device: torch.device
) -> tuple[_OnDevice, ...]:
    """Return the pieces of some coordinates; kept for good, because captured launches read them from there."""
    return tuple(_OnDevice.of(piece, dtype, tile, device) for piece in pieces(layout, begin, end, most))


def _draw(piece: Piece, rows: int, K: int, step0: int, meta: torch.Tensor, *, probe: bool) -> torch.Tensor:
    """Return the numbers that a piece needs, one row a direction."""
    numbers = torch.empty(rows, piece.width, dtype=torch.float32, device=meta.device)
    block = BLOCK[torch.float32]
    for at, count, place in piece.draws.tolist():
        for low in range(0, count, MAX_DRAWS):
            tile0, shift = divmod(at + low, block)
            some = min(MAX_DRAWS, count - low)
            _draw_kernel[(rows, -(-(shift + some) // block))](
                numbers, piece.width, tile0, shift, some, place + low, K, step0, meta,
                PROBE=probe, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return numbers


def fill(out: torch.Tensor, start: int, table: LaunchTable, layout: LowRankLayout) -> None:
    """Write coordinates start, ... of the directions of the table's one step to the rows of float32 `out`."""
    (rows, count), block = out.shape, BLOCK[torch.float32]
    (place,) = _on_device(layout, start, start + count, layout.drawn, out.dtype, tile_of(out.dtype, 1), out.device)
    numbers = _draw(place.piece, rows, rows, 0, table.meta, probe=False)
    _fill_kernel[(rows, place.tiles.programs)](
        out, count, start, place.tiles.parts, place.tiles.number, numbers, place.piece.width, float(layout.scale),
        LAYOUT_RANK=layout.rank, PARTS=place.tiles.block, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def apply(source: torch.Tensor, out: torch.Tensor, start: int, table: LaunchTable, layout: LowRankLayout) -> None:
    """Write source after all steps of the table, perturbed by its probe, to out (which may be source)."""
    S, K = table.shape
    tile = tile_of(source.dtype, S)
    most, source, out = FACTOR_BYTES // (4 * max(K, 1)), source.view(-1), out.view(-1)
    for place in _on_device(layout, start, start + source.numel(), most, source.dtype, tile, source.device):
        here = slice(place.piece.begin - start, place.piece.end - start)
        _apply_piece(source[here], out[here], place, tile, table, layout)


def steps_at_a_time(piece: Piece, S: int, K: int) -> Iterator[tuple[int, int]]:
    """Cut S steps so that the numbers of a piece stay within FACTOR_BYTES: the first step and how many."""
    each = max(FACTOR_BYTES // max(4 * K * piece.width, 1), 1)
    if each > UNROLLED:
        each -= each % UNROLLED
    for first in range(0, max(S, 1), each):
        yield first, min(each, S - first)


def _apply_piece(
    source: torch.Tensor, out: torch.Tensor, place: _OnDevice, tile: Tile, table: LaunchTable, layout: LowRankLayout
) -> None:
    (S, K), piece = table.shape, place.piece
    wide = source.dtype == torch.float32  # tiles of other types are longer, and spill registers sooner
    probed = _draw(piece, 1, 1, 0, table.probe, probe=True) if table.probing else None
    cuts = list(steps_at_a_time(piece, S, K))
    between = out if out.dtype == source.dtype or len(cuts) == 1 else torch.empty_like(source)
    for number, (first, some) in enumerate(cuts):
        last = number == len(cuts) - 1
        numbers = _draw(piece, some * K, K, first, table.meta, probe=False) if some and K else None
        probing, target = last and probed is not None, out if last else between
        unroll, at_once = 1 if some % UNROLLED or K > 1 else UNROLLED, together(K, layout.rank)
        if numbers is not None and place.matrices.number and not probing and source.dtype == target.dtype:
            _matrix_kernel[(place.matrices.programs,)](
                source, target, piece.begin, place.matrices.parts, place.matrices.number, numbers, piece.width,
                float(layout.scale), first, some, K, table.meta, table.coefficients, HALVES=table.halves,
                ONE=K == 1, UNROLL=unroll, TOGETHER=at_once if wide else math.gcd(at_once, FEW_TOGETHER),
                LAYOUT_RANK=layout.rank, PARTS=place.matrices.block, TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
            rest = [(place.entries, ENTRY_BLOCK, True), (place.others, BLOCK[source.dtype], False)]
        else:
            rest = [(place.tiles, BLOCK[source.dtype], False)]
        nothing = table.coefficients  # where a pass has no steps or no probe; not read
        for parts, block, entries in rest:
            if parts.number:
                _apply_kernel[(parts.programs,)](
                    source, target, piece.begin, parts.parts, parts.number, nothing if numbers is None else numbers,
                    nothing if probed is None else probed, piece.width, float(layout.scale), first, some, K, table.meta,
                    table.coefficients, table.probe, PROBE=probing, STEPS=some > 0, HALVES=table.halves,
                    ENTRIES=entries, ONE=K == 1, UNROLL=unroll if entries else 1, TOGETHER=at_once if wide else 1,
                    LAYOUT_RANK=layout.rank, PARTS=parts.block, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
                )  # fmt: skip
        source = target
