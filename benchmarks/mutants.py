"""Mutation testing: do the tests notice a small fault in the core?

    python benchmarks/mutants.py --list            # what would be tried
    python benchmarks/mutants.py --workers 2       # try what is not in docs/results/mutants.json yet
    python benchmarks/mutants.py --again           # and try the survivors again, after tests were added
    python benchmarks/mutants.py --only ledger     # one part; or a key, or words of a line

Each mutant is one fault in a copy of this tree: a flipped or shifted comparison, another operator, a constant off by
one, a condition turned round, a statement, return or keyword argument dropped (mutation.py), or one of SEMANTIC, which
were written by hand. The tests that cover its part then run until the first failure. Failing, crashing or taking far
too long counts as caught; a mutant that passes all tests has survived, and is either a missing test or equivalent.
EQUIVALENT names those that change nothing that can be seen, with the reason. Exit status 1: something survived; 2: the
tests fail without a fault, or one of the tables here no longer fits the sources.

Why not mutmut or cosmic-ray: mutmut switches mutants on and off inside each function at run time, which numba can't
compile and kernels cached on disk would hide, and it leaves module-level constants alone; cosmic-ray changes the
checkout in place and knows no sample that stays when other lines change.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutation import Mutant, find, sample

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/cyber0"
COUNT, SEED = 84, 0
SHORTEST_TIMEOUT_S, TIMEOUT_FACTOR = 120.0, 3.0
DATA_BYTES = 12 << 30  # of memory for the tests: a wrong constant must not take the machine down
NOT_COPIED = (".git", ".venv", "runs", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


@dataclass(frozen=True)
class Part:
    """A part of the package: its files, the tests that cover it in the order in which they run, quick ones first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    compiled: bool = False
    """Whether numba compiles some of it: each mutant then gets a cache of kernels of its own."""


FIXTURES, FORMAT = "tests/runs/test_fixtures.py", "tests/ledger/test_format.py"
PARTS: dict[str, Part] = {
    "directions": Part(
        ("directions/*.py", "directions/backends/*.py"),
        (
            "tests/directions/test_philox.py",
            "tests/directions/test_gaussian.py",
            "tests/model/test_commit.py",
            "tests/directions/test_directions.py",
            FORMAT,
        ),
        compiled=True,
    ),
    "ledger": Part(
        ("ledger/*.py",),
        (
            "tests/ledger/test_reports.py",
            "tests/protocol/test_codec.py",
            "tests/ledger/test_ledger.py",
            "tests/ledger/test_ledger_file.py",
            "tests/ledger/test_header.py",
            FORMAT,
            FIXTURES,
        ),
    ),
    "aggregate": Part(
        ("aggregate/*.py",),
        (
            "tests/aggregate/test_rules.py",
            "tests/aggregate/test_aggregate.py",
            "tests/protocol/test_federator.py",
            FORMAT,
        ),
        compiled=True,
    ),
    "attacks": Part(("attacks/*.py",), ("tests/attacks/test_attacks.py",)),
    "federator": Part(
        ("protocol/federator.py", "protocol/decider.py"),
        (
            "tests/protocol/test_federator.py",
            "tests/protocol/test_decider.py",
            "tests/protocol/test_messages.py",
            "tests/serve/test_hub.py",
        ),
    ),
    "client": Part(
        ("protocol/client.py",),
        (
            "tests/protocol/test_client.py",
            "tests/model/test_interrupts.py",
            "tests/serve/test_participant.py",
            FIXTURES,
        ),
    ),
    "parameters": Part(
        ("model/stored.py", "model/commit.py", "model/vector.py"),
        (
            "tests/model/test_interrupts.py",
            "tests/model/test_saturation.py",
            "tests/model/test_vector.py",
            "tests/model/test_probing_leaves_w.py",
            "tests/model/test_perturbation.py",
            "tests/model/test_weight_uses.py",
            "tests/model/test_layout.py",
            "tests/model/test_commit.py",
            "tests/estimate/test_estimate.py",
            FORMAT,
            "tests/zero_order",
        ),
    ),
}
EXCLUDED = ("directions/backends/triton_kernels.py",)  # needs a GPU: tests/directions/test_cuda.py
DESELECTED = (  # starts processes or loads language models, which costs more than it catches here
    f"{FIXTURES}::test_a_deployment_goes_on_with_a_client_and_a_follower_that_kept_their_state",
    f"{FIXTURES}::test_a_client_s_state_is_refused_by_another_client",
    f"{FIXTURES}::test_a_language_model_is_exported_for_from_pretrained",
)


