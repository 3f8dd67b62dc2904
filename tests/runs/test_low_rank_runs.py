"""Runs with low-rank directions: trained, resumed, rebuilt and checked like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import After, make_model, one_thread  # noqa: F401
from synthetic import own_config as config
from tuned_models import loss_of, make, steps

import cyber0
from cyber0.config.schema import Config, to_dict
from cyber0.errors import ConfigError, LedgerError, ModelError
from cyber0.federation.agreement import make_header
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Header
from cyber0.model.vector import Parameters
from cyber0.protocol.client import check_model
from cyber0.runs.replay import rebuild
from cyber0.runs.run import Run

LOW_RANK = ("method.distribution=low_rank", "method.rank=2", "task.options.kind=mlp", "rounds=6", "method.lr=0.01")


@pytest.mark.parametrize(
    "more",
    [
        ("task.dtype=bfloat16", "method.mu=0.05"),
        ("method.optimizer=adam", "method.lr=0.001"),
        ("method.projection_radius=2", "method.local_epochs=2"),
        ("method.estimator=gradient", "method.mu=0", "method.optimizer=hessian"),
        ("method.estimator=forward", "method.mu=0", "serve.seed_mode=chained"),
    ],
    ids=["bfloat16", "adam", "ball", "gradient", "forward"],
)
def test_a_run_is_rebuilt_from_its_folder_and_resumed_to_the_same_bits(more: tuple[str, ...], tmp_path: Path) -> None:
    settings = config(*LOW_RANK, *more)
    whole = Run.start(settings, tmp_path / "whole").run()
    ledger, parameters = rebuild(tmp_path / "whole")
    assert parameters.digest() == whole["model_digest"] and parameters.space == ledger.header.space
    assert ledger.header.space.text == "'low_rank' of rank 2"
    with pytest.raises(ZeroDivisionError):
        cyber0.run(settings, out=tmp_path / "cut", callbacks=[After(3, ZeroDivisionError())])
    assert cyber0.run(settings, out=tmp_path / "cut", resume=True)["model_digest"] == whole["model_digest"]


def test_low_rank_directions_train() -> None:
    simulation = Simulation(config(*LOW_RANK, "federation.attack=none", "method.lr=0.1"))
    before = simulation.evaluate().loss
    for _ in range(30):
        simulation.run_round()
    assert simulation.evaluate().loss < 0.8 * before


@pytest.mark.parametrize("rank", [1, 3])
def test_the_header_states_the_rank_with_the_distribution(rank: int) -> None:
    chosen = config("method.distribution=low_rank", f"method.rank={rank}")
    header = make_header(chosen, Parameters(make_model("mlp"), "low_rank", rank=rank))
    stated = json.loads(header.to_json())
    assert stated["distribution"] == {"name": "low_rank", "options": {"rank": rank}, "version": 1}
    assert "rank" not in stated and "rank" not in stated["settings"]["method"]
    assert Header.from_json(header.to_json()) == header
    assert header.config["method"].get("rank", 1) == rank and header.config["method"]["distribution"] == "low_rank"


def test_weights_of_another_rank_are_refused() -> None:
    header = make_header(
        config("method.distribution=low_rank", "method.rank=2"), Parameters(make_model("mlp"), "low_rank", rank=2)
    )
    check_model(header, Parameters(make_model("mlp"), "low_rank", rank=2))
    with pytest.raises(ModelError, match="directions are 'low_rank' of rank 2 here, not 'low_rank' of rank 1"):
        check_model(header, Parameters(make_model("mlp"), "low_rank"))
    with pytest.raises(ModelError, match="directions are 'low_rank' of rank 2 here, not 'gaussian'"):
        check_model(header, Parameters(make_model("mlp")))


def test_a_rank_is_refused_without_low_rank_directions_and_left_out_where_it_is_one() -> None:
    with pytest.raises(
        ConfigError, match=r'method.rank = 2 .*set method.distribution = "low_rank", or method.rank = 1'
    ):
        Config().with_overrides(["method.rank=2"])
    with pytest.raises(ConfigError, match=r"method.rank = 0 .*at least 1"):
        Config().with_overrides(["method.distribution=low_rank", "method.rank=0"])
    chosen = Config().with_overrides(["method.distribution=low_rank"])
    assert "rank" not in to_dict(chosen)["method"] and Config.from_dict(to_dict(chosen)) == chosen
    other = Config().with_overrides(["method.distribution=low_rank", "method.rank=2"])
    assert to_dict(other)["method"]["rank"] == 2 and Config.from_dict(to_dict(other)) == other


# ZeroOrder.


@pytest.mark.parametrize("rank", [1, 2])
def test_zero_order_takes_low_rank_steps_and_resumes_them(rank: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"distribution": "low_rank", "rank": rank}
    path, uninterrupted = tmp_path / "tuning.ledger", steps("mlp", 4, **options)
    steps("mlp", 2, ledger=path, **options)
    model, optimizer = make("mlp", ledger=path, **options)
    for _ in range(2):
        optimizer.step(lambda: loss_of(model))
    assert optimizer.parameters.digest() == uninterrupted != steps("mlp", 4)
    optimizer.close()
    with pytest.raises(LedgerError, match=r"differs in .*rank"):
        make("mlp", ledger=path, distribution="low_rank", rank=3 - rank)


@pytest.mark.parametrize(("rank", "distribution"), [(2, "gaussian"), (0, "low_rank"), (-1, "sphere")])
def test_zero_order_refuses_a_rank_that_can_not_be(rank: int, distribution: str) -> None:
    with pytest.raises(ValueError, match=rf"rank = {rank} can't be used with distribution='{distribution}'"):
        make("mlp", rank=rank, distribution=distribution)
