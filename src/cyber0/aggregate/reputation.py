"""The rule `reputation`: who has gained too much, who contradicts everybody, and who colludes, over many rounds."""

from __future__ import annotations

import numpy as np

from cyber0.aggregate.distances import Float64Array, doubles
from cyber0.aggregate.history import Clients, PairAverage, clipped, cosines_of
from cyber0.aggregate.rule import Guilt, Matrix, Outcome, Rule
from cyber0.config.registry import rule
from cyber0.errors import ConfigError

_SURE = 3.0  # standard deviations of an average cosine below which clients are taken to disagree
_BEYOND = 4.0  # the same for guilt; really 5.6, as an exponential average has half the variance that is assumed here
_AS_MUCH = 0.5  # a guilty client contradicts the crowd at least this many times as much as the crowd agrees


@rule(history=True, judges=True, pairwise=True)
def reputation(
    beta: float, *, margin: float = 1.5, doubt: float = 1.0, rounds: float = 50.0, centred: bool = False
) -> Rule:
    """Average the clipped reports of the clients that all their reports so far speak for.

    Two things are remembered of every client: its implied loss, and the cosines of the angles between its reports and
    those of each other client, averaged over the rounds. Up to b = floor(beta * invited) clients sit a round out, first
    those of least implied loss, then those that agree least with others.

    **Implied loss.** A round that moves w by -(lr / k) sum_r v_r z_r changes the loss of client i by

        -(lr / k) <v, x_i>

    up to curvature, with its report x_i and the decision v; the sum over the rounds is L_i. Losses have a lower bound:
    an honest client that is content sends small slopes, and its L_i stops falling. A client whose slopes stay large, so
    as to drag the model along, implies a loss that falls without end. It sits out if

        L_i < margin * min(median L, 0) - doubt * sqrt(sum over the rounds of the median squared change of L)

    An honest client that sits out is one that has gained more than the others; it is back when they have caught up.

    **Agreement.** A client's support is the (b + 1)-th largest of its average cosines; the b largest are passed over,
    since the other Byzantine clients may send the same. Where the data are alike, so that the median client's support
    is surely positive (three standard deviations), a client whose support is surely negative sits out. Where they are
    not, honest clients contradict each other, and nobody sits out for that. The same holds for the mean of a client's
    average cosines without the b largest and the b smallest, if the support is negative too. That mean has less noise:
    with one sample a client, two honest reports hardly resemble each other, and `rounds` should be several hundred.

    **Collusion.** The rest are averaged, each row shortened to the median length, with weights

        1 / (1 + sum over the b - 1 largest c^2 of max(c^2 - a^2, 0))

    where c are the client's average cosines and a is the b-th largest of them, or 0 if that is negative. b clients that
    send the same row, or a row and its reverse, together count little more than one client. What at least b others
    agree with is no collusion, as one of them is honest, and costs no weight.

    On unlike data this is more accurate than trimming, as honest clients with rare data stay; see
    `docs/measured/worst_attack.md`.

    Ours; weights by similarity over the rounds are FoolsGold's idea (Fung et al., "The limitations of federated
    learning in sybil settings", RAID 2020). It assumes that the clients' losses start from similar values, as those of
    an untrained classifier do. v is what the step is made of: with method.optimizer = "zscore" and the like, the scaled
    scalars. With momentum, adam and hessian, whose steps depend on vectors as long as w, it is the decision.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
        margin: how many times the gain of the median client is still plausible; at least 1.
        doubt: how many standard deviations of L are left to chance.
        rounds: over about how many of the last rounds the cosines are averaged.
        centred: take the cosines of rows less their mean. For method.optimizer = "zscore" with method.estimator =
            "one_sided": the curvature adds nearly the same number to all scalars of all clients, by which everybody
            resembles everybody, and which the step leaves out.

    Examples:
        Without a history hardly anybody is left out, and rows are shortened to the median length:

        >>> reputation(0.25)(np.array([[3.0, 4.0], [0.0, 5.0], [4.0, 3.0], [3000.0, 4000.0]]))
        array([2.5, 4. ])
    """
    if not (margin >= 1 and doubt >= 0 and rounds >= 1):
        raise ConfigError(
            f"margin = {margin!r}, doubt = {doubt!r}, rounds = {rounds!r} is impossible: use at least 1, 0 and 1"
        )
    return Rule("reputation", beta, remembers=lambda clients: Reputation(clients, margin, doubt, rounds, centred))


