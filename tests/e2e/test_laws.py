"""Goal: a kernel that breaks a law of attention becomes a critical alert of a real server, from one
sample, with the ranks' sums judged as one; and a healthy one becomes none.

Method: bellwetherd, and clients of two ranks that push what a kernel's sums are; a small model in
bf16 whose kernel has a planted fault.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / room) for room in ("support", "python")]
from bellwether_process import Server, wait_for
from planted_kernels import planted

import bellwether
from bellwether.client import Block, RunClient, RunOptions

LAYERS, HEADS, KV_HEADS = 3, 4, 2
A3 = "law_a3"
COUNTS = ("do_nonfinite", "dq_nonfinite", "dk_nonfinite", "dv_nonfinite")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running


def block(signal: str, value: float, heads: int, wrong: Optional[tuple[int, int, float]] = None) -> Block:
    """`value` everywhere, but for wrong = (layer, head, value)."""
    values = [value] * (LAYERS * heads)
    if wrong is not None:
        values[wrong[0] * heads + wrong[1]] = wrong[2]
    return Block(signal, values, layer_count=LAYERS, head_count=heads)


def sums(**wrong: tuple[int, int, float]) -> list[Block]:
    """A healthy kernel's: differences of one sigma, distances as rounding gives them."""
    found = [Block("loss", [2.0])]
    for law, projections in (("a1", 8), ("a2", 8), ("a3", 1), ("a4", 1)):
        names = [f"law_{law}_{i}" for i in range(projections)] if projections > 1 else [f"law_{law}"]
        found += [block(name, 1.0, KV_HEADS, wrong.get(name)) for name in names]
        for what, value in (("variance", 1.0), ("alike", 0.0)):
            name = f"law_{law}_{what}"
            found.append(block(name, value, KV_HEADS, wrong.get(name)))
    for tensor, heads in (("o", HEADS), ("dq", HEADS), ("dk", KV_HEADS), ("dv", KV_HEADS)):
        for what, value in (("dot", 1.0), ("got_sumsq", 1.0), ("ref_sumsq", 1.0), ("rest", 16.0), ("variance", 16.0), ("variance_sq", 16.0), ("factor", 100.0), ("factor_variance", 1e6), ("factor_alike", 0.0)):
            name = f"shadow_{tensor}_{what}"
            found.append(block(name, value, heads, wrong.get(name)))
    for name in COUNTS:
        found.append(block(name, 0.0, HEADS if name[:2] in ("do", "dq") else KV_HEADS, wrong.get(name)))
    return found


class Pair:
    """Two data-parallel ranks of a run."""

    def __init__(self, server: Server, run: str, **options: Any) -> None:
        self.server, self.run = server, run
        self.ranks = [
            RunClient(RunOptions(
                run=run, layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, rank=rank, world=2, server=server.grpc,
                attention_kernel="flash", **{"score_dtype": "bf16", **options},
            ))
            for rank in range(2)
        ]  # fmt: skip

    def push(self, step: int, first: list[Block], second: list[Block]) -> None:
        for client, blocks in zip(self.ranks, (first, second)):
            client.push(step, blocks)
            assert client.flush(20)
        wait_for("the step is judged", lambda: self.server.call("GetRun", run=self.run)["step"] == str(step))

    def alerts(self) -> list[dict[str, Any]]:
        return [alert["last"] for alert in self.server.call("ListAlerts", run=self.run)["alerts"]]

    def close(self) -> None:
        for client in self.ranks:
            client.close()


def test_sums_of_ranks_are_judged_as_one(server: Server) -> None:
    pair = Pair(server, "sums")
    pair.push(0, sums(law_a3=(1, 0, 300.0)), sums(law_a3=(1, 0, -300.0)))
    assert pair.alerts() == []
    # Halves that are each within chance.
    pair.push(20, sums(law_a3=(1, 1, 6.0)), sums(law_a3=(1, 1, 6.0)))
    (alert,) = wait_for("it is an alert", pair.alerts)
    assert (alert["rule"], alert["severity"]) == ("kernel", "SEVERITY_CRITICAL")
    z = 12 / math.sqrt(2)
    assert f"law A3 is broken by {z:.3g} standard deviations" in alert["summary"]
    pair.close()


def test_a_factor_near_one_is_named(server: Server) -> None:
    pair = Pair(server, "factor")
    pair.push(0, sums(), sums())
    # Each rank alone is within chance.
    wrong = sums(shadow_dv_factor=(2, 1, 6000.0))
    pair.push(20, wrong, wrong)
    (alert,) = wait_for("it is an alert", pair.alerts)
    z = 12000 / math.sqrt(2e6)
    assert f"dV is wrong: 1.006 times its reference, {z:.3g} standard deviations" in alert["summary"]
    assert {e["signal"] for e in alert["evidence"]} == {"shadow_dv_factor_z"}
    pair.close()


