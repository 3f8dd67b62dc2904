"""The test vectors of docs/FORMAT.md: which cases there are, and what the library makes of them.

`python tests/format_vectors.py` writes docs/format_vectors.json. A case is a dictionary: section, inputs, `expect`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cyber0 import aggregate, optimizers
from cyber0.config.tolerance import share_of
from cyber0.directions import (
    Directions,
    DirectionSpace,
    Probe,
    Step,
    definition,
    engine,
    permutation,
    philox4x32,
    reference,
    words,
)
from cyber0.directions.steps import coefficients
from cyber0.errors import LedgerError
from cyber0.estimate.batches import Batch, Samples
from cyber0.estimate.evaluator import Evaluator
from cyber0.federation.population import byzantine_clients
from cyber0.ledger import (
    Header,
    LayoutEntry,
    Ledger,
    Record,
    Reports,
    first_chain,
    next_chain,
    opening_of,
    read_records,
)
from cyber0.ledger.format1 import RecordFormat1
from cyber0.ledger.opening import read_opening
from cyber0.ledger.rates import AgreedRates
from cyber0.ledger.record import RecordFormat
from cyber0.model.vector import Parameters
from cyber0.protocol import codec as codecs
from cyber0.protocol import messages as protocol
from cyber0.protocol.client import Client, replay
from cyber0.protocol.decider import invited_clients
from cyber0.protocol.federator import Federator
from cyber0.protocol.messages import Announcement
from cyber0.tasks import partition

FILE = Path(__file__).parents[1] / "docs" / "format_vectors.json"

Case = dict[str, Any]

TOP = 2**64 - 1
SOME = 0x0123456789ABCDEF
NUMPY = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.uint16}
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# Hexadecimal patterns.


def hex32(values: Any) -> list[str]:
    array = np.ascontiguousarray(values)
    return [f"{int(v):08x}" for v in array.view(np.uint32).reshape(-1)]


def hex16(values: Any) -> list[str]:
    return [f"{int(v):04x}" for v in np.asarray(values, np.uint16).reshape(-1)]


def hex64(values: Any) -> list[str]:
    return [f"{int(v):016x}" for v in np.asarray(values, np.float64).view(np.uint64).reshape(-1)]


def doubles(patterns: list[str]) -> np.ndarray:
    return np.array([int(p, 16) for p in patterns], np.uint64).view(np.float64)


def stored_hex(values: Any, storage: str) -> list[str]:
    return hex32(values) if storage == "float32" else hex16(values)


def floats(patterns: list[str]) -> np.ndarray:
    return np.array([int(p, 16) for p in patterns], np.uint32).view(np.float32)


def stored(patterns: list[str], storage: str) -> np.ndarray:
    return floats(patterns) if storage == "float32" else np.array([int(p, 16) for p in patterns], np.uint16)


def as_tensor(patterns: list[str], storage: str) -> torch.Tensor:
    return torch.from_numpy(stored(patterns, storage).copy()).view(TORCH[storage])


def tensor_hex(t: torch.Tensor) -> list[str]:
    flat = t.detach().reshape(-1)
    return hex32(flat.numpy()) if t.dtype == torch.float32 else hex16(flat.view(torch.uint16).numpy())


# What the library makes of a case, by section.


def _place(case: Case) -> tuple[int, int, int]:
    return int(case["key"], 16), case["round"], case["index"]


def _philox(case: Case) -> Any:
    counter, key = ([int(w, 16) for w in case[name]] for name in ("counter", "key"))
    return hex32(philox4x32(counter, key))


def _words(case: Case) -> Any:
    key, round, index = _place(case)
    return hex32(words(key, case["stream"], round, index, case["start"], case["count"]))


def _permutation(case: Case) -> Any:
    key, round, index = _place(case)
    return permutation(key, case["stream"], round, index, case["n"]).tolist()


def _round_key(case: Case) -> Any:
    header = some_header(seed=int(case["seed"], 16), seed_mode=case["seed_mode"])
    return f"{header.round_key(bytes.fromhex(case['chain_hex'])):016x}"


def _space(case: Case) -> DirectionSpace:
    if case["distribution"] == "low_rank":
        return DirectionSpace.of("low_rank", case["shapes"], case["rank"])
    return DirectionSpace(case["distribution"], case.get("dimension", 1))


def _direction(case: Case) -> Any:
    key, round, index = _place(case)
    dimension = case.get("dimension")
    space = _space(case)
    z = reference(
        key, round, index, case["start"], case["count"], case["distribution"], dimension=dimension, layout=space.layout
    )
    out = torch.empty(case["count"])
    engine.fill(out, case["start"], key, round, index, space)
    assert hex32(out.numpy()) == hex32(z)
    return hex32(z)


def _sphere_scale(case: Case) -> Any:
    key, round, index = _place(case)
    units = definition.squared_norm_units(reference(key, round, index, 0, case["dimension"], "gaussian"))
    return {"sum": units, "s": hex32(definition.sphere_scale(key, round, index, case["dimension"]))[0]}


def _digest(case: Case) -> Any:
    parameters = Parameters(model_of(case["layout"]))
    load(parameters, case["layout"], case["weights"])
    return parameters.digest()


def _rest_digest(case: Case) -> Any:
    model = nn.Linear(1, 1)
    for name, shape, dtype, patterns in case["tensors"]:
        data = b"".join(int(p, 16).to_bytes(len(p) // 2, "little") for p in patterns)
        model.register_buffer(name, torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape))
    return Parameters(model).rest_digest()


def _nearest(case: Case) -> Any:
    return stored_hex(definition.narrow(floats(case["x"]), case["storage"]), case["storage"])


def _stochastic(case: Case) -> Any:
    w = np.array([int(p, 16) for p in case["words"]], np.uint32)
    found = definition.narrow_stochastically(floats(case["x"]), case["storage"], w, case.get("bits", 32))
    return stored_hex(found, case["storage"])


def _coefficients(case: Case) -> Any:
    c = definition.coefficients_for(case["lr"], floats(case["g"]), case["k"])
    assert hex32(coefficients(case["lr"], floats(case["g"]), case["k"])) == hex32(c)
    return hex32(c)


def _commit(case: Case) -> Any:
    steps = [
        Step(int(s["key"], 16), s["round"], floats(s["c"]), s["first"], s["rounding_index"], bits=case.get("bits", 32))
        for s in case["steps"]
    ]
    return _applied(case, steps, None)


def _optimizer(case: Case) -> Any:
    """Commit the rounds of a case one after the other, as a client does."""
    layout = [{"name": "w", "shape": [len(case["w"])], "dtype": case["storage"], "offset": 0}]
    parameters = Parameters(model_of(layout), case["distribution"])
    load(parameters, layout, [case["w"]])
    optimizer = optimizers.make(case["name"], case["options"])
    parameters.hold_vectors(optimizer.vectors)
    state, found = optimizer.start(), []
    for one in case["rounds"]:
        update = optimizer.step(state, one["lr"], floats(one["g"]), case["k"])
        state = update.state
        step = Step(int(one["key"], 16), one["round"], update.coefficients, elementwise=update.elementwise)
        parameters.commit(step)
        found.append({
            "c": hex32(update.coefficients), "w": tensor_hex(parameters.tensors[0]), "state": hex64(state),
            "vectors": [hex32(v.numpy()) for v in parameters.moments.vectors.values()],
            "digest": optimizers.state_digest(parameters.digest(), state, parameters.vectors_digest()),
        })  # fmt: skip
    return found


def _probe(case: Case) -> Any:
    key, round, index = _place(case)
    return _applied(case, [], Probe(key, round, index, case["c"]))


def _applied(case: Case, steps: list[Step], probe: Probe | None) -> list[str]:
    storage, start, space = case["storage"], case["start"], _space(case)
    w = stored(case["w"], storage)
    defined = definition.apply(w, storage, start, steps, probe, space)
    source = as_tensor(case["w"], storage)
    engine.apply(source, source, start, steps, probe, space)
    assert tensor_hex(source) == stored_hex(defined, storage)
    return stored_hex(defined, storage)


class _Estimates:
    """Stands in for an evaluator: gives the estimates of a case, and keeps the weights that it was asked at."""

    def __init__(self, parameters: Parameters, rows: list[np.ndarray]) -> None:
        self._parameters, self._rows = parameters, rows
        self.seen: list[list[str]] = []

    def estimate(self, batch: Batch, directions: Directions, steps: Any = ()) -> np.ndarray:
        self.seen.append(tensor_hex(self._parameters.tensors[0]))
        return self._rows[len(self.seen) - 1][None]


def _local_steps(case: Case) -> Any:
    rows = [doubles(g) for g in case["estimates"]]
    layout = [{"name": "w", "shape": [len(case["w"])], "dtype": case["storage"], "offset": 0}]
    parameters = Parameters(model_of(layout), case["distribution"])
    load(parameters, layout, [case["w"]])
    header = some_header(
        seed=int(case["key"], 16), layout=tuple(LayoutEntry(**e) for e in layout),
        distribution=case["distribution"], k=len(rows[0]), local_epochs=len(rows),
    )  # fmt: skip
    estimates = _Estimates(parameters, rows)
    samples = Samples(torch.zeros(1), torch.zeros(1), [np.arange(1)], 1, 0)
    client = Client(header, parameters, samples, estimates, lambda t: case["lr"], checked=True)  # type: ignore[arg-type]
    client._warned, client.next_round = True, case["round"]
    client.measure(Announcement(case["round"], np.zeros(1, np.int64)), [0])
    assert tensor_hex(parameters.tensors[0]) == case["w"]
    return estimates.seen[1:]


def _projection(case: Case) -> Any:
    parameters = Parameters(model_of(case["layout"]))
    load(parameters, case["layout"], [w * case.get("repeat", 1) for w in case["weights"]])
    parameters.project(case["radius"])
    return [tensor_hex(t)[: len(w)] for t, w in zip(parameters.tensors, case["weights"], strict=True)]


def _codec(case: Case) -> Any:
    codec = codecs.make(case["codec"])
    data = codec.encode(floats(case["values"]))
    return {"bytes_hex": data.hex(), "decoded": hex32(codec.decode(data))}


class _FirstWeight(nn.Module):
    """Gives every sample, a number, times the first weight."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w[0]


class _OutputIsLoss:
    def outputs(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs)

    def losses(self, outputs: Any, targets: Any) -> torch.Tensor:
        return outputs  # type: ignore[no-any-return]


def _estimate(case: Case) -> Any:
    parameters = Parameters(_FirstWeight(as_tensor(case["w"], "float32").clone()), case["distribution"])
    evaluator = Evaluator(parameters, _OutputIsLoss(), case["estimator"], case["mu"])
    samples = torch.tensor(case["samples"], dtype=torch.float32)
    batch = Batch(samples, torch.zeros(len(samples)), np.array([len(samples)]))
    row = evaluator.estimate(batch, Directions(int(case["key"], 16), case["round"], case["count"], case["first"]))[0]
    return hex32(row.astype(np.float32))


def _share(case: Case) -> Any:
    return share_of(case["fraction"], case["count"])


def _invited(case: Case) -> Any:
    return invited_clients(int(case["seed"], 16), case["round"], case["clients"], case["participation"]).tolist()


def _byzantine(case: Case) -> Any:
    return np.flatnonzero(byzantine_clients(int(case["seed"], 16), case["clients"], case["byzantine"])).tolist()


def _federator(
    rule: aggregate.Rule, invited: int, quorum: int, n: int = 1, codec: str = "float32", limit: float = math.inf
) -> Federator:
    header = some_header(clients=invited, k=n, codec=codec)
    return Federator(Ledger.create(None, header), rule, invited, lr_at=lambda t: 0.1, quorum=quorum, limit=limit)


