"""Goal: a number of a step that cannot be read costs that number: the step, its frame and its
sample arrive all the same, and it is said once.  No integer loses bits on its way to C: what a
field cannot hold is refused, and what is recorded can be replayed.
Method: short runs with odd numbers and odd optimizers, read back from their recordings; every
field of every struct at its limits and beyond.  DTensors are in test_parallel.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import socket
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch

import bellwether
from bellwether import settings
from bellwether._native import attention_c_api, c_api
from bellwether._util.integers import STEP_MAX
from bellwether.attach_pid import inside
from bellwether.client import Block, ClientError, RunClient, RunOptions

from models import Model, Shape, batch
from recording import Recording, replayed_alerts

SHAPE = Shape(layers=1)
STEPS = 12  # More than errors turn a monitor off.


class OwnRate(torch.optim.Optimizer):
    """Sets its own rate, as Adafactor does."""

    def __init__(self, parameters: Any, **groups: Any) -> None:
        super().__init__(parameters, groups)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-1e-3)


def told(path: Path, optimizer: Any, numbers: dict[str, Any], explicit: bool) -> Any:
    """(steps, status) of a run that tells these numbers."""
    model = Model(SHAPE)
    stepper = optimizer(model.parameters())
    monitor = bellwether.attach(
        model, record=str(path), run="numbers", every=2, overhead_budget=1e9
    )
    for step in range(STEPS):
        model(batch(SHAPE, step)).square().mean().backward()
        stepper.step()
        stepper.zero_grad()
        if explicit:
            monitor.step(**numbers)
    assert monitor.flush(20)
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0 and status["live"], status["last_error"]
    recorded = Recording(path, ended=True)
    assert [frame.step for frame in recorded.frames] == list(range(STEPS))
    assert all("rows" in recorded.steps()[step] for step in range(0, STEPS, 2))
    return recorded.steps(), status


@pytest.mark.parametrize(
    "groups",
    [dict(lr=None), {}, dict(lr=0.5, weight_decay=None), dict(lr=None, weight_decay="none")],
    ids=str,
)
@pytest.mark.parametrize("explicit", [False, True])
def test_an_optimizer_without_a_rate(
    groups: dict[str, Any], explicit: bool, tmp_path: Path
) -> None:
    steps, _ = told(
        tmp_path / "a.bwrun", lambda parameters: OwnRate(parameters, **groups), {}, explicit
    )
    assert all(("learning_rate" in s) == (groups.get("lr") is not None) for s in steps.values())


def test_an_unreadable_number_costs_that_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = {"loss": torch.ones(3), "grad_norm": 2.0, "lr": "warm", "tokens": math.nan}
    steps, status = told(tmp_path / "a.bwrun", lambda p: torch.optim.SGD(p, lr=0.1), numbers, True)
    for signals in steps.values():
        assert "loss" not in signals and "learning_rate" not in signals
        assert signals["grad_norm"][0, 0] == 2 and math.isnan(signals["tokens"][0, 0])
    assert sorted(status["numbers_left_out"].values()) == [STEPS, STEPS]
    said = caplog.text
    assert said.count("left out: loss: ") == 1 and said.count("left out: learning_rate: ") == 1


class Odd:
    """A trainer's own object, that raises whatever is asked of it."""

    def __index__(self) -> int:
        raise RuntimeError("no")

    __float__ = __repr__ = __eq__ = __index__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


NO_STEPS = (10**30, 10**5000, -1, STEP_MAX + 1, 2.5, math.nan, math.inf, True, "7", "\u00b2", b"7",
            [1], Odd(), np.float64("nan"), torch.ones(2))  # fmt: skip


