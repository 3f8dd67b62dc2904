"""A run: a federation that keeps its folder up to date, started, resumed and run to its end.

folder.py has the files, replay.py what can be checked of them, export.py the trained model.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from cyber0.config import doors
from cyber0.config.files import load, located, to_toml
from cyber0.config.paths import paths
from cyber0.config.schedules import AUTO
from cyber0.config.schema import Config
from cyber0.directions.backends import check_device
from cyber0.errors import ConfigError, ModelMissingError
from cyber0.federation import user_code as own
from cyber0.federation.methods import FEDERATIONS
from cyber0.federation.simulation import Evaluation, Federation, MeasureLr, Simulation
from cyber0.model.tensors import save_tensors
from cyber0.runs import environment
from cyber0.runs.callbacks import Callbacks
from cyber0.runs.export import model_path, write_model
from cyber0.runs.folder import (
    ClientRow,
    MetricsFile,
    PartitionRow,
    read_metrics,
    read_summary,
    write_clients,
    write_partition,
    write_summary,
)
from cyber0.runs.weights import fault_of_weights, with_stored_start
from cyber0.storage import (
    CLIENTS,
    CONFIG,
    DIAGNOSTICS,
    METRICS,
    REPORT,
    REPORTS,
    SERVED,
    SOURCES,
    SUMMARY,
    TASK_DIGEST,
    WEIGHTS,
    write_text,
)
from cyber0.storage.disk import Clock
from cyber0.tasks import AnyTask
from cyber0.tasks.construct import adopted
from cyber0.tasks.metrics import MetricsRow, best_round, final_figures, finite
from cyber0.tasks.own import OwnTask

CHECKPOINT_SECONDS = 10.0  # of work that a run without a ledger may lose when it is killed


class Run:
    """A federation that keeps its folder up to date.

    Args:
        config: Its settings.
        folder: Where its files go.
        simulation: The federation.
        export: Whether to write the trained model at the end.
        clock: Tells the seconds since some moment.
    """

    def __init__(
        self, config: Config, folder: Path, simulation: Federation, *, export: bool = True,
        clock: Clock = time.perf_counter,
    ) -> None:  # fmt: skip
        self.config, self.folder, self.simulation, self.export = config, folder, simulation, export
        self.rows = {row.round: row for row in _stored_rows(folder) if row.round <= simulation.checkpointed_round}
        self._seconds_before = max((row.seconds for row in self.rows.values()), default=0.0)
        self._last_before = self.rows.pop(config.rounds, None)  # measured again: the summary rests on it
        self._rounds_before = simulation.checkpointed_round
        self._clock, self._started = clock, clock()
        self._metrics_file = MetricsFile(folder / METRICS)
        self._write_partition()

    @classmethod
    def start(
        cls, config: Config, folder: Path, *, task: AnyTask | None = None, export: bool = True,
        clock: Clock = time.perf_counter, measure_lr: MeasureLr | None = None,
    ) -> Run:  # fmt: skip
        """Start a run in a folder that holds none; the task is made from the config when absent.

        `measure_lr` finds the learning rate of a config that asks for that.
        """
        config, task = adopted(located(config), task)
        if any((folder / kind.state_file).exists() for kind in FEDERATIONS.values()):
            raise ConfigError(
                f"{folder} already holds a run; resume it (`cyber0 run --resume {folder}`, in Python resume=True), or "
                "choose another folder"
            )
        if (there := model_path(config, folder)).exists() and read_summary(folder) is None:
            raise ConfigError(
                f"{there} exists already, and is where the trained model of this run would go; choose another folder"
            )
        check_device(config.device)
        written = to_toml(config, folder)
        if (folder / CONFIG).exists() and to_toml(load(folder / CONFIG), folder) != written:
            raise ConfigError(
                f"{folder} holds a {CONFIG} with other settings, which would be lost; choose another folder"
            )
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder {folder} can't be made: {error.strerror}; choose another") from None
        for leftover in (METRICS, CLIENTS, SUMMARY, REPORTS, REPORT, DIAGNOSTICS, SOURCES, TASK_DIGEST):
            (folder / leftover).unlink(missing_ok=True)

        def ready() -> None:
            write_text(folder / CONFIG, to_toml(config, folder))
            own.remember(config, folder)

        # Nothing is left behind until all that can be refused has been: the data, the partition, the model.
        try:
            simulation = FEDERATIONS[config.method.name].create(config, folder, ready, task, measure_lr)
        except BaseException:
            for path in new:
                if any(path.iterdir()):
                    break
                path.rmdir()
            raise
        return cls._of(config, folder, simulation, export=export, clock=clock)

    @classmethod
    def resume(
        cls,
        folder: Path,
        *,
        task: AnyTask | None = None,
        rounds: int | None = None,
        export: bool = True,
        clock: Clock = time.perf_counter,
        measure_lr: MeasureLr | None = None,
    ) -> Run:
        """Resume a run that was cut off; one that was cut off before its first record starts again.

        A task that was given in Python must be given again; one that the config names is imported again. `rounds`
        replaces the total number of rounds, so that a finished run can be lengthened. `measure_lr` is for a run that
        starts again: otherwise the learning rate is in the ledger.
        """
        if not (folder / CONFIG).exists():
            started = any((folder / kind.state_file).exists() for kind in FEDERATIONS.values())
            remedy = f"; `cyber0 repair {folder}` writes it again" if started else ""
            raise ConfigError(f"{folder} holds no run to resume: it has no {CONFIG}{remedy}")
        if (folder / SERVED).exists():
            raise ConfigError(
                f"{folder} belongs to a federator, which needs its clients to continue: resume it with `cyber0 serve "
                f"... --out {folder} --resume`"
            )
        try:
            config, task = adopted(load(folder / CONFIG), task, resumed=True)
        except ConfigError as error:
            raise ConfigError(f"{error}. `cyber0 repair {folder}` restores {CONFIG} as the run was started") from error
        if rounds is not None:
            config = replace(config, rounds=rounds)
        own.warn_if_changed(config, folder, given_task=task is not None)
        kind = FEDERATIONS[config.method.name]
        if not (folder / kind.state_file).exists():
            other = next((k.state_file for k in FEDERATIONS.values() if (folder / k.state_file).exists()), None)
            if other is not None:
                raise ConfigError(
                    f"{folder / CONFIG} was changed: method.name = {config.method.name!r} keeps {kind.state_file}, and "
                    f"{folder} has {other}. `cyber0 repair {folder}` restores {CONFIG} as the run was started"
                )
            write_text(folder / CONFIG, to_toml(config, folder))  # with the requested rounds
            return cls.start(config, folder, task=task, export=export, clock=clock, measure_lr=measure_lr)
        config = with_stored_start(config, folder)
        try:
            simulation = kind.resume(config, folder, task)
        except ConfigError as error:
            lost = [key for key, path in paths(config).items() if doors.sha256(path) is None]
            if task is not None or not lost:
                raise
            raise ConfigError(f"{error}. If it was moved, edit {lost[0]} in {folder / CONFIG}") from error
        except ModelMissingError as error:
            moved = f"If it was moved, set task.model to its whole path in {folder / CONFIG}"
            raise ModelMissingError(f"{error}. {moved}") from error
        try:
            _set_rounds(simulation, folder)
        except BaseException:
            simulation.close()
            raise
        return cls._of(config, folder, simulation, export=export, clock=clock)

    @classmethod
    def _of(cls, config: Config, folder: Path, simulation: Federation, *, export: bool, clock: Clock) -> Run:
        try:
            _store_start(simulation, folder)
            return cls(config, folder, simulation, export=export, clock=clock)
        except BaseException:
            simulation.close()
            raise

    def run(self, callbacks: Iterable[object] = ()) -> dict[str, Any]:
        """Run the rounds that are left, calling the callbacks (see callbacks.py), and return the summary."""
        simulation, rounds = self.simulation, self.config.rounds
        try:
            hooks = Callbacks(callbacks)
            hooks.on_start(self)
            for due in self._missing(simulation.checkpointed_round):
                simulation.catch_up(due)
                hooks.on_evaluate(due, self._evaluate())
            simulation.catch_up()
            stored_at = self._clock()
            while simulation.round < rounds:
                hooks.on_round(simulation.run_round())
                due = self.is_due(simulation.round)
                metrics = self._evaluate() if due else {}
                if due or self._clock() - stored_at > CHECKPOINT_SECONDS:
                    simulation.checkpoint()
                    stored_at = self._clock()
                if due:
                    hooks.on_evaluate(simulation.round, metrics)
        finally:
            simulation.close()
        summary = self._finish()
        hooks.on_end(summary)
        return summary

    @property
    def task(self) -> AnyTask:
        """What is learned; a task of the user's own as the user wrote it."""
        task = self.simulation.task
        return task.task if isinstance(task, OwnTask) else task

    @property
    def automatic_lr(self) -> float | None:
        """The learning rate that was found for `method.lr = "auto"`; None if it was given as a number."""
        simulation = self.simulation
        if self.config.method.lr != AUTO or not isinstance(simulation, Simulation):
            return None
        return simulation.ledger.header.lr

    @property
    def lr_search(self) -> Mapping[str, Any] | None:
        """The trial runs behind that rate and their cost; None in a run that was resumed."""
        return self.simulation.lr_search if isinstance(self.simulation, Simulation) else None

    @property
    def round(self) -> int:
        """How many rounds are done, those from before it was resumed included."""
        return max(self.simulation.round, self.simulation.checkpointed_round)

    @property
    def rounds(self) -> int:
        """How many rounds there are in all."""
        return self.config.rounds

    @property
    def rounds_per_second(self) -> float:
        """How fast it has been since it was started or resumed."""
        return (self.round - self._rounds_before) / max(self._clock() - self._started, 1e-9)

    def is_due(self, round: int) -> bool:
        """Return whether the model is evaluated after that many rounds: every so many, and at both ends."""
        return round % self.config.evaluate_every == 0 or round == self.config.rounds

    def _missing(self, done: int) -> Iterator[int]:
        """Yield the evaluations that a run which has come this far lacks."""
        yield from (r for r in range(done + 1) if self.is_due(r) and r not in self.rows)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the model, add a row to metrics.csv, and return what was measured."""
        simulation, before = self.simulation, self._last_before
        loss, accuracy, metrics = simulation.evaluate()
        up, down = simulation.traffic()
        row = MetricsRow(
            round=simulation.round,
            accuracy=accuracy,
            loss=loss,
            uplink_bytes=up,
            downlink_bytes=down,
            decided=simulation.decided,
            seconds=before.seconds if before and before.round == simulation.round else self._seconds(),
            train_loss=simulation.train_loss(),
            metrics=metrics,
        )
        last = row.round > max(self.rows, default=-1)
        self.rows[row.round] = row
        if last and self._metrics_file.fits(row):
            self._metrics_file.append(row)
        else:
            self._metrics_file.rewrite([self.rows[round] for round in sorted(self.rows)])
        return row.measured()

    @property
    def last_row(self) -> MetricsRow:
        """The evaluation of the latest round."""
        return self.rows[max(self.rows)]

    def _seconds(self) -> float:
        return self._seconds_before + self._clock() - self._started

    def _finish(self) -> dict[str, Any]:
        simulation, last = self.simulation, self.last_row
        seconds = last.seconds
        summary = {
            "task": doors.short(self.config.task.name),
            "method": self.config.method.name,
            "evaluated_on": simulation.evaluated_on,
            **final_figures(last),
            "best_round": best_round(self.rows.values(), getattr(simulation.task, "best", "")),
            "rounds": simulation.round,
            "abandoned_rounds": simulation.round - simulation.decided,
            "dimension": simulation.parameters.dimension,
            "uplink_bytes_per_client": last.uplink_bytes,
            "downlink_bytes_per_client": last.downlink_bytes,
            "wall_seconds": seconds,
            "rounds_per_second": simulation.round / seconds if seconds > 0 else 0.0,
            "probability_of_too_many_liars": simulation.config.risk,
            "model_digest": simulation.parameters.digest(),
            "saturated_weights": simulation.parameters.saturated(),
            "rejected_reports": {reason.lower(): n for reason, n in simulation.rejections().items()},
        }
        if (ledger := getattr(simulation, "ledger", None)) is not None:
            summary["chain"] = ledger.chain.hex()
        if self.config.federation.expel:
            summary["expelled"] = [one.as_dict() for one in simulation.federator.expulsions]
        if self.automatic_lr is not None:
            summary["lr_auto"] = self.automatic_lr
        if self.lr_search is not None:
            summary["lr_search"] = self.lr_search
        if best := getattr(simulation.task, "best", ""):
            summary["best_metric"] = best
        if 0 in self.rows:
            summary["initial_accuracy"] = finite(self.rows[0].accuracy)
        more = simulation.evaluate_more(Evaluation(last.loss, last.accuracy))
        summary |= {name: finite(value) for name, value in more.items()}
        summary["environment"] = self._environment()
        write_clients(self.folder, self.suspects())
        # What comes after the summary can be made again by --resume.
        write_summary(self.folder, summary)
        if self.export:
            write_model(simulation.config, simulation.parameters, self.folder, simulation.round, summary)
        return summary

    @property
    def model_path(self) -> Path:
        """Where the trained model is written at the end."""
        return model_path(self.config, self.folder)

    def _environment(self) -> dict[str, Any]:
        """Return where the run ran; resuming a run that has ended does not change that."""
        if self._rounds_before == self.config.rounds:
            recorded = (read_summary(self.folder) or {}).get("environment")
            if isinstance(recorded, dict):
                return recorded
        return dict(environment.describe(self.config.device))

    def _write_partition(self) -> None:
        counts, byzantine = self.simulation.label_counts(), self.simulation.byzantine
        rows = [PartitionRow(i, bool(byzantine[i]), row.tolist()) for i, row in enumerate(counts)]
        write_partition(self.folder, rows, counts.shape[1] if self.simulation.task.classes else 0)

    def title(self) -> str:
        """Return the run in one sentence."""
        f, m, a = self.config.federation, self.config.method, self.config.aggregation
        attack, dealt, rule = map(doors.short, (f.attack, f.partition, a.rule))
        byzantine = f"{f.byzantine} Byzantine ({attack})" if f.byzantine else "none Byzantine"
        clients = f"{f.clients} clients, {byzantine}, {dealt}, {rule}"
        task = doors.short(self.config.task.name)
        if m.name == "cyber0":
            return f"{task}, {clients}, k = {m.k}"
        if m.name == "mezo":
            return f"{task}, mezo, k = {m.k}"
        local = f", {m.local_epochs} local steps" if m.local_epochs > 1 else ""
        return f"{task}, {m.name}, {clients}{local}"

    @property
    def has_accuracy(self) -> bool:
        """Whether an accuracy was measured, not a loss alone."""
        return any(math.isfinite(row.accuracy) for row in self.rows.values())

    def suspects(self) -> list[ClientRow]:
        """Return how often each client's scalars were trimmed."""
        federator = self.simulation.federator
        columns = zip(self.simulation.byzantine, federator.sent.tolist(), federator.trimmed.tolist(), strict=True)
        return [ClientRow(i, bool(byzantine), sent, cut) for i, (byzantine, sent, cut) in enumerate(columns)]


