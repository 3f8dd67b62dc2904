"""The only place that assembles: it resolves what a config names, and makes of it what takes part in a round.

A simulation, `cyber0 join` and `cyber0 serve` are made of the same parts. What needs torch is imported where it is
made, for a federator needs no weights and loads no torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cyber0 import aggregate, attacks, optimizers
from cyber0.aggregate import Rule
from cyber0.config import doors
from cyber0.config.choices import PROBING_ESTIMATORS
from cyber0.config.registry import ATTACKS, RULES, Entry, Registry
from cyber0.config.schedules import learning_rate
from cyber0.config.schema import Config, MethodConfig
from cyber0.errors import ConfigError, Cyber0Error
from cyber0.ledger import Header, Log, Reports
from cyber0.ledger.rates import scalar_limit
from cyber0.ledger.store import Agreed
from cyber0.optimizers import Optimizer
from cyber0.protocol.decider import Decider, judge_in
from cyber0.protocol.federator import Federator
from cyber0.tasks import EngineTask, partition

if TYPE_CHECKING:
    import torch

    from cyber0.estimate.batches import Batch, Samples
    from cyber0.estimate.evaluator import Evaluator
    from cyber0.model.vector import Parameters
    from cyber0.protocol.client import Client

STEP_LENGTH = 2.0  # in units of mu
_COLUMNS = 3  # of the matrix on which a rule is tried


def resolve(config: Config, *, served: bool = False) -> None:
    """Import all that a config names, and refuse what can't work; of a served run, what its federator needs.

    Whoever writes files calls this first. A user's rule and attack are tried on a small random matrix, so that a wrong
    shape is an error at once; a user's task is tried where its parameters are made.

    Raises:
        ConfigError: something can't be imported, does not take its options, fails, or gives the wrong shape.
    """
    federation = config.federation
    lr_at = learning_rates(config, lr=1.0)
    for t in {0, max(0, config.rounds - 1)} if config.rounds else ():
        lr_at(t)
    rule, entry = make_rule(config), RULES.entry(config.aggregation.rule)
    if federation.expel:
        judge_in(rule, rule.memory(federation.clients))
    if entry.own:
        rows = np.random.default_rng(0).normal(size=(federation.invited, _COLUMNS))
        with _tried(RULES, entry, f"a matrix of {federation.invited} x {_COLUMNS}"):
            rule.decide(rows, federation.invited)
    if not served:
        partition.make(federation.partition, federation.partition_arguments)
        _try_attack(config)


def _try_attack(config: Config) -> None:
    federation = config.federation
    attack, entry = attacks.make(federation.attack, federation.attack_arguments), ATTACKS.entry(federation.attack)
    byzantine = min(federation.byzantine, federation.invited)
    if not entry.own or byzantine == 0:
        return
    rule, invited, random = make_rule(config), federation.invited, np.random.default_rng(0)
    known = attacks.Knowledge(
        honest=random.normal(size=(invited - byzantine, _COLUMNS)), own=random.normal(size=(byzantine, _COLUMNS)),
        byzantine=byzantine, invited=invited, tolerated=aggregate.tolerated(config.aggregation.beta, invited), round=0,
        seed=config.seed, decide=lambda rows: rule.decide(rows, invited).values, step=lambda decided: decided,
        truth=random.normal(size=_COLUMNS) if entry.traits["needs_truth"] else None,
    )  # fmt: skip
    with _tried(ATTACKS, entry, f"{invited - byzantine} honest rows of {_COLUMNS} scalars"):
        attack(known)


@contextlib.contextmanager
def _tried(registry: Registry, entry: Entry, what: str) -> Iterator[None]:
    try:
        yield
    except Cyber0Error:
        raise
    except Exception as error:  # a user's code may raise anything
        reason = doors.described(error)
        raise ConfigError(f"{registry.key} = {entry.name!r} failed on {what}: {reason}") from error


def make_rule(config: Config) -> Rule:
    """Return the rule that a config names."""
    chosen = config.aggregation
    return aggregate.make(chosen.rule, chosen.beta, before=chosen.before, seed=config.seed, options=chosen.options)


def stores_reports(config: Config) -> bool:
    """Return whether every report is stored: asked for, or needed by the rule, which may be the user's own."""
    return config.stores_reports or make_rule(config).remembers is not None


def make_optimizer(config: Config) -> Optimizer:
    """Return the optimizer that a config names."""
    return optimizers.make(config.method.optimizer, config.method.optimizer_options)


def learning_rates(config: Config, lr: float | None = None) -> Callable[[int], float]:
    """Return the learning rate as a function of the round; `lr` is what the schedule multiplies, if not method.lr."""
    method = config.method
    return learning_rate(method.rate if lr is None else lr, method.lr_schedule, config.rounds, method.lr_options)


def lr_without_data(config: Config) -> float:
    """Return the learning rate for `method.lr = "auto"` where nothing can be measured: a federator has no data.

    An optimizer that divides by the size of the decided scalars already finds the rate of every round from them; what
    is left to choose is the length of a step. It is 2 mu along each direction, as a mean over the schedule: mu is the
    distance over which whoever made the config takes the loss to be straight.

    Raises:
        ConfigError: the optimizer does not divide by the size of the scalars, or there is no mu.
    """
    method = config.method
    if not make_optimizer(config).scale_free:
        raise ConfigError(
            f'method.lr = "auto" is measured on data with method.optimizer = {method.optimizer!r}, and a federator has '
            'none; set method.optimizer = "adaptive", which takes the rate of each round from the decided scalars, or '
            "set method.lr to a number"
        )
    if not method.mu:
        raise ConfigError('method.lr = "auto" is in units of method.mu for a federator; set one of them to a number')
    schedule, rounds = learning_rates(config, lr=1.0), range(max(config.rounds, 1))
    mean = sum(map(schedule, rounds)) / len(rounds) or 1.0
    return float(f"{STEP_LENGTH * method.mu * math.sqrt(method.k) / mean / method.local_epochs:.1e}")


