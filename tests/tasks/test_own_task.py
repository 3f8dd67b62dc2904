"""One's own model and data: `cyber0.Task`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_tasks import Codes, Line, Pictures, blobs
from synthetic import one_thread  # noqa: F401
from torch import nn

import cyber0
from cyber0.config.choices import ESTIMATORS, PROBING_ESTIMATORS
from cyber0.config.files import load
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, Cyber0Error, DataError, ModelError
from cyber0.federation import methods
from cyber0.protocol.messages import Announcement
from cyber0.serve.join import JoinOptions, make_participant
from cyber0.tasks import own

HERE = Path(__file__).parents[1]
SMALL = ("federation.clients=8", "federation.byzantine=2", "rounds=6", "method.k=8", "method.batch_size=8",
         "evaluate_every=2")  # fmt: skip


def small(*overrides: str) -> Config:
    return load(None, [*SMALL, *overrides])


def finished(task: Any, *overrides: str) -> Any:
    federation = methods.make(small(*overrides), task=task)
    while federation.round < federation.config.rounds:
        federation.run_round()
    return federation


@pytest.mark.slow
def test_a_network_of_ones_own_learns_in_a_simulation() -> None:
    simulation = cyber0.Simulation(small("rounds=60", "method.lr=0.05", "method.k=32"), task=Pictures())
    before = simulation.evaluate()
    while simulation.round < 60:
        simulation.run_round()
    after = simulation.evaluate()
    assert after.loss < 0.8 * before.loss and after.accuracy > before.accuracy
    assert simulation.evaluated_on == "test"


def test_the_header_names_the_task_and_not_the_default() -> None:
    simulation = cyber0.Simulation(small(), task=Pictures())
    assert simulation.ledger.header.config["task"]["name"] == "own_tasks:Pictures"
    given = cyber0.Simulation(
        small(), task=cyber0.Task.of(nn.Linear(16, 4), (blobs(64, 1)[0].flatten(1), blobs(64, 1)[1]))
    )
    assert given.ledger.header.config["task"]["name"] == "own"


@pytest.mark.parametrize("method", ["cyber0", "fedavg", "trimmed_mean", "krum", "fedzo", "mezo"])
def test_a_task_of_ones_own_is_trained_by_every_method(method: str) -> None:
    more = ["federation.byzantine=0"] if method == "mezo" else []
    federation = finished(Pictures(), f"method.name={method}", "rounds=2", *more)
    assert np.isfinite(federation.evaluate().loss)


def test_the_models_start_follows_from_the_runs_seed_and_no_generator_is_moved() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one, again, other = (cyber0.Simulation(small(f"seed={seed}"), task=Pictures()).parameters for seed in (1, 1, 2))
    assert one.digest() == again.digest() != other.digest()
    assert one.rest_digest() == again.rest_digest()
    assert torch.equal(torch.get_rng_state(), state)


def test_data_that_is_split_at_random_is_split_the_same_way_each_time() -> None:
    class Split(Pictures):
        def train_data(self) -> object:
            inputs, targets = blobs(200, 2)
            chosen = torch.randperm(200)[:100]
            return inputs[chosen], targets[chosen]

    torch.manual_seed(1)
    one = own.OwnTask(Split(), "split").train_inputs
    torch.manual_seed(2)
    assert torch.equal(own.OwnTask(Split(), "split").train_inputs, one)


@pytest.mark.parametrize("estimator", PROBING_ESTIMATORS)
def test_a_loss_in_numpy_that_has_no_gradient_is_minimised(estimator: str) -> None:
    settings = small("rounds=80", "method.lr=0.1", f"method.estimator={estimator}")
    simulation = cyber0.Simulation(settings, task=Line())
    before = simulation.evaluate()
    while simulation.round < 80:
        simulation.run_round()
    after = simulation.evaluate()
    assert after.loss < 0.5 * before.loss
    assert after.metrics["error"] < before.metrics["error"] and after.metrics["rows"] == 96
    assert np.isnan(after.accuracy) and simulation.evaluated_on == "train"


@pytest.mark.parametrize("setting", ["method.estimator=gradient", "method.estimator=forward", "method.name=fedavg"])
def test_what_needs_gradients_refuses_a_loss_that_has_none(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"needs gradients, and what losses\(\) of own_tasks:Line returns has none"):
        methods.make(small(setting), task=Line())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_client_joins_with_a_loss_without_gradient_where_none_is_needed(estimator: str) -> None:
    settings = (f"task.name={HERE}/own_tasks.py:Line", "federation.clients=1", "federation.byzantine=0")
    header = cyber0.Simulation(small(*settings)).ledger.header
    header = replace(header, id="0a" * 16, estimator=estimator)
    options = JoinOptions("127.0.0.1:1", None, 0, task=f"{HERE}/own_tasks.py:Line")
    if estimator not in PROBING_ESTIMATORS:
        with pytest.raises(ConfigError, match=f"estimator '{estimator}' needs gradients"):
            make_participant(header, options)
        return
    client = make_participant(header, options).client
    measured = client.measure(Announcement(0, np.zeros(1, np.int64)), [0])
    assert np.isfinite(measured).all() and measured.any()


def test_a_dictionary_of_inputs_without_targets_is_learned_from() -> None:
    simulation = cyber0.Simulation(small("rounds=30", "method.lr=0.05"), task=Codes())
    before = simulation.evaluate()
    while simulation.round < 30:
        simulation.run_round()
    assert simulation.evaluate().loss < before.loss
    sizes = [len(share) for share in simulation.shares]
    assert max(sizes) - min(sizes) <= 1


def test_every_form_of_the_same_samples_gives_the_same_bits() -> None:
    inputs, targets = blobs(64, 9)

    class Pairs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> Any:
            return inputs[i], int(targets[i])

    forms = [(inputs, targets), [inputs.double().numpy(), targets.numpy().astype(np.uint8)], Pairs(),
             torch.utils.data.TensorDataset(inputs, targets)]  # fmt: skip
    models = [finished(cyber0.Task.of(lambda: Pictures().model(), form), "rounds=3").parameters for form in forms]
    assert len({model.digest() for model in models}) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_stored_as_the_config_says(dtype: str) -> None:
    simulation = finished(Pictures(), f"task.dtype={dtype}", "rounds=2")
    assert {tensor.dtype for tensor in simulation.parameters.tensors} == {getattr(torch, dtype)}


def test_a_given_model_is_copied_and_not_trained_itself() -> None:
    model = nn.Linear(16, 4)
    before = model.weight.detach().clone()
    task = cyber0.Task.of(model, (blobs(64, 1)[0].flatten(1), blobs(64, 1)[1]))
    assert finished(task, "rounds=2").parameters.digest() == finished(task, "rounds=2").parameters.digest()
    assert torch.equal(model.weight, before)


def test_a_model_that_is_returned_twice_is_refused() -> None:
    class Kept(Pictures):
        def model(self) -> nn.Module:
            if not hasattr(self, "net"):
                self.net = super().model()
            return self.net

    task = own.OwnTask(Kept(), "kept")
    task.model(0)
    with pytest.raises(ModelError, match="returned the same module twice"):
        task.model(0)


@pytest.mark.parametrize("partition", ["by_label", "dirichlet", "shards", "gamma"])
def test_partitions_by_label_say_that_there_are_none(partition: str) -> None:
    with pytest.raises(ConfigError, match=f"federation.partition = '{partition}' deals samples by their classes"):
        cyber0.Simulation(small(f"federation.partition={partition}"), task=Line())
    assert cyber0.Simulation(small(f"federation.partition={partition}"), task=Pictures()).label_counts().shape == (8, 4)


def test_labels_that_are_none_are_not_flipped() -> None:
    with pytest.raises(ConfigError, match="0 classes"):
        cyber0.Simulation(small("federation.attack=label_flip"), task=Line())
    finished(Pictures(), "federation.attack=label_flip", "rounds=1")


class Wrong(Pictures):
    """A task one of whose parts is what it is made with."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part if callable(part) else lambda part=part: part)


