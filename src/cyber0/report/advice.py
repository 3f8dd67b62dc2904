"""Which lr, how many directions, how many rounds: rules of thumb beside what the theorems require, and how far to trust
those; then the quantities of the theorems explained, what dominates, and a picture."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cyber0.config.schema import Config
from cyber0.config.tolerance import share_of
from cyber0.errors import ConfigError
from cyber0.theory import theorems as theory

DEFAULT_BETA = 0.25  # as in a config
SLACK = 0.1  # traffic above the least that is worth fewer rounds
KINDS = (".png", ".svg", ".pdf")  # of pictures
MOST_PLOT_POINTS = 400  # of a curve
MNIST_DIMENSION = 7850  # weights of the default run's model
MEASURED = "lr 0.019 to 0.1 and mu 1e-05 to 0.01"  # by `cyber0 diagnose examples/mnist.toml`


@dataclass(frozen=True)
class Setting:
    """The quantities that the theorems need."""

    d: int
    k: int
    m: int
    n: int
    byzantine: int
    beta: float
    mu: float
    strong_convexity: float
    smoothness: float
    v: float
    diameter: float
    lipschitz: float
    distance: float
    error: float

    @property
    def rate(self) -> theory.Rate:
        """The rate of Theorem 2 or 3."""
        if self.mu == 0:
            return theory.theorem2(self.d, self.k, self.strong_convexity, self.smoothness)
        return theory.theorem3(self.d, self.k, self.strong_convexity, self.smoothness, self.mu)

    @property
    def number(self) -> int:
        """The number of the theorem that gives the rate."""
        return 2 if self.mu == 0 else 3

    @property
    def robustness(self) -> theory.Robustness:
        """Delta of Theorem 1."""
        return theory.delta(
            n=self.n, m=self.m, beta=self.beta, v=self.v, d=self.d, diameter=self.diameter, lipschitz=self.lipschitz
        )


class Line(NamedTuple):
    """One row of the table."""

    quantity: str
    value: str
    meaning: str


def make_setting(
    *, d: int, k: int, m: int, n: int, byzantine: int | None, beta: float | None, mu: float, strong_convexity: float,
    smoothness: float, noise: float, v: float | None, diameter: float, lipschitz: float | None, distance: float | None,
    error: float | None,
) -> Setting:  # fmt: skip
    """Fill in what was not given, and refuse what is impossible."""
    if m < 1:
        raise ConfigError(f"m = {m} is impossible: there must be at least 1 client")
    if byzantine is not None and not 0 <= 2 * byzantine < m:
        raise ConfigError(
            f"byzantine = {byzantine} of m = {m} clients: no rule tolerates half or more Byzantine clients; lower "
            "byzantine"
        )
    if not (math.isfinite(mu) and mu >= 0):
        raise ConfigError(f"mu = {mu!r} is impossible: it must be a finite number of at least 0")
    if not (math.isfinite(noise) and noise > 0):
        raise ConfigError(f"noise = {noise!r} is impossible: it must be a finite number above 0")
    if beta is None:
        beta = DEFAULT_BETA if byzantine is None else byzantine / m
    byzantine = share_of(beta, m) if byzantine is None else byzantine
    if 0 <= beta < 0.5 and share_of(beta, m) < byzantine:
        raise ConfigError(
            f"beta = {beta!r} trims {share_of(beta, m)} of m = {m} at each end, fewer than byzantine = {byzantine}; "
            f"the theorems need alpha <= beta: raise beta to {byzantine / m:.4g}"
        )
    if distance is not None and not 0 <= distance <= diameter:
        raise ConfigError(
            f"distance = {distance!r} is impossible in a set of diameter {diameter!r}: w0 and w* are both in it; "
            "raise --diameter or lower --distance"
        )
    distance = diameter / 2 if distance is None else distance
    setting = Setting(
        d, k, m, n, byzantine, beta, mu, strong_convexity, smoothness, d * noise if v is None else v, diameter,
        d * smoothness * (1 + diameter) if lipschitz is None else lipschitz, distance,
        distance / 10 if error is None else error,
    )  # fmt: skip
    _ = setting.rate, setting.robustness  # their checks
    if not (math.isfinite(setting.error) and setting.error > 0):
        raise ConfigError(f"error = {setting.error!r} is impossible: it must be a finite number above 0")
    return setting


def table(setting: Setting) -> list[Line]:
    """Return the quantities of the theorems, each with what it means."""
    rate, robust, s = setting.rate, setting.robustness, setting
    floor = rate.floor(robust.value)
    lines = [
        Line("tau", _text(rate.tau), f"Theorem {s.number}: how noisy the estimate is; a full gradient has 1"),
        Line("eta", _text(rate.eta), f"Theorem {s.number}: the learning rate (method.lr), for sphere directions; for "
             "Gaussian ones within 2 / d the same"),
        Line("contraction", _shortfall(rate.contraction), "the distance to the minimiser is multiplied by this each "
             "round, in the mean"),
        Line(f"rounds to {_text(s.error)}", f"{rounds_to_forget(s):,}", "until no more than this is left of the "
             f"starting distance {_text(s.distance)}; the floor below comes on top"),
        Line("scalars sent", f"{rounds_to_forget(s) * s.k:,}", "by each client until then: rounds times k"),
        Line("Delta", _text(robust.value), "Theorem 1: how far Byzantine clients and finite samples move the estimate "
             "at worst, at all w and z at once"),
        Line("  of it sampling", _text(robust.sampling), "finite samples of the honest clients; falls with n m"),
        Line("  of it trimming", _text(robust.trimming), "Byzantine clients, and honest scalars trimmed with them; "
             "falls with n, not with m"),
        Line("  of it covering", _text(robust.covering), "because it holds for every w and z"),
        Line("fails with", f"10^{robust.log_failure / math.log(10):,.0f}", "the probability that Delta does not "
             "hold for the data that was drawn"),
        Line("Delta at one place", _text(theory.pointwise_delta(n=s.n, m=s.m, beta=s.beta, v=s.v)), "the same at one w "
             "and z given beforehand, for 99 % of the data (ours)"),
        Line("2 Delta / lambda", _text(2 * robust.value / s.strong_convexity), "the distance that remains because of "
             "Delta"),
    ]  # fmt: skip
    if s.mu > 0:
        own = theory.theorem3_independent(s.d, s.k, s.strong_convexity, s.smoothness, s.mu)
        shift = theory.minimiser_shift(s.d, s.strong_convexity, s.smoothness, s.mu)
        lines += [
            Line("mu bias", _text(rate.mu_bias), "the distance that remains because mu is not 0 (Theorem 3, by its "
                 "proof)"),
            Line("  ours", _text(own.mu_bias), f"the same with the tighter proof, at lr = {_text(own.eta)}"),
            Line("minimiser moved by", _text(shift), "at most, because losses are smoothed over a ball of radius mu "
                 "(ours)"),
        ]  # fmt: skip
    empty = "; above the diameter, so the theorem promises nothing about where it ends" if floor >= s.diameter else ""
    lines.append(Line("floor", _text(floor), f"all that remains, however many rounds{empty}"))
    return lines


def rounds_to_forget(setting: Setting) -> int:
    """Return after how many rounds the first term of the bound, contraction^T distance, is at most the error."""
    return replace(setting.rate, mu_bias=0.0).rounds_to(setting.error, setting.distance)


def figures(setting: Setting) -> dict[str, Any]:
    """Return the advice as data: what was assumed, what to choose, and the quantities of the theorems."""
    rate, robust, small = setting.rate, setting.robustness, replace(setting, mu=0.0)
    return {
        "setting": asdict(setting),
        "theorem": setting.number,
        "in_practice": {"lr": small.rate.eta, "k_up_to": suggested_k(small), "rounds": rounds_to_forget(small)},
        "for_the_bound": {"lr": rate.eta, "k_up_to": suggested_k(setting), "rounds": rounds_to_forget(setting)},
        "rate": asdict(rate),
        "robustness": asdict(robust),
        "floor": rate.floor(robust.value),
        "choices": choices(setting),
        "caveats": caveats(setting),
        "quantities": table(setting),
        "dominating": dominating(setting),
    }


def dominating(setting: Setting) -> list[str]:
    """Return which term is the largest, in the rate and in what remains."""
    rate, robust, s = setting.rate, setting.robustness, setting
    direction_part, rest = (s.d / s.k, (s.k - 1) / s.k) if s.mu == 0 else (2 * s.d / s.k, rate.tau - 2 * s.d / s.k)
    lines = [
        f"tau is mostly d / k ({direction_part / rate.tau:.0%}): more directions a round cut the rounds"
        if direction_part > rest
        else f"d / k is only {direction_part / rate.tau:.0%} of tau: more directions a round save few rounds"
    ]
    causes = {
        "sampling": ("finite samples; more samples or clients help", robust.sampling * 2 / s.strong_convexity),
        "trimming": ("Byzantine clients and trimming; more samples a client help, more clients do not",
                     robust.trimming * 2 / s.strong_convexity),
        "covering": ("holding for all w and z at once", robust.covering * 2 / s.strong_convexity),
        "mu": ("the probing step; lower mu", rate.mu_bias),
    }  # fmt: skip
    text, size = max(causes.values(), key=lambda cause: cause[1])
    lines.append(f"what remains is mostly due to {text} ({size / rate.floor(robust.value):.0%})")
    needed = 4 * (math.log(4) - robust.log_failure + math.log(s.m))
    if s.n < needed:
        lines.append(
            f"n = {s.n:,} is below 4 (d log A + log m) = {needed:,.0f}: there the trimming part falls as 1 / n, not as "
            "1 / sqrt(n), and Delta is above the leading term that the paper states"
        )
    return lines


def suggested_k(setting: Setting) -> int:
    """Return the largest k that costs at most a tenth more traffic than the least, which is k = 1's.

    Rounds are proportional to tau and traffic to k tau: d + k - 1 for mu = 0, 2d + (k - 1)(1 + sqrt d) for mu > 0.
    """
    per_direction = 1.0 if setting.mu == 0 else 1 + math.sqrt(setting.d)
    least = setting.d if setting.mu == 0 else 2 * setting.d
    return 1 + int(SLACK * least / per_direction)


class Choice(NamedTuple):
    """A setting to choose: what works in practice, what the theorem requires, and the source of the former."""

    name: str
    practice: str
    bound: str
    source: str


def choices(setting: Setting) -> list[Choice]:
    """Return which lr, how many directions, how many rounds, which mu and beta.

    In practice the tau of Theorem 2 also holds for mu > 0 while mu is small: it is exact for mu = 0, and the sqrt(d)
    that Theorem 3 has instead is a property of its proof (docs/THEORY.md).
    """
    s, small = setting, replace(setting, mu=0.0)
    rounds, usual = rounds_to_forget(small), Config().method.mu
    fewer = theory.tau(s.d, 1) / small.rate.tau
    found = [
        Choice("lr", _text(small.rate.eta), _text(s.rate.eta), "rule of thumb k / ((d + k - 1) L_F): Theorem 2's lr, "
               f"for mu near 0. It is as good as --smoothness, L_F = {s.smoothness:g}; diagnose measures it"),
        Choice("k", f"up to {suggested_k(small):,}", f"up to {suggested_k(s):,}", "by Theorem 2: up to there, k costs "
               f"at most {SLACK:.0%} more scalars in all than k = 1. k = {s.k:,} needs {fewer:.3g} times fewer rounds "
               "than k = 1; a direction costs two forward passes a round, or one if method.estimator is one_sided"),
        Choice("rounds", f"{rounds:,}", f"{rounds_to_forget(s):,}", f"by Theorem 2 with this lr and k = {s.k:,}, until "
               f"{_text(s.error)} is left of the starting distance {_text(s.distance)}, if lambda = "
               f"{s.strong_convexity:g}. Nothing is added for noise and Byzantine clients"),
    ]  # fmt: skip
    if s.mu > 0:
        found.append(Choice("mu", _text(usual), f"up to {_text(_largest_mu(s))}", "rule of thumb, the default: short "
                            "enough that the loss is straight, long enough for float32; 16-bit weights need about ten "
                            "times as much. diagnose measures the range"))  # fmt: skip
    enough = _text(s.byzantine / s.m)
    now = "" if s.beta <= s.byzantine / s.m + 1e-9 else f" (now {s.beta:g})"
    found.append(Choice("beta", enough, enough, f"Theorem 1: as much as {s.byzantine} Byzantine clients of {s.m} need; "
                        f"trimming more only adds to Delta{now}"))  # fmt: skip
    return found


def _largest_mu(setting: Setting) -> float:
    """Return the largest mu whose bias stays below Delta's part of the floor and below the requested error."""
    target = min(2 * setting.robustness.value / setting.strong_convexity, setting.error)
    return target * setting.mu / setting.rate.mu_bias


