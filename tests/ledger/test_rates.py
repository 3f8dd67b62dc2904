"""The learning rates that header and records determine, and how large a decided scalar may be."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledgers import make_header

from cyber0.config.schedules import learning_rate
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, LedgerError
from cyber0.ledger import Header, Record
from cyber0.ledger.rates import AgreedRates, scalar_fault, scalar_limit

STAIRS = """
def stairs(*, every: int = 2):
    return lambda t, rounds: 2.0 ** -(t // every)

def broken():
    return lambda t, rounds: 1 // 0
"""


def at(round: int, lr: float, rounds: int = 9, value: float | None = 1.0) -> Record:
    values = None if value is None else np.array([value], np.float32)
    return Record(round, lr, values, np.ones(8, np.bool_), np.zeros(8, np.int64), rounds=rounds)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_what_a_federator_uses_is_what_was_agreed_on_also_when_a_run_is_lengthened(schedule: str) -> None:
    header = make_header(lr_schedule=schedule)
    agreed = AgreedRates(header)
    assert agreed.unknown == "" and not agreed.free
    for rounds in (9, 20, 0):
        lr_at = learning_rate(header.lr, schedule, rounds)
        for t in range(max(rounds, 1)):
            assert agreed.fault(at(t, lr_at(t), rounds)) == ""
            assert agreed.fault(at(t, lr_at(t), rounds, value=None)) == ""
            assert "learning rate is 7.0, and" in agreed.fault(at(t, 7.0, rounds))
    if schedule != "constant":
        assert agreed.fault(at(5, learning_rate(header.lr, schedule, 20)(5), 9)) != ""


def test_platforms_may_differ_in_the_last_bits_of_a_cosine_and_no_more() -> None:
    agreed = AgreedRates(make_header(lr_schedule="cosine"))
    rounds = 10**6
    for t in (0, 1, rounds // 2, rounds - 1):
        other = 0.01 * 0.5 * (1.0 + math.nextafter(math.cos(math.pi * (t / rounds)), 1.0))
        assert agreed.fault(at(t, other, rounds)) == ""
    assert agreed.fault(at(0, 0.01 * (1 + 1e-8), rounds)) != ""
    assert agreed.fault(at(rounds - 1, 0.01 * 1e-8, rounds)) != ""


def test_a_schedule_that_only_a_header_names_is_not_imported_and_only_nonsense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import pathlib; pathlib.Path('sprung').touch()\n" + STAIRS)
    header = make_header(lr_schedule="own.py:stairs", settings={"rounds": 9, "method": {"lr_options": {"every": 1}}})
    agreed = AgreedRates(header)
    assert "--schedule FILE.py:NAME" in agreed.unknown and not (tmp_path / "sprung").exists()
    assert agreed.fault(at(3, 7.0)) == ""
    for odd in (-1.0, math.inf, math.nan):
        assert "at least 0 was agreed on" in agreed.fault(at(3, odd))
    with pytest.raises(ConfigError, match="--schedule"):
        agreed.of_run(9)
    named = AgreedRates(header, "own.py:stairs")
    assert named.unknown == "" and (tmp_path / "sprung").exists()
    assert named.fault(at(3, 0.01 / 8)) == "" and "0.00125 was agreed on" in named.fault(at(3, 0.01))
    with pytest.raises(ConfigError, match=r"own\.py:broken in round 3 failed: ZeroDivisionError"):
        AgreedRates(dataclasses.replace(header, settings={"rounds": 9}), "own.py:broken").fault(at(3, 0.01))


def test_a_path_is_for_schedules_that_are_not_built_in() -> None:
    with pytest.raises(ConfigError, match="--schedule stairs must be a path"):
        AgreedRates(make_header(lr_schedule="own.py:stairs"), "stairs")
    for named in ("linear", "free"):
        with pytest.raises(ConfigError, match=f"this run's is '{named}': leave it out"):
            AgreedRates(make_header(lr_schedule=named), "own.py:stairs")


def test_of_format_1_only_what_does_not_depend_on_the_number_of_rounds_is_checked() -> None:
    settings = {"rounds": 9}
    constant = AgreedRates(make_header(format=1, settings=settings))
    assert constant.fault(at(3, 0.01)) == "" and constant.fault(at(3, 7.0)) != ""
    linear = AgreedRates(make_header(format=1, lr_schedule="linear", settings=settings))
    assert "format 1 does not record" in linear.unknown
    assert linear.fault(at(3, 0.01)) == "" and linear.fault(at(3, -0.01)) != ""


@pytest.mark.parametrize("changes", [{"lr_schedule": "free"}, {"settings": {}}])
def test_the_user_of_a_zero_order_sets_any_learning_rate(changes: dict[str, Any]) -> None:
    agreed = AgreedRates(make_header(**changes))
    assert agreed.free and agreed.fault(at(3, 7.0)) == "" and agreed.fault(at(3, -7.0)) == ""


def test_no_config_can_leave_the_learning_rate_open() -> None:
    with pytest.raises(ConfigError, match="lr_schedule = 'free'"):
        Config().with_overrides(["method.lr_schedule=free"])


def test_options_that_a_header_gives_a_schedule_must_fit() -> None:
    for options in ({"every": 1}, 3, None):
        header = make_header(settings={"rounds": 9, "method": {"lr_options": options}})
        with pytest.raises((ConfigError, LedgerError), match="lr_options"):
            AgreedRates(header).fault(at(0, 0.01))


def served(**settings: Any) -> Header:
    return make_header(id="0a" * 16, settings={"rounds": 9, **settings})


def test_the_scalars_of_a_served_run_have_a_limit_and_a_simulation_has_none() -> None:
    assert scalar_limit(make_header()) == math.inf
    assert scalar_limit(served()) == 1e6
    assert scalar_limit(served(serve={"scalar_limit": 5})) == 5
    for odd in (0, -1.0, True, "1", None):
        with pytest.raises(LedgerError, match=r"scalar_limit = .* must be a finite number above 0"):
            scalar_limit(served(serve={"scalar_limit": odd}))
    assert scalar_fault(at(0, 0.01, value=None), 1.0) == "" and scalar_fault(at(0, 0.01, value=-1e6), 1e6) == ""
    assert "magnitude 2e+06, and at most 1e+06" in scalar_fault(at(0, 0.01, value=-2e6), 1e6)
