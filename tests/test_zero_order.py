"""ZeroOrder: fine-tuning of one torch model, resumable from its ledger, and w is safe from a loss that fails."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import Blobs, make_model, one_thread, plain_two_point  # noqa: F401
from torch import nn

from cyber0 import Ledger, ZeroOrder
from cyber0.directions import Directions, Probe
from cyber0.errors import LedgerError, ModelError
from cyber0.model.blocks import perturbed
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested

TASK = Blobs()


def loss_of(model: nn.Module, samples: int = 64) -> torch.Tensor:
    return TASK.losses(TASK.outputs(model, TASK.train_inputs[:samples]), TASK.train_targets[:samples]).mean()


def make(kind: str = "mlp", dtype: str = "float32", **options: Any) -> tuple[nn.Module, ZeroOrder]:
    model = make_model(kind, dtype=dtype)
    return model, ZeroOrder(model, **{"lr": 0.05, "mu": 1e-2, "k": 4, "seed": 3, **options})


def steps(kind: str, count: int, **options: Any) -> str:
    model, optimizer = make(kind, **options)
    for _ in range(count):
        optimizer.step(lambda: loss_of(model))
    optimizer.close()
    return optimizer.parameters.digest()


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher", "sphere"])
def test_it_minimises(distribution: str) -> None:
    model, optimizer = make("linear", distribution=distribution, lr=0.05, k=8)
    before = float(loss_of(model))
    results = [optimizer.step(lambda: loss_of(model)) for _ in range(60)]
    after = float(loss_of(model))
    assert after < 0.6 * before
    assert results[0].loss == pytest.approx(before, rel=0.02)
    assert [r.round for r in results] == list(range(60)) and optimizer.round == 60


@pytest.mark.parametrize("distribution", ["gaussian", "sphere"])
def test_slopes_are_the_two_point_estimates_and_the_step_goes_against_them(distribution: str) -> None:
    model, optimizer = make(distribution=distribution)
    start = optimizer.parameters.vector()
    expected = plain_two_point(model, TASK, TASK.batch(64), Directions(3, 0, 4), 1e-2, distribution)[0]
    result = optimizer.step(lambda: loss_of(model))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(result.slopes, expected, rtol=1e-3, atol=1e-3 * scale)
    z = optimizer.parameters.directions(3, 0, 0, 4)
    wanted = start - 0.05 / 4 * torch.from_numpy(result.slopes) @ z
    assert torch.allclose(optimizer.parameters.vector(), wanted, rtol=1e-4, atol=1e-6)


def test_a_step_evaluates_the_loss_twice_a_direction() -> None:
    model, optimizer = make(k=5)
    calls: list[int] = []
    made = []
    for _ in range(3):
        optimizer.step(lambda: (calls.append(1), loss_of(model))[1])
        made.append(len(calls))
    assert [made[1] - made[0], made[2] - made[1]] == [10, 10]
    assert made[0] <= 10 + 4  # the first time it is seen whether all uses of the weights are met


@pytest.mark.parametrize("bad", ["raise", "nan", "inf", "interrupt"])
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_a_loss_that_fails_leaves_w_and_the_ledger_as_they_were(kind: str, bad: str) -> None:
    model, optimizer = make(kind)
    optimizer.step(lambda: loss_of(model))
    before, calls = optimizer.parameters.digest(), 0

    def loss() -> torch.Tensor | float:
        nonlocal calls
        calls += 1
        value = loss_of(model)
        if calls < 6:
            return value
        if bad == "raise":
            raise RuntimeError("out of memory")
        if bad == "interrupt":
            raise KeyboardInterrupt
        return value * float(bad)

    expected = {"raise": RuntimeError, "interrupt": KeyboardInterrupt}.get(bad, ModelError)
    with pytest.raises(expected):
        optimizer.step(loss)
    assert optimizer.parameters.digest() == before
    assert optimizer.round == 1
    optimizer.step(lambda: loss_of(model))
    assert optimizer.round == 2


def test_a_loss_that_is_not_finite_is_named() -> None:
    _, optimizer = make()
    with pytest.raises(ModelError, match="the loss is nan in step 0, direction 0"):
        optimizer.step(lambda: float("nan"))


def test_a_slope_beyond_float32_leaves_w_as_it_was() -> None:
    _, optimizer = make()
    before, signs = optimizer.parameters.digest(), itertools.cycle([1e38, -1e38])
    with pytest.raises(ModelError, match=r"slope is 1e\+40 in step 0, direction 0.*float32.*raise mu"):
        optimizer.step(lambda: next(signs))
    assert (optimizer.parameters.digest(), optimizer.round) == (before, 0)


def test_the_loss_may_be_a_number_and_must_be_one_number() -> None:
    model, optimizer = make()
    optimizer.step(lambda: float(loss_of(model)))
    optimizer.step(lambda: loss_of(model).view(1))
    with pytest.raises(ModelError, match=r"one number, got a tensor of shape \(64, 4\): take its mean"):
        optimizer.step(lambda: TASK.outputs(model, TASK.train_inputs[:64]))
    assert optimizer.round == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["mlp", "tied", "frozen backbone", "attention"])
def test_dropped_in_the_middle_it_goes_on_from_its_ledger_to_the_same_bits(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "mu": 0.05}
    uninterrupted = steps(kind, 6, **options)
    path = tmp_path / "tuning.ledger"
    model, optimizer = make(kind, ledger=path, **options)
    for _ in range(3):
        optimizer.step(lambda: loss_of(model))
    reached = optimizer.parameters.digest()
    del model, optimizer  # without close()
    gc.collect()
    model, optimizer = make(kind, ledger=path, **options)
    assert (optimizer.round, optimizer.parameters.digest()) == (3, reached)
    for _ in range(3):
        optimizer.step(lambda: loss_of(model))
    assert optimizer.parameters.digest() == uninterrupted
    optimizer.close()


def test_a_torn_last_record_is_cut_off_and_its_step_taken_again(tmp_path: Path) -> None:
    path, uninterrupted = tmp_path / "tuning.ledger", steps("mlp", 5)
    steps("mlp", 4, ledger=path)
    path.write_bytes(path.read_bytes()[:-3])
    model, optimizer = make(ledger=path)
    assert optimizer.round == 3
    for _ in range(2):
        optimizer.step(lambda: loss_of(model))
    assert optimizer.parameters.digest() == uninterrupted


def test_with_and_without_a_file_the_bits_are_the_same_and_another_seed_gives_others(tmp_path: Path) -> None:
    plain = steps("mlp", 4)
    assert steps("mlp", 4, ledger=tmp_path / "a.ledger") == plain
    assert steps("mlp", 4, ledger=str(tmp_path / "b.ledger")) == plain
    assert steps("mlp", 4) == plain
    assert steps("mlp", 4, seed=4) != plain
    assert (tmp_path / "a.ledger").read_bytes() == (tmp_path / "b.ledger").read_bytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [({"lr": 0.1}, "lr"), ({"mu": 0.02}, "mu"), ({"k": 5}, "k"), ({"seed": 4}, "seed"),
     ({"projection_radius": 3.0}, "projection"),
     ({"distribution": "sphere"}, "distribution"), ({"dtype": "bfloat16"}, "layout"), ({"kind": "conv"}, "layout")],
)  # fmt: skip
def test_a_ledger_of_other_settings_is_refused_by_naming_the_difference(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "tuning.ledger"
    steps("mlp", 1, ledger=path)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=rf"differs in .*{named}.*start from the same") as refusal:
        make(**{"ledger": path, **change})
    assert path.read_bytes() == before
    make(ledger=path)[1].close()  # and it is not left locked, though somebody holds on to the error
    assert refusal.tb is not None


def test_a_model_that_was_trained_already_is_not_the_ledgers_starting_point(tmp_path: Path) -> None:
    path = tmp_path / "tuning.ledger"
    model, optimizer = make(ledger=path)
    optimizer.step(lambda: loss_of(model))
    optimizer.close()
    with pytest.raises(LedgerError, match="weights_digest"):
        ZeroOrder(model, lr=0.05, mu=1e-2, k=4, seed=3, ledger=path)


def test_two_cannot_write_to_one_ledger(tmp_path: Path) -> None:
    _, first = make(ledger=tmp_path / "tuning.ledger")
    with pytest.raises(LedgerError, match="another process or object"):
        make(ledger=tmp_path / "tuning.ledger")
    first.close()


def test_the_ledger_is_an_ordinary_one(tmp_path: Path) -> None:
    steps("mlp", 3, ledger=tmp_path / "tuning.ledger")
    ledger = Ledger.open(tmp_path / "tuning.ledger")
    assert len(ledger) == 3 and ledger.header.k == 4 and all(r.lr == 0.05 for r in ledger)


def test_each_step_records_the_lr_it_was_taken_with_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    model, optimizer = make(ledger=tmp_path / "tuning.ledger")
    for lr in (0.05, 0.02, 0.07):
        optimizer.lr = lr
        optimizer.step(lambda: loss_of(model))
    optimizer.close()
    assert [r.lr for r in Ledger.open(tmp_path / "tuning.ledger")] == [0.05, 0.02, 0.07]
    again = make(ledger=tmp_path / "tuning.ledger")[1]
    assert again.parameters.digest() == optimizer.parameters.digest()


@pytest.mark.parametrize("kind", ["linear", "tied", "attention", "layer", "conv", "half used", "frozen backbone"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_kinds_of_models_are_tuned_and_frozen_weights_stay(kind: str, dtype: str) -> None:
    model, optimizer = make(kind, dtype, lr=0.02, k=8, mu=0.02)
    rest, before = optimizer.parameters.rest_digest(), float(loss_of(model))
    for _ in range(25):
        optimizer.step(lambda: loss_of(model))
    assert float(loss_of(model)) < before - 0.02
    assert optimizer.parameters.rest_digest() == rest


def test_weights_stay_in_the_ball(tmp_path: Path) -> None:
    model, optimizer = make("linear", projection_radius=0.5, ledger=tmp_path / "ball.ledger")
    for _ in range(3):
        optimizer.step(lambda: loss_of(model))
        assert optimizer.parameters.vector().norm() <= 0.5 * (1 + 1e-5)
    optimizer.close()
    again = make("linear", projection_radius=0.5, ledger=tmp_path / "ball.ledger")[1]
    assert again.parameters.digest() == optimizer.parameters.digest()


@pytest.mark.parametrize(
    ("bad", "named"),
    [({"lr": 0}, "lr"), ({"lr": -1.0}, "lr"), ({"lr": torch.ones(2)}, "lr"), ({"lr": np.float64("nan")}, "lr"),
     ({"lr": None}, "lr"), ({"lr": True}, "lr"), ({"k": np.float64(2)}, "k"), ({"k": torch.tensor(True)}, "k"),
     ({"k": torch.tensor(2.0)}, "k"), ({"seed": 1.5}, "seed"), ({"mu": 0}, "mu.*estimator='forward'"),
     ({"estimator": "gradient"}, "estimator"), ({"estimator": "forward", "mu": -1}, "mu"),
     ({"lr": float("nan")}, "lr"), ({"lr": "fast"}, "lr"), ({"mu": 0.0}, "mu"),
     ({"mu": 1e-60}, "mu"), ({"mu": float("inf")}, "mu"), ({"k": 0}, "k"), ({"k": 1.5}, "k"), ({"k": True}, "k"),
     ({"projection_radius": 0}, "projection_radius"), ({"projection_radius": -2.0}, "projection_radius"),
     ({"distribution": "gausian"}, "distribution"),
     ({"seed": -1}, "seed"), ({"seed": 2**64}, "seed"), ({"k": 2**24}, "k")],
)  # fmt: skip
def test_bad_arguments_are_named_before_anything_is_written(bad: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, LedgerError), match=named):
        make(**{"ledger": tmp_path / "tuning.ledger", **bad})
    assert not (tmp_path / "tuning.ledger").exists()


@pytest.mark.parametrize(
    ("bad", "message"),
    [({"seed": -1}, "seed must be .*from 0.*got -1"), ({"seed": 2**64}, "seed must be .* got 18446744073709551616"),
     ({"mu": 1e300}, r"mu must be at most 3\.4e\+38.*got 1e\+300")],
)  # fmt: skip
def test_arguments_that_do_not_fit_their_type_are_refused_as_values(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**bad)


def test_the_models_mode_and_torchs_generator_are_left_alone() -> None:
    model, optimizer = make()
    model.train()
    state = torch.get_rng_state()
    optimizer.step(lambda: loss_of(model))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


# Uses of weights that the substitution does not meet: right slopes, or a refusal.


def in_a_thread(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(compute().detach()))
    thread.start()
    thread.join()
    return results[0]


X = TASK.train_inputs[:64]


def cross_entropy(outputs: torch.Tensor) -> torch.Tensor:
    return TASK.losses(outputs, TASK.train_targets[:64]).mean()


def traced_once(model: nn.Module) -> Callable[[], torch.Tensor]:
    made: list[Any] = []

    def loss() -> torch.Tensor:
        if not made:
            made.append(torch.jit.trace(model, X))
        return cross_entropy(made[0](X))

    return loss


def made_before(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Callable[[], torch.Tensor]]:
    def closure(model: nn.Module) -> Callable[[], torch.Tensor]:
        made = make(model)
        return lambda: cross_entropy(made(X))

    return closure


CLOSURES: dict[str, Callable[[nn.Module], Callable[[], torch.Tensor]]] = {
    "traced before": made_before(lambda m: torch.jit.trace(m, X)),
    "traced at the first call": traced_once,
    "traced at every call": lambda m: lambda: cross_entropy(torch.jit.trace(m, X)(X)),
    "scripted before": made_before(torch.jit.script),
    "scripted at every call": lambda m: lambda: cross_entropy(torch.jit.script(m)(X)),
    "in a thread": lambda m: lambda: in_a_thread(lambda: cross_entropy(m(X))),
    "compiled before": made_before(lambda m: torch.compile(m, backend="eager")),
    "compiled at every call": lambda m: lambda: cross_entropy(torch.compile(m, backend="eager")(X)),
    "partly traced": lambda m: lambda: cross_entropy(m[2](torch.jit.trace(m[:2], X)(X))),
}


def sequential() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(X.shape[1], 8), nn.Tanh(), nn.Linear(8, TASK.classes))


@pytest.mark.parametrize("after_a_plain_step", [False, True])
@pytest.mark.parametrize("how", CLOSURES)
def test_slopes_are_right_however_the_loss_computes_the_model(how: str, after_a_plain_step: bool) -> None:
    model, twin = sequential(), sequential()
    mine, plain = (ZeroOrder(m, lr=0.05, mu=1e-2, k=3, seed=3) for m in (model, twin))
    if after_a_plain_step:
        for optimizer, m in ((mine, model), (plain, twin)):
            optimizer.step(lambda: cross_entropy(m(X)))  # noqa: B023
    loss = CLOSURES[how](model)
    for _ in range(3):
        found, expected = mine.step(loss), plain.step(lambda: cross_entropy(twin(X)))
        np.testing.assert_allclose(found.slopes, expected.slopes, rtol=1e-3, atol=1e-4)
        assert np.abs(found.slopes).min() > 0


def test_a_compiled_model_may_be_given_as_it_is() -> None:
    twin, compiled = sequential(), torch.compile(sequential(), backend="eager")
    mine, plain = (ZeroOrder(m, lr=0.05, mu=1e-2, k=3, seed=3) for m in (compiled, twin))
    for _ in range(2):
        found, expected = (o.step(lambda: cross_entropy(m(X))) for o, m in ((mine, compiled), (plain, twin)))  # noqa: B023
        np.testing.assert_allclose(found.slopes, expected.slopes, rtol=1e-3, atol=1e-4)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


def penalty(model: Any) -> torch.Tensor:
    return 0.01 * model[0].weight.square().sum()


class Computes:
    """A loss that is an object; made anew for every step, as a lambda is."""

    def __init__(self, model: nn.Module, net: Any, x: torch.Tensor) -> None:
        self.model, self.net, self.x = model, net, x

    def __call__(self) -> torch.Tensor:
        return cross_entropy(self.net(self.x)) + penalty(self.model)


GLOBAL: list[Any] = [None]


def by_global(m: nn.Module, net: Any) -> Callable[[], torch.Tensor]:
    GLOBAL[0] = net
    return lambda: cross_entropy(GLOBAL[0](X)) + penalty(m)


Maker = Callable[[nn.Module, Any], Callable[[], torch.Tensor]]
MAKERS: dict[str, Maker] = {
    "a closure": lambda m, net: lambda: cross_entropy(net(X)) + penalty(m),
    "a list in a closure": lambda m, net: (lambda nets: lambda: cross_entropy(nets[1](X)) + penalty(m))([m, net]),
    "a default": lambda m, net: lambda net=net: cross_entropy(net(X)) + penalty(m),  # type: ignore[misc]
    "a keyword default": lambda m, net: lambda *, net=net: cross_entropy(net(X)) + penalty(m),  # type: ignore[misc]
    "a function of the network": lambda m, net: (lambda f: lambda: cross_entropy(f()) + penalty(m))(lambda: net(X)),
    "a callable object": lambda m, net: Computes(m, net, X.clone()),
    "a bound method": lambda m, net: Computes(m, net, X.clone()).__call__,
    "a partial of an object": lambda m, net: functools.partial(Computes(m, net, X.clone())),
    "an argument of a partial": lambda m, net: functools.partial(
        lambda f, x: cross_entropy(f(x)) + penalty(m), net, X.clone()
    ),
    "a keyword of a partial": lambda m, net: functools.partial(lambda f: cross_entropy(f(X)) + penalty(m), f=net),
    "a wrapper": lambda m, net: wrapped(lambda: cross_entropy(net(X)) + penalty(m)),
    "a partial of a wrapper": lambda m, net: functools.partial(wrapped(Computes(m, net, X.clone()).__call__)),
    "a global": by_global,
}


@pytest.mark.parametrize("how", MAKERS)
def test_the_same_code_on_another_network_is_checked_anew(how: str) -> None:
    model, twin = sequential(), sequential()
    mine, plain = (ZeroOrder(m, lr=0.05, mu=1e-2, k=3, seed=3) for m in (model, twin))
    for net in (model, torch.jit.trace(model, X)):
        found = mine.step(MAKERS[how](model, net))
        expected = plain.step(MAKERS[how](twin, twin))
        np.testing.assert_allclose(found.slopes, expected.slopes, rtol=1e-3, atol=1e-4)


def test_the_same_code_on_another_traced_function_is_checked_anew() -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2)
    checks = counted(optimizer)
    for scale in (1.0, 2.0):
        scaled = torch.jit.trace(lambda x: x * scale, X)  # noqa: B023
        for _ in range(2):
            optimizer.step(lambda: cross_entropy(scaled(model(X))))  # noqa: B023
    assert len(checks) == 2


def counted(optimizer: ZeroOrder) -> list[None]:
    """Return a list that grows by one with every check of a loss."""
    checks: list[None] = []
    check_uses = optimizer.parameters.check_uses

    def counting(*arguments: Any) -> None:
        checks.append(None)
        check_uses(*arguments)

    optimizer.parameters.check_uses = counting  # type: ignore[method-assign]
    return checks


@pytest.mark.parametrize("how", MAKERS)
def test_the_same_code_on_other_batches_is_not_checked_anew_and_no_batch_is_kept(how: str) -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2)
    checks, batches = counted(optimizer), []

    def one_step(number: int) -> None:
        x = X + 0.01 * number
        batches.append(weakref.ref(x))
        loss = MAKERS[how](model, model)
        optimizer.step(lambda loss=loss, x=x: loss() + 0.1 * model(x).square().mean())

    for number in range(4):
        one_step(number)
    gc.collect()
    assert len(checks) == 1 and all(batch() is None for batch in batches)


def test_a_network_in_the_place_of_one_that_is_gone_is_checked_anew() -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2)
    checks = counted(optimizer)
    places = set()

    def one_step() -> weakref.ref[nn.Module]:
        net = nn.Sequential(model[0], model[1], model[2])
        places.add(id(net))
        optimizer.step(lambda: cross_entropy(net(X)))
        return weakref.ref(net)

    steps = 0
    while steps < 6 or (len(places) == steps < 100):  # until an address is indeed used again
        gone, steps = one_step(), steps + 1
        gc.collect()
        assert gone() is None
    assert len(checks) == steps


def test_what_a_first_call_makes_is_checked_with_it_and_not_once_more() -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2)
    checks, loss = counted(optimizer), traced_once(model)
    for _ in range(3):
        optimizer.step(loss)
    assert len(checks) == 1


TOKENS = torch.tensor([[1, 2, 3, 4], [4, 0, 2, 2]])


def renormalising() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 8, max_norm=0.5), nn.Linear(8, 2))


def traced_at_the_first_call(model: nn.Module) -> Callable[[], torch.Tensor]:
    made: list[Any] = []

    def loss() -> torch.Tensor:
        if not made:
            made.append(torch.jit.trace(model, TOKENS))
        return made[0](TOKENS).square().mean()

    return loss


RENORMALISED: dict[str, Callable[[nn.Module], Callable[[], torch.Tensor]]] = {
    "in a thread": lambda m: lambda: in_a_thread(lambda: m(TOKENS).square().mean()),
    "traced at the first call": traced_at_the_first_call,
    "traced at every call": lambda m: lambda: torch.jit.trace(m, TOKENS)(TOKENS).square().mean(),
}


@pytest.mark.parametrize("after_a_plain_step", [False, True])
@pytest.mark.parametrize("how", RENORMALISED)
def test_an_embedding_that_renormalises_itself_writes_to_a_copy_however_it_is_computed(
    how: str, after_a_plain_step: bool
) -> None:
    model, twin = renormalising(), renormalising()
    mine, plain = (ZeroOrder(m, lr=0.01, mu=1e-2, k=2, seed=1) for m in (model, twin))
    if after_a_plain_step:
        for optimizer, m in ((mine, model), (plain, twin)):
            optimizer.step(lambda: m(TOKENS).square().mean())  # noqa: B023
    loss = RENORMALISED[how](model)
    for _ in range(2):
        found, expected = mine.step(loss), plain.step(lambda: twin(TOKENS).square().mean())
        np.testing.assert_allclose(found.slopes, expected.slopes, rtol=1e-3, atol=1e-4)
        before = mine.parameters.digest()
        assert mine.probe(loss) == pytest.approx(plain.probe(lambda: twin(TOKENS).square().mean()), rel=1e-5)
        assert mine.parameters.digest() == before
    mine.close()


def test_a_renormalising_embedding_that_is_written_to_between_steps_is_refused() -> None:
    model = renormalising()
    optimizer = ZeroOrder(model, lr=0.01, mu=1e-2)
    loss = RENORMALISED["in a thread"](model)
    optimizer.step(loss)
    with torch.no_grad():
        model(TOKENS)  # outside a step torch renormalises the weight itself
    with pytest.raises(ModelError, match=r"'0\.weight' was written to since step 1"):
        optimizer.step(loss)


class KeepsAView(nn.Module):
    """Computes with a view of its weight that was made in __init__, and with its bias as it should."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(X.shape[1], TASK.classes)
        self.views = [self.layer.weight.detach().T]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.views[0] + self.layer.bias


