"""Zero-order estimates: how a loss changes along each direction, for one client or for many at once.

    two_point   g_r = (f(w + mu z_r) - f(w - mu z_r)) / 2 mu
    gradient    g_r = <grad f(w), z_r> from one gradient (mu = 0, as the paper does it)
    forward     the same number by forward-mode differentiation, without backpropagation

with the factor d in front when directions lie on the unit sphere. All clients of a batch are at the same w: weights
are perturbed once, everybody's samples go through in one pass, and the means are taken per client, in float64.

There are three roads to the same numbers, and the evaluator takes the first that fits: a model whose outputs are one
linear map of w needs X W and X Z only; a small model is evaluated at all directions at once (vmap); a large one
streams its weights through, one block perturbed at a time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cyber0.directions import Probe, engine
from cyber0.errors import ModelError
from cyber0.kernels import threads
from cyber0.model.cuda_graphs import CapturedGraphs, GraphInputs
from cyber0.model.substitution import LinearUse
from cyber0.model.vector import PROBE, Parameters

Tensor = torch.Tensor
Matrix = NDArray[np.float64]

BATCHED_DIMENSION = 1 << 20  # models up to this many weights are evaluated at many directions at once
LARGE_BACKBONE = 1 << 24  # frozen weights from which on a model has use for many threads, however few are trained
BATCHED_WEIGHTS = 1 << 23  # and with at most this many perturbed weights in memory
LINEAR_OUTPUTS = 1 << 17  # the linear road takes samples in pieces of so many outputs, about what a cache holds
BATCHED_SAMPLES = 1 << 14  # and at most this many samples times directions, which bounds the activations
PROJECTION_CHUNK = 1 << 24  # coordinates of all directions that are drawn at a time to project a gradient


class Objective(Protocol):
    """What is measured: outputs of a model, and one loss per sample from them.

    `losses` may be called from several threads at once.
    """

    def outputs(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's outputs for a batch of samples."""
        ...

    def losses(self, outputs: Any, targets: Any) -> Tensor:
        """Return one loss per sample."""
        ...


@runtime_checkable
class InPieces(Protocol):
    """An objective whose outputs are computed piece by piece, each from plain tensors, so that it can be recorded.

    Its losses are functions of outputs and targets alone.
    """

    def pieces(self, inputs: Any) -> list[GraphInputs]:
        """Return the pieces of a batch of samples."""
        ...

    def piece_outputs(self, model: nn.Module, *piece: Any) -> Tensor:
        """Return the model's outputs for one of them."""
        ...

    def joined(self, outputs: list[Tensor], inputs: Any) -> Tensor:
        """Return the outputs for the batch from those of its pieces."""
        ...


@dataclass(frozen=True)
class Batch:
    """The samples of one or many clients, one client after the other; `counts` says how many each has.

    Inputs are a tensor, or what the objective takes, as long as it can be sliced.
    """

    inputs: Any
    targets: Tensor
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Directions:
    """The k directions of one round and local epoch: indices first .. first + k - 1."""

    seed: int
    round: int
    k: int
    first: int = 0

    def probe(self, r: int, coefficient: float) -> Probe:
        """Return the look at w + coefficient * z of the r-th of them."""
        return Probe(self.seed, self.round, self.first + r, coefficient)