def with_lr(config: Config, lr: float) -> Config:
    """Return a config with this learning rate."""
    return replace(config, method=replace(config.method, lr=lr))


def make_decider(header: Header, config: Config, rule: Rule) -> Decider:
    """Return what decides a run's rounds, and decides them again when they are verified."""
    return Decider(rule, header, **_deciding(header, config))


def make_federator(log: Log, config: Config, reports: Reports | None = None, *, rehearsed: bool = False) -> Federator:
    """Return the federator whose decisions go to a log, and the reports it accepts to a file, if any.

    `rehearsed` says whether simulated attackers look ahead.
    """
    return Federator(
        log,
        make_rule(config),
        log.header.clients,
        rounds=config.rounds,
        lr_at=learning_rates(config),
        reports=reports,
        rehearsed=rehearsed,
        **_deciding(log.header, config),
    )


def _deciding(header: Agreed, config: Config) -> dict[str, Any]:
    return {
        "participation": config.federation.participation, "quorum": config.serve.quorum,
        "limit": scalar_limit(header) if isinstance(header, Header) else math.inf, "expel": config.federation.expel,
    }  # fmt: skip


def make_parameters(
    task: EngineTask, model: torch.nn.Module, directions: MethodConfig | Header, needs_gradient: str = "",
    compute: str = "",
) -> Parameters:  # fmt: skip
    """Return the weights of a model, in which a task of the user's own is tried.

    Args:
        task: Whose model it is.
        model: On its device, with the weights to start from.
        directions: What says their distribution and rank.
        needs_gradient: The setting that needs the gradient of the loss, if one does (see `gradients_for`).
        compute: The type that the model computes in; empty: that of its weights.
    """
    import torch

    from cyber0.estimate.torch_threads import evaluating
    from cyber0.model.vector import Parameters
    from cyber0.tasks.own import OwnTask

    dtype = getattr(torch, compute) if compute else None
    made = Parameters(model, directions.distribution, dtype, rank=directions.rank)
    if isinstance(task, OwnTask):
        with evaluating(made):
            task.check(model, needs_gradient)
    return made


def gradients_for(config: Config) -> str:
    """Return the setting that needs the gradient of the loss; empty if losses are all that is needed."""
    method, federation = config.method, config.federation
    if method.name in ("fedavg", "trimmed_mean", "krum"):
        return f"method.name = {method.name!r}"
    if method.estimator not in PROBING_ESTIMATORS:
        return f"method.estimator = {method.estimator!r}"
    if federation.byzantine and attacks.needs_truth(federation.attack, federation.attack_arguments):
        return f"federation.attack = {federation.attack!r} against the sign of the truth"
    return ""


def make_samples(
    task: EngineTask, shares: Sequence[NDArray[np.int64]], config: Config, seed: int, *, attack: str = "",
    byzantine: NDArray[np.bool_] | None = None, everybody: bool = True, first: int = 0,
) -> Samples:  # fmt: skip
    """Return the samples of some clients, and the batches that they draw by a seed.

    Args:
        task: Whose training samples they are.
        shares: Which of them each client holds.
        config: Sets the sizes of batches.
        seed: What the batches are drawn by.
        attack: What the Byzantine clients do: it may flip their labels. Empty: nothing.
        byzantine: Which of the clients are Byzantine.
        everybody: Whether all clients are invited each round.
        first: The number of the first of the clients.
    """
    from cyber0.estimate.batches import Samples

    flips = bool(attack) and ATTACKS.entry(attack).traits["flips_labels"]
    batches = np.full(len(shares), config.method.batch_size)
    if config.aggregation.reference_batch and first == 0:
        batches[0] = config.aggregation.reference_batch  # of the trusted client
    return Samples(
        task.train_inputs, task.train_targets, shares, batches, seed,
        flipped=byzantine if flips else None, classes=task.classes, everybody=everybody,
        candidates=config.method.candidates,
    )  # fmt: skip


def make_evaluator(
    parameters: Parameters, task: EngineTask, config: Config, estimator: str, mu: float,
    first_batch: Callable[[], Batch] | None = None,
) -> Evaluator:  # fmt: skip
    """Return what measures the losses of a task; `first_batch` makes the batch that is measured first, if known."""
    from cyber0.estimate.evaluator import Evaluator

    rows = config.method.rows_in_flight
    return Evaluator(parameters, task, estimator, mu, reference=first_batch, rows_in_flight=rows)


def make_client(
    header: Header, config: Config, task: EngineTask, parameters: Parameters, samples: Samples,
    lr_at: Callable[[int], float], *, number: int | None = None, first_batch: Callable[[], Batch] | None = None,
    checked: bool = False,
) -> Client[Parameters, Evaluator]:  # fmt: skip
    """Return the client of a deployment, or one that speaks for all clients of a simulation; see `Client`."""
    from cyber0.protocol.client import Client

    evaluator = make_evaluator(parameters, task, config, header.estimator, header.mu, first_batch)
    return Client(header, parameters, samples, evaluator, lr_at, config.method.local_memory, number, checked=checked)
