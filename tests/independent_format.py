"""A second implementation of docs/FORMAT.md, written from that page: plain, slow, without a line of cyber0."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Case = dict[str, Any]
F32 = np.float32
LARGEST = float.fromhex("0x1.fffffep127")


# Random words.


def philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def words(key: int, stream: int, round: int, index: int, start: int, count: int) -> list[int]:
    made: list[int] = []
    for block in range(start // 4, (start + count - 1) // 4 + 1 if count else start // 4):
        counter = [block % 2**32, block // 2**32, round, stream * 2**24 + index]
        made += philox(counter, [key % 2**32, key // 2**32])
    return made[start % 4 :][:count]


def permutation(key: int, stream: int, round: int, index: int, n: int) -> list[int]:
    drawn = words(key, stream, round, index, 0, 2 * n)
    keys = [drawn[2 * i] + 2**32 * drawn[2 * i + 1] for i in range(n)]
    return sorted(range(n), key=lambda i: (keys[i], i))


def round_key(seed: int, mode: str, chain: bytes) -> int:
    if mode == "shared":
        return seed
    text = b"cyber0 round key" + struct.pack("<Q", seed) + chain[:8]
    (key,) = struct.unpack("<Q", hashlib.sha256(text).digest()[:8])
    return int(key)


# Directions.

A, B, C, D = (F32(float.fromhex(c)) for c in ("0x1.043c58p-14", "0x1.483bf2p-48", "-0x1.bda568p-80", "0x1.2ed9d0p-109"))


def gaussian_of(word: int) -> np.float32:
    b0, b1, b2, b3 = struct.unpack("<4b", struct.pack("<I", word))
    x = F32(53 * b0 + 97 * b1 + 121 * b2 + 127 * b3 + 199)
    q = x * x
    return F32(x * (A + q * (B + q * (C + q * D))))


def gaussian(key: int, round: int, index: int, start: int, count: int) -> list[np.float32]:
    return [gaussian_of(word) for word in words(key, 0, round, index, start, count)]


def norm_sum(key: int, round: int, index: int, d: int) -> int:
    total = 0
    for z in gaussian(key, round, index, 0, d):
        total += int(F32(F32(F32(z * z) * F32(2**20)) + F32(0.5)))
    return total


SCALES: dict[tuple[int, int, int, int], np.float32] = {}


def scale(key: int, round: int, index: int, d: int) -> np.float32:
    place = (key, round, index, d)
    if place not in SCALES:
        SCALES[place] = F32(1 / math.sqrt(max(1, norm_sum(*place)) / 2**20))
    return SCALES[place]


class LowRank(NamedTuple):
    """The distribution low_rank for weights of these shapes."""

    shapes: list[list[int]]
    rank: int

    def coordinates(self, key: int, round: int, index: int) -> list[np.float32]:
        z: list[np.float32] = []
        taken = 0

        def take(count: int) -> list[np.float32]:
            nonlocal taken
            taken += count
            return gaussian(key, round, index, taken - count, count)

        for shape in self.shapes:
            size = math.prod(shape)
            rows = shape[0] if len(shape) > 1 and size else 1
            columns = size // rows
            if self.rank * (rows + columns) >= rows * columns:
                z += take(size)
                continue
            b = [take(rows) for _ in range(self.rank)]
            a = [take(columns) for _ in range(self.rank)]
            for o in range(rows):
                for i in range(columns):
                    total = F32(b[0][o] * a[0][i])
                    for r in range(1, self.rank):
                        total = F32(total + F32(b[r][o] * a[r][i]))
                    z.append(total if self.rank == 1 else F32(total * F32(1 / math.sqrt(self.rank))))
        return z


def direction(
    distribution: str | LowRank, key: int, round: int, index: int, start: int, count: int, d: int | None
) -> list[np.float32]:
    if isinstance(distribution, LowRank):
        return distribution.coordinates(key, round, index)[start : start + count]
    if distribution == "rademacher":
        signs = []
        for i in range(start, start + count):
            (word,) = words(key, 0, round, index, i // 32, 1)
            signs.append(F32(-1 if word >> i % 32 & 1 else 1))
        return signs
    z = gaussian(key, round, index, start, count)
    if distribution == "sphere":
        assert d is not None
        s = scale(key, round, index, d)
        z = [F32(v * s) for v in z]
    return z


# Weights: patterns are integers.


def float_of(pattern: int, storage: str) -> np.float32:
    """The value of a stored pattern, in float32."""
    if storage == "float16":
        (value,) = struct.unpack("<e", struct.pack("<H", pattern))
        return F32(value)
    (value,) = struct.unpack("<f", struct.pack("<I", pattern << 16 if storage == "bfloat16" else pattern))
    return F32(value)


def bits_of(x: np.float32) -> int:
    return int(np.asarray(x, np.float32).view(np.uint32))


def top_of(storage: str) -> int:
    """The pattern of the largest finite value."""
    return {"float32": 0x7F7FFFFF, "float16": 0x7BFF, "bfloat16": 0x7F7F}[storage]


def neighbours(x: np.float32, storage: str) -> tuple[int, Fraction]:
    """The pattern of the largest storable magnitude <= |x|, and where |x| lies between it and the next."""
    a, low, high = Fraction(float(abs(x))), 0, top_of(storage)
    while low < high:  # magnitudes grow with their patterns
        middle = (low + high + 1) // 2
        low, high = (middle, high) if Fraction(float(float_of(middle, storage))) <= a else (low, middle - 1)
    value = Fraction(float(float_of(low, storage)))
    if low == top_of(storage):
        below = Fraction(float(float_of(low - 1, storage)))
        return low, (a - value) / (value - below)
    return low, (a - value) / (Fraction(float(float_of(low + 1, storage))) - value)


def nearest(x: np.float32, storage: str) -> int:
    if np.isnan(x):
        return 0x7FC00000 if storage == "float32" else 0x7FFF
    if storage == "float32":
        return bits_of(x)
    sign, infinity = int(np.signbit(x)) << 15, top_of(storage) + 1
    if np.isinf(x):
        return sign | infinity
    low, fraction = neighbours(x, storage)
    up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and low % 2 == 1)
    return sign | min(low + up, infinity)


def stochastic(x: np.float32, storage: str, word: int, bits: int = 32) -> int:
    if np.isnan(x):
        return 0x7FFF
    sign = int(np.signbit(x)) << 15
    if abs(float(x)) >= float(float_of(top_of(storage), storage)):
        return sign | top_of(storage)
    low, fraction = neighbours(x, storage)
    return sign | (low + (word < math.floor(fraction * 2**bits)))


def rounding_words(key: int, round: int, index: int, start: int, count: int, bits: int) -> list[int]:
    """One word a coordinate; of 16 bits, two coordinates share one: the even one has its low half."""
    each = 32 // bits
    first, last = start // each, (start + count - 1) // each
    drawn = words(key, 1, round, index, first, last - first + 1)
    return [drawn[i // each - first] >> bits * (i % each) & (1 << bits) - 1 for i in range(start, start + count)]


def little_endian(pattern: int, storage: str) -> bytes:
    return struct.pack("<I" if storage == "float32" else "<H", pattern)


def digest(layout: list[Case], weights: list[list[int]]) -> str:
    sha = hashlib.sha256()
    for entry, stored in zip(layout, weights, strict=True):
        sha.update(b"".join(little_endian(p, entry["dtype"]) for p in stored))
    return sha.hexdigest()


# Commit.


def clamp(x: Any) -> Any:
    """To the finite range of float32; NaN stays."""
    return LARGEST if x > LARGEST else -LARGEST if x < -LARGEST else x


def coefficient(lr: float, g: np.floating[Any], k: int) -> np.float32:
    with np.errstate(all="ignore"):
        return F32(clamp(np.float64(lr) * np.float64(g) / np.float64(k)))


def commit(
    stored: list[int], storage: str, start: int, key: int, round: int, first: int, rounding: int,
    c: list[np.float32], distribution: str | LowRank, d: int,
    move: Callable[[int, np.float32], np.float32] | None = None,
    bits: int = 32,
) -> list[int]:  # fmt: skip
    """Move the weights from coordinate `start` on by one step; `move` makes another update of u at a coordinate."""
    count = len(stored)
    z = [direction(distribution, key, round, first + r, start, count, d) for r in range(len(c))]
    drawn = rounding_words(key, round, rounding, start, count, bits)
    result = []
    with np.errstate(all="ignore"):
        for i, pattern in enumerate(stored):
            u, w = F32(0), float_of(pattern, storage)
            for r, factor in enumerate(c):
                u = F32(u + F32(factor * z[r][i]))
            u = u if move is None else move(start + i, u)
            x = F32(w - u)
            x = F32(clamp(w if np.isnan(x) else x))
            result.append(bits_of(x) if storage == "float32" else stochastic(x, storage, drawn[i], bits))
    return result


def exact_sum(values: list[float]) -> float:
    return float(sum(map(Fraction, values)))  # rounded once


def f64(x: Any) -> np.float64:
    return np.float64(x)


def vanishing(p: Any) -> Any:
    return p if p >= 2.0**-60 else type(p)(0)


class Optimizer:
    """What turns the scalars of decided rounds into steps, with its state and vectors."""

    def __init__(self, name: str, options: dict[str, float], d: int) -> None:
        self.name, self.options = name, options
        self.state = {"adaptive": [0.0, 1.0], "adam": [1.0, 1.0]}.get(name, [])
        starts = {"momentum": [0.0], "adam": [0.0, 0.0], "hessian": [1.0]}.get(name, [])
        self.vectors = [[F32(start)] * d for start in starts]

    def coefficients(self, lr: float, g: list[np.float32], k: int) -> list[np.float32]:
        x = [float(v) for v in self.scaled([f64(v) for v in g])]
        return [coefficient(1.0 if self.name in ("adam", "hessian") else lr, f64(v), k) for v in x]

    def scaled(self, g: list[np.float64]) -> list[np.float64]:
        """x_0 .. x_(n-1), and the state after the round."""
        n = len(g)
        if self.name == "adaptive":
            s, p = self.state
            beta = f64(self.options["beta"])
            s = beta * f64(s) + (f64(1) - beta) * (f64(exact_sum([v * v for v in g])) / f64(n))
            p = vanishing(f64(p) * beta)
            self.state = [s, p]
            return over(g, np.sqrt(s / (f64(1) - p)))
        if self.name in ("normalized", "zscore"):
            a = f64(exact_sum(g)) / f64(n)
            y = [v - a for v in g]
            total = f64(exact_sum([v * v for v in y]))
            if self.name == "normalized":
                return over(g, np.sqrt(total / f64(n - 1)))
            return over(y, np.sqrt(total / f64(n)))
        if self.name == "rank":
            return [np.sqrt(f64(3)) * (f64(sum(o < v for o in g) - sum(o > v for o in g)) / f64(n)) for v in g]
        if self.name == "adam":
            self.state = [
                vanishing(f64(self.state[0]) * f64(self.options["beta1"])),
                vanishing(f64(self.state[1]) * f64(self.options["beta2"])),
            ]
        return g

    def move(self, lr: float) -> Callable[[int, np.float32], np.float32] | None:
        """What a round does with u at a coordinate; None: w moves by u."""
        rule = {"momentum": self._momentum, "adam": self._adam, "hessian": self._hessian}.get(self.name)
        return None if rule is None else lambda i, u: rule(lr, i, bounded(u))

    def _momentum(self, lr: float, i: int, u: np.float32) -> np.float32:
        beta = self.options["beta"]
        m = F32(F32(F32(beta) * self.vectors[0][i]) + F32(F32(1 - beta) * u))
        self.vectors[0][i] = m
        return m

    def _adam(self, lr: float, i: int, u: np.float32) -> np.float32:
        (m, v), (beta1, beta2) = (vector[i] for vector in self.vectors), (self.options["beta1"], self.options["beta2"])
        m = F32(F32(F32(beta1) * m) + F32(F32(1 - beta1) * u))
        v = F32(F32(F32(beta2) * v) + F32(F32(1 - beta2) * F32(u * u)))
        self.vectors[0][i], self.vectors[1][i] = m, v
        first, second = (F32(f64(1) / (f64(1) - f64(p))) for p in self.state)
        root = F32(np.sqrt(F32(v * second)))
        return F32(F32(F32(lr) * F32(m * first)) / F32(root + F32(self.options["eps"])))

    def _hessian(self, lr: float, i: int, u: np.float32) -> np.float32:
        h, nu = self.vectors[0][i], self.options["nu"]
        step = bounded(F32(u / F32(np.sqrt(h))))
        mean = F32(F32(nu) * F32(F32(step * step) + F32(self.options["floor"])))
        self.vectors[0][i] = F32(F32(F32(1 - nu) * h) + mean)
        return F32(F32(lr) * step)

    def digest(self, weights: str) -> str:
        """What participants compare, given the digest of the weights."""
        if not self.state and not self.vectors:
            return weights
        data = bytes.fromhex(weights) + struct.pack(f"<{len(self.state)}d", *self.state)
        if self.vectors:
            floats = b"".join(struct.pack("<f", v) for vector in self.vectors for v in vector)
            data += hashlib.sha256(floats).digest()
        return hashlib.sha256(data).hexdigest()


def over(values: list[np.float64], divisor: np.float64) -> list[np.float64]:
    return [v / divisor if divisor else f64(0) for v in values]


def bounded(u: np.float32) -> np.float32:
    return F32(0) if np.isnan(u) else F32(min(max(u, -(2.0**60)), 2.0**60))


def probe(
    stored: list[int], storage: str, start: int, key: int, round: int, index: int, c: float,
    distribution: str | LowRank, d: int,
) -> list[int]:  # fmt: skip
    z = direction(distribution, key, round, index, start, len(stored), d)
    with np.errstate(all="ignore"):
        return [nearest(F32(float_of(p, storage) + F32(F32(c) * z[i])), storage) for i, p in enumerate(stored)]


def project(layout: list[Case], weights: list[list[int]], radius: float) -> list[list[int]]:
    with np.errstate(over="ignore"):
        r = float(np.float64(1) / np.float64(radius))
    for _ in range(64):
        total = 0
        for entry, stored in zip(layout, weights, strict=True):
            for pattern in stored:
                x = float(float_of(pattern, entry["dtype"])) * r
                total += 0 if math.isnan(x) else math.trunc(min(x * x, 2.0**12) * 2.0**40 + 0.5)
        if total <= 2**40:
            break
        f = F32(1.0 / math.sqrt(float(total) / 2.0**40))
        weights = [
            [nearest(F32(float_of(p, entry["dtype"]) * f), entry["dtype"]) for p in stored]
            for entry, stored in zip(layout, weights, strict=True)
        ]
        if total < 2**52:
            break
    return weights


# Scalars.

Q = [F32(v) for v in (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)]
LOG8 = [F32(0), *(F32(float(Q[(m - 64) % 4]) * 2.0 ** ((m - 64) // 4)) for m in range(1, 128))]
EDGES = [float(LOG8[1]) / 2, *(math.sqrt(float(LOG8[m]) * float(LOG8[m + 1])) for m in range(1, 127))]


def encode(x: np.float32, codec: str) -> bytes:
    if codec == "float32":
        return struct.pack("<I", bits_of(x))
    if codec == "bfloat16":
        return struct.pack("<H", 0x7FC0 if np.isnan(x) else nearest(x, "bfloat16"))
    if not np.isfinite(x):
        return b"\x80"
    m = sum(edge <= abs(float(x)) for edge in EDGES)
    return bytes([m | (0x80 if x < 0 and m else 0)])


def decode(data: bytes, codec: str) -> list[int]:
    """Float32 patterns."""
    if codec == "float32":
        return list(struct.unpack(f"<{len(data) // 4}I", data))
    if codec == "bfloat16":
        return [half << 16 for half in struct.unpack(f"<{len(data) // 2}H", data)]
    values = [F32(np.nan) if b == 0x80 else -LOG8[b & 127] if b & 128 else LOG8[b] for b in data]
    return [bits_of(v) for v in values]


def share(fraction: float, count: int) -> int:
    return math.floor(fraction * count + 1e-9)


def needed(rule: str, before: str, b: int, quorum: int) -> int:
    least = 2 * b + 3 if rule in ("krum", "multi_krum") else 2 * b + 1
    return max(quorum, 2 * (least - 1) + 1 if before == "bucketing" else least)


def tolerated(beta: float, invited: int) -> int:
    return min(share(beta, invited), (invited - 1) // 2)


def pairwise(a: list[float]) -> float:
    """Of more than 56 numbers."""
    n = len(a)
    if n <= 128:
        whole = n - n % 8
        r = a[:8]
        for i in range(8, whole):
            r[i % 8] += a[i]
        total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
        for v in a[whole:]:
            total += v
        return total
    half = n // 2 - n // 2 % 8
    return pairwise(a[:half]) + pairwise(a[half:])


def trimmed_mean(rows: list[list[float]], beta: float, invited: int, round: int) -> tuple[list[float], list[int]]:
    """The values of all columns in float64, and in how many of them each row was trimmed."""
    return trimmed_by(rows, tolerated(beta, invited), round)


def trimmed_by(rows: list[list[float]], b: int, round: int) -> tuple[list[float], list[int]]:
    columns, values, trimmed = len(rows[0]), [], [0] * len(rows)
    for place in range(columns):
        column = [row[place] for row in rows]
        out = trimmed_in(column, b, round * columns + place)
        for i in out:
            trimmed[i] += 1
        left = len(column) - 2 * b
        if b and len(column) <= 256:
            terms = sorted(column)[b : b + left]
        else:
            terms = [0.0 if i in out else v for i, v in enumerate(column)]
        total = 0.0
        if len(column) <= 256 or (b == 0 and columns >= 2**14):
            for v in terms:
                total += v
        else:
            total += pairwise(terms)
        values.append(total / left)
    return values, trimmed


def trimmed_in(column: list[float], b: int, turn: int) -> set[int]:
    if not b:
        return set()
    ranked = sorted(column)
    low, high = ranked[b], ranked[len(column) - b - 1]
    out = {i for i, v in enumerate(column) if v < low or v > high}
    surplus = [(low, b - sum(v < low for v in column)), (high, b - sum(v > high for v in column))]
    if low == high:
        surplus = [(low, surplus[0][1] + surplus[1][1])]
    for edge, s in surplus:
        equal = [i for i, v in enumerate(column) if v == edge]
        out |= {i for number, i in enumerate(equal) if (number - turn * s) % len(equal) < s}
    return out


def decided(
    rule: str,
    beta: float,
    quorum: int,
    round: int,
    codec: str,
    reports: list[list[np.float32] | None],
    limit: float = math.inf,
) -> tuple[list[int] | None, list[bool], list[int]]:
    """The scalars of a round as patterns (None: abandoned), who reported, and who was trimmed how often."""
    rows, reported = [], []
    for report in reports:
        row = None
        if report is not None:
            data = b"".join(encode(x, codec) for x in report)
            row = [float(float_of(p, "float32")) for p in decode(data, codec)]
        reported.append(row is not None and all(map(math.isfinite, row)))
        rows += [row] if row is not None and reported[-1] else []
    nobody = [0] * len(reports)
    b = 0 if rule == "mean" else tolerated(beta, len(reports))
    if len(rows) < needed(rule, "none", b, quorum):
        return None, reported, nobody
    values, trimmed = trimmed_by(rows, (len(rows) - 1) // 2 if rule == "median" else b, round)
    with np.errstate(over="ignore"):
        patterns = decode(b"".join(encode(F32(v), codec) for v in values), codec)
    decoded = [float(float_of(p, "float32")) for p in patterns]
    if not all(math.isfinite(v) and abs(v) <= limit for v in decoded):
        return None, reported, nobody
    counts = iter(trimmed)
    return patterns, reported, [next(counts) if r else 0 for r in reported]


def batch(seed: int, client: int, round: int, epoch: int, samples: int, size: int) -> list[int]:
    if samples <= size:
        return list(range(samples))
    drawn: list[int] = []
    for i, word in enumerate(words(seed, 2, round, client, 2**34 * epoch, size)):
        j = samples - size + i
        s = word * (j + 1) // 2**32
        drawn.append(j if s in drawn else s)
    return drawn


def partition(name: str, seed: int, clients: int, labels: list[int]) -> list[list[int]]:
    order = sorted(permutation(seed, 5, 0, 0, len(labels)), key=lambda i: labels[i])
    if name == "iid":
        return [order[client::clients] for client in range(clients)]
    size, longer = divmod(len(order), clients)
    cuts = [client * size + min(client, longer) for client in range(clients + 1)]
    return [order[cuts[client] : cuts[client + 1]] for client in range(clients)]


# Ledger.


def packed(bits: list[int]) -> bytes:
    data = bytearray(-(-len(bits) // 8))
    for i, bit in enumerate(bits):
        data[i // 8] |= bit << i % 8
    return bytes(data)


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def canonical(value: Any) -> str:
    """Canonical JSON. Python writes floats as the document wants them."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        valid(math.isfinite(value) if isinstance(value, float) else True)
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(map(escaped, value)) + '"'
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"


