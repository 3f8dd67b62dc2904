"""What a language model computes for a batch: probes, packing, groups, and losses that are not finite."""

from __future__ import annotations

import copy
import os
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for a network
pytest.importorskip("transformers", reason="language models need the extra 'text'")
pytest.importorskip("peft", reason="adapters need the extra 'text'")

from tiny_models import ARCHITECTURES

from cyber0 import directions
from cyber0.directions import Probe
from cyber0.estimate.evaluator import Batch, Directions, Evaluator
from cyber0.federation.simulation import Simulation
from cyber0.model.vector import Parameters
from cyber0.tasks.text import tokens
from cyber0.tasks.text.task import Text
from cyber0.tasks.text.tokens import Tokens

SOME_PROBE = Probe(seed=3, round=5, index=1, coefficient=0.1)


def alone(task: Text, model: torch.nn.Module, inputs: Tokens) -> torch.Tensor:
    """Return the logits of the label words of each sample by itself, from all logits of the plain model."""
    rows = []
    for i, n in enumerate(inputs.lengths):
        logits = model(input_ids=inputs.ids[i : i + 1, :n]).logits
        rows.append(logits[0, int(inputs.places[i])].index_select(-1, task._word_tokens))
    return torch.stack(rows).float()


def moved(model: torch.nn.Module, parameters: Parameters) -> torch.nn.Module:
    """Return a deep copy whose trainable weights were set to w + c z, by the definition of a direction."""
    result = copy.deepcopy(model)
    z = directions.reference(SOME_PROBE.seed, SOME_PROBE.round, SOME_PROBE.index, 0, parameters.dimension, "gaussian")
    start = 0
    with torch.no_grad():
        for p in result.parameters():
            if p.requires_grad:
                step = torch.from_numpy(np.asarray(z[start : start + p.numel()], dtype=np.float32)).view(p.shape)
                p.copy_((p.float() + np.float32(SOME_PROBE.coefficient) * step).to(p.dtype))
                start += p.numel()
    assert start == parameters.dimension
    return result


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora", "prefix"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_a_probe_equals_a_copy_with_moved_weights_and_packing_changes_nothing(
    name: str, adapter: str, settings: Any
) -> None:
    if (name, adapter) == ("roberta", "prefix"):
        pytest.skip("prefix tuning is for causal models")
    config = settings(name, f"task.adapter={adapter}")
    task = Text(config.task)
    model = task.model(0).eval()
    parameters, inputs = Parameters(model), task.train_inputs
    truth = moved(model, parameters)
    before = parameters.digest()
    with parameters.perturbed(SOME_PROBE):
        seen = task.outputs(model, inputs)
    assert len(inputs.groups) > 1 and any(g.mask is not None for g in inputs.groups)
    expected = alone(task, truth, inputs)
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
    assert (expected - alone(task, model, inputs)).abs().max() > 1e-3  # a probe that changed nothing would not pass
    assert parameters.digest() == before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["roberta", "llama"])
@torch.no_grad()
def test_sixteen_bit_weights_are_seen_where_they_are_moved(name: str, dtype: str, settings: Any) -> None:
    task = Text(settings(name).task)
    model = task.model(0, dtype).eval()
    parameters = Parameters(model)
    with parameters.perturbed(SOME_PROBE):
        seen = task.outputs(model, task.train_inputs)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen, task.outputs(moved(model, parameters), task.train_inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "gpt2"])
@pytest.mark.parametrize("light", [True, False])
@torch.no_grad()
def test_estimates_are_each_clients_own_whatever_the_packing(name: str, light: bool, settings: Any) -> None:
    task = Text(settings(name).task)
    model = task.model(0).eval()
    evaluator = Evaluator(Parameters(model), task, mu=1e-2)
    evaluator._light = light  # both paths: all directions at once, and streamed
    counts, inputs, targets = np.array([5, 1, 7]), task.train_inputs[:13], task.train_targets[:13]
    together = evaluator.estimate(Batch(inputs, targets, counts), Directions(1, 2, 2))
    begin = 0
    for row, count in zip(together, counts, strict=True):
        part = slice(begin, begin + count)
        single = evaluator.estimate(Batch(inputs[part], targets[part], np.array([count])), Directions(1, 2, 2))
        np.testing.assert_allclose(row, single[0], rtol=1e-2, atol=1e-3)
        begin += count


