#!/usr/bin/env python3
"""Makes a recording small enough to keep among tests/testdata/runs.

Values keep 10 bits of mantissa, as those of the recorded traces do; what a step and the hook took
is left out, times count from the step; zstd at its highest usual level.

    python3 tests/support/compact_recording.py exported.bwrun gpt-flash-live-s12.bwrun

It takes protoc and the Python packages protobuf, zstandard and numpy.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
import zstandard
from google.protobuf.internal.decoder import _DecodeVarint32
from google.protobuf.internal.encoder import _VarintBytes

ROOT = Path(__file__).resolve().parents[2]
MAGIC = b"BWRUN\0\0\1"
MANTISSA_BITS = 10
LEFT_OUT = ("step_seconds", "hook_seconds")
STEP_NS = 20_000_000


def protos() -> tuple[Any, Any]:
    """recording_pb2 and signals_pb2, made by protoc."""
    folder = Path(tempfile.mkdtemp())
    files = sorted((ROOT / "proto" / "bellwether" / "v1").glob("*.proto"))
    command = ["protoc", f"-I{ROOT / 'proto'}", f"--python_out={folder}", *map(str, files)]
    subprocess.run(command, check=True)
    sys.path.insert(0, str(folder))
    from bellwether.v1 import recording_pb2, signals_pb2

    shutil.rmtree(folder)
    return recording_pb2, signals_pb2


def rounded(values: np.ndarray) -> np.ndarray:
    """To the nearest with so many bits; NaN and infinity as they are."""
    bits = values.view(np.uint32)
    drop = 23 - MANTISSA_BITS
    near = ((bits + np.uint32(1 << (drop - 1))) >> np.uint32(drop)) << np.uint32(drop)
    return np.where(np.isfinite(values), near, bits).astype(np.uint32).view(np.float32)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args(argv)
    recording, signals = protos()
    left_out = {
        value.number
        for value in signals.Signal.DESCRIPTOR.values
        if value.number and value.GetOptions().Extensions[signals.signal].name in LEFT_OUT
    }
    assert len(left_out) == len(LEFT_OUT)
    raw = args.source.read_bytes()
    assert raw.startswith(MAGIC), f"{args.source} is no recording"
    data = zstandard.ZstdDecompressor().decompressobj().decompress(raw[len(MAGIC) :])
    out, at = bytearray(), 0
    while at < len(data):
        size, at = _DecodeVarint32(data, at)
        message = recording.RecordedMessage()
        message.ParseFromString(data[at : at + size])
        at += size
        body = message.message
        if body.WhichOneof("body") == "hello":
            name = args.target.name.removesuffix(".bwrun")
            body.hello.run.name = name
            body.hello.run.uuid = hashlib.md5(name.encode()).digest()
        if body.WhichOneof("body") == "frame":
            body.frame.time_unix_ns = (body.frame.step + 1) * STEP_NS
            kept = [block for block in body.frame.blocks if block.signal not in left_out]
            for block in kept:
                block.values[:] = rounded(np.array(block.values, np.float32))
            copies = [type(block).FromString(block.SerializeToString()) for block in kept]
            del body.frame.blocks[:]
            body.frame.blocks.extend(copies)
        packed = message.SerializeToString()
        out += _VarintBytes(len(packed)) + packed
    packer = zstandard.ZstdCompressor(level=19, write_checksum=True, write_content_size=False)
    args.target.write_bytes(MAGIC + packer.compress(bytes(out)))
    print(f"{args.target}: {args.target.stat().st_size} bytes, was {len(raw)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
