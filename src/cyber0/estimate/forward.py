"""Slopes by forward-mode differentiation: the derivative along a direction at w itself, without backpropagation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from cyber0.directions import Probe
from cyber0.errors import ModelError
from cyber0.model.vector import Parameters

Tensor = torch.Tensor


def slope_at_w(
    parameters: Parameters, compute: Callable[[], Tensor], direction: Probe
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what `compute` gives at w, and its derivative along a direction, by forward-mode differentiation."""
    from torch.autograd import forward_ad

    if not parameters.substitutable:
        raise ModelError(_without_tangents(parameters))
    with forward_ad.dual_level(), _differentiable_attention():
        with parameters.along(direction.seed, direction.round, direction.index):
            try:
                result = compute()
            except (NotImplementedError, RuntimeError) as error:
                if "forward AD" not in str(error):
                    raise
                raise ModelError(
                    f"this model has an operation without forward-mode derivative ({error}); use estimator 'two_point'"
                ) from error
        value, slope = forward_ad.unpack_dual(result)  # type: ignore[no-untyped-call]  # torch has no types for it
    return value, torch.zeros_like(value) if slope is None else slope


def _without_tangents(parameters: Parameters) -> str:
    if parameters.random:
        return (
            "this loss can't carry forward-mode tangents as far as can be seen: evaluated again at the same weights it "
            "gives other values. Likely it is random (dropout by numpy or Python's random, samples drawn in the loss): "
            "draw before the step, or use estimator 'two_point'"
        )
    return (
        "this loss can't carry forward-mode tangents: some of it is traced, scripted or compiled, or runs in a thread "
        "of its own. Compute with the plain module in the calling thread, or use estimator 'two_point'"
    )


@contextlib.contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Take attention's plain form: the fused ones have no forward-mode derivative."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
