"""A training of several ranks: processes of this machine that speak gloo, with one recording."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MAGIC = b"BWRUN\0\0\1"
END_SECONDS = 60.0  # For a sender to end its file.


def _rank(rank: int, world: int, folder: str, train: Callable[..., Any], arguments: Any) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )
    result = train(*arguments)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(world: int, train: Callable[..., Any], *arguments: Any) -> Any:
    """What `train(*arguments)` returns at rank 0.  Raises what a rank raises."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _rank, (world, folder, train, arguments), nprocs=world
        )
        return torch.load(f"{folder}/result", weights_only=False)


# ---- recordings ----
# Protocol buffers by hand: a file is a zstd stream of RecordedMessages (recording.proto), each with
# its length before it.  Of these only the step of a frame is read, to sort them by it.


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        else:
            size = {1: 8, 5: 4}.get(key & 7, 0)
            if key & 7 == 2:
                size, at = _varint(data, at)
            yield key >> 3, data[at : at + size]
            at += size


def _step_of(message: bytes, otherwise: int) -> int:
    """Of a RecordedMessage: message (2), frame (3) in it, its step (2)."""
    body = next((value for number, value in _fields(message) if number == 2), b"")
    frame = next((value for number, value in _fields(body) if number == 3), None)
    if frame is None:
        return otherwise
    return next((int(value) for number, value in _fields(frame) if number == 2), 0)


def _content(path: Path) -> bytes:
    """A rank's recording once its sender, a process of its own, has ended it."""
    import zstandard

    began = time.monotonic()
    while True:
        raw = path.read_bytes() if path.exists() else b""
        stream = zstandard.ZstdDecompressor().decompressobj()
        data: bytes = stream.decompress(raw[len(MAGIC) :])
        if stream.eof and raw.startswith(MAGIC):
            return data
        if time.monotonic() > began + END_SECONDS:
            raise RuntimeError(f"{path} was not ended")
        time.sleep(0.05)


def _messages(path: Path) -> Iterator[tuple[int, bytes]]:
    """(step, message with its length) of a rank's recording."""
    data = _content(path)
    at, step = 0, -1
    while at < len(data):
        size, begin = _varint(data, at)
        step = _step_of(data[begin : begin + size], step)
        yield step, data[at : begin + size]
        at = begin + size


def merge(paths: list[Path], into: Path) -> None:
    """Recordings of single ranks become one of all, in the order of their steps."""
    import zstandard

    every = [list(_messages(path)) for path in paths]
    placed = [
        (step, rank, number, message)
        for rank, messages in enumerate(every)
        for number, (step, message) in enumerate(messages)
    ]
    data = b"".join(message for _, _, _, message in sorted(placed))
    packed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)
    partial = into.with_suffix(".partial")
    partial.write_bytes(MAGIC + packed)
    os.replace(partial, into)
    for path in paths:
        if path != into:
            path.unlink()
