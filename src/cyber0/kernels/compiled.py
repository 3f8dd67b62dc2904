"""How kernels are compiled: once for each version of the sources, cached on disk.

numba notices a change in the file of a kernel, but not in what that file imports: after an update it would keep using
the old polynomial. So compiled kernels are cached in a folder named after all the sources that they are made from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

from cyber0.kernels import cache as user_cache

_config: Any = numba.config


@cache
def folder() -> Path:
    """Return where this version's kernels are cached."""
    package = Path(__file__).parents[1]
    sha = hashlib.sha256()
    places = (package / "kernels", package / "directions", package / "estimate", package / "aggregate")
    for source in sorted(source for place in places for source in place.rglob("*.py")):
        sha.update(source.read_bytes())
    base = Path(_config.CACHE_DIR) if _config.CACHE_DIR else user_cache.folder()
    return base / "kernels" / sha.hexdigest()[:16]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that releases the GIL, and cache the result on disk."""
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(folder())
    try:
        return numba.njit(nogil=True, cache=True)(function)
    finally:
        _config.CACHE_DIR = before


def inline(function: Callable[..., Any]) -> Any:
    """Compile a small function into each kernel that calls it."""
    return numba.njit(nogil=True, inline="always")(function)