@dataclass(frozen=True)
class Semantic:
    """A fault that someone thought of: `pattern`, which must match in one place of the package, is replaced."""

    name: str
    pattern: str
    replacement: str
    """As for re.sub."""
    tests: tuple[str, ...]
    compiled: bool = False


SEMANTIC = [
    Semantic("a use of a weight that escapes the substitution is ignored",
             r"self\._streamable = self\._streamable and not detector\.caught", "self._streamable = self._streamable",
             ("tests/model/test_weight_uses.py", "tests/model/test_perturbation.py",
              "tests/estimate/test_estimate.py")),
    Semantic("buffers are watched at the first probe only",
             r"version_of\(b\) != versions\[name\]", "False",
             ("tests/model/test_probing_leaves_w.py", "tests/estimate/test_estimate.py", "tests/zero_order")),
    Semantic("a run is resumed with a changed config",
             r"check_same_run\(self\.ledger, header\)", "pass",
             ("tests/federation/test_simulation.py", FIXTURES, "tests/runs/test_run.py")),
    Semantic("a baseline is resumed with a changed config",
             r"made\._progress\(\)\.check_same_run\(found\[1\], folder\)", "pass",
             ("tests/federation/test_methods.py", FIXTURES)),
    Semantic("directions in memory are taken whatever key they were drawn with",
             r"if drawn != \(step\.seed, step\.round, step\.first, len\(step\.coefficients\)\):",
             "if drawn[1:] != (step.round, step.first, len(step.coefficients)):",
             ("tests/model/test_layout.py", "tests/model/test_commit.py", "tests/protocol/test_client.py",
              "tests/protocol/test_codec.py")),
    Semantic("ZeroOrder records the header's lr, not the current one",
             r"Record\(self\.round, [^,]+, slopes", "Record(self.round, self.ledger.header.lr, slopes",
             ("tests/zero_order", FIXTURES)),
    Semantic("a baseline's checkpoint does not restore the rejections",
             r"federator\.rejections\.update\(\{.*\}\)|self\.rejected = sum\(progress\.rejections.*", "pass",
             (FIXTURES, "tests/federation/test_methods.py")),
    Semantic("float16 is rounded up where the random word equals the threshold",
             r"uint64\(word\) < threshold", "uint64(word) <= threshold",
             ("tests/model/test_commit.py", "tests/directions/test_directions.py"), compiled=True),
    Semantic("bfloat16 is rounded up where the random word equals the threshold",
             r"words\[i\] < uint32\(a << uint32\(16\)\)", "words[i] <= uint32(a << uint32(16))",
             ("tests/model/test_commit.py", "tests/directions/test_directions.py"), compiled=True),
    Semantic("bfloat16 is rounded up where 16 random bits equal the threshold",
             r"a \+ \(uint32\(words\[i\]\) \^ uint32\(0xFFFF\)\)", "a + uint32(0x10000) - uint32(words[i])",
             ("tests/model/test_commit.py",), compiled=True),
    Semantic("an odd weight is rounded by the low half of its word",
             r"\[shared & np\.uint32\(0xFFFF\), shared >> np\.uint32\(16\)\]",
             "[shared & np.uint32(0xFFFF), shared & np.uint32(0xFFFF)]",
             ("tests/model/test_commit.py",)),
    Semantic("a step is rounded by 32 bits whatever the header says",
             r", bits=self\.bits\)\n", ")\n",
             ("tests/federation/test_rounding.py",)),
    Semantic("b follows from how many reported, not from how many were invited",
             r"b=self\.tolerated\(round\)", "b=tolerated(self.rule.beta, len(rows))",
             ("tests/protocol/test_federator.py",)),
    Semantic("a client's second report replaces its first",
             r"if self\._answered\[client\]:", "if False:",
             ("tests/protocol/test_federator.py",)),
    Semantic("replay starts from any weights",
             r"if parameters\.digest\(\) != header\.weights_digest:(?=\n        raise LedgerError)", "if False:",
             ("tests/protocol/test_client.py", "tests/zero_order", "tests/runs/test_replay.py")),
    Semantic("an interrupt between two segments goes unnoticed",
             r"self\._torn = True  # until", "self._torn = False  # until",
             ("tests/model/test_interrupts.py",)),
    Semantic("a decision is committed before it is in the ledger of ZeroOrder",
             r"self\.ledger\.append\(record\)(  #.*\n *)(self\._catch_up\(\)|self\._commit\(record\))\n",
             r"\2\1self.ledger.append(record)\n",
             ("tests/zero_order",)),
]  # fmt: skip

