"""Whether every use of a weight is met is checked once, and what is not met is copied or refused."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, SOME_PROBE, TOKENS, UNMET, X, bits, set_weights
from torch import Tensor, nn

from cyber0.directions import Probe
from cyber0.errors import ModelError
from cyber0.model import blocks as blocks_module
from cyber0.model import vector as parameters
from cyber0.model.vector import Parameters

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # still in use, so still tested


# Whether all uses are met is seen once.


@pytest.mark.parametrize("name", [*ARCHITECTURES, *UNMET])
def test_models_whose_uses_are_met_keep_streaming_and_the_others_are_copied(name: str) -> None:
    torch.manual_seed(3)
    make, inputs, rtol = ARCHITECTURES.get(name, (UNMET.get(name), (X,), 1e-6))
    model = make()
    twin, p = copy.deepcopy(model), Parameters(model)
    before, state = bits(model), torch.get_rng_state()
    plain = p.substitutable
    with torch.no_grad():
        p.check_uses(lambda: model(*inputs).float().square().mean(), SOME_PROBE)
        assert p.substitutable == (plain and name not in UNMET)
        with p.perturbed(SOME_PROBE):
            got = model(*inputs)
        set_weights(twin, p.layout, [], SOME_PROBE)
        torch.testing.assert_close(got, twin.eval()(*inputs), rtol=rtol, atol=rtol)
    assert bits(model) == before and torch.equal(torch.get_rng_state(), state)


def test_seeing_whether_uses_are_met_takes_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(12)])
    p, made, largest = Parameters(model), [0], 400 * 401 * 4
    original = torch.Tensor.to

    def to(t: Tensor, *arguments: Any, **named: Any) -> Tensor:
        result = original(t, *arguments, **named)
        made[0] = max(made[0], result.untyped_storage().nbytes())
        return result

    monkeypatch.setattr(p, "copied", lambda *_: pytest.fail("a second copy was made"))
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(blocks_module, "CACHE_BYTES", largest)
    x = torch.randn(2, 400)
    with torch.no_grad():
        p.check_uses(lambda: model(x).square().mean(), SOME_PROBE)
    assert p.substitutable and 0 < made[0] <= 400 * 4  # the decoys of a layer: one number a row


def test_a_loss_that_differs_from_call_to_call_is_not_taken_for_one_that_is_not_met() -> None:
    model, noise = nn.Linear(6, 3), np.random.default_rng(0)
    p = Parameters(model)
    with torch.no_grad():
        p.check_uses(lambda: float(model(X).square().mean()) + 0.01 * noise.normal(), SOME_PROBE)
    assert p.substitutable


def test_a_random_loss_that_happens_to_repeat_itself_once_is_not_taken_for_one_that_is_not_met() -> None:
    model = nn.Linear(6, 3)
    noise = iter([0.0, 1.0, 0.0, 1e-4, 0.5, 1.0, 0.2, 0.3, 0.4])
    p = Parameters(model)
    with torch.no_grad():
        p.check_uses(lambda: float(model(X).square().mean()) + next(noise), SOME_PROBE)
    assert p.substitutable


def test_a_model_that_is_distrusted_within_its_first_probe_stays_so() -> None:
    model = nn.Linear(6, 3)
    p = Parameters(model)
    with torch.no_grad(), p.perturbed(SOME_PROBE):
        p.distrust()
        model(X)
    assert not p.substitutable


def test_w_itself_is_computed_without_a_substitution_where_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 3)
    p = Parameters(model)
    with torch.no_grad():
        p.check_uses(lambda: model(X).square().mean(), SOME_PROBE)
    monkeypatch.setattr(parameters, "Substitution", lambda *_: pytest.fail("torch.compile would run eagerly"))
    with p.perturbed(None):
        model(X)


def test_a_thread_that_computes_a_renormalising_embedding_leaves_w_alone() -> None:
    model = nn.Embedding(5, 8, max_norm=0.5)
    p = Parameters(model)
    before, versions = bits(model), p.versions()
    with p.perturbed(None):
        thread = threading.Thread(target=lambda: model(TOKENS))
        thread.start()
        thread.join()
    assert bits(model) == before and p.versions() == versions


def test_what_a_first_call_keeps_is_made_of_the_weights_themselves() -> None:
    model, kept = nn.Linear(6, 3), []
    p = Parameters(model)

    def loss() -> Tensor:
        if not kept:
            kept.append(model.weight.clone())
        return (model.weight - kept[0]).square().sum()

    with torch.no_grad():
        p.check_uses(loss, SOME_PROBE)
    assert torch.equal(kept[0], model.weight) and p.substitutable


@pytest.mark.parametrize("rest", [0.0, 1.0])
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("scripted", [False, True])
def test_a_view_of_a_weight_that_was_kept_from_before_is_refused_by_name(
    made: str, rest: float, scripted: bool
) -> None:
    views: list[Tensor] = []
    layer: nn.Module = nn.Linear(6, 3)
    model = nn.Sequential(torch.jit.script(layer) if scripted else layer)
    views += [layer.weight.detach()[1:]] if made == "before" else []
    p = Parameters(model)
    views += [layer.weight.T[2:]] if made == "after" else []
    before = bits(model)
    with torch.no_grad(), pytest.raises(ModelError, match=r"'0\.weight' is also read through a view"):
        p.check_uses(lambda: views[0].square().sum() + rest * model(X).square().sum(), SOME_PROBE)
    assert bits(model) == before


def test_a_copy_of_the_starting_weights_may_be_read() -> None:
    model = nn.Linear(6, 3)
    kept = model.state_dict()  # holds the old memory, and is not read
    start = model.weight.detach().clone()
    p = Parameters(model)
    with torch.no_grad():
        p.check_uses(lambda: model(X).square().sum() + (model.weight - start).square().sum(), SOME_PROBE)
    assert p.substitutable and torch.equal(kept["weight"], start)


def test_a_loss_that_raises_is_not_taken_for_one_that_is_not_met() -> None:
    model, calls = nn.Linear(6, 3), [0]
    p = Parameters(model)

    def loss() -> Tensor:
        calls[0] += 1
        if calls[0] > 1:
            raise RuntimeError("no memory")
        return model(X).sum()

    with torch.no_grad(), pytest.raises(RuntimeError, match="no memory"):
        p.check_uses(loss, SOME_PROBE)
    assert p.substitutable and p.attached


def test_a_second_copy_of_a_large_model_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model = UNMET["vmap over a parameter"]()
    p = Parameters(model)
    monkeypatch.setattr(parameters, "COPY_UNTOLD_BYTES", 10)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="a second copy of them"):
        p.check_uses(lambda: model(X).square().mean(), SOME_PROBE)


def test_autocast_does_not_keep_the_weights_of_another_probe() -> None:
    model = nn.Linear(6, 3)
    p = Parameters(model)
    p.distrust()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(X)
        outputs = []
        for index in range(2):
            with p.perturbed(Probe(7, 0, index, 0.5)):
                outputs.append(model(X))
        assert torch.equal(model(X), plain)
    assert not torch.equal(outputs[0], plain) and not torch.equal(outputs[0], outputs[1])
