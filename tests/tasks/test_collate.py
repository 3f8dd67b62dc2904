"""Data of other libraries as a task's samples: a torch DataLoader, and what the package datasets has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stand_ins import DataSet
from synthetic import one_thread  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import cyber0
from cyber0.errors import DataError
from cyber0.tasks.samples import Columns, to_tensors

Make = Callable[[dict[str, list[Any]]], Any]


def real(columns: dict[str, list[Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)


installed = importlib.util.find_spec("datasets") is not None
MAKERS = [DataSet, pytest.param(real, marks=pytest.mark.skipif(not installed, reason="datasets is not installed"))]
ROWS = {"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "label": [0, 1, 1]}


@pytest.mark.parametrize("make", MAKERS)
def test_columns_are_inputs_by_name_and_the_label_column_is_the_targets(make: Make) -> None:
    data = to_tensors(make({**ROWS, "ids": [[7], [8], [9]]}), "train_data()")
    assert isinstance(data.inputs, Columns) and list(data.inputs.tensors) == ["x", "ids"]
    assert data.inputs.tensors["x"].dtype == torch.float32 and data.inputs.tensors["ids"].tolist() == [[7], [8], [9]]
    assert data.targets.tolist() == [0, 1, 1] and data.targets.dtype == torch.int64
    assert to_tensors(make({"x": ROWS["x"]}), "train_data()").targets.shape == (3, 0)
    both = to_tensors(make({**ROWS, "labels": [2, 2, 2]}), "train_data()")
    assert both.targets.tolist() == [2, 2, 2], "labels are what transformers' models take"


@pytest.mark.parametrize("make", MAKERS)
def test_a_format_says_which_columns_count(make: Make) -> None:
    data = make({**ROWS, "text": ["a", "b", "c"]}).with_format("torch", columns=["x", "label"])
    found = to_tensors(data, "train_data()")
    assert isinstance(found.inputs, Columns) and list(found.inputs.tensors) == ["x"]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("columns", "message"),
    [({**ROWS, "text": ["a", "b", "c"]}, r"column 'text' holds str.*remove_columns\(\['text'\]\)"),
     ({"ids": [[1], [2, 3]], "label": [0, 1]}, r"'ids' have unlike shapes; pad them"),
     ({"label": [0, 1]}, "the columns label and no inputs"), ({"x": [], "label": []}, "holds no samples")],
)  # fmt: skip
def test_columns_that_can_not_be_tensors_are_refused_by_name(
    make: Make, columns: dict[str, list[Any]], message: str
) -> None:
    with pytest.raises(DataError, match=rf"^train_data\(\).*{message}"):
        to_tensors(make(columns), "train_data()")


def test_several_sets_and_streamed_ones_are_refused() -> None:
    with pytest.raises(DataError, match=r"several sets \('train', 'test'\); return one of them, as sets\['train'\]"):
        to_tensors({"train": DataSet(ROWS), "test": DataSet(ROWS)}, "train_data()")

    class Streamed:
        column_names = None

        def with_format(self) -> None: ...

    with pytest.raises(DataError, match="without streaming=True"):
        to_tensors(Streamed(), "train_data()")


def test_a_loader_gives_its_dataset_in_the_order_of_the_dataset() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    for loader in (DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, drop_last=True),
                   DataLoader(TensorDataset(x, y), batch_size=None)):  # fmt: skip
        data = to_tensors(loader, "train_data()")
        assert torch.equal(torch.as_tensor(data.inputs), x) and data.targets.tolist() == y.tolist()


def test_a_loader_joins_samples_by_its_own_collate_fn() -> None:
    class Sentences(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"ids": list(range(index + 1)), "labels": index % 2}

    def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(sample["ids"]) for sample in samples)
        ids = [sample["ids"] + [-1] * (width - len(sample["ids"])) for sample in samples]
        return {"ids": torch.tensor(ids), "labels": torch.tensor([sample["labels"] for sample in samples])}

    data = to_tensors(DataLoader(Sentences(), batch_size=2, collate_fn=padded), "train_data()")
    assert isinstance(data.inputs, Columns) and data.inputs.tensors["ids"].tolist() == [
        [0, -1, -1],
        [0, 1, -1],
        [0, 1, 2],
    ]
    assert data.targets.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match="can't be put into one tensor"):
        to_tensors(DataLoader(Sentences(), batch_size=2), "train_data()")


def test_a_loader_of_an_endless_kind_is_read_to_its_end() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return ((torch.full((2,), float(i)), i % 2) for i in range(4))

    data = to_tensors(DataLoader(Stream(), batch_size=2), "train_data()")
    assert torch.as_tensor(data.inputs)[:, 0].tolist() == [0, 1, 2, 3] and data.targets.tolist() == [0, 1, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_a_run_learns_the_same_from_columns_a_loader_and_tensors(make: Make, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    y = (x[:, 0] > 0).long()

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    config = {"rounds": 8, "method": {"k": 4, "lr": 0.1}, "federation": {"clients": 4, "byzantine": 1}}
    given = [make({"x": x.tolist(), "label": y.tolist()}), DataLoader(TensorDataset(x, y), shuffle=True), (x, y)]
    losses = [cyber0.run(config, task=cyber0.Task.of(Named, data), out=tmp_path / str(i))["final_loss"]
              for i, data in enumerate(given)]  # fmt: skip
    assert losses[0] == losses[1] == losses[2]
