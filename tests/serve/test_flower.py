"""The Flower app, with a grid in memory: both modes end with every node at the bits of the replayed ledger."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from processes import write_digits
from synthetic import OWN_BLOBS, one_thread  # noqa: F401

pytest.importorskip("flwr", reason="needs the extra flower in an environment of its own: see docs/DEPLOY.md")

from cryptography import x509
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from cyber0.errors import ConfigError, LedgerError, ProtocolError
from cyber0.ledger import Ledger
from cyber0.runs.replay import rebuild
from cyber0.serve import flower
from cyber0.serve.identity import Authority

NODES = (1001, 1002, 1003)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the ServerApp's task, as messages want to know who sends them; and look for answers without waiting."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    for name in ("_PULL_SECONDS", "_NODES_SECONDS"):
        monkeypatch.setattr(flower, name, 0.01)


class MemoryGrid(Grid):
    """SuperNodes as threads: each handles one message at a time and keeps its context."""

    def __init__(self, data: Path, nodes: Iterable[int] = NODES) -> None:
        self.contexts = {node: Context(1, node, {"cyber0.data": str(data)}, RecordDict(), {}) for node in nodes}
        self.sent: list[Message] = []
        self.before: Callable[[Message], None] = lambda message: None
        self.last: Callable[[Message], bool] = lambda reply: False
        """After which reply the SuperLink can't be reached any more."""
        self.gone = False
        self._locks = {node: threading.Lock() for node in self.contexts}
        self._replies: dict[str, Message] = {}
        self._threads: list[threading.Thread] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        if self.gone:
            raise ConnectionError("the SuperLink is gone")
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            name = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            self._threads.append(threading.Thread(target=self._handle, args=[name, message]))
            self._threads[-1].start()
            ids.append(name)
        return ids

    def _handle(self, name: str, message: Message) -> None:
        node = message.metadata.dst_node_id
        with self._locks[node]:
            try:
                self.before(message)
                self._replies[name] = flower.client_app(_carried(message), self.contexts[node])
            except Exception as error:
                self._replies[name] = Message(Error(0, repr(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self._replies.pop(name) for name in message_ids if name in self._replies]
        self.gone = any(map(self.last, found))
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def _carried(message: Message) -> Message:
    """Return the message with its content as it comes out of the network."""
    record = ConfigRecord.inflate(message.content.config_records[flower.RECORD].deflate())
    message.content = RecordDict({flower.RECORD: record})
    return message


def settings(out: Path, mode: str, rounds: int = 6, **more: Any) -> dict[str, Any]:
    return {
        "flower.mode": mode, "flower.out": str(out), "rounds": rounds, "federation.clients": 3,
        "federation.byzantine": 0, "method.k": 4, "method.lr": 0.001, "serve.quorum": 3, "serve.digest_every": 2,
        "serve.seed_mode": "chained", "serve.codec": "bfloat16", "flower.patience_s": 120.0,
        **more,
    }  # fmt: skip


def federate(grid: MemoryGrid, run_config: dict[str, Any]) -> None:
    try:
        flower.server_app(grid, Context(1, 1, {}, RecordDict(), run_config))
    finally:
        grid.join()


def stated(grid: MemoryGrid, capsys: pytest.CaptureFixture[str]) -> set[str]:
    said = capsys.readouterr().err
    return {line.partition("digest=")[2] for line in said.splitlines() if " holds client=" in line}


@pytest.mark.parametrize(("mode", "more"), [("stream", {}), ("message", {"method.local_epochs": 3})])
def test_every_node_ends_at_the_bits_of_the_replayed_ledger(
    mode: str, more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, out = MemoryGrid(write_digits(tmp_path / "data")), tmp_path / "run"
    federate(grid, settings(out, mode, **more))
    ledger, parameters = rebuild(out)
    assert len(ledger) == 6 and all(record.reported.all() for record in ledger)
    assert stated(grid, capsys) == {parameters.digest()}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["chain"] == ledger.chain.hex() and summary["uplink_bytes_per_client"] > 0
    assert ("wire_uplink_bytes_per_client" in summary) == (mode == "stream")  # Flower does not say what it sends
    if mode == "stream":
        assert len(grid.sent) == len(NODES)  # one message a node, whatever the rounds

    with pytest.raises(ConfigError, match=r"flower\.resume=true"):
        federate(grid, settings(out, mode, **more))
    with pytest.raises(LedgerError, match="other settings than the run config"):
        federate(grid, settings(out, mode, **more, **{"flower.resume": True, "method.mu": 0.5}))


@pytest.mark.parametrize("mode", ["stream", "message"])
def test_nodes_that_name_their_copy_of_ones_own_task_end_at_the_bits_of_the_replayed_ledger(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, out = MemoryGrid(tmp_path / "nothing"), tmp_path / "run"
    own = {"task.name": OWN_BLOBS, "task.options.kind": "mlp"}
    for context in grid.contexts.values():
        context.node_config = {"cyber0.task": f"{tmp_path / 'copy.py'}:OwnBlobs"}
    shutil.copy(Path(OWN_BLOBS.rpartition(":")[0]), tmp_path / "copy.py")
    federate(grid, settings(out, mode, **own))
    ledger, parameters = rebuild(out, task=OWN_BLOBS)
    assert ledger.header.config["task"]["name"] == "synthetic.py:OwnBlobs" and parameters.dimension > 100
    assert len(ledger) == 6 and all(record.reported.all() for record in ledger)
    assert stated(grid, capsys) == {parameters.digest()}


def test_a_node_that_names_no_copy_of_the_task_imports_nothing_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = MemoryGrid(tmp_path, nodes=[1001])
    grid.contexts[1001].node_config = {}
    more = {"task.name": OWN_BLOBS, "federation.clients": 1, "serve.quorum": 1, "flower.patience_s": 2.0}
    with pytest.raises(ProtocolError, match="no round for 2 s"):
        federate(grid, settings(tmp_path / "run", "message", **more))
    assert "the run's task is synthetic.py:OwnBlobs" in capsys.readouterr().err


def test_a_certificate_is_made_for_one_run_and_one_node(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "data")
    seen: dict[int, list[dict[str, Any]]] = {node: [] for node in NODES}
    for name in ("first", "second"):
        grid = MemoryGrid(data)
        grid.before = lambda message: seen[message.metadata.dst_node_id].append(
            dict(message.content.config_records[flower.RECORD])
        )
        federate(grid, settings(tmp_path / name, "stream", rounds=2))
    for node, (first, second) in seen.items():
        assert first["authority"] != second["authority"] and first["key"] != second["key"]
        certificate = x509.load_pem_x509_certificate(first["certificate"])
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        assert uris == [f"urn:cyber0:client:{first['client']}", f"urn:flower:node:{node}"]
        assert Authority(first["authority"]).identity_of(first["certificate"]).client == first["client"]
    assert {first["client"] for first, _ in seen.values()} == {0, 1, 2}


def test_a_node_whose_app_crashes_is_invited_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "_FAILED_SECONDS", 0.01)
    grid, out = MemoryGrid(write_digits(tmp_path / "data")), tmp_path / "run"
    crashes = iter([True])

    def crash(message: Message) -> None:
        if next(crashes, False):
            raise RuntimeError("out of memory")

    grid.before = crash
    federate(grid, settings(out, "stream"))
    assert len(grid.sent) == len(NODES) + 1 and len(Ledger.open(out / "ledger.bin")) == 6


def test_a_run_by_messages_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, out = MemoryGrid(write_digits(tmp_path / "data")), tmp_path / "run"
    grid.last = lambda reply: len(Ledger.open(out / "ledger.bin")) == 3
    with pytest.raises(ConnectionError):
        federate(grid, settings(out, "message"))
    assert len(Ledger.open(out / "ledger.bin")) in (3, 4)  # the last answer may have made the fourth
    grid.gone, grid.last = False, lambda reply: False
    grid.contexts[1002].state.clear()
    federate(grid, settings(out, "message", **{"flower.resume": True}))
    ledger, parameters = rebuild(out)
    assert len(ledger) == 6 and stated(grid, capsys) == {parameters.digest()}


def test_a_node_accepts_no_run_but_the_one_its_owner_has_pinned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = MemoryGrid(write_digits(tmp_path / "data"))
    grid.contexts[1002].node_config["cyber0.run"] = "00112233"
    grid.last = Message.has_error
    with pytest.raises(ConnectionError):
        federate(grid, settings(tmp_path / "run", "message"))
    assert len(Ledger.open(tmp_path / "run" / "ledger.bin")) == 0
    assert "client=1 reason=ProtocolError('the federator describes run" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["stream", "message"])
def test_a_run_that_nobody_joins_gives_up_and_says_so(mode: str, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match=r"no round for 0\.1 s .*: 0 nodes are there, and a decision needs 3"):
        federate(MemoryGrid(tmp_path, nodes=()), settings(tmp_path / "run", mode, **{"flower.patience_s": 0.1}))
