"""Zero-order fine-tuning of one torch model on one machine.

    optimizer = ZeroOrder(model, lr=1e-6, mu=1e-3, k=4, seed=0, ledger="tuning.ledger")
    for batch in batches:
        optimizer.step(loss_fn, batch)

Each step measures the loss at w + mu z and w - mu z for k directions (with estimator="one_sided" at w + mu z, and once
at w) and moves w against them. There is no gradient and no backpropagation: memory is that of inference. With a ledger,
every step is on disk as k scalars; the same call on the same starting weights continues where the file ends.

It is a torch.optim.Optimizer with one parameter group, so torch's schedulers set its learning rate; the lr of each step
is recorded. What an ordinary optimizer keeps in its state is in the ledger here.
"""

from cyber0.zero_order.optimizer import StepResult, ZeroOrder

__all__ = ["StepResult", "ZeroOrder"]
