"""What a process that plays many runs keeps from one to the next: the language model as it was loaded.

Loading one takes seconds, up to half a minute from a .gguf file. A process that plays one run puts up no shelf and
holds no second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_shelf: dict[str, tuple[Hashable, Any]] | None = None


def put_up() -> None:
    """Keep things from now on, until the process ends."""
    global _shelf
    _shelf = {} if _shelf is None else _shelf


def is_up() -> bool:
    """Return whether things are kept."""
    return _shelf is not None


def recall(kind: str, which: Hashable, make: Callable[[], T]) -> T:
    """Return the thing of that kind, made unless the last was the same; without a shelf it is made."""
    if _shelf is None:
        return make()
    if kind not in _shelf or _shelf[kind][0] != which:
        _shelf.pop(kind, None)  # first: two of them need not fit
        _shelf[kind] = (which, make())
    found: T = _shelf[kind][1]
    return found
