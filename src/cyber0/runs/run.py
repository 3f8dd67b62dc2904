"""A run's folder: what is written there, and how a run that was cut off goes on.

    config.toml        the whole config; `cyber0 run config.toml` repeats the run
    w0.safetensors     the starting weights; a named language model is loaded again, and its digest compared
    ledger.bin         every decision; with w0 it is the model
    state.safetensors  instead of a ledger, where clients send d numbers: the weights and counters as of some round
    partition.csv      how many samples every client has, of each label where there are classes
    metrics.csv        one row an evaluation
    clients.csv        who was trimmed how often
    summary.json       the figures at the end
    model.safetensors  the trained model, unless --no-export; of a language model the folder model/ instead, which
                       from_pretrained (or PEFT) loads
    sources.json       the SHA-256 of each file of the user's that the config names, if any
    reports.bin        every report, if serve.keep_reports
    diagnostics.json   what `cyber0 diagnose` measured, if it was asked
    report.html        all of it to look at, in one file
    plots/*.png        pictures

The ledger, or the state, alone says how far a run has come. Everything else is written from it, so a run may be killed
at any moment.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from cyber0.aggregate import Rule, tolerated
from cyber0.config import doors
from cyber0.config.files import load, located, to_toml
from cyber0.config.paths import paths
from cyber0.config.registry import RULES
from cyber0.config.schema import Config, TaskConfig
from cyber0.directions.engine import STORAGE_OF
from cyber0.errors import ConfigError, DataError, LedgerError, ModelMissingError
from cyber0.federation import user_code as own
from cyber0.federation.build import make_rule
from cyber0.federation.methods import FEDERATIONS
from cyber0.federation.simulation import Evaluation, Federation, check_device
from cyber0.ledger import Entry, Header, Ledger, Reports, read_opening
from cyber0.model.tensors import save_tensors
from cyber0.model.vector import Parameters
from cyber0.protocol import codec as codecs
from cyber0.protocol.client import replay
from cyber0.protocol.federator import combine
from cyber0.report import page, plots
from cyber0.runs import environment
from cyber0.runs.callbacks import Callbacks
from cyber0.runs.repair import fault_of_weights
from cyber0.storage import (
    CLIENTS,
    CONFIG,
    DIAGNOSTICS,
    LEDGER,
    METRICS,
    MODEL,
    MODEL_FOLDER,
    PARTITION,
    PLOTS,
    REPORT,
    REPORTS,
    SERVED,
    SOURCES,
    STATE,
    SUMMARY,
    TASK_DIGEST,
    WEIGHTS,
    give_normal_modes,
    naming,
    replacing_folder,
    write_text,
)
from cyber0.tasks import AnyTask, own_task, starting_model
from cyber0.tasks.own import OwnTask, adopted
from cyber0.tasks.starting import names_in_files

MODEL_CONFIGS = ("config.json", "adapter_config.json")  # of a folder that from_pretrained or PEFT loads
MODEL_FILES = (
    *MODEL_CONFIGS, "README.md", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece*.model", "spm*.model", "source.spm", "target.spm",
)  # fmt: skip
MODEL_FOLDERS = {".": MODEL_FILES, "base": MODEL_FILES, "additional_chat_templates": ("*.jinja",)}
"""What exporting a model may write, by folder; base is the model of a .gguf file beside its adapter."""
KEEP_SECONDS = 10.0  # of work that a run without a ledger may lose when it is killed


class Row(NamedTuple):
    """One evaluation: after how many rounds, how good, at which price."""

    round: int
    accuracy: float
    loss: float
    uplink_bytes: int
    downlink_bytes: int
    decided: int
    seconds: float
    train_loss: float | None = None
    """Of a language model that learns from few samples; empty elsewhere, where it would cost more than it says."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """What a task of the user's own measures beside the loss and the accuracy."""


_COLUMNS = Row._fields[:-1]
_ROW_TYPES: dict[str, Callable[[str], Any]] = {
    name: float if name in ("loss", "seconds") else int for name in _COLUMNS if name not in ("accuracy", "train_loss")
}


