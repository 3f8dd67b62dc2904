"""The model of a run's folder in use: `cyber0 evaluate` and `cyber0 predict`.

    evaluate(Path("runs/one"))["accuracy"]
    predict(Path("runs/one"), "digit.png")[0]["class"]

The weights are those of w0 plus the ledger or, where replaying it takes long, those that the run left at its end, if
they are what its summary claims; `weights_from` says which. `cyber0 verify` is the full check. The task is
the one that the folder's config names: a task of the user's own is imported if it is the file that the run began with.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cyber0.config import doors
from cyber0.config.choices import DATASETS, TEXT_TASKS
from cyber0.config.schema import Config, load, overridden
from cyber0.directions.backends import check_device
from cyber0.errors import ConfigError, DataError, LedgerError, ModelError, ModelMissingError
from cyber0.estimate.torch_threads import evaluating
from cyber0.federation.methods import checkpoint
from cyber0.federation.simulation import learned_from
from cyber0.federation.user_code import refuse_unknown
from cyber0.ledger import Ledger, read_opening
from cyber0.model.vector import Parameters
from cyber0.protocol.client import replay
from cyber0.runs.run import finite, model_path, read_summary
from cyber0.storage import CONFIG, LEDGER, MODEL, STATE, SUMMARY, WEIGHTS
from cyber0.tasks import AnyTask, Task, make, mnist, own, own_task
from cyber0.tasks.own import Columns, OwnTask, adopted
from cyber0.tasks.starting import load_into

REPLAYED_COORDINATES = 1 << 31  # of directions: what a processor draws in a few seconds
ADAPTER = "adapter_model.safetensors"  # what PEFT calls the weights of an adapter


@dataclass(frozen=True)
class Options:
    """Which model of a run is meant, and with which task; what is left empty is as in the run."""

    round: int | None = None
    """After how many rounds; None: all that there are."""
    device: str = ""
    model: str = ""
    """Where the language model is that the run began with."""
    task: str = ""
    """Where the task of somebody's own is: file.py:Name."""
    overrides: Sequence[str] = ()
    """Settings of the task to replace, such as task.options.size=3."""
    given: AnyTask | None = None
    """The task itself, if it was given in Python."""


@dataclass(frozen=True)
class Trained:
    """A task and the weights that were trained for it."""

    config: Config
    task: Task
    parameters: Parameters
    round: int
    weights_from: str
    """"replay": w0 and the ledger; "export": what the run left, as its summary claims; "checkpoint": its state."""


def evaluate(folder: Path, data: str = "", options: Options | None = None) -> dict[str, Any]:
    """Return loss, accuracy and the task's metrics on the set that the run is evaluated on, or on other data.

    Args:
        folder: The run's.
        data: For MNIST a folder of idx files; for text tasks a file of labelled sentences, or a folder with test or
            dev files; for a task of the user's own the option `data` of its constructor. Empty: the run's own.
        options: Which model.
    """
    trained = _load(folder, options or Options(), lambda config: _evaluated_task(config, data, options))
    task, model = trained.task, trained.parameters.model

    def measure() -> dict[str, Any]:
        loss, accuracy, *rest = task.evaluate(model)
        metrics = dict(rest[0]) if rest else {}
        more = task.evaluate_more(model, loss, accuracy) if hasattr(task, "evaluate_more") else {}
        return {"loss": loss, "accuracy": accuracy, **more, "metrics": metrics}

    with evaluating(trained.parameters):
        found = _called(task, measure)
    figures = {name: finite(value) for name, value in found.items() if name != "metrics"}
    return {
        "round": trained.round,
        "evaluated_on": str(getattr(task, "evaluated_on", "test")),
        "samples": len(task.test_targets),
        **figures,
        "metrics": {name: finite(value) for name, value in found["metrics"].items()},
        "model_digest": trained.parameters.digest(),
        "weights_from": trained.weights_from,
    }