def test_the_head_is_left_as_it_was_also_after_an_error(settings: Any) -> None:
    task = Text(settings("gpt2").task)
    model: Any = task.model(0)
    bad = Tokens(task.train_inputs.ids + 10**6, task.train_inputs.lengths, task.train_inputs.places)
    with pytest.raises(IndexError):
        task.outputs(model, bad)
    assert "forward" not in vars(model.lm_head) and not model.lm_head._forward_pre_hooks


def test_a_batch_above_the_local_set_means_the_whole_set(settings: Any) -> None:
    simulation = Simulation(settings("gpt2", "method.batch_size=64"))
    assert simulation.client.samples.counts(np.arange(4)).tolist() == [4, 4, 4, 4]
    assert sorted(simulation.task.labels.tolist()) == [0] * 8 + [1] * 8
    simulation.run_round()


def test_losses_that_are_not_finite_name_their_batch(settings: Any) -> None:
    task = Text(settings("gpt2").task)

    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.full((len(targets),), torch.nan)

    task.losses = broken  # type: ignore[method-assign]
    simulation = Simulation(settings("gpt2"), task=task)
    simulation.task.losses = broken
    with pytest.warns(
        RuntimeWarning, match=r"round 0: the losses of client \d+ are not finite .* training samples \d+"
    ):
        simulation.run_round()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        simulation.run_round()  # said once


def test_a_sample_whose_loss_is_not_finite_is_named_with_its_text(settings: Any) -> None:
    simulation = Simulation(settings("gpt2", "method.batch_size=100", "federation.byzantine=0"))
    task, number = simulation.task, int(simulation.shares[2][0])
    odd = simulation.samples.batch(np.array([2]), 0).inputs.ids[0]

    def outputs(model: torch.nn.Module, inputs: Tokens) -> torch.Tensor:
        logits = Text.outputs(task, model, inputs)
        width = min(len(odd), inputs.ids.shape[1])
        logits[(inputs.ids[:, :width] == odd[:width]).all(dim=1)] = torch.nan
        return logits

    task.outputs = outputs
    with pytest.warns(RuntimeWarning, match="not finite") as caught:
        simulation.run_round()
    (message,) = [str(w.message) for w in caught if "not finite" in str(w.message)]
    named = re.search(r"those of training samples (\d+); its batch is .*; sample \1 is ", message)
    assert named is not None and repr(task.shown(number)) in message
    assert task.shown(int(named[1])) == task.shown(number)  # the same words may be there twice


@pytest.mark.parametrize("name", ["roberta", "llama"])
@torch.no_grad()
def test_groups_of_rounded_sizes_give_the_same_outputs(
    name: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Text(settings(name, "task.samples=0").task)
    model, inputs = task.model(0).eval(), task.train_inputs[:13]
    plain = task.outputs(model, inputs)
    monkeypatch.setattr(Tokens, "_rounds", property(lambda self: not self.comes_again))
    monkeypatch.setattr(tokens, "SAMPLE_BITS", 1)
    rounded, again = inputs[:13], inputs[:13].coming_again()
    torch.testing.assert_close(task.outputs(model, rounded), plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(task.outputs(model, again), plain, rtol=1e-4, atol=1e-5)
    assert sum(len(g.ids) for g in again.groups) == 13 < sum(len(g.ids) for g in rounded.groups)
    assert sum(g.samples for g in rounded.groups) == 13


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_rounded_sizes_are_few_and_not_much_larger(bits: int) -> None:
    sizes = [tokens.rounded_up(n, bits) for n in range(1, 1025)]
    assert all(n <= s <= n * (1 + 2.0 ** (1 - bits)) for n, s in enumerate(sizes, 1))
    assert len(set(sizes)) <= 11 * 2 ** (bits - 1)


def test_a_batch_of_everything_is_drawn_once_and_comes_again(settings: Any) -> None:
    simulation = Simulation(settings("llama", "method.batch_size=100"))
    clients = np.arange(4)
    first, second = (simulation.client.samples.batch(clients, t) for t in range(2))
    assert first is second and first.inputs.comes_again
    part = simulation.client.samples.batch(clients[:2], 2)
    assert part is not first and part.inputs.comes_again and len(part.inputs) < len(first.inputs)
    fewer = Simulation(settings("llama", "method.batch_size=3")).client.samples
    assert not fewer.batch(clients, 0).inputs.comes_again and fewer.batch(clients, 0) is not fewer.batch(clients, 0)
