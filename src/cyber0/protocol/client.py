"""The client: measures, applies the decisions, catches up by replay. A state machine without I/O.

One `Client` object speaks for one client in a deployment and for many in a simulation: clients that hold the same
weights share them, and are measured together. What it needs of weights, data and estimates is below, as protocols:
whoever assembles a client hands it objects that have these methods, and this module needs no torch.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cyber0 import optimizers
from cyber0.config import doors
from cyber0.config.choices import TEXT_TASKS
from cyber0.directions import Directions, DirectionSpace, Probe, Step
from cyber0.directions.definition import ROUNDINGS
from cyber0.directions.steps import STEPS_PER_PASS
from cyber0.errors import LedgerError, ModelError, ProtocolError
from cyber0.ledger import Header, LayoutEntry, Record, first_chain, next_chain
from cyber0.ledger.record import Decision
from cyber0.protocol.messages import Announcement, Report

Indices = NDArray[np.int64]


class HeldWeights(Protocol):
    """The weights that a client holds, as one vector."""

    @property
    def layout(self) -> tuple[LayoutEntry, ...]: ...

    @property
    def space(self) -> DirectionSpace: ...

    def digest(self) -> str: ...

    def rest_digest(self) -> str: ...

    def hold_vectors(self, starts: Mapping[str, float]) -> None:
        """Hold these float32 vectors beside w, and no others, each filled with the value it starts with."""

    def vectors_digest(self) -> str:
        """Return a digest of the vectors beside w, "" if there are none."""

    def load(self, tensors: Mapping[str, Any], vectors: Mapping[str, Any] | None = None) -> None:
        """Set w, and the vectors beside it: to those given, or to the values they start with."""

    def commit(self, step: Step) -> None: ...

    def replay(self, steps: Sequence[Step], radius: float | None) -> None: ...

    def excursion(self) -> AbstractContextManager[None]:
        """Return a context that puts the very bits of the weights back when it ends."""


class ClientData(Protocol):
    """The samples of every client. What a batch is only the estimator needs to know."""

    @property
    def sizes(self) -> Indices:
        """How many samples each client has."""

    def groups(self, clients: Indices) -> Sequence[Indices]:
        """Split clients into groups that are measured in one pass."""

    def drawn(self, clients: Indices, round: int) -> tuple[Indices, Indices]:
        """Return the indices of the samples that clients draw in a round, and how many each does."""

    def batch(self, clients: Indices, round: int, epoch: int) -> Any: ...


class Estimator(Protocol):
    """Measures slopes of the loss at the weights that the client holds."""

    @property
    def objective(self) -> Any:
        """What is measured; a method `shown`, if it has one, shows a sample to the user."""

    def estimate(self, batch: Any, directions: Directions, steps: Sequence[Step]) -> NDArray[np.float64]:
        """Return one row of k slopes for each client of the batch, at w after `steps`."""

    def nonfinite_samples(self, batch: Any, probe: Probe | None) -> NDArray[np.bool_]:
        """Return which samples of a batch have a loss that is not finite at w, or at a probe."""


W = TypeVar("W", bound=HeldWeights)
E = TypeVar("E", bound=Estimator)


class Client(Generic[W, E]):
    """One client, or several that share their weights.

    Args:
        header: What was agreed on: seed, k, mu, digests. A model that differs is refused.
        parameters: The weights, at w0.
        samples: The data of every client, and the batches they draw from it.
        evaluator: How the loss is measured.
        lr_at: The learning rate of a round, for local epochs.
        local_memory: How local epochs are undone: "copy" keeps one extra copy of the weights, "regenerate" none.
        number: In a deployment, which client of the federation the only one here is; None: they are numbered as here.
        checked: Whether the header was just made of these very weights: billions of them take a while to digest.
    """

    def __init__(
        self,
        header: Header,
        parameters: W,
        samples: ClientData,
        evaluator: E,
        lr_at: Callable[[int], float],
        local_memory: str = "copy",
        number: int | None = None,
        *,
        checked: bool = False,
    ) -> None:
        if not checked:
            check_model(header, parameters)
        self.header = header
        self.parameters = parameters
        self.samples = samples
        self.evaluator = evaluator
        self.lr_at = lr_at
        self.local_memory = local_memory
        self.next_round = 0
        self.updates = Updates(header)
        """What turns decisions into steps, with the optimizer's state before the next round."""
        parameters.hold_vectors(self.updates.optimizer.vectors)
        self.chain = first_chain(header)
        """What the ledger's chain has reached before the next round."""
        self._number = number
        self._warned = False

    @property
    def key(self) -> int:
        """What the directions and roundings of the next round are drawn with."""
        return self.header.round_key(self.chain)

    def measure(self, announcement: Announcement, clients: Sequence[int] | Indices) -> NDArray[np.float64]:
        """Return what these clients measure in the announced round: one row of E * k scalars each."""
        if announcement.round != self.next_round:
            raise ProtocolError(
                f"round {announcement.round} was announced, but these weights are those of round {self.next_round}: "
                "catch up first"
            )
        who = np.asarray(clients, dtype=np.int64)
        if len(who) == 0:
            return np.zeros((0, self.header.scalars))
        if self.header.local_epochs == 1:
            groups = self.samples.groups(who)
            rows = np.concatenate([self.evaluator.estimate(self._batch(g, 0), self._directions(0), ()) for g in groups])
        else:
            rows = np.stack([self._local_epochs(int(client)) for client in who])
        if not (self._warned or np.isfinite(rows).all()):
            place = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
            self._warn(int(who[place]), int(np.flatnonzero(~np.isfinite(rows[place]))[0]))
        return rows

    def rehearse(self) -> None:
        """Measure once without reporting, so that kernels are compiled and graphs captured before a deadline runs.

        Nothing that counts changes: a batch depends on its round alone.
        """
        warned, self._warned = self._warned, True  # no warning for a round that nobody announced
        try:
            self.measure(Announcement(self.next_round, np.zeros(1, np.int64)), [0])
        finally:
            self._warned = warned

    def _warn(self, client: int, index: int) -> None:
        """Name the first batch whose losses are not finite, once; the federator will reject the report."""
        self._warned = True
        name = client if self._number is None else self._number
        batch, _ = self.samples.drawn(np.array([client], dtype=np.int64), self.next_round)
        odd = self._nonfinite_samples(client, index)
        culprits = f"those of training samples {_few(odd)}; its batch is {_few(batch)}"
        shown = getattr(self.evaluator.objective, "shown", None)
        if len(odd) and shown is not None:
            culprits += f"; sample {odd[0]} is {shown(int(odd[0]))!r}"
        warnings.warn(
            f"round {self.next_round}: the losses of client {name} are not finite "
            f"({culprits if len(odd) else f'its batch is the training samples {_few(batch)}'}); lower method.lr or "
            "method.mu, use float32 or bfloat16, or inspect these samples",
            RuntimeWarning,
            stacklevel=4,
        )

    def _nonfinite_samples(self, client: int, index: int) -> Indices:
        """Return the samples of a client's batch whose losses are not finite at w, or else at the probes of a scalar.

        There are none where only the weights of a later local epoch, or only gradients, are to blame.
        """
        who = np.array([client], dtype=np.int64)
        (indices, _), batch = self.samples.drawn(who, self.next_round), self._batch(who, 0)
        sides = (1, -1) if self.header.estimator == "two_point" else (1,)
        probes = [Probe(self.key, self.next_round, index, side * self.header.mu) for side in sides]
        for probe in (None, *probes) if index < self.header.k else (None,):
            odd = self.evaluator.nonfinite_samples(batch, probe)
            if odd.any():
                found: Indices = indices[odd]
                return found
        return np.zeros(0, np.int64)

    def report(self, announcement: Announcement, client: int) -> Report:
        """Return one client's report on the announced round."""
        row = self.measure(announcement, [client])[0]
        with np.errstate(over="ignore"):
            return Report(client, announcement.round, row.astype(np.float32))

    def apply(self, decision: Decision | Record) -> None:
        """Commit a decided round, or skip an abandoned one."""
        self.catch_up([decision])

    def catch_up(self, decisions: Iterable[Decision | Record]) -> None:
        """Commit consecutive rounds, thousands of them in one pass over the weights.

        Decisions are read as they are needed, so memory does not grow with their number. If one is refused, nothing of
        its pass is committed: the client is then where the last complete pass ended.
        """
        passes = _commit(self.updates, self.parameters, decisions, self.next_round, self.chain)
        for reached, chain in passes:
            self.next_round, self.chain = reached, chain

    def move_to(
        self,
        tensors: Mapping[str, Any],
        round: int,
        chain: bytes,
        state: optimizers.State | None = None,
        vectors: Mapping[str, Any] | None = None,
    ) -> None:
        """Take given weights: w0 again (round 0), or a snapshot that was taken before `round`.

        `state` and `vectors` are the optimizer's; None: those it starts with.
        """
        self.parameters.load(tensors, vectors)
        self.updates.state = self.updates.optimizer.start() if state is None else state
        self.next_round, self.chain = round, chain

    def digest(self) -> str:
        """Return a digest of all that the next round depends on: the weights, the optimizer's state and vectors."""
        return optimizers.state_digest(self.parameters.digest(), self.updates.state, self.parameters.vectors_digest())

    def _directions(self, epoch: int) -> Directions:
        return Directions(self.key, self.next_round, self.header.k, epoch * self.header.k)

    def _batch(self, clients: Indices, epoch: int) -> Any:
        return self.samples.batch(clients, self.next_round, epoch)

    def _local_epochs(self, client: int) -> NDArray[np.float64]:
        """Algorithm 4: k estimates, a local step by them, E times; then back to the round's w, bit for bit."""
        rows: list[NDArray[np.float64]] = []
        steps: list[Step] = []
        who, lr = np.array([client], dtype=np.int64), self.lr_at(self.next_round)

        def measure_epoch(epoch: int) -> Step:
            moved = steps if self.local_memory == "regenerate" else ()
            row = self.evaluator.estimate(self._batch(who, epoch), self._directions(epoch), moved)[0]
            rows.append(row)
            c = self.updates.optimizer.step(self.updates.state, lr, row, self.header.k).coefficients
            first = epoch * self.header.k
            return Step(self.key, self.next_round, c, first=first, rounding=epoch + 1, bits=self.updates.bits)

        if self.local_memory == "regenerate":
            for epoch in range(self.header.local_epochs):
                steps.append(measure_epoch(epoch))
        else:
            with self.parameters.excursion():
                for epoch in range(self.header.local_epochs):
                    step = measure_epoch(epoch)
                    if epoch + 1 < self.header.local_epochs:
                        self.parameters.commit(step)
        return np.concatenate(rows)


