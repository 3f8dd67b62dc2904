"""The trained model of a run's folder, with its task.

The weights come from w0 and the ledger. Where replaying takes long, those that the run exported at its end are used, if
they are what its summary claims; `Trained.weights_from` says which. `cyber0 verify` is the full check. The task is the
one that the folder's config names: a user's own is imported only if it is the file that the run started with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cyber0.config.choices import TEXT_TASKS
from cyber0.config.files import load
from cyber0.config.overrides import overridden
from cyber0.config.schema import Config
from cyber0.directions.backends import check_device
from cyber0.errors import ConfigError, DataError, LedgerError, ModelError, ModelMissingError
from cyber0.federation.methods import checkpoint
from cyber0.federation.user_code import refuse_unknown
from cyber0.ledger import Ledger, read_opening
from cyber0.model.vector import Parameters
from cyber0.protocol.client import replay
from cyber0.runs.export import model_path
from cyber0.runs.folder import read_summary
from cyber0.storage import CONFIG, LEDGER, MODEL, STATE, SUMMARY, WEIGHTS
from cyber0.tasks import AnyTask, EngineTask, own_task
from cyber0.tasks.starting import load_into

REPLAYED_COORDINATES = 1 << 31  # of directions: what a processor draws in a few seconds
ADAPTER = "adapter_model.safetensors"  # what PEFT calls the weights of an adapter


@dataclass(frozen=True)
class InferenceOptions:
    """Which model of a run to use, and with which task; empty fields mean as in the run."""

    round: int | None = None
    """After how many rounds; None: all of them."""
    device: str = ""
    model: str = ""
    """Where the language model is that the run started from."""
    task: str = ""
    """Where the user's own task is: file.py:Name."""
    overrides: Sequence[str] = ()
    """Settings of the task to replace, such as task.options.size=3."""
    given: AnyTask | None = None
    """The task itself, if it was given in Python."""


@dataclass(frozen=True)
class Trained:
    """A task and the weights that were trained for it."""

    config: Config
    task: EngineTask
    parameters: Parameters
    round: int
    weights_from: str
    """"replay": w0 and the ledger; "export": the exported model, as the summary claims; "checkpoint": its state."""


def load_trained(folder: Path, options: InferenceOptions, make_task: Callable[[Config], EngineTask]) -> Trained:
    config = _settings(folder, options)
    check_device(config.device)
    try:
        task = make_task(config).to(config.device)
        parameters, reached, source = _weights(folder, config, task, options.round)
    except ModelMissingError as error:
        raise error.by_option(f"the model that the run started from, {config.task.model!r},") from error
    return Trained(config, task, parameters, reached, source)


def _weights(folder: Path, config: Config, task: EngineTask, round: int | None) -> tuple[Parameters, int, str]:
    """Return the weights after some round, that round, and where they come from.

    Only the summary vouches for an exported model, so it is compared with w0 and the ledger where replaying takes a
    few seconds at most.
    """
    if (folder / STATE).exists():
        return *_from_state(folder, config, task, round), "checkpoint"
    with Ledger.open(folder / LEDGER) as ledger:
        last = len(ledger)
        if round is not None and not 0 <= round <= last:
            raise LedgerError(f"there is no round {round}: the ledger has {last} rounds; use 0 to {last}")
        reached = last if round is None else round
        header = ledger.header
        exported = _exported(folder, config, task, ledger) if reached == last else None
        if exported is not None and header.dimension * header.scalars * last > REPLAYED_COORDINATES:
            return exported, reached, "export"
        claimed = None if exported is None else exported.digest()
        del exported  # two models may not fit into memory
        found = Parameters(_start(folder, config, task), header.distribution, rank=header.rank)
        _check_rest(found, header.rest_digest, folder)
        replay(header, found, ledger.records(0, reached))
    if claimed not in (None, found.digest()):
        warnings.warn(f"{model_path(config, folder)} and {SUMMARY} claim another model than w0 and the ledger give; w0 "
                      "and the ledger are used instead", RuntimeWarning, stacklevel=2)  # fmt: skip
    return found, reached, "replay"


def _start(folder: Path, config: Config, task: EngineTask) -> torch.nn.Module:
    """Return the model at w0."""
    model = task.model(config.seed, config.task.dtype)
    if (folder / WEIGHTS).exists():
        load_into(model, folder / WEIGHTS, str(folder / WEIGHTS))
    return model.to(config.device)


