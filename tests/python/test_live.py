"""Goal: attach() with nothing configured ends in a run on a real private server, which the
command finds, and which says what the library measured.
Method: the real bellwetherd, bellwether-sender and bellwether of this build.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import bellwether
from bellwether._hook.layer.judged import FAMILIES as ALL_FAMILIES
from bellwether._native import c_api
from bellwether._server import private_server
from bellwether.scan import command as scan_command
from bellwether.tools.doctor import layer_findings

from conftest import ROOT
from models import Attention, Model, Shape, batch

sys.path.insert(0, str(ROOT / "tests" / "support"))
sys.path.insert(0, str(ROOT / "examples"))
import tiny_transformer
from bellwether_process import Server, wait_for

FAMILIES = list(ALL_FAMILIES)
SEED = 2
ALREADY_ILL = 2000  # Key gradients have leaked since about step 1,200.
SAMPLES_MAX = 64  # Within which such a run must be called ill.


@pytest.fixture
def ended_server() -> Iterator[None]:
    assert c_api.find(c_api.SERVER), "bellwetherd is not built"
    yield
    ready = private_server.state_folder() / private_server.READY_FILE
    if ready.exists():
        pid = json.loads(ready.read_text())["pid"]
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def ask(*words: str) -> str:
    command = c_api.find("bellwether")
    assert command, "bellwether is not built"
    done = subprocess.run([str(command), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def await_step(run: str, step: int) -> None:
    """What a flush made durable is in the log; what is asked for is told a moment later."""

    def told() -> bool:
        runs = json.loads(ask("-o", "json", "run", "list")).get("runs", [])
        return (run, step) in [(r["description"]["name"], int(r.get("step", 0))) for r in runs]

    wait_for(f"{run} is told up to step {step}", told)


def test_from_attach_to_the_command(ended_server: None, tmp_path: Path) -> None:
    model = Model(Shape())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bellwether.attach(model, run="live", every=2, overhead_budget=1e9) as monitor:
        for step in range(6):
            model(batch(model.shape, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=1.25)
        assert monitor.flush(20), monitor.status()
        status = monitor.status()
        assert status["link"] == "streaming" and status["errors"] == 0
        assert status["page_url"].endswith("#/run/live")
        told = monitor.metrics()
    await_step("live", 5)
    assert "live" in ask("run", "list")
    matrix = json.loads(ask("-o", "json", "matrix", "live", "wq_sigma"))
    rows = [v for row in flat(matrix) for v in row]
    assert max(rows) == pytest.approx(
        max(
            told["bellwether/layer0/wq_sigma_max"],
            told["bellwether/layer1/wq_sigma_max"],
        ),
        rel=1e-5,
    )


class Negative(Attention):
    """Of a scale that is measured in no way."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=-0.25)


