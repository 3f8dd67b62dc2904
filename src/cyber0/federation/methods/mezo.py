"""Zero-order training on one machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cyber0.config.schema import Config, for_header
from cyber0.federation.simulation import MeasureLr, Simulation
from cyber0.ledger import Header, Ledger
from cyber0.tasks import AnyTask


class Mezo(Simulation):
    """One machine has all the samples and takes a step along k directions, measured on one batch, in every round.

    Malladi et al., "Fine-tuning language models with just forward passes", NeurIPS 2023 (MeZO; there mostly k = 1). It
    is cyber0 with a single client: the ledger is written, and nothing is sent.
    """

    methods = ("mezo",)

    def __init__(
        self,
        config: Config,
        *,
        task: AnyTask | None = None,
        ledger: Callable[[Header], Ledger] | None = None,
        reports: Path | None = None,
        measure_lr: MeasureLr | None = None,
    ) -> None:
        super().__init__(for_header(config), task=task, ledger=ledger, reports=reports, measure_lr=measure_lr)

    def traffic(self) -> tuple[int, int]:
        """Return zeros."""
        return 0, 0
