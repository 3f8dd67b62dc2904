"""A whole federation in one process.

The simulation drives the same federator and client as a deployment does. What makes it fast: all honest clients are at
the same w, so one `Client` object speaks for all of them, perturbs once and measures everybody's batches in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0 import aggregate, attacks
from cyber0.choices import DEVICES
from cyber0.client import Client
from cyber0.config import Config, to_dict
from cyber0.directions import Stream, permutation
from cyber0.errors import ConfigError, LedgerError
from cyber0.estimate import Evaluator
from cyber0.federator import Federator
from cyber0.ledger import Header, Ledger, Record
from cyber0.memory import keep_freed_memory
from cyber0.parameters import Parameters
from cyber0.protocol import payload_bytes
from cyber0.samples import Samples
from cyber0.schedules import learning_rate
from cyber0.tasks import Task, partition
from cyber0.tasks import make as make_task


class Evaluation(NamedTuple):
    """How good the model is on the test samples."""

    loss: float
    accuracy: float


class Simulation:
    """One federation, ready to play rounds.

    Args:
        config: Its settings.
        task: What is learned; made from the config when absent.
        ledger: Where decisions go: given the header, it returns a new ledger, or the one of this very run to be gone
            on with (call `catch_up` then). By default they are kept in memory.
    """

    def __init__(
        self, config: Config, *, task: Task | None = None, ledger: Callable[[Header], Ledger] | None = None
    ) -> None:
        self.config = config
        keep_freed_memory()
        check_device(config.device)
        self.task = (task or make_task(config.task)).to(config.device)
        federation, method = config.federation, config.method
        model = self.task.model(config.seed, config.task.dtype).to(config.device)
        self.parameters = Parameters(model, method.distribution)
        deal = partition.make(
            federation.partition, alpha=federation.alpha, shards=federation.shards, similarity=federation.similarity
        )
        self.shares = deal(self.task.labels, federation.clients, config.seed)
        self.byzantine = byzantine_clients(config.seed, federation.clients, federation.byzantine)
        header = make_header(config, self.parameters)
        self.ledger = Ledger.create(None, header) if ledger is None else ledger(header)
        _check_same_run(self.ledger.header, header)
        lr_at = learning_rate(method.lr, method.lr_schedule, config.rounds)
        self.federator = Federator(
            self.ledger,
            make_rule(config),
            federation.clients,
            participation=federation.participation,
            quorum=config.serve.quorum,
            lr_at=lr_at,
        )
        samples = Samples(
            self.task.train_inputs, self.task.train_targets, self.shares, method.batch_size, config.seed,
            flipped=self.byzantine if federation.attack in attacks.FLIP_LABELS else None, classes=self.task.classes,
        )  # fmt: skip
        evaluator = Evaluator(self.parameters, self.task, method.estimator, method.mu)
        self.client = Client(header, self.parameters, samples, evaluator, lr_at, method.local_memory)
        self._attack = attacks.make(federation.attack, federation.attack_reading, strength=federation.attack_strength)
        self.decided = 0
        """How many of the rounds behind the model were decided, not abandoned."""
        self._reports = 0

    @property
    def round(self) -> int:
        """How many rounds the model has behind it."""
        return self.client.next_round

    def label_counts(self) -> NDArray[np.int64]:
        """Return how many samples of each label each client has: the partition as a (clients x labels) matrix."""
        return partition.label_counts(self.task.labels, self.shares, self.task.classes)

    def catch_up(self, stop: int | None = None) -> None:
        """Move the weights through what the ledger already holds, up to round `stop`."""
        self.client.catch_up(map(self._counted, self.ledger.records(self.round, stop)))

    def play_round(self) -> Record:
        """Play one round: announce, measure, lie, decide, commit."""
        if self.round < len(self.ledger):  # an interrupt came between decision and commit
            self.catch_up()
        try:
            with self.client.evaluator.own_threads():
                return self._play_round()
        except BaseException:
            self.federator.cancel_round()
            raise

    def _play_round(self) -> Record:
        announcement = self.federator.open_round()
        lies = self.byzantine[announcement.invited]
        honest, liars = announcement.invited[~lies], announcement.invited[lies]
        if self.config.federation.attack in attacks.NEED_OWN:
            sent = _as_sent(self.client.measure(announcement, announcement.invited))
            values, own = sent[~lies], sent[lies]
        else:
            values, own = _as_sent(self.client.measure(announcement, honest)), np.zeros((0, self.federator.numbers))
        self.federator.receive_many(honest, announcement.round, values)
        if len(liars):
            known = attacks.Knowledge(
                honest=values, own=own, liars=len(liars), invited=len(announcement.invited),
                tolerated=self.federator.tolerated, round=announcement.round, seed=self.config.seed,
                decide=self._rule_in_force(honest, liars),
            )  # fmt: skip
            self.federator.receive_many(liars, announcement.round, _as_sent(self._attack(known)))
        self.federator.decide(deadline=True)
        record = self.ledger.last
        assert record is not None
        self.client.apply(record)
        self._counted(record)
        return record

    def _rule_in_force(
        self, honest: NDArray[np.int64], liars: NDArray[np.int64]
    ) -> Callable[[attacks.Matrix], attacks.Vector]:
        """Return what the federator would decide, as a function of the honest rows and then the liars' rows."""
        order = np.argsort(np.concatenate([honest, liars]))
        rule, invited = self.federator.rule, len(order)

        def decide(rows: attacks.Matrix) -> attacks.Vector:
            # Honest rows that are not finite are left out of what the liars see, as they are of what is decided.
            ordered = rows[order] if len(rows) == len(order) else rows
            return rule(_as_sent(ordered), invited)

        return decide

    def _counted(self, record: Record) -> Record:
        self.decided += record.values is not None
        self._reports += int(record.reported.sum())
        return record

    def evaluate(self) -> Evaluation:
        """Return loss and accuracy on the test samples."""
        with self.client.evaluator.own_threads():  # torch's own threads need not add up in the same order each time
            loss, accuracy = self.task.evaluate(self.parameters.model)
        return Evaluation(loss, accuracy)

    def traffic(self) -> tuple[int, int]:
        """Return the payload bytes that a client has sent and received so far, as a mean over the clients."""
        per_round = payload_bytes(self.federator.numbers)
        return self._reports * per_round // self.config.federation.clients, self.decided * per_round


