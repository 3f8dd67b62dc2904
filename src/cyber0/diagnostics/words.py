"""A diagnosis in plain words: what is wrong, if anything, and which lr and mu to choose. Plain data in and out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

GOOD, NOTE, BAD = "good", "note", "bad"

TOO_SHAKY = 0.1  # of the loss's change over a probing step, when it is measured twice
GUESSING = 0.05  # relative distance from the loss of guessing that counts as guessing
WRONG_SLOPES = 0.3  # error of slopes that is no longer harmless
TOO_SLOW = 0.1  # share of the fall that the best lr would give
TOO_MUCH_TAKEN = 0.2  # of the honest slopes left in a decision, below which liars decide
LEARNED = 0.8  # of the loss at the start, below which a run has learned something
TOO_LITTLE = 0.25  # of the promised fall; the best lr gives a half where there is no noise
WEAK = 1.0  # signal to noise of a decision


class Finding(NamedTuple):
    """One thing that was found: how bad it is, what it is about, and what to do."""

    level: str
    topic: str
    text: str


class Verdict(NamedTuple):
    """What a diagnosis comes to."""

    level: str
    headline: str
    findings: list[Finding]
    suggestions: list[str]


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, as plain data, and what it means; print it."""

    data: Mapping[str, Any]

    @property
    def verdict(self) -> Verdict:
        return verdict(self.data)

    def __str__(self) -> str:
        head, rows = table(self.data)
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]
        found = self.verdict
        lines += ["", found.headline, *(f"- {f.text}" for f in found.findings)]
        return "\n".join([*lines, *(f"suggested: {line}" for line in found.suggestions)])


# What a fault means for the question "is it the learning rate or a bug?", the most fundamental first.
HEADLINES = {
    "loss": "Not the learning rate: the loss itself is wrong.",
    "mu": "It is mu: the slopes are not those of the loss.",
    "slopes": "A bug, not the learning rate: the loss does not change with the weights that are trained.",
    "signal": "The data, not the learning rate: the estimates are noise.",
    "lr": "It is the learning rate.",
    "liars": "Not the learning rate: the liars decide.",
}
FINE = "Neither: learning rate and mu are fine, and the slopes are more than noise."


def verdict(diagnosis: Mapping[str, Any]) -> Verdict:
    """Judge a diagnosis, as `diagnose` returns it or diagnostics.json has it."""
    stations: Sequence[Mapping[str, Any]] = diagnosis["stations"]
    findings: list[Finding] = []
    several = len(stations) > 1
    for station in stations:
        where = f"After {station['round']:,} rounds: " if several else ""
        judged = [_in_time(found, station, stations[0]) for found in _judge(diagnosis, station)]
        findings += [f._replace(text=where + f.text) for f in judged if f.level != GOOD or not several]
    topics = [topic for topic in HEADLINES if any(f.level == BAD and f.topic == topic for f in findings)]
    level = BAD if topics else NOTE if any(f.level == NOTE for f in findings) else GOOD
    headline = HEADLINES[topics[0]] if topics else FINE
    if not topics and level == NOTE:
        headline = "Nothing is broken; what is noted below costs some speed or accuracy."
    return Verdict(level, headline, findings, suggestions(diagnosis))


def _in_time(found: Finding, station: Mapping[str, Any], first: Mapping[str, Any]) -> Finding:
    """Make little of a step that is too long where the loss has come down: noise and liars bring every run there."""
    if found.topic != "lr" or found.level != BAD or station is first or None in (station["loss"], first["loss"]):
        return found
    if first["lr_rise"] is not None and first["lr"] >= first["lr_rise"] or station["loss"] > LEARNED * first["loss"]:
        return found
    return found._replace(level=NOTE)


def _judge(diagnosis: Mapping[str, Any], station: Mapping[str, Any]) -> list[Finding]:
    if station["loss"] is None:
        where = station.get("broken") or "the loss"
        cause = (
            "the steps have led the weights astray: lower lr" if station["round"]
            else "look at these samples and at the starting weights"
        )  # fmt: skip
        return [Finding(BAD, "lr" if station["round"] else "loss", f"{where} is not a finite number; {cause}.")]
    found = [*_loss(station), *_mu(diagnosis, station)]
    if not any(f.level == BAD for f in found):  # what follows rests on slopes that can be relied on
        found += _signal(diagnosis, station)
        signal = station["signal"]
        if signal is None or signal["present"]:
            found += [*_liars(station), *_lr(diagnosis, station)]
    return found