class Evaluator:
    """Estimates for one model and objective.

    Args:
        parameters: The weights that are looked at; never changed here.
        objective: What is measured.
        estimator: "two_point", "gradient" or "forward".
        mu: The probing step of two_point.
        reference: Makes the batch by which is decided what is recorded on a GPU; the first that comes when absent. A
            run that can be gone on with needs one that is the same wherever it begins.
    """

    def __init__(
        self, parameters: Parameters, objective: Objective, estimator: str = "two_point", mu: float = 1e-3,
        *, reference: Callable[[], Batch] | None = None,
    ) -> None:  # fmt: skip
        if estimator not in ("two_point", "gradient", "forward"):
            raise ValueError(f"estimator must be two_point, gradient or forward, got {estimator!r}")
        if estimator == "two_point" and not np.float32(mu) > 0:  # also refuses what float32 rounds to 0
            raise ValueError(
                f"two_point divides by mu, got mu = {mu}: use estimator 'gradient' or 'forward' for mu = 0"
            )
        make_first_calls()
        self.parameters = parameters
        self.objective = objective
        self.estimator = estimator
        self.mu = float(np.float32(mu))  # the kernels perturb by float32 mu: divide by the same
        self._batched = parameters.dimension <= BATCHED_DIMENSION
        # Directions at once save nothing where a large frozen model has a small adapter, and cost activations.
        self._light = sum(p.numel() for p in parameters.model.parameters()) <= BATCHED_DIMENSION
        self._probed = False
        self._in_pieces = objective if isinstance(objective, InPieces) else None
        # A loss may look at the weights itself (a penalty), so it is part of what is recorded.
        in_pieces = self._in_pieces
        one_piece = self._losses_of if in_pieces is None else partial(in_pieces.piece_outputs, parameters.model)
        first = None if reference is None else lambda: self._graph_inputs(reference())[0]
        self._graphs = CapturedGraphs(parameters, one_piece, first)
        self._linear = self._batched and len(parameters.tensors) <= 2
        # Sphere directions carry the factor d (Algorithm 1), the others do not (Algorithm 2).
        self._factor = float(parameters.dimension) if parameters.distribution == "sphere" else 1.0

    def estimate(self, batch: Batch, directions: Directions, steps: Any = ()) -> Matrix:
        """Return g as a (clients x k) float64 matrix, at w or at w after `steps`."""
        with torch.no_grad(), self.own_threads():
            self._probe(batch, directions)
            matrix = None if steps else self._linear_road(batch, directions)
            if matrix is not None:
                return self._factor * matrix
            method = getattr(self, f"_{self.estimator}")
            slopes: Matrix = method(batch, directions, steps)
            return self._factor * slopes

    def _probe(self, batch: Batch, directions: Directions) -> None:
        """Look once at a few samples: a model not all of whose uses of weights are met must stream a second copy."""
        if self._probed:
            return
        n = min(2, int(batch.counts.sum()))
        few = Batch(batch.inputs[:n], batch.targets[:n], np.array([n]))
        self.parameters.check_uses(lambda: self._forward_losses(few), directions.probe(0, PROBE))
        self._batched = self._batched and self.parameters.substitutable
        self._probed = True

    # Road 1: outputs that are one linear map of w.

    def _linear_road(self, batch: Batch, directions: Directions) -> Matrix | None:
        if not self._batched or not self._linear:
            return None
        size = max(1, BATCHED_WEIGHTS // self.parameters.dimension)
        parts = [replace(directions, first=directions.first + r, k=min(size, directions.k - r))
                 for r in range(0, directions.k, size)]  # fmt: skip

        def draw(part: Directions) -> list[Tensor]:
            return self.parameters.direction_tensors(part.seed, part.round, part.first, part.k)

        # Directions are drawn while the samples are prepared: neither keeps two cores busy by itself.
        on_host = self.parameters.backend.host
        drawn = threads.begin(lambda: draw(parts[0])) if on_host else lambda: draw(parts[0])
        use = self._linear_use(batch)
        self._linear = use is not None
        if use is None:
            return None
        slopes = [self._linear_estimate(use, batch, drawn() if i == 0 else draw(part)) for i, part in enumerate(parts)]
        return np.concatenate(slopes, axis=1)

    def own_threads(self) -> contextlib.AbstractContextManager[None]:
        """Keep torch to one thread for a small model; see `own_threads`."""
        return own_threads(self.parameters)

    def _linear_use(self, batch: Batch) -> LinearUse | None:
        return linear_use(self.parameters, self.objective, batch)

    def _linear_estimate(self, use: LinearUse, batch: Batch, z: list[Tensor]) -> Matrix:
        """From X W and X Z, once each: outputs at w + c z are X W + c X Z."""
        parts = dict(zip(map(id, self.parameters.tensors), z, strict=True))
        assert use.inputs is not None and use.outputs is not None
        weights = parts[id(use.weight)]
        k, classes, features = weights.shape
        weights = weights.view(k * classes, features)
        bias = None if use.bias is None else parts[id(use.bias)][:, :, None]
        inputs, outputs = use.inputs, use.outputs

        def slopes(begin: int, end: int) -> Tensor:
            # A thread that has not asked torch yet lets its first matrix product use as many threads as the machine
            # has, which rounds differently: the first round of a process would not be that of a resumed one.
            torch.get_num_threads()
            with torch.no_grad():  # which holds for one thread only
                along = (weights @ inputs[begin:end].T).view(k, classes, -1)
                if bias is not None:
                    along += bias
                return self._slopes_of_outputs(outputs[begin:end], along, batch.targets[begin:end])

        pieces = _pieces(len(inputs), LINEAR_OUTPUTS // (k * classes), on_host=self.parameters.backend.host)
        if self.estimator == "forward":  # forward-mode levels belong to the whole process, not to a thread
            done = [slopes(begin, end) for begin, end in pieces]
        else:
            done = threads.run_in_threads(slopes, pieces)
        return _client_means(torch.cat(done, dim=1), batch.counts)

    def _slopes_of_outputs(self, outputs: Tensor, along: Tensor, targets: Tensor) -> Tensor:
        """Return the (k x samples) slopes of the losses where outputs move by `along` (k x classes x samples)."""
        k, classes, n = along.shape

        def losses(outputs: Tensor, targets: Tensor) -> Tensor:
            return checked_losses(self.objective.losses(outputs, targets), len(outputs))

        if self.estimator == "two_point":
            many = targets.repeat(k, *[1] * (targets.dim() - 1))
            # Class first: losses over few classes then run over long contiguous rows, several times faster.
            start, moved = outputs.T.contiguous()[:, None], along.mul_(self.mu).transpose(0, 1)
            above, below = along.new_empty(classes, k, n), along.new_empty(classes, k, n)
            plus = losses(torch.add(start, moved, out=above).view(classes, k * n).T, many)
            minus = losses(torch.sub(start, moved, out=below).view(classes, k * n).T, many)
            return (plus - minus).div_(2 * self.mu).view(k, n)
        if self.estimator == "gradient":
            with torch.enable_grad():
                leaf = outputs.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(losses(leaf, targets).sum(), leaf)
            return torch.einsum("nc,kcn->kn", gradient, along)

        def slope(tangent: Tensor) -> Tensor:
            result: Tensor = torch.func.jvp(lambda o: losses(o, targets), (outputs,), (tangent.T,))[1]
            return result

        slopes: Tensor = torch.func.vmap(slope)(along)
        return slopes

    # Road 2: small models, all directions at once. Road 3: one direction at a time, weights streamed.

    def _two_point(self, batch: Batch, directions: Directions, steps: Any) -> Matrix:
        if self._batched and self._light and not steps:
            matrix = self._two_point_batched(batch, directions)
            if matrix is not None:
                return matrix
        probes = [directions.probe(r, c) for r in range(directions.k) for c in (self.mu, -self.mu)]
        # All looks are asked for before the first answer is waited for.
        means = _client_means(torch.stack([self.losses(batch, probe, steps) for probe in probes]), batch.counts)
        return (means[:, ::2] - means[:, 1::2]) / (2 * self.mu)

    def losses(self, batch: Batch, probe: Probe | None, steps: Any = ()) -> Tensor:
        """Return every sample's loss at w, or at a look at it."""
        if self._in_pieces is not None and not steps:
            parts = [self._graphs(piece, probe) for piece in self._graph_inputs(batch)]
            return self._checked_losses(self._in_pieces.joined(parts, batch.inputs), batch.targets)
        if isinstance(batch.inputs, Tensor) and not steps:
            (piece,) = self._graph_inputs(batch)
            return self._graphs(piece, probe)
        with self.parameters.perturbed(probe, steps):
            return self._forward_losses(batch)

    def _graph_inputs(self, batch: Batch) -> list[GraphInputs]:
        return [(batch.inputs, batch.targets)] if self._in_pieces is None else self._in_pieces.pieces(batch.inputs)

    def _forward_losses(self, batch: Batch) -> Tensor:
        return self._losses_of(batch.inputs, batch.targets)

    def _losses_of(self, inputs: Any, targets: Tensor) -> Tensor:
        return self._checked_losses(self.objective.outputs(self.parameters.model, inputs), targets)

    def _checked_losses(self, outputs: Any, targets: Tensor) -> Tensor:
        return checked_losses(self.objective.losses(outputs, targets), len(targets))

    def _two_point_batched(self, batch: Batch, directions: Directions) -> Matrix | None:
        parameters, k = self.parameters, directions.k
        samples = int(batch.counts.sum())
        size = max(1, min(k, BATCHED_WEIGHTS // (2 * parameters.dimension), BATCHED_SAMPLES // (2 * samples)))
        w = parameters.vector()

        def losses(*tensors: Tensor) -> Tensor:
            with parameters.holding(tensors):
                return self._forward_losses(batch)

        columns = []
        for begin in range(0, k, size):
            count = min(size, k - begin)
            z = parameters.directions(directions.seed, directions.round, directions.first + begin, count)
            moved = z.mul_(self.mu)  # rounded, then added and rounded: the same bits as the kernels
            stack = torch.cat([w + moved, w - moved])
            try:
                with warnings.catch_warnings():  # what is not batched yet is slower than it could be, and right
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    both = torch.func.vmap(losses)(*parameters.unflatten(stack))
            except (RuntimeError, NotImplementedError, ValueError):
                # The model branches on its values, does not fit in this form, or the like: stream it from now on.
                self._batched = False
                return None
            columns.append(_client_means((both[:count] - both[count:]) / (2 * self.mu), batch.counts))
        return np.concatenate(columns, axis=1)

    # mu = 0.

    def _forward(self, batch: Batch, directions: Directions, steps: Any) -> Matrix:
        self._refuse_steps(steps)
        columns = []
        for r in range(directions.k):
            slopes = slope_at_w(self.parameters, lambda: self._forward_losses(batch), directions.probe(r, 0.0))[1]
            columns.append(_client_means(slopes[None], batch.counts))
        return np.concatenate(columns, axis=1)

    def _gradient(self, batch: Batch, directions: Directions, steps: Any) -> Matrix:
        """One gradient a client, k projections."""
        self._refuse_steps(steps)
        rows, begin = [], 0
        for count in batch.counts.tolist():
            part = Batch(batch.inputs[begin : begin + count], batch.targets[begin : begin + count], np.array([count]))
            begin += count
            with torch.enable_grad(), self.parameters.perturbed(None):
                loss = self._forward_losses(part).mean()
                gradients = torch.autograd.grad(loss, self.parameters.tensors, allow_unused=True)
            rows.append(self._project(gradients, directions))
        return np.stack(rows)

    def project(self, gradient: Tensor, directions: Directions) -> NDArray[np.float64]:
        """Return the slopes of a loss with this gradient, given as one vector, along every direction."""
        parts = [gradient[entry.offset : entry.offset + entry.size] for entry in self.parameters.layout]
        return self._factor * self._project(parts, directions)

    def _project(self, gradients: Any, directions: Directions) -> NDArray[np.float64]:
        """Return <gradient, z_r> for every direction, drawn piece by piece."""
        parameters, total = self.parameters, np.zeros(directions.k)
        for entry, gradient in zip(parameters.layout, gradients, strict=True):
            if gradient is None:
                continue
            flat = gradient.reshape(-1).float()
            size = max(1, PROJECTION_CHUNK // directions.k)
            for begin in range(0, flat.numel(), size):
                piece = flat[begin : begin + size]
                z = torch.empty(directions.k, piece.numel(), device=piece.device)
                engine.fill(
                    z, entry.offset + begin, directions.seed, directions.round, directions.first,
                    parameters.distribution, dimension=parameters.dimension,
                )  # fmt: skip
                total += (z @ piece).double().cpu().numpy()
        return total

    def _refuse_steps(self, steps: Any) -> None:
        if steps:
            raise ValueError(f"estimator {self.estimator!r} works at w itself: use local_memory = 'copy' with it")


def slope_at_w(
    parameters: Parameters, compute: Callable[[], Tensor], direction: Probe
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what `compute` gives at w, and its derivative along a direction, by forward-mode differentiation."""
    from torch.autograd import forward_ad

    if not parameters.substitutable:
        raise ModelError(_without_tangents(parameters))
    with forward_ad.dual_level(), _differentiable_attention():
        with parameters.along(direction.seed, direction.round, direction.index):
            try:
                result = compute()
            except (NotImplementedError, RuntimeError) as error:
                if "forward AD" not in str(error):
                    raise
                raise ModelError(
                    f"this model has an operation without forward-mode derivative ({error}); use estimator 'two_point'"
                ) from error
        value, slope = forward_ad.unpack_dual(result)  # type: ignore[no-untyped-call]
    return value, torch.zeros_like(value) if slope is None else slope


def _without_tangents(parameters: Parameters) -> str:
    if parameters.random:
        return (
            "this loss can't carry forward-mode tangents as far as can be seen: evaluated again at the same weights it "
            "gives other values. Likely it is random (dropout by numpy or Python's random, samples drawn in the loss): "
            "draw before the step, or use estimator 'two_point'"
        )
    return (
        "this loss can't carry forward-mode tangents: some of it is traced, scripted or compiled, or runs in a thread "
        "of its own. Compute with the plain module in the calling thread, or use estimator 'two_point'"
    )


def linear_use(parameters: Parameters, objective: Objective, batch: Batch) -> LinearUse | None:
    """Return how the outputs are one linear map of float32 weights, None if they are not."""
    use = LinearUse(parameters.tensors)
    with parameters.perturbed(None), use:
        outputs = objective.outputs(parameters.model, batch.inputs)
        if use.explains(outputs):  # a loss that looks at the weights itself (a penalty) is not linear in them
            objective.losses(outputs[:1], batch.targets[:1])
    if not use.explains(outputs) or use.weight is None or use.weight.dtype != torch.float32:
        return None
    use.outputs = outputs
    return use


@contextlib.contextmanager
def own_threads(parameters: Parameters) -> Iterator[None]:
    """Keep torch to one thread for a small model on the CPU; the linear road's pieces go to threads of our own.

    torch's threads would spin after each of many small operations, and on a busy machine wait for one another many
    times longer than the operations take; and what they compute need not be the same each time. Switching is best done
    around a whole round.
    """
    before, small = torch.get_num_threads(), parameters.dimension <= BATCHED_DIMENSION
    if before == 1 or not small or not parameters.backend.host or _frozen(parameters) > LARGE_BACKBONE:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def evaluating(parameters: Parameters) -> Iterator[None]:
    """Evaluate a model at w in eval mode, whether or not its task thinks of that."""
    with own_threads(parameters), parameters.perturbed(None):
        yield


def _frozen(parameters: Parameters) -> int:
    return sum(p.numel() for p in parameters.model.parameters()) - parameters.dimension


@cache
def make_first_calls() -> None:
    """Call torch's elementwise functions on the CPU once, from one thread.

    MKL chooses their code at the first call. When two threads made that call at once, one of them was seen to get code
    that is right to four digits only (2 of 59 processes on a busy machine), and a run was not repeatable.
    """
    for dtype in (torch.float32, torch.float64):
        few = torch.full((8,), 0.5, dtype=dtype)
        for name in ("exp", "log", "expm1", "log1p", "log2", "tanh", "erf", "sqrt", "rsqrt", "sin", "cos", "sigmoid"):
            getattr(torch, name)(few)


def _pieces(samples: int, rows: int, on_host: bool) -> list[tuple[int, int]]:
    """Cut the samples into pieces of about so many rows: on the CPU for threads, elsewhere only to bound memory."""
    if not on_host:
        rows *= 64
    # A multiple of four pieces, so that threads end together, and of 16 rows, which matrix products like.
    count = -(-samples // max(1, rows))
    count = -(-count // 4) * 4 if count > 1 else 1
    size = -(-samples // (16 * count)) * 16
    return [(begin, min(begin + size, samples)) for begin in range(0, samples, size)]


@contextlib.contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Take attention's plain form: the fused ones have no forward-mode derivative."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def checked_losses(losses: Tensor, samples: int) -> Tensor:
    if losses.shape != (samples,):
        raise ModelError(
            f"losses must be one number a sample ({samples}), got shape {tuple(losses.shape)}: use reduction='none'"
        )
    return losses


def _client_means(values: Tensor, counts: NDArray[np.int64]) -> Matrix:
    """Return the (clients x rows) means over each client's columns of a (rows x samples) tensor, in float64."""
    if (counts == counts[0]).all():
        sums = values.view(len(values), len(counts), int(counts[0])).sum(2, dtype=torch.float64)
    else:
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.from_numpy(counts)).to(
            values.device, non_blocking=True
        )
        sums = torch.zeros(len(values), len(counts), dtype=torch.float64, device=values.device)
        sums.index_add_(1, owner, values.to(torch.float64))
    return np.asarray(sums.cpu().numpy().T / counts[:, None], dtype=np.float64)
