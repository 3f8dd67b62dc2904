"""cyber0: Byzantine-resilient federated zero-order learning that sends k scalars a round.

Importing this loads neither torch nor numba; names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyber0.api import run as run
    from cyber0.config.registry import attack as attack
    from cyber0.config.registry import partition as partition
    from cyber0.config.registry import pre_aggregation as pre_aggregation
    from cyber0.config.registry import rule as rule
    from cyber0.config.registry import schedule as schedule
    from cyber0.config.schema import Config as Config
    from cyber0.errors import Cyber0Error as Cyber0Error
    from cyber0.federation.simulation import Simulation as Simulation
    from cyber0.ledger import Ledger as Ledger
    from cyber0.model.vector import Parameters as Parameters
    from cyber0.protocol.client import Client as Client
    from cyber0.protocol.federator import Federator as Federator
    from cyber0.tasks.base import Task as Task
    from cyber0.zero_order import ZeroOrder as ZeroOrder

__version__ = "0.2.0"

_HOMES = {
    "Client": "protocol.client",
    "Config": "config.schema",
    "Cyber0Error": "errors",
    "Federator": "protocol.federator",
    "Ledger": "ledger",
    "Parameters": "model.vector",
    "Simulation": "federation.simulation",
    "Task": "tasks.base",
    "ZeroOrder": "zero_order",
    "run": "api",
    **dict.fromkeys(("attack", "partition", "pre_aggregation", "rule", "schedule"), "config.registry"),
}
_ROOMS = ("aggregate", "attacks", "config", "diagnose", "directions", "estimate", "federation", "integrations",
          "ledger", "model", "protocol", "report", "reproduce", "runs", "study", "tasks", "theory")  # fmt: skip

__all__ = ["Client", "Config", "Cyber0Error", "Federator", "Ledger", "Parameters", "Simulation", "Task", "ZeroOrder",
           "attack", "partition", "pre_aggregation", "rule", "run", "schedule"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"cyber0.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return import_module(f"cyber0.{name}")
    raise AttributeError(f"module 'cyber0' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
