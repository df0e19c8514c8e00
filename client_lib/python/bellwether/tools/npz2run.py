"""python -m bellwether.npz2run IN.npz OUT.bwrun: a recorded trace as a recorded run.

A trace (fields steps, loss, gn, cm, sd, rep16, ...; cfg as JSON) becomes what a live job would have
sent.  That is a Hello from the configuration, and one frame a step with the loss and the gradient
norm.  Sampled steps have the heads' sums, and an Event stands where something was done to the run.
Fields may be missing.  The same input gives the same frames: times count from the step, not the
clock.  OUT is written whole or not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from .._native import c_api
from .._native.run_client import Block, ClientError, RunOptions, recording
from .._util import files, integers
from .._util.counted import counted

Array = npt.NDArray[np.float32]

ROWS = 2048  # Query rows that one sample of a trace stands for.
SEQUENCES = 2  # Sequences of which they were taken.
RING_FRAMES = 1024
FLUSH_EVERY = 512  # Less than the ring, so that it never overflows.
BYTES_MAX = 4 << 30  # Of a trace's fields together, unpacked.
FIELDS_MAX = 1024
CFG_CHARACTERS_MAX = 1 << 20
END_SECONDS = 60.0  # For the sender to end the file.
FAILED, INTERRUPTED = 1, 130
_TIME_MAX = (1 << 63) - 1  # ns

# How a mode of a trace is called in Hello; other names pass through.
KERNELS = {"flash": "flash", "cudnn": "cudnn", "fa": "emulated-fa", "fahp": "emulated-fa-hp",
           "lp": "emulated-lp", "fa32": "emulated-fp32", "fp32": "math"}  # fmt: skip


class TraceError(ValueError):
    """The file is no trace; the text says why."""


# [samples][layers][heads] of a trace: signal -> (field, what its unit is multiplied by).
_HEADS = ("cm", "sd", "rep16", "maxlogit", "entropy", "sink", "dbias", "dabs", "wq")
_KEY_HEADS = ("kbar", "wk")  # Of key heads, or of all heads.
_SCALARS = {"loss": "loss", "gn": "grad_norm"}  # [steps], by field.
_FIELDS = frozenset({"cfg", "steps", *_SCALARS, *_HEADS, *_KEY_HEADS})


def _fields(path: Path) -> dict[str, Any]:
    """What an archive has of the fields that are known here.  Raises TraceError."""
    try:
        with files.open_regular(path) as opened, zipfile.ZipFile(opened) as archive:
            entries = archive.infolist()
            size = sum(e.file_size for e in entries if e.filename.removesuffix(".npy") in _FIELDS)
            if len(entries) > FIELDS_MAX or size > BYTES_MAX:
                raise TraceError(
                    f"{path}: it has {len(entries)} fields of {size} bytes, must have at most "
                    f"{FIELDS_MAX} of {BYTES_MAX}"
                )
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files if name in _FIELDS}
    except TraceError:
        raise
    except FileNotFoundError as e:
        raise TraceError(f"{path}: {e.strerror}") from e
    except Exception as e:  # The file decides what reading it raises.
        raise TraceError(f"{path}: not an .npz archive: {files.one_line(e)}") from e


def _numbers(path: Path, name: str, values: Any, dimensions: int) -> Array:
    """A field that is what it should be.  Raises TraceError."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise TraceError(f"{path}: {name} holds {getattr(values, 'dtype', 'objects')}, no numbers")
    if values.ndim != dimensions:
        raise TraceError(
            f"{path}: {name} has the shape {list(values.shape)}, must have {dimensions} dimensions"
        )
    return values


def _steps(path: Path, values: Any) -> npt.NDArray[np.int64]:
    """The steps of the samples.  Raises TraceError."""
    given = _numbers(path, "steps", values, 1)
    legal = (given >= 0) & (given <= integers.STEP_MAX) & (given == np.floor(given))
    if not legal.all():
        first = int(np.argmin(legal))
        raise TraceError(
            f"{path}: steps[{first}] is {given[first]}, must be an integer of "
            f"0 to {integers.STEP_MAX}"
        )
    steps = given.astype(np.int64)
    back = np.flatnonzero(np.diff(steps) <= 0)
    if len(back):
        at = int(back[0]) + 1
        raise TraceError(
            f"{path}: steps[{at}] is {steps[at]} behind {steps[at - 1]}, must be increasing"
        )
    return steps


