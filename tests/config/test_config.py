from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyber0.config import choices
from cyber0.config.files import load, to_toml
from cyber0.config.keys import SECTIONS, describe
from cyber0.config.schema import AggregationConfig, Config, FederationConfig, MethodConfig, TaskConfig, to_dict
from cyber0.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        Config().with_overrides(overrides)
    return str(error.value)


def test_the_defaults_are_the_default_run_of_the_design() -> None:
    config = Config()
    assert (config.task.name, config.rounds, config.seed) == ("mnist", 400, 0)
    federation, method = config.federation, config.method
    assert (federation.clients, federation.byzantine, federation.partition) == (12, 3, "iid")
    assert (federation.attack, federation.attack_reading) == ("full_knowledge", "accepted")
    assert (method.k, method.lr, method.mu, method.batch_size) == (64, 0.01, 0.001, 64)
    assert (config.aggregation.rule, config.aggregation.beta) == ("trimmed_mean", 0.25)


@pytest.mark.parametrize("task", ["mnist", "sst2"])
def test_an_example_is_the_tasks_default_run_with_every_key_explained(task: str) -> None:
    example, config = EXAMPLES / f"{task}.toml", Config().with_overrides([f"task.name={task}"])
    assert load(example) == config
    assert example.read_text().endswith("\n\n" + to_toml(config))


def test_every_key_has_a_description() -> None:
    described = describe()
    assert len(described) == len({d.name for d in described})
    assert all(d.text for d in described)
    assert {"seed", "method.k", "aggregation.beta", "serve.deadline_s"} <= {d.name for d in described}


@pytest.mark.parametrize("description", [d for d in describe() if d.choices], ids=lambda d: d.name)
def test_every_choice_on_offer_is_accepted(description: Any) -> None:
    for name in description.choices:
        overrides = [f"{description.name}={name}"]
        if name == "bucketing":  # pairs of 12 clients are too few for the 3 Byzantine clients of the default run
            overrides.append("aggregation.beta=0.2")
        if description.name in ("task.adapter", "task.compute"):  # of language models
            overrides.append("task.name=sst2")
        if name == "fit_reference":
            overrides.append("aggregation.reference=100")
        if name == "mezo":  # there are no Byzantine clients on one machine
            overrides.append("federation.byzantine=0")
        config = Config().with_overrides(overrides)
        assert load(overrides=overrides) == config


def test_a_missing_key_takes_its_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("seed = 7\n[method]\nk = 3\n")
    assert load(file) == Config(seed=7, method=MethodConfig(k=3))


def test_overrides_win_over_the_file_and_bare_words_are_strings(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[aggregation]\nrule = 'mean'\n")
    config = load(
        file, ["aggregation.rule=median", "method.lr = 1e-3", "task.data=/some/where", "seed=18446744073709551615"]
    )
    assert config.aggregation.rule == "median"
    assert config.method.lr == 1e-3
    assert config.task.data == "/some/where"
    assert config.seed == 2**64 - 1


def test_a_string_key_takes_a_number_as_it_is_written() -> None:
    assert Config().with_overrides(["task.data=2024"]).task.data == "2024"
    assert Config().with_overrides(['task.data="a b"']).task.data == "a b"


def test_overrides_are_checked_together_not_one_by_one() -> None:
    config = Config().with_overrides(["federation.clients=3", "federation.byzantine=1"])
    assert (config.federation.clients, config.federation.byzantine) == (3, 1)


def test_a_whole_number_does_for_a_float_and_becomes_one() -> None:
    lr = Config().with_overrides(["method.lr=1"]).method.lr
    assert lr == 1.0 and type(lr) is float


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**64 - 1),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    beta=st.floats(0, 0.25),
    data=st.text(st.characters(exclude_categories=["Cs"])),
    risk=st.booleans(),
)
def test_a_written_config_reads_back_the_same(seed: int, lr: float, beta: float, data: str, risk: bool) -> None:
    import tomllib

    config = Config(
        seed=seed,
        task=TaskConfig(data=data),
        federation=FederationConfig(accept_risk=risk),
        method=MethodConfig(lr=lr),
        aggregation=AggregationConfig(beta=beta),
    )
    text = to_toml(config)
    assert Config.from_dict(tomllib.loads(text)) == config
    assert to_toml(Config.from_dict(to_dict(config))) == text


