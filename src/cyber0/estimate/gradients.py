"""Gradients of a loss for many clients at once, by backpropagation, and their projections onto directions.

Three paths lead to the same rows, and the first that fits is taken: outputs that are one linear map of w need two
matrix products for all clients together (linear.py); a small model goes through vmap over the clients (batched.py); any
other takes one client at a time. Losses are taken in eval mode, as everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.directions import Directions
from cyber0.estimate import batched
from cyber0.estimate.batches import Batch
from cyber0.estimate.linear import SAMPLES_AT_ONCE, LinearGradients
from cyber0.estimate.objective import Matrix, Objective, checked_losses
from cyber0.estimate.torch_threads import make_first_calls
from cyber0.model.vector import Parameters

Tensor = torch.Tensor

PROJECTION_CHUNK = 1 << 24  # coordinates of all directions that are drawn at a time to project a gradient


class Gradients:
    """Gradients for one model and objective; w is never changed here.

    Args:
        parameters: The weights.
        objective: What is measured.
    """

    def __init__(self, parameters: Parameters, objective: Objective) -> None:
        make_first_calls()
        self.parameters, self.objective = parameters, objective
        small = parameters.dimension <= batched.BATCHED_DIMENSION and parameters.substitutable
        self._linear = small and len(parameters.tensors) <= 2
        self._linear_gradients = LinearGradients(parameters, objective)
        self._batched = small
        self._compared = False

    def each(self, batch: Batch, at: Tensor | None = None) -> Tensor:
        """Return the gradient of every client's mean loss, one float32 row each.

        Args:
            batch: The clients' samples.
            at: Where each client is, one row of weights each; None: all are at w.
        """
        if self._linear:
            rows = self._linear_gradients.each(batch, at)
            if rows is not None:
                return rows
            self._linear = False
        parts = []
        for clients, samples in self._pieces(batch.counts):
            part = Batch(batch.inputs[samples], batch.targets[samples], batch.counts[clients])
            parts.append(self._piece(part, None if at is None else at[clients]))
        return torch.cat(parts)

    def of_all(self, inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        """Return the gradient at w of the weighted sum of all samples' losses, as one float32 vector.

        Args:
            inputs: The samples.
            targets: Their targets.
            shares: The weight of each sample; those of weight 0 cost no less than the others.
        """
        if self._linear:
            gradient = self._linear_gradients.of_all(inputs, targets, shares)
            if gradient is not None:
                return gradient
        total = torch.zeros(self.parameters.dimension, device=self.parameters.device)
        for begin in range(0, len(inputs), SAMPLES_AT_ONCE):
            part = slice(begin, begin + SAMPLES_AT_ONCE)
            total += self._gradient(inputs[part], targets[part], shares[part])
        return total

    def _pieces(self, counts: NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
        """Yield the clients, and their samples, that go through together: equally many each, within the limits."""
        most = max(1, batched.BATCHED_WEIGHTS // self.parameters.dimension)
        begin, sample = 0, 0
        while begin < len(counts):
            count = int(counts[begin])
            limit = min(len(counts), begin + min(most, max(1, batched.BATCHED_SAMPLES // count)))
            end = begin + 1
            while end < limit and counts[end] == count:
                end += 1
            yield slice(begin, end), slice(sample, sample + (end - begin) * count)
            sample += (end - begin) * count
            begin = end

    def _piece(self, batch: Batch, at: Tensor | None) -> Tensor:
        if not self._batched or not isinstance(batch.inputs, Tensor):  # sentences differ in length: no one tensor
            return self._one_by_one(batch, at)
        try:
            rows = batched.client_gradients(self.parameters, self.objective, batch, at)
        except batched.UNBATCHABLE:
            self._batched = False
            return self._one_by_one(batch, at)
        if not self._compared:  # a use of a weight that is not met gives a wrong gradient without a word
            plain = self._one_by_one(batch, at)
            self._compared = True
            self._batched = torch.allclose(rows, plain, rtol=1e-3, atol=1e-5, equal_nan=True)
            rows = rows if self._batched else plain
        return rows

    def _one_by_one(self, batch: Batch, at: Tensor | None) -> Tensor:
        rows, begin = [], 0
        with contextlib.nullcontext() if at is None else self.parameters.excursion():
            for client, count in enumerate(batch.counts.tolist()):
                part = slice(begin, begin + count)
                begin += count
                if at is not None:
                    self.parameters.set_vector(at[client])
                shares = torch.full((count,), 1.0 / count, device=self.parameters.device)
                rows.append(self._gradient(batch.inputs[part], batch.targets[part], shares))
        return torch.stack(rows)

    def _gradient(self, inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        """Return the gradient at w of the weighted sum of these samples' losses."""
        tensors = self.parameters.tensors
        with torch.enable_grad(), self.parameters.perturbed(None):
            outputs = self.objective.outputs(self.parameters.model, inputs)
            losses = checked_losses(self.objective.losses(outputs, targets), len(shares))
            gradients = torch.autograd.grad(losses @ shares.to(losses), tensors, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(tensors, gradients, strict=True)]
        return torch.cat([part.reshape(-1).float() for part in parts])


def projected_gradients(
    parameters: Parameters, losses: Callable[[Batch], Tensor], batch: Batch, directions: Directions
) -> Matrix:
    """Return the (clients x k) slopes: one gradient a client, k projections."""
    rows, begin = [], 0
    for count in batch.counts.tolist():
        part = Batch(batch.inputs[begin : begin + count], batch.targets[begin : begin + count], np.array([count]))
        begin += count
        with torch.enable_grad(), parameters.perturbed(None):
            gradients = torch.autograd.grad(losses(part).mean(), parameters.tensors, allow_unused=True)
        rows.append(project(parameters, gradients, directions))
    return np.stack(rows)


def project(
    parameters: Parameters, gradients: Sequence[Tensor | None], directions: Directions
) -> NDArray[np.float64]:  # fmt: skip
    """Return <gradient, z_r> for every direction, drawn piece by piece; the gradient is one tensor a parameter."""
    total = np.zeros(directions.k)
    for entry, gradient in zip(parameters.layout, gradients, strict=True):
        if gradient is None:
            continue
        flat = gradient.reshape(-1).float()
        size = max(1, PROJECTION_CHUNK // directions.k)
        for begin in range(0, flat.numel(), size):
            piece = flat[begin : begin + size]
            z = torch.empty(directions.k, piece.numel(), device=piece.device)
            parameters.fill(z, entry.offset + begin, directions.seed, directions.round, directions.first)
            total += (z @ piece).double().cpu().numpy()
    return total
