"""Goal: on a GPU the operator is right too, on any stream, in CUDA graphs and compiled.
Method: as test_attention.py and test_attention_torch.py; skipped without a GPU of
compute capability 8.0 or later and a build with CUDA, unless BELLWETHER_REQUIRE_GPU=1.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from test_attention_masks import drawn, formula, run
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether import sdpa
from bellwether._attention import dispatch

from attention_reference import KINDS, Features, inputs, plain, with_gradients
from gpu import LACKS, SKIPPED

if SKIPPED:
    pytest.skip(LACKS, allow_module_level=True)

SHAPE = {"heads": 4, "kv_heads": 2, "q_len": 300, "k_len": 300, "dim": 64}


def on_gpu(kind: str, **shape: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, d_o = (t.cuda() for t in inputs(kind, **{**SHAPE, **shape}))
    return q, k, v, d_o


def ours(mode: str = "hp", **how: Any) -> Any:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bellwether.attention(q, k, v, causal=True, mode=mode, enable_gqa=True, **how)

    return function


def close(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Within what bf16 products can differ by, of the largest element."""
    return all(
        float((x.cpu() - y).abs().max()) <= 2**-6 * float(y.abs().max()) for x, y in zip(a, b)
    )


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["fa", "hp", "hpm", "sr"])
def test_as_exact_as_pytorch(kind: str, mode: str) -> None:
    given = inputs(kind, **SHAPE)
    qkv, d_o = given[:3], given[3]

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, Features(causal=True))

    got = with_gradients(ours(mode), tuple(t.cuda() for t in qkv), d_o.cuda())
    want = with_gradients(reference, qkv, d_o, torch.float64)
    yardstick = with_gradients(reference, qkv, d_o)
    factor = 2.5 if mode == "sr" else 2.0
    for name, g, w, y in zip(("o", "dq", "dk", "dv"), got, want, yardstick):
        error, bar = (
            float((g.cpu() - w).abs().max()),
            factor * float((y - w).abs().max()) + 1e-5,
        )
        assert error <= bar, f"{name}: {error:.2e} > {bar:.2e}"


@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("how", [{"window": 40}, {"softcap": 5.0}, {"center": True}])
def test_features_agree_with_the_cpu(how: dict[str, Any], dim: int) -> None:
    given = inputs("randn", **{**SHAPE, "dim": dim})
    want = with_gradients(ours(**how), given[:3], given[3])
    got = with_gradients(ours(**how), tuple(t.cuda() for t in given[:3]), given[3].cuda())
    assert close(got, want)


def test_packed_sequences_agree_with_the_cpu() -> None:
    given = inputs("randn", **SHAPE, batch=1)
    cu = torch.tensor([0, 1, 128, 128, 300], dtype=torch.int32)
    want = with_gradients(ours(cu_seqlens=cu), given[:3], given[3])
    got = with_gradients(
        ours(cu_seqlens=cu.cuda()), tuple(t.cuda() for t in given[:3]), given[3].cuda()
    )
    assert close(got, want)


# ---- masks, key lengths, sinks, values of another width ----


def on_device(how: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cuda() if isinstance(t, Tensor) else t for name, t in how.items()}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name == "bellwether"]