def make_rule(config: Config) -> aggregate.Rule:
    """Return the rule that a config asks for."""
    chosen = config.aggregation
    return aggregate.make(chosen.rule, chosen.beta, before=chosen.before, seed=config.seed)


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have."""
    if device not in DEVICES:
        raise ConfigError(f"device = {device!r} is not a choice; possible are {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device = "cuda", but this machine has no CUDA GPU that torch can use; set device = "cpu"')


def byzantine_clients(seed: int, clients: int, count: int) -> NDArray[np.bool_]:
    """Return which clients lie: fixed for the run, drawn by the seed."""
    lies = np.zeros(clients, dtype=np.bool_)
    lies[permutation(seed, Stream.ATTACKS, 0, 0, clients)[:count]] = True
    return lies


def make_header(config: Config, parameters: Parameters) -> Header:
    """Return what the participants agree on before the first round."""
    method = config.method
    return Header(
        seed=config.seed,
        dimension=parameters.dimension,
        layout=parameters.layout,
        distribution=method.distribution,
        k=method.k,
        local_epochs=method.local_epochs,
        mu=method.mu,
        estimator=method.estimator,
        lr=method.lr,
        lr_schedule=method.lr_schedule,
        projection_radius=method.projection_radius or None,
        weights_digest=parameters.digest(),
        rest_digest=parameters.rest_digest(),
        clients=config.federation.clients,
        config=to_dict(config),
        codec=config.serve.codec,
    )


def _check_same_run(found: Header, expected: Header) -> None:
    odd = expected.differences(found)
    if odd:
        raise LedgerError(f"the ledger belongs to another run: it differs in {', '.join(odd)}")


def _as_sent(values: NDArray[np.float64]) -> NDArray[Any]:
    """Round to what travels; what is beyond float32 becomes infinite and will be refused."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float32).astype(np.float64)