def test_a_module_that_keeps_a_view_of_its_weight_is_refused_by_name() -> None:
    model = KeepsAView()
    optimizer = ZeroOrder(model, lr=0.05)
    with pytest.raises(ModelError, match=r"'layer\.weight' is also read through a view"):
        optimizer.step(lambda: cross_entropy(model(X)))
    assert optimizer.round == 0


def accuracy(model: nn.Module) -> torch.Tensor:
    return (model(X).argmax(1) == TASK.train_targets[:64]).float().mean()


FLAT: dict[str, Callable[[nn.Module, nn.Module], torch.Tensor | float]] = {
    "a constant": lambda model, other: 1.0,
    "another model": lambda model, other: cross_entropy(other(X)),
    "an accuracy": lambda model, other: accuracy(model),
    "computed before": lambda model, other: cross_entropy(other(X)).detach(),
}


@pytest.mark.parametrize("k", [1, 3, 12])
@pytest.mark.parametrize("why", FLAT)
def test_a_loss_that_is_the_same_at_all_probes_is_refused_with_likely_causes(why: str, k: int) -> None:
    model, other = sequential(), sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-6, k=k)
    before = optimizer.parameters.digest()
    with pytest.raises(ModelError, match=rf"at all {2 * max(k, 8)} probes .*no slope.*causes.*accuracy.*raise mu"):
        optimizer.step(lambda: FLAT[why](model, other))
    assert (optimizer.parameters.digest(), optimizer.round) == (before, 0)


