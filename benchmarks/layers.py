"""How much each layer of a language model tells about the labels of a set, to choose task.layer of adapter head by.

    python benchmarks/layers.py --model MODEL --data DIR [--task trec] [--template ... --words ...] [--device cuda]

For every layer, a linear classifier is fitted with gradients to the training samples that a run learns from, and judged
by others of the training set: the test set has no say. Neighbouring layers differ by little, so many are held out.
Printed as a Markdown table.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy

from cyber0.config.schema import Config
from cyber0.federation import population
from cyber0.tasks.text.task import Text
from cyber0.tasks.text.tokens import Tokens

DECAY = 1e-4  # of the squared weights, so that there is an optimum on samples that can be separated


@torch.no_grad()
def states(task: Text, model: torch.nn.Module, tokens: Tokens) -> torch.Tensor:
    """Return the hidden states at the answers' places, samples x layers x width; the last layer's are normalised."""
    found = []
    for group in tokens.groups:
        given = {"use_cache": False} if task.causal else {"attention_mask": group.mask}
        layers = model.base_model(input_ids=group.ids, output_hidden_states=True, **given).hidden_states[1:]
        rows = torch.arange(len(group.places), device=group.places.device)
        found.append(torch.stack([layer[rows, group.places].float() for layer in layers], 1))
    result = torch.cat(found).index_select(0, tokens.back)
    return result / result.square().mean(2, keepdim=True).sqrt()


def fitted(inputs: torch.Tensor, targets: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the weights of a linear classifier of these samples."""
    weights = torch.zeros(inputs.shape[1], classes, device=inputs.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = cross_entropy(inputs @ weights, targets) + DECAY * weights.square().sum()
        result.backward()
        return result.detach()

    optimizer.step(loss)
    return weights.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name on the hub, a folder or a .gguf file")
    parser.add_argument("--data", required=True, help="a folder with the set's files")
    parser.add_argument("--task", default="trec")
    parser.add_argument("--template", default="", help="prompt; default: the task's own")
    parser.add_argument("--words", default="", help="label words; default: the task's own")
    parser.add_argument("--samples", type=int, default=512, help="to fit")
    parser.add_argument("--held-out", type=int, default=4000, help="to judge by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    config = Config().with_overrides(
        [f"task.name={arguments.task}", f"task.model={arguments.model}", f"task.data={arguments.data}",
         f"task.template={arguments.template}", f"task.label_words={arguments.words}",
         f"task.samples={arguments.samples}", f"task.validation={arguments.held_out}", f"seed={arguments.seed}"]
    )  # fmt: skip
    whole = Text(config.task).to(arguments.device)
    model = whole.model(0).to(arguments.device).eval()
    task = population.learned_from(whole, config)
    learned, held_out = (states(task, model, tokens) for tokens in (task.train_inputs, task.validation_inputs))
    targets = task._targets("validation")
    accuracies = []
    for layer in range(learned.shape[1]):
        weights = fitted(learned[:, layer], task.train_targets, task.classes)
        accuracies.append(float(((held_out[:, layer] @ weights).argmax(1) == targets).double().mean()))
    best = max(accuracies)
    print(f"| layer | accuracy on {arguments.held_out:,} held-out training samples (%) |\n|---|---|")
    for layer, accuracy in enumerate(accuracies, 1):
        mark = "**" if accuracy == best else ""
        print(f"| {layer} | {mark}{100 * accuracy:.1f}{mark} |")


if __name__ == "__main__":
    main()