def _loss(station: Mapping[str, Any]) -> list[Finding]:
    steps = 2 * (station["mu"] or 0) * station["slope"]
    if steps and station["repeat"] > TOO_SHAKY * steps:
        return [Finding(
            BAD, "loss",
            f"measured twice at the same weights, the loss differs by {station['repeat']:.2g}, and a probing step changes "
            f"it by {steps:.2g}: it must see the same samples each time, without dropout or other chance.",
        )]  # fmt: skip
    return []


def _mu(diagnosis: Mapping[str, Any], station: Mapping[str, Any]) -> list[Finding]:
    points, mu = station["probing"], station["mu"]
    if mu is None:
        return []
    here = min(points, key=lambda p: abs(math.log(p["mu"] / mu)))
    if station["mu_low"] is None:
        if not station["slope"] and all(p["straight"] == 0 for p in points):
            return [Finding(BAD, "slopes", f"no step up to {points[-1]['mu']:.2g} along any direction changes the loss: "
                            "look which weights are trained, and whether the loss depends on them.")]  # fmt: skip
        return [Finding(BAD, "mu", f"slopes depend on mu wherever it was tried ({points[0]['mu']:.2g} to "
                        f"{points[-1]['mu']:.2g}): the loss is too rough for {diagnosis['dtype']}, or has no slope.")]  # fmt: skip
    error = math.inf if here["error"] is None else here["error"]
    straight = f"{_percent(here['straight'])} of the loss's change over a probing step is linear"
    off = f"slopes are {_percent(error)} off" if error < 10 else "slopes have nothing to do with the loss's"
    if error <= WRONG_SLOPES:
        level = GOOD if station["mu_low"] * 0.99 <= mu <= station["mu_high"] * 1.01 else NOTE
        return [Finding(level, "mu", f"mu = {mu:g}: {straight}, and {off}.")]
    if mu < station["mu_low"]:
        lost = f"the step is lost in the rounding of {diagnosis['dtype']}"
        return [Finding(BAD, "mu", f"mu = {mu:g} is too small: {off}, since {lost}; from {station['mu_low']:.2g} on they "
                        "are right.")]  # fmt: skip
    return [Finding(BAD, "mu", f"mu = {mu:g} is too large: {off}, since the loss bends over such a step ({straight}); up "
                    f"to {station['mu_high']:.2g} they are right.")]  # fmt: skip


def _signal(diagnosis: Mapping[str, Any], station: Mapping[str, Any]) -> list[Finding]:
    signal = station["signal"]
    if signal is None:
        return [Finding(NOTE, "signal", "signal and noise can't be told apart in one batch: give several.")]
    ratio, decided, unit = _ratio(signal["ratio"]), signal["decided_ratio"], diagnosis["unit"]
    if signal["present"]:
        agree = f"signs agree in {_percent(signal['agreement'])}"
        text = f"signal to noise {ratio} in one {unit}'s numbers"
        text += f", {_ratio(decided)} in their mean; {agree}" if unit == "client" else f"; {agree}"
        if decided is not None and decided < WEAK:
            return [Finding(NOTE, "signal", f"{text}: more noise than signal, so take larger batches or more "
                            "clients, or lower lr over the rounds.")]  # fmt: skip
        return [Finding(GOOD, "signal", f"{text}.")]
    noise = f"the {unit}s' numbers agree no better than chance (signal to noise {ratio}, "
    noise += f"signs agree in {_percent(signal['agreement'])})"
    guessing = diagnosis.get("guessing")
    if guessing and station["loss"] > (1 - GUESSING) * guessing:
        return [Finding(BAD, "signal", f"{noise}, and the loss {station['loss']:.3g} is no better than that of guessing, "
                        f"{guessing:.3g}: look whether labels belong to their samples (order, template, label words).")]  # fmt: skip
    return [Finding(
        NOTE if station["round"] else BAD, "signal",
        f"{noise}: with such batches no slope can be told from noise here. It may be near a minimum; if the loss should "
        "be lower, look at samples and labels, or take larger batches.",
    )]  # fmt: skip


