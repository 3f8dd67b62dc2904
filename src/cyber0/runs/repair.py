"""`cyber0 repair`: what is good in a run's folder, what is not, and cutting that off after keeping a copy.

A killed process needs none of this: what it leaves is cut off when the run is resumed. This is for disks that lost or
changed something. It needs neither torch nor the model, so it works where a federator runs.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import mmap
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyber0.config.files import load, to_toml
from cyber0.config.paths import agreed
from cyber0.config.schema import Config, for_header
from cyber0.errors import ConfigError, Cyber0Error, LedgerError
from cyber0.federation import user_code as own
from cyber0.ledger import DECIDED, Header, Ledger, Reports
from cyber0.ledger.header import Entry
from cyber0.ledger.record import RecordFormat
from cyber0.ledger.settings import changed_settings
from cyber0.storage import (
    CONFIG,
    LEDGER,
    METRICS,
    PARTITION,
    REPORTS,
    SERVED,
    STATE,
    STATE_DIGEST,
    STATE_PROGRESS,
    SUMMARY,
    WEIGHTS,
    naming,
    state_digest,
    write_text,
)
from cyber0.storage.disk import locked

DAMAGED = ".damaged"
LEDGER_METHODS = ("cyber0", "mezo")  # the others keep their weights
_LENGTH = struct.Struct("<Q")


@dataclass
class Finding:
    """What was found out about one file, and what can be done about it."""

    name: str
    text: str
    remedy: str = ""
    """Empty: nothing needs to be done, or `lost`."""
    apply: Callable[[], None] | None = None
    lost: bool = False
    """Whether something is wrong that nothing can be done about here."""


@dataclass
class Survey:
    """What was found in a folder."""

    folder: Path
    findings: list[Finding] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    """What else the operator should know before and after."""

    @property
    def remedies(self) -> list[Finding]:
        """The findings that something can be done about."""
        return [finding for finding in self.findings if finding.apply is not None]

    @property
    def lost(self) -> list[str]:
        """The files that something is wrong with and nothing can be done about."""
        return [finding.name for finding in self.findings if finding.lost]

    def add(self, name: str, text: str, remedy: str = "", apply: Callable[[], None] | None = None) -> None:
        self.findings.append(Finding(name, text, remedy, apply))

    def add_loss(self, name: str, text: str) -> None:
        self.findings.append(Finding(name, text, lost=True))


def command(folder: Path, *, yes: bool) -> int:
    """Say what is found, ask, repair; return the exit code: 1 if something was left as it is."""
    if folder.name == LEDGER and folder.is_file():
        folder = folder.parent  # the other files of a run must agree with it
    with _held(folder):
        survey = examine(folder)
        for finding in survey.findings:
            print(f"{finding.name}: {finding.text}")
        if not survey.remedies:
            print(f"can't be repaired: {', '.join(survey.lost)}" if survey.lost else "nothing to repair")
            return 1 if survey.lost else 0
        print("\nrepair would")
        for finding in survey.remedies:
            print(f"- {finding.remedy}")
        for line in survey.advice:
            print(line)
        if not yes and not _agreed():
            print("nothing was changed; --yes repairs without asking")
            return 1
        for finding in survey.remedies:
            assert finding.apply is not None
            finding.apply()
            print(f"done: {finding.remedy}")
        if survey.lost:
            print(f"can't be repaired: {', '.join(survey.lost)}")
    return 1 if survey.lost else 0


def _agreed() -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return input("\nDo it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep a run from being resumed meanwhile, and refuse one that is running."""
    if folder.is_file():
        with locked(folder):
            yield
        return
    if not folder.is_dir() or not any((folder / name).exists() for name in (LEDGER, STATE, CONFIG)):
        raise ConfigError(f"{folder} holds no run: it has no {LEDGER}, no {STATE} and no {CONFIG}")
    with locked(folder / LEDGER if (folder / LEDGER).exists() else folder):
        yield


