"""Goal: what the laws are asked about is what went into a kernel of attention and what came out of
it, and training stays the same bit for bit.  Calls of which not all is known are left out, and the
layer says why.
Method: small models in bf16, beside a twin that nothing watches and that keeps its own tensors;
what reaches the kernels library is recorded on the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama as llama

import bellwether
from bellwether._kernels import laws
from bellwether._laws.call import GradedCall
from bellwether._laws.judge import RIGHT, Limits, judge
from bellwether._native import c_api
from bellwether._step.grad_scale import POWERS
from bellwether.settings import STATS

BATCH, HEADS, KV_HEADS, TOKENS, DIM = 2, 4, 2, 40, 16
WIDTH = HEADS * DIM
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
PADDED = CAUSAL & (torch.arange(TOKENS) < torch.tensor([TOKENS, 27])[:, None, None])[:, None]
TENSORS = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")
Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def sdpa(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if m.mask is not None:
        return F.scaled_dot_product_attention(q, k, v, m.mask, enable_gqa=True)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def by_math(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(m, q, k, v)


def written_out(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(DIM)
    scores = scores.masked_fill(~(CAUSAL if m.mask is None else m.mask), -math.inf)
    return m.softmax(scores) @ v  # type: ignore[no-any-return]


def ours(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if m.mask is not None:
        return bellwether.attention(q, k, v, mask=m.mask, enable_gqa=True)
    return bellwether.attention(q, k, v, causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, attend: Attend, kv_heads: int, copies: bool, mask: Optional[Tensor]) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.copies = HEADS, kv_heads, copies
        self.q_proj = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, kv_heads * DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, kv_heads * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.attend, self.mask = attend, mask
        self.keep = False
        self.kept: list[Tensor] = []

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.copies:
            k, v = (t.repeat_interleave(HEADS // self.kv_heads, 1) for t in (k, v))
        y = self.attend(self, q, k, v)
        if self.keep:
            self.kept = [q, k, v, y]
            for t in self.kept:
                t.retain_grad()
        return x + self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(
        self, attend: Attend = sdpa, kv_heads: int = HEADS, copies: bool = False,
        mask: Optional[Tensor] = None, reentrant: Optional[bool] = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Attention(attend, kv_heads, copies, mask) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def made(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Net:
    torch.manual_seed(seed)
    net = Net(**how)
    for p in net.parameters():
        p.data.mul_(2)
    return net.to(dtype)


def batch(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    given = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(7))
    return given.to(dtype).requires_grad_()


def step(net: Net, factor: float = 1.0) -> list[Optional[Tensor]]:
    """The gradients of one."""
    x = batch(next(net.parameters()).dtype)
    (net(x).float().square().mean() * factor).backward()
    return [x.grad, *(p.grad for p in net.parameters())]


def are_same(some: list[Optional[Tensor]], others: list[Optional[Tensor]]) -> bool:
    """Bit for bit."""
    return all(
        b is None if a is None else b is not None and torch.equal(a, b)
        for a, b in zip(some, others)
    )


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[laws.Graded]:
    """What the library is asked."""
    calls: list[laws.Graded] = []

    def add(sums: Any, of: laws.Graded, **how: Any) -> None:
        tensors = {name: getattr(of, name).clone() for name in TENSORS}
        calls.append(dataclasses.replace(of, **tensors))

    monkeypatch.setattr(laws, "add_laws", add)
    monkeypatch.setattr(laws, "add_shadow", lambda *_, **__: None)
    return calls


def watched(net: nn.Module, path: Path, **settings: Any) -> bellwether.Monitor:
    return bellwether.attach(
        net, record=str(path / "a.bwrun"), run="laws", every=1, overhead_budget=1e9, **settings
    )


def without(monitor: bellwether.Monitor) -> list[dict[str, int]]:
    """Of each layer, why its laws were left out."""
    status = monitor.status()
    assert status["errors"] == 0 and status["live"], status["last_error"]
    return [layer["without_laws"] for layer in status["layers"]]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "padded": dict(mask=PADDED), "grouped": dict(kv_heads=KV_HEADS),
    "copies": dict(kv_heads=KV_HEADS, copies=True), "reentrant": dict(reentrant=True),
    "not reentrant": dict(reentrant=False),
}  # fmt: skip
CASES = [
    (attend, kind)
    for attend in (sdpa, by_math, written_out, ours)
    for kind in KINDS
    if not (attend is written_out and kind == "grouped")
]


@pytest.mark.parametrize("attend, kind", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_the_tensors_are_those_of_the_kernel(
    attend: Attend, kind: str, heard: list[laws.Graded], tmp_path: Path
) -> None:
    how = dict(KINDS[kind], attend=attend)
    twin = made(**{**how, "reentrant": None})
    for block in twin.blocks:
        block.keep = True
    expected = step(twin)
    net = made(**how)
    monitor = watched(net, tmp_path)
    got = step(net)
    assert without(monitor) == [{}, {}]
    monitor.detach()
    assert are_same(got, expected)
    assert len(heard) == 2
    for call, block in zip(reversed(heard), twin.blocks):
        q, k, v, y = block.kept
        for mine, true in ((call.q, q), (call.k, k), (call.v, v), (call.o, y), (call.d_o, y.grad),
                           (call.dq, q.grad), (call.dk, k.grad), (call.dv, v.grad)):  # fmt: skip
            assert true is not None and torch.equal(mine, true)


def turned(x: Tensor) -> Tensor:
    """In 32 bits, as rotary embeddings are."""
    angles = torch.arange(TOKENS)[:, None] * torch.linspace(0.1, 1, DIM)
    return x * angles.cos() + x.roll(DIM // 2, -1) * angles.sin()


def eager(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m.num_key_value_groups = q.shape[1] // k.shape[1]
    added = torch.zeros(TOKENS, TOKENS).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
    o, _ = llama.eager_attention_forward(m, q, k, v, added[None, None], scaling=DIM**-0.5)
    return o.transpose(1, 2)  # type: ignore[no-any-return]


def one_is_narrow(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(m, q.to(torch.get_autocast_dtype("cpu")), k, v)


class Widened(Attention):
    """q and k are float32, and v is what autocast makes of a product."""

    def __init__(self, attend: Attend, *how: Any) -> None:
        def widened(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = turned(q), turned(k)
            if m.keep:
                m.wide = [q, k, v]
                for t in m.wide:
                    t.retain_grad()
            return attend(m, q, k, v)

        super().__init__(widened, *how)


UNDER_AUTOCAST = {sdpa: "accumulated", one_is_narrow: "accumulated", ours: "fused",
                  eager: "composed"}  # fmt: skip


@pytest.mark.parametrize("attend", UNDER_AUTOCAST, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_that_autocast_narrows_are_asked_in_its_type(
    attend: Attend, kv_heads: int, dtype: torch.dtype, heard: list[laws.Graded], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(globals(), "Attention", Widened)

    def trained(net: Net) -> list[Optional[Tensor]]:
        with torch.autocast("cpu", dtype):
            y = net(batch(torch.float32))
        y.float().square().mean().mul(64).backward()
        return [p.grad for p in net.parameters()]

    twin, net = (made(dtype=torch.float32, attend=attend, kv_heads=kv_heads) for _ in "ab")
    for block in twin.blocks:
        block.keep = True
    expected = trained(twin)
    monitor = watched(net, tmp_path)
    got = trained(net)
    assert without(monitor) == [{}, {}]
    monitor.detach()
    assert are_same(got, expected) and len(heard) == 2
    for call, block in zip(reversed(heard), twin.blocks):
        assert {getattr(call, name).dtype for name in TENSORS} == {dtype}
        assert call.arithmetic == UNDER_AUTOCAST[attend]
        q, k, v = block.wide
        for mine, true in ((call.q, q), (call.k, k), (call.v, v),
                           (call.dq, q.grad), (call.dk, k.grad), (call.dv, v.grad)):  # fmt: skip
            assert torch.equal(mine, true.to(dtype))
        graded = GradedCall(call.q, call.k, call.v, call.o, call.d_o, call.dq, call.dk, call.dv,
                            call.scale, call.mask)  # fmt: skip
        assert judge(graded, Limits(10**4)).verdict == RIGHT  # By fp64.


def test_the_catalogue_names_all_rows() -> None:
    rows = {*c_api.LAW_STATS, *c_api.LAW_KV_STATS, *c_api.SHADOW_STATS, *c_api.SHADOW_KV_STATS,
            *c_api.FACTOR_STATS, *c_api.FACTOR_KV_STATS}  # fmt: skip
    unsent = {f"{tensor}_{part}" for tensor in ("do", "dq", "dk", "dv")
              for part in ("sum", "abs_sum")}  # fmt: skip
    assert set(STATS["laws"]) == rows - unsent
    of_gradients = {name for name in rows - unsent if not name.startswith("shadow_o_")}
    assert of_gradients - set(POWERS) == {"law_rows_left_out"}


def dropped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def keys_are_queries(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(k, k, v)


def detached_keys(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.detach(), v)


def entropic(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(DIM)
    return m.softmax(scores) @ v + scores.logsumexp(-1, keepdim=True).square()


LEFT_OUT = {
    dropped: "dropout in the attention",
    keys_are_queries: "two of q, k and v are one tensor",
    detached_keys: "no gradient reaches k",
    entropic: "the scores go on into logsumexp",
}


@pytest.mark.parametrize("attend", LEFT_OUT, ids=lambda f: f.__name__)
def test_calls_that_are_left_out_are_said(
    attend: Attend, heard: list[laws.Graded], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    twin = made(attend=attend)
    torch.manual_seed(2)
    expected = step(twin)
    net = made(attend=attend)
    monitor = watched(net, tmp_path)
    torch.manual_seed(2)
    got = step(net)
    assert without(monitor) == [{LEFT_OUT[attend]: 1}] * 2 and not heard
    monitor.detach()
    assert are_same(got, expected)


def test_nothing_is_said_where_the_laws_are_not_asked_for(
    heard: list[laws.Graded], tmp_path: Path
) -> None:
    net = made(attend=dropped)
    monitor = watched(net, tmp_path, stats="drift, leak")
    step(net)
    assert without(monitor) == [{}, {}] and not heard
    monitor.detach()


def test_a_backward_without_all_gradients_is_counted(
    heard: list[laws.Graded], tmp_path: Path
) -> None:
    net = made()
    monitor = watched(net, tmp_path)
    weights = [block.v_proj.weight for block in net.blocks]
    torch.autograd.grad(net(batch()).float().square().mean(), weights[1:])
    monitor.step()
    assert without(monitor) == [{}, {"a backward pass without all of dq, dk and dv": 1}]
    assert not heard
    step(net)
    assert len(heard) == 2
    monitor.detach()


def test_only_sampled_steps_are_asked(heard: list[laws.Graded], tmp_path: Path) -> None:
    net = made()
    monitor = bellwether.attach(net, record=str(tmp_path / "a.bwrun"), run="laws", every=3)
    for count in (2, 2, 2, 4):
        step(net)
        assert len(heard) == count
        monitor.step()
    monitor.detach()


def test_of_a_long_batch_the_first_sequences_are_asked(
    heard: list[laws.Graded], tmp_path: Path
) -> None:
    net = made()
    monitor = watched(net, tmp_path, sequences=1)
    step(net)
    assert [call.dk.shape[0] for call in heard] == [1, 1] and without(monitor) == [{}, {}]
    monitor.detach()
