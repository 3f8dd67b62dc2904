"""A rule and an attack of your own, from a file.

    cyber0 run --set aggregation.rule=examples/own_rule.py:clipped --set aggregation.options.tau=2.0
    cyber0 run --set federation.attack=examples/own_rule.py:shift --set federation.attack_options.by=3.0

In a config file, a path is relative to the file's folder. A factory takes its options as keyword arguments and returns
a plain function of NumPy arrays.
"""

from __future__ import annotations

import numpy as np

import cyber0


@cyber0.rule
def clipped(*, tau: float = 1.0):
    """Average the reports, each shortened to at most tau times their median length."""

    def rule(matrix):  # clients x scalars, all of them finite
        lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
        longest = tau * np.median(lengths)
        return (matrix * np.minimum(1.0, longest / np.maximum(lengths, 1e-30))).mean(axis=0)

    return rule


@cyber0.attack(needs_own=False)
def shift(*, by: float = 1.0):
    """Send the honest mean, moved by this many standard deviations in the wrong direction."""

    def attack(known):  # a cyber0.attacks.Knowledge
        mean, deviation = known.honest.mean(axis=0), known.honest.std(axis=0)
        return np.tile(mean - by * np.sign(mean) * deviation, (known.byzantine, 1))

    return attack