@pytest.mark.parametrize("seed", range(40))
def test_random_masked_calls_equal_the_formula(
    seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_said", set())
    tensors, how = drawn(seed, lengths=(1, 70, 200), dims=(8, 40, 64, 128, 192))
    tensors = [t.bfloat16().double() for t in tensors]
    want = run(formula, tensors, how, torch.double)
    on_gpu_tensors = [t.cuda() for t in tensors]
    got = run(bellwether.attention, on_gpu_tensors, on_device(how), torch.bfloat16)
    for number, (g, w) in enumerate(zip(got, want)):
        error = float((g.cpu().double() - w).abs().max()) if g.numel() else 0.0
        assert error <= 2**-6 * max(1.0, float(w.abs().max())), (number, error, how)
    assert said(caplog) == []


def test_masked_calls_repeat_and_compile_whole() -> None:
    torch.manual_seed(5)
    q, k, v, d_o = on_gpu("randn", q_len=500, k_len=500)
    how = {
        "mask": torch.rand(2, 1, 500, 500, device="cuda") > 0.3,
        "key_lengths": torch.tensor([500, 411], device="cuda"),
        "sinks": torch.randn(4, device="cuda"),
    }
    torch.use_deterministic_algorithms(True)
    try:
        first = with_gradients(ours(**how), (q, k, v), d_o)
        assert all(same(with_gradients(ours(**how), (q, k, v), d_o), first) for _ in range(10))
        torch._dynamo.reset()
        compiled = torch.compile(ours(**how), fullgraph=True, backend="aot_eager")
        assert same(with_gradients(compiled, (q, k, v), d_o), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_padding_is_never_read(left: bool, center: bool) -> None:
    q, k, v, d_o = on_gpu("randn")
    begin, end = (77, 300) if left else (0, 211)
    bounds = torch.tensor([[0, 300], [begin, end]], device="cuda")
    call = ours(key_lengths=bounds, center=center)
    clean = with_gradients(call, (q, k, v), d_o)
    for t in (k, v):
        t[1, :, :begin] = t[1, :, end:] = math.nan
    got = with_gradients(call, (q, k, v), d_o)
    assert all(bool(t.isfinite().all()) for t in got)
    assert close(got, tuple(t.cpu() for t in clean))
    assert not got[2][1, :, :begin].any() and not got[3][1, :, end:].any()


def test_stabilize_serves_masks(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v, _ = on_gpu("randn", heads=2)
    mask = torch.rand(2, 1, 300, 300, device="cuda") > 0.3

    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = self.k_proj = torch.nn.Identity()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = Attends()
    with bellwether.stabilize(model):
        got = model(q, k, v)
    assert torch.equal(got, bellwether.attention(q, k, v, mask=mask))
    assert said(caplog) == []


def test_deterministic_algorithms_repeat() -> None:
    q, k, v, d_o = on_gpu("randn", q_len=1500, k_len=1500)
    torch.use_deterministic_algorithms(True)
    try:
        first = with_gradients(ours(), (q, k, v), d_o)
        assert all(same(with_gradients(ours(), (q, k, v), d_o), first) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", ["hp", "hpm"])
def test_compiled_checkpointed_and_under_autocast(mode: str) -> None:
    q, k, v, d_o = on_gpu("randn", q_len=64, k_len=64)  # One block of queries: dq repeats.
    want = with_gradients(ours(mode), (q, k, v), d_o)
    torch._dynamo.reset()
    compiled = torch.compile(ours(mode), fullgraph=True, backend="aot_eager")
    assert same(with_gradients(compiled, (q, k, v), d_o), want)

    def again(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(ours(mode), q, k, v, use_reentrant=False)

    assert same(with_gradients(again, (q, k, v), d_o), want)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(ours(mode)(q.float(), k.float(), v.float()).double(), want[0])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("how", [{"mode": "hpm"}, {"center": True}], ids=["hpm", "center"])
def test_cuda_graph_replays_with_new_inputs(how: dict[str, Any], dim: int) -> None:
    q, k, v, d_o = on_gpu("randn", q_len=64, k_len=64, dim=dim)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(ours(**how)(*leaves), leaves, d_o)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = ours(**how)(*leaves)
        gradients = torch.autograd.grad(o, leaves, d_o)
    other = on_gpu("sink", q_len=64, k_len=64, dim=dim)
    with torch.no_grad():
        for leaf, new in zip(leaves, other):
            leaf.copy_(new)
        d_o.copy_(other[3])
    graph.replay()
    want = with_gradients(ours(**how), other[:3], other[3])
    assert same(tuple(t.double() for t in (o.detach(), *gradients)), want)


def test_the_current_stream_is_used() -> None:
    q, k, v, _ = on_gpu("randn", q_len=2048, k_len=2048)
    want = ours()(q, k, v)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # Whoever does not wait for it reads zeros.
        late.copy_(q)
        got = ours()(late, k, v)
    stream.synchronize()
    assert torch.equal(got, want)


def test_views_that_are_not_aligned_are_copied() -> None:
    q, k, v, d_o = on_gpu("randn", q_len=64, k_len=64)
    moved = [shifted_in_memory(t) for t in (q, k, v)]
    assert same(
        with_gradients(ours(), tuple(moved), d_o),
        with_gradients(ours(), (q, k, v), d_o),
    )


def shifted_in_memory(t: Tensor) -> Tensor:
    """The same numbers one element further in memory."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return room[1:].view(t.shape).copy_(t)


def test_float32_falls_back() -> None:
    q, k, v, _ = on_gpu("randn")
    got = ours()(q.float(), k.float(), v.float())
    assert got.dtype == torch.float32 and close((got,), (ours()(q, k, v).float().cpu(),))


# ---- centring ----


def centred(k: Tensor, cu: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """(keys minus their means, the mean of their sizes) in double."""
    wide = k.double()
    bounds = [0, k.shape[2]] if cu is None else cu.tolist()
    out, size = torch.empty_like(wide), torch.empty_like(wide)
    for a, b in zip(bounds, bounds[1:]):
        part = wide[:, :, a:b]
        out[:, :, a:b] = part - part.mean(dim=2, keepdim=True)
        size[:, :, a:b] = part.abs().mean(dim=2, keepdim=True)
    return out, size


def is_centred(got: Tensor, k: Tensor, cu: Optional[Tensor] = None) -> bool:
    """Within the bound of center_keys.cu and the rounding of the result."""
    want, size = centred(k, cu)
    bound = (24 + k.shape[2] / 256) * 2**-24 * size
    rounding = torch.finfo(k.dtype).eps * want.abs() + torch.finfo(k.dtype).smallest_normal
    return bool(((got.double() - want).abs() <= bound + rounding).all())


def keys(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape, device="cuda") + 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 1, 64), (2, 3, 31, 64), (3, 2, 257, 128), (1, 2, 2049, 96), (1, 1, 40_001, 64),
     (2, 2, 300, 256), (2, 2, 77, 5), (1, 1, 513, 1000), (512, 4, 16, 64)],
)  # fmt: skip
def test_keys_are_centred(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    k = keys(dtype, *shape)
    got = bellwether.center_keys(k)
    assert is_centred(got, k)
    # In the layout of a projection, in rows that are not aligned, and with padding behind.
    for other in (
        k.transpose(1, 2).contiguous().transpose(1, 2),
        shifted_in_memory(k),
        torch.cat([k, torch.full_like(k, math.nan)], dim=3)[..., : shape[3]],
    ):
        assert is_centred(bellwether.center_keys(other), k)


@pytest.mark.parametrize("lengths", [[0, 5, 0, 300, 1], [9000], [1] * 700, [3, 20_000, 64]])
def test_packed_keys_are_centred(lengths: list[int]) -> None:
    torch.manual_seed(4)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    k = keys(torch.bfloat16, 1, 3, int(cu[-1]), 64)
    assert is_centred(bellwether.center_keys(k, cu), k, cu)
    if len(lengths) > 2:  # What one sequence holds concerns no other.
        a, b = int(cu[1]), int(cu[2])
        k[:, :, a:b] = math.nan
        got = bellwether.center_keys(k, cu)
        assert torch.isnan(got[:, :, a:b]).all()
        assert not torch.isnan(got[:, :, :a]).any() and not torch.isnan(got[:, :, b:]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(2, 3, 31, 64), (1, 2, 2049, 96), (2, 1, 9001, 64), (2, 2, 77, 5)]
)
def test_the_mean_is_of_visible_keys(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(6)
    k = keys(dtype, *shape)
    visible = torch.rand(shape[0], 1, shape[2], device="cuda") > 0.3
    visible[-1, :, : shape[2] // 2] = False
    k.masked_fill_(~visible[..., None], math.nan)
    got = bellwether.center_keys(k, visible=visible)
    for entry in range(shape[0]):
        shown = visible[entry, 0]
        assert is_centred(got[entry : entry + 1, :, shown], k[entry : entry + 1, :, shown])
        assert torch.isnan(got[entry, :, ~shown]).all()


def test_centring_repeats_bit_for_bit() -> None:
    k = keys(torch.float32, 2, 4, 5000, 64)
    first = bellwether.center_keys(k)
    assert all(torch.equal(bellwether.center_keys(k), first) for _ in range(200))


def test_the_gradient_of_centring_is_centring() -> None:
    k = keys(torch.bfloat16, 2, 3, 700, 64).requires_grad_()
    gradient = torch.randn_like(k)
    bellwether.center_keys(k).backward(gradient)
    assert k.grad is not None and torch.equal(k.grad, bellwether.center_keys(gradient))
    k.grad = None
    bellwether.center_keys(k).sum().backward()  # Its gradient has no layout at all.
    assert k.grad is not None and not k.grad.any()


def test_centring_compiles_whole_and_is_captured() -> None:
    k = keys(torch.bfloat16, 2, 3, 700, 64)
    want = bellwether.center_keys(k)
    torch._dynamo.reset()
    compiled = torch.compile(bellwether.center_keys, fullgraph=True)
    assert torch.equal(compiled(k), want)
    cu = torch.tensor([0, 100, 700], device="cuda", dtype=torch.int32)
    packed = k[:1].contiguous()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, got_packed = bellwether.center_keys(k), bellwether.center_keys(packed, cu)
    k.add_(1)
    packed.mul_(2)
    graph.replay()
    assert torch.equal(got, bellwether.center_keys(k))
    assert torch.equal(got_packed, bellwether.center_keys(packed, cu))


# ---- as the flash attention of scaled_dot_product_attention ----


@pytest.mark.skipif(not sdpa.has_slot(), reason="this torch has no such slot")
def test_the_activated_implementation_is_ours_until_restored() -> None:
    q, k, v, d_o = on_gpu("randn", q_len=64, k_len=64)  # One block of queries: dq repeats.

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, enable_gqa=True)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before, with_dropout = (with_gradients(f, (q, k, v), d_o) for f in (attend, dropped))
        want = with_gradients(ours(), (q, k, v), d_o)
        # What this leaves in the compiler's caches must not be taken for the activated one.
        with_gradients(torch.compile(attend, fullgraph=True), (q, k, v), d_o)
        sdpa.register()
        torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
        try:
            assert same(with_gradients(attend, (q, k, v), d_o), want)
            torch._dynamo.reset()
            compiled = torch.compile(attend, fullgraph=True)
            assert same(with_gradients(compiled, (q, k, v), d_o), want)
            assert same(with_gradients(dropped, (q, k, v), d_o), with_dropout)
        finally:
            torch.nn.attention.restore_flash_attention_impl()
        assert same(with_gradients(attend, (q, k, v), d_o), before) and not same(before, want)