def test_an_accuracy_is_learned_from_where_mu_is_large_enough_to_change_it() -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=0.3, k=4)
    assert optimizer.step(lambda: -accuracy(model)).slopes.any()


def test_two_losses_that_happen_to_be_equal_are_no_reason_to_refuse_a_step() -> None:
    model, calls, chance = sequential(), itertools.count(), [10**9]
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2, k=1)

    def loss() -> torch.Tensor | float:
        return 0.5 if chance[0] <= next(calls) < chance[0] + 2 else cross_entropy(model(X))

    optimizer.step(loss)
    before, chance[0] = optimizer.parameters.digest(), next(calls) + 1
    assert optimizer.step(loss).slopes.tolist() == [0.0]
    assert (optimizer.parameters.digest(), optimizer.round) == (before, 2)
    assert optimizer.step(loss).slopes.any()


# Changes from outside.


def sgd_step(model: nn.Module) -> None:
    loss_of(model).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def normed() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(X.shape[1], 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, TASK.classes))
    model[2].requires_grad_(False)
    return model


def write(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor[0] += 1


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "load_state_dict": (lambda m: m.load_state_dict(m.state_dict()), r"'0\.weight' was written to since step 1"),
    "in place": (lambda m: write(m[3].bias), r"'3\.bias' was written to since step 1"),
    "another optimizer": (sgd_step, r"'0\.weight' was written to"),
    "through .data": (lambda m: m[3].weight.data.mul_(0.99), r"'3\.weight' was changed through \.data"),
    "one weight through .data": (lambda m: m[0].weight.data[5, 2].add_(1e-3), r"'0\.weight' was changed through"),
    "a frozen weight": (lambda m: write(m[2].weight), r"'2\.weight', which is not trained, was written to"),
    "batch norm in train mode": (lambda m: m.train()(X), r"'1\.\w+', which is not trained, was written to"),
    "freezing": (lambda m: m[0].requires_grad_(False), r"'0\.weight' was frozen or replaced"),
    "unfreezing": (lambda m: m[2].requires_grad_(True), r"'2\.weight' was added or made trainable"),
    "another layer": (lambda m: m.__setitem__(3, nn.Linear(8, TASK.classes)), r"'3\.weight' was frozen or replaced"),
    "one layer more": (lambda m: m.append(nn.Linear(4, 4)), r"'4\.weight' was added"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_the_model_between_steps_is_refused_by_name(how: str) -> None:
    model = normed()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2, k=2)
    change, message = CHANGES[how]
    optimizer.step(lambda: cross_entropy(model(X)))
    change(model)
    after = optimizer.parameters.digest()
    for use in (lambda: optimizer.step(lambda: cross_entropy(model(X))), optimizer.close):
        with pytest.raises(ModelError, match=message):
            use()
    assert (optimizer.parameters.digest(), optimizer.round) == (after, 1)


def test_a_loss_that_writes_to_the_weights_is_refused_before_its_step_is_recorded() -> None:
    model = normed()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2, k=2)
    storage = optimizer.parameters.segments[0].buffer.numpy()

    def loss() -> torch.Tensor:
        storage[0] += 1e-3
        return cross_entropy(model(X))

    with pytest.raises(ModelError, match=r"changed through \.data"):
        optimizer.step(loss)
    assert optimizer.round == 0


