"""Goal: watching never changes a result, never raises into training, and ends when told.
Method: the same training with and without, compared bit by bit; planted errors; forks.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import bellwether
from bellwether import monitor as monitor_module
from bellwether._hook.calls.kernel_choice import SDPA
from bellwether._hook.layer import gradients, seen_calls
from bellwether._hook.patches import registry
from bellwether._native import c_api
from bellwether._step.patches import Patches
from bellwether._step.steps import Steps
from bellwether.settings import Settings
from bellwether.tools.doctor import layer_findings, monitor_findings

from models import Model, Shape, batch
from recording import Recording

PLAIN_SDPA = SDPA
SHAPE = Shape()


def losses(
    how: str, path: Path, shape: Shape = SHAPE, checkpointing: Optional[str] = None
) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(11)
    model = Model(shape, checkpointing=checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = None
    if how in ("watched", "midway"):
        monitor = bellwether.attach(
            model, record=str(path), run="bits", every=2, overhead_budget=1e9
        )
    found = []
    for step in range(10):
        if how == "midway" and step == 6:
            assert monitor is not None
            monitor.detach()
        loss = model(batch(shape, step)).square().mean() + F.dropout(torch.ones(3), 0.5).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss=loss)
        found.append(loss.detach())
    if monitor is not None:
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
        monitor.detach()
    return found, [p.detach() for p in model.parameters()]


def test_compared_trainings_have_one_thread_also_in_children() -> None:
    """With more, the same training twice may differ without us: see one_thread.py."""
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (torch.get_num_threads(), int(child.stdout)) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_bitwise_the_same_training(
    dtype: torch.dtype, checkpointing: Optional[str], tmp_path: Path
) -> None:
    shape = Shape(dtype=dtype)
    plain = losses("plain", tmp_path, shape, checkpointing)
    for how in ("watched", "midway"):
        other = losses(how, tmp_path / f"{how}.bwrun", shape, checkpointing)
        for a, b in zip(plain[0] + plain[1], other[0] + other[1]):
            assert torch.equal(a, b), how


def test_a_recording_ends_with_its_watch(tmp_path: Path) -> None:
    """Nothing that might still come is waited for."""
    seconds = []
    for number in range(5):
        path = tmp_path / f"{number}.bwrun"
        model = Model(SHAPE)
        with bellwether.attach(model, record=str(path), run="ends", every=1) as monitor:
            model(batch(SHAPE, 0)).sum().backward()
            monitor.step(loss=1.0)
            assert monitor.flush(20)
        began = time.monotonic()
        Recording(path, ended=True)
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.5, seconds  # The quickest: any of them may wait for a core.


def test_disabled_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLWETHER_DISABLED", "1")
    model = Model(Shape())
    before = Model.__dict__.get("forward")
    monitor = bellwether.attach(model)
    assert not monitor.live() and monitor.why_off == "disabled"
    assert F.scaled_dot_product_attention is PLAIN_SDPA
    assert Model.__dict__.get("forward") is before and not registry.layers
    model(batch(Shape(), 0)).sum().backward()
    monitor.step(loss=1.0)
    monitor.event("data")
    assert monitor.flush() and monitor.metrics() is not None
    monitor.detach()


def test_attaching_twice_gives_the_same_handle(tmp_path: Path) -> None:
    model = Model(Shape())
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="twice")
    assert bellwether.attach(model) is monitor
    assert bellwether.attach(torch.nn.DataParallel(model)) is monitor
    monitor.detach()
    again = bellwether.attach(model, record=str(tmp_path / "b.bwrun"), run="twice")
    assert again is not monitor and again.live()
    again.detach()


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (None, "rank 0 reports: without parallel= each rank is taken for a copy"),
        (bellwether.Parallel(data=(3, 8)), "another copy of the model reports"),
    ],
    ids=["nothing is known", "copies are known"],
)
def test_other_ranks_stand_aside(parallel: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monitor = bellwether.attach(Model(Shape()), server="127.0.0.1:1", parallel=parallel)
    assert not monitor.live() and monitor.why_off.startswith(said)
    assert [finding.ok for finding in layer_findings(monitor.status())] == [None]
    assert F.scaled_dot_product_attention is PLAIN_SDPA


def test_all_ranks_report_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    model = Model(Shape())
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="ranks", ranks="all"
    ) as monitor:
        model(batch(Shape(), 0)).sum().backward()
        monitor.step()
        assert monitor.flush(20)
    hello = Recording(tmp_path / "a-rank3.bwrun").hello
    assert (hello.rank, hello.run.world, hello.run.reporters) == (3, 8, 8)


@pytest.mark.parametrize("where", ["add_probe", "add_key_leak"])
def test_errors_inside_turn_it_off_and_training_goes_on(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(gradients, where, broken)
    plain = losses_without_check(None, tmp_path)
    watched = losses_without_check(tmp_path / "a.bwrun", tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0]))
    status = watched[1]
    assert status["errors"] == 1 and not status["live"]
    assert "planted" in status["why_off"]


def losses_without_check(record: Optional[Path], folder: Path) -> tuple[list[Tensor], Any]:
    torch.manual_seed(2)
    model = Model(Shape(), checkpointing="non-reentrant")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None
    if record is not None:
        monitor = bellwether.attach(model, record=str(record), run="errors", every=1)
    found = []
    for step in range(10):
        loss = model(batch(Shape(), step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    status = monitor.status() if monitor is not None else None
    if monitor is not None:
        monitor.detach()
    return found, status


@pytest.mark.parametrize("good", [0, 1, 2])
def test_turning_off_in_the_middle_of_a_checkpointed_backward(
    good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken(*args: Any, **kwargs: Any) -> None:
        calls.append(None)
        if len(calls) > good:
            raise RuntimeError("planted")

    monkeypatch.setattr(gradients, "add_probe", broken)
    plain = losses_without_check(None, tmp_path)
    watched = losses_without_check(tmp_path / "a.bwrun", tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0]))
    assert not watched[1]["live"]


def test_a_step_that_ends_between_forward_and_recomputation(tmp_path: Path) -> None:
    model = Model(Shape(), checkpointing="non-reentrant")
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="between", every=2
    ) as monitor:
        for step in range(6):
            loss = model(batch(Shape(), step)).sum()
            monitor.step(loss=loss)  # Now the sampling flips.
            loss.backward()  # A CheckpointError would end the test.
        assert monitor.status()["errors"] == 0


def test_errors_in_forward_and_step_stay_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    model = Model(Shape())
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="f", every=1, overhead_budget=1e9
    ) as monitor:
        monitor.step(loss=object(), step="x")  # type: ignore[arg-type]
        assert len(monitor.status()["numbers_left_out"]) == 2 and monitor.live()
        monkeypatch.setattr("bellwether._step.reporter.Sample", broken)
        monitor.step(loss=1.0)
        assert monitor.status()["errors"] == 1 and not monitor.live()
        monkeypatch.setattr(seen_calls.SeenCalls, "observe", broken)
        model(batch(Shape(), 0)).sum().backward()
        monitor.step(loss=1.0)
        assert "planted" in monitor.why_off


def test_samples_of_more_bytes_than_allowed_become_rarer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = Model(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="bytes", every=1, overhead_budget=1e9,
        byte_budget=1000,
    ) as monitor:  # fmt: skip
        for step in range(40):
            model(batch(SHAPE, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert monitor.flush(20)
        status = monitor.status()
        volume = status["volume"]
        assert status["sampling_period"] > 1 and volume["rarer"] >= 1
        assert volume["budget"] == 1000 and volume["sample"] > 10_000 and volume["second"] > 0
        assert any("a second of byte_budget's 1:" in f.text for f in monitor_findings(monitor))
    assert caplog.text.count("byte_budget allows 1 KiB a second") == 1


class Deaf:
    """A server that takes connections at an address and never answers; `slow` reads what
    comes, byte by byte.
    """

    def __init__(self, slow: bool) -> None:
        self._slow = slow
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = threading.Event()
        self._taken: list[socket.socket] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                taken, _ = self._listener.accept()
                self._taken.append(taken)
                self.heard.set()
                while self._slow and taken.recv(1):
                    pass
            except OSError:
                return  # Closed.

    def close(self) -> None:
        for each in (self._listener, *self._taken):
            each.close()


@pytest.mark.parametrize("server", ["dead", "hung", "slow"])
def test_a_bad_server_costs_nothing_but_the_data(server: str, tmp_path: Path) -> None:
    deaf = None if server == "dead" else Deaf(server == "slow")
    address = f"unix:{tmp_path}/nobody.sock" if deaf is None else deaf.address

    def train(address: Optional[str]) -> list[Tensor]:
        torch.manual_seed(1)
        model = Model(Shape())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = None
        if address is not None:
            monitor = bellwether.attach(
                model, server=address, run=server, every=1, overhead_budget=1e9
            )
        for step in range(300):  # More than the ring holds.
            loss = model(batch(Shape(), step, 1, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step(loss=loss)
                if deaf is not None and step == 0:
                    assert deaf.heard.wait(60)
        if monitor is not None:
            status = monitor.status()
            assert status["errors"] == 0, status["last_error"]
            assert status["link"] in ("starting", "connecting", "streaming")
            assert not monitor.flush(0.05)
            monitor.detach()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(None), train(address)))
    if deaf is not None:
        deaf.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk of one's own takes root")
def test_a_full_disk_costs_nothing_but_the_recording(tmp_path: Path) -> None:
    """In a mount namespace: a folder of 64 KiB."""
    script = tmp_path / "train.py"
    script.write_text(f"""\
