"""How fast the others are beside slow, silent and hostile clients: worlds of streams on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest
from virtual_time import run
from wire import Pipe, Voter, answer_newest, make_hub, now

from cyber0.serve.admission import Cut
from cyber0.serve.hub import FRAMES_A_ROUND, Hub
from cyber0.serve.sessions import DeadlineTimer

CLIENTS = 5
FAST = 0.05  # seconds that an ordinary client takes for an answer

Guest = Callable[[Hub], Awaitable[None]]


class World(NamedTuple):
    """What has happened in a world, by the second."""

    rounds: list[int]
    """In the ledger."""
    counted: list[int]
    """Reports of the last client that counted."""
    missed: list[int]
    """Rounds that have waited for the last client in vain."""
    hub: Hub

    def pace(self, begin: int, end: int) -> float:
        """Return the rounds a second between two times."""
        return (self.rounds[end] - self.rounds[begin]) / (end - begin)


def fast(client: int) -> Guest:
    return lambda hub: answer_newest(hub, client, lambda round: FAST)


def slow(client: int, seconds: float) -> Guest:
    return lambda hub: answer_newest(hub, client, lambda round: seconds)


def live(seconds: int, deadline_s: float, *guests: Guest, clients: int = CLIENTS, beta: float = 0.2) -> World:
    """Let clients live for so many seconds; the last of them is the one that is watched."""

    async def work() -> World:
        hub = make_hub(clients, 1 << 30, deadline_s=deadline_s, beta=beta)
        world = World([], [], [], hub)
        hub.start()
        tasks = [asyncio.ensure_future(guest(hub)) for guest in guests]
        for second in range(seconds + 1):
            await asyncio.sleep(second - now())
            world.rounds.append(len(hub.ledger))
            world.counted.append(hub.figures.clients[-1].reports)
            world.missed.append(hub.figures.clients[-1].misses)
        for task in tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return world

    world: World = run(work(), patience=1e6)
    return world


OTHERS = [fast(client) for client in range(CLIENTS - 1)]


UNDISTURBED = 1 / (FAST + 0.002)  # rounds a second of the others by themselves; a few turns of the loop take 2 ms


# Nobody slows the others by more than a factor of two.


async def join_hold_and_leave(hub: Hub) -> None:
    while True:
        pipe, voter = Pipe(), Voter(hub.ledger.header, CLIENTS - 1)
        voter.round, voter.chain = len(hub.ledger), hub.ledger.chain
        serving = asyncio.ensure_future(hub.serve(pipe))
        await pipe.up.put(voter.hello())
        await pipe.down.get()
        await asyncio.sleep(0.9 * hub.policy.deadline_s)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def answers_now_and_then(hub: Hub) -> Awaitable[None]:
    """Answer fast, so as to be waited for, and then hold up the round; over and over."""
    return answer_newest(hub, CLIENTS - 1, lambda round: 1.8 if round % 3 == 0 else FAST)


def holds_a_little(hub: Hub) -> Awaitable[None]:
    return answer_newest(hub, CLIENTS - 1, lambda round: 0.09 if round % 2 else FAST)


def useless(hub: Hub) -> Awaitable[None]:
    """Hold up a round, and then send what can't count."""
    return answer_newest(hub, CLIENTS - 1, lambda round: 1.8, lambda answer: bytes(len(answer)))


HOSTILE: dict[str, Guest] = {
    "just before each deadline": slow(CLIENTS - 1, 1.8),
    "join, hold, leave": join_hold_and_leave,
    "now and then": answers_now_and_then,
    "a little each time": holds_a_little,
    "useless": useless,
    "silent": slow(CLIENTS - 1, 1e9),
}


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", HOSTILE)
def test_after_a_minute_no_client_slows_the_others_by_more_than_a_factor_of_two(behaviour: str) -> None:
    world = live(120, 2.0, *OTHERS, HOSTILE[behaviour])
    assert world.pace(60, 120) > 0.5 * UNDISTURBED


@pytest.mark.slow
def test_as_many_hostile_clients_as_are_tolerated_slow_the_others_no_more_than_one() -> None:
    hostile = [slow(8, 1.8), lambda hub: answer_newest(hub, 9, lambda round: 0.09 if round % 2 else FAST)]
    world = live(120, 2.0, *(fast(client) for client in range(8)), *hostile, clients=10)
    assert world.hub.federator.tolerated == 2 and world.pace(60, 120) > 0.5 * UNDISTURBED


def test_a_hostile_client_does_not_make_a_slow_one_the_pace_of_all() -> None:
    honest = [*OTHERS[:-1], slow(CLIENTS - 2, 0.6)]  # waiting for which would make rounds twelve times as long
    world = live(30, 2.0, *honest, slow(CLIENTS - 1, 0.58))
    assert world.pace(10, 30) > 0.5 * UNDISTURBED


# Honest clients are counted, however slow.


