"""Hostile bytes: 20,000 inputs into every decoder of the network. benchmarks/fuzz.py takes a million of them."""

from __future__ import annotations

import pytest
from fuzz import DECODERS, FEW, REFUSALS, feed, inputs, true_messages
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.slow
def test_no_decoder_crashes_whatever_it_is_given() -> None:
    taken = sum(bool(feed(data)) for data in inputs(FEW))
    assert FEW // 20 < taken < FEW  # it meets both what is well formed and what is not


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(name: str, data: bytes) -> None:
    try:
        DECODERS[name](data)
    except REFUSALS as error:
        assert str(error)


def test_every_true_message_is_taken_by_a_decoder() -> None:
    assert all(feed(message) for message in true_messages())