def _rate(case: Case) -> Any:
    """The rate is accepted as it is, and not if it is larger by a millionth of the header's."""
    header = some_header(lr=case["lr"], lr_schedule=case["schedule"], settings={"rounds": 9})
    nobody = np.zeros(header.clients, np.int64)
    (lr,) = hex64([AgreedRates(header).of_run(case["rounds"])(case["round"])])
    for more, valid in ((0.0, True), (1e-6 * case["lr"], False)):
        stated = float(doubles([lr])[0]) + more
        record = Record(case["round"], stated, None, nobody.astype(np.bool_), nobody, rounds=case["rounds"])
        assert (AgreedRates(header).fault(record) == "") == valid
    return lr


def _needed(case: Case) -> Any:
    rule = aggregate.make(case["rule"], case["beta"], before=case["before"])
    federator = _federator(rule, case["invited"], case["quorum"])
    return {"b": federator.tolerated, "reports": federator.required}


def _decision(case: Case) -> Any:
    codec = codecs.make(case["codec"])
    reports = case["reports"]
    n = len(next(row for row in reports if row is not None))
    rule = aggregate.make(case["rule"], case["beta"])
    federator = _federator(rule, len(reports), case["quorum"], n, case["codec"], case.get("limit", math.inf))
    for t in range(case["round"]):
        nobody = np.zeros(len(reports), np.int64)
        federator.ledger.append(Record(t, 0.1, None, nobody.astype(np.bool_), nobody))
    federator.open_round()
    for client, row in enumerate(reports):
        if row is not None:
            values = codec.decode(codec.encode(floats(row)))
            federator.receive(protocol.Report(client, case["round"], values))
    federator.decide(deadline=True)
    record = federator.ledger.last
    assert record is not None
    return {
        "values": None if record.values is None else hex32(record.values),
        "reported": record.reported.tolist(), "trimmed": record.trimmed.tolist(),
    }  # fmt: skip


def _trimmed_mean(case: Case) -> Any:
    rule = aggregate.trimmed_mean(case["beta"])
    outcome = rule.decide(rows_of(case), case["invited"], case["round"])
    if "repeat" not in case:
        return {"values": hex64(outcome.values), "trimmed": outcome.excluded.tolist()}
    sha = hashlib.sha256(outcome.values.astype("<f8").tobytes()).hexdigest()
    return {"values_sha256": sha, "values": hex64(outcome.values[:2]), "trimmed": outcome.excluded.tolist()}


def rows_of(case: Case) -> np.ndarray:
    """The matrix of a case, all its columns repeated side by side where the case says so."""
    return np.tile(few_columns(case), (1, case.get("repeat", 1)))


def few_columns(case: Case) -> np.ndarray:
    """Patterns, or, where there are too many, numbers chosen from a list by random words, or Gaussian coordinates.

    Gaussian row i is the beginning of direction i times 2^(7 i mod 61 - 30): in float64 the order of their sum matters.
    """
    if "rows" in case:
        return np.stack([floats(row) for row in case["rows"]])
    if "chosen_rows" in case:
        g = case["chosen_rows"]
        among = floats(g["among"])
        drawn = [words(int(g["key"], 16), 7, g["round"], i, 0, g["columns"]) for i in range(g["count"])]
        return np.stack([among[w % len(among)] for w in drawn])
    g = case["gaussian_rows"]
    key, columns = int(g["key"], 16), g["columns"]
    rows = [reference(key, g["round"], i, 0, columns, "gaussian") for i in range(g["count"])]
    return np.stack([row * np.float32(2.0 ** (7 * i % 61 - 30)) for i, row in enumerate(rows)])


def _batch(case: Case) -> Any:
    client, size = case["client"], case["samples"]
    shares = [np.arange(1)] * client + [np.arange(size)]
    samples = Samples(torch.zeros(size), torch.zeros(size), shares, case["batch_size"], int(case["seed"], 16))
    drawn, _ = samples.drawn(np.array([client]), case["round"], case["epoch"])
    return drawn.tolist()


def _partition(case: Case) -> Any:
    deal = partition.make(case["partition"])
    return [part.tolist() for part in deal(np.array(case["labels"]), case["clients"], int(case["seed"], 16))]


def _ledger(case: Case) -> Any:
    header = header_of(case["header"])
    ledger = Ledger.create(None, header)
    parameters = Parameters(model_of(case["header"]["layout"]), header.distribution, rank=header.rank)
    # The digest of w0 is in the header already; what the library makes of the model must agree with it.
    load(parameters, case["header"]["layout"], case["w0"])
    assert parameters.digest() == header.weights_digest
    data, chains, keys, digests = opening_of(header), [ledger.chain.hex()], [], []
    codec = RecordFormat1(header) if header.format == 1 else RecordFormat(header)
    for record in map(record_of, case["records"]):
        keys.append(f"{header.round_key(ledger.chain):016x}")
        data += codec.encode(record, ledger.chain)
        before = ledger.chain
        appended = ledger.append(record)
        assert header.format == 1 or next_chain(before, appended) == ledger.chain
        chains.append(ledger.chain.hex())
        load(parameters, case["header"]["layout"], case["w0"])
        replay(header, parameters, ledger)
        digests.append(parameters.digest())
    assert bytes.fromhex(chains[0]) == first_chain(header)
    return {
        "file_hex": data.hex(), "chains": chains, "keys": keys, "digests": digests,
        "weights": [tensor_hex(t) for t in parameters.tensors],
    }  # fmt: skip


def _reports(case: Case) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        reports = Reports(Path(folder) / "reports.bin", case["numbers"], rounds=0)
        for entry in case["entries"]:
            rows = [floats(row) for row in entry["rows"]]
            reports.append(entry["round"], np.array(rows, np.float32).reshape(len(rows), case["numbers"]))
        reports.close()
        return (Path(folder) / "reports.bin").read_bytes().hex()


