"""Labelled sentences: from a folder of TSV or JSONL files, or from the Hugging Face hub.

A folder has train and test files, and optionally dev: train.tsv or train.jsonl, gzipped or not. A TSV line has the
texts, then the label; a header line, whose last name is `label`, names the columns. The built-in sets need none, nor
does a template with one field. A JSONL line is an object with the template's fields and `label`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cyber0.config import doors
from cyber0.errors import DataError
from cyber0.tasks import SETS
from cyber0.tasks.text import prompts

LABEL = "label"
SUFFIXES = (".tsv", ".jsonl", ".tsv.gz", ".jsonl.gz", ".parquet")
SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid"), "test": ("test",)}


@dataclass(frozen=True)
class Sentences:
    """Samples as texts by field name, and the index of each one's class."""

    texts: list[dict[str, str]]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: NDArray[np.int64]) -> Sentences:
        """Return some of the samples."""
        return Sentences([self.texts[i] for i in indices.tolist()], self.labels[indices])


@dataclass(frozen=True)
class HubSet:
    """Where a built-in set is on the hub, and the names of its columns there."""

    repository: str
    columns: dict[str, str]
    """Our name of a column -> its name there."""
    labels: tuple[str, ...] = ()
    """Names of numeric labels; a label that has none (-1) means an unlabelled sample, left out."""


HUB = {
    "sst2": HubSet("SetFit/sst2", {"text": "text", LABEL: "label"}),
    "snli": HubSet("stanfordnlp/snli", {LABEL: "label"}, ("entailment", "neutral", "contradiction")),
    "trec": HubSet("SetFit/TREC-QC", {"text": "text", LABEL: "label_coarse_original"}),
}


def columns_of(name: str) -> list[str] | None:
    """Return the text columns of a built-in set's TSV files, whatever the template."""
    return prompts.Template(prompts.PROMPTS[name].masked).fields if name in prompts.PROMPTS else None


def read_folder(
    folder: Path, fields: Sequence[str], classes: Sequence[str], columns: Sequence[str] | None = None, *,
    evaluated: bool = True,
) -> dict[str, Sentences]:  # fmt: skip
    """Return the splits that a folder holds: train, and test or dev; if it is never evaluated, train alone."""
    if not folder.is_dir():
        raise DataError(f"task.data = {str(folder)!r} is not a folder")
    paths = _files_in(folder, SPLITS if evaluated else ("train",))
    found = {split: read_file(path, fields, classes, columns=columns) for split, path in paths.items()}
    if "train" not in found or (evaluated and len(found) < 2):
        wanted, none = ("the files train and test (or dev)", "none of them") if evaluated else ("a file train", "none")
        raise DataError(
            f"{folder} must hold {wanted}, as .tsv or .jsonl, gzipped or not; it has {', '.join(found) or none}"
        )
    return found


def read_other(
    path: Path, fields: Sequence[str], classes: Sequence[str], columns: Sequence[str] | None = None
) -> dict[str, Sentences]:
    """Return samples to evaluate on: those of a file, as the test set, or a folder's dev and test sets."""
    paths = {"test": path} if path.is_file() else _files_in(path, SETS)
    if not path.exists() or not paths:
        what = f"{path} has no file test or dev, as .tsv or .jsonl" if path.is_dir() else f"there is no {path}"
        raise DataError(f"{what}; give a file of labelled sentences (.tsv or .jsonl, gzipped or not), or a folder with "
                        "the files test or dev")  # fmt: skip
    return {split: read_file(file, fields, classes, columns=columns) for split, file in paths.items()}


