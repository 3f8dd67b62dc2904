"""ZeroOrder: fine-tuning of one torch model, resumable from its ledger, and w is safe from a loss that fails."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import Blobs, make_model, one_thread, plain_two_point  # noqa: F401
from tuned_models import TASK, loss_of, make, steps

from cyber0 import Ledger, ZeroOrder
from cyber0.directions import Directions
from cyber0.errors import LedgerError, ModelError
from cyber0.model.vector import Parameters
from cyber0.runs.replay import check_conduct

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_ledger_of_an_earlier_version_is_continued_whose_header_says_constant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = tmp_path / "old.ledger", tmp_path / "new.ledger"
    for path, schedule in zip(paths, ("constant", "free"), strict=True):
        with monkeypatch.context() as version:
            version.setattr("cyber0.zero_order.optimizer.FREE", schedule)
            model, optimizer = make(ledger=path)
            optimizer.lr = 0.02
            optimizer.step(lambda model=model: loss_of(model))
            optimizer.close()
        assert Ledger.open(path).header.lr_schedule == schedule
    digests = set()
    for path in paths:
        model, optimizer = make(ledger=path)
        assert optimizer.round == 1 and optimizer.lr == 0.02
        optimizer.step(lambda model=model: loss_of(model))
        optimizer.close()
        digests.add(optimizer.parameters.digest())
        assert check_conduct(Ledger.open(path)).free
    assert len(digests) == 1
    header = dataclasses.replace(Ledger.open(paths[1]).header, lr_schedule="linear")
    Ledger.create(tmp_path / "other.ledger", header).close()
    with pytest.raises(LedgerError, match="differs in lr_schedule"):
        make(ledger=tmp_path / "other.ledger")


@pytest.mark.slow
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


def test_starting_resuming_and_restoring_hash_the_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    digest = Parameters.digest
    monkeypatch.setattr(Parameters, "digest", lambda self: (hashed.append(1), digest(self))[1])
    model, optimizer = make(ledger=tmp_path / "ledger")
    assert len(hashed) == 1
    start = {name: t.clone() for name, t in optimizer.parameters.state().items()}
    optimizer.step(lambda: loss_of(model))
    optimizer.close()
    resumed = make(ledger=tmp_path / "ledger")[1]
    assert (len(hashed), resumed.round) == (2, 1)
    resumed.restore(start)
    assert len(hashed) == 3
