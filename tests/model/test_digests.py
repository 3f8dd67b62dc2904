"""Digests of tensors: SHA-256 of their bytes in order, however they are cut and fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cyber0.directions.backends.base import Backend
from cyber0.model import digests
from cyber0.model.digests import digest_of
from cyber0.model.vector import Parameters

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def some_parts(sizes: list[int]) -> list[torch.Tensor | bytes]:
    torch.manual_seed(len(sizes))
    parts: list[torch.Tensor | bytes] = []
    for number, size in enumerate(sizes):
        parts += [f"part {number}\n".encode(), (torch.randn(size) * 9).to(DTYPES[number % len(DTYPES)])]
    return parts


def plain(parts: list[torch.Tensor | bytes]) -> str:
    data = [p if isinstance(p, bytes) else p.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in parts]
    return hashlib.sha256(b"".join(data)).hexdigest()


@pytest.mark.parametrize("on_host", [True, False])
@given(st.lists(st.integers(0, 70), max_size=8), st.sampled_from([8, 24, 64]))
@settings(max_examples=60, deadline=None)
def test_it_is_the_sha_256_of_all_bytes_in_order(on_host: bool, sizes: list[int], piece: int) -> None:
    """Without `on_host`, pieces are copied to the two buffers as from a device."""
    parts = some_parts(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "PIECE_BYTES", piece)
        patch.setattr(digests, "on_host", lambda _: on_host)
        assert digest_of(parts) == plain(parts)


def test_a_piece_is_fetched_while_the_one_before_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next copy has begun before anything waits for the last one, and never more than two are under way."""
    events: list[str] = []

    def begin_copy(self: Backend, piece: torch.Tensor, here: torch.Tensor) -> Callable[[], None]:
        number = len([e for e in events if e.startswith("copy")])
        events.append(f"copy {number}")
        here.copy_(piece)
        return lambda: events.append(f"hash {number}")

    monkeypatch.setattr(Backend, "begin_copy", begin_copy)
    monkeypatch.setattr(digests, "PIECE_BYTES", 40)
    monkeypatch.setattr(digests, "on_host", lambda _: False)
    w = torch.arange(35, dtype=torch.float32)
    assert digest_of([w]) == plain([w])
    assert events == ["copy 0", "copy 1", "hash 0", "copy 2", "hash 1", "copy 3", "hash 2", "hash 3"]


def test_views_count_by_their_values() -> None:
    w = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert digest_of([w.t()]) == plain([w.t()])
    assert digest_of([torch.ones(1).expand(5)]) == plain([torch.ones(5)])


def test_a_model_and_the_rest_of_it_have_the_digests_that_the_format_defines() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    parameters = Parameters(model)
    assert parameters.digest() == plain([model[0].weight, model[1].weight, model[1].bias])
    rest: list[torch.Tensor | bytes] = []
    for name in ("0.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var"):
        t = model.state_dict()[name]
        rest += [f"{name} {tuple(t.shape)} {t.dtype}\n".encode(), t]
    assert parameters.rest_digest() == plain(rest)
