"""The trained model written out: a safetensors file, or for a language model a folder that from_pretrained loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cyber0.config import doors
from cyber0.config.schema import Config
from cyber0.errors import ConfigError, DataError, LedgerError
from cyber0.ledger import LayoutEntry, Ledger, read_opening
from cyber0.model.tensors import save_tensors
from cyber0.model.vector import Parameters
from cyber0.runs.folder import read_summary
from cyber0.runs.replay import settings_in, task_of
from cyber0.runs.weights import fault_of_weights
from cyber0.storage import (
    CONFIG,
    LEDGER,
    MODEL,
    MODEL_FOLDER,
    STATE,
    give_normal_modes,
    replacing_folder,
)
from cyber0.tasks.starting import names_in_files

MODEL_CONFIGS = ("config.json", "adapter_config.json")  # of a folder that from_pretrained or PEFT loads
MODEL_FILES = (
    *MODEL_CONFIGS, "README.md", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece*.model", "spm*.model", "source.spm", "target.spm",
)  # fmt: skip
MODEL_FOLDERS = {".": MODEL_FILES, "base": MODEL_FILES, "additional_chat_templates": ("*.jinja",)}
"""What exporting a model may write, by folder; base is the model of a .gguf file beside its adapter."""


def model_path(config: Config, folder: Path) -> Path:
    """Return where a run writes its trained model: a file, or of a language model a folder."""
    return folder / (MODEL_FOLDER if config.task.trains_language_model else MODEL)


def write_model(config: Config, parameters: Parameters, folder: Path, rounds: int, summary: Mapping[str, Any]) -> None:
    """Write the trained model of a run into its folder, unless it is there already."""
    path = model_path(config, folder)
    if holds_model(path, parameters.layout, summary["model_digest"]):
        return
    if path.name != MODEL_FOLDER:
        save_tensors(whole_state(parameters), path)
        return
    if foreign := _foreign_file(path):
        raise DataError(f"{path} holds {foreign}, which is no file of a model and would be deleted; move it elsewhere, "
                        f"and `cyber0 run --resume {folder}` writes the model")  # fmt: skip
    _write_pretrained(config, parameters, path, rounds, summary)


def holds_model(path: Path, layout: Iterable[LayoutEntry], digest: str, model: torch.nn.Module | None = None) -> bool:
    """Return whether a trained model with that digest is at a path already: a file, or a folder.

    With `model`, a tied weight may be stored under the name of its twin.
    """
    if path.name == MODEL:
        return path.is_file() and not fault_of_weights(path, layout, digest)
    try:
        card = (path / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    tied: dict[int, list[str]] = {}
    for name, t in model.state_dict(keep_vars=True).items() if model is not None else ():
        tied.setdefault(id(t), []).append(name)
    twins = {name: names for names in tied.values() for name in names}

    def names_of(name: str) -> list[str]:
        return [one for twin in (name, *twins.get(name, ())) for one in names_in_files(twin)]

    first, *shards = sorted(path.glob("*.safetensors")) or [path / MODEL]
    return digest in card and not fault_of_weights(first, layout, digest, shards=shards, names_of=names_of)


def check_exported(folder: Path, ledger: Ledger, parameters: Parameters, digest: str) -> Path | None:
    """Return where a run has its trained model, if anywhere; refuse one that w0 and the ledger do not give.

    `digest` is that of `parameters`.
    """
    task = task_of(ledger.header, "")
    path = folder / (MODEL_FOLDER if task is not None and task.trains_language_model else MODEL)
    if not path.exists():
        return None
    if not holds_model(path, parameters.layout, digest, parameters.model):
        remedy = f"delete it, and `cyber0 run --resume {folder}` writes it again"
        raise LedgerError(f"{path} is not the model that w0 and the ledger give; {remedy}")
    return path


def export(
    ledger: Ledger, parameters: Parameters, out: Path, model: str = "", *, folder: Path | None = None,
    rounds: int | None = None,
) -> bool:  # fmt: skip
    """Write a language model as a folder that from_pretrained loads; return False for other models.

    Args:
        ledger: The run's.
        parameters: The weights to write.
        out: Where to write.
        model: Where the language model is that the run started from, if not where the ledger says.
        folder: The run's, whose evaluation the model card quotes.
        rounds: After how many rounds the weights are; None: all of the ledger's.
    """
    task = task_of(ledger.header, model)
    if task is None or doors.is_own(task.name) or not hasattr(parameters.model, "save_pretrained"):
        return False
    config = replace(settings_in(ledger.header), task=task)
    _write_pretrained(config, parameters, out, len(ledger) if rounds is None else rounds, read_summary(folder))
    return True


def _write_pretrained(
    config: Config, parameters: Parameters, out: Path, rounds: int, summary: Mapping[str, Any] | None
) -> None:
    """Write a folder that from_pretrained loads, completely or not at all."""
    from cyber0.tasks.text import task as text

    with replacing_folder(out.resolve()) as new:
        text.export(config, parameters, new, home=out.resolve(), rounds=rounds, summary=summary)
        give_normal_modes(new)  # safetensors' own is 0600


def save_weights(parameters: Parameters, path: Path) -> None:
    """Write w to a safetensors file, completely or not at all."""
    save_tensors(parameters.state(), path)


def whole_state(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return w by name, with the model's frozen weights and buffers; tied weights come once."""
    state, known = parameters.state(), {id(p) for p in parameters.tensors}
    for name, t in parameters.model.state_dict(keep_vars=True).items():
        if isinstance(t, torch.Tensor) and id(t) not in known:
            known.add(id(t))
            # A file can't hold tensors that share memory, as buffers may: they are small enough to copy.
            state[name] = t.detach() if isinstance(t, torch.nn.Parameter) else t.detach().clone()
    return state


