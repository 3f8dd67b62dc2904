"""Names that can be chosen in a config, one table for each key: name -> what it means in one line.

Rules, attacks, partitions and schedules are not here: each is registered where its factory is (see registry.py).
Devices, distributions and roundings are declared where they are implemented, and read from there at first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

Choices = Mapping[str, str]


class Declared(Mapping[str, str]):
    """Choices that a module of a higher layer declares: a table of texts, or of objects with a `text`.

    Args:
        home: The module, which is imported at first use.
        name: The table in it.
    """

    def __init__(self, home: str, name: str) -> None:
        self._home, self._name = home, name

    def __getitem__(self, name: str) -> str:
        declared = self._table()[name]
        return declared if isinstance(declared, str) else str(declared.text)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())

    def _table(self) -> Mapping[str, Any]:
        table: Mapping[str, Any] = getattr(import_module(self._home), self._name)
        return table


DEVICES: Choices = Declared("cyber0.directions.backends", "DEVICES")
DISTRIBUTIONS: Choices = Declared("cyber0.directions.definition", "DISTRIBUTIONS")
ROUNDINGS: Choices = Declared("cyber0.directions.definition", "ROUNDINGS")
TEXT_TASKS: Choices = {
    "sst2": "a language model says whether a film review is positive",
    "snli": "a language model says whether a sentence follows from another",
    "trec": "a language model says what a question asks for, of six kinds",
    "text": "a language model sorts any sentences: task.data, task.template, task.label_words",
}
TASKS: Choices = {
    "mnist": "logistic regression on handwritten digits, 7,850 weights",
    "ridge": "synthetic least squares with a penalty, 50 weights, minimiser known; accuracy is explained variance",
    "logistic": "synthetic logistic regression with a penalty, 50 weights; lambda, L_F and the minimiser are known",
    **TEXT_TASKS,
}
ADAPTERS: Choices = {
    "none": "all weights are trained",
    "lora": "low-rank changes of the attention's query and value maps alone are trained",
    "prefix": "the keys and values of a few virtual tokens in front are trained (causal models)",
    "head": "a linear classifier of the hidden states after layer task.layer is trained; the model is read only once",
    "top": "the layers after task.layer are trained; those up to it are frozen, and computed only once for each sample",
}
DATASETS: Choices = {
    "mnist": "60,000 + 10,000 handwritten digits",
    "sst2": "67,349 + 872 + 1,821 sentences of film reviews",
    "snli": "550,000 pairs of sentences",
    "trec": "5,452 + 500 questions",
}
DTYPES: Choices = {
    "float32": "4 bytes a weight",
    "float16": "2 bytes a weight, rounded stochastically",
    "bfloat16": "2 bytes a weight, rounded stochastically",
}
ATTACK_READINGS: Choices = {
    "accepted": "send the most extreme value that survives trimming",
    "literal": "send the floor(beta m)-th smallest or largest honest value",
}
ATTACK_SIGNS: Choices = {
    "honest": "of the mean of the honest reports",
    "truth": "of the honest clients' gradient over all their samples, without the noise of batches",
}
METHODS: Choices = {
    "cyber0": "k scalars a round: robust zero-order federation",
    "fedavg": "federated averaging: each client sends the sum of the gradients of its local steps, d scalars",
    "trimmed_mean": "the same, combined by the coordinate-wise trimmed mean (Yin et al.)",
    "krum": "the same, combined by Krum (Blanchard et al.)",
    "fedzo": "federated averaging of local zero-order steps, d scalars (Fang et al.)",
    "mezo": "zero-order steps on one machine that has all the samples; nothing is sent",
}
PROBING_ESTIMATORS: Choices = {  # they measure the loss at a distance mu from w; the others differentiate it at w
    "two_point": "loss at w + mu z and w - mu z",
    "one_sided": "loss at w + mu z and w, which all directions share: k + 1 evaluations instead of 2k",
}
ESTIMATORS: Choices = {
    **PROBING_ESTIMATORS,
    "gradient": "mu = 0: one gradient, k projections",
    "forward": "mu = 0: forward-mode derivative, no backpropagation",
}
LOCAL_MEMORIES: Choices = {
    "copy": "keep one extra copy of the weights",
    "regenerate": "regenerate the local steps (slower, no copy)",
}
CODECS: Choices = Declared("cyber0.protocol.codec", "CODECS")
SEED_MODES: Choices = {
    "shared": "directions follow from the seed: known to every participant from the start",
    "chained": "and from the last decision: unknown to everybody until it is made",
}
DURABILITIES: Choices = {
    "always": "fsync each record before it is announced",
    "batch": "fsync once a second",
}
