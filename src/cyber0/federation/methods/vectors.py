"""Methods whose clients send d scalars: what they have in common.

A client sends the sum of the steps that it took in a round, in units of the learning rate: for one gradient step the
gradient, for E steps (w - w_E) / lr. Rules and attacks then see values of the same scale whatever the learning rate,
and everybody moves by w <- w - lr * (what the rule made of them).

There is no ledger here: a decision is as large as the model. Progress is a checkpoint, from which the same bits
follow, since batches and directions are functions of the seed, the client and the round.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.attacks import Vector
from cyber0.config.paths import agreed
from cyber0.config.schema import Config
from cyber0.directions.definition import LARGEST
from cyber0.federation import build
from cyber0.federation.methods.checkpoint import Checkpoint, CheckpointFile
from cyber0.federation.simulation import Federation, MeasureLr
from cyber0.ledger import LastRecord, Record
from cyber0.protocol.messages import Announcement, payload_bytes
from cyber0.storage import STATE
from cyber0.tasks import AnyTask


@dataclass(frozen=True)
class Agreement:
    """What the federator needs to know."""

    seed: int
    clients: int
    scalars: int
    codec: str = "float32"  # d scalars travel as they are


class VectorFederation(Federation):
    """A federation whose clients send d scalars a round.

    The weights that are moved are float32, also where the model stores 16 bits: the model has them rounded to nearest,
    and no update is lost.
    """

    state_file = STATE

    def __init__(self, config: Config, *, task: AnyTask | None = None) -> None:
        super().__init__(config, task=task)
        self.log = LastRecord(Agreement(config.seed, config.federation.clients, self.parameters.dimension))
        self.federator = build.make_federator(self.log, config)
        self.w = self.parameters.vector()
        self._round = self._checkpointed = 0
        self._identity = (self.parameters.digest(), self.parameters.rest_digest())
        self._checkpoint: CheckpointFile | None = None
        self._found: tuple[dict[str, torch.Tensor], Checkpoint] | None = None

    @classmethod
    def create(
        cls, config: Config, folder: Path, ready: Callable[[], None], task: AnyTask | None = None,
        measure_lr: MeasureLr | None = None,
    ) -> Self:  # fmt: skip
        made = cls(config, task=task)
        ready()
        made._checkpoint = CheckpointFile(folder)
        made.checkpoint()
        return made

    @classmethod
    def resume(cls, config: Config, folder: Path, task: AnyTask | None = None) -> Self:
        checkpoint = CheckpointFile(folder)
        try:
            made = cls(config, task=task)
            found = checkpoint.read()
            made._progress().check_same_run(found[1], folder)
        except BaseException:
            checkpoint.close()
            raise
        made._checkpoint, made._found, made._checkpointed = checkpoint, found, found[1].round
        return made

    @abstractmethod
    def steps(self, clients: NDArray[np.int64], lr: float) -> torch.Tensor:
        """Return the sum of every client's local steps in this round, one row each, in units of the learning rate."""

    @property
    def round(self) -> int:
        return self._round

    @property
    def checkpointed_round(self) -> int:
        return self._checkpointed

    def catch_up(self, stop: int | None = None) -> None:
        """Run rounds up to `stop`, since nothing before the checkpoint is stored; or restore the checkpoint."""
        if stop is not None:
            while self._round < stop:
                self.run_round()
        elif self._found is not None:
            self._restore(*self._found)
            self._found = None

    def finish_commit(self) -> None:
        if self._round < self.log.next_round:
            assert self.log.last is not None
            self.apply(self.log.last)
            self._counted(self.log.last)

    def _restore(self, weights: dict[str, torch.Tensor], progress: Checkpoint) -> None:
        w = torch.cat([weights[entry.name].reshape(-1) for entry in self.parameters.layout])
        self.w = w.to(self.parameters.device)
        self.parameters.set_vector(self.w)
        self._round = self.log.next_round = progress.round
        self.decided, self._reports = progress.decided, progress.reports
        federator = self.federator
        federator.trimmed[:], federator.sent[:] = progress.trimmed, progress.sent
        self.rejected = sum(progress.rejections.values())

    def checkpoint(self) -> None:
        if self._checkpoint is None:
            return
        w, layout = self.w.cpu(), self.parameters.layout
        weights = {e.name: w[e.offset : e.offset + e.size].view(e.shape).contiguous() for e in layout}
        self._checkpoint.write(weights, self._progress())
        self._checkpointed = self._round

    def _progress(self) -> Checkpoint:
        federator = self.federator
        return Checkpoint(
            round=self._round,
            decided=self.decided,
            reports=self._reports,
            trimmed=federator.trimmed.tolist(),
            sent=federator.sent.tolist(),
            rejections=self.rejections(),
            weights_digest=self._identity[0],
            rest_digest=self._identity[1],
            config=agreed(self.config),
        )

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()

    def measure(self, announcement: Announcement, clients: NDArray[np.int64]) -> NDArray[np.float32]:
        if len(clients) == 0:
            return np.zeros((0, self.parameters.dimension), np.float32)
        self.parameters.set_vector(self.w)  # an interrupt may have left them between two rounds
        rows: NDArray[np.float32] = self.steps(clients, self.lr_at(announcement.round)).cpu().numpy()
        return rows

    def truth(self, gradient: torch.Tensor) -> Vector:
        """Return the gradient: the first of the local steps, were it taken on all samples."""
        exact: Vector = gradient.double().cpu().numpy()
        return exact

    def apply(self, record: Record) -> None:
        moved = self.w
        if record.values is not None:
            moved = moved - record.lr * torch.from_numpy(record.values).to(moved.device)
            moved.clamp_(-LARGEST, LARGEST)  # as a commit of cyber0 does
            radius = self.config.method.projection_radius
            if radius:
                moved = moved * (radius / max(float(moved.double().norm()), radius))
        self.w, self._round = moved, record.round + 1
        self.parameters.set_vector(moved)

    def traffic(self) -> tuple[int, int]:
        """As for cyber0, but the weights are sent down to those who are invited, not to everybody."""
        per_round, clients = payload_bytes(self.federator.scalars), self.config.federation.clients
        return (
            self._reports * per_round // clients,
            self.decided * self.federator.invited_count * per_round // clients,
        )
