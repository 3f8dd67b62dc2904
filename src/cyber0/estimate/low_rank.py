"""Low-rank directions: many probes in one pass, whose rows are the samples repeated for each probe."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from cyber0.config.schema import ROWS_IN_FLIGHT
from cyber0.directions import Directions
from cyber0.estimate.batches import Batch
from cyber0.estimate.differences import one_sided, two_point
from cyber0.estimate.objective import InPieces, Matrix, Objective, checked_losses, client_means
from cyber0.model.cuda_graphs import CapturedGraphs, GraphInputs, Prepared
from cyber0.model.factors import ProbeBatch
from cyber0.model.low_rank import Ungroupable
from cyber0.model.low_rank_layers import unflattened
from cyber0.model.vector import Parameters

Tensor = torch.Tensor

# Of the probes by which a batch of several is compared with single ones, until one shows that they agree: far from w a
# deep model amplifies 16-bit rounding until nothing can be compared.
CHECK_DISTANCES = (0.01, 0.002)
SPREAD, EPSILONS = 1e-3, 64  # how far they may differ: of the difference between probes, and in units of rounding
SPREAD_16, EPSILONS_16 = 0.1, 8  # the same where the model computes in 16 bits

log = logging.getLogger("cyber0")


class LowRankPath:
    """Slopes by two_point or one_sided, from the losses at as many probes at once as rows in flight allow.

    Args:
        parameters: The weights.
        objective: What is measured.
        rows_in_flight: The most rows in one pass: samples times probes.
        reference: Builds the batch used to decide what to capture as a CUDA graph; defaults to the first batch.
    """

    def __init__(
        self, parameters: Parameters, objective: Objective, rows_in_flight: int = ROWS_IN_FLIGHT,
        reference: Callable[[], Batch] | None = None,
    ) -> None:  # fmt: skip
        self._parameters, self._objective, self._rows_in_flight = parameters, objective, rows_in_flight
        self._in_pieces = objective if isinstance(objective, InPieces) else None
        self._reference = reference
        self._checked = False
        self.possible = True
        """Whether probes can share a pass, as far as is known."""
        self._graphs = self._make_graphs()

    def estimate(self, batch: Batch, directions: Directions, estimator: str, mu: float) -> Matrix | None:
        """Return g as a (clients x k) matrix; None if probes must be taken one at a time."""
        if not self.possible or self._parameters.low_rank is None:
            return None
        distances, with_w = ((mu, -mu), False) if estimator == "two_point" else ((mu,), True)
        most = self._rows_in_flight // int(batch.counts.sum()) - with_w
        if most < len(distances):
            return None
        parts = [ProbeBatch(part, distances, with_w) for part in _parts(directions, most // len(distances))]
        try:
            self._check(batch)
            repeated = _Repeated(self._in_copies(batch, parts[0].groups))
            # All passes are launched before the first result is waited for.
            losses = [self._losses(repeated, part) for part in parts]
        except Ungroupable as reason:
            self._give_up(reason)
            return None
        return np.concatenate(
            [_slopes(client_means(one, batch.counts, batch.weights), estimator, mu) for one in losses], axis=1
        )

    def _in_copies(self, batch: Batch, copies: int) -> Batch:
        if self._in_pieces is None:
            return batch
        return replace(batch, inputs=self._in_pieces.in_copies(batch.inputs, copies))

    def _make_graphs(self) -> _Graphs:
        return _Graphs(self._parameters, self._piece_outputs, None if self._reference is None else self._first_piece)

    def _first_piece(self) -> GraphInputs:
        assert self._reference is not None
        batch = self._reference()
        return (batch.inputs, batch.targets) if self._in_pieces is None else self._in_pieces.pieces(batch.inputs)[0]

    def _losses(self, batch: _Repeated, probes: ProbeBatch) -> Tensor:
        """Return the samples' losses at all probes, (groups, samples)."""
        groups, targets = probes.groups, batch.targets(probes.groups)
        if self._in_pieces is not None:
            pieces = [self._graphs(piece, probes) for piece in batch.pieces(self._in_pieces, groups)]
            # A sample's outputs at all probes as one row, because `joined` reorders samples.
            rows = [p.view(groups, -1, *p.shape[1:]).transpose(0, 1).flatten(1) for p in pieces]
            whole = unflattened(self._in_pieces.joined(rows, batch.of.inputs), 1, groups, *pieces[0].shape[1:])
            losses = self._objective.losses(whole.transpose(0, 1).flatten(0, 1), targets)
            return checked_losses(losses, len(targets)).view(groups, -1)
        inputs = batch.inputs(groups)
        if isinstance(inputs, Tensor):
            return self._graphs((inputs, targets), probes).view(groups, -1)
        with self._graphs.perturbed(probes, (targets,)):
            return self._losses_of(inputs, targets).view(groups, -1)

    def _piece_outputs(self, *piece: Any) -> Tensor:
        if self._in_pieces is not None:
            return self._in_pieces.piece_outputs(self._parameters.model, *piece)
        return self._losses_of(*piece)

    def _losses_of(self, inputs: Any, targets: Tensor) -> Tensor:
        outputs = self._objective.outputs(self._parameters.model, inputs)
        return checked_losses(self._objective.losses(outputs, targets), len(targets))

    # Whether a batch of probes gives what single probes give.

    def _check(self, batch: Batch) -> None:
        """Learn from a few samples where the rows of a batch are, and compare with probes one at a time, once."""
        if self._checked:
            return
        self._checked = True
        if self._reference is not None:
            batch = self._reference()
        n = min(2, int(batch.counts.sum()))
        few = _Repeated(Batch(batch.inputs[:n], batch.targets[:n], np.array([n])))

        def compute(times: int) -> Tensor:
            if self._in_pieces is not None:
                return self._piece_outputs(*few.pieces(self._in_pieces, times)[0])
            return self._losses_of(few.inputs(times), few.targets(times))

        rows = n if self._in_pieces is None else len(_first(few.pieces(self._in_pieces, 1)[0]))
        others = [] if self._parameters.backend.host else [self._parameters.device]
        with torch.random.fork_rng(others, device_type=self._parameters.device.type):
            self._compare(compute, rows, Directions(0, 0, 2))  # the same in a resumed run

    def _compare(self, compute: Callable[[int], Tensor], rows: int, directions: Directions) -> None:
        for distance in CHECK_DISTANCES:
            for rows_inside in (False, True):
                with contextlib.suppress(Exception):  # the model's own code may raise anything where rows are many
                    if self._compared(compute, rows, directions, distance, rows_inside=rows_inside):
                        return
        raise Ungroupable("several probes at once gave other losses than one at a time, or none")

    def _compared(
        self, compute: Callable[[int], Tensor], rows: int, directions: Directions, distance: float, *, rows_inside: bool
    ) -> bool:
        """Learn where the rows are, and return whether probes at a distance share a pass."""
        probes, distances = self._parameters.low_rank, (distance, -distance)
        assert probes is not None
        singles = []
        for part in _parts(directions, 1):
            for one in distances:
                with probes.at(ProbeBatch(part, (one,))):
                    singles.append(compute(1))
        right, dtypes = torch.stack(singles), {*probes.dtypes, singles[0].dtype}
        found = probes.learn(compute, rows, ProbeBatch(directions, distances), rows_inside=rows_inside)
        return found.shape[0] == right.shape[0] * right.shape[1] and _agree(found.view(right.shape), right, dtypes)

    def _give_up(self, reason: Exception) -> None:
        self.possible = False
        self._graphs = self._make_graphs()
        log.info("probes along low-rank directions are taken one at a time: %s", reason)