def _check_shapes(path: Path, fields: dict[str, Any]) -> None:
    """Raises TraceError for fields that are not of one model and of these samples."""
    samples = len(fields["steps"])
    shapes = {n: fields[n].shape for n in (*_HEADS, *_KEY_HEADS) if n in fields}
    wide = next((shape for n, shape in shapes.items() if n in _HEADS), None)
    key_heads = {shape[2] for n, shape in shapes.items() if n in _KEY_HEADS}
    heads = wide[2] if wide is not None else max(key_heads, default=1)
    layers = next((shape[1] for shape in (wide, *shapes.values()) if shape is not None), 1)
    narrow = key_heads - {heads}
    legal = {"layers": (layers, c_api.LAYERS_MAX), "heads": (heads, c_api.HEADS_MAX)}
    for name, (count, most) in legal.items():
        if not 1 <= count <= most:
            raise TraceError(f"{path}: it has {count} {name}, must have 1 to {most}")
    if len(narrow) > 1 or any(not 1 <= n <= heads or heads % n for n in narrow):
        raise TraceError(f"{path}: key heads are {sorted(narrow)}, must be a divisor of {heads}")
    for name, shape in shapes.items():
        widths = {heads} | (narrow if name in _KEY_HEADS else set())
        if shape[:2] != (samples, layers) or shape[2] not in widths:
            raise TraceError(
                f"{path}: {name} has the shape {list(shape)}, must have "
                f"{[samples, layers, heads]} (samples, layers, heads)"
            )


# The fields of cfg that are used here: least, most, and what it is where it is not told.
_WHOLE = {
    "L": (1, c_api.LAYERS_MAX, 1), "C": (0, 1 << 20, 0), "hd": (0, 1024, 0), "T": (0, 1 << 30, 0),
    "swat": (-1, integers.STEP_MAX, -1), "glitch": (-1, integers.STEP_MAX, -1),
    "lrspike": (-1, integers.STEP_MAX - 50, -1), "qknorm": (0, 1, 0),
}  # fmt: skip
_REAL = {"lr": math.nan, "wd": 0.0}
_TEXT = {"mode": "", "arch": "gpt"}


def _configuration(path: Path, told: Any) -> dict[str, Any]:
    """The fields that are used here, each of its type.  Raises TraceError."""
    try:
        text = str(told)
        if len(text) > CFG_CHARACTERS_MAX:
            raise ValueError(f"it has more than {CFG_CHARACTERS_MAX} characters")
        given = files.json_object(text)
    except ValueError as e:
        raise TraceError(f"{path}: cfg is not JSON of an object: {e}") from e
    cfg: dict[str, Any] = {}
    try:
        for name, (low, high, _) in _WHOLE.items():
            if name in given:
                value = given[name]
                cfg[name] = integers.whole(
                    f"cfg.{name}", int(value) if isinstance(value, bool) else value, low, high
                )
        for name in _REAL:
            if name in given:
                value = given[name]
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise ValueError(f"cfg.{name} is {integers.shown(value)}, must be a number")
                cfg[name] = float(value)
        for name in _TEXT:
            if name in given:
                if not isinstance(given[name], str):
                    raise ValueError(f"cfg.{name} is {integers.shown(given[name])}, must be a text")
                cfg[name] = given[name]
    except (ValueError, OverflowError) as e:
        raise TraceError(f"{path}: {e}") from e
    return cfg


