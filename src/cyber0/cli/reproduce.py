"""`cyber0 reproduce`: the paper's tables, figures and theorems."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cyber0.cli import completion, options
from cyber0.cli.output import Reply, with_json
from cyber0.errors import ConfigError, ExitCode


@with_json
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", autocompletion=completion.reproductions, help="What to reproduce; see `cyber0 list`."
        ),
    ],
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Repetitions. (default: its own)")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the files. (default: reproduce/NAME)")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A preview: one seed, few rounds.")] = False,
    set_: Annotated[
        list[str] | None,
        options.set_option(
            "Override a setting in all runs; may be repeated. With language models also in those of one data set: "
            "trec:method.lr=1e-5."
        ),
    ] = None,
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw from the finished runs; run nothing.")] = False,
    rerun: options.RerunOption = False,
    device: options.DeviceOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_DIR", help="Language model: a name on the Hugging Face hub, a folder, a .gguf file."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Language models: steps in place of the paper's 20,000; other lengths are scaled in proportion.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="SETS",
            help="Language models: the data sets, such as sst2,trec,snli. (optimizers: also mnist,ridge)",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder that contains the folders sst2, trec, snli. (default: the hub)"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Language models: parallel runs. (default: 1)")
    ] = None,
    passes: Annotated[
        float | None,
        typer.Option(metavar="N", min=1, help="optimizers: forward passes over the training samples a run."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="TASK/VARIANT", help="optimizers: what to run, as trec/adaptive*,mnist/*.")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(metavar="TASK=PERCENT", help="optimizers: count the passes to these too, as trec=92,snli=56."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, help="optimizers: stop after this time; the same command continues."),
    ] = None,
) -> Reply:
    """Reproduce a table, figure or theorem of the paper: PNG, SVG, CSV, LaTeX and a comparison.

    The same command resumes what was interrupted. Runs that several reproductions have in common run only once if these
    share the same --out.
    """
    from cyber0 import reproduce as paper
    from cyber0.kernels.memory import keep_freed_memory

    keep_freed_memory()
    sets = _listed(tasks)
    chosen = paper.names(name, sets)
    overrides = (*(set_ or ()), *([f"device={device}"] if device else []))
    for_runs = {"--set": set_, "--device": device, "--redraw": redraw, "--rerun": rerun}
    _refuse_unused(chosen, for_runs, ("runs", "text runs"))
    if redraw and rerun:
        raise ConfigError("--redraw runs nothing, and --rerun runs something again: give only one of them")
    for_text = {"--model": model, "--steps": steps, "--tasks": tasks, "--data": data, "--workers": workers}
    if not any(paper.REPRODUCTIONS[one].made_of == "text runs" for one in chosen):
        _refuse_unused(chosen, for_text, ("text runs",))
    for_search = {"--passes": passes, "--only": only, "--targets": targets, "--minutes": minutes}
    for option, value in for_search.items():
        if value is not None and "optimizers" not in chosen:
            raise ConfigError(f"{name} has no {option}, which is for `cyber0 reproduce optimizers`; remove it")
    folder = out or Path("reproduce") / name
    if not redraw:  # which finds nothing in a folder that does not exist
        folder.mkdir(parents=True, exist_ok=True)
    started, found = time.monotonic(), []
    for one in chosen:
        request = paper.Request(
            folder,
            seeds,
            quick,
            lambda line: print(line, flush=True),
            overrides,
            redraw,
            paper.TextRequest(model or "", steps, sets, data, workers or 1),
            one,
            rerun,
            paper.SearchRequest(passes, _listed(only), minutes, _listed(targets)),
        )
        try:
            comparison = paper.find(one)(request)
        except KeyboardInterrupt:
            print(f"interrupted; the same command resumes {one}", file=sys.stderr)
            sys.exit(ExitCode.INTERRUPTED)
        print(comparison.read_text(encoding="utf-8"))
        files = sorted(path.name for path in folder.glob(f"{one}.*"))
        print(f"{folder}/: {', '.join(files)}")
        found.append({"name": one, "comparison": comparison, "files": [folder / name for name in files]})
    print(f"{name}: {time.monotonic() - started:.0f} s")
    return Reply(found)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _refuse_unused(chosen: Sequence[str], given: Mapping[str, object], made_of: Sequence[str]) -> None:
    """Refuse an option that has no effect on one of the chosen reproductions."""
    from cyber0 import reproduce as paper

    for one in chosen:
        for option, value in given.items():
            if value and paper.REPRODUCTIONS[one].made_of not in made_of:
                kind = "runs" if "runs" in made_of else "runs of a language model"
                raise ConfigError(f"{one} is not made of {kind}, so {option} has no effect on it; remove {option}")