def _few(indices: Indices) -> str:
    return ", ".join(map(str, indices[:8].tolist())) + (", ..." if len(indices) > 8 else "")


class Updates:
    """The steps of consecutive decided rounds: what the header's optimizer makes of their scalars."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.optimizer = optimizers.make(header.optimizer, header.optimizer_options)
        self.state = self.optimizer.start()
        """The optimizer's state after the last of them."""
        self.bits = ROUNDINGS[header.rounding].bits
        """How many random bits round a 16-bit weight."""

    def step(self, decision: Decision | Record, chain: bytes) -> Step:
        """Return the step of the next decided round; `chain` is what the ledger's hash was before it."""
        header = self.header
        assert decision.values is not None
        if decision.values.shape != (header.scalars,) or not np.isfinite(decision.values).all():
            raise ProtocolError(f"the decision of round {decision.round} must be {header.scalars} finite scalars")
        if not math.isfinite(decision.lr):
            raise ProtocolError(f"the decision of round {decision.round} has the learning rate {decision.lr}")
        update = self.optimizer.step(self.state, decision.lr, decision.values, header.k)
        self.state = update.state
        key = header.round_key(chain)
        return Step(key, decision.round, update.coefficients, elementwise=update.elementwise, bits=self.bits)

    def lengths(self, decisions: Sequence[Decision | Record]) -> list[float | None]:
        """Return the norm of what a scale-free optimizer will make of the next rounds' scalars; None for others."""
        if not self.optimizer.scale_free:
            return [None] * len(decisions)
        lengths: list[float | None] = []
        state = self.state
        for decision in decisions:
            scaled = np.zeros(0)
            if decision.values is not None:
                scaled, state = self.optimizer.scaled(state, decision.values.astype(np.float64))
            lengths.append(float(np.linalg.norm(scaled)))
        return lengths


