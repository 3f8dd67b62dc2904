"""Federated averaging by gradients, and its robust kin."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.federation.methods.vectors import VectorFederation


class FirstOrder(VectorFederation):
    """Every invited client takes E gradient steps from w on fresh batches, and sends what they add up to.

        w_0 = w,  w_(e+1) = w_e - lr grad f_i(w_e; batch e),  sent: (w - w_E) / lr

    With one step and the plain mean this is distributed SGD; with more it is McMahan et al., "Communication-efficient
    learning of deep networks from decentralized data", AISTATS 2017 (FedAvg), all clients weighing the same. Under the
    coordinate-wise trimmed mean it is Yin et al., ICML 2018, under Krum Blanchard et al., NeurIPS 2017.
    """

    methods = ("fedavg", "trimmed_mean", "krum")

    def steps(self, clients: NDArray[np.int64], lr: float) -> torch.Tensor:
        return torch.cat([self._steps_of(group, lr) for group in self.samples.groups(clients)])

    def _steps_of(self, clients: NDArray[np.int64], lr: float) -> torch.Tensor:
        """Return the sums for clients that go through together."""
        # The sum of the gradients is what (w - w_E) / lr is without rounding, and says where a client is.
        total = self.gradients.each(self.samples.batch(clients, self.round))
        for epoch in range(1, self.config.method.local_epochs):
            total += self.gradients.each(self.samples.batch(clients, self.round, epoch), self.w - lr * total)
        return total