def predict(folder: Path, source: str, options: Options | None = None) -> list[dict[str, Any]]:
    """Return what the model makes of inputs: class and probabilities where there are classes, else the outputs.

    Args:
        folder: The run's.
        source: For MNIST a picture, an idx file or an array (.npy); for text tasks a sentence, a file of lines or -
            for the standard input; for a task of the user's own a file .npy, .npz, .csv or .safetensors of inputs.
        options: Which model.
    """
    read: list[Any] = []

    def make_task(config: Config) -> Task:
        """Read the inputs too: what is wrong with them is said before any weights are computed."""
        task = _asked_task(config, options)
        read.append(_inputs(task, source))
        return task

    trained = _load(folder, options or Options(), make_task)
    (inputs, shown), task = read[0], trained.task
    with evaluating(trained.parameters), torch.no_grad():
        outputs = _outputs(trained, inputs.to(trained.parameters.device), source)
    names = getattr(task, "label_names", None)
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1 and _has_classes(task):
        rows = [_class(row, names) for row in outputs.float().softmax(1).cpu()]
    else:
        rows = [{"outputs": row} for row in _rows(outputs, len(inputs))]
    return [{"input": shown[i] if shown else i, **row} for i, row in enumerate(rows)]


# The task.


def _settings(folder: Path, options: Options) -> Config:
    """Return the settings of a run, with its task as it was asked for."""
    if not any((folder / name).exists() for name in (LEDGER, STATE)):
        raise ConfigError(f"{folder} holds no run: it has no {LEDGER} and no {STATE}")
    if (folder / CONFIG).exists():
        config = load(folder / CONFIG)
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
    if options.overrides:
        config = config.with_overrides(options.overrides)
    if options.task:
        config = replace(config, task=own_task(config.task, options.task))
    if options.model and config.task.name not in TEXT_TASKS:
        raise ConfigError(f"--model {options.model} is for runs of a language model, and this is none: leave it out")
    task = replace(config.task, model=options.model or config.task.model)
    return replace(config, task=task, device=options.device or config.device)


def _header(folder: Path) -> Mapping[str, Any] | None:
    """Return the settings in the header of a run's ledger, if it has one."""
    if not (folder / LEDGER).exists():
        return None
    with (folder / LEDGER).open("rb") as file:
        return read_opening(file, folder / LEDGER)[0].config


def _evaluated_task(config: Config, data: str, options: Options | None) -> Task:
    given = adopted(config, options.given if options else None, resumed=True)[1]
    name = config.task.name
    if not data:
        task = given or make(config.task)
        return learned_from(task, config) if getattr(task, "evaluated_on", "test") == "train" else task
    path = Path(data).expanduser()
    if given is not None:
        raise ConfigError(f"data = {data!r} can't change a task that was given; give one that has the data")
    if doors.is_own(name):
        return make(replace(config.task, options={**config.task.options, "data": data}))
    if name in TEXT_TASKS:
        from cyber0.tasks.text.task import Text

        return Text(config.task, splits={}).on_other(path)
    if name not in DATASETS:
        raise ConfigError(f"--data {data}: task.name = {name!r} draws its own samples; leave --data out")
    if not path.is_dir():
        raise ConfigError(f"--data {data} is not a folder; give one with {' and '.join(mnist.IDX_FILES[2:])}")
    return mnist.Mnist(arrays=mnist.load_test(path))


def _asked_task(config: Config, options: Options | None) -> Task:
    """Return a task that is only asked for outputs, so that it needs no samples."""
    given = adopted(config, options.given if options else None, resumed=True)[1]
    if given is not None or doors.is_own(config.task.name):
        return given or make(config.task)
    if config.task.name in TEXT_TASKS:
        from cyber0.tasks.text.task import Text

        return Text(config.task, splits={})
    if config.task.name not in DATASETS:
        raise ConfigError(f"task.name = {config.task.name!r} is a synthetic problem, whose model predicts nothing")
    return mnist.Mnist(arrays=mnist.no_samples())


def _has_classes(task: Task) -> bool:
    return task.predicts_classes if isinstance(task, OwnTask) else True


# The weights.


