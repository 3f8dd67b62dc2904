"""The report in a real browser: it draws, it answers the mouse, it fits a phone, it asks nothing of the network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from chromium import Chromium
from report_runs import make_folder

from cyber0.report import page
from cyber0.report.contents import contents
from cyber0.report.folder import read
from cyber0.report.watch import LiveServer
from cyber0.runs.folder import COUNTS

pytestmark = pytest.mark.skipif(
    chromium.find() is None,
    reason=f"no browser: none of {', '.join(chromium.NAMES)} is there; apt-get install chromium",
)

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of one run."""
    home = tmp_path_factory.mktemp("one")
    return page.write([make_folder(home / "run")], home / "report.html")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report that compares three runs, one of them with other rounds of evaluation and a name that is HTML."""
    home = tmp_path_factory.mktemp("three")
    slow = make_folder(home / HOSTILE.replace("/", "\u2215"), data=HOSTILE, slope=0.4, every=7)
    runs = [make_folder(home / "trimmed"), make_folder(home / "mean", rule="mean", slope=0.1), slow]
    return page.write(runs, home / "report.html")


def texts(browser: Chromium, selector: str) -> list[str]:
    found = browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")
    assert isinstance(found, list)
    return found


def ink(browser: Chromium, chart: str) -> dict[str, int]:
    """Return how many pixels of each opaque colour a chart's canvas has."""
    found: dict[str, int] = browser.run(f"""(() => {{
        const canvas = document.querySelector("#{chart} canvas"), counts = {{}};
        const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) {{
            const name = "#" + [0, 1, 2].map((j) => data[i + j].toString(16).padStart(2, "0")).join("");
            counts[name] = (counts[name] || 0) + 1;
        }}
        return counts;
    }})()""")
    return found


CHARTS = ("accuracy-rounds", "accuracy-bytes", "loss-rounds", "loss-bytes")
BLUE, ORANGE, BRIGHT_BLUE = "#0072b2", "#d55e00", "#56b4e9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "beta", "said"),
    [
        ("trimmed_mean", 0.0, "With this beta the rule trims b = 0 scalars"),
        ("median", 0.25, "This rule trims no scalars"),
    ],
)
def test_that_nobody_was_trimmed_is_said_with_its_cause(
    rule: str, beta: float, said: str, browser: Chromium, tmp_path: Path
) -> None:
    run = make_folder(tmp_path / "run", rule=rule)
    settings = re.sub(r"(?m)^beta = .*$", f"beta = {beta}", (run / "config.toml").read_text())
    if not beta:
        settings = re.sub(r"(?m)^byzantine = .*$", "byzantine = 0", settings)
    (run / "config.toml").write_text(settings)
    rows = "".join(f"{client},0,3200,0,0.0\n" for client in range(12))
    (run / "clients.csv").write_text("client,byzantine,sent,trimmed,share\n" + rows)
    browser.open(page.write([run], tmp_path / "report.html"))
    assert any(f"{said}, so this says nothing about the 12 clients." in t for t in texts(browser, "#suspects"))


def test_a_report_draws_everything_and_asks_nothing(browser: Chromium, one: Path) -> None:
    browser.emulate(1200)
    browser.open(one)
    assert browser.messages == []
    assert browser.requests == [one.as_uri()]
    for chart in CHARTS:
        assert ink(browser, chart).get(BLUE, 0) > 300, chart
    assert texts(browser, "h1") == ["run"]
    assert "3 of them Byzantine" in texts(browser, ".sentence")[0]
    assert len(texts(browser, "#figures .card")) >= 6
    assert len(texts(browser, "#clients tbody tr")) == len(texts(browser, "#shares tbody tr")) == 12
    assert len(texts(browser, "#settings tbody tr")) > 30
    assert texts(browser, "#command") == ["cyber0 run --set rounds=50 --set evaluate_every=1"]


