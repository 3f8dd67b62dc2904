"""Federated averaging by zero-order steps."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.config.schema import Config
from cyber0.directions import Directions
from cyber0.estimate.batched import BATCHED_WEIGHTS
from cyber0.federation import build
from cyber0.federation.methods.vectors import VectorFederation
from cyber0.tasks import AnyTask


class FedZO(VectorFederation):
    """Every invited client takes E zero-order steps from w, each along k directions of its own, and sends their sum.

        w_(e+1) = w_e - (lr / k) sum_r g_r z_r,   g_r the slope of f_i along z_r at w_e over a fresh batch

    Fang et al., "Communication-efficient stochastic zeroth-order optimization for federated learning", IEEE
    Transactions on Signal Processing 2022. Their directions are uniform on the unit sphere with the factor d, which is
    `method.distribution = "sphere"` here, and their slope is the forward difference (f(w + mu z) - f(w)) / mu, which is
    `method.estimator = "one_sided"`. The default, two_point, is the central difference, with 2k evaluations instead of
    k + 1 and an error of order mu^2 instead of mu. Direction r of client i in local step e has the index
    (i E + e) k + r.
    """

    methods = ("fedzo",)

    def __init__(self, config: Config, *, task: AnyTask | None = None) -> None:
        super().__init__(config, task=task)
        method, first = config.method, partial(self.first_batch, alone=True)
        self.evaluator = build.make_evaluator(self.parameters, self.task, config, method.estimator, method.mu, first)

    def steps(self, clients: NDArray[np.int64], lr: float) -> torch.Tensor:
        return torch.stack([self._steps_of(client, lr) for client in clients.tolist()])

    def _steps_of(self, client: int, lr: float) -> torch.Tensor:
        method, total = self.config.method, torch.zeros_like(self.w)
        with self.parameters.excursion() if method.local_epochs > 1 else contextlib.nullcontext():
            for epoch in range(method.local_epochs):
                if epoch:
                    self.parameters.set_vector(self.w - lr * total)
                first = (client * method.local_epochs + epoch) * method.k
                directions = Directions(self.config.seed, self.round, method.k, first)
                batch = self.samples.batch(np.array([client]), self.round, epoch)
                slopes = self.evaluator.estimate(batch, directions)[0]
                total += self._along(directions, slopes / method.k)
        return total

    def _along(self, directions: Directions, factors: NDArray[np.float64]) -> torch.Tensor:
        """Return sum_r factors_r z_r."""
        size = max(1, BATCHED_WEIGHTS // self.parameters.dimension)
        total, factor = torch.zeros_like(self.w), torch.from_numpy(factors).to(self.w)
        for begin in range(0, directions.k, size):
            some = factor[begin : begin + size]
            first = directions.first + begin
            total += some @ self.parameters.directions(directions.seed, directions.round, first, len(some))
        return total
