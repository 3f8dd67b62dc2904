"""What torch expects of an optimizer, for one whose state is a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cyber0.errors import LedgerError, ModelError
from cyber0.ledger import Ledger
from cyber0.model.vector import Parameters


class LedgerOptimizer(torch.optim.Optimizer):
    """An optimizer of one parameter group without gradients; its state is the position in its ledger."""

    parameters: Parameters
    ledger: Ledger

    @property
    def round(self) -> int:
        """How many steps have been taken; the index of the next one."""
        return self.ledger.next_round

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that other code has left on the weights; this optimizer makes none."""
        for p in self.parameters.tensors:
            p.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: all trainable weights of the model are one group."""
        if self.param_groups:
            raise ModelError(
                "ZeroOrder trains all trainable weights of its model with one learning rate, without further groups: "
                "create a new ZeroOrder when what is trained changes"
            )
        self.param_groups.append({**param_group, **self.defaults})

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's position and the learning rate. The weights are not in it: save the model as well."""
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        group["params"] = list(range(len(self.param_groups[0]["params"])))
        standing = {"round": self.round, "chain": self.ledger.chain.hex(), "weights_digest": self._header_digest}
        return {"state": {}, "param_groups": [group], "ledger": standing}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the learning rate from a state at this ledger's position; any other state is refused.

        Raises:
            LedgerError: The state is of another position: only replaying the ledger leads there.
        """
        standing = state_dict.get("ledger")
        if not isinstance(standing, Mapping) or not {"round", "chain", "weights_digest"} <= set(standing):
            raise LedgerError("this is not a state of a ZeroOrder: it holds no position in a ledger")
        self._refuse_standing(**{name: standing[name] for name in ("round", "chain", "weights_digest")})
        (group,) = state_dict["param_groups"]
        self.param_groups[0].update({name: value for name, value in group.items() if name != "params"})

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ZeroOrder can't be copied or pickled: save state_dict(), the ledger and the model")

    @property
    def _header_digest(self) -> str:
        return self.ledger.header.weights_digest

    def _refuse_standing(self, round: int, chain: str, weights_digest: str) -> None:
        if (round, chain) == (self.round, self.ledger.chain.hex()):
            return
        if weights_digest != self._header_digest:
            reason = "it began with other weights"
        elif round > self.round:
            reason = "open the ledger file that has these steps: ZeroOrder(model, ledger=...) on the starting weights"
        elif self.ledger.chain_at(round).hex() == chain:
            reason = "a ledger can't be rewound: restore an older copy of its file, and start from the starting weights"
        else:
            reason = "it belongs to another ledger"
        raise LedgerError(f"the state is of step {round} and this ledger is at step {self.round}: {reason}")
