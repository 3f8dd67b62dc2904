"""The upper layers of a language model: those below are frozen, and run once for each sample."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra 'text'")
pytest.importorskip("peft", reason="adapters need the extra 'text'")

from safetensors.torch import save_file
from tiny_models import ARCHITECTURES, SENTENCES

from cyber0.directions import Directions
from cyber0.directions.backends.cpu import CpuBackend
from cyber0.errors import ConfigError, ModelError
from cyber0.federation.simulation import Simulation
from cyber0.runs import inference, replay
from cyber0.runs import run as runs
from cyber0.runs.trained import InferenceOptions
from cyber0.tasks import text
from cyber0.tasks.text import layers
from cyber0.tasks.text.model_cache import MODELS
from cyber0.tasks.text.task import Text
from cyber0.tasks.text.top import TopTask

TOP = ("task.adapter=top", "task.layer=1")


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model whose trained weights are others than at the start."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_outputs_are_those_of_the_whole_model(name: str, settings: Any) -> None:
    top, plain = text.make(settings(name, *TOP).task), Text(settings(name).task)
    assert isinstance(top, TopTask)
    model = moved(top.model(0).eval())
    expected = plain.outputs(model, plain.train_inputs)
    torch.testing.assert_close(top.outputs(model, top.train_inputs), expected, rtol=1e-4, atol=1e-5)
    some = np.array([3, 0, 7])
    torch.testing.assert_close(top.outputs(model, top.train_inputs.take(some)), expected[some], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(top.outputs(model, top.train_inputs[2:5]), expected[2:5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_the_layers_after_the_chosen_one_are_trained(name: str, settings: Any) -> None:
    model = text.make(settings(name, *TOP).task).model(0)
    upper = {id(p) for p in layers.blocks_of(model)[1].parameters()}
    assert {id(p) for p in model.parameters() if p.requires_grad} == upper


def test_each_sample_passes_the_frozen_layers_once(settings: Any) -> None:
    simulation = Simulation(settings("llama", *TOP, "method.k=4", "rounds=3", "method.distribution=low_rank"))
    below, above = layers.blocks_of(simulation.parameters.model)
    rows: dict[str, int] = {"below": 0, "above": 0}

    def count(name: str) -> Any:
        def add(_: Any, output: torch.Tensor) -> None:
            rows[name] += len(output)

        return lambda module, given, output: add(given, output)

    below.mlp.register_forward_hook(count("below"))
    above.mlp.register_forward_hook(count("above"))
    simulation.evaluate()
    for _ in range(3):
        simulation.run_round()
    simulation.evaluate()
    # The samples that accuracy is measured on; those to learn from were read at the start.
    assert rows["below"] == len(SENTENCES) < rows["above"]


def test_frozen_layers_keep_their_weights_and_their_own_forward(settings: Any) -> None:
    simulation = Simulation(settings("llama", *TOP))
    model = simulation.parameters.model
    before = {name: p.clone() for name, p in model.named_parameters()}
    simulation.run_round()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all(name.startswith("model.layers.1.") for name in changed)
    assert not any("forward" in vars(block) for block in layers.blocks_of(model))


def test_a_failing_pass_gives_the_frozen_layers_back_their_forward(settings: Any) -> None:
    task = text.make(settings("llama", *TOP).task)
    model = task.model(0).eval()
    inputs = task.train_inputs
    hook = layers.blocks_of(model)[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        task.outputs(model, inputs)
    hook.remove()
    assert not any("forward" in vars(block) for block in layers.blocks_of(model))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_run_is_resumed_replayed_and_used_like_that_of_a_whole_model(
    name: str, settings: Any, tmp_path: Path
) -> None:
    config = settings(name, *TOP, "rounds=4", "method.distribution=low_rank")
    whole = runs.Run.start(config, tmp_path / "whole").run()
    run = runs.Run.start(config, tmp_path / "run")
    run.simulation.run_round()
    run.simulation.close()
    again = runs.Run.resume(tmp_path / "run").run()
    assert again["model_digest"] == whole["model_digest"]
    _, replayed = replay.rebuild(tmp_path / "whole", 4)
    assert replayed.digest() == whole["model_digest"]
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    expected = replayed.model.state_dict()
    assert all(torch.equal(p, expected[key]) for key, p in loaded.state_dict().items())
    card = (tmp_path / "whole" / "model" / "README.md").read_text()
    assert (
        "The layers after number 1 (" in card
        and "| task.layer | 1 |" in card
        and "peft" not in card.split("## Versions")[0]
    )
    found = inference.evaluate(tmp_path / "whole")
    assert found["accuracy"] == whole["final_accuracy"]
    (predicted,) = inference.predict(tmp_path / "whole", SENTENCES[0][0])
    assert predicted["probability"] >= 0.5


def test_models_that_differ_below_are_told_apart(settings: Any) -> None:
    first, other = (Simulation(settings("llama", *TOP)).parameters for _ in range(2))
    assert first.rest_digest() == other.rest_digest()
    with torch.no_grad():
        next(layers.blocks_of(other.model)[0].parameters()).add_(1)
    assert first.digest() == other.digest() and first.rest_digest() != other.rest_digest()


def test_what_is_computed_in_sixteen_bits_keeps_its_states_in_them(settings: Any) -> None:
    task = text.make(settings("llama", *TOP, "task.compute=bfloat16").task)
    model = task.model(0)
    assert task.train_inputs.states.dtype == torch.bfloat16 and next(model.parameters()).dtype == torch.float32


def test_a_task_keeps_no_model_alive(settings: Any) -> None:
    task = text.make(settings("llama", *TOP).task)
    first, second = task.model(0), task.model(0)
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert task.train_inputs.states is not None  # the other one has read them
    del second
    gc.collect()
    with pytest.raises(RuntimeError, match="make the model first"):
        _ = task.test_inputs


def test_predictions_are_those_of_the_weights_that_the_run_started_with(settings: Any, tmp_path: Path) -> None:
    model = text.make(settings("llama", *TOP).task).model(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    save_file({name: p.clone() for name, p in model.state_dict().items()}, tmp_path / "other.safetensors")
    config = settings("llama", *TOP, f"task.weights={tmp_path / 'other.safetensors'}")
    run = runs.Run.start(config, tmp_path / "run")
    run.run()
    plain, trained = Text(settings("llama").task), run.simulation.parameters.model
    with torch.no_grad():
        expected = plain.outputs(trained, plain.tokenise(plain._splits["train"].take(np.array([0])))).softmax(1)
    (found,) = inference.predict(tmp_path / "run", SENTENCES[0][0])
    assert found["probability"] == pytest.approx(float(expected.max()), abs=1e-4)


def test_states_that_overflow_are_refused(settings: Any) -> None:
    task = text.make(settings("llama", *TOP, "task.compute=float16").task)
    model: Any = task.model(0)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1e6)
    with pytest.raises(ConfigError, match=r"larger than float16 can hold; set task\.compute = \"bfloat16\""):
        _ = task.train_inputs


class Passing(torch.nn.Module):
    """The layer of a model, and something that it takes from the embeddings as well."""

    def __init__(self, layer: torch.nn.Module, take: Any) -> None:
        super().__init__()
        self.layer, self.take = layer, take

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.layer(self.take(hidden), *args, **kwargs)


@pytest.mark.parametrize("fault", ["embeddings", "in place", "not a number", "shape"])
def test_models_whose_layers_take_something_else_too_are_refused(fault: str, settings: Any) -> None:
    task = text.make(settings("llama", *TOP).task)
    model: Any = task.model(0)
    seen: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda _, given, output: seen.append(output))
    takes = {
        "embeddings": lambda hidden: hidden + seen[-1],
        "in place": lambda hidden: hidden.mul_(1.5),
        "not a number": lambda hidden: hidden * (torch.nan if seen[-1] is hidden else 1),
        "shape": lambda hidden: hidden,
    }
    model.model.layers[1] = Passing(model.model.layers[1], takes[fault])
    if fault == "shape":
        model.model.layers[0].register_forward_hook(lambda _, given, output: output[None])
    with pytest.raises(ModelError, match=r"the layers of LlamaForCausalLM do not simply .* task\.adapter = \"none\""):
        _ = task.train_inputs


def test_layers_that_share_weights_are_refused(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Text(settings("llama").task).model(0)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(ModelError, match="layers of LlamaForCausalLM share weights"):
        layers.train_after(model, 1)


def test_test_samples_that_a_process_keeps_are_read_with_the_weights_of_each_run(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODELS, "enabled", True)
    monkeypatch.setattr(MODELS, "_entries", {})
    first, second = (text.make(settings("llama", *TOP).task) for _ in range(2))
    models = [first.model(0), second.model(0)]
    with torch.no_grad():
        next(layers.blocks_of(models[1])[0].parameters()).add_(1)
    assert not torch.equal(first.test_inputs.states, second.test_inputs.states)


def test_a_layer_that_leaves_nothing_to_train_is_refused(settings: Any) -> None:
    for layer in (2, 3):
        message = rf"task\.layer = {layer}: the model has 2 layers, of which one at least is trained; set it to 1 to 1"
        with pytest.raises(ConfigError, match=message):
            text.make(settings("llama", "task.adapter=top", f"task.layer={layer}").task)
    with pytest.raises(ConfigError, match=r"task\.compute"):
        settings("llama", *TOP, "task.compute=float16", "task.dtype=bfloat16")


def test_a_model_without_a_list_of_layers_is_refused(settings: Any) -> None:
    task = text.make(settings("llama", *TOP).task)
    model = task.model(0)
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(ModelError, match="has no list of its 2 layers"):
        layers.blocks_of(model)


def test_states_that_do_not_fit_are_refused(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = text.make(settings("llama", *TOP).task)
    model = task.model(0)
    monkeypatch.setattr(CpuBackend, "free_memory", lambda *_: 1000)
    with pytest.raises(ConfigError, match=r"keeps the hidden states of 24 samples .* learn from fewer samples"):
        _ = task.train_inputs
    del model


def test_another_layer_is_refused_for_a_trained_model(settings: Any, tmp_path: Path) -> None:
    runs.Run.start(settings("llama", *TOP), tmp_path / "run").run()
    with pytest.raises(ConfigError, match=r"--set task\.layer=2 can't be used here"):
        inference.evaluate(tmp_path / "run", options=InferenceOptions(overrides=("task.layer=2",)))


@pytest.mark.filterwarnings("error:the model's weights can't be replaced")
@pytest.mark.parametrize("distribution", ["gaussian", "low_rank"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_upper_layers_compute_in_sixteen_bits(name: str, distribution: str, settings: Any) -> None:
    more = (f"method.distribution={distribution}", "method.k=4")
    wide = Simulation(settings(name, *TOP, *more))
    narrow = Simulation(settings(name, *TOP, *more, "task.compute=bfloat16"))
    with torch.no_grad():
        at_w = Directions(0, 0, 1).probe(0, 0.0)
        right, found = (s.client.evaluator.losses(s.first_batch(alone=False), at_w) for s in (wide, narrow))
    torch.testing.assert_close(found, right, rtol=0.05, atol=0.05)
    assert not torch.equal(found, right)
    assert np.isfinite(narrow.run_round().values).all()
    assert narrow.client.evaluator.low_rank._checked == (distribution == "low_rank")


@pytest.mark.cuda
@pytest.mark.parametrize("compute", ["", "float16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_run_on_a_gpu_shares_passes_and_commits_what_a_cpu_replays(
    name: str, compute: str, settings: Any, tmp_path: Path
) -> None:
    more = ("device=cuda", f"task.compute={compute}", "method.distribution=low_rank", "method.k=4", "rounds=6")
    run = runs.Run.start(settings(name, *TOP, *more), tmp_path / "run")
    summary = run.run()
    assert run.simulation.client.evaluator.low_rank._checked
    _, replayed = replay.rebuild(tmp_path / "run", device="cpu")
    assert replayed.digest() == summary["model_digest"]
    top, plain = text.make(settings(name, *TOP).task), Text(settings(name).task)
    trained = run.simulation.parameters.model.cpu().eval()
    kept = top.model(0)  # its frozen layers are those of the run
    with torch.no_grad():
        expected = plain.outputs(trained, plain.train_inputs)
        torch.testing.assert_close(top.outputs(trained, top.train_inputs), expected, rtol=1e-4, atol=1e-5)
    del kept
