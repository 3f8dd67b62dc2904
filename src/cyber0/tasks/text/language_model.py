"""Language models from Hugging Face: loading, adapters, the few logits that an answer needs, writing a model.

A model is used as it is: its own forward pass runs, and on the way its head is given one position a sample and
computes the label words' logits alone. So every architecture's own way from the hidden states to the logits
(a transform, a scale, a soft cap) is kept, and a tied output layer is met like any other use of a weight.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional

from cyber0.directions import Stream, words
from cyber0.directions.backends import backend_of
from cyber0.errors import ConfigError, DataError, ModelError, ModelMissingError
from cyber0.tasks.text import fusion
from cyber0.tasks.text.gguf_file import ReadOnce
from cyber0.tasks.text.replacement import Function, Replacement

Tensor = torch.Tensor

LORA_SCALE = 2  # alpha / rank, as in MeZO
MIB, GIB = 1 << 20, 1 << 30
BASE = "base"  # the folder beside an adapter that holds its base model, where that was a .gguf file

log = logging.getLogger("cyber0")


@dataclass(frozen=True)
class Adapter:
    """Which weights are trained: "none" (all), "lora" or "prefix"."""

    kind: str = "none"
    rank: int = 8
    length: int = 5


class LanguageModel:
    """A model by name: its config and tokenizer at once, its weights when asked for.

    Args:
        name: A name on the hub, a folder, or a .gguf file.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise ConfigError("task.model is empty: set it to a name on the Hugging Face hub, a folder or a .gguf file")
        self._library = _transformers()
        self.name = name
        path = Path(name).expanduser()
        self._where: dict[str, Any] = {"pretrained_model_name_or_path": str(path) if path.exists() else name}
        if name.endswith(".gguf"):
            if not path.is_file():
                raise ModelMissingError(f"task.model = {name!r}: there is no such file", "there is no such file")
            _need("gguf", "a .gguf file")
            self._where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        elif path.is_dir() and not (path / "config.json").is_file():
            reason = "the folder has no config.json, so it holds no model that save_pretrained wrote"
            raise ModelMissingError(f"task.model = {name!r}: {reason}", reason)
        elif not path.exists() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
            raise ModelMissingError(f"task.model = {name!r}: there is no such folder", "there is no such folder")
        self._gguf = ReadOnce() if "gguf_file" in self._where else None
        with self._loading():
            self.config = self._library.AutoConfig.from_pretrained(**self._where)
            self.tokenizer = self._library.AutoTokenizer.from_pretrained(**self._where)
        if getattr(self.config, "is_encoder_decoder", False):
            kind = self.config.model_type
            raise ModelError(
                f"task.model = {name!r} has an encoder and a decoder ({kind}); use a masked or causal model"
            )
        self.causal = self._is_causal()

    def _is_causal(self) -> bool:
        """Return whether it says the next word; otherwise it fills a mask."""
        architecture = (getattr(self.config, "architectures", None) or [""])[0]
        if architecture.endswith("ForMaskedLM"):
            return False
        if architecture.endswith(("ForCausalLM", "LMHeadModel")):
            return True
        masked = self._library.models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        return not (self.config.model_type in masked and self.tokenizer.mask_token is not None)

    @property
    def longest(self) -> int:
        """How many tokens a sample may have."""
        limits = [getattr(self.config, "max_position_embeddings", None), self.tokenizer.model_max_length]
        # RoBERTa's positions begin after its padding token, which takes some of them away.
        return min([int(n) - 2 for n in limits if isinstance(n, int) and n > 2] + [1 << 20])

    @property
    def padding(self) -> int:
        """The token that fills rows up. Nobody looks at it, but some causal models complain about the padding token."""
        token = self.tokenizer.pad_token_id
        if self.causal:
            return int(token == 0)
        return 0 if token is None else int(token)

    def check_tokens(self, ids: Sequence[int], where: str) -> None:
        """Refuse tokens that the model has no embedding for."""
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        last = max(ids, default=0)
        if size is not None and last >= size:
            raise ModelError(
                f"task.model = {self.name!r}: its tokenizer has {len(self.tokenizer):,} tokens and the model embeds "
                f"{size:,}; {where} has token {last}, {self.tokenizer.decode([last])!r}, which has no embedding. Use "
                "the tokenizer that belongs to the model, or give the model embeddings for all tokens "
                "(model.resize_token_embeddings(len(tokenizer))) and save it with save_pretrained"
            )

    def load(self, dtype: str, device: torch.device, seed: int, adapter: Adapter) -> nn.Module:
        """Return the model with its weights; an adapter's weights are a function of the seed."""
        kind: torch.dtype = getattr(torch, dtype)
        check_dtype(kind, device)
        self._check_memory(kind, device)
        auto = self._library.AutoModelForCausalLM if self.causal else self._library.AutoModelForMaskedLM
        # Reading a .gguf file draws a bar of its own, which no setting turns off.
        unseen = contextlib.redirect_stderr(io.StringIO()) if "gguf_file" in self._where else contextlib.nullcontext()
        with self._loading(), unseen:
            model, report = auto.from_pretrained(
                **self._where, config=copy.deepcopy(self.config), dtype=kind, output_loading_info=True
            )
        missing = sorted(report["missing_keys"])
        if missing:
            raise ModelError(
                f"task.model = {self.name!r} lacks {len(missing)} weights, {missing[0]!r} among them, which would be "
                f"random: it is not a checkpoint with a {'causal' if self.causal else 'masked'} language model's head"
            )
        if self._gguf is not None:
            self._gguf.forget()
        forget_quantisation(model)
        return adapted(model, adapter, seed, self.causal)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Be quiet, and say what can be done when a model can't be had."""
        try:
            with _quiet(self._library), self._gguf() if self._gguf is not None else contextlib.nullcontext():
                yield
        except torch.OutOfMemoryError:
            raise
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            remedy = "Look whether all its files are there and whole" if Path(self.name).expanduser().exists() else (
                "If the Hugging Face hub can't be reached from here, fetch the model where it can "
                f"(hf download {self.name} --local-dir DIR), copy the folder, and set task.model to it"
            )  # fmt: skip
            what = f"task.model = {self.name!r} could not be loaded: {reason}"
            raise ModelMissingError(f"{what}\n{remedy}", reason) from error

    def _check_memory(self, dtype: torch.dtype, device: torch.device) -> None:
        """Refuse a model whose weights alone can't fit."""
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            auto = self._library.AutoModelForCausalLM if self.causal else self._library.AutoModelForMaskedLM
            model = auto.from_config(self.config)
        sizes = [p.numel() for p in model.parameters()]
        needed, free = (sum(sizes) + max(sizes)) * dtype.itemsize, backend_of(device).free_memory(device)
        if needed > free:
            raise ModelError(
                f"task.model = {self.name!r} has {sum(sizes):,} weights and needs {needed / GIB:.1f} GiB as "
                f"{str(dtype).removeprefix('torch.')}, with its largest block perturbed; {device.type} has "
                f'{free / GIB:.1f} GiB free. A smaller model, or task.dtype = "bfloat16", needs less'
            )