def test_a_written_config_names_every_key() -> None:
    import tomllib

    written = tomllib.loads(to_toml(Config()))
    assert [d.name for d in describe()] == [
        f"{section}.{name}" if isinstance(table, dict) else section
        for section, table in written.items()
        for name in (table if isinstance(table, dict) else [section])
    ]
    for table in written.values():
        for name in [name for name, value in table.items() if value == {}] if isinstance(table, dict) else []:
            del table[name]
    del (
        written["task"]["weights"],
        written["task"]["compute"],
        written["task"]["validation"],
        written["task"]["layer"],
        written["aggregation"]["reference"],
        written["aggregation"]["reference_batch"],
    )  # left out where they are empty, like the tables of options
    del written["federation"]["expel"]
    del written["serve"]["scalar_limit"]  # and where they have their defaults: run ids stay what they were
    for name in ("candidates", "optimizer", "rank", "rows_in_flight", "rounding"):
        del written["method"][name]
    assert written == to_dict(Config())


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("aggregation.bta=0.2", "aggregation.beta"),
        ("method.beta=0.2", "aggregation.beta"),
        ("metod.k=2", "method.k"),
        ("round=3", "rounds"),
        ("agregation=3", "aggregation"),
        ("method.wholly_else=3", "method.k"),
        ("nonsense=1", "federation"),
        ("aggregation.rule=trimed_mean", "trimmed_mean"),
        ("federation.attack=full_knowlege", "full_knowledge"),
        ("method.distribution=zzz", "gaussian"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_valid_one(override: str, hint: str) -> None:
    message = refused(override)
    name, _, value = override.partition("=")
    assert name in message and value in message and hint in message


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "seed=18446744073709551616",
        "seed=true",
        "seed=1.0",
        "rounds=-1",
        "rounds=4294967297",
        "rounds=many",
        "device=tpu",
        "evaluate_every=0",
        "task.dtype=float64",
        "federation.clients=0",
        "federation.byzantine=-1",
        "federation.byzantine=12",
        "federation.byzantine=13",
        "federation.alpha=0",
        "federation.alpha=-1",
        "federation.alpha=1e10",
        "federation.shards=0",
        "federation.similarity=-0.1",
        "federation.similarity=1.1",
        "federation.participation=0",
        "federation.participation=1.5",
        "federation.accept_risk=1",
        "federation.accept_risk=True",
        "method.k=0",
        "method.k=16777216",
        "method.mu=-0.1",
        "method.lr=0",
        "method.lr=-1",
        "method.lr=nan",
        "method.lr=inf",
        "method.lr=1" + "0" * 400,
        "method.batch_size=0",
        "method.local_epochs=0",
        "method.projection_radius=-1",
        "aggregation.beta=0.5",
        "aggregation.beta=-0.1",
        "aggregation.beta=nan",
        "serve.deadline_s=0",
        "serve.quorum=0",
        "serve.quorum=13",
        "serve.codec=float16",
        "serve.digest_every=-1",
    ],
)
def test_an_impossible_value_is_refused_with_its_key(override: str) -> None:
    assert override.partition("=")[0] in refused(override)


def test_differences_with_mu_zero_are_refused_with_the_remedy() -> None:
    assert 'method.estimator = "gradient" or "forward"' in refused("method.mu=0")
    assert '"one_sided", which divides by it' in refused("method.mu=0", "method.estimator=one_sided")
    assert "method.mu" in refused("method.mu=1e-60")
    for estimator in ("gradient", "forward"):
        assert Config().with_overrides(["method.mu=0", f"method.estimator={estimator}"]).method.mu == 0


def test_too_many_directions_in_a_round_are_refused() -> None:
    assert Config().with_overrides(["method.k=4096", "method.local_epochs=4095"]).method.k == 4096
    assert "method.local_epochs" in refused("method.k=4096", "method.local_epochs=4096")


def test_trimming_everybody_is_refused() -> None:
    message = refused("federation.clients=2", "federation.byzantine=0", "aggregation.beta=0.4999999999999")
    assert "aggregation.beta" in message and "2 invited" in message


def test_floors_are_guarded_against_decimal_fractions() -> None:
    assert AggregationConfig(beta=0.29).trimmed(100) == 29
    assert FederationConfig(clients=100, participation=0.29).invited == 29
    assert FederationConfig(clients=10, participation=0.01).invited == 1


def test_a_strength_is_refused_where_an_attack_has_none_or_another_range() -> None:
    assert Config().federation.attack_strength == 0
    Config().with_overrides(["federation.attack=alie", "federation.attack_strength=1.5"])
    for overrides, words in (
        (["federation.attack_strength=2"], ("federation.attack_strength = 2.0", "'full_knowledge'", "sign_flip")),
        (["federation.attack=ipm", "federation.attack_strength=-1"], ("federation.attack_strength", "at least 0")),
        (["federation.attack=fang_trimmed_mean", "federation.attack_strength=1"], ("above 1",)),
    ):
        with pytest.raises(ConfigError) as refused:
            Config().with_overrides(overrides)
        assert all(word in str(refused.value) for word in words)


