"""The README.md of an exported language model: how it was trained, and how to reproduce it.

Written for somebody who has only this folder. Paths of the machine that trained are left out; only the last parts of
their names are shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cyber0.config.schema import Config
from cyber0.tasks import of_set
from cyber0.tasks.text import prompts
from cyber0.tasks.text.sentences import HUB

CARD_PACKAGES = ("cyber0", "torch", "transformers", "peft")


def model_card(
    config: Config,
    *,
    causal: bool,
    rounds: int,
    dimension: int,
    digest: str,
    base: str = "",
    summary: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a model card, YAML front matter included.

    Args:
        config: Of the run.
        causal: Whether the model predicts the next token; otherwise it fills a mask.
        rounds: After which the weights are exported.
        dimension: Number of trained weights.
        digest: Of those.
        base: The folder that holds an adapter's base model, if that was exported too.
        summary: The run's summary.json, if it is about these weights.
    """
    task = config.task
    sections = [
        _front_matter(config, causal),
        f"# {_model_name(config)}, fine-tuned on {_data_name(config)} by cyber0\n\n{_what(config, rounds, dimension)}",
        f"## Use\n\n```python\n{_usage(config, causal, base)}\n```\n\n{_prompt(config, causal)}",
        f"## Training\n\n{_table(('setting', 'value'), _settings(config, rounds))}",
    ]
    figures = _figures(summary or {})
    if figures:
        sections.append(f"## Evaluation\n\n{_table(('figure', 'value'), figures)}")
    reproduce = (
        f"The {'adapter' if task.adapts else 'model'} is its starting point plus the run's ledger of "
        "decided scalars: the same bits on every machine. With the run's folder, `RUN`, and the base model at hand:\n\n"
        f"```\ncyber0 verify RUN\ncyber0 replay RUN --round {rounds} --out FOLDER\n```\n\n"
        f"SHA-256 of the {dimension:,} trained weights: `{digest}`"
    )
    sections.append(f"## Reproduce\n\n{reproduce}")
    found = [f"{name} {found}" for name in CARD_PACKAGES if (found := _version(name))]
    sections.append(f"## Versions\n\nExported with {', '.join(found)}.")
    return "\n\n".join(sections) + "\n"


def is_hub_name(model: str) -> bool:
    """Return whether a model is named as on the hub, not by a path of this machine."""
    path = Path(model).expanduser()
    return not (path.exists() or model.endswith(".gguf") or path.is_absolute() or model.startswith((".", "~")))


def _front_matter(config: Config, causal: bool) -> str:
    adapter, adapts = config.task.adapter, config.task.adapts
    fields: dict[str, Any] = {
        "library_name": "peft" if adapts else "transformers",
        "pipeline_tag": "text-generation" if causal else "fill-mask",
        "tags": ["cyber0", "federated-learning", "zeroth-order", *([adapter] if adapts else [])],
    }
    if is_hub_name(config.task.model):
        fields["base_model"] = config.task.model
        fields["base_model_relation"] = "adapter" if adapts else "finetune"
    if not config.task.data and config.task.name in HUB:
        fields["datasets"] = [HUB[config.task.name].repository]
    # JSON is valid YAML, and quotes every name.
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---"])


def _model_name(config: Config) -> str:
    model = config.task.model
    return _line(model if is_hub_name(model) else Path(model).expanduser().name)


def _data_name(config: Config) -> str:
    task = config.task
    return _line(Path(task.data).expanduser().name if task.name == "text" and task.data else task.name)


def _what(config: Config, rounds: int, dimension: int) -> str:
    task, f = config.task, config.federation
    upper = f"The layers after number {task.layer}" if task.layer else "The upper third of the layers"
    trained = {"lora": f"A LoRA adapter of rank {task.lora_rank}", "prefix": f"A prefix of {task.prefix_length} tokens",
               "top": upper}  # fmt: skip
    what = f"{trained.get(task.adapter, 'All weights')} ({dimension:,} weights) of `{_model_name(config)}`"
    if config.method.name == "mezo":
        how = "zeroth-order optimization on one machine"
    else:
        byzantine = f", {f.byzantine} of them Byzantine" if f.byzantine else ""
        how = f"Byzantine-resilient zeroth-order optimization in a federation of {f.clients} clients{byzantine}"
    return f"{what}, trained for {rounds:,} rounds by {how}. The task is text classification by prompts."


