"""Goal: the sums that a run sends of the laws are those of its kernels' own tensors.  A fault
     inside an autograd Function is far beyond rounding in them, and sound kernels are not.
Method: short runs in bf16, read back from their recordings, beside the same sums in fp64.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_law_calls import (
    CASES,
    DIM,
    HEADS,
    KINDS,
    KV_HEADS,
    Attend,
    Net,
    batch,
    made,
    ours,
    sdpa,
    step,
    without,
)  # fmt: skip
from torch import Tensor, nn

import bellwether
from bellwether._kernels import laws
from bellwether._laws.attention import row_weights
from bellwether._laws.call import GradedCall
from bellwether._laws.judge import Limits
from bellwether._laws.reference import PROJECTIONS, reference, signs

from planted_kernels import planted
from recording import Recording

LIMIT = Limits(10**7)
Sums = dict[str, tuple[Tensor, Tensor]]  # By signal: the value, and the sum of absolute terms.


def call_of(of: laws.Graded) -> GradedCall:
    """With one gradient for each key head."""
    dk, dv = (laws._added(t, of.group) for t in (of.dk, of.dv))
    k, v = (t[:, :: of.group] for t in (of.k, of.v))
    return GradedCall(
        of.q, k, v, of.o, of.d_o, of.dq, dk, dv, of.scale, of.mask, of.softcap, of.sinks
    )


def expected(call: GradedCall) -> Sums:
    found: Sums = {}
    q, o, d_o, dq = (call.grouped(t).double() for t in (call.q, call.o, call.d_o, call.dq))
    k, v, dk, dv = (t.double() for t in (call.k, call.v, call.dk, call.dv))
    weighted = row_weights(call)[0][..., None] * d_o
    pairs = {"law_a1": (dk.sum((0, 2)), dk.abs().sum((0, 2, 3)))}
    of_rows = weighted.sum((0, 2, 3))
    size = dv.abs().sum((0, 2, 3)) + weighted.abs().sum((0, 2, 3, 4))
    pairs["law_a2"] = dv.sum((0, 2)) - of_rows, size
    for law, (vector, size) in pairs.items():
        projected = vector @ signs(vector.shape[-1], vector.device).mT
        for i in range(PROJECTIONS):
            found[f"{law}_{i}"] = projected[:, i], size
    for law, ours_, theirs in (("law_a3", q * dq, k * dk), ("law_a4", o * d_o, v * dv)):
        found[law] = (
            ours_.sum((0, 2, 3, 4)) - theirs.sum((0, 2, 3)),
            ours_.abs().sum((0, 2, 3, 4)) + theirs.abs().sum((0, 2, 3)),
        )
    for name, t in (("do", call.d_o), ("dq", call.dq), ("dk", call.dk), ("dv", call.dv)):
        squares = t.double().square().sum((0, 2, 3))
        found[f"{name}_sumsq"] = squares, squares
        found[f"{name}_nonfinite"] = torch.zeros_like(squares), torch.ones_like(squares)
    return found


@dataclasses.dataclass
class Run:
    calls: list[laws.Graded]  # The last layer's first.
    sent: dict[str, np.ndarray[Any, Any]]  # Of the last step: [layer, head].


def watched(
    net: nn.Module, path: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 1, **settings: Any
) -> Run:
    calls: list[laws.Graded] = []
    add = laws.add_laws

    def heard(sums: Any, of: laws.Graded, **how: Any) -> None:
        names = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")
        calls.append(dataclasses.replace(of, **{name: getattr(of, name).clone() for name in names}))
        add(sums, of, **how)

    monkeypatch.setattr(laws, "add_laws", heard)
    monitor = bellwether.attach(
        net, record=str(path / "a.bwrun"), run="laws", every=1, rows=0, overhead_budget=1e9,
        **settings,
    )  # fmt: skip
    for _ in range(steps):
        calls.clear()
        step(net)  # type: ignore[arg-type]
        monitor.step()
    assert monitor.flush(20)
    assert not any(without(monitor)), without(monitor)
    monitor.detach()
    return Run(calls, Recording(path / "a.bwrun", ended=True).steps()[steps - 1])


@pytest.mark.parametrize("attend, kind", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_the_sums_are_those_of_fp64(
    attend: Attend, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched(made(**KINDS[kind], attend=attend), tmp_path, monkeypatch)
    for layer, of in enumerate(reversed(run.calls)):
        for signal, (value, size) in expected(call_of(of)).items():
            sent = torch.from_numpy(run.sent[signal][layer].astype(np.float64))
            assert ((sent - value).abs() <= 1e-5 * size).all(), signal
        assert (run.sent["law_rows_left_out"][layer] == 0).all()


@pytest.mark.parametrize("attend, kind", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_sound_kernels_are_within_rounding(
    attend: Attend, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched(made(**KINDS[kind], attend=attend), tmp_path, monkeypatch)
    assert max(z_of(run.sent).values()) < LIMIT.z


def z_of(sent: dict[str, Any]) -> dict[str, float]:
    """By law the largest beyond what roundings give that are all alike."""
    found = {}
    for law in ("law_a1", "law_a2", "law_a3", "law_a4"):
        names = [law] if law in sent else [f"{law}_{i}" for i in range(PROJECTIONS)]
        difference = np.max([np.abs(sent[name]) for name in names], axis=0)
        beyond = np.maximum(difference - sent[f"{law}_alike"], 0)
        found[law] = float(np.max(beyond / np.sqrt(sent[f"{law}_variance"])))
    return found


class Core(nn.Module):
    """A kernel of one's own."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.function = planted(fault)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v)  # type: ignore[no-any-return]


