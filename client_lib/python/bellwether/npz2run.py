"""python -m bellwether.npz2run IN.npz OUT.bwrun: a recorded trace as a recorded run.

A trace (fields steps, loss, gn, cm, sd, rep16, ...; cfg as JSON) becomes what a live job would
have sent: a Hello from the configuration, one frame a step with the loss and the gradient norm,
the heads' sums on the sampled steps, and an Event where something was done to the run.  Fields
may be missing.  The same input gives the same frames: times count from the step, not the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from .client import Block, ClientError, RunOptions, recording

Array = npt.NDArray[np.float32]

ROWS = 2048  # Query rows that one sample of a trace stands for.
SEQUENCES = 2  # Sequences of which they were taken.
RING_FRAMES = 1024
FLUSH_EVERY = 512  # Less than the ring, so that it never overflows.

# How a mode of a trace is called in Hello; other names pass through.
KERNELS = {"flash": "flash", "cudnn": "cudnn", "fa": "emulated-fa", "fahp": "emulated-fa-hp",
           "lp": "emulated-lp", "fa32": "emulated-fp32", "fp32": "math"}  # fmt: skip


class TraceError(ValueError):
    """The file is no trace; the text says why."""


def load(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """(configuration, fields) of a trace.  Raises TraceError."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            fields = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as e:
        raise TraceError(f"{path}: not an .npz archive: {e}") from e
    if "steps" not in fields:
        raise TraceError(f"{path}: field 'steps' is missing; it holds {sorted(fields)}")
    cfg: dict[str, Any] = {}
    if "cfg" in fields:
        try:
            cfg = json.loads(str(fields.pop("cfg")))
        except json.JSONDecodeError as e:
            raise TraceError(f"{path}: cfg is not JSON: {e}") from e
    return cfg, fields


def mode_parts(mode: str) -> tuple[str, bool]:
    """("flash", centred) of a mode such as "flash+ck"."""
    base, *extras = mode.split("+")
    return KERNELS.get(base, base), any(extra.startswith("ck") for extra in extras)


