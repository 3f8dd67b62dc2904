"""ZeroOrder as a torch optimizer: arguments, schedulers, its state, and what it says to common mistakes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import Blobs, make_model, one_thread, plain_two_point  # noqa: F401
from torch import nn
from tuned_models import loss_of, make, sequential

from cyber0 import ZeroOrder
from cyber0.errors import LedgerError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested


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


@pytest.mark.slow
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
        LedgerError, match=r"state is of step 1 and this ledger is at step 2: a ledger can't be rewound"
    ):
        again.load_state_dict(states[1])
    with pytest.raises(LedgerError, match="step 2 and this ledger is at step 0: open the ledger file"):
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
