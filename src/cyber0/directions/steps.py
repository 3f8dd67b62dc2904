"""From decided scalars to a step's coefficients, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

STEPS_PER_PASS = 4096  # bounds the table of coefficients that one replaying pass carries


def coefficients(lr: float, values: Any, k: int) -> Any:
    """Return c_j = fp32(fp64(lr) * values_j / k), clamped to the finite range of float32.

    The compiled form of `definition.coefficients_for`: it keeps denormals whatever mode the user has set.
    """
    from cyber0.directions.backends import numba_kernels  # compiled on first use

    return numba_kernels.coefficients(np.float64(lr), np.ascontiguousarray(values, dtype=np.float64), np.float64(k))
