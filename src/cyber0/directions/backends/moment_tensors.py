"""Steps of optimizers with vectors beside w, by torch's elementwise operations: the bits of moments.py.

Each of them is one IEEE operation on every device: a product, sum, root or quotient of tensors, or a product or sum
with a float32 constant. What may be fused or computed by a reciprocal is not used: addcmul, lerp, alpha=, a tensor over
a number. tests/directions/test_moment_kernels.py compares these functions with the definition on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from cyber0.directions.moments import LIMIT

Tensor = torch.Tensor


def advance(rule: str, minus_u: Tensor, vectors: Sequence[Tensor], constants: Sequence[float]) -> Tensor:
    """Advance vectors in place by u, given as 0 - u without NaNs, and return what w moves by; `minus_u` is scratch."""
    u = torch.sub(minus_u.new_zeros(()), minus_u, out=minus_u).clamp_(-LIMIT, LIMIT)
    return RULES[rule](u, vectors, constants)


def _momentum(u: Tensor, vectors: Sequence[Tensor], constants: Sequence[float]) -> Tensor:
    (m,), (keep, take) = vectors, constants
    return m.mul_(keep).add_(u.mul_(take))


RULES: Mapping[str, Callable[[Tensor, Sequence[Tensor], Sequence[float]], Tensor]] = {"momentum": _momentum}
