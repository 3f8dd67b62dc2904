"""How much a language model knows before it learns, by the prompt that it is asked with.

    python benchmarks/prompts.py --model MODEL --data DIR [--task sst2] [--device cuda]

A prompt is chosen on training sentences, the few that a run learns from: its test set must not have a say. Printed as
a Markdown table, the best first. Where a run begins with a lower loss it has less to learn, by fewer noisy steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from cyber0.config.schema import Config
from cyber0.errors import ConfigError
from cyber0.tasks import make, partition
from cyber0.tasks.text.model_cache import MODELS

SENTIMENT = "0=negative, 1=positive"
PROMPTS = {
    "sst2": [
        ("", ""),
        ("{text} It was {mask}", "0=bad, 1=good"),
        ("{text} All in all, the movie was {mask}", "0=bad, 1=good"),
        ("Review: {text}\nSentiment: {mask}", SENTIMENT),
        ("Movie review: {text}\nSentiment: {mask}", SENTIMENT),
        ("Text: {text}\nSentiment: {mask}", SENTIMENT),
        ("Review: {text}\nSentiment (positive or negative): {mask}", SENTIMENT),
        ("Review: {text}\nThe sentiment of this review is {mask}", SENTIMENT),
        ("Review: {text}\nIs this review positive or negative? {mask}", SENTIMENT),
        ("{text}\nThe sentiment of this sentence is {mask}", SENTIMENT),
        ("Movie review: {text}\nThe movie is {mask}", "0=bad, 1=good"),
        ("Movie review: {text}\nVerdict: {mask}", "0=bad, 1=good"),
    ],
    "trec": [
        ("", ""),
        ("Question: {text}\nThe answer is a {mask}", "DESC=description, ENTY=thing, ABBR=abbreviation, HUM=person, "
         "LOC=place, NUM=number"),
        ("Question: {text}\nAnswer type: {mask}", "DESC=description, ENTY=thing, ABBR=abbreviation, HUM=person, "
         "LOC=location, NUM=number"),
        ("Question: {text}\nCategory: {mask}", "DESC=Description, ENTY=Thing, ABBR=Letters, HUM=Person, LOC=Place, "
         "NUM=Number"),
    ],
    "snli": [
        ("", ""),
        ("{premise} Question: {hypothesis} True, false or neither? Answer: {mask}",
         "contradiction=false, entailment=true, neutral=neither"),
        ("Premise: {premise}\nHypothesis: {hypothesis}\nLabel: {mask}",
         "contradiction=contradiction, entailment=true, neutral=neutral"),
        ("{premise} Does this mean that {hypothesis:lower} Yes, no, or maybe? {mask}",
         "contradiction=No, entailment=Yes, neutral=Maybe"),
    ],
}  # fmt: skip


def measured(arguments: argparse.Namespace, template: str, words: str) -> tuple[float, float]:
    """Return the model's loss and accuracy on training sentences, before it learns."""
    config = Config().with_overrides(
        [f"task.name={arguments.task}", f"task.model={arguments.model}", f"task.data={arguments.data}",
         f"task.template={template}", f"task.label_words={words}"]
    )  # fmt: skip
    task = make(config.task).to(arguments.device)
    task = task.keep(partition.few_shot(task.labels, arguments.samples, 0))
    model = task.model(0, arguments.dtype).to(arguments.device).eval()
    with torch.no_grad():
        outputs, targets = task.outputs(model, task.train_inputs), task.train_targets
        right = (outputs.argmax(1) == targets).double().mean()
        return float(task.losses(outputs, targets).double().mean()), float(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name on the hub, a folder or a .gguf file")
    parser.add_argument("--data", required=True, type=Path, help="a folder with the set's files")
    parser.add_argument("--task", choices=PROMPTS, default="sst2")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    MODELS.enable()  # the model is loaded once
    found = []
    for template, words in PROMPTS[arguments.task]:
        try:
            loss, accuracy = measured(arguments, template, words)
        except ConfigError as error:  # a word that this model has no token for
            print(f"left out: {template!r}: {error}", flush=True)
            continue
        found.append((loss, accuracy, template or "(the task's own)", words))
        print(f"{100 * accuracy:5.1f} %  loss {loss:.3f}  {template!r} {words}", flush=True)
    print(f"\n| prompt | words | accuracy on {arguments.samples} training sentences | loss |\n|---|---|---|---|")
    for loss, accuracy, template, words in sorted(found):
        shown = template.replace("\n", "\\n")
        print(f"| `{shown}` | {words} | {100 * accuracy:.1f} % | {loss:.3f} |")


if __name__ == "__main__":
    main()
