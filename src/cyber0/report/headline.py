"""The head of a report: a run in one sentence, its headline figures, the command that repeats it."""

from __future__ import annotations

import math
import shlex
from typing import Any, NamedTuple

from cyber0.config.keys import toml_value
from cyber0.config.presets import defaults_for
from cyber0.runs.folder import RunFolder
from cyber0.tasks import SETS, of_set
from cyber0.tasks.metrics import columns_of


class Headline(NamedTuple):
    """A headline figure: its text, and the value to sort runs by (None: unknown).

    Figures of one key but different labels, such as dev and test accuracy, can't be compared.
    """

    key: str
    label: str
    value: float | None
    text: str
    detail: str = ""


def setting(folder: RunFolder, name: str) -> Any:
    """Return a setting by its full name; None where it is not known."""
    section, _, key = name.rpartition(".")
    table = folder.config.get(section, {}) if section else folder.config
    return table.get(key) if isinstance(table, dict) else None


def sentence(folder: RunFolder) -> str:
    """Return in one sentence what was run and what came of it."""
    if not folder.config:
        return f"A run whose settings are not known{_outcome(folder)}."
    task, clients, byzantine = (setting(folder, n) for n in ("task.name", "federation.clients", "federation.byzantine"))
    attack, rule, partition = (setting(folder, n) for n in
                               ("federation.attack", "aggregation.rule", "federation.partition"))  # fmt: skip
    who = f"{byzantine} of them Byzantine ({attack})" if byzantine else "none of them Byzantine"
    if folder.served:
        who = "over the network"
    method = setting(folder, "method.name") or "cyber0"
    directions = f" and k = {setting(folder, 'method.k')}" if method == "cyber0" else ""
    partition = "" if folder.served else f", partition {partition}"
    return f"{task} learned by {clients} clients, {who}{partition}: {method} with {rule}{directions}{_outcome(folder)}."


def _outcome(folder: RunFolder) -> str:
    if not folder.evaluations:
        return ", not evaluated yet"
    last, rounds = folder.evaluations[-1], setting(folder, "rounds")
    when = f"{last.round:,} rounds"
    if not folder.ended and isinstance(rounds, int) and last.round < rounds:
        when = f"{last.round:,} of {rounds:,} rounds"
    accuracy = f"{_percent(last.accuracy)} {of_set(folder.evaluated_on, 'accuracy')}"
    if math.isnan(last.accuracy):
        accuracy = f"a {of_set(folder.evaluated_on, 'loss')} of {last.loss:.4g}"
    accuracy += "".join(f" ({_percent(f.accuracy)} on the {f.of} set)" for f in _other_set(folder))
    return f" has {accuracy} after {when}, each client having sent {byte_text(last.uplink_bytes)}"


class _Final(NamedTuple):
    """The figures of the finished model on one set."""

    of: str
    accuracy: float
    loss: float | None


def _other_set(folder: RunFolder) -> list[_Final]:
    """Return the figures on the set that was only measured at the end, if there is one."""
    result = []
    for name in SETS:
        accuracy, loss = (folder.summary.get(f"{name}_{what}") for what in ("accuracy", "loss"))
        if folder.evaluated_on not in (None, name) and isinstance(accuracy, float):
            result.append(_Final(name, accuracy, loss if isinstance(loss, float) else None))
    return result


def figures(folder: RunFolder) -> list[Headline]:
    """Return the headline figures, the most telling first; what is not known is left out."""
    result = []
    summary = folder.summary
    if folder.evaluations:
        last = folder.evaluations[-1]
        best = max(folder.evaluations, key=lambda e: e.accuracy if math.isfinite(e.accuracy) else -1.0)
        of, other = folder.evaluated_on, _other_set(folder)
        if math.isfinite(best.accuracy):
            result.append(Headline("accuracy", of_set(of, "accuracy"), last.accuracy, _percent(last.accuracy),
                                 f"best {_percent(best.accuracy)} at round {best.round:,}"))  # fmt: skip
        result += [
            *(Headline("accuracy", of_set(f.of, "accuracy"), f.accuracy, _percent(f.accuracy), "measured at the end")
              for f in other),
            *_more_metrics(folder),
            Headline("loss", of_set(of, "loss"), last.loss, f"{last.loss:.4f}"),
            *(Headline("loss", of_set(f.of, "loss"), f.loss, f"{f.loss:.4f}") for f in other if f.loss is not None),
            Headline("rounds", "rounds", last.round, f"{last.round:,}", _abandoned(summary)),
            Headline("sent", "sent by each client", last.uplink_bytes, byte_text(last.uplink_bytes),
                   _against_gradients(summary, last.round, last.uplink_bytes)),
            Headline("received", "received by each client", last.downlink_bytes, byte_text(last.downlink_bytes)),
        ]  # fmt: skip
        if last.seconds > 0:
            result.append(Headline("time", "time", last.seconds, _duration(last.seconds),
                                 rate_text(last.round / last.seconds)))  # fmt: skip
    result += _network_figures(folder)
    dimension = summary.get("dimension")
    if isinstance(dimension, int):
        result.append(Headline("weights", "weights trained", dimension, f"{dimension:,}"))
    risk = summary.get("probability_of_too_many_liars")
    if isinstance(risk, float) and risk > 0:
        detail = "more than the rule tolerates"
        result.append(Headline("risk", "rounds with too many Byzantine clients", risk, f"{risk:.3g}", detail))
    rejected = summary.get("rejected_reports")
    if isinstance(rejected, dict) and rejected:
        kinds = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
        counts = [n for n in rejected.values() if isinstance(n, int)]
        result.append(
            Headline(
                "rejected", "refused" if folder.served else "reports rejected", sum(counts), f"{sum(counts):,}", kinds
            )
        )
    return result