def changed_file(case: Case, change: Case) -> bytes:
    """The file of a case with one change made to it: bytes replaced, then cut off, then added to."""
    data = bytearray.fromhex(case["file_hex"])
    for place, new in change.get("replace", []):
        data[place : place + len(new) // 2] = bytes.fromhex(new)
    return bytes(data[: change.get("keep", len(data))]) + bytes.fromhex(change.get("append_hex", ""))


def changed_opening(case: Case, change: Case) -> bytes:
    """The opening of a case with another JSON or format byte, sealed anew, and then changed like any file."""
    data = bytes.fromhex(case["file_hex"])
    text = data[12:-4].decode()
    for old, new in change.get("json", []):
        assert old in text
        text = text.replace(old, new, 1)
    body = data[:7] + bytes([change.get("byte_7", data[7])]) + struct.pack("<I", len(text.encode())) + text.encode()
    return changed_file({"file_hex": sealed_hex(body)}, change)


def _headers(case: Case) -> Any:
    found: list[Any] = []
    for change in case["changes"]:
        data = changed_opening(case, change)
        try:
            header, opening = read_opening(io.BytesIO(data), "a case")
            assert opening == data and opening_of(header) == data
            found.append(first_chain(header).hex())
        except LedgerError:
            found.append(None)
    return found


def _ledger_tails(case: Case) -> Any:
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, change in enumerate(case["changes"]):
            path = Path(folder) / f"{number}.bin"
            path.write_bytes(changed_file(case, change))
            try:
                with Ledger.open(path) as ledger:
                    found.append({"records": len(ledger), "ignored": ledger.torn_bytes})
            except LedgerError:
                found.append(None)
    return found


def _reports_tails(case: Case) -> Any:
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, change in enumerate(case["changes"]):
            path = Path(folder) / f"{number}.bin"
            path.write_bytes(changed_file(case, change))
            try:
                found.append([number for number, _ in Reports(path, case["numbers"])])
            except LedgerError:
                found.append(None)
    return found


def _records_message(case: Case) -> str:
    data = bytes.fromhex(case["file_hex"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.bin"
        path.write_bytes(data)
        with Ledger.open(path) as ledger:
            sent, count = ledger.chunk(case["first"], len(data))
            read = read_records(ledger.header, sent, case["first"], ledger.chain_at(case["first"]))
            assert len(read) == count and read[-1].chain == ledger.chain
    return (bytes([protocol.RECORDS]) + sent).hex()


def _message(case: Case) -> Any:
    if case["kind"] == "records":
        return _records_message(case)
    codec = codecs.make(case.get("codec", "float32"))
    kind, chain = case["kind"], bytes.fromhex(case.get("chain_hex", ""))
    if kind == "hello":
        digests = (bytes.fromhex(case[name]) for name in ("run", "weights_digest", "rest_digest"))
        return protocol.encode_hello(protocol.Hello(case["role"], case["client"], *digests, case["round"], chain)).hex()
    if kind == "report":
        digest = bytes.fromhex(case["digest_hex"])
        return protocol.encode_report(protocol.Report(0, case["round"], floats(case["values"]), digest), codec).hex()
    if kind == "decision":
        values = None if case["values"] is None else floats(case["values"])
        details = bytes.fromhex(case["details_hex"])
        decision = protocol.Decision(case["round"], case["lr"], values, details, case["rounds"])
        return protocol.encode_decision(decision, codec).hex()
    if kind == "evaluation":
        found = protocol.EvaluationMessage(case["round"], case["accuracy"], case["loss"], dict(case["metrics"]))
        return protocol.encode_evaluation(found).hex()
    if kind == "opened":
        return protocol.encode_opened(protocol.Opened(case["round"], chain, case["rounds"])).hex()
    return protocol.encode_bare({"replay": protocol.REPLAY, "ended": protocol.ENDED}[kind]).hex()


SECTIONS: dict[str, Callable[[Case], Any]] = {
    "philox": _philox, "words": _words, "permutation": _permutation, "round_key": _round_key, "direction": _direction,
    "sphere_scale": _sphere_scale, "digest": _digest, "rest_digest": _rest_digest, "nearest": _nearest,
    "stochastic": _stochastic, "coefficients": _coefficients, "commit": _commit, "optimizer": _optimizer,
    "local_steps": _local_steps,
    "probe": _probe, "projection": _projection, "estimate": _estimate, "codec": _codec, "share": _share,
    "invited": _invited, "needed": _needed, "trimmed_mean": _trimmed_mean, "decision": _decision, "batch": _batch,
    "rate": _rate,
    "partition": _partition, "byzantine": _byzantine, "ledger": _ledger, "headers": _headers,
    "ledger_tails": _ledger_tails, "reports": _reports, "reports_tails": _reports_tails, "message": _message,
}  # fmt: skip


def by_library(case: Case) -> Any:
    """Return what the library makes of a case."""
    return SECTIONS[case["section"]](case)


# Models and ledgers.


def model_of(layout: list[Case]) -> nn.Module:
    model = nn.Module()
    for entry in layout:
        zeros = torch.zeros(entry["shape"], dtype=TORCH[entry["dtype"]])
        model.register_parameter(entry["name"], nn.Parameter(zeros))
    return model


def load(parameters: Parameters, layout: list[Case], weights: list[list[str]]) -> None:
    parameters.load(
        {e["name"]: as_tensor(w, e["dtype"]).view(e["shape"]) for e, w in zip(layout, weights, strict=True)}
    )


def header_of(fields: Case) -> Header:
    text = json.dumps({**fields, "seed": int(fields["seed"], 16)}).encode()
    return Header.from_json(text, fields.get("format", 1))


def record_of(fields: Case) -> Record:
    values = None if fields["values"] is None else floats(fields["values"])
    return Record(fields["round"], fields["lr"], values, np.array(fields["reported"], np.bool_),
                  np.array(fields["trimmed"], np.int64), rounds=fields.get("rounds", 0))  # fmt: skip


def some_header(**changes: Any) -> Header:
    fields: dict[str, Any] = {
        "seed": 0, "layout": (LayoutEntry("w", (1,), "float32", 0),), "distribution": "gaussian", "k": 1,
        "local_epochs": 1, "mu": 1e-3, "estimator": "two_point", "lr": 0.1, "lr_schedule": "constant",
        "projection_radius": None, "weights_digest": "0" * 64, "rest_digest": "0" * 64, "clients": 1,
    }  # fmt: skip
    return Header(**{**fields, **changes})


# The cases.


class Draws:
    """Inputs that are the same on every machine and with every numpy."""

    def __init__(self, seed: int) -> None:
        self._seed, self._place = seed, 0

    def _words(self, count: int) -> np.ndarray:
        self._place += count
        return words(self._seed, 7, 0, 0, self._place - count, count)

    def normal(self, count: int) -> np.ndarray:
        return definition.gaussian_from_words(self._words(count)).astype(np.float64)

    def uniform(self, count: int) -> np.ndarray:
        return self._words(count) / 2.0**32

    def integers(self, below: int, count: int) -> np.ndarray:
        return self._words(count).astype(np.int64) % below


def cases() -> list[Case]:
    """Return every case without what is expected."""
    made: list[Case] = []
    for build in (_random_cases, _direction_cases, _weight_cases, _commit_cases, _scalar_cases, _file_cases,
                  _optimizer_cases, _rounding_cases, _low_rank_cases):  # fmt: skip
        made += build()
    return made


def _random_cases() -> list[Case]:
    known = [(["00000000"] * 4, ["00000000"] * 2), (["ffffffff"] * 4, ["ffffffff"] * 2),
             (["243f6a88", "85a308d3", "13198a2e", "03707344"], ["a4093822", "299f31d0"])]  # fmt: skip
    made: list[Case] = [{"section": "philox", "counter": c, "key": k} for c, k in known]
    places = [(0, 0, 0, 0, 0), (SOME, 1, 12345, 678, 3), (TOP, 7, 2**32 - 1, 2**24 - 1, 2**34 - 2), (1, 4, 0, 2, 2**35)]
    made += [
        {"section": "words", "key": f"{key:016x}", "stream": stream, "round": t, "index": j, "start": start, "count": 7}
        for key, stream, t, j, start in places
    ]
    made += [
        {"section": "permutation", "key": f"{key:016x}", "stream": stream, "round": t, "index": 0, "n": n}
        for key, stream, t, n in [(0, 3, 0, 1), (0, 3, 0, 12), (SOME, 5, 0, 30), (TOP, 4, 7, 100)]
    ]
    chain = bytes(range(200, 232)).hex()
    made += [
        {"section": "round_key", "seed": f"{seed:016x}", "seed_mode": mode, "chain_hex": chain[:digits]}
        for seed, mode, digits in [
            (SOME, "shared", 64),
            (SOME, "chained", 64),
            (SOME, "chained", 16),
            (0, "chained", 64),
        ]
    ]
    return made


def _direction_cases() -> list[Case]:
    places = [(0, 0, 0, 0, 7850), (1, 399, 63, 7842, 7850), (TOP, 2**32 - 1, 2**24 - 1, 1020, 20_003),
              (SOME, 12345, 678, 3, 11), (42, 7, 3, 30, 40)]  # fmt: skip
    made: list[Case] = [
        {"section": "direction", "distribution": distribution, "key": f"{key:016x}", "round": t, "index": j,
         "start": start, "count": 8, "dimension": d}
        for distribution in ("gaussian", "rademacher", "sphere") for key, t, j, start, d in places
    ]  # fmt: skip
    far = [("gaussian", 2**34 - 4), ("gaussian", 2**39 - 4), ("rademacher", 2**39 - 4), ("rademacher", 2**34 + 29)]
    made += [
        {"section": "direction", "distribution": name, "key": f"{42:016x}", "round": 7, "index": 3, "start": start,
         "count": 8} for name, start in far
    ]  # fmt: skip
    small = ((j, reference(9, 0, j, 0, 1, "gaussian")) for j in range(10_000))
    vanishing = next(j for j, z in small if definition.squared_norm_units(z) == 0)
    places = [(0, 0, 0, 4), (1, 1, 1, 5), (SOME, 12345, 678, 1000), (3, 4, 5, 1025), (0, 0, 0, 7850),
              (TOP, 2**32 - 1, 2**24 - 1, 20_003), (9, 0, vanishing, 1)]  # fmt: skip
    made += [
        {"section": "sphere_scale", "key": f"{key:016x}", "round": t, "index": j, "dimension": d}
        for key, t, j, d in places
    ]
    return made


LAYOUT = [
    {"name": "body", "shape": [3, 4], "dtype": "float32", "offset": 0},
    {"name": "head", "shape": [5], "dtype": "bfloat16", "offset": 12},
    {"name": "scale", "shape": [2, 2], "dtype": "float16", "offset": 17},
]


def _some_weights(size: float, seed: int = 1) -> list[list[str]]:
    rng = Draws(seed)
    made = []
    for entry in LAYOUT:
        x = np.float32(rng.normal(int(np.prod(entry["shape"]))) * size)
        made.append(stored_hex(definition.narrow(x, str(entry["dtype"])), str(entry["dtype"])))
    return made


# float32 around the places where a rounding may go wrong: zeros, subnormals of all types, ties, edges, infinities, NaN.
EDGES32 = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x00008000, 0x00018000, 0x33000000,
    0x33000001, 0x33800000, 0x33C00000, 0xB3C00000, 0x387FC000, 0x387FE000, 0x38800000, 0x3F800000, 0x3F801000,
    0x3F803000, 0x3F808000, 0x3F818000, 0x3F80FFFF, 0xBF80FFFF, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000,
    0xC7800000, 0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
    0xFFC00001, 0x2F000000, 0x28000000, 0x33FFFFFF,
]  # fmt: skip


def _weight_cases() -> list[Case]:
    frozen = [
        ["z_running", [2, 3], "float32", hex32(np.arange(6, dtype=np.float32))],
        ["Count", [], "float32", hex32(np.float32([7.0]))],
        ["a_half", [3], "bfloat16", ["3f80", "0001", "ff80"]],
    ]
    made: list[Case] = [
        {"section": "digest", "layout": LAYOUT, "weights": _some_weights(0.1)},
        {"section": "rest_digest", "tensors": frozen},
        {
            "section": "rest_digest",
            "tensors": [
                ["num_batches_tracked", [], "int64", ["0123456789abcdef"]],
                ["ids", [1, 2], "int64", ["f" * 16, "0" * 16]],
                ["mask", [3], "bool", ["01", "00", "01"]],
            ],
        },
    ]
    edges = [f"{p:08x}" for p in EDGES32]
    for storage in ("float32", "float16", "bfloat16"):
        made.append({"section": "nearest", "storage": storage, "x": edges})
    for storage in ("float16", "bfloat16"):
        # Words at, just below and just above where the fractions of some x lie.
        for w in (0, 0x00080000, 0x3FFFFFFF, 0x40000000, 0x7FFFFFFF, 0x80000000, 0xFFFEFFFF, 0xFFFF0000, 0xFFFFFFFF):
            made.append({"section": "stochastic", "storage": storage, "x": edges, "words": [f"{w:08x}"] * len(edges)})
    return made


def _commit_cases() -> list[Case]:
    made: list[Case] = []
    g = hex32(np.float32([0.5, -1e-3, 3e38, -3e38, 1e-30, 1e-45]))
    for lr, k in ((0.01, 64), (1e-6, 3), (50.0, 4), (1e300, 1), (1e-12, 7), (-0.1, 1)):
        made.append({"section": "coefficients", "lr": lr, "g": g, "k": k})
    # Next to the middle of two float32, where lr * (g / k) and lr / k * g would be rounded to the other one.
    made.append({"section": "coefficients", "lr": 0.9000003218650818, "g": hex32(np.float32([5.0])), "k": 3})
    rng = Draws(5)

    def steps(sizes: tuple[float, ...], k: int, first: int = 0) -> list[Case]:
        return [
            {"key": f"{SOME + t:016x}", "round": 40 + t, "first": first, "rounding_index": t % 2,
             "c": hex32(np.float32(np.clip(rng.normal(k) * size, -3e38, 3e38)))} for t, size in enumerate(sizes)
        ]  # fmt: skip

    infinite = [{"key": f"{7:016x}", "round": 1, "first": 0, "rounding_index": 0, "c": hex32(np.float32([3e38] * 4))}]
    for storage, top in (("float32", 0x7F7FFFFF), ("float16", 0x7BFF), ("bfloat16", 0x7F7F)):
        sign, kind = (31, np.uint32) if storage == "float32" else (15, np.uint16)
        random = stored_hex(definition.narrow(np.float32(rng.normal(12) * 0.02), storage), storage)
        tiny = stored_hex(np.array([0, 1, 2, 5, 0x3FF, 0x400, *(1 << sign | v for v in (0, 1, 3))], kind), storage)
        large = stored_hex(np.array([top, top - 1, top | 1 << sign, top - 2 | 1 << sign] * 3, kind), storage)
        smallest = {"float32": 1e-44, "float16": 3e-8, "bfloat16": 1e-40}[storage]
        for distribution in ("gaussian", "rademacher", "sphere"):
            what = [(random, steps((1e-3, 1e-6, 0.1), 3)), (tiny, steps((smallest, smallest / 8), 2, 5)),
                    (large, steps((1e38 if top != 0x7BFF else 3e4, 3e38), 4)), (large, infinite)]  # fmt: skip
            for start, (w, made_steps) in zip((0, 1020, 5, 0), what, strict=True):
                made.append({
                    "section": "commit", "storage": storage, "distribution": distribution, "start": start,
                    "dimension": 2000, "w": w, "steps": made_steps,
                })  # fmt: skip
        for c in (1e-3, -1e-3, 3.0):
            made.append({
                "section": "probe", "storage": storage, "distribution": "gaussian", "start": 1021, "dimension": 2000,
                "key": f"{SOME:016x}", "round": 3, "index": 9, "c": c, "w": random + large,
            })  # fmt: skip
        made += _local_step_cases(storage)
    for size, radius in ((0.1, 10.0), (0.1, 0.1), (30.0, 1.0), (1e4, 1e-3), (3e38, 1.0)):
        weights = _some_weights(min(size, 1e4), seed=2)
        weights[0] = hex32(np.float32((2 * rng.uniform(12) - 1) * size))
        made.append({"section": "projection", "layout": LAYOUT, "weights": weights, "radius": radius})
    # u begins with +0: products of -0 leave a weight of -0 as it is.
    for storage, zero in (("float32", "00000000"), ("float16", "0000"), ("bfloat16", "0000")):
        made.append({
            "section": "commit", "storage": storage, "distribution": "rademacher", "start": 0, "dimension": 8,
            "w": ["8" + zero[1:]] * 4 + [zero] * 4, "steps": [
                {"key": f"{SOME:016x}", "round": 4, "first": 0, "rounding_index": 0, "c": ["80000000"]}],
        })  # fmt: skip
    return made + _projection_cases()


def _local_step_cases(storage: str) -> list[Case]:
    """Three local epochs: two steps are taken, the one after the last estimates is not. Some estimates not finite."""
    rng = Draws(12)
    w = stored_hex(definition.narrow(np.float32(rng.normal(6) * 0.02), storage), storage)
    usual = [hex64(rng.normal(2)) for _ in range(3)]
    infinite = [hex64(np.array([np.inf, 0.5])), hex64(np.array([1.0, -np.inf])), hex64(np.zeros(2))]
    no_number = [hex64(np.array([0.5, np.nan])), hex64(np.array([3.0, 1e300])), hex64(np.zeros(2))]
    return [
        {"section": "local_steps", "storage": storage, "distribution": distribution, "key": f"{SOME:016x}",
         "round": 17, "lr": 0.003, "w": w, "estimates": estimates}
        for distribution, estimates in (("gaussian", usual), ("sphere", infinite), ("rademacher", no_number))
    ]  # fmt: skip


# A radius and weights, found by a search, for which w * (1 / R) and w / R give different results.
QUOTIENT = (1.682, ["3f9ac02e", "4091d7bf", "3ae091da", "00000000", "00000000", "00000000"])

# Weights, found by a search, for which the result differs without the + 0.5 in each term.
WITHOUT_HALF = ["3ebfb8df", "3f5af72d", "3ed512b5", "bf3441f6", "3f0fd5df", "bcd6900a"]
# Weights, found by a search, for which w * factor rounded to the type at once, without float32 between, differs.
TWICE_ROUNDED = {
    "float16": ["3469", "be50", "bc9c", "ba86", "3962", "b797"],
    "bfloat16": ["3f8e", "3fc7", "3fb2", "bfb9", "bf13", "3fd3"],
}


def _projection_cases() -> list[Case]:
    flat = [{"name": "w", "shape": [6], "dtype": "float32", "offset": 0}]
    w = {
        # One weight counts 2^12 and the others nothing: N is 2^52, and one pass is not enough.
        1.0: hex32(np.float32([1000, 0, 0, -0.0, 0, 1e-20])),
        # About 40 passes.
        1e-30: hex32(np.float32([3e38, -1e38, 2e38, 0, 1e-30, -5e-31])),
        # 1 / R is infinite: 0 times it is no number, and counts nothing.
        1e-310: hex32(np.float32([0.5, 0, -0.0, 1e-45, 3, 0])),
        # (w r)^2 and (w / R)^2 are rounded to different integers, and those sums to different f.
        QUOTIENT[0]: QUOTIENT[1],
        # N is 2^40: on the sphere, so it stays.
        5.0: hex32(np.float32([3, 4, 0, 0, 0, 0])),
    }  # fmt: skip
    made: list[Case] = [
        {"section": "projection", "layout": flat, "weights": [patterns], "radius": radius}
        for radius, patterns in w.items()
    ]
    made += [
        {"section": "projection", "layout": [{**flat[0], "dtype": storage}], "weights": [patterns], "radius": 1.0}
        for storage, patterns in (("float32", WITHOUT_HALF), *TWICE_ROUNDED.items())
    ]
    # 4,097 weights count 2^52 each: the sum exceeds 64 bits, and float64 rounds it.
    many = [{**flat[0], "shape": [4097 * 6]}]
    once = hex32(np.float32([1e4, 0.3, -0.7, 1e-3, 0, 60]))
    return [*made, {"section": "projection", "layout": many, "weights": [once], "radius": 1.0, "repeat": 4097}]


# share(ALMOST_HALF, 10) is 5, and 4 is the most that 10 clients can tolerate.
ALMOST_HALF = 0.49999999999


def _scalar_cases() -> list[Case]:
    made: list[Case] = [
        {"section": "estimate", "estimator": estimator, "distribution": distribution, "key": f"{SOME:016x}", "round": 6,
         "first": 2, "count": 3, "mu": 2.0**-6, "samples": [1, 1, 2, 4], "w": hex32(np.float32([1, -2, 3, 0.5]))}
        for distribution in ("gaussian", "rademacher", "sphere") for estimator in ("two_point", "gradient", "forward")
    ]  # fmt: skip
    made += [{**case, "estimator": "one_sided"} for case in made if case["estimator"] == "two_point"]
    edge = codecs.make("log8").decode(b"\x01")[0] / 2  # between the codes 0 and 1
    values = np.float32([0, -0.0, 1, -1, 1e-5, 9e-6, 1.8e-5, 0.3, -7.7, 1234.5, 6e4, -1e9, 3.39e38, np.inf, np.nan,
                         1e-40, -1e-7, edge, -edge])  # fmt: skip
    odd = ["7f7fffff", "ff7fffff", "7f7f7fff", "7f7f8000", "ff800000", "ffc00000", "ffc00001", "7fffffff", "00000001",
           "3f808000", "3f818000"]  # fmt: skip
    made += [{"section": "codec", "codec": name, "values": hex32(values) + odd} for name in codecs.CODECS]
    shares = [(0.25, 12), (0.29, 100), (0.1, 30), (0.49, 3), (1 / 3, 9), (0.7, 10), (0.0, 5), (0.3, 10)]
    made += [{"section": "share", "fraction": f, "count": c} for f, c in shares]
    made += [
        {"section": "invited", "seed": f"{seed:016x}", "round": t, "clients": m, "participation": p}
        for seed, t, m, p in [(0, 0, 12, 1.0), (0, 0, 12, 0.5), (SOME, 9, 40, 0.25), (SOME, 10, 40, 0.01)]
    ]
    rng = Draws(6)
    plain = np.float32(rng.normal(60).reshape(12, 5))
    tied = np.float32([[1, 2, 5, 0, -0.0], [1, 2, 5, 0, 0.0], [1, 3, 5, 1, 0], [2, 3, 5, 1, 1], [3, 3, 5, 9, 2],
                       [3, 4, 5, 9, 2], [3, 4, 5, 9, 2]])  # fmt: skip
    wild = np.float32([[1e30, 1], [1, 1e-30], [-1e30, 3], [7, 1e8], [1e-8, -1e8]])
    for rows, beta, invited, t in ((plain, 0.25, 12, 3), (plain, 0.0, 12, 3), (plain, 0.05, 12, 0), (tied, 0.3, 7, 0),
                                   (tied, 0.3, 7, 5), (tied, 0.0, 7, 5), (tied, 0.25, 9, 11), (wild, 0.0, 5, 0),
                                   (wild, 0.2, 5, 0), (plain[:7], 0.25, 12, 8)):  # fmt: skip
        made.append({"section": "trimmed_mean", "beta": beta, "invited": invited, "round": t,
                     "rows": [hex32(row) for row in rows]})  # fmt: skip
    for count, beta in ((256, 0.1), (257, 0.1), (257, 0.0), (300, 0.3), (1000, 0.0)):
        made.append({"section": "trimmed_mean", "beta": beta, "invited": count, "round": 2,
                     "gaussian_rows": {"key": f"{SOME:016x}", "round": 1, "count": count, "columns": 3}})  # fmt: skip
    made.append({"section": "trimmed_mean", "beta": 0.0, "invited": 256, "round": 2,
                 "gaussian_rows": {"key": f"{SOME:016x}", "round": 1, "count": 256, "columns": 3}})  # fmt: skip
    made.append({"section": "trimmed_mean", "beta": ALMOST_HALF, "invited": 10, "round": 1,
                 "rows": [hex32(row) for row in plain[:10]]})  # fmt: skip
    # Few values, so that many are equal where the cut is; which of them is left out shows in the last bits.
    among = hex32(np.float32([-3e7, -1.1, -1e-7, 1e-7, 1.1, 3e7]))
    for count, beta, t in ((257, 0.1, 2), (300, 0.25, 2), (300, 0.25, 3), (301, 0.4, 0)):
        made.append({"section": "trimmed_mean", "beta": beta, "invited": count, "round": t, "chosen_rows": {
            "key": f"{SOME:016x}", "round": 1, "count": count, "columns": 3, "among": among}})  # fmt: skip
    for count, beta in ((256, 0.1), (300, 0.0), (300, 0.1)):
        made.append({"section": "trimmed_mean", "beta": beta, "invited": count, "round": 0, "chosen_rows": {
            "key": f"{0:016x}", "round": 0, "count": count, "columns": 1, "among": ["80000000"]}})  # fmt: skip
    for repeat, beta in ((2**13, 0.0), (2**13, 0.01), (2**13 - 1, 0.0)):
        made.append({"section": "trimmed_mean", "beta": beta, "invited": 257, "round": 5, "repeat": repeat,
                     "gaussian_rows": {"key": f"{SOME:016x}", "round": 1, "count": 257, "columns": 2}})  # fmt: skip
    made += _decision_cases()
    made += _rate_cases()
    made += [
        {"section": "batch", "seed": f"{seed:016x}", "client": c, "round": t, "epoch": e, "samples": n, "batch_size": b}
        for seed, c, t, e, n, b in [(0, 0, 0, 0, 10, 16), (0, 0, 0, 0, 100, 8), (SOME, 11, 399, 2, 17, 16),
                                     (SOME, 3, 5, 1, 16, 16)]
    ]  # fmt: skip
    made += [
        {"section": "byzantine", "seed": f"{seed:016x}", "clients": m, "byzantine": count}
        for seed, m, count in [(0, 12, 3), (SOME, 12, 3), (SOME, 5, 5), (SOME, 5, 0)]
    ]
    labels = rng.integers(3, 20).tolist()
    made += [
        {"section": "partition", "partition": name, "seed": f"{SOME:016x}", "clients": 3, "labels": labels}
        for name in ("iid", "by_label")
    ]
    return made


def _decision_cases() -> list[Case]:
    made: list[Case] = [
        {"section": "needed", "rule": rule, "before": before, "beta": beta, "invited": invited, "quorum": quorum}
        for rule, before, beta, invited, quorum in [
            ("trimmed_mean", "none", 0.25, 12, 1), ("trimmed_mean", "none", 0.25, 12, 9), ("mean", "none", 0.0, 12, 1),
            ("mean", "none", 0.25, 12, 1), ("median", "none", 0.25, 12, 1), ("krum", "none", 0.25, 12, 1),
            ("multi_krum", "none", 0.25, 12, 10), ("trimmed_mean", "none", 0.49, 2, 1), ("mda", "none", 0.49, 4, 1),
            ("trimmed_mean", "none", 0.29, 100, 1), ("geometric_median", "nnm", 0.1, 20, 1),
            ("trimmed_mean", "bucketing", 0.1, 20, 1), ("krum", "bucketing", 0.1, 20, 1),
            ("multi_krum", "none", 0.25, 12, 1), ("trimmed_mean", "none", ALMOST_HALF, 10, 1),
            ("mean", "nnm", 0.25, 12, 1), ("mean", "bucketing", 0.25, 12, 1),
        ]
    ]  # fmt: skip
    rng = Draws(11)
    rows = [hex32(np.float32(row)) for row in rng.normal(24).reshape(8, 3)]
    silent: list[Any] = [*rows[:3], None, *rows[4:7], None]
    broken: list[Any] = [*rows[:6], [rows[6][0], "7fc00000", rows[6][2]], ["7f800000", *rows[7][1:]]]
    large = [["7f7fffff"] * 3, *rows[1:7], ["7f7fffff"] * 3]
    made += [
        {"section": "decision", "rule": rule, "beta": beta, "quorum": quorum, "round": t, "codec": codec,
         "reports": reports}
        for rule, beta, quorum, t, codec, reports in [
            ("trimmed_mean", 0.25, 1, 0, "float32", rows), ("trimmed_mean", 0.25, 1, 2, "log8", silent),
            ("trimmed_mean", 0.25, 7, 1, "float32", silent), ("trimmed_mean", 0.25, 1, 1, "bfloat16", broken),
            ("trimmed_mean", 0.4, 1, 1, "float32", broken), ("median", 0.25, 1, 1, "float32", rows),
            ("median", 0.25, 1, 3, "float32", rows[:7]), ("mean", 0.0, 1, 0, "float32", silent),
            ("mean", 0.0, 1, 0, "float32", large), ("mean", 0.0, 1, 0, "float32", [["7f7fffff"]] * 3),
            ("trimmed_mean", 0.125, 1, 0, "bfloat16", large), ("mean", 0.0, 1, 0, "bfloat16", [["7f7f7fff"]] * 3),
            ("mean", 0.0, 1, 0, "float32", [None, ["7fc00000"]]),
        ]
    ]  # fmt: skip
    million = "49742400"
    made += [
        {"section": "decision", "rule": "mean", "beta": 0.0, "quorum": 1, "round": 0, "codec": codec,
         "reports": [[million], [pattern]], "limit": limit}
        for codec, pattern, limit in [
            ("float32", million, 1e6), ("float32", "49742402", 1e6), ("float32", "c9742400", 1e6),
            ("float32", million, 999999.9), ("bfloat16", million, 1e6), ("log8", million, 5e4), ("log8", million, 6e4),
        ]
    ]  # fmt: skip
    return made


def _rate_cases() -> list[Case]:
    return [
        {"section": "rate", "lr": lr, "schedule": schedule, "round": t, "rounds": rounds}
        for schedule, lr, t, rounds in [
            ("constant", 0.01, 0, 9), ("constant", 0.01, 8, 9), ("constant", 0.01, 8, 0), ("linear", 0.01, 0, 9),
            ("linear", 0.01, 1, 9), ("linear", 0.3, 8, 9), ("linear", 0.3, 9, 9), ("linear", 0.3, 9, 20),
            ("linear", 0.3, 1, 0), ("linear", 0.3, 0, 0), ("cosine", 0.01, 0, 9), ("cosine", 0.01, 9, 9),
            ("cosine", 0.01, 9, 0),
        ]
    ]  # fmt: skip


def _ledger_case(
    distribution: str, seed_mode: str, radius: float | None, k: int, epochs: int, abandoned: int = 1, *,
    format: int = 2, lrs: tuple[float, ...] = tuple(0.05 * (1 - t / 4) for t in range(4)),
    optimizer: Case | None = None, rounding: str = "stochastic", rank: int = 0,
) -> Case:  # fmt: skip
    rng = Draws(7)
    w0, n, clients = _some_weights(0.1), k * epochs, 11
    parameters = Parameters(model_of(LAYOUT))
    load(parameters, LAYOUT, w0)
    header = {
        "seed": f"{SOME:016x}", "layout": LAYOUT, "distribution": distribution, "k": k,
        "local_epochs": epochs, "mu": 1e-05, "estimator": "two_point", "lr": 0.05, "lr_schedule": "linear",
        "projection_radius": radius, "weights_digest": parameters.digest(), "rest_digest": parameters.rest_digest(),
        "clients": clients, "settings": {"task": {"name": "Größe \u2211 \U0001f600 \"x\"\n\x7f\x00/"}, "rounds": 4,
        "serve": {}, "z": [0.0, -0.0, 1e-05, 0.0001, 1e15, 1e16, 123456789012345680.0, 5e-324, 1.5e+300, 2**64 - 1,
        True, False, None], "Z": {}, "é": []},
        "codec": "float32", "seed_mode": seed_mode,
    }  # fmt: skip
    if format == 1:
        header |= {"version": 1, "dimension": 21, "config": header.pop("settings")}
    else:
        one: Case = {"options": {}, "version": 1}
        header |= {"format": 2, "extensions": {}, "id": "" if seed_mode == "shared" else "0f" * 16,
                   "distribution": {"name": distribution, **one, **({"options": {"rank": rank}} if rank else {})},
                   "rounding": {"name": rounding, **one},
                   "optimizer": {"name": "sgd", **one, **(optimizer or {})},
                   "layout": [{name: e[name] for name in ("name", "shape", "dtype")} for e in LAYOUT]}  # fmt: skip
    records = []
    for t in range(4):
        reported = rng.uniform(clients) < 0.7
        trimmed = np.where(reported, rng.integers(n + 1, clients), 0)
        values, nothing = np.float32(rng.normal(n)), t == abandoned
        records.append({
            "round": t, "lr": lrs[t], "values": None if nothing else hex32(values),
            "reported": reported.tolist(), "trimmed": [0] * clients if nothing else trimmed.tolist(),
            **({} if format == 1 else {"rounds": (4, 4, 2**32 - 1, 0)[t]}),
        })  # fmt: skip
    return {"section": "ledger", "header": header, "w0": w0, "records": records}


def _tail_cases() -> list[Case]:
    """Ledgers and files of reports with another end, and what is left of them."""
    header = some_header(clients=3, k=2)
    codec, data, chain = RecordFormat(header), opening_of(header), first_chain(header)
    places = [len(data)]
    for t in range(3):
        values = None if t == 1 else np.float32([0.5, -t])
        record = Record(t, 0.25, values, np.array([True, t > 0, True]), np.array([t, 0, 0], np.int64))
        one = codec.encode(replace(record, rounds=3), chain)
        data, chain = data + one, codec.chain_after(one)
        places.append(len(data))
    start, abandoned, last, end = places
    changes: list[Case] = [{}]
    changes += [{"keep": keep} for keep in (0, 11, start - 5, start - 1, start, start + 1, abandoned - 1, abandoned + 1,
                                            abandoned + 69, last, last + 1, last + 5, end - 1)]  # fmt: skip
    # Zeros instead of the rest of the last record, and more of them.
    changes += [{"keep": keep, "append_hex": "00" * (end - keep + more)}
                for keep in (last, last + 1, last + 4, last + 17, last + 24, last + 40, end - 37, end - 36, end - 20,
                             end - 4, end - 2, end)
                for more in (0, 9)]  # fmt: skip
    zeros = "00" * (end - last)
    changes += [
        {"append_hex": "00" * 5}, {"append_hex": "00" * 4 + "01"}, {"append_hex": "03"}, {"append_hex": "01"},
        {"append_hex": "02"}, {"append_hex": "07" + zeros}, {"append_hex": "01" + "03" + zeros},
        # A record whose round is another one, then zeros.
        {"append_hex": "01" + "04" + zeros},
        # The chain does not go on, then zeros; a byte behind the zeros.
        {"replace": [[end - 36, "ff"]], "keep": end - 30, "append_hex": "00" * 30},
        {"keep": end - 10, "append_hex": "00" * 10 + "01"},
        # A wrong byte in the middle of what is there: damage.
        {"replace": [[last + 6, "ff"]]}, {"replace": [[start + 20, "ff"]]}, {"replace": [[end - 1, "ff"]]},
        # Of the scalars only the CRC knows: wrong ones before a tail of zeros can't be told.
        {"replace": [[last + 18, "ff"]], "keep": end - 37, "append_hex": "00" * 37},
        # But where the chain was written, the core has to fit it, and the details their digest.
        {"replace": [[last + 18, "ff"]], "keep": end - 20, "append_hex": "00" * 20},
        {"replace": [[last + 14, "ff"]], "keep": end - 20, "append_hex": "00" * 20},
        {"replace": [[end - 37, "ff"]], "keep": end - 20, "append_hex": "00" * 20},
        # An abandoned round whose kind became "decided", at the end and before another record.
        {"keep": last, "replace": [[abandoned, "01"]]}, {"replace": [[abandoned, "01"]]},
        {"keep": last - 1, "replace": [[abandoned, "01"]]}, {"replace": [[abandoned, "00"]]},
        # Damage to the header.
        {"replace": [[20, "ff"]]}, {"replace": [[start - 1, "ff"]]}, {"replace": [[0, "63"]]},
    ]  # fmt: skip
    # Sealed, but not what a record may be. Its core, which ends with the digest of its details, and these.
    before = data[last - 36 : last - 4]
    bad: list[tuple[bytes, bytes, bytes]] = [
        (struct.pack("<BIdI", 2, 2, 0.5, 3), b"\x01", before),  # an abandoned round instead: fine
        (struct.pack("<BIdI", 2, 2, 0.5, 0), b"\x01", before),  # nothing said of how many rounds there are: fine
        (struct.pack("<BIdI", 2, 2, 0.5, 2), b"\x01", before),  # fewer rounds than there are by now: fine
        (struct.pack("<BIdI", 2, 2, 0.5, 3), b"\xf9", before),  # bits of clients that there are not: fine
        (struct.pack("<BIdI", 2, 3, 0.5, 3), b"\x01", before),
        (struct.pack("<BIdI", 2, 2, float("nan"), 3), b"\x01", before),
        (struct.pack("<BIdI", 2, 2, 0.5, 3), b"\x01", bytes(32)),  # another chain
        (struct.pack("<BIdIff", 1, 2, 0.5, 3, 1, float("inf")), b"\x01\x00", before),
        (struct.pack("<BIdIff", 1, 2, 0.5, 3, 1, 1), b"\x01\x0c", before),  # trimmed, not reported: fine
    ]
    for head, details, chain in bad:
        core = head + hashlib.sha256(details).digest()[:16]
        body = core + details + hashlib.sha256(chain + core).digest()
        changes.append({"keep": last, "append_hex": sealed_hex(body)})
    core = struct.pack("<BIdI", 2, 2, 0.5, 3) + bytes(16)  # another digest of the details
    changes.append({"keep": last, "append_hex": sealed_hex(core + b"\x01" + hashlib.sha256(before + core).digest())})
    made: list[Case] = [{"section": "ledger_tails", "file_hex": data.hex(), "changes": changes}]
    made += [{"section": "message", "kind": "records", "file_hex": data.hex(), "first": first} for first in (0, 1)]

    entries = [entry_of(t, count) for t, count in enumerate((2, 0, 1))]
    data = b"cyber0 reports 1\n" + b"".join(entries)
    start, end = len(data) - len(entries[-1]), len(data)
    changes = [{}, *({"keep": keep} for keep in (0, 16, 17, 18, 40, start, start + 3, start + 8, start + 9, end - 1))]
    changes += [{"keep": keep, "append_hex": "00" * (end - keep + more)}
                for keep in (start, start + 8, start + 10, end - 4, end - 1) for more in (0, 9)]  # fmt: skip
    changes += [
        {"append_hex": "00"}, {"append_hex": "00" * 30}, {"append_hex": "00" * 30 + "01"}, {"append_hex": "03"},
        {"append_hex": "03000000" + "ffffffff"}, {"replace": [[30, "ff"]]}, {"replace": [[start + 10, "ff"]]},
        {"replace": [[3, "ff"]]},
    ]  # fmt: skip
    made.append({"section": "reports_tails", "numbers": 2, "file_hex": data.hex(), "changes": changes})
    return made


def _more_tail_cases() -> list[Case]:
    """Of n = 9, where an abandoned record ends before the details of a decided one do; of both formats."""
    made: list[Case] = []
    for format in (2, 1):
        header = some_header(clients=3, k=9, format=format)
        codec = RecordFormat1(header) if format == 1 else RecordFormat(header)
        data, chain, places, chains = opening_of(header), first_chain(header), [], []
        for t in range(3):
            places.append(len(data))
            chains.append(chain)
            values = None if t == 1 else np.float32(np.arange(1, 10))
            trimmed = np.array([t, 0, 9 if t == 2 else 0], np.int64)  # so that the details do not end in a zero
            one = codec.encode(Record(t, 0.25, values, np.array([True, t > 0, True]), trimmed, rounds=3), chain)
            data, chain = data + one, codec.chain_after(one)
        _, abandoned, last = places
        end, whole, short = len(data), len(data) - last, last - abandoned
        kind, odd = [abandoned, "01"], [abandoned + 8, "ff"]
        wrong = f"{data[end - 4] ^ 1:02x}"
        changes: list[Case] = [
            {}, {"keep": places[0]}, {"keep": last + 3}, {"keep": end - 1}, {"append_hex": "00"},
            # The first byte of a CRC, right and wrong, and zeros instead of the others.
            {"keep": end - 3, "append_hex": "00" * 3},
            {"replace": [[end - 4, wrong]], "keep": end - 3, "append_hex": "00" * 3},
            {"replace": [[end - 4, wrong]], "keep": end - 3, "append_hex": "00" * 30},
            # Who reported is wrong, by the digest that the core has of it: looked at where the chain was begun.
            {"replace": [[end - 39, "01"]], "keep": end - 36, "append_hex": "00" * 36},
            {"replace": [[end - 39, "01"]], "keep": end - 35, "append_hex": "00" * 35},
            # Hashes that are wrong in their first byte.
            {"replace": [[end - 36, f"{data[end - 36] ^ 1:02x}"]], "keep": end - 35, "append_hex": "00" * 35},
            {"keep": end - 35, "append_hex": "00" * 35},
            # An abandoned record whose kind was damaged; with fewer and more bytes after it, and zeros.
            {"replace": [kind], "keep": last - 1}, {"replace": [kind], "keep": last},
            {"replace": [kind], "keep": last + 5}, {"replace": [kind], "keep": abandoned + whole - 1},
            {"replace": [kind], "keep": abandoned + whole}, {"replace": [kind], "keep": abandoned + whole + 1},
            *({"replace": [kind], "keep": last, "append_hex": "00" * zeros}
              for zeros in (1, whole - short - 1, whole - short, whole)),
            # Where more than its kind was damaged nothing shows that it was abandoned.
            {"replace": [kind, odd], "keep": last}, {"replace": [kind, odd], "keep": last + 5},
            {"replace": [kind, odd], "keep": last, "append_hex": "00" * (whole - short)},
            # The beginning of a record of the next round, of another one, and of neither.
            *({"append_hex": text} for text in ("01", "0103", "010300000000ff", "02030000" + "00" * 9, "0104", "0103ff",
                                                "01" + "00" * 4 + "ff", "01" + "ff" * 20)),
        ]  # fmt: skip
        # Whole records after the last but one, of another learning rate, or not what a record may be.
        for kind_, round, lr, value, previous in (
            (2, 2, 0.0, 0, chains[2]), (1, 2, -0.0, 1, chains[2]), (1, 2, -1.5, 1, chains[2]),
            (2, 2, float("inf"), 0, chains[2]), (2, 2, float("-inf"), 0, chains[2]), (2, 2, 0.5, 0, chains[1]),
            (1, 2, 0.5, 1, bytes(32)), (1, 1, 0.5, 1, chains[2]),
        ):  # fmt: skip
            text = whole_record(codec, kind_, round, lr, value, previous)
            changes.append({"keep": last, "append_hex": text})
        # The CRC of these ends in a zero byte and is right: they are no tail, with zeros after them or not.
        for kind_, round, value, previous in ((1, 2, 1, chains[2]), (1, 2, np.inf, chains[2]), (2, 2, 0, bytes(32)),
                                              (2, 3, 0, chains[2])):  # fmt: skip
            found = (whole_record(codec, kind_, round, lr, value, previous) for lr in range(1, 100_000))
            text = next(text for text in found if text.endswith("00"))
            changes += [{"keep": last, "append_hex": text + "00" * zeros} for zeros in (0, 7)]
        made.append({"section": "ledger_tails", "file_hex": data.hex(), "changes": changes})

    data = b"cyber0 reports 1\n" + entry_of(0, 1) + entry_of(1, 0)
    changes = [{"append_hex": b"".join(entry_of(t, 1) for t in more).hex()}
               for more in ((2,), (1,), (0,), (3,), (3, 5), (3, 2), (2**32 - 1,))]  # fmt: skip
    made.append({"section": "reports_tails", "numbers": 2, "file_hex": data.hex(), "changes": changes})
    return made


def whole_record(codec: RecordFormat, kind: int, round: int, lr: float, value: float, previous: bytes) -> str:
    """A sealed record of 3 clients, of which the first reported, with all scalars alike."""
    details = b"\x01" if kind == 2 else b"\x01\x00\x00"
    core = codec.head_of(kind, round, lr, 3) + struct.pack("<9f", *[value] * 9) * (kind == 1)
    core += hashlib.sha256(details).digest()[: codec.digest_bytes]
    return sealed_hex(core + details + codec.hash_for(core, previous))


# What is changed in the JSON of a header: why, and pairs of a text in it and another one instead.
Changed = tuple[str, list[list[str]]]


def _in(part: str, *others: tuple[str, str]) -> list[Changed]:
    """Several texts instead of one, each by itself."""
    return [(why, [[part, new]]) for why, new in others]


def _settings_changes(name: str) -> list[Changed]:
    """What may be in `settings` and `config` alike: which forms are canonical, and how deep it may be."""
    part, deep = f'"{name}":{{}}', f'"{name}":{{"a":'

    def one(text: str) -> str:
        return f'"{name}":{{"a":{text}}}'

    return _in(
        part,
        ("a space", one(" 1")), ("a line break", one("1\n")), ("short escapes", one('"\\b\\f\\n\\r\\t\\"\\\\/"')),
        ("an escape that has a short form", one('"\\u000d"')), ("an escaped slash", one('"\\/"')),
        ("control characters", one('"\\u0000\\u001f\\u007f"')), ("U+007F as it is", one('"\x7f"')),
        ("an escaped letter", one('"\\u0061"')), ("escapes beyond ASCII", one('"\\u00e9\\ud83d\\ude00"')),
        ("upper-case digits in an escape", one('"\\u00E9"')), ("UTF-8 beyond ASCII", one('"\u00e9"')),
        ("half of a surrogate pair", one('"\\ud83d"')),
        ("U+FF5E before U+1F600, by code points", f'"{name}":{{"\\uff5e":1,"\\ud83d\\ude00":2}}'),
        ("U+1F600 before U+FF5E, by UTF-16", f'"{name}":{{"\\ud83d\\ude00":2,"\\uff5e":1}}'),
        ("keys that are not sorted", f'"{name}":{{"b":1,"a":1}}'), ("a key twice", f'"{name}":{{"a":1,"a":1}}'),
        ("integers", one("[0,-1,18446744073709551616]")), ("-0, an integer", one("-0")), ("-0.0", one("-0.0")),
        ("floats", one("[1.0,0.0001,1e-05,1.5e-05,1000000000000000.0,1e+16,1.7976931348623157e+308,5e-324]")),
        ("1e-5", one("1e-5")), ("0.00001", one("0.00001")), ("1e16", one("1e16")), ("1E+16", one("1E+16")),
        ("1.0e-05", one("1.0e-05")), ("0.10", one("0.10")), ("more digits than needed", one("0.10000000000000001")),
        ("an infinity", one("1e999")), ("NaN", one("NaN")), ("true, false and null", one("[true,false,null]")),
        ("16 deep", deep + "[" * 15 + "1" + "]" * 15 + "}"), ("17 deep", deep + "[" * 16 + "1" + "]" * 16 + "}"),
        ("16 deep, an empty list there", deep + "[" * 16 + "]" * 16 + "}"),
        ("17 deep, an empty list there", deep + "[" * 17 + "]" * 17 + "}"),
        ("17 deep, objects", f'"{name}":' + '{"a":' * 17 + "1" + "}" * 17),
        ("a list instead of an object", f'"{name}":[]'), ("null instead of an object", f'"{name}":null'),
        ("a section that is no object", f'"{name}":{{"method":3}}'),
        ("another section that is no object", f'"{name}":{{"serve":[]}}'),
        ("a third section that is no object", f'"{name}":{{"federation":null}}'),
    )  # fmt: skip


def _field_changes() -> list[Changed]:
    """What the fields of both formats may be. The parts that are replaced are those of `_header_cases`."""
    lr, mu, k, clients, seed = '"lr":0.1', '"mu":0.001', '"k":2', '"clients":3', '"seed":5'
    return [
        *_in(k, ("k as a float", '"k":2.0'), ("k = true", '"k":true'), ("k = 0", '"k":0'), ("k as text", '"k":"2"'),
             ("E k = 2^24 - 2", '"k":8388607'), ("E k = 2^24", '"k":8388608')),
        *_in('"local_epochs":2', ("no local epoch", '"local_epochs":0'), ("E = 1.0", '"local_epochs":1.0')),
        *_in(clients, ("no client", '"clients":0'), ("2^24 clients", '"clients":16777216'),
             ("2^24 + 1 clients", '"clients":16777217')),
        *_in(seed, ("the largest seed", '"seed":18446744073709551615'), ("2^64", '"seed":18446744073709551616'),
             ("a negative seed", '"seed":-1'), ("a seed as a float", '"seed":5.0')),
        *_in(lr, ("a whole lr", '"lr":1'), ("the same as a float", '"lr":1.0'), ("lr = 0.0", '"lr":0.0'),
             ("lr = 0", '"lr":0'), ("a negative lr", '"lr":-0.1'), ("lr = null", '"lr":null'),
             ("lr as text", '"lr":"0.1"'),
             ("an infinite lr", '"lr":1e999'), ("an integer that float64 can hold", '"lr":1' + "0" * 300),
             ("an integer that float64 can't hold", '"lr":1' + "0" * 309), ("lr = true", '"lr":true')),
        *_in(mu, ("mu = 0.0 with two_point", '"mu":0.0'), ("mu = 0 with two_point", '"mu":0'),
             ("a mu that is 0 in float32", '"mu":1e-60'), ("a mu beyond float32", '"mu":1e+60'),
             ("mu = null", '"mu":null'), ("a negative mu", '"mu":-0.001')),
        ("mu = 0.0 with gradient", [[mu, '"mu":0.0'], ['"two_point"', '"gradient"']]),
        ("mu = -0.0 with forward", [[mu, '"mu":-0.0'], ['"two_point"', '"forward"']]),
        ("a negative mu with forward", [[mu, '"mu":-1.0'], ['"two_point"', '"forward"']]),
        *_in('"projection_radius":null', ("a radius", '"projection_radius":0.5'),
             ("a whole one", '"projection_radius":2'),
             ("a radius of 0.0", '"projection_radius":0.0'), ("a negative radius", '"projection_radius":-1.0')),
        *_in('"two_point"', ("an unknown estimator", '"one_point"')),
        *_in('"shared"', ("an unknown seed mode", '"none"')),
        *_in('"codec":"float32"', ("an unknown codec", '"codec":"float16"')),
        *_in('"lr_schedule":"constant"', ("a schedule of one's own", '"lr_schedule":"a.py:b"'),
             ("a schedule without a name", '"lr_schedule":""')),
        *_in('"weights_digest":"0', ("an upper-case digest", '"weights_digest":"A'),
             ("one digit less", '"weights_digest":"'), ("one digit more", '"weights_digest":"00')),
        *_in('"rest_digest":"0', ("a digest that is none", '"rest_digest":"g')),
    ]  # fmt: skip


def _definition_changes() -> list[Changed]:
    made: list[Changed] = []
    for kind, name in (("distribution", "gaussian"), ("optimizer", "sgd"), ("rounding", "stochastic")):
        stated = f'"{kind}":{{"name":"{name}","options":{{}},"version":1}}'
        made += _in(
            stated,
            (f"an unknown {kind}", f'"{kind}":{{"name":"x","options":{{}},"version":1}}'),
            (f"the {kind} in version 2", f'"{kind}":{{"name":"{name}","options":{{}},"version":2}}'),
            (f"the {kind} with an option", f'"{kind}":{{"name":"{name}","options":{{"a":1}},"version":1}}'),
            (f"the {kind} without a version", f'"{kind}":{{"name":"{name}","options":{{}}}}'),
            (f"the {kind} by its name alone", f'"{kind}":"{name}"'),
        )
    stated = '"optimizer":{"name":"sgd","options":{},"version":1}'
    return made + _in(
        stated,
        ("version 1.0", '"optimizer":{"name":"sgd","options":{},"version":1.0}'),
        ("version true", '"optimizer":{"name":"sgd","options":{},"version":true}'),
        ("options null", '"optimizer":{"name":"sgd","options":null,"version":1}'),
        ("options that are a list", '"optimizer":{"name":"sgd","options":[],"version":1}'),
        ("another key", '"optimizer":{"about":1,"name":"sgd","options":{},"version":1}'),
    )


def _header_cases() -> list[Case]:
    """Openings of both formats, good ones and such as must be refused."""
    entries = (LayoutEntry("w", (2, 2), "float32", 0), LayoutEntry("b", (1,), "bfloat16", 4))
    first, second = '{"dtype":"float32","name":"w","shape":[2,2]}', '{"dtype":"bfloat16","name":"b","shape":[1]}'
    fields: dict[str, Any] = {"seed": 5, "k": 2, "local_epochs": 2, "clients": 3, "layout": entries}
    changes: list[Case] = [{"why": "nothing is changed"}]
    made: list[Changed] = [
        *_settings_changes("settings"), *_field_changes(), *_definition_changes(),
        *_in('"gaussian"', ("rademacher", '"rademacher"'), ("sphere", '"sphere"')),
        ("sphere with d = 3, which a reader of headers does not check", [['"gaussian"', '"sphere"'], ["[2,2]", "[2]"]]),
        *_in('"extensions":{}', ("an unknown extension", '"extensions":{"privacy":{"version":1}}'),
             ("extensions that are a list", '"extensions":[]'), ("extensions null", '"extensions":null')),
        *_in('"extensions":{},', ("no extensions", ""), ("another key", '"extensions":{},"extra":1,')),
        *_in('"seed_mode":"shared",', ("no seed_mode", "")),
        *_in('"format":2', ("format 3", '"format":3'), ("format 2.0", '"format":2.0'), ("format 1", '"format":1'),
             ("format true", '"format":true'), ("no format but a version", '"version":2')),
        *_in('"id":""', ("an id", '"id":"00112233445566778899aabbccddeeff"'), ("half an id", '"id":"0011223344556677"'),
             ("an upper-case id", '"id":"00112233445566778899AABBCCDDEEFF"'), ("id null", '"id":null')),
        *_in('"settings":{}', ("other settings", '"settings":{"aggregation":{"beta":0.25},"method":{},"rounds":400}'),
             ("the seed again", '"settings":{"seed":5}'), ("k again", '"settings":{"method":{"k":2}}'),
             ("the number of clients again", '"settings":{"federation":{"clients":3}}'),
             ("the codec again", '"settings":{"serve":{"codec":"float32"}}'),
             ("the distribution again", '"settings":{"method":{"distribution":"gaussian"}}'),
             ("k in another place", '"settings":{"k":2,"task":{"k":2,"seed":5}}'),
             ("a key with a point is no path", '"settings":{"method.k":2}'),
             ("rounds need not be a number", '"settings":{"rounds":"many"}')),
        *_in(f"[{first},{second}]", ("no weights", "[]"), ("one entry", f"[{first}]"),
             ("a name twice", f"[{first},{first}]"), ("layout null", "null"), ("an object", "{}"), ("numbers", "[1]")),
        *_in("[2,2]", ("a scalar", "[]"), ("no coordinates beside another entry", "[0,2]"),
             ("a negative length", "[-1]"), ("a length as a float", "[2.0]"), ("a shape that is a number", "4")),
        ("no coordinates at all", [["[2,2]", "[0,2]"], ["[1]", "[0]"]]),
        *_in('"float32","name":"w"', ("an unknown type", '"float64","name":"w"'),
             ("an empty name", '"float32","name":""'), ("a name that is a number", '"float32","name":1'),
             ("an offset", '"float32","name":"w","offset":0')),
        *_in('{"clients"', ("a space at the beginning", ' {"clients"'), ("a list", '[{"clients"'),
             ("no JSON", "clients")),
    ]  # fmt: skip
    made += [(f"shape {why}", [['"shape":[2,2]', f'"shape":[{shape}]']]) for why, shape in (
        ("of 64 lengths", "4," + ",".join(["1"] * 63)), ("of 65 lengths", "4," + ",".join(["1"] * 64)),
        ("of 2^63 - 1 coordinates, which with the other weight's are too many", str(2**63 - 1)),
        ("of 2^63 - 2 coordinates", str(2**63 - 2)), ("of 2^64 coordinates", "4294967296,4294967296"),
        ("of no coordinates, by a product beyond 2^63", "4294967296,4294967296,0"),
        ("of no coordinates", "0,4294967296"),
    )]  # fmt: skip
    changes += [{"why": why, "json": pairs} for why, pairs in made]
    changes += [
        {"why": "byte 7 is 3", "byte_7": 3}, {"why": "byte 7 is 0", "byte_7": 0}, {"why": "byte 7 is 1", "byte_7": 1},
        {"why": "byte 7 and format are 1", "byte_7": 1, "json": [['"format":2', '"format":1']]},
        {"why": "byte 7 and format are 3", "byte_7": 3, "json": [['"format":2', '"format":3']]},
        {"why": "a wrong magic", "replace": [[5, "31"]]}, {"why": "a wrong CRC", "replace": [[20, "5b"]]},
        {"why": "a length that is too large", "replace": [[8, "ffffffff"]]}, {"why": "no bytes", "keep": 0},
        {"why": "too few bytes", "keep": 300},
    ]  # fmt: skip
    two: Case = {
        "section": "headers",
        "file_hex": opening_of(some_header(**fields)).hex(),
        "changes": changes,
    }

    first = '{"dtype":"float32","name":"w","offset":0,"shape":[2,2]}'
    second = '{"dtype":"bfloat16","name":"b","offset":4,"shape":[1]}'
    made = [
        *_settings_changes("config"), *_field_changes(),
        *_in('"distribution":"gaussian"', ("sphere", '"distribution":"sphere"'), ("unknown", '"distribution":"x"'),
             ("a definition", '"distribution":{"name":"gaussian","options":{},"version":1}')),
        *_in('"version":1', ("version 2", '"version":2'), ("version 1.0", '"version":1.0'), ("format", '"format":1')),
        *_in('"dimension":5', ("another dimension", '"dimension":4'), ("dimension 5.0", '"dimension":5.0'),
             ("an id", '"dimension":5,"id":""'), ("extensions", '"dimension":5,"extensions":{}')),
        *_in(f"{first},{second}", ("the other order", f"{second},{first}"), ("no weights", "")),
        *_in('"offset":4,', ("a gap", '"offset":5,'), ("an overlap", '"offset":3,'), ("no offset", ""),
             ("an offset as a float", '"offset":4.0,')),
        *_in('"config":{}',
             ("all settings again", '"config":{"federation":{"clients":3},"method":{"distribution":"gaussian",'
              '"estimator":"two_point","k":2,"local_epochs":2,"lr":0.1,"lr_schedule":"constant","mu":0.001,'
              '"projection_radius":0.0},"seed":5,"serve":{"codec":"float32","seed_mode":"shared"}}'),
             ("some of them, and others", '"config":{"method":{"k":2},"rounds":400,"task":{"k":7,"seed":1}}'),
             ("a radius of 0 for null", '"config":{"method":{"projection_radius":0}}'),
             ("a key with a point is no path", '"config":{"method.k":3}'),
             *((f"another {path}", '"config":' + inside) for path, inside in (
                 ("seed", '{"seed":6}'), ("method.k", '{"method":{"k":3}}'),
                 ("method.local_epochs", '{"method":{"local_epochs":1}}'), ("method.mu", '{"method":{"mu":0.002}}'),
                 ("method.estimator", '{"method":{"estimator":"gradient"}}'), ("method.lr", '{"method":{"lr":0.2}}'),
                 ("method.lr_schedule", '{"method":{"lr_schedule":"linear"}}'),
                 ("method.distribution", '{"method":{"distribution":"sphere"}}'),
                 ("method.projection_radius", '{"method":{"projection_radius":1.0}}'),
                 ("federation.clients", '{"federation":{"clients":4}}'), ("serve.codec", '{"serve":{"codec":"log8"}}'),
                 ("serve.seed_mode", '{"serve":{"seed_mode":"chained"}}')))),
        ("a whole number for a float", [['"lr":0.1', '"lr":1.0'], ['"config":{}', '"config":{"method":{"lr":1}}']]),
        ("a radius, and 0.0 in the config", [['"projection_radius":null', '"projection_radius":0.5'],
                                             ['"config":{}', '"config":{"method":{"projection_radius":0.0}}']]),
    ]  # fmt: skip
    changes = [{"why": "nothing is changed"}, *({"why": why, "json": pairs} for why, pairs in made)]
    changes += [{"why": "byte 7 is 2", "byte_7": 2}, {"why": "a wrong CRC", "replace": [[20, "5b"]]}]
    opening = opening_of(some_header(**fields, format=1)).hex()
    one: Case = {"section": "headers", "file_hex": opening, "changes": changes}

    mu = '"mu":0.001'
    changes = [{"why": "nothing is changed"}] + [{"why": why, "json": pairs} for why, pairs in _in(
        mu, ("mu = 0.0 with one_sided", '"mu":0.0'), ("mu = 0 with one_sided", '"mu":0'), ("a whole mu", '"mu":1'),
    )]  # fmt: skip
    one_sided = opening_of(some_header(**fields, estimator="one_sided")).hex()
    return [two, one, {"section": "headers", "file_hex": one_sided, "changes": changes}]


def sealed_hex(body: bytes) -> str:
    return (body + struct.pack("<I", zlib.crc32(body))).hex()


def entry_of(round: int, rows: int) -> bytes:
    return bytes.fromhex(sealed_hex(struct.pack(f"<II{2 * rows}f", round, rows, *range(1, 2 * rows + 1))))


def _file_cases() -> list[Case]:
    made: list[Case] = [
        _ledger_case("gaussian", "shared", None, 3, 1),
        _ledger_case("sphere", "chained", 0.45, 2, 2),
        _ledger_case("rademacher", "chained", None, 8, 1),
        _ledger_case("sphere", "chained", 0.45, 2, 2, format=1),
        # w0 is outside the ball, and stays there until a round is decided.
        _ledger_case("gaussian", "shared", 0.2, 2, 1, abandoned=0),
        _ledger_case("rademacher", "shared", None, 1, 1, abandoned=2, lrs=(0.0, -0.05, -0.5, -0.0)),
    ]
    made += _header_cases() + _tail_cases() + _more_tail_cases()
    rng = Draws(8)
    rows = [hex32(np.float32(rng.normal(3))) for _ in range(5)]
    made.append({"section": "reports", "numbers": 3, "entries": [
        {"round": 0, "rows": rows[:3]}, {"round": 1, "rows": []}, {"round": 2, "rows": rows[3:]}]})  # fmt: skip
    names = {"run": "11" * 32, "weights_digest": "22" * 32, "rest_digest": "a3" * 32}
    chain = "0123456789abcdef"
    values = hex32(np.float32([0.5, -3.25, 1e-3]))
    made += [
        {"section": "message", "kind": "hello", "role": 1, "client": 70_000, **names, "round": 9, "chain_hex": chain},
        {"section": "message", "kind": "hello", "role": 2, "client": 0, **names, "round": 0, "chain_hex": chain},
        {"section": "message", "kind": "report", "codec": "float32", "round": 5, "values": values, "digest_hex": ""},
        {"section": "message", "kind": "report", "codec": "log8", "round": 5, "values": values, "digest_hex": chain},
        {"section": "message", "kind": "evaluation", "round": 5, "accuracy": 0.75, "loss": 1.5, "metrics": []},
        {
            "section": "message",
            "kind": "evaluation",
            "round": 6,
            "accuracy": 0.5,
            "loss": -1.5,
            "metrics": [["f1", 0.25], ["Größe ∑", -3.0]],
        },
        {"section": "message", "kind": "opened", "round": 6, "rounds": 400, "chain_hex": chain},
        {"section": "message", "kind": "replay"},
        {"section": "message", "kind": "ended"},
    ]
    for name, decided in (("float32", values), ("bfloat16", values), ("log8", values), ("float32", None)):
        made.append({"section": "message", "kind": "decision", "codec": name, "round": 7, "lr": 0.01, "values": decided,
                     "rounds": 400, "details_hex": chain + "fedcba9876543210"})  # fmt: skip
    return made


OPTIMIZER_OPTIONS: dict[str, dict[str, float]] = {
    "sgd": {}, "adaptive": {"beta": 0.75}, "normalized": {}, "zscore": {}, "rank": {}, "momentum": {"beta": 0.7},
    "adam": {"beta1": 0.8, "beta2": 0.97, "eps": 1e-6}, "hessian": {"nu": 0.3, "floor": 0.02},
}  # fmt: skip


def _optimizer_cases() -> list[Case]:
    rng, made = Draws(9), list[Case]()
    scalars = [np.float32(rng.normal(4)) for _ in range(3)]
    ordinary = [*scalars, np.float32([2.5, -1.0, 2.5, 7.0]), np.float32([0, 0, 0, 0]), np.float32([3, 3, 3, 3])]
    extreme = [np.float32(row) for row in ([1e-30, -2e-30, 3e-45, 0], [3e38, -3e38, 1e38, 2e38], [1e-3, 2, -4e6, 1])]
    storages = (("float32", "gaussian"), ("bfloat16", "rademacher"), ("float16", "sphere"))
    for name, options in OPTIMIZER_OPTIONS.items():
        for (storage, distribution), rows in zip(storages, (ordinary, ordinary, extreme), strict=True):
            w = stored_hex(definition.narrow(np.float32(rng.normal(9) * 0.1), storage), storage)
            rounds = [{"key": f"{SOME + t:016x}", "round": 2 * t, "lr": 0.05 / (t + 1), "g": hex32(row)}
                      for t, row in enumerate(rows)]  # fmt: skip
            made.append({"section": "optimizer", "name": name, "options": options, "k": 4, "storage": storage,
                         "distribution": distribution, "w": w, "rounds": rounds})  # fmt: skip
    adaptive, adam = ({"name": name, "options": OPTIMIZER_OPTIONS[name]} for name in ("adaptive", "adam"))
    made += [_ledger_case("gaussian", "chained", None, 2, 2, optimizer=adaptive),
             _ledger_case("rademacher", "shared", 0.45, 3, 1, optimizer=adam)]  # fmt: skip
    return [*made, _optimizer_header_case()]


def _rounding_cases() -> list[Case]:
    """Rounding by 16 bits a weight."""
    rng, made, edges = Draws(13), list[Case](), [f"{p:08x}" for p in EDGES32]
    for storage, top in (("float16", 0x7BFF), ("bfloat16", 0x7F7F)):
        # As for 32 bits; and about the fraction of the smallest float16 in 0x28000000, 2^-23, which is less than 2^-16.
        for w in (0, 1, 8, 0x3FFF, 0x4000, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF):
            made.append({"section": "stochastic", "storage": storage, "bits": 16, "x": edges,
                         "words": [f"{w:08x}"] * len(edges)})  # fmt: skip
        random = stored_hex(definition.narrow(np.float32(rng.normal(12) * 0.02), storage), storage)
        tiny = stored_hex(np.array([0, 1, 2, 5, 0x3FF, 0x400, 0x8000, 0x8001, 0x8003], np.uint16), storage)
        large = stored_hex(np.array([top, top - 1, top | 0x8000, top - 2 | 0x8000] * 3, np.uint16), storage)
        smallest = {"float16": 3e-8, "bfloat16": 1e-40}[storage]
        for start, w, sizes in ((0, random, (1e-3, 1e-6, 0.1)), (2**35 + 1021, random, (1e-3,)),
                                (1021, tiny, (smallest, smallest / 8)), (5, large, (3e4, 3e38))):  # fmt: skip
            steps = [{"key": f"{SOME + t:016x}", "round": 60 + t, "first": 0, "rounding_index": t % 2,
                      "c": hex32(np.float32(np.clip(rng.normal(2) * size, -3e38, 3e38)))}
                     for t, size in enumerate(sizes)]  # fmt: skip
            made.append({"section": "commit", "storage": storage, "distribution": "gaussian", "start": start,
                         "dimension": 2**36, "bits": 16, "w": w, "steps": steps})  # fmt: skip
    momentum = {"name": "momentum", "options": OPTIMIZER_OPTIONS["momentum"]}
    made += [_ledger_case("gaussian", "chained", None, 2, 2, rounding="stochastic16"),
             _ledger_case("rademacher", "shared", 0.45, 3, 1, rounding="stochastic16", optimizer=momentum)]  # fmt: skip
    stated = '"rounding":{"name":"stochastic16","options":{},"version":1}'
    header = some_header(k=2, rounding="stochastic16")
    assert stated.encode() in header.to_json()
    changes: list[Case] = [{"why": "float32 weights, which are not rounded"}]
    changes += [{"why": why, "json": [[old, new]]} for why, old, new in (
        ("the other rounding", "stochastic16", "stochastic"), ("unknown", "stochastic16", "stochastic8"),
        ("version 2", stated, stated.replace(":1}", ":2}")), ("an option", stated, stated.replace("{}", '{"bits":16}')),
        ("the rounding again", '"settings":{}', '"settings":{"method":{"rounding":"stochastic16"}}'),
    )]  # fmt: skip
    return [*made, {"section": "headers", "file_hex": opening_of(header).hex(), "changes": changes}]


def _optimizer_header_case() -> Case:
    stated = '"optimizer":{"name":"adam","options":{"beta1":0.9,"beta2":0.999,"eps":1e-08},"version":1}'
    header = some_header(k=2, optimizer="adam")
    assert stated.encode() in header.to_json()
    changes: list[Case] = [{"why": "nothing is changed"}]

    def other(why: str, name: str, options: str, *more: list[str]) -> None:
        text = f'"optimizer":{{"name":"{name}","options":{{{options}}},"version":1}}'
        changes.append({"why": why, "json": [[stated, text], *more]})

    two, one = ['"local_epochs":1', '"local_epochs":2'], ['"k":2', '"k":1']
    for name in ("sgd", "normalized", "zscore", "rank"):
        other(name, name, "")
        other(f"{name} with k = 1", name, "", one)
        other(f"{name} with two local epochs", name, "", two, one)
        other(f"{name} with an option", name, '"beta":0.5')
    for name, largest in (("adaptive", "0.9999999999999999"), ("momentum", "0.999999")):
        for beta in ("0.0", largest, "1.0", "-0.1", "0", "null", "true", '"0.5"'):
            other(f"{name} with the beta {beta}", name, f'"beta":{beta}')
        other(f"{name} without beta", name, "")
        other(f"{name} with two local epochs", name, '"beta":0.5', two)
    other("momentum with a longer mean", "momentum", '"beta":0.9999999')
    for beta1, beta2, eps in (
        ("0.5", "0.5", "1.0"), ("0.6", "0.5", "1e-08"), ("0.0", "0.999999", "1e-12"),
        ("0.9", "0.9999999", "1e-08"), ("0.9", "0.999", "1e-13"), ("0.9", "0.999", "2.0"),
    ):  # fmt: skip
        options = f'"beta1":{beta1},"beta2":{beta2},"eps":{eps}'
        other(f"adam with {beta1}, {beta2}, {eps}", "adam", options)
    changes.append({"why": "adam with two local epochs", "json": [two]})
    for floor, nu in (("0.01", "0.01"), ("1e-12", "1e-06"), ("1.0", "1.0"), ("1e-13", "0.01"), ("0.01", "9e-07"),
                      ("2.0", "0.01"), ("0.01", "1.5")):  # fmt: skip
        other(f"hessian with the floor {floor} and nu {nu}", "hessian", f'"floor":{floor},"nu":{nu}')
    other("hessian with two local epochs", "hessian", '"floor":0.01,"nu":0.01', two)
    return {"section": "headers", "file_hex": opening_of(header).hex(), "changes": changes}


LOW_RANK_SHAPES = [[7, 5], [5], [], [4, 3, 2, 2], [1, 9], [3, 0], [30, 2], [2, 2], [6, 40]]


def _low_rank_cases() -> list[Case]:
    made, rng = list[Case](), Draws(11)
    size = sum(math.prod(shape) for shape in LOW_RANK_SHAPES)
    for rank in (1, 2, 3, 7):
        same = {"distribution": "low_rank", "shapes": LOW_RANK_SHAPES, "rank": rank}
        for key, t, j, start, count in [(0, 0, 0, 0, size), (TOP, 2**32 - 1, 2**24 - 1, 33, 60), (42, 7, 3, 101, 7)]:
            made.append({"section": "direction", **same, "key": f"{key:016x}", "round": t, "index": j, "start": start,
                         "count": count, "dimension": size})  # fmt: skip
        for storage, zero in (("float32", "80000000"), ("float16", "8000"), ("bfloat16", "8000")):
            w = stored_hex(definition.narrow(np.float32(rng.normal(24) * 0.02), storage), storage)
            steps = [{"key": f"{SOME + t:016x}", "round": 40 + t, "first": 2 * t, "rounding_index": t % 2,
                      "c": hex32(np.float32(rng.normal(3) * c))}
                     for t, c in enumerate((1e-3, 1e-6, 0.1, 1e-45))]  # fmt: skip
            common = {**same, "storage": storage, "start": 29, "dimension": size, "w": [*w, zero, zero]}
            made.append({"section": "commit", **common, "steps": steps})
            made.append({"section": "probe", **common, "key": f"{SOME:016x}", "round": 3, "index": 9, "c": -1e-3})
    made += [_ledger_case("low_rank", "chained", None, 3, 2, rank=1),
             _ledger_case("low_rank", "shared", 0.45, 2, 1, rank=2,
                          optimizer={"name": "adam", "options": OPTIMIZER_OPTIONS["adam"]})]  # fmt: skip
    header = some_header(distribution="low_rank", rank=2)
    stated = '"distribution":{"name":"low_rank","options":{"rank":2},"version":1}'
    assert stated.encode() in header.to_json()
    other = ('{"rank":1}', '{"rank":16777216}', '{"rank":16777217}', '{"rank":0}', '{"rank":2.0}', '{"rank":true}',
             '{"rank":null}', "{}", "[2]", "2", '{"a":1,"rank":2}')  # fmt: skip
    changes: list[Case] = [{"why": "nothing is changed"}]
    changes += [
        {"why": f"the options {options}", "json": [[stated, stated.replace('{"rank":2}', options)]]}
        for options in other
    ]
    changes += [
        {"why": "another distribution with a rank", "json": [["low_rank", "gaussian"]]},
        {"why": "the rank again", "json": [['"settings":{}', '"settings":{"method":{"rank":2}}']]},
    ]
    made.append({"section": "headers", "file_hex": opening_of(header).hex(), "changes": changes})
    older: list[Case] = [
        {"why": "low_rank in format 1", "json": [['"gaussian"', '"low_rank"']]},
        {"why": "a rank of 1", "json": [['"config":{}', '"config":{"method":{"rank":1}}']]},
        {"why": "another rank", "json": [['"config":{}', '"config":{"method":{"rank":2}}']]},
    ]
    return [*made, {"section": "headers", "file_hex": opening_of(some_header(format=1)).hex(), "changes": older}]


def written() -> str:
    """Return the file: one case a line."""
    about = "Test vectors of docs/FORMAT.md, written by tests/format_vectors.py"
    lines = [json.dumps({**case, "expect": by_library(case)}) for case in cases()]
    return f'{{"format": 2,\n "about": "{about}",\n "cases": [\n' + ",\n".join(lines) + "\n]}\n"


if __name__ == "__main__":
    FILE.write_text(written())
    print(f"{FILE}: {len(cases())} cases")
