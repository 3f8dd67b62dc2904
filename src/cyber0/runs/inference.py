"""Using the model of a run's folder: `cyber0 evaluate` and `cyber0 predict`.

    evaluate(Path("runs/one"))["accuracy"]
    predict(Path("runs/one"), "digit.png")[0]["class"]

trained.py says where the weights come from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cyber0.config import doors
from cyber0.config.choices import DATASETS, TEXT_TASKS
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, DataError, ModelError
from cyber0.estimate.torch_threads import evaluating
from cyber0.federation.population import learned_from
from cyber0.runs.trained import InferenceOptions, Trained, load_trained
from cyber0.tasks import EngineTask, make, mnist
from cyber0.tasks.construct import adopted
from cyber0.tasks.metrics import finite
from cyber0.tasks.own import OwnTask
from cyber0.tasks.samples import Columns, read_inputs


def evaluate(folder: Path, data: str = "", options: InferenceOptions | None = None) -> dict[str, Any]:
    """Return loss, accuracy and the task's metrics on the set that the run is evaluated on, or on other data.

    Args:
        folder: The run's.
        data: For MNIST a folder of idx files; for text tasks a file of labelled sentences, or a folder with test or
            dev files; for a user's own task the option `data` of its constructor. Empty: the run's own.
        options: Which model.
    """
    trained = load_trained(folder, options or InferenceOptions(), lambda config: _evaluated_task(config, data, options))
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


def predict(folder: Path, source: str, options: InferenceOptions | None = None) -> list[dict[str, Any]]:
    """Return the model's predictions: class and probabilities where there are classes, else the outputs.

    Args:
        folder: The run's.
        source: For MNIST a picture, an idx file or an array (.npy); for text tasks a sentence, a file of lines or -
            for the standard input; for a user's own task a file .npy, .npz, .csv or .safetensors of inputs.
        options: Which model.
    """
    read: list[Any] = []

    def make_task(config: Config) -> EngineTask:
        """Read the inputs too: what is wrong with them is reported before any weights are computed."""
        task = _task_without_data(config, options).to(config.device)  # where a head's language model reads them
        read.append(_inputs(task, source))
        return task

    trained = load_trained(folder, options or InferenceOptions(), make_task)
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


def _evaluated_task(config: Config, data: str, options: InferenceOptions | None) -> EngineTask:
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
        from cyber0.tasks import text

        return text.make(config.task, splits={}).on_other(path)
    if name not in DATASETS:
        raise ConfigError(f"--data {data}: task.name = {name!r} draws its own samples; leave --data out")
    if not path.is_dir():
        raise ConfigError(f"--data {data} is not a folder; give one with {' and '.join(mnist.IDX_FILES[2:])}")
    return mnist.Mnist(arrays=mnist.load_test(path))


def _task_without_data(config: Config, options: InferenceOptions | None) -> EngineTask:
    """Return a task that only computes outputs, so that it needs no samples."""
    given = adopted(config, options.given if options else None, resumed=True)[1]
    if given is not None or doors.is_own(config.task.name):
        return given or make(config.task)
    if config.task.name in TEXT_TASKS:
        from cyber0.tasks import text

        return text.make(config.task, splits={})
    if config.task.name not in DATASETS:
        raise ConfigError(f"task.name = {config.task.name!r} is a synthetic problem, whose model predicts nothing")
    return mnist.Mnist(arrays=mnist.no_samples())


def _has_classes(task: EngineTask) -> bool:
    return task.predicts_classes if isinstance(task, OwnTask) else True


# The weights.


# Inputs and outputs.


def _inputs(task: EngineTask, source: str) -> tuple[Any, list[str]]:
    """Return inputs as the task stores them, and their texts; none where inputs are shown by their index."""
    if task.name in TEXT_TASKS:
        return _text_inputs(task, source)
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataError(f"{source}: there is no such file of inputs")
    if isinstance(task, OwnTask):
        return read_inputs(path), []
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
    except (OSError, RuntimeError):  # a long sentence is not the name of a file
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


def _called(task: EngineTask, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call a task; an exception in a user's own becomes an error of one line."""
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