def test_of_a_large_model_some_weights_of_every_parameter_are_watched() -> None:
    model = nn.Sequential(nn.Linear(X.shape[1], 1500), nn.Tanh(), nn.Linear(1500, TASK.classes))
    optimizer = ZeroOrder(model, lr=1e-4, mu=1e-2)
    for p in model.parameters():
        optimizer.step(lambda: cross_entropy(model(X)))
        kept = p.detach().clone()
        p.data.clamp_(-1e-3, 1e-3)
        with pytest.raises(ModelError, match=r"changed through \.data"):
            optimizer.step(lambda: cross_entropy(model(X)))
        p.data.copy_(kept)


def test_a_loss_that_is_not_finite_because_of_a_change_from_outside_is_refused_for_the_change() -> None:
    model = normed()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2)
    optimizer.step(lambda: cross_entropy(model(X)))
    model[3].bias.data.fill_(math.nan)
    with pytest.raises(ModelError, match=r"'3\.bias' was changed through \.data since step 1, so the ledger no longer"):
        optimizer.step(lambda: cross_entropy(model(X)))


@pytest.mark.parametrize("dtypes", [1, 2])
def test_the_watched_weights_of_all_segments_are_compared_once_a_step(
    dtypes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[nn.Linear(X.shape[1], X.shape[1]) for _ in range(6)])
    for layer in model[:3] if dtypes == 2 else ():
        layer.to(torch.bfloat16)
    optimizer = ZeroOrder(model, lr=1e-4, mu=0.05)
    compared: list[None] = []
    equal = torch.equal

    def counting(a: torch.Tensor, b: torch.Tensor) -> bool:
        compared.append(None)
        return equal(a, b)

    monkeypatch.setattr(torch, "equal", counting)
    for step in range(4):
        compared.clear()
        optimizer.step(lambda: model[3:](model[:3](X.to(model[0].weight.dtype)).float()).square().mean())
        assert len(compared) == dtypes or step == 0  # which also sees whether weights move at all