def _stored_rows(folder: Path) -> Iterator[MetricsRow]:
    """Yield the evaluations in a run's folder up to one that is damaged: those are measured again."""
    if (folder / METRICS).exists():
        yield from takewhile(lambda row: row.decided is not None, read_metrics(folder / METRICS)[0])


def _set_rounds(simulation: Federation, folder: Path) -> None:
    """Set the number of rounds of a resumed run to that of its config, unless more are done already."""
    config, done = simulation.config, simulation.checkpointed_round
    if config.rounds < done:
        raise ConfigError(
            f"rounds = {config.rounds}, and the run in {folder} has {done} already, which can't be undone; `cyber0 "
            f"replay {folder} --round {config.rounds} --out FILE.safetensors` writes the model as it was then"
        )
    if done < config.rounds:
        (folder / SUMMARY).unlink(missing_ok=True)  # where it is, the run is complete
    if load(folder / CONFIG).rounds != config.rounds:
        write_text(folder / CONFIG, to_toml(config, folder))


def _store_start(simulation: Federation, folder: Path) -> None:
    """Store w0 beside the ledger, unless it is a named model: that is not ours to copy, and its digest identifies it.

    Frozen weights and buffers that task.weights has changed are stored too, so that file is not needed again.
    """
    path, parameters = folder / WEIGHTS, simulation.parameters
    if getattr(simulation.task, "named_model", False) and not simulation.config.task.weights:
        return
    if path.exists():
        fault = fault_of_weights(path, parameters.layout, parameters.digest())
        if not fault:
            return
        warnings.warn(f"{path} was damaged and is written again: {fault}", RuntimeWarning, stacklevel=2)
    whole = parameters.model.state_dict()
    save_tensors({**parameters.state(), **{name: whole[name] for name in simulation.placed}}, path)
