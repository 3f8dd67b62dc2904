"""Whether a federator keeps to what was agreed on: checks of a participant, as a state machine without I/O.

    check = FederatorCheck(header, AgreedRates(header))
    check.decision(decision)        # before it is committed
    check.committed(decision)
    check.answering(round)          # before a report is sent
    check.answered(round, values)
    check.ended(round)

A violation raises `Misconduct`, which says what was agreed on, what came, and in which round. The federator decides
alone, so these checks can't tell whether a decision is right; they bound what a wrong one can do.

**Stalling.** A federator that abandons every round, or decides next to nothing, keeps the weights where they are and
collects one projection after another of the same gradient; as many as there are weights determine it. So a client
counts the scalars that it has sent while w moved less than one ordinary round moves it, and stops at a limit.

How far a round moves w is measured by ||ghat||, the norm of its decided scalars, and not by lr ||ghat||: the learning
rate is checked, and a schedule may lower it to 0. But if the run is said to be shorter than before, so that its
schedule lowers the rate, the round counts only as much as its rate is of that over the longest length stated so far.

An optimizer that divides by the size of the scalars makes numbers of size 1 of them; there the norm of these numbers
counts, and an ordinary round moves w by sqrt(E k) / 16 at least. Otherwise one large decision would make all later
steps short, and equal scalars would move nothing at all where their differences count. With `adam` and `hessian`, whose
divisors are vectors, ||ghat|| counts nevertheless: after one very large decision w may stand still, unnoticed, for
about 1 / (1 - beta2) or 1 / nu rounds.

Without such an optimizer an ordinary round moves w by ||own report|| / (16 sqrt(invited)) at least. Of m honest reports
g + e_i, with the same signal g and independent noise e_i, the mean has the squared norm ||g||^2 + ||e||^2 / m, which is
no less than a report's ||g||^2 + ||e||^2 over m; trimming makes it no smaller. The factor 16 is for clients whose data
are unlike the others', and for attackers. In simulations ||ghat|| was 0.3 to 1.8 of ||own report|| / sqrt(m) with data
dealt evenly and 0.1 to 0.35 with one label a client, under the attacks that we have; krum, which may choose the report
of a client that has nothing to learn, went down to 0.02 in a round. With the factor 16 no client of these sent the
scalars of more than 3 rounds before the count began anew; with a factor of 2, up to 9. What does look like a stall is a
run of full batches, of unlike data and the plain mean, long after it has converged: there each client's gradient stays,
and their mean is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cyber0 import optimizers
from cyber0.errors import ProtocolError
from cyber0.ledger import Header, Record
from cyber0.ledger.rates import AgreedRates, scalar_fault, scalar_limit
from cyber0.ledger.record import Decision

STALLED_ROUNDS = 4
"""How many rounds' scalars a client sends, by default, while the weights stay where they are."""
MARGIN = 16.0
LEAST_SCALARS = 4
"""How many scalars a round counts as having at least: the norm of fewer is small by chance too often."""

_TYPES = {"float32": (float(np.finfo(np.float32).max), 2.0**-23), "float16": (65504.0, 2.0**-10),
          "bfloat16": (float.fromhex("0x1.fep127"), 2.0**-7)}  # fmt: skip
"""By name, the largest finite value of a type of weights, and the distance from 1 to the next value."""


class Misconduct(ProtocolError):
    """The federator did what was not agreed on; the participant stops."""

    message = b""
    """What the federator sent."""


class Stall(NamedTuple):
    """What a client has sent while w stood still."""

    answered: int = 0
    """The round after the last one that it answered: one that is announced again is not counted again."""
    scalars: int = 0
    """How many scalars it has sent since w moved as far as an ordinary round moves it."""
    moved: float = 0.0
    """The sum of ||ghat|| over the rounds decided since."""
    squares: float = 0.0
    """The sum of the squares of these scalars, by which an ordinary round is judged."""


