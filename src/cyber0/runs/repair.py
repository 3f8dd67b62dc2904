"""`cyber0 repair`: which parts of a run's folder are intact, and cutting off the others after making a copy.

A killed process needs none of this: what it leaves unfinished is cut off when the run is resumed. This is for disks
that lost or changed something. It needs neither torch nor the model, so it works where a federator runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyber0.config.files import load, to_toml
from cyber0.config.paths import agreed
from cyber0.config.schema import Config, for_header
from cyber0.errors import ConfigError, Cyber0Error, ExitCode, LedgerError
from cyber0.federation import user_code as own
from cyber0.ledger import DECIDED, Header, Ledger, Reports
from cyber0.ledger.record import RecordFormat
from cyber0.ledger.settings import changed_settings
from cyber0.runs.folder import load_summary, read_metrics
from cyber0.runs.weights import fault_of_weights, read_safetensors
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
LEDGER_METHODS = ("cyber0", "mezo")  # the others store their weights


@dataclass
class FileFinding:
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
    findings: list[FileFinding] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    """What else the operator should know before and after."""

    @property
    def remedies(self) -> list[FileFinding]:
        """The findings that something can be done about."""
        return [finding for finding in self.findings if finding.apply is not None]

    @property
    def lost(self) -> list[str]:
        """The files that something is wrong with and nothing can be done about."""
        return [finding.name for finding in self.findings if finding.lost]

    def add(self, name: str, text: str, remedy: str = "", apply: Callable[[], None] | None = None) -> None:
        self.findings.append(FileFinding(name, text, remedy, apply))

    def add_loss(self, name: str, text: str) -> None:
        self.findings.append(FileFinding(name, text, lost=True))


def command(folder: Path, *, yes: bool) -> ExitCode:
    """Print what was found, ask, repair; return the exit code: FAULTS if something is left damaged."""
    if folder.name == LEDGER and folder.is_file():
        folder = folder.parent  # the other files of a run must agree with it
    with _locked_folder(folder):
        survey = examine(folder)
        for finding in survey.findings:
            print(f"{finding.name}: {finding.text}")
        if not survey.remedies:
            print(f"can't be repaired: {', '.join(survey.lost)}" if survey.lost else "nothing to repair")
            return ExitCode.FAULTS if survey.lost else ExitCode.DONE
        print("\nrepair would")
        for finding in survey.remedies:
            print(f"- {finding.remedy}")
        for line in survey.advice:
            print(line)
        if not yes and not _confirmed():
            print("nothing was changed; --yes repairs without asking")
            return ExitCode.FAULTS
        for finding in survey.remedies:
            assert finding.apply is not None
            finding.apply()
            print(f"done: {finding.remedy}")
        if survey.lost:
            print(f"can't be repaired: {', '.join(survey.lost)}")
    return ExitCode.FAULTS if survey.lost else ExitCode.DONE


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return input("\nDo it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder so that its run can't be resumed meanwhile; a run that is running is refused."""
    if folder.is_file():
        with locked(folder):
            yield
        return
    if not folder.is_dir() or not any((folder / name).exists() for name in (LEDGER, STATE, CONFIG)):
        raise ConfigError(f"{folder} holds no run: it has no {LEDGER}, no {STATE} and no {CONFIG}")
    with locked(folder / LEDGER if (folder / LEDGER).exists() else folder):
        yield


