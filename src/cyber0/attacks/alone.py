"""Attacks without collusion: each Byzantine client knows what it measured itself and what was decided, nothing else."""

from __future__ import annotations

import numpy as np

from cyber0.attacks.knowledge import Attack, Knowledge, Matrix
from cyber0.config.registry import attack
from cyber0.errors import ConfigError


@attack(strength="scale")
def xfed(scale: float = 1.0, spread: float = 1.0, window: int = 20) -> Attack:
    """Send the own scalars reversed, as long as recent decisions say that rows are: no collusion, no other knowledge.

        -scale * (M + spread * MAD) * g_i / ||g_i||

    M is the median length of the last `window` decisions, and MAD the median distance of these lengths from it. Before
    the first decision, M is the row's own length and MAD is 0.

    After Mouri, Adnan and Ridowan, "XFED: Non-collusive model poisoning attack against Byzantine-robust federated
    classifiers" (arXiv 2604.09489): median and MAD of recent changes of the model set the scale of a perturbation
    against a unit vector. We know that paper by its summary. Ours is the form for scalars: directions are new in each
    round, so of earlier decisions only the length says something, and the unit vector is the client's own row. Where
    decisions are as long as the model (federated averaging), the row's own length is used in all rounds.

    Args:
        scale: how much longer than a decision a row is.
        spread: how many times the MAD is added.
        window: over how many decisions; at most 50.
    """
    if not (scale >= 0 and spread >= 0 and window >= 1):
        raise ConfigError(
            f"scale = {scale!r}, spread = {spread!r}, window = {window!r} is impossible: use at least 0, 0 and 1"
        )

    def send(known: Knowledge) -> Matrix:
        with np.errstate(over="ignore", invalid="ignore"):  # own rows near the end of the range
            own = np.linalg.norm(known.own, axis=1)
            lengths = own
            if known.past is not None and len(known.past):
                past = np.linalg.norm(known.past[-window:], axis=1)
                middle = np.median(past)
                lengths = np.full(len(own), middle + spread * np.median(np.abs(past - middle)))
            rows: Matrix = -(scale * lengths / np.where(own > 0, own, 1.0))[:, None] * known.own
        return rows

    return send
