"""What cyber0 is compared with: the same simulation, attacks, partitions and byte counting under other methods.

fedavg        clients take local gradient steps and send d numbers (first_order.py)
trimmed_mean  the same under the coordinate-wise trimmed mean
krum          the same under Krum
fedzo         clients take local zero-order steps and send d numbers (fedzo.py)
mezo          one machine has all the samples and takes zero-order steps (mezo.py)
"""

from cyber0.federation.methods.fedzo import FedZO
from cyber0.federation.methods.first_order import FirstOrder
from cyber0.federation.methods.mezo import Mezo
from cyber0.federation.methods.vectors import VectorFederation

__all__ = ["FedZO", "FirstOrder", "Mezo", "VectorFederation"]
