"""What the participants of a run agree on: the header that a config and a model make, and whether a ledger has it."""

from __future__ import annotations

from cyber0.config import doors
from cyber0.config.paths import agreed
from cyber0.config.schema import Config
from cyber0.errors import LedgerError
from cyber0.ledger import Header, Ledger, changed_settings, without_fields
from cyber0.ledger.header import check_rounding
from cyber0.model.vector import Parameters
from cyber0.storage import CONFIG


def make_header(config: Config, parameters: Parameters, id: str = "") -> Header:
    """Return what the participants agree on before the first round; `id` tells runs of one config apart."""
    method = config.method
    check_rounding(method.rounding, parameters.layout, "method.rounding")
    return Header(
        seed=config.seed,
        layout=parameters.layout,
        distribution=method.distribution,
        rank=method.rank,
        k=method.k,
        local_epochs=method.local_epochs,
        mu=method.mu,
        estimator=method.estimator,
        lr=method.rate,
        lr_schedule=doors.short(method.lr_schedule),
        projection_radius=method.projection_radius or None,
        weights_digest=parameters.digest(),
        rest_digest=parameters.rest_digest(),
        clients=config.federation.clients,
        settings=without_fields(agreed(config)),
        codec=config.serve.codec,
        seed_mode=config.serve.seed_mode,
        rounding=method.rounding,
        optimizer=method.optimizer,
        optimizer_options=dict(method.optimizer_options),
        id=id,
    )


def different(mine: Header, recorded: Header) -> list[str]:
    """Return in what a model and its settings differ from those on record; the number of rounds and the id may.

    The place of a language model may differ as well, as long as its digests are the same.
    """
    odd = [name for name in mine.differences(recorded) if name in _MODEL_WORDS]
    free = ("rounds",) if odd else ("rounds", "task.model")
    return odd + changed_settings(mine.config, recorded.config, free=free)


_MODEL_WORDS = {"layout": "the names, shapes or types of its weights", "weights_digest": "the values it starts from",
                "rest_digest": "frozen weights or buffers"}  # fmt: skip


def check_same_run(ledger: Ledger, expected: Header) -> None:
    odd = different(expected, ledger.header)
    if ledger.header.format == 1 and expected.rounds != ledger.header.rounds:
        raise LedgerError(
            f"rounds = {expected.rounds}, and the ledger was started with {ledger.header.rounds}: a ledger of format 1 "
            "can't be lengthened. Start a new run from its model by task.weights, in another folder"
        )
    if odd and all(name in _MODEL_WORDS for name in odd):
        differs = _MODEL_WORDS["layout"] if "layout" in odd else " and ".join(_MODEL_WORDS[name] for name in odd)
        raise LedgerError(
            f"the model is not the one that the run was started with: it differs in {differs}. Restore the task and "
            "its model as they were, or start a new run in another folder"
        )
    if odd:
        settings = changed_settings(expected.config, ledger.header.config)
        remedy = f" (`cyber0 repair {ledger.repairable}` writes {CONFIG} from the ledger)" if settings else ""
        raise LedgerError(
            f"the ledger belongs to another run: it differs in {', '.join(odd)}. Settings can't change within a run: "
            f"restore them{remedy}, or start a new run in another folder"
        )
