"""`cyber0.run`: the Python form of the command `cyber0 run`. torch is loaded once the settings have been checked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyber0.config import doors
from cyber0.config.choices import TASKS
from cyber0.config.files import load, located
from cyber0.config.overrides import overridden
from cyber0.config.paths import agreed
from cyber0.config.schema import Config
from cyber0.errors import ConfigError
from cyber0.runs.callbacks import Callbacks
from cyber0.storage import CONFIG, SERVED

if TYPE_CHECKING:
    from cyber0.tasks import AnyTask

Settings = Config | Mapping[str, Any] | str | Path | None
"""What a run can be asked for by: see `settings_of`."""


def run(
    config: Settings = None,
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
            but for `rounds`: more of them lengthen the run. A task that was given in Python is given again,
            unless its class and its arguments are on record.
        callbacks: Objects with any of the methods `on_start(run)`, `on_round(record)`, `on_evaluate(round, metrics)`
            and `on_end(summary)`. What one raises stops the run, which can be resumed.
        export: Whether to write the trained model into the folder at the end.

    Returns:
        The summary, as it is in summary.json.

    Raises:
        Cyber0Error: something was refused, as a rule before anything was written.
    """
    told = Callbacks(callbacks)
    if resume and out is None:
        raise ConfigError("resume=True needs the folder of the run to resume: out=DIR")
    if resume and isinstance(config, Mapping) and "task" not in config:
        config = _with_task_of(Path(out or ""), config)
    settings = None if resume and config is None else settings_of(config)
    from cyber0.runs.run import Run
    from cyber0.tasks.construct import adopted

    if resume:
        folder = Path(out or "")
        if settings is not None:
            _check_same(adopted(settings, task)[0], folder)
        return Run.resume(folder, task=task, rounds=None if settings is None else settings.rounds, export=export).run(
            [told]
        )
    assert settings is not None
    settings, task = adopted(settings, task)
    folder = _new_folder(doors.object_name(settings.task.name)) if out is None else Path(out)
    return Run.start(settings, folder, task=task, export=export).run([told])


def settings_of(config: Settings) -> Config:
    """Return the settings that a run was asked for by; relative paths in a dictionary start at the working directory.

    Raises:
        ConfigError: it is nothing of that kind, or a setting in it is unknown or impossible.
    """
    if isinstance(config, Config):
        return _located(config)
    if isinstance(config, Mapping):
        return _located(located(Config.from_dict(config)))
    if config is None or isinstance(config, str | Path):
        return named_settings(config)
    raise ConfigError(
        f"config = {config!r} can't be read as settings; give a Config, a dictionary of settings, or the path of a "
        "TOML file"
    )


def named_settings(name: str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """Return the settings that the command's argument stands for, some replaced by `section.key=value`.

    Args:
        name: The path of a TOML file, or of a task of the user's own, file.py:Name; None: the default run.
        overrides: As after --set.
    """
    return _located(load_named(name, overrides))


def load_named(name: str | Path | None, overrides: Iterable[str] = (), *, trusted: bool = False) -> Config:
    """Return the same with model and data as they are written.

    What only the header of a ledger names is refused, for it would be imported, unless `trusted`.
    """
    path = None if name is None else Path(name)
    task = str(path) if path is not None and doors.is_path(str(path)) and not path.exists() else ""
    if path is not None and not task:
        _check_is_config(path)
    overrides = [*([f"task.name={task}"] if task else []), *overrides]
    config = load(None if task else path, overrides)
    if not trusted and path is not None and (path.parent / SERVED).exists():
        from cyber0.federation.user_code import refuse_of_header

        refuse_of_header(config, path, overridden(overrides))
    return config


def _check_is_config(path: Path) -> None:
    """Refuse what is likely to be given in place of a config file: the name of a task, the folder of a run."""
    if path.suffix == ".py":
        raise ConfigError(f"{path} is a Python file; name the task in it: cyber0 run {path}:NAME")
    if str(path) in TASKS and not path.exists():
        raise ConfigError(f"there is no config file {path}; to run the task of that name: --set task.name={path}")
    if (path / CONFIG).is_file():
        raise ConfigError(f"{path} is the folder of a run; repeat it by `cyber0 run {path / CONFIG}`, or resume it by "
                          f"`cyber0 run --resume {path}`")  # fmt: skip


def _located(config: Config) -> Config:
    """Return the config with model and data by their whole paths if they lie here: it may be resumed elsewhere."""

    def whole(path: str) -> str:
        here = Path(path).expanduser()
        return str(here.resolve()) if path and here.exists() else path

    return replace(config, task=replace(config.task, model=whole(config.task.model), data=whole(config.task.data)))


def _with_task_of(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with the task that a run has on record, where it is one of the user's own."""
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
