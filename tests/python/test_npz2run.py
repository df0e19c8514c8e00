"""Goal: any trace becomes the frames and events of a live job: nothing invented, nothing of the
configuration told that a job would not tell, the same bytes every time.  Whatever is wrong with a
trace is one sentence, and what lay where the recording should go stays.
Method: synthetic traces with missing fields, NaN, key heads and every kind of switch; and each
field wrong in each way.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bellwether.tools import npz2run

from conftest import ROOT
from recording import Recording, replayed_alerts

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


HEADS_3D = (SAMPLES, LAYERS, HEADS)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "steps-far": ({"steps": np.array([0, 2**62])}, "steps[1] is 4611686018427387904, must be an"),
    "steps-nan": ({"steps": np.array([0.0, math.nan])}, "steps[1] is nan, must be"),
    "steps-inf": ({"steps": np.array([math.inf])}, "steps[0] is inf, must be"),
    "steps-part": ({"steps": np.array([0.5])}, "steps[0] is 0.5, must be"),
    "steps-below": ({"steps": np.array([-1])}, "steps[0] is -1, must be"),
    "steps-twice": ({"steps": np.array([1, 3, 3])}, "steps[2] is 3 behind 3, must be increasing"),
    "steps-back": ({"steps": np.array([3, 1, 5])}, "steps[1] is 1 behind 3, must be increasing"),
    "steps-text": ({"steps": np.array(["a"])}, "steps holds <U1, no numbers"),
    "steps-square": ({"steps": np.zeros((2, 2))}, "steps has the shape [2, 2], must have 1 dim"),
    "steps-one": ({"steps": np.array(3)}, "steps has the shape [], must have 1 dimensions"),
    "steps-bool": ({"steps": np.array(["2020"], "M8[Y]")}, "steps holds datetime64[Y], no"),
    "steps-objects": ({"steps": np.array([None, {}])}, "not an .npz archive: Object arrays"),
    "nothing": ({"steps": np.array([], np.int64)}, "the trace holds no step"),
    "loss-square": ({"loss": np.ones((2, 2))}, "loss has the shape [2, 2], must have 1"),
    "loss-complex": ({"loss": np.ones(3, complex)}, "loss holds complex128, no numbers"),
    "gn-text": ({"gn": np.array(["x"])}, "gn holds <U1, no numbers"),
    "cm-flat": ({"cm": np.ones(3)}, "cm has the shape [3], must have 3 dimensions"),
    "cm-short": ({"cm": np.ones((1, LAYERS, HEADS))}, "cm has the shape [1, 2, 3], must have ["),
    "wk-many": ({"wk": np.ones((SAMPLES, LAYERS, 7))}, "key heads are [7], must be a divisor of"),
    "wk-two": ({"wk": np.ones((SAMPLES, LAYERS, 2))}, "key heads are [2], must be a divisor of 3"),
    "wk-none": ({"wk": np.ones((SAMPLES, LAYERS, 0))}, "key heads are [0], must be"),
    "sd-layers": ({"sd": np.ones((SAMPLES, 5, HEADS))}, "sd has the shape [6, 5, 3], must have"),
    "cm-wide": ({"cm": np.ones((SAMPLES, LAYERS, 2000))}, "it has 2000 heads, must have 1 to 1024"),
    "cfg-list": ({"cfg": "[]"}, "cfg is not JSON of an object: it holds a list, no object"),
    "cfg-cut": ({"cfg": "{"}, "cfg is not JSON of an object"),
    "cfg-deep": ({"cfg": '{"a":' * 100_000}, "cfg is not JSON of an object: it is nested too"),
    "cfg-number": ({"cfg": np.array(5.0)}, "cfg is not JSON of an object"),
    "cfg-long": ({"cfg": '"' + "a" * (1 << 20) + '"'}, "it has more than 1048576 characters"),
    **{
        f"cfg-{name}-{value}": ({"cfg": json.dumps({name: value})}, f"cfg.{name} is ")
        for name, value in (
            ("L", 0), ("L", 10**30), ("L", "2"), ("C", -1), ("hd", 1e999), ("T", None),
            ("T", 2**31),
            ("swat", [1]), ("glitch", math.nan), ("lrspike", 2**53), ("qknorm", 2), ("lr", "fast"),
            ("wd", {}), ("mode", 5), ("arch", None),
        )
    },
    "cfg-wd-huge": ({"cfg": '{"wd": 1' + "0" * 400 + "}"}, "int too large"),
    "cfg-arch-esc": ({"cfg": '{"arch": "a\\u001b[31m"}'}, "model has byte 0x1b at 1"),
}  # fmt: skip


def failed(source: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence that a conversion fails with."""
    assert npz2run.main([str(source), str(target)]) == 1
    out, said = capsys.readouterr()
    assert out == "" and said.count("\n") == 1 and said.startswith("npz2run: "), said
    assert "\x1b" not in said
    return said