def watched(path: Path) -> tuple[Any, Any]:
    """(a step of training, its monitor)."""
    model = Model(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = bellwether.attach(model, record=str(path), run="steps", every=2, overhead_budget=1e9)

    def train() -> None:
        model(batch(SHAPE, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train, monitor


def test_invalid_steps_are_left_out_and_counting_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.bwrun"
    train, monitor = watched(path)
    told = [np.int64(4), 9.0, np.uint8(17), torch.tensor(30), *NO_STEPS, STEP_MAX - 1, STEP_MAX]
    for step in told:
        train()
        monitor.step(step)
    assert monitor.flush(20)
    status = monitor.status()
    assert status["live"] and status["errors"] == 0, status["last_error"]
    assert sum(status["numbers_left_out"].values()) == len(NO_STEPS)
    assert "step: ValueError: step is an integer of 100 bits, must be" in caplog.text
    monitor.detach()
    recorded = [frame.step for frame in Recording(path, ended=True).frames]
    on = range(31, 31 + len(NO_STEPS))
    assert recorded == [4, 9, 17, 30, *on, STEP_MAX - 1, STEP_MAX]
    replayed_alerts(path)  # A replay takes the largest step, too.


def test_invalid_steps_alone_count_from_attaching(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    train, monitor = watched(path)
    monitor.count_from(10**30)
    for _ in range(3):
        train()
        monitor.step(10**30)
    monitor.detach()
    recorded = Recording(path, ended=True)
    assert [frame.step for frame in recorded.frames] == [0, 1, 2]
    assert recorded.hello.run.step_origin == 2  # STEP_ORIGIN_ATTACH


@pytest.mark.parametrize("step", [math.inf, math.nan, -1, torch.tensor(math.inf), 10**30, "x"])
def test_invalid_optimizer_step_counts_are_ignored(step: Any) -> None:
    model = Model(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[next(model.parameters())] = {"step": step}
    assert inside._steps_done(optimizer) is None
    optimizer.state[next(model.parameters())] = {"step": torch.tensor(7.0)}
    assert inside._steps_done(optimizer) == 7


def test_reported_values_never_raise_into_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    train, monitor = watched(path)
    for value in (10**400, None, Odd(), "much", math.nan):
        monitor.event("data", "said", value)
    for text in (5, "\ud800 \0", "x" * 10_000):
        monitor.event("data", text, 1)
    for number in (10**400, -(10**400), Odd(), math.inf):
        train()
        monitor.step(loss=number, grad_norm=number, lr=number, tokens=number)
    for timeout in (0.0, -1, math.nan, 10**400, "long"):
        monitor.flush(timeout)
    assert monitor.flush(math.inf)
    status = monitor.status()
    assert status["live"] and status["errors"] == 0, status["last_error"]
    assert sum("timeout: " in reason for reason in status["numbers_left_out"]) == 2
    monitor.detach()
    recorded = Recording(path, ended=True)
    texts = [event.text for event in recorded.events if event.kind == 10]
    assert texts == ["said", "5", "   ", "x" * 256]
    assert [frame.step for frame in recorded.frames] == [0, 1, 2, 3]


INTEGERS = {ctypes.c_uint8: (0, 2**8 - 1), ctypes.c_int32: (-(2**31), 2**31 - 1),
            ctypes.c_uint32: (0, 2**32 - 1), ctypes.c_int64: (-(2**63), 2**63 - 1),
            ctypes.c_uint64: (0, 2**64 - 1)}  # fmt: skip
STRUCTS = [
    struct
    for module in (c_api, attention_c_api)
    for struct in vars(module).values()
    if isinstance(struct, type) and issubclass(struct, ctypes.Structure)
    and hasattr(struct, "_fields_")
]  # fmt: skip


def test_no_integer_loses_bits_in_any_field_of_any_struct() -> None:
    assert len(STRUCTS) >= 13
    checked = 0
    for kind in STRUCTS:
        narrower = getattr(kind, "NARROWER", {})
        for name, type_ in kind._fields_:
            if type_ not in INTEGERS:
                continue
            low, high = narrower.get(name, INTEGERS[type_])
            value = kind()
            for legal in (low, high, np.int64(1), True):
                setattr(value, name, legal)
                assert getattr(value, name) == int(legal)
            before = getattr(value, name)
            for wrong in (low - 1, high + 1, 10**30, 0.5, math.nan, math.inf, "1", None, Odd()):
                with pytest.raises(
                    ValueError, match=f"^{name} is .*, must be an integer of {low} "
                ):
                    setattr(value, name, wrong)
            assert getattr(value, name) == before
            checked += 1
    assert checked > 80
    with pytest.raises(ValueError, match="head_stride is -9223372036854775809, must be"):
        c_api.Tensor4(0, 0, -(2**63) - 1, 0)


OPTIONS = RunOptions(run="numbers", layers=1, heads=2, server="127.0.0.1:1", log_path=os.devnull)


@pytest.mark.parametrize(
    "name",
    [field.name for field in dataclasses.fields(RunOptions) if field.type in ("int", "float")],
)
def test_options_out_of_range_are_refused_by_name(name: str) -> None:
    for wrong in (10**400, math.nan, math.inf, "many", None):
        with pytest.raises(ClientError):
            RunClient(dataclasses.replace(OPTIONS, **{name: wrong}))
    if name not in ("weight_decay", "softcap"):
        for whole, told in (
            (-1, "-1"),
            (2**64 + 1, "18446744073709551617"),
            (10**30, "an integer of 100 bits"),
        ):
            with pytest.raises(ClientError, match=f"{name} is {told}, must be"):
                RunClient(dataclasses.replace(OPTIONS, **{name: whole}))


def test_a_text_that_c_would_cut_is_refused() -> None:
    for name in ("run", "server", "record_path", "token_file", "model"):
        with pytest.raises(ClientError, match=f"{name} is .*, must have no zero byte"):
            RunClient(dataclasses.replace(OPTIONS, **{name: "a:1\0b"}))


def test_call_arguments_out_of_range_are_refused_by_name(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.bwrun")  # Which need not be UTF-8.
    with RunClient(dataclasses.replace(OPTIONS, server=None, record_path=path)) as client:
        loss = [Block("loss", [1.0])]
        for step in NO_STEPS:
            for call in (lambda s: client.push(s, loss), lambda s: client.push_event(s, "data"),
                         lambda s: client.push_spectrum(s, 0, 0, 1, 1, 1.0, 0),
                         lambda s: client.push_action_result("a", s, True, "")):  # fmt: skip
                with pytest.raises(ClientError, match=r"step is .*, must be an integer of 0 to"):
                    call(step)
        for wrong in (-1, 2**32, 2**32 + 1, 10**30):  # 2^32 + 1 was head 1 once.
            for field in range(4):
                place = [0, 0, 1, 1]
                place[field] = wrong
                with pytest.raises(ClientError, match=r"is .*, must be"):
                    client.push_spectrum(0, *place, 1.0, 0)
            with pytest.raises(ClientError, match="layer_begin is"):
                client.push(0, [Block("rows", [1.0, 1.0], wrong, 1, 0, 2)])
        assert client.queued_bytes == 0
        assert client.push(STEP_MAX, loss) and client.flush(20)
        assert client.queued_bytes == 28  # Four of the value, and what says its place.
    assert [frame.step for frame in Recording(Path(path), ended=True).frames] == [STEP_MAX]


@pytest.mark.parametrize(
    "name", ["every", "rows", "sequences", "gram_bytes", "byte_budget", "spool_bytes"]
)
def test_settings_out_of_range_are_refused_by_name(name: str) -> None:
    for wrong in (10**30, math.inf, math.nan, -1, "\u00b2", "9" * 5000):
        with pytest.raises(ValueError, match=f"^{name}: "):
            settings.resolve({name: wrong}, environment={})
    said: list[str] = []
    odd = {f"BELLWETHER_{name.upper()}": "1" + "0" * 30, "SLURM_RESTART_COUNT": "\u00b2",
           "TORCHELASTIC_RESTART_COUNT": "9" * 30}  # fmt: skip
    assert settings.resolve({}, environment=odd, complain=said.append).attempt == 0
    assert len(said) == 1 and name.upper() in said[0]


def no_files(folder: Path) -> dict[str, str]:
    """What may lie where a file should, and what is said of it."""
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    return {
        str(folder / "fifo"): "it is a FIFO, must be a regular file",
        str(folder / "folder"): "it is a folder, must be a regular file",
        str(folder / "loop"): "Too many levels of symbolic links",
        str(folder / "socket"): "it is a socket, must be a regular file",
        "/dev/full": "it is a device, must be a regular file",
        str(folder / "\0"): "embedded null byte",
    }


@pytest.mark.parametrize("server", [None, "127.0.0.1:1"])
def test_a_recording_that_would_block_is_refused_when_attaching(
    server: Optional[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path, why in no_files(tmp_path).items():
        caplog.clear()
        model = Model(SHAPE)
        monitor = bellwether.attach(model, record=path, server=server, run="none")
        assert monitor.live() == (server is not None)
        assert caplog.text.count(why) == 1, caplog.text
        assert (why in monitor.why_off) == (server is None)
        assert server is None or monitor.record_path is None
        monitor.detach()
