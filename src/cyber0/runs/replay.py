"""Replaying a run's folder: the model from w0 and the ledger alone, and every decision again from the reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from cyber0.aggregate import Rule
from cyber0.config import doors
from cyber0.config.registry import RULES
from cyber0.config.schema import Config, TaskConfig
from cyber0.directions.engine import STORAGE_OF
from cyber0.errors import ConfigError, DataError, LedgerError, ModelMissingError
from cyber0.federation.build import make_decider, make_rule
from cyber0.ledger import Header, Ledger, Reports
from cyber0.ledger.rates import AgreedRates, scalar_fault, scalar_limit
from cyber0.model.vector import Parameters
from cyber0.protocol.client import replay
from cyber0.protocol.decider import Expulsion
from cyber0.storage import CONFIG, LEDGER, REPORTS, STATE, WEIGHTS
from cyber0.tasks import own_task, starting_model


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

    `model` is where the language model is that the run started from, if not where the ledger says. `task` is where the
    user's own task is, needed if the folder has no w0: a ledger never makes anybody import code.
    """
    ledger = open_ledger(folder)
    if stop is not None and not 0 <= stop <= len(ledger):
        raise LedgerError(f"there is no round {stop}: the ledger has {len(ledger)} rounds; use 0 to {len(ledger)}")
    header = ledger.header
    start = _starting_model(folder, header, device, model, task)
    parameters = Parameters(start, header.distribution, rank=header.rank)
    if parameters.layout != ledger.header.layout:
        raise LedgerError("the starting weights have other names, shapes or types than the ledger's layout")
    replay(ledger.header, parameters, ledger.records(0, stop))
    return ledger, parameters


def _starting_model(folder: Path, header: Header, device: str, given: str, own: str) -> torch.nn.Module:
    """Return a model at w0: the stored weights; without them, as after a deployment, one built from the header."""
    task = task_of(header, given)
    if task is not None and own:
        task = own_task(task, own)
    stored = (folder / WEIGHTS).exists()
    if task is None or (stored and not task.trains_language_model):
        return _Weights(header, load_weights(folder / WEIGHTS)).to(device)
    if task.weights and not stored:
        raise DataError(
            f"there is no {folder / WEIGHTS}: the run started from the weights of a file (task.weights); copy that "
            "file there"
        )
    own_task(task, own)
    try:
        with doors.offline(doors.DATA, *(() if given else (doors.MODEL,))):
            model = starting_model(
                replace(task, weights=os.path.abspath(folder / WEIGHTS) if stored else ""), header.seed, device
            )
    except ModelMissingError as error:
        raise error.by_option(f"the model that the run started from, {task.model!r},") from error
    made = Parameters(model, header.distribution, rank=header.rank)
    if task.model and made.rest_digest() != header.rest_digest:
        raise LedgerError(f"task.model = {task.model!r} is not the model of this run: its frozen weights differ")
    if not task.model and made.digest() != header.weights_digest:
        raise DataError(
            f"there is no {folder / WEIGHTS}: the starting weights of the run are needed, and the task that its header "
            "names starts from others"
        )
    return model


def task_of(header: Header, model: str) -> TaskConfig | None:
    """Return the task that a ledger names, if any, with the language model at the given path."""
    task = settings_in(header).task if "task" in header.config else None
    if model and (task is None or not task.model):
        raise ConfigError(f"--model {model} is for runs of a language model, and this is none: leave --model out")
    return replace(task, model=model) if task is not None and model else task


def settings_in(header: Header) -> Config:
    """Return the settings in a ledger's header.

    Raises:
        LedgerError: this version does not know one of them, which is named.
    """
    try:
        return Config.recorded(header.config)
    except ConfigError as error:
        raise LedgerError(
            f"the settings in the ledger's header are not those of this version of cyber0: {error}. A newer version "
            "may have written it: use that one"
        ) from error


class Redecided(NamedTuple):
    """What was found when a run's rounds were decided again."""

    rounds: int
    expulsions: list[Expulsion]


