"""A diagnosis in plain words: what is wrong, if anything, and which lr and mu to choose. Plain data in and out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cyber0.tasks import of_set

GOOD, NOTE, BAD = "good", "note", "bad"

TOO_SHAKY = 0.1  # of the loss's change over a probing step, when it is measured twice
GUESSING = 0.05  # relative distance from the loss of guessing that counts as guessing
WRONG_SLOPES = 0.3  # error of slopes that is no longer harmless
TOO_SLOW = 0.1  # share of the fall that the best lr would give
LOST = 1e-6  # the same, below which it can't be told from rounding
TOO_MUCH_TAKEN = 0.2  # of the honest slopes left in a decision, below which liars decide
LEARNED = 0.8  # of the loss at the start, below which a run has learned something
TOO_LITTLE = 0.25  # of the promised fall; the best lr gives a half where there is no noise
WEAK = 1.0  # signal to noise of a decision

# What a fault means for the question "is it the learning rate or a bug?", the most fundamental first.
HEADLINES = {
    "loss": "Not the learning rate: the loss itself is wrong.",
    "slopes": "A bug, not the learning rate: the loss does not change with the weights that are trained.",
    "mu": "It is mu: the slopes are not those of the loss.",
    "signal": "The data, not the learning rate: the estimates are noise.",
    "lr": "It is the learning rate.",
    "liars": "Not the learning rate: the liars decide.",
    "ascent": "Not the learning rate: the steps do not lead downhill.",
}
FINE = "Neither: learning rate and mu are fine, and the slopes are more than noise."
NOTED = "Nothing is broken; what is noted below costs some speed or accuracy."

Data = Mapping[str, Any]


class Finding(NamedTuple):
    """One thing that was found: how bad it is, what it is about, and what to do."""

    level: str
    topic: str
    text: str

    def sentence(self, where: str = "") -> Finding:
        """Begin with a capital, or with the place; names of settings are written as they are."""
        text = where + self.text
        return self._replace(text=text if text.startswith(("lr", "mu")) else text[0].upper() + text[1:])


class Verdict(NamedTuple):
    """What a diagnosis comes to."""

    level: str
    headline: str
    findings: list[Finding]
    suggestions: list[str]


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, as plain data, and what it means; print it."""

    data: Data

    @property
    def verdict(self) -> Verdict:
        """What it comes to."""
        return verdict(self.data)

    def __str__(self) -> str:
        head, rows = table(self.data)
        cells = [head, *rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        found = self.verdict
        lines += ["", found.headline, *(f"- {f.text}" for f in found.findings)]
        return "\n".join([*lines, *(f"suggested: {line}" for line in found.suggestions)])


def verdict(diagnosis: Data) -> Verdict:
    """Judge a diagnosis, as `diagnose` returns it or diagnostics.json has it.

    Of several places only what is amiss is said; the table has the rest.
    """
    stations: Sequence[Data] = diagnosis["stations"]
    findings: list[Finding] = []
    several = len(stations) > 1
    for station in stations:
        where = f"After {station['round']:,} rounds: " if several else ""
        judged = [_in_time(found, station, stations[0]) for found in _judge(diagnosis, station)]
        findings += [f.sentence(where) for f in judged if f.level != GOOD or not several]
    faults = [topic for topic in HEADLINES if any(f.level == BAD and f.topic == topic for f in findings)]
    if faults:
        level, headline = BAD, HEADLINES[faults[0]]
    elif any(f.level == NOTE for f in findings):
        level, headline = NOTE, NOTED
    else:
        level, headline = GOOD, FINE
    return Verdict(level, headline, findings, suggestions(diagnosis))


def _in_time(found: Finding, station: Data, first: Data) -> Finding:
    """Make little of a step that is too long where the loss has come down: noise and liars bring every run there."""
    if found.topic != "lr" or found.level != BAD or station is first or None in (station["loss"], first["loss"]):
        return found
    wrong_from_the_start = first["lr_rise"] is not None and first["lr"] >= first["lr_rise"]
    if wrong_from_the_start or station["loss"] > LEARNED * first["loss"]:
        return found
    return found._replace(level=NOTE)


def _judge(diagnosis: Data, station: Data) -> list[Finding]:
    if station["loss"] is None:
        where = station.get("broken") or "the loss"
        if station["round"]:
            return [
                Finding(BAD, "lr", f"{where} is not a finite number: the steps have led the weights astray; lower lr.")
            ]
        return [
            Finding(BAD, "loss", f"{where} is not a finite number: look at these samples and the starting weights.")
        ]
    found = [*_loss(station), *_mu(diagnosis, station)]
    if any(f.level == BAD for f in found):  # what follows rests on slopes that can be relied on
        return found
    found += _signal(diagnosis, station)
    signal = station["signal"]
    if signal is None or signal["present"]:
        found += [*_byzantine(station), *_lr(diagnosis, station)]
    return found


def _loss(station: Data) -> list[Finding]:
    change = 2 * (station["mu"] or 0) * (station["slope"] or 0)  # None: not finite, which is for mu to say
    if not change or station["repeat"] <= TOO_SHAKY * change:
        return []
    text = (
        f"measured twice at the same weights, the loss differs by {station['repeat']:.2g}, and a probing step changes "
        f"it by {change:.2g}: it must see the same samples each time, without dropout or other chance."
    )
    return [Finding(BAD, "loss", text)]


def _mu(diagnosis: Data, station: Data) -> list[Finding]:
    points, mu, low, high = (station[name] for name in ("probing", "mu", "mu_low", "mu_high"))
    if mu is None:
        return []
    if low is None:
        tried = f"{points[0]['mu']:.2g} to {points[-1]['mu']:.2g}"
        if station["slope"] == 0 and all(p["straight"] == 0 for p in points):
            text = f"no step along any direction changes the loss (mu {tried}): look which weights are trained, and "
            return [Finding(BAD, "slopes", f"{text}whether the loss depends on them.")]
        text = f"slopes depend on mu wherever it was tried ({tried}): the loss is too rough for "
        return [Finding(BAD, "mu", f"{text}{diagnosis['dtype']}, or has no slope.")]
    here = _nearest(points, "mu", mu)
    error = math.inf if here["error"] is None else here["error"]
    straight = f"{_percent(here['straight'])} of the loss's change over a probing step is linear"
    off = f"slopes are {_percent(error)} off" if error < 10 else "slopes have nothing to do with the loss's"
    if error <= WRONG_SLOPES:
        good = low * 0.99 <= mu <= high * 1.01  # both were rounded to float32
        return [Finding(GOOD if good else NOTE, "mu", f"mu = {mu:g}: {straight}, and {off}.")]
    if mu < low:
        text = f"mu = {mu:g} is too small: {off}, since the step is lost in the rounding of {diagnosis['dtype']}; from "
        return [Finding(BAD, "mu", f"{text}{low:.2g} on they are right.")]
    text = f"mu = {mu:g} is too large: {off}, since the loss bends over such a step ({straight}); up to "
    return [Finding(BAD, "mu", f"{text}{high:.2g} they are right.")]


def _signal(diagnosis: Data, station: Data) -> list[Finding]:
    signal, unit, guessing = station["signal"], diagnosis["unit"], diagnosis["guessing"]
    if signal is None:
        return [Finding(NOTE, "signal", "signal and noise can't be told apart in one batch: give several.")]
    ratio, decided, agree = signal["ratio"], signal["decided_ratio"], _percent(signal["agreement"])
    if signal["present"]:
        text = f"signal to noise {_short(ratio)} in one {unit}'s numbers"
        text += f", {_short(decided)} in their mean; signs agree in {agree}" if unit == "client" else ""
        if decided is None or decided >= WEAK:
            return [Finding(GOOD, "signal", f"{text}.")]
        larger = "larger batches or more clients" if unit == "client" else "larger batches"
        remedy = f"take {larger}, or lower lr over the rounds"
        return [Finding(NOTE, "signal", f"{text}: more noise than signal, so {remedy}.")]
    units = "clients'" if unit == "client" else "batches'"
    text = f"the {units} numbers agree no better than chance (signal to noise {_short(ratio)}, signs agree in {agree})"
    if guessing and station["loss"] > (1 - GUESSING) * guessing:
        text += (
            f", and the loss {station['loss']:.3g} is no better than that of guessing, {guessing:.3g}: look whether "
        )
        return [Finding(BAD, "signal", f"{text}labels belong to their samples (order, template, label words).")]
    text += ": with such batches no slope can be told from noise here. It may be near a minimum; if the loss should be "
    level = NOTE if station["round"] else BAD
    return [Finding(level, "signal", f"{text}lower, look at samples and labels, or take larger batches.")]


def _byzantine(station: Data) -> list[Finding]:
    kept = station["kept"]
    if kept is None or kept >= TOO_MUCH_TAKEN:
        return []
    text = f"of the honest clients' mean slopes {_percent(max(0.0, kept))} is left in a decision; liars take the rest."
    return [Finding(BAD if kept <= 0 else NOTE, "liars", text)]


def _lr(diagnosis: Data, station: Data) -> list[Finding]:
    lr, points = station["lr"], station["stepping"]
    low, best, high, rise = (station[f"lr_{name}"] for name in ("low", "best", "high", "rise"))
    if best is None:
        tried = f" (lr {points[0]['lr']:.2g} to {points[-1]['lr']:.2g})" if points else ""
        text = f"no step lowers the loss, however short{tried}: look whether the loss of a batch is that of its own "
        return [Finding(BAD, "ascent", f"{text}samples, and whether anything changes the sign of slopes.")]
    promised, real = station["promised"], station["real"]
    came = ""
    if promised > 0 and real is not None:
        share = "nothing" if real <= 0 else _percent(real / promised)
        came = f"; {share} of the fall that the slopes promise comes true"
    if rise is not None and lr >= rise:
        text = f"lr = {lr:g} is too large: a step raises the loss, as all do from {_short(rise)} on; "
        return [Finding(BAD, "lr", f"{text}{_short(best)} is best.")]
    if lr > high:
        text = f"lr = {lr:g} is near the edge: from {_short(rise or high)} on a step raises the loss"
        return [Finding(NOTE, "lr", f"{text}{came}.")]
    if lr >= low:
        text = f"lr = {lr:g} is in the range where a step does at least half of what it could"
        return [Finding(GOOD, "lr", f"{text}{came}.")]
    if lr == 0:
        return [Finding(BAD, "lr", f"lr = 0: no step moves the weights; {_short(best)} is best.")]
    fall = max(0.0, _nearest(points, "lr", lr)["fall"] or 0.0)  # less is rounding
    share = fall / max(p["fall"] for p in points if p["fall"] is not None)
    if diagnosis["lr_schedule"] != "constant" and station["round"]:
        return [Finding(GOOD, "lr", f"lr = {lr:g} by its schedule; a step does {_percent(share)} of what it could.")]
    below = f"{_times(best / lr)} below the best, {_short(best)}"
    does = f"a step does {_percent(share)} of what it could"
    if share >= TOO_SLOW:
        return [Finding(NOTE, "lr", f"lr = {lr:g} is {below}: {does}{came}.")]
    text = f"lr = {lr:g} is too small, {below}: "
    if share <= LOST:
        return [Finding(BAD, "lr", f"{text}so short a step is lost in rounding.")]
    return [Finding(BAD, "lr", f"{text}{does}, so expect {_times(1 / share)} as many rounds as are needed.")]


def of_records(records: Data, evaluated_on: str | None = "test") -> list[Finding]:
    """Judge what the ledger of a run promised, and what came of it on the set that was evaluated."""
    promised, real, signal = records["promised"], records["real"], records.get("signal")
    found: list[Finding] = []
    if promised > 0:
        text = (
            f"in {records['rounds']:,} rounds the decided numbers promised that the loss falls by {_number(promised)}; "
        )
        text += f"the {of_set(evaluated_on, 'loss')} "
        fell = f"fell by {_number(real)}, {_percent(real / promised)} of it"
        text += fell if real > 0 else f"rose by {_number(-real)}"
        if real <= 0:
            found.append(Finding(BAD, "lr", f"{text}: lr is too large, or the decisions are noise."))
        elif real < TOO_LITTLE * promised:
            found.append(Finding(NOTE, "lr", f"{text}: steps are long, or mostly noise."))
        else:
            found.append(Finding(GOOD, "lr", f"{text}."))
    if signal is not None:
        text = f"signal to noise {_short(signal['ratio'])} in a client's reports, {_short(signal['decided_ratio'])} in "
        text += f"their mean; signs agree in {_percent(signal['agreement'])}"
        found.append(Finding(GOOD if signal["present"] else BAD, "signal", f"{text}."))
    return [f.sentence() for f in found]


def suggestions(diagnosis: Data) -> list[str]:
    """Return the ranges of lr and mu, where they were found."""
    lines = []
    usable = [s for s in diagnosis["stations"] if s["loss"] is not None]
    lrs = [(s["lr_low"], s["lr_high"]) for s in usable if s["lr_low"] is not None and _reliable(diagnosis, s)]
    if lrs:
        common, now = (max(low for low, _ in lrs), min(high for _, high in lrs)), f"now {diagnosis['lr']:g}"
        if common[0] < common[1]:
            lines.append(f"lr {_range(*common)} ({now})")
        else:
            text = (
                f"lr {_range(*lrs[0])} in the beginning and {_range(*lrs[-1])} in the end ({now}): lower it over the "
            )
            lines.append(f"{text}rounds by lr_schedule, or keep to what lies between")
    mus = [(s["mu_low"], s["mu_high"]) for s in usable if s["mu_low"] is not None]
    if mus:
        low, high = max(low for low, _ in mus), min(high for _, high in mus)
        if low <= high:
            lines.append(f"mu {_range(low, high)} (now {diagnosis['mu']:g})")
    return lines


def _reliable(diagnosis: Data, station: Data) -> bool:
    """Tell whether the range of lr rests on slopes of the loss, not on rounding or noise."""
    if any(f.level == BAD for f in [*_loss(station), *_mu(diagnosis, station)]):
        return False
    return station["signal"] is None or bool(station["signal"]["present"])


def table(diagnosis: Data) -> tuple[list[str], list[list[str]]]:
    """Return what was measured: a header, and one row a quantity with a column a place."""
    stations, unit, mu = diagnosis["stations"], diagnosis["unit"], diagnosis["mu"]
    rows: list[list[str]] = [
        ["loss", *(_number(s["loss"]) for s in stations)],
        [f"signal to noise, one {unit}", *(_of_signal(s, "ratio") for s in stations)],
    ]
    if unit == "client":  # batches of one machine are not combined
        rows += [
            ["signal to noise, mean of all", *(_of_signal(s, "decided_ratio") for s in stations)],
            ["honest slope left in a decision", *(_percent(s["kept"]) for s in stations)],
        ]
    rows += [
        ["signs agree", *(_of_signal(s, "agreement") for s in stations)],
        [f"signal to noise, k = {diagnosis['k']} directions", *(_short(s["directions_ratio"]) for s in stations)],
    ]
    if mu is not None:
        rows += [
            [f"linear at mu = {mu:g}", *(_at_mu(s, "straight") for s in stations)],
            [f"error of slopes at mu = {mu:g}", *(_at_mu(s, "error") for s in stations)],
            ["good mu", *(_range(s["mu_low"], s["mu_high"]) for s in stations)],
        ]
    rows += [
        ["lr", *(_number(s["lr"]) for s in stations)],
        ["promised fall that comes true", *(_share(s["real"], s["promised"]) for s in stations)],
        ["good lr", *(_range(s["lr_low"], s["lr_high"]) for s in stations)],
        ["best lr", *(_short(s["lr_best"]) for s in stations)],
        ["loss rises from lr", *(_short(s["lr_rise"]) for s in stations)],
    ]
    return ["", *(f"after {s['round']:,} rounds" for s in stations)], rows


def _nearest(points: Sequence[Data], name: str, value: float) -> Data:
    return min(points, key=lambda p: abs(math.log(p[name] / value)))


def _of_signal(station: Data, name: str) -> str:
    if station["signal"] is None:
        return "-"
    return (_percent if name == "agreement" else _short)(station["signal"][name])


def _at_mu(station: Data, name: str) -> str:
    return _percent(_nearest(station["probing"], "mu", station["mu"])[name]) if station["probing"] else "-"


def _share(part: float | None, whole: float | None) -> str:
    """Return which share of a promised fall came true; where the loss rises, by whatever, that is none."""
    if part is None or not whole or not math.isfinite(part / whole):
        return "-"
    return "none: it rises" if part < 0 < whole else _percent(part / whole)


def _range(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{_short(low)} ... {_short(high)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _times(factor: float) -> str:
    return f"{factor:,.0f} times" if 100 <= factor < 1e6 else f"{factor:.2g} times"


def _percent(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return "-"
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or share == 0 else f"{100 * share:.2g} %"
