"""Strongly convex tasks on synthetic data, for which all constants of the theorems are known.

    Ridge      f(w; x, y) = (x.w - y)^2 / 2 + (penalty / 2) ||w||^2
    Logistic   f(w; x, y) = log(1 + exp(-y x.w)) + (penalty / 2) ||w||^2,  y = -1 or +1

The training samples are the whole population: lambda, L_F and the minimiser are those of their mean loss. Samples are
drawn from the shared stream of data, and then transformed to have exactly the wanted second moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from cyber0.directions import Stream, words
from cyber0.directions.definition import gaussian_from_words
from cyber0.errors import ConfigError

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]

DIMENSION, SAMPLES, TEST_SAMPLES = 50, 1200, 400
INPUTS, NOISE, TRUTH = 0, 1, 2  # indices of the stream of data
NEWTON_STEPS = 50


def gaussian_array(seed: int, index: int, *shape: int) -> Array:
    """Return standard normal values from the stream of data, the same on every machine."""
    count = int(np.prod(shape))
    return gaussian_from_words(words(seed, Stream.DATA, 0, index, 0, count)).astype(np.float64).reshape(shape)


class _Convex:
    """What both tasks share. `labels`, the sign of a target, are only for the partitions."""

    name = ""
    classes = 2

    def __init__(self, inputs: Array, targets: Array, samples: int, penalty: float) -> None:
        import torch

        self.dimension, self.penalty = inputs.shape[1], penalty
        self.inputs, self.targets = inputs[:samples], targets[:samples]
        """The training samples in float64."""
        self.labels: NDArray[Any] = (self.targets > 0).astype(np.int64)
        self.train_inputs = torch.from_numpy(self.inputs.astype(np.float32))
        self.train_targets = torch.from_numpy(self.targets.astype(np.float32))
        self.test_inputs = torch.from_numpy(inputs[samples:].astype(np.float32))
        self.test_targets = torch.from_numpy(targets[samples:].astype(np.float32))

    def model(self, seed: int, dtype: str = "float32") -> torch.nn.Module:
        """Return the model at w0, a point of the unit sphere that the seed decides."""
        import torch

        drawn = gaussian_from_words(words(seed, Stream.INITIAL_WEIGHTS, 0, 0, 0, self.dimension)).astype(np.float64)
        start = torch.from_numpy(drawn / np.linalg.norm(drawn))
        return _make_model(start.to(getattr(torch, dtype)), self.penalty)

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the samples: they are stored as the model takes them."""
        return inputs

    def outputs(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Return x.w and the penalty of each sample: two columns."""
        result: torch.Tensor = model(inputs)
        return result

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one float32 loss per sample, penalty included."""
        wide = outputs.float()
        return self._fit(wide[:, 0], targets) + wide[:, 1]

    def evaluate(self, model: torch.nn.Module) -> tuple[float, float]:
        """Return mean loss and accuracy (0 to 1) on the test samples."""
        import torch

        with torch.no_grad():
            outputs = self.outputs(model, self.test_inputs)
            loss = self.losses(outputs, self.test_targets).double().mean()
            accuracy = self._accuracy(outputs[:, 0].double(), self.test_targets.double())
        return float(loss), float(accuracy)

    def keep(self, indices: NDArray[Any]) -> Self:
        """Refuse: with fewer samples, the known curvature and minimiser would be wrong."""
        raise ConfigError(
            f"task.samples = {len(indices)} can't be used with this task, which needs all its samples: set 0"
        )

    def to(self, device: torch.device | str) -> Self:
        """Move the samples to a device, in place, and return the task."""
        for name in ("train_inputs", "train_targets", "test_inputs", "test_targets"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def _fit(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _accuracy(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Ridge(_Convex):
    """Least squares with a penalty. Its Hessian has eigenvalues from 1 / condition + penalty to 1 + penalty, exactly.

    Its accuracy is the share of the targets' variance that the model explains: below 0 if the mean explains more.

    Args:
        dimension: d.
        samples: Training samples; at least d, or the second moments can't be reached.
        condition: Ratio of the largest to the smallest eigenvalue without the penalty; 1: isotropic, lambda = L_F.
        penalty: Weight of ||w||^2 / 2.
        noise: Deviation of the targets from a linear truth of norm 1.
        seed: Decides the data.
    """

    name = "ridge"

    def __init__(
        self,
        dimension: int = DIMENSION,
        samples: int = SAMPLES,
        condition: float = 10.0,
        penalty: float = 0.1,
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        _check(dimension, samples, penalty)
        if not condition >= 1:
            raise ConfigError(f"condition = {condition!r} is impossible: it must be at least 1")
        spectrum = np.geomspace(1 / condition, 1, dimension)
        inputs = _white(seed, samples, dimension) * np.sqrt(spectrum)
        truth = unit_vector(seed, dimension)
        targets = inputs @ truth + noise * gaussian_array(seed, NOISE, len(inputs))
        super().__init__(inputs, targets, samples, penalty)
        self.strong_convexity, self.smoothness = 1 / condition + penalty, 1 + penalty
        moment = self.inputs.T @ self.targets / samples
        self.minimiser: Array = moment / (spectrum + penalty)

    def _fit(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (predicted - targets).square() / 2

    def _accuracy(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 1 - (predicted - targets).square().mean() / targets.var(correction=0)


class Logistic(_Convex):
    """Logistic regression with a penalty. All samples have the same norm, `scale` sqrt(dimension).

    lambda = penalty and L_F = penalty + (largest eigenvalue of the samples' second moments) / 4 bound the curvature
    everywhere. The minimiser is found by Newton's method.

    Args:
        dimension: d.
        samples: Training samples.
        penalty: Weight of ||w||^2 / 2.
        scale: Root mean square of an input.
        seed: Decides the data.
    """

    name = "logistic"

    def __init__(
        self,
        dimension: int = DIMENSION,
        samples: int = SAMPLES,
        penalty: float = 0.1,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        _check(dimension, samples, penalty)
        inputs = gaussian_array(seed, INPUTS, samples + TEST_SAMPLES, dimension)
        inputs *= scale * np.sqrt(dimension) / np.linalg.norm(inputs, axis=1, keepdims=True)
        margin = 2 * inputs @ unit_vector(seed, dimension)
        uniform = (words(seed, Stream.DATA, 0, NOISE, 0, len(inputs)) + 0.5) * 2.0**-32
        targets = np.where(uniform < sigmoid(margin), 1.0, -1.0)
        super().__init__(inputs, targets, samples, penalty)
        moments = self.inputs.T @ self.inputs / samples
        self.strong_convexity = penalty
        self.smoothness = penalty + float(np.linalg.eigvalsh(moments)[-1]) / 4
        self.minimiser: Array = self.smoothed_minimiser(np.zeros(1), np.ones(1))

    def smoothed_minimiser(self, steps: Array, weights: Array) -> Array:
        """Return the minimiser of the mean of F with every margin moved by the steps, weighed by the weights.

        With (mu ||x|| s, p) of `theory.ball_marginal` it is w*_mu, to the last digits; with one step of 0 it is w*.
        """
        w = np.zeros(self.dimension)
        signed = self.inputs * self.targets[:, None]
        for _ in range(NEWTON_STEPS):
            falling = sigmoid(-(signed @ w)[:, None] - steps)  # (samples x steps)
            gradient = -signed.T @ (falling @ weights) / len(signed) + self.penalty * w
            curvature = (falling * (1 - falling)) @ weights / len(signed)
            hessian = (signed.T * curvature) @ signed + self.penalty * np.eye(self.dimension)
            change = np.linalg.solve(hessian, gradient)
            w = w - change
            if np.linalg.norm(change) < 1e-13:
                break
        return w

    def _fit(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.nn.functional.softplus(-targets * predicted)

    def _accuracy(self, predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (predicted * targets > 0).double().mean()


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + e^-x), without overflow."""
    result: Array = 0.5 * (1 + np.tanh(x / 2))
    return result


def unit_vector(seed: int, dimension: int) -> Array:
    """Return the linear truth behind the targets."""
    drawn = gaussian_array(seed, TRUTH, dimension)
    return drawn / float(np.linalg.norm(drawn))


def _white(seed: int, samples: int, dimension: int) -> Array:
    """Return inputs whose first `samples` rows have the identity as their matrix of second moments."""
    drawn = gaussian_array(seed, INPUTS, samples + TEST_SAMPLES, dimension)
    values, vectors = np.linalg.eigh(drawn[:samples].T @ drawn[:samples] / samples)
    return np.asarray(drawn @ (vectors / np.sqrt(values)) @ vectors.T)


def _check(dimension: int, samples: int, penalty: float) -> None:
    if dimension < 1 or samples < dimension:
        raise ConfigError(
            f"samples = {samples!r} must be at least dimension = {dimension!r}, and that at least 1; raise samples"
        )
    if not penalty > 0:
        raise ConfigError(f"penalty = {penalty!r} is impossible: it must be above 0, or F may not be strongly convex")


def _make_model(start: torch.Tensor, penalty: float) -> torch.nn.Module:
    import torch

    class Linear(torch.nn.Module):
        """x.w, and the penalty, which a loss could not compute from x.w alone."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(start.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            fitted = x.to(self.weight.dtype) @ self.weight
            penalties = (0.5 * penalty * self.weight.square().sum()).expand_as(fitted)
            return torch.stack([fitted, penalties], dim=1)

    return Linear()