def examine(folder: Path) -> Survey:
    """Find out what is good in a run's folder, or in a single ledger file; nothing is changed."""
    if folder.is_file():
        return _examine_file(folder)
    survey = Survey(folder)
    if (folder / LEDGER).exists():
        try:
            ledger, fault = Ledger.inspect(folder / LEDGER)
        except LedgerError as error:
            if not (folder / LEDGER).stat().st_size:
                raise
            raise LedgerError(
                f"{error}. No record can be read without it, so there is nothing to repair: restore {LEDGER} from a "
                f"copy, or start again in another folder with `cyber0 run {folder / CONFIG}`"
            ) from error
        with ledger:
            rounds = len(ledger)
            cut = _examine_ledger(survey, folder / LEDGER, ledger, fault)
            settings = ledger.header.config
            if settings:  # a run that was lengthened says so in its records
                settings = {**settings, "rounds": ledger.rounds}
            _examine_config(survey, settings, "the ledger's header")
            _examine_weights(survey, ledger.header)
            _examine_reports(survey, ledger, cut)
            _examine_metrics(survey)
            _examine_summary(survey, rounds)
        if cut:
            survey.advice += _advice(folder, rounds)
        return survey
    if (folder / STATE).exists():
        _examine_config(survey, _examine_state(survey), STATE)
    else:
        _examine_missing(survey, _examine_config(survey, None, ""))
    _examine_metrics(survey)
    _examine_summary(survey, None)
    return survey


def _examine_file(path: Path) -> Survey:
    """Find out what is good in the ledger of a `ZeroOrder`."""
    survey = Survey(path.parent)
    ledger, fault = Ledger.inspect(path)
    with ledger:
        if _examine_ledger(survey, path, ledger, fault):
            survey.advice.append(f"A copy of {path.name} that reaches further is better: put that in its place.")
    return survey


