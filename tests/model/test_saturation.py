"""Weights that would leave the finite range are clamped, counted, and the user is told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import one_thread, own_config  # noqa: F401
from torch import nn

from cyber0 import ZeroOrder
from cyber0.cli import display as screen
from cyber0.config.schema import Config
from cyber0.directions import Step
from cyber0.directions.definition import GAUSSIAN_REACH
from cyber0.federation import methods
from cyber0.model.vector import Parameters
from cyber0.runs import replay as replays
from cyber0.runs.run import Run

DIVERGING = ("rounds=30", "aggregation.rule=mean", "method.estimator=gradient", "method.mu=0", "method.lr=1e9")
DTYPES = ["float32", "float16", "bfloat16"]


def config(*overrides: str) -> Config:
    """Return settings of blobs whose loss diverges under too large a learning rate."""
    return own_config("task.options.penalised=true", *overrides)


def weights(rows: int, dtype: torch.dtype, value: float) -> Parameters:
    model = nn.Linear(10, rows, bias=False)
    nn.init.constant_(model.weight, value)
    return Parameters(model.to(dtype))


def step(size: float, round: int = 0, k: int = 2) -> Step:
    return Step(1, round, np.full(k, size, np.float32))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_diverging_run_ends_with_finite_weights_and_says_how_many_were_clamped(tmp_path: Path, dtype: str) -> None:
    this = Run.start(config(*DIVERGING, f"task.dtype={dtype}"), tmp_path / "run")
    summary = this.run()
    w = this.simulation.parameters.vector()
    assert w.isfinite().all()
    at_the_edge = int((w.abs() == torch.finfo(getattr(torch, dtype)).max).sum())
    assert summary["saturated_weights"] == at_the_edge > 0
    assert replays.rebuild(tmp_path / "run")[1].digest() == summary["model_digest"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_command_line_warns_of_clamped_weights_and_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, settings in (("bad", DIVERGING), ("good", ("rounds=3",))):
        this = Run.start(config(*settings), tmp_path / name)
        screen.conclude(this, this.run(), screen.new_console())
        shown = " ".join(" ".join(capsys.readouterr()).split())
        assert ("weights were clamped" in shown) == (name == "bad")
        assert name == "good" or "cyber0 diagnose" in shown


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("radius", [0.0, 2.0])
def test_the_baselines_clamp_too(dtype: str, radius: float) -> None:
    settings = ("method.name=fedavg", "aggregation.rule=mean", "method.lr=1e9", f"method.projection_radius={radius}")
    federation: Any = methods.make(config(*settings, "federation.byzantine=0", f"task.dtype={dtype}"))
    for _ in range(30):
        federation.run_round()
        assert federation.w.isfinite().all() and federation.parameters.vector().isfinite().all()
    assert (federation.parameters.saturated() > 0) == (radius == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_at_the_edge_are_counted(dtype: torch.dtype) -> None:
    p = weights(30, dtype, 1.0)
    assert p.saturated() == 0
    p.commit(step(1e-3))
    assert p.saturated() == 0
    p.commit(step(1e38, round=1, k=8))
    count = p.saturated()
    assert count == int((p.vector().abs() == torch.finfo(dtype).max).sum()) > 0
    for value, expected in ((0.0, 0), (torch.finfo(dtype).max, 300), (-1.0, 0)):
        p.load({"weight": torch.full((30, 10), value, dtype=dtype)})
        assert p.saturated() == expected
        p.set_vector(torch.full((300,), value) * -2)
        assert p.saturated() == expected


def test_weights_are_not_read_while_none_can_be_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    p = weights(3, torch.float16, 1.0)
    assert p.saturated() == 0
    read: list[int] = []
    plain = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *given: (read.append(1), plain(*given))[1])
    for t in range(1000):
        p.commit(step(1e-3, round=t))
        assert p.saturated() == 0
    assert not read
    for t in range(1000, 1010):
        p.commit(step(1e3, round=t))
        p.saturated()
    assert read


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_bound_on_the_weights_holds_also_when_rounding_goes_up(dtype: torch.dtype) -> None:
    """Stochastic rounding may move a weight by a whole step though its update is a hundredth of that."""
    p = weights(100, dtype, 1.0)
    p.saturated()
    for t in range(300):
        p.commit(step(1e-5, round=t, k=1))
        assert p._bound is not None and float(p.vector().abs().max()) <= p._bound


def test_the_bound_on_the_weights_is_that_of_the_distribution() -> None:
    """Coordinates of low-rank directions are products, and reach further than Gaussian ones."""
    model = nn.Linear(60, 50, bias=False)
    nn.init.zeros_(model.weight)
    p = Parameters(model, "low_rank", rank=2)
    p.saturated()
    largest = 0.0
    for t in range(20):
        before = p.vector()
        p.commit(step(1.0, round=t, k=1))
        largest = max(largest, float((p.vector() - before).abs().max()))
        assert p._bound is not None and float(p.vector().abs().max()) <= p._bound
    assert largest > GAUSSIAN_REACH


def test_zero_order_warns_once_when_weights_are_clamped() -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = ZeroOrder(model, lr=1e39, mu=1e-2, k=2)
    with pytest.warns(RuntimeWarning, match=r"of 8 weights were clamped .* lower lr = 1e\+39") as caught:
        optimizer.step(lambda: model.weight.square().sum())
    assert caught[0].filename == __file__
    assert optimizer.parameters.vector().isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer._guards.warn_if_saturated(1, optimizer.lr)


def test_zero_order_is_silent_while_all_is_well() -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = ZeroOrder(model, lr=1e-2, mu=1e-2, k=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            optimizer.step(lambda: model.weight.square().sum())