def _load(folder: Path, options: Options, make_task: Callable[[Config], Task]) -> Trained:
    config = _settings(folder, options)
    check_device(config.device)
    try:
        task = make_task(config).to(config.device)
        parameters, reached, source = _weights(folder, config, task, options.round)
    except ModelMissingError as error:
        raise error.by_option(f"the model that the run began with, {config.task.model!r},") from error
    return Trained(config, task, parameters, reached, source)


def _weights(folder: Path, config: Config, task: Task, round: int | None) -> tuple[Parameters, int, str]:
    """Return the weights after so many rounds, how many rounds that are, and where they are from.

    What a run left at its end is vouched for by its summary alone, so it is compared with w0 and the ledger where
    replaying takes a few seconds at most.
    """
    if (folder / STATE).exists():
        return *_from_state(folder, config, task, round), "checkpoint"
    with Ledger.open(folder / LEDGER) as ledger:
        last = len(ledger)
        if round is not None and not 0 <= round <= last:
            raise LedgerError(f"round {round} was asked for, but the ledger has {last} rounds: use 0 to {last}")
        reached = last if round is None else round
        header = ledger.header
        exported = _exported(folder, config, task, ledger) if reached == last else None
        if exported is not None and header.dimension * header.numbers * last > REPLAYED_COORDINATES:
            return exported, reached, "export"
        claimed = None if exported is None else exported.digest()
        del exported  # two models may be too much for the memory
        found = Parameters(_start(folder, config, task), header.distribution)
        _check_rest(found, header.rest_digest, folder)
        replay(header, found, ledger.records(0, reached))
    if claimed not in (None, found.digest()):
        warnings.warn(f"{model_path(config, folder)} and {SUMMARY} claim another model than w0 and the ledger give; w0 "
                      "and the ledger are used instead", RuntimeWarning, stacklevel=2)  # fmt: skip
    return found, reached, "replay"


def _start(folder: Path, config: Config, task: Task) -> torch.nn.Module:
    """Return the model at w0."""
    model = task.model(config.seed, config.task.dtype)
    if (folder / WEIGHTS).exists():
        load_into(model, folder / WEIGHTS, str(folder / WEIGHTS))
    return model.to(config.device)


def _exported(folder: Path, config: Config, task: Task, ledger: Ledger) -> Parameters | None:
    """Return the weights that the run left at its end, if it has come to it and they are what its summary claims.

    Replaying is exact too, but of a large model and many rounds it takes a while.
    """
    path, summary, header = model_path(config, folder), read_summary(folder) or {}, ledger.header
    file = path if path.name == MODEL else next((f for n in (MODEL, ADAPTER) if (f := path / n).exists()), path / MODEL)
    if not file.is_file() or summary.get("rounds") != len(ledger):
        return None
    if summary.get("chain", chain := ledger.chain.hex()) != chain:  # earlier versions did not state it
        warnings.warn(f"{folder / SUMMARY} is of another ledger; w0 and the ledger are used instead", RuntimeWarning,
                      stacklevel=2)  # fmt: skip
        return None
    model = _start(folder, config, task)
    try:
        load_into(model, file, str(file))
    except (DataError, ModelError) as error:
        fault = str(error)
    else:
        found = Parameters(model, header.distribution)
        same = found.digest() == summary.get("model_digest") and found.rest_digest() == header.rest_digest
        if same:
            return found
        fault = f"{file} is not the model that {SUMMARY} claims"
    warnings.warn(f"{fault}; w0 and the ledger are used instead", RuntimeWarning, stacklevel=2)
    return None


def _from_state(folder: Path, config: Config, task: Task, round: int | None) -> tuple[Parameters, int]:
    """Return the weights that a method without a ledger has kept."""
    tensors, progress = checkpoint.read(folder / STATE)
    if round not in (None, progress.round):
        raise LedgerError(f"round {round} was asked for, but {config.method.name} keeps no ledger: {folder / STATE} "
                          f"has the weights after round {progress.round} alone")  # fmt: skip
    found = Parameters(_start(folder, config, task), config.method.distribution)
    _check_rest(found, progress.rest_digest, folder)
    if found.digest() != progress.weights_digest:
        raise LedgerError(f"{folder / STATE} belongs to a run that began with other weights than this task does")
    w = torch.cat([tensors[entry.name].reshape(-1) for entry in found.layout])
    found.set_vector(w.to(found.device))
    return found, progress.round


