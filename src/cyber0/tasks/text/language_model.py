"""Language models by name: config and tokenizer, and the weights when they are needed."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from cyber0.config import doors
from cyber0.directions.backends import backend_of
from cyber0.errors import ConfigError, ModelError, ModelMissingError
from cyber0.tasks.text.adapters import Adapter, adapted
from cyber0.tasks.text.gguf_file import ReadOnce
from cyber0.tasks.text.libraries import load_transformers, need, quiet

Tensor = torch.Tensor

MIB, GIB = 1 << 20, 1 << 30

log = logging.getLogger("cyber0")


class LanguageModel:
    """A model by name: its config and tokenizer are loaded at once, its weights on demand.

    Args:
        name: A name on the hub, a folder, or a .gguf file.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise ConfigError("task.model is empty: set it to a name on the Hugging Face hub, a folder or a .gguf file")
        self._library = load_transformers()
        self.name = name
        path = Path(name).expanduser()
        self._where: dict[str, Any] = {"pretrained_model_name_or_path": str(path) if path.exists() else name}
        if name.endswith(".gguf"):
            if not path.is_file():
                raise ModelMissingError(f"task.model = {name!r}: there is no such file", "there is no such file")
            need("gguf", "a .gguf file")
            self._where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        elif path.is_dir() and not (path / "config.json").is_file():
            reason = "the folder has no config.json, so it holds no model that save_pretrained wrote"
            raise ModelMissingError(f"task.model = {name!r}: {reason}", reason)
        elif not path.exists() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
            raise ModelMissingError(f"task.model = {name!r}: there is no such folder", "there is no such folder")
        elif not path.exists() and doors.is_offline(doors.MODEL):
            self._where = {"pretrained_model_name_or_path": _in_cache(name)}
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
        """Return whether it predicts the next token; otherwise it fills a mask."""
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
        """The token that pads rows. It is never attended to, but some causal models warn about their padding token."""
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
        # Reading a .gguf file shows a progress bar that no setting turns off.
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
        """Suppress output, and raise an error with a remedy if a model can't be loaded."""
        try:
            with quiet(self._library), self._gguf() if self._gguf is not None else contextlib.nullcontext():
                yield
        except torch.OutOfMemoryError:
            raise
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            remedy = "Check that all its files are there and complete" if Path(self.name).expanduser().exists() else (
                "If the Hugging Face hub can't be reached from here, fetch the model elsewhere "
                f"(hf download {self.name} --local-dir DIR), copy the folder, and set task.model to it"
            )  # fmt: skip
            what = f"task.model = {self.name!r} could not be loaded: {reason}"
            raise ModelMissingError(f"{what}\n{remedy}", reason) from error

    def _check_memory(self, dtype: torch.dtype, device: torch.device) -> None:
        """Refuse a model whose weights alone do not fit."""
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


def _in_cache(name: str) -> str:
    """Return the folder of the hub's cache that holds a model; transformers asks the hub about nothing in a folder."""
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, local_files_only=True))
    except Exception:  # whatever the hub's client says about a name that it does not know
        reason = "it is not on this machine, and a model that only the header of a run names is not downloaded"
        raise ModelMissingError(f"task.model = {name!r}: {reason}", reason) from None


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a type in which the device can't multiply matrices."""
    name = str(dtype).removeprefix("torch.")
    if not backend_of(device).multiplies(dtype, device):
        raise ModelError(f"task.dtype = {name!r} can't be used on this {device.type}; use task.dtype = 'float32'")


def forget_quantisation(model: Any) -> None:
    """Turn a model that was dequantised on loading into an ordinary one, which can be saved."""
    model.hf_quantizer = None
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
