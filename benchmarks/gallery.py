"""The pictures of docs/GALLERY.md.

python benchmarks/gallery.py [NAME ...]      # of the list below; none: all of them, in some minutes

Each is made by the command that the gallery shows beside it, or by a screenshot of what that command shows in a browser
(`apt-get install chromium`). Runs go to a temporary folder. MNIST is fetched if it is not cached.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import round_picture

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
LARGEST_BYTES = 150_000
RULES = ("trimmed_mean", "median", "krum", "mean")
STUDY = """
rounds = 100
evaluate_every = 50
[study]
seeds = 1
[study.grid]
aggregation.rule = ["mean", "median", "trimmed_mean", "krum", "geometric_median"]
federation.attack = ["none", "full_knowledge", "sign_flip", "alie", "ipm", "gaussian"]
"""


def cyber0(home: Path, *arguments: str) -> None:
    """Run a command in a folder."""
    subprocess.run([sys.executable, "-m", "cyber0", *arguments], cwd=home, check=True, stdout=subprocess.DEVNULL)


def run(home: Path, name: str, *settings: str) -> Path:
    """Return the folder of a run, made if it is not there."""
    folder = home / name
    if not folder.exists():
        options = [part for setting in settings for part in ("--set", setting)]
        cyber0(home, "run", "--quiet", "--out", name, "--no-export", *options)
    return folder


def attacked(home: Path, rule: str) -> Path:
    """Return a run under an attack that breaks the plain mean."""
    return run(home, rule, "rounds=200", "federation.attack=sign_flip", f"aggregation.rule={rule}")


def draw_round(home: Path, out: Path) -> None:
    round_picture.draw(round_picture.measured(), out)


def draw_rules(home: Path, out: Path) -> None:
    """Draw the accuracy of several rules under one attack, from the metrics of their runs."""
    from cyber0.report import plots
    from cyber0.runs.folder import read_metrics

    figure = plots.new_figure("3 of 12 clients reverse their scalars (sign_flip)", width=6.4, height=4.0)
    axes = figure.subplots()
    for rule, colour in zip(RULES, plots.COLOURS, strict=False):
        rows = read_metrics(attacked(home, rule) / "metrics.csv")[0]
        accuracy = [100 * (row.accuracy or 0.0) for row in rows]
        label = f"{rule}: {accuracy[-1]:.1f} %"
        axes.plot([row.round for row in rows], accuracy, color=colour, linewidth=1.8, label=label, clip_on=False)
    axes.set(xlabel="Round", ylabel="Test accuracy (%)", ylim=(0, 100), xlim=(0, 200))
    axes.legend(frameon=False, loc="center right")
    plots.plain(axes)
    plots.save(figure, out)


def draw_partition(home: Path, out: Path) -> None:
    folder = run(home, "dirichlet", "rounds=20", "federation.partition=dirichlet", "federation.alpha=0.3")
    shutil.copy(folder / "plots/partition.png", out)


def draw_study(home: Path, out: Path) -> None:
    (home / "study.toml").write_text(STUDY)
    cyber0(home, "study", "study.toml", "--out", "study")
    shutil.copy(home / "study/plots/heatmap.png", out)


def draw_bound(home: Path, out: Path) -> None:
    cyber0(home, "theory", "--d", "7850", "--k", "64", "--m", "12", "--byzantine", "3", "--plot", str(out))


def shoot_report(home: Path, out: Path) -> None:
    names = [attacked(home, rule).name for rule in ("trimmed_mean", "mean")]
    cyber0(home, "report", *names, "--out", "compared.html")
    _shoot(home, home / "compared.html", out, bottom="#curves")


def shoot_phone(home: Path, out: Path) -> None:
    folder = attacked(home, "trimmed_mean")
    _shoot(home, folder / "report.html", out, width=390, dark=True, bottom="#suspects", top="#suspects")


def shoot_diagnosis(home: Path, out: Path) -> None:
    folder = attacked(home, "trimmed_mean")
    cyber0(home, "diagnose", str(folder))
    _shoot(home, folder / "report.html", out, top="#diagnostics", bottom="#diagnostics")


def shoot_demo(home: Path, out: Path) -> None:
    """Start the demo, try another rule, and take a picture when that run is over."""
    command = [sys.executable, "-m", "cyber0", "demo", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            line = next(line for line in demo.stdout if "the demo is at" in line)
            _shoot(home, line.split(" at ")[1].split()[0], out, prepare=_try_rules, bottom="#suspects")
        finally:
            demo.terminate()


def _try_rules(browser: Any) -> None:
    for rule in ("trimmed_mean", "mean", "krum"):
        browser.run(f"(() => {{ const box = document.getElementById('rule'); box.value = '{rule}'; "
                    "box.dispatchEvent(new Event('change')); })()")  # fmt: skip
        browser.wait(f"document.querySelector('#legend [aria-current=true]')?.textContent.startsWith("
                     f"'{rule.replace('_', ' ')},')")  # fmt: skip
        browser.wait("document.getElementById('state').textContent.includes('over')")
    browser.click("#legend .chip")
    browser.wait("document.getElementById('rule').value === 'trimmed_mean'")
    time.sleep(1.0)  # the page polls three times a second


def _shoot(
    home: Path, page: Path | str, out: Path, *, bottom: str, top: str = "body", width: int = 1180, dark: bool = False,
    prepare: Callable[[Any], None] = lambda browser: None,
) -> None:  # fmt: skip
    """Save a page from the top of one element to the bottom of another."""
    sys.path.insert(0, str(ROOT / "tests"))
    import chromium
    from PIL import Image

    if chromium.find() is None:
        raise SystemExit("no browser for a screenshot: apt-get install chromium")
    with chromium.Chromium(home / f"profile-{out.stem}") as browser:
        browser.emulate(width, dark=dark, phone=width < 500)
        browser.open(page)
        prepare(browser)
        browser.run("scrollTo(0, 0)")
        edges = [browser.run(f"document.querySelector('{one}').getBoundingClientRect().{edge}")
                 for one, edge in ((top, "top"), (bottom, "bottom"))]  # fmt: skip
        browser.picture(out)
    with Image.open(out) as whole:
        margin = 10
        box = (0, max(0, int(edges[0]) - margin), whole.width, min(whole.height, int(edges[1]) + margin))
        whole.crop(box).save(out)


def shrink(path: Path) -> None:
    """Store a picture by as few colours as it takes to be small; these have few."""
    from PIL import Image

    with Image.open(path) as picture:
        plain = picture.convert("RGB")
    for colours in (256, 128, 64, 32):
        plain.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= LARGEST_BYTES:
            return
    raise SystemExit(f"{path} has {path.stat().st_size:,} bytes; a picture has at most {LARGEST_BYTES:,}")


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    "round": draw_round,
    "rules": draw_rules,
    "partition": draw_partition,
    "study": draw_study,
    "bound": draw_bound,
    "report": shoot_report,
    "phone": shoot_phone,
    "diagnosis": shoot_diagnosis,
    "demo": shoot_demo,
}


def main() -> None:
    """Make the pictures that are named, or all."""
    names = sys.argv[1:] or list(PICTURES)
    unknown = [name for name in names if name not in PICTURES]
    if unknown:
        raise SystemExit(f"there is no picture {unknown[0]!r}; choose of {', '.join(PICTURES)}")
    with tempfile.TemporaryDirectory() as home:
        for name in names:
            out = IMAGES / f"{name}.png"
            PICTURES[name](Path(home), out)
            shrink(out)
            print(f"{out.relative_to(ROOT)}: {out.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