def check_model(header: Header, parameters: HeldWeights) -> None:
    """Refuse a model that is not the one that was agreed on, by name."""
    if parameters.layout != header.layout:
        odd = _differences(parameters.layout, header.layout)
        raise ModelError(
            f"the model's trainable weights are not those agreed on; they differ in {odd}; {_remedy(header)}"
        )
    if parameters.space != header.space:
        raise ModelError(f"directions are {header.space.text} here, not {parameters.space.text}")
    if parameters.rest_digest() != header.rest_digest:
        raise ModelError(
            f"the model's frozen weights or buffers differ from those agreed on (rest digest); {_remedy(header)}"
        )
    if parameters.digest() != header.weights_digest:
        what = "trainable weights differ from the starting point agreed on (weights digest)"
        raise ModelError(f"the model's {what}; {_remedy(header)}")


def _remedy(header: Header) -> str:
    """Return what to do about a model that differs, for the kind of task that the run has."""
    task = header.config.get("task", {})
    name = task.get("name", "")
    if task.get("weights"):
        return (
            "the run starts from weights in a file (task.weights): pass your copy of it, --weights FILE of join and "
            "follow, task.weights elsewhere"
        )
    if name in TEXT_TASKS:
        return (
            f"your copy of the model {task.get('model', '')!r} is another revision or has another precision: copy the "
            "whole folder from where the run was started, and name it (--model DIR of join and follow, task.model "
            "elsewhere)"
        )
    if doors.is_own(name):
        return (
            f"your copy of {name} is not the one that the run was started with, or its model() depends on more than "
            "the seed and the version of torch: copy that file, and use the same torch"
        )
    if name:
        return (
            f"the model of task {name!r} follows from the seed: use the versions of cyber0 and torch that the run has"
        )
    return "start from the model that the ledger began with"