@pytest.mark.parametrize("name", BAD)
def test_errors_are_sentences_and_keep_the_earlier_recording(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, why = BAD[name]
    changes = {key: value for key, value in fields.items() if key != "cfg"}
    whole: dict[str, Any] = {"steps": np.arange(SAMPLES), "cm": np.ones(HEADS_3D), "cfg": "{}"}
    if "steps" in changes:
        del whole["cm"]
    np.savez(tmp_path / "a.npz", **{**whole, **changes, **fields})
    (tmp_path / "a.bwrun").write_text("earlier")
    assert why in failed(tmp_path / "a.npz", tmp_path / "a.bwrun", capsys)
    assert (tmp_path / "a.bwrun").read_text() == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bwrun", "a.npz"]


def bomb(path: Path) -> None:
    """Says of a field that it unpacks to more than there is."""
    np.savez_compressed(path, steps=np.zeros(1000))
    raw = path.read_bytes()
    at = raw.rindex(b"PK\x01\x02") + 24  # The directory's size of the unpacked file.
    path.write_bytes(raw[:at] + (0xFFFFFFF0).to_bytes(4, "little") + raw[at + 4 :])


def claims(path: Path) -> None:
    """A field whose head says that it is of 2^45 numbers."""
    np.save(path.with_suffix(".npy"), np.zeros(3))
    raw = path.with_suffix(".npy").read_bytes().replace(b"(3,), }          ", b"(1<<45,), }     ")
    path.with_suffix(".npy").unlink()
    raw = raw.replace(b"1<<45,", b"35184372088832,")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("steps.npy", raw)


def cut(path: Path) -> None:
    np.savez(path, steps=np.arange(1000))
    path.write_bytes(path.read_bytes()[:-300])


NO_TRACES: dict[str, Any] = {
    "other": lambda p: np.savez(p, loss=np.zeros(3)),
    "fifo": os.mkfifo, "folder": Path.mkdir, "loop": lambda p: p.symlink_to(p.name),
    "zeros": lambda p: p.symlink_to("/dev/zero"), "empty": Path.touch, "absent": lambda p: None,
    "text": lambda p: p.write_text("words"), "cut": cut, "bomb": bomb, "claims": claims,
    "array": lambda p: np.save(p, np.zeros(3)) or Path(f"{p}.npy").rename(p),
    "pickle": lambda p: p.write_bytes(b"\x80\x04N."),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TRACES)
def test_a_file_that_is_no_trace_is_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    NO_TRACES[name](tmp_path / "a.npz")
    said = failed(tmp_path / "a.npz", tmp_path / "a.bwrun", capsys)
    assert f"npz2run: {tmp_path / 'a.npz'}: " in said
    assert not (tmp_path / "a.bwrun").exists()


def test_steps_that_lie_far_apart_are_no_loop(tmp_path: Path) -> None:
    steps = np.array([7, 2**40, 2**53], np.uint64)
    np.savez(tmp_path / "a.npz", steps=steps, loss=np.ones(3), cm=np.ones((3, LAYERS, HEADS)))
    assert npz2run.convert(tmp_path / "a.npz", tmp_path / "a.bwrun") == 6
    recorded = Recording(tmp_path / "a.bwrun", ended=True)
    assert [frame.step for frame in recorded.frames] == [0, 1, 2, 7, 2**40, 2**53]
    assert replayed_alerts(tmp_path / "a.bwrun") == []


def test_complete_recording_replaces_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "a.npz", tmp_path / "a.bwrun"
    trace(source, BASE)
    target.write_text("earlier")
    (tmp_path / "link.bwrun").symlink_to("a.bwrun")
    assert npz2run.convert(source, tmp_path / "link.bwrun") == 54
    assert (tmp_path / "link.bwrun").is_symlink() and len(Recording(target, True).frames) == 54
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.bwrun", "a.npz", "link.bwrun"]
    whole = source.read_bytes()
    (tmp_path / "same").hardlink_to(source)
    for same in (source, tmp_path / "same", tmp_path / "x" / ".." / "a.npz"):
        assert "it is the trace itself" in failed(source, same, capsys)
    assert source.read_bytes() == whole
    os.mkfifo(tmp_path / "fifo")
    for path, why in ((tmp_path / "fifo", "it is a FIFO, must be a regular file"),
                      (tmp_path, "it is a folder, must be"), (Path("/dev/full"), "it is a device"),
                      (tmp_path / "a.npz" / "b", "Not a directory")):  # fmt: skip
        assert why in failed(source, path, capsys)


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
    (tmp_path / "b.bwrun").write_text("earlier")
    wrong = command(tmp_path / "words.npz", tmp_path / "b.bwrun")
    assert wrong.returncode == 1 and "not an .npz" in wrong.stderr, wrong.stderr
    assert "Traceback" not in wrong.stderr and (tmp_path / "b.bwrun").read_text() == "earlier"