class Reputation:
    """The implied loss of every client, and how far each two of them agree."""

    def __init__(self, clients: int, margin: float, doubt: float, rounds: float, centred: bool) -> None:
        self.losses: Float64Array = np.zeros(clients)
        """How the loss of each client has changed so far, as its reports say."""
        self._reported = np.zeros(clients, np.bool_)
        self._chance, self._columns = 0.0, 0
        self._margin, self._doubt, self._centred = margin, doubt, centred
        self._cosines = PairAverage(clients, rounds)

    @property
    def least_plausible(self) -> float:
        """The implied loss below which a client sits out."""
        known = self.losses[self._reported]  # who never reported would count as one that gains nothing
        gained = min(float(np.median(known)), 0.0) if len(known) else 0.0
        return self._margin * gained - self._doubt * float(np.sqrt(self._chance))

    def combine(self, rows: Matrix, clients: Clients, b: int, round: int) -> Outcome:
        losses, out = self.losses[clients], np.zeros(len(rows), np.bool_)
        least = np.argsort(losses, kind="stable")[:b]
        out[least] = losses[least] < self.least_plausible
        cosines, rounds = self._cosines.including(clients, self._compared(rows))
        likely = cosines * np.sqrt(rows.shape[1] * rounds)
        support, middle = _support(likely, b), _middle(likely, b)
        opposed = np.zeros(len(rows), np.bool_)
        if np.median(support) > _SURE:
            opposed |= support < -_SURE
        if np.median(middle) > _SURE:
            opposed |= (middle < -_SURE) & (support < 0)
        places = b - np.count_nonzero(out)
        worst = np.lexsort((support, ~opposed))
        out[worst[opposed[worst] & ~out[worst]][:places]] = True
        weights = np.where(out, 0.0, _independence(cosines, b))
        values: Float64Array = np.add.reduce(clipped(rows) * (weights / weights.sum())[:, None], axis=0)
        return Outcome(values, np.where(out, rows.shape[1], 0).astype(np.int64))

    def learn(self, rows: Matrix, clients: Clients, values: Matrix, lr: float) -> None:
        """Add a decided round; clients that did not report keep what they have."""
        changes = np.add.reduce(clipped(rows) * values.astype(np.float64), axis=1) * (-lr / rows.shape[1])
        self.losses[clients] += changes
        self._reported[clients] = True
        self._columns = rows.shape[1]
        self._chance += float(np.median(changes**2))
        self._cosines.add(clients, self._compared(rows))

    def _compared(self, rows: Matrix) -> Float64Array:
        if self._centred:
            wide = doubles(rows, slice(None))
            rows = wide - (np.add.reduce(wide, axis=1) / wide.shape[1])[:, None]
        return cosines_of(rows)

    def guilty(self, clients: Clients, b: int) -> list[Guilt]:
        """Return who contradicts a crowd of at least all but b, and loses by what the crowd gains by.

        The crowd are the clients that agree with at least all but b of the others, by four standard deviations. With
        at least N - b of the N clients in it, a client is guilty if

        - it disagrees with each member of the crowd, by four standard deviations;
        - its mean cosine with them is below -1/2 times the mean cosine of two members;
        - its implied loss has risen by four standard deviations, and the crowd's median has fallen by as many.

        Byzantine clients may join the crowd by sending what some honest clients send. N - 2 b of the crowd are honest
        whatever they do, and these must be more than half of the N - b honest clients: with N <= 3 b nobody is guilty.
        Where honest clients contradict each other, a minority of them can be found guilty, by N - 2 b that agree.
        """
        losses, limit = self.losses[clients], _BEYOND * float(np.sqrt(self._chance))
        if b < 1 or len(clients) <= 3 * b or not self._columns or not (losses > limit).any():
            return []  # mostly: comparing all pairs in every round would take longer than the rest of it
        cosines, rounds = self._cosines.among(clients)
        likely = cosines * np.sqrt(self._columns * rounds)
        np.fill_diagonal(likely, 0.0)
        most = len(clients) - b
        crowd = np.count_nonzero(likely > _BEYOND, axis=1) >= most - 1
        count = int(np.count_nonzero(crowd))
        if count < most:
            return []
        within = cosines[np.ix_(crowd, crowd)]
        agreement = float((within.sum() - within.trace()) / (count * (count - 1)))
        toward, nearest = cosines[:, crowd].mean(axis=1), likely[:, crowd].max(axis=1)
        gained = float(np.median(losses[crowd]))
        sure = (nearest < -_BEYOND) & (toward < -_AS_MUCH * agreement) & (losses > limit) & (gained < -limit)
        return [
            _guilt(int(clients[i]), {
                "clients_contradicted": count, "deviations": float(nearest[i]), "deviations_limit": -_BEYOND,
                "cosine": float(toward[i]), "cosine_limit": -_AS_MUCH * agreement,
                "implied_loss": float(losses[i]), "implied_loss_limit": limit, "implied_loss_of_others": gained,
            })
            for i in np.argsort(-losses, kind="stable").tolist() if sure[i]
        ]  # fmt: skip


