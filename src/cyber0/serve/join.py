"""`cyber0 join` and `cyber0 follow`: a participant behind gRPC, which comes back whenever the federator does."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch
from numpy.typing import NDArray

from cyber0 import attacks
from cyber0.config import doors
from cyber0.config.choices import TEXT_TASKS
from cyber0.config.schedules import learning_rate
from cyber0.config.schema import Config, TaskConfig
from cyber0.errors import ConfigError, Cyber0Error, ModelMissingError, ProtocolError
from cyber0.estimate.batches import Samples
from cyber0.estimate.evaluator import Evaluator
from cyber0.estimate.torch_threads import evaluating
from cyber0.federation.simulation import dealt
from cyber0.kernels.memory import keep_freed_memory
from cyber0.ledger import Header, first_chain, read_opening
from cyber0.model.vector import Parameters
from cyber0.protocol.client import Client
from cyber0.serve.operations import Log, on_stop_signals
from cyber0.serve.participant import Lie, Participant
from cyber0.serve.server import LEAN, SERVICE, refuse_unless_loopback
from cyber0.serve.state import State, load_snapshot
from cyber0.serve.tls import Credentials
from cyber0.tasks import Task, own_task, starting
from cyber0.tasks import make as make_task
from cyber0.tasks.own import OwnTask

LIES = ("sign_flip", "gaussian", "nonfinite", "ipm", "label_flip")
"""Attacks that need to know of nobody else."""

_LARGEST_MESSAGE = 256 << 20
_DESCRIBE_SECONDS = 20.0
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0
_REFUSALS = ("FAILED_PRECONDITION", "PERMISSION_DENIED", "INVALID_ARGUMENT", "UNAUTHENTICATED", "UNIMPLEMENTED")

# What gRPC says when two sides can't agree on TLS: nothing that a human can act on, and waiting won't help.
_MISMATCHES = {
    "Hostname Verification": "its certificate is not for this name: join by a name it has, or make it with `cyber0 "
    "certs --host NAME`",
    "certificate verify failed": "its certificate is not from the authority in ca.pem, or has expired",
    "certificate signature failure": "its certificate is not from the authority in ca.pem",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: was it started with --insecure?",
}
_HANGS_UP = "it hangs up; perhaps it wants a certificate (--certs), one of its authority, or one that has not expired"


@dataclass(frozen=True)
class Options:
    """What `cyber0 join` or `cyber0 follow` was asked for."""

    address: str
    credentials: Credentials | None
    """None: plaintext, to this machine only."""
    number: int
    follows: bool = False
    data: Path | None = None
    model: str = ""
    """Where this participant's copy of the language model is; empty: where the header says."""
    task: str = ""
    """Where this participant's copy of the task is, if the run's is none of cyber0's: file.py:Name."""
    weights: Path | None = None
    """The safetensors file with the weights that the run starts from, if they are not the task's own."""
    state: Path | None = None
    snapshot: Path | None = None
    device: str = "cpu"
    lie: str = ""
    patience_s: float = 300.0
    run: str = ""
    """The beginning of the run's id in hexadecimal; empty: any run."""


Watch = Callable[[Participant, Task], Callable[[int], None]]