class Run:
    """A simulation that keeps its folder up to date.

    Args:
        config: Its settings.
        folder: Where its files go.
        simulation: What is run.
        pictures: Whether to draw pictures and a report at the end, which takes about a second.
        export: Whether to write the trained model at the end.
    """

    def __init__(
        self, config: Config, folder: Path, simulation: Federation, *, pictures: bool = True, export: bool = True
    ) -> None:
        self.config, self.folder, self.simulation, self.pictures = config, folder, simulation, pictures
        self.export = export
        self.rows = {
            row.round: row for row in _read_rows(folder / METRICS) if row.round <= simulation.checkpointed_round
        }
        self._seconds_before = max((row.seconds for row in self.rows.values()), default=0.0)
        self._ended = self.rows.pop(config.rounds, None)  # the summary rests on it: who resumes measures it again
        self._rounds_before = simulation.checkpointed_round
        self._started = time.perf_counter()
        self._header: tuple[str, ...] = ()  # of the file, once written: its last line may have been cut off before
        self._write_partition()

    @classmethod
    def start(
        cls, config: Config, folder: Path, *, task: AnyTask | None = None, pictures: bool = True, export: bool = True
    ) -> Run:
        """Begin a run in a folder that holds none; the task is made from the config when absent."""
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
            simulation = FEDERATIONS[config.method.name].create(config, folder, ready, task)
        except BaseException:
            for path in new:
                if any(path.iterdir()):
                    break
                path.rmdir()
            raise
        return cls._of(config, folder, simulation, pictures=pictures, export=export)

    @classmethod
    def resume(
        cls,
        folder: Path,
        *,
        task: AnyTask | None = None,
        rounds: int | None = None,
        pictures: bool = True,
        export: bool = True,
    ) -> Run:
        """Resume a run that was cut off; one that was cut off before its first record starts anew.

        A task that was given in Python must be given again; one that the config names is imported again. With `rounds`
        the run is to have that many from now on, in all: a finished one is lengthened.
        """
        if not (folder / CONFIG).exists():
            begun = any((folder / kind.state_file).exists() for kind in FEDERATIONS.values())
            remedy = f"; `cyber0 repair {folder}` writes it again" if begun else ""
            raise ConfigError(f"{folder} holds no run to resume: it has no {CONFIG}{remedy}")
        if (folder / SERVED).exists():
            raise ConfigError(
                f"{folder} is a federator's, whose clients decide what comes next: go on by `cyber0 serve ... --out "
                f"{folder} --resume`"
            )
        try:
            config, task = adopted(load(folder / CONFIG), task, resumed=True)
        except ConfigError as error:
            raise ConfigError(f"{error}. `cyber0 repair {folder}` restores {CONFIG} as the run was begun") from error
        if rounds is not None:
            config = replace(config, rounds=rounds)
        own.warn_if_changed(config, folder, given_task=task is not None)
        kind = FEDERATIONS[config.method.name]
        if not (folder / kind.state_file).exists():
            other = next((k.state_file for k in FEDERATIONS.values() if (folder / k.state_file).exists()), None)
            if other is not None:
                raise ConfigError(
                    f"{folder / CONFIG} was changed: method.name = {config.method.name!r} keeps {kind.state_file}, and "
                    f"{folder} has {other}. `cyber0 repair {folder}` restores {CONFIG} as the run was begun"
                )
            write_text(folder / CONFIG, to_toml(config, folder))  # with the rounds that were asked for
            return cls.start(config, folder, task=task, pictures=pictures, export=export)
        config = with_kept_start(config, folder)
        try:
            simulation = kind.resume(config, folder, task)
        except ConfigError as error:
            lost = [key for key, path in paths(config).items() if doors.sha256(path) is None]
            if task is not None or not lost:
                raise
            raise ConfigError(f"{error}. If it was moved, edit {lost[0]} in {folder / CONFIG}") from error
        try:
            _plan(simulation, folder)
        except BaseException:
            simulation.close()
            raise
        return cls._of(config, folder, simulation, pictures=pictures, export=export)

    @classmethod
    def _of(cls, config: Config, folder: Path, simulation: Federation, *, pictures: bool, export: bool) -> Run:
        try:
            _keep_start(simulation, folder)
            return cls(config, folder, simulation, pictures=pictures, export=export)
        except BaseException:
            simulation.close()
            raise

    def run(self, callbacks: Iterable[object] = ()) -> dict[str, Any]:
        """Play what is left of the run, telling the callbacks (see callbacks.py), and return its summary."""
        simulation, rounds = self.simulation, self.config.rounds
        try:
            told = Callbacks(callbacks)
            told.on_start(self)
            for due in self._missing(simulation.checkpointed_round):
                simulation.catch_up(due)
                told.on_evaluate(due, self._evaluate())
            simulation.catch_up()
            kept_at = time.perf_counter()
            while simulation.round < rounds:
                told.on_round(simulation.run_round())
                due = self.is_due(simulation.round)
                metrics = self._evaluate() if due else {}
                if due or time.perf_counter() - kept_at > KEEP_SECONDS:
                    simulation.checkpoint()
                    kept_at = time.perf_counter()
                if due:
                    told.on_evaluate(simulation.round, metrics)
        finally:
            simulation.close()
        summary = self._finish()
        told.on_end(summary)
        return summary

    @property
    def task(self) -> AnyTask:
        """What is learned; a task of the user's own as the user wrote it."""
        task = self.simulation.task
        return task.task if isinstance(task, OwnTask) else task

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
        return (self.round - self._rounds_before) / max(time.perf_counter() - self._started, 1e-9)

    def is_due(self, round: int) -> bool:
        """Return whether the model is evaluated after that many rounds: every so many, and at both ends."""
        return round % self.config.evaluate_every == 0 or round == self.config.rounds

    def _missing(self, done: int) -> Iterator[int]:
        """Yield the evaluations that a run which has come this far lacks."""
        yield from (r for r in range(done + 1) if self.is_due(r) and r not in self.rows)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the model, add a row to metrics.csv, and return what was measured."""
        simulation = self.simulation
        loss, accuracy, metrics = simulation.evaluate()
        up, down = simulation.traffic()
        seconds = self._ended.seconds if self._ended and self._ended.round == simulation.round else self._seconds()
        trained = simulation.train_loss()
        row = Row(simulation.round, accuracy, loss, up, down, simulation.decided, seconds, trained, metrics)
        last = simulation.round > max(self.rows, default=-1)
        self.rows[simulation.round] = row
        if last and self._header and set(metrics) <= set(self._header):
            path = self.folder / METRICS
            with naming(path), path.open("a", newline="") as file:
                csv.writer(file).writerow(_cells(row, self._header))
            return _measured(row)
        rows = [self.rows[r] for r in sorted(self.rows)]
        self._header = (*_COLUMNS, *dict.fromkeys(name for row in rows for name in row.metrics))
        _write_csv(self.folder / METRICS, self._header, [_cells(row, self._header) for row in rows])
        return _measured(row)

    @property
    def last_row(self) -> Row:
        """The evaluation of the latest round."""
        return self.rows[max(self.rows)]

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    def _finish(self) -> dict[str, Any]:
        simulation, last = self.simulation, self.last_row
        seconds = last.seconds
        summary = {
            "task": doors.short(self.config.task.name),
            "method": self.config.method.name,
            "evaluated_on": simulation.evaluated_on,
            "final_accuracy": finite(last.accuracy),
            "final_loss": finite(last.loss),
            "metrics": {name: finite(value) for name, value in _figures(last).items()},
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
        if best := getattr(simulation.task, "best", ""):
            summary["best_metric"] = best
        if 0 in self.rows:
            summary["initial_accuracy"] = finite(self.rows[0].accuracy)
        more = simulation.evaluate_more(Evaluation(last.loss, last.accuracy))
        summary |= {name: finite(value) for name, value in more.items()}
        summary["environment"] = self._environment()
        _write_csv(self.folder / CLIENTS, ("client", "byzantine", "sent", "trimmed", "share"), self.suspects())
        # Last of the files: where it is, the run is whole. What is made of it may be made again by --resume.
        write_text(self.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        if self.pictures:
            self._draw()
        if self.export:
            self._write_model(summary)
        return summary

    @property
    def model_path(self) -> Path:
        """Where the trained model is written at the end."""
        return model_path(self.config, self.folder)

    def _write_model(self, summary: Mapping[str, Any]) -> None:
        """Write the trained model, unless it is there already."""
        path, parameters = self.model_path, self.simulation.parameters
        if holds_model(path, parameters.layout, summary["model_digest"]):
            return
        if path.name == MODEL_FOLDER:
            if stranger := _stranger(path):
                raise DataError(f"{path} holds {stranger}, which is no file of a model and would be deleted; move it "
                                f"elsewhere, and `cyber0 run --resume {self.folder}` writes the model")  # fmt: skip
            _write_pretrained(self.simulation.config, parameters, path, self.simulation.round, summary)
        else:
            save_tensors(whole_state(parameters), path)

    def _draw(self) -> None:
        simulation = self.simulation
        rows = [self.rows[r]._asdict() for r in sorted(self.rows)]
        picture = plots.accuracy_picture if self.has_accuracy else plots.loss_picture
        picture(rows, self.folder / PLOTS / self.first_picture, self.title(), evaluated_on=simulation.evaluated_on)
        invited = simulation.federator.invited_count
        plots.suspects_picture(
            [share for *_, share in self.suspects()],
            [bool(lies) for lies in simulation.byzantine],
            self.folder / PLOTS / "suspects.png",
            expected=2 * simulation.config.borne / invited if self.config.aggregation.rule == "trimmed_mean" else None,
        )
        plots.partition_picture(
            simulation.label_counts().tolist(),
            [bool(lies) for lies in simulation.byzantine],
            self.folder / PLOTS / "partition.png",
            title=f"Samples of each client, {simulation.config.federation.partition_title}",
            labelled=bool(simulation.task.classes),
        )
        page.write([self.folder], self.folder / REPORT)

    def _environment(self) -> dict[str, Any]:
        """Return on what the run ran; who resumes a run that has ended has not run it."""
        if self._rounds_before == self.config.rounds:
            try:
                recorded = json.loads((self.folder / SUMMARY).read_text(encoding="utf-8"))["environment"]
                return dict(recorded)
            except (OSError, ValueError, KeyError, TypeError):
                pass  # no record, or an older one
        return dict(environment.describe(self.config.device))

    def _write_partition(self) -> None:
        counts, lies = self.simulation.label_counts(), self.simulation.byzantine
        labels = counts.shape[1] if self.simulation.task.classes else 0
        header = ("client", "byzantine", "samples", *(f"label_{label}" for label in range(labels)))
        rows = [(i, int(lies[i]), int(row.sum()), *row[:labels].tolist()) for i, row in enumerate(counts)]
        _write_csv(self.folder / PARTITION, header, rows)

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

    @property
    def first_picture(self) -> str:
        """The picture of what was measured over the rounds."""
        return "accuracy.png" if self.has_accuracy else "loss.png"

    def suspects(self) -> list[tuple[int, int, int, int, float]]:
        """Return (client, lies, sent, trimmed, share trimmed) for every client."""
        federator, lies = self.simulation.federator, self.simulation.byzantine
        columns = zip(lies.tolist(), federator.sent.tolist(), federator.trimmed.tolist(), strict=True)
        return [(i, int(b), s, t, t / s if s else 0.0) for i, (b, s, t) in enumerate(columns)]


def best_round(rows: Iterable[Row], metric: str = "") -> int | None:
    """Return the round of the best evaluation, the first of several: the highest of a metric, of "-name" the lowest.

    Without a metric it is that of the lowest loss. None where no evaluation gave a finite number.
    """
    name = metric.removeprefix("-") or "loss"
    sign = -1.0 if metric.startswith("-") or name == "loss" else 1.0
    found = {row.round: row.loss if name == "loss" else _figures(row).get(name, math.nan) for row in rows}
    found = {round: sign * value for round, value in sorted(found.items()) if math.isfinite(value)}
    return max(found, key=lambda round: found[round], default=None)


def _figures(row: Row) -> dict[str, float]:
    """Return all that was measured beside the loss, the accuracy first."""
    accuracy = {} if math.isnan(row.accuracy) else {"accuracy": row.accuracy}
    return {**accuracy, **row.metrics}


def _measured(row: Row) -> dict[str, float]:
    """Return all that was measured, the losses included: what callbacks are told."""
    trained = {} if row.train_loss is None else {"train_loss": row.train_loss}
    return {"loss": row.loss, **_figures(row), **trained}


def finite(value: float) -> float | None:
    """Return a number as JSON knows it, which has no NaN."""
    return value if math.isfinite(value) else None


def save_weights(parameters: Parameters, path: Path) -> None:
    """Write w to a safetensors file, in whole or not at all."""
    save_tensors(parameters.state(), path)


def whole_state(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return w by name, and with it the model's frozen weights and buffers; what is tied comes once."""
    state, known = parameters.state(), {id(p) for p in parameters.tensors}
    for name, t in parameters.model.state_dict(keep_vars=True).items():
        if isinstance(t, torch.Tensor) and id(t) not in known:
            known.add(id(t))
            # A file can't hold tensors that share memory, as buffers may: they are small enough to copy.
            state[name] = t.detach() if isinstance(t, torch.nn.Parameter) else t.detach().clone()
    return state


