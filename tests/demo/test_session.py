"""The demo's session: what a change does, what is kept, and that the training is real."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from small_demo import small_session, small_source
from synthetic import one_thread  # noqa: F401

from cyber0 import Simulation
from cyber0.demo import data
from cyber0.demo.session import MOST_TRIALS, Session, offered_rules
from cyber0.demo.trial import Settings
from cyber0.errors import ConfigError
from cyber0.tasks import mnist


def advance(session: Session, rounds: int) -> dict[str, Any]:
    for _ in range(rounds):
        assert session.step()
    return session.snapshot()


@pytest.mark.slow
def test_it_learns_and_trims_those_who_lie() -> None:
    session = small_session()
    before = session.snapshot()["chosen"]["accuracy"]
    chosen = advance(session, 40)["chosen"]
    assert chosen["round"] == 40 and chosen["ended"] and chosen["accuracy"] > before + 0.3
    share = [cut / sent for cut, sent in zip(chosen["trimmed"], chosen["sent"], strict=True)]
    assert min(share[i] for i in (2, 5, 9)) > max(share[i] for i in range(12) if i not in (2, 5, 9))
    assert not session.step()  # nothing is left to do


@pytest.mark.slow
def test_a_configuration_is_the_run_that_a_simulation_of_it_is() -> None:
    session = small_session(8)
    session.choose({"byzantine": [0, 7], "attack": "ipm", "rule": "median", "tolerated": 2})
    chosen = advance(session, 8)["chosen"]
    settings = Settings((0, 7), "ipm", "median", 2)
    alone = Simulation(settings.config(8), task=small_source().task, byzantine=[0, 7])
    for _ in range(8):
        alone.run_round()
    assert chosen["digest"] == alone.parameters.digest()


@pytest.mark.slow
def test_a_configuration_that_is_chosen_again_continues_where_it_stopped() -> None:
    session = small_session()
    first = advance(session, 5)
    session.choose({"rule": "mean"})
    second = advance(session, 3)
    assert second["chosen"]["round"] == 3 and len(second["trials"]) == 2
    session.choose({"rule": "trimmed_mean"})
    third = advance(session, 1)
    assert third["chosen"]["number"] == first["chosen"]["number"] and third["chosen"]["round"] == 6
    assert [trial["round"] for trial in third["trials"]] == [6, 3]


@pytest.mark.slow
def test_the_configuration_left_longest_ago_makes_room() -> None:
    session = small_session()
    for client in range(MOST_TRIALS + 1):
        session.choose({"byzantine": [client]})
        session.step()
    kept = [trial["settings"]["byzantine"] for trial in session.snapshot()["trials"]]
    assert kept == [(client,) for client in range(1, MOST_TRIALS + 1)]


@pytest.mark.slow
def test_pause_stops_the_rounds_and_clear_forgets_them() -> None:
    session = small_session()
    advance(session, 3)
    session.control("pause")
    assert not session.step() and session.snapshot()["chosen"]["round"] == 3
    session.control("resume")
    assert advance(session, 1)["chosen"]["round"] == 4
    session.choose({"rule": "mean"})
    session.control("clear")
    state = advance(session, 1)
    assert len(state["trials"]) == 1 and state["chosen"]["round"] == 1


@pytest.mark.slow
def test_the_numbers_of_a_round_say_who_was_left_out_and_what_was_decided() -> None:
    session = small_session()
    session.choose({"attack": "nonfinite"})
    last = advance(session, 1)["chosen"]["last"]
    assert [last["excluded"][i] for i in (2, 5, 9)] == [True, True, True]
    assert last["scalars"][2] is None or last["scalars"][5] is None or last["scalars"][9] is None
    session.choose({"attack": "gaussian"})
    last = advance(session, 1)["chosen"]["last"]
    inside = [v for v, out in zip(last["scalars"], last["excluded"], strict=True) if not out]
    assert len(inside) == 12 - 2 * 3
    assert last["decided"] == pytest.approx(sum(inside) / len(inside), rel=1e-5)


@pytest.mark.slow
def test_rules_that_choose_clients_leave_out_whole_clients() -> None:
    session = small_session()
    session.choose({"rule": "krum"})
    last = advance(session, 1)["chosen"]["last"]
    assert last["excluded"].count(False) == 1
    assert last["decided"] == pytest.approx(last["scalars"][last["excluded"].index(False)], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"byzantine": [12]}, "from 0 to 11"),
        ({"byzantine": [True]}, "from 0 to 11"),
        ({"byzantine": "2"}, "list of clients"),
        ({"byzantine": list(range(12))}, "at least one of them honest"),
        ({"attack": "evil.py:attack"}, "is not one of none, full_knowledge"),
        ({"attack": ["sign_flip"]}, "is not one of"),
        ({"rule": "os:system"}, "is not one of mean"),
        ({"tolerated": 6}, "from 0 to 5"),
        ({"tolerated": 1.0}, "whole number"),
        ({"device": "cuda"}, "device can't be set; only byzantine"),
        ({"rule": "krum", "tolerated": 5}, "needs 13 reports"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(given: dict[str, Any], said: str) -> None:
    session = small_session()
    before = session.snapshot()
    with pytest.raises(ConfigError, match=said):
        session.choose(given)
    with pytest.raises(ConfigError, match="pause, resume, clear"):
        session.control("stop")
    assert session.snapshot() == before


@pytest.mark.slow
def test_a_change_wakes_the_loop_that_waits() -> None:
    session, done = small_session(2), threading.Event()

    class Stop(Exception):
        pass

    def run() -> None:
        try:
            session.run()
        except Stop:
            done.set()

    step = session.step

    def watched() -> bool:
        worked = step()
        if session.snapshot()["chosen"]["number"] == 1:
            raise Stop
        return worked

    session.step = watched  # type: ignore[method-assign]
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    session.choose({"rule": "mean"})
    assert done.wait(60)
    thread.join()


@pytest.mark.slow
def test_without_a_cached_mnist_digits_are_drawn_and_nothing_is_downloaded(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CYBER0_CACHE", str(tmp_path))
    monkeypatch.setattr(mnist, "download", lambda *_: pytest.fail("it downloads"))
    monkeypatch.setattr(data, "TRAIN", 50)
    found = data.choose()
    assert "MNIST is not cached" in found.text
    one, two, other = (data.drawn_digits(40, 10, seed) for seed in (0, 0, 1))
    assert one.train_images.shape == (40, 784) and one.test_labels.tolist() == list(range(10))
    assert (one.train_images == two.train_images).all() and (one.train_images != other.train_images).any()


def test_who_lies_can_be_named_in_python_and_must_be_as_many_as_the_config_says() -> None:
    task, config = small_source().task, Settings((1, 4)).config(1)
    assert Simulation(config, task=task, byzantine=[4, 1]).byzantine.nonzero()[0].tolist() == [1, 4]
    for wrong in ([1], [1, 1], [1, 12], [-1, 3]):
        with pytest.raises(ConfigError, match=r"federation\.byzantine = 2 different clients from 0 to 11"):
            Simulation(config, task=task, byzantine=wrong)


def test_every_rule_on_offer_can_be_chosen() -> None:
    for name in offered_rules():
        Settings((2,), "ipm", name, 1).config(8)


@pytest.mark.slow
def test_a_rule_with_a_history_remembers_the_rounds_of_its_configuration() -> None:
    session = small_session(8)
    session.choose({"byzantine": [0, 7], "attack": "ipm", "rule": "reputation", "tolerated": 2})
    chosen = advance(session, 8)["chosen"]
    alone = Simulation(Settings((0, 7), "ipm", "reputation", 2).config(8), task=small_source().task, byzantine=[0, 7])
    for _ in range(8):
        alone.run_round()
    assert chosen["digest"] == alone.parameters.digest()
