"""What is measured: a model's outputs, one loss a sample, and each client's mean of them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cyber0.errors import ModelError
from cyber0.model.cuda_graphs import GraphInputs

Tensor = torch.Tensor
Matrix = NDArray[np.float64]


class Objective(Protocol):
    """Outputs of a model, and one loss a sample from them.

    `losses` may be called from several threads at once.
    """

    def outputs(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's outputs for a batch of samples."""
        ...

    def losses(self, outputs: Any, targets: Any) -> Tensor:
        """Return one loss per sample."""
        ...


@runtime_checkable
class InPieces(Protocol):
    """An objective that computes its outputs piece by piece, each from plain tensors, so that they can be captured.

    Its losses are functions of outputs and targets alone.
    """

    def in_copies(self, inputs: Any, copies: int) -> Any:
        """Return a batch of samples whose pieces suit passes in which each sample is repeated so often."""
        ...

    def pieces(self, inputs: Any) -> list[GraphInputs]:
        """Return the pieces of a batch of samples."""
        ...

    def piece_outputs(self, model: nn.Module, *piece: Any) -> Tensor:
        """Return the model's outputs for one of them."""
        ...

    def joined(self, outputs: list[Tensor], inputs: Any) -> Tensor:
        """Return the outputs for the batch from those of its pieces."""
        ...


def checked_losses(losses: Tensor, samples: int) -> Tensor:
    """Return the losses, or refuse them if there is not one for each sample."""
    if losses.shape != (samples,):
        raise ModelError(
            f"losses must be one number a sample ({samples}), got shape {tuple(losses.shape)}: use reduction='none'"
        )
    return losses


def client_means(values: Tensor, counts: NDArray[np.int64], weights: Tensor | None = None) -> Matrix:
    """Return the (clients x rows) means over each client's columns of a (rows x samples) tensor, in float64.

    Columns are multiplied by `weights` before.
    """
    if weights is not None:
        values = values * weights
    if (counts == counts[0]).all():
        sums = values.view(len(values), len(counts), int(counts[0])).sum(2, dtype=torch.float64)
    else:
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.from_numpy(counts)).to(
            values.device, non_blocking=True
        )
        sums = torch.zeros(len(values), len(counts), dtype=torch.float64, device=values.device)
        sums.index_add_(1, owner, values.to(torch.float64))
    return np.asarray(sums.cpu().numpy().T / counts[:, None], dtype=np.float64)
