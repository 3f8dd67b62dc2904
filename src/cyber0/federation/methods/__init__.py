"""The federation of each method: cyber0, and what it is compared with under the same attacks and partitions.

fedavg        clients take local gradient steps and send d scalars (first_order.py)
trimmed_mean  the same under the coordinate-wise trimmed mean
krum          the same under Krum
fedzo         clients take local zero-order steps and send d scalars (fedzo.py)
mezo          one machine has all the samples and takes zero-order steps (mezo.py)
"""

from cyber0.config.schema import Config
from cyber0.federation.methods.fedzo import FedZO
from cyber0.federation.methods.first_order import FirstOrder
from cyber0.federation.methods.mezo import Mezo
from cyber0.federation.methods.vectors import VectorFederation
from cyber0.federation.simulation import Federation, Simulation
from cyber0.tasks import AnyTask

__all__ = ["FEDERATIONS", "FedZO", "FirstOrder", "Mezo", "VectorFederation", "make"]

_KINDS: tuple[type[Federation], ...] = (Simulation, FirstOrder, FedZO, Mezo)
FEDERATIONS: dict[str, type[Federation]] = {name: kind for kind in _KINDS for name in kind.methods}
"""Which federation a method's name stands for."""


def make(config: Config, *, task: AnyTask | None = None) -> Federation:
    """Return the federation of a config, whose progress is in memory."""
    return FEDERATIONS[config.method.name](config, task=task)
