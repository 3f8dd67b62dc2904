"""The paper's algorithm, written out: what `cyber0.Simulation` does, in about 50 lines.

    python examples/round.py [ROUNDS]

Clients and federator share a seed, from which all derive the same k directions z_1 .. z_k of a round. Each client sends
k slopes of its loss, the federator sends back k scalars, and all replicas of the weights change by the same bits:

    g_i,r = (f_i(w + mu z_r) - f_i(w - mu z_r)) / 2 mu        w <- w - lr / k * (sum over r of ghat_r z_r)

The ledger is, byte for byte, the one that `cyber0.Simulation` writes for the same config.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

import cyber0
from cyber0 import aggregate, attacks
from cyber0.directions import Directions, reference
from cyber0.estimate.batches import Samples
from cyber0.estimate.evaluator import Evaluator
from cyber0.federation.agreement import make_header
from cyber0.federation.population import byzantine_clients
from cyber0.ledger import Ledger, Record
from cyber0.tasks import make, partition


def train(config: cyber0.Config, *, path: str | None = None) -> Ledger:
    """Train a model with float32 weights on clients of which some may be Byzantine; return the ledger."""
    method, federation = config.method, config.federation
    m, k, lr, mu = federation.clients, method.k, method.lr, method.mu

    # Shared by all: the model at w0, and which samples each client has. In a deployment each client has its own.
    task = make(config.task)
    parameters = cyber0.Parameters(task.model(config.seed, "float32"))
    shares = partition.iid()(task.labels, m, config.seed)
    samples = Samples(task.train_inputs, task.train_targets, shares, method.batch_size, config.seed)
    evaluator = Evaluator(parameters, task, "two_point", mu)
    byzantine = byzantine_clients(config.seed, m, federation.byzantine)
    honest, attackers = np.flatnonzero(~byzantine), np.flatnonzero(byzantine)
    rule, attack = aggregate.trimmed_mean(config.aggregation.beta), attacks.full_knowledge()

    w = parameters.vector().numpy()
    ledger = Ledger.create(path, make_header(config, parameters))
    for t in range(config.rounds):
        # The clients: k scalars each. No client writes to w, and no direction is stored.
        reports = np.zeros((m, k), np.float32)
        reports[honest] = evaluator.estimate(samples.batch(honest, t), Directions(config.seed, t, k))
        if len(attackers):  # they see every honest report, and send the worst scalars that survive the trimming
            seen = reports[honest].astype(np.float64)
            known = attacks.Knowledge(honest=seen, own=seen[:0], byzantine=len(attackers), invited=m,
                                      tolerated=aggregate.tolerated(rule.beta, m), round=t)  # fmt: skip
            reports[attackers] = attack(known)

        # The federator: a trimmed mean of every column. It needs no weights.
        decided = rule.decide(reports, m, t)
        values = decided.values.astype(np.float32)
        ledger.append(Record(t, lr, values, np.ones(m, np.bool_), decided.excluded, rounds=config.rounds))

        # Every participant: the same commit, in float32, one direction after another.
        update = np.zeros_like(w)
        for r in range(k):
            update += np.float32(lr * float(values[r]) / k) * reference(config.seed, t, r, 0, len(w), "gaussian")
        w = w - update
        parameters.set_vector(torch.from_numpy(w))

    loss, accuracy, *_ = task.evaluate(parameters.model)
    print(f"{config.rounds} rounds: accuracy {accuracy:.2%}, loss {loss:.4f}, digest {parameters.digest()[:16]}")
    return ledger


if __name__ == "__main__":
    train(cyber0.Config(rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 20))