def _usage(config: Config, causal: bool, base: str) -> str:
    kind = "CausalLM" if causal else "MaskedLM"
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'
    if not config.task.adapts:
        return (
            f"from transformers import AutoModelFor{kind}, AutoTokenizer\n\n"
            f'model = AutoModelFor{kind}.from_pretrained("FOLDER")\n{tokenizer}'
        )
    auto = "AutoPeftModelForCausalLM" if causal else "AutoPeftModel"
    lines = (
        f'from peft import {auto}\nfrom transformers import AutoTokenizer\n\nmodel = {auto}.from_pretrained("FOLDER")'
    )
    if base:
        lines += (
            "\n# After the folder was moved, where adapter_config.json no longer names the base model's place:\n"
            f'# model = PeftModel.from_pretrained(AutoModelFor{kind}.from_pretrained("FOLDER/{base}"), "FOLDER")'
        )
    return f"{lines}\n{tokenizer}"


def _prompt(config: Config, causal: bool) -> str:
    template = prompts.template(config.task.name, config.task.template, causal).text
    words = prompts.label_words(config.task.name, config.task.label_words)
    answers = ", ".join(f"`{_line(label)}`: `{_line(word)}`" for label, word in words.items())
    return (
        f"The prompt is `{_line(json.dumps(template, ensure_ascii=False)[1:-1])}`, and the answer is the most probable "
        f"of one word a label at `{{mask}}`: {answers}."
    )


def _settings(config: Config, rounds: int) -> list[tuple[str, object]]:
    t, f, m, a = config.task, config.federation, config.method, config.aggregation
    found: list[tuple[str, object]] = [
        ("task.name", t.name), ("data", _data_name(config)), ("task.samples", t.samples or "all"),
        ("task.dtype", t.dtype), ("task.adapter", t.adapter), ("rounds", rounds), ("seed", config.seed),
        ("method.name", m.name), ("method.optimizer", m.optimizer), ("method.k", m.k), ("method.mu", m.mu),
        ("method.lr", m.lr), ("method.lr_schedule", m.lr_schedule), ("method.batch_size", m.batch_size),
        ("method.local_epochs", m.local_epochs), ("method.distribution", m.distribution),
        ("method.estimator", m.estimator),
    ]  # fmt: skip
    found += [("task.layer", t.layer)] if t.adapter == "top" else []
    found += [("task.compute", t.compute)] if t.compute else []
    found += [("method.rank", m.rank)] if m.distribution == "low_rank" else []
    if m.name != "mezo":
        found += [
            ("federation.clients", f.clients), ("federation.byzantine", f.byzantine),
            ("federation.attack", f.attack if f.byzantine else "none"), ("federation.partition", f.partition),
            ("federation.participation", f.participation), ("aggregation.rule", a.rule), ("aggregation.beta", a.beta),
        ]  # fmt: skip
    return found


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, object]]:
    evaluated, names = summary.get("evaluated_on"), ("accuracy", "loss")
    found = {f"{which} {name}": summary.get(f"{which}_{name}") for which in ("dev", "test") for name in names}
    for name in names:
        found.setdefault(of_set(evaluated, name), None)
        if found[of_set(evaluated, name)] is None:
            found[of_set(evaluated, name)] = summary.get(f"final_{name}")
    found[of_set(evaluated, "accuracy before training")] = summary.get("initial_accuracy")
    return [(name, f"{value:.4f}") for name, value in found.items() if isinstance(value, int | float)]


def _table(head: tuple[str, str], rows: list[tuple[str, object]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {_line(str(value)).replace('|', chr(92) + '|')} |" for name, value in rows])


def _line(text: str) -> str:
    """Return a text that neither ends its line nor its code span."""
    return " ".join(text.replace("`", "'").split())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
