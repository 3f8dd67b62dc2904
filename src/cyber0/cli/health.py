"""What `cyber0 doctor` looks at: packages, devices and their kernels, data, disks. Nothing here may fail as a whole."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import cyber0

BASE = "base"
MODULES = {"grpcio": "grpc", "import-linter": "importlinter"}
"""Import names of packages that are not those of the distribution."""
SLOW = ("peft", "flwr")  # to import: whether they work is not tried
UNTRIED = ("dev", "docs")  # extras for developers, whose packages are tools
OTHERS = {"triton": "kernels on a GPU; comes with torch for CUDA", "tensorboard": "cyber0 run --tensorboard"}

Row = dict[str, Any]


def examine(tell: Callable[[str], object]) -> dict[str, Any]:
    """Return all findings; `tell` is told what is being done, for kernels take seconds to compile the first time."""
    tell("packages")
    try:
        packages = [_package(*needed) for needed in _requirements()]
        note = ""
    except Exception as error:  # no metadata, or no package to read it with
        packages, note = [], f"what cyber0 needs can't be read ({_text(error)}): install it with pip install ."
    devices = list(_devices(tell))
    tell("data and disks")
    base = [p for p in packages if BASE in p["needed_by"]]
    faults = [note] if note else []
    faults += [f"{p['name']}: {p['state']}; {p['remedy']}" for p in base if p["remedy"]]
    faults += [f"kernels on {d['device']}: {d['kernels']}" for d in devices if d["kernels"] != "ok"]
    caches = list(_caches())
    return {
        "ok": not faults,
        "faults": faults,
        "versions": {"cyber0": cyber0.__version__, "python": platform.python_version(),
                     "platform": f"{platform.system()} {platform.release()}, {platform.machine()}"},
        "packages": packages,
        "other_packages": [_other(name, use) for name, use in OTHERS.items()],
        "extras": _extras(packages),
        "devices": devices,
        "caches": caches,
        "disks": _disks(Path(cache["path"]) for cache in caches),
    }  # fmt: skip


def _requirements() -> list[tuple[str, Any, list[str]]]:
    """Return each package that cyber0 or an extra of it needs: name, versions, and by which extras (or the base)."""
    from packaging.requirements import Requirement

    found = metadata.distribution("cyber0")
    extras = [BASE, *(found.metadata.get_all("Provides-Extra") or [])]
    given = [Requirement(line) for line in found.requires or []]
    needed: dict[str, tuple[Any, list[str]]] = {}

    def add(extra: str, of: str) -> None:
        for one in given:
            marker = one.marker
            here = marker is None if of == BASE else marker is not None and marker.evaluate({"extra": of})
            if here and one.name == "cyber0":  # an extra that contains another
                for other in one.extras:
                    add(extra, other)
            elif here and extra not in needed.setdefault(one.name, (one.specifier, []))[1]:
                needed[one.name][1].append(extra)

    for extra in extras:
        add(extra, extra)
    return [(name, versions, by) for name, (versions, by) in needed.items()]


def _package(name: str, versions: Any, needed_by: list[str]) -> Row:
    """Return how a package is: its version, and what to do unless it can be used."""
    install = f"pip install '{name}{versions}'"
    row: Row = {"name": name, "needs": str(versions), "needed_by": needed_by, "version": None, "state": "missing",
                "remedy": install}  # fmt: skip
    try:
        row["version"] = metadata.version(name)
        if not versions.contains(row["version"], prereleases=True):
            return row | {"state": f"version {row['version']} is not {versions}"}
    except metadata.PackageNotFoundError:
        return row
    except Exception as error:  # damaged metadata
        return row | {"state": f"broken: {_text(error)}", "remedy": f"{install} --force-reinstall"}
    if name not in SLOW and not set(needed_by) <= set(UNTRIED):
        try:
            importlib.import_module(MODULES.get(name, name))
        except Exception as error:  # whatever a broken installation raises
            return row | {"state": f"broken: {_text(error)}", "remedy": f"{install} --force-reinstall"}
    return row | {"state": "ok", "remedy": ""}


def _other(name: str, use: str) -> Row:
    try:
        return {"name": name, "version": metadata.version(name), "for": use}
    except Exception:  # not there, or damaged
        return {"name": name, "version": None, "for": use}


def _remedy(extra: str) -> str:
    alone = " in an environment of its own" if extra == "flower" else ""  # Flower pins other versions of what we use
    return f"pip install 'cyber0[{extra}]'{alone}"


def _extras(packages: Iterable[Row]) -> list[Row]:
    """Return each extra with what is missing of it, and how to get that."""
    by_extra: dict[str, list[str]] = {}
    for package in packages:
        for extra in package["needed_by"]:
            by_extra.setdefault(extra, []).extend([package["name"]] if package["remedy"] else [])
    return [
        {"name": extra, "missing": missing, "remedy": _remedy(extra) if missing else ""}
        for extra, missing in by_extra.items()
        if extra != BASE
    ]


def _devices(tell: Callable[[str], object]) -> Iterable[Row]:
    """Yield the processor and the GPUs that torch can use, and whether their kernels give the bits they should."""
    try:
        from cyber0.directions.backends import DEVICES, backend_for

        counts = {kind: backend_for(kind).device_count() for kind in DEVICES}
    except Exception as error:  # numpy, torch or numba does not work
        yield _processor() | {"kernels": f"not usable: {_text(error)}"}
        return
    for kind, count in counts.items():
        for number in range(count):
            device = kind if kind == "cpu" else f"{kind}:{number}"
            tell(f"kernels on {device}; compiling them takes some seconds the first time")
            yield (_processor() if kind == "cpu" else _gpu(device)) | {"kernels": _kernels(device)}


def _kernels(device: str) -> str:
    try:
        from cyber0.directions.check import wrong_bits

        wrong = wrong_bits(device)
    except Exception as error:  # a driver or compiler may raise anything; the rest of the table must still be shown
        return f"not usable: {_text(error)}"
    return f"wrong bits in {', '.join(wrong)}" if wrong else "ok"


def _processor() -> Row:
    row: Row = {"device": "cpu", "name": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    try:
        from cyber0.kernels.threads import available_cores
        from cyber0.runs.environment import cpu_name

        row |= {"name": cpu_name(), "cores": available_cores()}
        row["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except Exception:  # not everywhere; the rest is enough
        row["memory_bytes"] = None
    return row


def _gpu(device: str) -> Row:
    import torch

    try:
        about = torch.get_device_module(device).get_device_properties(device)
        return {"device": device, "name": about.name, "cores": about.multi_processor_count,
                "memory_bytes": about.total_memory}  # fmt: skip
    except Exception as error:  # as a driver does that does not fit torch
        return {"device": device, "name": _text(error), "cores": None, "memory_bytes": None}


def _caches() -> Iterable[Row]:
    """Yield where data and compiled kernels are kept, and what is there."""
    from cyber0.kernels import cache

    mnist = cache.folder() / "mnist.npz"
    yield {"what": "MNIST", "path": mnist, "present": mnist.is_file(), "remedy": "cyber0 data mnist"}
    kernels = cache.folder() / "kernels"
    yield {"what": "compiled kernels", "path": kernels, "present": kernels.is_dir(), "remedy": "compiled when needed"}
    hub = _hub_cache()
    yield {"what": "Hugging Face hub", "path": hub, "present": hub.is_dir(), "remedy": "filled when needed"}
    try:
        from cyber0.tasks.text.sentences import HUB
    except Exception:  # numpy is missing, which is said elsewhere
        return
    for name, there in HUB.items():
        folder = hub / f"datasets--{there.repository.replace('/', '--')}"
        yield {"what": name, "path": folder, "present": folder.is_dir(), "remedy": f"cyber0 data {name}"}


def _hub_cache() -> Path:
    """Return the hub's cache as its client finds it."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("HF_HOME") or f"{home}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{root}/hub").expanduser()


def _disks(paths: Iterable[Path]) -> list[Row]:
    """Return the free space here and where the caches are, once for each disk."""
    rows: dict[object, Row] = {}
    for path in (Path.cwd(), *paths):
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        try:
            writable = os.access(there, os.W_OK | os.X_OK) or there.is_file()
            row = {"path": there, "free_bytes": shutil.disk_usage(there).free, "writable": writable}
            rows.setdefault((there.stat().st_dev, writable), row)
        except OSError:
            continue
    return list(rows.values())


def _text(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")
