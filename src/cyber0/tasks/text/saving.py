"""Writing a trained language model as a folder that from_pretrained loads."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

from cyber0.errors import DataError
from cyber0.tasks.text.libraries import load_transformers, quiet

MIB, GIB = 1 << 20, 1 << 30
BASE = "base"  # the folder beside an adapter that holds its base model, if that was a .gguf file

log = logging.getLogger("cyber0")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder that from_pretrained loads: the whole model, or the adapter; and the tokenizer."""
    with quiet(load_transformers()), warnings.catch_warnings():
        # PEFT looks for the base to see whether the vocabulary was changed, which it never is here.
        warnings.filterwarnings("ignore", message="Could not find a config file in")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def name_base(model: Any, name: str, folder: Path, home: Path | None = None) -> str:
    """Make an adapter name a base that PEFT can load, before it is saved; return the base's folder if one is written.

    PEFT knows names on the hub and folders, which it resolves from the working directory. So a folder is named by its
    absolute path; for a .gguf file, the dequantised model is written beside the adapter, and named by its place once
    the folder is at `home`.
    """
    path = Path(name).expanduser()
    written = ""
    if name.endswith(".gguf"):
        written, path = BASE, (home or folder) / BASE
        _save_base(model, folder / BASE, path)
    if written or path.exists():
        for settings in model.peft_config.values():
            settings.base_model_name_or_path = str(path.resolve())
    return written


def _save_base(model: Any, folder: Path, home: Path) -> None:
    """Write the model inside an adapter, without it."""
    base = model.get_base_model()
    state = {
        name.replace(".base_layer.", "."): tensor for name, tensor in base.state_dict().items() if ".lora_" not in name
    }
    size, free = sum(t.nbytes for t in {t.data_ptr(): t for t in state.values()}.values()), _free_disk(folder)
    if size > free:
        raise DataError(
            f"{home} needs {size / GIB:.1f} GiB for the dequantised base model, without which PEFT can't load the "
            f"adapter, and {free / GIB:.1f} GiB are free; choose another --out, or --out FILE.safetensors for the "
            "adapter's weights alone"
        )
    with quiet(load_transformers()):
        base.save_pretrained(folder, state_dict=state)
    log.warning("%s: the model of the .gguf file, dequantised (%s MiB), since PEFT can't load a .gguf file as the base",
                home, f"{size / MIB:,.1f}")  # fmt: skip


def _free_disk(folder: Path) -> int:
    """Return how many bytes are free where a folder will be created."""
    return shutil.disk_usage(next(parent for parent in folder.resolve().parents if parent.exists())).free
