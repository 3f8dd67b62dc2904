"""`cyber0 reproduce optimizers`: rates are bracketed, runs cost what is said, claims follow from results."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from cyber0 import reproduce as paper
from cyber0.cli.main import app
from cyber0.config.schema import Config
from cyber0.errors import ConfigError
from cyber0.reproduce import Request, SearchRequest, TextRequest, halving, optimizer_runs, optimizers, outputs
from cyber0.reproduce import optimizer_results as shown
from cyber0.reproduce.optimizer_runs import Entry, Variant
from cyber0.reproduce.optimizers import OptimizerStudy
from cyber0.study import Cell, Result

RUNGS = 2


def searched(loss: Callable[[int, int], float]) -> tuple[halving.Search, int]:
    """Run a search on a function of rung and exponent, and count what it measures."""
    measured: list[dict[int, halving.Score]] = [{} for _ in range(RUNGS)]
    while (found := halving.search(measured)).best is None:
        new = [(rung, e) for rung, wanted in enumerate(found.wanted) for e in wanted if e not in measured[rung]]
        assert new, "a search that is not done wants something"
        for rung, e in new:
            measured[rung][e] = (loss(rung, e),)
    return found, sum(map(len, measured))


def test_half_of_the_rates_are_tried_for_longer() -> None:
    found, runs = searched(lambda rung, e: (e - 0.4) ** 2)
    assert found == halving.Search(((-2, -1, 0, 1, 2), (-1, 0, 1)), 0) and runs == 8


@pytest.mark.parametrize("best", [-7, 6])
def test_a_grid_whose_best_is_at_its_edge_is_widened(best: int) -> None:
    found, _ = searched(lambda rung, e: (e - best) ** 2)
    first, last = found.wanted
    assert found.best == best and min(first) < best < max(first)
    assert last == (best - 1, best, best + 1)  # widening does not make the next rung wider


def test_a_best_rate_that_falls_with_the_length_of_runs_is_followed() -> None:
    found, _ = searched(lambda rung, e: (e - 1 + 3 * rung) ** 2)
    assert found.best == -2 and found.wanted[1][:2] == (-3, -2)


def test_diverged_runs_are_the_worst_and_a_search_ends_where_all_diverge() -> None:
    found, _ = searched(lambda rung, e: math.inf if e > -4 else -e / 10)
    assert found.best == -4
    assert searched(lambda rung, e: math.inf)[0].best == -halving.FARTHEST


def test_full_runs_try_rates_on_both_sides_until_the_best_is_between_two_others() -> None:
    def found(**losses: float) -> halving.Search:
        return halving.bracketed(3, {int(e[1:]): (loss,) for e, loss in losses.items()})

    assert found() == halving.Search(((3, 2),))
    assert found(e3=0.5, e2=0.4) == halving.Search(((3, 2, 1),))
    assert found(e3=0.5, e2=0.4, e1=0.4) == halving.Search(((3, 2, 1),), 2)
    assert found(e3=0.5, e2=0.6) == halving.Search(((3, 2, 4),))
    assert found(e3=0.5, e2=0.6, e4=0.4) == halving.Search(((3, 2, 4, 5),))
    assert found(e3=0.5, e2=0.6, e4=0.4, e5=0.7) == halving.Search(((3, 2, 4, 5),), 4)
    assert found(e3=math.inf, e2=math.inf, e4=math.inf).best == 3  # nothing is gained by more of them
    assert halving.bracketed(halving.FARTHEST, {14: (0.1,), 13: (0.2,)}).best == halving.FARTHEST


def test_of_equal_accuracies_the_lower_loss_counts() -> None:
    assert halving.bracketed(3, {3: (0.1, 0.7), 2: (0.1, 0.6), 1: (0.1, 0.8)}).best == 2
    assert halving.bracketed(3, {3: (0.09, 0.7), 2: (0.1, 0.6), 4: (0.1, 0.2)}).best == 3


def test_passes_count_directions_sides_and_samples() -> None:
    def passes(*settings: str, samples: int = 512) -> float:
        return optimizer_runs.passes_per_round(Config().with_overrides(["task.name=trec", *settings]), samples)

    assert passes() == 2  # 12 clients with 42 or 43 samples: batches of 64 are all they have
    assert passes("method.k=8") == 16
    assert passes("method.k=8", "method.estimator=one_sided") == 9
    assert passes("method.batch_size=3") == 2 * 36 / 512
    assert passes("method.local_epochs=5") == 10
    assert passes("federation.clients=8", "federation.participation=0.5", "federation.byzantine=0") == 1
    mnist = Config()
    assert mnist.rounds * optimizer_runs.passes_per_round(mnist, 60_000) == optimizer_runs.TASKS["mnist"].passes


class FakeStudy:
    """Stands in for a study: a run's loss and accuracy follow from its settings."""

    loss: Callable[[Cell], float]
    held_out: Callable[[Cell], float | str]
    """The accuracy on held-out samples; empty: there are none."""
    limit = 10**6
    fails: Callable[[Cell], bool]
    ran: list[Cell]

    def __init__(self, cells: Sequence[Cell], out: Path, *_: Any, **__: Any) -> None:
        self.cells, self.out = list(cells), out

    def results(self) -> list[Result]:
        return [self._result(cell, "done" if (self.out / cell.digest).exists() else "open") for cell in self.cells]

    def _result(self, cell: Cell, status: Any) -> Result:
        return Result(cell, status, cell.digest, {}, "it broke" if status == "failed" else "")

    def run(self, progress: Any, *, more: Callable[[list[Result]], list[Cell]], seconds: float | None) -> list[Result]:
        failed: set[str] = set()
        while True:
            results = [self._result(r.cell, "failed") if r.cell.digest in failed else r for r in self.results()]
            self.cells += [cell for cell in more(results) if cell.digest not in {c.digest for c in self.cells}]
            status = {r.cell.digest: r.status for r in results}
            left = [cell for cell in self.cells if status.get(cell.digest, "open") == "open"
                    and not (self.out / cell.digest).exists()]  # fmt: skip
            if not left or len(type(self).ran) >= type(self).limit:
                return results
            type(self).ran.append(left[0])
            if type(self).fails(left[0]):
                failed.add(left[0].digest)
            else:
                self._write(left[0])

    def _write(self, cell: Cell) -> None:
        folder, config, end = self.out / cell.digest, cell.config, type(self).loss(cell)
        folder.mkdir(parents=True)
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["round", "accuracy", "loss", "validation_loss", "seconds", "validation_accuracy"])
            for round in sorted({*range(0, config.rounds, config.evaluate_every), config.rounds}):
                now = 2.0 - (2.0 - end) * round / config.rounds
                accuracy = 1 - now / 2 - 0.05 * (config.federation.byzantine > 0)
                writer.writerow([round, accuracy, 9.0, now, 3.0, type(self).held_out(cell)])