def check_replaceable(out: Path, *, force: bool = False) -> None:
    """Refuse to overwrite anything; with `force`, only what belongs to a run or what replay does not write."""
    place, where = out.resolve(), f"--out {out}"
    if place.is_dir() and Path.cwd().is_relative_to(place):
        raise ConfigError(f"{where} is the current folder or holds it, so it can't be replaced; name a new one")
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not (place.is_dir() or place.is_file()):  # else a device would be replaced by a file
        raise ConfigError(f"{where} is neither a file nor a folder, so it can't be replaced; name a new one")
    beside = place if place.is_dir() else place.parent
    own = next((name for name in (LEDGER, STATE, CONFIG) if (beside / name).exists()), None)
    if own:
        raise ConfigError(f"{where} exists already, and {own} there shows that it belongs to a run; name another place")
    if not force:
        what = "a folder that holds files already" if place.is_dir() else "a file that is there already"
        raise ConfigError(f"{where} is {what}; name a new one, or overwrite it by --force")
    if not place.is_dir():
        return
    if not any((place / name).exists() for name in MODEL_CONFIGS):
        raise ConfigError(
            f"{where} is a folder without {' or '.join(MODEL_CONFIGS)}, so not a model that --force could replace; "
            "name a new one"
        )
    if foreign := _foreign_file(place):
        raise ConfigError(
            f"{where} holds {foreign}, which no replay has written and --force would delete; move it elsewhere, or "
            "name a new folder"
        )


def check_not_base(folder: Path, out: Path, model: str = "") -> None:
    """Refuse to write over, around or into the model that the run started from: replaying needs it."""
    try:
        with (folder / LEDGER).open("rb") as file:
            task = task_of(read_opening(file, folder / LEDGER)[0], model)
    except OSError:
        return  # `rebuild` says what is wrong
    if task is None or not task.model or not (base := Path(task.model).expanduser().resolve()).exists():
        return
    place = out.resolve()
    if place.is_relative_to(base) or base.is_relative_to(place):
        raise ConfigError(
            f"--out {out} is, holds or lies in {base}, the model that the run started from, which replaying needs; "
            "name another place"
        )


def _foreign_file(folder: Path) -> str:
    """Return the first file in a folder that exporting a model does not write; empty if there is none."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")))
    return next((name.as_posix() for name in names if not _of_a_model(name)), "")


def _of_a_model(path: Path) -> bool:
    """Return whether exporting a model writes a file or folder of that name."""
    files = MODEL_FOLDERS.get(path.parent.as_posix(), ())
    return path.as_posix() in MODEL_FOLDERS or any(path.match(name) for name in files)