def _transformers() -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _need("transformers", "a language model")
    import transformers

    return transformers


def _need(package: str, what: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}: pip install 'cyber0[text]'")


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a type in which the device can't multiply."""
    name = str(dtype).removeprefix("torch.")
    if not backend_of(device).multiplies(dtype, device):
        raise ModelError(f'task.dtype = "{name}" is not something this {device.type} can compute in; use "float32"')


def forget_quantisation(model: Any) -> None:
    """Make a model that was dequantised on loading an ordinary one, which can be saved."""
    model.hf_quantizer = None
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)


# Adapters.


def adapted(model: Any, adapter: Adapter, seed: int, causal: bool) -> nn.Module:
    """Return the model with what is trained made trainable and the rest frozen."""
    if adapter.kind == "none":
        plain: nn.Module = model
        return plain
    _need("peft", f'task.adapter = "{adapter.kind}"')
    import peft

    if adapter.kind == "lora":
        known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        settings: Any = peft.LoraConfig(
            r=adapter.rank, lora_alpha=LORA_SCALE * adapter.rank, lora_dropout=0.0,
            target_modules=None if model.config.model_type in known else "all-linear",
            task_type="CAUSAL_LM" if causal else None,
        )  # fmt: skip
    elif not causal:
        raise ConfigError('task.adapter = "prefix" needs a causal model; use task.adapter = "lora" with a masked one')
    else:
        settings = peft.PrefixTuningConfig(num_virtual_tokens=adapter.length, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # what it draws itself is drawn anew below
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # it then does what it should
        wrapped: nn.Module = peft.get_peft_model(model, settings)
    _draw_adapter(wrapped, adapter.kind, seed)
    return wrapped.eval()


def _draw_adapter(model: nn.Module, kind: str, seed: int) -> None:
    """Draw an adapter's first weights from the shared stream: PEFT's own are different on every machine.

    LoRA as PEFT does it: A uniform within 1 / sqrt(inputs), B zero, so that the model starts as it was. A prefix: near
    zero, where its attention is spread evenly and its values add little.
    """
    start = 0
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if kind == "lora" and "lora_B" in name:
            scale = 0.0
        elif kind == "lora":
            scale = p.shape[-1] ** -0.5
        else:
            scale = 0.1
        drawn = words(seed, Stream.INITIAL_WEIGHTS, 0, 0, start, p.numel())
        uniform = (drawn >> np.uint32(8)).astype(np.float64) * 2.0**-23 - 1.0
        with torch.no_grad():
            p.copy_(torch.from_numpy((scale * uniform).astype(np.float32)).view(p.shape))
        start += p.numel()


def base_of(model: Any) -> Any:
    """Return the model inside an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


@contextlib.contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Within this context transformers shows neither bars nor what is less than an error."""
    shown = library.utils.logging
    level, bars = shown.get_verbosity(), shown.is_progress_bar_enabled()
    shown.set_verbosity_error()
    shown.disable_progress_bar()
    try:
        yield
    finally:
        shown.set_verbosity(level)
        if bars:
            shown.enable_progress_bar()


# The answer.


def answer_logits(model: Any, ids: Tensor, mask: Tensor | None, places: Tensor, tokens: Tensor, causal: bool) -> Tensor:
    """Return each sample's logits of some tokens at its place, in float32: (samples, tokens).

    A causal model needs no mask: what is padded lies behind the place, where it does not look.
    """
    given = {"use_cache": False} if causal else {"attention_mask": mask}
    shorter = fusion.fused(model, ids.device)
    with _answers_only(base_of(model), places, tokens), _tokens_known(all_real=causal or mask is None), shorter:
        logits: Tensor = model(input_ids=ids, **given).logits
    # A model that goes past its head's forward gives all logits: they are right too.
    logits = logits[:, 0] if logits.shape[1] == 1 else _at(logits, places)[:, 0]
    return (logits if logits.shape[-1] == len(tokens) else logits.index_select(-1, tokens)).float()


def _at(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden[torch.arange(len(places), device=places.device), places][:, None]


@contextlib.contextmanager
def _answers_only(model: Any, places: Tensor, tokens: Tensor) -> Iterator[None]:
    """Within this context the head sees one position a sample and computes these tokens' logits alone, in float32.

    An output layer that is not a plain linear map (one with an adapter or a forward of somebody's own, say) computes
    all logits of the position.
    """
    output = model.get_output_embeddings()
    if model not in _HEADS:
        _HEADS[model] = None if output is None else _head(model, output, model.get_input_embeddings())
    head = _HEADS[model]
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output layer that could be found: it is not a language model")

    def one_place(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_at(args[0], places), *args[1:])

    def few_tokens(hidden: Tensor) -> Tensor:
        bias = None if output.bias is None else output.bias.index_select(0, tokens).float()
        return functional.linear(hidden.float(), output.weight.index_select(0, tokens).float(), bias)

    plain = type(output) is nn.Linear and "forward" not in vars(output)
    handle = head.register_forward_pre_hook(one_place)
    if plain:
        output.forward = few_tokens
    try:
        yield
    finally:
        handle.remove()
        if plain:
            del output.forward


class _Known(threading.local):
    """What this thread knows of the samples that go through a model now."""

    unpacked = False
    all_real = False


_KNOWN = _Known()


@contextlib.contextmanager
def _tokens_known(all_real: bool) -> Iterator[None]:
    """Within this context transformers need not ask the device how samples are padded or packed.

    Asking makes the processor wait for the device; and while a pass is recorded, where it can't be asked, a mask would
    be made that says nothing and bars the fastest kernels.
    """
    before = _KNOWN.unpacked, _KNOWN.all_real
    with contextlib.ExitStack() as replaced:
        for question in _questions():
            replaced.enter_context(question())
        _KNOWN.unpacked, _KNOWN.all_real = True, all_real
        try:
            yield
        finally:
            _KNOWN.unpacked, _KNOWN.all_real = before


@cache
def _questions() -> list[Replacement]:
    """Return the questions of transformers' masks, to be answered by `_KNOWN`; other versions' may still be asked."""
    from transformers import masking_utils

    def packed(original: Function) -> Function:
        return lambda *args, **named: None if _KNOWN.unpacked else original(*args, **named)

    def tracing(original: Function) -> Function:
        return lambda tensor=None: False if _KNOWN.all_real and tensor is None else original(tensor)

    def ignored(original: Function) -> Function:
        def answer(padding_mask: Any, *args: Any, **named: Any) -> Any:
            return original(None if _KNOWN.all_real else padding_mask, *args, **named)

        return answer

    return [
        Replacement(masking_utils, "find_packed_sequence_indices", packed),
        Replacement(masking_utils, "is_tracing", tracing),
        Replacement(masking_utils, "_ignore_causal_mask_sdpa", ignored),
        Replacement(masking_utils, "_ignore_bidirectional_mask_sdpa", ignored),
    ]


_HEADS: WeakKeyDictionary[nn.Module, nn.Module | None] = WeakKeyDictionary()  # looked for once a model


def _head(module: nn.Module, output: nn.Module, inputs: nn.Module) -> nn.Module | None:
    """Return the largest part of a model that holds its output layer and not its input embeddings."""
    for child in module.children():
        parts = set(child.modules())
        if output in parts:
            return _head(child, output, inputs) if inputs in parts else child
    return None


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder that from_pretrained loads: the whole model, or the adapter; and the tokenizer."""
    with _quiet(_transformers()), warnings.catch_warnings():
        # PEFT looks for the base to tell whether the vocabulary was changed, which it never is here.
        warnings.filterwarnings("ignore", message="Could not find a config file in")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def name_base(model: Any, name: str, folder: Path, home: Path | None = None) -> str:
    """Let an adapter that is about to be saved name a base that PEFT can load; return its folder's name if written.

    PEFT knows names on the hub and folders, which it looks for from wherever the process was started. So a folder is
    named by its whole path; of a .gguf file, the dequantised model is written beside the adapter, and named as it will
    be once the folder is at `home`.
    """
    path = Path(name).expanduser()
    written = ""
    if name.endswith(".gguf"):
        written, path = BASE, (home or folder) / BASE
        _save_base(model, folder / BASE, path)
    if written or path.exists():
        for settings in model.peft_config.values():
            settings.base_model_name_or_path = str(path.resolve())
    return written


def _save_base(model: Any, folder: Path, home: Path) -> None:
    """Write the model inside an adapter, without it."""
    base = model.get_base_model()
    state = {
        name.replace(".base_layer.", "."): tensor for name, tensor in base.state_dict().items() if ".lora_" not in name
    }
    size, free = sum(t.nbytes for t in {t.data_ptr(): t for t in state.values()}.values()), _free_disk(folder)
    if size > free:
        raise DataError(
            f"{home} needs {size / GIB:.1f} GiB for the dequantised base model, without which PEFT can't load the "
            f"adapter, and {free / GIB:.1f} GiB are free; choose another --out, or --out FILE.safetensors for the "
            "adapter's weights alone"
        )
    with _quiet(_transformers()):
        base.save_pretrained(folder, state_dict=state)
    log.warning("%s: the model of the .gguf file, dequantised (%s MiB), since PEFT can't load a .gguf file as the base",
                home, f"{size / MIB:,.1f}")  # fmt: skip


def _free_disk(folder: Path) -> int:
    """Return how many bytes are free where a folder is to be made."""
    return shutil.disk_usage(next(parent for parent in folder.resolve().parents if parent.exists())).free
