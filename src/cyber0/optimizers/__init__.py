"""How w moves: an optimizer turns the decided scalars of each round into a step, from the ledger alone.

    optimizer = optimizers.make("adaptive", {"beta": 0.98})
    state = optimizer.start()
    coefficients, state = optimizer.step(state, record.lr, record.values, header.k)

The state is a few float64 numbers, a function of the records so far, so every participant has the same without a byte
more on the wire. docs/FORMAT.md defines each optimizer to the bit; a change of these bits is a new version.
"""

from cyber0.config.registry import OPTIMIZERS, import_modules
from cyber0.optimizers.base import Optimizer, State, Update, full_options, make, state_digest

import_modules(__name__, __path__)

__all__ = ["OPTIMIZERS", "Optimizer", "State", "Update", "full_options", "make", "state_digest"]
