"""Goal: the full spectra of Gram matrices that a real trainer ships are stored as series of the
steps that they were shipped in.  They equal torch.linalg.svdvals of the weights of that step, also
when the server is killed in the middle, and when its GPU fails.  Rules of one's own see them.  The
server asks for the heads that are on their way to fail.
Method: the real bellwetherd, a PyTorch model under the real hook, and recorded runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, wait_for

import bellwether
from bellwether.client import Block, RunClient, RunOptions, Sampling

from conftest import generated_protos  # noqa: F401
from models import Model, Shape, batch
from recording import Recording

RUN = "spectra"
STEPS = 12
SHAPE = Shape(heads=4, kv_heads=2)
FAKE = BIN / "libbellwether_fake_gpu_bank.so"
# Rounding to 17 bits, and the float32 of the matrices.
TOLERANCE = 2e-5
RULES = (
    "thresholds: {context: {warmup_steps: 0}}\n"
    "rules:\n- {name: ranky, signal: gram_effective_rank, detector: level, above: 2, batch_steps: 1,"
    " stage: 3, severity: warning}\n"
)


def weight(model: Model, layer: int, which: str) -> Tensor:
    """[heads, dim, width], double."""
    h, g = SHAPE.heads * SHAPE.dim, SHAPE.kv_heads * SHAPE.dim
    qkv = model.attentions()[layer].qkv.weight.detach().double()
    return (qkv[:h] if which == "q" else qkv[h : h + g]).clone().unflatten(0, (-1, SHAPE.dim))


def effective_rank(sigma: Tensor) -> float:
    p = sigma.square() / sigma.square().sum()
    p = p[p > 0]
    return float(torch.exp(-(p * p.log()).sum()))


def wanted(model: Model, before: Optional[list[tuple[Tensor, Tensor]]]) -> dict[tuple[str, int, int], float]:
    """(signal, layer, head) -> value, by singular values of the weights."""
    found = {}
    for layer in range(SHAPE.layers):
        q, k = weight(model, layer, "q"), weight(model, layer, "k")
        for head in range(SHAPE.heads):
            sigma = torch.linalg.svdvals(q[head])
            found["gram_sigma", layer, head] = float(sigma[0])
            found["gram_stable_rank", layer, head] = float(sigma.square().sum() / sigma[0] ** 2)
            found["gram_effective_rank", layer, head] = effective_rank(sigma)
            found["gram_top2_ratio", layer, head] = float(sigma[1] / sigma[0])
            if before is not None:
                q0, k0 = before[layer][0][head], before[layer][1][head // 2]
                change = (q[head] - q0).T @ k0 + q0.T @ (k[head // 2] - k0)
                found["gram_increment_rank", layer, head] = effective_rank(torch.linalg.svdvals(change))
    return found


def train(
    between: Callable[[int], None] = lambda step: None, **where: str
) -> dict[int, dict[tuple[str, int, int], float]]:
    """Trains under watch; step -> what its series should hold."""
    torch.manual_seed(5)
    model = Model(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor = bellwether.attach(
        model, run=RUN, every=1, overhead_budget=1e9, byte_budget=0, gram_bytes=1 << 19,
        **where
    )
    found = {}
    before = None
    for step in range(STEPS):
        model(batch(model.shape, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found[step] = wanted(model, before)
        before = [(weight(model, i, "q"), weight(model, i, "k")) for i in range(SHAPE.layers)]
        monitor.step()
        if "record" in where:  # The ring has fewer places than all steps together have matrices.
            assert monitor.flush(60)
        between(step)
    assert monitor.flush(60) and monitor.status()["errors"] == 0, monitor.status()["last_error"]
    monitor.detach()
    return found


def train_with(
    server: Server, between: Callable[[int], None] = lambda step: None
) -> dict[int, dict[tuple[str, int, int], float]]:
    found = train(between, server=server.grpc)
    wait_for("the run has ended", lambda: server.call("GetRun", run=RUN).get("ended"))
    return found


def compare(server: Server, found: dict[int, dict[tuple[str, int, int], float]]) -> None:
    keys = [key for key in found[STEPS - 1] if key[0].startswith("gram_")]
    # They are computed behind the run, and may come after its end.
    wait_for(
        "the last spectra are stored",
        lambda: all(STEPS - 1 in server.series(RUN, *key) for key in keys),
    )
    stored = {key: server.series(RUN, *key) for key in keys}
    for (signal, layer, head), series in stored.items():
        # The layers have their numbers from the end of the first step on; a change needs two.
        first = 2 if signal == "gram_increment_rank" else 1
        assert sorted(series) == list(range(first, STEPS)), (signal, layer, head)
        for step, value in series.items():
            expected = found[step][signal, layer, head]
            tolerance = 2e-3 if signal == "gram_increment_rank" else TOLERANCE
            assert value == pytest.approx(expected, rel=tolerance), (signal, layer, head, step)


def count(metrics: str, start: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(start))


def test_the_stored_spectra_are_those_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(RULES)
    with Server(tmp_path, "rules_file: rules.yml\n") as server:
        found = train_with(server)
        compare(server, found)
        top = server.json("head", "top", RUN, "--signal", "gram_sigma", "--limit", "1")["heads"][0]
        last = {key[1:]: value for key, value in found[STEPS - 1].items() if key[0] == "gram_sigma"}
        assert (top.get("layer", 0), top.get("head", 0)) == max(last, key=lambda where: last[where])
        alerts = server.call("ListAlerts", run=RUN, limit=10)["alerts"]
        assert "ranky" in {alert["last"]["rule"] for alert in alerts}
        metrics = server.get("/metrics")
        grams = SHAPE.layers * SHAPE.heads * (STEPS - 1)
        assert count(metrics, 'bellwether_spectra_total{result="computed"}') == 2 * grams - SHAPE.layers * SHAPE.heads
        assert count(metrics, 'bellwether_spectra_total{result="dropped"}') == 0
        # They leave with the run, and come back as what they are.
        server.run("run", "export", RUN, str(tmp_path / "out.bwrun"))
        exported = Recording(tmp_path / "out.bwrun").steps()
        assert exported[3]["gram_sigma"].shape == (SHAPE.layers, SHAPE.heads)


def test_a_killed_server_recovers_them_and_alerts_nothing_else(tmp_path: Path) -> None:
    with Server(tmp_path) as server:

        def kill(step: int) -> None:
            if step in (3, 4, 8):
                server.kill()
                server.start()

        found = train_with(server, kill)
        compare(server, found)
        before = {key: server.series(RUN, *key) for key in found[2]}
        server.kill()
        server.start()
        server.await_applied()
        assert {key: server.series(RUN, *key) for key in found[2]} == before


def test_a_recording_with_matrices_is_imported_and_replayed_alike(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(RULES)
    found = train(record=str(tmp_path / "run.bwrun"))
    recording = Recording(tmp_path / "run.bwrun", ended=True)
    assert any(m.WhichOneof("body") == "spectrum" for m in recording.messages)

    def replayed(path: Path) -> list[tuple[str, str, str]]:
        done = subprocess.run(
            [str(BIN / "bellwether"), "replay", str(path), "--json", "--rules", str(rules)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        transitions = [json.loads(line) for line in done.stdout.splitlines()]
        return [(t["rule"], str(t["step"]), t["summary"]) for t in transitions]

    with Server(tmp_path, "rules_file: rules.yml\n") as server:
        server.run("run", "import", str(tmp_path / "run.bwrun"))
        compare(server, found)
        history = []
        for alert in server.call("ListAlerts", run=RUN, limit=100)["alerts"]:
            history += server.call("GetAlert", run=RUN, key=alert["last"]["key"])["alert"]["history"]
        history.sort(key=lambda t: int(t["id"]))
        live = [(t["rule"], str(t["step"]), t["summary"]) for t in history]
        server.run("run", "export", RUN, str(tmp_path / "out.bwrun"))
    assert "ranky" in {rule for rule, *_ in live}
    assert replayed(tmp_path / "run.bwrun") == live
    assert replayed(tmp_path / "out.bwrun") == live, "of the signals, without a matrix"


@pytest.mark.parametrize("passes", ["1000000", "5", "-1"])
def test_gpu_and_failing_gpu_give_the_same_spectra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: str
) -> None:
    monkeypatch.setenv("BELLWETHER_FAKE_BANK_SPECTRA", passes)
    with Server(tmp_path, "", "--gpu=on", f"--gpu.library={FAKE}") as server:

        def keep_up(step: int) -> None:
            """In several batches, however long the server has to wait for a processor."""
            computed = 'bellwether_spectra_total{result="computed"}'
            grams = SHAPE.layers * SHAPE.heads * (step - 1)
            wait_for("it keeps up", lambda: count(server.get("/metrics"), computed) >= grams)

        compare(server, train_with(server, keep_up))
        metrics = server.get("/metrics")
    batches = {b: count(metrics, f'bellwether_spectra_seconds_count{{backend="{b}"}}') for b in ("cpu", "cuda")}
    assert (batches["cuda"] > 0) == (passes != "-1")
    assert (batches["cpu"] > 0) == (passes != "1000000")
    assert f'bellwether_degraded{{reason="gpu"}} {int(passes == "5")}' in metrics


def test_the_server_asks_for_the_heads_that_drift(tmp_path: Path) -> None:
    recording = Recording(ROOT / "tests/testdata/runs/gpt-flash-s4.bwrun")
    layout = recording.hello.run.layout
    attention = recording.hello.run.attention
    asked: Optional[Sampling] = None
    with Server(tmp_path) as server:
        options = RunOptions(
            run="drifts", server=server.grpc, layers=layout.layers, heads=layout.heads, kv_heads=layout.kv_heads,
            attention_kernel=attention.kernel, score_dtype=attention.score_dtype, causal=attention.causal,
        )  # fmt: skip
        with RunClient(options) as client:
            for frame in recording.frames:
                blocks = [
                    Block(recording.names[b.signal], list(b.values), b.layer_begin, b.layer_count, b.head_begin, b.head_count)
                    for b in frame.blocks
                ]
                while not client.push(frame.step, blocks):
                    assert client.flush(30)
                asked = client.poll_sampling() or asked
            assert client.flush(60)

            def heads() -> Optional[Sampling]:
                nonlocal asked
                asked = client.poll_sampling() or asked
                return asked if asked is not None and asked.deeper else None

            found = wait_for("the server asks for more of some heads", heads)
            assert found.period == 0 and len(found.deeper) <= 64
            named = {
                (h["layer"], h["head"])
                for alert in server.call("ListAlerts", run="drifts", limit=100)["alerts"]
                for h in alert["last"].get("heads", [])
            }
            assert named & set(found.deeper)
