"""`cyber0.run`: the Python form of the command `cyber0 run`. torch is loaded once the settings have been checked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyber0.config import doors
from cyber0.config.files import load
from cyber0.config.paths import agreed
from cyber0.config.schema import Config
from cyber0.errors import ConfigError
from cyber0.runs.callbacks import Callbacks
from cyber0.runs.settings import ConfigLike, settings_of
from cyber0.storage import CONFIG

if TYPE_CHECKING:
    from cyber0.tasks import AnyTask


def run(
    config: ConfigLike = None,
    task: AnyTask | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Iterable[object] = (),
    export: bool = True,
) -> dict[str, Any]:
    """Train as the command `cyber0 run` does: same ledger, same folder, same errors, but nothing is printed.

    Args:
        config: A `Config`, a dictionary of settings (nested like the TOML), or what the command takes: the path of a
            TOML file, or a task of your own as "file.py:Name". None: the default run.
        task: What is learned, a `cyber0.Task`; by default the one that the config names.
        out: Folder for the run; by default a new one, runs/TASK-TIME.
        resume: Resume the run in `out`. It needs no config; one that is given must be the one it was started with,
            except for `rounds`: more of them lengthen the run. A task that was given in Python must be given again,
            unless its class and its arguments were recorded.
        callbacks: Objects with any of the methods `on_start(run)`, `on_round(record)`, `on_evaluate(round, metrics)`
            and `on_end(summary)`. An exception in one stops the run, which can be resumed.
        export: Whether to write the trained model into the folder at the end.

    Returns:
        The summary, as it is in summary.json.

    Raises:
        Cyber0Error: something was refused, usually before anything was written.

    Examples:
        >>> import cyber0
        >>> settings = {"rounds": 60, "task": {"name": "logistic"}, "method": {"k": 16, "lr": 0.1}}
        >>> summary = cyber0.run(settings, out="runs/first")
        >>> summary["final_accuracy"] > summary["initial_accuracy"]
        True
        >>> cyber0.run(out="runs/first", resume=True, config={**settings, "rounds": 80})["rounds"]
        80
    """
    hooks = Callbacks(callbacks)
    if resume and out is None:
        raise ConfigError("resume=True needs the folder of the run to resume: out=DIR")
    if resume and isinstance(config, Mapping) and "task" not in config:
        config = _with_task_of(Path(out or ""), config)
    settings = None if resume and config is None else settings_of(config)
    from cyber0.diagnose.rate import measured_lr
    from cyber0.report.writer import ReportWriter
    from cyber0.runs.run import Run
    from cyber0.tasks.construct import adopted

    if resume:
        folder = Path(out or "")
        if settings is not None:
            _check_same(adopted(settings, task)[0], folder)
        rounds = None if settings is None else settings.rounds
        this = Run.resume(folder, task=task, rounds=rounds, export=export, measure_lr=measured_lr)
    else:
        assert settings is not None
        settings, task = adopted(settings, task)
        folder = _new_folder(doors.object_name(settings.task.name)) if out is None else Path(out)
        this = Run.start(settings, folder, task=task, export=export, measure_lr=measured_lr)
    return this.run([ReportWriter(), hooks])  # the caller's on_end finds every file written


def _with_task_of(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with the task that a run has recorded, where it is the user's own."""
    if not (folder / CONFIG).exists():
        return settings
    task = load(folder / CONFIG).task
    return {**settings, "task": {"name": task.name, "options": task.options}} if doors.is_path(task.name) else settings


def _check_same(config: Config, folder: Path) -> None:
    """Refuse settings that are not those of the run to resume, each by its name."""
    from cyber0.ledger import changed_settings

    if not (folder / CONFIG).exists():
        return  # `Run.resume` says what is wrong
    changed = changed_settings(agreed(config), agreed(load(folder / CONFIG)))
    if changed:
        raise ConfigError(
            f"the run in {folder} has other settings: {', '.join(changed)}. Leave the config out to resume it as it "
            "was started, or choose another out"
        )


def _new_folder(task: str) -> Path:
    """Return a folder under runs/ that does not exist yet."""
    stem = time.strftime(f"{task}-%Y%m%d-%H%M%S")
    candidates = (Path("runs") / (stem + suffix) for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(path for path in candidates if not path.exists())