@pytest.mark.slow
def test_on_a_phone_the_bars_and_the_settings_need_no_scrolling_sideways(browser: Chromium, one: Path) -> None:
    browser.emulate(390, 800, phone=True)
    browser.open(one)
    for table in ("clients", "settings", "versions"):
        room = browser.run(f"(() => {{ const box = document.getElementById('{table}').parentNode; "
                           "return box.scrollWidth - box.clientWidth; })()")  # fmt: skip
        assert room <= 0, table
    meaning, name = (browser.run(f"document.querySelector('#settings td.{kind}').getBoundingClientRect().top")
                     for kind in ("long", "key"))  # fmt: skip
    assert meaning > name
    browser.emulate(1200)


def test_settings_and_figures_of_the_same_name_are_compared_in_one_column(browser: Chromium, tmp_path: Path) -> None:
    runs = [make_folder(tmp_path / "short", rounds=20), make_folder(tmp_path / "long", rounds=40, rule="mean")]
    browser.open(page.write(runs, tmp_path / "report.html"))
    heads = texts(browser, "#runs th")
    assert heads[:3] == ["run", "accuracy", "rule"] and heads.count("rounds") == 1


DEV = {"evaluated_on": "dev", "dev_accuracy": 0.9, "test_accuracy": 0.8125, "test_loss": 0.4321}


def headings(browser: Chromium) -> list[str]:
    return [title.split(" over ")[0] for title in texts(browser, "#curves figcaption")]


@pytest.mark.slow
def test_runs_on_dev_and_test_set_are_compared_in_columns_of_their_own(browser: Chromium, tmp_path: Path) -> None:
    dev = [make_folder(tmp_path / name, task="sst2", more=DEV) for name in ("dev", "again")]
    test = [make_folder(tmp_path / name) for name in ("test", "other")]

    def compared(runs: list[Path]) -> dict[str, list[str]]:
        browser.open(page.write(runs, tmp_path / "report.html"))
        assert browser.messages == []
        cells = [texts(browser, f"#runs tbody tr:nth-child({n}) td") for n in range(1, len(runs) + 1)]
        return dict(zip(texts(browser, "#runs th"), map(list, zip(*cells, strict=True)), strict=True))

    table = compared([dev[0], test[0]])
    last = table["test accuracy"][1]
    assert table["dev accuracy"] == [last, "-"] and table["test accuracy"] == ["81.25 %", last]
    assert "accuracy" not in table and table["test loss"][0] == "0.4321"
    assert headings(browser) == ["Accuracy"] * 2 + ["Loss"] * 2
    assert texts(browser, "#legend .chip") == ["dev (dev)", "test (test)"]
    assert compared(test)["accuracy"] == [last, last]  # one set: nothing to tell apart
    assert headings(browser) == ["Test accuracy"] * 2 + ["Test loss"] * 2
    assert texts(browser, "#legend .chip") == ["test", "other"]
    assert compared(dev)["dev accuracy"] == [last, last]
    assert headings(browser) == ["Dev accuracy"] * 2 + ["Dev loss"] * 2


def test_the_ticks_of_a_loss_that_hardly_changes_differ(browser: Chromium, tmp_path: Path) -> None:
    run = make_folder(tmp_path / "run", rounds=4)
    rows = "".join(f"{t},0.5,{0.7085 + 2e-6 * t:.7f},{256 * t},{256 * t},{t},{t}\n" for t in range(5))
    (run / "metrics.csv").write_text("round,accuracy,loss,uplink_bytes,downlink_bytes,decided,seconds\n" + rows)
    browser.open(page.write([run], tmp_path / "report.html"))
    browser.run("""(() => {
        const draw = CanvasRenderingContext2D.prototype.fillText;
        window.written = [];
        CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
            if (this.canvas.closest("#loss-rounds")) window.written.push(text);
            return draw.call(this, text, ...rest);
        };
    })()""")
    for _ in range(2):  # logarithmic, and back
        browser.run("window.written.length = 0")
        browser.click("#log-loss")
        browser.wait("window.written.some((text) => text.startsWith('0.'))")
        ticks = browser.run("window.written.filter((text) => text.startsWith('0.'))")
        assert len(ticks) > 1 and len(set(ticks)) == len(ticks), ticks