def escaped(character: str) -> str:
    code = ord(character)
    if character in SHORT or 0x20 <= code <= 0x7E:
        return SHORT.get(character, character)
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def opening(header: Case) -> bytes:
    text = canonical(header).encode("ascii")
    return sealed(b"CYBER0\x00" + bytes([format_of(header)]) + struct.pack("<I", len(text)) + text)


def format_of(header: Case) -> int:
    return int(header.get("format", 1))


def read_opening(data: bytes) -> tuple[Case, int]:
    """The header of a file, and where the records begin."""
    valid(len(data) >= 12 and data[:7] == b"CYBER0\x00" and data[7] in (1, 2))
    place = 12 + u32(data, 8)
    valid(len(data) >= place + 4 and u32(data, place) == zlib.crc32(data[:place]))
    try:
        text = data[12:place].decode("ascii")
        header = json.loads(text)
    except ValueError:
        raise InvalidFile from None
    valid(isinstance(header, dict) and canonical(header) == text)
    check_header(header, data[7])
    return header, place + 4


BOTH = {
    "seed", "seed_mode", "layout", "distribution", "k", "local_epochs", "mu", "estimator", "lr", "lr_schedule",
    "projection_radius", "codec", "weights_digest", "rest_digest", "clients",
}  # fmt: skip
KEYS = {1: BOTH | {"version", "dimension", "config"},
        2: BOTH | {"format", "id", "rounding", "optimizer", "settings", "extensions"}}  # fmt: skip
