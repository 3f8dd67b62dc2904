"""federation.expel over the network: the client is told why, comes back in vain, and the rounds go on without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from virtual_time import run
from wire import Voter, make_header, now, run_voter

from cyber0 import aggregate
from cyber0.ledger import Ledger, Reports
from cyber0.protocol.federator import Federator
from cyber0.protocol.messages import Report, encode_report
from cyber0.serve.admission import Cut
from cyber0.serve.hub import Hub
from cyber0.serve.policy import RoundPolicy

CLIENTS, K, BYZANTINE = 8, 16, 7


def hub_of(ledger: Ledger, folder: Path, events: list[tuple[str, dict[str, Any]]], rounds: int) -> Hub:
    federator = Federator(ledger, aggregate.make("reputation", 0.25), CLIENTS, lr_at=lambda t: 0.1, expel=True,
                          reports=Reports.beside(ledger, folder / "reports.bin"))  # fmt: skip
    policy = RoundPolicy(
        federator, rounds=rounds, deadline_s=30.0, log=lambda event, **fields: events.append((event, fields))
    )
    return Hub(policy, clock=now)


def answer_of(client: int) -> Callable[[int, NDArray[np.float32]], bytes]:
    def answer(round: int, _: NDArray[np.float32]) -> bytes:
        own = np.random.default_rng((1, round)).normal(size=K)
        own = own + 0.5 * np.random.default_rng((2, round, client)).normal(size=K)
        return encode_report(
            Report(client, round, np.float32(-1 if client == BYZANTINE else 1) * own.astype(np.float32))
        )

    return answer


async def take_part(hub: Hub) -> list[Cut | None]:
    hub.start()
    voters = [Voter(hub.ledger.header, client, answer_of(client)) for client in range(CLIENTS)]
    for voter in voters:
        voter.rounds = hub.rounds
    return list(await asyncio.gather(*(run_voter(hub, voter) for voter in voters)))


def test_an_expelled_client_is_told_why_and_a_restarted_federator_still_refuses_it(tmp_path: Path) -> None:
    async def work() -> None:
        events: list[tuple[str, dict[str, Any]]] = []
        path = tmp_path / "ledger.bin"
        with Ledger.create(path, make_header(CLIENTS, k=K), durability="none") as ledger:
            hub = hub_of(ledger, tmp_path, events, rounds=60)
            cuts = await take_part(hub)
            cut = cuts[BYZANTINE]
            assert cut is not None and (cut.reason, cut.status) == ("expelled", "PERMISSION_DENIED")
            assert cut.text.startswith(f"client {BYZANTINE} was expelled after round ")
            assert [other for other in cuts if other is not None] == [cut]
            assert len(ledger) == 60 and hub.state_of(BYZANTINE) == "expelled"
            ((_, logged),) = [one for one in events if one[0] == "expelled"]
            assert logged["client"] == BYZANTINE and "contradict" in logged["evidence"]
            assert not any(record.reported[BYZANTINE] for record in list(ledger)[logged["round"] + 1 :])
        with Ledger.open(path, writable=True) as ledger:
            restarted = hub_of(ledger, tmp_path, events, rounds=65)
            again = (await take_part(restarted))[BYZANTINE]
            assert again is not None and again.text == cut.text
            assert [one[1] for one in events if one[0] == "expelled"] == [logged, logged]
            assert len(ledger) == 65

    run(work())
