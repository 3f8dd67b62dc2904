"""Models whose outputs are one linear map of w, as logistic regression: two matrix products give everything.

Outputs at w + c z are X W + c X Z for all directions and clients, and the gradient is that of the outputs times X.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cyber0.config.choices import PROBING_ESTIMATORS
from cyber0.directions import Directions
from cyber0.estimate import batched
from cyber0.estimate.batches import Batch
from cyber0.estimate.differences import one_sided, two_point
from cyber0.estimate.objective import Matrix, Objective, checked_losses, client_means
from cyber0.kernels import threads
from cyber0.model.substitution import LinearUse
from cyber0.model.vector import Parameters

Tensor = torch.Tensor

LINEAR_OUTPUTS = 1 << 17  # samples are taken in pieces of so many outputs, about what a cache holds
SAMPLES_AT_ONCE = 1 << 12  # of a gradient over all samples
FEATURES_KEPT = 1 << 27  # what a linear map takes of all samples is kept if it has no more elements than this


def linear_use(parameters: Parameters, objective: Objective, batch: Batch) -> LinearUse | None:
    """Return how the outputs are one linear map of float32 weights, None if they are not."""
    use = LinearUse(parameters.tensors)
    with parameters.perturbed(None), use:
        outputs = objective.outputs(parameters.model, batch.inputs)
        if use.explains(outputs):  # a loss that uses the weights itself (a penalty) is not linear in them
            objective.losses(outputs[:1], batch.targets[:1])
    if not use.explains(outputs) or use.weight is None or use.weight.dtype != torch.float32:
        return None
    use.outputs = outputs
    return use


class LinearSlopes:
    """Slopes along directions, from X W and X Z, once each.

    Args:
        parameters: The weights.
        objective: What is measured.
        estimator: "two_point", "one_sided", "gradient" or "forward".
        mu: The probing step of two_point and one_sided.
    """

    def __init__(self, parameters: Parameters, objective: Objective, estimator: str, mu: float) -> None:
        self._parameters, self._objective, self._estimator, self._mu = parameters, objective, estimator, mu
        self.possible = parameters.dimension <= batched.BATCHED_DIMENSION and len(parameters.tensors) <= 2
        """Whether the model was linear as far as is known."""

    def estimate(self, batch: Batch, directions: Directions) -> Matrix | None:
        """Return g as a (clients x k) matrix; None if the model is not linear."""
        size = max(1, batched.BATCHED_WEIGHTS // self._parameters.dimension)
        parts = [replace(directions, first=directions.first + r, k=min(size, directions.k - r))
                 for r in range(0, directions.k, size)]  # fmt: skip

        def draw(part: Directions) -> list[Tensor]:
            return self._parameters.direction_tensors(part.seed, part.round, part.first, part.k)

        # Directions are drawn while the samples are prepared: neither keeps two cores busy by itself.
        on_host = self._parameters.backend.host
        drawn = threads.start(lambda: draw(parts[0])) if on_host else lambda: draw(parts[0])
        use = linear_use(self._parameters, self._objective, batch)
        self.possible = use is not None
        if use is None:
            return None
        slopes = [self._along(use, batch, drawn() if i == 0 else draw(part)) for i, part in enumerate(parts)]
        return np.concatenate(slopes, axis=1)

    def _along(self, use: LinearUse, batch: Batch, z: list[Tensor]) -> Matrix:
        """Return the slopes along the directions z, given as one tensor for each parameter."""
        parts = dict(zip(map(id, self._parameters.tensors), z, strict=True))
        assert use.inputs is not None and use.outputs is not None
        weights = parts[id(use.weight)]
        k, classes, features = weights.shape
        weights = weights.view(k * classes, features)
        bias = None if use.bias is None else parts[id(use.bias)][:, :, None]
        inputs, outputs = use.inputs, use.outputs

        def slopes(begin: int, end: int) -> Tensor:
            # A thread that has not asked torch yet lets its first matrix product use as many threads as the machine
            # has, which rounds differently: the first round of a process would not be that of a resumed one.
            torch.get_num_threads()
            with torch.no_grad():  # which holds for one thread only
                along = (weights @ inputs[begin:end].T).view(k, classes, -1)
                if bias is not None:
                    along += bias
                return self._of_outputs(outputs[begin:end], along, batch.targets[begin:end])

        pieces = _pieces(len(inputs), LINEAR_OUTPUTS // (k * classes), on_host=self._parameters.backend.host)
        if self._estimator == "forward":  # forward-mode levels belong to the whole process, not to a thread
            done = [slopes(begin, end) for begin, end in pieces]
        else:
            done = threads.run_in_threads(slopes, pieces)
        return client_means(torch.cat(done, dim=1), batch.counts, batch.weights)

    def _of_outputs(self, outputs: Tensor, along: Tensor, targets: Tensor) -> Tensor:
        """Return the (k x samples) slopes of the losses where outputs move by `along` (k x classes x samples)."""
        k, classes, n = along.shape

        def losses(outputs: Tensor, targets: Tensor) -> Tensor:
            return checked_losses(self._objective.losses(outputs, targets), len(outputs))

        if self._estimator in PROBING_ESTIMATORS:
            many = targets.repeat(k, *[1] * (targets.dim() - 1))
            # Class first: losses over few classes then run over long contiguous rows, several times faster.
            start, moved = outputs.T.contiguous()[:, None], along.mul_(self._mu).transpose(0, 1)
            above = along.new_empty(classes, k, n)
            plus = losses(torch.add(start, moved, out=above).view(classes, k * n).T, many)
            if self._estimator == "one_sided":
                return one_sided(plus.view(k, n), losses(start.view(classes, n).T, targets), self._mu)
            below = along.new_empty(classes, k, n)
            minus = losses(torch.sub(start, moved, out=below).view(classes, k * n).T, many)
            return two_point(plus, minus, self._mu).view(k, n)
        if self._estimator == "gradient":
            with torch.enable_grad():
                leaf = outputs.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(losses(leaf, targets).sum(), leaf)
            return torch.einsum("nc,kcn->kn", gradient, along)

        def slope(tangent: Tensor) -> Tensor:
            result: Tensor = torch.func.jvp(lambda o: losses(o, targets), (outputs,), (tangent.T,))[1]
            return result

        slopes: Tensor = torch.func.vmap(slope)(along)
        return slopes


def _pieces(samples: int, rows: int, on_host: bool) -> list[tuple[int, int]]:
    """Cut the samples into pieces of about so many rows: on the CPU for threads, elsewhere only to bound memory."""
    if not on_host:
        rows *= 64
    # A multiple of four pieces, so that threads end together, and of 16 rows, which matrix products like.
    count = -(-samples // max(1, rows))
    count = -(-count // 4) * 4 if count > 1 else 1
    size = -(-samples // (16 * count)) * 16
    return [(begin, min(begin + size, samples)) for begin in range(0, samples, size)]


class LinearGradients:
    """Gradients of each client's mean loss, or of a weighted sum over all samples.

    Args:
        parameters: The weights.
        objective: What is measured.
    """

    def __init__(self, parameters: Parameters, objective: Objective) -> None:
        self.parameters, self.objective = parameters, objective
        self._whole: tuple[Tensor, LinearUse | None] | None = None

    def each(self, batch: Batch, at: Tensor | None) -> Tensor | None:
        """Return one float32 row a client, as `Gradients.each`; None if the model is not linear."""
        with torch.no_grad():
            use = linear_use(self.parameters, self.objective, batch)
            if use is None:
                return None
            assert use.inputs is not None and use.outputs is not None and use.weight is not None
            ends = np.cumsum(batch.counts).tolist()
            spans = [slice(end - count, end) for end, count in zip(ends, batch.counts.tolist(), strict=True)]
            x, outputs = use.inputs, use.outputs
            if at is not None:
                own = dict(zip(map(id, self.parameters.tensors), self.parameters.unflatten(at), strict=True))
                outputs = torch.cat([x[span] @ own[id(use.weight)][i].T for i, span in enumerate(spans)])
                if use.bias is not None:
                    counts = torch.from_numpy(batch.counts).to(x.device)
                    outputs += own[id(use.bias)].repeat_interleave(counts, 0)
            slopes = self._slopes(outputs, batch.targets)
            slopes /= torch.from_numpy(np.repeat(batch.counts, batch.counts)).to(slopes)[:, None]
            weight = torch.stack([slopes[span].T @ x[span] for span in spans])
            return self._rows(use, weight, torch.stack([slopes[span].sum(0) for span in spans]))

    def _rows(self, use: LinearUse, weight: Tensor, bias: Tensor) -> Tensor:
        """Put the gradients of the weight and the bias, one of each a row, in the order of the vector."""
        parts = {id(use.weight): weight.flatten(1), id(use.bias): bias}
        return torch.cat([parts[id(p)] for p in self.parameters.tensors], dim=1)

    def of_all(self, inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor | None:
        """Return one vector, as `Gradients.of_all`; None if the model is not linear, or its features are too many."""
        use = self._use_of_all(inputs, targets)
        if use is None:
            return None
        assert use.inputs is not None and use.weight is not None
        with torch.no_grad():
            outputs = torch.nn.functional.linear(use.inputs, use.weight, use.bias)
            slopes = self._slopes(outputs, targets) * shares[:, None]
            return self._rows(use, (slopes.T @ use.inputs)[None], slopes.sum(0)[None])[0]

    def _use_of_all(self, inputs: Tensor, targets: Tensor) -> LinearUse | None:
        """Return the linear map with what it takes of all samples, which no change of w changes: computed once."""
        if self._whole is None or self._whole[0] is not inputs:
            self._whole = (inputs, self._find_use_of_all(inputs, targets))
        return self._whole[1]

    def _find_use_of_all(self, inputs: Tensor, targets: Tensor) -> LinearUse | None:
        features: list[Tensor] = []
        use: LinearUse | None = None
        with torch.no_grad():
            for begin in range(0, len(inputs), SAMPLES_AT_ONCE):
                part = slice(begin, begin + SAMPLES_AT_ONCE)
                use = linear_use(
                    self.parameters, self.objective, Batch(inputs[part], targets[part], np.zeros(0, np.int64))
                )
                if use is None or use.inputs is None or len(inputs) * use.inputs.shape[1] > FEATURES_KEPT:
                    return None
                features.append(use.inputs)
        if use is not None:
            use.inputs, use.outputs = torch.cat(features), None
        return use

    def _slopes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return how each sample's loss changes with its outputs."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            losses = checked_losses(self.objective.losses(leaf, targets), len(leaf))
            (slopes,) = torch.autograd.grad(losses.sum(), leaf)
        return slopes
