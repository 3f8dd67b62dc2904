"""The shared randomness: z[i] is a function of (seed, round, index, coordinate i), the same bits everywhere.

`reference` is the readable definition (definition.py); backends/ has the fast kernels that give its
bits, and engine.py calls the backend of a tensor's device. This package itself needs numpy alone.
"""

from cyber0.directions.definition import DISTRIBUTIONS, Directions, Probe, Step, reference
from cyber0.directions.low_rank import LowRankLayout
from cyber0.directions.philox import Stream, permutation, philox4x32, words
from cyber0.directions.space import DirectionSpace

__all__ = [
    "DISTRIBUTIONS",
    "DirectionSpace",
    "Directions",
    "LowRankLayout",
    "Probe",
    "Step",
    "Stream",
    "permutation",
    "philox4x32",
    "reference",
    "words",
]