def read_unlabelled(path: Path, fields: Sequence[str]) -> list[dict[str, str]]:
    """Return the texts of a file without labels: one sample a line, as plain text, TSV or JSONL.

    Several texts of a sample are separated by tabs, in the order of the fields. A label in the last column of a .tsv
    file, or in a JSONL line, is ignored.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as text: {error}") from None
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if kind == "tsv" and lines and lines[0][1].split("\t")[-1].strip() == LABEL:
        lines = lines[1:]
    texts = [_texts(line, fields, kind, f"{path}, line {place}") for place, line in lines]
    if not texts:
        raise DataError(f"{path} holds no line of text")
    return texts


def texts_of(line: str, fields: Sequence[str]) -> dict[str, str]:
    """Return the texts of one sample, separated by tabs if there are several."""
    return _texts(line, fields, "", f"{line!r}")


def _texts(line: str, fields: Sequence[str], kind: str, where: str) -> dict[str, str]:
    if kind == "jsonl":
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON: {error.msg}, column {error.colno}") from None
        missing = [name for name in fields if not isinstance(row, dict) or not isinstance(row.get(name), str)]
        if missing:
            raise DataError(f"{where} has no text {missing[0]!r}; the template needs {', '.join(fields)}")
        return {name: row[name].strip() for name in fields}
    cells = [line] if len(fields) == 1 and kind != "tsv" else line.split("\t")
    if len(cells) not in (len(fields), len(fields) + (kind == "tsv")):
        raise DataError(f"{where} has {len(cells)} texts separated by tabs where the template needs {len(fields)}: "
                        f"{', '.join(fields)}")  # fmt: skip
    return {name: cell.strip() for name, cell in zip(fields, cells, strict=False)}


def _files_in(folder: Path, splits: Iterable[str]) -> dict[str, Path]:
    """Return the file of each split that a folder has."""
    found = {}
    for split in splits:
        paths = [folder / f"{name}{suffix}" for name in SPLITS[split] for suffix in SUFFIXES]
        path = next((path for path in paths if path.is_file()), None)
        if path is not None:
            found[split] = path
    return found


def read_file(
    path: Path, fields: Sequence[str], classes: Sequence[str], hub: HubSet | None = None,
    columns: Sequence[str] | None = None,
) -> Sentences:  # fmt: skip
    """Return the samples of one file."""
    try:
        rows = list(_rows(path, fields, columns))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    number = {name: i for i, name in enumerate(classes)}
    texts, labels = [], []
    for place, row in rows:
        label = _label(row, hub)
        if label is None:
            continue
        names = hub.columns if hub is not None else {}
        missing = [field for field in fields if not isinstance(row.get(names.get(field, field)), str)]
        if missing or label not in number:
            unknown = f"has the label {label!r}, which has no word" if label else f"has no {LABEL!r}"
            what = f"has no text {missing[0]!r}" if missing else unknown
            raise DataError(
                f"{path}, line {place}: the sample {what}; the template needs {', '.join(fields)}, and the labels are "
                f"{', '.join(classes)}"
            )
        texts.append({field: row[names.get(field, field)].strip() for field in fields})
        labels.append(number[label])
    if not texts:
        raise DataError(f"{path} holds no labelled sample")
    return Sentences(texts, np.array(labels, dtype=np.int64))


def _label(row: dict[str, Any], hub: HubSet | None) -> str | None:
    """Return a sample's label as text; None for an unlabelled one from the hub."""
    label = row.get(LABEL if hub is None else hub.columns[LABEL])
    if hub is not None and hub.labels:
        return hub.labels[label] if isinstance(label, int) and 0 <= label < len(hub.labels) else None
    return "" if label is None else str(label).strip()


