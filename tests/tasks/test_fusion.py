"""Llama-style models with fewer kernels compute what they compute with all of them."""

from __future__ import annotations

import copy
import os
import threading
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="language models need the extra 'text'")
from low_rank_models import low_rank_parameters, moved_copy
from tiny_models import config
from transformers import masking_utils
from transformers.models.llama import modeling_llama as llama

from cyber0.directions import Directions, Probe
from cyber0.model.factors import ProbeBatch
from cyber0.model.vector import Parameters
from cyber0.tasks.text import fusion
from cyber0.tasks.text.answer import answer_logits
from cyber0.tasks.text.replacement import Replacement

os.environ["HF_HUB_OFFLINE"] = "1"
cuda = pytest.mark.cuda
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def model_of(name: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    changed = config(name, 40, 0)
    changed.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(changed).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.2 * torch.randn_like(p) + (1.0 if p.dim() == 1 else 0.0))
    return model.requires_grad_(False)


def on(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def test_what_is_llamas_is_found_and_what_is_not_is_left() -> None:
    found = {type(part).__name__ for part, _ in fusion._find(model_of("llama"))}
    assert found == {"LlamaRMSNorm", "LlamaMLP"}
    assert fusion._find(model_of("gemma")) == []  # its norms add one to their weights, its layers use GELU
    assert fusion._find(model_of("gpt2")) == fusion._find(model_of("opt")) == []


def test_a_function_is_llamas_by_its_code_not_by_its_name() -> None:
    def rotate_half(x: Tensor) -> Tensor:
        x1, x2 = x[..., ::2], x[..., 1::2]
        return torch.stack((-x2, x1), dim=-1).flatten(-2)

    assert not fusion._same(rotate_half, llama.rotate_half)
    assert fusion._same(llama.rotate_half, llama.rotate_half)
    assert not fusion._same(len, llama.rotate_half) and not fusion._same(None, None)


def test_a_part_that_somebody_changed_is_left(on_the_cpu: None) -> None:
    model = model_of("llama")
    with fusion.fused(model, torch.device("cpu")):
        assert "forward" in vars(model.model.norm)
    own = model.model.norm.forward = lambda x: x
    with fusion.fused(model, torch.device("cpu")), fusion.fused(model, torch.device("cpu")):
        assert model.model.norm.forward is own
    assert model.model.norm.forward is own
    assert not any("forward" in vars(m) for m in model.model.layers.modules())


def test_a_norm_of_another_type_than_its_input_gives_what_llamas_gives() -> None:
    norm = llama.LlamaRMSNorm(8)
    x = on("cpu", 3, 8, dtype=torch.bfloat16)
    assert fusion.norm(norm, x).dtype == norm(x).dtype == torch.float32 and torch.equal(fusion.norm(norm, x), norm(x))


def test_the_model_is_as_it_was_after_an_error(on_the_cpu: None) -> None:
    model = model_of("llama")
    with pytest.raises(KeyError), fusion.fused(model, torch.device("cpu")):
        assert "forward" in vars(model.model.norm) and fusion._HERE.fused
        raise KeyError
    assert not any("forward" in vars(m) for m in model.modules()) and not fusion._HERE.fused


def functions_of_transformers() -> dict[str, Any]:
    return {f"{m.__name__}.{name}": f for m in (llama, masking_utils) for name, f in vars(m).items() if callable(f)}


def test_functions_of_transformers_are_replaced_only_while_a_model_answers(on_the_cpu: None) -> None:
    model, before = model_of("llama"), functions_of_transformers()
    before_attention, attention = nn.functional.scaled_dot_product_attention, list[Any]()
    rotated_by: list[int] = []
    during: list[dict[str, Any]] = []

    def hook(*_: Any) -> None:
        during.append(functions_of_transformers())
        attention.append(nn.functional.scaled_dot_product_attention)
        q, angles = torch.ones(1, 3, 2, 4).transpose(1, 2), torch.ones(1, 3, 4)
        with mock.patch.object(fusion, "rotated", lambda x, *_: rotated_by.append(threading.get_ident()) or x):
            llama.apply_rotary_pos_emb(q, q, angles, angles)
            thread = threading.Thread(target=llama.apply_rotary_pos_emb, args=(q, q, angles, angles))
            thread.start()
            thread.join()

    model.model.norm.register_forward_pre_hook(hook)
    ids, place, words = torch.arange(5)[None], torch.tensor([4]), torch.tensor([3, 9])
    with torch.no_grad():
        answer_logits(model, ids, None, place, words, causal=True)
    changed = {name.rpartition(".")[2] for name, f in during[0].items() if f is not before[name]}
    assert fusion.ROTATION in changed and "find_packed_sequence_indices" in changed
    assert attention[0] is not before_attention and nn.functional.scaled_dot_product_attention is before_attention
    assert rotated_by == [threading.get_ident()] * 2  # queries and keys; another thread gets Llama's own
    assert functions_of_transformers() == before

    model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        answer_logits(model, ids, None, place, words, causal=True)
    assert functions_of_transformers() == before


def test_a_function_that_somebody_else_replaces_meanwhile_is_left() -> None:
    module = ModuleType("module")
    module.f = original = lambda: 1  # type: ignore[attr-defined]
    replaced = Replacement(module, "f", lambda f: lambda: f() + 1)
    with replaced(), replaced():
        assert module.f() == 2
    assert module.f is original
    with replaced():
        with replaced():
            assert module.f() == 2
        assert module.f() == 2  # until the last one leaves
        module.f = other = lambda: 5  # type: ignore[attr-defined]
    assert module.f is other
    with replaced():
        assert module.f() == 6
    assert module.f is other
    with Replacement(module, "f", lambda _: None)(), Replacement(module, "g", lambda g: g)():
        assert module.f is other and not hasattr(module, "g")


def test_an_output_layer_with_a_forward_of_its_own_keeps_it() -> None:
    model = model_of("llama")
    plain = model.lm_head.forward
    own = model.lm_head.forward = lambda hidden: 2 * plain(hidden)
    ids, place, words = torch.arange(5)[None], torch.tensor([4]), torch.tensor([3, 9])
    with torch.no_grad():
        got = answer_logits(model, ids, None, place, words, causal=True)
        assert torch.allclose(got, model(input_ids=ids).logits[:, 4, words], rtol=1e-5, atol=1e-6)
    assert model.lm_head.forward is own


def test_on_the_cpu_nothing_is_done() -> None:
    model = model_of("llama")
    with torch.no_grad(), fusion.fused(model, torch.device("cpu")):
        assert not any("forward" in vars(m) for m in model.modules()) and not fusion._HERE.fused


def test_shortcuts_that_compute_something_else_are_not_taken(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", lambda self, x: x + 1)
    model = model_of("llama")
    with fusion.fused(model, torch.device("cpu")):
        assert not fusion._HERE.fused
    assert "shortcuts" in caplog.text


def test_the_answers_are_the_models_own(on_the_cpu: None) -> None:
    check_answers("cpu", torch.float32, 1e-5)


def check_answers(device: str, dtype: torch.dtype, tolerance: float) -> None:
    model = model_of("llama").to(device, dtype)
    ids = torch.arange(5 * 7, device=device).view(5, 7) % 40
    places, words = torch.tensor([6, 3, 4, 0, 6], device=device), torch.tensor([3, 9], device=device)
    with torch.no_grad():
        got = answer_logits(model, ids, None, places, words, causal=True)
        expected = model(input_ids=ids).logits.float()[torch.arange(5), places][:, words]
    assert torch.allclose(got, expected, rtol=tolerance, atol=20 * tolerance)


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_every_layer_takes_the_kernel_for_attention_over_few_tokens(
    device: str, dtype: torch.dtype, shared: int, request: pytest.FixtureRequest
) -> None:
    if device == "cpu":
        request.getfixturevalue("on_the_cpu")
    model = model_of("llama", head_dim=32, num_key_value_heads=shared).to(device, dtype)
    for tokens, times in ((5, 2), (fusion.FEW_TOKENS, 2), (fusion.FEW_TOKENS + 1, 0), (1, 0)):
        ids = torch.arange(tokens, device=device)[None] % 40
        with torch.no_grad(), mock.patch.object(fusion, "attended", side_effect=fusion.attended) as called:
            with fusion.fused(model, torch.device(device)):
                called.reset_mock()  # the first time the shortcuts are checked
                found = model(ids, use_cache=False).logits.float()
            assert called.call_count == times
            right = model(ids, use_cache=False).logits.float()
        assert called.call_count == times
        assert (found - right).abs().max() < 3 * DTYPES[dtype] * right.abs().max()


def test_only_plain_causal_attention_takes_the_kernel(on_the_cpu: None) -> None:
    q, k = on("cpu", 2, 4, 5, 32).half(), on("cpu", 2, 2, 5, 32).half()
    wide, mask = k.repeat_interleave(2, 1), torch.ones(5, 5, dtype=torch.bool)
    with torch.no_grad(), fusion.fused(model_of("llama"), torch.device("cpu")):
        attention = nn.functional.scaled_dot_product_attention
        with mock.patch.object(fusion, "attended", return_value=None) as called:
            assert attention(q, wide, wide, is_causal=True) is None
            assert attention(q, k, k, is_causal=True, scale=0.2, enable_gqa=True) is None
            assert called.call_count == 2 and called.call_args == mock.call(q, k, k, 0.2)
            assert attention(q, wide, wide) is not None and attention(q, wide, wide, mask) is not None
            assert attention(q, wide, wide, dropout_p=0.5, is_causal=True) is not None
            assert attention(q.float(), wide.float(), wide.float(), is_causal=True) is not None
            with pytest.raises(RuntimeError):  # as torch's own
                attention(q, k, k, is_causal=True)
            elsewhere: list[Any] = []
            thread = threading.Thread(target=lambda: elsewhere.append(attention(q, wide, wide, is_causal=True)))
            thread.start()
            thread.join()
            assert called.call_count == 2 and isinstance(elsewhere[0], Tensor)


def test_layers_that_are_more_than_a_product_are_called_themselves(on_the_cpu: None) -> None:
    model = model_of("llama")
    part, x, seen = model.model.layers[0].mlp, on("cpu", 2, 3, 16), []
    right = part(x)
    with mock.patch.object(fusion, "gated_product", side_effect=fusion.gated_product) as called:
        assert torch.allclose(fusion.gated(part, x), right, rtol=1e-5, atol=1e-6) and called.call_count == 1
        part.up_proj.register_forward_hook(lambda *_: seen.append(1))
        assert torch.allclose(fusion.gated(part, x), right, rtol=1e-5, atol=1e-6) and seen == [1]
        part.gate_proj = nn.Linear(16, 32)
        assert torch.allclose(fusion.gated(part, x), part(x), rtol=1e-5, atol=1e-6) and called.call_count == 1


@pytest.mark.parametrize("dtype", DTYPES)
class TestKernels:
    pytestmark = cuda

    def test_a_norm_is_llamas(self, dtype: torch.dtype) -> None:
        norm = llama.LlamaRMSNorm(72, 1e-5).cuda().to(dtype)
        x = 3 * on("cuda", 5, 3, 72, dtype=dtype)
        assert torch.allclose(fusion.norm(norm, x), norm(x), rtol=DTYPES[dtype], atol=DTYPES[dtype])

    @pytest.mark.parametrize("rows", [0, 1, 700])
    def test_a_gate_is_llamas(self, dtype: torch.dtype, rows: int) -> None:
        from cyber0.tasks.text.fusion_kernels import silu_times

        gate, up = 4 * on("cuda", rows, 33, dtype=dtype), on("cuda", 33, rows, dtype=dtype).T
        expected = nn.functional.silu(gate.float()) * up.float()
        assert torch.allclose(silu_times(gate, up).float(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])

    @pytest.mark.parametrize(("heads", "size", "samples"), [(9, 64, 1), (1, 8, 3), (5, 128, 3)])
    def test_a_rotation_is_llamas(self, dtype: torch.dtype, heads: int, size: int, samples: int) -> None:
        x = on("cuda", 3, 11, heads, size, dtype=dtype).transpose(1, 2)
        cos, wide = on("cuda", samples, 11, size, dtype=dtype), on("cuda", samples, 11, size + 1, dtype=dtype)
        assert not fusion.rotatable(x, cos, wide[..., 1:])
        assert heads == 1 or not fusion.rotatable(x.contiguous(), cos, cos)
        sin = wide[..., 1:].contiguous()
        assert fusion.rotatable(x, cos, sin)
        expected = llama.apply_rotary_pos_emb(x, x, cos, sin)[0]
        assert torch.allclose(fusion.rotated(x, cos, sin), expected, rtol=DTYPES[dtype], atol=3 * DTYPES[dtype])

    def test_the_answers_are_the_models_own(self, dtype: torch.dtype) -> None:
        check_answers("cuda", dtype, DTYPES[dtype])
        with torch.no_grad(), fusion.fused(model_of("llama").cuda(), torch.device("cuda")):
            assert fusion._HERE.fused


@pytest.mark.cuda
def test_a_probe_meets_the_weights_of_every_shortcut() -> None:
    model = model_of("llama").requires_grad_(True).cuda()
    other = copy.deepcopy(model)
    parameters, probe = Parameters(model), Probe(5, 2, 0, 0.05)
    with parameters.copied(probe), torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    ids, places, words = torch.arange(12, device="cuda").view(2, 6), torch.tensor([5, 2]).cuda(), torch.tensor([1, 2])
    with torch.no_grad(), parameters.perturbed(probe):
        got = answer_logits(model, ids, None, places, words.cuda(), causal=True)
    with torch.no_grad():
        expected = other(input_ids=ids).logits[torch.arange(2), places][:, words]
        before = model(input_ids=ids).logits[torch.arange(2), places][:, words]
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4) and not torch.allclose(before, expected, atol=1e-2)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    ("stored", "compute"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.float16)]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_probes_at_once_meet_the_weights_of_every_shortcut(
    device: str, stored: torch.dtype, compute: torch.dtype | None, rank: int, request: pytest.FixtureRequest
) -> None:
    if device == "cpu":
        request.getfixturevalue("on_the_cpu")
    model = model_of("llama", head_dim=32).requires_grad_(True)
    directions, distances, ids = Directions(1, 0, 2), (0.05, -0.05), torch.arange(12).view(2, 6)
    copies = [moved_copy(model, rank, directions, r, c) for r in range(2) for c in distances]
    with torch.no_grad():
        right = torch.stack([moved(ids, use_cache=False).logits for moved in copies])
    probes = low_rank_parameters(model.to(device, stored), rank, compute=compute).low_rank
    assert probes is not None
    watched = mock.patch.object(fusion, "attended", side_effect=fusion.attended)
    with torch.no_grad(), fusion.fused(model, torch.device(device)), watched as called:
        found = probes.learn(
            lambda times: model(ids.repeat(times, 1).to(device), use_cache=False).logits,
            2,
            ProbeBatch(directions, distances),
        )
    error = float((found.float().cpu().view(right.shape) - right).abs().max() / right.abs().max())
    assert called.called == (found.dtype != torch.float32)
    assert error < {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}[found.dtype]
    assert (right[0] - right[1]).abs().max() > 0.2 * right.abs().max()


@pytest.mark.usefixtures("on_the_cpu")
def test_norms_are_fused_also_where_weights_are_stored_in_another_type() -> None:
    model, ids = model_of("llama").requires_grad_(True), torch.arange(6)[None]
    parameters, probe = Parameters(model, compute=torch.bfloat16), Directions(1, 0, 1).probe(0, 1e-3)
    assert fusion._right(torch.device("cpu"))  # which takes the shortcuts once
    norms = sum(isinstance(part, llama.LlamaRMSNorm) for part in model.modules())
    counted = mock.patch.object(fusion.functional, "rms_norm", side_effect=nn.functional.rms_norm)
    with torch.no_grad(), counted as called, parameters.perturbed(probe), fusion.fused(model, torch.device("cpu")):
        got = model(ids).logits
    assert called.call_count >= norms and {call.args[0].dtype for call in called.call_args_list} == {torch.bfloat16}
    with torch.no_grad(), parameters.perturbed(probe):
        torch.testing.assert_close(got, model(ids).logits, rtol=3e-2, atol=3e-2)
