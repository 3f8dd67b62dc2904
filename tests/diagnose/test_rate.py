"""lr = "auto": it finds a good rate, records it, and is not measured twice."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import Blobs, config, one_thread  # noqa: F401

import cyber0
from cyber0 import ZeroOrder
from cyber0.cli import main as cli
from cyber0.config.files import load
from cyber0.config.schema import Config
from cyber0.diagnose import rate, trial_runs
from cyber0.diagnose.federation import Clients, diagnose
from cyber0.diagnose.rate import BestStep, best_step, guessed_lr, measured_lr, part_for, trials_for
from cyber0.errors import ConfigError, LedgerError, ModelError
from cyber0.federation.build import lr_without_data
from cyber0.federation.methods import make
from cyber0.federation.simulation import Simulation
from cyber0.ledger import Ledger
from cyber0.runs.replay import check_conduct, rebuild
from cyber0.runs.run import Run
from cyber0.serve import server
from cyber0.study.worker import run_job
from cyber0.tasks.convex import Ridge

SETTINGS: dict[str, Any] = {
    "rounds": 6,
    "evaluate_every": 6,
    "task": {"name": "logistic"},
    "federation": {"clients": 6, "byzantine": 1, "attack": "sign_flip"},
    "method": {"k": 8, "lr": "auto", "batch_size": 8},
}


@pytest.fixture(autouse=True)
def here(folder_without_pictures: Path) -> Path:
    return folder_without_pictures


def changed(**method: Any) -> dict[str, Any]:
    return {**SETTINGS, "method": {**SETTINGS["method"], **method}}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["cyber0", *arguments])
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()


def never(*_: object) -> float:
    raise AssertionError("the learning rate is measured again")


def chosen(*overrides: str) -> float:
    """Return the rate with which trial runs of a logistic regression with these settings begin."""
    settings = Config.from_dict(SETTINGS).with_overrides(overrides)
    return Simulation(settings, measure_lr=guessed_lr).ledger.header.lr


# What is chosen.


def test_on_a_quadratic_the_best_step_is_that_of_the_theory() -> None:
    ridge, k = Ridge(dimension=20, condition=1.0, penalty=0.1), 4
    settings = Config().with_overrides(
        ["task.name=ridge", "federation.clients=2", "federation.byzantine=0", "aggregation.rule=mean",
         f"method.k={k}", "method.batch_size=100000"]
    )  # fmt: skip
    found = best_step(Clients(Simulation(settings, task=ridge), 16), 16)
    assert found.lr == pytest.approx(k / ((20 + k + 1) * ridge.smoothness), rel=0.25)
    assert 0 < found.fall < found.loss


def test_the_longer_a_run_the_smaller_its_rate_and_a_schedule_shortens_it() -> None:
    best = BestStep(lr=1.0, fall=0.1, loss=2.0)
    assert part_for(best, 10, 0.5) == part_for(best, 20, 0.5) == 1.0
    assert part_for(best, 80, 0.5) == pytest.approx(0.5)
    assert part_for(best._replace(loss=-2.0), 80, 0.5) == pytest.approx(0.5)
    assert part_for(best._replace(loss=0.0), 80, 0.5) == rate.LEAST_PART
    assert part_for(best._replace(fall=0.0), 80, 0.5) == 1.0
    short, long, linear = (
        chosen("rounds=100"),
        chosen("rounds=6400"),
        chosen("rounds=6400", "method.lr_schedule=linear"),
    )
    assert long == pytest.approx(short / 4, rel=0.1)
    assert linear == pytest.approx(long * 2 ** (1 / 3), rel=0.1)


def test_full_batches_need_no_smaller_rate_in_a_longer_run() -> None:
    full = "method.batch_size=100000"
    assert chosen(full, "rounds=100") == chosen(full, "rounds=6400")


def test_where_steps_have_one_length_a_linear_schedule_doubles_the_rate() -> None:
    adaptive = "method.optimizer=adaptive"
    long, linear = chosen(adaptive, "rounds=6400"), chosen(adaptive, "rounds=6400", "method.lr_schedule=linear")
    assert linear == pytest.approx(2 * long, rel=0.05)
    assert chosen(adaptive, "rounds=100") > 4 * long


class Scaled(Blobs):
    """A loss in other units."""

    by = 1.0

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.by * super().losses(outputs, targets)


@pytest.mark.parametrize(("optimizer", "power"), [("sgd", 1), ("adaptive", 0), ("normalized", 0)])
def test_the_rate_follows_the_units_of_the_loss_as_the_optimizer_does(optimizer: str, power: int) -> None:
    plain, large = Scaled("linear"), Scaled("linear")
    large.by = 1024.0
    found = []
    for task in (plain, large):
        settings = config("method.lr=auto", f"method.optimizer={optimizer}", "method.k=4")
        found.append(Simulation(settings, task=task, measure_lr=measured_lr).ledger.header.lr)
    assert found[0] == pytest.approx(found[1] * 1024.0**power, rel=0.1)


def test_more_rounds_are_tried_with_fewer_directions_within_limits() -> None:
    assert [trials_for(k) for k in (1, 4, 64, 1000)] == [32, 16, 8, 8]


# Trial runs.


def tried(
    losses: dict[int, float], start: float = math.inf, most: int = trial_runs.MOST_TRIALS
) -> tuple[int, list[int]]:
    found = trial_runs.search(lambda e: losses.get(e, math.inf), start, most)
    return found.best, sorted(found.losses)


def test_a_rate_is_halved_as_long_as_that_helps_or_else_doubled() -> None:
    assert tried({0: 0.4, -1: 0.3, -2: 0.2, -3: 0.25}) == (-2, [-3, -2, -1, 0])
    assert tried({0: 0.3, -1: 0.4, 1: 0.2, 2: 0.5}) == (1, [-1, 0, 1, 2])
    assert tried({0: 0.3, -1: 0.4, 1: 0.4}) == (0, [-1, 0, 1])
    assert tried({0: 0.3, -1: 0.3, -2: 0.3}) == (-1, [-2, -1, 0])


def test_a_search_goes_on_below_rates_that_diverge_and_ends() -> None:
    assert tried({-4: 0.2, -5: 0.3}) == (-4, [-5, -4, -3, -2, -1, 0])
    assert tried({0: 2e14, -1: 3e14, -2: 4e14, -3: 0.3, -4: 0.4}, start=0.7) == (-3, [-4, -3, -2, -1, 0])
    assert tried({0: 4e14, -1: 3e14, -2: 4e14, -3: 0.6, -4: 0.4, -5: 0.5}, start=0.7)[0] == -4
    assert tried({0: 0.9, -1: 0.8, -2: 0.9, -3: 1.0}, start=0.7, most=4) == (-1, [-3, -2, -1, 0])  # none is better
    assert tried({}, most=5) == (-4, [-4, -3, -2, -1, 0])
    assert tried({e: 1.0 + e / 10 for e in range(-9, 1)}, most=4) == (-3, [-3, -2, -1, 0])


class Relu(cyber0.Task):
    """A small network whose loss is flat at the starting weights, and steep later."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(57, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def train_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        words, counts = torch.randn(57, generator=random), torch.randn(600, 57, generator=random)
        return counts, (counts @ words > 0).long()