class Custom(Net):
    def __init__(self, fault: str, **told: Any) -> None:
        super().__init__(attend=lambda m, q, k, v: m.core(q, k, v))
        for i, block in enumerate(self.blocks):
            core = Core(fault if i else "")
            block.core = bellwether.wrap_attention(core, layout="bhtd", **told)


def custom(fault: str, **told: Any) -> Custom:
    torch.manual_seed(0)
    net = Custom(fault, **told)
    for p in net.parameters():
        p.data.mul_(2)
    return net.to(torch.bfloat16)


BREAKS = {
    "dq_times_five_in_a_sequence": "law_a3",
    "dq_negated_in_a_head": "law_a3",
    "dk_of_heads_exchanged": "law_a3",
    "dk_tail_not_written": "law_a1",
    "p_does_not_add_up": "law_a2",
    "dv_last_row_of_queries_left_out": "law_a2",
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_planted_fault_is_beyond_rounding(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched(custom(fault), tmp_path, monkeypatch)
    upper = {name: values[1] for name, values in run.sent.items() if values.shape[0] == 2}
    lower = {name: values[0] for name, values in run.sent.items() if values.shape[0] == 2}
    assert z_of(upper)[BREAKS[fault]] > 2 * LIMIT.z
    assert max(z_of(lower).values()) < LIMIT.z


def test_a_fault_that_sums_cancel_is_seen_beside_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = custom("dq_two_percent_large", arithmetic="composed")
    run = watched(core, tmp_path, monkeypatch, steps=2)
    rest, variance, squares = (
        run.sent[f"shadow_dq_{part}"] for part in ("rest", "variance", "variance_sq")
    )
    excess = rest / variance
    limit = LIMIT.excess(torch.from_numpy(variance.astype(np.float64) ** 2 / squares)).numpy()
    assert excess[1, 3] > limit[1, 3] and (excess[1, :3] < limit[1, :3]).all()


def test_a_factor_near_one_is_seen_beside_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = custom("dv_one_percent_large", arithmetic="composed")
    run = watched(core, tmp_path, monkeypatch, steps=2)
    factor, variance, alike = (
        run.sent[f"shadow_dv_factor{part}"][1] for part in ("", "_variance", "_alike")
    )
    z = (np.abs(factor) - alike) / np.sqrt(variance)
    assert z[3] > LIMIT.z and (z[:3] < 1).all()
    assert abs(factor[3] / variance[3] - 0.01) < 2e-3


def test_grouped_keys_have_one_factor_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = watched(made(kv_heads=KV_HEADS), tmp_path, monkeypatch, steps=2)
    for tensor, heads in (("o", HEADS), ("dq", HEADS), ("dk", KV_HEADS), ("dv", KV_HEADS)):
        assert run.sent[f"shadow_{tensor}_factor_variance"].shape == (2, heads)
        assert (run.sent[f"shadow_{tensor}_factor_variance"][1] > 0).all(), tensor


@pytest.mark.parametrize("told", [{}, {"kernel": "mine"}, {"kernel": "flash"}], ids=str)
def test_a_kernel_of_unknown_rounding_is_not_compared(
    told: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched(custom("", **told), tmp_path, monkeypatch, steps=2)
    assert {call.arithmetic for call in run.calls} == {"composed"}
    assert "shadow_dq_rest" not in run.sent and np.isfinite(run.sent["law_a3"]).all()


@pytest.mark.parametrize("arithmetic", ["fused", "composed"])
def test_a_kernel_is_compared_as_it_is_told_to_round(
    arithmetic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched(custom("", arithmetic=arithmetic), tmp_path, monkeypatch, steps=2)
    assert {call.arithmetic for call in run.calls} == {arithmetic}
    assert np.isfinite(run.sent["shadow_dq_rest"]).any()


def test_a_run_names_the_kernels_of_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "k" * 40
    for names, told in ((("one", "two"), "one, two"), ((long, "l" * 40), f"{long} and others")):
        net = custom("")
        for block, name in zip(net.blocks, names):
            bellwether.wrap_attention(block.core, layout="bhtd", kernel=name)
        watched(net, tmp_path, monkeypatch)
        assert Recording(tmp_path / "a.bwrun", ended=True).hello.run.attention.kernel == told


def test_elements_that_are_not_finite_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched(custom("nan_in_a_head_of_dq"), tmp_path, monkeypatch)
    assert run.sent["dq_nonfinite"][1].tolist() == [0, 0, 1, 0]
    assert run.sent["do_nonfinite"][1].tolist() == [0] * HEADS
    assert np.isnan(run.sent["law_a3"][1, 2])
    assert run.sent["do_nonfinite"][0].sum() > 0  # It goes on to the layers below.


def test_one_layer_of_each_sample_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps, layer in ((2, 1), (3, 0)):
        path = tmp_path / str(steps)
        path.mkdir()
        run = watched(made(), path, monkeypatch, steps)
        call = call_of(run.calls[1 - layer])
        known = reference(call, arithmetic="accumulated")
        for tensor in ("o", "dq", "dk", "dv"):
            parts = ("got_sumsq", "rest", "variance")
            squares, rest, variance = (run.sent[f"shadow_{tensor}_{part}"] for part in parts)
            assert np.isnan(squares[1 - layer]).all() and (rest[layer] < 10 * variance[layer]).all()
        for name, exact in (("o", known.o.exact), ("dq", known.dq.exact)):
            got, exact = getattr(call, name).double(), exact.flatten(1, 2)
            for part, value in (
                ("dot", got * exact), ("got_sumsq", got * got), ("ref_sumsq", exact * exact),
            ):  # fmt: skip
                sent = torch.from_numpy(run.sent[f"shadow_{name}_{part}"][layer].astype(np.float64))
                difference = (sent - value.sum((0, 2, 3))).abs()
                assert (difference <= 1e-5 * value.abs().sum((0, 2, 3))).all(), (name, part)


def test_the_loss_scale_is_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    for factor in (1.0, 1024.0):
        path = tmp_path / str(factor)
        path.mkdir()
        net = made(dtype=torch.float16)
        for p in net.parameters():
            p.data.div_(4)
        monitor = bellwether.attach(
            net, record=str(path / "a.bwrun"), run="laws", every=1, rows=0, overhead_budget=1e9
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=factor)
        scaler.scale(net(batch(torch.float16)).float().square().sum()).backward()
        monitor.step()
        assert monitor.flush(20)
        monitor.detach()
        sent.append(Recording(path / "a.bwrun", ended=True).steps()[0])
    plain, scaled = sent
    for signal in ("do_sumsq", "dq_sumsq", "dk_sumsq", "dv_sumsq"):
        assert scaled[signal] == pytest.approx(plain[signal], rel=0.05)
    for law in ("law_a1", "law_a2", "law_a3", "law_a4"):
        ratio = scaled[f"{law}_variance"] / plain[f"{law}_variance"]
        assert ((ratio > 0.1) & (ratio < 10)).all()


def test_the_type_says_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = watched(made(dtype=torch.float32), tmp_path, monkeypatch)
    assert not any(name.startswith("law_") for name in run.sent)
    assert (run.sent["dq_sumsq"] > 0).all()


def test_a_softcap_leaves_out_a1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def capped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bellwether.attention(q, k, v, causal=True, softcap=20.0)

    run = watched(made(attend=capped), tmp_path, monkeypatch)
    found = {name[:6] for name in run.sent if name.startswith("law_a")}
    assert found == {"law_a2", "law_a3", "law_a4"}
    assert math.isfinite(float(run.sent["law_a3"].sum()))


def test_key_heads_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = watched(made(**KINDS["copies"], attend=sdpa), tmp_path, monkeypatch)
    assert run.sent["law_a3"].shape == (2, KV_HEADS) and run.calls[0].dk.shape[1] == HEADS
    assert run.calls[0].group == HEADS // KV_HEADS and run.calls[0].dk.shape[3] == DIM


def test_our_own_kernels_are_asked_by_their_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched(made(attend=ours), tmp_path, monkeypatch)
    assert {of.arithmetic for of in run.calls} == {"fused"}
    run = watched(made(attend=sdpa), tmp_path, monkeypatch)
    assert {of.arithmetic for of in run.calls} == {"accumulated"}