def load(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """(configuration, fields) of a trace.  Raises TraceError."""
    fields = _fields(path)
    if "steps" not in fields:
        raise TraceError(f"{path}: field 'steps' is missing; it holds {sorted(fields)}")
    cfg = _configuration(path, fields.pop("cfg")) if "cfg" in fields else {}
    fields["steps"] = _steps(path, fields["steps"])
    for name in fields.keys() & _SCALARS.keys():
        fields[name] = _numbers(path, name, fields[name], 1)
    for name in fields.keys() & {*_HEADS, *_KEY_HEADS}:
        fields[name] = _numbers(path, name, fields[name], 3)
    _check_shapes(path, fields)
    return cfg, fields


def mode_parts(mode: str) -> tuple[str, bool]:
    """("flash", centred) of a mode such as "flash+ck"."""
    base, *extras = mode.split("+")
    return KERNELS.get(base, base), any(extra.startswith("ck") for extra in extras)


def layout(cfg: dict[str, Any], fields: dict[str, Array]) -> tuple[int, int, int]:
    """(layers, heads, kv_heads) from the shapes, else from the configuration."""
    shapes = [fields[name].shape[1:] for name in (*_HEADS, *_KEY_HEADS) if name in fields]
    if not shapes:
        heads = cfg.get("C", 64) // (cfg.get("hd") or 64)
        heads = min(max(1, heads), c_api.HEADS_MAX)
        return cfg.get("L", 1), heads, heads
    return shapes[0][0], max(shape[1] for shape in shapes), min(shape[1] for shape in shapes)


def options(name: str, cfg: dict[str, Any], fields: dict[str, Array]) -> RunOptions:
    """What the job would have said in its Hello; nothing else of cfg is told."""
    layers, heads, kv_heads = layout(cfg, fields)
    kernel, centred = mode_parts(cfg.get("mode", "").split(">")[0])
    width = cfg.get("C", 0)
    head_dim = cfg.get("hd", 0) or (width // heads if width % heads == 0 else 0)
    return RunOptions(
        run=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seq_len=cfg.get("T", 0),
        ring_frames=RING_FRAMES,
        framework="recorded",
        model=cfg.get("arch", "gpt"),
        attention_kernel=kernel,
        score_dtype="fp32" if kernel in ("math", "emulated-fp32") else "bf16",
        weight_decay=cfg.get("wd", 0.0),
        causal=True,
        centred=centred,
        qk_norm=bool(cfg.get("qknorm", 0)),
    )


def events(cfg: dict[str, Any]) -> list[tuple[int, str, str, float]]:
    """(step, kind, text, value) of what was done to the run, by rising step."""
    found: list[tuple[int, str, str, float]] = []
    modes = cfg.get("mode", "").split(">")
    switch = cfg.get("swat", -1)
    if len(modes) == 2 and switch >= 0:
        (before, centred_before), (after, centred_after) = map(mode_parts, modes)
        if after != before:
            found.append((switch, "attention_mode", after, 0.0))
        if centred_after != centred_before:
            kind = "centring_on" if centred_after else "centring_off"
            found.append((switch, kind, "", 0.0))
    glitch = cfg.get("glitch", -1)
    if glitch >= 0:
        found.append((glitch, "data", "random tokens for 3 steps", 3.0))
    spike = cfg.get("lrspike", -1)
    if spike >= 0:
        rate = cfg.get("lr", math.nan)
        found.append((spike, "learning_rate", "learning rate x5", 5 * rate))
        found.append((spike + 50, "learning_rate", "learning rate back to x1", rate))
    return sorted(found, key=lambda event: event[0])


def head_sums(cfg: dict[str, Any], fields: dict[str, Array]) -> dict[str, Array]:
    """Signal name -> [samples, layers, heads] float32, in the units of the catalogue."""
    length = cfg.get("T", 1024)
    # A trace holds the mean entropy; the catalogue wants each row's share of its ln n.
    mean_log = float(np.log(np.arange(1, max(2, length) + 1)).mean())
    factors = {
        "common_mode_sum": ("cm", ROWS),
        "spread_sum": ("sd", ROWS),
        "tied_rows_bf16": ("rep16", ROWS),
        "logit_max": ("maxlogit", 1),
        "entropy_sum": ("entropy", ROWS / mean_log),
        "sink_sum": ("sink", ROWS),
        "delta_bias_sum": ("dbias", 1),
        "delta_error_abs_sum": ("dabs", 1),
        "key_coherence_sum": ("kbar", SEQUENCES),
        "wq_sigma": ("wq", 1),
        "wk_sigma": ("wk", 1),
    }
    sums: dict[str, Array] = {}
    for signal, (field, factor) in factors.items():
        if field in fields:
            with np.errstate(over="ignore", invalid="ignore"):
                values = fields[field].astype(np.float64) * factor
                if signal == "tied_rows_bf16":
                    values = np.round(values)
                sums[signal] = np.ascontiguousarray(values.astype(np.float32))
    _, heads, kv_heads = layout(cfg, fields)
    for name in ("key_coherence_sum",):
        if name in sums and sums[name].shape[2] == heads and kv_heads != heads:
            # Recorded per query head: the heads of one group share their keys.
            sums[name] = np.ascontiguousarray(sums[name][:, :, :: heads // kv_heads])
    return sums


def rounded(values: Array, bits: int) -> Array:
    """The values with so many bits of mantissa, to nearest; NaN and infinity stay."""
    if bits >= 23:
        return values
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    drop = np.uint32(23 - bits)
    kept = (raw + np.uint32(1 << int(drop - 1))) >> drop << drop
    finite = np.isfinite(values) & (np.abs(values) < 3e38)
    return np.where(finite, kept, raw).astype(np.uint32).view(np.float32)


def _steps_in_order(fields: dict[str, Array]) -> Iterable[int]:
    """Each that something is known of; samples may lie far apart, and behind all else."""
    told = max((len(fields[name]) for name in _SCALARS if name in fields), default=0)
    yield from range(told)
    yield from (int(step) for step in fields["steps"] if step >= told)


def frames(
    cfg: dict[str, Any], fields: dict[str, Array], mantissa_bits: int = 23
) -> Iterator[tuple[int, list[Block]]]:
    """(step, blocks) of every step, in order; steps of which nothing is known are left out."""
    layers, heads, kv_heads = layout(cfg, fields)
    sums = {n: rounded(v, mantissa_bits) for n, v in head_sums(cfg, fields).items()}
    sample_of = {int(step): i for i, step in enumerate(fields["steps"])}
    rows = np.full((layers, heads), ROWS, np.float32)
    sequences = np.full((layers, kv_heads), SEQUENCES, np.float32)
    scalars = [(signal, fields[f]) for f, signal in _SCALARS.items() if f in fields]
    per_row = set(sums) & {"common_mode_sum", "spread_sum", "tied_rows_bf16", "entropy_sum",
                           "sink_sum", "logit_max", "delta_bias_sum"}  # fmt: skip
    for step in _steps_in_order(fields):
        blocks = [Block(signal, [float(v[step])]) for signal, v in scalars if step < len(v)]
        sample = sample_of.get(step)
        if sample is not None:
            if per_row:
                blocks.append(Block("rows", rows, 0, layers, 0, heads))
            if "key_coherence_sum" in sums:
                blocks.append(Block("sequences", sequences, 0, layers, 0, kv_heads))
            for signal, values in sums.items():
                width = values.shape[2]
                blocks.append(Block(signal, values[sample], 0, layers, 0, width))
        if blocks:
            yield step, blocks


def convert(
    source: Path,
    target: Path,
    name: Optional[str] = None,
    *,
    progress: bool = False,
    mantissa_bits: int = 23,
) -> int:
    """Writes `target` and returns the number of frames.  Raises TraceError, ClientError."""
    why = files.why_no_file(target)
    if why is not None:
        raise TraceError(f"{target}: {why}")
    real = Path(os.path.realpath(target))  # Its folder may not be there yet.
    if real.exists() and source.exists() and real.samefile(source):
        raise TraceError(f"{target}: it is the trace itself, which would be replaced")
    cfg, fields = load(source)
    real.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(real) as part:
        return _write(cfg, fields, part, target, name or source.stem, progress, mantissa_bits)


def _write(
    cfg: dict[str, Any],
    fields: dict[str, Array],
    part: Path,
    target: Path,
    name: str,
    progress: bool,
    mantissa_bits: int,
) -> int:
    """Writes the recording to `part`, whole."""
    waiting = events(cfg)
    written = 0
    told = max((len(fields[n]) for n in _SCALARS if n in fields), default=0)
    total = told + int((fields["steps"] >= told).sum())
    with contextlib.closing(_Writing(part, target, options(name, cfg, fields))) as writing:
        client = writing.client
        for step, blocks in frames(cfg, fields, mantissa_bits):
            while waiting and waiting[0][0] <= step:
                at, kind, text, value = waiting.pop(0)
                client.push_event(at, kind, text, value)
            writing.begun = True
            client.push(step, blocks, time_unix_ns=min((step + 1) * 1_000_000_000, _TIME_MAX))
            written += 1
            if written % FLUSH_EVERY == 0:
                _drain(client.flush(60.0), target)
                if progress:
                    print(f"\r{target.name} {100 * written // total:3d} %", end="", file=sys.stderr)
        if not written:
            raise TraceError(f"{target}: the trace holds no step")
        _drain(client.flush(60.0), target)
        counters = client.counters()
        dropped = counters.frames_dropped_ring + counters.frames_dropped_window
        if dropped or counters.frames_stripped:
            raise ClientError(f"{target}: frames were dropped or stripped: {counters}")
    if progress:
        print(f"\r{target.name} 100 %", file=sys.stderr)
    return written


class _Writing:
    """A client and its sender, which is a process of its own: it makes the file when it comes to
    it, and writes the file's end, a checksum, after the client let go."""

    def __init__(self, part: Path, target: Path, of: RunOptions) -> None:
        self.client = recording(part, of)
        self._target = target
        self.begun = False  # Something was pushed, so that there is a sender.

    def close(self) -> None:
        """Waits for the sender's end.  Raises ClientError."""
        deadline = time.monotonic() + END_SECONDS
        pid = self.client.counters().sender_pid
        if self.begun and not pid:
            self.client.flush(END_SECONDS)  # After it the sender has a number, or failed for good.
            pid = self.client.counters().sender_pid
        self.client.close()
        while pid and _runs(pid):  # Not by a pidfd: kernels before Linux 5.3 have none.
            if time.monotonic() > deadline:
                raise ClientError(
                    f"{self._target}: the sender did not end the file in {END_SECONDS:g} s"
                )
            time.sleep(0.005)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _drain(done: bool, target: Path) -> None:
    if not done:
        raise ClientError(f"{target}: the sender did not write for 60 s")


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether.npz2run", description="Turns a recorded trace into a .bwrun."
    )
    parser.add_argument("source", type=Path, metavar="IN.npz")
    parser.add_argument("target", type=Path, metavar="OUT.bwrun")
    parser.add_argument("--name", help="the run's name (default: the file's)")
    parser.add_argument(
        "--mantissa-bits", type=int, default=23, choices=range(4, 24), metavar="4..23",
        help="round the heads' values to so many bits, for a smaller file",
    )  # fmt: skip
    options_given = parser.parse_args(arguments)
    try:
        count = convert(
            options_given.source,
            options_given.target,
            options_given.name,
            progress=sys.stderr.isatty(),
            mantissa_bits=options_given.mantissa_bits,
        )
    except KeyboardInterrupt:
        print("npz2run: ended; nothing was written", file=sys.stderr)
        return INTERRUPTED
    except (TraceError, ClientError, c_api.LibraryError, OSError) as e:
        print(f"npz2run: {files.one_line(e)}", file=sys.stderr)
        return FAILED
    except Exception as e:  # Of a trace that is wrong in a way that nobody thought of.
        why = f"{options_given.source}: {type(e).__name__}: {e}"
        print(f"npz2run: {files.one_line(why)}", file=sys.stderr)
        return FAILED
    size = options_given.target.stat().st_size
    print(f"{options_given.target}: {counted(count, 'frame')}, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
