"""The file of a study: every combination of a grid, checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from studies import GRID, plan_of

from cyber0.config.files import load
from cyber0.errors import ConfigError
from cyber0.study import Layout, read_plan


def test_a_grid_is_every_combination_with_the_last_axis_and_then_the_seeds_fastest(here: Path) -> None:
    plan = plan_of(GRID)
    found = [(*cell.axes.values(), cell.config.seed) for cell in plan.cells]
    assert found == [(r, a, s) for r in ("mean", "krum") for a in ("none", "alie", "ipm") for s in (0, 1)]
    for cell in plan.cells:
        assert cell.config.aggregation.rule == cell.axes["aggregation.rule"]
        assert cell.config.federation.attack == cell.axes["federation.attack"]
        assert cell.config.rounds == 2
    assert plan.name == "s" and plan.layout == Layout(("aggregation.rule",), ("federation.attack",), ())
    assert len({cell.folder_name for cell in plan.cells}) == 12


def test_quoted_dotted_and_nested_keys_mean_the_same(here: Path) -> None:
    spellings = ('"federation.clients" = [6, 8]', "federation.clients = [6, 8]", "federation = { clients = [6, 8] }")
    plans = [plan_of(f"[study.grid]\n{spelling}\n") for spelling in spellings]
    assert plans[0].cells == plans[1].cells == plans[2].cells
    assert [cell.config.federation.clients for cell in plans[0].cells] == [6, 8]


def test_seeds_are_a_list_or_so_many_from_the_files_own_seed(here: Path) -> None:
    grid = "[study.grid]\nrounds = [1]\n"
    assert plan_of(f"seed = 7\n{grid}").seeds == [7]
    assert plan_of(f"seed = 7\n[study]\nseeds = 3\n{grid}").seeds == [7, 8, 9]
    assert plan_of(f"[study]\nseeds = [5, 2]\n{grid}").seeds == [5, 2]


def test_a_share_of_byzantine_clients_sets_their_number_and_beta(here: Path) -> None:
    plan = plan_of("[study.grid]\nbyzantine_share = [0.125, 0.29]\nfederation.clients = [40, 100]\n")
    found = [(c.config.federation.byzantine, c.config.aggregation.beta) for c in plan.cells]
    assert found == [(5, 0.125), (12, 0.125), (11, 0.29), (29, 0.29)]
    assert plan.layout.circumstances == ("byzantine_share", "federation.clients")


@pytest.mark.parametrize("beta", ["[aggregation]\nbeta = 0.4\n", "[study.grid.aggregation]\nbeta = [0.4]\n"])
def test_a_beta_that_is_set_stays_beside_a_share_of_byzantine_clients(beta: str, here: Path) -> None:
    plan = plan_of(f"{beta}[study.grid]\nbyzantine_share = [0.25]\n")
    assert [(c.config.federation.byzantine, c.config.aggregation.beta) for c in plan.cells] == [(3, 0.4)]


def test_values_that_belong_together_are_one_axis_and_one_that_attacks_is_known_as_such(here: Path) -> None:
    plan = plan_of("""
    [study.grid]
    defence = [{ label = "own", aggregation.rule = "krum", "method.k" = 8 }, { aggregation = { rule = "mean" } }]
    foe = [{ label = "loud", federation.attack = "gaussian" }, { federation.attack = "alie", federation.byzantine = 2 }]
    """)
    assert [tuple(cell.axes.values()) for cell in plan.cells] == [
        ("own", "loud"), ("own", "alie, 2"), ("mean", "loud"), ("mean", "alie, 2")]  # fmt: skip
    assert [(c.config.method.k, c.config.federation.byzantine) for c in plan.cells] == [
        (8, 3),
        (8, 2),
        (64, 3),
        (64, 2),
    ]
    assert plan.layout == Layout(("defence",), ("foe",), ())


def test_skip_leaves_out_what_meets_all_of_a_condition(here: Path) -> None:
    skip = 'skip = [{ aggregation.rule = "mean", "federation.attack" = ["alie", "ipm"] }]'
    plan = plan_of(GRID.replace("seeds = 2", f"seeds = 2\n{skip}"))
    assert [tuple(c.axes.values()) for c in plan.cells[::2]] == [
        ("mean", "none"), ("krum", "none"), ("krum", "alie"), ("krum", "ipm")]  # fmt: skip
    assert plan.skipped == 2


IMPOSSIBLE = (
    "[study]\n{}\n[study.grid]\nfederation.clients = [5, 12]\naggregation = {{rule = ['krum'], beta = [0.4]}}\n"
)


def test_an_impossible_combination_is_refused_by_name_or_left_out(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 combination of the grid is impossible:\s+federation.clients = 5, .*"
                                          r"krum.*needs 7 reports(.|\n)*skip_impossible"):  # fmt: skip
        plan_of(IMPOSSIBLE.format(""))
    plan = plan_of(IMPOSSIBLE.format("skip_impossible = true"))
    assert [cell.config.federation.clients for cell in plan.cells] == [12]
    assert len(plan.impossible) == 1 and "needs 7 reports" in plan.impossible[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = 3", r"has no \[study\] table"),
        ("study = 3", r"has no \[study\] table"),
        ("[study]", r"\[study.grid\] lists what varies"),
        ("[study]\nsed = 3\n[study.grid]\nrounds = [1]", "unknown key study.sed; did you mean 'seeds'"),
        ("[study]\nrounds = 3\n[study.grid]\nrounds = [1]", r"unknown key study.rounds; settings .* belong outside"),
        ("[study]\nseeds = 0\n[study.grid]\nrounds = [1]", "study.seeds = 0 must be a count"),
        ("[study]\nseeds = [1, 1]\n[study.grid]\nrounds = [1]", "contains a seed twice"),
        ("[study]\nseeds = [-1]\n[study.grid]\nrounds = [1]", "seed = -1 is impossible"),
        ("[study]\nname = 'a/b'\n[study.grid]\nrounds = [1]", "a valid name for a folder"),
        ("[study]\nskip_impossible = 1\n[study.grid]\nrounds = [1]", "must be true or false"),
        ("rouns = 1\n[study.grid]\nrounds = [1]", "unknown key 'rouns'.*did you mean 'rounds'"),
        ("[study.grid]\nattack = ['alie']", "did you mean 'federation.attack'"),
        ("[study.grid]\nfederation.attack = ['alei']", "'alei' is not a choice; did you mean 'alie'"),
        ("[study.grid]\nfederation.attack = 'alie'", "must be a list"),
        ("[study.grid]\nfederation.attack = []", "is empty"),
        ("[study.grid]\nrounds = [1, 1]", "has 1 twice"),
        ("[study.grid]\nrounds = [[1]]", "must be a whole number"),
        ("[study.grid]\nseed = [1]", "set study.seeds"),
        ("[study.grid]\nbyzantine_shares = [0.1]", "did you mean 'byzantine_share'"),
        ("[study.grid]\nbyzantine_share = [1.0]", "must be a share of the clients"),
        ("[study.grid]\nbyzantine_share = [0.6]", "aggregation.beta = 0.6 is impossible"),
        ("[study.grid]\nbyzantine_share = [0.1]\nfederation.byzantine = [1]", "both set federation.byzantine"),
        ("[study.grid]\nx = [{ k = 3 }]", "did you mean 'method.k'"),
        ("[study.grid]\nx = [{ method.k = 3 }, 5]", "mixes tables with other values"),
        ("[study.grid]\nx = [{ label = 5, method.k = 3 }]", "label = 5 must be a name"),
        ("[study.grid]\nx = [{ seed = 3 }]", "set study.seeds"),
        ("[study.grid]\nx = [{ method.k = 3, 'method.k' = 4 }]", "method.k is set twice"),
        ("[study.grid]\nstatus = [{ rounds = 3 }]", "'status' is taken"),
        ("[study.grid.foo]\nrounds = [3]", "study.grid.foo is a table"),
        ("[study]\nskip = 3\n[study.grid]\nrounds = [1]", "must be a list of tables"),
        ("[study]\nskip = [{rounds = 2}]\n[study.grid]\nrounds = [1]", "is not in the grid; its values are 1"),
        ("[study]\nskip = [{rounds = {a = 2}}]\n[study.grid]\nrounds = [1]", "must be a value or a list"),
        ("[study]\nskip = [{seed = 2}]\n[study.grid]\nrounds = [1]", "no combination has"),
        ("[study]\nskip = [{rounds = 1}]\n[study.grid]\nrounds = [1]", "no combination to run: 1 are skipped"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_with_a_remedy(text: str, message: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(text)


def test_the_example_is_what_its_header_says() -> None:
    example = Path(__file__).parents[2] / "examples/study.toml"
    plan = read_plan(example)
    assert len(plan.cells) == 120 and plan.name == "rules-and-attacks"
    with pytest.raises(ConfigError, match="run it by: cyber0 study"):
        load(example)


def test_a_share_of_byzantine_clients_counts_the_tasks_own_clients(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        '[task]\nname = "sst2"\nmodel = "x"\n[study]\nname = "s"\nseeds = 1\n[study.grid]\nbyzantine_share = [0.25]\n'
    )
    (cell,) = read_plan(file).cells
    assert (cell.config.federation.clients, cell.config.federation.byzantine) == (8, 2)