_CUTS = "how work is cut over threads changes no bit"
EQUIVALENT: dict[tuple[str, str], str] = {
    ("if upper > 0:", "if (upper >= 0):"): "of 0 numbers that are left out none is counted",
    ("if lower > 0:", "if (lower >= 0):"): "of 0 numbers that are left out none is counted",
    ("if pieces == 1 or columns < 2:", "*"): _CUTS,
    ("if threads == 1 or count <= 2 * TILE:", "*"): _CUTS,
    ("tied |= stop < count and tile[min(stop, count - 1), c] == high[c]", "*"):
        "a tie that is none leads to the slower way, which counts the same",
    ("factor, row = c[r], z[r, begin : begin + n]", "factor, row = c[r], z[r, begin : (begin - n)]"):
        "compiled code does not look at the end of a slice",
    ("w, rows, c = stored.detach().numpy(), z.numpy(), np.ascontiguousarray(coefficients, dtype=np.float32)",
     "w, rows, c = stored.detach().numpy(), z.numpy(), np.ascontiguousarray(coefficients)"):
        "the coefficients of a step are float32",
    ("near = np.where(sign > 0, low, high)", "near = np.where((sign >= 0), low, high)"): "the sign is never 0",
    ("cache[number] = torch.empty(segment.count, device=self.device)", "cache[number] = torch.empty(segment.count)"):
        "the same on a CPU; tests/directions/test_cuda.py notices on a GPU",
    ("if units <= BALL_GRID:  # inside", "if (units < BALL_GRID):  # inside"): "on the ball the factor is exactly 1",
    ("self._drawn = ((seed, round, first, count), parts) if small else None", "pass"):
        "what is kept only spares the commit to draw it again",
    ("who = np.array([client], dtype=np.int64)", "who = np.array([client])"): "the default type, but on old Windows",
}  # fmt: skip
"""(source line, the same line mutated) -> why no test can notice; "*" for every mutant of the line. No indentation."""


@dataclass(frozen=True)
class Trial:
    """A mutant and the tests that should catch it."""

    part: str
    mutant: Mutant
    tests: tuple[str, ...]
    compiled: bool
    name: str = ""


@dataclass
class Outcome:
    """What became of one."""

    key: str
    part: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    result: str
    """caught, timeout (which counts as caught), survived or equivalent."""
    by: str = ""
    """The test that failed first, or the reason why it is equivalent."""
    seconds: float = 0.0


class BrokenSetupError(Exception):
    """The tests fail without a fault, or can't be run: nothing could be concluded."""


