"""Changes of the model from outside are refused by name, and can be undone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import Blobs, make_model, one_thread, plain_two_point  # noqa: F401
from torch import nn
from tuned_models import TASK, X, cross_entropy, loss_of, make

from cyber0 import ZeroOrder
from cyber0.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested


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
