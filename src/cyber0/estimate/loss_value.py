"""What a user's loss function returns, as a number or as a tensor; anything else is refused with what to return."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch

from cyber0.errors import ModelError


def loss_value(result: Any) -> float:
    """Return a loss as a float."""
    if result is None:
        raise ModelError("the loss function returned None: it must return the loss (is a `return` missing?)")
    if isinstance(result, (torch.Tensor, np.ndarray)):
        shape = tuple(result.shape)
        if math.prod(shape) != 1:
            raise ModelError(f"the loss must be one number, got a tensor of shape {shape}: take its mean")
        result = result.item()
    if not isinstance(result, numbers.Real):
        raise ModelError(
            f"the loss must be a number or a tensor that holds one, got {type(result).__name__}: return its .loss, say"
        )
    return float(result)


def loss_tensor(result: Any) -> torch.Tensor:
    """Return a loss that carries its derivative."""
    loss_value(result)
    if not isinstance(result, torch.Tensor):
        raise ModelError(
            f"estimator 'forward' needs the loss as a tensor, got {type(result).__name__}: return it without .item()"
        )
    return result.reshape(())
