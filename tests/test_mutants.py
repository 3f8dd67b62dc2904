"""The mutation tester itself: it must tell a fault that is caught from one that is not, or its figures mean nothing."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import mutants
import pytest
from mutants import BrokenSetupError, Laboratory, Outcome, Part, Semantic, sampled, summary, thought_of, try_all
from mutation import Mutant, find, sample

CORE = b'''"""A toy."""


def clamp(x: int, low: int = 0, high: int = 9) -> int:
    """Return x, but no less than 3 and no more than 4."""
    if x < low:
        return low
    return min(x, high)


def countdown(n: int) -> int:
    steps = 0
    while n > 0:
        n -= 1
        steps += 1
    return steps


def untested(a: int) -> int:
    if a > 10 and a % 2 == 0:
        raise ValueError(f"{a + 1} is too much" + "by 1")
    return a * 2
'''
TESTS = """
from toy.core import clamp, countdown

def test_clamp():
    assert [clamp(x) for x in (-1, 0, 5, 9, 10)] == [0, 0, 5, 9, 9]

def test_countdown():
    assert countdown(3) == 3 and countdown(0) == 0
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of its own, with tests that cover a part of it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to load than these tests to run
    for name, text in (("src/toy/__init__.py", b""), ("src/toy/core.py", CORE), ("tests/test_toy.py", TESTS.encode())):
        (tmp_path / "toy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "toy" / name).write_bytes(text)
    return tmp_path / "toy"


def toy(root: Path) -> Laboratory:
    return Laboratory(root, "src/toy", ())


def changes(source: str, operator: str = "") -> set[str]:
    found = find(source.encode(), "x.py")
    return {m.after for m in found if operator in ("", m.operator)}


@pytest.mark.parametrize(
    ("source", "operator", "expected"),
    [
        ("x = a < b", "comparison", {"x = (a >= b)"}),
        ("x = a < b <= c", "boundary", {"x = (a <= b <= c)", "x = (a < b < c)"}),
        ("x = a == b", "boundary", set()),
        ("x = a + b", "arithmetic", {"x = (a - b)"}),
        ("x = a << 3", "arithmetic", {"x = (a >> 3)"}),
        ("x += 2.5", "arithmetic", {"x -= 2.5"}),
        ("x = 7", "constant", {"x = 8", "x = (6)"}),
        ("x = 0.5", "constant", {"x = 1.5"}),
        ("x = a and not b", "boolean", {"x = (a or not b)", "x = a and bool(b)"}),
        ("x = f(a, True, key=b)", "boolean", {"x = f(a, False, key=b)"}),
        ("x = f(a, key=b, n=c)", "drop keyword", {"x = f(a, n=c)", "x = f(a, key=b)"}),
        ("self.x = a\ny = a\nf(a)", "drop statement", {"pass"}),
        ("def f():\n    return a", "drop return", {"a"}),
    ],
)
def test_each_operator_makes_the_faults_it_is_named_after(source: str, operator: str, expected: set[str]) -> None:
    assert changes(source, operator) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""One of 3."""',
        "x: Literal[3]",
        "X: TypeAlias = Literal[3]",
        'def f(a: Literal[3]) -> Literal[4]:\n    """5"""',
        "import a",
        'y = f"{a + 1}"',
        'y = "a" + b',
        "assert a == 1",
        "for a, b in zip(c, d, strict=True):\n    pass",
        "@cache(8)\ndef f(): pass",
    ],
)
def test_words_types_and_assertions_are_left_alone(source: str) -> None:
    assert changes(source) == set()


def test_an_error_can_be_left_out_but_its_words_stay() -> None:
    assert changes("raise ValueError(a + 1, 3)") == {"pass"}


def test_every_mutant_compiles_and_changes_one_place() -> None:
    found = find(CORE, "core.py")
    assert len({m.key for m in found}) == len(found) > 30
    for mutant in found:
        changed = mutant.apply(CORE)
        assert changed != CORE and ast.dump(ast.parse(changed)) != ast.dump(ast.parse(CORE))
        assert mutant.after in changed.decode()
        assert mutant.before == CORE.decode().splitlines()[mutant.line - 1].strip()


def test_characters_of_several_bytes_do_not_shift_a_fault() -> None:
    (mutant,) = find('x = "äöü", a + b\n'.encode(), "x.py")
    assert mutant.apply('x = "äöü", a + b\n'.encode()).decode() == 'x = "äöü", (a - b)\n'


def test_the_sample_follows_from_the_seed_and_outlives_edits_elsewhere() -> None:
    found = find(CORE, "core.py")
    chosen = sample(found, 10, 0)
    assert [m.key for m in chosen] == [m.key for m in sample(reversed(found), 10, 0)]
    assert {m.key for m in chosen} != {m.key for m in sample(found, 10, 1)}
    assert len({m.line for m in chosen}) == 10 and len({m.operator for m in chosen}) >= 6
    moved = find(b"import sys\n\n\n" + CORE, "core.py")
    assert [m.key for m in sample(moved, 10, 0)] == [m.key for m in chosen]
    assert len(sample(found, 10_000, 0)) == len({m.line for m in found})


def trials_of(root: Path, *afters: str) -> list[mutants.Trial]:
    every = [m for m in find(CORE, "core.py") if m.after in afters]
    assert {m.after for m in every} == set(afters)
    return [mutants.Trial("core", m, ("tests/test_toy.py",), False) for m in every]


def outcomes(root: Path, trials: list[mutants.Trial], equivalent: dict[tuple[str, str], str]) -> dict[str, Outcome]:
    done: dict[str, Outcome] = {}
    laboratory = toy(root)
    try:
        try_all(laboratory, trials, 2, done, equivalent)
    finally:
        laboratory.close()
    return {found.after: found for found in done.values()}


@pytest.mark.slow
def test_what_a_test_notices_is_caught_and_what_none_notices_survives(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "SHORTEST_TIMEOUT_S", 2.0)
    caught, survives = "if (x >= low):", "return (a / 2)"
    endless, equal, by_line = "n -= (0)", "if (x <= low):", "raise ValueError"
    trials = trials_of(root, caught, survives, endless, equal)
    trials += [mutants.Trial("core", m, ("tests/test_toy.py",), False) for m in find(CORE, "") if by_line in m.before]
    reasons = {("if x < low:", equal): "low is returned either way",
               ('raise ValueError(f"{a + 1} is too much" + "by 1")', "*"): "for a test"}  # fmt: skip
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    found = outcomes(root, trials, reasons)
    assert {after: o.result for after, o in found.items()} == {
        caught: "caught", survives: "survived", endless: "timeout", equal: "equivalent", "pass": "equivalent",
    }  # fmt: skip
    assert found[caught].by == "tests/test_toy.py::test_clamp" and found[equal].by == "low is returned either way"
    total = summary(list(found.values()))
    assert (total["mutants"], total["equivalent"], total["caught"], total["survived"]) == (5, 2, 2, 1)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_fault_that_breaks_the_import_is_caught(root: Path) -> None:
    broken = Mutant("core.py", 1, "by hand", "", "", "", 0, 0, "import nothing_of_that_name\n")
    (found,) = outcomes(root, [mutants.Trial("core", broken, ("tests/test_toy.py",), False)], {}).values()
    assert found.result == "caught"


@pytest.mark.slow
def test_one_fault_leaves_no_trace_in_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one size and written in the same second, to Python they are the same file that it has compiled already."""
    write = Path.write_bytes

    def write_at_once(path: Path, data: bytes) -> int:
        size = write(path, data)
        os.utime(path, (1e9, 1e9))
        return size

    monkeypatch.setattr(Path, "write_bytes", write_at_once)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    trials = []
    for old, new in ((b"min(", b"max("), (b"a * 2", b"a + 2")):
        start = CORE.index(old)
        by_hand = Mutant("core.py", 1, "by hand", "", "", "", start, start + len(old), new.decode())
        trials.append(mutants.Trial("core", by_hand, ("tests/test_toy.py",), False))
    laboratory = toy(root)
    laboratory.open(1)
    try:
        assert [laboratory.try_one(trial, 60.0)[0] for trial in trials * 3] == ["caught", "survived"] * 3
    finally:
        laboratory.close()


def test_what_is_done_is_not_tried_again(root: Path) -> None:
    trials = trials_of(root, "return (a / 2)")
    done = {trials[0].mutant.key: mutants.outcome(trials[0], "caught")}
    try_all(toy(root), trials, 1, done, {})  # the laboratory is never opened
    assert [found.result for found in done.values()] == ["caught"]


def test_tests_that_fail_without_a_fault_prove_nothing(root: Path) -> None:
    (root / "tests/test_toy.py").write_text(f"{TESTS}\ndef test_wrong():\n    assert False\n")
    with pytest.raises(BrokenSetupError, match=r"without any fault: tests/test_toy\.py::test_wrong"):
        outcomes(root, trials_of(root, "return (a / 2)"), {})


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", None])
def test_tests_that_are_not_there_prove_nothing(text: str | None, root: Path) -> None:
    (root / "tests/test_toy.py").unlink()
    if text is not None:
        (root / "tests/test_toy.py").write_text(text)
    with pytest.raises(BrokenSetupError, match="pytest ended with status"):
        outcomes(root, trials_of(root, "return (a / 2)"), {})


def test_a_package_that_is_imported_from_elsewhere_proves_nothing(root: Path) -> None:
    (root / "src/json").mkdir()
    laboratory = Laboratory(root, "lib/json", ())
    try:
        with pytest.raises(BrokenSetupError, match="not from the copy"):
            laboratory.open(1)
    finally:
        laboratory.close()


def test_a_part_without_files_and_a_line_that_has_gone_are_named(root: Path) -> None:
    with pytest.raises(BrokenSetupError, match=r"part gone: no file matches gone/\*.py"):
        sampled({"gone": Part(("gone/*.py",), ())}, 3, 0, root, "src/toy")
    wanted = [Semantic("x", "return min", "return max", ()), Semantic("y", "no such line", "", ())]
    (trial,), (outdated,) = thought_of(wanted, root, "src/toy")
    assert (trial.mutant.file, trial.mutant.line) == ("core.py", 8)
    assert trial.mutant.apply(CORE) == CORE.replace(b"return min", b"return max")
    assert outdated.startswith("'y'") and "found 0 times" in outdated


def test_the_tables_fit_the_sources() -> None:
    trials, outdated = thought_of(mutants.SEMANTIC, mutants.ROOT, mutants.PACKAGE)
    assert outdated == []
    lines = {line.strip() for path in (mutants.ROOT / mutants.PACKAGE).rglob("*.py") for line in path.open()}
    assert [before for before, _ in mutants.EQUIVALENT if before not in lines] == []
    for part in mutants.PARTS.values():
        assert all((mutants.ROOT / test).exists() for test in part.tests)
        assert all(any((mutants.ROOT / mutants.PACKAGE).glob(pattern)) for pattern in part.files)
    assert all((mutants.ROOT / test).exists() for trial in trials for test in trial.tests)