KNOWN = {
    "distribution": ("gaussian", "rademacher", "sphere", "low_rank"), "rounding": ("stochastic", "stochastic16"),
    "optimizer": ("sgd", "adaptive", "normalized", "zscore", "rank", "momentum", "adam", "hessian"),
    "estimator": ("two_point", "one_sided", "gradient", "forward"), "codec": ("float32", "bfloat16", "log8"),
    "seed_mode": ("shared", "chained"), "dtype": ("float32", "float16", "bfloat16"),
}  # fmt: skip
IN_CONFIG = {
    "method": ("k", "local_epochs", "mu", "estimator", "lr", "lr_schedule", "distribution", "rank",
               "projection_radius"),
    "federation": ("clients",), "serve": ("codec", "seed_mode"),
}  # fmt: skip


def integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(float(value))
    except OverflowError:
        return False


def digits(value: Any, count: int) -> bool:
    return isinstance(value, str) and len(value) == count and set(value) <= set("0123456789abcdef")


def known(kind: str, value: Any) -> bool:
    return isinstance(value, str) and value in KNOWN[kind]


def check_header(header: Case, format: int) -> None:
    valid(integer(header.get("format" if format == 2 else "version"), format, format))
    valid(set(header) == KEYS[format])
    valid(integer(header["seed"], 0, 2**64 - 1) and integer(header["clients"], 1, 2**24))
    valid(integer(header["k"], 1, 2**24) and integer(header["local_epochs"], 1, 2**24))
    valid(header["k"] * header["local_epochs"] < 2**24)
    valid(all(known(kind, header[kind]) for kind in ("seed_mode", "estimator", "codec")))
    valid(number(header["mu"]) and header["mu"] >= 0)
    valid(header["mu"] > 0 or header["estimator"] not in ("two_point", "one_sided"))
    valid(number(header["lr"]) and header["lr"] > 0)
    valid(isinstance(header["lr_schedule"], str) and header["lr_schedule"] != "")
    radius = header["projection_radius"]
    valid(radius is None or (number(radius) and radius > 0))
    valid(digits(header["weights_digest"], 64) and digits(header["rest_digest"], 64))
    if format == 2:
        valid(header["id"] == "" or digits(header["id"], 32))
        valid(header["extensions"] == {})
        for kind in ("distribution", "rounding", "optimizer"):
            stated = header[kind]
            valid(isinstance(stated, dict) and set(stated) == {"name", "options", "version"})
            valid(known(kind, stated["name"]) and integer(stated["version"], 1, 1))
            if stated["name"] == "low_rank":
                valid(isinstance(stated["options"], dict) and set(stated["options"]) == {"rank"})
                valid(integer(stated["options"]["rank"], 1, 2**24))
            else:
                valid(stated["options"] == {} or kind == "optimizer")
        check_optimizer(header, **header["optimizer"])
    else:
        valid(known("distribution", header["distribution"]) and header["distribution"] != "low_rank")
    check_layout(header, format)
    check_settings(header, header["settings" if format == 2 else "config"], format)


