"""Who is guilty beyond doubt by all reports so far, and that no honest client is."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from cyber0.aggregate import Judge, Matrix, reputation

CLIENTS, BYZANTINE, K = 12, 3, 32
RANDOM = np.random.default_rng


def judged(
    rows_of: Callable[[int], Matrix], rounds: int = 80, options: dict[str, float] | None = None, beta: float = 0.25
) -> Judge:
    """Return what the rule remembers of rounds that it decided itself."""
    rule, who = reputation(beta, **(options or {})), np.arange(CLIENTS)
    memory = rule.memory(CLIENTS)
    for number in range(rounds):
        rows = rows_of(number)
        outcome = rule.decide(rows, round=number, memory=memory, clients=who)
        assert memory is not None
        memory.learn(rows, who, outcome.values, 0.1)
    return cast(Judge, memory)


def alike(number: int, noise: float = 1.0) -> Matrix:
    """Return what clients with like data send: slopes of one gradient, with noise."""
    return RANDOM((1, number)).normal(size=K) + noise * RANDOM((2, number)).normal(size=(CLIENTS, K))


def attacked(number: int, attack: str, noise: float = 1.0) -> Matrix:
    rows = alike(number, noise)
    if attack == "sign_flip":
        rows[-BYZANTINE:] *= -4
    elif attack == "ipm":
        rows[-BYZANTINE:] = -rows[:-BYZANTINE].mean(axis=0)
    elif attack == "full_knowledge":
        honest = rows[:-BYZANTINE]
        rows[-BYZANTINE:] = np.where(honest.mean(axis=0) >= 0, honest.min(axis=0), honest.max(axis=0))
    return rows


@pytest.mark.parametrize("attack", ["sign_flip", "ipm", "full_knowledge"])
def test_who_claims_to_lose_by_what_all_others_gain_by_is_guilty(attack: str) -> None:
    memory = judged(lambda number: attacked(number, attack, noise=2.0))
    found = memory.guilty(np.arange(CLIENTS), BYZANTINE)
    assert sorted(one.client for one in found) == [9, 10, 11]
    numbers = found[0].numbers
    assert numbers["clients_contradicted"] == 9 and numbers["implied_loss"] > numbers["implied_loss_limit"] > 0
    assert numbers["deviations"] < numbers["deviations_limit"] < 0
    assert "contradict those of each of 9 clients" in found[0].text


def test_guilt_is_found_in_the_noise_of_one_sample_a_client_once_enough_rounds_are_averaged() -> None:
    def noisy(number: int) -> Matrix:
        return attacked(number, "sign_flip", noise=3.0)  # honest rows have a mean cosine of 0.1

    few, many = judged(noisy, 5, {"rounds": 500.0}), judged(noisy, 600, {"rounds": 500.0})
    assert few.guilty(np.arange(CLIENTS), BYZANTINE) == []
    assert sorted(one.client for one in many.guilty(np.arange(CLIENTS), BYZANTINE)) == [9, 10, 11]


def test_nobody_is_guilty_where_none_may_be_or_more_than_b_disagree() -> None:
    memory = judged(lambda number: attacked(number, "sign_flip"))
    assert memory.guilty(np.arange(CLIENTS), 0) == []
    assert memory.guilty(np.arange(CLIENTS), BYZANTINE - 1) == []


def framed(clients: int, beta: float, b: int, agreeing: int) -> set[int]:
    """Return the guilty if b Byzantine clients send what the first few honest ones do, and one teaches the reverse.

    The next honest client, of the number `agreeing`, is that one; the others' data have nothing to do with either.
    """
    rule, who, guilty = reputation(beta), np.arange(clients), set[int]()
    memory = cast(Judge, rule.memory(clients))
    for number in range(80):
        common, rows = RANDOM((1, number)).normal(size=K), RANDOM((2, number)).normal(size=(clients, K))
        rows[:agreeing] += common
        rows[agreeing] -= common
        rows[clients - b :] += common
        memory.learn(rows, who, rule.decide(rows, round=number, memory=memory, clients=who).values, 0.1)
        guilty |= {one.client for one in memory.guilty(who, b)}
    return guilty


@pytest.mark.parametrize(("clients", "beta", "b", "agreeing"), [(20, 0.45, 9, 2), (12, 0.34, 4, 4), (12, 0.25, 3, 5)])
def test_byzantine_clients_and_a_minority_of_the_honest_get_nobody_found_guilty(
    clients: int, beta: float, b: int, agreeing: int
) -> None:
    assert framed(clients, beta, b, agreeing) == set()


def test_byzantine_clients_and_all_but_2b_clients_that_agree_can_get_an_honest_client_found_guilty() -> None:
    assert framed(12, 0.25, 3, 6) == {6}  # what docs/SECURITY.md says remains possible


@pytest.mark.parametrize(("beta", "found"), [(0.25, {9, 10, 11}), (0.34, set())])
def test_nobody_is_guilty_where_a_third_may_be_byzantine(beta: float, found: set[int]) -> None:
    memory = judged(lambda number: attacked(number, "sign_flip"), beta=beta)
    assert {one.client for one in memory.guilty(np.arange(CLIENTS), int(beta * CLIENTS))} == found


def labels_of(kind: str, seed: int) -> Matrix:
    """Return the shares of 10 labels that each client holds."""
    if kind == "by_label":
        return np.eye(10)[np.arange(CLIENTS) % 10]
    if kind == "rare":  # eleven alike, one with a single label
        return np.concatenate([np.full((CLIENTS - 1, 10), 0.1), np.eye(10)[:1]])
    alpha = {"iid": 1e4, "dirichlet": 0.1, "mild": 0.5}[kind]
    return RANDOM(seed).dirichlet(np.full(10, alpha), size=CLIENTS)


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("kind", ["iid", "by_label", "rare", "dirichlet", "mild"])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_honest_client_is_ever_guilty(kind: str, batch: int, seed: int) -> None:
    """A softmax classifier is trained by the rule; all are honest, or three of them flip signs."""
    means, shares, who = 2 * RANDOM(seed).normal(size=(10, 8)), labels_of(kind, seed), np.arange(CLIENTS)
    for byzantine in (0, BYZANTINE):
        rule, w, random = reputation(0.25), np.zeros((8, 10)), RANDOM((seed, byzantine))
        memory = cast(Judge, rule.memory(CLIENTS))
        for number in range(150):
            labels = np.stack([random.choice(10, size=batch, p=share) for share in shares])
            inputs = means[labels] + random.normal(size=(CLIENTS, batch, 8))
            logits = inputs @ w
            soft = np.exp(logits - logits.max(axis=2, keepdims=True))
            errors = soft / soft.sum(axis=2, keepdims=True) - np.eye(10)[labels]
            gradients = np.einsum("cbi,cbo->cio", inputs, errors) / batch
            directions = random.normal(size=(K, 8, 10))
            rows = np.einsum("cio,kio->ck", gradients, directions)
            rows[CLIENTS - byzantine :] *= -1
            decided = rule.decide(rows, round=number, memory=memory).values
            memory.learn(rows, who, decided, 0.2)
            w = w - 0.2 / K * np.einsum("k,kio->io", decided, directions)
            guilty = {one.client for one in memory.guilty(who, BYZANTINE)}
            assert guilty <= set(range(CLIENTS - byzantine, CLIENTS)), (number, guilty)