def test_a_wrong_kernel_is_named_and_outlives_a_kill(server: Server) -> None:
    pair = Pair(server, "wrong")
    pair.push(0, sums(), sums())
    wrong = sums(law_a3=(2, 1, 90.0), shadow_dq_rest=(2, 3, 4800.0))
    pair.push(20, wrong, wrong)
    (alert,) = wait_for("it is an alert", pair.alerts)
    said = alert["summary"]
    assert "kernel (flash) is wrong in layer 2 head 3: dQ is wrong: 300 times as far from its reference" in said
    assert "leaves dQ or dK, by a factor or of exchanged heads" in said
    assert alert["cause"] == "faulty kernel" and alert["advice"].startswith("Switch to another kernel of attention.")
    assert {e["signal"] for e in alert["evidence"]} == {"law_a3_z", "shadow_dq_excess"}
    metrics = wait_for("it is exported", lambda: [
        line for line in server.get("/metrics").splitlines()
        if line.startswith("bellwether_layer_shadow_dq_excess_max") and 'layer="2"' in line
    ])  # fmt: skip
    assert float(metrics[0].split()[-1]) == 300
    server.kill()
    server.start()
    (after,) = pair.alerts()
    assert after == alert
    pair.push(40, wrong, wrong)
    assert [a["key"] for a in pair.alerts()] == [alert["key"]]
    pair.close()


def test_a_kernels_nan_is_named_and_not_the_layers_below(server: Server) -> None:
    pair = Pair(server, "nan")
    nan = float("nan")
    blocks = sums(dq_nonfinite=(1, 2, 64.0), law_a3=(1, 1, nan))
    # All of layer 0, which lies below.
    for i, below in enumerate(blocks):
        if below.signal in COUNTS:
            values = list(below.values)
            values[: below.head_count] = [512.0] * below.head_count
            blocks[i] = Block(below.signal, values, layer_count=LAYERS, head_count=below.head_count)
    pair.push(0, blocks, sums())
    (alert,) = wait_for("it is an alert", pair.alerts)
    assert (alert["rule"], alert["cause"]) == ("nonfinite", "faulty kernel")
    assert "first in layer 1 head 2: dQ, as the kernel returned it from a finite dO" in alert["summary"]
    assert "layer 0 below follows from it" in alert["summary"] and "the kernel: flash" in alert["summary"]
    pair.close()


def test_biased_rounding_alone_is_no_alert(server: Server) -> None:
    pair = Pair(server, "biased")
    for step in range(0, 100, 20):
        blocks = sums(law_a1_0=(1, 0, 80.0), law_a1_3=(1, 0, -80.0), law_a1_alike=(1, 0, 50.0))
        pair.push(step, blocks, blocks)
    assert pair.alerts() == []
    pair.close()


class Core(nn.Module):
    """A kernel of one's own."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.function = planted(fault)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.core = bellwether.wrap_attention(Core(fault), layout="bhtd")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (4, 16)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y: Tensor = self.core(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fault, said", [
    ("", None),
    ("dq_negated_in_a_head", "layer 1 head 2: law A3 is broken"),
    ("p_does_not_add_up", "dV, or P of the backward pass"),
    ("nan_in_a_head_of_dq", "layer 1 head 2: dQ, as the kernel returned it from a finite dO"),
])  # fmt: skip
def test_a_fault_in_a_watched_jobs_kernel_is_told(server: Server, fault: str, said: Optional[str]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(Attention(fault if layer == 1 else "") for layer in range(3))).to(torch.bfloat16)
    for p in net.parameters():
        p.data.mul_(2)
    monitor = bellwether.attach(net, server=server.grpc, run="job", every=1, rows=0, overhead_budget=1e9)
    for step in range(3):
        x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        loss = net(x.requires_grad_()).float().square().mean()
        loss.backward()
        monitor.step(loss=float(loss.detach()))
        net.zero_grad()
    assert monitor.flush(20)
    monitor.detach()
    wait_for("all is judged", lambda: server.call("GetRun", run="job")["step"] == "2")
    told = [alert["last"] for alert in server.call("ListAlerts", run="job")["alerts"]]
    if said is None:
        assert told == []
        return
    assert any(said in alert["summary"] and alert["cause"] == "faulty kernel" for alert in told), told
    assert told[-1]["first_step"] == "0"
