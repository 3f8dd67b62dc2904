"""Which weights of a language model are trained: all, its upper layers, or an adapter (LoRA, prefix) and its start."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from cyber0.config.schema import TaskConfig
from cyber0.directions import Stream, words
from cyber0.errors import ConfigError
from cyber0.tasks.text.layers import train_after
from cyber0.tasks.text.libraries import need

LORA_SCALE = 2  # alpha / rank, as in MeZO


@dataclass(frozen=True)
class Adapter:
    """Which weights are trained: "none" (all), "lora", "prefix", "top" (the layers after `layer`) or "head"."""

    kind: str = "none"
    rank: int = 8
    length: int = 5
    layer: int = 0

    @classmethod
    def of(cls, config: TaskConfig) -> Self:
        """Return what a config sets."""
        return cls(config.adapter, config.lora_rank, config.prefix_length, config.layer)


def adapted(model: Any, adapter: Adapter, seed: int, causal: bool) -> nn.Module:
    """Return the model with the adapter's weights, or its upper layers, trainable and the rest frozen."""
    if adapter.kind in ("none", "top"):
        plain: nn.Module = model
        if adapter.kind == "top":
            train_after(model, adapter.layer)
        return plain
    need("peft", f'task.adapter = "{adapter.kind}"')
    import peft

    if adapter.kind == "lora":
        known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        settings: Any = peft.LoraConfig(
            r=adapter.rank, lora_alpha=LORA_SCALE * adapter.rank, lora_dropout=0.0,
            target_modules=None if model.config.model_type in known else "all-linear",
            task_type="CAUSAL_LM" if causal else None,
        )  # fmt: skip
    elif not causal:
        raise ConfigError('task.adapter = "prefix" needs a causal model; use task.adapter = "lora" with a masked one')
    else:
        settings = peft.PrefixTuningConfig(num_virtual_tokens=adapter.length, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # PEFT's own initial weights are replaced below
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # PEFT then corrects it itself
        wrapped: nn.Module = peft.get_peft_model(model, settings)
    _draw_adapter(wrapped, adapter.kind, seed)
    return wrapped.eval()


def _draw_adapter(model: nn.Module, kind: str, seed: int) -> None:
    """Draw an adapter's initial weights from the shared stream: PEFT's own differ between machines.

    LoRA as in PEFT: A uniform within 1 / sqrt(inputs), B zero, so that the model starts unchanged. A prefix: near zero,
    where its attention is spread evenly and its values add little.
    """
    start = 0
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if kind == "lora" and "lora_B" in name:
            scale = 0.0
        elif kind == "lora":
            scale = p.shape[-1] ** -0.5
        else:
            scale = 0.1
        drawn = words(seed, Stream.INITIAL_WEIGHTS, 0, 0, start, p.numel())
        uniform = (drawn >> np.uint32(8)).astype(np.float64) * 2.0**-23 - 1.0
        with torch.no_grad():
            p.copy_(torch.from_numpy((scale * uniform).astype(np.float32)).view(p.shape))
        start += p.numel()


def base_of(model: Any) -> Any:
    """Return the model inside an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model
