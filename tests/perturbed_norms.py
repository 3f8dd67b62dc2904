"""What a norm gives whose weight and bias are perturbed, in float64."""

from __future__ import annotations

from torch import Tensor

Perturbed = tuple[Tensor, Tensor]
"""A vector at w itself, and its z for each direction."""


def perturbed_norm(
    x: Tensor, weight: Perturbed, bias: Perturbed | None, distances: Tensor, eps: float, *, centred: bool
) -> Tensor:
    """Return the norm of the rows of all groups; see triton_layers.py."""
    wide, c = x.double().view(*distances.shape, -1, x.shape[-1]), distances.double()[..., None]
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    found = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    found = found * (weight[0].double() + c * weight[1].double()[:, None])[:, :, None]
    if bias is not None:
        found = found + (bias[0].double() + c * bias[1].double()[:, None])[:, :, None]
    return found.view(x.shape)
