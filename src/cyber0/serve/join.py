"""`cyber0 join` and `cyber0 follow`: the participant that a header and its own options describe, over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0 import attacks
from cyber0.config import doors
from cyber0.config.choices import PROBING_ESTIMATORS, TEXT_TASKS
from cyber0.config.schedules import FREE
from cyber0.config.schema import Config, TaskConfig
from cyber0.errors import ConfigError, ModelMissingError, ProtocolError
from cyber0.federation import build
from cyber0.federation.population import dealt
from cyber0.kernels.memory import keep_freed_memory
from cyber0.ledger import Header, first_chain
from cyber0.ledger.rates import AgreedRates
from cyber0.model.vector import Parameters
from cyber0.serve.conduct import STALLED_ROUNDS
from cyber0.serve.connection import FederatorConnection
from cyber0.serve.identity import expiry_warning
from cyber0.serve.operations import EventLog
from cyber0.serve.participant import CommitHook, LocalAttack, Participant
from cyber0.serve.snapshots import SnapshotError, load_snapshot
from cyber0.serve.state import ParticipantState, open_state
from cyber0.serve.tls import Credentials
from cyber0.tasks import EngineTask, own_task, starting
from cyber0.tasks import make as make_task

LOCAL_ATTACKS = ("sign_flip", "gaussian", "nonfinite", "ipm", "label_flip")
"""Attacks that need to know nothing of other clients."""
MAX_SCALARS = 1 << 16
MAX_DRAWN_CLIENTS = 1 << 17  # of which some are invited: everybody draws them each round, in 0.05 s
"""How many scalars a round may have by default: each takes a client two passes through its model."""


@dataclass(frozen=True)
class JoinOptions:
    """The options of `cyber0 join` and `cyber0 follow`."""

    address: str
    credentials: Credentials | None
    """None: plaintext, to this machine only."""
    number: int
    follows: bool = False
    data: Path | None = None
    model: str = ""
    """Where this participant's copy of the language model is; empty: where the header says."""
    task: str = ""
    """Where this participant's copy of the task is, if it is not built in: file.py:Name."""
    weights: Path | None = None
    """The safetensors file with the weights that the run starts from, if they are not the task's own."""
    state: Path | None = None
    snapshot: Path | None = None
    device: str = "cpu"
    attack: str = ""
    """For tests: the attack by which this client is Byzantine."""
    patience_s: float = 300.0
    run: str = ""
    """The beginning of the run's id in hexadecimal; empty: any run."""
    schedule: str = ""
    """Where this participant's copy of the run's schedule is, if it is not built in: file.py:name."""
    stalled_rounds: int = STALLED_ROUNDS
    """How many rounds are answered while the weights stay where they are."""
    max_scalars: int = MAX_SCALARS
    """How many scalars a round may have."""


MakeHook = Callable[[Participant, EngineTask], CommitHook]
"""Returns what is called after every commit."""


