"""Diagnostics: the ranges hold what is known to be best, each fault is named, and looking changes nothing."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import Blobs, config, make_model, one_thread  # noqa: F401
from torch import nn

from cyber0 import ZeroOrder
from cyber0.cli import main as cli
from cyber0.config.choices import PROBING_ESTIMATORS
from cyber0.config.files import to_toml
from cyber0.config.schema import Config
from cyber0.diagnose import federation, records
from cyber0.diagnose import verdict as words
from cyber0.diagnose.closures import Closures
from cyber0.diagnose.measurement import Probing
from cyber0.diagnose.mu_scan import true_slopes
from cyber0.diagnose.signal import of_reports
from cyber0.errors import ConfigError, LedgerError
from cyber0.federation.simulation import Simulation
from cyber0.report.contents import contents
from cyber0.report.folder import read
from cyber0.runs.run import Run
from cyber0.tasks.convex import Ridge

TRIALS = 4


def stations(simulation: Simulation, trials: int = TRIALS) -> dict[str, Any]:
    """Return a diagnosis of a simulation where it stands."""
    station = federation.measured(simulation, trials)
    return {**federation.facts(simulation), "stations": [station]}


def blobs(*overrides: str, kind: str = "linear", task: Blobs | None = None) -> dict[str, Any]:
    chosen = config("federation.byzantine=0", *overrides)
    return stations(Simulation(chosen, task=task or Blobs(kind)))


def topics(diagnosis: dict[str, Any], level: str = words.BAD) -> set[str]:
    return {f.topic for f in words.verdict(diagnosis).findings if f.level == level}


# What is measured.


def test_on_a_quadratic_the_range_of_lr_is_that_of_the_theory() -> None:
    # Isotropic ridge regression on whole local sets: a step c falls by c |g|^2 (1 - c / 2c*), with 1 / c* = L tau,
    # tau = (d + k + 1) / k for Gaussian directions.
    ridge, k = Ridge(dimension=20, condition=1.0, penalty=0.1), 4
    chosen = Config().with_overrides(
        ["task.name=ridge", "federation.clients=2", "federation.byzantine=0", "aggregation.rule=mean",
         f"method.k={k}", "method.batch_size=100000", "method.lr=0.02"]
    )  # fmt: skip
    station = stations(Simulation(chosen, task=ridge), 16)["stations"][0]
    best = k / ((20 + k + 1) * ridge.smoothness)
    assert station["lr_low"] < best < station["lr_high"]
    assert station["lr_low"] == pytest.approx(0.29 * best, rel=0.4)
    assert station["lr_rise"] == pytest.approx(2 * best, rel=0.4)
    assert station["mu_high"] >= 0.1  # slopes of a quadratic are right with any mu that rounding allows


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher", "sphere"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_what_slopes_promise_comes_true_for_small_steps_whatever_the_directions(kind: str, distribution: str) -> None:
    found = blobs("method.lr=1e-3", f"method.distribution={distribution}", kind=kind)["stations"][0]
    assert found["promised"] > 0
    assert found["real"] == pytest.approx(found["promised"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["linear", "conv", "branching"])
def test_measuring_changes_no_bit_and_a_run_goes_on_as_if_nothing_was(kind: str, dtype: str) -> None:
    chosen = config(f"task.dtype={dtype}", "method.k=2", "method.mu=0.01")
    looked, plain = (Simulation(chosen, task=Blobs(kind)) for _ in range(2))
    for simulation in (looked, plain):
        simulation.run_round()
    federation.measured(looked, 2)
    assert looked.parameters.digest() == plain.parameters.digest() and looked.round == 1
    for simulation in (looked, plain):
        simulation.run_round()
    assert looked.parameters.digest() == plain.parameters.digest()


@pytest.mark.parametrize("estimator", ["gradient", "forward"])
def test_without_a_probing_step_there_is_nothing_to_say_of_mu(estimator: str) -> None:
    found = blobs(f"method.estimator={estimator}", "method.mu=0")
    assert found["mu"] is None and found["stations"][0]["probing"] == []
    assert words.verdict(found).level != words.BAD
    assert not any(line.startswith("mu") for line in words.suggestions(found))


def test_one_sided_slopes_have_a_narrower_range_of_mu_and_fewer_evaluations() -> None:
    ridge = Ridge(dimension=20, condition=1.0, penalty=0.1)

    def measured(estimator: str, mu: float) -> dict[str, Any]:
        chosen = Config().with_overrides(
            ["task.name=ridge", "federation.clients=2", "federation.byzantine=0", "aggregation.rule=mean", "method.k=4",
             "method.batch_size=100000", "method.lr=0.02", f"method.mu={mu}", f"method.estimator={estimator}"]
        )  # fmt: skip
        return stations(Simulation(chosen, task=ridge))

    central, one_sided = (measured(name, 1e-3) for name in ("two_point", "one_sided"))
    (wide,), (narrow,) = central["stations"], one_sided["stations"]
    assert words.verdict(one_sided).level != words.BAD
    assert narrow["mu_high"] < 0.5 * wide["mu_high"]  # mu/2 z'Hz, of which a central difference knows nothing
    by_mu = {point["mu"]: point for point in narrow["probing"]}
    for point in wide["probing"]:  # beyond rounding, the error is the even part of the loss's change over the odd one
        if point["mu"] > 0.01 and point["mu"] in by_mu:
            expected = math.sqrt((1 - point["straight"]) / point["straight"])
            assert by_mu[point["mu"]]["error"] == pytest.approx(expected, rel=0.05)
    # A loss that differs from itself is judged by its change over the distance between the two losses: mu, or 2 mu.
    shaky = {**narrow, "repeat": 1.5 * words.TOO_SHAKY * narrow["mu"] * narrow["slope"]}
    faults = {name: topics({**one_sided, "estimator": name, "stations": [shaky]}) for name in PROBING_ESTIMATORS}
    assert faults == {"two_point": set(), "one_sided": {"loss"}}
    bent = measured("one_sided", 10.0)
    assert topics(bent) == {"mu"}
    assert "the estimator two_point cancels most of the bend" in words.verdict(bent).findings[0].text


@pytest.mark.parametrize(("estimator", "each"), [("two_point", 8), ("one_sided", 5)])
def test_a_diagnosis_counts_the_evaluations_of_its_estimator(estimator: str, each: int) -> None:
    _, optimizer, losses = zero_order(mu=1e-2, estimator=estimator)
    calls = [0]

    def counted() -> torch.Tensor:
        calls[0] += 1
        return losses[0]()

    optimizer.step(counted)
    calls[0] = 0
    found = optimizer.diagnose(counted, trials=2)
    assert found.data["stations"][0]["evaluations"] == calls[0] - 1  # one more shows whether the loss is finite
    calls[0] = 0
    Closures(optimizer, [counted]).slopes(0)
    assert calls[0] == each


@pytest.mark.parametrize(("factor", "advised"), [(1e-3, True), (1e3, False)])
def test_a_falling_lr_is_advised_only_where_the_range_falls(factor: float, advised: bool) -> None:
    found = blobs()
    start = found["stations"][0]
    end = {**start, "lr_low": factor * start["lr_low"], "lr_high": factor * start["lr_high"]}
    found["stations"] = [start, end]
    (line,) = [line for line in words.suggestions(found) if line.startswith("lr")]
    assert ("lower it over the rounds" in line) is advised and line.endswith("choose a value in between")


@settings(max_examples=25)
@given(ratio=st.floats(1, 9), clients=st.integers(4, 20), seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-6, 1e6))
def test_signal_and_noise_are_found_again(ratio: float, clients: int, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    rounds = [scale * (ratio * rng.normal(size=(1, 100)) + rng.normal(size=(clients, 100))) for _ in range(4)]
    signal = of_reports(rounds)
    assert signal is not None and signal.present
    assert signal.ratio == pytest.approx(ratio, rel=0.25)
    assert signal.noise == pytest.approx(scale, rel=0.1)
    assert signal.decided_ratio == pytest.approx(signal.ratio * math.sqrt(clients))


@settings(max_examples=25)
@given(clients=st.integers(4, 20), seed=st.integers(0, 2**32 - 1))
def test_noise_alone_is_no_signal(clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    signal = of_reports([rng.normal(size=(clients, 100)) for _ in range(4)])
    assert signal is not None and not signal.present
    assert signal.agreement == pytest.approx(0.5, abs=0.1)


def test_rows_that_are_not_finite_are_left_out_and_one_row_says_nothing() -> None:
    rows = np.array([[1.0, 2.0], [1.1, 2.1], [math.nan, 0.0]])
    assert of_reports([rows]) == of_reports([rows[:2]])
    assert of_reports([rows[:1]]) is None and of_reports([]) is None


def test_slopes_that_agree_far_out_are_not_taken_for_the_true_ones() -> None:
    # Rounding, then the true slope 1 with an error that grows, then another plateau at 3.
    by_mu = [np.array([v, -v]) for v in (0.0, 7.0, 1.02, 1.0, 1.01, 1.5, 2.9, 3.0, 3.0, 3.0)]
    straight = [0.0, 0.6, 0.99, 0.99, 0.9, 0.6, 0.1, 0.02, 0.01, 0.01]
    found = true_slopes(by_mu, straight)
    assert found is not None
    np.testing.assert_allclose(found, [1.005, -1.005])
    assert true_slopes([np.zeros(2)] * 5, [0.0] * 5) is None


# The faults that users ask about, each by its name.


def test_a_sound_setup_is_called_sound() -> None:
    verdict = words.verdict(blobs("method.lr=0.3", "method.batch_size=64"))
    assert verdict.level == words.GOOD and verdict.headline == words.FINE


@pytest.mark.parametrize(("lr", "what"), [("100", "is too large"), ("1e-4", "below the best")])
def test_a_learning_rate_that_is_1000_times_off_is_named(lr: str, what: str) -> None:
    found = blobs(f"method.lr={lr}")
    verdict = words.verdict(found)
    assert verdict.headline == words.HEADLINES["lr"]
    assert topics(found) == {"lr"} and any(what in f.text for f in verdict.findings)
    low, high = found["stations"][0]["lr_low"], found["stations"][0]["lr_high"]
    assert low < 0.1 * 2 and high > 0.1 / 2  # where the tests' own setting lies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mu", "dtype", "what", "sound"),
    [("1e-6", "bfloat16", "too small", 1e-2), ("1e-9", "float32", "too small", 1e-5),
     ("1e-6", "float16", "too small", 3e-3), ("30", "float32", "too large", 1e-2),
     ("1e-14", "float32", "too small", 1e-4), ("1e-30", "float32", "too small", 1e-4),
     ("1e-37", "float32", "too small", 1e-4), ("1e-30", "bfloat16", "too small", 1e-2),
     ("1e-14", "float16", "too small", 3e-3), ("1e5", "float32", "too large", 1e-4),
     ("1e5", "bfloat16", "too large", 1e-2),
     ("1e38", "float32", "too large", 1e-4)],
)  # fmt: skip
def test_a_mu_that_is_lost_in_rounding_or_too_long_is_named(mu: str, dtype: str, what: str, sound: float) -> None:
    found = blobs(f"method.mu={mu}", f"task.dtype={dtype}", "method.batch_size=64", kind="mlp")
    verdict = words.verdict(found)
    assert verdict.headline == words.HEADLINES["mu"]
    assert any(f"mu = {float(mu):g} is {what}" in f.text for f in verdict.findings)
    station = found["stations"][0]
    assert station["mu_low"] <= sound <= station["mu_high"]
    assert not any(line.startswith("lr") for line in verdict.suggestions)  # it would rest on those slopes


@pytest.mark.filterwarnings("ignore:mu = .* is below the resolution:RuntimeWarning")
@pytest.mark.slow
def test_a_good_mu_is_found_where_weights_are_far_from_one() -> None:
    _, optimizer, losses = zero_order(mu=1e-3, size=1e30)
    found = optimizer.diagnose(*losses, trials=TRIALS)
    (station,) = found.data["stations"]
    assert found.verdict.headline == words.HEADLINES["mu"]
    assert station["mu_low"] <= 1e26 <= station["mu_high"]
    assert station["evaluations"] < 700


class ZeroBias(nn.Module):
    """A linear model in 16 bits whose bias, at 0, any step moves, while its weights need a longer one."""

    def __init__(self) -> None:
        super().__init__()
        drawn = 0.1 + 0.1 * torch.rand(3, 8, generator=torch.Generator().manual_seed(1))
        self.weight, self.bias = nn.Parameter(drawn.bfloat16()), nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.float(), self.bias.float())


@pytest.mark.filterwarnings("ignore:mu = .* is below the resolution:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("mu", [1e-14, 1e-5, 0.02])
def test_slopes_of_the_few_weights_that_a_short_step_moves_are_not_taken_for_the_losss(mu: float) -> None:
    model, generator = ZeroBias(), torch.Generator().manual_seed(2)
    x, y = torch.randn(60, 8, generator=generator), (torch.arange(60) % 5).clamp(max=2)
    optimizer = ZeroOrder(model, lr=0.1, mu=mu, k=4)
    losses = [lambda i=i: nn.functional.cross_entropy(model(x[i::3]), y[i::3]) for i in range(3)]
    found = optimizer.diagnose(*losses, trials=TRIALS)
    (station,) = found.data["stations"]
    assert 2**-12 < station["mu_low"] <= 0.02 <= station["mu_high"]
    assert (found.verdict.headline == words.HEADLINES["mu"]) == (mu < 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("mu", ["1e-30", "1e-3", "1e5"])
def test_a_loss_that_is_a_step_function_is_called_too_rough_whatever_mu(mu: str) -> None:
    task = Blobs()
    task.losses = lambda outputs, y: (outputs.argmax(dim=1) != y).float()  # type: ignore[method-assign]
    found = blobs(f"method.mu={mu}", task=task)
    assert topics(found) == {"mu"} and found["stations"][0]["mu_low"] is None
    assert "too rough" in words.verdict(found).findings[0].text


def test_shuffled_labels_are_named() -> None:
    task = Blobs(samples=1920)
    task.train_targets = task.train_targets[torch.from_numpy(np.random.default_rng(0).permutation(1920))]
    with torch.no_grad():
        start = make_model("linear")
        for p in start.parameters():
            p.zero_()
    task.model = lambda seed, dtype="float32": start  # type: ignore[method-assign]
    chosen = config("federation.byzantine=0", "method.batch_size=16")
    verdict = words.verdict(stations(Simulation(chosen, task=task), 8))
    assert verdict.headline == words.HEADLINES["signal"]
    assert "check whether labels match their samples" in verdict.findings[-1].text


@pytest.mark.slow
@pytest.mark.parametrize("mu", ["1e-30", "1e-3", "1e5"])
def test_weights_that_the_loss_does_not_depend_on_are_named(mu: str) -> None:
    task = Blobs()
    inputs = task.train_inputs
    task.outputs = lambda model, x: inputs.new_zeros(len(x), 4) + 0 * model(x)  # type: ignore[method-assign]
    assert words.verdict(blobs(f"method.mu={mu}", task=task)).headline == words.HEADLINES["slopes"]


def test_losses_that_are_not_finite_name_client_round_and_samples() -> None:
    task = Blobs()
    task.train_inputs[7] = math.nan
    found = blobs("method.batch_size=1000", "federation.clients=4", task=task)
    verdict = words.verdict(found)
    assert verdict.headline == words.HEADLINES["loss"]
    assert "batch of round 0 (training samples" in verdict.findings[0].text
    json.dumps(found, allow_nan=False)


def test_the_warning_of_a_run_names_the_very_samples() -> None:
    task = Blobs()
    task.train_inputs[7] = math.nan
    simulation = Simulation(config("method.batch_size=1000", "federation.byzantine=0"), task=task)
    with pytest.warns(RuntimeWarning, match=r"round 0: the losses of client \d+ .*those of training samples 7; its"):
        simulation.run_round()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        simulation.run_round()  # said once


def test_byzantine_clients_that_decide_are_named_and_their_share_is_known() -> None:
    chosen = config("federation.attack=sign_flip", "aggregation.rule=mean", "federation.byzantine=6",
                      "federation.attack_strength=10")  # fmt: skip
    found = stations(Simulation(chosen, task=Blobs()))
    assert found["stations"][0]["kept"] < 0
    assert "byzantine" in topics(found)
    honest = blobs("method.lr=0.1")["stations"][0]
    assert honest["kept"] == pytest.approx(1, abs=0.1)


# One torch model.


def zero_order(lr: float = 0.05, size: float = 1.0, **options: Any) -> tuple[nn.Module, ZeroOrder, list[Any]]:
    """Return a model, its weights times a size that each layer takes off again, an optimizer and six losses."""
    model, task = make_model("mlp"), Blobs()
    if size != 1:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(size)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda _, args, out: out / size)
    optimizer = ZeroOrder(model, lr=lr, k=4, **options)

    def loss(part: int) -> torch.Tensor:
        x, y = task.train_inputs[part::6], task.train_targets[part::6]
        return task.losses(task.outputs(model, x), y).mean()

    return model, optimizer, [lambda part=part: loss(part) for part in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "level"), [(0.05, {words.GOOD, words.NOTE}), (1e3, {words.BAD}), (1e-6, {words.BAD})])
def test_zero_order_says_whether_its_learning_rate_will_do(lr: float, level: set[str]) -> None:
    _, optimizer, losses = zero_order(lr)
    before = optimizer.parameters.digest()
    found = optimizer.diagnose(*losses, trials=TRIALS)
    assert found.verdict.level in level
    assert (found.verdict.headline == words.HEADLINES["lr"]) == (words.BAD in level)
    assert optimizer.parameters.digest() == before and optimizer.round == 0
    assert "suggested: lr" in str(found) and "client" not in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "what"),
    [(1e-300, "too small"), (1e-14, "too small"), (1e-10, "too small"), (1e-8, "too small"), (1e10, "too large"),
     (1e300, "too large")],
)  # fmt: skip
def test_a_usable_learning_rate_is_found_however_far_it_is(lr: float, what: str) -> None:
    sound, found = (o.diagnose(*losses, trials=TRIALS) for _, o, losses in (zero_order(0.05), zero_order(lr)))
    (near,), (station,) = sound.data["stations"], found.data["stations"]
    assert found.verdict.headline == words.HEADLINES["lr"]
    assert any(f"lr = {lr:g} is {what}" in f.text for f in found.verdict.findings)
    assert station["lr_low"] == pytest.approx(near["lr_low"], rel=0.5)
    assert station["lr_rise"] == pytest.approx(near["lr_rise"], rel=0.5)
    assert station["evaluations"] < 600 and "suggested: lr" in str(found)


@pytest.mark.slow
def test_a_learning_rate_that_a_scheduler_has_brought_to_0_is_named() -> None:
    _, optimizer, losses = zero_order()
    optimizer.lr = 0
    found = optimizer.diagnose(*losses, trials=TRIALS)
    assert found.verdict.headline == words.HEADLINES["lr"]
    assert any(f.text.startswith("lr = 0: no step moves the weights") for f in found.verdict.findings)
    assert "suggested: lr" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-9, 0.05])
@pytest.mark.parametrize("flipped", ["slopes", "decide"])
def test_steps_that_lead_uphill_are_not_blamed_on_the_learning_rate(
    flipped: str, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(Closures, flipped)
    monkeypatch.setattr(Closures, flipped, lambda *arguments: -right(*arguments))
    _, optimizer, losses = zero_order(lr)
    found = optimizer.diagnose(*losses, trials=TRIALS)
    assert found.verdict.headline == words.HEADLINES["byzantine" if flipped == "decide" else "ascent"]
    assert any("no step lowers the loss, however short" in f.text.lower() for f in found.verdict.findings)
    assert "suggested: lr" not in str(found)


@pytest.mark.slow
def test_of_a_promised_fall_nothing_comes_true_where_the_loss_rises() -> None:
    _, optimizer, losses = zero_order(1e5)
    found = optimizer.diagnose(*losses, trials=TRIALS)
    (shares,) = [row[1] for row in words.table(found.data)[1] if row[0] == "predicted fall that is realised"]
    assert shares == "none: it rises"


@pytest.mark.slow
def test_a_loss_that_draws_new_samples_each_time_is_named() -> None:
    model, optimizer, _ = zero_order()
    task, rng = Blobs(), np.random.default_rng(0)

    def drawing() -> torch.Tensor:
        some = torch.from_numpy(rng.integers(0, 480, 16))
        return task.losses(task.outputs(model, task.train_inputs[some]), task.train_targets[some]).mean()

    assert optimizer.diagnose(drawing, drawing, trials=2).verdict.headline == words.HEADLINES["loss"]


def test_one_loss_is_enough_and_none_is_not() -> None:
    _, optimizer, losses = zero_order()
    assert optimizer.diagnose(losses[0], trials=2).verdict.level != words.BAD
    with pytest.raises(ValueError, match="at least one loss"):
        optimizer.diagnose()


# Runs, their folders and reports.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ridge regression that has ended."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    chosen = Config().with_overrides(
        ["task.name=ridge", "rounds=20", "method.k=4", "method.lr=0.05", "serve.keep_reports=true",
         "serve.seed_mode=chained"]
    )  # fmt: skip
    Run.start(chosen, folder).run()
    return folder


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["cyber0", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.slow
def test_a_run_is_diagnosed_at_start_middle_and_end_and_its_report_shows_it(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    ledger = (folder / "ledger.bin").read_bytes()
    assert run_cli(monkeypatch, "diagnose", str(folder), "--rounds", "2") == 0
    printed = capsys.readouterr().out
    diagnosis = json.loads((folder / "diagnostics.json").read_text())
    assert [s["round"] for s in diagnosis["stations"]] == [0, 10, 20]
    assert (folder / "ledger.bin").read_bytes() == ledger
    assert words.verdict(diagnosis).headline in printed and "suggested: lr" in printed
    (shown,) = contents([read(folder)])["runs"]
    assert shown["diagnostics"]["headline"] in (folder / "report.html").read_text(encoding="utf-8")
    assert len(shown["diagnostics"]["stations"]) == 3


@pytest.mark.slow
def test_the_model_is_measured_where_the_run_was(finished: Path) -> None:
    found = federation.diagnose(finished, trials=2)["stations"]
    losses = {e.round: e.loss for e in read(finished).evaluations}
    for station in found:
        assert station["loss"] == pytest.approx(losses[station["round"]], rel=0.5)
    assert found[0]["loss"] > found[1]["loss"] > found[2]["loss"]


def test_a_rule_with_a_history_decides_as_in_the_run_without_the_clients_that_it_expelled(tmp_path: Path) -> None:
    chosen = Config().with_overrides(
        ["task.name=logistic", "rounds=60", "method.k=32", "method.lr=0.05", "federation.attack=sign_flip",
         "federation.attack_strength=4", "federation.expel=true", "aggregation.rule=reputation"]
    )  # fmt: skip
    Run.start(chosen, tmp_path / "run").run()
    (found,) = federation.diagnose(tmp_path / "run", round=60, trials=2)["stations"]
    assert found["kept"] > 0.85
    (tmp_path / "run" / "reports.bin").unlink()
    told: list[str] = []
    (without,) = federation.diagnose(tmp_path / "run", round=60, trials=2, tell=told.append)["stations"]
    assert without["kept"] < 0.7 and "reports.bin is missing" in told[0] and "without its history" in told[0]


def test_a_run_that_was_not_diagnosed_shows_what_its_records_say(finished: Path) -> None:
    found = read(finished)
    assert found.diagnosis == {} and found.notes == []
    losses = [e.loss for e in found.evaluations]
    assert found.records["real"] == pytest.approx(losses[0] - losses[-1])
    assert found.records["signal"]["present"]
    (shown,) = contents([found])["runs"]
    assert [f["level"] for f in shown["diagnostics"]["records"]] == [words.GOOD, words.GOOD]


def test_records_promise_what_the_slopes_of_the_decisions_say(tmp_path: Path) -> None:
    folder, shared = tmp_path / "run", ["task.name=ridge", "rounds=6", "method.k=8", "federation.byzantine=0"]
    by = {}
    for distribution in ("gaussian", "sphere"):
        chosen = Config().with_overrides([*shared, "method.lr=0.01", f"method.distribution={distribution}"])
        Run.start(chosen, folder / distribution).run()
        found = read(folder / distribution)
        by[distribution] = found.records["real"] / found.records["promised"]
    assert all(0.5 < share < 1.5 for share in by.values())
    assert records.read(folder / "gaussian", [(0, 1.0)]) is None  # one evaluation: nothing came of anything yet


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"stations": [{}]}', "\xff", '{"stations": 3}'])
def test_a_broken_diagnostics_file_is_noted_and_the_report_is_made(text: str, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "diagnostics.json").write_bytes(text.encode("latin-1"))
    found = read(folder)
    assert any("diagnostics.json can't be read" in note for note in found.notes)
    assert "headline" not in contents([found])["runs"][0]["diagnostics"]


def test_a_config_is_diagnosed_where_it_begins_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ridge.toml"
    path.write_text(to_toml(Config().with_overrides(["task.name=ridge", "method.k=4"])))
    assert run_cli(monkeypatch, "diagnose", str(path), "--rounds", "2", "--set", "method.lr=1e-5") == 0
    assert words.HEADLINES["lr"] in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_one_machine_alone_is_diagnosed_by_its_batches() -> None:
    from cyber0.federation.methods import make

    chosen = Config().with_overrides(["task.name=ridge", "method.name=mezo", "federation.byzantine=0", "method.k=2"])
    simulation = make(chosen)
    assert isinstance(simulation, Simulation)
    found = stations(simulation)
    assert found["unit"] == "batch" and found["stations"][0]["signal"]["present"]


@pytest.mark.parametrize("name", ["fedavg", "fedzo"])
def test_a_method_whose_rounds_are_not_k_scalars_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[task]\nname = "ridge"\n[method]\nname = "{name}"\n')
    with pytest.raises(ConfigError, match=f"{name}.*possible are cyber0, mezo"):
        federation.diagnose(path)


def test_what_can_not_be_diagnosed_says_what_to_do(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="use 0 to 20"):
        federation.diagnose(finished, round=21)
    with pytest.raises(ConfigError, match="can't change an existing run"):
        federation.diagnose(finished, overrides=["method.lr=1"])
    with pytest.raises(ConfigError, match=r"holds no run: it has no config.toml"):
        federation.diagnose(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    text = (other / "config.toml").read_text()
    (other / "config.toml").write_text(text.replace("seed = 0", "seed = 1", 1))
    with pytest.raises(LedgerError, match=r"does not belong to .* differs in .*seed \(now 1, on record 0\)"):
        federation.diagnose(other)


def test_a_run_that_has_learned_is_not_blamed_for_steps_that_are_long_in_the_end() -> None:
    found = blobs("method.lr=100")
    late = found["stations"][0] | {"round": 50}
    assert late["loss"] is not None
    start = late | {"round": 0, "loss": 3 * late["loss"], "lr": 0.1}
    assert words.verdict({**found, "stations": [start, late]}).level == words.NOTE
    start["lr"] = late["lr"]
    assert words.verdict({**found, "stations": [start, late]}).headline == words.HEADLINES["lr"]


def test_a_point_of_the_scan_says_how_straight_the_loss_is() -> None:
    points = [Probing(**p) for p in blobs("method.batch_size=64")["stations"][0]["probing"]]
    assert points[0].straight > 0.99 and points[-1].straight < points[0].straight
    assert all(0 <= p.straight <= 1 for p in points)
    assert min(p.error for p in points) < 1e-2