BEST = {"sgd": 0.16, "adaptive": 0.02, "normalized": 0.32}
ENDS = {"sgd": 0.4, "adaptive": 0.2, "normalized": 0.3}


def loss_of(cell: Cell) -> float:
    """Every optimizer has a best rate and a level it reaches there; short runs get part of the way."""
    name = str(cell.axes["variant"])
    off = abs(math.log2(cell.config.method.lr / BEST[name]))
    return min(3.0, ENDS[name] + 0.2 * off + (0.0 if cell.axes["stage"] == "full" else 1.0))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeStudy]:
    stand_in = type("Fake", (FakeStudy,), {"ran": [], "loss": staticmethod(loss_of),
                                           "held_out": staticmethod(lambda cell: ""),
                                           "fails": staticmethod(lambda cell: False)})  # fmt: skip
    monkeypatch.setattr(optimizers, "Study", stand_in)
    monkeypatch.setattr(optimizers, "print_notes", lambda *_: None)
    monkeypatch.setattr(outputs, "write_figure", lambda *_: None)  # takes a second
    kept = [variant for variant in optimizer_runs.VARIANTS if variant.name in BEST]
    monkeypatch.setattr(optimizer_runs, "VARIANTS", tuple(kept))
    return stand_in


def request(out: Path, *overrides: str, seeds: int = 2, tasks: tuple[str, ...] = ("mnist",), **search: Any) -> Request:
    lines: list[str] = []
    return Request(out, seeds, False, lines.append, overrides, text=TextRequest(tasks=tasks),
                   search=SearchRequest(**search))  # fmt: skip


