"""Shortcuts through language models, taken on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import fake_triton
import pytest


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shortcuts are taken on the CPU, with the logic of their kernels in numpy."""
    from cyber0.tasks.text import fusion

    def forget() -> None:
        fusion._right.cache_clear()
        fusion._FOUND.clear()

    monkeypatch.setattr(fusion, "_wanted", lambda _: True)
    with fake_triton.kernels():
        forget()
        yield
        forget()