def _differences(here: Sequence[LayoutEntry], agreed: Sequence[LayoutEntry], most: int = 5) -> str:
    """Return in which weights two layouts differ, with type and shape."""
    mine, theirs = ({e.name: f"{e.dtype} {list(e.shape)}" for e in layout} for layout in (here, agreed))
    odd = sorted(name for name in mine | theirs if mine.get(name) != theirs.get(name)) or ["their order"]
    shown = [f"{name} (here {mine.get(name, 'none')}, agreed on {theirs.get(name, 'none')})" for name in odd[:most]]
    return ", ".join(shown)


def replay(header: Header, parameters: HeldWeights, records: Iterable[Record], updates: Updates | None = None) -> int:
    """Move parameters at w0 through the records, drawn as needed, and return how many rounds were passed.

    `updates`, if given, has the optimizer's state when this returns; its vectors are beside the weights.
    """
    if parameters.digest() != header.weights_digest:
        raise LedgerError("these weights are not the ledger's starting point: their digest differs from its header's")
    return replay_from_start(header, parameters, records, updates or Updates(header))


def replay_from_start(header: Header, parameters: HeldWeights, records: Iterable[Record], updates: Updates) -> int:
    """Do what `replay` does, with parameters that are known to be at w0: hashing a large model takes seconds."""
    reached = 0
    parameters.hold_vectors(updates.optimizer.vectors)
    for rounds, _ in _commit(updates, parameters, records, 0, first_chain(header)):
        reached = rounds
    return reached


def _commit(
    updates: Updates, parameters: HeldWeights, decisions: Iterable[Decision | Record], reached: int, chain: bytes
) -> Iterator[tuple[int, bytes]]:
    """Commit consecutive rounds from round `reached` on, and yield after each pass how far w has come."""
    rest = iter(decisions)
    while part := list(itertools.islice(rest, STEPS_PER_PASS)):
        before = updates.state
        try:
            steps = []
            for decision in part:
                if decision.round != reached:
                    raise ProtocolError(f"expected the decision of round {reached}, got that of {decision.round}")
                reached += 1
                if decision.values is not None:
                    steps.append(updates.step(decision, chain))
                chain = decision.chain or next_chain(chain, decision)
            parameters.replay(steps, updates.header.projection_radius)
        except BaseException:  # an interrupt too: the state must stay that of the weights
            updates.state = before
            raise
        yield reached, chain
