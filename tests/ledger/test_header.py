"""A ledger's header: each setting once, and nothing that makes no sense."""

from __future__ import annotations

import io
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from ledgers import copy_with, make_header, write

from cyber0.errors import LedgerError
from cyber0.ledger import (
    MAGIC,
    Header,
    LayoutEntry,
    Ledger,
    read_opening,
    without_fields,
)
from cyber0.ledger.settings import IN_CONFIG


def test_a_ledger_of_another_format_is_refused_by_name(folder: Path) -> None:
    text = make_header().to_json()
    with pytest.raises(LedgerError, match="format 3, and this cyber0 knows formats 1 and 2: update cyber0"):
        Header.from_json(text.replace(b'"format":2', b'"format":3'))
    data = bytearray(write(folder, make_header(), []).read_bytes())
    data[len(MAGIC)] = 3
    with pytest.raises(LedgerError, match="format 3, and"):
        Ledger.open(copy_with(folder, bytes(data)))
    assert Header.from_json(text) == make_header()
    assert Header.from_json(text).to_json() == text


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b'{"format":2}', b'{"format":2,"k":2}', b"\xff\xfe"])
def test_a_header_that_makes_no_sense_is_refused(text: bytes) -> None:
    with pytest.raises(LedgerError):
        Header.from_json(text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**64}, "seed = 18446744073709551616"),
        ({"seed": 1.5}, r"seed = 1\.5"),
        ({"seed": True}, "seed = True"),
        ({"k": 0}, "k = 0"),
        ({"k": 2.5}, r"k = 2\.5 .* a whole number"),
        ({"k": "3"}, "k = '3'"),
        ({"local_epochs": 1.0}, r"local_epochs = 1\.0"),
        ({"clients": 0}, "clients = 0"),
        ({"clients": 2**24 + 1}, "clients = 16777217"),
        ({"k": 2**12, "local_epochs": 2**12}, r"local_epochs \* k = 16777216"),
        ({"codec": "int8"}, "codec = 'int8' .* one of float32, bfloat16, log8"),
        ({"codec": ["float32"]}, r"codec = \['float32'\]"),
        ({"seed_mode": None}, "seed_mode = None"),
        ({"optimizer": "lion"}, "optimizer 'lion' .* known are .*sgd in version 1.*: update cyber0"),
        ({"optimizer_options": {"beta": 0.5}}, "impossible options: .*beta = 0.5: sgd takes no such option"),
        ({"optimizer_options": []}, r"optimizer.options = \[\] .* must be a table"),
        ({"optimizer": "adaptive", "optimizer_options": {"beta": 1.0}}, "impossible options: .*beta = 1.0 must be"),
        ({"optimizer": "normalized", "k": 1}, "k = 1 .* must be at least 2 with optimizer = 'normalized'"),
        ({"optimizer": "zscore", "k": 1, "local_epochs": 5}, "k = 1 .* must be at least 2 with optimizer = 'zscore'"),
        ({"rounding": "nearest"}, "rounding 'nearest' .* known are stochastic in version 1"),
        ({"distribution": ["gaussian"]}, "distribution .*gaussian.* unknown"),
        ({"id": "ab"}, "id = 'ab' .* 32 hexadecimal digits"),
        ({"format": 3}, "format = 3"),
        ({"distribution": "uniform"}, "distribution 'uniform' .* unknown here; known are gaussian in version 1"),
        ({"estimator": "guess"}, "estimator = 'guess' .* two_point"),
        ({"lr_schedule": ""}, "lr_schedule = '' .* constant"),
        ({"lr_schedule": 1}, "lr_schedule = 1 .* constant"),
        ({"layout": ()}, "no coordinates"),
        ({"settings": {"function": print}}, "can't be written as JSON"),
        ({"settings": []}, r"settings = \[\] .* a table"),
        ({"settings": {"method": "on"}}, r"settings\.method = 'on' .* a table"),
        ({"settings": {"seed": 2**64 - 1}}, "a setting twice: seed = 18446744073709551615 is its field seed"),
        ({"settings": {"seed": 3}}, "contradicts itself: seed = 18446744073709551615, but seed = 3 in its config"),
        ({"settings": {"method": {"mu": 7.5}}}, r"contradicts itself: mu = .*, but method\.mu = 7\.5 in its config"),
        ({"mu": "x"}, "mu = 'x' .* a finite number, at least 0"),
        ({"mu": float("nan")}, "mu = nan"),
        ({"mu": -1e-3}, r"mu = -0\.001"),
        ({"mu": 0}, 'mu = 0 .* above 0 with estimator = "two_point"'),
        ({"mu": 0, "estimator": "one_sided"}, 'mu = 0 .* above 0 with estimator = "one_sided"'),
        ({"mu": 10**400}, "mu = 1000"),
        ({"lr": 0.0}, r"lr = 0\.0"),
        ({"lr": float("inf")}, "lr = inf"),
        ({"lr": None}, "lr = None"),
        ({"projection_radius": 0}, "projection_radius = 0 .* above 0, or null"),
        ({"weights_digest": "ab"}, "weights_digest = 'ab' .* 64 hexadecimal digits"),
        ({"rest_digest": 7}, "rest_digest = 7"),
        ({"layout": 3}, "layout = 3"),
        ({"layout": ({"name": "w"},)}, "layout = .* a list of entries"),
        (
            {"layout": (LayoutEntry("w", (6,), "float32", 0), LayoutEntry("b", (6,), "float32", 5))},
            "'b' .* at coordinate 5",
        ),
        (
            {"layout": (LayoutEntry("w", (6,), "float32", 0), LayoutEntry("b", (5,), "float32", 7))},
            "'b' .* at coordinate 7",
        ),
        (
            {"layout": (LayoutEntry("w", (6,), "float32", 0), LayoutEntry("w", (6,), "float32", 6))},
            "two weights are named 'w'",
        ),
    ],
)
def test_an_impossible_header_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LedgerError, match=named):
        make_header(**changes)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ((5, (2,), "float32", 0), "layout.name = 5"),
        (("w", (2.5,), "float32", 0), r"layout\.shape of 'w' = \(2\.5,\)"),
        (("w", (-1,), "float32", 0), r"layout\.shape of 'w' = \(-1,\)"),
        (("w", 4, "float32", 0), r"layout\.shape = 4"),
        (("w", (2**63,), "float32", 0), r"layout\.shape of 'w' = \(9223372036854775808,\)"),
        (("w", (2**32, 2**31), "float32", 0), r"layout\.shape of 'w' .* fewer than 2\*\*63 coordinates"),
        (("w", (10**4000,) * 900, "float32", 0), r"layout\.shape of 'w' = "),
        (("w", (1,) * 65, "float32", 0), r"layout\.shape of 'w' = "),
        (("w", (2,), "int8", 0), r"layout\.dtype of 'w' = 'int8' .* float32, float16, bfloat16"),
        (("w", (2,), "float32", -1), r"layout\.offset of 'w' = -1"),
        (("w", (2,), "float32", "0"), r"layout\.offset of 'w' = '0'"),
    ],
)
def test_an_impossible_weight_in_the_layout_is_refused_by_name(entry: tuple[Any, ...], named: str) -> None:
    with pytest.raises(LedgerError, match=named):
        LayoutEntry(*entry)


