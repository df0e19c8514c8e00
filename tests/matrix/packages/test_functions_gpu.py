"""Goal: FlashAttention 4's functions, PyTorch's flex_attention and its varlen_attn are watched
whole on a GPU, and train the same bits as without us.
Method: the real functions in a small model, twice: alone, and watched with each call captured as
it is made.  Numbers are compared with fp64 from the captured call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import gpu_results
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import bellwether

import definitions
import projections
from capture import as_given, copied
from cell import prepare
from comparison import Result, Run, digest, judge, recorded
from definitions import Call
from gpu import LACKS, SKIPPED
from training import STEPS, WATCH

pytestmark = pytest.mark.skipif(SKIPPED, reason=LACKS)

DEVICE = "cuda"
HEADS, DIM, WIDTH, TOKENS = 4, 64, 96, 160
WINDOW = 21  # Keys before a row's own that it sees.
LENGTHS = (75, 1, 100, 144)  # Of documents that are laid end to end.
SOFTCAP = 3.0


def offsets() -> Tensor:
    return torch.tensor((0, *LENGTHS)).cumsum(0).to(torch.int32)


def documents(device: str = "cpu") -> Tensor:
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)


# ---- what a row may see, [rows, keys] ----


def everything(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool)


def causal(tokens: int) -> Tensor:
    return everything(tokens).tril()


def window(tokens: int) -> Tensor:
    return causal(tokens).triu(-WINDOW)


def apart(allowed: Callable[[int], Tensor], tokens: int) -> Tensor:
    """Within documents."""
    document = documents()
    return allowed(tokens) & (document[:, None] == document)


# ---- the functions; q, k, v and o are [batch, tokens, heads, dim] ----

Attend = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]


def flash(**options: Any) -> Attend:
    def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

        given = {"learnable_sink": module.sinks} if module.case.sinks else {}
        o: Tensor = flash_attn_func(q, k, v, deterministic=True, **given, **options)[0]
        return o

    return attend


def flash_documents(**options: Any) -> Attend:
    def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        cu = offsets().to(q.device)
        given = {"learnable_sink": module.sinks} if module.case.sinks else {}
        o = flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(LENGTHS),
            max_seqlen_k=max(LENGTHS), deterministic=True, **given, **options,
        )[0]  # fmt: skip
        return o[None]  # type: ignore[no-any-return]

    return attend


def varlen(**options: Any) -> Attend:
    def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cu = offsets().to(q.device)
        o = varlen_attn(q[0], k[0], v[0], cu, cu, max(LENGTHS), max(LENGTHS), **options)
        return o[None]  # type: ignore[call-overload,no-any-return,index]

    return attend


@functools.cache
def compiled_flex() -> Any:
    return torch.compile(flex_attention)


@functools.cache
def block_mask(kind: str, tokens: int) -> Any:
    if kind == "documents":
        document = documents(DEVICE)  # Outside of the function: it makes no tensors.

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (document[q] == document[k])
    else:

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k <= (WINDOW if kind == "window" else tokens))

    return create_block_mask(allowed, None, None, tokens, tokens, device=DEVICE)


def distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - (q - k).abs() * 0.05 * (h + 1)


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def flex(kind: Optional[str] = None, compiled: bool = True, **options: Any) -> Attend:
    def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = dict(options)
        if kind is not None:
            given["block_mask"] = block_mask(kind, q.shape[1])
        function = compiled_flex() if compiled else flex_attention
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o: Tensor = function(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **given)
        return o.transpose(1, 2)

    return attend


@dataclasses.dataclass(frozen=True)
class Case:
    attend: Attend
    allowed: Callable[[int], Tensor] = everything
    dtype: torch.dtype = torch.bfloat16
    kv_heads: int = 2
    softcap: float = 0.0
    sinks: bool = False
    distance: bool = False  # A bias by distance().
    laid: bool = False  # Documents end to end in one sequence.
    checkpointing: Optional[str] = None
    scale: float = DIM**-0.5


FULL = torch.float32
PACKAGES = {
    "flash": "flash-attn-4",
    "varlen": "torch",
    "flex": "torch",
}
LAID = dict(laid=True)
CASES: dict[str, Case] = {
    "flash": Case(flash()),
    "flash-causal": Case(flash(causal=True), causal),
    "flash-window": Case(flash(causal=True, window_size=(WINDOW, 0)), window),
    "flash-window-alone": Case(flash(window_size=(WINDOW, 0)), window, kv_heads=4),
    "flash-softcap": Case(flash(causal=True, softcap=SOFTCAP), causal, softcap=SOFTCAP),
    "flash-sinks": Case(flash(causal=True), causal, sinks=True),
    "flash-half": Case(flash(causal=True), causal, dtype=torch.float16),
    "flash-checkpoint": Case(flash(causal=True), causal, checkpointing="non-reentrant"),
    "flash-reentrant": Case(flash(causal=True), causal, checkpointing="reentrant"),
    "flash-documents": Case(flash_documents(), functools.partial(apart, everything), **LAID),
    "flash-documents-causal": Case(
        flash_documents(causal=True), functools.partial(apart, causal), **LAID
    ),
    "flash-documents-window": Case(
        flash_documents(causal=True, window_size=(WINDOW, 0)),
        functools.partial(apart, window), **LAID,
    ),
    "flash-documents-sinks": Case(
        flash_documents(causal=True), functools.partial(apart, causal), sinks=True, **LAID
    ),
    "flash-documents-checkpoint": Case(
        flash_documents(causal=True), functools.partial(apart, causal),
        checkpointing="non-reentrant", **LAID,
    ),
    "varlen": Case(varlen(), functools.partial(apart, everything), kv_heads=4, **LAID),
    "varlen-causal": Case(
        varlen(window_size=(-1, 0)), functools.partial(apart, causal), kv_heads=4, **LAID
    ),
    "varlen-window": Case(
        varlen(window_size=(WINDOW, 0), scale=0.2), functools.partial(apart, window), kv_heads=4,
        scale=0.2, **LAID,
    ),
    "varlen-half": Case(
        varlen(window_size=(-1, 0)), functools.partial(apart, causal), dtype=torch.float16,
        kv_heads=4, **LAID,
    ),
    "varlen-checkpoint": Case(
        varlen(window_size=(-1, 0)), functools.partial(apart, causal), kv_heads=4,
        checkpointing="non-reentrant", **LAID,
    ),
    "flex": Case(flex(), dtype=FULL),
    "flex-causal": Case(flex("causal"), causal),
    "flex-causal-fp32": Case(flex("causal"), causal, dtype=FULL),
    "flex-window": Case(flex("window"), window),
    "flex-documents": Case(flex("documents"), functools.partial(apart, causal), **LAID),
    "flex-distance": Case(
        flex("causal", score_mod=distance), causal, dtype=FULL, distance=True
    ),
    "flex-softcap": Case(flex("causal", score_mod=capped), causal, dtype=FULL, softcap=SOFTCAP),
    "flex-checkpoint": Case(flex("causal"), causal, checkpointing="non-reentrant"),
    "flex-eager": Case(flex(compiled=False), dtype=FULL),
    "flex-eager-window": Case(flex("window", compiled=False), window),
    "flex-eager-documents": Case(
        flex("documents", compiled=False), functools.partial(apart, causal), **LAID
    ),
    "flex-eager-distance": Case(
        flex("causal", compiled=False, score_mod=distance), causal, dtype=FULL, distance=True
    ),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, case: Case, name: str) -> None:
        super().__init__()
        self.case, self.name = case, name
        self.q_proj = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, case.kv_heads * DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, case.kv_heads * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if case.sinks else None
        self.calls: Optional[list[Call]] = None  # Those that are captured.

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, DIM)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.calls is None or not torch.is_grad_enabled():
            o = self.case.attend(self, q, k, v)
        else:
            o = self.captured(q, k, v, self.calls)
        out: Tensor = self.out(o.flatten(2))
        return out

    def captured(self, q: Tensor, k: Tensor, v: Tensor, calls: list[Call]) -> Tensor:
        case, tokens = self.case, q.shape[1]

        def view(t: Tensor) -> Tensor:
            return copied(t.transpose(1, 2))

        seen = [view(t) for t in (q, k, v)]
        call = Call(self.name, *seen, seen[0], case.scale, kv_heads=case.kv_heads)
        call.allowed, call.softcap = case.allowed(tokens), case.softcap
        if self.sinks is not None:
            call.sinks = copied(self.sinks)
        if case.distance:
            place = torch.arange(tokens)
            each = torch.arange(1, HEADS + 1)[:, None, None]
            call.bias = -(place[:, None] - place).abs() * 0.05 * each
        with as_given(call, k, lambda t: t.transpose(1, 2)) as own:
            o = case.attend(self, q, own, v)

        def arrived(gradient: Tensor) -> None:
            call.d_o = view(gradient)

        call.o = view(o)
        o.register_hook(arrived)
        calls.append(call)
        return o


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Attention(case, f"blocks.{i}") for i in range(2))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.08)

    def forward(self, x: Tensor) -> Tensor:
        x, way = self.inlet(x), self.case.checkpointing
        for block in self.blocks:
            if way is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=way == "reentrant")
        return x


def trained(case: Case, path: Optional[Path]) -> tuple[Run, Any, bool]:
    """(what it left, the status of the monitor, whether all was written).  Watched and captured
    where a path is given."""
    torch.manual_seed(3)
    run, model, status, flushed = Run(), Model(case).to(DEVICE, case.dtype), None, False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = None if path is None else bellwether.attach(model, record=str(path), **WATCH)
    size, tokens = (1, sum(LENGTHS)) if case.laid else (2, TOKENS)
    try:
        for step in range(STEPS):
            made = torch.Generator().manual_seed(step)
            x = torch.randn(size, tokens, WIDTH, generator=made).to(DEVICE, case.dtype)
            for block in model.blocks:
                block.calls = None if monitor is None else []  # type: ignore[assignment]
            loss = model(x).float().square().mean()
            loss.backward()
            if monitor is not None:
                called = [call for block in model.blocks for call in block.calls or ()]  # type: ignore[union-attr]
                calls = [call for call in called if call.d_o is not None]
                run.calls.append([calls])
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                run.weights.append(projections.sigmas(projections.separate, model, [calls]))
            run.losses.append(loss.item())
        run.digest = digest(model)
        if monitor is not None:
            flushed = monitor.flush(20)
            status = monitor.status()
    finally:
        if monitor is not None:
            monitor.detach()
    return run, status, flushed


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        prepare(tmp_path_factory.mktemp("functions"), patch.setenv, DEVICE)
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CASES)
def test_a_function_has_every_signal_and_right_numbers(
    name: str, prepared: None, tmp_path: Path
) -> None:
    case, result = CASES[name], Result(name)
    if name.startswith("flash"):
        pytest.importorskip("flash_attn.cute")
    alone = trained(case, None)[0]
    watched, status, flushed = trained(case, tmp_path / "a.bwrun")
    assert alone.same(trained(case, None)[0]), "it does not repeat its bits by itself"
    assert watched.same(alone)
    calls = [call for step in watched.calls for part in step for call in part]
    assert len(calls) == 2 * STEPS
    for call in calls:
        assert definitions.mistaken(call) <= (1e-3 if case.dtype == FULL else 0.05)
    judge(watched, True, status, flushed, recorded(tmp_path / "a.bwrun"), result)
    lawless = {"leak"} if case.softcap or case.sinks else set()
    passed = not result.wrong and set(result.missing) == lawless
    gpu_results.note(dataclasses.asdict(result), PACKAGES[name.partition("-")[0]], passed)
    assert passed, result
