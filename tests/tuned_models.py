"""Models, losses and steps that the tests of ZeroOrder share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from synthetic import Blobs, make_model, one_thread, plain_two_point  # noqa: F401
from torch import nn

from cyber0 import ZeroOrder

TASK = Blobs()


def loss_of(model: nn.Module, samples: int = 64) -> torch.Tensor:
    return TASK.losses(TASK.outputs(model, TASK.train_inputs[:samples]), TASK.train_targets[:samples]).mean()


def make(kind: str = "mlp", dtype: str = "float32", **options: Any) -> tuple[nn.Module, ZeroOrder]:
    model = make_model(kind, dtype=dtype)
    return model, ZeroOrder(model, **{"lr": 0.05, "mu": 1e-2, "k": 4, "seed": 3, **options})


def steps(kind: str, count: int, **options: Any) -> str:
    model, optimizer = make(kind, **options)
    for _ in range(count):
        optimizer.step(lambda: loss_of(model))
    optimizer.close()
    return optimizer.parameters.digest()


# Uses of weights that the substitution does not meet: right slopes, or a refusal.


def in_a_thread(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: compute().detach()).result()


X = TASK.train_inputs[:64]


def cross_entropy(outputs: torch.Tensor) -> torch.Tensor:
    return TASK.losses(outputs, TASK.train_targets[:64]).mean()


def sequential() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(X.shape[1], 8), nn.Tanh(), nn.Linear(8, TASK.classes))