def model_path(config: Config, folder: Path) -> Path:
    """Return where a run writes its trained model: a file, or of a language model a folder."""
    return folder / (MODEL_FOLDER if config.task.model else MODEL)


def holds_model(path: Path, layout: Iterable[Entry], digest: str, model: torch.nn.Module | None = None) -> bool:
    """Tell whether a trained model with that digest is at a path already: a file, or a folder.

    With `model`, a weight that is tied to another may be there under the name of that.
    """
    if path.name == MODEL:
        return path.is_file() and not fault_of_weights(path, layout, digest)
    try:
        card = (path / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    tied: dict[int, list[str]] = {}
    for name, t in model.state_dict(keep_vars=True).items() if model is not None else ():
        tied.setdefault(id(t), []).append(name)
    twins = {name: names for names in tied.values() for name in names}

    def names_of(name: str) -> list[str]:
        return [one for twin in (name, *twins.get(name, ())) for one in names_in_files(twin)]

    first, *shards = sorted(path.glob("*.safetensors")) or [path / MODEL]
    return digest in card and not fault_of_weights(first, layout, digest, shards=shards, names_of=names_of)


def check_exported(folder: Path, ledger: Ledger, parameters: Parameters) -> Path | None:
    """Return where a run has its trained model, if it has it; refuse one that is not what w0 and the ledger give."""
    task = _task(ledger.header, "")
    path = folder / (MODEL_FOLDER if task is not None and task.model else MODEL)
    if not path.exists():
        return None
    if not holds_model(path, parameters.layout, parameters.digest(), parameters.model):
        remedy = f"delete it, and `cyber0 run --resume {folder}` writes it again"
        raise LedgerError(f"{path} is not the model that w0 and the ledger give; {remedy}")
    return path


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file."""
    if not path.exists():
        raise DataError(f"there is no {path}: the starting weights of the run are needed")
    try:
        return load_file(path)
    except Exception as error:  # safetensors' own error type is not public in every version
        raise DataError(f"{path} can't be read as safetensors: {error}") from error


def _plan(simulation: Federation, folder: Path) -> None:
    """Let a run that is resumed have as many rounds as its config now says, if there are not more already."""
    config, done = simulation.config, simulation.checkpointed_round
    if config.rounds < done:
        raise ConfigError(
            f"rounds = {config.rounds}, and the run in {folder} has {done} already, which are not undone; `cyber0 "
            f"replay {folder} --round {config.rounds} --out FILE.safetensors` writes the model of then"
        )
    if done < config.rounds:
        (folder / SUMMARY).unlink(missing_ok=True)  # where it is, the run is whole
    if load(folder / CONFIG).rounds != config.rounds:
        write_text(folder / CONFIG, to_toml(config, folder))


def _keep_start(simulation: Federation, folder: Path) -> None:
    """Write w0 beside the ledger, unless it is a named model: that is not ours to copy, and a digest tells it.

    Frozen weights and buffers that task.weights has changed are kept with it: that file is not needed again.
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


def with_kept_start(config: Config, folder: Path) -> Config:
    """Return the config with the w0 that a run has kept, where it is whole, in place of the file task.weights."""
    path = folder / WEIGHTS
    if not config.task.weights or not path.exists():
        return config
    if (folder / LEDGER).exists():
        with (folder / LEDGER).open("rb") as file:
            header = read_opening(file, folder / LEDGER)[0]
        if fault_of_weights(path, header.layout, header.weights_digest):
            return config
    return replace(config, task=replace(config.task, weights=os.path.abspath(path)))


class _Weights(torch.nn.Module):
    """A module that is nothing but its weights, under the names of a ledger's layout.

    Those may be any strings, also such as no module can have, so the module itself knows its weights by their numbers.
    """

    def __init__(self, header: Header, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for entry in header.layout:
            if entry.name not in tensors:
                raise LedgerError(f"the starting weights lack {entry.name!r}, which the ledger's layout has")
            found = tensors[entry.name]
            if (tuple(found.shape), STORAGE_OF.get(found.dtype)) != (entry.shape, entry.dtype):
                raise LedgerError(
                    "the starting weights have other names, shapes or types than the ledger's layout: "
                    f"{entry.name!r} is {found.dtype} of shape {tuple(found.shape)}, not {entry.dtype} of {entry.shape}"
                )
        self._of_layout = [entry.name for entry in header.layout]
        self._weights = torch.nn.ParameterList(tensors[name] for name in self._of_layout)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return zip(self._of_layout, self._weights, strict=True)


def open_ledger(folder: Path) -> Ledger:
    """Return the ledger of a run, read-only."""
    if (folder / STATE).exists():
        raise LedgerError(
            f"{folder} holds a run of a method without a ledger, so there is nothing to replay or verify: its weights "
            f"are in {STATE}, and `cyber0 run {folder / CONFIG}` gives them again"
        )
    if not (folder / LEDGER).exists():
        raise LedgerError(f"{folder} holds no run: it has no {LEDGER}")
    return Ledger.open(folder / LEDGER)


def rebuild(
    folder: Path, stop: int | None = None, device: str = "cpu", model: str = "", task: str = ""
) -> tuple[Ledger, Parameters]:
    """Return the ledger of a run (read-only) and the weights after `stop` rounds, from w0 and the ledger alone.

    `model` says where the language model is that the run began with, if not where the ledger says; `task` where the
    task of somebody's own is, which is needed if the folder has no w0: no ledger makes anybody import anything.
    """
    ledger = open_ledger(folder)
    if stop is not None and not 0 <= stop <= len(ledger):
        raise LedgerError(
            f"round {stop} was asked for, but the ledger has {len(ledger)} rounds: use 0 to {len(ledger)}"
        )
    parameters = Parameters(_starting_model(folder, ledger.header, device, model, task), ledger.header.distribution)
    if parameters.layout != ledger.header.layout:
        raise LedgerError("the starting weights have other names, shapes or types than the ledger's layout")
    replay(ledger.header, parameters, ledger.records(0, stop))
    return ledger, parameters


def _starting_model(folder: Path, header: Header, device: str, given: str, own: str) -> torch.nn.Module:
    """Return a model at w0: the stored weights; without them, as after a deployment, one made as the header says."""
    task = _task(header, given)
    if task is not None and own:
        task = own_task(task, own)
    kept = (folder / WEIGHTS).exists()
    if task is None or (kept and not task.model):
        return _Weights(header, load_weights(folder / WEIGHTS)).to(device)
    if task.weights and not kept:
        raise DataError(
            f"there is no {folder / WEIGHTS}: the run began with the weights of a file (task.weights); copy that file "
            "there"
        )
    own_task(task, own)
    try:
        model = starting_model(
            replace(task, weights=os.path.abspath(folder / WEIGHTS) if kept else ""), header.seed, device
        )
    except ModelMissingError as error:
        raise error.by_option(f"the model that the run began with, {task.model!r},") from error
    made = Parameters(model, header.distribution)
    if task.model and made.rest_digest() != header.rest_digest:
        raise LedgerError(f"task.model = {task.model!r} is not the model of this run: its frozen weights differ")
    if not task.model and made.digest() != header.weights_digest:
        raise DataError(
            f"there is no {folder / WEIGHTS}: the starting weights of the run are needed, and the task that its header "
            "names begins with others"
        )
    return model


def _task(header: Header, model: str) -> TaskConfig | None:
    """Return the task that a ledger names, if it names one, with the model in the place that is given."""
    task = _settings(header).task if "task" in header.config else None
    if model and (task is None or not task.model):
        raise ConfigError(f"--model {model} is for runs of a language model, and this is none: leave --model out")
    return replace(task, model=model) if task is not None and model else task


def _settings(header: Header) -> Config:
    """Return the settings that a ledger's header holds; one that this version does not know is named."""
    try:
        return Config.recorded(header.config)
    except ConfigError as error:
        raise LedgerError(
            f"the settings in the ledger's header are not those of this version of cyber0: {error}. A newer version "
            "may have written it: use that one"
        ) from error


def check_replaceable(out: Path, *, force: bool = False) -> None:
    """Refuse to write where something lies; with `force`, only where it is a run's own or not what replay writes."""
    place, where = out.resolve(), f"--out {out}"
    if place.is_dir() and Path.cwd().is_relative_to(place):
        raise ConfigError(f"{where} is the current folder or holds it, so it can't be replaced; name a new one")
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not (place.is_dir() or place.is_file()):  # a device would be replaced by a file, for everybody
        raise ConfigError(f"{where} is neither a file nor a folder, so it can't be replaced; name a new one")
    beside = place if place.is_dir() else place.parent
    own = next((name for name in (LEDGER, STATE, CONFIG) if (beside / name).exists()), None)
    if own:
        raise ConfigError(f"{where} exists already, and {own} there says that it belongs to a run; name another place")
    if not force:
        what = "a folder that holds files already" if place.is_dir() else "a file that is there already"
        raise ConfigError(f"{where} is {what}; name a new one, or overwrite it by --force")
    if not place.is_dir():
        return
    if not any((place / name).exists() for name in MODEL_CONFIGS):
        raise ConfigError(
            f"{where} is a folder without {' or '.join(MODEL_CONFIGS)}, so not a model that --force could replace; "
            "name a new one"
        )
    if stranger := _stranger(place):
        raise ConfigError(
            f"{where} holds {stranger}, which no replay has written and --force would delete; move it elsewhere, or "
            "name a new folder"
        )


def _stranger(folder: Path) -> str:
    """Return the first file in a folder that exporting a model does not write; empty if there is none."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")))
    return next((name.as_posix() for name in names if not _of_a_model(name)), "")


def _of_a_model(path: Path) -> bool:
    """Tell whether exporting a model writes a file or folder of that name."""
    files = MODEL_FOLDERS.get(path.parent.as_posix(), ())
    return path.as_posix() in MODEL_FOLDERS or any(path.match(name) for name in files)


def check_not_base(folder: Path, out: Path, model: str = "") -> None:
    """Refuse to write over, around or into the model that the run began with: without it the run can't be replayed."""
    try:
        with (folder / LEDGER).open("rb") as file:
            task = _task(read_opening(file, folder / LEDGER)[0], model)
    except OSError:
        return  # `rebuild` says what is wrong
    if task is None or not task.model or not (base := Path(task.model).expanduser().resolve()).exists():
        return
    place = out.resolve()
    if place.is_relative_to(base) or base.is_relative_to(place):
        raise ConfigError(
            f"--out {out} is, holds or lies in {base}, the model that the run began with and is replayed from; name "
            "another place"
        )


def export(
    ledger: Ledger, parameters: Parameters, out: Path, model: str = "", *, folder: Path | None = None,
    rounds: int | None = None,
) -> bool:  # fmt: skip
    """Write a language model as a folder that from_pretrained loads; return False for other models.

    Args:
        ledger: Of the run.
        parameters: What it gives.
        out: Where to write.
        model: Where the language model is that the run began with, if not where the ledger says.
        folder: The run's, for the model card to quote its evaluation.
        rounds: After which round the weights are; None: all of the ledger's.
    """
    task = _task(ledger.header, model)
    if task is None or doors.is_own(task.name) or not hasattr(parameters.model, "save_pretrained"):
        return False
    config = replace(_settings(ledger.header), task=task)
    _write_pretrained(config, parameters, out, len(ledger) if rounds is None else rounds, read_summary(folder))
    return True


def _write_pretrained(
    config: Config, parameters: Parameters, out: Path, rounds: int, summary: Mapping[str, Any] | None
) -> None:
    """Write a folder that from_pretrained loads, in whole or not at all."""
    from cyber0.tasks.text import task as text

    with replacing_folder(out.resolve()) as new:
        text.export(config, parameters, new, home=out.resolve(), rounds=rounds, summary=summary)
        give_normal_modes(new)  # safetensors' own is 0600


def read_summary(folder: Path | None) -> dict[str, Any] | None:
    """Return the summary of a run that has ended."""
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8")) if folder is not None else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def check_decisions(folder: Path, ledger: Ledger, rule_path: str = "") -> int:
    """Decide every round again from the reports that were kept, and return how many rounds that were.

    `rule_path` is where the rule is, if it is not one of ours: the header, which names it, is not trusted with code.
    """
    path = folder / REPORTS
    if not path.exists():
        if _settings(ledger.header).serve.keep_reports:
            raise LedgerError(
                f"{path} is missing, though the run kept its reports: rounds 0 to {len(ledger) - 1} can't be checked; "
                "restore it from a copy"
            )
        raise LedgerError(f"{folder} has no {REPORTS}: set serve.keep_reports = true before a run to keep its reports")
    config = _settings(ledger.header)
    rule, invited, codec = _rule(config, rule_path), config.federation.invited, codecs.make(ledger.header.codec)
    required = max(config.serve.quorum, rule.required(tolerated(rule.beta, invited)))
    reports = Reports(path, ledger.header.scalars)
    kept = iter(reports)
    for record in ledger:
        number, rows = next(kept, (None, None))
        if number != record.round or rows is None or len(rows) != record.reported.sum():
            if reports.fault is not None:
                raise reports.damage("this round can't be decided again")
            until = len(ledger) if number is None else max(number, record.round + 1)
            raise LedgerError(
                f"{path} does not hold the reports of round {record.round} that the ledger speaks of: rounds "
                f"{record.round} to {until - 1} can't be checked"
            )
        values, excluded = combine(rule, rows, invited, required, record.round, codec)
        same = (values is None) == (record.values is None) and (
            values is None or record.values is None or values.tobytes() == record.values.tobytes()
        )
        if not same or not np.array_equal(record.trimmed[record.reported], excluded):
            raise LedgerError(f"the reports of round {record.round} give another decision than the ledger has")
    return len(ledger)


def _rule(config: Config, path: str) -> Rule:
    """Return the rule of a recorded config, which is imported only from where the caller says it is."""
    named = config.aggregation.rule
    if path:
        if not doors.is_path(path):
            raise ConfigError(f"--rule {path} must be a path, file.py:name or package.module:name")
        return make_rule(replace(config, aggregation=replace(config.aggregation, rule=path)))
    if named not in RULES:
        raise ConfigError(
            f"aggregation.rule = {named!r} of this run is not built in, and a header never makes anybody import code; "
            "name the rule by --rule FILE.py:NAME"
        )
    return make_rule(config)


def _read_rows(path: Path) -> list[Row]:
    """Return the rows of a metrics file up to one that was cut off or damaged: those are measured again."""
    if not path.exists():
        return []
    rows = []
    with path.open(newline="") as file, contextlib.suppress(KeyError, TypeError, ValueError, csv.Error):
        for line in csv.DictReader(file):
            known, trained = {name: kind(line[name]) for name, kind in _ROW_TYPES.items()}, line.get("train_loss")
            accuracy = float(line["accuracy"] or "nan")
            more = {name: float(line[name]) for name in line if name not in _COLUMNS and line[name]}
            rows.append(Row(**known, accuracy=accuracy, train_loss=float(trained) if trained else None, metrics=more))
    return rows


def _cells(row: Row, header: tuple[str, ...]) -> list[Any]:
    """Return a row as the columns of a file; what was not measured is left empty."""
    values = {**row.metrics, **row._asdict(), "accuracy": "" if math.isnan(row.accuracy) else row.accuracy}
    return [values.get(name, "") for name in header]


def _write_csv(path: Path, header: tuple[str, ...], rows: list[Any]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())
