"""The gated product of a Llama's feed-forward layers, as one function that low-rank probes know.

Two matrices take the same rows, and what they give is multiplied at once; so all that a probe changes is computed in
the pass over their results that multiplies them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import handle_torch_function

from cyber0.model import low_rank_layers as layers
from cyber0.model.low_rank import HANDLERS, Use, perturbs_by_function

Tensor = torch.Tensor


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is a product with its weight and nothing else."""
    bare = type(layer) is nn.Linear and layer.bias is None and "forward" not in vars(layer)
    return bare and not (layer._forward_hooks or layer._forward_pre_hooks)


def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(x gate^T) * (x up^T)."""
    from cyber0.tasks.text import fusion_kernels

    if perturbs_by_function():
        found: Tensor = handle_torch_function(gated_product, (x, gate, up), x, gate, up)
        return found
    return fusion_kernels.silu_times(functional.linear(x, gate), functional.linear(x, up))


def _perturbed(use: Use) -> Any:
    """Handle `gated_product` of weights that have a low-rank perturbation."""
    from cyber0.tasks.text import fusion_kernels

    x, gate, up = use.args
    one, other = use.low_rank(gate), use.low_rank(up)
    if one is None or other is None or use.known(x) or not use.has_rows(x):
        return NotImplemented
    each, scaled = use.split(x), use.mode.scaled
    gate, up = (use.split(functional.linear(x, use.base(weight)), x) for weight in (gate, up))
    factors = (one.right, one.left), (other.right, other.left)
    found = fusion_kernels.perturbed_silu_times(gate, up, each, *factors, scaled)
    if found is None:
        gate, up = (layers.add_product(y, each, *pair, scaled) for y, pair in zip((gate, up), factors, strict=True))
        found = fusion_kernels.silu_times(gate, up)
    return use.join(found, x)


HANDLERS[gated_product] = _perturbed