def _exported(folder: Path, config: Config, task: EngineTask, ledger: Ledger) -> Parameters | None:
    """Return the weights that a finished run exported, if they are what its summary claims.

    Replaying is exact too, but takes a while for a large model and many rounds.
    """
    path, summary, header = model_path(config, folder), read_summary(folder) or {}, ledger.header
    file = path if path.name == MODEL else next((f for n in (MODEL, ADAPTER) if (f := path / n).exists()), path / MODEL)
    if not file.is_file() or summary.get("rounds") != len(ledger):
        return None
    if summary.get("chain", chain := ledger.chain.hex()) != chain:  # earlier versions did not record it
        warnings.warn(f"{folder / SUMMARY} is of another ledger; w0 and the ledger are used instead", RuntimeWarning,
                      stacklevel=2)  # fmt: skip
        return None
    model = _start(folder, config, task)
    try:
        load_into(model, file, str(file))
    except (DataError, ModelError) as error:
        fault = str(error)
    else:
        found = Parameters(model, header.distribution, rank=header.rank)
        same = found.digest() == summary.get("model_digest") and found.rest_digest() == header.rest_digest
        if same:
            return found
        fault = f"{file} is not the model that {SUMMARY} claims"
    warnings.warn(f"{fault}; w0 and the ledger are used instead", RuntimeWarning, stacklevel=2)
    return None


def _from_state(folder: Path, config: Config, task: EngineTask, round: int | None) -> tuple[Parameters, int]:
    """Return the weights in the checkpoint of a method without a ledger."""
    tensors, progress = checkpoint.read(folder / STATE)
    if round not in (None, progress.round):
        raise LedgerError(f"there is no round {round}: {config.method.name} has no ledger, and {folder / STATE} "
                          f"has the weights after round {progress.round} alone")  # fmt: skip
    found = Parameters(_start(folder, config, task), config.method.distribution, rank=config.method.rank)
    _check_rest(found, progress.rest_digest, folder)
    if found.digest() != progress.weights_digest:
        raise LedgerError(f"{folder / STATE} belongs to a run that started from other weights than this task does")
    w = torch.cat([tensors[entry.name].reshape(-1) for entry in found.layout])
    found.set_vector(w.to(found.device))
    return found, progress.round


def _check_rest(parameters: Parameters, digest: str, folder: Path) -> None:
    if parameters.rest_digest() != digest:
        raise ModelError(
            f"the model's frozen weights or buffers are not those of the run in {folder}; use the task, or the "
            "language model, as it was when the run started"
        )


def _settings(folder: Path, options: InferenceOptions) -> Config:
    """Return the settings of a run, with the task that the options name."""
    if not any((folder / name).exists() for name in (LEDGER, STATE)):
        raise ConfigError(f"{folder} holds no run: it has no {LEDGER} and no {STATE}")
    if (folder / CONFIG).exists():
        config = load(folder / CONFIG)
        _check_layer(folder, config)
        if options.given is None and not options.task and "task.name" not in overridden(options.overrides):
            refuse_unknown(config, folder, _header(folder), ("task.name",), "--task FILE.py:NAME")
    else:  # nothing is imported because a header says so
        with Ledger.open(folder / LEDGER) as ledger:
            config = Config.recorded(ledger.header.config)
        if options.given is None:
            config = replace(config, task=own_task(config.task, options.task))
    for override in options.overrides:
        if not override.strip().startswith("task."):
            raise ConfigError(f"--set {override} can't change what was trained; only settings of the task can be set")
        if config.task.adapter in ("head", "top") and override.partition("=")[0].strip() == "task.layer":
            raise ConfigError(
                f"--set {override} can't be used here: what was trained takes the hidden states after layer "
                f"{config.task.layer} (0: two thirds of the way up) and no others; leave it out"
            )
    if options.overrides:
        config = config.with_overrides(options.overrides)
    if options.task:
        config = replace(config, task=own_task(config.task, options.task))
    if options.model and config.task.name not in TEXT_TASKS:
        raise ConfigError(f"--model {options.model} is for runs of a language model, and this is none: leave it out")
    task = replace(config.task, model=options.model or config.task.model)
    return replace(config, task=task, device=options.device or config.device)


def _check_layer(folder: Path, config: Config) -> None:
    """Refuse another layer than the one whose hidden states were trained on: predictions would be wrong, unnoticed."""
    if config.task.adapter not in ("head", "top"):
        return
    recorded = ((_header(folder) or {}).get("task") or {}).get("layer", 0)
    if recorded != config.task.layer:
        raise LedgerError(
            f"{folder / CONFIG} says task.layer = {config.task.layer}, and the run was trained with {recorded}; "
            f"restore it (`cyber0 repair {folder}` writes {CONFIG} from the ledger)"
        )


def _header(folder: Path) -> Mapping[str, Any] | None:
    """Return the settings in the header of a run's ledger, if it has one."""
    if not (folder / LEDGER).exists():
        return None
    with (folder / LEDGER).open("rb") as file:
        return read_opening(file, folder / LEDGER)[0].config
