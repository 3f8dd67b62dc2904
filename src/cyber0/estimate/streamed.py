"""Any model: one probe at a time, its weights perturbed block by block as the model uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cyber0.directions import Directions, Probe, Step
from cyber0.estimate.batches import Batch
from cyber0.estimate.differences import one_sided, two_point
from cyber0.estimate.objective import InPieces, Matrix, Objective, checked_losses, client_means
from cyber0.model.cuda_graphs import CapturedGraphs, GraphInputs
from cyber0.model.vector import Parameters

Tensor = torch.Tensor


class StreamedPath:
    """Losses of a model at w or at a probe, for batches of any kind; passes are captured where the device allows it.

    Args:
        parameters: The weights.
        objective: What is measured.
        reference: Builds the batch used to decide what to capture as a CUDA graph; defaults to the first batch.
    """

    def __init__(
        self, parameters: Parameters, objective: Objective, reference: Callable[[], Batch] | None = None
    ) -> None:
        self._parameters, self._objective = parameters, objective
        self._in_pieces = in_pieces = objective if isinstance(objective, InPieces) else None
        # A loss may use the weights itself (a penalty), so it is part of what is captured.
        one_piece = self._losses_of if in_pieces is None else partial(in_pieces.piece_outputs, parameters.model)
        first = None if reference is None else lambda: self._graph_inputs(reference())[0]
        self.graphs = CapturedGraphs(parameters, one_piece, first)

    def two_point(self, batch: Batch, directions: Directions, mu: float, steps: Sequence[Step]) -> Matrix:
        """Return g as a (clients x k) matrix, at w after `steps`."""
        means = self._means(batch, [directions.probe(r, c) for r in range(directions.k) for c in (mu, -mu)], steps)
        return two_point(means[:, ::2], means[:, 1::2], mu)

    def one_sided(self, batch: Batch, directions: Directions, mu: float, steps: Sequence[Step]) -> Matrix:
        """Return g as a (clients x k) matrix, at w after `steps`.

        The loss at w is that of a probe at distance 0, by the same kernels and the same CUDA graph as the others: a
        model computes a little differently without a probe (torch's fused attention, say), and one error of f(w) would
        be in all k slopes, divided by mu.
        """
        at_w = directions.probe(0, 0.0)
        means = self._means(batch, [at_w, *(directions.probe(r, mu) for r in range(directions.k))], steps)
        return one_sided(means[:, 1:], means[:, :1], mu)

    def _means(self, batch: Batch, probes: Sequence[Probe], steps: Sequence[Step]) -> Matrix:
        """Return the clients' mean losses, a column for each probe."""
        # All probes are launched before the first result is waited for.
        return client_means(
            torch.stack([self.losses(batch, probe, steps) for probe in probes]), batch.counts, batch.weights
        )

    def losses(self, batch: Batch, probe: Probe | None, steps: Sequence[Step] = ()) -> Tensor:
        """Return every sample's loss at w, or at a probe."""
        if self._in_pieces is not None and not steps:
            parts = [self.graphs(piece, probe) for piece in self._graph_inputs(batch)]
            return self._checked_losses(self._in_pieces.joined(parts, batch.inputs), batch.targets)
        if isinstance(batch.inputs, Tensor) and not steps:
            (piece,) = self._graph_inputs(batch)
            return self.graphs(piece, probe)
        with self._parameters.perturbed(probe, steps):
            return self.plain_losses(batch)

    def plain_losses(self, batch: Batch) -> Tensor:
        """Return every sample's loss with the weights that the model has now."""
        return self._losses_of(batch.inputs, batch.targets)

    def _graph_inputs(self, batch: Batch) -> list[GraphInputs]:
        return [(batch.inputs, batch.targets)] if self._in_pieces is None else self._in_pieces.pieces(batch.inputs)

    def _losses_of(self, inputs: Any, targets: Tensor) -> Tensor:
        return self._checked_losses(self._objective.outputs(self._parameters.model, inputs), targets)

    def _checked_losses(self, outputs: Any, targets: Tensor) -> Tensor:
        return checked_losses(self._objective.losses(outputs, targets), len(targets))
