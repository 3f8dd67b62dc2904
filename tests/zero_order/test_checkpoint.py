"""Checkpoints of a ZeroOrder: saved beside the weights, continued without the starting weights or a replay."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import make_model, one_thread  # noqa: F401
from tuned_models import loss_of, make, sequential

from cyber0 import ZeroOrder
from cyber0.errors import LedgerError, ModelError


def stepped(count: int, **options: Any) -> tuple[torch.nn.Module, ZeroOrder]:
    model, optimizer = make(**options)
    for _ in range(count):
        optimizer.step(lambda: loss_of(model))
    return model, optimizer


def on_disk(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adaptive", "momentum", "adam", "hessian"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_continues_with_the_bits_of_no_interruption(optimizer: str, dtype: str) -> None:
    model, whole = stepped(3, optimizer=optimizer, dtype=dtype)
    saved = on_disk({"model": model.state_dict(), "checkpoint": whole.checkpoint()})
    for _ in range(3):
        whole.step(lambda: loss_of(model))
    other = make_model("mlp", dtype=dtype)
    other.load_state_dict(saved["model"])
    resumed = ZeroOrder(other, lr=0.05, mu=1e-2, k=4, seed=3, optimizer=optimizer)
    resumed.resume(saved["checkpoint"])
    assert resumed.round == 3 and resumed.lr == 0.05
    for _ in range(3):
        resumed.step(lambda: loss_of(other))
    assert resumed.parameters.digest() == whole.parameters.digest() and resumed.ledger.chain == whole.ledger.chain


def test_a_ledger_in_memory_can_be_written_to_a_file(tmp_path: Path) -> None:
    optimizer = stepped(3)[1]
    optimizer.save_ledger(tmp_path / "tuning.ledger")
    replayed = make(ledger=tmp_path / "tuning.ledger")[1]
    assert replayed.round == 3 and replayed.parameters.digest() == optimizer.parameters.digest()


def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing() -> None:
    _, optimizer = stepped(2, optimizer="adam")
    checkpoint = optimizer.checkpoint()
    fresh = make(optimizer="adam")[1]
    with pytest.raises(ModelError, match="checkpoint of step 2 belongs to other weights: first load"):
        fresh.resume(checkpoint)
    assert fresh.round == 0 and not any(v.any() for v in fresh.parameters.moments.vectors.values())
    with pytest.raises(LedgerError, match=r"other settings \(it differs in mu\)"):
        make(optimizer="adam", mu=0.5)[1].resume(checkpoint)
    with pytest.raises(LedgerError, match="holds no ledger and state"):
        fresh.resume(optimizer.state_dict())
    damaged = {**checkpoint, "ledger": checkpoint["ledger"].clone()}
    damaged["ledger"][-40] += 1
    with pytest.raises(LedgerError, match="of a checkpoint"):
        fresh.resume(damaged)


def test_a_checkpoint_of_other_frozen_weights_is_refused() -> None:
    def half_frozen(value: float) -> ZeroOrder:
        model = sequential()
        first = next(model.parameters()).requires_grad_(False)
        first.data.fill_(value)
        return ZeroOrder(model, lr=0.05)

    with pytest.raises(ModelError, match="other frozen weights or buffers: load the same"):
        half_frozen(1.0).resume(half_frozen(2.0).checkpoint())


def test_only_a_new_optimizer_without_a_file_resumes(tmp_path: Path) -> None:
    _, optimizer = stepped(1)
    checkpoint = optimizer.checkpoint()
    for other in (optimizer, make(ledger=tmp_path / "ledger")[1]):
        with pytest.raises(LedgerError, match="only a new ZeroOrder"):
            other.resume(checkpoint)
