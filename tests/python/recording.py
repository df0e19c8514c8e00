"""Reads a .bwrun file with nothing but protobuf and zstandard, by recording.proto."""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from google.protobuf.internal.decoder import _DecodeVarint32

MAGIC = b"BWRUN\0\0\1"


class Recording:
    def __init__(self, path: Path, ended: bool = False) -> None:
        """Reads what is there; with `ended` waits for the sender to write the file's end."""
        from bellwether.v1 import recording_pb2, runs_pb2, signals_pb2

        deadline = time.monotonic() + 60
        while True:
            # The sender, a process of its own, may not have begun yet.
            raw = path.read_bytes() if path.exists() or not ended else b""
            if len(raw) > len(MAGIC) or not ended:
                assert raw[:8] == MAGIC, raw[:8]
                stream = zstandard.ZstdDecompressor().decompressobj()
                data = stream.decompress(raw[8:])
                if stream.eof or not ended:
                    break
            assert time.monotonic() < deadline, f"{path} was not ended"
            time.sleep(0.01)
        self.names = {}
        for value in signals_pb2.Signal.DESCRIPTOR.values:
            if value.number:
                name = value.GetOptions().Extensions[signals_pb2.signal].name
                self.names[value.number] = name
        self.event_names = dict(runs_pb2.EventKind.items())
        self.messages: list[Any] = []
        at = 0
        while at < len(data):
            try:
                size, at = _DecodeVarint32(data, at)
            except IndexError:
                break
            if at + size > len(data):
                break  # The sender is in the middle of it.
            message = recording_pb2.RecordedMessage()
            message.ParseFromString(data[at : at + size])
            at += size
            self.messages.append(message.message)

    @property
    def hello(self) -> Any:
        return next(m.hello for m in self.messages if m.WhichOneof("body") == "hello")

    @property
    def frames(self) -> list[Any]:
        return [m.frame for m in self.messages if m.WhichOneof("body") == "frame"]

    @property
    def events(self) -> list[Any]:
        return [m.event for m in self.messages if m.WhichOneof("body") == "event"]

    @property
    def seqs(self) -> list[int]:
        return [m.seq for m in self.messages if m.seq]

    def steps(self) -> dict[int, dict[str, np.ndarray]]:
        """step -> signal -> [layers, heads] float32; parts of one step are put together."""
        found: dict[int, dict[str, np.ndarray]] = {}
        layout = self.hello.run.layout
        for frame in self.frames:
            step = found.setdefault(frame.step, {})
            for block in frame.blocks:
                name = self.names[block.signal]
                width = max(block.head_begin + block.head_count, 1)
                height = max(block.layer_begin + block.layer_count, 1)
                if name not in step or step[name].shape[0] < height:
                    full = np.full((max(height, layout.layers), width), math.nan, np.float32)
                    old = step.get(name)
                    if old is not None:
                        full[: old.shape[0], : old.shape[1]] = old
                    step[name] = full if block.layer_count < layout.layers else full[:height]
                values = np.array(block.values, np.float32).reshape(block.layer_count, -1)
                step[name][block.layer_begin : block.layer_begin + block.layer_count] = values
        return found


def replayed_alerts(path: Path, *how: str) -> list[Any]:
    """What `bellwether replay` says of a recording once its sender has ended it."""
    from bellwether._native import c_api

    Recording(path, ended=True)
    tool = c_api.find("bellwether")
    assert tool is not None
    said = subprocess.run(
        [str(tool), "replay", str(path), "--json", *how],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines() if "rule" in line]
