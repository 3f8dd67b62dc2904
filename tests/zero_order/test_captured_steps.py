"""step(loss_fn, batch) on a GPU: captured passes give the bits of plain ones, and never those of another loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cyber0 import ZeroOrder
from cyber0.zero_order import batch_loss

pytestmark = pytest.mark.cuda


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(256, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(x)[:, 0])
        return result


def made(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, ZeroOrder]:
    torch.manual_seed(1)
    model = Net().to("cuda", dtype)
    return model, ZeroOrder(model, **{"lr": 1e-5, "mu": 1e-2, "k": 2, "seed": 3, **options})


def batch(seed: int, rows: int = 6, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"x": torch.randn(rows, 9, 256).to("cuda", dtype), "y": torch.randint(0, 5, (rows,)).cuda()}


def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda b: nn.functional.cross_entropy(model(b["x"]).float(), b["y"])


def graphs(optimizer: ZeroOrder) -> int:
    return sum(len(g._captured) for g in optimizer._passes._graphs.values())


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "momentum"])
@pytest.mark.parametrize("estimator", ["two_point", "one_sided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_give_the_bits_of_uncaptured_ones(dtype: torch.dtype, estimator: str, optimizer: str) -> None:
    options = {"estimator": estimator, "optimizer": optimizer, "mu": 0.05}
    (model, one), (twin, other) = made(dtype, **options), made(dtype, **options)
    for seed, rows in enumerate((6, 6, 4, 4, 6)):
        got = one.step(loss_of(model), batch(seed, rows, dtype))
        expected = other.step(loss_of(twin), batch(seed, rows, dtype), capture=False)
        assert got.loss == expected.loss and np.array_equal(got.slopes, expected.slopes)
    assert graphs(one) == 2 and graphs(other) == 0
    assert one.parameters.digest() == other.parameters.digest()


def test_a_captured_step_gives_the_slopes_of_a_closure() -> None:
    (model, one), (twin, other) = made(), made()
    for seed in range(3):
        got, given = one.step(loss_of(model), batch(seed)), batch(seed)
        expected = other.step(lambda: loss_of(twin)(given))  # noqa: B023
        assert np.array_equal(got.slopes, expected.slopes)


def test_a_changed_batch_gives_its_own_loss() -> None:
    model, optimizer = made(lr=1e-12)
    for seed in range(4):
        given = batch(seed)
        with torch.no_grad():
            expected = loss_of(model.eval())(given).item()
        assert optimizer.step(loss_of(model), given).loss == pytest.approx(expected, rel=0.05)
    assert graphs(optimizer) == 1


def test_another_function_is_not_served_by_an_old_graph() -> None:
    model, optimizer = made(lr=1e-12)
    once = loss_of(model)
    first = [optimizer.step(once, batch(0)).loss for _ in range(2)][-1]
    assert optimizer.step(lambda b: 2 * once(b), batch(0)).loss == pytest.approx(2 * first, rel=0.1)
    for factor in (3.0, 4.0):
        got = optimizer.step(lambda b: factor * once(b), batch(0)).loss  # noqa: B023
        assert got == pytest.approx(factor * first, rel=0.1)
    assert graphs(optimizer) == 4


def test_a_model_that_reads_values_back_falls_back() -> None:
    (model, one), (twin, other) = made(), made()

    def asking(b: Any, net: nn.Module) -> Tensor:
        value = loss_of(net)(b)
        return value if value.item() > 1e9 else value + 1

    for seed in range(3):
        got, expected = one.step(lambda b: asking(b, model), batch(seed)), batch(seed)
        assert np.array_equal(got.slopes, other.step(lambda: asking(expected, twin)).slopes)  # noqa: B023
    assert graphs(one) == 0


def test_a_batch_on_the_cpu_is_given_as_it_is() -> None:
    model, optimizer = made()
    given = {name: t.cpu() for name, t in batch(0).items()}
    result = optimizer.step(lambda b: loss_of(model)({name: t.cuda() for name, t in b.items()}), given)
    assert np.isfinite(result.loss) and graphs(optimizer) == 0


def test_graphs_of_many_functions_do_not_pile_up() -> None:
    model, optimizer = made(k=1)
    once = loss_of(model)
    for count in range(2 * batch_loss.MOST_VERSIONS):
        optimizer.step(lambda b: once(b) + count, batch(0))  # noqa: B023
    assert graphs(optimizer) == 0


def test_a_small_model_is_evaluated_at_many_directions_at_once() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5)).cuda()
    optimizer = ZeroOrder(model, lr=1e-3, mu=1e-2, k=16, seed=3)
    given = {"x": torch.randn(32, 16).cuda(), "y": torch.randint(0, 5, (32,)).cuda()}
    calls: list[int] = []
    for _ in range(2):
        before = len(calls)
        optimizer.step(lambda b: (calls.append(1), loss_of(model)(b))[1], given)
    assert len(calls) == before + 1
