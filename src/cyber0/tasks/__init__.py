"""What can be learned: data, a model and its losses. Importing this loads neither torch nor data."""

from __future__ import annotations

from cyber0.tasks.base import AnyTask, EngineTask, HoldsOut, Task, make, own_task, starting_model
from cyber0.tasks.sets import SETS, evaluated_by_name, evaluated_on, of_set

__all__ = ["SETS", "AnyTask", "EngineTask", "HoldsOut", "Task", "evaluated_by_name", "evaluated_on", "make", "of_set",
           "own_task", "starting_model"]  # fmt: skip
