"""A function of another library's module, replaced only within a context."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


class Replacement:
    """One function of a module: replaced from the first thread's entry until the last thread's exit.

    Threads outside the context may call the replacement meanwhile, so it must check which thread calls it. A function
    that someone else installs while it is replaced stays.

    Args:
        module: Where the function lives.
        name: Its name; where the module has none, nothing is replaced.
        make: Returns the replacement of an original, or None to leave the original alone.
    """

    def __init__(self, module: ModuleType, name: str, make: Callable[[Function], Function | None]) -> None:
        self._module, self._name, self._make = module, name, make
        self._lock, self._users = threading.Lock(), 0
        self._original: Function | None = None
        self._replacement: Function | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Within this context the function is replaced."""
        self._install()
        try:
            yield
        finally:
            self._restore()

    def _install(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            found = getattr(self._module, self._name, None)
            if found is not self._original:
                made = None if found is None else self._make(found)
                self._original, self._replacement = found, made if found is None or made is None else wraps(found)(made)
            if self._replacement is not None:
                setattr(self._module, self._name, self._replacement)

    def _restore(self) -> None:
        with self._lock:
            self._users -= 1
            mine = self._replacement is not None and getattr(self._module, self._name, None) is self._replacement
            if self._users == 0 and mine:
                setattr(self._module, self._name, self._original)
