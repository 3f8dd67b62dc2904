"""Language models on the GPU: what a whole federated step costs beside the forward passes it contains.

    python benchmarks/gpu_step.py --json figures.json     all figures; needs CUDA, triton and the extra 'text'
    python benchmarks/gpu_step.py --only step             one section
    python benchmarks/gpu_step.py --tiny                  tiny shapes, on the CPU where there is no GPU

A step is `Simulation.run_round`: every client's batch is drawn, both evaluations are made, the federator decides, the
ledger is written (in memory), the weights move. Bare forward passes are the same code with the perturbation off. Models
have the published shapes and random weights, which no figure depends on.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from measure import Call, Figure, interleaved, main
from torch import nn

from cyber0.bench import timing
from cyber0.bench.subjects import BarePasses
from cyber0.config.schema import Config
from cyber0.directions import Directions, Step
from cyber0.estimate.batches import Batch
from cyber0.estimate.evaluator import Evaluator
from cyber0.estimate.objective import client_means
from cyber0.federation.simulation import Simulation
from cyber0.model.vector import Parameters
from cyber0.tasks.text.answer import answer_logits
from cyber0.tasks.text.task import Text
from cyber0.tasks.text.tokens import Group, Tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MU, LR = 1e-3, 1e-6
CLIENTS, BATCH = 8, 64
WORDS = (1000, 2000)  # tokens of the label words; of tiny models the remainder

# How many of SST-2's 67,349 training prompts have 7, 8, 9, ... tokens: "<s> ... It was <mask>.</s>", counted with a
# byte-level BPE tokenizer of 49,152 words (SmolLM2's).
SST2_LENGTHS = (515, 4319, 6639, 6034, 5074, 4367, 3843, 3372, 3007, 2706, 2355, 2176, 1925, 1853, 1713, 1550, 1362,
                1258, 1181, 1109, 1057, 949, 869, 804, 694, 668, 602, 561, 544, 465, 404, 388, 379, 331, 286, 258, 216,
                215, 195, 154, 148, 107, 96, 97, 77, 64, 56, 39, 33, 46, 35, 29, 27, 15, 12, 11, 14, 12, 12, 9, 4, 4, 3,
                1, 0, 0, 0, 1)  # fmt: skip
SST2_SHORTEST = 7


def roberta(tiny: bool) -> Any:
    """Return the config of RoBERTa-large's shape, 355 M weights."""
    from transformers import RobertaConfig

    shape = (500, 32, 2, 2, 64) if tiny else (50265, 1024, 24, 16, 4096)
    words, width, layers, heads, inner = shape
    return RobertaConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, max_position_embeddings=514, type_vocab_size=1, pad_token_id=1,
    )  # fmt: skip


def llama(tiny: bool) -> Any:
    """Return the config of the 7-billion Llama's shape."""
    from transformers import LlamaConfig

    shape = (500, 32, 2, 2, 64) if tiny else (32000, 4096, 32, 32, 11008)
    words, width, layers, heads, inner = shape
    return LlamaConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, max_position_embeddings=2048,
    )  # fmt: skip


def smollm(tiny: bool) -> Any:
    """Return the config of SmolLM2-135M's shape."""
    from transformers import LlamaConfig

    shape = (500, 32, 2, 2, 64) if tiny else (49152, 576, 30, 9, 1536)
    words, width, layers, heads, inner = shape
    return LlamaConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=1 if tiny else 3, intermediate_size=inner, tie_word_embeddings=True,
    )  # fmt: skip