import sys
sys.path[:0] = {sys.path[:3]!r}
from pathlib import Path
import torch, test_attach
plain = test_attach.losses("plain", Path("."))
found = test_attach.losses_on_a_full_disk(Path("small"))
assert all(torch.equal(a, b) for a, b in zip(plain[0] + plain[1], found))
""")
    (tmp_path / "small").mkdir()
    mount = "mount -t tmpfs -o size=64k none small && dd if=/dev/zero of=small/rest bs=4k"
    command = f"{mount} 2>/dev/null; exec {sys.executable} train.py"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("no mount namespace may be made here")
    assert done.returncode == 0, done.stdout + done.stderr


def losses_on_a_full_disk(folder: Path) -> list[Tensor]:
    """What losses() gives, recorded to where nothing fits."""
    torch.manual_seed(11)
    model = Model(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = bellwether.attach(
        model, record=str(folder / "full.bwrun"), run="full", every=1, overhead_budget=1e9
    )
    found = []
    for step in range(10):
        loss = model(batch(SHAPE, step)).square().mean() + F.dropout(torch.ones(3), 0.5).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=loss)
        found.append(loss.detach())
    # Said by the sender, a process of its own that may only just start.
    deadline = time.monotonic() + 60
    while not monitor.status()["counters"].error and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not monitor.flush(2)
    status = monitor.status()
    assert status["errors"] == 0, status["last_error"]
    assert status["counters"].error, "nobody was told"
    monitor.detach()
    return found + [p.detach() for p in model.parameters()]


def test_a_missing_sender_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = c_api.find
    monkeypatch.setattr(c_api, "find", lambda name: None if name == c_api.SENDER else find(name))
    model = Model(SHAPE)
    monitor = bellwether.attach(model, record=str(tmp_path / "run.bwrun"), every=1)
    model(batch(SHAPE, 0)).square().mean().backward()
    monitor.step(loss=1.0)
    assert "bellwether-sender was not found" in monitor.status()["last_error"]
    assert "nothing is recorded: bellwether-sender was not found" in caplog.text
    monitor.detach()


class Numbers(torch.utils.data.Dataset):
    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor  # The parent's, inherited by fork.

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        # A worker that touches the model must not reach the parent's client.
        assert not self.monitor.live() and not monitor_module.handles.all()
        self.monitor.step(loss=1.0)
        return torch.full((4, Shape().width), float(index))


def test_data_loader_workers_with_a_live_stream(tmp_path: Path) -> None:
    model = Model(Shape())
    gc.collect()
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="fork", every=1) as monitor:
        model(batch(Shape(), 0)).sum().backward()
        monitor.step(loss=1.0)
        loader = torch.utils.data.DataLoader(
            Numbers(monitor), batch_size=2, num_workers=2, multiprocessing_context="fork"
        )
        for x in loader:
            model(x).sum().backward()
            monitor.step(loss=1.0)
        assert monitor.live() and monitor.status()["step"] == 5
        assert monitor.flush(20)


def test_a_forked_child_may_train_unwatched(tmp_path: Path) -> None:
    model = Model(Shape())
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="fork") as monitor:
        model(batch(Shape(), 0)).sum().backward()
        monitor.step()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                model(batch(Shape(), 1)).sum()
                monitor.step()
                monitor.flush(0.1)
                monitor.detach()
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert monitor.flush(20) and monitor.live()


def test_a_dropped_model_takes_its_monitor_along(tmp_path: Path) -> None:
    model = Model(Shape())
    bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="gone")
    watch = weakref.ref(model)
    del model
    gc.collect()
    assert watch() is None
    assert not registry.layers and F.scaled_dot_product_attention is PLAIN_SDPA


def test_frozen_and_eval_forwards_are_not_samples(tmp_path: Path) -> None:
    model = Model(Shape())
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="eval") as monitor:
        with torch.no_grad():
            model(batch(Shape(), 0))
        assert [x.calls for x in monitor.layers] == [0, 0]


def test_detach_within_detach_takes_each_patch_back_once() -> None:
    steps = Steps(None, Settings(), None, silent=False)
    patches, undone = Patches(steps), list[str]()

    def first() -> None:
        undone.append("first")
        patches.take_back()

    patches.add(first, lambda: undone.append("second"))
    patches.take_back()
    assert undone == ["first", "second"] and not patches.installed
    assert steps.health.errors == 0