def test_byzantine_clients_come_first_and_are_marked(browser: Chromium, one: Path) -> None:
    browser.open(one)
    rows = browser.run(
        "[...document.querySelectorAll('#clients tbody tr')].map((r) => [r.cells[0].textContent, r.className])"
    )
    assert sorted(client for client, kind in rows[:3]) == ["1", "2", "3"]
    assert [kind for _, kind in rows] == ["byzantine"] * 3 + [""] * 9


@pytest.mark.slow
def test_a_click_on_a_name_hides_its_curve_everywhere_and_another_shows_it(browser: Chromium, three: Path) -> None:
    browser.emulate(1200)
    browser.open(three)
    assert browser.messages == []
    names = texts(browser, "#legend .chip")
    assert names[:2] == ["trimmed", "mean"] and len(names) == 3
    before = [ink(browser, chart).get(ORANGE, 0) for chart in CHARTS]
    assert all(count > 100 for count in before)
    browser.click("#legend .chip:nth-child(2)")
    browser.wait("document.querySelectorAll('#legend .chip[aria-pressed=false]').length === 1")
    assert [ink(browser, chart).get(ORANGE, 0) for chart in CHARTS] == [0] * 4
    browser.click("#legend .chip:nth-child(2)")
    assert [ink(browser, chart).get(ORANGE, 0) for chart in CHARTS] == before
    browser.click("#everyone")
    assert not any(ink(browser, chart).get(BLUE, 0) for chart in CHARTS)


def test_hovering_shows_the_values_of_every_run(browser: Chromium, three: Path) -> None:
    browser.open(three)
    assert not browser.run("[...document.querySelectorAll('.readout')].some((e) => !e.hidden)")
    browser.hover("#accuracy-rounds .u-over", x=0.5)
    head, *values = texts(browser, "#accuracy-rounds .readout p")
    assert head == "round 25"
    data = json.loads(browser.run("document.getElementById('data').textContent"))
    curve = data["runs"][0]["curve"]["columns"]
    assert values[0] == f"trimmed{100 * curve['accuracy'][curve['round'].index(25)]:.2f} %"
    # The third run was not evaluated at round 25: its nearest evaluation is read out.
    curve = data["runs"][2]["curve"]["columns"]
    assert values[2].endswith(f"{100 * curve['accuracy'][curve['round'].index(28)]:.2f} %")
    browser.hover("h1")
    assert not browser.run("[...document.querySelectorAll('.readout')].some((e) => !e.hidden)")


def test_dragging_zooms_in(browser: Chromium, one: Path) -> None:
    browser.open(one)
    before = browser.run("document.querySelector('#accuracy-rounds canvas').toDataURL()")
    browser.drag("#accuracy-rounds .u-over", 0.5, 0.9)
    browser.wait(f"document.querySelector('#accuracy-rounds canvas').toDataURL() !== {json.dumps(before)}")
    browser.hover("#accuracy-rounds .u-over", x=0.01)
    assert texts(browser, "#accuracy-rounds .readout p")[0] == "round 25"


@pytest.mark.slow
@pytest.mark.parametrize(("table", "column"), [("clients", 0), ("clients", 2), ("shares", 4), ("settings", 0)])
def test_tables_sort_up_and_down(browser: Chromium, one: Path, table: str, column: int) -> None:
    browser.open(one)
    cells = f"#{table} tbody td:nth-child({column + 1})"
    orders = []
    for _ in range(2):
        browser.click(f"#{table} th:nth-child({column + 1}) button")
        orders.append(texts(browser, cells))
    if table != "settings":
        numbers = [[float(text.replace(",", "").replace("\u00b7", "0").rstrip(" %")) for text in o] for o in orders]
        assert numbers[0] == sorted(numbers[0], reverse=True) and numbers[1] == sorted(numbers[1])
        assert len(set(numbers[0])) > 2
    else:
        assert orders[0] == sorted(orders[0]) and orders[1] == sorted(orders[0], reverse=True)
    assert browser.run(f"document.querySelector('#{table} th:nth-child({column + 1})').ariaSort") in (
        "ascending",
        "descending",
    )


