"""Callbacks that log a run to Weights & Biases or Trackio, by default on this machine alone.

    cyber0.run(config, out="runs/a", callbacks=[WandbCallback(project="cyber0")])

Both log what TensorBoard gets: each evaluation once, by round, those before a resume included. The settings of the run
are the logged run's config, and the figures of summary.json end up in its summary.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from cyber0.config.schema import to_dict
from cyber0.errors import ConfigError

if TYPE_CHECKING:
    from cyber0.runs.run import Run

_WANDB_MODES = ("offline", "online", "shared", "disabled")


class _Logger:
    """What both have in common. A context manager, so that the logged run also ends if the run is interrupted."""

    def __init__(self, package: str, name: str | None, options: dict[str, Any]) -> None:
        try:
            self._library: Any = import_module(package)
        except ImportError as error:
            what = type(self).__name__
            raise ConfigError(f"{what} needs the package {package}, which can't be imported ({error}): "
                              f"pip install {package}") from None  # fmt: skip
        self._name, self._options = name, options
        self._logged: Any = None
        self._rounds: set[int] = set()

    def on_start(self, run: Run) -> None:
        self._run, self._rounds = run, set()
        self._logged = self._library.init(**self._arguments(run))
        for round in sorted(run.rows):
            self._log_evaluation(round)

    def _arguments(self, run: Run) -> dict[str, Any]:
        """Return what a logged run is begun with."""
        return {"name": self._name or run.folder.name, "config": to_dict(run.config), **self._options}

    def on_evaluate(self, round: int, metrics: dict[str, float]) -> None:
        self._log_evaluation(round)

    def _log_evaluation(self, round: int) -> None:
        if round not in self._rounds:  # a resumed run repeats its last one
            self._rounds.add(round)
            self._logged.log(self._run.rows[round].scalars(self._run.simulation.evaluated_on), step=round)

    def on_end(self, summary: dict[str, Any]) -> None:
        self._finish()

    def _finish(self, **how: Any) -> None:
        logged, self._logged = self._logged, None
        if logged is not None:
            logged.finish(**how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._finish()


class WandbCallback(_Logger):
    """Logs to Weights & Biases, offline by default: into the run's folder, without an account or a network.

    `wandb sync RUN/wandb/offline-run-*` uploads it later.

    Args:
        project: The project's name.
        name: The logged run's name; by default that of the run's folder.
        mode: "offline", "online", "shared" or "disabled", as in wandb.init.
        options: Other arguments of wandb.init, such as group or tags.
    """

    def __init__(self, project: str, name: str | None = None, mode: str = "offline", **options: Any) -> None:
        if mode not in _WANDB_MODES:
            raise ConfigError(f"mode = {mode!r} is not a mode of Weights & Biases; use {', '.join(_WANDB_MODES)}")
        super().__init__("wandb", name, {"project": project, "mode": mode, **options})

    def _arguments(self, run: Run) -> dict[str, Any]:
        return {"dir": str(run.folder), **super()._arguments(run)}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._finish(exit_code=0 if kind is None else 1)  # W&B shows the run as failed

    def on_end(self, summary: dict[str, Any]) -> None:
        if self._logged is not None:
            self._logged.summary.update({f"cyber0/{name}": value for name, value in summary.items()})
        super().on_end(summary)


class TrackioCallback(_Logger):
    """Logs to Trackio, whose data is on this machine (the folder TRACKIO_DIR); `trackio show` shows it.

    Args:
        project: The project's name.
        name: The logged run's name; by default that of the run's folder.
        options: Other arguments of trackio.init, such as space_id, which uploads it.
    """

    def __init__(self, project: str, name: str | None = None, **options: Any) -> None:
        super().__init__("trackio", name, {"project": project, **options})
