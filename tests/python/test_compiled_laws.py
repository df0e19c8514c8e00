"""Goal: compiled attention is asked about the same tensors as eager attention, at one place of the
graph, and training stays the same bit for bit; what is left out is said.
Method: the models of test_law_calls.py, compiled, beside an eager twin that nothing watches;
inductor's graphs run as they are.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from test_law_calls import (
    KINDS,
    Attend,
    Net,
    are_same,
    by_math,
    detached_keys,
    dropped,
    heard,
    made,
    ours,
    sdpa,
    step,
    watched,
    without,
)
from test_law_numbers import BREAKS, LIMIT, z_of
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import bellwether
from bellwether._hook.compiled import compiled_taps, recorded, written_anyway
from bellwether._hook.layer import compiled_backward
from bellwether._kernels import laws

from compiled_training import inductor_graphs
from conftest import in_long
from planted_kernels import Planted
from recording import Recording

__all__ = ["heard"]

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < compiled_taps.TORCH_MIN:
    pytest.skip("compiled modules are not watched with this torch", allow_module_level=True)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(net: Any, backend: Any) -> Any:
    for block in net.blocks:
        block.compile(fullgraph=True, backend=backend)
    return net


def sent_by(monitor: bellwether.Monitor, path: Path) -> dict[str, Any]:
    monitor.step(loss=1.0)
    assert monitor.flush(20)
    monitor.detach()
    return Recording(path / "a.bwrun", ended=True).steps()[0]


CASES = [
    (sdpa, "plain", "aot_eager"), (sdpa, "not reentrant", "aot_eager"),
    (by_math, "plain", "aot_eager"), (sdpa, "plain", inductor_graphs),
    (sdpa, "padded", inductor_graphs), (sdpa, "grouped", inductor_graphs),
    (sdpa, "copies", inductor_graphs), (ours, "grouped", inductor_graphs),
]  # fmt: skip


@pytest.mark.parametrize("attend, kind, backend", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_the_tensors_are_those_of_the_kernel(
    attend: Attend, kind: str, backend: Any, heard: list[laws.Graded], tmp_path: Path
) -> None:
    how = dict(KINDS[kind], attend=attend)
    twin = made(**{**how, "reentrant": None})
    for block in twin.blocks:
        block.keep = True
    expected = step(twin)
    net = made(**how)
    monitor = watched(net, tmp_path)
    got = step(compiled(net, backend))
    assert without(monitor) == [{}, {}]
    monitor.detach()
    assert are_same(got, expected) and len(heard) == 2
    for call, block in zip(reversed(heard), twin.blocks):
        q, k, v, y = block.kept
        assert call.arithmetic == ("composed" if attend is by_math else
                                   "fused" if attend is ours else "accumulated")  # fmt: skip
        for mine, true in ((call.q, q), (call.k, k), (call.v, v), (call.o, y), (call.d_o, y.grad),
                           (call.dq, q.grad), (call.dk, k.grad), (call.dv, v.grad)):  # fmt: skip
            assert true is not None and torch.equal(mine, true)


@torch.library.custom_op("planted::fused_attention", mutates_args=())
def fused_attention(q: Tensor, k: Tensor, v: Tensor, fault: str) -> Tensor:
    ctx = types.SimpleNamespace(save_for_backward=lambda *_: None)
    return Planted.forward(ctx, q, k, v, None, fault).contiguous()


@torch.library.custom_op("planted::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, fault: str
) -> list[Tensor]:
    ctx = types.SimpleNamespace()
    ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
    Planted.forward(ctx, q, k, v, None, fault)
    return [g.contiguous() for g in Planted.backward(ctx, d_o)[:3] if g is not None]


fused_attention.register_fake(lambda q, k, v, fault: q.new_empty(q.shape))
fused_attention_backward.register_fake(
    lambda d_o, q, k, v, fault: [t.new_empty(t.shape) for t in (q, k, v)]
)
fused_attention.register_autograd(
    lambda ctx, d_o: (*fused_attention_backward(d_o, *ctx.saved_tensors, ctx.fault), None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(*inputs[:3]), setattr(ctx, "fault", inputs[3])
    ),
)  # fmt: skip


class Core(nn.Module):
    """A kernel of one's own, in which the compiler sees nothing."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused_attention(q, k, v, self.fault)


def with_fault(fault: str, **told: str) -> Net:
    """In the second of two layers."""
    torch.manual_seed(0)
    net = Net(attend=lambda m, q, k, v: m.core(q, k, v))
    for i, block in enumerate(net.blocks):
        core = Core(fault if i else "")
        block.core = bellwether.wrap_attention(core, layout="bhtd", **told)  # type: ignore[arg-type]
    for p in net.parameters():
        p.data.mul_(2)
    return net.to(torch.bfloat16)


# One of each law; of the others test_law_numbers.py tells the same sums.
ALIKE = ["dq_negated_in_a_head", "dk_of_heads_exchanged", "dv_last_row_of_queries_left_out"]


