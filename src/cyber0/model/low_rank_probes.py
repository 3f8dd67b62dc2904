"""Low-rank probes of a model: their factors, and where a batch of rows for several of them has its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from cyber0.directions import Probe
from cyber0.directions.low_rank import LowRankLayout
from cyber0.model import low_rank_uses as _uses  # noqa: F401  # registers the handlers
from cyber0.model.factors import Factors, ProbeBatch
from cyber0.model.low_rank import LOGGED, LowRankMode, Plan, ShapeLog, Trained, Ungroupable

if TYPE_CHECKING:
    from cyber0.model.vector import Parameters

Tensor = torch.Tensor


class LowRankProbes:
    """Makes a model compute at probes along low-rank directions.

    Args:
        parameters: The weights.
        layout: How the stream of a direction becomes its coordinates.
    """

    def __init__(self, parameters: Parameters, layout: LowRankLayout) -> None:
        self._parameters, self._layout = parameters, layout
        tensors = parameters.tensors
        self._shapes = [tuple(p.shape) for p in tensors]
        self._trained = {id(p): Trained(i, parameters.compute or p.dtype) for i, p in enumerate(tensors)}
        self.dtypes = list(dict.fromkeys(t.dtype for t in self._trained.values()))
        """The types that weights are computed with."""
        self._factors: dict[tuple[int, int, bool], Factors] = {}
        self._plan: Plan | None = None

    def factors(self, batch: ProbeBatch) -> Factors:
        """Return the factors of some probes, in the place that all batches of as many probes use."""
        if batch.shape not in self._factors:
            self._factors[batch.shape] = Factors(
                self._layout, self._shapes, self.dtypes, batch, self._parameters.device
            )
        found = self._factors[batch.shape]
        found.renew(batch)
        return found

    def at(self, batch: ProbeBatch, rows: int = 0) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model computes at the probes, one group of rows after the other.

        Args:
            batch: The probes; more than one needs a plan: see `learn`.
            rows: How many rows the batch of samples has, in all groups together.

        Raises:
            Ungroupable: Several probes can't share this pass.
        """
        return self.prepare(batch, rows).computing()

    def prepare(self, batch: ProbeBatch, rows: int = 0) -> PreparedProbes:
        """Return the same in two parts: what can be renewed for other probes, and the context."""
        return PreparedProbes(self, batch, rows)

    @contextlib.contextmanager
    def computing(self, factors: Factors, rows: int) -> Iterator[None]:
        """Within this context the model computes at the probes whose factors these are."""
        single = factors.distances.numel() == 1
        mode = LowRankMode(self._trained, factors, rows, None if single else self._plan)
        with self._parameters.held(), mode:
            yield
        if mode.failed:
            raise Ungroupable("the model caught an exception that was meant for the evaluator")

    def learn(
        self, compute: Callable[[int], Tensor], samples: int, batch: ProbeBatch, *, rows_inside: bool = False
    ) -> Tensor:  # fmt: skip
        """Learn where the rows are, and return what `compute` gives at the probes.

        Args:
            compute: Computes with the samples repeated so often.
            samples: How many there are.
            batch: Some probes, more than LOGGED.
            rows_inside: How a dimension is read that rows are merged into with others: `Plan.rows_inside`.

        Raises:
            Ungroupable: Several probes can't share a pass.
        """
        if self._parameters.written:
            raise Ungroupable("the model writes to a weight, as an embedding with max_norm does")
        log, plan = ShapeLog(), Plan(rows_inside=rows_inside)
        with self._parameters.held(), log:
            compute(LOGGED)
        mode = LowRankMode(self._trained, self.factors(batch), samples * batch.groups, plan, log.calls)
        with self._parameters.held(), mode:
            found = compute(batch.groups)
        if mode.failed:
            raise Ungroupable("the model caught an exception that was meant for the evaluator")
        self._plan = plan
        return found


class PreparedProbes:
    """Probes that a pass computes at, in places that a captured pass reads.

    Args:
        probes: Of the model.
        batch: The probes.
        rows: How many rows the batch of samples has.
    """

    def __init__(self, probes: LowRankProbes, batch: ProbeBatch, rows: int) -> None:
        self._probes, self._rows, self._factors = probes, rows, probes.factors(batch)

    def renew(self, batch: ProbeBatch | Probe) -> None:
        """Prepare other probes, of the same numbers, in the same place."""
        self._factors.renew(ProbeBatch.of(batch) if isinstance(batch, Probe) else batch)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model computes at the probes."""
        return self._probes.computing(self._factors, self._rows)