def fresh(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return a model with random weights, made on the device."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    auto = AutoModelForMaskedLM if config.model_type == "roberta" else AutoModelForCausalLM
    with torch.device(DEVICE):
        model: nn.Module = auto.from_config(config, dtype=dtype).eval()
    assert next(model.parameters()).dtype == dtype
    return model


class Prompts:
    """A task of random tokens for a model of a given shape: as many samples as the clients draw in a round."""

    name, classes = "random prompts", 2

    def __init__(self, config: Any, dtype: torch.dtype, lengths: np.ndarray[Any, Any]) -> None:
        self.config, self.dtype = config, dtype
        self.causal = config.model_type != "roberta"
        draw = np.random.default_rng(0)
        rows = [draw.integers(4, config.vocab_size, n).tolist() for n in lengths]
        places = [n - 1 if self.causal else n - 3 for n in lengths]
        pad = 0 if self.causal else config.pad_token_id
        self.train_inputs = self.test_inputs = Tokens.from_lists(rows, places, pad)
        self.train_targets = self.test_targets = torch.arange(len(rows)) % 2
        self.labels = self.train_targets.numpy()
        self.words = torch.tensor([word % config.vocab_size for word in WORDS])

    def model(self, seed: int, dtype: str = "float32") -> nn.Module:
        return fresh(self.config, self.dtype)

    def prepare(self, inputs: Tokens) -> Tokens:
        return inputs

    def outputs(self, model: nn.Module, inputs: Tokens) -> torch.Tensor:
        return self.joined([self.piece_outputs(model, *piece) for piece in self.pieces(inputs)], inputs)

    in_copies, pieces, joined = Text.in_copies, Text.pieces, Text.joined

    def piece_outputs(self, model: nn.Module, ids: Any, mask: Any, places: Any) -> torch.Tensor:
        return answer_logits(model, ids, mask, places, self.words, self.causal)

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        return 0.0, 0.0

    def keep(self, numbers: Any) -> Self:
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        for name in ("train_inputs", "train_targets", "test_inputs", "test_targets", "words"):
            setattr(self, name, getattr(self, name).to(device))
        return self


class Federation(BarePasses):
    """A simulation on random prompts, and the bare forward passes of the same batches."""

    def __init__(
        self, config: Any, dtype: torch.dtype, lengths: np.ndarray[Any, Any], clients: int = CLIENTS, k: int = 1,
        distribution: str = "gaussian",
    ) -> None:  # fmt: skip
        self.task, batch = Prompts(config, dtype, lengths), len(lengths) // clients
        settings = [f"federation.clients={clients}", "federation.byzantine=0", f"method.k={k}", f"method.lr={LR}",
                    f"method.mu={MU}", f"method.batch_size={batch}", f"device={DEVICE}",
                    f"method.distribution={distribution}"]  # fmt: skip
        self.simulation = Simulation(Config().with_overrides(settings), task=self.task)
        self.parameters = self.simulation.parameters
        super().__init__(self.simulation, clients)

    def step(self) -> None:
        self.simulation.run_round()

    @torch.no_grad()
    def two_eager(self) -> None:
        """The same two passes launched kernel by kernel, as a plain call of the model is."""
        for _ in range(2):
            outputs = self.task.outputs(self.parameters.model, self.batch.inputs)
            client_means(self.task.losses(outputs, self.batch.targets)[None], self.batch.counts)

    @torch.no_grad()
    def two_padded(self) -> None:
        """Two passes over the same sentences, padded to the longest of the batch, recorded as ours are."""
        tokens = self.batch.inputs
        padded = replace(self.batch, inputs=Padded(tokens.ids, tokens.lengths, tokens.places))
        for _ in range(2):
            client_means(self.evaluator.losses(padded, None)[None], self.batch.counts)


def inference_of(config: Any, dtype: torch.dtype, lengths: np.ndarray[Any, Any]) -> Call:
    """Return a pass over a batch by a model of its own, to the mean loss."""
    task = Prompts(config, dtype, lengths).to(DEVICE)
    evaluator = Evaluator(Parameters(task.model(0)), task, "two_point", MU)
    batch = Batch(task.train_inputs.coming_again(), task.train_targets, np.array([len(lengths)]))

    @torch.no_grad()
    def forward() -> None:
        client_means(evaluator.losses(batch, None)[None], batch.counts)

    return forward


class Padded(Tokens):
    """A batch as one group, padded to its longest."""

    @property
    def groups(self) -> list[Group]:
        longest = int(self.lengths.max())
        real = torch.from_numpy(self.lengths).to(self.device)[:, None]
        mask = (torch.arange(longest, device=self.device) < real).to(torch.int64)
        return [Group(self.ids[:, :longest], mask, self.places, len(self))]

    @property
    def back(self) -> torch.Tensor:
        return torch.arange(len(self), device=self.device)


class MezoSimulation:
    """The usual way: each client in turn perturbs in place by torch.normal, evaluates, perturbs back."""

    def __init__(self, task: Prompts, clients: int) -> None:
        self.task, self.model = task, fresh(task.config, task.dtype)
        rows, size = task.train_inputs, len(task.train_inputs) // clients
        self.batches = [(rows[i * size : (i + 1) * size], task.train_targets[i * size : (i + 1) * size])
                        for i in range(clients)]  # fmt: skip
        self.seed = 0

    def _move(self, factor: float) -> None:
        torch.manual_seed(self.seed)
        for p in self.model.parameters():
            z = torch.normal(mean=0.0, std=1.0, size=p.data.size(), device=p.data.device, dtype=p.data.dtype)
            p.data = p.data + factor * z

    def _loss(self, inputs: Tokens, targets: torch.Tensor) -> torch.Tensor:
        return self.task.losses(self.task.outputs(self.model, inputs), targets).mean()

    @torch.no_grad()
    def step(self) -> None:
        self.seed += 1
        slopes = []
        for inputs, targets in self.batches:
            self._move(MU)
            above = self._loss(inputs, targets)
            self._move(-2 * MU)
            below = self._loss(inputs, targets)
            self._move(MU)
            slopes.append(((above - below) / (2 * MU)).item())
        self._move(-LR * float(np.mean(slopes)))


def step(tiny: bool) -> Iterator[Figure]:
    """A whole step of 8 clients x 64 sequences, against two bare forward passes and against MeZO's way."""
    for tokens in (32, 64):
        for name, tf32 in (("bf16", False), ("fp32", False), ("fp32", True)):
            with matrix_products_in_tf32(tf32), releasing():
                yield from _step(name, tf32, tokens, tiny)


def _step(name: str, tf32: bool, tokens: int, tiny: bool) -> Iterator[Figure]:
    lengths = np.full(CLIENTS * (4 if tiny else BATCH), tokens)
    ours = Federation(roberta(tiny), DTYPES[name], lengths)
    calls: dict[str, Call] = {"step": ours.step, "forwards": ours.two_forwards}
    if name == "bf16":
        calls["mezo"] = MezoSimulation(ours.task, CLIENTS).step
    times = interleaved(calls, 2 if tiny else 5, wall_seconds_in_a_row)
    title = f"{name}{' TF32' if tf32 else ''} T = {tokens}"
    note = f"{ours.parameters.dimension / 1e6:.0f} M weights, {len(lengths)} sequences"
    yield Figure(f"{title}: step", 1e3 * times["step"], "ms", note=note)
    yield Figure(f"{title}: step / two bare forwards", times["step"] / times["forwards"], "x", 1.06)
    if "mezo" in times:
        target = {32: 9.0, 64: 4.0}[tokens]
        yield Figure(f"{title}: MeZO-style step / step", times["mezo"] / times["step"], "x", target, at_least=True)


def sst2_lengths(tiny: bool) -> np.ndarray[Any, Any]:
    """Return as many lengths as all clients' batches have samples."""
    shares = np.array(SST2_LENGTHS) / sum(SST2_LENGTHS)
    size = CLIENTS * (8 if tiny else BATCH)
    return SST2_SHORTEST + np.random.default_rng(1).choice(len(shares), size=size, p=shares)


def shortcuts(tiny: bool) -> Iterator[Figure]:
    """A small Llama-style model: a step with one kernel a norm, rotation and gate, against one without."""
    drawn = sst2_lengths(tiny)
    ours, plain = (Federation(smollm(tiny), torch.bfloat16, drawn) for _ in range(2))

    def without() -> None:
        os.environ["CYBER0_FUSION"] = "0"
        try:
            plain.step()
        finally:
            del os.environ["CYBER0_FUSION"]

    calls = {"step": ours.step, "forwards": ours.two_forwards, "without": without}
    times = interleaved(calls, 2 if tiny else 5, wall_seconds_in_a_row)
    note = f"{ours.parameters.dimension / 1e6:.0f} M weights, {len(drawn)} prompts with SST-2's lengths"
    yield Figure("SmolLM2-135M's shape, bf16: step", 1e3 * times["step"], "ms", note=note)
    yield Figure("step / two bare forwards", times["step"] / times["forwards"], "x")
    yield Figure("step / step without shortcuts", times["step"] / times["without"], "x")


def lengths(tiny: bool) -> Iterator[Figure]:
    """The real lengths of SST-2's prompts: a whole step against two passes padded to the longest of the batch."""
    drawn = sst2_lengths(tiny)
    for name in DTYPES:
        with releasing():
            ours = Federation(roberta(tiny), DTYPES[name], drawn)
            calls = {"step": ours.step, "padded": ours.two_padded}
            times = interleaved(calls, 2 if tiny else 7, wall_seconds_in_a_row)
            groups = [tuple(g.ids.shape) for g in ours.batch.inputs.groups]
            note = (
                f"mean {drawn.mean():.1f}, longest {drawn.max()}; groups {', '.join(f'{n} x {t}' for n, t in groups)}"
            )
            yield Figure(f"{name} step / two padded forwards", times["step"] / times["padded"], "x", 0.75, note=note)


def memory(tiny: bool) -> Iterator[Figure]:
    """Peak memory of a step in units of inference with the same batch, and of backpropagation in units of a step."""
    for name, tokens in (("bf16", 32), ("fp32", 32), ("bf16", 64), ("fp32", 64)):
        with releasing():
            drawn = np.full(CLIENTS * (4 if tiny else BATCH), tokens)
            inference = peak_of(lambda: inference_of(roberta(tiny), DTYPES[name], drawn))  # noqa: B023
            peak = peak_of(lambda: Federation(roberta(tiny), DTYPES[name], drawn).step)  # noqa: B023
            title = f"RoBERTa-large {name} T = {tokens}"
            yield compared(f"{title}: step / inference", peak, inference, 1.12)
            if tokens == 32:
                yield from _backpropagation(title, Federation(roberta(tiny), DTYPES[name], drawn), peak)


def _backpropagation(title: str, ours: Federation, peak: int) -> Iterator[Figure]:
    """One step of gradient descent on the same batch, everything in the weights' own type."""
    task, batch, model = ours.task, ours.batch, ours.parameters.model
    for kind, optimizer in (("SGD", torch.optim.SGD(model.parameters(), lr=1e-9)),
                            ("Adam", torch.optim.Adam(model.parameters(), lr=1e-9))):  # fmt: skip

        def descend(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            task.losses(task.outputs(model, batch.inputs), batch.targets).mean().backward()
            optimizer.step()

        try:
            most = peak_bytes(descend)
            yield compared(f"{title}: backpropagation with {kind} / step", most, peak)
        except torch.OutOfMemoryError:
            yield Figure(f"{title}: backpropagation with {kind} / step", float("inf"), "x", note="does not fit")
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()


def seven_billion(tiny: bool) -> Iterator[Figure]:
    """The 7-billion Llama shape in bf16: one step of 8 sequences of 128 tokens."""
    drawn = np.full(8, 128)
    inference = peak_of(lambda: inference_of(llama(tiny), torch.bfloat16, drawn))
    # The share that a batch of two probes adds is that of two batches of samples.
    twice = peak_of(lambda: inference_of(llama(tiny), torch.bfloat16, np.full(16, 128)))
    for z, target in (("low_rank", 1.25), ("gaussian", None)):
        with releasing():
            ours = Federation(llama(tiny), torch.bfloat16, drawn, clients=1, distribution=z)
            peak = peak_bytes(ours.step)
            times = interleaved({"step": ours.step, "forwards": ours.two_forwards}, 2 if tiny else 5, wall_seconds)
            note = f"{ours.parameters.dimension / 1e9:.2f} G weights, 8 x 128 tokens"
            yield Figure(f"{z} step", times["step"], "s", note=note)
            if DEVICE == "cuda":
                yield Figure(f"{z} step", peak / 2**30, "GiB")
            yield Figure(f"{z} step / two bare forwards", times["step"] / times["forwards"], "x", target)
            base = twice if z == "low_rank" else inference
            yield compared(f"{z} peak memory, step / inference with as many rows", peak, base, 1.05)
            if z == "gaussian":
                yield from _whole_weights(ours.parameters)
                yield from _backpropagation("7 billion bf16", ours, peak)
            del ours


def _whole_weights(parameters: Parameters) -> Iterator[Figure]:
    """What is done to all weights: the digest that participants compare, and a commit."""
    gigabytes, step = sum(p.nbytes for p in parameters.tensors) / 1e9, Step(7, 0, np.array([LR], np.float32))
    for bits in (32, 16):
        one = replace(step, bits=bits)
        taken = interleaved({"commit": partial(parameters.commit, one)}, 3, wall_seconds_in_a_row)["commit"]
        yield Figure(f"commit, rounded by {bits} bits", taken / gigabytes, "s/GB", note=f"{taken:.3g} s, k = 1")
    taken = interleaved({"digest": parameters.digest}, 2, wall_seconds)["digest"]
    zeros = bytes(1 << 28)
    alone = timing.seconds(lambda: hashlib.sha256(zeros).digest()) / (len(zeros) / 1e9)
    note = f"{taken:.3g} s for {gigabytes:.3g} GB; SHA-256 alone, in memory, {alone:.3g} s/GB"
    yield Figure("digest", taken / gigabytes, "s/GB", note=note)


def alone(tiny: bool) -> Iterator[Figure]:
    """One client by itself, 64 sequences of 32 tokens: launching kernels is what takes the time."""
    for name, z, target in (("fp32", "gaussian", 1.15), ("bf16", "gaussian", None), ("fp32", "low_rank", 1.12),
                            ("bf16", "low_rank", 1.12)):  # fmt: skip
        with releasing():
            drawn = np.full(4 if tiny else BATCH, 32)
            ours = Federation(roberta(tiny), DTYPES[name], drawn, clients=1, distribution=z)
            calls = {"step": ours.step, "forwards": ours.two_forwards, "eager": ours.two_eager}
            times = interleaved(calls, 2 if tiny else 9, wall_seconds_in_a_row)
            title, note = f"{name} {z} step", f"step {1e3 * times['step']:.2f} ms"
            yield Figure(f"{title} / two bare forwards", times["step"] / times["forwards"], "x", target, note=note)
            yield Figure(f"{title} / two eager forwards", times["step"] / times["eager"], "x", 1.0)


def replay(tiny: bool) -> Iterator[Figure]:
    """20,000 rounds of k = 1 in as few passes as possible, ending with the bits of the model that went one by one."""
    cases = (("fp32", 32, "gaussian", 12.0), ("bf16", 32, "gaussian", 25.0), ("bf16", 16, "gaussian", None))
    yield from _replay(tiny, cases)


def replay_low_rank(tiny: bool) -> Iterator[Figure]:
    """The same along low-rank directions."""
    cases = (("fp32", 32, "low_rank", 2.0), ("bf16", 32, "low_rank", None), ("bf16", 16, "low_rank", 4.0))
    yield from _replay(tiny, cases)


def _replay(tiny: bool, cases: Iterable[tuple[str, int, str, float | None]]) -> Iterator[Figure]:
    rounds = 50 if tiny else 20_000
    slopes = np.random.default_rng(2).standard_normal(rounds).astype(np.float32)
    for name, bits, z, target in cases:
        steps = [Step(7, t, np.array([LR * slope], np.float32), bits=bits) for t, slope in enumerate(slopes)]
        more = (", low-rank" if z == "low_rank" else "") + (", rounded by 16 bits" if bits == 16 else "")
        title = f"{name} replay of {rounds:,} rounds{more}"
        with releasing():
            trained, slept = (Parameters(fresh(roberta(tiny), DTYPES[name]), z) for _ in range(2))
            slept.load({key: value.clone() for key, value in trained.state().items()})
            slept.replay([])  # the kernels are compiled outside the measurement
            one_by_one = wall_seconds(lambda: [trained.commit(one) for one in steps])  # noqa: B023
            taken = wall_seconds(lambda: slept.replay(steps))  # noqa: B023
            same = trained.digest() == slept.digest()
            digests = "equal" if same else "DIFFER"
            note = f"{trained.dimension / 1e6:.0f} M weights; one by one {one_by_one:.1f} s; digests {digests}"
            yield Figure(title, taken if same else None, "s", target, note=note)


def estimators(tiny: bool) -> Iterator[Figure]:
    """mu = 0 by one gradient and k projections, by forward mode, and mu > 0 by 2 k or k + 1 evaluations."""
    size, k = (4, 2) if tiny else (BATCH, 8)

    def make() -> Federation:
        return Federation(roberta(tiny), torch.float32, np.full(size, 32), clients=1, k=k)

    def estimate(kind: str) -> Call:
        ours = make()
        evaluator = Evaluator(ours.parameters, ours.task, kind, MU)
        return lambda: evaluator.estimate(ours.batch, Directions(7, 0, k))

    with releasing():
        inference = peak_of(lambda: inference_of(roberta(tiny), torch.float32, np.full(size, 32)))
        for kind in ("two_point", "one_sided", "gradient", "forward"):
            peak, call = peak_of(lambda: estimate(kind)), estimate(kind)  # noqa: B023
            taken = interleaved({kind: call}, 2 if tiny else 5, wall_seconds)[kind]
            yield Figure(f"{kind}: time", 1e3 * taken, "ms", note=f"k = {k}, {size} x 32 tokens")
            yield compared(f"{kind}: peak memory / inference", peak, inference)
            del call


# Tools.


wall_seconds = partial(timing.wall_seconds, device=DEVICE)
wall_seconds_in_a_row = partial(timing.wall_seconds_in_a_row, device=DEVICE)
synchronise = partial(timing.synchronise, DEVICE)


def peak_of(make: Callable[[], Call]) -> int:
    """Return the peak of a call that nothing else was made with, so that no memory is left from another."""
    with releasing():
        return peak_bytes(make())


def peak_bytes(call: Call) -> int:
    """Return the most memory that torch took from the device at any moment of a few calls; 0 on the CPU.

    What is reserved counts, not what tensors fill: a recorded pass holds its memory between replays.
    """
    if DEVICE == "cpu":
        call()
        return 0
    gc.collect()
    synchronise()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):  # as it is, recorded, replayed
        call()
    synchronise()
    return torch.cuda.max_memory_reserved()


def compared(name: str, peak: int, base: int, target: float | None = None) -> Figure:
    """Return a peak in units of another; torch counts neither on the CPU."""
    if DEVICE == "cpu":
        return Figure(name, float("nan"), "x", note="not measured on the CPU")
    return Figure(name, peak / base, "x", target, note=f"{peak / 2**30:.2f} GiB against {base / 2**30:.2f} GiB")


@contextlib.contextmanager
def matrix_products_in_tf32(wanted: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def releasing() -> Iterator[None]:
    """Give back the memory of what was measured before."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    yield


# Memory comes first: nothing that another section left behind can then be counted.
SECTIONS: dict[str, Callable[[bool], Iterator[Figure]]] = {
    "memory": memory,
    "step": step,
    "lengths": lengths,
    "shortcuts": shortcuts,
    "alone": alone,
    "replay": replay,
    "replay_low_rank": replay_low_rank,
    "estimators": estimators,
    "seven_billion": seven_billion,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    machine = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"}
    sys.exit(main(__doc__ or "", SECTIONS, machine))
