"""What the theorems say about a user's setting: a table in plain words, what dominates, what to choose, a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from cyber0 import theory
from cyber0.counting import share_of
from cyber0.errors import ConfigError

DEFAULT_BETA = 0.25  # as in a config
SLACK = 0.1  # traffic above the least that is worth fewer rounds
KINDS = (".png", ".svg", ".pdf")  # of pictures
MOST_POINTS = 400  # of a curve


@dataclass(frozen=True)
class Setting:
    """All that the theorems need to know."""

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
    """Fill in what was left open, and refuse what is impossible."""
    if m < 1:
        raise ConfigError(f"m = {m} is impossible: there must be at least 1 client")
    if byzantine is not None and not 0 <= 2 * byzantine < m:
        raise ConfigError(
            f"byzantine = {byzantine} of m = {m} clients: no rule withstands half or more liars; lower byzantine"
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
            f"beta = {beta!r} trims {share_of(beta, m)} of m = {m} at each end, fewer than the byzantine = {byzantine} "
            f"that lie; the theorems need alpha <= beta: raise beta to {byzantine / m:.4g}"
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
    number = "2" if s.mu == 0 else "3"
    floor = rate.floor(robust.value)
    lines = [
        Line("tau", _text(rate.tau), f"Theorem {number}: how noisy the estimate is; a full gradient has 1"),
        Line("eta", _text(rate.eta), f"Theorem {number}: the learning rate (method.lr), for sphere directions; for "
             "Gaussian ones within 2 / d the same"),
        Line("contraction", _shortfall(rate.contraction), "the distance to the minimiser is multiplied by this each "
             "round, in the mean"),
        Line(f"rounds to {_text(s.error)}", f"{rounds_to_forget(s):,}", "until no more than this is left of the "
             f"starting distance {_text(s.distance)}; the floor below comes on top"),
        Line("numbers sent", f"{rounds_to_forget(s) * s.k:,}", "by each client until then: rounds times k"),
        Line("Delta", _text(robust.value), "Theorem 1: how far liars and finite samples move the estimate at worst, at "
             "all w and z at once"),
        Line("  of it sampling", _text(robust.sampling), "finite samples of the honest; falls with n m"),
        Line("  of it trimming", _text(robust.trimming), "liars, and honest numbers trimmed with them; falls with n, "
             "not with m"),
        Line("  of it covering", _text(robust.covering), "from asking it of every w and z"),
        Line("fails with", f"10^{robust.log_failure / math.log(10):,.0f}", "the probability that the data is so odd "
             "that Delta does not hold"),
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


def dominating(setting: Setting) -> list[str]:
    """Say which term is the largest, in the rate and in what remains."""
    rate, robust, s = setting.rate, setting.robustness, setting
    direction_part, rest = (s.d / s.k, (s.k - 1) / s.k) if s.mu == 0 else (2 * s.d / s.k, rate.tau - 2 * s.d / s.k)
    lines = [
        f"tau is mostly d / k ({direction_part / rate.tau:.0%}): more directions a round cut the rounds"
        if direction_part > rest
        else f"d / k is only {direction_part / rate.tau:.0%} of tau: more directions a round save few rounds"
    ]
    causes = {
        "sampling": ("finite samples; more samples or clients help", robust.sampling * 2 / s.strong_convexity),
        "trimming": ("liars and trimming; more samples a client help, more clients do not",
                     robust.trimming * 2 / s.strong_convexity),
        "covering": ("asking for all w and z at once", robust.covering * 2 / s.strong_convexity),
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


def suggestions(setting: Setting) -> list[str]:
    """Suggest lr, k, beta and mu."""
    s, k = setting, suggested_k(setting)
    there = replace(s, k=k).rate
    lines = [
        f"lr = {_text(s.rate.eta)} for k = {s.k}",
        f"k = {k:,}: {there.tau / s.rate.tau:.2g} times the rounds of k = {s.k}, lr = {_text(there.eta)}, and at most "
        f"{SLACK:.0%} more numbers than k = 1 needs",
        f"beta = {s.byzantine / s.m:.4g}, as much as {s.byzantine} liars of {s.m} need; what is trimmed beyond that "
        "only adds to Delta"
        + ("" if s.beta <= s.byzantine / s.m + 1e-9 else f" (now {s.beta:g})"),
    ]  # fmt: skip
    if s.mu > 0:
        target = 2 * s.robustness.value / s.strong_convexity
        own = theory.theorem3_independent(s.d, s.k, s.strong_convexity, s.smoothness, s.mu)
        largest, ours = (min(target, s.error) * s.mu / rate.mu_bias for rate in (s.rate, own))
        lines.append(
            f"mu up to {_text(largest)} keeps its bias below Delta's part and the error asked for; by the tighter "
            f"proof, up to {_text(ours)} at lr = {_text(own.eta)}"
        )
    return lines


def picture(setting: Setting, path: Path) -> Path:
    """Draw over rounds, for several k, what the bound leaves of the starting distance, and what mu and Delta add."""
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"--plot {path} can't be drawn: give it one of the endings {', '.join(KINDS)}")
    from cyber0.report.plots import COLOURS, GREY, new_figure, plain, save

    s = setting
    ks = sorted({1, s.k, suggested_k(s), s.d})
    figure = new_figure(f"Bound on the distance to the minimiser, d = {s.d:,}, mu = {s.mu:g}", width=9.6, height=4.6)
    axes = figure.subplots()
    for k, colour in zip(ks, COLOURS, strict=False):
        rate = replace(s, k=k).rate
        end = math.log(1e-3) / math.log(rate.contraction)
        rounds = [end ** (i / MOST_POINTS) for i in range(MOST_POINTS + 1)] if end > 1 else [0.0, 1.0]
        forgetting = replace(rate, mu_bias=0.0)
        axes.plot(rounds, [forgetting.bound(t, s.distance) for t in rounds], color=colour, label=f"k = {k:,}")
        if rate.mu_bias:
            axes.axhline(rate.mu_bias, color=colour, linestyle=":", linewidth=1.2)
    if s.mu > 0:
        axes.plot([], [], ":", color=GREY, label="what mu adds for each k")
    remains = 2 * s.robustness.value / s.strong_convexity
    if remains < s.distance:
        axes.axhline(remains, color=GREY, linestyle="--", linewidth=1, label="what Delta adds, 2 Delta / lambda")
    axes.set(xscale="log", yscale="log", xlabel="Round", ylabel="Distance to the minimiser")
    axes.legend(frameon=False)
    plain(axes)
    return save(figure, path)


def _text(value: float) -> str:
    return f"{value:.3g}"


def _shortfall(factor: float) -> str:
    return f"1 - {1 - factor:.3g}"