def test_a_client_slower_than_the_deadline_takes_part_regularly() -> None:
    world = live(30, 0.5, *OTHERS, slow(CLIENTS - 1, 0.6))
    assert world.counted[10] >= 2 and world.counted[20] >= world.counted[10] + 3 <= world.counted[30] - 3
    assert world.pace(0, 30) > 0.5 * UNDISTURBED
    assert world.missed[30] == 1  # later on it is known to be slow


def test_a_faster_slow_client_does_not_use_up_the_time_of_a_slower_one() -> None:
    world = live(60, 0.5, *OTHERS[:-1], slow(CLIENTS - 2, 0.15), slow(CLIENTS - 1, 0.6))
    assert world.counted[40] >= world.counted[20] + 4 and world.counted[60] >= world.counted[40] + 4
    assert world.hub.figures.clients[CLIENTS - 2].reports > 2 * world.counted[60]


def test_several_clients_that_are_a_little_slow_leave_time_for_one_that_is_slower() -> None:
    others = [*(fast(client) for client in range(9)), *(slow(client, 0.14) for client in range(9, 12))]
    world = live(40, 0.5, *others, slow(12, 0.6), clients=13, beta=0.25)
    assert world.counted[20] >= 2 and world.counted[40] >= world.counted[20] + 3
    assert world.pace(0, 40) > 0.5 * UNDISTURBED


def test_a_client_that_was_stopped_is_counted_again_at_once() -> None:
    stopped = {40: 12.0}
    world = live(20, 2.0, *OTHERS, lambda hub: answer_newest(hub, CLIENTS - 1, lambda round: stopped.pop(round, FAST)))
    assert world.counted[3] == world.counted[14] == 40
    assert world.counted[20] - world.counted[15] == world.rounds[20] - world.rounds[15]
    assert world.hub.figures.refused["flood"] == 0 and world.missed[20] == 1


def test_jitter_of_tens_of_milliseconds_costs_nobody_its_vote_as_a_rule() -> None:
    seeded = random.Random(1)

    def delay(round: int) -> float:
        return 0.01 + (0.03 * seeded.random() if seeded.random() < 0.1 else 0.0)

    def jittery(client: int) -> Guest:
        return lambda hub: answer_newest(hub, client, delay)

    world = live(20, 2.0, *(jittery(client) for client in range(CLIENTS)))
    assert min(traffic.reports for traffic in world.hub.figures.clients) > 0.95 * world.rounds[-1]


def test_late_answers_are_no_flood_but_repeated_ones_are() -> None:
    async def work() -> list[str]:
        hub = make_hub(4, 1 << 30, deadline_s=2.0)
        hub.start()
        others = [asyncio.ensure_future(answer_newest(hub, client, lambda round: FAST)) for client in range(3)]
        pipe, voter, answers = Pipe(), Voter(hub.ledger.header, 3), list[bytes]()
        serving = asyncio.ensure_future(hub.serve(pipe))
        await pipe.up.put(voter.hello())
        while len(answers) < 5 * FRAMES_A_ROUND:  # it reads all that is announced, and answers nothing
            answers += voter.take(await pipe.down.get())
        for answer in answers[:-1]:
            await pipe.up.put(answer)
        await asyncio.sleep(FAST / 2)
        assert not serving.done() and hub.figures.refused["late"] == len(answers) - 1
        for answer in answers[: FRAMES_A_ROUND + 1]:
            await pipe.up.put(answer)
        await asyncio.wait([serving], timeout=1.0)
        with pytest.raises(Cut) as cut:
            serving.result()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return [cut.value.reason]

    assert run(work()) == ["flood"]


# The timer of a round.


def rings(*settings: tuple[float, float], held_up: tuple[float, float] = (1e9, 0.0)) -> list[float]:
    """Return when a timer rings that is set to `due` at `time`; its clock may jump, as if the loop stood still."""

    async def work() -> list[float]:
        rung: list[float] = []

        def clock() -> float:
            at, seconds = held_up
            return now() if now() < at else now() + seconds

        timer = DeadlineTimer(clock, lambda: rung.append(round(clock(), 2)))
        for time, due in settings:
            await asyncio.sleep(time - now())
            timer.set(due)
        await asyncio.sleep(100)
        timer.close()
        return rung

    found: list[float] = run(work(), patience=1e4)
    return found


def test_the_timer_follows_a_deadline_that_moves_either_way() -> None:
    assert rings((0.0, 60.0), (1.0, 2.0)) == [2.0]
    assert rings((0.0, 2.0), (1.0, 5.0)) == [5.0]
    assert rings((0.0, 60.0), (1.0, 2.0), (1.5, 50.0), (3.0, 4.0)) == [4.0]


def test_a_federator_that_stood_still_reads_what_has_come_before_it_gives_anybody_up() -> None:
    assert rings((0.0, 2.0), held_up=(1.99, 0.5)) == [3.0]  # it was half a second late: it waits as long again
    assert rings((0.0, 2.0), held_up=(1.99, 0.02)) == [2.02]