def test_what_is_done_beside_the_weights_is_no_change() -> None:
    model = normed()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2, k=2)
    for _ in range(2):
        optimizer.step(lambda: cross_entropy(model(X)))
        model.eval()
        model(X).sum().backward()
        model.train()
        copy.deepcopy(model).load_state_dict(model.state_dict())
        optimizer.zero_grad()
        assert all(p.grad is None for p in optimizer.parameters.tensors)
    optimizer.close()
    model.half()  # after close, nobody cares


def test_a_model_converted_before_close_is_the_users_own_affair(tmp_path: Path) -> None:
    model, optimizer = make(ledger=tmp_path / "tuning.ledger")
    optimizer.step(lambda: loss_of(model))
    model.half()
    optimizer.close()
    make(ledger=tmp_path / "tuning.ledger")[1].close()


def test_close_closes_the_ledger_also_when_it_refuses_the_weights(tmp_path: Path) -> None:
    model, optimizer = make(ledger=tmp_path / "tuning.ledger")
    optimizer.step(lambda: loss_of(model))
    next(model.parameters()).data.add_(1)
    with pytest.raises(ModelError, match=r"since step 1"):
        optimizer.close()
    make(ledger=tmp_path / "tuning.ledger")[1].close()  # which nobody holds


def test_the_starting_weights_bring_an_altered_model_back_to_its_ledger() -> None:
    model, optimizer = make()
    start = {name: t.clone() for name, t in optimizer.parameters.state().items()}
    for _ in range(3):
        optimizer.step(lambda: loss_of(model))
    reached = optimizer.parameters.digest()
    model.load_state_dict(make_model("mlp", 5).state_dict())
    optimizer.restore(start)
    assert optimizer.parameters.digest() == reached
    optimizer.step(lambda: loss_of(model))
    with pytest.raises(ModelError, match="weights digest"):
        optimizer.restore({name: t + 1 for name, t in start.items()})
    with pytest.raises(ModelError, match="since step 4"):
        optimizer.step(lambda: loss_of(model))