OPTIONS: dict[str, dict[str, tuple[float, float]]] = {
    "adaptive": {"beta": (0, math.nextafter(1, 0))}, "momentum": {"beta": (0, 0.999999)},
    "adam": {"beta1": (0, 0.999999), "beta2": (0, 0.999999), "eps": (1e-12, 1)},
    "hessian": {"nu": (1e-6, 1), "floor": (1e-12, 1)},
}  # fmt: skip


def check_optimizer(header: Case, name: str, options: Any, version: int) -> None:
    limits = OPTIONS.get(name, {})
    valid(isinstance(options, dict) and set(options) == set(limits))
    for option, (low, high) in limits.items():
        valid(type(options[option]) is float and low <= options[option] <= high)
    valid(name != "adam" or options["beta1"] <= options["beta2"])
    valid(name not in ("momentum", "adam", "hessian") or header["local_epochs"] == 1)
    valid(name not in ("normalized", "zscore", "rank") or header["k"] >= 2)


def check_layout(header: Case, format: int) -> None:
    names, d = set(), 0
    valid(isinstance(header["layout"], list))
    for entry in header["layout"]:
        keys = {"name", "shape", "dtype"} | ({"offset"} if format == 1 else set())
        valid(isinstance(entry, dict) and set(entry) == keys)
        valid(isinstance(entry["name"], str) and entry["name"] not in names and known("dtype", entry["dtype"]))
        valid(isinstance(entry["shape"], list) and len(entry["shape"]) <= 64)
        valid(all(integer(size, 0, 2**63 - 1) for size in entry["shape"]))
        for end in range(len(entry["shape"])):
            valid(math.prod(entry["shape"][: end + 1]) < 2**63)
        valid(format == 2 or integer(entry["offset"], d, d))
        names.add(entry["name"])
        d += math.prod(entry["shape"])
    valid(0 < d < 2**63 and (format == 2 or integer(header["dimension"], d, d)))