def make_participant(
    header: Header, options: Options, watch: Watch | None = None, watch_every: int = 1, state: State | None = None
) -> Participant:
    """Build the model that the header describes, over this participant's own data.

    What it keeps between starts is `state`, or lies in the folder that the options name.
    """
    keep_freed_memory()
    if header.format == 1:
        raise ProtocolError("the federator describes a ledger of format 1, which is not served any more: update it")
    if not header.settings:
        raise ProtocolError("the federator's header has no settings, so it says neither the task nor how to take part")
    config = Config.recorded(header.config)
    if not options.follows and options.number >= header.clients:
        raise ConfigError(f"client {options.number} is none of this run's, whose clients are 0 to {header.clients - 1}")
    settings = own_settings(config.task, options)
    with _copy_asked_for(settings.model, options):
        task = make_task(settings, evaluated=options.follows).to(options.device)
    state = state or State(options.state, first_chain(header), options.number)

    def model() -> torch.nn.Module:
        with _copy_asked_for(settings.model, options):
            made = task.model(config.seed, config.task.dtype)
        if options.weights is not None:
            starting.load_into(made, options.weights, f"--weights {options.weights}")
        return made.to(options.device)

    def start() -> Mapping[str, torch.Tensor]:
        return Parameters(model(), header.distribution).state()

    parameters = Parameters(model(), header.distribution)
    if isinstance(task, OwnTask):
        with evaluating(parameters):
            task.check(parameters.model, "" if header.estimator == "two_point" else f"estimator {header.estimator!r}")
    share = np.arange(len(task.labels))
    if not options.follows:
        with doors.closed("give your own samples by --data DIR"):
            task, share = own_samples(task, config, options.number, private=options.data is not None)
    flipped = np.array([True]) if options.lie and attacks.ATTACKS.entry(options.lie).traits["flips_labels"] else None
    samples = Samples(task.train_inputs, task.train_targets, [share], config.method.batch_size, state.seed,
                      flipped=flipped, classes=task.classes)  # fmt: skip
    rates = _rates(header, config)
    evaluator = Evaluator(parameters, task, header.estimator, header.mu)
    client = Client(
        header, parameters, samples, evaluator, rates(config.rounds), config.method.local_memory, options.number
    )
    participant = Participant(
        client, state, None if options.follows else options.number, follower=options.number, start=start,
        lie=make_lie(options.lie, config) if options.lie else None, watch_every=watch_every, rates=rates,
    )  # fmt: skip
    if watch is not None:
        participant.watch = watch(participant, task)
    snapshots = [state.snapshot(), None if options.snapshot is None else load_snapshot(options.snapshot)]
    newest = max((s for s in snapshots if s is not None), key=lambda s: s.round, default=None)
    if newest is not None:
        participant.begin_at(newest)
    return participant


def _rates(header: Header, config: Config) -> Callable[[int], Callable[[int], float]]:
    """Return the learning rates of a run with so many rounds.

    Only local epochs ask for them; other rounds follow what was decided.
    """
    if header.local_epochs == 1:
        return lambda rounds: lambda t: header.lr

    def rates(rounds: int) -> Callable[[int], float]:
        with doors.closed("ask the federator for a schedule that is built in, or for method.local_epochs = 1"):
            return learning_rate(header.lr, header.lr_schedule, rounds, config.method.lr_options)

    return rates


def own_settings(task: TaskConfig, options: Options) -> TaskConfig:
    """Return the run's task with this participant's own data, and its own copy of the model."""
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
def _copy_asked_for(model: str, options: Options) -> Iterator[None]:
    """Say how to name one's own copy of a model that can't be loaded; the settings are the federator's to change."""
    try:
        yield
    except ModelMissingError as error:
        what = f"--model {model}" if options.model else f"this run's model, which the federator calls {model!r},"
        raise error.by_option(what) from error


def check_run(header: Header, wanted: str) -> None:
    """Refuse a federator that describes another run than was agreed on."""
    found = first_chain(header).hex()
    if not found.startswith(wanted.lower()):
        raise ProtocolError(f"the federator describes run {found[:16]}, not {wanted}: its settings or model are others")


def own_samples(task: Task, config: Config, number: int, *, private: bool) -> tuple[Task, NDArray[np.int64]]:
    """Return the task and which of its samples are this client's.

    All of what is private; of what everybody has its part by the partition. The whole MNIST is never private.
    """
    whole: Callable[[], bool] = getattr(task, "is_whole", lambda: not private)
    if not whole():
        return task, np.arange(len(task.labels))
    task, shares = dealt(task, config)
    return task, shares[number]


def make_lie(name: str, config: Config) -> Lie:
    """Return what a Byzantine client sends instead of its numbers; for tests."""
    if name not in LIES:
        raise ConfigError(f"--lie {name} needs to know what others send, or is unknown; possible are {', '.join(LIES)}")
    attack, seed, f = attacks.make(name), secrets.randbits(64), config.federation

    def lie(row: NDArray[np.float64], round: int) -> NDArray[np.float64]:
        own = row[None]
        known = attacks.Knowledge(honest=own, own=own, byzantine=1, invited=f.invited, tolerated=config.borne,
                                  round=round, seed=seed)  # fmt: skip
        lies: NDArray[np.float64] = attack(known)[0]
        return lies

    return lie


