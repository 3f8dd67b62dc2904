"""Trial runs for `method.lr = "auto"`: the run itself from w0, for half of its rounds, at rates that differ by 2.

What is measured at w0 says little about the loss further on: a ReLU network with small weights is flat there, and
diverges at a rate that suits its first steps. So the rate that was measured is only where a search begins. Each trial
has the clients, attack, rule, optimizer and schedule of the run. It learns from four fifths of each client's training
samples, and is judged by the honest clients' loss on the rest: the loss of samples that are learned from would favour
rates that over-fit, where there are few. The rate is halved as long as that lowers the loss at the end, or else doubled
as long as that does.

A run of half the rounds does best at a higher rate than the whole run, because noise has less time to add up. By the
experiments of benchmarks/auto_rate.py, half of its best rate is about the best; trials of a quarter of the rounds do
not tell enough.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cyber0.diagnose.federation import Clients
from cyber0.estimate.differences import evaluations
from cyber0.federation import build
from cyber0.federation.build import with_lr

if TYPE_CHECKING:
    from cyber0.estimate.batches import Samples
    from cyber0.federation.simulation import Simulation

SHARE = 0.5
"""How long a trial is, as a part of the run."""
PART = 0.5
"""Which part of the best trial's rate is taken."""
MOST_TRIALS = 8
"""Trials at most, so that a search costs at most four runs; three or four trials are usual."""
HELD_OUT = 5
"""One of so many training samples of a client is held out of the trials."""
SAMPLES = 4096
"""Draws of held-out samples by which a trial is judged at least; all of them where a batch takes all."""


class Search(NamedTuple):
    """What was tried: the loss at the end of a trial, by its exponent of 2; infinite if it diverged."""

    losses: dict[int, float]
    best: int


def search(loss: Callable[[int], float], start: float = math.inf, most: int = MOST_TRIALS) -> Search:
    """Return where a loss is least among the exponents of 2, beginning with 0 and -1.

    It goes on to the better side as long as the loss falls. Below rates that end above the loss at the start it always
    goes on: once a run has diverged, its loss says nothing of which rate is better.
    """
    losses = {e: loss(e) for e in (0, -1)}
    outward = 1 if losses[0] < min(losses[-1], start) else -1
    best = 0 if outward == 1 else -1
    while len(losses) < most:
        losses[best + outward] = loss(best + outward)
        if losses[best + outward] >= losses[best] and losses[best] < start:
            break
        best += outward
    return Search(losses, best if losses[best] < start else min(losses, key=lambda e: (losses[e], e)))


class TrialRuns:
    """The trial runs of a simulation that is at w0, which stays there.

    Args:
        simulation: The run, which can have any rate.
        lr: The rate to begin with, for the whole run.
    """

    def __init__(self, simulation: Simulation, lr: float) -> None:
        self._simulation, self._lr = simulation, lr
        kept, held = zip(*map(_split, simulation.shares), strict=True)
        self._samples, self._held_out = self._of(kept), self._of(held)
        self.rounds = max(1, round(SHARE * simulation.config.rounds))
        self.passes = 0
        """Evaluations of the loss so far, each on the batches of all clients of a round."""
        self.start = self._judged(copy.copy(simulation))
        """The loss on the held-out samples at w0."""

    def rate(self, exponent: int) -> float:
        """Return the rate of the whole run that a trial stands for."""
        return self._lr * 2.0**exponent

    def loss(self, exponent: int) -> float:
        """Return the loss on the held-out samples at the end of a trial; infinite if it diverged."""
        parameters = self._simulation.parameters
        config = replace(with_lr(self._simulation.config, self.rate(exponent) / PART), rounds=self.rounds)
        method = config.method
        trial = copy.copy(self._simulation)
        trial.samples = self._samples
        try:
            with parameters.excursion(), warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore", RuntimeWarning)  # a trial may diverge
                trial._assemble(config, None, None)  # with a ledger of its own, in memory
                for _ in range(self.rounds):
                    self.passes += method.local_epochs * evaluations(method.estimator, method.k)
                    if trial.run_round().values is None:
                        return math.inf  # nobody's scalars are finite any more
                return self._judged(trial)
        finally:
            # The clients of the run have not moved: neither may the vectors of their optimizer.
            parameters.hold_vectors(self._simulation.client.updates.optimizer.vectors)

    def _of(self, shares: Sequence[NDArray[np.int64]]) -> Samples:
        simulation, federation = self._simulation, self._simulation.config.federation
        return build.make_samples(
            simulation.task, shares, simulation.config, simulation.config.seed, attack=federation.attack,
            byzantine=simulation.byzantine, everybody=federation.invited == federation.clients,
        )  # fmt: skip

    def _judged(self, trial: Simulation) -> float:
        """Return the mean loss of the honest clients on held-out samples."""
        trial.samples = samples = self._held_out
        drawn = samples.measured[~trial.byzantine].sum()
        draws = math.ceil(SAMPLES / int(drawn)) if (samples.sizes > samples.measured).any() else 1
        clients = Clients(trial, draws)
        self.passes += draws
        found = float(np.mean([clients.losses(draw).mean() for draw in range(draws)]))
        return found if math.isfinite(found) else math.inf


def _split(share: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the samples of a client that trials learn from, and those held out; a single one is both."""
    held = np.arange(len(share)) % HELD_OUT == min(HELD_OUT, len(share)) - 1
    return (share, share) if len(share) == 1 else (share[~held], share[held])


def described(found: Search, runs: TrialRuns) -> dict[str, Any]:
    """Return what was tried and what it cost, as plain data for summary.json."""
    tried = {f"{runs.rate(e):.2g}": loss if math.isfinite(loss) else None for e, loss in sorted(found.losses.items())}
    return {"trials": len(tried), "rounds": runs.rounds, "forward_passes": runs.passes, "losses": tried}
