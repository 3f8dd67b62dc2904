"""Weights from a safetensors file: a model's whole state dict, or its trainable weights alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from cyber0.config.schema import TaskConfig
from cyber0.errors import DataError, ModelError

_ADAPTER_WEIGHT = re.compile(r"(lora_(?:embedding_)?[AB])(\.weight)?$")
_NAMED_ADAPTER = re.compile(r"(lora_(?:embedding_)?[AB])\.default(\.weight)?$")
_PROMPTS = "prompt_encoder.default.embedding.weight"
FIXED = "fixed_entries"  # a model's attribute: names in its state dict that a file must have as the model has them
_SAVED = "save it with safetensors.torch.save_file(model.state_dict(), FILE)"


def place(model: nn.Module, config: TaskConfig) -> tuple[str, ...]:
    """Load the file that task.weights names, if any, into a model; return what `load_into` does."""
    if not config.weights:
        return ()
    return load_into(model, Path(config.weights), f"task.weights = {config.weights!r}")


def load_into(model: nn.Module, path: Path, where: str) -> tuple[str, ...]:
    """Copy the weights of a file into a model, one after the other.

    Returns the names of its frozen weights and buffers, if any of these changed: they are then part of the start. A
    file with some of them must have all; one with only the trainable weights leaves them unchanged. Tied tensors are
    needed only once. A LoRA or prefix adapter may be in PEFT's format.

    Args:
        model: Receives the weights.
        path: A safetensors file.
        where: What names the file, for errors.

    Raises:
        DataError: there is no such file, or it is not a safetensors file.
        ModelError: the file has other names, shapes or types than the model, which is unchanged.
    """
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    with _opened(path.expanduser(), where) as file:
        names = {_own_name(name, model): name for name in file.keys()}  # noqa: SIM118 (it is no dict)
        _check_names(names, state, trained, where)
        _check_tensors(names, state, file, where)
        _check_fixed(getattr(model, FIXED, ()), names, state, file, where)
        rest, changed = [own for own in names if id(state[own]) not in trained], False
        with torch.no_grad():
            for own, name in names.items():
                tensor = file.get_tensor(name).to(state[own].device)
                changed = changed or (own in rest and not torch.equal(state[own], tensor))
                state[own].copy_(tensor)
    return tuple(rest) if changed else ()


@contextmanager
def _opened(path: Path, where: str) -> Iterator[Any]:
    if path.is_dir():
        raise DataError(f"{where} is a folder; name a file in it, such as model.safetensors")
    if not path.is_file():
        raise DataError(f"{where}: there is no file {path}")
    try:
        file = safe_open(path, framework="pt")
    except Exception as error:  # safetensors' own error type is not public in every version
        said = " ".join(str(error).split())
        raise DataError(f"{where} can't be read as safetensors ({said}); {_SAVED}") from error
    with file:
        yield file


def names_in_files(name: str) -> tuple[str, str]:
    """Return the names that a weight may have in a file: the model's and PEFT's."""
    if name == _PROMPTS:
        return name, "prompt_embeddings"
    return name, _NAMED_ADAPTER.sub(r"\1\2", name)


def _own_name(name: str, model: nn.Module) -> str:
    """Return the model's name of a weight; PEFT omits the name of the adapter in its files."""
    if not hasattr(model, "peft_config"):
        return name
    if name == "prompt_embeddings":
        return _PROMPTS
    return _ADAPTER_WEIGHT.sub(r"\1.default\2", name)


def _check_names(names: Iterable[str], state: Mapping[str, torch.Tensor], trained: set[int], where: str) -> None:
    unknown = [name for name in names if name not in state]
    given = {id(state[name]) for name in names if name in state}
    whole = bool(given - trained)
    first = dict(reversed([(id(t), name) for name, t in state.items()]))
    missing = [name for i, name in first.items() if i not in given and (whole or i in trained)]
    faults = []
    if unknown:
        faults.append(f"has {_few(unknown)}, which the model does not have")
    if missing:
        faults.append(f"lacks {_few(missing[::-1])}")
    if faults:
        raise ModelError(f"{where} does not fit the model: the file {', and '.join(faults)}; give the whole state dict "
                         "of this model, or its trainable weights alone")  # fmt: skip


def _check_tensors(names: Mapping[str, str], state: Mapping[str, torch.Tensor], file: Any, where: str) -> None:
    first: dict[int, str] = {}
    for own, name in names.items():
        mine, tensor = state[own], file.get_tensor(name)
        twin = first.setdefault(id(mine), name)
        if mine.shape != tensor.shape:
            fault = f"{name!r} has shape {tuple(tensor.shape)} in the file and {tuple(mine.shape)} in the model"
            remedy = "give weights of this model"
        elif mine.dtype != tensor.dtype:
            fault = f"{name!r} is {_kind(tensor)} in the file and {_kind(mine)} in the model"
            remedy = "set task.dtype to the file's, or convert the file"
        elif twin != name and not torch.equal(file.get_tensor(twin), tensor):
            fault = f"{twin!r} and {name!r} are one weight of the model and differ in the file"
            remedy = "remove one of them"
        else:
            continue
        raise ModelError(f"{where} does not fit the model: {fault}; {remedy}")


def _check_fixed(
    fixed: Iterable[str], names: Mapping[str, str], state: Mapping[str, torch.Tensor], file: Any, where: str
) -> None:
    """Refuse a file that would replace what tells one model from another."""
    for own in fixed:
        if own in names and not torch.equal(file.get_tensor(names[own]).to(state[own].device), state[own]):
            raise ModelError(
                f"{where} does not fit the model: its {own!r} is of another language model; set task.model to that "
                "one, or give a file with the trainable weights alone"
            )


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
