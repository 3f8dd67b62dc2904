"""Gradients of a loss for many clients at once, by backpropagation.

Three roads lead to the same numbers, and the first that fits is taken: outputs that are one linear map of w need two
matrix products for all clients together; a small model goes through vmap over the clients; any other takes one client
at a time. Losses are taken in eval mode, as everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.estimate.evaluator import (
    BATCHED_DIMENSION,
    BATCHED_SAMPLES,
    BATCHED_WEIGHTS,
    Batch,
    Objective,
    checked_losses,
    linear_use,
    make_first_calls,
)
from cyber0.model.substitution import LinearUse
from cyber0.model.vector import Parameters

Tensor = torch.Tensor

SAMPLES_AT_ONCE = 1 << 12  # of a gradient over all samples
FEATURES_KEPT = 1 << 27  # numbers: what a linear map takes of all samples is kept if it is no more than this


class Gradients:
    """Gradients for one model and objective; w is never changed here.

    Args:
        parameters: The weights.
        objective: What is measured.
    """

    def __init__(self, parameters: Parameters, objective: Objective) -> None:
        make_first_calls()
        self.parameters, self.objective = parameters, objective
        small = parameters.dimension <= BATCHED_DIMENSION and parameters.substitutable
        self._linear = small and len(parameters.tensors) <= 2
        self._batched = small
        self._compared = False
        self._whole: tuple[Tensor, LinearUse | None] | None = None

    def each(self, batch: Batch, at: Tensor | None = None) -> Tensor:
        """Return the gradient of every client's mean loss, one float32 row each.

        Args:
            batch: The clients' samples.
            at: Where each client is, one row of weights each; None: all are at w.
        """
        rows = self._linear_road(batch, at)
        if rows is not None:
            return rows
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
        use = self._use_of_all(inputs, targets)
        if use is not None:
            return self._linear_of_all(use, targets, shares)
        total = torch.zeros(self.parameters.dimension, device=self.parameters.device)
        for begin in range(0, len(inputs), SAMPLES_AT_ONCE):
            part = slice(begin, begin + SAMPLES_AT_ONCE)
            total += self._gradient(inputs[part], targets[part], shares[part])
        return total

    # Road 1: outputs that are one linear map of w.

    def _linear_road(self, batch: Batch, at: Tensor | None) -> Tensor | None:
        if not self._linear:
            return None
        with torch.no_grad():
            use = linear_use(self.parameters, self.objective, batch)
            self._linear = use is not None
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

    def _use_of_all(self, inputs: Tensor, targets: Tensor) -> LinearUse | None:
        """Return the linear map with what it takes of all samples, which no change of w changes: found out once."""
        if not self._linear:
            return None
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

    def _linear_of_all(self, use: LinearUse, targets: Tensor, shares: Tensor) -> Tensor:
        assert use.inputs is not None and use.weight is not None
        with torch.no_grad():
            outputs = torch.nn.functional.linear(use.inputs, use.weight, use.bias)
            slopes = self._slopes(outputs, targets) * shares[:, None]
            return self._rows(use, (slopes.T @ use.inputs)[None], slopes.sum(0)[None])[0]

    def _slopes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return how each sample's loss changes with its outputs."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            losses = checked_losses(self.objective.losses(leaf, targets), len(leaf))
            (slopes,) = torch.autograd.grad(losses.sum(), leaf)
        return slopes

    # Road 2: small models, all clients at once. Road 3: one client at a time.

    def _pieces(self, counts: NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
        """Yield the clients, and their samples, that go through together: equally many each, within the limits."""
        most = max(1, BATCHED_WEIGHTS // self.parameters.dimension)
        begin, sample = 0, 0
        while begin < len(counts):
            count = int(counts[begin])
            limit = min(len(counts), begin + min(most, max(1, BATCHED_SAMPLES // count)))
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
            rows = self._at_once(batch, at)
        except (RuntimeError, NotImplementedError, ValueError):
            # The model branches on its values, does not fit in this form, or the like.
            self._batched = False
            return self._one_by_one(batch, at)
        if not self._compared:  # a use of a weight that is not met gives a wrong gradient without a word
            plain = self._one_by_one(batch, at)
            self._compared = True
            self._batched = torch.allclose(rows, plain, rtol=1e-3, atol=1e-5, equal_nan=True)
            rows = rows if self._batched else plain
        return rows

    def _at_once(self, batch: Batch, at: Tensor | None) -> Tensor:
        clients, count = len(batch.counts), int(batch.counts[0])

        def loss(weights: tuple[Tensor, ...], inputs: Tensor, targets: Tensor) -> Tensor:
            with self.parameters.holding(weights):
                outputs = self.objective.outputs(self.parameters.model, inputs)
                return checked_losses(self.objective.losses(outputs, targets), count).mean()

        weights = [p.detach() for p in self.parameters.tensors] if at is None else self.parameters.unflatten(at)
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None if at is None else 0, 0, 0))(
            tuple(weights),
            batch.inputs.view(clients, count, *batch.inputs.shape[1:]),
            batch.targets.view(clients, count, *batch.targets.shape[1:]),
        )
        return torch.cat([g.detach().float().reshape(clients, -1) for g in gradients], dim=1)

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