def test_a_network_that_is_flat_at_its_start_gets_a_rate_with_which_it_learns() -> None:
    settings = Config().with_overrides(["rounds=80", "method.lr=auto"])
    found = Simulation(settings, task=Relu(), measure_lr=measured_lr)
    first = Simulation(settings, task=Relu(), measure_lr=guessed_lr)
    for simulation in (found, first):
        for _ in range(settings.rounds):
            simulation.run_round()
    assert found.evaluate().accuracy > 0.8 > first.evaluate().accuracy
    assert found.ledger.header.lr < first.ledger.header.lr / 2


@pytest.mark.parametrize("optimizer", ["momentum", "hessian", "adaptive"])
def test_trial_runs_leave_no_trace_in_weights_state_and_samples(optimizer: str) -> None:
    more = (f"method.optimizer={optimizer}", "method.k=4", "rounds=8", "method.batch_size=3")
    auto = Simulation(config("method.lr=auto", *more), task=Blobs("linear"), measure_lr=measured_lr)
    given = Simulation(config(f"method.lr={auto.ledger.header.lr!r}", *more), task=Blobs("linear"))
    assert auto.round == len(auto.ledger) == auto.decided == 0 and auto.client.digest() == given.client.digest()
    for simulation in (auto, given):
        for _ in range(3):
            simulation.run_round()
    assert auto.client.digest() == given.client.digest() and auto.ledger.chain == given.ledger.chain


