"""The kernels of language models compute what torch computes: their logic in numpy, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_triton
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cyber0.tasks.text import fusion

TOLERANCE = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
on_a_gpu = pytest.param(
    "cuda",
    marks=pytest.mark.cuda,
)


@pytest.fixture(scope="module", params=["cpu", on_a_gpu])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        yield request.param
        return
    with fake_triton.kernels():
        yield request.param


def drawn(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


# Gated products.


def products(device: str, dtype: torch.dtype, rank: int = 1) -> tuple[Any, ...]:
    """Return the arguments of a perturbed gate: 3 directions at 2 distances, factors in one buffer."""
    width, out, rows = 600, 530, 7  # more than a program reads at a time
    factors = drawn(device, 3, rank * 2 * (width + out) + 5).to(dtype)

    def several(begin: int, length: int) -> Tensor:
        return factors[:, begin : begin + rank * length].unflatten(1, (rank, length))

    gate, up = 2 * drawn(device, 6, rows, out).to(dtype), drawn(device, 6, out, rows).mT.to(dtype).contiguous()
    x, scaled = drawn(device, 6, rows, width).to(dtype), torch.tensor([[3e-2, -1e-2], [0.0, 0.0], [2e-2, 1e-2]])
    left = rank * (width + out)
    ends = [several(1, width), several(1 + rank * width, out), several(left, width), several(left + rank * width, out)]
    return gate, up, x, (ends[0], ends[1]), (ends[2], ends[3]), scaled.to(device)


@pytest.mark.parametrize("many", [1, 4096])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gate_has_what_perturbed_weights_add(
    device: str, dtype: torch.dtype, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cyber0.tasks.text import fusion_kernels

    monkeypatch.setattr(fusion_kernels, "MANY", many)  # rows from which on a program has more of them
    gate, up, x, gate_factors, up_factors, scaled = products(device, dtype)
    each = x.double().view(3, 2, *x.shape[1:])

    def moved(y: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        added = each @ inner.double().mT[:, None] @ outer.double()[:, None]
        return y.double().view(added.shape) + scaled.double()[..., None, None] * added

    right = functional.silu(moved(gate, *gate_factors)) * moved(up, *up_factors)
    found = fusion_kernels.perturbed_silu_times(gate, up, x, gate_factors, up_factors, scaled)
    assert found is gate and found.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), right.view(gate.shape), rtol=tolerance, atol=tolerance)


def test_a_gate_that_has_no_kernel_is_left(device: str) -> None:
    from cyber0.tasks.text.fusion_kernels import perturbed_silu_times

    gate, up, x, (inner, outer), other, scaled = products(device, torch.float32)
    before, transposed = gate.clone(), gate.mT.contiguous().mT
    assert perturbed_silu_times(*products(device, torch.float32, rank=2)) is None
    assert perturbed_silu_times(transposed, up, x, (inner, outer), other, scaled) is None
    assert perturbed_silu_times(gate, up, x, (inner.contiguous(), outer), other, scaled) is None
    assert perturbed_silu_times(gate[:0], up[:0], x[:0], (inner, outer), other, scaled) is None
    assert torch.equal(gate, before) and torch.equal(transposed, before)


# Attention.


def heads(device: str, dtype: torch.dtype, tokens: int, size: int, each: int, shared: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values, (samples, heads, tokens, size), as one product for all of them gives them."""
    drawn_at_once = drawn(device, 2, tokens, each + 2 * shared, size).to(dtype).transpose(1, 2)
    return drawn_at_once.split([each, shared, shared], 1)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_over_few_tokens_is_torchs(device: str, dtype: torch.dtype, tokens: int, size: int) -> None:
    for (each, shared), scale in (((3, 3), None), ((6, 2), 0.3)):
        q, k, v = heads(device, dtype, tokens, size, each, shared)
        assert fusion.attendable(q, k, v)
        found = fusion.attended(q, k, v, scale)
        k, v = (t.double().repeat_interleave(each // shared, 1) for t in (k, v))
        right = functional.scaled_dot_product_attention(q.double(), k, v, is_causal=True, scale=scale)
        assert found.dtype == dtype and found.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(found.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_attention_that_the_kernel_does_not_cover_is_left_to_torch() -> None:
    q, k, v = heads("cpu", torch.float16, 5, 32, 6, 2)
    assert fusion.attendable(q, k, v)
    for given in (
        (q.float(), k.float(), v.float()), (q, k.bfloat16(), v.bfloat16()), (q, k, v.bfloat16()),  # types
        (q[0], k[0], v[0]), (q, k[0], v[0]), (q[:0], k[:0], v[:0]),  # no samples
        (q[:, :, :3], k, v), (q, k[:, :, :3], v[:, :, :3]), (q, k, v[:, :, :3]),  # tokens
        (q[:, :5], k, v), (q[:1], k, v),  # heads and samples
        (q[..., :16], k[..., :16], v[..., :16]), (q, k, v[..., :16]),  # sizes
        (q.mT.contiguous().mT, k, v), heads("cpu", torch.float16, fusion.FEW_TOKENS + 1, 32, 6, 2),
    ):  # fmt: skip
        assert not fusion.attendable(*given)
