"""ZeroOrderTrainer: a transformers Trainer by zero-order steps, with its data, evaluation, logging and checkpoints."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import one_thread  # noqa: F401

pytest.importorskip("transformers", reason="needs the extra text")

import transformers
from tiny_models import SENTENCES, config, tokenizer

from cyber0 import ZeroOrder
from cyber0.errors import ConfigError, LedgerError, ModelError
from cyber0.integrations.transformers import ZeroOrderTrainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*pin_memory")]


@pytest.fixture(scope="module")
def words() -> Any:
    return tokenizer(masked=True)


@pytest.fixture(scope="module")
def rows(words: Any) -> list[dict[str, Any]]:
    return [{**words(text, padding="max_length", max_length=24), "labels": int(label)} for text, label in SENTENCES]


def make_model(words: Any, dtype: torch.dtype = torch.float32) -> Any:
    settings = config("roberta", len(words), words.pad_token_id)
    settings.num_labels = 2
    torch.manual_seed(0)
    model = transformers.RobertaForSequenceClassification(settings)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.dim() > 1 else 1.0)  # so that the sentences differ
    return model.to(dtype)


def arguments(out: Path, **more: Any) -> Any:
    usual = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_steps": 4, "seed": 1,
             "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(out), **usual | more)


def make_trainer(model: Any, rows: list[dict[str, Any]], out: Path, given: Any = None, **more: Any) -> Any:
    zero_order = {"mu": 1e-2, "k": 2, **(given or {})}
    special = {name: more.pop(name) for name in ("compute_metrics", "compute_loss_func", "callbacks") if name in more}
    return ZeroOrderTrainer(model=model, args=arguments(out, **more), train_dataset=rows, eval_dataset=rows[:8],
                            zero_order=zero_order, **special)  # fmt: skip


def bits(trainer: Any) -> tuple[str, bytes]:
    assert all(p.grad is None for p in trainer.model.parameters())
    return trainer.zero_order.parameters.digest(), trainer.zero_order.ledger.chain


def in_float32(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits.float(), labels)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 4},
    "epochs and warm-up": {"max_steps": -1, "num_train_epochs": 1.0, "warmup_steps": 2, "lr_scheduler_type": "cosine"},
    "autocast": {"bf16": True},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "adam": {"given": {"optimizer": "adam"}, "learning_rate": 1e-3},
    "adaptive": {"given": {"optimizer": "adaptive", "estimator": "one_sided"}},
    "low rank": {"given": {"distribution": "low_rank"}},
    "bfloat16": {"dtype": torch.bfloat16, "compute_loss_func": in_float32},
    "float16": {"dtype": torch.float16, "compute_loss_func": in_float32},
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_training_ends_with_the_same_bits(
    case: str, words: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = dict(CASES[case])
    dtype = settings.pop("dtype", torch.float32)
    whole = make_trainer(make_model(words, dtype), rows, tmp_path / "whole", **settings)
    before = whole.model.state_dict()["classifier.dense.weight"].clone()
    whole.train()
    assert whole.state.global_step == whole.zero_order.round == 6
    assert not torch.equal(before, whole.model.state_dict()["classifier.dense.weight"])
    checkpoint = tmp_path / "whole/checkpoint-4"
    other = make_model(words, dtype)
    with torch.no_grad():
        other.classifier.dense.weight.zero_()  # the weights that a new process starts with do not matter
    resumed = make_trainer(other, rows, tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert bits(resumed) == bits(whole)
    assert torch.equal(*(t.model.state_dict()["classifier.dense.weight"] for t in (whole, resumed)))


def test_the_ledger_and_the_starting_weights_give_the_trained_model(
    words: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer = make_trainer(make_model(words), rows, tmp_path / "out")
    with pytest.raises(LedgerError, match="call train"):
        trainer.save_ledger(tmp_path / "tuning.ledger")
    trainer.train()
    trainer.save_ledger(tmp_path / "tuning.ledger")
    replayed = ZeroOrder(make_model(words), lr=1e-2, mu=1e-2, k=2, seed=1, ledger=tmp_path / "tuning.ledger")
    assert replayed.round == 6 and replayed.parameters.digest() == trainer.zero_order.parameters.digest()


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    words = tokenizer(masked=False)
    texts = [words(text, padding="max_length", max_length=16) for text, _ in SENTENCES]
    masked = [[w if m else -100 for w, m in zip(t["input_ids"], t["attention_mask"], strict=True)] for t in texts]
    rows = [{**text, "labels": labels} for text, labels in zip(texts, masked, strict=True)]  # of unlike lengths

    def trained(size: int, accumulated: int) -> Any:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config("llama", len(words), words.pad_token_id))
        trainer = make_trainer(model, rows, tmp_path / str(size), max_steps=2, save_strategy="no",
                               per_device_train_batch_size=size, gradient_accumulation_steps=accumulated,
                               logging_steps=1)  # fmt: skip
        trainer.train()
        return trainer

    one, four = trained(8, 1), trained(2, 4)
    first, second = (torch.tensor([list(r.values) for r in t.zero_order.ledger]) for t in (one, four))
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-3)
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (one, four)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_it_evaluates_logs_and_ends_with_the_best_model(words: Any, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    def metrics(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    seen = []

    class Watch(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(logs)

    trainer = make_trainer(
        make_model(words), rows, tmp_path, {"k": 8}, max_steps=16, learning_rate=0.05, logging_steps=4, save_steps=4,
        eval_strategy="steps", eval_steps=4, load_best_model_at_end=True, metric_for_best_model="loss",
        compute_metrics=metrics, callbacks=[Watch()],
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    history = trainer.state.log_history
    assert {"loss", "learning_rate", "epoch"} <= set(seen[1]) and not any("grad_norm" in entry for entry in history)
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert min(losses) < before and "eval_accuracy" in history[1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses))
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    assert rates == sorted(rates, reverse=True) and trainer.zero_order.ledger.last.lr == pytest.approx(0.05 / 16)
    trainer.train()  # a second training starts from the model as it is, with a ledger of its own
    assert trainer.zero_order.round == 16


def test_neither_gradients_nor_vectors_are_allocated_and_dropout_is_off(
    words: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    modes = set()

    class Watched(ZeroOrderTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            modes.update((model.training, torch.is_grad_enabled()))
            return super().compute_loss(model, inputs, *rest, **more)

    trainer = Watched(model=make_model(words), args=arguments(tmp_path), train_dataset=rows, zero_order={"mu": 1e-2})
    trainer.train()
    assert modes == {False}
    assert all(p.grad is None for p in trainer.model.parameters())
    assert not trainer.zero_order.state and not trainer.zero_order.parameters.moments.vectors
    saved = torch.load(tmp_path / "checkpoint-6/optimizer.pt", weights_only=True)
    assert not saved["state"] and (tmp_path / "checkpoint-6/optimizer.pt").stat().st_size < 20_000


def test_an_adapter_is_trained_and_resumed_and_the_rest_stays_frozen(
    words: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"])
        base = make_model(words)
        torch.manual_seed(5)
        return peft.get_peft_model(base, lora)

    whole = make_trainer(adapted(), rows, tmp_path / "whole", learning_rate=0.05)
    frozen = {name: p.clone() for name, p in whole.model.named_parameters() if not p.requires_grad}
    whole.train()
    assert whole.zero_order.parameters.dimension == sum(p.numel() for p in whole.model.parameters() if p.requires_grad)
    assert all(torch.equal(p, frozen[name]) for name, p in whole.model.named_parameters() if name in frozen)
    resumed = make_trainer(adapted(), rows, tmp_path / "resumed", learning_rate=0.05)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-4"))
    assert bits(resumed) == bits(whole)
    assert (tmp_path / "whole/checkpoint-6/adapter_model.safetensors").exists()


def test_a_checkpoint_without_a_ledger_or_with_other_settings_is_refused(
    words: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    make_trainer(make_model(words), rows, tmp_path / "a").train()
    checkpoint = tmp_path / "a/checkpoint-4"
    with pytest.raises(LedgerError, match=r"other settings \(it differs in k, mu\)|differs in mu, k"):
        make_trainer(make_model(words), rows, tmp_path / "b", {"k": 3, "mu": 0.1}).train(
            resume_from_checkpoint=str(checkpoint)
        )
    bare = shutil.copytree(checkpoint, tmp_path / "bare-4")
    (bare / "optimizer.pt").unlink()
    with pytest.raises(LedgerError, match=r"at step 4 and its ledger at step 0.*save_only_model"):
        make_trainer(make_model(words), rows, tmp_path / "c").train(resume_from_checkpoint=str(bare))
    swapped = shutil.copytree(checkpoint, tmp_path / "swapped-4")
    shutil.copy(tmp_path / "a/checkpoint-6/model.safetensors", swapped)
    with pytest.raises(ModelError, match="checkpoint of step 4 belongs to other weights"):
        make_trainer(make_model(words), rows, tmp_path / "d").train(resume_from_checkpoint=str(swapped))
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 4


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [({"lr": 1e-3}, {}, "learning_rate"), ({"ledger": "x"}, {}, r"save_ledger\(FILE\)"),
     ({"kk": 3}, {}, "use mu, k, seed"),
     ({}, {"fp16": True}, "dtype=torch.float16"), ({}, {"weight_decay": 0.1}, "weight_decay = 0.1"),
     ({}, {"torch_compile": True}, "leave it out"), ({}, {"learning_rate": 0.0}, "learning_rate = 0 must be above 0")],
)  # fmt: skip
def test_what_can_not_work_is_refused_with_a_remedy(
    given: dict[str, Any], more: dict[str, Any], message: str, words: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(make_model(words), rows, tmp_path, given, **more)


@pytest.mark.parametrize(
    ("name", "value"), [("fsdp", "full_shard"), ("deepspeed", {"stage": 2}), ("n_gpu", 2), ("world_size", 4)]
)
def test_sharded_and_replicated_models_are_refused(name: str, value: Any, words: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path)

    class Elsewhere:
        def __getattr__(self, wanted: str) -> Any:
            return value if wanted == name else getattr(args, wanted)

    with pytest.raises(ConfigError, match="one device"):
        ZeroOrderTrainer(model=make_model(words), args=Elsewhere())


def test_without_transformers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cyber0.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs the package transformers: pip install"):
        importlib.import_module("cyber0.integrations.transformers")


def test_settings_that_are_no_dictionary_are_refused(words: Any, tmp_path: Path) -> None:
    wrong: Any = "k=4"
    with pytest.raises(ConfigError, match="zero_order = 'k=4' must be a dictionary"):
        ZeroOrderTrainer(model=make_model(words), args=arguments(tmp_path), zero_order=wrong)


def test_an_optimizer_of_ones_own_is_refused(words: Any, tmp_path: Path) -> None:
    model = make_model(words)
    own = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(ConfigError, match="makes its optimizer itself"):
        ZeroOrderTrainer(model=model, args=arguments(tmp_path), optimizers=own)


def test_what_has_no_effect_and_losses_in_16_bits_are_warned_of(
    words: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.warns(RuntimeWarning, match="gradient_checkpointing has no effect"):
        trainer = make_trainer(make_model(words), rows, tmp_path / "a", gradient_checkpointing=True, max_steps=2)
    trainer.train()
    assert trainer.zero_order.round == 2
    with pytest.warns(RuntimeWarning, match=r"computed in bfloat16, in steps of 0\.008 .*compute_loss_func"):
        make_trainer(make_model(words, torch.bfloat16), rows, tmp_path / "b", {"mu": 0.1}, max_steps=1).train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss is computed")
        make_trainer(make_model(words), rows, tmp_path / "c", max_steps=1).train()