class FederatorCheck:
    """What a participant holds a federator to.

    Args:
        header: What was agreed on.
        rates: The learning rates that were agreed on.
        invited: How many clients are invited to a round.
        stalled_rounds: How many rounds' scalars a client sends while w stands still.
        stall: What was counted before a restart.
        fullness: Returns the largest |w|, as a part of the largest value that its type can hold; None: not checked.
        carried: Returns the largest number in the optimizer's vectors, if it averages over rounds.
    """

    def __init__(
        self,
        header: Header,
        rates: AgreedRates,
        *,
        invited: int,
        stalled_rounds: int = STALLED_ROUNDS,
        stall: Stall | None = None,
        fullness: Callable[[], float] | None = None,
        carried: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.rates, self.stall = rates, stall or Stall()
        self.planned = header.rounds
        """How many rounds the run is to have, by the last announcement that stated a number."""
        self._longest = header.rounds
        self._header, self._invited = header, invited
        self._limit = scalar_limit(header)
        self._optimizer = optimizers.make(header.optimizer, header.optimizer_options)
        self._stall_limit = stalled_rounds * max(header.scalars, LEAST_SCALARS)
        self._warned = False
        self._fullness, self._full = fullness, math.inf
        self._read_carried, self._carried = carried, math.inf
        self._type_limit = min(_TYPES[entry.dtype][0] for entry in header.layout)
        self._coarsest = max(_TYPES[entry.dtype][1] for entry in header.layout)

    # What it decides.

    def decision(self, decision: Decision | Record) -> None:
        """Check a decision, live or from the ledger, before it is committed."""
        fault = self.rates.fault(decision) or scalar_fault(decision, self._limit)
        if not fault and self._header.rounds and decision.rounds <= decision.round:
            fault = f"the run is said to have {decision.rounds} rounds, which does not include this one"
        if fault:
            raise Misconduct(f"round {decision.round}: {fault}")

    def fits(self, decision: Decision | Record) -> bool:
        """Return whether w certainly stays in the finite range of its type; otherwise `look` at w first.

        A bound on |w| grows by what a step can add at most, so the weights need not be read each round.
        """
        if self._fullness is None or decision.values is None:
            return True
        reach = self._reach(decision)
        full = (self._full + reach) * (1 + self._coarsest)
        if not full < 1:
            return False
        self._full, self._carried = full, reach
        return True

    def look(self, decision: Decision | Record) -> None:
        """Read how large the weights are; refuse a decision that may take them out of the finite range."""
        assert self._fullness is not None
        self._full, self._carried = self._fullness(), self._read_carried() / self._type_limit
        if not self.fits(decision):
            raise Misconduct(
                f"round {decision.round}: its step may change a weight by {self._reach(decision) * self._type_limit:g},"
                f" which leaves the finite range: the largest weight is at {self._full:.3g} of what its type can hold"
            )

    def _reach(self, decision: Decision | Record) -> float:
        """Return the most that a step can change a weight by, as a part of the largest value of its type."""
        assert decision.values is not None
        furthest = self._header.space.reach
        reach = self._optimizer.reach(decision.lr, decision.values, self._header.k, furthest) / self._type_limit
        if self._optimizer.carries:  # an average is no larger than the largest, but for what rounding adds
            reach = max(reach, self._carried) * (1 + 2.0**-22)
        return reach

    def forget_weights(self) -> None:
        """Note that w was replaced, so that nothing is known of how large the weights are."""
        self._full = self._carried = math.inf

    def forget_answers(self) -> None:
        """Count from 0 again: whoever has looked at the evidence and trusts the federator grants as many answers."""
        self.stall = Stall(self.stall.answered)

    def opened(self, round: int, rounds: int) -> None:
        """Refuse an announcement by which the run would end before it: a record has to say so first."""
        if 0 < rounds <= round and rounds < self.planned:
            raise Misconduct(
                f"round {round}: it is announced as one of {rounds} rounds, which do not include it, and "
                f"{self.planned} were announced before"
            )

    def announced(self, rounds: int) -> None:
        """Note how many rounds the run is to have; 0: no number was stated."""
        self.planned = rounds or self.planned

    def ended(self, round: int) -> None:
        """Refuse an end before the last round that was announced."""
        if round < self.planned:
            raise Misconduct(
                f"round {round}: the federator says that the run has ended, and {self.planned} rounds were announced"
            )

    # What it collects.

    def committed(self, decision: Decision | Record, length: float | None = None) -> None:
        """Note how far a decided round has moved w; each round once, also if it is replayed.

        `length` is the norm of what the optimizer made of the decided scalars; None: of the scalars themselves.
        """
        if decision.values is None:
            return
        self._longest = max(self._longest, decision.rounds)
        share = self.rates.share(decision, self._longest)
        if length is None:
            length = float(np.linalg.norm(decision.values.astype(np.float64)))
        moved = self.stall.moved + share * length
        if moved >= self._ordinary:
            self.stall = Stall(self.stall.answered)
        else:
            self.stall = self.stall._replace(moved=moved)

    def answering(self, round: int) -> str:
        """Refuse to answer a round if that would be too many scalars at a w that stands still; return a warning."""
        count = self.stall.scalars + self._header.scalars
        if round < self.stall.answered:
            return ""
        still = (
            f"the weights have moved less than an ordinary round moves them (||ghat|| {self.stall.moved:.3g} of "
            f"{self._ordinary:.3g})"
        )
        if count > self._stall_limit:
            raise Misconduct(
                f"round {round}: {self.stall.scalars} scalars were sent while {still}, and {self._stall_limit} is the "
                "limit (--stalled-rounds): further answers at the same weights would reveal the data"
            )
        if self._warned or 2 * count <= self._stall_limit or self.stall.scalars == 0:
            return ""
        self._warned = True
        sent, limit = self.stall.scalars, self._stall_limit
        return f"round {round}: {sent} scalars were sent while {still}; this client stops at {limit}"

    def answered(self, round: int, values: NDArray[np.float64]) -> None:
        """Count the scalars of a report, as measured; one that was sent before, and is sent again, once."""
        was = self.stall
        if round < was.answered:
            return
        finite = np.clip(values[np.isfinite(values)], -self._limit, self._limit)  # no decision can have more
        squares = float(np.square(finite).sum())
        self.stall = Stall(round + 1, was.scalars + len(values), was.moved, was.squares + squares)

    @property
    def _ordinary(self) -> float:
        """How far an ordinary round moves w: by the reports since it last moved, or by scalars of size 1."""
        if self._optimizer.scale_free:
            return math.sqrt(self._header.scalars) / MARGIN
        reports = max(self.stall.scalars / self._header.scalars, 1.0)
        return math.sqrt(self.stall.squares / reports) / (MARGIN * math.sqrt(self._invited))