def _rows(path: Path, fields: Sequence[str], columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line and what it holds by column."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet(path), 1)
        return
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if ".jsonl" in path.name:
        for place, line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {place} is not JSON: {error.msg}, column {error.colno}") from None
            yield place, row if isinstance(row, dict) else {}
        return
    names, lines = _named(path, lines, fields, columns)
    for place, line in lines:
        cells = line.split("\t")
        if len(cells) != len(names):
            raise DataError(
                f"{path}, line {place}: {len(cells)} columns where {len(names)} ({', '.join(names)}) are expected"
            )
        yield place, dict(zip(names, cells, strict=True))


def _named(
    path: Path, lines: list[tuple[int, str]], fields: Sequence[str], columns: Sequence[str] | None
) -> tuple[list[str], list[tuple[int, str]]]:
    """Return the names of a TSV file's columns, and its lines without the header."""
    first = [cell.strip() for cell in lines[0][1].split("\t")] if lines else []
    if first and first[-1] == LABEL:
        lines = lines[1:]
        missing = [field for field in fields if field not in first]
        if not missing:
            return first, lines
        if columns is None or not set(fields) <= set(columns):
            raise DataError(
                f"{path} has no column {missing[0]!r}, which task.template names; its columns are "
                f"{', '.join(first[:-1]) or 'none'} and {LABEL}: correct the template, or the file's first line"
            )
    if columns is None and len(fields) > 1:
        raise DataError(
            f"{path} does not name its columns: start it with a line of their names, {', '.join(fields)} and "
            f"{LABEL} last, separated by tabs"
        )
    return [*(columns or fields), LABEL], lines


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path.name} is a parquet file, which pyarrow reads: pip install pyarrow, or set task.data to a folder of "
            "TSV or JSONL files"
        ) from None
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def fetch(name: str, force: bool = False) -> str:
    """Make sure that a built-in set is in the hub's cache, and describe it."""
    prompt = prompts.PROMPTS[name]
    found = read_hub(name, prompts.Template(prompt.masked).fields, list(prompt.words), force)
    sizes = ", ".join(f"{split} {len(samples):,}" for split, samples in found.items())
    return f"{sizes} samples, from {HUB[name].repository} on the Hugging Face hub, in its cache"


def read_hub(name: str, fields: Sequence[str], classes: Sequence[str], force: bool = False) -> dict[str, Sentences]:
    """Return a built-in set's splits, downloaded once into the hub's own cache."""
    hub = HUB[name]
    try:
        paths = _in_cache(name, hub.repository) if doors.is_offline(doors.DATA) else _downloaded(hub.repository, force)
    except DataError:
        raise
    except Exception as error:  # the hub's client raises errors of many libraries
        raise DataError(
            f"{name} could not be fetched from the Hugging Face hub ({hub.repository}): {_first_line(error)}\n"
            f"Set task.data to a folder that holds train.tsv and {'dev.tsv' if name == 'sst2' else 'test.tsv'} (or "
            f".jsonl, gzipped or not): lines of {', '.join(fields)} and the label ({', '.join(classes)}), "
            "separated by tabs"
        ) from error
    found = {split: read_file(path, fields, classes, hub) for split, path in paths.items()}
    if "train" not in found or len(found) < 2:
        raise DataError(f"{hub.repository} on the hub no longer has train and test files; set task.data to a folder")
    return found


def _downloaded(repository: str, force: bool) -> dict[str, Path]:
    """Return the files of the splits; if the hub can't be reached, those in its cache."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        files: list[str] = HfApi().list_repo_files(repository, repo_type="dataset")
    except Exception:  # errors of many libraries, as above
        cached = None if force else _cached(repository)
        if cached is None:
            raise
        return _splits_in(cached)
    return {split: Path(hf_hub_download(repository, file, repo_type="dataset", force_download=force))
            for split, file in _chosen(files).items()}  # fmt: skip


def _in_cache(name: str, repository: str) -> dict[str, Path]:
    """Return the files of the splits in the hub's cache; the hub is not asked."""
    cached = _cached(repository)
    if cached is None:
        raise DataError(
            f"{name} is not on this machine, and data that only the header of a run names is not downloaded: fetch it "
            f"with `cyber0 data {name}`, or give your own samples with --data DIR"
        )
    return _splits_in(cached)


def _splits_in(folder: Path) -> dict[str, Path]:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {split: folder / file for split, file in _chosen(names).items()}


def _cached(repository: str) -> Path | None:
    """Return where a set is in the hub's cache, if it is there."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repository, repo_type="dataset", local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None


def _chosen(files: Sequence[str]) -> dict[str, str]:
    return {split: file for split in SPLITS if (file := _file_of(split, files)) is not None}


def _file_of(split: str, files: Sequence[str]) -> str | None:
    """Return the file of a split: its name begins with the split's."""
    good = [f for f in files if Path(f).name.startswith(SPLITS[split]) and f.endswith(SUFFIXES)]
    return min(good, key=len, default=None)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
