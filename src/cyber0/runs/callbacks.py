"""Callbacks: objects that a run calls as it progresses. Any object with any of these methods is one:

    on_start(run)                 before the first round, and before the first evaluation
    on_round(record)              after each round: its record is in the ledger, the weights have moved
    on_evaluate(round, metrics)   after each evaluation, which is in metrics.csv; after `on_round` of that round
    on_end(summary)               after the last round, when every file has been written

The screen, the report, the live page and TensorBoard are callbacks like those of a user.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError

if TYPE_CHECKING:
    from cyber0.ledger import Record
    from cyber0.runs.run import Run

HOOKS = {"on_start": ("run",), "on_round": ("record",), "on_evaluate": ("round", "metrics"), "on_end": ("summary",)}
"""The methods of a callback, and what each is called with."""


class Callbacks:
    """Several callbacks as one, called in their order. Return values are ignored; exceptions stop the run.

    Each callback gets its own copies of dictionaries, which it may change.

    Raises:
        ConfigError: one of them is not a callback, has a method on_... that is never called, or one that can't be.
    """

    def __init__(self, callbacks: Iterable[object]) -> None:
        if not isinstance(callbacks, Iterable) or isinstance(callbacks, str | Mapping):
            raise ConfigError(f"callbacks = {callbacks!r} is not a list of callbacks; put it in one: callbacks=[...]")
        members = list(callbacks)
        for member in members:
            _check(member)
        self._hooks: dict[str, list[Callable[..., object]]] = {
            name: [getattr(member, name) for member in members if hasattr(member, name)] for name in HOOKS
        }

    def on_start(self, run: Run) -> None:
        for hook in self._hooks["on_start"]:
            hook(run)

    def on_round(self, record: Record) -> None:
        for hook in self._hooks["on_round"]:
            hook(record)

    def on_evaluate(self, round: int, metrics: dict[str, float]) -> None:
        for hook in self._hooks["on_evaluate"]:
            hook(round, dict(metrics))

    def on_end(self, summary: dict[str, Any]) -> None:
        for hook in self._hooks["on_end"]:
            hook(copy.deepcopy(summary))


def _check(callback: object) -> None:
    if isinstance(callback, type):
        raise ConfigError(f"the callback {callback.__name__} is a class; give an instance: {callback.__name__}()")
    kind = type(callback).__name__
    named = [name for name in dir(callback) if name.startswith("on_")]
    for name in named:
        if name not in HOOKS:
            raise ConfigError(f"the callback {kind} has {name}, which is never called; {suggestion(name, HOOKS)}")
        _check_hook(getattr(callback, name), name, f"{kind}.{name}")
    if not any(hasattr(callback, name) for name in HOOKS):
        raise ConfigError(f"the callback {callback!r} has none of the methods {', '.join(HOOKS)}; write one of them")


def _check_hook(hook: object, name: str, where: str) -> None:
    """Refuse a method that can't be called with the arguments of its hook."""
    if not callable(hook):
        raise ConfigError(f"{where} of a callback is {hook!r}; make it a method")
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*HOOKS[name])
    except TypeError as error:
        arguments = ", ".join(HOOKS[name])
        raise ConfigError(f"{where} can't be called as {name}({arguments}): {error}; let it take {arguments}") from None