def in_json(text: bytes, name: str, value: object) -> bytes:
    """Return a header's JSON with one key replaced."""
    found = {**json.loads(text), name: value}
    return json.dumps(found, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        (
            "distribution",
            {"name": "thirds", "options": {"rank": 2}, "version": 1},
            "'thirds' in version 1 .* update",
        ),
        ("distribution", {"name": "gaussian", "options": {}, "version": 2}, "'gaussian' in version 2 .* unknown here"),
        ("distribution", {"name": "gaussian", "options": {}, "version": True}, "'gaussian' in version True"),
        ("distribution", {"name": "gaussian", "options": {}, "version": None}, "'gaussian' in version None"),
        ("distribution", {"name": "gaussian", "options": {"rank": 2}, "version": 1}, "takes no options, got .*rank"),
        ("distribution", {"name": "low_rank", "options": {}, "version": 1}, "must be an object of rank"),
        ("distribution", {"name": "low_rank", "options": 2, "version": 1}, "must be an object of rank"),
        (
            "distribution",
            {"name": "low_rank", "options": {"rank": 0}, "version": 1},
            "rank = 0 .* a whole number, 1 to",
        ),
        ("distribution", {"name": "low_rank", "options": {"rank": 1.0}, "version": 1}, "rank = 1.0 .* a whole number"),
        (
            "distribution",
            {"name": "low_rank", "options": {"rank": 1, "x": 2}, "version": 1},
            "must be an object of rank",
        ),
        ("optimizer", {"name": "lion", "options": {}, "version": 1}, "optimizer 'lion' in version 1 .* known are"),
        ("rounding", {"name": "stochastic", "options": {}, "version": 9}, "rounding 'stochastic' in version 9"),
        ("rounding", "stochastic", "an object of name, options and version"),
        ("extensions", {"privacy": {"version": 1}}, "extensions 'privacy', which this cyber0 does not know: update"),
        ("extensions", [], r"extensions \[\]"),
        ("surprise", 1, r"missing or too many: \['surprise'\]"),
    ],
)
def test_what_a_later_version_may_add_is_refused_by_name(name: str, value: object, named: str) -> None:
    text = make_header().to_json()
    assert Header.from_json(text) == make_header()
    with pytest.raises(LedgerError, match=named):
        Header.from_json(in_json(text, name, value))