def _raises() -> Any:
    raise KeyError("no column 'price'")


def _dataset(*samples: Any) -> Any:
    class Some(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, i: int) -> Any:
            return samples[i]

    return Some()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": 3}, r"model\(\) returned an int, not a torch.nn.Module"),
        ({"model": lambda: nn.Linear(9, 4)}, r"the model failed: RuntimeError: .* shapes cannot be multiplied"),
        ({"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))}, r"shape \(2, 3\) .* needs \(2, 4\)"),
        ({"train_data": None}, r"train_data\(\) returned None"),
        ({"train_data": _raises}, r"train_data\(\) failed: KeyError: .*no column.* \(test_own_task.py, line \d+\)"),
        ({"train_data": (torch.zeros(0, 1, 4, 4), torch.zeros(0))}, "holds no samples"),
        ({"train_data": _dataset()}, "holds no samples"),
        ({"train_data": (torch.zeros(5, 1, 4, 4), torch.zeros(4))}, "there are 5 inputs and 4 targets"),
        ({"train_data": ({"a": torch.zeros(5, 2), "b": torch.zeros(4, 2)}, None)}, "5 of 'a', 4 of 'b'"),
        ({"train_data": (1, 2, 3)}, r"returned 3 values; return inputs, \(inputs, targets\)"),
        ({"train_data": (np.array([object()]), None)}, "can't be made a tensor: they are a ndarray"),
        ({"train_data": _dataset((torch.zeros(2), 0), (torch.zeros(3), 0))}, "give all of them the same shape"),
        ({"train_data": (torch.zeros(9, 1, 4, 4), torch.zeros(9))}, "these are float32 of shape .* write losses"),
        ({"train_data": torch.zeros(9, 1, 4, 4)}, "there are no targets; write losses"),
        ({"losses": lambda o, t: nn.functional.cross_entropy(o, t)}, r"losses\(\) returned 1 number for 2 samples"),
        ({"losses": lambda o, t: [0.0, 1.0, 2.0]}, r"losses\(\) returned 3 numbers for 2 samples"),
        ({"losses": lambda o, t: [0.0]}, r"losses\(\) returned 1 number for 2 samples"),
        ({"losses": lambda o, t: None}, r"losses\(\) returned None; return one number per sample"),
        ({"test_data": (torch.zeros(5, 1, 3, 3), torch.zeros(5).long())},
         r"evaluating inputs \(2, 1, 3, 3\) of test_data\(\) \(train_data\(\) gives inputs \(2, 1, 4, 4\)\) failed"),
        ({"test_data": ({"a": torch.zeros(5, 1, 4, 4)}, torch.zeros(5).long())}, r"evaluating a \(2, 1, 4, 4\) of te"),
        ({"train_data": (torch.zeros(9, 1, 4, 4), torch.arange(9) % 4 - 1)},
         r"train_data\(\): targets hold -1; classes are numbered from 0"),
        ({"test_data": (torch.zeros(9, 1, 4, 4), torch.arange(9) % 4 - 2)}, r"test_data\(\): targets hold -2"),
        ({"train_data": (torch.zeros(9, 1, 4, 4), torch.arange(9) * 10000)}, r"needs \(2, 80001\)"),
        ({"losses": lambda o, t: o}, r"losses\(\) returned shape \(2, 4\) for 2 samples"),
        ({"metrics": lambda o, t: 0.5}, r"metrics\(\) returned a float; return a dictionary"),
        ({"metrics": lambda o, t: {"loss": 1.0}}, r"can't use 'loss' as the name of a metric"),
        ({"metrics": lambda o, t: {"f1": o}}, "metric 'f1' is a Tensor; make it one number"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(parts: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, ModelError), match=message) as refused:
        cyber0.Simulation(small("federation.clients=4", "federation.byzantine=0"), task=Wrong(**parts))
    assert "\n" not in str(refused.value)


def test_a_loss_that_gets_shorter_later_names_both_lengths() -> None:
    task = Wrong(losses=lambda o, t: torch.zeros(2))
    simulation = cyber0.Simulation(small("federation.byzantine=0"), task=task)
    with pytest.raises(ModelError, match=r"2 numbers for 64 samples"):
        simulation.run_round()


def test_a_class_in_place_of_an_instance_is_said() -> None:
    with pytest.raises(ConfigError, match=r"give an instance: task=Pictures\(\)"):
        cyber0.Simulation(small(), task=Pictures)  # type: ignore[arg-type]


def test_a_best_metric_that_is_not_measured_is_refused() -> None:
    class Best(Pictures):
        best = "f1"

    with pytest.raises(Cyber0Error, match="best = 'f1' is none of its metrics"):
        cyber0.Simulation(small(), task=Best())


def test_whole_numbers_below_zero_are_targets_where_the_loss_is_ones_own() -> None:
    signs = torch.arange(64) % 2 * 2 - 1
    task = cyber0.Task.of(
        nn.Linear(16, 1), (blobs(64, 1)[0].flatten(1), signs), losses=lambda o, t: (1 - o[:, 0] * t).relu()
    )
    assert np.isfinite(finished(task).evaluate().loss)


def _with(**methods: Any) -> Any:
    return type("Mine", (Pictures,), methods)()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("loss", "losses"), ("metric", "metrics"), ("train_dat", "train_data"), ("tests_data", "test_data"),
     ("output", "outputs")],
)  # fmt: skip
def test_a_misspelt_method_is_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"nothing calls {name}\(\) of Mine; did you mean '{meant}'\?"):
        written = {key: found for key, found in vars(Pictures).items() if key != meant and not key.startswith("__")}
        kind = type("Mine", (cyber0.Task,), {**written, "width": 4, name: lambda self, *given: None})
        cyber0.Simulation(small(), task=kind())


