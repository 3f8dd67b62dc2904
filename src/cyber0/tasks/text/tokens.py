"""Tokenised samples on a device, and how a batch of them is cut so that little padding is computed.

Every group of a batch costs one more pass of perturbing the weights and of launching kernels, and a group is as long
as its longest sample: the cut is the one with the least cost, found exactly over the sorted lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from cyber0.directions.backends import backend_of

# What a further pass costs, in tokens that could be computed meanwhile: launches on a GPU, perturbing on a CPU.
PASS_COST, PASS_COST_ON_CPU = 2048, 128
TOKENS_PER_PASS = 1 << 16  # bounds the activations
ALIGNMENT = 8  # of padded lengths on a GPU, whose attention kernels want masks of such rows
# Sizes of groups on a GPU are rounded up to so many leading bits, so that captured CUDA graphs serve many batches.
LENGTH_BITS, SAMPLE_BITS = 2, 3


@dataclass(frozen=True)
class Group:
    """Samples that go through the model together."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    """1 where a token is real; None where all are."""
    places: torch.Tensor
    """Where each sample's answer is read."""
    samples: int
    """How many of the rows, the first ones, are samples of their own."""
    rows: torch.Tensor
    """Which of the batch they are."""


@dataclass(frozen=True)
class Tokens:
    """Samples as rows of tokens, padded on the right.

    Args:
        ids: One row a sample.
        lengths: How many tokens of each row are real. On the host: the cut is made there.
        places: Where each sample's answer is read.
        comes_again: Whether the same samples come as a batch time and again; others are cut into groups whose sizes
            differ less from batch to batch, at the price of some padding.
        copies: How often each sample is in a pass, once for each of the probes that share it. Padding is computed as
            often, so the more there are, the finer the cut.
        states: The hidden states after the model's frozen layers, (samples, tokens, width); None: all layers run.
    """

    ids: torch.Tensor
    lengths: NDArray[np.int64]
    places: torch.Tensor
    comes_again: bool = False
    copies: int = 1
    states: torch.Tensor | None = None

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], places: Sequence[int], pad: int) -> Tokens:
        """Make them from one list of tokens a sample."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        ids = torch.full((len(rows), int(lengths.max(initial=1))), pad, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        return cls(ids, lengths, torch.tensor(places, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, part: slice) -> Tokens:
        states = None if self.states is None else self.states[part]
        return Tokens(self.ids[part], self.lengths[part], self.places[part], states=states)

    def coming_again(self) -> Tokens:
        """Return the same samples, marked as a batch that is used repeatedly."""
        return replace(self, comes_again=True)

    def in_copies(self, copies: int) -> Tokens:
        """Return the same samples, to be cut for passes in which each is repeated."""
        if copies not in self._in_copies:
            self._in_copies[copies] = replace(self, copies=copies)
        return self._in_copies[copies]

    @cached_property
    def _in_copies(self) -> dict[int, Tokens]:
        """What was made so far, since the same batch may come every round and its groups are kept with it."""
        return {self.copies: self}

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def to(self, device: torch.device | str) -> Tokens:
        """Return the same on another device."""
        states = None if self.states is None else self.states.to(device)
        return Tokens(self.ids.to(device), self.lengths, self.places.to(device), states=states)

    def take(self, indices: NDArray[np.int64]) -> Tokens:
        """Return some of the samples."""
        index = torch.from_numpy(indices).to(self.device, non_blocking=True)
        states = None if self.states is None else self.states.index_select(0, index)
        places = self.places.index_select(0, index)
        return Tokens(self.ids.index_select(0, index), self.lengths[indices], places, states=states)

    @cached_property
    def groups(self) -> list[Group]:
        """The samples, by length, in groups that cost least."""
        order, groups, begin = self._order, [], 0
        cost = PASS_COST_ON_CPU if backend_of(self.device).host else PASS_COST
        lengths = self.lengths[order]
        if self._rounds:
            lengths = np.array([self._padded_length(n) for n in lengths])
        for count in cut(lengths, max(1, cost // self.copies), max(1, TOKENS_PER_PASS // self.copies)):
            groups.append(self._group(order[begin : begin + count]))
            begin += count
        return groups

    @cached_property
    def back(self) -> torch.Tensor:
        """Where in the groups, one after the other, each sample is."""
        starts = np.concatenate([[0], np.cumsum([len(g.ids) for g in self.groups])])
        counts = [g.samples for g in self.groups]
        rows = np.concatenate([start + np.arange(n) for start, n in zip(starts[:-1], counts, strict=True)])
        return torch.from_numpy(rows[np.argsort(self._order, kind="stable")]).to(self.device, non_blocking=True)

    @property
    def _rounds(self) -> bool:
        return backend_of(self.device).captures and not self.comes_again

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.lengths, kind="stable")

    def _padded_length(self, length: int) -> int:
        """Return how long a group is whose longest sample has so many tokens."""
        parts = -(-int(length) // ALIGNMENT)
        return min((rounded_up(parts, LENGTH_BITS) if self._rounds else parts) * ALIGNMENT, self.ids.shape[1])

    def _group(self, indices: NDArray[np.int64]) -> Group:
        samples = len(indices)
        if self._rounds:  # padded with the last sample, whose extra outputs are ignored
            indices = np.pad(indices, (0, rounded_up(samples, SAMPLE_BITS) - samples), mode="edge")
        lengths = self.lengths[indices]
        longest, padded = int(lengths.max()), bool((lengths != lengths.max()).any())
        if (padded and not backend_of(self.device).host) or self._rounds:
            longest = self._padded_length(longest)
            padded = bool((lengths != longest).any())
        index = torch.from_numpy(indices).to(self.device, non_blocking=True)
        ids, places = self.ids[:, :longest].index_select(0, index), self.places.index_select(0, index)
        mask = None
        if padded:
            real = torch.from_numpy(lengths).to(self.device, non_blocking=True)[:, None]
            mask = (torch.arange(longest, device=self.device) < real).to(torch.int64)
        return Group(ids, mask, places, samples, index)


def rounded_up(size: int, bits: int) -> int:
    """Return the next number of at most so many leading bits."""
    unit = 1 << max((size - 1).bit_length() - bits, 0)
    return -(-size // unit) * unit


def cut(lengths: NDArray[np.int64], pass_cost: int, most: int) -> list[int]:
    """Return how many of the samples, given by ascending length, each group takes.

    The cost of a group is samples * longest + pass_cost, and the sum is the least possible; a group of more than
    `most` tokens is cut again.
    """
    sizes, counts = np.unique(lengths, return_counts=True)
    total = np.concatenate([[0], np.cumsum(counts)])
    best, previous = np.zeros(len(sizes) + 1, dtype=np.int64), [0] * (len(sizes) + 1)
    for end in range(1, len(sizes) + 1):  # best[i]: the least cost of the i shortest sizes
        costs = best[:end] + sizes[end - 1] * (total[end] - total[:end]) + pass_cost
        previous[end] = int(costs.argmin())
        best[end] = costs[previous[end]]
    ends = [len(sizes)]
    while ends[-1]:
        ends.append(previous[ends[-1]])
    groups: list[int] = []
    for begin, end in zip(ends[:0:-1], ends[-2::-1], strict=True):
        samples, rows = int(total[end] - total[begin]), max(1, most // int(sizes[end - 1]))
        groups += _evenly(samples, -(-samples // rows))
    return groups


def _evenly(samples: int, parts: int) -> list[int]:
    return [samples * (i + 1) // parts - samples * i // parts for i in range(parts)]