def test_byzantine_clients_without_an_attack_are_allowed_and_so_is_the_reverse() -> None:
    Config().with_overrides(["federation.attack=none"])
    Config().with_overrides(["federation.byzantine=0"])


def test_a_config_built_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"method\.k"):
        MethodConfig(k=0)
    with pytest.raises(ConfigError, match="rounds"):
        replace(Config(), rounds=-1)
    with pytest.raises(ConfigError, match="method must be"):
        Config(method={"k": 3})  # type: ignore[arg-type]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="can't be read"):
        load(tmp_path)


def test_bad_toml_is_refused_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("seed = 1\nrounds = = 2\n")
    with pytest.raises(ConfigError, match=r"bad\.toml.*line 2"):
        load(file)
    file.write_bytes(b"seed = \xff\n")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load(file)


def test_a_section_that_is_not_a_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('task = "mnist"\n')
    for overrides in ([], ["task.dtype=float16"]):
        with pytest.raises(ConfigError, match="task = 'mnist' must be a table; its keys are name, data"):
            load(file, overrides)
    assert "section" in refused("task=3")


def test_an_override_without_a_value_is_refused() -> None:
    assert "section.key=value" in refused("method.k")
    assert "task.data" in refused("task.data=\udcff")


def test_reading_a_config_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, cyber0.config as c; c.load(); print(*{'torch', 'numpy', 'numba'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"


def test_choices_have_a_line_each_and_sections_are_complete() -> None:
    tables = [getattr(choices, name) for name in dir(choices) if name.isupper()]
    assert all(text and "\n" not in text for table in tables for text in table.values())
    assert list(SECTIONS) == ["task", "federation", "method", "aggregation", "serve"]
    assert math.isfinite(Config().serve.deadline_s)


@pytest.mark.parametrize("task", ["ridge", "logistic"])
def test_labels_that_are_not_classes_can_not_be_flipped(task: str) -> None:
    with pytest.raises(ConfigError, match=r"label_flip.*has no such classes; choose another"):
        Config().with_overrides([f"task.name={task}", "federation.attack=label_flip"])


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("task.option.width=3", "task.options.width"),
        ("aggregation.opts.tau=3", "aggregation.options.tau"),
        ("method.learning_rate=3", "method.lr"),
        ("learning_rate=3", "method.lr"),
    ],
)
def test_what_people_write_for_a_setting_is_understood(setting: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key .*; did you mean '{meant}'\?"):
        load(None, [setting])


def test_a_comment_stands_apart_from_a_value_of_any_length() -> None:
    for length in range(40):
        text = to_toml(load(None, [f"task.data={'x' * length}"]))
        assert f'data = "{"x" * length}" ' in text


DEEP, LONG = "[" * 2000 + "]" * 2000, "9" * 5000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"rounds = {DEEP}", "is nested too deeply"),
        (f"[task]\noptions = {'{a=' * 500}1{'}' * 500}", "is nested too deeply"),
        (f"[study]\nx = {'[' * 40}{']' * 40}", "is nested too deeply: at most 32"),
        (f"{'a.' * 5000}a = 1", "is nested too deeply"),
        (f"[{'a.' * 5000}a]\nb = 1", "is nested too deeply"),
        (f"rounds = {LONG}", "an integer has too many digits"),
        (f"seed = 0x{'f' * 6000}", "seed has too many digits"),
        (f"[method]\nk = [0x{'f' * 6000}]", r"method\.k has too many digits"),
        (f"foo = 0x{'f' * 6000}", "foo has too many digits"),
    ],
)
def test_toml_that_is_nested_deeply_or_has_huge_integers_is_refused_in_one_line(
    text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"deep\.toml (can't be read: )?{reason}") as refused:
        load(path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize("value", [DEEP, LONG, f"0x{'f' * 6000}", f"{{a={DEEP}}}"])
@pytest.mark.parametrize("name", ["rounds", "method.lr", "task.name", "task.options.x"])
def test_an_override_that_is_nested_deeply_or_has_huge_integers_is_refused_in_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = '.*' (is nested|can't be read)") as refused:
        load(None, [f"{name}={value}"])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize("settings", [["aggregation.beta=0.34"], ["aggregation.beta=0.05", "federation.byzantine=0"]])
def test_expelling_is_refused_where_nobody_can_be_expelled(settings: list[str]) -> None:
    message = refused("federation.expel=true", "aggregation.rule=reputation", *settings)
    assert "federation.expel = true can expel nobody" in message and "aggregation.beta = 0." in message
