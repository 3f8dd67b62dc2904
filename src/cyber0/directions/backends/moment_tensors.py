"""Steps of optimizers with vectors beside w, by torch's elementwise operations: the bits of moments.py.

Each of them is one IEEE operation on every device: a product, sum or quotient of tensors, or a product or sum with a
float32 constant. What may be fused or computed by a reciprocal is not used: addcmul, lerp, alpha=, a tensor over a
number. tests/directions/test_moment_kernels.py compares these functions with the definition on the CPU.
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


def _adam(u: Tensor, vectors: Sequence[Tensor], constants: Sequence[float]) -> Tensor:
    (m, v), (keep_m, take_m, keep_v, take_v, correct_m, correct_v, lr, eps) = vectors, constants
    v.mul_(keep_v).add_((u * u).mul_(take_v))
    m.mul_(keep_m).add_(u.mul_(take_m))
    root = _root(torch.mul(v, correct_v, out=u)).add_(eps)
    return (m * correct_m).mul_(lr).div_(root)


def _hessian(u: Tensor, vectors: Sequence[Tensor], constants: Sequence[float]) -> Tensor:
    (h,), (keep, take, floor, lr) = vectors, constants
    u.div_(_root(h.clone())).clamp_(-LIMIT, LIMIT)
    h.mul_(keep).add_((u * u).add_(floor).mul_(take))
    return u.mul_(lr)


def _root(x: Tensor) -> Tensor:
    """Replace x by its square root, correctly rounded.

    torch's float32 root is that of MKL on some CPUs, which may be one bit off. In float64 such an error can't reach the
    float32 result: no root of a float32 number is that close to the middle between two of them.
    """
    return x.copy_(x.double().sqrt_())


RULES: Mapping[str, Callable[[Tensor, Sequence[Tensor], Sequence[float]], Tensor]] = {
    "momentum": _momentum,
    "adam": _adam,
    "hessian": _hessian,
}
