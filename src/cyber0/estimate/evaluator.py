"""Zero-order estimates: how a loss changes along each direction, for one client or for many at once.

    two_point   g_r = (f(w + mu z_r) - f(w - mu z_r)) / 2 mu
    one_sided   g_r = (f(w + mu z_r) - f(w)) / mu, where the k directions share f(w)
    gradient    g_r = <grad f(w), z_r> from one gradient (mu = 0, as the paper does it)
    forward     the same by forward-mode differentiation, without backpropagation

with the factor d in front when directions lie on the unit sphere. All clients of a batch are at the same w: weights
are perturbed once, everybody's samples go through in one pass, and the means are taken per client, in float64.

There are several paths to the same slopes, and the evaluator takes the first that fits: a model whose outputs are one
linear map of w needs X W and X Z only (linear.py); along low-rank directions many probes share a pass, and no perturbed
weights are built (low_rank.py); a small model is evaluated at all directions at once (batched.py); a large one streams
its weights through, one block perturbed at a time (streamed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.config.choices import ESTIMATORS, PROBING_ESTIMATORS
from cyber0.config.schema import ROWS_IN_FLIGHT
from cyber0.directions import Directions, Probe, Step
from cyber0.estimate import batched
from cyber0.estimate.batches import Batch
from cyber0.estimate.candidates import as_many, narrowed
from cyber0.estimate.forward import slope_at_w
from cyber0.estimate.gradients import project, projected_gradients
from cyber0.estimate.linear import LinearSlopes
from cyber0.estimate.low_rank import LowRankPath
from cyber0.estimate.objective import InPieces, Matrix, Objective, client_means
from cyber0.estimate.streamed import StreamedPath
from cyber0.estimate.torch_threads import make_first_calls, own_threads
from cyber0.model.vector import CHECK_DISTANCE, Parameters

Tensor = torch.Tensor


class Evaluator:
    """Estimates for one model and objective.

    Args:
        parameters: The weights that are probed; never changed here.
        objective: What is measured.
        estimator: "two_point", "one_sided", "gradient" or "forward".
        mu: The probing step of two_point and one_sided.
        reference: Builds the batch used to decide what to capture as a CUDA graph; defaults to the first batch. A run
            that can be resumed needs one that is the same wherever it starts.
        rows_in_flight: The most rows, samples times probes, of one pass along low-rank directions.
    """

    def __init__(
        self, parameters: Parameters, objective: Objective, estimator: str = "two_point", mu: float = 1e-3,
        *, reference: Callable[[], Batch] | None = None, rows_in_flight: int = ROWS_IN_FLIGHT,
    ) -> None:  # fmt: skip
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
        if estimator in PROBING_ESTIMATORS and not np.float32(mu) > 0:  # also refuses what float32 rounds to 0
            raise ValueError(
                f"{estimator} divides by mu, got mu = {mu}: use estimator 'gradient' or 'forward' for mu = 0"
            )
        make_first_calls()
        self.parameters = parameters
        self.objective = objective
        self.estimator = estimator
        self.mu = float(np.float32(mu))  # the kernels perturb by float32 mu: divide by the same
        self._batched = parameters.dimension <= batched.BATCHED_DIMENSION and parameters.compute is None
        # Directions at once save nothing where a large frozen model has a small adapter, and cost activations.
        self._light = sum(p.numel() for p in parameters.model.parameters()) <= batched.BATCHED_DIMENSION
        self._checked_uses = False
        self.linear = LinearSlopes(parameters, objective, estimator, self.mu)
        first = None if reference is None else lambda: as_many(reference())
        self.streamed = StreamedPath(parameters, objective, first)
        self.low_rank = LowRankPath(parameters, objective, rows_in_flight, first)
        self.losses = self.streamed.losses

    def estimate(self, batch: Batch, directions: Directions, steps: Sequence[Step] = ()) -> Matrix:
        """Return g as a (clients x k) float64 matrix, at w or at w after `steps`."""
        with torch.no_grad(), own_threads(self.parameters):
            self._check_uses(batch, directions)
            if batch.narrowing is not None:
                batch = narrowed(batch, self._candidates_losses(batch, directions, steps))
            if self._batched and self.linear.possible and not steps:
                matrix = self.linear.estimate(batch, directions)
                if matrix is not None:
                    return self.parameters.factor * matrix
            if self.estimator in PROBING_ESTIMATORS:
                return self.parameters.factor * self._differences(batch, directions, steps)
            if steps:
                raise ValueError(f"estimator {self.estimator!r} works at w itself: use local_memory = 'copy' with it")
            along = self._forward if self.estimator == "forward" else self._gradient
            return self.parameters.factor * along(batch, directions)

    def _candidates_losses(self, batch: Batch, directions: Directions, steps: Sequence[Step]) -> Tensor:
        """Return the losses at w of a batch of candidates, from passes no larger than that over the kept ones."""
        at_w = directions.probe(0, 0.0)  # computes in the same type as other probes
        if isinstance(self.objective, InPieces):  # which bounds its passes
            return self.losses(batch, at_w, steps)
        assert batch.narrowing is not None
        size = int(batch.narrowing.counts.sum())
        parts = [slice(begin, begin + size) for begin in range(0, len(batch.targets), size)]
        whole = np.zeros(0, np.int64)  # losses are one a sample, whoever has it
        return torch.cat([self.losses(Batch(batch.inputs[p], batch.targets[p], whole), at_w, steps) for p in parts])

    def _check_uses(self, batch: Batch, directions: Directions) -> None:
        """Probe once with a few samples: a model some of whose weight uses are not met must stream a second copy."""
        if self._checked_uses:
            return
        n = min(2, int(batch.counts.sum()))
        few = Batch(batch.inputs[:n], batch.targets[:n], np.array([n]))
        self.parameters.check_uses(lambda: self.streamed.plain_losses(few), directions.probe(0, CHECK_DISTANCE))
        self._batched = self._batched and self.parameters.substitutable
        self._checked_uses = True

    def _differences(self, batch: Batch, directions: Directions, steps: Sequence[Step]) -> Matrix:
        if not steps:
            matrix = self.low_rank.estimate(batch, directions, self.estimator, self.mu)
            if matrix is not None:
                return matrix
        if self._batched and self._light and not steps:
            matrix = batched.difference_slopes(
                self.parameters, lambda: self.streamed.plain_losses(batch), batch, directions, self.estimator, self.mu
            )
            if matrix is not None:
                return matrix
            self._batched = False  # stream it from now on
        streamed = self.streamed.two_point if self.estimator == "two_point" else self.streamed.one_sided
        return streamed(batch, directions, self.mu, steps)

    def _forward(self, batch: Batch, directions: Directions) -> Matrix:
        columns = []
        for r in range(directions.k):
            direction = directions.probe(r, 0.0)
            _, slopes = slope_at_w(self.parameters, lambda: self.streamed.plain_losses(batch), direction)
            columns.append(client_means(slopes[None], batch.counts, batch.weights))
        return np.concatenate(columns, axis=1)

    def _gradient(self, batch: Batch, directions: Directions) -> Matrix:
        return projected_gradients(self.parameters, self.streamed.plain_losses, batch, directions)

    def project(self, gradient: Tensor, directions: Directions) -> NDArray[np.float64]:
        """Return the slopes of a loss with this gradient, given as one vector, along every direction."""
        parts = [gradient[entry.offset : entry.offset + entry.size] for entry in self.parameters.layout]
        return self.parameters.factor * project(self.parameters, parts, directions)

    def nonfinite_samples(self, batch: Batch, probe: Probe | None) -> NDArray[np.bool_]:
        """Return which samples of a batch have a loss that is not finite at w, or at a probe."""
        with torch.no_grad(), self.parameters.perturbed(probe):
            losses = self.streamed.plain_losses(batch)
        return ~torch.isfinite(losses).cpu().numpy()
