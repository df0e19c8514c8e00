"""Goal: any trace becomes the frames and events of a live job: nothing invented, nothing of the
configuration told that a job would not tell, the same bytes every time.
Method: synthetic traces with missing fields, NaN, key heads and every kind of switch.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bellwether import npz2run

from conftest import ROOT
from recording import Recording

LAYERS, HEADS, SAMPLES, EVERY = 2, 3, 6, 10
ROWS = 2048


def trace(path: Path, cfg: dict[str, Any], drop: tuple[str, ...] = (), **extra: Any) -> dict:
    rng = np.random.default_rng(5)
    last = (SAMPLES - 1) * EVERY + 3
    fields: dict[str, Any] = {
        "steps": np.arange(0, SAMPLES * EVERY, EVERY, dtype=np.int32),
        "loss": rng.random(last + 1, np.float32),
        "gn": rng.random(last + 1, np.float32),
    }
    for name in ("cm", "sd", "rep16", "maxlogit", "entropy", "sink", "dbias", "dabs", "dpos",
                 "obias", "kbar", "wq", "wk", "wv"):  # fmt: skip
        fields[name] = rng.random((SAMPLES, LAYERS, HEADS), np.float32)
    fields["rep16"] = rng.integers(0, ROWS, (SAMPLES, LAYERS, HEADS)).astype(np.float32) / ROWS
    fields.update(extra)
    for name in drop:
        del fields[name]
    np.savez_compressed(path, cfg=json.dumps(cfg), **fields)
    return fields


BASE = {"L": LAYERS, "C": 192, "mode": "flash", "lr": 0.002, "T": 1024, "wd": 0.1, "seed": 3}


def test_every_number_arrives(tmp_path: Path) -> None:
    fields = trace(tmp_path / "a.npz", BASE)
    frames = npz2run.convert(tmp_path / "a.npz", tmp_path / "a.bwrun", "some-run")
    recorded = Recording(tmp_path / "a.bwrun")
    assert frames == len(recorded.frames) == len(fields["loss"]) == 54
    assert [f.step for f in recorded.frames] == list(range(54))
    assert recorded.seqs == list(range(1, 55))
    run = recorded.hello.run
    assert run.name == "some-run" and run.weight_decay == 0.1
    assert (run.layout.layers, run.layout.heads, run.layout.seq_len) == (LAYERS, HEADS, 1024)
    assert run.layout.head_dim == 64
    attention = run.attention
    assert (attention.kernel, attention.score_dtype, attention.causal) == ("flash", "bf16", True)
    assert not attention.centred and not attention.qk_norm
    steps = recorded.steps()
    mean_log = np.log(np.arange(1, 1025)).mean()
    for sample, step in enumerate(fields["steps"]):
        got = steps[int(step)]
        for signal, field, factor in (
            ("common_mode_sum", "cm", ROWS), ("spread_sum", "sd", ROWS),
            ("tied_rows_bf16", "rep16", ROWS), ("logit_max", "maxlogit", 1),
            ("entropy_sum", "entropy", ROWS / mean_log), ("sink_sum", "sink", ROWS),
            ("delta_bias_sum", "dbias", 1), ("delta_error_abs_sum", "dabs", 1),
            ("key_coherence_sum", "kbar", 2), ("wq_sigma", "wq", 1), ("wk_sigma", "wk", 1),
        ):  # fmt: skip
            assert np.allclose(got[signal], fields[field][sample] * factor, rtol=1e-6), signal
        assert (got["rows"] == ROWS).all() and (got["sequences"] == 2).all()
    for step in range(54):
        assert steps[step]["loss"][0, 0] == fields["loss"][step]
        assert steps[step]["grad_norm"][0, 0] == fields["gn"][step]
        assert (set(steps[step]) == {"loss", "grad_norm"}) == (step % EVERY != 0)
    assert not recorded.events


def test_same_input_same_bytes(tmp_path: Path) -> None:
    trace(tmp_path / "a.npz", {**BASE, "glitch": 12})
    outputs = []
    for name in ("x.bwrun", "y.bwrun"):
        npz2run.convert(tmp_path / "a.npz", tmp_path / name, "same")
        recorded = Recording(tmp_path / name)
        assert [f.time_unix_ns for f in recorded.frames] == [(s + 1) * 10**9 for s in range(54)]
        for event in recorded.events:
            event.time_unix_ns = 0  # client.h has no time for an event.
        outputs.append([m.SerializeToString() for m in recorded.messages])
    assert outputs[0] == outputs[1]


def test_missing_fields_nan_and_key_heads(tmp_path: Path) -> None:
    broken = np.full((SAMPLES, LAYERS, HEADS), np.nan, np.float32)
    broken[0] = 3e38
    trace(
        tmp_path / "a.npz",
        BASE,
        drop=("cm", "sd", "sink", "dbias", "dabs", "dpos", "obias", "wv", "gn"),
        maxlogit=broken,
        wk=np.ones((SAMPLES, LAYERS, 1), np.float32),
        loss=np.array([1.0, math.nan, math.inf], np.float32),
    )
    npz2run.convert(tmp_path / "a.npz", tmp_path / "a.bwrun")
    recorded = Recording(tmp_path / "a.bwrun")
    assert recorded.hello.run.layout.kv_heads == 1 and recorded.hello.run.name == "a"
    steps = recorded.steps()
    assert "common_mode_sum" not in steps[0] and "grad_norm" not in steps[0]
    assert np.isnan(steps[10]["logit_max"]).all() and (steps[0]["logit_max"] > 1e38).all()
    assert steps[0]["wk_sigma"].shape == steps[0]["key_coherence_sum"].shape == (LAYERS, 1)
    assert math.isnan(steps[1]["loss"][0, 0]) and math.isinf(steps[2]["loss"][0, 0])
    assert 3 not in steps and 10 in steps


@pytest.mark.parametrize(
    ("cfg", "hello", "events"),
    [
        ({"mode": "flash+ck"}, ("flash", True, False), []),
        ({"mode": "flash", "qknorm": 1}, ("flash", False, True), []),
        ({"mode": "flash>flash+ck", "swat": 20}, ("flash", False, False),
         [(20, "EVENT_KIND_CENTRING_ON", 0.0)]),
        ({"mode": "flash>fahp", "swat": 21}, ("flash", False, False),
         [(21, "EVENT_KIND_ATTENTION_MODE", 0.0)]),
        ({"mode": "fa+ck>cudnn", "swat": 7}, ("emulated-fa", True, False),
         [(7, "EVENT_KIND_ATTENTION_MODE", 0.0), (7, "EVENT_KIND_CENTRING_OFF", 0.0)]),
        ({"mode": "flash>fahp", "swat": -1}, ("flash", False, False), []),
        ({"mode": "flash", "glitch": 30}, ("flash", False, False),
         [(30, "EVENT_KIND_DATA", 3.0)]),
        ({"mode": "cudnn", "lrspike": 2}, ("cudnn", False, False),
         [(2, "EVENT_KIND_LEARNING_RATE", 0.01), (52, "EVENT_KIND_LEARNING_RATE", 0.002)]),
    ],
)  # fmt: skip
def test_hello_and_events(
    cfg: dict[str, Any], hello: tuple[str, bool, bool], events: list, tmp_path: Path
) -> None:
    trace(tmp_path / "a.npz", {**BASE, **cfg})
    npz2run.convert(tmp_path / "a.npz", tmp_path / "a.bwrun")
    recorded = Recording(tmp_path / "a.bwrun")
    attention = recorded.hello.run.attention
    assert (attention.kernel, attention.centred, attention.qk_norm) == hello
    numbers = {number: name for name, number in recorded.event_names.items()}
    got = [(e.step, numbers[e.kind], round(e.value, 9)) for e in recorded.events]
    assert got == events
    # An event stands before the frame of its step.
    order = [(m.WhichOneof("body"), getattr(m, m.WhichOneof("body"))) for m in recorded.messages]
    for index, (kind, message) in enumerate(order):
        if kind == "event":
            assert all(m.step < message.step for k, m in order[:index] if k == "frame")


def test_the_seed_and_the_file_are_not_told(tmp_path: Path) -> None:
    trace(tmp_path / "a.npz", {**BASE, "seed": 123456, "note": "will-explode"})
    npz2run.convert(tmp_path / "a.npz", tmp_path / "a.bwrun", "n")
    raw = Recording(tmp_path / "a.bwrun").hello.SerializeToString()
    assert b"will-explode" not in raw and b"123456" not in raw


def command(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bellwether.npz2run", *map(str, arguments)],
        cwd=ROOT / "client_lib" / "python", capture_output=True, text=True,
    )  # fmt: skip


def test_command_line(tmp_path: Path) -> None:
    trace(tmp_path / "a.npz", BASE)
    done = command(tmp_path / "a.npz", tmp_path / "sub" / "a.bwrun")
    assert done.returncode == 0 and "54 frames" in done.stdout, done.stderr
    assert "%" not in done.stderr  # A bar is for terminals.
    (tmp_path / "words.npz").write_text("words")
    np.savez(tmp_path / "other.npz", loss=np.zeros(3))
    for name, words in (("words", "not an .npz"), ("other", "'steps' is missing"),
                        ("absent", "No such file")):  # fmt: skip
        failed = command(tmp_path / f"{name}.npz", tmp_path / "b.bwrun")
        assert failed.returncode == 1 and words in failed.stderr, failed.stderr
        assert "Traceback" not in failed.stderr