@dataclass
class Laboratory:
    """Runs tests in copies of a tree, one for each worker."""

    root: Path
    package: str = PACKAGE
    deselected: Sequence[str] = DESELECTED
    kernels: Path = field(init=False)
    _base: Path = field(init=False)
    _free: SimpleQueue[Path] = field(init=False, default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.kernels = self._base / "kernels"

    def open(self, workers: int) -> None:
        """Make the copies, and see that it is they that are imported."""
        for number in range(workers):
            tree = self._base / f"tree{number}"
            shutil.copytree(self.root, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
            name = Path(self.package).name
            command = [sys.executable, "-c", f"import {name}; print({name}.__file__)"]
            done = subprocess.run(command, cwd=tree, env=self._environment(tree, self.kernels), capture_output=True,
                                  text=True, check=False)  # fmt: skip
            if not Path(done.stdout.strip()).resolve().is_relative_to(tree.resolve()):
                raise BrokenSetupError(
                    f"{name} is imported from {done.stdout.strip()}, not from the copy: {done.stderr}"
                )
            self._free.put(tree)

    def close(self) -> None:
        shutil.rmtree(self._base, ignore_errors=True)

    def baseline(self, test: str) -> float:
        """Return how long a file of tests takes without a fault; it must pass."""
        tree = self._free.get()
        try:
            result, by, seconds = self._run(tree, [test], 3600.0, self.kernels)
        finally:
            self._free.put(tree)
        if result != "survived":
            raise BrokenSetupError(f"{test} fails without any fault: {by}")
        return seconds

    def try_one(self, trial: Trial, timeout: float) -> tuple[str, str, float]:
        """Put the fault in, run the tests, take it out; return the result, what caught it, and the seconds."""
        tree = self._free.get()
        path = tree / self.package / trial.mutant.file
        source = path.read_bytes()
        own = Path(tempfile.mkdtemp(dir=self._base, prefix="own-")) if trial.compiled else None
        try:
            path.write_bytes(trial.mutant.apply(source))
            return self._run(tree, trial.tests, timeout, own or self.kernels)
        finally:
            path.write_bytes(source)
            if own is not None:
                shutil.rmtree(own, ignore_errors=True)
            self._free.put(tree)

    def _environment(self, tree: Path, kernels: Path) -> dict[str, str]:
        source = str(tree / Path(self.package).parent)
        # No .pyc files: they are told apart by seconds and size, and a mutant often has the size of the original.
        own = {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(kernels),
               "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
        return os.environ | own

    def _run(self, tree: Path, tests: Sequence[str], timeout: float, kernels: Path) -> tuple[str, str, float]:
        limited = (
            f"import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, ({DATA_BYTES}, {DATA_BYTES})); "
            "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
        )
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-m", "not mnist and not cuda"]
        options += [f"--deselect={name}" for name in self.deselected]
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", limited, *options, *tests], cwd=tree, env=self._environment(tree, kernels),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timeout", f"not done after {timeout:.0f} s", time.perf_counter() - begin
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        seconds = time.perf_counter() - begin
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        if process.returncode == 0 and re.search(r"\b\d+ passed", output):
            return "survived", "", seconds
        if process.returncode in (1, 2) and failed:
            return "caught", failed[1], seconds
        if process.returncode < 0 or process.returncode == 3:
            return "caught", f"crashed with status {process.returncode}", seconds
        raise BrokenSetupError(f"pytest ended with status {process.returncode}: {output[-2000:]}")


def sampled(parts: Mapping[str, Part], count: int, seed: int, root: Path, package: str) -> list[Trial]:
    """Return the same number of trials of every part; `count` in all."""
    trials = []
    for number, (name, part) in enumerate(parts.items()):
        files = sorted({path for pattern in part.files for path in (root / package).glob(pattern)})
        names = [str(path.relative_to(root / package)) for path in files]
        if not files:
            raise BrokenSetupError(f"part {name}: no file matches {', '.join(part.files)}; PARTS is out of date")
        mutants = [m for f, n in zip(files, names, strict=True) if n not in EXCLUDED for m in find(f.read_bytes(), n)]
        share = (count * (number + 1)) // len(parts) - (count * number) // len(parts)
        trials += [Trial(name, m, part.tests, part.compiled) for m in sample(mutants, share, seed)]
    return trials


def thought_of(semantic: Sequence[Semantic], root: Path, package: str) -> tuple[list[Trial], list[str]]:
    """Return the hand-written trials, wherever in the package their lines are by now, and what is no longer found."""
    sources = {path: path.read_text("utf-8") for path in sorted((root / package).rglob("*.py"))}
    trials, outdated = [], []
    for wanted in semantic:
        found = [(path, match) for path, text in sources.items() for match in re.finditer(wanted.pattern, text)]
        if len(found) != 1:
            outdated.append(f"{wanted.name!r}: {wanted.pattern!r} is found {len(found)} times, not once")
            continue
        path, match = found[0]
        file, text = str(path.relative_to(root / package)), sources[path]
        start, end = (len(text[:place].encode()) for place in match.span())
        line, after = text.count("\n", 0, match.start()) + 1, match.expand(wanted.replacement)
        before, shown = (" ".join(words.split()) for words in (match[0], after))
        mutant = Mutant(file, line, "semantic", before, shown, wanted.name, start, end, after)
        trials.append(Trial("semantic", mutant, wanted.tests, wanted.compiled, wanted.name))
    return trials, outdated


def reason(mutant: Mutant, equivalent: Mapping[tuple[str, str], str]) -> str | None:
    """Return why a mutant is equivalent, if it is known to be."""
    return equivalent.get((mutant.before, mutant.after), equivalent.get((mutant.before, "*")))


def outcome(trial: Trial, result: str, by: str = "", seconds: float = 0.0) -> Outcome:
    m = trial.mutant
    return Outcome(m.key, trial.part, m.file, m.line, trial.name or m.operator, m.before, m.after, result, by,
                   round(seconds, 1))  # fmt: skip


def try_all(
    laboratory: Laboratory, trials: Sequence[Trial], workers: int, done: dict[str, Outcome],
    equivalent: Mapping[tuple[str, str], str], save: Any = lambda: None,
) -> None:  # fmt: skip
    """Try what is not done yet; `done` and the file that `save` writes are up to date after each."""
    todo = []
    for trial in trials:
        why = reason(trial.mutant, equivalent)
        if why is not None:
            done[trial.mutant.key] = outcome(trial, "equivalent", why)
        elif trial.mutant.key not in done or done[trial.mutant.key].result == "equivalent":
            todo.append(trial)
    if not todo:
        return
    lock = threading.Lock()
    laboratory.open(workers)
    tests = list(dict.fromkeys(test for trial in todo for test in trial.tests))
    with ThreadPoolExecutor(workers) as pool:
        seconds = dict(zip(tests, pool.map(laboratory.baseline, tests), strict=True))
    for test, spent in seconds.items():
        print(f"{spent:5.1f} s without a fault: {test}", file=sys.stderr)

    def go(trial: Trial) -> None:
        limit = SHORTEST_TIMEOUT_S + TIMEOUT_FACTOR * sum(seconds[test] for test in trial.tests)
        found = outcome(trial, *laboratory.try_one(trial, limit))
        with lock:
            done[trial.mutant.key] = found
            save()
            print(f"{found.result:8} {found.seconds:6.1f} s  {described(found)}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(go, trial) for trial in todo]:
            future.result()


def described(found: Outcome) -> str:
    return f"{found.key}  {found.file}:{found.line}  {found.operator}: {found.before}  ->  {found.after}"


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return how many there are of each result, in all and by part."""

    def counted(some: Sequence[Outcome]) -> dict[str, int]:
        equivalent = sum(o.result == "equivalent" for o in some)
        caught = sum(o.result in ("caught", "timeout") for o in some)
        return {"mutants": len(some), "equivalent": equivalent, "caught": caught,
                "survived": len(some) - equivalent - caught}  # fmt: skip

    parts = {part: counted([o for o in outcomes if o.part == part]) for part in dict.fromkeys(o.part for o in outcomes)}
    return {**counted(outcomes), "parts": parts}


def _read(path: Path) -> dict[str, Outcome]:
    if not path.exists():
        return {}
    return {found["key"]: Outcome(**found) for found in json.loads(path.read_text())["outcomes"]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count",
        type=int,
        default=COUNT,
        help=f"sampled mutants, besides SEMANTIC; FILE then holds no others (default: {COUNT})",
    )
    parser.add_argument("--seed", type=int, default=SEED, help="which are sampled")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="a part, the beginning of a key, or words of a line; may be repeated")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument("--workers", type=int, default=1, help="how many at a time")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/results/mutants.json", metavar="FILE", help="where the outcomes go"
    )
    options = parser.parse_args(arguments)
    try:
        trials, outdated = thought_of(SEMANTIC, ROOT, PACKAGE)
        trials += sampled(PARTS, options.count, options.seed, ROOT, PACKAGE)
    except BrokenSetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in outdated:
        print(f"error: SEMANTIC is out of date: {name}", file=sys.stderr)

    def asked(trial: Trial) -> bool:
        m, parts = trial.mutant, (*PARTS, "semantic")
        return not options.only or any(
            text == trial.part if text in parts else m.key.startswith(text) or text in f"{m.before}\n{trial.name}"
            for text in options.only
        )

    chosen = [trial for trial in trials if asked(trial)]
    if options.list:
        for trial in chosen:
            print(f"{trial.part:10} {described(outcome(trial, reason(trial.mutant, EQUIVALENT) or ''))}")
        print(f"{len(chosen)} mutants")
        return 2 if outdated else 0
    done = _read(options.out)
    if options.again:
        done = {key: found for key, found in done.items() if found.result != "survived"}

    def save() -> None:
        outcomes = [done[t.mutant.key] for t in trials if t.mutant.key in done]
        machine = {"python": platform.python_version(), "processors": os.cpu_count(), "workers": options.workers}
        content = {"seed": options.seed, "count": options.count, "machine": machine, "summary": summary(outcomes),
                   "outcomes": [asdict(found) for found in outcomes]}  # fmt: skip
        temporary = options.out.with_suffix(".new")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(options.out)

    laboratory = Laboratory(ROOT)
    try:
        try_all(laboratory, chosen, options.workers, done, EQUIVALENT, save)
    except BrokenSetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        laboratory.close()
    save()
    found = [done[trial.mutant.key] for trial in chosen]
    total = summary(found)
    print(f"{total['mutants']} mutants, {total['equivalent']} equivalent, {total['caught']} of "
          f"{total['mutants'] - total['equivalent']} others caught")  # fmt: skip
    for survivor in (o for o in found if o.result == "survived"):
        print(f"survived: {described(survivor)}")
    return 2 if outdated else int(total["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