def test_the_starting_weights_do_not_make_up_for_frozen_ones_that_were_changed() -> None:
    model = normed()
    optimizer = ZeroOrder(model, lr=0.05, mu=1e-2, k=2)
    start = {name: t.clone() for name, t in optimizer.parameters.state().items()}
    write(model[2].weight)
    with pytest.raises(ModelError, match="rest digest"):
        optimizer.restore(start)


# What a torch user expects.


@pytest.mark.parametrize("given", ["parameters", "list", "state_dict"])
def test_parameters_instead_of_the_model_are_refused_with_what_to_pass(given: str) -> None:
    model = sequential()
    wrong: Any = {"parameters": model.parameters(), "list": list(model.parameters()), "state_dict": model.state_dict()}
    with pytest.raises(TypeError, match=r"takes the model itself, got .*ZeroOrder\(model, lr"):
        ZeroOrder(wrong[given], lr=0.1)


@pytest.mark.parametrize("wrap", [np.float64, torch.tensor, lambda v: np.array(v)])
def test_numbers_may_be_of_numpy_or_torch(wrap: Callable[[Any], Any]) -> None:
    def whole(value: int) -> Any:
        return torch.tensor(value) if wrap is torch.tensor else np.int64(value)

    given = {"lr": wrap(0.25), "mu": wrap(0.5), "k": whole(3), "seed": whole(7), "projection_radius": wrap(2.0)}
    header = make(**given)[1].ledger.header
    plain = make(lr=0.25, mu=0.5, k=3, seed=7, projection_radius=2.0)[1].ledger.header
    assert header == plain and header.to_json() == plain.to_json()
    model, optimizer = make()
    optimizer.lr = wrap(0.125)
    optimizer.step(lambda: wrap(float(loss_of(model))))
    last = optimizer.ledger.last
    assert last is not None and last.lr == optimizer.lr == 0.125


@pytest.mark.parametrize(
    ("result", "message"),
    [(None, "returned None.*return"), ("1.5", "got str"), ({"loss": 1.0}, r"got dict.*\.loss"), (1j, "got complex")],
)
def test_a_loss_that_returns_no_number_is_refused_in_words(result: Any, message: str) -> None:
    optimizer = make()[1]
    with pytest.raises(ModelError, match=message):
        optimizer.step(lambda: result)
    assert optimizer.round == 0


@pytest.mark.parametrize("loss", [None, torch.tensor(1.0)])
def test_a_step_without_a_function_says_what_to_pass(loss: Any) -> None:
    with pytest.raises(TypeError, match="needs the loss as a function"):
        make()[1].step(loss)


SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "StepLR": lambda o, last: torch.optim.lr_scheduler.StepLR(o, 2, 0.5, last_epoch=last),
    "MultiStepLR": lambda o, last: torch.optim.lr_scheduler.MultiStepLR(o, [1, 4], 0.5, last_epoch=last),
    "LambdaLR": lambda o, last: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t), last_epoch=last),
    "ExponentialLR": lambda o, last: torch.optim.lr_scheduler.ExponentialLR(o, 0.9, last_epoch=last),
    "LinearLR": lambda o, last: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 5, last_epoch=last),
    "CosineAnnealingLR": lambda o, last: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8, last_epoch=last),
}


def scheduled(optimizer: ZeroOrder, model: nn.Module, scheduler: Any, count: int) -> list[float]:
    lrs = []
    for _ in range(count):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step(lambda: loss_of(model))
        scheduler.step()
    return lrs


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize(
    ("name", "continues"),
    [*((name, "stepped as often") for name in SCHEDULERS),
     *((name, "last_epoch") for name in ("StepLR", "MultiStepLR", "LambdaLR"))],
)  # fmt: skip
def test_torchs_schedulers_set_the_lr_of_each_step_and_continue_after_a_resume(
    name: str, continues: str, tmp_path: Path
) -> None:
    path, schedule = tmp_path / "tuning.ledger", SCHEDULERS[name]
    model, optimizer = make()
    lrs = scheduled(optimizer, model, schedule(optimizer, -1), 7)
    assert [r.lr for r in optimizer.ledger] == lrs and len(set(lrs)) > 2
    half, first = make(ledger=path)
    scheduled(first, half, schedule(first, -1), 4)
    first.close()
    again, second = make(ledger=path)
    assert second.lr == lrs[3]  # the ledger's last
    if continues == "last_epoch":
        scheduler = schedule(second, second.round - 1)
    else:
        second.lr = second.ledger.header.lr
        scheduler = schedule(second, -1)
        for _ in range(second.round):
            scheduler.step()
    assert scheduled(second, again, scheduler, 3) == lrs[4:]
    assert second.parameters.digest() == optimizer.parameters.digest()


