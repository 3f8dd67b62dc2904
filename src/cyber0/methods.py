"""Which federation a method's name stands for."""

from __future__ import annotations

from cyber0.baselines import FedZO, FirstOrder, Mezo
from cyber0.config import Config
from cyber0.simulation import Federation, Simulation
from cyber0.tasks import Task

METHODS: dict[str, type[Federation]] = {
    "cyber0": Simulation,
    "fedavg": FirstOrder,
    "trimmed_mean": FirstOrder,
    "krum": FirstOrder,
    "fedzo": FedZO,
    "mezo": Mezo,
}


def make(config: Config, *, task: Task | None = None) -> Federation:
    """Return the federation that a config asks for, kept in memory."""
    return METHODS[config.method.name](config, task=task)