def test_trial_runs_are_judged_by_training_samples_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_evaluated(*_: object) -> None:
        raise AssertionError("the test samples are looked at")

    monkeypatch.setattr(Blobs, "evaluate", never_evaluated)
    settings = config("method.lr=auto", "method.k=4", "rounds=4")
    assert Simulation(settings, task=Blobs("linear"), measure_lr=measured_lr).lr_search


class Memorised(cyber0.Task):
    """Random labels and more weights than samples: the faster these are learned, the worse for others."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(200, 2)

    def train_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        inputs = torch.randn(96, 200, generator=random)
        return inputs, (inputs[:, 0] + torch.randn(96, generator=random) > 0).long()


def test_trial_runs_are_judged_by_samples_that_they_do_not_learn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Config().with_overrides(["rounds=40", "method.k=8", "method.lr=auto", "federation.byzantine=0"])
    found = Simulation(settings, task=Memorised(), measure_lr=measured_lr).ledger.header.lr
    monkeypatch.setattr(trial_runs, "_split", lambda share: (share, share))
    assert found < Simulation(settings, task=Memorised(), measure_lr=measured_lr).ledger.header.lr


@pytest.mark.parametrize("size", [1, 2, 4, 5, 12])
def test_every_client_holds_samples_out_and_keeps_some(size: int) -> None:
    kept, held = trial_runs._split(np.arange(size))
    assert len(kept) and len(held) == max(1, size // 5) and sorted({*kept, *held}) == list(range(size))


def test_a_run_whose_trials_all_diverge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runs.TrialRuns, "loss", lambda *_: math.inf)
    with pytest.raises(ConfigError, match=r"all 8 trial runs of 3 rounds diverge, the last with lr = .* set lr to"):
        Simulation(Config.from_dict(SETTINGS), measure_lr=measured_lr)


def test_what_was_tried_and_what_it_cost_is_in_the_summary(here: Path) -> None:
    summary = cyber0.run(SETTINGS, out="auto")
    search = json.loads((here / "auto/summary.json").read_text())["lr_search"]
    assert search == summary["lr_search"] and search["rounds"] == 3
    assert 3 <= search["trials"] == len(search["losses"]) <= trial_runs.MOST_TRIALS
    assert f"{summary['lr_auto']:.2g}" in search["losses"]
    drawn = math.ceil(trial_runs.SAMPLES / (5 * 8))  # by five honest clients, in batches of eight
    assert search["forward_passes"] == search["trials"] * (3 * 2 * 8 + drawn) + drawn  # two sides of eight directions
    assert "lr_search" not in cyber0.run(changed(lr=summary["lr_auto"]), out="given")


# What is recorded.


def test_a_run_records_its_rate_and_is_the_run_of_that_number(here: Path) -> None:
    summary = cyber0.run(SETTINGS, out="auto")
    header = Ledger.open(here / "auto" / "ledger.bin").header
    assert header.lr == summary["lr_auto"] == json.loads((here / "auto/summary.json").read_text())["lr_auto"]
    assert load(here / "auto/config.toml").method.lr == "auto"
    again, given = cyber0.run(SETTINGS, out="again"), cyber0.run(changed(lr=header.lr), out="given")
    assert summary["model_digest"] == again["model_digest"] == given["model_digest"]
    assert summary["chain"] == again["chain"] == given["chain"]
    assert "lr_auto" not in given


def test_measuring_leaves_the_weights_as_they_are() -> None:
    settings = config("method.k=4", "method.lr=auto")
    measured = Simulation(settings, task=Blobs("linear"), measure_lr=measured_lr)
    plain = Simulation(config("method.k=4"), task=Blobs("linear"))
    assert measured.parameters.digest() == plain.parameters.digest() and measured.round == 0


def test_a_resumed_run_takes_the_rate_of_its_ledger(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cyber0.run(SETTINGS, out="whole")
    run = Run.start(Config.from_dict(SETTINGS), here / "cut", measure_lr=measured_lr)
    for _ in range(3):
        run.simulation.run_round()
    run.simulation.close()
    monkeypatch.setattr(rate, "best_step", never)
    summary = cyber0.run(out="cut", resume=True)
    assert (summary["chain"], summary["lr_auto"]) == (whole["chain"], whole["lr_auto"])
    longer = cyber0.run({**SETTINGS, "rounds": 9}, out="cut", resume=True)
    assert (longer["rounds"], longer["lr_auto"]) == (9, whole["lr_auto"])


def test_a_run_that_was_cut_off_before_its_first_record_is_measured_when_it_starts_again(here: Path) -> None:
    run = Run.start(Config.from_dict(SETTINGS), here / "cut", measure_lr=measured_lr)
    run.simulation.close()
    (here / "cut/ledger.bin").unlink()
    assert cyber0.run(out="cut", resume=True)["chain"] == cyber0.run(SETTINGS, out="whole")["chain"]


def test_replay_verify_and_diagnose_take_the_rate_from_the_ledger(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = cyber0.run(SETTINGS, out="auto")
    monkeypatch.setattr(rate, "best_step", never)
    ledger, parameters = rebuild(here / "auto")
    assert parameters.digest() == summary["model_digest"]
    assert check_conduct(ledger).fault(next(iter(ledger))) == ""
    assert diagnose(here / "auto", round=0, trials=2)["lr"] == summary["lr_auto"]


def test_a_config_that_asks_for_auto_can_be_diagnosed(here: Path) -> None:
    (here / "my.toml").write_text('rounds = 6\n[task]\nname = "logistic"\n[method]\nk = 8\nlr = "auto"\n')
    found = diagnose(here / "my.toml", trials=2)
    assert found["lr"] > 0 and found["stations"][0]["lr_low"] <= found["lr"] * 4


def test_a_rate_that_the_ledger_does_not_have_is_refused(here: Path) -> None:
    cyber0.run(SETTINGS, out="auto")
    text = (here / "auto/config.toml").read_text().replace('lr = "auto"', "lr = 0.5")
    (here / "auto/config.toml").write_text(text)
    with pytest.raises(LedgerError, match=r"method.lr \(now 0.5, on record"):
        cyber0.run(out="auto", resume=True)


def test_studies_and_mezo_find_rates_too(here: Path) -> None:
    settings = Config.from_dict({**SETTINGS, "federation": {"byzantine": 0}}).with_overrides(["method.name=mezo"])
    folder = here / "cell"
    from cyber0.config.schema import to_dict

    run_job({"folder": str(folder), "config": to_dict(settings)}, lambda _: None)
    assert json.loads((folder / "summary.json").read_text())["lr_auto"] > 0


def test_the_command_shows_what_was_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [f"--set={s}" for s in ("task.name=logistic", "method.k=8", "method.lr=auto", "rounds=2")]
    command(monkeypatch, "run", *sets, "--out", "run")
    lr = json.loads(Path("run/summary.json").read_text())["lr_auto"]
    assert re.search(rf'lr = {lr:g}, by \d trial runs of 1 rounds \(method.lr = "auto"\)', capsys.readouterr().out)


# What is refused.


def test_vector_methods_refuse_auto() -> None:
    with pytest.raises(ConfigError, match=r'method.lr = "auto" is for method.name = "cyber0" and "mezo"'):
        Config().with_overrides(["method.name=fedavg", "method.lr=auto"])


@pytest.mark.parametrize("value", ["automatic", "Auto", "0.1x"])
def test_any_other_word_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a number or 'auto'"):
        Config().with_overrides([f"method.lr={value}"])


def test_a_simulation_without_a_way_to_measure_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"start it by `cyber0 run` or cyber0.run"):
        make(Config.from_dict(SETTINGS))


class Flat(Blobs):
    """A loss that does not depend on the weights."""

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0 * super().losses(outputs, targets) + 1


class Broken(Blobs):
    """A loss that is not a number."""

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return math.nan * super().losses(outputs, targets)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Flat("linear"), "the loss is flat: .* raise mu"),
        (Broken("linear"), "the loss at the starting weights is nan; inspect the samples"),
    ],
)
def test_a_loss_that_tells_nothing_is_refused_with_a_remedy(task: Blobs, words: str) -> None:
    with pytest.raises(ConfigError, match=f'lr = "auto" finds no learning rate: {words}.* or set lr to a number'):
        Simulation(config("method.lr=auto", "method.k=4"), task=task, measure_lr=measured_lr)


def test_where_no_step_helps_other_samples_that_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attacked = {**SETTINGS, "federation": {"clients": 4, "byzantine": 3, "attack": "sign_flip"}}
    attacked["aggregation"] = {"rule": "mean"}
    with pytest.raises(ConfigError, match=r"no step .* lowers the loss of other samples; raise the batch size or k"):
        cyber0.run(attacked, out="run")
    assert not (here / "run").exists()


# Without data.


def test_a_federator_takes_the_length_of_a_step_from_mu(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive = Config().with_overrides(["method.lr=auto", "method.optimizer=adaptive", "method.mu=0.01"])
    assert lr_without_data(adaptive) == pytest.approx(2 * 0.01 * 8, rel=0.05)
    assert lr_without_data(adaptive.with_overrides(["method.lr_schedule=linear"])) == pytest.approx(0.32, rel=0.05)
    assert lr_without_data(adaptive.with_overrides(["method.local_epochs=4"])) == pytest.approx(0.04, rel=0.05)
    (here / "my.toml").write_text(
        'rounds = 6\n[task]\nname = "logistic"\n[method]\nk = 4\nlr = "auto"\noptimizer = "adaptive"\n'
    )
    command(monkeypatch, "init", "my.toml", "--out", "header.bin")
    header = Ledger.open(here / "header.bin").header
    assert header.lr == 0.004
    monkeypatch.setattr(server, "_made_header", lambda made: replace(header, lr=made.method.rate))
    with server.prepare(here / "my.toml", here / "served", [], resume=False) as ledger:
        assert ledger.header.lr == load(here / "served/config.toml").method.lr == 0.004
    text = (here / "my.toml").read_text().replace("k = 4", "k = 4\nmu = 0.001")
    (here / "my.toml").write_text(text)
    monkeypatch.setattr("cyber0.federation.build.STEP_LENGTH", 3.0)  # as of another version: the ledger's rate stays
    with server.prepare(here / "my.toml", here / "served", ["rounds=9"], resume=True) as ledger:
        assert ledger.header.lr == load(here / "served/config.toml").method.lr == 0.004


@pytest.mark.parametrize(
    ("setting", "words"),
    [("method.optimizer=sgd", 'set method.optimizer = "adaptive"'), ("method.mu=0", "in units of method.mu")],
)
def test_without_data_and_without_a_length_nothing_is_chosen(setting: str, words: str) -> None:
    settings = ["method.lr=auto", "method.optimizer=adaptive", "method.estimator=gradient", setting]
    with pytest.raises(ConfigError, match=words):
        lr_without_data(Config().with_overrides(settings))


# ZeroOrder.

INPUTS = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS @ torch.randn(20, 1, generator=torch.Generator().manual_seed(1))


def network() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Linear(20, 1)


def trained(optimizer: ZeroOrder, model: torch.nn.Module, steps: int = 3) -> str:
    for _ in range(steps):
        optimizer.step(lambda: torch.nn.functional.mse_loss(model(INPUTS), TARGETS))
    return optimizer.parameters.digest()


def test_zero_order_finds_its_rate_at_the_first_step_and_is_then_as_if_it_was_given(here: Path) -> None:
    model, file = network(), here / "auto.ledger"
    auto = ZeroOrder(model, lr="auto", k=4, ledger=file)
    assert math.isnan(auto.lr) and not file.exists()
    digest = trained(auto, model)
    other = network()
    given = ZeroOrder(other, lr=auto.lr, k=4, ledger=here / "given.ledger")
    assert trained(given, other) == digest
    auto.close()
    given.close()
    assert file.read_bytes() == (here / "given.ledger").read_bytes()


def test_a_resumed_zero_order_takes_the_rate_of_its_ledger(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = network(), here / "auto.ledger"
    first = ZeroOrder(model, lr="auto", k=4, ledger=file)
    trained(first, model)
    first.close()
    monkeypatch.setattr(rate, "best_step", never)
    again = network()
    second = ZeroOrder(again, lr="auto", k=4, ledger=file)
    assert (second.lr, second.round) == (first.lr, 3)
    assert second.parameters.digest() == first.parameters.digest()
    trained(second, again)


def test_a_rate_that_is_set_before_the_first_step_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "best_step", never)
    model = network()
    optimizer = ZeroOrder(model, lr="auto", k=4)
    optimizer.lr = 0.01
    trained(optimizer, model)
    assert optimizer.ledger.header.lr == optimizer.lr == 0.01


def test_a_scheduler_is_made_after_the_rate_is_found() -> None:
    model = network()
    optimizer = ZeroOrder(model, lr="auto", k=4)
    early = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)  # it remembers the rate it was made with
    trained(optimizer, model, 1)
    early.step()
    with pytest.raises(ModelError, match=r"call optimizer.find_lr\(loss\) before"):
        trained(optimizer, model, 1)
    model = network()
    optimizer = ZeroOrder(model, lr="auto", k=4)
    halves = [lambda h=h: torch.nn.functional.mse_loss(model(INPUTS[h::2]), TARGETS[h::2]) for h in (0, 1)]
    found = optimizer.find_lr(*halves)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    trained(optimizer, model, 1)
    scheduler.step()
    assert optimizer.find_lr(*halves) == optimizer.lr == found / 2


def test_a_flat_loss_of_zero_order_is_refused_and_no_ledger_is_left(here: Path) -> None:
    optimizer = ZeroOrder(network(), lr="auto", ledger=here / "flat.ledger")
    with pytest.raises(ConfigError, match="the loss is flat"):
        optimizer.step(lambda: 1.0)
    assert not (here / "flat.ledger").exists()


def test_a_zero_order_that_steps_by_one_length_takes_a_smaller_part() -> None:
    found = {}
    for name in ("sgd", "adaptive"):
        model = network()
        optimizer = ZeroOrder(model, lr="auto", k=4, optimizer=name)
        trained(optimizer, model, 1)
        slopes = next(iter(optimizer.ledger)).values
        found[name] = optimizer.lr * (1 if name == "adaptive" else float((slopes**2).mean() ** 0.5))
    assert found["adaptive"] < found["sgd"]


def test_with_lr_changes_nothing_else() -> None:
    from cyber0.federation.build import with_lr

    settings = Config.from_dict(SETTINGS)
    assert with_lr(settings, 0.5) == replace(settings, method=replace(settings.method, lr=0.5))