def _liars(station: Mapping[str, Any]) -> list[Finding]:
    kept = station["kept"]
    if kept is None or kept >= 0.8:
        return []
    text = f"of the honest clients' mean slopes {_percent(max(0.0, kept))} is left in a decision; liars take the rest"
    return [Finding(BAD if kept <= 0 else NOTE, "liars", f"{text}.")] if kept < TOO_MUCH_TAKEN else []


def _lr(diagnosis: Mapping[str, Any], station: Mapping[str, Any]) -> list[Finding]:
    lr, points = station["lr"], station["stepping"]
    if station["lr_best"] is None:
        return [Finding(BAD, "lr", f"no step lowers the loss, however short (lr {points[0]['lr']:.2g} to "
                        f"{points[-1]['lr']:.2g})." if points else "there are no slopes to step along.")]  # fmt: skip
    low, best, high, rise = (station[f"lr_{name}"] for name in ("low", "best", "high", "rise"))
    fall = min(points, key=lambda p: abs(math.log(p["lr"] / lr)))["fall"]
    most = max(p["fall"] for p in points if p["fall"] is not None)
    came = _came_true(station)
    if rise is not None and lr >= rise:
        return [Finding(BAD, "lr", f"lr = {lr:g} is too large: a step raises the loss, as all do from {_number(rise)} on; "
                        f"{_number(best)} is best.")]  # fmt: skip
    share = (fall or 0.0) / most
    if lr > high:
        return [Finding(NOTE, "lr", f"lr = {lr:g} is near the edge: from {_number(rise or high)} on a step raises the "
                        f"loss{came}.")]  # fmt: skip
    if lr >= low:
        return [Finding(GOOD, "lr", f"lr = {lr:g} is in the range where a step does at least half of what it could{came}.")]
    if diagnosis["lr_schedule"] != "constant" and station["round"]:
        return [Finding(GOOD, "lr", f"lr = {lr:g} by its schedule; a step does {_percent(share)} of what it could.")]
    slow = f"lr = {lr:g} is {_times(best / lr)} below the best, {_number(best)}: a step does {_percent(share)} of what it could"
    if share >= TOO_SLOW:
        return [Finding(NOTE, "lr", f"{slow}{came}.")]
    return [Finding(BAD, "lr", f"{slow}, so expect {_times(1 / share) if share > 0 else 'many times'} as many rounds "
                    "as are needed.")]  # fmt: skip


def _came_true(station: Mapping[str, Any]) -> str:
    promised, real = station["promised"], station["real"]
    if not promised or real is None or promised <= 0:
        return ""
    return f"; {_percent(real / promised)} of the fall that the slopes promise comes true"


def of_records(records: Mapping[str, Any]) -> list[Finding]:
    """Judge what the ledger of a run promised, and what came of it on the test set."""
    promised, real, found = records["promised"], records["real"], []
    if promised > 0:
        text = f"in {records['rounds']:,} rounds the decided numbers promised a fall of the loss by {_number(promised)} in "
        text += f"all; the test loss fell by {_number(real)}, which is {_percent(real / promised)} of it"
        if real <= 0:
            found.append(Finding(BAD, "lr", f"{text}: lr is too large, or the decisions are noise."))
        elif real < TOO_LITTLE * promised:
            found.append(Finding(NOTE, "lr", f"{text}: steps are long, or mostly noise."))
        else:
            found.append(Finding(GOOD, "lr", f"{text}."))
    signal = records.get("signal")
    if signal is not None:
        text = f"signal to noise {_ratio(signal['ratio'])} in a client's reports, {_ratio(signal['decided_ratio'])} in "
        text += f"their mean; signs agree in {_percent(signal['agreement'])}"
        found.append(Finding(GOOD if signal["present"] else BAD, "signal", f"{text}."))
    return found


