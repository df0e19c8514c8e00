"""Goal: what inductor makes of a watched training is, but for our taps, what it makes of it without
us: the same tensors saved for the backward, the same kernels and as many buffers.  Those of the
forward come in the same order: at another place a kernel has another name, by which inductor keeps
what it has tuned.
Method: forward and backward are compiled up to inductor's scheduler, which has fused by then; no
code is built and nothing runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
import transformers.models.llama.modeling_llama as llama
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering

import bellwether
from bellwether._hook.compiled import compiled_taps

from conftest import in_long
from models import Attention, Model, Shape, batch

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < compiled_taps.TORCH_MIN:
    pytest.skip("compiled modules are not watched with this torch", allow_module_level=True)

EQUAL = Shape(layers=1, heads=4, kv_heads=4, dim=16, width=64)
GQA = dataclasses.replace(EQUAL, kv_heads=2)
BF16 = torch.bfloat16


class Stopped(Exception):
    """Everything is compiled; nothing is to run."""


@dataclasses.dataclass
class Lowered:
    """One graph as inductor's scheduler has it, without our taps."""

    backward: bool
    kernels: list[str]
    buffers: Counter[str]
    saved: Counter[str]
    taps: int


def described(thing: Any) -> str:
    return f"{thing.get_dtype()} {list(thing.get_size())}"


def described_as_it_lies(thing: Any) -> str:
    return f"{described(thing)} {list(thing.get_stride())}"


def read(graph: GraphLowering) -> Lowered:
    kernels, buffers, taps = list[str](), Counter[str](), 0
    for node in graph.scheduler.nodes:
        parts = node.get_nodes()
        if any("bellwether" in str(getattr(part.node, "op_overload", "")) for part in parts):
            taps += 1
            continue
        targets = sorted(
            str(getattr(part.node, "op_overload", None) or type(part.node).__name__)
            for part in parts
        )
        made = [
            out.node for part in parts for out in part.get_outputs() if out.node.has_tensor_output()
        ]
        kernels.append(f"{'+'.join(targets)} {list(map(described_as_it_lies, made))}")
        buffers.update(map(described, made))
    # A view of a tensor may be saved in place of another; inputs are there anyway.
    saved = Counter(
        f"{out.get_dtype()} {math.prod(map(int, out.get_size()))}"
        for out in graph.graph_outputs
        if out.maybe_get_size() is not None and out.get_name() not in graph.graph_inputs
    )
    return Lowered(graph.is_backward, kernels, buffers, saved, taps)


@pytest.fixture(autouse=True)
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lowered]]:
    """Graphs appear here as they are compiled."""
    found: list[Lowered] = []

    def stop(*_: Any) -> None:
        raise Stopped

    def without_code(graph: GraphLowering) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        found.append(read(graph))
        return types.SimpleNamespace(call=stop, __file__="none", key="none", runner=None)

    monkeypatch.setattr(GraphLowering, "compile_to_module", without_code)
    # A CPU's vector instructions are found out by building a program.
    with (
        config.patch({"force_disable_caches": True, "cpp.simdlen": 1}),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
    ):
        torch._dynamo.reset()
        yield found
    torch._dynamo.reset()