def test_a_header_has_each_setting_once_and_knows_them_all() -> None:
    settings = {"rounds": 9, "method": {"batch_size": 4}, "task": {"name": "mnist"}}
    config = make_header(settings=settings, projection_radius=2.0).config
    assert config["rounds"] == 9 and config["task"] == {"name": "mnist"} and config["seed"] == 2**64 - 1
    assert config["method"]["batch_size"] == 4 and config["method"]["projection_radius"] == 2.0
    assert config["federation"] == {"clients": 8} and config["serve"] == {"codec": "float32", "seed_mode": "shared"}
    assert make_header(settings=settings).config["method"]["projection_radius"] == 0.0
    assert make_header(settings=without_fields(config), projection_radius=2.0).config == config
    assert make_header(settings={}).config == {}
    assert settings["method"] == {"batch_size": 4}


@pytest.mark.parametrize(("name", "path"), IN_CONFIG.items())
@pytest.mark.parametrize("format", [1, 2])
def test_a_config_that_contradicts_its_header_is_refused_with_both_values(name: str, path: str, format: int) -> None:
    section, _, key = path.rpartition(".")
    header = make_header(format=format)
    agreed = getattr(header, name) if name != "projection_radius" else 0.0
    agreeing = {section: {key: agreed}} if section else {key: agreed}
    other = {section: {key: "another"}} if section else {key: "another"}
    mine = re.escape(repr(getattr(header, name)))
    with pytest.raises(LedgerError, match=rf"itself: {name} = {mine}, but {re.escape(path)} = 'another' in its config"):
        make_header(format=format, settings=other)
    if format == 1:  # which repeats its fields in its config
        assert make_header(format=1, settings=agreeing).config == agreeing
    else:
        with pytest.raises(LedgerError, match=f"a setting twice: {re.escape(path)} = .* is its field {name}"):
            make_header(settings=agreeing)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_deeply_nested_settings_are_refused_and_crash_nothing(depth: int) -> None:
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    with pytest.raises(LedgerError, match="nested too deeply"):
        Header.from_json(make_header(settings={}).to_json().replace(b'"settings":{}', b'"settings":' + nested))
    with pytest.raises(LedgerError, match="can't be read"):  # for its depth, or where Python reads it, for its end
        Header.from_json(b"[" * depth)
    config: dict[str, Any] = {}
    for _ in range(depth):
        config = {"a": config}
    with pytest.raises(LedgerError, match="nested too deeply"):
        make_header(settings=config)


def test_settings_may_be_nested_to_a_depth_that_does_not_depend_on_python() -> None:
    nested: Any = 1
    for _ in range(15):
        nested = [nested]
    make_header(settings={"a": nested})
    with pytest.raises(LedgerError, match="nested too deeply: 16 levels are the most"):
        make_header(settings={"a": [nested]})


@pytest.mark.parametrize("indent", [None, 1])
def test_a_header_that_is_not_canonical_json_is_refused(folder: Path, indent: int | None) -> None:
    found = json.loads(make_header().to_json())
    text = json.dumps(found, indent=indent, sort_keys=True).encode()
    opening = MAGIC + b"\x02" + len(text).to_bytes(4, "little") + text
    path = folder / "ledger.bin"
    path.write_bytes(opening + zlib.crc32(opening).to_bytes(4, "little"))
    with pytest.raises(LedgerError, match="not canonical JSON"):
        Ledger.open(path)


def test_a_header_whose_length_is_damaged_asks_for_no_memory(folder: Path) -> None:
    data = bytearray(write(folder, make_header(), []).read_bytes())
    data[len(MAGIC) + 1 : len(MAGIC) + 5] = b"\xff" * 4
    asked = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return super().read(size)

    with pytest.raises(LedgerError, match="claims 4294967295 bytes; 16777216 are the most"):
        read_opening(Watched(data), "x")
    data[len(MAGIC) + 1 : len(MAGIC) + 5] = (1 << 24).to_bytes(4, "little")
    with pytest.raises(LedgerError, match="cut off: 16777216 bytes were announced"):
        read_opening(Watched(data), "x")
    assert max(asked) <= 1 << 20


def test_seed_zero_is_a_seed_and_a_round_decides_k_numbers_per_local_epoch() -> None:
    header = make_header(seed=0, k=4, local_epochs=3, projection_radius=2.5)
    assert Header.from_json(header.to_json()) == header
    assert header.scalars == 12
