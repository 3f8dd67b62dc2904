"""Counts that must come out the same wherever they are needed: shares of the clients, the chance of a bad sample."""

from __future__ import annotations

import math

from cyber0.errors import ConfigError

PAIRWISE_ROWS = 10_000  # the distances of every pair of so many clients fill 0.8 GB
REMEMBERED_CLIENTS = 2_000  # a number for every pair of so many clients fills 32 MB; a rule keeps two
BUCKET_SIZE = 2  # clients averaged into one before the rule, as in the experiments of the bucketing paper

_EXACT_UP_TO = 1_000  # clients; beyond, logarithms are exact enough and much faster


def share_of(fraction: float, count: int) -> int:
    """Return floor(fraction * count), guarded against products like 0.29 * 100 = 28.999999999999996."""
    return math.floor(fraction * count + 1e-9)


def tolerated(beta: float, invited: int) -> int:
    """Return b = floor(beta * invited), the number of Byzantine clients that a rule guards against.

    Args:
        beta: the share of Byzantine clients to guard against, in [0, 0.5).
        invited: how many clients were invited.
    """
    if not 0.0 <= beta < 0.5:  # also refuses NaN
        raise ConfigError(f"beta = {beta!r} is impossible: nobody can outvote half of the clients; use 0 <= beta < 0.5")
    if invited < 0:
        raise ConfigError(f"{invited} clients can't be invited: use a number that is not negative")
    b = share_of(beta, invited)
    return min(b, max(0, (invited - 1) // 2))


def invited_count(clients: int, participation: float) -> int:
    """Return how many of the clients are invited to a round: their share, and at least one."""
    if not 0.0 < participation <= 1.0:
        raise ConfigError(f"participation = {participation!r} is impossible: use a share of the clients in (0, 1]")
    return max(1, share_of(participation, clients))


def check_expelling(clients: int, participation: float, beta: float) -> None:
    """Refuse federation.expel where it can expel nobody, or a round invites a sample of the clients.

    Of a sample b is known of it only, and what is remembered of clients that were drawn for different rounds differs in
    its noise.
    """
    b = tolerated(beta, clients)
    if not 0 < 3 * b < clients:
        raise ConfigError(
            f"federation.expel = true can expel nobody with federation.clients = {clients} and aggregation.beta = "
            f"{beta:g}, which tolerates {b}: that must be at least 1 and fewer than a third of the clients; change one "
            "of the two, or set federation.expel = false"
        )
    invited = invited_count(clients, participation)
    if invited < clients:
        raise ConfigError(
            f"federation.expel = true compares all clients over the same rounds, and federation.participation = "
            f"{participation:g} invites {invited} of {clients} to a round; set federation.participation = 1.0 or "
            "federation.expel = false"
        )


def majority(b: int) -> int:
    """Return how many rows b Byzantine clients can't outvote."""
    return 2 * b + 1


def rows_before_buckets(rows: int, size: int) -> int:
    """Return how many rows must come in for so many buckets to come out."""
    return size * (rows - 1) + 1


def probability_of_too_many_byzantine(clients: int, byzantine: int, invited: int, tolerated: int) -> float:
    """Return the probability that a random sample of the clients holds more Byzantine clients than are tolerated.

    The upper tail of the hypergeometric distribution: the sum over i > tolerated of
    C(byzantine, i) C(clients - byzantine, invited - i) / C(clients, invited).
    """
    honest = clients - byzantine
    if not 0 <= byzantine <= clients or not 0 <= invited <= clients:
        raise ConfigError(f"{byzantine} Byzantine and {invited} invited clients must be within {clients} clients")
    counts = range(max(tolerated + 1, invited - honest, 0), min(byzantine, invited) + 1)
    if clients <= _EXACT_UP_TO:
        ways = sum(math.comb(byzantine, i) * math.comb(honest, invited - i) for i in counts)
        return ways / math.comb(clients, invited)
    if not counts:
        return 0.0
    first = counts[0]
    log_term = _log_choose(byzantine, first) + _log_choose(honest, invited - first) - _log_choose(clients, invited)
    logs = [log_term]
    for i in counts[:-1]:  # each term is the one before it times a simple ratio
        log_term += math.log((byzantine - i) * (invited - i)) - math.log((i + 1) * (honest - invited + i + 1))
        logs.append(log_term)
    return min(1.0, math.fsum(map(math.exp, logs)))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
