"""`cyber0 theory` and `cyber0 reproduce`: what they print, write and refuse; and the loop behind the theorems."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.testing
from hypothesis import given
from hypothesis import strategies as st

from cyber0 import Config, Simulation, aggregate, attacks, tasks
from cyber0 import reproduce as paper
from cyber0.cli.main import app
from cyber0.config import choices
from cyber0.config.schema import TaskConfig
from cyber0.errors import ConfigError
from cyber0.report import advice
from cyber0.reproduce import outputs, theorem1, theorem2, theorem3
from cyber0.reproduce.federations import FederationSetup, Losses, distances, simulate, sphere, starts
from cyber0.reproduce.outputs import part, write_csv
from cyber0.tasks.convex import Logistic, Ridge
from cyber0.theory import theorems as theory


def run(*arguments: str) -> str:
    result = typer.testing.CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# The fast loop.

COMMON = ["rounds=12", "method.distribution=sphere", "method.k=3", "method.lr=0.05", "method.batch_size=1000", "seed=5",
          "federation.clients=8"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("ridge", ["method.estimator=gradient", "federation.byzantine=2", "federation.attack=full_knowledge"]),
        ("ridge", ["method.estimator=forward", "federation.byzantine=0", "aggregation.beta=0"]),
        ("ridge", ["method.estimator=gradient", "federation.byzantine=0", "method.projection_radius=0.9"]),
        ("logistic", ["method.mu=0.5", "federation.byzantine=2", "federation.attack=always_large"]),
    ],
)
def test_the_many_small_federations_run_as_a_simulation_runs(name: str, overrides: list[str]) -> None:
    config = Config().with_overrides([*COMMON, f"task.name={name}", *overrides])
    task = {"ridge": Ridge, "logistic": Logistic}[name](10, 80)
    federation = Simulation(config, task=task)
    honest = [share for share, byzantine in zip(federation.shares, federation.byzantine, strict=True) if not byzantine]
    w0 = federation.parameters.vector().numpy().astype(np.float64)
    losses = Losses(
        np.stack([task.inputs[s] for s in honest])[None], np.stack([task.targets[s] for s in honest])[None],
        task.penalty, logistic=name == "logistic",
    )  # fmt: skip
    setup = FederationSetup(
        12, 3, 0.05, mu=config.method.mu if name == "logistic" else 0.0,
        rule=aggregate.trimmed_mean(config.aggregation.beta), byzantine=config.federation.byzantine,
        attack=attacks.make(config.federation.attack),
        radius=config.method.projection_radius or None, seed=5,
    )  # fmt: skip
    ours = [state.w[0] for state in simulate(losses, w0[None], setup)]
    for t in range(13):
        theirs = federation.parameters.vector().numpy()
        np.testing.assert_allclose(ours[t], theirs, rtol=0, atol=3e-5)
        if t < 12:
            federation.run_round()
    assert np.abs(ours[-1] - w0).max() > 0.01


def test_replicas_have_directions_of_their_own_and_the_first_those_of_a_simulation() -> None:
    from cyber0.directions import reference

    z = sphere(7, 3, 4, 2, 6)
    assert len(np.unique(z.round(6).reshape(8, 6), axis=0)) == 8
    np.testing.assert_array_equal(z[0, 1], reference(7, 3, 1, 0, 6, "sphere", dimension=6))


@pytest.mark.parametrize("logistic", [False, True])
def test_slopes_are_the_limit_of_differences_whether_data_is_shared_or_not(logistic: bool) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(4, 3, 5, 6)), rng.choice([-1.0, 1.0], size=(4, 3, 5))
    w, z = rng.normal(size=(4, 6)), sphere(0, 0, 4, 2, 6)
    own = Losses(inputs, targets, 0.1, logistic)
    slopes = own.slopes(w, z)
    np.testing.assert_allclose(slopes, own.slopes(w, z, 1e-5), atol=1e-8)
    for s in range(4):
        shared = Losses(inputs[s : s + 1], targets[s : s + 1], 0.1, logistic)
        np.testing.assert_allclose(shared.slopes(w[s : s + 1], z[s : s + 1])[:, 0], slopes[:, s])
        np.testing.assert_allclose(shared.slopes(w, z, 0.3)[:, s], own.slopes(w, z, 0.3)[:, s])


# Theorems.


def test_no_other_lie_moves_a_trimmed_mean_further_than_those_of_theorem_1() -> None:
    case = theorem1.Case(n=5, m=9, byzantine=2)
    rng = np.random.default_rng(1)
    losses = theorem1.population().draw(rng, 1, 7, 5)
    w, z = rng.normal(size=(6, theorem1.DIMENSION)), sphere(0, 0, 6, 1, theorem1.DIMENSION)
    low, high = theorem1.extremes(losses, case, w, z)
    honest = (theorem1.DIMENSION * losses.slopes(w, z)).reshape(7, -1)
    for _ in range(200):
        byzantine = rng.normal(size=(2, honest.shape[1])) * 10.0 ** rng.uniform(-1, 6)
        decided = aggregate.trimmed_mean(case.beta)(np.concatenate([honest, byzantine])).reshape(low.shape)
        assert (low - 1e-9 <= decided).all() and (decided <= high + 1e-9).all()


def test_the_worst_error_is_found_among_all_choices_of_a_few_directions() -> None:
    rng = np.random.default_rng(2)
    z = sphere(1, 0, 5, 4, 3)
    low, high = -rng.random((5, 4)), rng.random((5, 4))
    choices = np.stack(np.meshgrid(*[[0, 1]] * 4)).reshape(4, -1).T
    every = [np.linalg.norm(np.einsum("sk,skd->sd", np.where(c, high, low), z), axis=1) / 4 for c in choices]
    found, best = theorem1.worst_norm(low, high, z), np.max(every, axis=0)
    assert (found <= best + 1e-12).all()
    assert (found > 0.8 * best).all()


def test_on_the_isotropic_quadratic_the_rate_of_theorem_2_is_met_within_ten_per_cent() -> None:
    task, k = theorem2.isotropic(50), 5
    rate = theory.theorem2(50, k, task.strong_convexity, task.smoothness)
    assert task.strong_convexity == task.smoothness
    begin = starts(0, 24, task.minimiser, 1.0)
    found = distances(simulate(theorem2.pool(task), begin, FederationSetup(60, k, rate.eta)), task.minimiser)
    slope = np.polyfit(np.arange(61), np.log(found.mean(axis=1)), 1)[0]
    assert slope / math.log(rate.contraction) == pytest.approx(1, abs=0.1)


def test_the_smoothed_minimiser_of_the_logistic_task_is_where_the_estimates_cancel() -> None:
    task, mu = Logistic(6, 40), 1.5
    point = theorem3.smoothed_minimiser(task, mu)
    z = sphere(3, 0, 1, 30_000, 6)
    slopes = 6 * theorem3.logistic_pool(task).slopes(point[None], z, mu)[0, 0]
    estimates = slopes[:, None] * z[0]
    error = estimates.std(axis=0) / math.sqrt(len(estimates))
    assert (np.abs(estimates.mean(axis=0)) < 5 * error).all()
    assert np.linalg.norm(point - task.minimiser) > 0.01  # so that the test tells the two apart


# The command `reproduce`.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["theorem1", "theorem2", "theorem3"])
def test_a_quick_reproduction_writes_its_files_and_every_bound_holds(name: str, tmp_path: Path) -> None:
    text = run("reproduce", name, "--quick", "--out", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        f"{name}.{kind}" for kind in ("csv", "md", "png", "svg")
    }
    assert (tmp_path / f"{name}.md").read_text() in text
    assert "| yes |" in text and "**no**" not in text
    rows = list(csv.DictReader((tmp_path / f"{name}.csv").open()))
    assert len(rows) > 5
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / f"{name}.svg").read_text()[:1000]


def test_a_reproduction_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def compute() -> list[dict[str, Any]]:
        calls.append(1)
        return [{"a": 0.1}]

    for settings in ({"seeds": 1}, {"seeds": 1}, {"seeds": 2}, {"seeds": 2}):
        assert part(tmp_path, "x", settings, compute) == [{"a": 0.1}]
    assert len(calls) == 2
    (tmp_path / "parts" / "x.json").write_text('{"settings": {"se')
    assert part(tmp_path, "x", {"seeds": 2}, compute) == [{"a": 0.1}]
    assert len(calls) == 3
    monkeypatch.setattr("cyber0.runs.environment.source_digest", lambda: "other code")
    part(tmp_path, "x", {"seeds": 2}, compute)
    assert len(calls) == 4


def test_every_name_that_can_be_reproduced_has_its_function() -> None:
    for name in paper.REPRODUCTIONS:
        assert callable(paper.find(name))
        assert paper.names(name) == (name,)
    for group, members in paper.GROUPS.items():
        assert paper.names(group) == members
        assert set(members) <= set(paper.REPRODUCTIONS)


def test_a_group_is_reproduced_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(name: str) -> paper.ReproduceFunction:
        def reproduce(request: paper.Request) -> Path:
            request.progress(f"{name} {request.seeds} {request.quick}")
            path = request.out / f"{name}.md"
            path.write_text(name)
            return path

        return reproduce

    monkeypatch.setattr(paper, "find", fake)
    text = run("reproduce", "theory", "--seeds", "3", "--out", str(tmp_path))
    assert "theorem2 3 False" in text
    assert (tmp_path / "theorem3.md").exists()
    monkeypatch.chdir(tmp_path)
    run("reproduce", "theorem1", "--quick")
    assert (tmp_path / "reproduce" / "theorem1" / "theorem1.md").exists()


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'theorm2'; did you mean 'theorem2'"):
        run("reproduce", "theorm2")
    with pytest.raises(ConfigError, match="possible are fig1a"):
        run("reproduce", "qqq")


def test_rows_with_different_columns_share_one_table(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "x.csv", [{"a": 1}, {"b": 2, "a": 3}])
    assert path.read_text().splitlines() == ["a,b", "1,", "3,2"]


# The command `theory`.


def test_the_table_has_the_numbers_of_the_theorems_and_says_what_they_mean() -> None:
    text = run("theory", "--d", "50", "--k", "8", "--m", "20", "--n", "1000", "--byzantine", "5", "--mu", "0",
               "--lambda", "0.5")  # fmt: skip
    rate = theory.theorem2(50, 8, 0.5, 1.0)
    for number in (
        f"{rate.tau:.3g}",
        f"{rate.eta:.3g}",
        f"{1 - rate.contraction:.3g}",
        f"{rate.rounds_to(0.5, 5.0):,}",
    ):
        assert number in text
    assert "5 Byzantine, beta = 0.25" in text
    for words in ("tau", "eta", "contraction", "Delta", "floor", "what remains is mostly due to", "│ lr", "up to 6",
                  "beta = 0.25"):  # fmt: skip
        assert words in text
    assert "mu bias" not in text
    assert "mu bias" in run("theory", "--d", "50")


def test_the_default_setting_is_that_of_a_config() -> None:
    config = Config()
    text = run("theory", "--d", "7850")
    assert f"k = {config.method.k}, m = {config.federation.clients}" in text
    assert f"3 Byzantine, beta = {config.aggregation.beta}, mu = {config.method.mu}" in text


def setting(**given: Any) -> advice.Setting:
    open_ = dict.fromkeys(("byzantine", "beta", "v", "lipschitz", "distance", "error"))
    usual = {"d": 7850, "k": 64, "m": 12, "n": 1000, "mu": 0.001, "strong_convexity": 0.1, "smoothness": 1.0,
             "noise": 1.0, "diameter": 10.0}  # fmt: skip
    return advice.make_setting(**{**open_, **usual, **given})


def test_theory_answers_first_which_lr_k_and_rounds_and_says_what_the_bound_is_worth() -> None:
    text = " ".join(run("theory", "--d", "7850", "--k", "64", "--m", "12", "--byzantine", "3").split())
    answers = text.index("in practice"), text.index("cyber0 diagnose"), text.index("says nothing"), text.index("tau")
    assert list(answers) == sorted(answers)
    by_name = {choice.name: choice for choice in advice.choices(setting())}
    two, three = theory.theorem2(7850, 64, 0.1, 1.0), theory.theorem3(7850, 64, 0.1, 1.0, 0.001)
    assert by_name["lr"][1:3] == (f"{two.eta:.3g}", f"{three.eta:.3g}")
    assert by_name["rounds"][1:3] == (f"{two.rounds_to(0.5, 5.0):,}", "16,894")
    assert by_name["k"][1:3] == ("up to 786", "up to 18") and by_name["mu"].practice == str(Config().method.mu)
    assert all(choice.source.startswith(("rule of thumb", "by Theorem", "Theorem")) for choice in by_name.values())
    assert "mu" not in {choice.name for choice in advice.choices(setting(mu=0.0))}
    assert advice.MNIST_DIMENSION == 28 * 28 * 10 + 10


def test_a_bound_that_says_something_is_not_called_empty() -> None:
    rich = setting(d=5, k=5, n=10**9, mu=0.0)
    assert rich.rate.floor(rich.robustness.value) < rich.diameter
    assert "says nothing" in advice.caveats(setting())[1] and "says nothing" not in advice.caveats(rich)[1]


def test_the_rule_of_thumb_for_lr_lies_where_diagnose_finds_it_on_a_quadratic() -> None:
    from cyber0.diagnose import federation

    ridge = Ridge(dimension=20, condition=1.0, penalty=0.1)
    chosen = Config().with_overrides(
        ["task.name=ridge", "federation.clients=2", "federation.byzantine=0", "aggregation.rule=mean", "method.k=4",
         "method.batch_size=100000", "method.lr=0.02"]
    )  # fmt: skip
    station = federation.measured(Simulation(chosen, task=ridge), 8)
    asked = setting(d=20, k=4, smoothness=ridge.smoothness, strong_convexity=ridge.strong_convexity)
    lr = next(choice for choice in advice.choices(asked) if choice.name == "lr")
    assert station["lr_low"] < float(lr.practice) < station["lr_high"]
    assert float(lr.bound) < float(lr.practice)


@pytest.mark.parametrize("mu", [0.0, 0.001])
def test_the_plot_shows_the_floor_and_the_whole_bound(mu: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from cyber0.report import plots

    figures: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure) or path)
    asked = setting(mu=mu)
    advice.picture(asked, Path("bound.png"))
    (axes,) = figures[0].axes
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    (delta,) = (y for label, y in lines.items() if label.startswith("floor, part of Delta"))
    assert delta[0] == pytest.approx(2 * asked.robustness.value / asked.strong_convexity)
    assert any(label.startswith("floor, part of mu") for label in lines) == (mu > 0)
    whole = lines["the whole bound, k = 64"]
    assert whole[0] == pytest.approx(asked.rate.bound(1, asked.distance, asked.robustness.value))
    assert whole[-1] >= asked.rate.floor(asked.robustness.value)
    low, high = axes.get_ylim()
    assert low < asked.distance / 100 and high > whole[0]
    assert "above the diameter 10: says nothing" in axes.get_legend_handles_labels()[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_plot_is_drawn_into_the_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"plot.{kind}"
    assert str(path) in run("theory", "--d", "50", "--mu", "0", "--plot", str(path)).replace("\n", "")
    assert path.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--d", "0"], ["d = 0"]),
        (["--d", "5", "--k", "0"], ["k = 0"]),
        (["--d", "5", "--m", "0"], ["m = 0"]),
        (["--d", "5", "--n", "-1"], ["n = -1"]),
        (["--d", "5", "--mu", "-1"], ["mu = -1"]),
        (["--d", "5", "--mu", "nan"], ["mu = nan"]),
        (["--d", "5", "--noise", "0"], ["noise = 0"]),
        (["--d", "5", "--v", "-2"], ["v = -2"]),
        (["--d", "5", "--beta", "0.5"], ["beta = 0.5"]),
        (["--d", "5", "--byzantine", "6"], ["byzantine = 6", "m = 12", "lower"]),
        (["--d", "5", "--byzantine", "3", "--beta", "0.1"], ["beta = 0.1", "raise beta to 0.25"]),
        (["--d", "5", "--lambda", "2"], ["lambda", "2.0", "1.0"]),
        (["--d", "5", "--distance", "11"], ["distance = 11", "diameter"]),
        (["--d", "5", "--error", "0"], ["error = 0"]),
        (["--d", "5", "--plot", "x.doc"], ["x.doc", ".png"]),
    ],
)
def test_a_bad_value_is_refused_by_name(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        run("theory", *arguments)
    assert all(word in str(caught.value) for word in words), caught.value


@given(st.integers(1, 10**6), st.sampled_from([0.0, 0.01]))
def test_the_suggested_k_costs_a_tenth_more_traffic_at_most(d: int, mu: float) -> None:
    k, smoothed = advice.suggested_k(setting(d=d, k=1, n=100, mu=mu)), mu > 0
    assert k * theory.tau(d, k, smoothed=smoothed) <= 1.1 * theory.tau(d, 1, smoothed=smoothed) * (1 + 1e-9)
    assert (k + 1) * theory.tau(d, k + 1, smoothed=smoothed) > 1.1 * theory.tau(d, 1, smoothed=smoothed) * (1 - 1e-9)


@pytest.mark.slow
def test_a_run_on_a_convex_task_works_from_the_command_line(tmp_path: Path) -> None:
    text = run(
        "run", "--set", "task.name=ridge", "--set", "rounds=20", "--set", "method.k=4", "--out", str(tmp_path / "r")
    )
    assert "ridge, 12 clients" in text
    assert (tmp_path / "r" / "summary.json").exists()


@pytest.mark.parametrize("name", sorted(set(choices.TASKS) - set(choices.DATASETS) - set(choices.TEXT_TASKS)))
def test_every_task_without_a_data_set_is_made_by_its_name(name: str) -> None:
    task = tasks.make(TaskConfig(name=name))
    assert task.name == name
    assert task.model(0).weight.shape == (50,)


def test_a_convex_task_takes_no_data() -> None:
    with pytest.raises(ConfigError, match=r"task\.data = 'x' can't be used with task\.name = 'ridge'"):
        Config().with_overrides(["task.name=ridge", "task.data=x"])


def test_a_figure_is_written_as_a_small_png_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        figure = Figure()
        figure.subplots().plot([1, 2, 3])
        outputs.write_figure(folder, "plot", figure)
        written.append([(folder / f"plot.{kind}").read_bytes() for kind in ("png", "svg")])
    assert written[0] == written[1]
    assert Image.open(tmp_path / "a/plot.png").mode == "P"