def check_decisions(folder: Path, ledger: Ledger, rule_path: str = "") -> Redecided:
    """Decide every round again from the stored reports; return how many rounds that were, and who was expelled.

    `rule_path` is where the rule is, if it is not built in: the header names it, but never makes anybody import code.
    """
    path = folder / REPORTS
    if not path.exists():
        if settings_in(ledger.header).stores_reports:
            raise LedgerError(
                f"{path} is missing, though the run stored its reports: rounds 0 to {len(ledger) - 1} can't be "
                "checked; restore it from a copy"
            )
        raise LedgerError(f"{folder} has no {REPORTS}: set serve.keep_reports = true before a run to store its reports")
    config = settings_in(ledger.header)
    reports = Reports(path, ledger.header.scalars)
    decider = make_decider(ledger.header, config, _rule(config, rule_path))
    stored = iter(reports)
    for record in ledger:
        number, rows = next(stored, (None, None))
        if number != record.round or rows is None or len(rows) != record.reported.sum():
            if reports.fault is not None:
                raise reports.damage("this round can't be decided again")
            until = len(ledger) if number is None else max(number, record.round + 1)
            raise LedgerError(
                f"{path} does not hold the reports of round {record.round} that the ledger has: rounds "
                f"{record.round} to {until - 1} can't be checked"
            )
        clients = np.flatnonzero(record.reported)
        if len(uninvited := np.setdiff1d(clients, decider.invited(record.round))):
            raise LedgerError(
                f"client {uninvited[0]} reported in round {record.round} of the ledger, to which it was not invited"
                + "".join(f": {one.text}" for one in decider.expulsions if one.client == uninvited[0])
            )
        values, excluded = decider.decide(record.round, rows, clients)
        same = (values is None) == (record.values is None) and (
            values is None or record.values is None or values.tobytes() == record.values.tobytes()
        )
        if not same or not np.array_equal(record.trimmed[record.reported], excluded):
            raise LedgerError(f"the reports of round {record.round} give another decision than the ledger has")
        decider.learn(record, rows)
    return Redecided(len(ledger), decider.expulsions)


def check_conduct(ledger: Ledger, schedule: str = "") -> AgreedRates:
    """Refuse a ledger whose federator did not keep to what was agreed on; return what the learning rates should be.

    `schedule` is where the run's schedule is, if it is not built in.

    Raises:
        LedgerError: a round has another learning rate, or a scalar beyond the limit of a served run.
    """
    rates, limit = AgreedRates(ledger.header, schedule), scalar_limit(ledger.header)
    for record in ledger:
        if fault := rates.fault(record) or scalar_fault(record, limit):
            raise LedgerError(f"the federator broke the agreement in round {record.round}: {fault}")
    return rates


def _rule(config: Config, path: str) -> Rule:
    """Return the rule of a recorded config; one that is not built in is imported only from the given path."""
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


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file."""
    if not path.exists():
        raise DataError(f"there is no {path}: the starting weights of the run are needed")
    try:
        return load_file(path)
    except Exception as error:  # safetensors' own error type is not public in every version
        raise DataError(f"{path} can't be read as safetensors: {error}") from error


class _Weights(torch.nn.Module):
    """A module that is nothing but its weights, under the names of a ledger's layout.

    Names may be any strings, also ones that no module can have, so the module itself stores its weights by index.
    """

    def __init__(self, header: Header, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for entry in header.layout:
            if entry.name not in tensors:
                raise LedgerError(f"the starting weights lack {entry.name!r}, which the ledger's layout has")
            tensor = tensors[entry.name]
            if (tuple(tensor.shape), STORAGE_OF.get(tensor.dtype)) != (entry.shape, entry.dtype):
                raise LedgerError(
                    "the starting weights have other names, shapes or types than the ledger's layout: "
                    f"{entry.name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {entry.dtype} of "
                    f"{entry.shape}"
                )
        self._of_layout = [entry.name for entry in header.layout]
        self._weights = torch.nn.ParameterList(tensors[name] for name in self._of_layout)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return zip(self._of_layout, self._weights, strict=True)
