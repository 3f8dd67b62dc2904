"""The verdict of a diagnosis: what is wrong, if anything, and which lr and mu to choose. Plain data in and out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cyber0.tasks import of_set

GOOD, NOTE, BAD = "good", "note", "bad"

TOO_SHAKY = 0.1  # difference of a loss measured twice, relative to its change over a probing step
GUESSING = 0.05  # relative distance from the loss of random guessing that counts as guessing
WRONG_SLOPES = 0.3  # error of slopes from which on they are wrong
TOO_SLOW = 0.1  # fraction of the fall that the best lr would give
LOST = 1e-6  # the same, below which it can't be distinguished from rounding
TOO_MUCH_TAKEN = 0.2  # of the honest slopes left in a decision, below which Byzantine clients decide
LEARNED = 0.8  # of the loss at the start, below which a run has learned something
TOO_LITTLE = 0.25  # of the predicted fall; the best lr gives a half where there is no noise
WEAK = 1.0  # signal to noise of a decision

# What a fault means for the question "is it the learning rate or a bug?", the most fundamental first.
HEADLINES = {
    "loss": "Not the learning rate: the loss itself is wrong.",
    "slopes": "A bug, not the learning rate: the loss does not change with the weights that are trained.",
    "mu": "It is mu: the slopes are not those of the loss.",
    "signal": "The data, not the learning rate: the estimates are noise.",
    "lr": "It is the learning rate.",
    "byzantine": "Not the learning rate: the Byzantine clients decide.",
    "ascent": "Not the learning rate: the steps do not lead downhill.",
}
FINE = "Neither: learning rate and mu are fine, and the slopes are more than noise."
NOTED = "Nothing is broken; the notes below cost some speed or accuracy."

DiagnosisData = Mapping[str, Any]


class Finding(NamedTuple):
    """One finding: how bad it is, what it is about, and what to do."""

    level: str
    topic: str
    text: str

    def sentence(self, where: str = "") -> Finding:
        """Start with a capital, or with the place; names of settings stay as they are."""
        text = where + self.text
        return self._replace(text=text if text.startswith(("lr", "mu")) else text[0].upper() + text[1:])


class Verdict(NamedTuple):
    """The conclusion of a diagnosis."""

    level: str
    headline: str
    findings: list[Finding]
    suggestions: list[str]


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, as plain data, and what it means; print it."""

    data: DiagnosisData

    @property
    def verdict(self) -> Verdict:
        """The conclusion."""
        return verdict(self.data)

    def __str__(self) -> str:
        head, rows = table(self.data)
        cells = [head, *rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        found = self.verdict
        lines += ["", found.headline, *(f"- {f.text}" for f in found.findings)]
        return "\n".join([*lines, *(f"suggested: {line}" for line in found.suggestions)])


def verdict(diagnosis: DiagnosisData) -> Verdict:
    """Judge a diagnosis, as `diagnose` returns it or diagnostics.json has it.

    For several points only problems are listed; the table has the rest.
    """
    measurements: Sequence[DiagnosisData] = diagnosis["stations"]
    findings: list[Finding] = []
    several = len(measurements) > 1
    for measurement in measurements:
        where = f"After {measurement['round']:,} rounds: " if several else ""
        judged = [_in_time(found, measurement, measurements[0]) for found in _judge(diagnosis, measurement)]
        findings += [f.sentence(where) for f in judged if f.level != GOOD or not several]
    faults = [topic for topic in HEADLINES if any(f.level == BAD and f.topic == topic for f in findings)]
    if faults:
        level, headline = BAD, HEADLINES[faults[0]]
    elif any(f.level == NOTE for f in findings):
        level, headline = NOTE, NOTED
    else:
        level, headline = GOOD, FINE
    return Verdict(level, headline, findings, suggestions(diagnosis))


def _in_time(found: Finding, measurement: DiagnosisData, first: DiagnosisData) -> Finding:
    """Downgrade a step that is too long after the loss has come down: noise and attacks bring every run there."""
    if (
        found.topic != "lr"
        or found.level != BAD
        or measurement is first
        or None in (measurement["loss"], first["loss"])
    ):
        return found
    wrong_from_the_start = first["lr_rise"] is not None and first["lr"] >= first["lr_rise"]
    if wrong_from_the_start or measurement["loss"] > LEARNED * first["loss"]:
        return found
    return found._replace(level=NOTE)


def _judge(diagnosis: DiagnosisData, measurement: DiagnosisData) -> list[Finding]:
    if measurement["loss"] is None:
        where = measurement.get("broken") or "the loss"
        if measurement["round"]:
            return [Finding(BAD, "lr", f"{where} is not a finite number: training has diverged; lower lr.")]
        return [Finding(BAD, "loss", f"{where} is not a finite number: check these samples and the starting weights.")]
    found = [*_loss(diagnosis, measurement), *_mu(diagnosis, measurement)]
    if any(f.level == BAD for f in found):  # the rest needs reliable slopes
        return found
    found += _signal(diagnosis, measurement)
    signal = measurement["signal"]
    if signal is None or signal["present"]:
        found += [*_byzantine(measurement), *_lr(diagnosis, measurement)]
    return found


def _loss(diagnosis: DiagnosisData, measurement: DiagnosisData) -> list[Finding]:
    steps = 1 if _is_one_sided(diagnosis) else 2  # between the losses whose difference is taken
    change = steps * (measurement["mu"] or 0) * (measurement["slope"] or 0)  # None: not finite, see _mu
    if not change or measurement["repeat"] <= TOO_SHAKY * change:
        return []
    text = (
        f"measured twice at the same weights, the loss differs by {measurement['repeat']:.2g}, and a probing step "
        f"changes it by {change:.2g}: it must see the same samples each time, without dropout or other randomness."
    )
    return [Finding(BAD, "loss", text)]


def _mu(diagnosis: DiagnosisData, measurement: DiagnosisData) -> list[Finding]:
    points, mu, low, high = (measurement[name] for name in ("probing", "mu", "mu_low", "mu_high"))
    if mu is None:
        return []
    if low is None:
        tried = f"{points[0]['mu']:.2g} to {points[-1]['mu']:.2g}"
        if measurement["slope"] == 0 and all(p["straight"] == 0 for p in points):
            text = f"no step along any direction changes the loss (mu {tried}): check which weights are trained, and "
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
    remedy = ", and the estimator two_point cancels most of the bend" if _is_one_sided(diagnosis) else ""
    return [Finding(BAD, "mu", f"{text}{high:.2g} they are right{remedy}.")]


def _is_one_sided(diagnosis: DiagnosisData) -> bool:
    return diagnosis.get("estimator") == "one_sided"  # diagnoses of earlier versions don't say


def _signal(diagnosis: DiagnosisData, measurement: DiagnosisData) -> list[Finding]:
    signal, unit, guessing = measurement["signal"], diagnosis["unit"], diagnosis["guessing"]
    if signal is None:
        return [Finding(NOTE, "signal", "signal and noise can't be separated with one batch: give several.")]
    ratio, decided, agree = signal["ratio"], signal["decided_ratio"], _percent(signal["agreement"])
    if signal["present"]:
        text = f"signal to noise {_short(ratio)} in one {unit}'s scalars"
        text += f", {_short(decided)} in their mean; signs agree in {agree}" if unit == "client" else ""
        if decided is None or decided >= WEAK:
            return [Finding(GOOD, "signal", f"{text}.")]
        larger = "larger batches or more clients" if unit == "client" else "larger batches"
        remedy = f"use {larger}, or lower lr over the rounds"
        return [Finding(NOTE, "signal", f"{text}: more noise than signal, so {remedy}.")]
    units = "clients'" if unit == "client" else "batches'"
    text = f"the {units} scalars agree no better than chance (signal to noise {_short(ratio)}, signs agree in {agree})"
    if guessing and measurement["loss"] > (1 - GUESSING) * guessing:
        text += f", and the loss {measurement['loss']:.3g} is no better than that of guessing, {guessing:.3g}: check "
        return [Finding(BAD, "signal", f"{text}whether labels match their samples (order, template, label words).")]
    text += ": with such batches slopes can't be distinguished from noise here. It may be near a minimum; if the loss "
    level = NOTE if measurement["round"] else BAD
    return [Finding(level, "signal", f"{text}should be lower, check samples and labels, or use larger batches.")]


def _byzantine(measurement: DiagnosisData) -> list[Finding]:
    kept = measurement["kept"]
    if kept is None or kept >= TOO_MUCH_TAKEN:
        return []
    left = _percent(max(0.0, kept))
    text = f"of the honest clients' mean slopes {left} is left in a decision; the attack takes the rest."
    return [Finding(BAD if kept <= 0 else NOTE, "byzantine", text)]


def _lr(diagnosis: DiagnosisData, measurement: DiagnosisData) -> list[Finding]:
    lr, points = measurement["lr"], measurement["stepping"]
    low, best, high, rise = (measurement[f"lr_{name}"] for name in ("low", "best", "high", "rise"))
    if best is None:
        tried = f" (lr {points[0]['lr']:.2g} to {points[-1]['lr']:.2g})" if points else ""
        text = f"no step lowers the loss, however short{tried}: check that the loss of a batch is that of its own "
        return [Finding(BAD, "ascent", f"{text}samples, and that nothing changes the sign of slopes.")]
    promised, real = measurement["promised"], measurement["real"]
    came = ""
    if promised > 0 and real is not None:
        share = "nothing" if real <= 0 else _percent(real / promised)
        came = f"; {share} of the fall that the slopes predict is realised"
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
    if diagnosis["lr_schedule"] != "constant" and measurement["round"]:
        return [Finding(GOOD, "lr", f"lr = {lr:g} by its schedule; a step does {_percent(share)} of what it could.")]
    below = f"{_times(best / lr)} below the best, {_short(best)}"
    does = f"a step does {_percent(share)} of what it could"
    if share >= TOO_SLOW:
        return [Finding(NOTE, "lr", f"lr = {lr:g} is {below}: {does}{came}.")]
    text = f"lr = {lr:g} is too small, {below}: "
    if share <= LOST:
        return [Finding(BAD, "lr", f"{text}so short a step is lost in rounding.")]
    return [Finding(BAD, "lr", f"{text}{does}, so expect {_times(1 / share)} as many rounds as are needed.")]


def of_records(records: DiagnosisData, evaluated_on: str | None = "test") -> list[Finding]:
    """Judge the fall of the loss that the ledger of a run predicted against the real one on the evaluated set."""
    promised, real, signal = records["promised"], records["real"], records.get("signal")
    found: list[Finding] = []
    if promised > 0:
        predicted = _number(promised)
        text = f"in {records['rounds']:,} rounds the decided scalars predicted that the loss falls by {predicted}; the "
        text += f"{of_set(evaluated_on, 'loss')} "
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


def suggestions(diagnosis: DiagnosisData) -> list[str]:
    """Return the ranges of lr and mu, if known."""
    lines = []
    usable = [s for s in diagnosis["stations"] if s["loss"] is not None]
    lrs = [(s["lr_low"], s["lr_high"]) for s in usable if s["lr_low"] is not None and _reliable(diagnosis, s)]
    if lrs:
        common, now = (max(low for low, _ in lrs), min(high for _, high in lrs)), f"now {diagnosis['lr']:g}"
        if common[0] < common[1]:
            lines.append(f"lr {_range(*common)} ({now})")
        else:
            falls = "lower it over the rounds by lr_schedule, or " if lrs[-1][1] <= lrs[0][0] else ""
            text = f"lr {_range(*lrs[0])} at the start and {_range(*lrs[-1])} at the end ({now})"
            lines.append(f"{text}: {falls}choose a value in between")
    mus = [(s["mu_low"], s["mu_high"]) for s in usable if s["mu_low"] is not None]
    if mus:
        low, high = max(low for low, _ in mus), min(high for _, high in mus)
        if low <= high:
            lines.append(f"mu {_range(low, high)} (now {diagnosis['mu']:g})")
    return lines


def _reliable(diagnosis: DiagnosisData, measurement: DiagnosisData) -> bool:
    """Return whether the range of lr is based on slopes of the loss, not on rounding or noise."""
    if any(f.level == BAD for f in [*_loss(diagnosis, measurement), *_mu(diagnosis, measurement)]):
        return False
    return measurement["signal"] is None or bool(measurement["signal"]["present"])


def table(diagnosis: DiagnosisData) -> tuple[list[str], list[list[str]]]:
    """Return what was measured: a header, and one row per quantity with one column per point."""
    measurements, unit, mu = diagnosis["stations"], diagnosis["unit"], diagnosis["mu"]
    rows: list[list[str]] = [
        ["loss", *(_number(s["loss"]) for s in measurements)],
        [f"signal to noise, one {unit}", *(_of_signal(s, "ratio") for s in measurements)],
    ]
    if unit == "client":  # the batches of one client are not aggregated
        rows += [
            ["signal to noise, mean of all", *(_of_signal(s, "decided_ratio") for s in measurements)],
            ["honest slope left in a decision", *(_percent(s["kept"]) for s in measurements)],
        ]
    rows += [
        ["signs agree", *(_of_signal(s, "agreement") for s in measurements)],
        [f"signal to noise, k = {diagnosis['k']} directions", *(_short(s["directions_ratio"]) for s in measurements)],
    ]
    if mu is not None:
        rows += [
            [f"linear at mu = {mu:g}", *(_at_mu(s, "straight") for s in measurements)],
            [f"error of slopes at mu = {mu:g}", *(_at_mu(s, "error") for s in measurements)],
            ["good mu", *(_range(s["mu_low"], s["mu_high"]) for s in measurements)],
        ]
    rows += [
        ["lr", *(_number(s["lr"]) for s in measurements)],
        ["predicted fall that is realised", *(_share(s["real"], s["promised"]) for s in measurements)],
        ["good lr", *(_range(s["lr_low"], s["lr_high"]) for s in measurements)],
        ["best lr", *(_short(s["lr_best"]) for s in measurements)],
        ["loss rises from lr", *(_short(s["lr_rise"]) for s in measurements)],
    ]
    return ["", *(f"after {s['round']:,} rounds" for s in measurements)], rows


def _nearest(points: Sequence[DiagnosisData], name: str, value: float) -> DiagnosisData:
    return min(points, key=lambda p: abs(math.log(p[name] / value)))


def _of_signal(measurement: DiagnosisData, name: str) -> str:
    if measurement["signal"] is None:
        return "-"
    return (_percent if name == "agreement" else _short)(measurement["signal"][name])


def _at_mu(measurement: DiagnosisData, name: str) -> str:
    return _percent(_nearest(measurement["probing"], "mu", measurement["mu"])[name]) if measurement["probing"] else "-"


def _share(part: float | None, whole: float | None) -> str:
    """Return which share of a predicted fall was realised; none where the loss rises."""
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