def caveats(setting: Setting) -> list[str]:
    """Return what to rely on: measurements first, and how much the bound is worth here."""
    s, default = setting, Config()
    m, floor = default.method, setting.rate.floor(setting.robustness.value)
    lines = [
        "A measurement beats both columns: `cyber0 diagnose CONFIG` tries lr and mu on your loss. For the default run "
        f"(MNIST, d = {MNIST_DIMENSION:,}, k = {m.k}, lr = {m.lr:g}, mu = {m.mu:g}, {default.rounds:,} rounds) it "
        f"finds {MEASURED} at the start.",
    ]
    worth = f"its floor, {_text(floor)}, is what it allows for however many rounds"
    if floor >= s.diameter:
        worth = (
            f"its floor, {_text(floor)}, is above the diameter {s.diameter:g} of the set that holds the weights, so it "
            "says nothing about where training ends"
        )
    lines.append(
        f"The bound is a guarantee for the worst case, and loose: {worth}. In our experiments Delta is at least 83 "
        "times the largest error seen (docs/RESULTS.md)."
    )
    return lines


def check_picture(path: Path) -> None:
    """Refuse a picture of an unknown format."""
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"--plot {path} can't be drawn: give it one of the endings {', '.join(KINDS)}")


def picture(setting: Setting, path: Path) -> Path:
    """Draw over rounds, for several k, what is left of the starting distance by the theorem; its floor; their sum.

    The floor has a line for Delta's part and one for that of mu. Above the diameter, where a bound says nothing, it is
    shaded. The rule of thumb for the given k is drawn too.
    """
    check_picture(path)
    from cyber0.report.plots import COLOURS, GREY, INK, new_figure, plain, save

    s, small = setting, replace(setting, mu=0.0)
    title = f"Distance to the minimiser: Theorem {s.number}, d = {s.d:,}, mu = {s.mu:g}"
    figure = new_figure(title, width=9.6, height=5.4)
    axes = figure.subplots()
    ks, delta = sorted({1, s.k, suggested_k(s), s.d}), s.robustness.value
    rates = {k: replace(replace(s, k=k).rate, mu_bias=0.0) for k in ks}

    def curve(rate: theory.Rate, label: str, delta: float = 0.0, end: float | None = None, **style: Any) -> None:
        rounds = _rounds(rate, end)
        axes.plot(rounds, [rate.bound(t, s.distance, delta) for t in rounds], label=label, **style)

    for (k, rate), colour in zip(rates.items(), COLOURS, strict=False):
        curve(rate, f"left of the start, k = {k:,}", color=colour)
    if s.mu > 0:
        curve(small.rate, f"rule of thumb, k = {s.k:,}", color=COLOURS[ks.index(s.k)], linestyle="-.", linewidth=1.2)
        axes.axhline(s.rate.mu_bias, color=GREY, linestyle=":", linewidth=1.5,
                     label=f"floor, part of mu: {_text(s.rate.mu_bias)}")  # fmt: skip
    part = 2 * delta / s.strong_convexity
    axes.axhline(part, color=GREY, linestyle="--", linewidth=1.5, label=f"floor, part of Delta: {_text(part)}")
    last = max(_rounds(rate)[-1] for rate in rates.values())
    curve(s.rate, f"the whole bound, k = {s.k:,}", delta, last, color=INK, linewidth=2.2)
    axes.set(xscale="log", yscale="log", xlabel="Round", ylabel="Distance to the minimiser")
    low, high = axes.get_ylim()
    if high > s.diameter:
        axes.axhspan(s.diameter, high, color=GREY, alpha=0.12, linewidth=0,
                     label=f"above the diameter {s.diameter:g}: says nothing")  # fmt: skip
        axes.set_ylim(low, high)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    plain(axes)
    return save(figure, path)


def _rounds(rate: theory.Rate, end: float | None = None) -> list[float]:
    """Return rounds, evenly spaced in their logarithm, until a thousandth of the starting distance is left."""
    end = math.log(1e-3) / math.log(rate.contraction) if end is None else end
    return [end ** (i / MOST_PLOT_POINTS) for i in range(MOST_PLOT_POINTS + 1)] if end > 1 else [0.0, 1.0]


def _text(value: float) -> str:
    return f"{value:.3g}"


def _shortfall(factor: float) -> str:
    return f"1 - {1 - factor:.3g}"