def suggestions(diagnosis: Mapping[str, Any]) -> list[str]:
    """Return the ranges of lr and mu, where they were found."""
    lines = []
    usable = [s for s in diagnosis["stations"] if s["loss"] is not None]
    ranges = [(s["lr_low"], s["lr_high"]) for s in usable if s["lr_low"] is not None and _reliable(s)]
    if ranges:
        low, high = max(r[0] for r in ranges), min(r[1] for r in ranges)
        if low < high:
            lines.append(f"lr {_number(low)} ... {_number(high)} (now {diagnosis['lr']:g})")
        else:
            first, last = ranges[0], ranges[-1]
            lines.append(
                f"lr {_number(first[0])} ... {_number(first[1])} in the beginning and {_number(last[0])} ... "
                f"{_number(last[1])} in the end (now {diagnosis['lr']:g}): lower it over the rounds by lr_schedule, or keep "
                "to what lies between"
            )
    mus = [(s["mu_low"], s["mu_high"]) for s in usable if s["mu_low"] is not None]
    if mus:
        low, high = max(r[0] for r in mus), min(r[1] for r in mus)
        if low <= high:
            lines.append(f"mu {_number(low)} ... {_number(high)} (now {diagnosis['mu']:g})")
    return lines


def _reliable(station: Mapping[str, Any]) -> bool:
    """Tell whether the range of lr rests on slopes of the loss, not on rounding or noise."""
    slopes = station["mu_low"] is None or all(f.level != BAD for f in _mu({"dtype": ""}, station))
    return slopes and (station["signal"] is None or station["signal"]["present"])


def table(diagnosis: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return what was measured: a header, and one row a quantity with a column a place."""
    stations = diagnosis["stations"]
    head = ["", *(f"after {s['round']:,} rounds" for s in stations)]
    rows: list[list[str]] = [
        ["loss", *(_number(s["loss"]) for s in stations)],
        [f"signal to noise, one {diagnosis['unit']}", *(_of_signal(s, "ratio") for s in stations)],
        ["signal to noise, mean of all", *(_of_signal(s, "decided_ratio") for s in stations)],
        ["signs agree", *(_of_signal(s, "agreement") for s in stations)],
        ["honest slope left in a decision", *(_percent(s["kept"]) for s in stations)],
        ["signal to noise across directions", *(_ratio(s["directions_ratio"]) for s in stations)],
    ]
    if diagnosis["unit"] == "batch":  # nothing is combined
        rows = [row for row in rows if row[0] not in ("signal to noise, mean of all", "honest slope left in a decision")]
    if diagnosis["mu"] is not None:
        rows += [
            [f"linear at mu = {diagnosis['mu']:g}", *(_at_mu(s, "straight") for s in stations)],
            [f"error of slopes at mu = {diagnosis['mu']:g}", *(_at_mu(s, "error") for s in stations)],
            ["good mu", *(_range(s["mu_low"], s["mu_high"]) for s in stations)],
        ]
    return head, [
        *rows,
        ["lr", *(_number(s["lr"]) for s in stations)],
        ["fall promised that comes true", *(_share(s["real"], s["promised"]) for s in stations)],
        ["good lr", *(_range(s["lr_low"], s["lr_high"]) for s in stations)],
        ["best lr", *(_number(s["lr_best"]) for s in stations)],
        ["loss rises from lr", *(_number(s["lr_rise"]) for s in stations)],
    ]


def _of_signal(station: Mapping[str, Any], name: str) -> str:
    signal = station["signal"]
    if signal is None:
        return "-"
    return _percent(signal[name]) if name == "agreement" else _ratio(signal[name])


def _at_mu(station: Mapping[str, Any], name: str) -> str:
    if not station["probing"]:
        return "-"
    point = min(station["probing"], key=lambda p: abs(math.log(p["mu"] / station["mu"])))
    return _percent(point[name])


def _share(part: float | None, whole: float | None) -> str:
    return _percent(part / whole) if part is not None and whole else "-"


def _range(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{_number(low)} ... {_number(high)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}" if abs(value) < 0.1 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _times(factor: float) -> str:
    return f"{factor:,.2g} times" if factor < 100 else f"{factor:,.0f} times"


def _percent(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return "-"
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or share == 0 else f"{100 * share:.2g} %"
