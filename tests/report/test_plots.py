from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cyber0.report import plots
from cyber0.report.plots import accuracy_picture, partition_picture, suspects_picture


def rows(count: int) -> list[dict[str, float]]:
    return [
        {"round": 10 * i, "accuracy": i / count, "loss": 1.0, "uplink_bytes": 2560 * i, "downlink_bytes": 2560 * i}
        for i in range(count)
    ]


def size_of(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 5_000
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 41])
def test_the_accuracy_picture_is_drawn_for_any_number_of_rows(tmp_path: Path, count: int) -> None:
    path = accuracy_picture(rows(count), tmp_path / "plots" / "accuracy.png", "MNIST")
    assert size_of(path) == (1440, 600)


def test_one_row_after_bytes_were_sent_is_drawn(tmp_path: Path) -> None:
    assert size_of(accuracy_picture(rows(3)[2:], tmp_path / "a.png", "one")) == (1440, 600)


@pytest.mark.parametrize(("given", "label"), [({}, "Test accuracy (%)"), ({"evaluated_on": "dev"}, "Dev accuracy (%)")])
def test_the_accuracy_picture_names_the_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], label: str
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure) or path)
    accuracy_picture(rows(3), tmp_path / "a.png", "SST-2", **given)
    assert drawn[0].axes[0].get_ylabel() == label


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 12, 1000])
@pytest.mark.parametrize("known", [True, False])
def test_the_suspects_are_drawn_whoever_is_known_to_be_byzantine(tmp_path: Path, clients: int, known: bool) -> None:
    shares = [client / clients for client in range(clients)]
    byzantine = [client % 4 == 0 for client in range(clients)] if known else None
    path = suspects_picture(shares, byzantine, tmp_path / "s.png", expected=0.5 if known else None)
    assert size_of(path) == (1440, 600)


def test_nobody_trimmed_is_drawn(tmp_path: Path) -> None:
    assert size_of(suspects_picture([0.0, 0.0], [False, False], tmp_path / "s.png")) == (1440, 600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clients", "labels", "known"), [(1, 1, True), (12, 10, True), (12, 10, False), (1000, 10, True), (6, 100, False)]
)
def test_the_partition_is_drawn_for_any_number_of_clients_and_labels(
    tmp_path: Path, clients: int, labels: int, known: bool
) -> None:
    counts = [[(7 * client + label) % 50 for label in range(labels)] for client in range(clients)]
    byzantine = [client % 4 == 0 for client in range(clients)] if known else None
    width, height = size_of(partition_picture(counts, byzantine, tmp_path / "plots" / "p.png"))
    assert width == 1440 and height <= 1500


@pytest.mark.slow
def test_importing_the_plots_does_not_load_matplotlib_and_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from cyber0.report import plots; assert 'matplotlib' not in sys.modules; "
        f"plots.suspects_picture([0.5], None, {str(tmp_path / 's.png')!r}); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
