"""How scalars travel: as float32, as bfloat16, or as one byte each on a logarithmic scale.

A codec loses digits, so whatever is decided is what comes out of it: the federator decodes the reports, decides,
encodes the decision, and records and commits what everybody will decode. All replicas then agree bit for bit.

    float32   the number itself
    bfloat16  its upper half, rounded to nearest even; what is too large becomes infinite
    log8      sign and 7 bits m: m = 0 is zero, else 2^((m - 64) / 4), 1.8e-5 to 55,000, at most 9 % off; what is larger
              becomes the largest, 0x80 means not a number (after Zelikman et al., "Just one byte (per gradient)", 2023)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError

Float32Array = NDArray[np.float32]

_NOT_A_NUMBER = 0x80
_STEPS = 4  # of log8 an octave
_ONE = 64  # the code of 1.0


@dataclass(frozen=True)
class Codec:
    """One way to write scalars: `encode` turns a float32 array into bytes, `decode` turns those back."""

    name: str
    text: str
    """What it does, in one line."""
    size: int
    """Bytes a scalar."""
    encode: Callable[[Float32Array], bytes]
    decode: Callable[[bytes], Float32Array]

    def as_decoded(self, values: Float32Array) -> Float32Array:
        """Return what the other side will see of these scalars."""
        if self.name == "float32":
            return values
        return self.decode(self.encode(values)).reshape(values.shape)


def make(name: str) -> Codec:
    """Return the codec of that name."""
    if name not in CODECS:
        raise ConfigError(f"there is no codec {name!r}; {suggestion(name, CODECS)}")
    return CODECS[name]


def _to_float32(values: Float32Array) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _from_float32(data: bytes) -> Float32Array:
    return np.frombuffer(data, "<f4").astype(np.float32)


def _to_bfloat16(values: Float32Array) -> bytes:
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Adding 0x7FFF, and 1 more if the kept part is odd, carries into it exactly when rounding goes up.
    rounded = (words.astype(np.uint64) + 0x7FFF + (words >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2").tobytes()


def _from_bfloat16(data: bytes) -> Float32Array:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _log8_table() -> Float32Array:
    """Return what each of the 256 bytes means; exact powers of two times four constants, so the same everywhere."""
    fractions = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429], np.float32)
    steps = np.arange(1, 128) - _ONE
    magnitudes = np.ldexp(fractions[steps % _STEPS], steps // _STEPS)
    half = np.concatenate([[np.float32(0)], magnitudes]).astype(np.float32)
    table = np.concatenate([half, -half])
    table[_NOT_A_NUMBER] = np.nan
    return table


_LOG8 = _log8_table()
# Where one magnitude ends and the next begins: halfway on the logarithmic scale; below half the smallest it is zero.
_LOG8_EDGES = np.concatenate(
    [[_LOG8[1].astype(np.float64) / 2], np.sqrt(_LOG8[1:127].astype(np.float64) * _LOG8[2:128].astype(np.float64))]
)


def _to_log8(values: Float32Array) -> bytes:
    codes = np.searchsorted(_LOG8_EDGES, np.abs(values), side="right").astype(np.uint8)
    codes |= np.where((values < 0) & (codes > 0), 0x80, 0).astype(np.uint8)
    return np.where(np.isfinite(values), codes, _NOT_A_NUMBER).astype(np.uint8).tobytes()


def _from_log8(data: bytes) -> Float32Array:
    return _LOG8[np.frombuffer(data, np.uint8)]


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("float32", "4 bytes a scalar", 4, _to_float32, _from_float32),
        Codec("bfloat16", "2 bytes a scalar", 2, _to_bfloat16, _from_bfloat16),
        Codec("log8", "1 byte a scalar, on a logarithmic scale", 1, _to_log8, _from_log8),
    )
}
"""All codecs, by name: the choices of serve.codec."""
