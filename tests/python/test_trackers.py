"""Goal: numbers that a script gives its tracker become numbers and signals of the run, at the step
that is under way.  A run's alerts become the tracker's.  The tracker beside gets what it got.
Method: accelerate's own Accelerator; torchtitan's, verl's, W&B's and trackio's own where they are
installed, and stand-ins that keep to their interfaces.
"""

from __future__ import annotations

import contextvars
import enum
import sys
import types
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import bellwether
import bellwether.accelerate
from bellwether.trackers import Logger, alerts_to

from models import Model, Shape, batch
from recording import Recording

WATCH: dict[str, Any] = dict(every=1, rows=0, sequences=0, overhead_budget=1e9)
STEPS = 4


def told(path: Path) -> dict[int, dict[str, float]]:
    """Step -> name -> value, of the run's own numbers and of the job's."""
    recording = Recording(path, ended=True)
    found: dict[int, dict[str, float]] = {}
    for step, signals in recording.steps().items():
        of_run = {name for name in ("loss", "grad_norm", "learning_rate") if name in signals}
        found[step] = {name: float(signals[name][0, 0]) for name in of_run}
    for frame in recording.frames:
        found[frame.step].update({own.name: own.values[0] for own in frame.own})
    return found


def train(path: Path, log: Any, **attach: Any) -> Any:
    """Each step is logged as trainers do it: behind the optimizer's step."""
    model = Model(Shape(layers=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    monitor = bellwether.attach(model, record=str(path), run="tracked", **WATCH, **attach)
    for step in range(STEPS):
        model(batch(model.shape, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        log(monitor, step)
    monitor.detach()
    return monitor


def test_numbers_are_of_the_step_that_has_just_ended(tmp_path: Path) -> None:
    def log(monitor: Any, step: int) -> None:
        # torchtitan counts from 1, and logs every so many steps.
        if step % 2 == 0:
            metrics = {"loss_metrics/global_avg_loss": 5.0 + step, "grad_norm": torch.tensor(0.5),
                       "reward": float(step), "mine/depth": 3, "tflops": 9.0}  # fmt: skip
            Logger(monitor, names="mine/*").log(metrics, step + 1)

    monitor = train(tmp_path / "a.bwrun", log)
    found = told(tmp_path / "a.bwrun")
    assert sorted(found) == list(range(STEPS))
    assert [found[step].get("loss") for step in range(STEPS)] == [5.0, None, 7.0, None]
    for step in (0, 2):
        assert found[step]["grad_norm"] == 0.5 and found[step]["learning_rate"] == 0.25
        assert (found[step]["reward"], found[step]["mine/depth"]) == (step, 3.0)
        assert "tflops" not in found[step]
    assert monitor.status()["numbers_left_out"] == {}


def test_a_loop_that_calls_step_is_believed(tmp_path: Path) -> None:
    def log(monitor: Any, step: int) -> None:
        monitor.step(loss=1.0)
        Logger(monitor).log({"loss": 7.0}, step)

    train(tmp_path / "a.bwrun", log)
    assert [each["loss"] for each in told(tmp_path / "a.bwrun").values()] == [1.0] * STEPS


@pytest.mark.parametrize("given", [{"loss": "x"}, {"loss": None, 5: 6}, {}, None, 7, {"loss": [1]}])
def test_numbers_that_cannot_be_read_raise_nothing(tmp_path: Path, given: Any) -> None:
    train(tmp_path / "a.bwrun", lambda monitor, step: Logger(monitor).log(given, step))
    assert sorted(told(tmp_path / "a.bwrun")) == list(range(STEPS))


class Beside:
    """As torchtitan's BaseLogger."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, Any], int]] = []
        self.closed = 0

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.got.append((metrics, step))

    def close(self) -> None:
        self.closed += 1


def test_the_logger_beside_gets_all_of_it_and_ours(tmp_path: Path) -> None:
    beside = Beside()

    def log(monitor: Any, step: int) -> None:
        Logger(monitor, beside=beside).log({"loss": 2.0}, step + 1)

    train(tmp_path / "a.bwrun", log)
    assert [step for _, step in beside.got] == list(range(1, STEPS + 1))
    assert all(metrics["loss"] == 2.0 for metrics, _ in beside.got)
    assert "bellwether/layer0/wq_sigma_max" in beside.got[-1][0]
    logger = Logger(None, beside=beside)
    logger.close(), logger.finish()
    assert beside.closed == 1


def test_errors_of_the_logger_beside_stay_the_hosts(tmp_path: Path) -> None:
    class Broken(Beside):
        def log(self, metrics: dict[str, Any], step: int) -> None:
            raise KeyError("the host's")

    def log(monitor: Any, step: int) -> None:
        with pytest.raises(KeyError, match="the host's"):
            Logger(monitor, beside=Broken()).log({"loss": 2.0}, step)

    assert train(tmp_path / "a.bwrun", log).why_off == "detached"


def test_accelerate_has_it_among_its_trackers(tmp_path: Path) -> None:
    from accelerate import Accelerator

    path = tmp_path / "a.bwrun"
    tracker = bellwether.accelerate.Tracker(
        names="mine", record=str(path), run="accelerated", **WATCH
    )
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    model = Model(Shape(layers=1))
    monitor = tracker.attach(model)
    shape = model.shape
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.init_trackers("project", config={"lr": 0.1})
    assert accelerator.get_tracker("bellwether", unwrap=True) is monitor
    for step in range(STEPS):
        loss = model(batch(shape, step)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"train_loss": 1.0 + step, "mine": 2.0 * step, "other": 1.0}, step=step)
    accelerator.end_training()
    assert monitor.why_off == "detached" and monitor.status()["errors"] == 0
    found = told(path)
    assert [found[step]["loss"] for step in range(STEPS)] == [1.0, 2.0, 3.0, 4.0]
    assert [found[step]["mine"] for step in range(STEPS)] == [0.0, 2.0, 4.0, 6.0]
    assert not any("other" in each for each in found.values())


def test_torchtitans_container_takes_it_for_one_of_its_loggers(tmp_path: Path) -> None:
    metrics = pytest.importorskip("torchtitan.components.metrics")
    container = metrics.LoggerContainer()

    def log(monitor: Any, step: int) -> None:
        if not container.number_of_loggers:
            container.add_logger(Logger(monitor))
        container.log({"loss_metrics/global_avg_loss": float(step)}, step + 1)

    train(tmp_path / "a.bwrun", log)
    container.close()
    assert [each["loss"] for each in told(tmp_path / "a.bwrun").values()] == [0.0, 1.0, 2.0, 3.0]


def test_verls_tracking_takes_it_for_one_of_its_loggers(tmp_path: Path) -> None:
    tracking = pytest.importorskip("verl.utils.tracking")
    of_verl = tracking.Tracking("project", "experiment", default_backend=[])

    def log(monitor: Any, step: int) -> None:
        of_verl.logger["bellwether"] = Logger(monitor)
        of_verl.log(data={"actor/kl_loss": 0.5 * step, "timing_s/gen": 2.0}, step=step)

    train(tmp_path / "a.bwrun", log)
    of_verl.finish()
    found = told(tmp_path / "a.bwrun")
    assert [found[step]["actor/kl_loss"] for step in range(STEPS)] == [0.0, 0.5, 1.0, 1.5]
    assert not any("timing_s/gen" in each for each in found.values())


# ---- alerts ----


def alert(**more: Any) -> bellwether.Alert:
    said = {
        "run": "mine", "state": "firing", "severity": "critical", "rule": "drift", "layer": 1,
        "head": 3, "step": 70, "cause": "rounding drift",
        "summary": "mine: drift in layer 1 head 3",
    }  # fmt: skip
    return bellwether.Alert.of({**said, **more})


class OfWandb(enum.Enum):
    INFO, WARN, ERROR = "INFO", "WARN", "ERROR"


class Wandb(types.SimpleNamespace):
    AlertLevel = OfWandb

    def alert(self, title: str, text: str, level: Any = None, wait_duration: Any = None) -> None:
        assert len(title) < 64 and level.value in ("INFO", "WARN", "ERROR")
        self.got.append((title, text, level.value))


def test_an_alert_becomes_one_of_the_trackers() -> None:
    wandb = Wandb(got=[])
    tell = alerts_to(wandb)
    tell(alert())
    tell(alert(severity="warning", layer=None, head=None, cause="unknown"))
    tell(alert(state="resolved"))
    assert wandb.got == [
        (
            "critical: drift in layer 1 head 3",
            "mine: drift in layer 1 head 3 [rounding drift]; step 70", "ERROR",
        ),
        ("warning: drift", "mine: drift in layer 1 head 3; step 70", "WARN"),
    ]  # fmt: skip
    alerts_to(wandb, resolved=True)(alert(state="resolved", rule="r" * 100))
    assert wandb.got[-1][2] == "INFO" and wandb.got[-1][0].startswith("over: rrr")


def test_a_tracker_that_knows_its_run_by_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """As trackio's: the alert comes on another thread."""
    import threading

    current: contextvars.ContextVar[Optional[str]] = contextvars.ContextVar("run", default=None)
    got: list[Any] = []
    module = types.ModuleType("of_context")

    def tell(title: str, text: Optional[str] = None, level: Any = None) -> None:
        got.append((current.get(), title, level))

    monkeypatch.setattr(module, "alert", tell, raising=False)
    monkeypatch.setitem(sys.modules, "of_context", module)
    current.set("mine")
    callback = alerts_to(module)
    for _ in range(2):
        thread = threading.Thread(target=callback, args=(alert(),))
        thread.start()
        thread.join()
    assert got == [("mine", "critical: drift in layer 1 head 3", "ERROR")] * 2


def test_wandb_itself_takes_an_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", mode="offline", dir=str(tmp_path))
    try:
        for target in (wandb, run):
            for severity in ("info", "warning", "critical"):
                alerts_to(target)(alert(severity=severity))
    finally:
        run.finish()


def test_trackio_itself_takes_an_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    run = trackio.init(project="p", embed=False)
    said: list[Any] = []
    monkeypatch.setattr(type(run), "alert", lambda self, **told: said.append(told))
    thread = threading.Thread(target=alerts_to(trackio), args=(alert(),))
    thread.start()
    thread.join()
    trackio.finish()
    assert [each["level"] for each in said] == [trackio.AlertLevel.ERROR]