def test_the_other_schedulers_work_or_say_what_they_miss() -> None:
    model, optimizer = make()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        optimizer.step(lambda: loss_of(model))
        plateau.step(1.0)
    assert optimizer.lr == 0.05 / 4
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
    scheduled(optimizer, model, cycle, 5)
    with pytest.raises(ValueError, match="momentum"):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def test_a_resumed_optimizer_continues_with_the_ledgers_last_lr(tmp_path: Path) -> None:
    model, optimizer = make(ledger=tmp_path / "tuning.ledger")
    optimizer.lr = 0.02
    optimizer.step(lambda: loss_of(model))
    optimizer.close()
    again = make(ledger=tmp_path / "tuning.ledger")[1]
    assert again.lr == again.param_groups[0]["lr"] == 0.02 and again.ledger.header.lr == 0.05


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf, "fast", None])
def test_an_lr_that_can_not_be_is_refused_before_anything_is_measured(lr: Any) -> None:
    optimizer = make()[1]
    with pytest.raises(ValueError, match="lr must be a number"):
        optimizer.lr = lr
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match="lr must be a number"):
        optimizer.step(lambda: pytest.fail("measured"))


def test_an_lr_of_zero_is_a_step_that_goes_nowhere() -> None:
    model, optimizer = make(dtype="bfloat16", mu=0.05)
    optimizer.lr, before = 0, optimizer.parameters.digest()
    optimizer.step(lambda: loss_of(model))
    assert (optimizer.parameters.digest(), optimizer.round) == (before, 1)


def test_it_has_the_face_of_a_torch_optimizer() -> None:
    model, optimizer = make()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert len(optimizer.param_groups) == 1
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert "lr: 0.05" in repr(optimizer)
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    assert optimizer.step(lambda: loss_of(model)).round == 0 and seen == ["stepped"]
    with pytest.raises(ModelError, match="one learning rate"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_its_state_says_where_the_ledger_stands_and_no_other_is_loaded(tmp_path: Path) -> None:
    model, optimizer = make(ledger=tmp_path / "tuning.ledger")
    states = [optimizer.state_dict()]
    for _ in range(2):
        optimizer.step(lambda: loss_of(model))
        states.append(optimizer.state_dict())
    optimizer.close()
    torch.save(states, tmp_path / "states.pt")
    states = torch.load(tmp_path / "states.pt", weights_only=True)
    assert [s["ledger"]["round"] for s in states] == [0, 1, 2]
    states[2]["param_groups"][0]["lr"] = 0.03
    again = make(ledger=tmp_path / "tuning.ledger")[1]
    again.load_state_dict(states[2])
    assert again.lr == 0.03
    with pytest.raises(
        LedgerError, match="state is of step 1 and this ledger stands at step 2: a ledger is not rewound"
    ):
        again.load_state_dict(states[1])
    with pytest.raises(LedgerError, match="step 2 and this ledger stands at step 0: open the ledger file"):
        make()[1].load_state_dict(states[2])
    other = make("conv")[1]
    with pytest.raises(LedgerError, match="other weights"):
        other.load_state_dict(states[2])
    with pytest.raises(LedgerError, match="not a state of a ZeroOrder"):
        again.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    another_model, another = make(lr=0.01)
    for _ in range(2):
        another.step(lambda: loss_of(another_model))
    with pytest.raises(LedgerError, match="another ledger"):
        another.load_state_dict(states[2])


# Slopes at w itself.


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher", "sphere"])
@pytest.mark.parametrize("kind", ["mlp", "tied", "attention"])
def test_forward_slopes_are_the_gradient_along_the_directions(kind: str, distribution: str) -> None:
    model, optimizer = make(kind, estimator="forward", mu=0, distribution=distribution)
    z = optimizer.parameters.directions(3, 0, 0, 4)
    before = float(loss_of(model))
    gradients = torch.autograd.grad(loss_of(model), optimizer.parameters.tensors)
    factor = optimizer.parameters.dimension if distribution == "sphere" else 1
    result = optimizer.step(lambda: loss_of(model))
    expected = factor * z @ torch.cat([g.reshape(-1) for g in gradients])
    np.testing.assert_allclose(result.slopes, expected, rtol=1e-3, atol=1e-4 * factor)
    assert result.loss == pytest.approx(before, rel=1e-5)
    assert (optimizer.ledger.header.mu, optimizer.ledger.header.estimator) == (0.0, "forward")


def test_forward_minimises_resumes_and_is_diagnosed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"estimator": "forward", "mu": 0, "ledger": tmp_path / "tuning.ledger", "k": 8}
    model, optimizer = make("linear", **options)
    before = float(loss_of(model))
    for _ in range(40):
        optimizer.step(lambda: loss_of(model))
    assert float(loss_of(model)) < 0.7 * before
    optimizer.close()
    again_model, again = make("linear", **options)
    assert (again.round, again.parameters.digest()) == (40, optimizer.parameters.digest())
    batches = [lambda n=n: loss_of(again_model, n) for n in (32, 48, 64)]
    assert str(again.diagnose(*batches, trials=2))
    again.close()
    with pytest.raises(LedgerError, match="estimator"):
        make("linear", **{**options, "ledger": tmp_path / "tuning.ledger", "estimator": "two_point", "mu": 1e-3})


@pytest.mark.parametrize(
    ("loss", "message"),
    [(lambda m: float(loss_of(m)), "needs the loss as a tensor, got float"),
     (lambda m: loss_of(m).detach().clone() * 0 + 2.0, "no slope.*detached"),
     (lambda m: cross_entropy(torch.jit.trace(m, X)(X)), "can't carry forward-mode tangents")],
)  # fmt: skip
def test_a_loss_without_a_derivative_is_refused_in_words(loss: Callable[[nn.Module], Any], message: str) -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    with pytest.raises(ModelError, match=message):
        optimizer.step(lambda: loss(model))
    assert optimizer.round == 0


def test_an_infinite_derivative_is_named() -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    before = optimizer.parameters.digest()
    with pytest.raises(ModelError, match=r"the slope is -?(inf|nan) in step 0, direction 0.*left as they are.*at 0"):
        optimizer.step(lambda: (model(X).mean() - model(X).mean().detach()).abs().sqrt())
    assert (optimizer.parameters.digest(), optimizer.round) == (before, 0)


@pytest.mark.parametrize("seed", range(12))
def test_dropout_is_no_reason_to_refuse_forward_derivatives(seed: int) -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    torch.manual_seed(seed)
    optimizer.step(lambda: cross_entropy(nn.functional.dropout(model(X[:4]), 0.5, training=True).repeat(16, 1)))
    assert optimizer.round == 1


