"""Tables 4 and 5: the paper's settings, as the defaults of this program have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cyber0.config.schema import Config
from cyber0.reproduce.text import TITLES


class SettingsTable(NamedTuple):
    """A table of settings."""

    title: str
    head: list[str]
    rows: list[list[str]]


ROWS: Mapping[str, tuple[str, Callable[[Config], Any]]] = {
    "Global Train Samples": ("task.samples", lambda c: c.task.samples or 60_000),  # all of MNIST's
    "Number of Clients": ("federation.clients", lambda c: c.federation.clients),
    "Number of Byzantine Clients": ("federation.byzantine", lambda c: c.federation.byzantine),
    "beta": ("aggregation.beta", lambda c: c.aggregation.beta),
    "Learning Rate": ("method.lr", lambda c: c.method.lr),
    "Client Batch Size": ("method.batch_size", lambda c: c.method.batch_size),
    "Learning Steps": ("rounds", lambda c: c.rounds),
}


def tables() -> list[SettingsTable]:
    """Return the two tables; a row has the paper's name, the key, and the value for each data set."""
    texts = {title: Config().with_overrides([f"task.name={task}"]) for task, title in TITLES.items()}
    return [
        _table("Table 4: logistic regression (Table 1: 40 clients)", {"MNIST": Config()}),
        _table("Table 5: prompt-based fine-tuning", {name: texts[name] for name in ("SST-2", "SNLI", "TREC")}),
    ]


def _table(title: str, configs: Mapping[str, Config]) -> SettingsTable:
    rows = [[name, key, *(_shown(value(config)) for config in configs.values())]
            for name, (key, value) in ROWS.items()]  # fmt: skip
    return SettingsTable(title, ["the paper's name", "setting", *configs], rows)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