def _examine_ledger(survey: Survey, path: Path, ledger: Ledger, fault: str | None) -> bool:
    """Add what was found; return whether records are lost."""
    name = path.name
    size, good = path.stat().st_size, ledger.size
    kept = f"{len(ledger):,} records are good, the first {good:,} bytes"
    if size == good:
        survey.add(name, f"{kept}, which is all of it")
        return False
    rest = size - good
    copy = free_name(path)
    if fault is None:
        unfinished = "were never written" if ledger.zero_tail else "are a record that was not finished"
        survey.add(
            name,
            f"{kept}; the last {rest:,} {unfinished}. A resumed run cuts them off by itself",
            f"cut these {rest:,} bytes off {name} and keep a copy of all of it as {copy.name}",
            lambda: _cut(path, good),
        )
        return False
    lost = -(-rest // RecordFormat(ledger.header).sizes[DECIDED])
    lost_rounds = f"about {lost:,} round{'s' if lost > 1 else ''}"
    place = f"after round {len(ledger) - 1}" if len(ledger) else "before its first record"
    survey.add(
        name,
        f"{kept}; record {len(ledger)} does not verify: {fault}. It and what follows, {rest:,} bytes or {lost_rounds}, "
        "can't be used",
        f"cut {name} off {place}, losing {lost_rounds}, and keep a copy of all of it as {copy.name}",
        lambda: _cut(path, good),
    )
    return True


def _advice(folder: Path, rounds: int) -> list[str]:
    copy = (
        f"If somebody has a copy of this {LEDGER} that reaches further than {rounds:,} rounds (a backup, another "
        f"participant), put that in its place instead: `cyber0 verify {folder}` says whether it is whole."
    )
    if (folder / SERVED).exists():
        return [
            copy,
            "This is a federator's ledger. Clients that have seen one of the lost rounds will refuse it until seen.bin "
            "in their --state folder is deleted, by which they agree that these rounds never were.",
        ]
    return [
        copy,
        f"Otherwise `cyber0 run --resume {folder}` computes the lost rounds again: the same, on this machine.",
    ]


def _examine_config(survey: Survey, recorded: dict[str, Any] | None, where: str) -> Config | None:
    """Add what was found, given the settings that another file records, and return the config."""
    path, config = survey.folder / CONFIG, _recorded(recorded)
    try:
        found = load(path)
        odd = changed_settings(agreed(for_header(found)), agreed(config)) if config is not None else []
        if not odd:
            survey.add(CONFIG, "can be read")
            return found
        fault = f"differs from {where} in {', '.join(odd)}"
    except ConfigError as error:
        fault = str(error) if path.exists() else "is missing"
    if config is None:
        survey.add_loss(CONFIG, f"{fault}; nothing here says what it was, so restore it from a copy")
        return None
    aside = f"keep the present one as {free_name(path).name}, and " if path.exists() else ""

    def restore() -> None:
        if path.exists():
            _put_aside(path)
        write_text(path, to_toml(own.with_remembered_paths(config, survey.folder)))

    survey.add(CONFIG, fault, f"{aside}write {CONFIG} from the settings in {where}", restore)
    return config


def _recorded(settings: dict[str, Any] | None) -> Config | None:
    if not settings:
        return None
    try:
        return Config.recorded(settings)
    except Cyber0Error:
        return None


def _examine_missing(survey: Survey, config: Config | None) -> None:
    """Add that the file is missing which says how far a run has come, if the run was begun: it is made first of all."""
    folder = survey.folder
    if not any((folder / name).exists() for name in (SUMMARY, METRICS, PARTITION)):
        return
    with_ledger = config is None or config.method.name in LEDGER_METHODS
    again = f"start again in another folder with `cyber0 run {folder / CONFIG} --out ...`"
    if with_ledger:
        survey.add_loss(LEDGER, f"is missing: the decisions of the run are lost; restore it from a copy, or {again}")
    elif (folder / SUMMARY).exists():
        survey.add(STATE, f"is not there: the figures do not need it; to have the weights again, {again}")
    else:
        survey.add_loss(STATE, f"is missing: `cyber0 run --resume {folder}` starts from the first round")


def _examine_weights(survey: Survey, header: Header) -> None:
    path = survey.folder / WEIGHTS
    if not path.exists():
        return
    fault = fault_of_weights(path, header.layout, header.weights_digest)
    if not fault:
        survey.add(WEIGHTS, "the starting weights of this ledger")
        return
    _aside(survey, path, fault, "a resumed run, or `cyber0 replay`, makes the starting weights again")


def fault_of_weights(
    path: Path, layout: Iterable[Entry], digest: str, *, shards: Iterable[Path] = (),
    names_of: Callable[[str], Iterable[str]] = lambda name: (name,),
) -> str:  # fmt: skip
    """Return what is wrong with a file of starting weights that must have that digest; "" if nothing is.

    Args:
        path: The file.
        layout: What is in it.
        digest: Of all of it, in the order of the layout.
        shards: More files, where the weights are in several.
        names_of: Under which names a weight of the layout may be in them.
    """
    try:
        tensors = {name: t for file in (path, *shards) for name, t in _read_safetensors(file)[0].items()}
        sha = hashlib.sha256()
        for entry in layout:
            sha.update(tensors[next((name for name in names_of(entry.name) if name in tensors), entry.name)])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"can't be read as safetensors: {error!r}"
    same = sha.hexdigest() == digest
    return "" if same else "they are not the starting weights of this run: their digest differs"


def _examine_state(survey: Survey) -> dict[str, Any] | None:
    """Add what was found, and return the settings that it records."""
    path = survey.folder / STATE
    try:
        weights, about = _read_safetensors(path)
        progress = json.loads(about[STATE_PROGRESS])
        if STATE_DIGEST in about and about[STATE_DIGEST] != state_digest(about[STATE_PROGRESS], weights):
            raise ValueError("it was changed after it was written, its digest is wrong")
        text, settings = f"the weights after {progress['round']:,} rounds", progress["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"can't be read as the state of a run: {error!r}"
        _aside(survey, path, text, f"`cyber0 run --resume {survey.folder}` then starts from the first round")
        return None
    survey.add(STATE, text)
    return dict(settings)


def _examine_reports(survey: Survey, ledger: Ledger, cut: bool) -> None:
    path, config = survey.folder / REPORTS, _recorded(ledger.header.config)
    if not path.exists():
        if config is not None and config.serve.keep_reports and len(ledger):
            lost = f"is missing: none of the {len(ledger)} rounds can be decided again (`cyber0 verify --decisions`)"
            survey.add_loss(REPORTS, f"{lost}; restore it from a copy")
        return
    try:
        reports = Reports(path, ledger.header.scalars)
    except LedgerError as error:
        _aside(survey, path, str(error), "no round can be decided again (`cyber0 verify --decisions`)")
        return
    found, good = reports.survey()
    last = found[-1] if found else -1
    fault, size, needed = reports.fault, path.stat().st_size, len(ledger)
    reports.close()
    kept = f"the reports up to round {last} are good, the first {good:,} bytes" if last >= 0 else "no report is good"
    copy = free_name(path).name
    if fault is not None:
        harm = f"rounds from {fault.round} on can't be decided again (`cyber0 verify --decisions`)"
        harmless = "the ledger does not need them, and a resumed run cuts them off by itself"
        survey.add(
            REPORTS,
            f"{kept}; those of round {fault.round} {fault.text}. {harm if fault.round < needed else harmless}",
            f"cut {size - good:,} bytes off {REPORTS} and keep a copy of all of it as {copy}",
            lambda: _cut(path, good),
        )
    elif cut and last >= needed:
        remedy = f"keep a copy of {REPORTS} as {copy}, since a resumed run cuts off what the ledger lacks"
        survey.add(REPORTS, kept, remedy, lambda: _copy(path))
    elif lacking := len(set(range(needed)).difference(found)):
        text = f"those of {lacking} of the {needed} rounds are missing, which can't be decided again"
        survey.add_loss(REPORTS, f"{kept}, but {text} (`cyber0 verify --decisions`); restore it from a copy")
    else:
        survey.add(REPORTS, f"{kept}, which is all of it")


def _examine_metrics(survey: Survey) -> None:
    path = survey.folder / METRICS
    if not path.exists():
        return
    good, whole = 0, True
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        try:
            reader = csv.DictReader(file)
            whole = "round" in (reader.fieldnames or ())
            for row in reader:
                int(row["round"])
                whole = None not in row and None not in row.values()
                if not whole:
                    break
                good += 1
        except (csv.Error, KeyError, TypeError, ValueError):
            whole = False
    rest = "" if whole else "; what follows is damaged, and a resumed run measures it again"
    survey.add(METRICS, f"{good:,} evaluations{rest}")


def _examine_summary(survey: Survey, rounds: int | None) -> None:
    path = survey.folder / SUMMARY
    if not path.exists():
        return
    try:
        claimed = json.loads(path.read_text(encoding="utf-8"))["rounds"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        _aside(survey, path, f"can't be read as a summary: {error!r}", "a resumed run writes it again")
        return
    if rounds is not None and claimed != rounds:
        text = f"speaks of {claimed} rounds, and the ledger has {rounds}"
        _aside(survey, path, text, "a resumed run writes it again")
        return
    survey.add(SUMMARY, f"the run has ended, after {claimed} rounds")


def _aside(survey: Survey, path: Path, fault: str, then: str) -> None:
    remedy = f"rename {path.name} to {free_name(path).name}; {then}"
    survey.add(path.name, fault, remedy, lambda: _put_aside(path))


def free_name(path: Path) -> Path:
    """Return where a copy of a damaged file goes: never over an older one."""
    candidate, number = path.with_name(path.name + DAMAGED), 1
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}{DAMAGED}.{number}"), number + 1
    return candidate


def _put_aside(path: Path) -> None:
    with naming(path):
        path.rename(free_name(path))


def _copy(path: Path) -> None:
    copy = free_name(path)
    with naming(copy), path.open("rb") as source, copy.open("xb") as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())


def _cut(path: Path, size: int) -> None:
    """Shorten a file to its good part, once a copy of all of it is on the disk."""
    _copy(path)
    with naming(path), path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def _read_safetensors(path: Path) -> tuple[dict[str, memoryview], dict[str, str]]:
    """Return the bytes of each tensor and the metadata; the format is simple, and torch is not needed to read it.

    The file is mapped, not read: a model may be larger than the memory.
    """
    if path.stat().st_size < _LENGTH.size:
        raise ValueError("the file is too short")
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    begin = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    about: dict[str, Any] = json.loads(bytes(data[_LENGTH.size : begin]))
    if not isinstance(about, dict):
        raise ValueError("its header is no table")
    metadata = about.pop("__metadata__", {})
    tensors = {}
    for name, tensor in about.items():
        low, high = tensor["data_offsets"]
        if not 0 <= low <= high <= len(data) - begin:
            raise ValueError(f"{name} is cut off")
        tensors[name] = data[begin + low : begin + high]
    return tensors, metadata