def _mismatch(reason: str) -> str:
    """Say what is wrong if a connection failed for what the other side is; empty if it may yet come about."""
    return next((text for sign, text in _MISMATCHES.items() if sign.lower() in reason.lower()), "")


class _Refused(ProtocolError):
    """The federator does not want us, and trying again would not help."""


class Connection:
    """Keeps a participant connected to its federator until the run has ended, a signal comes, or patience is out."""

    def __init__(self, options: Options, log: Log) -> None:
        self._options, self._log = options, log
        self._stop = asyncio.Event()
        self._channel: Any = None

    async def take_part(self, build: Callable[[Header], Participant]) -> Participant | None:
        """Take part until it ends; returns the participant, None if it was stopped before it had one."""
        on_stop_signals(self._stop.set)
        participant: Participant | None = None
        last_heard, delay = time.monotonic(), _FIRST_DELAY
        try:
            while not self._stop.is_set():
                try:
                    async with self._open_channel() as channel:
                        if participant is None:
                            participant = build(await self._describe(channel))
                            participant.warm_up()  # the first may take longer than a deadline
                        begin = participant.client.next_round, time.monotonic()
                        await self._stream(channel, participant)
                    if participant.ended or self._stop.is_set():
                        break
                    reason = "the stream ended"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                    if participant is None and "Socket closed" in reason:
                        reason = _HANGS_UP
                    if participant is None and (mismatch := _mismatch(reason)):
                        raise _Refused(f"{self._options.address} can't be trusted: {mismatch}") from None
                    if error.code().name in _REFUSALS:
                        raise _Refused(f"{self._options.address} refused: {error.details()}") from None
                if participant is not None and participant.client.next_round > begin[0]:
                    last_heard, delay = time.monotonic(), _FIRST_DELAY
                if time.monotonic() - last_heard > self._options.patience_s:
                    failed = "does not let us in" if reason.startswith("ALREADY_EXISTS") else "can't be reached"
                    raise ProtocolError(f"{self._options.address} {failed}: {reason}")
                self._log("waiting", seconds=round(delay, 1), reason=reason)
                await self._pause(delay)
                delay = min(_LONGEST_DELAY, 2 * delay)
        finally:
            if participant is not None:
                participant.save()
        return participant

    def _open_channel(self) -> Any:
        options = [*LEAN, ("grpc.max_receive_message_length", _LARGEST_MESSAGE), ("grpc.enable_retries", 0),
                   ("grpc.use_local_subchannel_pool", 1)]  # fmt: skip
        address, credentials = self._options.address, self._options.credentials
        if credentials is None:
            refuse_unless_loopback(address)
            return grpc.aio.insecure_channel(address, options)
        secured = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
        return grpc.aio.secure_channel(address, secured, options)

    async def _describe(self, channel: Any) -> Header:
        opening = await channel.unary_unary(f"/{SERVICE}/Describe")(b"", timeout=_DESCRIBE_SECONDS)
        return read_opening(io.BytesIO(opening), self._options.address)[0]

    async def _stream(self, channel: Any, participant: Participant) -> None:
        """Speak with the federator until the stream ends."""
        call = channel.stream_stream(f"/{SERVICE}/Rounds")()
        stopped = asyncio.ensure_future(self._stop.wait())
        stopped.add_done_callback(lambda done: None if done.cancelled() else call.cancel())
        try:
            await call.write(participant.hello())
            while (message := await call.read()) is not grpc.aio.EOF:
                answer = participant.receive(message)
                if answer is not None:
                    await call.write(answer)
                while participant.outbox:
                    await call.write(participant.outbox.pop(0))
                if participant.ended and self._options.follows:
                    await call.done_writing()  # a federator waits for the last evaluation
                if self._stop.is_set():
                    return
        except asyncio.InvalidStateError:
            pass  # the stream ended while we wrote; its status says why
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
            return
        except Cyber0Error:
            call.cancel()
            raise
        finally:
            stopped.cancel()
        if await call.code() is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(),
                                       details=await call.details())  # fmt: skip

    async def _pause(self, seconds: float) -> None:
        """Wait a little, not all clients equally long, or until a signal comes."""
        try:
            async with asyncio.timeout(seconds * random.uniform(0.5, 1.5)):
                await self._stop.wait()
        except TimeoutError:
            pass
