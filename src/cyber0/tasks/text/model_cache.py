"""The language model and the sentences that a process with many runs loads once.

Loading a model takes seconds, up to half a minute from a .gguf file; reading and tokenising sentences takes seconds as
well. The cache is off unless `enable` is called: a process
with a single run should not hold a second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class ModelCache:
    """The last loaded object of each kind."""

    def __init__(self) -> None:
        self.enabled = False
        self._entries: dict[str, tuple[Hashable, Any]] = {}

    def enable(self) -> None:
        """Cache what is loaded from now on."""
        self.enabled = True

    def get_or_load(self, kind: str, key: Hashable, load: Callable[[], T]) -> T:
        """Return the cached object of that kind if it has this key; otherwise load it, and cache it if enabled."""
        if not self.enabled:
            return load()
        if kind not in self._entries or self._entries[kind][0] != key:
            self._entries.pop(kind, None)  # before loading: two of them may not fit in memory
            self._entries[kind] = (key, load())
        found: T = self._entries[kind][1]
        return found

    def cached(self, kind: str) -> Any:
        """Return the cached object of that kind, or None."""
        return self._entries.get(kind, (None, None))[1]


MODELS = ModelCache()
"""The cache of this process."""