def make_participant(
    header: Header,
    options: JoinOptions,
    make_hook: MakeHook | None = None,
    hook_every: int = 1,
    state: ParticipantState | None = None,
) -> Participant:
    """Build the model that the header describes, over this participant's own data.

    What it stores between starts is `state`, by default in the folder that the options name.
    """
    if header.format == 1:
        raise ProtocolError(
            "the federator serves a ledger of format 1, which is not supported any more: update the federator"
        )
    if not header.settings:
        raise ProtocolError("the federator's header has no settings, so it names neither the task nor how to take part")
    if header.lr_schedule == FREE:
        raise ProtocolError(
            f"the federator's header says lr_schedule = {FREE!r}, by which it could choose any learning rate: ask for "
            "a run with a schedule"
        )
    if header.scalars > options.max_scalars:
        raise ProtocolError(
            f"the federator's header asks for {header.scalars} scalars a round (local_epochs * k = "
            f"{header.local_epochs} * {header.k}), and {options.max_scalars} are allowed here: allow them with "
            f"--max-scalars {header.scalars} if that was agreed on"
        )
    config = Config.recorded(header.config)
    if config.federation.participation < 1 and header.clients > MAX_DRAWN_CLIENTS:
        raise ProtocolError(
            f"the federator's header names {header.clients} clients, of whom some are drawn each round, and "
            f"{MAX_DRAWN_CLIENTS} can be drawn from: ask for a run of fewer clients, or with participation = 1"
        )
    if not options.follows and options.number >= header.clients:
        raise ConfigError(f"client {options.number} is not in this run, whose clients are 0 to {header.clients - 1}")
    settings = own_settings(config.task, options)
    named_by_header = [kind for kind, own in ((doors.MODEL, options.model), (doors.DATA, options.data)) if not own]
    with _copy_asked_for(settings.model, options), doors.offline(*named_by_header):
        task = make_task(settings, evaluated=options.follows).to(options.device)
    state = state or open_state(options.state, first_chain(header), options.number)

    def model() -> torch.nn.Module:
        with _copy_asked_for(settings.model, options):
            made = task.model(config.seed, config.task.dtype)
        if options.weights is not None:
            starting.load_into(made, options.weights, f"--weights {options.weights}")
        return made.to(options.device)

    def start() -> Mapping[str, torch.Tensor]:
        return Parameters(model(), header.distribution, rank=header.rank).state()

    gradient = "" if header.estimator in PROBING_ESTIMATORS else f"estimator {header.estimator!r}"
    parameters = build.make_parameters(task, model(), header, gradient, config.task.compute)
    share = np.arange(len(task.labels))
    if not options.follows:
        with doors.closed("give your own samples by --data DIR"):
            task, share = own_samples(task, config, options.number, private=options.data is not None)
    attackers = np.array([bool(options.attack)])
    samples = build.make_samples(task, [share], config, state.seed, attack=options.attack, byzantine=attackers,
                                  first=options.number)  # fmt: skip
    agreed = AgreedRates(header, options.schedule)
    if agreed.unknown:
        warnings.warn(
            f"learning rates are not checked, except that they are finite and not negative: {agreed.unknown}",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
    rates = _rates(header, agreed)
    client = build.make_client(header, config, task, parameters, samples, rates(config.rounds), number=options.number)
    participant = Participant(
        client, state, None if options.follows else options.number, follower=options.number, start=start,
        attack=make_attack(options.attack, config) if options.attack else None, hook_every=hook_every, rates=rates,
        agreed=agreed, stalled_rounds=options.stalled_rounds,
    )  # fmt: skip
    if make_hook is not None:
        participant.on_commit = make_hook(participant, task)
    _resume(participant, options.snapshot)
    return participant


def _resume(participant: Participant, path: Path | None) -> None:
    """Continue from the newer of the participant's own snapshot and the one in a file that it was given.

    Its own is there to save time: where it can't be used, replaying leads to the same weights.
    """
    given = None if path is None else load_snapshot(path)
    try:
        own = participant.state.snapshot()
        if own is not None and (given is None or own.round >= given.round):
            participant.resume_from(own)
            return
    except SnapshotError as error:
        warnings.warn(f"{error.reason}; the ledger is replayed instead", RuntimeWarning, stacklevel=2)
    if given is not None:
        participant.resume_from(given)


def _rates(header: Header, agreed: AgreedRates) -> Callable[[int], Callable[[int], float]]:
    """Return the learning rates of a run with so many rounds.

    Only local epochs need them; without local epochs the rate comes with each decision.
    """
    return agreed.of_run if header.local_epochs > 1 else lambda rounds: lambda t: header.lr


def own_settings(task: TaskConfig, options: JoinOptions) -> TaskConfig:
    """Return the run's task with this participant's own data and its own copy of the model."""
    if options.model and task.name not in TEXT_TASKS:
        raise ConfigError(
            f"--model {options.model} is for runs of a language model, and this run's task.name is {task.name!r}: "
            "leave --model out"
        )
    task = own_task(task, options.task)
    if doors.is_own(task.name):
        return task if options.data is None else replace(task, options={**task.options, "data": str(options.data)})
    data = "" if options.data is None else str(options.data.expanduser())
    return replace(task, data=data, model=options.model or task.model)


@contextlib.contextmanager
def _copy_asked_for(model: str, options: JoinOptions) -> Iterator[None]:
    """Name the option for a model that can't be loaded: a participant can't change the settings."""
    try:
        yield
    except ModelMissingError as error:
        what = f"--model {model}" if options.model else f"this run's model, which the federator calls {model!r},"
        raise error.by_option(what) from error


def check_run(header: Header, wanted: str) -> None:
    """Refuse a federator that describes another run than was agreed on."""
    found = first_chain(header).hex()
    if not found.startswith(wanted.lower()):
        raise ProtocolError(f"the federator describes run {found[:16]}, not {wanted}: its settings or model differ")


def own_samples(
    task: EngineTask, config: Config, number: int, *, private: bool
) -> tuple[EngineTask, NDArray[np.int64]]:
    """Return the task and the indices of this client's samples.

    That is all samples if they are private, else its share of the partition. The whole MNIST is never private.
    """
    whole: Callable[[], bool] = getattr(task, "is_whole", lambda: not private)
    if not whole():
        return task, np.arange(len(task.labels))
    task, shares = dealt(task, config)
    return task, shares[number]


def make_attack(name: str, config: Config) -> LocalAttack:
    """Return what a Byzantine client sends instead of its scalars; for tests."""
    if name not in LOCAL_ATTACKS:
        raise ConfigError(
            f"--lie {name} needs to know what others send, or is unknown; possible are {', '.join(LOCAL_ATTACKS)}"
        )
    attack, seed, f = attacks.make(name), secrets.randbits(64), config.federation

    def forged(row: NDArray[np.float64], round: int) -> NDArray[np.float64]:
        own = row[None]
        known = attacks.Knowledge(honest=own, own=own, byzantine=1, invited=f.invited, tolerated=config.borne,
                                  round=round, seed=seed)  # fmt: skip
        sent: NDArray[np.float64] = attack(known)[0]
        return sent

    return forged


def take_part(
    options: JoinOptions, log: EventLog, make_hook: MakeHook | None = None, hook_every: int = 1
) -> Participant | None:
    """Take part in a federator's run until it ends; None if it was stopped before it began. Warnings go to the log."""

    def warn(message: Warning | str, *_: object, **__: object) -> None:
        log("warning", text=str(message))

    def build(header: Header) -> Participant:
        check_run(header, options.run)
        participant = make_participant(header, options, make_hook, hook_every)
        client = participant.client
        samples = {} if options.follows else {"samples": int(client.samples.sizes.sum())}
        log("joining", client=options.number, run=participant.run.hex()[:16], round=client.next_round, **samples)
        return participant

    async def connect() -> Participant | None:
        return await FederatorConnection(options, log).take_part(build)

    if options.credentials is not None and (warning := expiry_warning(options.credentials, time.time())):
        log("warning", text=warning)
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("default", RuntimeWarning)
        warnings.showwarning = warn
        participant = asyncio.run(connect())
        if participant is not None:
            at = participant.client
            log("left" if not participant.ended else "ended", rounds=at.next_round, chain=at.chain.hex(),
                digest=at.parameters.digest())  # fmt: skip
        return participant