def test_the_study_searches_every_rate_and_runs_the_best_in_full(fake: type[FakeStudy], tmp_path: Path) -> None:
    study = OptimizerStudy(request(tmp_path)).run()
    full = [cell for cell in fake.ran if cell.axes["stage"] == "full"]
    assert {(c.axes["variant"], c.axes["lr"]) for c in full if c.config.seed == 1} == set(BEST.items())
    assert {c.config.federation.byzantine for c in full} == {0, 3}
    assert {c.config.federation.attack for c in full} == {"full_knowledge"}
    for cell in fake.ran:
        config, searching = cell.config, cell.axes["stage"] != "full"
        assert config.method.lr_schedule == ("constant" if searching else "linear")
        assert not searching or (config.seed == 0 and config.federation.byzantine == 0)
        assert config.federation.byzantine or config.aggregation.rule == "mean"
        cost = config.rounds * optimizer_runs.passes_per_round(config, 60_000)
        share = {"search 1": 1 / 36, "search 2": 1 / 12, "full": 1.0}[str(cell.axes["stage"])]
        assert cost == pytest.approx(share * 655.36, rel=0.1)
    searches = [c for c in fake.ran if c.axes["stage"] != "full"]
    assert len(fake.ran) - len(full) == len(searches) < 40 and len(study.runs()) == len(fake.ran)