def test_helpers_are_not_taken_for_misspelt_methods() -> None:
    def loss(self: Any, outputs: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def metrics(self: Any, outputs: Any, targets: Any) -> Any:
        return {"error": self.loss(outputs, targets).mean()}

    def inner(self: Any, outputs: Any, targets: Any) -> Any:
        return torch.stack([self.metric(o, t) for o, t in zip(outputs, targets, strict=True)]).flatten()

    def metric(self: Any, output: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(output[None], target[None])

    for helpers in (
        {"losses": inner, "metric": metric},
        {"output": loss, "shown": property(lambda self: self.output)},
        {"loss": loss, "losses": loss},
        {"loss": loss, "metrics": metrics},
        {"_loss": loss, "train": loss, "load_data": loss, "make_model": loss, "class_names": loss},
    ):
        cyber0.Simulation(small(), task=_with(**helpers))
    base = type(_with(test_data=_with().train_data))
    cyber0.Simulation(small(), task=type("Child", (base,), {"test_dataset": loss})())


@pytest.mark.parametrize(
    "targets, remedy",
    [
        (torch.tensor([0.0, 1.0]), "return whole numbers"),
        (torch.tensor([[0], [1]]), "squeeze"),
        (torch.tensor([0.5, 1.0]), r"float32 of shape \(2,\); write losses"),
    ],
)
def test_targets_that_are_no_classes_are_refused_with_what_to_do(targets: torch.Tensor, remedy: str) -> None:
    with pytest.raises(ModelError, match=remedy):
        cyber0.Task().losses(torch.randn(2, 2), targets)


def test_samples_that_are_not_finite_are_named_before_the_run(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(24, 3), torch.arange(24) % 2
    x[5, 1], x[7, 0] = np.nan, np.inf
    task = own.OwnTask(cyber0.Task.of(nn.Linear(3, 2), (x, y), (torch.randn(4, 3), torch.zeros(4).long())), "mine")
    assert len(task.train_inputs) == 24 and len(task.test_inputs) == 4
    (warning,) = caplog.messages
    assert warning == (
        "mine: train_data(): 2 of 24 samples have inputs that are NaN or infinite, the first is sample 5 "
        "(counted from 0)"
    )