def _guilt(client: int, numbers: dict[str, float]) -> Guilt:
    return Guilt(client, (
        "its reports contradict those of each of {clients_contradicted} clients that agree with each other (by "
        "{deviations:.1f} standard deviations or more, limit {deviations_limit:g}; mean cosine {cosine:.3f}, limit "
        "{cosine_limit:.3f}), and imply a loss that rose by {implied_loss:.3g} (limit {implied_loss_limit:.3g}) while "
        "theirs fell by {fell:.3g}"
    ).format(**numbers, fell=-numbers["implied_loss_of_others"]), numbers)  # fmt: skip


def _support(cosines: Float64Array, b: int) -> Float64Array:
    """Return the (b + 1)-th largest cosine of each row with another; zeros if all others may be Byzantine."""
    if len(cosines) <= b + 1:
        return np.zeros(len(cosines))
    others = cosines.copy()
    np.fill_diagonal(others, -np.inf)
    support: Float64Array = -np.partition(-others, b, axis=1)[:, b]
    return support


def _middle(likely: Float64Array, b: int) -> Float64Array:
    """Return the mean of each row's average cosines without the b largest and the b smallest; 0 if none are left.

    The cosines are in standard deviations, and so is the mean, since those with others are independent but for signal.
    """
    count = len(likely) - 1 - 2 * b
    if count < 1:
        return np.zeros(len(likely))
    others = likely.copy()
    np.fill_diagonal(others, np.inf)
    return np.asarray(np.add.reduce(np.sort(others, axis=1)[:, b : b + count], axis=1) / np.sqrt(count))


def _independence(cosines: Float64Array, b: int) -> Float64Array:
    """Return the weight of each row: the less, the more it resembles, or contradicts, a few others and nobody else."""
    if b < 2:
        return np.ones(len(cosines))  # a single Byzantine client has nobody to collude with
    others = cosines.copy()
    np.fill_diagonal(others, 0.0)
    agreed = np.partition(-others, b - 1, axis=1)[:, b - 1]
    shared = -np.sort(-(others**2), axis=1)[:, : b - 1] - np.minimum(agreed, 0.0)[:, None] ** 2
    weights: Float64Array = 1.0 / (1.0 + np.add.reduce(np.maximum(shared, 0.0), axis=1))
    return weights
