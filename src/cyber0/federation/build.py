"""Which federation a method's name stands for."""

from __future__ import annotations

from cyber0.config.schema import Config
from cyber0.federation.methods import FedZO, FirstOrder, Mezo
from cyber0.federation.simulation import Federation, Simulation
from cyber0.tasks import AnyTask

KINDS: tuple[type[Federation], ...] = (Simulation, FirstOrder, FedZO, Mezo)
FEDERATIONS: dict[str, type[Federation]] = {name: kind for kind in KINDS for name in kind.methods}


def make(config: Config, *, task: AnyTask | None = None) -> Federation:
    """Return the federation that a config asks for, kept in memory."""
    return FEDERATIONS[config.method.name](config, task=task)