def examine(folder: Path) -> Survey:
    """Examine a run's folder, or a single ledger file; nothing is changed."""
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
    """Examine the ledger of a `ZeroOrder`."""
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
    intact = f"{len(ledger):,} records are good, the first {good:,} bytes"
    if size == good:
        survey.add(name, f"{intact}, which is all of it")
        return False
    rest = size - good
    copy = free_name(path)
    if fault is None:
        unfinished = "were never written" if ledger.zero_tail else "are a record that was not finished"
        survey.add(
            name,
            f"{intact}; the last {rest:,} {unfinished}. A resumed run cuts them off by itself",
            f"cut these {rest:,} bytes off {name} and keep a copy of all of it as {copy.name}",
            lambda: _cut(path, good),
        )
        return False
    lost = -(-rest // RecordFormat(ledger.header).sizes[DECIDED])
    lost_rounds = f"about {lost:,} round{'s' if lost > 1 else ''}"
    place = f"after round {len(ledger) - 1}" if len(ledger) else "before its first record"
    survey.add(
        name,
        f"{intact}; record {len(ledger)} does not verify: {fault}. It and what follows, {rest:,} bytes or "
        f"{lost_rounds}, can't be used",
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
            "in their --state folder is deleted, which accepts that these rounds are lost.",
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
        survey.add_loss(CONFIG, f"{fault}; its contents are unknown, so restore it from a copy")
        return None
    first = f"keep the present one as {free_name(path).name}, and " if path.exists() else ""

    def restore() -> None:
        if path.exists():
            _rename_damaged(path)
        write_text(path, to_toml(own.with_remembered_paths(config, survey.folder)))

    survey.add(CONFIG, fault, f"{first}write {CONFIG} from the settings in {where}", restore)
    return config


def _recorded(settings: dict[str, Any] | None) -> Config | None:
    if not settings:
        return None
    try:
        return Config.recorded(settings)
    except Cyber0Error:
        return None


def _examine_missing(survey: Survey, config: Config | None) -> None:
    """Report a missing ledger or state of a run that was started: it is written before all other files."""
    folder = survey.folder
    if not any((folder / name).exists() for name in (SUMMARY, METRICS, PARTITION)):
        return
    with_ledger = config is None or config.method.name in LEDGER_METHODS
    again = f"start again in another folder with `cyber0 run {folder / CONFIG} --out ...`"
    if with_ledger:
        survey.add_loss(LEDGER, f"is missing: the decisions of the run are lost; restore it from a copy, or {again}")
    elif (folder / SUMMARY).exists():
        survey.add(STATE, f"is missing, which the figures do not need; to compute the weights again, {again}")
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
    _add_rename(survey, path, fault, "a resumed run, or `cyber0 replay`, makes the starting weights again")


def _examine_state(survey: Survey) -> dict[str, Any] | None:
    """Add what was found, and return the settings that it records."""
    path = survey.folder / STATE
    try:
        weights, about = read_safetensors(path)
        progress = json.loads(about[STATE_PROGRESS])
        if STATE_DIGEST in about and about[STATE_DIGEST] != state_digest(about[STATE_PROGRESS], weights):
            raise ValueError("it was changed after it was written, its digest is wrong")
        text, settings = f"the weights after {progress['round']:,} rounds", progress["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"can't be read as the state of a run: {error!r}"
        _add_rename(survey, path, text, f"`cyber0 run --resume {survey.folder}` then starts from the first round")
        return None
    survey.add(STATE, text)
    return dict(settings)


def _examine_reports(survey: Survey, ledger: Ledger, cut: bool) -> None:
    path, config = survey.folder / REPORTS, _recorded(ledger.header.config)
    if not path.exists():
        if config is not None and config.stores_reports and len(ledger):
            lost = f"is missing: none of the {len(ledger)} rounds can be decided again (`cyber0 verify --decisions`)"
            survey.add_loss(REPORTS, f"{lost}; restore it from a copy")
        return
    try:
        reports = Reports(path, ledger.header.scalars)
    except LedgerError as error:
        _add_rename(survey, path, str(error), "no round can be decided again (`cyber0 verify --decisions`)")
        return
    found, good = reports.survey()
    last = found[-1] if found else -1
    fault, size, needed = reports.fault, path.stat().st_size, len(ledger)
    reports.close()
    intact = f"the reports up to round {last} are good, the first {good:,} bytes" if last >= 0 else "no report is good"
    copy = free_name(path).name
    if fault is not None:
        harm = f"rounds from {fault.round} on can't be decided again (`cyber0 verify --decisions`)"
        harmless = "the ledger does not need them, and a resumed run cuts them off by itself"
        survey.add(
            REPORTS,
            f"{intact}; those of round {fault.round} {fault.text}. {harm if fault.round < needed else harmless}",
            f"cut {size - good:,} bytes off {REPORTS} and keep a copy of all of it as {copy}",
            lambda: _cut(path, good),
        )
    elif cut and last >= needed:
        remedy = f"keep a copy of {REPORTS} as {copy}, since a resumed run cuts off what the ledger lacks"
        survey.add(REPORTS, intact, remedy, lambda: _copy(path))
    elif lacking := len(set(range(needed)).difference(found)):
        text = f"those of {lacking} of the {needed} rounds are missing, which can't be decided again"
        survey.add_loss(REPORTS, f"{intact}, but {text} (`cyber0 verify --decisions`); restore it from a copy")
    else:
        survey.add(REPORTS, f"{intact}, which is all of it")


def _examine_metrics(survey: Survey) -> None:
    path = survey.folder / METRICS
    if not path.exists():
        return
    rows, fault = read_metrics(path)
    rest = "; what follows is damaged, and a resumed run measures it again" if fault else ""
    survey.add(METRICS, f"{len(rows):,} evaluations{rest}")


def _examine_summary(survey: Survey, rounds: int | None) -> None:
    path = survey.folder / SUMMARY
    if not path.exists():
        return
    try:
        claimed = load_summary(survey.folder)["rounds"]
    except (OSError, ValueError, KeyError) as error:
        _add_rename(survey, path, f"can't be read as a summary: {error!r}", "a resumed run writes it again")
        return
    if rounds is not None and claimed != rounds:
        text = f"claims {claimed} rounds, but the ledger has {rounds}"
        _add_rename(survey, path, text, "a resumed run writes it again")
        return
    survey.add(SUMMARY, f"the run has ended, after {claimed} rounds")


def _add_rename(survey: Survey, path: Path, fault: str, then: str) -> None:
    remedy = f"rename {path.name} to {free_name(path).name}; {then}"
    survey.add(path.name, fault, remedy, lambda: _rename_damaged(path))


def free_name(path: Path) -> Path:
    """Return where a copy of a damaged file goes; an older copy is never overwritten."""
    candidate, number = path.with_name(path.name + DAMAGED), 1
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}{DAMAGED}.{number}"), number + 1
    return candidate


def _rename_damaged(path: Path) -> None:
    with naming(path):
        path.rename(free_name(path))


def _copy(path: Path) -> None:
    copy = free_name(path)
    with naming(copy), path.open("rb") as source, copy.open("xb") as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())


def _cut(path: Path, size: int) -> None:
    """Truncate a file to its intact part, once a copy of all of it is on the disk."""
    _copy(path)
    with naming(path), path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())