def _more_metrics(folder: RunFolder) -> list[Headline]:
    """Return what else was measured at the last evaluation, beside accuracy and loss."""
    last = folder.evaluations[-1]
    columns = [c for c in columns_of([last]) if c.measured and c.name not in ("accuracy", "loss")]
    values = {c: value for c in columns if math.isfinite(value := last.value(c))}
    labels = {c: of_set(folder.evaluated_on, c.label) if c.of_set else c.label for c in values}
    return [Headline(f"metric {c.name}", labels[c], value, f"{value:.4g}") for c, value in values.items()]


def _network_figures(folder: RunFolder) -> list[Headline]:
    """Return what a deployment cost on the network."""
    served = folder.served
    if not served:
        return []
    total = {name: sum(column) for name, column in served["clients"].items()}
    result = []
    if not folder.evaluations:
        done = served.get("round", 0)
        result.append(Headline("rounds", "rounds", done, f"{done:,}", _abandoned(folder.summary)))
    if reports := total["reports"]:
        up, down, size_up, size_down = (total[name] / reports for name in ("wire_in", "wire_out", "payload_in",
                                                                           "payload_out"))  # fmt: skip
        sizes = f"{size_up:.3g} / {size_down:.3g} B"
        if up and down:
            result.append(Headline("wire", "on the wire, up / down", up + down, f"{up:.3g} / {down:.3g} B",
                                 f"a client and round; payload {sizes}"))  # fmt: skip
        else:
            result.append(Headline("payload", "payload, up / down", size_up + size_down, sizes,
                                 "a client and round; bytes on the wire are not known on this system"))  # fmt: skip
    result.append(Headline("misses", "reports missed", total["misses"], f"{total['misses']:,}"))
    if "connected" in served:
        result.append(Headline("connected", "clients connected", served["connected"], f"{served['connected']:,}",
                             f"{served['current']:,} of them current"))  # fmt: skip
    return result


def _abandoned(summary: dict[str, Any]) -> str:
    count = summary.get("abandoned_rounds")
    return f"{count:,} of them abandoned" if isinstance(count, int) and count else ""


def _against_gradients(summary: dict[str, Any], rounds: int, sent: int) -> str:
    """Return what 32-bit gradients would have cost, where that is more."""
    dimension = summary.get("dimension")
    dense = 4 * dimension * rounds if isinstance(dimension, int) else 0
    if not sent or dense <= sent:
        return ""
    return f"as gradients {byte_text(dense)}, {dense / sent:,.3g} times as much"


def command(folder: RunFolder) -> str:
    """Return the command that repeats the run, from the settings that differ from the defaults.

    It needs no file of the run, only the user's own files that the settings name.
    """
    defaults = defaults_for(folder.config)
    parts = ["cyber0", "run"]
    for name, value in settings_of(folder):
        if name not in defaults or value != defaults[name]:
            parts += ["--set", f"{name}={_override(value)}"]
    return shlex.join(parts)


def settings_of(folder: RunFolder) -> list[tuple[str, Any]]:
    """Return every setting by its full name, in the order of the file."""
    plain = [(name, value) for name, value in folder.config.items() if not isinstance(value, dict)]
    tables = [(name, value) for name, value in folder.config.items() if isinstance(value, dict)]
    return plain + [(f"{section}.{name}", value) for section, table in tables for name, value in table.items()]


def _override(value: Any) -> str:
    """Return a value as --set takes it: names as they are, everything else as TOML."""
    if isinstance(value, str) and value.isidentifier():
        return value
    return toml_value(value) if isinstance(value, bool | int | float | str | dict | list) else str(value)


def byte_text(count: float) -> str:
    """Return a number of bytes with a unit that makes it easy to read."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,.0f} B"


def rate_text(rounds_per_second: float) -> str:
    """Return a speed that can be read at any pace: below one round a second, as seconds a round."""
    if rounds_per_second <= 0:
        return ""
    if rounds_per_second < 1:
        return f"{1 / rounds_per_second:,.{0 if rounds_per_second < 0.01 else 1}f} s/round"
    return f"{rounds_per_second:,.{0 if rounds_per_second >= 10 else 1}f} rounds/s"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if math.isfinite(share) else "no"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