class _Graphs(CapturedGraphs):
    """Passes at several probes, captured for each shape of samples and number of probes that come twice."""

    def prepare(self, probe: ProbeBatch, piece: GraphInputs) -> Prepared:
        probes = self._parameters.low_rank
        assert probes is not None
        return probes.prepare(probe, len(_first(piece)))

    def reference_inputs(self, probe: ProbeBatch) -> GraphInputs:
        return _piece_tiled(super().reference_inputs(probe), probe.groups)

    def perturbed(self, probe: ProbeBatch, piece: GraphInputs) -> contextlib.AbstractContextManager[None]:
        return self.prepare(probe, piece).computing()


class _Repeated:
    """A batch whose samples are repeated for each of some groups; what was made is kept.

    Args:
        batch: The samples.
    """

    def __init__(self, batch: Batch) -> None:
        self.of = batch
        self._kept: dict[tuple[str, int], Any] = {}

    def inputs(self, times: int) -> Any:
        """Return the inputs, repeated."""
        inputs = self.of.inputs
        if isinstance(inputs, Tensor):
            return self._made("inputs", times, partial(_tiled, inputs, times))
        rows = np.tile(np.arange(len(self.of.targets)), times)
        return self._made("inputs", times, lambda: inputs.take(rows))

    def targets(self, times: int) -> Tensor:
        """Return the targets, repeated."""
        found: Tensor = self._made("targets", times, partial(_tiled, self.of.targets, times))
        return found

    def pieces(self, objective: InPieces, times: int) -> list[GraphInputs]:
        """Return the pieces that an objective makes of the inputs, each repeated."""

        def make() -> list[GraphInputs]:
            return [_piece_tiled(piece, times) for piece in objective.pieces(self.of.inputs)]

        found: list[GraphInputs] = self._made("pieces", times, make)
        return found

    def _made(self, what: str, times: int, make: Callable[[], Any]) -> Any:
        if (what, times) not in self._kept:
            self._kept[what, times] = make()
        return self._kept[what, times]


def _tiled(t: Tensor, times: int) -> Tensor:
    return t.repeat(times, *[1] * (t.dim() - 1))


def _piece_tiled(piece: GraphInputs, times: int) -> GraphInputs:
    return tuple(None if t is None else _tiled(t, times) for t in piece)


def _first(piece: GraphInputs) -> Tensor:
    return next(t for t in piece if t is not None)


def _parts(directions: Directions, most: int) -> list[Directions]:
    """Cut directions into parts of nearly the same size, at most so many each."""
    count = -(-directions.k // most)
    ends = [directions.k * i // count for i in range(count + 1)]
    return [replace(directions, first=directions.first + begin, k=end - begin) for begin, end in pairwise(ends)]


def _slopes(means: Matrix, estimator: str, mu: float) -> Matrix:
    """Return slopes from the means at the probes of one pass, as `ProbeBatch` orders them: (clients x k)."""
    if estimator == "two_point":
        return two_point(means[:, ::2], means[:, 1::2], mu)
    return one_sided(means[:, 1:], means[:, :1], mu)


def _agree(found: Tensor, right: Tensor, dtypes: Collection[torch.dtype]) -> bool:
    """Return whether results of the same probes agree up to rounding, where models compute in these types.

    The first dimension has the probes.
    """
    wide = all(dtype in (torch.float32, torch.float64) for dtype in dtypes)
    spread, epsilons = (SPREAD, EPSILONS) if wide else (SPREAD_16, EPSILONS_16)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    found, right = found.double(), right.double()
    allowed = spread * (right - right.mean(0)).abs().amax() + epsilons * eps * right.abs().amax()
    return bool(((found - right).abs() <= allowed).all())
