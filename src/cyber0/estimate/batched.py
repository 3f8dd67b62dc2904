"""Small models: evaluated at many directions, or differentiated for many clients, at once by vmap."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cyber0.directions import Directions, Probe
from cyber0.estimate.batches import Batch
from cyber0.estimate.differences import one_sided, two_point
from cyber0.estimate.objective import Matrix, Objective, checked_losses, client_means
from cyber0.model.vector import Parameters

Tensor = torch.Tensor

BATCHED_DIMENSION = 1 << 20  # models up to this many weights are evaluated at many directions at once
BATCHED_WEIGHTS = 1 << 23  # and with at most this many perturbed weights in memory
BATCHED_SAMPLES = 1 << 14  # and at most this many samples times directions, which bounds the activations

UNBATCHABLE = (RuntimeError, NotImplementedError, ValueError)
"""What vmap raises for a model that branches on its values, or has an operation that it can't batch."""


def difference_slopes(
    parameters: Parameters, compute: Callable[[], Tensor], batch: Batch, directions: Directions, estimator: str,
    mu: float,
) -> Matrix | None:  # fmt: skip
    """Return g by two_point or one_sided as a (clients x k) matrix; None if the model can't be batched.

    `compute` returns the losses of the batch with the weights that the model then has.
    """
    k, samples = directions.k, int(batch.counts.sum())
    rows = min(BATCHED_WEIGHTS // parameters.dimension, BATCHED_SAMPLES // samples)
    size = max(1, min(k, rows - 1 if estimator == "one_sided" else rows // 2))
    w = parameters.vector()
    at_w: Tensor | None = None  # the losses at w, which all directions share

    columns = []
    for begin in range(0, k, size):
        count = min(size, k - begin)
        z = parameters.directions(directions.seed, directions.round, directions.first + begin, count)
        moved = z.mul_(mu)  # rounded, then added and rounded: the same bits as the kernels
        others = [w - moved] if estimator == "two_point" else [w[None]] if at_w is None else []
        found = _at_rows(parameters, compute, torch.cat([w + moved, *others]))
        if found is None:
            return None
        above, rest = found[:count], found[count:]
        if estimator == "two_point":
            slopes = two_point(above, rest, mu)
        else:
            at_w = rest if at_w is None else at_w
            slopes = one_sided(above, at_w, mu)
        columns.append(client_means(slopes, batch.counts, batch.weights))
    return np.concatenate(columns, axis=1)


def losses_at(parameters: Parameters, compute: Callable[[], Tensor], probes: Sequence[Probe]) -> Tensor | None:
    """Return what `compute` returns at each probe of one round, stacked; None if the model can't be batched."""
    indices = [p.index for p in probes]
    first, last = min(indices), max(indices)
    z = parameters.directions(probes[0].seed, probes[0].round, first, last - first + 1)
    chosen = torch.tensor(indices, device=parameters.device) - first
    coefficients = torch.tensor([p.coefficient for p in probes], device=parameters.device)
    return _at_rows(parameters, compute, z[chosen].mul_(coefficients[:, None]).add_(parameters.vector()))


def _at_rows(parameters: Parameters, compute: Callable[[], Tensor], rows: Tensor) -> Tensor | None:
    """Return what `compute` returns with each row of weights, stacked; None if the model can't be batched."""

    def at(*tensors: Tensor) -> Tensor:
        with parameters.holding(tensors):
            return compute()

    try:
        with warnings.catch_warnings():  # what is not batched yet is slower than it could be, and right
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found: Tensor = torch.func.vmap(at)(*parameters.unflatten(rows))
    except UNBATCHABLE:
        return None
    return found


def client_gradients(parameters: Parameters, objective: Objective, batch: Batch, at: Tensor | None) -> Tensor:
    """Return the gradient of every client's mean loss, one float32 row each, for clients of equally many samples.

    `at` is where each client is, one row of weights each; None: all are at w. A model that can't be batched raises one
    of UNBATCHABLE.
    """
    clients, count = len(batch.counts), int(batch.counts[0])

    def loss(weights: tuple[Tensor, ...], inputs: Tensor, targets: Tensor) -> Tensor:
        with parameters.holding(weights):
            outputs = objective.outputs(parameters.model, inputs)
            return checked_losses(objective.losses(outputs, targets), count).mean()

    weights = [p.detach() for p in parameters.tensors] if at is None else parameters.unflatten(at)
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None if at is None else 0, 0, 0))(
        tuple(weights),
        batch.inputs.view(clients, count, *batch.inputs.shape[1:]),
        batch.targets.view(clients, count, *batch.targets.shape[1:]),
    )
    return torch.cat([g.detach().float().reshape(clients, -1) for g in gradients], dim=1)