def layout(cfg: dict[str, Any], fields: dict[str, Array]) -> tuple[int, int, int]:
    """(layers, heads, kv_heads) from the shapes, else from the configuration."""
    shape: Optional[tuple[int, ...]] = None
    for name in ("cm", "sd", "rep16", "maxlogit", "entropy", "sink", "dbias", "wq"):
        if name in fields and fields[name].ndim == 3:
            shape = fields[name].shape[1:]
            break
    if shape is None:
        layers = int(cfg.get("L", 1))
        heads = max(1, int(cfg.get("C", 64)) // int(cfg.get("hd", 64)))
        return layers, heads, heads
    layers, heads = shape
    kv_heads = heads
    for name in ("wk", "kbar"):
        if name in fields and fields[name].ndim == 3:
            kv_heads = min(kv_heads, int(fields[name].shape[2]))
    return layers, heads, kv_heads


def options(name: str, cfg: dict[str, Any], fields: dict[str, Array]) -> RunOptions:
    """What the job would have said in its Hello; nothing else of cfg is told."""
    layers, heads, kv_heads = layout(cfg, fields)
    kernel, centred = mode_parts(str(cfg.get("mode", "")).split(">")[0])
    width = int(cfg.get("C", 0))
    head_dim = int(cfg.get("hd", 0)) or (width // heads if width % heads == 0 else 0)
    return RunOptions(
        run=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seq_len=int(cfg.get("T", 0)),
        ring_frames=RING_FRAMES,
        framework="recorded",
        model=str(cfg.get("arch", "gpt")),
        attention_kernel=kernel,
        score_dtype="fp32" if kernel in ("math", "emulated-fp32") else "bf16",
        weight_decay=float(cfg.get("wd", 0.0)),
        causal=True,
        centred=centred,
        qk_norm=bool(cfg.get("qknorm", 0)),
    )


def events(cfg: dict[str, Any]) -> list[tuple[int, str, str, float]]:
    """(step, kind, text, value) of what was done to the run, by rising step."""
    found: list[tuple[int, str, str, float]] = []
    modes = str(cfg.get("mode", "")).split(">")
    switch = int(cfg.get("swat", -1))
    if len(modes) == 2 and switch >= 0:
        (before, centred_before), (after, centred_after) = map(mode_parts, modes)
        if after != before:
            found.append((switch, "attention_mode", after, 0.0))
        if centred_after != centred_before:
            kind = "centring_on" if centred_after else "centring_off"
            found.append((switch, kind, "", 0.0))
    glitch = int(cfg.get("glitch", -1))
    if glitch >= 0:
        found.append((glitch, "data", "random tokens for 3 steps", 3.0))
    spike = int(cfg.get("lrspike", -1))
    if spike >= 0:
        rate = float(cfg.get("lr", math.nan))
        found.append((spike, "learning_rate", "learning rate x5", 5 * rate))
        found.append((spike + 50, "learning_rate", "learning rate back to x1", rate))
    return sorted(found, key=lambda event: event[0])


def head_sums(cfg: dict[str, Any], fields: dict[str, Array]) -> dict[str, Array]:
    """Signal name -> [samples, layers, heads] float32, in the units of the catalogue."""
    length = int(cfg.get("T", 1024))
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


def frames(
    cfg: dict[str, Any], fields: dict[str, Array], mantissa_bits: int = 23
) -> Iterator[tuple[int, list[Block]]]:
    """(step, blocks) of every step, in order; steps of which nothing is known are left out."""
    layers, heads, kv_heads = layout(cfg, fields)
    sums = {n: rounded(v, mantissa_bits) for n, v in head_sums(cfg, fields).items()}
    sample_of = {int(step): i for i, step in enumerate(fields["steps"])}
    rows = np.full((layers, heads), ROWS, np.float32)
    sequences = np.full((layers, kv_heads), SEQUENCES, np.float32)
    scalars = [(s, fields[f]) for s, f in (("loss", "loss"), ("grad_norm", "gn")) if f in fields]
    last = max([int(fields["steps"].max(initial=-1))] + [len(v) - 1 for _, v in scalars])
    per_row = set(sums) & {"common_mode_sum", "spread_sum", "tied_rows_bf16", "entropy_sum",
                           "sink_sum", "logit_max", "delta_bias_sum"}  # fmt: skip
    for step in range(last + 1):
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
    cfg, fields = load(source)
    waiting = events(cfg)
    written = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    total = max(len(fields.get("loss", ())), int(fields["steps"].max(initial=0)) + 1)
    with recording(target, options(name or source.stem, cfg, fields)) as client:
        for step, blocks in frames(cfg, fields, mantissa_bits):
            while waiting and waiting[0][0] <= step:
                at, kind, text, value = waiting.pop(0)
                client.push_event(at, kind, text, value)
            client.push(step, blocks, time_unix_ns=(step + 1) * 1_000_000_000)
            written += 1
            if written % FLUSH_EVERY == 0:
                _drain(client.flush(60.0), target)
                if progress:
                    print(f"\r{target.name} {100 * written // total:3d} %", end="", file=sys.stderr)
        _drain(client.flush(60.0), target)
        counters = client.counters()
        dropped = counters.frames_dropped_ring + counters.frames_dropped_window
        if dropped or counters.frames_stripped:
            raise ClientError(f"{target}: frames were dropped or stripped: {counters}")
    _wait_for(counters.sender_pid)
    if progress:
        print(f"\r{target.name} 100 %", file=sys.stderr)
    return written


def _wait_for(pid: int) -> None:
    """The sender writes the end of the file, its checksum, after the client let go."""
    deadline = time.monotonic() + 10.0
    while pid and time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except OSError:
            return
        time.sleep(0.005)


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
    except (TraceError, ClientError, RuntimeError, OSError) as e:
        print(f"npz2run: {e}", file=sys.stderr)
        return 1
    size = options_given.target.stat().st_size
    print(f"{options_given.target}: {count} frames, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
