"""The test vectors of docs/FORMAT.md: which cases there are, and what the library makes of them.

`python tests/format_vectors.py` writes docs/format_vectors.json. A case is a dictionary: section, inputs, `expect`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cyber0 import aggregate, protocol
from cyber0 import codec as codecs
from cyber0.client import replay
from cyber0.counting import share_of
from cyber0.directions import Perturbation, Step, definition, engine, permutation, philox4x32, reference, words
from cyber0.federator import invited_clients
from cyber0.ledger import Entry, Header, Ledger, Record, Reports, first_chain, opening_of
from cyber0.ledger.record import Codec
from cyber0.parameters import Parameters
from cyber0.samples import Samples
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


def _direction(case: Case) -> Any:
    key, round, index = _place(case)
    dimension = case.get("dimension")
    z = reference(key, round, index, case["start"], case["count"], case["distribution"], dimension=dimension)
    out = torch.empty(case["count"])
    engine.fill(out, case["start"], key, round, index, case["distribution"], dimension=dimension or 0)
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
        model.register_buffer(name, as_tensor(patterns, dtype).view(shape))
    return Parameters(model).rest_digest()


def _nearest(case: Case) -> Any:
    return stored_hex(definition.narrow(floats(case["x"]), case["storage"]), case["storage"])


def _stochastic(case: Case) -> Any:
    w = np.array([int(p, 16) for p in case["words"]], np.uint32)
    return stored_hex(definition.narrow_stochastically(floats(case["x"]), case["storage"], w), case["storage"])


def _coefficients(case: Case) -> Any:
    c = definition.coefficients_for(case["lr"], floats(case["g"]), case["k"])
    assert hex32(engine.coefficients(case["lr"], floats(case["g"]), case["k"])) == hex32(c)
    return hex32(c)


def _commit(case: Case) -> Any:
    steps = [
        Step(int(s["key"], 16), s["round"], floats(s["c"]), s["first"], s["rounding_index"]) for s in case["steps"]
    ]
    return _applied(case, steps, None)


def _probe(case: Case) -> Any:
    key, round, index = _place(case)
    return _applied(case, [], Perturbation(key, round, index, case["c"]))


def _applied(case: Case, steps: list[Step], look: Perturbation | None) -> list[str]:
    storage, start, dimension = case["storage"], case["start"], case["dimension"]
    w = stored(case["w"], storage)
    defined = definition.apply(w, storage, start, steps, look, case["distribution"], dimension=dimension)
    source = as_tensor(case["w"], storage)
    engine.apply(source, source, start, steps, look, case["distribution"], dimension=dimension)
    assert tensor_hex(source) == stored_hex(defined, storage)
    return stored_hex(defined, storage)


def _projection(case: Case) -> Any:
    parameters = Parameters(model_of(case["layout"]))
    load(parameters, case["layout"], case["weights"])
    parameters.project(case["radius"])
    return [tensor_hex(t) for t in parameters.tensors]


def _codec(case: Case) -> Any:
    codec = codecs.make(case["codec"])
    data = codec.encode(floats(case["values"]))
    return {"bytes_hex": data.hex(), "decoded": hex32(codec.decode(data))}


def _share(case: Case) -> Any:
    return share_of(case["fraction"], case["count"])


def _invited(case: Case) -> Any:
    return invited_clients(int(case["seed"], 16), case["round"], case["clients"], case["participation"]).tolist()


def _trimmed_mean(case: Case) -> Any:
    rule = aggregate.trimmed_mean(case["beta"])
    outcome = rule.decide(rows_of(case), case["invited"], case["round"])
    return {"values": hex64(outcome.values), "trimmed": outcome.excluded.tolist()}


def rows_of(case: Case) -> np.ndarray:
    """The matrix of a case: patterns, or, where there are too many, Gaussian coordinates of all sizes.

    Row i is the beginning of direction i times 2^(7 i mod 61 - 30): in float64 the order of their sum matters.
    """
    if "rows" in case:
        return np.stack([floats(row) for row in case["rows"]])
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
    parameters = Parameters(model_of(case["header"]["layout"]), header.distribution)
    # The digest of w0 is in the header already; what the library makes of the model must agree with it.
    load(parameters, case["header"]["layout"], case["w0"])
    assert parameters.digest() == header.weights_digest
    data, chains, keys, digests = opening_of(header), [ledger.chain.hex()], [], []
    for record in map(record_of, case["records"]):
        keys.append(f"{header.round_key(ledger.chain):016x}")
        data += Codec(header).encode(record, ledger.chain)
        ledger.append(record)
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


def _message(case: Case) -> Any:
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
        return protocol.encode_decision(protocol.Decision(case["round"], case["lr"], values, chain), codec).hex()
    if kind == "evaluation":
        return protocol.encode_evaluation(protocol.Evaluation(case["round"], case["accuracy"], case["loss"])).hex()
    if kind == "opened":
        return protocol.encode_opened(protocol.Opened(case["round"], chain)).hex()
    return protocol.encode_bare({"replay": protocol.REPLAY, "ended": protocol.ENDED}[kind]).hex()


SECTIONS: dict[str, Callable[[Case], Any]] = {
    "philox": _philox, "words": _words, "permutation": _permutation, "round_key": _round_key, "direction": _direction,
    "sphere_scale": _sphere_scale, "digest": _digest, "rest_digest": _rest_digest, "nearest": _nearest,
    "stochastic": _stochastic, "coefficients": _coefficients, "commit": _commit, "probe": _probe,
    "projection": _projection, "codec": _codec, "share": _share, "invited": _invited, "trimmed_mean": _trimmed_mean,
    "batch": _batch, "partition": _partition, "ledger": _ledger, "reports": _reports, "message": _message,
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
    return Header(**{**fields, "seed": int(fields["seed"], 16), "layout": tuple(Entry(**e) for e in fields["layout"])})


def record_of(fields: Case) -> Record:
    values = None if fields["values"] is None else floats(fields["values"])
    return Record(fields["round"], fields["lr"], values, np.array(fields["reported"], np.bool_),
                  np.array(fields["trimmed"], np.int64))  # fmt: skip


def some_header(seed: int, seed_mode: str) -> Header:
    return Header(
        seed=seed, dimension=1, layout=(Entry("w", (1,), "float32", 0),), distribution="gaussian", k=1, local_epochs=1,
        mu=1e-3, estimator="two_point", lr=0.1, lr_schedule="constant", projection_radius=None,
        weights_digest="0" * 64, rest_digest="0" * 64, clients=1, seed_mode=seed_mode,
    )  # fmt: skip


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
    for build in (_random_cases, _direction_cases, _weight_cases, _commit_cases, _scalar_cases, _file_cases):
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
    for size, radius in ((0.1, 10.0), (0.1, 0.1), (30.0, 1.0), (1e4, 1e-3), (3e38, 1.0)):
        weights = _some_weights(min(size, 1e4), seed=2)
        weights[0] = hex32(np.float32((2 * rng.uniform(12) - 1) * size))
        made.append({"section": "projection", "layout": LAYOUT, "weights": weights, "radius": radius})
    return made


def _scalar_cases() -> list[Case]:
    edge = codecs.make("log8").decode(b"\x01")[0] / 2  # between the codes 0 and 1
    values = np.float32([0, -0.0, 1, -1, 1e-5, 9e-6, 1.8e-5, 0.3, -7.7, 1234.5, 6e4, -1e9, 3.39e38, np.inf, np.nan,
                         1e-40, -1e-7, edge, -edge])  # fmt: skip
    made: list[Case] = [{"section": "codec", "codec": name, "values": hex32(values)} for name in codecs.CODECS]
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
    made += [
        {"section": "batch", "seed": f"{seed:016x}", "client": c, "round": t, "epoch": e, "samples": n, "batch_size": b}
        for seed, c, t, e, n, b in [(0, 0, 0, 0, 10, 16), (0, 0, 0, 0, 100, 8), (SOME, 11, 399, 2, 17, 16)]
    ]
    labels = rng.integers(3, 20).tolist()
    made += [
        {"section": "partition", "partition": name, "seed": f"{SOME:016x}", "clients": 3, "labels": labels}
        for name in ("iid", "by_label")
    ]
    return made


def _ledger_case(distribution: str, seed_mode: str, radius: float | None, k: int, epochs: int) -> Case:
    rng = Draws(7)
    w0, n, clients = _some_weights(0.1), k * epochs, 11
    parameters = Parameters(model_of(LAYOUT))
    load(parameters, LAYOUT, w0)
    header = {
        "seed": f"{SOME:016x}", "dimension": 21, "layout": LAYOUT, "distribution": distribution, "k": k,
        "local_epochs": epochs, "mu": 1e-05, "estimator": "two_point", "lr": 0.05, "lr_schedule": "linear",
        "projection_radius": radius, "weights_digest": parameters.digest(), "rest_digest": parameters.rest_digest(),
        "clients": clients, "config": {"task": {"name": "Größe \u2211 \U0001f600 \"x\"\n"}, "rounds": 4, "serve": {}},
        "codec": "float32", "seed_mode": seed_mode,
    }  # fmt: skip
    records = []
    for t in range(4):
        abandoned = t == 1
        reported = (rng.uniform(clients) < 0.7).tolist()
        trimmed = [int(v) for v in rng.integers(n + 1, clients)]
        records.append({
            "round": t, "lr": 0.05 * (1 - t / 4),
            "values": None if abandoned else hex32(np.float32(rng.normal(n))),
            "reported": reported, "trimmed": [0] * clients if abandoned else trimmed,
        })  # fmt: skip
    return {"section": "ledger", "header": header, "w0": w0, "records": records}


def _file_cases() -> list[Case]:
    made: list[Case] = [
        _ledger_case("gaussian", "shared", None, 3, 1),
        _ledger_case("sphere", "chained", 0.45, 2, 2),
        _ledger_case("rademacher", "chained", None, 8, 1),
    ]
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
        {"section": "message", "kind": "evaluation", "round": 5, "accuracy": 0.75, "loss": 1.5},
        {"section": "message", "kind": "opened", "round": 6, "chain_hex": chain},
        {"section": "message", "kind": "replay"},
        {"section": "message", "kind": "ended"},
    ]
    for name, decided in (("float32", values), ("bfloat16", values), ("log8", values), ("float32", None)):
        made.append({"section": "message", "kind": "decision", "codec": name, "round": 7, "lr": 0.01, "values": decided,
                     "chain_hex": chain})  # fmt: skip
    return made


def written() -> str:
    """Return the file: one case a line."""
    about = "Test vectors of docs/FORMAT.md, written by tests/format_vectors.py"
    lines = [json.dumps({**case, "expect": by_library(case)}) for case in cases()]
    return f'{{"format": 1,\n "about": "{about}",\n "cases": [\n' + ",\n".join(lines) + "\n]}\n"


if __name__ == "__main__":
    FILE.write_text(written())
    print(f"{FILE}: {len(cases())} cases")