def _check_rest(parameters: Parameters, digest: str, folder: Path) -> None:
    if parameters.rest_digest() != digest:
        raise ModelError(
            f"the model's frozen weights or buffers are not those of the run in {folder}; use the task, or the "
            "language model, as it was when the run began"
        )


# Inputs and outputs.


def _inputs(task: Task, source: str) -> tuple[Any, list[str]]:
    """Return inputs as the task stores them, and how they are shown if not by their numbers."""
    if task.name in TEXT_TASKS:
        return _text_inputs(task, source)
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataError(f"{source}: there is no such file of inputs")
    if isinstance(task, OwnTask):
        return own.read_inputs(path), []
    return torch.from_numpy(mnist.read_images(path)), []


def _text_inputs(task: Any, source: str) -> tuple[Any, list[str]]:
    import numpy as np

    from cyber0.tasks.text import sentences

    fields = task.template.fields
    if source == "-":
        texts = [sentences.texts_of(line.rstrip("\r\n"), fields) for line in sys.stdin if line.strip()]
        if not texts:
            raise DataError("the standard input holds no line of text")
    elif _is_file(source):
        texts = sentences.read_unlabelled(Path(source).expanduser(), fields)
    elif source.endswith((".txt", ".tsv", ".jsonl", ".gz")) and not any(map(str.isspace, source)):
        raise DataError(f"{source}: there is no such file of sentences")
    elif not source.strip():
        raise DataError("the sentence is empty; give a sentence, a file of lines, or - for the standard input")
    else:
        texts = [sentences.texts_of(source, fields)]
    tokens = task.tokenise(sentences.Sentences(texts, np.zeros(len(texts), np.int64)))
    return tokens, [" / ".join(text.values()) for text in texts]


def _is_file(source: str) -> bool:
    try:
        return Path(source).expanduser().is_file()
    except (OSError, RuntimeError):  # a long sentence is no name of a file
        return False


def _outputs(trained: Trained, inputs: Any, source: str) -> Any:
    task, model = trained.task, trained.parameters.model
    if not isinstance(task, OwnTask):
        return task.outputs(model, inputs)
    tensors = inputs.tensors if isinstance(inputs, Columns) else {"inputs": inputs}
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    where = f"{task.name}: the model, given {shapes} of {source} (one row a sample),"
    try:
        return doors.called(where, lambda: task.all_outputs(model, inputs), ModelError)
    except ModelError as error:
        whole = [f"{name} {tensor.dtype}".replace("torch.", "") for name, tensor in tensors.items()
                 if not (tensor.is_floating_point() or tensor.is_complex())]  # fmt: skip
        if not whole:
            raise
        raise ModelError(f"{error}. These are whole numbers: {', '.join(whole)}; where the model takes fractions, "
                         "write them as float32") from error  # fmt: skip


def _called(task: Task, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call a task; what one of the user's own raises becomes one line."""
    return doors.called(task.name, measure, ModelError) if isinstance(task, OwnTask) else measure()


def _class(probabilities: torch.Tensor, names: Sequence[str] | None) -> dict[str, Any]:
    best = int(probabilities.argmax())
    return {
        "class": names[best] if names else best,
        "probability": float(probabilities[best]),
        "probabilities": probabilities.tolist(),
    }


def _rows(outputs: Any, count: int) -> list[Any]:
    """Return outputs as plain values, one a sample."""
    if isinstance(outputs, Mapping):
        columns = {str(name): _rows(value, count) for name, value in outputs.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]
    if isinstance(outputs, list | tuple):
        parts = [_rows(value, count) for value in outputs]
        return [[part[i] for part in parts] for i in range(count)]
    tensor = torch.as_tensor(outputs)
    if tensor.dim() == 0 or len(tensor) != count:
        raise ModelError(f"the outputs have shape {tuple(tensor.shape)} for {count} inputs; let outputs() return one "
                         "row a sample")  # fmt: skip
    rows: list[Any] = tensor.cpu().tolist()
    return rows
