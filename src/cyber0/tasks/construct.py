"""Constructing a user's task: imported by its path and built with task.options, or given in Python."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cyber0.config import doors
from cyber0.config.registry import Entry
from cyber0.config.schema import Config, TaskConfig
from cyber0.errors import ConfigError, Cyber0Error
from cyber0.tasks import base
from cyber0.tasks.own import DATA_SEED, OwnTask, seeded
from cyber0.tasks.samples import type_name


def make(config: TaskConfig, *, evaluated: bool = True) -> OwnTask:
    """Import the task that a config names by its path, with its options."""
    if config.name == doors.OWN:
        raise ConfigError(f'task.name = "{doors.OWN}" stands for a task that was given in Python; give it again with '
                          'task=..., or name a path such as "my_task.py:Name"')  # fmt: skip
    name = doors.short(config.name)
    found = doors.load(config.name, "task.name")
    if isinstance(found, base.Task) and not config.options:
        return OwnTask(found, name, evaluated=evaluated)
    if isinstance(found, base.Task):
        raise ConfigError(
            f"task.options = {config.options!r}: {name} is an instance, which takes no options; remove them"
        )
    if not (isinstance(found, type) and issubclass(found, base.Task)):
        what = f"the class {found.__name__}" if isinstance(found, type) else type_name(found)
        raise ConfigError(f"task.name = {name!r} is {what}, not a class derived from cyber0.Task")
    return OwnTask(_constructed(found, config.options), name, evaluated=evaluated)


def check_options(kind: type[base.Task], options: Mapping[str, Any]) -> None:
    """Refuse options that the constructor does not take, have the wrong type, or are missing."""
    made_by = _no_options if kind.__init__ is object.__init__ else kind.__init__
    Entry(kind.__name__, made_by, {}, frozenset({"self"})).check(options, "task.options")


def _no_options() -> None:
    """Take the place of the constructor of a class without one."""


def options_of(task: base.Task) -> dict[str, Any] | None:
    """Return the arguments of a task given in Python as task.options; None if unknown or not plain values."""
    options = _given_to(task)
    if options is None:
        return None
    try:
        again = _constructed(type(task), options)
    except Cyber0Error:
        return None
    return options if _alike(task, again) else None


def _alike(task: base.Task, other: base.Task) -> bool:
    """Return whether two tasks have equal public attributes, as far as these can be compared."""
    mine, theirs = (
        {key: value for key, value in vars(one).items()
         if not key.startswith("_") and not isinstance(getattr(type(one), key, None), cached_property)}
        for one in (task, other)
    )  # fmt: skip
    return mine.keys() == theirs.keys() and all(_equal(mine[key], theirs[key]) for key in mine)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other) if isinstance(one, (bool, int, float, str, bytes, Path)) else True


def _given_to(task: base.Task) -> dict[str, Any] | None:
    """Return the arguments of a task's constructor by name; None if unknown or not plain values."""
    kind = type(task)
    if task._arguments is None or kind.__module__ == base.__name__ or kind.__new__ is not base.Task.__new__:
        return None
    if kind.__init__ is object.__init__:
        return {}
    args, kwargs = task._arguments
    try:
        bound = inspect.signature(kind.__init__).bind(task, *args, **kwargs)
    except (TypeError, ValueError):
        return None
    options: dict[str, Any] = {}
    for parameter in list(bound.signature.parameters.values())[1:]:
        value = bound.arguments.get(parameter.name, parameter.default)
        if parameter.name not in bound.arguments or (value is None and parameter.default is None):
            continue
        more = value if parameter.kind is parameter.VAR_KEYWORD else {parameter.name: value}
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL) or None in more.values():
            return None
        options |= more
    return options


def _constructed(kind: type[base.Task], options: Mapping[str, Any]) -> base.Task:
    check_options(kind, options)
    with seeded(DATA_SEED):
        return doors.called(f"{kind.__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})",
                              lambda: kind(**options))  # fmt: skip


def adopted(config: Config, task: Any, *, resumed: bool = False) -> tuple[Config, Any]:
    """Return the config with the name and options of a task given in Python, and the task as the engine takes it.

    If its options can't be recorded it is called "own", so that no other task is constructed in its place. For a
    resumed run, the name in the config is kept.
    """
    if isinstance(task, type) and issubclass(task, base.Task):
        raise ConfigError(f"task={task.__name__} is a class; give an instance: task={task.__name__}()")
    if isinstance(task, base.Task):
        named, options = config.task.name, options_of(task)
        if not (resumed and doors.is_own(named)):
            kept = doors.is_path(named) and named.rpartition(":")[2] == type(task).__name__
            named = doors.OWN if options is None else named if kept else doors.name_of(type(task))
        options = {} if named == doors.OWN else config.task.options if options is None else options
        task = OwnTask(task, doors.short(named))
        config = replace(config, task=replace(config.task, name=named, options=options))
    if task is not None and not hasattr(task, "evaluate"):  # every EngineTask has it
        raise ConfigError(f"task={task!r} is {type_name(task)}; give an instance of a class derived from cyber0.Task, "
                          "or cyber0.Task.of(model, train, test)")  # fmt: skip
    return config, task