def test_a_loss_that_does_not_repeat_itself_is_refused_as_random() -> None:
    model, noise = sequential(), itertools.chain([0.0, 5.0, 0.0], itertools.cycle([0.01]))
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    with pytest.raises(ModelError, match=r"gives other values\. Likely it is random.*'two_point'"):
        optimizer.step(lambda: cross_entropy(model(X)) + next(noise))


def test_a_loss_in_a_thread_is_told_what_carries_derivatives() -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=0.05, mu=0, estimator="forward")
    with pytest.raises(ModelError, match="traced, scripted or compiled, or runs in a thread") as refusal:
        optimizer.step(lambda: in_a_thread(lambda: cross_entropy(model(X))))
    assert "'two_point'" in str(refusal.value) and "gradient" not in str(refusal.value)


# Parameters that hold nothing.


class HoldsNothing(nn.Module):
    """A linear layer beside parameters of size 0."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, where: str, layer: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        empty = nn.Parameter(torch.empty(shape, dtype=dtype))
        if where == "before":
            self.first = nn.ParameterList([empty])
        self.layer = nn.Linear(X.shape[1], TASK.classes, dtype=layer)
        if where == "beside":
            self.layer.register_parameter("none", empty)
        if where == "after":
            self.last = nn.ParameterList([empty])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).float()


@pytest.mark.parametrize("estimator", ["two_point", "forward"])
@pytest.mark.parametrize("where", ["before", "beside", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_a_parameter_that_holds_nothing_changes_nothing(
    shape: tuple[int, ...], dtype: torch.dtype, where: str, estimator: str
) -> None:
    results = []
    for model in (
        HoldsNothing(shape, dtype, where, torch.float32),
        HoldsNothing(shape, dtype, "nowhere", torch.float32),
    ):
        optimizer = ZeroOrder(model, lr=0.05, mu=0.01, k=2, estimator=estimator)
        slopes = [optimizer.step(lambda: cross_entropy(model(X))).slopes.tolist() for _ in range(2)]  # noqa: B023
        parameters = optimizer.parameters
        results.append((slopes, parameters.digest(), parameters.saturated(), parameters.least_moving()))
    assert results[0] == results[1]


def test_a_model_of_16_bits_with_a_block_that_holds_nothing_is_diagnosed() -> None:
    model = HoldsNothing((0,), torch.bfloat16, "after", torch.bfloat16)
    optimizer = ZeroOrder(model, lr=0.01, mu=0.05)
    losses = [lambda n=n: cross_entropy(model(X)) * n for n in (1.0, 1.1)]
    assert str(optimizer.diagnose(*losses, trials=2))
    optimizer.parameters.set_vector(torch.full((optimizer.parameters.dimension,), math.inf))
    assert optimizer.parameters.saturated() == optimizer.parameters.dimension


def test_a_model_that_holds_nothing_at_all_is_refused() -> None:
    model = nn.ParameterList([nn.Parameter(torch.empty(0))])
    with pytest.raises(ModelError, match="hold no weight at all"):
        ZeroOrder(model, lr=0.05)


# 16 bits.


def lost(parameters: Parameters, mu: float) -> float:
    """Return the share of the weights that a probe of length mu leaves as they are."""
    before = parameters.vector()
    plan = parameters.weight_pass(Probe(1, 0, 0, mu))
    after = torch.cat([perturbed(s, plan).float() for s in parameters.segments])
    return float((before == after).float().mean())


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher", "sphere"])
@pytest.mark.parametrize(("dtype", "mu"), [("bfloat16", 1e-5), ("float16", 1e-6)])
def test_a_mu_below_the_resolution_of_16_bit_weights_is_warned_of_with_one_that_works(
    dtype: str, mu: float, distribution: str
) -> None:
    with pytest.warns(RuntimeWarning, match=r"mu = .* is below the resolution of most weights") as caught:
        optimizer = make(dtype=dtype, mu=mu, distribution=distribution)[1]
    better = float(str(caught[0].message).rsplit("mu = ", 1)[1].split()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(dtype=dtype, mu=better, distribution=distribution)
        make(dtype="float32", mu=mu, distribution=distribution)
    assert lost(optimizer.parameters, mu) > 0.5 > lost(optimizer.parameters, better)


@pytest.mark.parametrize(("lr", "told"), [(1e-14, 1), (0.05, 0)])
def test_an_lr_that_moves_no_weight_is_told_once(lr: float, told: int) -> None:
    model = sequential()
    optimizer = ZeroOrder(model, lr=lr, mu=1e-2)
    before = optimizer.parameters.digest()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(25):
            optimizer.step(lambda: cross_entropy(model(X)))
    said = [w for w in caught if "changed no weight" in str(w.message)]
    assert len(said) == told and (optimizer.parameters.digest() == before) == bool(told)
    assert all(w.filename == __file__ for w in said)


def test_a_closure_that_calls_backward_is_told_to_leave_it_out() -> None:
    model = nn.Linear(4, 1)
    optimizer = ZeroOrder(model, lr=0.1, mu=1e-3, k=2, seed=0)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(ModelError, match=r"calls backward\(\), and there are no gradients here"):
        optimizer.step(closure)
    assert optimizer.round == 0


def test_forward_mode_says_that_inference_mode_is_in_its_way() -> None:
    model = nn.Linear(4, 1)
    optimizer = ZeroOrder(model, lr=0.1, mu=1e-3, k=2, seed=0, estimator="forward")
    with torch.inference_mode(), pytest.raises(ModelError, match=r"inference_mode\(\) prevents; call step outside"):
        optimizer.step(lambda: model(torch.ones(3, 4)).square().mean())
    optimizer.step(lambda: model(torch.ones(3, 4)).square().mean())


def test_a_step_after_close_says_how_to_continue(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = ZeroOrder(model, lr=0.1, mu=1e-3, k=2, seed=0, ledger=tmp_path / "ledger")
    optimizer.close()
    with pytest.raises(ModelError, match="this ZeroOrder is closed: make another of the model"):
        optimizer.step(lambda: model(torch.ones(3, 4)).square().mean())
