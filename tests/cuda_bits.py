"""Bits on a CUDA device next to those of the definition."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from cyber0.directions import Probe, Step

DEVICE = "cuda"

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SOME_PROBE = Probe(2**63 + 5, 2**31, 77, 1e-3)


def bits(values: np.ndarray | Tensor) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().contiguous()
        values = values.view(torch.int32 if values.dtype == torch.float32 else torch.int16).numpy()
    return values.view(np.uint32 if values.itemsize == 4 else np.uint16)


def assert_same_bits(got: np.ndarray | Tensor, expected: np.ndarray | Tensor) -> None:
    a, b = bits(got).reshape(-1), bits(expected).reshape(-1)
    wrong = np.flatnonzero(a != b)
    assert a.shape == b.shape
    assert not len(wrong), (
        f"{len(wrong)} of {len(a)} differ, first at {wrong[0]}: got {a[wrong[0]]:#x}, expected {b[wrong[0]]:#x}"
    )


def some_step(
    round: int, k: int = 2, size: float = 1e-3, rounding: int = 0, seed: int = 2**64 - 3, bits: int = 32
) -> Step:
    c = np.float32(np.random.default_rng(round).normal(size=k) * size)
    return Step(seed, round, c, first=5, rounding=rounding, bits=bits)


# Models.


class Transformer(nn.Module):
    """A small language model: tied embedding and output, attention, layer norms, a weight used functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.position = nn.Parameter(torch.randn(12, 32) * 0.02)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 70, batch_first=True) for _ in range(3)])
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def transformers(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The same model on the CPU and on the GPU."""
    torch.manual_seed(5)
    model = Transformer().to(dtype)
    return model, copy.deepcopy(model).to(DEVICE)