def test_the_tables_say_what_the_runs_gave(fake: type[FakeStudy], tmp_path: Path) -> None:
    text = optimizers.reproduce(request(tmp_path, targets=("mnist=50", "mnist=95"))).read_text()
    row = next(line for line in text.splitlines() if line.startswith("| adaptive |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["adaptive", "64", "0.02"] and cells[4:7] == ["1.2000", "90.0 ± 0.0", "85.0 ± 0.0"]
    assert (cells[7], cells[8]) == ("583", "1.1 x")  # sgd ends at 80 %, 8/9 of the way to 90 %
    assert (cells[9], cells[10]) == ("364", "not reached")
    assert "| sgd | 64 | 0.16 |" in text and "| FZOO | normalized |" in text and "not done" not in text
    with (tmp_path / "optimizers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["stage"] for row in rows} == {"search 1", "search 2", "full"}
    assert max(float(row["passes"]) for row in rows) == pytest.approx(655.36, rel=0.01)
    panel, *rest = shown.draw(shown.Figures(OptimizerStudy(request(tmp_path)).run())).axes
    legend = panel.get_legend()
    assert not rest and legend is not None
    assert [text.get_text() for text in legend.get_texts()][:2] == ["sgd", "sgd, Byzantine clients"]


def test_a_study_that_runs_out_of_time_shows_what_there_is_and_continues(fake: type[FakeStudy], tmp_path: Path) -> None:
    fake.limit = 3
    text = optimizers.reproduce(request(tmp_path, minutes=1.0)).read_text()
    assert "No search is done yet." in text and "runs are not done" in text
    fake.limit = 26
    text = optimizers.reproduce(request(tmp_path, minutes=1.0)).read_text()
    assert "runs are not done" in text and "| – | – |" in text
    fake.limit = 10**6
    text = optimizers.reproduce(request(tmp_path)).read_text()
    digests = [cell.digest for cell in fake.ran]
    assert "not done" not in text and len(digests) == len(set(digests))  # nothing ran twice
    again = optimizers.reproduce(request(tmp_path)._replace(redraw=True)).read_text()
    assert again == text and len(fake.ran) == len(digests)


def test_only_the_selected_variants_run_and_the_others_are_still_shown(fake: type[FakeStudy], tmp_path: Path) -> None:
    optimizers.reproduce(request(tmp_path, only=("mnist/adaptive",)))
    assert {cell.axes["variant"] for cell in fake.ran} == {"adaptive"}
    assert {cell.axes["stage"] for cell in fake.ran} == {"search 1", "search 2", "full"}
    text = optimizers.reproduce(request(tmp_path, only=("sgd",))).read_text()
    assert "| adaptive | 64 |" in text and "| sgd | 64 |" in text and "| normalized | 64 |" not in text
    with pytest.raises(ConfigError, match="--only mnist/adaptve selects nothing"):
        OptimizerStudy(request(tmp_path, only=("mnist/adaptve",)))


def test_an_optimizer_whose_runs_all_fail_is_given_up(fake: type[FakeStudy], tmp_path: Path) -> None:
    # A method of the class is replaced on the instance, which mypy does not allow.
    fake.fails = staticmethod(lambda cell: cell.axes["variant"] == "adaptive")  # type: ignore[assignment]
    text = optimizers.reproduce(request(tmp_path)).read_text()
    assert "| normalized | 64 | 0.32 |" in text and "| adaptive | 64 |" not in text
    assert sum(cell.axes["variant"] == "adaptive" for cell in fake.ran) == len(halving.START)


def test_settings_that_the_study_chooses_itself_are_refused(tmp_path: Path) -> None:
    for setting in ("method.lr=0.1", "mnist:method.optimizer=adaptive", "method.optimizer_options.beta=0.9"):
        with pytest.raises(ConfigError, match="the study varies it"):
            OptimizerStudy(request(tmp_path, setting))
    with pytest.raises(ConfigError, match="use --passes"):
        OptimizerStudy(request(tmp_path, "rounds=5"))
    with pytest.raises(ConfigError, match="--tasks leaves out"):
        OptimizerStudy(request(tmp_path, "ridge:method.mu=0.1"))
    with pytest.raises(ConfigError, match="--tasks cifar is not one of the study's"):
        OptimizerStudy(request(tmp_path, tasks=("cifar",)))
    with pytest.raises(ConfigError, match="--targets trec=92"):
        OptimizerStudy(request(tmp_path, targets=("trec=92",)))


def test_text_tasks_vary_the_samples_of_a_round_at_equal_passes(tmp_path: Path) -> None:
    study = OptimizerStudy(request(tmp_path, "task.dtype=bfloat16", "trec:method.mu=0.01", tasks=("sst2", "trec")))
    of_task = {task: {e.name: e for e in study.entries if e.task == task} for task in ("sst2", "trec")}
    assert {"sgd", "sgd@128", "sgd@32", "adaptive@32", "normalized@128"} <= set(of_task["trec"])
    sizes = {name: study.config(e).method.batch_size for name, e in of_task["sst2"].items() if e.variant.name == "sgd"}
    assert sizes == {"sgd": 64, "sgd@128": 16, "sgd@32": 4, "sgd@12": 2}
    for entry in study.entries:
        config = study.config(entry)
        each = optimizer_runs.passes_per_round(config, 512)
        assert config.rounds * each == pytest.approx(6000, abs=each / 2)
        assert config.task.dtype == ("float32" if entry.variant.text else "bfloat16")
        assert config.method.mu == (0.01 if entry.task == "trec" else 0.001)
        assert config.method.k == entry.variant.least_k
    byzantine = study.config(of_task["sst2"]["sgd"], byzantine=True).federation
    assert (byzantine.byzantine, byzantine.clients) == (2, 8)
    assert study.config(of_task["trec"]["sgd"], byzantine=True).federation.byzantine == 3


def test_text_tasks_choose_full_runs_by_held_out_accuracy(fake: type[FakeStudy], tmp_path: Path) -> None:
    def accuracy(cell: Cell) -> float:
        """Best in full runs at four times the rate with the lowest loss, and for the optimizer with the highest."""
        off = abs(math.log2(cell.config.method.lr / (4 * BEST[str(cell.axes["variant"])])))
        return ENDS[str(cell.axes["variant"])] - 0.01 * off

    fake.held_out = staticmethod(accuracy)  # type: ignore[assignment]
    optimizers.reproduce(request(tmp_path, seeds=2))
    full = {str(c.axes["variant"]): c.config.method.lr for c in fake.ran
            if c.axes["stage"] == "full" and c.config.seed == 1}  # fmt: skip
    assert full == pytest.approx({name: 4 * lr for name, lr in BEST.items()})
    with (tmp_path / "optimizers.csv").open(newline="") as file:
        assert all(row["validation_accuracy"] for row in csv.DictReader(file))


def test_the_best_language_model_variants_compute_in_float16_along_low_rank_directions(tmp_path: Path) -> None:
    study = OptimizerStudy(request(tmp_path, "task.dtype=bfloat16", tasks=("trec", "mnist"), only=("*_float16@36",)))
    assert [f"{e.task}/{e.name}" for e in study.selected] == [
        "trec/adaptive_low_rank_float16@36", "trec/zscore_low_rank_float16@36",
    ]  # fmt: skip
    for entry in study.selected:
        task, method = study.config(entry).task, study.config(entry).method
        assert (task.dtype, task.compute) == ("float32", "float16")
        assert (method.k, method.batch_size, method.distribution, method.estimator) == (16, 3, "low_rank", "one_sided")
        rates = [study.rate(entry, e) for e in halving.START]
        assert rates[0] < 1e-3 and rates[-1] > 3e-3


def test_the_finalists_are_sgd_and_the_best_batches_of_the_two_best_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = OptimizerStudy(request(tmp_path))
    losses = {("sgd", 0): 0.9, ("sgd", 32): 0.5, ("a", 0): 0.3, ("a", 32): 0.2, ("b", 0): 0.4, ("c", 32): math.inf}
    entries = {Entry("trec", Variant(name), batch): loss for (name, batch), loss in losses.items()}

    class Ended:
        def __init__(self, entry: Entry) -> None:
            self.score = (entries[entry],)

    monkeypatch.setattr(study, "searched", Ended)
    assert [e.name for e in study.finalists(list(entries))] == ["sgd", "a@32", "b"]


def curve(*mean: float, per_round: float = 2.0) -> shown.Curve:
    return shown.Curve([100.0 * i for i in range(len(mean))], list(mean), list(mean), list(mean), per_round)


def test_factors_compare_where_both_first_reach_the_level_at_which_sgd_ends() -> None:
    usual = curve(0, 50, 80, 70, 80)  # is at its last level after 200 passes, not after 400
    assert shown.speed_of(usual, curve(0, 80, 90)) == shown.Speed(2.0, 2.0)
    assert shown.speed_of(usual, curve(0, 160)).passes == 4.0  # interpolated
    assert shown.speed_of(usual, curve(0, 80, per_round=9.0)) == shown.Speed(2.0, 9.0)
    assert shown.speed_of(usual, curve(0, 79)) == shown.Speed(0.0, 0.0)
    assert shown.speed_of(curve(-math.inf, -math.inf), usual) == shown.Speed(0.0, 0.0)


def test_language_tasks_decide_on_a_claim_where_there_are_any() -> None:
    assert shown.judge({}) == "not measured"
    assert shown.judge({"mnist": True}) == "yes" and shown.judge({"mnist": False, "ridge": False}) == "**no**"
    assert shown.judge({"mnist": True, "trec": False}) == "**no**"
    assert shown.judge({"mnist": False, "trec": True, "snli": False}) == "only on TREC"


def test_claims_are_judged_by_what_was_measured() -> None:
    class Made:
        study = type("Study", (), {"tasks": ("mnist", "trec")})

        def __init__(self) -> None:
            self.speeds = {("mnist", "normalized"): 1.0, ("trec", "normalized"): 3.5, ("trec", "hessian"): 1.5,
                           ("trec", "adaptive"): 2.0}  # fmt: skip

        def speed(self, task: str, variant: str) -> tuple[shown.Speed, str] | None:
            found = self.speeds.get((task, variant))
            return None if found is None else (shown.Speed(found, found), "made up")

    table: Any = Made()
    lines = {line.split("|")[1].strip(): line for line in shown.claims_table(table).splitlines()}
    assert lines["FZOO"].endswith("| MNIST 1 x (made up); TREC 3.5 x (made up) | yes |")
    assert lines["HiZOO"].endswith("| TREC 1.5 x (made up) | **no** |") and lines["HiSo"].endswith("| yes |")
    assert lines["AdaMeZO"].endswith("| – | not measured |")
    assert lines["MEAZO"].endswith("| TREC 2 x, hessian 1.5 x | yes |")
    table.speeds["trec", "adam"] = 3.0
    assert shown.claims_table(table).splitlines()[-1].endswith("| TREC 2 x, adam 3 x | **no** |")


def test_options_of_the_study_are_refused_elsewhere(tmp_path: Path) -> None:
    for option, value in {"--passes": "100", "--only": "x", "--minutes": "1", "--targets": "mnist=9"}.items():
        found = typer.testing.CliRunner().invoke(app, ["reproduce", "table1", option, value, "--out", str(tmp_path)])
        assert isinstance(found.exception, ConfigError) and option in str(found.exception)
    assert "optimizers" not in paper.GROUPS["all"]


@pytest.mark.slow
def test_a_small_study_of_ridge_regression_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [variant for variant in optimizer_runs.VARIANTS if variant.name in ("sgd", "adaptive")]
    monkeypatch.setattr(optimizer_runs, "VARIANTS", tuple(kept))
    wanted = request(tmp_path, seeds=1, tasks=("ridge",), passes=400.0)
    stopped = optimizers.reproduce(wanted._replace(search=wanted.search._replace(minutes=0.0))).read_text()
    assert "No search is done yet." in stopped
    text = optimizers.reproduce(wanted).read_text()
    assert "| sgd | 8 |" in text and "| adaptive | 8 |" in text and "not done" not in text
    assert (tmp_path / "optimizers.png").exists() and (tmp_path / "optimizers.svg").exists()
    runs = {folder.name for folder in (tmp_path / "study/runs").iterdir()}
    assert optimizers.reproduce(wanted).read_text() == text
    assert {folder.name for folder in (tmp_path / "study/runs").iterdir()} == runs


@pytest.mark.slow
def test_a_tiny_language_model_runs_a_float16_variant_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from tiny_models import write_model, write_sets

    monkeypatch.setattr(optimizer_runs, "HELD_OUT", 4)
    near = optimizer_runs.TASKS["trec"]._replace(step=0.15)  # no long search
    monkeypatch.setitem(optimizer_runs.TASKS, "trec", near)
    model, data = write_model("llama", tmp_path / "model"), write_sets(tmp_path / "sets")
    text = TextRequest(model=str(model), data=data, tasks=("trec",))
    search = SearchRequest(passes=300.0, only=("zscore_low_rank_float16@36",))
    few = ("task.samples=12",)
    wanted = Request(tmp_path / "out", 1, False, lambda _: None, few, text=text, search=search)
    table = optimizers.reproduce(wanted).read_text()
    assert "| zscore_low_rank_float16@36 | 16 |" in table
    with (tmp_path / "out/optimizers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["stage"] for row in rows} == {"search 1", "search 2", "full"}
    assert all(0 <= float(row["validation_accuracy"]) <= 1 for row in rows)
