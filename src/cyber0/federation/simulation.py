"""A whole federation in one process.

The simulation drives the same federator and client as a deployment does. What makes it fast: all honest clients are at
the same w, so one `Client` object speaks for all of them, perturbs once and measures everybody's batches in one pass.

`Federation` is what cyber0 and the methods that it is compared with (methods/) have in common, and the face that a
run sees of any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0 import aggregate, attacks
from cyber0.config import doors
from cyber0.config.schedules import AUTO
from cyber0.config.schema import Config
from cyber0.directions import Directions
from cyber0.directions.backends import check_device
from cyber0.errors import ConfigError, ModelError
from cyber0.estimate.batches import Batch
from cyber0.estimate.gradients import Gradients
from cyber0.estimate.torch_threads import evaluating, own_threads
from cyber0.federation import build
from cyber0.federation.agreement import check_same_run, make_header
from cyber0.federation.build import with_lr
from cyber0.federation.population import populate
from cyber0.federation.rehearsal import rehearse
from cyber0.ledger import Header, Ledger, Record, Reports
from cyber0.protocol.decider import invited_clients
from cyber0.protocol.federator import Federator, Receipt
from cyber0.protocol.messages import Announcement, payload_bytes
from cyber0.storage import LEDGER, REPORTS
from cyber0.tasks import AnyTask, partition, starting
from cyber0.tasks import make as make_task
from cyber0.tasks.construct import adopted
from cyber0.tasks.own import OwnTask


class Evaluation(NamedTuple):
    """How good the model is on the set that the task is evaluated on."""

    loss: float
    accuracy: float
    """NaN where the task has none."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """What else the task measures."""


MeasureLr = Callable[["Simulation"], float]
"""Finds the learning rate for a simulation at w0, which it leaves as it is."""


class Federation(ABC):
    """A federation under some method, ready to run rounds: who holds which data, who is Byzantine, what a round does.

    A method defines what its clients send, where decisions are stored and what they do to the weights.

    Args:
        config: Its settings.
        task: What is learned, a `cyber0.Task`; made from the config when absent.
        byzantine: Which clients are Byzantine, `federation.byzantine` of them; drawn by the seed when absent.
    """

    methods: ClassVar[tuple[str, ...]]
    """The names of the methods that this is."""
    state_file: ClassVar[str]
    """The file of a run's folder that holds its progress."""
    federator: Federator

    def __init__(
        self, config: Config, *, task: AnyTask | None = None, byzantine: Collection[int] | None = None
    ) -> None:
        if config.method.name not in self.methods:
            raise ConfigError(
                f"method.name = {config.method.name!r} is not what {type(self).__name__} does, which is "
                f"{' or '.join(self.methods)}; let cyber0.federation.methods.make(config) choose"
            )
        config, known = adopted(config, task)
        self.config = config
        build.resolve(config)
        self._traits = attacks.ATTACKS.entry(config.federation.attack).traits
        check_device(config.device)
        learned = (known or make_task(config.task)).to(config.device)
        self.task, self.shares, self.byzantine = populate(learned, config, byzantine)
        federation, method = config.federation, config.method
        model = self.task.model(config.seed, config.task.dtype)
        self.placed = starting.place(model, config.task)
        """The frozen weights and buffers that task.weights has changed, by name."""
        self.parameters = build.make_parameters(
            self.task, model.to(config.device), method, build.gradients_for(config), config.task.compute
        )
        self.samples = build.make_samples(
            self.task, self.shares, config, config.seed, attack=federation.attack, byzantine=self.byzantine,
            everybody=federation.invited == federation.clients,
        )  # fmt: skip
        self.lr_at = build.learning_rates(config, 1.0 if config.method.lr == AUTO else None)
        self.gradients = Gradients(self.parameters, self.task)
        self._attack = attacks.make(federation.attack, federation.attack_arguments)
        self._plans = bool(federation.byzantine and self._traits["plans"] and build.make_rule(config).remembers)
        self._needs_truth = attacks.needs_truth(federation.attack, federation.attack_arguments)
        self.decided = 0
        """How many of the rounds behind the model were decided, not abandoned."""
        self.rejected = 0
        """How many reports of the rounds behind the model did not count."""
        self._reports = 0

    # What a method defines.

    @classmethod
    @abstractmethod
    def create(
        cls, config: Config, folder: Path, ready: Callable[[], None], task: AnyTask | None = None,
        measure_lr: MeasureLr | None = None,
    ) -> Self:  # fmt: skip
        """Make one that stores its progress in a folder; `ready` is called before anything is written there.

        `measure_lr` finds the learning rate, if the config asks for that.
        """

    @classmethod
    @abstractmethod
    def resume(cls, config: Config, folder: Path, task: AnyTask | None = None) -> Self:
        """Make one that resumes, after `catch_up`, from the progress stored in a folder."""

    @property
    @abstractmethod
    def round(self) -> int:
        """How many rounds the model has behind it."""

    @property
    @abstractmethod
    def checkpointed_round(self) -> int:
        """How many rounds the stored progress has behind it."""

    @abstractmethod
    def catch_up(self, stop: int | None = None) -> None:
        """Move the weights to round `stop` of the stored progress, or to its end."""

    @abstractmethod
    def finish_commit(self) -> None:
        """Commit a decided round that an interrupt left uncommitted."""

    @abstractmethod
    def checkpoint(self) -> None:
        """Make sure that the progress so far is stored."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    @abstractmethod
    def measure(self, announcement: Announcement, clients: NDArray[np.int64]) -> NDArray[Any]:
        """Return what these clients would honestly send in the announced round, one row each."""

    @abstractmethod
    def truth(self, gradient: torch.Tensor) -> attacks.Vector:
        """Return what clients whose mean loss has this gradient at w would send, were there no noise."""

    @abstractmethod
    def apply(self, record: Record) -> None:
        """Move the weights by a decided round, or pass over an abandoned one."""

    # What all have in common.

    @property
    def needs_own(self) -> bool:
        """Whether the attack looks at what its clients would honestly send, so that it has to be measured."""
        return bool(self._traits["needs_own"] or self._plans)

    def label_counts(self) -> NDArray[np.int64]:
        """Return how many samples of each label each client has: the partition as a (clients x labels) matrix."""
        return partition.label_counts(self.task.labels, self.shares, self.task.classes)

    def run_round(self) -> Record:
        """Run one round: announce, measure, attack, decide, commit."""
        self.finish_commit()
        try:
            with own_threads(self.parameters):
                return self._run_round()
        except BaseException:
            self.federator.cancel_round()
            raise

    def _run_round(self) -> Record:
        announcement = self.federator.open_round()
        is_byzantine = self.byzantine[announcement.invited]
        honest, byzantine = announcement.invited[~is_byzantine], announcement.invited[is_byzantine]
        if self.needs_own:
            sent = self._as_sent(self._measured(announcement, announcement.invited))
            values, own = sent[~is_byzantine], sent[is_byzantine]
        else:
            values = self._as_sent(self._measured(announcement, honest))
            own = np.zeros((0, self.federator.scalars), np.float32)
        self.federator.receive_many(honest, announcement.round, values)
        if len(byzantine):
            forged = self.byzantine_reports(
                honest, byzantine, values, own, announcement.round, truth=self._truth(honest)
            )
            self.federator.receive_many(byzantine, announcement.round, forged)
        self.federator.decide(deadline=True)
        record = self.federator.ledger.last
        assert record is not None
        self.apply(record)
        self._counted(record)
        return record

    def _measured(self, announcement: Announcement, clients: NDArray[np.int64]) -> NDArray[Any]:
        """Measure; what a task of the user's own raises becomes one line."""
        if not isinstance(self.task, OwnTask):
            return self.measure(announcement, clients)
        where = f"{self.task.name}: measuring losses in round {announcement.round}"
        return doors.called(where, lambda: self.measure(announcement, clients), ModelError)

    def byzantine_reports(
        self, honest: NDArray[np.int64], byzantine: NDArray[np.int64], values: NDArray[np.float32],
        own: NDArray[np.float32], round: int, *, truth: attacks.Vector | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Return what these Byzantine clients send in a round in which these clients honestly send `values`.

        `own` is what the Byzantine clients measured themselves, where their attack needs that.
        """
        known = attacks.Knowledge(
            honest=values.astype(np.float64), own=own.astype(np.float64), byzantine=len(byzantine),
            invited=len(honest) + len(byzantine), tolerated=self._borne_in(round), round=round,
            seed=self.config.seed, decide=self._rule_in_force(honest, values, byzantine, round), step=self._step(),
            truth=truth, past=self._past(), **self._rehearsal(),
        )  # fmt: skip
        return self._as_sent(self._attack(known))

    def _borne_in(self, round: int) -> int:
        """Return how many Byzantine clients aggregation.beta is for in a round, whatever the rule."""
        federation, decider = self.config.federation, self.federator.decider
        b = aggregate.tolerated(self.config.aggregation.beta, federation.invited)
        return max(b - federation.invited + decider.invited_count(round), 0)

    def _step(self) -> Callable[[attacks.Vector], attacks.Vector] | None:
        """Return what the optimizer makes of a decision of this round; None where there is none."""
        return None

    def _past(self) -> attacks.Matrix | None:
        """Return the last decisions, oldest first; None where they are as long as the model."""
        return None

    def _rehearsal(self) -> dict[str, Any]:
        """Return what an attack that looks ahead knows beside the rest."""
        rehearsal = self.federator.decider.rehearsal
        if rehearsal is None:
            return {}
        play = partial(rehearse, rehearsal, byzantine=self.byzantine, seed=self.config.seed, sent=self._as_sent)
        return {"rehearse": play, "rehearsed": rehearsal.round}

    def _rule_in_force(
        self, honest: NDArray[np.int64], values: NDArray[np.float32], byzantine: NDArray[np.int64], number: int
    ) -> Callable[[attacks.Matrix], attacks.Vector]:
        """Return what the federator would decide, as a function of the honest rows followed by the Byzantine rows.

        An attack may leave out the honest rows that are not finite, which do not count.
        """
        everybody = np.concatenate([honest, byzantine])
        usable = np.concatenate([honest[np.isfinite(values).all(axis=1)], byzantine])
        rule, memory, b = self.federator.rule, self.federator.decider.memory, self.federator.tolerated

        def decide(rows: attacks.Matrix) -> attacks.Vector:
            clients = everybody if len(rows) == len(everybody) else usable
            order = np.argsort(clients)
            sent = self._as_sent(rows[order])
            return rule.decide(sent, len(everybody), number, memory=memory, clients=clients[order], b=b).values

        return decide

    def _as_sent(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Round to what travels; what is beyond float32 becomes infinite and will be refused."""
        with np.errstate(over="ignore", under="ignore"):
            return self.federator.codec.as_decoded(values.astype(np.float32, copy=False))

    def _truth(self, honest: NDArray[np.int64]) -> attacks.Vector | None:
        """Return what the honest would send on average if measured on all samples, where the attack needs it."""
        if len(honest) == 0 or not self._needs_truth:
            return None
        weights = np.zeros(len(self.task.train_inputs), np.float32)
        for client in honest.tolist():
            weights[self.shares[client]] = 1.0 / (len(honest) * len(self.shares[client]))
        shares = torch.from_numpy(weights).to(self.parameters.device)
        return self.truth(self.gradients.of_all(self.task.train_inputs, self.task.train_targets, shares))

    def _counted(self, record: Record) -> Record:
        self.decided += record.values is not None
        invited = self.federator.decider.invited_count(record.round)
        self._reports += invited  # here all who are invited send; refused reports count too
        # Counted by the records, not by the federator, whose counts end with its process.
        self.rejected += invited - int(np.count_nonzero(record.reported))
        return record

    def rejections(self) -> dict[str, int]:
        """Return how many reports were rejected, by reason.

        Each invited client sends one report of the right round and length, so the only reason here is a number that is
        not finite.
        """
        return {Receipt.NOT_FINITE.name: self.rejected} if self.rejected else {}

    def evaluate(self) -> Evaluation:
        """Return loss and accuracy on the set that the task is evaluated on."""
        with evaluating(self.parameters):
            if not isinstance(self.task, OwnTask):
                return Evaluation(*self.task.evaluate(self.parameters.model))
            where = f"{self.task.name}: evaluating after round {self.round}"
            return doors.called(where, lambda: Evaluation(*self.task.evaluate(self.parameters.model)), ModelError)

    @property
    def evaluated_on(self) -> str:
        """Which set that is, dev, test or train: a task that does not define it has a test set only."""
        return str(getattr(self.task, "evaluated_on", "test"))

    def evaluate_more(self, found: Evaluation) -> dict[str, float]:
        """Return what the task measures beside what was found, by name: a language model on every test set there is."""
        more: Callable[..., dict[str, float]] = getattr(self.task, "evaluate_more", lambda *_: {})
        with evaluating(self.parameters):
            return more(self.parameters.model, found.loss, found.accuracy)

    def train_loss(self) -> float | None:
        """Return the loss on the samples that are learned from, where the task measures it."""
        measure: Callable[..., float | None] = getattr(self.task, "train_loss", lambda _: None)
        with evaluating(self.parameters):
            return measure(self.parameters.model)

    def first_batch(self, alone: bool) -> Batch:
        """Return what is measured first in round 0: the samples of all honest clients invited, or of one."""
        federation = self.config.federation
        invited = invited_clients(self.config.seed, 0, federation.clients, federation.participation)
        unmeasured = self.byzantine[invited] & (not self.needs_own)
        who = invited if unmeasured.all() else invited[~unmeasured]
        return self.samples.batch(who[:1] if alone else self.samples.groups(who)[0], 0)

    def traffic(self) -> tuple[int, int]:
        """Return the payload bytes that a client has sent and received so far, as a mean over the clients."""
        per_round = payload_bytes(self.federator.scalars, self.federator.codec)
        return self._reports * per_round // self.config.federation.clients, self.decided * per_round


class Simulation(Federation):
    """A federation by cyber0: k scalars a round, and the model is its starting point plus a ledger.

    Args:
        config: Its settings.
        task: What is learned, a `cyber0.Task`; made from the config when absent.
        ledger: Given the header, returns a new ledger, or this run's existing one when resuming (call `catch_up` then).
            By default decisions are kept in memory.
        reports: The file for every accepted report, if any.
        measure_lr: Finds the learning rate at w0, if the config asks for that by "auto"; that of an existing ledger is
            in its header.
        byzantine: Which clients are Byzantine, `federation.byzantine` of them; drawn by the seed when absent.
    """

    methods = ("cyber0",)
    state_file = LEDGER
    lr_search: Mapping[str, Any] | None = None
    """What `measure_lr` tried and what that cost; None if it was not called."""

    def __init__(
        self,
        config: Config,
        *,
        task: AnyTask | None = None,
        ledger: Callable[[Header], Ledger] | None = None,
        reports: Path | None = None,
        measure_lr: MeasureLr | None = None,
        byzantine: Collection[int] | None = None,
    ) -> None:
        super().__init__(config, task=task, byzantine=byzantine)
        if self.config.method.lr == AUTO and measure_lr is not None:
            self._assemble(with_lr(self.config, 1.0), None, None)  # a simulation that can be measured, of any rate
            found = measure_lr(self)
            self._assemble(with_lr(self.config, found), ledger, reports)
        else:
            self._assemble(self.config, ledger, reports)

    def _assemble(self, config: Config, ledger: Callable[[Header], Ledger] | None, reports: Path | None) -> None:
        """Make the ledger, the federator and the clients."""
        self.config, self.lr_at = config, build.learning_rates(config)
        header = make_header(config, self.parameters)
        self.ledger = Ledger.create(None, header) if ledger is None else ledger(header)
        check_same_run(self.ledger, header)
        accepted = None if reports is None else Reports.beside(self.ledger, reports)
        self.federator = build.make_federator(self.ledger, config, accepted, rehearsed=self._plans)
        self._decisions: deque[NDArray[np.float32]] = deque(maxlen=attacks.PAST)
        self.client = build.make_client(
            self.ledger.header, config, self.task, self.parameters, self.samples, self.lr_at, checked=True,
            first_batch=partial(self.first_batch, alone=config.method.local_epochs > 1),
        )  # fmt: skip

    @classmethod
    def create(
        cls, config: Config, folder: Path, ready: Callable[[], None], task: AnyTask | None = None,
        measure_lr: MeasureLr | None = None,
    ) -> Self:  # fmt: skip
        def create(header: Header) -> Ledger:
            ready()
            return Ledger.create(folder / LEDGER, header)

        return cls(config, task=task, ledger=create, reports=_reports_file(config, folder), measure_lr=measure_lr)

    @classmethod
    def resume(cls, config: Config, folder: Path, task: AnyTask | None = None) -> Self:
        ledger = Ledger.open(folder / LEDGER, writable=True)
        if config.method.lr == AUTO:
            config = with_lr(config, ledger.header.lr)
        try:
            return cls(config, task=task, ledger=lambda _: ledger, reports=_reports_file(config, folder))
        except BaseException:
            ledger.close()
            raise

    @property
    def round(self) -> int:
        return self.client.next_round

    @property
    def checkpointed_round(self) -> int:
        return len(self.ledger)

    def catch_up(self, stop: int | None = None) -> None:
        self.client.catch_up(map(self._counted, self.ledger.records(self.round, stop)))

    def finish_commit(self) -> None:
        if self.round < len(self.ledger):
            self.catch_up()

    def checkpoint(self) -> None:
        """Do nothing: a record is in the ledger before it is applied."""

    def close(self) -> None:
        self.ledger.close()

    def measure(self, announcement: Announcement, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.client.measure(announcement, clients)

    def truth(self, gradient: torch.Tensor) -> attacks.Vector:
        """Return the slopes along all the round's directions, those of later local epochs taken at w as well."""
        directions = Directions(self.client.key, self.round, self.federator.scalars)
        return self.client.evaluator.project(gradient, directions)

    def apply(self, record: Record) -> None:
        self.client.apply(record)

    def _counted(self, record: Record) -> Record:
        if record.values is not None:
            self._decisions.append(record.values)
        return super()._counted(record)

    def _step(self) -> Callable[[attacks.Vector], attacks.Vector] | None:
        updates = self.client.updates
        return partial(updates.optimizer.taken, updates.state)

    def _past(self) -> attacks.Matrix | None:
        return np.array(self._decisions, np.float64).reshape(-1, self.federator.scalars)


def _reports_file(config: Config, folder: Path) -> Path | None:
    return folder / REPORTS if build.stores_reports(config) else None
