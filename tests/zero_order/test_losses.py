"""However a loss computes the model, its slopes are right, or it is refused with the reason."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import Blobs, make_model, one_thread, plain_two_point  # noqa: F401
from torch import nn
from tuned_models import TASK, X, cross_entropy, in_a_thread, sequential

from cyber0 import ZeroOrder
from cyber0.errors import ModelError

pytestmark = [  # still in use, so still tested; and what is traced need not hold for other inputs
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_loss_of_a_batch_without_the_batch_is_refused_with_the_remedy_and_other_type_errors_stay() -> None:
    model = nn.Linear(3, 1)
    optimizer = ZeroOrder(model, lr=0.1, mu=1e-3, k=1, seed=0)
    with pytest.raises(TypeError, match=r"step got no batch .*optimizer\.step\(loss_fn, batch\)"):
        optimizer.step(lambda batch: model(batch).mean())
    with pytest.raises(TypeError, match="unsupported operand"):
        optimizer.step(lambda: model(torch.ones(2, 3)).mean() + "one")
    assert optimizer.round == 0
