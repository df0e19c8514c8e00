"""Goal: an error of ours, wherever the host calls us, ends the watching with its reason and one
line of the log, and changes no bit of the training.
Method: guard.py knows every function of ours that the host calls.  Each is made to fail in turn
while a model trains with checkpointing, a GradScaler and a callback.  It is called by itself where
the training does not come by.  What must be among them is read from the code.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bellwether
from bellwether import _unwatched, monitor
from bellwether._hook.compiled import compiled_taps, traced_calls
from bellwether._hook.patches import met_calls
from bellwether._hook.running import running
from bellwether._step import grad_scale, steps
from bellwether._util import guard

from models import Model, Shape, batch

for name in (
    "_server.alerts", "_hf_callback", "attach_pid.inside", "lightning", "tools.runner",
    "accelerate", "trackers",
    "_hook.patches.wrap_attention",
):  # fmt: skip
    with contextlib.suppress(ImportError):  # The frameworks need not be there.
        importlib.import_module(f"bellwether.{name}")
PACKAGE = Path(bellwether.__file__).parent
# What a host is handed, or registers us with.
REGISTERED = {
    "atexit.register", "os.register_at_fork", "weakref.finalize",
    "optimizers.register_optimizer_step_pre_hook", "optimizers.register_optimizer_step_post_hook",
    "ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)", "_library.impl",
}  # fmt: skip
USED = {"step", "detach", "flush", "metrics", "status", "event", "on_action", "offer_action",
        "follow_alerts", "overhead", "count_from", "known_page_url",
        "capture_calls"}  # fmt: skip
# What only attach() and the handles of a process ask of a monitor.
INSIDE = {"forked", "install", "model", "trouble"}


class Planted(RuntimeError):
    pass


def planted(*args: Any, **kwargs: Any) -> Any:
    raise Planted("planted")


def train(path: Path | None) -> tuple[list[Tensor], Any]:
    torch.manual_seed(3)
    model = Model(Shape(layers=2), checkpointing="non-reentrant")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    handle = None
    if path is not None:
        handle = bellwether.attach(
            model, record=str(path), run="faults", every=1, overhead_budget=1e9,
            allow="lr.scale",
        )  # fmt: skip
    found = []
    for step in range(3):
        loss = model(batch(Shape(), step)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.detach())
        if handle is not None:
            handle.event("data")
            handle.step(loss=loss)
            handle.metrics(), handle.overhead(), handle.status(), handle.known_page_url()
    if handle is not None:
        handle.flush(0.1)
        handle.detach()
    return found + [p.detach() for p in model.parameters()], handle


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    return train(None)[0]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", sorted(guard.ENTRIES))
def test_an_error_in(
    name: str, plain: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    entry = guard.ENTRIES[name]
    reached = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        reached.append(args)
        planted()

    with monkeypatch.context() as patch:
        patch.setattr(entry, "function", fails)
        patch.setattr(entry, "told", False)
        caplog.set_level(logging.WARNING, "bellwether")
        watched, handle = train(tmp_path / "a.bwrun")
        assert all(torch.equal(a, b) for a, b in zip(plain, watched))
        if not reached:
            assert handle.why_off == "detached" and handle.status()["errors"] == 0
            caplog.clear()
            model = Model(Shape(layers=1))
            with bellwether.attach(model, record=str(tmp_path / "b.bwrun"), run="alone") as alone:
                count = len(inspect.signature(entry.guarded).parameters)
                entry.guarded(*([None] * count))
                assert "planted" in alone.why_off
    handle.detach()  # Where that is what has failed.
    running.stack.clear()
    met_calls.sdpa._users = 0
    met_calls.sdpa.divert(), met_calls.sdpa.restore()
    assert not grad_scale._hosts
    assert reached
    if isinstance(reached[0][0] if reached[0] else None, monitor.Monitor | steps.Steps):
        assert "planted" in handle.why_off or "planted" in alone.why_off
    lines = [line for line in told(caplog) if "planted" in line]
    assert len(lines) == 1, told(caplog)


def test_each_that_fails_once_in_a_checkpointed_forward(
    plain: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recomputation, in which nothing fails, finds what the forward has left."""
    for name in ("layer.Layer._before", "call_taps.TappedCall.output"):
        entry = guard.ENTRIES[f"bellwether._hook.layer.{name}"]
        good, calls = entry.function, []

        def once(*args: Any, good: Any = good, calls: Any = calls, **kwargs: Any) -> Any:
            calls.append(None)
            return planted() if len(calls) == 2 else good(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(entry, "function", once)
            watched, handle = train(tmp_path / f"{name}.bwrun")
        assert all(torch.equal(a, b) for a, b in zip(plain, watched))
        assert "planted" in handle.why_off


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < compiled_taps.TORCH_MIN,
    reason="compiled modules are not watched with this torch",
)
def test_an_error_while_torch_compile_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model = Model(Shape(layers=1))
    x = batch(model.shape, 0)
    want = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch._dynamo.reset()
    monkeypatch.setattr(traced_calls.Taps, "arguments", planted)
    handle = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="traced")
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), want)
    assert "torch.compile of the attention" in handle.why_off
    handle.detach()
    torch._dynamo.reset()


def test_an_import_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "bellwether._attach", None)
    model = Model(Shape(layers=1))
    handle = bellwether.attach(model, server="x")
    assert handle.why_off.startswith("import of bellwether: ") and not handle.live()
    with handle:
        model(batch(model.shape, 0)).sum().backward()
        handle.step(loss=1.0)
        assert handle.flush() and handle.metrics() == {} and handle.status()["errors"] == 1
    assert len(told(caplog)) == 1


def test_a_handle_of_nothing_has_what_a_monitor_has() -> None:
    wanted = {n for n in dir(monitor.Monitor) if not n.startswith("_")}
    found = set(dir(_unwatched.Unwatched("x")))
    assert USED | {"live", "why_off", "layers"} <= found
    assert wanted - found == INSIDE


def test_every_callback_given_to_the_host_is_guarded() -> None:
    for method in USED:
        assert f"bellwether.monitor.Monitor.{method}" in guard.ENTRIES
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE.parent).with_suffix("")
        home = ".".join(place.parts)
        if home not in sys.modules:
            continue
        tree = ast.parse(path.read_text())
        defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        guarded = {name.rpartition(".")[2] for name in guard.ENTRIES if name.startswith(home + ".")}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == "Callback":
                for method in node.body:
                    name = getattr(method, "name", "")
                    if name.startswith("on_") or name == "setup":
                        assert name in guarded, (path.name, name)
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in REGISTERED:
                continue
            for given in node.args[ast.unparse(node.func) == "weakref.finalize" :]:
                own = ast.unparse(given).removeprefix("self.")
                assert own not in defined or own in guarded, (path.name, own)
