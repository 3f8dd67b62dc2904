"""What a Flower app is told: its settings, a node's settings, and which node is which client."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyber0.errors import ConfigError, LedgerError
from cyber0.serve.nodes import NODE, AppSettings, NodeSettings, Roster, read_run_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower" / "pyproject.toml"


def quiet(*_: Any, **__: Any) -> None:
    pass


def flattened(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys as Flower hands them to an app."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_the_example_is_complete_and_valid() -> None:
    tables = tomllib.loads(EXAMPLE.read_text())["tool"]["flwr"]["app"]["config"]
    settings, config = read_run_config(dict(flattened(tables)))
    assert set(tables["flower"]) == set(AppSettings.__dataclass_fields__)
    assert settings.mode == "auto" and settings.host == "127.0.0.1"
    assert config.federation.clients == config.serve.quorum == 2 and config.serve.seed_mode == "chained"


@pytest.mark.parametrize(
    ("values", "message"),
    [({"flower.mod": "stream"}, r"unknown key 'flower\.mod' .*'flower\.mode'"),
     ({"flower.mode": "streams"}, "flower.mode = 'streams' must be one of auto, stream, message"),
     ({"flower.resume": "yes"}, "flower.resume = 'yes' must be of type bool"),
     ({"flower.patience_s": 0}, "patience_s = 0 must be above 0"), ({"flower.out": ""}, "flower.out must name"),
     ({"flower.listen": "7171"}, "flower.listen = '7171' must be HOST:PORT"),
     ({"flower.listen": "localhost:99999"}, "must be HOST:PORT"), ({"flower.address": "fed"}, "flower.address = 'fed'"),
     ({"flower.metrics_port": -1}, "metrics_port = -1"),
     ({"flower.listen": "0.0.0.0:7171"}, "not an address that nodes can reach: name one by flower.address"),
     ({"method.q": 4}, "unknown key 'method.q'"), ({"rounds": -1}, "rounds = -1")],
)  # fmt: skip
def test_bad_settings_are_refused_with_their_name_and_a_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_run_config(values)


def test_options_of_ones_own_task_and_rule_survive_that_flower_flattens_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = {"task": {"name": "my.py:Spam", "options": {"width": 3}}, "method": {"k": 4},
              "aggregation": {"rule": "my.py:clipped", "options": {"tau": 0.5}}}  # fmt: skip
    _, config = read_run_config(dict(flattened(tables)))
    assert (config.task.name, config.task.options) == (f"{tmp_path / 'my.py'}:Spam", {"width": 3})
    assert (config.aggregation.options, config.method.k) == ({"tau": 0.5}, 4)
    with pytest.raises(ConfigError, match=r"method.k = 4 can't be set where method = 3"):
        read_run_config({"method": 3, "method.k": 4})


def test_nodes_are_told_the_address_that_they_can_reach() -> None:
    assert AppSettings(listen="127.0.0.1:0").reached_at(4321) == "127.0.0.1:4321"
    far = AppSettings(listen="0.0.0.0:7171", address="fed.example:443")
    assert (far.reached_at(7171), far.host) == ("fed.example:443", "fed.example")


def test_a_nodes_config_may_hold_what_other_apps_want() -> None:
    node = NodeSettings.read(
        NODE, {"partition-id": 3, "cyber0.data": "/srv", "cyber0.model": "/lm", "cyber0.run": "9d4f"}
    )
    assert (node.data, node.model, node.run, node.device) == ("/srv", "/lm", "9d4f", "cpu")
    with pytest.raises(ConfigError, match=r"cyber0\.dta.*cyber0\.data"):
        NodeSettings.read(NODE, {"cyber0.dta": "/srv"})


@given(visits=st.lists(st.sets(st.integers(1, 9)), max_size=8), clients=st.integers(1, 5))
def test_a_number_belongs_to_one_node_for_ever(
    visits: list[set[int]], clients: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("roster") / "nodes.json"
    given_out: dict[int, int] = {}
    for visit in visits:
        here = Roster(path, clients, quiet).admit(visit)  # a federator that was started anew
        assert set(here) <= visit and all(given_out.get(node, number) == number for node, number in here.items())
        given_out |= here
        assert len(set(given_out.values())) == len(given_out) <= clients
    assert len(given_out) == min(clients, len(set().union(*visits)))


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 0}', '{"1": 0, "2": 0}', '{"1": 7}'])
def test_a_damaged_roster_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text(text)
    with pytest.raises(LedgerError, match=r"nodes\.json"):
        Roster(tmp_path / "nodes.json", 3, quiet)


def test_who_is_one_too_many_is_turned_away_once(tmp_path: Path) -> None:
    said: list[str] = []
    roster = Roster(tmp_path / "nodes.json", 1, lambda event, **_: said.append(event))
    for _ in range(2):
        assert roster.admit([7, 8]) == {7: 0}
    assert said == ["admitted", "turned_away"] and json.loads((tmp_path / "nodes.json").read_text()) == {"7": 0}


def test_a_trusted_client_is_refused_where_any_node_may_become_it() -> None:
    tables = {"federation.clients": 13, "aggregation.rule": "fit_reference", "aggregation.reference": 100}
    with pytest.raises(ConfigError, match=r"any node may be client 0; use `cyber0 serve`"):
        read_run_config(tables)