def check_settings(header: Case, settings: Any, format: int) -> None:
    valid(isinstance(settings, dict) and depth(settings) <= 16)
    places = [(settings, "seed")]
    for section, keys in IN_CONFIG.items():
        inside = settings.get(section, {})
        valid(isinstance(inside, dict))
        places += [(inside, key) for key in keys]
    valid("rounding" not in settings.get("method", {}) or format == 1)
    for table, key in places:
        mine = 1 if key == "rank" else 0 if header[key] is None else header[key]
        valid(key not in table or (format == 1 and table[key] == mine))


def depth(value: Any) -> int:
    """How many keys and positions it takes at most to name something in a value."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + depth(part) for part in parts), default=0)


def record(fields: Case, n: int, chain: bytes, format: int) -> bytes:
    values = fields["values"]
    core = struct.pack("<BId", 2 if values is None else 1, fields["round"], fields["lr"])
    if format == 2:
        core += struct.pack("<I", fields["rounds"])
    details = packed([int(r) for r in fields["reported"]])
    if values is not None:
        width = n.bit_length()
        core += b"".join(struct.pack("<I", v) for v in values)
        details += packed([count >> a & 1 for count in fields["trimmed"] for a in range(width)])
    if format == 1:
        return sealed(core + details + chain)
    core += hashlib.sha256(details).digest()[:16]
    return sealed(core + details + hashlib.sha256(chain + core).digest())


def chain_after(one: bytes, format: int) -> bytes:
    return hashlib.sha256(one).digest() if format == 1 else one[-36:-4]


class InvalidFile(Exception):
    pass


def valid(condition: bool) -> None:
    if not condition:
        raise InvalidFile


def u32(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "little")


def read_ledger(data: bytes) -> tuple[Case, list[Case], list[bytes], int]:
    """The header, the records and the chain of a file, and how many bytes at its end are ignored."""
    header, place = read_opening(data)
    format = data[7]
    chains, records = [hashlib.sha256(data[:place]).digest()], []
    n, m = header["k"] * header["local_epochs"], header["clients"]
    bare = (13 if format == 1 else 33) + -(-m // 8) + 36
    sizes = {1: bare + 4 * n + -(-m * n.bit_length() // 8), 2: bare}
    while place < len(data):
        rest = data[place:]
        one = rest[: sizes.get(rest[0], 0)]
        fields = None
        if rest[0] in sizes and len(one) == sizes[rest[0]]:
            fields = read_record(one, len(records), chains[-1], n, m, format)
        if fields is None:
            check_tail(rest, sizes, len(records), chains[-1], n, format)
            return header, records, chains, len(rest)
        records.append(fields)
        chains.append(chain_after(one, format))
        place += len(one)
    return header, records, chains, 0


def check_tail(rest: bytes, sizes: dict[int, int], round: int, chain: bytes, n: int, format: int) -> None:
    """What follows the last valid record: the steps of the document, in its order."""
    if not any(rest):
        return
    valid(rest[0] in sizes)
    if rest[0] == 1 and len(rest) >= sizes[2]:
        valid(not crc_is_right(b"\x02" + rest[1 : sizes[2]]))
    size = sizes[rest[0]]
    if len(rest) < size:
        begun = rest.rstrip(b"\0")[1:5]
        valid(begun == struct.pack("<I", round)[: len(begun)])
        return
    one = rest[:size]
    valid(not crc_is_right(one))
    valid(not any(rest[size - 1 :]))
    valid(may_be_begun(one, round, chain, n, format))


def crc_is_right(data: bytes) -> bool:
    return u32(data, len(data) - 4) == zlib.crc32(data[:-4])


def core_size(kind: int, n: int, format: int) -> int:
    return (13 if format == 1 else 33) + (4 * n if kind == 1 else 0)


def hash_in(data: bytes, chain: bytes, n: int, format: int) -> bytes:
    """The hash that belongs into a record."""
    return chain if format == 1 else hashlib.sha256(chain + data[: core_size(data[0], n, format)]).digest()


def details_match(data: bytes, n: int, format: int) -> bool:
    end = core_size(data[0], n, format)
    return format == 1 or data[end - 16 : end] == hashlib.sha256(data[end:-36]).digest()[:16]


def read_record(data: bytes, round: int, chain: bytes, n: int, m: int, format: int) -> Case | None:
    """The fields of a record of full length, None if it is not valid."""
    if not crc_is_right(data) or u32(data, 1) != round:
        return None
    if data[-36:-4] != hash_in(data, chain, n, format) or not details_match(data, n, format):
        return None
    (lr,), place = struct.unpack_from("<d", data, 5), 13 if format == 1 else 17
    values, trimmed = None, [0] * m
    if data[0] == 1:
        values = list(struct.unpack_from(f"<{n}I", data, place))
    if not math.isfinite(lr) or not all(np.isfinite(float_of(v, "float32")) for v in values or []):
        return None
    place = core_size(data[0], n, format)
    reported = [bool(data[place + i // 8] >> i % 8 & 1) for i in range(m)]
    place += -(-m // 8)
    if data[0] == 1:
        width = n.bit_length()
        bit = [data[place + i // 8] >> i % 8 & 1 for i in range(m * width)]
        trimmed = [sum(bit[i * width + a] << a for a in range(width)) for i in range(m)]
    stated = {} if format == 1 else {"rounds": u32(data, 13)}
    return {"round": round, "lr": lr, "values": values, "reported": reported, "trimmed": trimmed, **stated}


def may_be_begun(data: bytes, round: int, chain: bytes, n: int, format: int) -> bool:
    """Whether what a record has before the zeros at its end may be the beginning of the right one."""
    begun = len(data.rstrip(b"\0"))
    if begun > len(data) - 36 and not details_match(data, n, format):
        return False
    right = data[:1] + struct.pack("<I", round) + data[5:-36] + hash_in(data, chain, n, format)
    right += struct.pack("<I", zlib.crc32(data[:-4]))
    return data[:begun] == right[:begun]


def read_reports(data: bytes, n: int) -> list[int]:
    """The rounds of the entries of a file of reports."""
    valid(data[:17] == b"cyber0 reports 1\n")
    rounds, rest = [], data[17:]
    while len(rest) >= 8:
        size = 8 + 4 * n * u32(rest, 4) + 4
        if size > len(rest):
            break
        if u32(rest, size - 4) != zlib.crc32(rest[: size - 4]):
            valid(not any(rest[size - 1 :]))
            break
        valid(not rounds or u32(rest, 0) > rounds[-1])
        rounds.append(u32(rest, 0))
        rest = rest[size:]
    return rounds


def replayed(header: Case, records: list[Case], chains: list[bytes], w0: list[list[int]]) -> list[list[list[int]]]:
    """The weights after each record."""
    layout, weights, after, offsets, d = header["layout"], w0, [], [], 0
    for entry in layout:
        offsets.append(d)
        d += math.prod(entry["shape"])
    distribution = header["distribution"]
    distribution = distribution if format_of(header) == 1 else distribution["name"]
    if distribution == "low_rank":
        distribution = LowRank([e["shape"] for e in layout], header["distribution"]["options"]["rank"])
    stated = header.get("optimizer", {"name": "sgd", "options": {}})
    optimizer = Optimizer(stated["name"], stated["options"], d)
    bits = 16 if header.get("rounding", {"name": ""})["name"] == "stochastic16" else 32
    for fields, chain in zip(records, chains, strict=False):
        if fields["values"] is not None:
            key = round_key(header["seed"], header["seed_mode"], chain)
            g = [float_of(v, "float32") for v in fields["values"]]
            c, move = optimizer.coefficients(fields["lr"], g, header["k"]), optimizer.move(fields["lr"])
            weights = [
                commit(stored, e["dtype"], offset, key, fields["round"], 0, 0, c, distribution, d, move, bits)
                for e, offset, stored in zip(layout, offsets, weights, strict=True)
            ]  # fmt: skip
            if header["projection_radius"] is not None:
                weights = project(layout, weights, header["projection_radius"])
        after.append(weights)
    return after


# Cases.


def numbers(patterns: list[str]) -> list[int]:
    return [int(p, 16) for p in patterns]


def floats(patterns: list[str]) -> list[np.float32]:
    return [float_of(p, "float32") for p in numbers(patterns)]


def hexed(patterns: list[int], storage: str = "float32") -> list[str]:
    return [f"{p:08x}" if storage == "float32" else f"{p:04x}" for p in patterns]


def hex32(values: list[np.float32]) -> list[str]:
    return hexed([bits_of(v) for v in values])


def _place(case: Case) -> tuple[int, int, int]:
    return int(case["key"], 16), case["round"], case["index"]


def _words(case: Case) -> Any:
    key, round, index = _place(case)
    return hexed(words(key, case["stream"], round, index, case["start"], case["count"]))


def _permutation(case: Case) -> Any:
    key, round, index = _place(case)
    return permutation(key, case["stream"], round, index, case["n"])


def _distribution(case: Case) -> str | LowRank:
    return LowRank(case["shapes"], case["rank"]) if case["distribution"] == "low_rank" else str(case["distribution"])


def _direction(case: Case) -> Any:
    d = case.get("dimension")
    return hex32(direction(_distribution(case), *_place(case), case["start"], case["count"], d))


def _sphere_scale(case: Case) -> Any:
    d = case["dimension"]
    return {"sum": norm_sum(*_place(case), d), "s": hex32([scale(*_place(case), d)])[0]}


def _rest_digest(case: Case) -> Any:
    sha = hashlib.sha256()
    for name, shape, dtype, patterns in sorted(case["tensors"]):
        sha.update(f"{name} {tuple(shape)} torch.{dtype}\n".encode())
        sha.update(b"".join(bytes.fromhex(p)[::-1] for p in patterns))
    return sha.hexdigest()


def _stochastic(case: Case) -> Any:
    pairs = zip(floats(case["x"]), numbers(case["words"]), strict=True)
    bits = case.get("bits", 32)
    return hexed([stochastic(x, case["storage"], word, bits) for x, word in pairs], case["storage"])


def _commit(case: Case) -> Any:
    w, storage = numbers(case["w"]), case["storage"]
    for s in case["steps"]:
        w = commit(w, storage, case["start"], int(s["key"], 16), s["round"], s["first"], s["rounding_index"],
                   floats(s["c"]), _distribution(case), case["dimension"], bits=case.get("bits", 32))  # fmt: skip
    return hexed(w, storage)


def _optimizer(case: Case) -> Any:
    w, storage, d, found = numbers(case["w"]), case["storage"], len(case["w"]), []
    optimizer = Optimizer(case["name"], case["options"], d)
    layout = [{"dtype": storage}]
    for one in case["rounds"]:
        c = optimizer.coefficients(one["lr"], floats(one["g"]), case["k"])
        w = commit(w, storage, 0, int(one["key"], 16), one["round"], 0, 0, c, case["distribution"], d,
                   optimizer.move(one["lr"]))  # fmt: skip
        state = [f"{struct.unpack('<Q', struct.pack('<d', v))[0]:016x}" for v in optimizer.state]
        found.append({"c": hex32(c), "w": hexed(w, storage), "state": state,
                      "vectors": [hex32(v) for v in optimizer.vectors],
                      "digest": optimizer.digest(digest(layout, [w]))})  # fmt: skip
    return found


def _probe(case: Case) -> Any:
    storage, d = case["storage"], case["dimension"]
    w = probe(numbers(case["w"]), storage, case["start"], *_place(case), case["c"], _distribution(case), d)
    return hexed(w, storage)


def _projection(case: Case) -> Any:
    given = [numbers(p) for p in case["weights"]]
    w = project(case["layout"], [p * case.get("repeat", 1) for p in given], case["radius"])
    return [hexed(p[: len(g)], e["dtype"]) for e, p, g in zip(case["layout"], w, given, strict=True)]


def _codec(case: Case) -> Any:
    data = b"".join(encode(x, case["codec"]) for x in floats(case["values"]))
    return {"bytes_hex": data.hex(), "decoded": hexed(decode(data, case["codec"]))}


def _invited(case: Case) -> Any:
    m = case["clients"]
    count = max(1, share(case["participation"], m))
    if count == m:
        return list(range(m))
    return sorted(permutation(int(case["seed"], 16), 3, case["round"], 0, m)[:count])


def _trimmed_mean(case: Case) -> Any:
    if "rows" in case:
        rows = [[float(v) for v in floats(row)] for row in case["rows"]]
    elif "chosen_rows" in case:
        g = case["chosen_rows"]
        among = [float(v) for v in floats(g["among"])]
        key, columns = int(g["key"], 16), g["columns"]
        chosen = [words(key, 7, g["round"], i, 0, columns) for i in range(g["count"])]
        rows = [[among[w % len(among)] for w in row] for row in chosen]
    else:
        g = case["gaussian_rows"]
        key, columns = int(g["key"], 16), g["columns"]
        drawn = [gaussian(key, g["round"], i, 0, columns) for i in range(g["count"])]
        rows = [[float(v) * 2.0 ** (7 * i % 61 - 30) for v in row] for i, row in enumerate(drawn)]
    rows = [row * case.get("repeat", 1) for row in rows]
    values, trimmed = trimmed_mean(rows, case["beta"], case["invited"], case["round"])
    if "repeat" not in case:
        return {"values": [struct.pack(">d", v).hex() for v in values], "trimmed": trimmed}
    sha = hashlib.sha256(b"".join(struct.pack("<d", v) for v in values)).hexdigest()
    return {"values_sha256": sha, "values": [struct.pack(">d", v).hex() for v in values[:2]], "trimmed": trimmed}


def _needed(case: Case) -> Any:
    has_beta = case["rule"] != "mean" or case["before"] == "nnm"
    b = tolerated(case["beta"], case["invited"]) if has_beta else 0
    return {"b": b, "reports": needed(case["rule"], case["before"], b, case["quorum"])}


def _decision(case: Case) -> Any:
    reports = [None if row is None else floats(row) for row in case["reports"]]
    values, reported, trimmed = decided(
        case["rule"], case["beta"], case["quorum"], case["round"], case["codec"], reports, case.get("limit", math.inf)
    )
    return {"values": None if values is None else hexed(values), "reported": reported, "trimmed": trimmed}


def _rate(case: Case) -> Any:
    part = case["round"] / max(case["rounds"], 1)
    factor = {"constant": 1.0, "linear": max(0.0, 1.0 - part), "cosine": 0.5 * (1.0 + math.cos(math.pi * min(part, 1)))}
    return struct.pack(">d", case["lr"] * factor[case["schedule"]]).hex()


def _local_steps(case: Case) -> Any:
    w, storage, d = numbers(case["w"]), case["storage"], len(case["w"])
    key, seen = int(case["key"], 16), []
    for epoch, patterns in enumerate(case["estimates"][:-1]):
        g = [np.float64(struct.unpack(">d", bytes.fromhex(p))[0]) for p in patterns]
        c = [coefficient(case["lr"], v, len(g)) for v in g]
        first = epoch * len(g)
        w = commit(w, storage, 0, key, case["round"], first, epoch + 1, c, case["distribution"], d)
        seen.append(hexed(w, storage))
    return seen


def _estimate(case: Case) -> Any:
    """Sample i has the loss a_i times the first weight, so everything here is exact but for the probes."""
    mu, key, d = float(F32(case["mu"])), int(case["key"], 16), len(case["w"])
    factor, mean, made = d if case["distribution"] == "sphere" else 1, sum(case["samples"]) / len(case["samples"]), []
    for j in range(case["first"], case["first"] + case["count"]):
        if case["estimator"] in ("two_point", "one_sided"):
            other = -mu if case["estimator"] == "two_point" else 0.0
            far, near = (
                probe(numbers(case["w"]), "float32", 0, key, case["round"], j, c, case["distribution"], d)[0]
                for c in (mu, other)
            )
            slope = (mean * float(float_of(far, "float32")) - mean * float(float_of(near, "float32"))) / (mu - other)
        else:
            slope = mean * float(direction(case["distribution"], key, case["round"], j, 0, 1, d)[0])
        made.append(F32(factor * slope))
    return hex32(made)


def changed_file(case: Case, change: Case) -> bytes:
    data = bytearray.fromhex(case["file_hex"])
    for place, new in change.get("replace", []):
        data[place : place + len(new) // 2] = bytes.fromhex(new)
    return bytes(data[: change.get("keep", len(data))]) + bytes.fromhex(change.get("append_hex", ""))


def changed_opening(case: Case, change: Case) -> bytes:
    data = bytes.fromhex(case["file_hex"])
    text = data[12:-4].decode()
    for old, new in change.get("json", []):
        text = text.replace(old, new, 1)
    start = data[:7] + bytes([change.get("byte_7", data[7])])
    data = sealed(start + struct.pack("<I", len(text.encode())) + text.encode())
    return changed_file({"file_hex": data.hex()}, change)


def _headers(case: Case) -> Any:
    found: list[Any] = []
    for change in case["changes"]:
        data = changed_opening(case, change)
        try:
            _, end = read_opening(data)
            found.append(hashlib.sha256(data[:end]).hexdigest())
        except InvalidFile:
            found.append(None)
    return found


def _ledger_tails(case: Case) -> Any:
    found: list[Any] = []
    for change in case["changes"]:
        try:
            _, records, _, ignored = read_ledger(changed_file(case, change))
            found.append({"records": len(records), "ignored": ignored})
        except InvalidFile:
            found.append(None)
    return found


def _reports_tails(case: Case) -> Any:
    found: list[Any] = []
    for change in case["changes"]:
        try:
            found.append(read_reports(changed_file(case, change), case["numbers"]))
        except InvalidFile:
            found.append(None)
    return found


def _records_message(case: Case) -> str:
    data, text = bytes.fromhex(case["file_hex"]), b""
    header, records, chains, _ = read_ledger(data)
    for fields, chain in list(zip(records, chains, strict=False))[case["first"] :]:
        text += record(fields, header["k"] * header["local_epochs"], chain, format_of(header))
    return (b"\x03" + text).hex()


def _ledger(case: Case) -> Any:
    header = {**case["header"], "seed": int(case["header"]["seed"], 16)}
    n = header["k"] * header["local_epochs"]
    written = [{**r, "values": None if r["values"] is None else numbers(r["values"])} for r in case["records"]]
    data = opening(header)
    chains = [hashlib.sha256(data).digest()]
    for fields in written:
        one = record(fields, n, chains[-1], format_of(header))
        chains.append(chain_after(one, format_of(header)))
        data += one
    read_header, records, read_chains, ignored = read_ledger(data)
    assert (read_header, records, read_chains, ignored) == (header, written, chains, 0)
    weights = replayed(header, records, chains, [numbers(w) for w in case["w0"]])
    keys = [round_key(header["seed"], header["seed_mode"], chain) for chain in chains[:-1]]
    return {
        "file_hex": data.hex(), "chains": [c.hex() for c in chains], "keys": [f"{key:016x}" for key in keys],
        "digests": [digest(header["layout"], w) for w in weights],
        "weights": [hexed(p, e["dtype"]) for e, p in zip(header["layout"], weights[-1], strict=True)],
    }  # fmt: skip


def _reports(case: Case) -> Any:
    data = b"cyber0 reports 1\n"
    for entry in case["entries"]:
        body = struct.pack("<II", entry["round"], len(entry["rows"]))
        data += sealed(body + b"".join(little_endian(v, "float32") for row in entry["rows"] for v in numbers(row)))
    return data.hex()


def _message(case: Case) -> Any:
    if case["kind"] == "records":
        return _records_message(case)
    kind, chain = case["kind"], bytes.fromhex(case.get("chain_hex", ""))
    values = b"".join(encode(x, case["codec"]) for x in floats(case["values"])) if case.get("values") else b""
    if kind == "hello":
        named = b"".join(bytes.fromhex(case[name]) for name in ("run", "weights_digest", "rest_digest"))
        head = b"CYBER0 H" + struct.pack("<HBBI", 2, case["role"], 0, case["client"])
        body = head + named + struct.pack("<I", case["round"]) + chain
    elif kind == "report":
        body = struct.pack("<I", case["round"]) + values + bytes.fromhex(case["digest_hex"])
    elif kind == "evaluation":
        body = struct.pack("<IddB", case["round"], case["accuracy"], case["loss"], len(case["metrics"]))
        for name, value in case["metrics"]:
            text = name.encode()
            body += bytes([len(text)]) + text + struct.pack("<d", value)
    elif kind == "decision":
        head = struct.pack("<BIdI", 2 if case["values"] is None else 1, case["round"], case["lr"], case["rounds"])
        body = head + values + bytes.fromhex(case["details_hex"])
    elif kind == "opened":
        body = struct.pack("<BII", 4, case["round"], case["rounds"]) + chain
    else:
        body = bytes([{"replay": 5, "ended": 6}[kind]])
    return sealed(body).hex()


SECTIONS: dict[str, Callable[[Case], Any]] = {
    "philox": lambda c: hexed(philox(numbers(c["counter"]), numbers(c["key"]))),
    "words": _words,
    "permutation": _permutation,
    "round_key": lambda c: f"{round_key(int(c['seed'], 16), c['seed_mode'], bytes.fromhex(c['chain_hex'])):016x}",
    "direction": _direction,
    "sphere_scale": _sphere_scale,
    "digest": lambda c: digest(c["layout"], [numbers(w) for w in c["weights"]]),
    "rest_digest": _rest_digest,
    "nearest": lambda c: hexed([nearest(x, c["storage"]) for x in floats(c["x"])], c["storage"]),
    "stochastic": _stochastic,
    "coefficients": lambda c: hex32([coefficient(c["lr"], g, c["k"]) for g in floats(c["g"])]),
    "commit": _commit,
    "optimizer": _optimizer,
    "local_steps": _local_steps,
    "probe": _probe,
    "projection": _projection,
    "estimate": _estimate,
    "codec": _codec,
    "share": lambda c: share(c["fraction"], c["count"]),
    "invited": _invited,
    "needed": _needed,
    "trimmed_mean": _trimmed_mean,
    "decision": _decision,
    "rate": _rate,
    "batch": lambda c: batch(
        int(c["seed"], 16), c["client"], c["round"], c["epoch"], c["samples"], c["batch_size"]
    ),
    "partition": lambda c: partition(c["partition"], int(c["seed"], 16), c["clients"], c["labels"]),
    "byzantine": lambda c: sorted(permutation(int(c["seed"], 16), 4, 0, 0, c["clients"])[: c["byzantine"]]),
    "ledger": _ledger,
    "headers": _headers,
    "ledger_tails": _ledger_tails,
    "reports": _reports,
    "reports_tails": _reports_tails,
    "message": _message,
}  # fmt: skip


def by_hand(case: Case) -> Any:
    """Return what this implementation makes of a case."""
    return SECTIONS[case["section"]](case)