class Turned(Attention):
    """q and k are turned by their places, in one kernel with what lays them out for the call."""

    def split(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().split(x)
        angles = torch.arange(q.shape[2], device=q.device)[:, None] * 0.01
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return [*(t * cos + t.roll(1, -1) * sin for t in (q, k)), v]


class Eager(Turned):
    """transformers' own function, whose keys are repeated inside."""

    num_key_value_groups = 2

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("hidden", torch.full((1, 1, 40, 40), -1e9).triu(1).to(shape.dtype))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        scale = self.shape.dim**-0.5
        o, _ = llama.eager_attention_forward(self, q, k, v, self.hidden, scaling=scale)
        return o.transpose(1, 2)


class Widened(Attention):
    """q and k are turned in 32 bits, and v is not: autocast narrows the two for the call."""

    def split(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().split(x)
        angles = torch.arange(q.shape[2], device=q.device)[:, None] * torch.ones(q.shape[3])
        q, k = llama.apply_rotary_pos_emb(q, k, angles.cos()[None], angles.sin()[None])
        return [q, *(llama.repeat_kv(t, self.shape.heads // self.shape.kv_heads) for t in (k, v))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return super().attend(q, k, v, False)


class Normed(Widened):
    """QK-norm, with a weight of 32 bits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.q_norm, self.k_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)

    def split(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().split(x)
        return [self.q_norm(q), self.k_norm(k), v]


class Gated(Eager):
    """What comes after the output is one kernel, and so is what makes its gradient."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return super().attend(q, k, v, gqa) * q.sigmoid()


class Relative(Eager):
    """What its mask adds is learned, and depends on the queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = nn.Embedding(8, shape.heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        bias = self.table((place[:, None] - place).abs().clamp(max=7)).permute(2, 0, 1)
        self.hidden = bias * q.float().mean((1, 2, 3))[:, None, None, None].to(q.dtype)
        return super().attend(q, k, v, gqa)


class Seen(Turned):
    """A boolean mask becomes an additive one inside the call."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        seen = (place[:, None] >= place) & (place % 3 != 1)
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=gqa)


def graphs(
    found: list[Lowered],
    path: Optional[Path],
    shape: Shape,
    kind: type[nn.Module],
    cast: bool,
) -> list[Lowered]:
    found.clear()
    torch._dynamo.reset()
    torch.manual_seed(5)
    model = Model(shape, kind=kind)
    if shape.dtype is not torch.float32 and not cast:
        model = model.to(shape.dtype)
    monitor = bellwether.attach(model, record=str(path), run="g") if path is not None else None

    def loss(x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    x = batch(shape, 0).to(next(model.parameters()).dtype)
    amp = torch.autocast("cpu", BF16) if cast else contextlib.nullcontext()
    with amp, pytest.raises(Stopped):
        torch.compile(loss, fullgraph=True)(x)
    if monitor is not None:
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
        monitor.detach()
    return list(found)


def as_dtype(shape: Shape, dtype: torch.dtype) -> Shape:
    return dataclasses.replace(shape, dtype=dtype)


# By name: the shape, how it attends, whether autocast is on.
CASES: dict[str, tuple[Shape, type[nn.Module], bool]] = {
    "sdpa amp": (as_dtype(EQUAL, BF16), Turned, True),
    "eager": (GQA, Eager, False),
    "gated bf16": (as_dtype(GQA, BF16), Gated, False),
    "eager amp": (as_dtype(GQA, BF16), Eager, True),
    "relative": (GQA, Relative, False),
    "seen": (as_dtype(EQUAL, BF16), Seen, False),
    "widened": (as_dtype(GQA, BF16), Widened, True),
    "normed": (as_dtype(GQA, BF16), Normed, True),
}


# "relative" and "eager amp" attend as "eager" does, the first of them in fp32.
@pytest.mark.parametrize("name", in_long(["eager"], CASES))
def test_inductor_saves_and_writes_the_same_with_us(
    name: str,
    lowered: list[Lowered],
    tmp_path: Path,
) -> None:
    shape, kind, cast = CASES[name]
    plain = graphs(lowered, None, shape, kind, cast)
    watched = graphs(lowered, tmp_path / "g.bwrun", shape, kind, cast)
    assert [g.backward for g in plain] == [g.backward for g in watched] == [False, True]
    for without, with_us in zip(plain, watched):
        assert with_us.saved == without.saved
        assert sorted(with_us.kernels) == sorted(without.kernels)
        assert with_us.buffers == without.buffers
    assert watched[0].kernels == plain[0].kernels
    assert [g.taps for g in watched] == [0, shape.layers]  # Of each call one.
