"""The demo in a real browser: clicks change the run, accuracy rises, and the bars of those who lie grow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from chromium import Chromium
from small_demo import small_session
from synthetic import one_thread  # noqa: F401

from cyber0.demo.server import DemoServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.find() is None,
        reason=f"no browser: none of {', '.join(chromium.NAMES)} is there; apt-get install chromium",
    ),
]


@pytest.fixture
def demo() -> Iterator[DemoServer]:
    """A demo that trains in a thread of its own until the test ends."""
    session, over = small_session(60), threading.Event()

    def train() -> None:
        while not over.is_set():
            if not session.step():
                over.wait(0.02)

    thread = threading.Thread(target=train)
    with DemoServer() as server:
        server.start(session)
        thread.start()
        yield server
        over.set()
        thread.join()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    with Chromium(tmp_path / "profile") as one:
        yield one


def accuracy(browser: Chromium) -> float:
    return float(browser.run("document.getElementById('accuracy').textContent").split()[0])


def shares(browser: Chromium) -> list[float]:
    texts = browser.run("[...document.querySelectorAll('#people .bar b')].map((e) => e.textContent)")
    return [float(text.split()[0]) for text in texts]


def pick(browser: Chromium, control: str, value: str) -> None:
    browser.run(
        f"(() => {{ const box = document.getElementById('{control}'); box.value = '{value}'; "
        "box.dispatchEvent(new Event('change')); })()"
    )


OVER = "document.getElementById('state').textContent.includes('over')"


def marked(browser: Chromium) -> list[int]:
    rows: list[str] = browser.run("[...document.querySelectorAll('#people tbody tr')].map((row) => row.className)")
    return [client for client, name in enumerate(rows) if name == "byzantine"]


def test_clicks_change_who_lies_and_the_rule_and_the_page_shows_what_follows(
    demo: DemoServer, browser: Chromium
) -> None:
    browser.emulate(1200)
    browser.open(demo.address)
    browser.wait(OVER)
    assert accuracy(browser) > 40.0 and marked(browser) == [2, 5, 9]
    honest, byzantine = shares(browser)[0], shares(browser)[2]
    assert byzantine > honest + 20

    browser.click("#lies-2")  # client 2 is honest from here on, and client 0 lies
    browser.wait("document.querySelectorAll('#legend .chip').length === 2")
    browser.click("#lies-0")
    browser.wait(f"document.querySelectorAll('#legend .chip').length === 3 && {OVER}")
    assert marked(browser) == [0, 5, 9]
    assert shares(browser)[0] > shares(browser)[2] + 20
    trimmed = accuracy(browser)

    pick(browser, "rule", "mean")
    browser.wait(f"document.querySelectorAll('#legend .chip').length === 4 && {OVER}")
    assert accuracy(browser) < trimmed - 10 and shares(browser) == [0.0] * 12
    assert browser.run("document.getElementById('trimming').textContent") == "This rule trims no numbers so far."

    browser.click("#legend .chip:nth-child(3)")  # back to the trimmed mean: its run is there as it was
    browser.wait("document.getElementById('rule').value === 'trimmed_mean'")
    browser.wait(f"document.querySelector('#client-0 .bar b').textContent !== '0.0 %' && {OVER}")
    assert accuracy(browser) == trimmed
    assert browser.messages == []
    assert set(browser.requests) == {demo.address, *(f"{demo.address}{name}" for name in ("data.json", "settings"))}


def test_a_refusal_is_shown_and_the_controls_go_back(demo: DemoServer, browser: Chromium) -> None:
    browser.open(demo.address)
    pick(browser, "tolerated", "5")
    browser.wait("document.querySelectorAll('#legend .chip').length === 2")
    pick(browser, "rule", "krum")
    browser.wait("!document.getElementById('refused').hidden")
    assert "needs 13 reports" in browser.run("document.getElementById('refused').textContent")
    assert browser.run("document.getElementById('rule').value") == "trimmed_mean"


def test_pause_and_start_again(demo: DemoServer, browser: Chromium) -> None:
    browser.open(demo.address)
    browser.click("#pause")
    browser.wait("document.getElementById('pause').textContent === 'Continue'")
    browser.click("#pause")
    browser.wait("document.getElementById('pause').textContent === 'Pause'")
    browser.click("#clear")
    browser.wait(OVER)
    assert browser.run("document.querySelectorAll('#legend .chip').length") == 1


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_light_and_dark(demo: DemoServer, browser: Chromium, dark: bool) -> None:
    browser.emulate(390, 800, dark=dark, phone=True)
    browser.open(demo.address)
    assert browser.run("document.documentElement.scrollWidth") == 390
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 19, 24)" if dark else "rgb(246, 247, 249)")


def test_a_demo_that_has_ended_says_so(browser: Chromium) -> None:
    with DemoServer() as server:
        server.start(small_session(2))
        browser.open(server.address)
    browser.wait("document.getElementById('state').textContent.includes('has ended')")
