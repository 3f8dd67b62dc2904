"""The header of a small federation."""

from __future__ import annotations

from cyber0.ledger import Header, LayoutEntry


def make_header(clients: int = 12, k: int = 4, seed: int = 0) -> Header:
    return Header(
        seed=seed,
        layout=(LayoutEntry("w", (3,), "float32", 0),),
        distribution="gaussian",
        k=k,
        local_epochs=1,
        mu=1e-3,
        estimator="two_point",
        lr=0.01,
        lr_schedule="constant",
        projection_radius=None,
        weights_digest="ab" * 32,
        rest_digest="cd" * 32,
        clients=clients,
    )
