"""What can be learned: data, a model and its losses.

A task knows nothing of federations; `partition.py` deals its samples to clients. This file loads neither torch nor
data, so that a config can be refused quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

from cyber0.config import doors
from cyber0.config.choices import TEXT_TASKS
from cyber0.errors import ConfigError
from cyber0.tasks import base

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cyber0.config.schema import TaskConfig


SETS = ("dev", "test")
"""The sets of samples that accuracy can be measured on."""


def evaluated_on(task: str, sets: Container[str]) -> str:
    """Return the set that a task of these sets is evaluated on in the course of a run.

    It is the test set, of SST-2 the dev set, as in MeZO; the other one where that is missing.
    """
    first, second = ("dev", "test") if task == "sst2" else ("test", "dev")
    return second if second in sets and first not in sets else first


def evaluated_by_name(task: str, data: str = "") -> str | None:
    """Return the same of a task whose sets are not at hand; None where a folder of the user's decides it."""
    return None if (task in TEXT_TASKS and data) or doors.is_own(task) else evaluated_on(task, ())


def of_set(which: str | None, what: str) -> str:
    """Name a figure by the set it was measured on, as far as that is known: "dev accuracy"."""
    return f"{which} {what}" if which else what


class Task(Protocol):
    """What the simulation and a client need to know of a task."""

    name: str

    @property
    def classes(self) -> int:
        """How many classes the targets are of; 0 where they are something else, or there are none."""
        ...

    @property
    def labels(self) -> NDArray[Any]:
        """Labels of the training samples, for the partitions."""
        ...

    @property
    def train_inputs(self) -> Any:
        """Stored samples: a tensor, or what `outputs` takes, as long as it can be sliced and can `take(numbers)`."""
        ...

    @property
    def train_targets(self) -> torch.Tensor: ...

    @property
    def test_inputs(self) -> Any: ...

    @property
    def test_targets(self) -> torch.Tensor: ...

    def model(self, seed: int, dtype: str = "float32") -> torch.nn.Module:
        """Return the model at its starting point w0, a function of the seed with the same bits on every machine."""
        ...

    def prepare(self, inputs: Any) -> Any:
        """Turn stored samples into what the model takes."""
        ...

    def outputs(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        """Return the model's outputs for stored samples."""
        ...

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one float32 loss per sample."""
        ...

    def evaluate(self, model: torch.nn.Module) -> tuple[float, float] | tuple[float, float, dict[str, float]]:
        """Return mean loss and accuracy (0 to 1) on the test samples, or on the set that `evaluated_on` names.

        Where there is more to measure, a dictionary of it comes third. Accuracy is NaN where there is none.
        """
        ...

    def keep(self, numbers: NDArray[Any]) -> Self:
        """Return the same task with some of the training samples alone."""
        ...

    def to(self, device: torch.device | str) -> Self:
        """Move the samples to a device, in place, and return the task."""
        ...


AnyTask: TypeAlias = Task | base.Task
"""A task as the library sees one, or as a user writes one."""


def own_task(task: TaskConfig, given: str) -> TaskConfig:
    """Return a header's task with the path that was given on the command line, which alone is imported."""
    if doors.is_own(task.name):
        if not given:
            raise ConfigError(f"the run's task is {task.name}, somebody's own, and nothing is imported because a "
                              "header says so; name your copy of it by --task FILE.py:NAME")  # fmt: skip
        return replace(task, name=doors.located(given, Path.cwd()))
    if given:
        raise ConfigError(f"--task {given} is for runs of somebody's own task, and this run's is {task.name}: leave "
                          "--task out")  # fmt: skip
    return task


def starting_model(config: TaskConfig, seed: int, device: str = "cpu") -> torch.nn.Module:
    """Return the model that a run of this config begins with; a language model needs no data for it."""
    from cyber0.tasks import starting

    if config.name in TEXT_TASKS:
        from cyber0.tasks.text import task as text

        model = text.starting_model(config, seed, device)
    else:
        model = make(config).model(seed, config.dtype)
    starting.place(model, config)
    return model.to(device)


def make(config: TaskConfig, *, evaluated: bool = True) -> Task:
    """Build the task that a config names; its data is fetched if this machine does not have it yet.

    If it is never evaluated, as a client's, a folder of sentences needs no test file.
    """
    if doors.is_own(config.name):
        from cyber0.tasks import own

        return own.make(config, evaluated=evaluated)
    from cyber0.tasks.convex import Logistic, Ridge
    from cyber0.tasks.mnist import Mnist

    if config.name in TEXT_TASKS:
        from cyber0.tasks.text.task import Text

        return Text(config, evaluated=evaluated)
    tasks: dict[str, Callable[[], Task]] = {
        "mnist": lambda: Mnist(config.data or None),
        "ridge": Ridge,
        "logistic": Logistic,
    }
    return tasks[config.name]()