def test_choosing_another_run_shows_its_clients_and_settings_tell_runs_apart(browser: Chromium, three: Path) -> None:
    browser.open(three)
    assert texts(browser, "#settings tbody td:first-child") == ["evaluate_every", "task.data", "aggregation.rule"]
    browser.click("#only-changes")
    assert len(texts(browser, "#settings tbody tr")) > 30
    browser.run("(() => { const s = document.getElementById('chosen'); s.value = 1; s.onchange({target: s}); })()")
    assert "--set aggregation.rule=mean" in texts(browser, "#command")[0]


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_is_wider_than_a_phone(browser: Chromium, one: Path, three: Path, width: int) -> None:
    browser.emulate(width, 800, phone=True)
    for report in (one, three):
        browser.open(report)
        assert browser.run("document.documentElement.scrollWidth") == width
        for chart in CHARTS:
            assert browser.run(f"document.querySelector('#{chart} .uplot').getBoundingClientRect().right") <= width
    browser.emulate(1200)


@pytest.mark.slow
def test_light_and_dark_follow_the_reader_and_the_button(browser: Chromium, one: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    browser.emulate(1200, dark=True)
    browser.open(one)
    assert browser.run(paper) == "rgb(15, 19, 24)"
    assert ink(browser, "loss-rounds").get(BRIGHT_BLUE, 0) > 300
    browser.click("#theme")
    assert browser.run(paper) == "rgb(246, 247, 249)"
    assert ink(browser, "loss-rounds").get(BLUE, 0) > 300
    browser.emulate(1200)
    browser.click("#theme")
    assert browser.run(paper) == "rgb(15, 19, 24)"
    browser.click("#theme")
    assert browser.run(paper) == "rgb(246, 247, 249)"


def test_html_in_names_and_settings_is_text(browser: Chromium, three: Path) -> None:
    browser.open(three)
    browser.run("(() => { const s = document.getElementById('chosen'); s.value = 2; s.onchange({target: s}); })()")
    assert texts(browser, "#legend .chip")[2] == HOSTILE.replace("/", "\u2215")
    assert HOSTILE in texts(browser, "#settings td")
    assert browser.run("document.querySelectorAll('main img, main script').length") == 0
    assert browser.messages == []


@pytest.mark.slow
def test_broken_folders_are_drawn_with_a_note(browser: Chromium, tmp_path: Path) -> None:
    for lost in ("config.toml", "metrics.csv", "clients.csv", "partition.csv", "summary.json"):
        folder = make_folder(tmp_path / lost)
        (folder / lost).unlink()
        browser.open(page.write([folder], tmp_path / "report.html"))
        assert browser.messages == [], lost
        assert any(lost in note for note in texts(browser, ".note"))


@pytest.mark.slow
def test_a_20_000_round_report_opens(browser: Chromium, tmp_path: Path) -> None:
    out = page.write([make_folder(tmp_path / "long", rounds=20_000)], tmp_path / "report.html")
    assert out.stat().st_size < 3_000_000
    browser.open(out)  # `python benchmarks/report.py` measures how fast
    assert browser.messages == [] and all(ink(browser, chart).get(BLUE, 0) > 300 for chart in CHARTS)


@pytest.mark.slow
def test_a_watched_page_follows_the_run_and_keeps_its_end(browser: Chromium, tmp_path: Path) -> None:
    found = read(make_folder(tmp_path / "run"))
    every, end = found.evaluations, found.summary
    found.evaluations, found.summary = every[:10], {}
    progress: dict[str, Any] = {"round": 9, "rounds": 50, "speed": "3 rounds/s"}
    with LiveServer() as watch:
        watch.start(lambda: (found, progress))
        browser.open(watch.address)
        assert texts(browser, "#state") == ["live: round 9 of 50, 3 rounds/s"]
        assert "after 9 of 50 rounds" in texts(browser, ".sentence")[0]
        found.evaluations, progress["round"] = every[:30], 29
        browser.wait("document.querySelector('.sentence').textContent.includes('after 29 of 50 rounds')")
        assert texts(browser, "#state") == ["live: round 29 of 50, 3 rounds/s"]
        found.evaluations, found.summary = every, end
    browser.wait("document.querySelector('#state').textContent === 'the run has ended'")
    assert "after 50 rounds" in texts(browser, ".sentence")[0]
    assert ink(browser, "accuracy-rounds").get(BLUE, 0) > 300
    assert browser.messages == []
    assert {request.rsplit("/", 1)[1] for request in browser.requests} == {"", "data.json"}
    assert contents([found])["runs"][0]["ended"]


@pytest.mark.slow
def test_a_watched_run_says_how_it_is_evaluated_until_it_is(browser: Chromium, tmp_path: Path) -> None:
    found = read(make_folder(tmp_path / "run"))
    every, found.evaluations, found.summary = found.evaluations, [], {}
    with LiveServer() as watch:
        watch.start(lambda: (found, {"round": 9, "rounds": 50, "speed": "3 rounds/s"}))
        browser.open(watch.address)
        assert "Nothing has been evaluated" in texts(browser, "#curves")[0]
        found.evaluations = every[:10]
        browser.wait("document.querySelector('#curves').textContent.includes('Drag to zoom')")
        assert "Nothing has been evaluated" not in texts(browser, "#curves")[0]
    assert browser.messages == [] and ink(browser, "accuracy-rounds").get(BLUE, 0) > 30


@pytest.mark.slow
def test_a_watched_federator_shows_its_clients_as_they_come_and_go(browser: Chromium, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    (folder / "partition.csv").unlink()
    counts = {name: [40, 40, 10] for name in COUNTS} | {
        "payload_in": [640, 640, 160], "payload_out": [640, 640, 160], "wire_in": [2920, 2920, 2000],
        "wire_out": [3600, 3600, 4000], "misses": [0, 1, 7],
    }  # fmt: skip
    served = {"round": 40, "seconds": 2.0, "refused": {"flood": 2}, "digest_alarms": 0, "clients": counts}
    (folder / "served.json").write_text(json.dumps(served))
    found = read(folder)
    found.summary["rejected_reports"], states = {"flood": 2}, ["current", "current", "away"]
    found.served |= {"states": states, "connected": 2, "current": 2}
    with LiveServer() as watch:
        watch.start(lambda: (found, {"round": 40, "rounds": 50, "speed": "20 rounds/s"}))
        browser.open(watch.address)
        rows = [texts(browser, f"#connections tr:nth-child({i}) td") for i in (1, 2, 3)]
        assert rows[0] == ["2", "away", "10", "7", "16 / 16", "200 / 400"]  # who is away comes first
        assert rows[1] == ["1", "current", "40", "1", "16 / 16", "73 / 90"]
        assert "over the network" in texts(browser, ".sentence")[0] and texts(browser, ".note") == []
        cards = dict(zip(texts(browser, ".card .label"), texts(browser, ".card .value"), strict=True))
        assert cards["on the wire, up / down"] == "87.1 / 124 B"
        assert cards["reports missed"] == "8" and cards["clients connected"] == "2" and cards["refused"] == "2"
        assert texts(browser, "#partition") == []
        states[2], counts["misses"][2] = "catching up", 9
        found.served["clients"]["misses"] = counts["misses"]
        browser.wait("document.querySelector('#connections td.text').textContent === 'catching up'")
        browser.wait("[...document.querySelectorAll('.card .value')].some((e) => e.textContent === '10')")
        watch._last_request = -60.0
    assert browser.messages == []