class Eager(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


def test_a_run_that_is_judged_in_part_says_so_everywhere(
    ended_server: None, caplog: pytest.LogCaptureFixture
) -> None:
    def train(name: str, *kinds: type[Attention]) -> str:
        caplog.clear()
        model = Model(Shape())
        for layer, kind in enumerate(kinds):
            model.blocks[layer].attention = kind(model.shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with bellwether.attach(model, run=name, every=1, overhead_budget=1e9) as monitor:
            for step in range(12):
                model(batch(model.shape, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss=1.25)
            assert monitor.flush(20), monitor.status()
            failed = [f.text for f in layer_findings(monitor.status()) if f.ok is False]
            layers = monitor.status()["layers"]
            unjudged = [sorted(x["not_judged_by"], key=FAMILIES.index) for x in layers]
            page, token = monitor.known_page_url().split("#")[0].split("?token=")
        await_step(name, 11)
        asked = urllib.request.Request(
            f"{page}metrics", headers={"Authorization": f"Bearer {token}"}
        )
        metrics = urllib.request.urlopen(asked).read().decode()
        told.update(doctor=failed, log=caplog.text, metrics=metrics, unjudged=unjudged)
        listed = next(line for line in ask("run", "list").splitlines() if line.startswith(name))
        assert f" {json.loads(ask('-o', 'json', 'run', 'get', name))['judged']['text']} " in listed
        return listed

    told: dict[str, Any] = {}
    assert " 0 nothing found in 12 steps " in train("whole")
    assert told["doctor"] == [] and "judged in part" not in told["log"]
    assert 'bellwether_run_judged_ratio{run="whole",family="all"} 1' in told["metrics"]

    assert " 0 judged by: norm, leak, loss " in train("negative", Negative, Negative)
    assert len(told["doctor"]) == 2 and "not judged by drift, ties, logits" in told["doctor"][0]
    said = [line for line in told["log"].splitlines() if "judged in part" in line]
    assert len(said) == 1 and "in 2 of 2 layers" in said[0] and "scale is not above 0" in said[0]
    assert 'bellwether_run_judged_ratio{run="negative",family="drift"} 0' in told["metrics"]
    assert 'bellwether_run_judged_ratio{run="negative",family="leak"} 1' in told["metrics"]

    partly = train("one-of-two", Negative)
    assert " 0 judged by: norm, leak, loss; drift, ties, logits in 1 of 2 layers " in partly
    assert len(told["doctor"]) == 1 and "in 1 of 2 layers" in told["log"]
    assert 'bellwether_run_judged_ratio{run="one-of-two",family="ties"} 0.5' in told["metrics"]

    mixed = train("eager-of-two", Eager)
    assert " 0 judged by: loss; drift, ties, norm, logits, leak in 1 of 2 layers " in mixed
    assert len(told["doctor"]) == 1 and "in 1 of 2 layers" in told["log"]
    assert "(Eager): it never calls scaled_dot_product_attention" in told["log"]
    assert told["unjudged"] == [["drift", "ties", "norm", "logits", "leak"], []]
    assert 'bellwether_run_judged_ratio{run="eager-of-two",family="all"} 0.5' in told["metrics"]

    assert " 0 judged by: loss " in train("loss-only", Eager, Eager)
    assert len(told["doctor"]) == 2 and "only loss, gradient norm" in told["log"]


def test_a_scan_without_a_server_starts_one(
    ended_server: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "outside"
    folder.mkdir()
    weights = {"layers.0.attn.qkv.weight": torch.randn(48, 16)}
    torch.save({"model": weights, "config": {"n_head": 2}}, folder / "step_7.pt")
    assert scan_command.main([str(folder)]) == 0
    out, said = capsys.readouterr()
    await_step("outside", 7)
    assert "#/run/outside" in said and out.startswith("step        7  sigma(W_Q) ")
    matrix = json.loads(ask("-o", "json", "matrix", "outside", "wq_sigma"))
    rows = [v for row in flat(matrix) for v in row]
    heads = weights["layers.0.attn.qkv.weight"][:16].unflatten(0, (2, 8))
    sigma = torch.linalg.matrix_norm(heads, ord=2)
    assert max(rows) == pytest.approx(float(sigma.max()), rel=1e-5)


def test_a_run_that_is_ill_already_is_called_ill(tmp_path: Path) -> None:
    """The failing example, attached when its key gradients have leaked for hundreds of steps."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    data = tiny_transformer.Data(SEED)
    model = tiny_transformer.TinyTransformer()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=tiny_transformer.LEARNING_RATE, betas=(0.9, 0.95),
        weight_decay=0.0, fused=True,
    )  # fmt: skip
    monitor = None
    with (
        Server(tmp_path) as server,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    ):
        for step in range(ALREADY_ILL + 20 * SAMPLES_MAX):
            for group in optimizer.param_groups:
                share = min(1.0, (step + 1) / tiny_transformer.WARM_UP_STEPS)
                group["lr"] = tiny_transformer.LEARNING_RATE * share
            if step == ALREADY_ILL:
                monitor = bellwether.attach(
                    model, server=server.grpc, run="late", every=20, rows=0, sequences=0,
                    overhead_budget=1e9,
                )  # fmt: skip
                monitor.count_from(step)
            tokens, target = data.batch()
            error = tiny_transformer.LOSS_SCALE * (model(tokens) - target)
            loss = (error**2)[:, tiny_transformer.SCORED_FROM :].mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), tiny_transformer.GRADIENT_NORM_MAX)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if monitor is not None:
                monitor.step(loss=loss)
                if step % 100 == 0 and monitor.flush(20) and serious_layers(server):
                    break
        assert monitor is not None
        monitor.detach()
        wait_for("the sick layer is named", lambda: serious_layers(server))
        assert serious_layers(server) == {1}
        print(f"attached at step {ALREADY_ILL}, named by step {step}")


def serious_layers(server: Server) -> set[int]:
    """Those that alerts of some weight name."""
    alerts = server.call("ListAlerts", run="late", limit=100)["alerts"]
    serious = ("SEVERITY_WARNING", "SEVERITY_CRITICAL")
    return {a["last"]["layer"] for a in alerts if a["last"]["severity"] in serious} - {-1}


def flat(thing: object) -> list[list[float]]:
    """All lists of numbers in a JSON value."""
    if isinstance(thing, list):
        if thing and all(isinstance(v, (int, float)) for v in thing):
            return [thing]
        return [row for v in thing for row in flat(v)]
    if isinstance(thing, dict):
        return [row for v in thing.values() for row in flat(v)]
    return []
