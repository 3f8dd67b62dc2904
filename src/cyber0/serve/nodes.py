"""The settings of a Flower app and of its nodes, and which node is which client. Does not import Flower.

The run's settings are Flower's run config: keys that begin with `flower.` are those of `AppSettings`, all others are
cyber0's own (`rounds`, `method.k`, ...). A node's are the keys of its node config that begin with `cyber0.`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from cyber0.config.files import located
from cyber0.config.schema import Config
from cyber0.config.suggestions import suggestion
from cyber0.errors import ConfigError, LedgerError
from cyber0.serve.addresses import LAST_PORT, is_address
from cyber0.serve.operations import EventLog
from cyber0.storage import write_text

MODES = ("auto", "stream", "message")
NODES = "nodes.json"
APP, NODE = "flower.", "cyber0."


@dataclass(frozen=True)
class _Settings:
    """Settings with plain values, each checked against the type of its default."""

    @classmethod
    def read(cls, prefix: str, values: Mapping[str, Any]) -> Self:
        """Take the values whose names begin with the prefix."""
        mine = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        known = {f.name: f.default for f in fields(cls)}
        for name, value in mine.items():
            if name not in known:
                remedy = suggestion(name, known, prefix)
                raise ConfigError(f"unknown key {prefix + name!r} (= {value!r}); {remedy}")
            wanted = type(known[name])
            if not (type(value) is wanted or (wanted is float and type(value) is int)):
                raise ConfigError(f"{prefix}{name} = {value!r} must be of type {wanted.__name__}")
        return cls(**mine)


@dataclass(frozen=True)
class AppSettings(_Settings):
    """How the app runs, on the SuperLink's side."""

    mode: str = "auto"
    """"stream": the rounds go over gRPC, beside Flower; "message": a Flower message per round; "auto": messages in
    Flower's simulation, which may run one node at a time, and the stream otherwise."""
    out: str = "runs/flower"
    """The run's folder."""
    resume: bool = False
    """Continue the ledger in `out`, if there is one."""
    listen: str = "127.0.0.1:0"
    """stream: where the hub listens."""
    address: str = ""
    """stream: HOST:PORT under which nodes reach the hub; empty: as in `listen`."""
    metrics_port: int = 0
    """stream: answer /metrics and /health on this loopback port; 0: no."""
    patience_s: float = 600.0
    """Give up after so long without a round."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"flower.mode = {self.mode!r} must be one of {', '.join(MODES)}")
        if not self.out:
            raise ConfigError("flower.out must name a folder on the SuperLink's machine")
        if self.patience_s <= 0:
            raise ConfigError(f"flower.patience_s = {self.patience_s!r} must be above 0")
        if not 0 <= self.metrics_port <= LAST_PORT:
            raise ConfigError(f"flower.metrics_port = {self.metrics_port} must be 0 to {LAST_PORT}")
        for name in ("listen", "address"):
            value = getattr(self, name)
            if (value or name == "listen") and not is_address(value):
                raise ConfigError(f"flower.{name} = {value!r} must be HOST:PORT")
        if self.mode != "message" and not self.address and self.host in ("0.0.0.0", "[::]", "::"):
            raise ConfigError(
                f"flower.listen = {self.listen!r} is not an address that nodes can reach: name one by flower.address"
            )

    @property
    def host(self) -> str:
        """The name or address by which nodes know the hub; its certificate is made for it."""
        return (self.address or self.listen).rpartition(":")[0]

    def reached_at(self, port: int) -> str:
        """Return HOST:PORT for the nodes, given the port that is listened on."""
        return self.address or f"{self.host}:{port}"


@dataclass(frozen=True)
class NodeSettings(_Settings):
    """How a node takes part; only the node's owner sets these."""

    data: str = ""
    """Folder with the node's own samples."""
    model: str = ""
    """The node's own copy of the run's language model; empty: where the run config says."""
    task: str = ""
    """Where the run's task is on this node, if it is not built in: file.py:Name."""
    weights: str = ""
    """The safetensors file with the weights that the run starts from, if they are not the task's own."""
    state: str = ""
    """Folder for what is stored between starts; empty: what Flower stores for the node."""
    device: str = "cpu"
    run: str = ""
    """Take part in this run alone; the first digits of its ID are enough."""
    schedule: str = ""
    """Where the run's schedule is on this node, if it is not built in: file.py:name."""
    stalled_rounds: int = 4
    """How many rounds are answered while the weights stay where they are."""
    max_scalars: int = 65_536
    """Refuse a run with more scalars a round."""

    def __post_init__(self) -> None:
        if self.stalled_rounds < 1:
            raise ConfigError(f"cyber0.stalled_rounds = {self.stalled_rounds} must be at least 1")


def read_run_config(values: Mapping[str, Any]) -> tuple[AppSettings, Config]:
    """Return the app's settings and the run's; Flower flattens tables: task.options.width is in two of them."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith(APP):
            continue
        *sections, key = name.split(".")
        target = tables
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{name} = {value!r} can't be set where {section} = {target!r}; remove one of them")
        target[key] = value
    config = Config.from_dict(tables)
    if config.aggregation.reference:
        raise ConfigError(
            f"aggregation.reference = {config.aggregation.reference} trusts client 0, and on Flower any node may be "
            "client 0; use `cyber0 serve`, where a certificate says who it is, or another rule"
        )
    return AppSettings.read(APP, values), located(config)


class Roster:
    """Which node is which client: a node gets its number once and keeps it, also in a resumed run."""

    def __init__(self, path: Path, clients: int, log: EventLog) -> None:
        self._path, self._clients, self._log = path, clients, log
        self._turned_away: set[int] = set()
        self._client_of = _read_clients(path, clients) if path.exists() else {}

    def admit(self, nodes: Iterable[int]) -> dict[int, int]:
        """Give new nodes the numbers that are free, and return the client of each node that is online."""
        here = sorted(nodes)
        new = [node for node in here if node not in self._client_of]
        free = sorted(set(range(self._clients)) - set(self._client_of.values()))
        for node, client in zip(new, free, strict=False):
            self._client_of[node] = client
            self._log("admitted", node=node, client=client)
        if new and free:
            self._write()
        for node in new[len(free) :]:
            if node not in self._turned_away:
                self._turned_away.add(node)
                self._log("turned_away", node=node, text=f"all {self._clients} clients are other nodes")
        return {node: self._client_of[node] for node in here if node in self._client_of}

    def _write(self) -> None:
        write_text(self._path, json.dumps(self._client_of, indent=1) + "\n", durable=False)


def _read_clients(path: Path, clients: int) -> dict[int, int]:
    try:
        client_of = {int(node): int(client) for node, client in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise LedgerError(f"{path} can't be read ({error}): it must map node ids to client numbers") from None
    given = set(client_of.values())
    if len(given) != len(client_of) or not all(0 <= client < clients for client in given):
        raise LedgerError(f"{path} must give every node a number of its own, 0 to {clients - 1}")
    return client_of