@pytest.mark.parametrize("fault", in_long(ALIKE, BREAKS))
def test_a_fault_in_a_compiled_training_breaks_its_law(fault: str, tmp_path: Path) -> None:
    net = with_fault(fault)
    monitor = watched(net, tmp_path)
    expected = step(with_fault(fault))
    got = step(compiled(net, inductor_graphs))
    assert are_same(got, expected) and without(monitor) == [{}, {}]
    sent = sent_by(monitor, tmp_path)
    lower, upper = ({name: v[i] for name, v in sent.items() if v.shape[0] == 2} for i in (0, 1))
    assert z_of(upper)[BREAKS[fault]] > 2 * LIMIT.z
    assert max(z_of(lower).values()) < LIMIT.z


@pytest.mark.parametrize("told, taken_as", [({}, "composed"), ({"arithmetic": "fused"}, "fused")])
def test_a_compiled_kernel_rounds_as_it_is_told(
    told: dict[str, str], taken_as: str, heard: list[laws.Graded], tmp_path: Path
) -> None:
    net = with_fault("", kernel="mine", **told)
    monitor = watched(net, tmp_path)
    step(compiled(net, inductor_graphs))
    monitor.detach()
    assert [call.arithmetic for call in heard] == [taken_as] * 2


@pytest.mark.parametrize("attend", [sdpa, by_math, ours], ids=lambda f: f.__name__)
def test_sound_compiled_kernels_are_within_rounding(attend: Attend, tmp_path: Path) -> None:
    net = made(attend=attend)
    monitor = watched(net, tmp_path)
    step(compiled(net, inductor_graphs))
    assert without(monitor) == [{}, {}]
    sent = sent_by(monitor, tmp_path)
    assert max(z_of(sent).values()) < LIMIT.z


def test_a_call_has_one_tap_in_the_graph(
    monkeypatch: pytest.MonkeyPatch, heard: list[laws.Graded], tmp_path: Path
) -> None:
    """Another would cost in every step, and find other tensors where the call's were."""
    taps: list[str] = []
    before = written_anyway.read_what_is_written

    def counted(module: Any) -> None:
        before(module)
        operators = (written_anyway._tap_of(node) for node in module.graph.nodes)
        taps.extend(str(op) for op in operators if "observe" in str(op))

    monkeypatch.setattr(written_anyway, "read_what_is_written", counted)
    net = made()
    monitor = watched(net, tmp_path)
    run = torch.compile(net, backend=inductor_graphs)
    run(torch.ones(2, 8, 64).bfloat16().requires_grad_()).float().sum().backward()
    monitor.detach()
    assert taps == ["bellwether.observe_call.default"] * 2 and len(heard) == 2


LACKS = {
    dropped: "dropout in the attention",
    detached_keys: "no gradient reaches k",
}


@pytest.mark.parametrize("attend", LACKS, ids=lambda f: f.__name__)
def test_compiled_calls_that_are_left_out_are_said(
    attend: Attend, heard: list[laws.Graded], tmp_path: Path
) -> None:
    net = compiled(made(attend=attend), "aot_eager")
    monitor = watched(net, tmp_path)
    step(net)
    assert without(monitor) == [{LACKS[attend]: 1}] * 2 and not heard
    monitor.detach()


class Noisy(nn.Module):
    """What it does to queries is random: their gradient cannot be made once more."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = F.dropout(q, 0.1)
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def test_a_gradient_that_no_graph_writes_is_said(heard: list[laws.Graded], tmp_path: Path) -> None:
    net = made(attend=lambda m, q, k, v: m.core(q.sin(), k, v))
    for block in net.blocks:
        block.core = bellwether.wrap_attention(Noisy(), layout="bhtd")
    monitor = watched(net, tmp_path)
    step(compiled(net, inductor_graphs))
    assert without(monitor) == [{compiled_backward.NOT_WRITTEN: 1}] * 2 and not heard
    assert "key_gradient_sum" in sent_by(monitor, tmp_path)


class Documents(nn.Module):
    """A mask that is a function with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.document = nn.Buffer(torch.arange(64) // 7)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - 0.1 * (self.document[i] - self.document[j]).abs()

        return flex.flex_attention(q, k, v, change)


def test_no_tensor_is_held_behind_the_backward(
    monkeypatch: pytest.MonkeyPatch, heard: list[laws.Graded], tmp_path: Path
) -> None:
    """PyTorch's CUDA graphs refuse memory of theirs that is."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    made_of: list[weakref.ref[Tensor]] = []
    before = recorded.made_of

    def noted(*args: Any) -> list[Tensor]:
        # The graph's own tensors live on elsewhere: what is seen are copies.
        tensors = [t.clone() for t in before(*args)]
        made_of.extend(map(weakref.ref, tensors))
        return tensors

    monkeypatch.setattr(recorded, "made_of", noted)
    net = made(attend=lambda m, q, k, v: m.core(q, k, v))
    for block in net.blocks:
        block.core = Documents()
    monitor = watched(net, tmp_path)
    step(compiled(net, "aot_eager"))
    assert without(monitor) == [{}, {}] and len(heard) == 2
    heard.clear()
    assert made_of and all(of() is None for of in made_of)
    monitor.detach()
