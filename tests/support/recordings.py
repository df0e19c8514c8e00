"""Recordings (.bwrun) made here: frames of several ranks with values that follow from a seed.

The format is recording.proto's.  Everything is flushed each few messages, so that any prefix of
the file holds nearly all that was written so far.
"""

from __future__ import annotations

import math
import random
import uuid
from pathlib import Path
from typing import Any

import zstandard
from ack_ledger import INGEST, SIGNALS

from bellwether.v1 import recording_pb2

SIGNALS_OF_HEADS = ("WQ_SIGMA", "WK_SIGMA", "ROWS")
MESSAGES_PER_FLUSH = 20


def _hello(name: str, rank: int, ranks: int, layers: int, heads: int) -> Any:
    message = INGEST.ClientMessage()
    hello = message.hello
    hello.protocol, hello.client_version, hello.rank = 1, "recorded", rank
    run = hello.run
    run.name, run.uuid = name, uuid.uuid5(uuid.NAMESPACE_URL, name).bytes
    run.world = run.reporters = ranks
    layout = run.layout
    layout.layers, layout.heads, layout.kv_heads, layout.head_dim = layers, heads, heads, 64
    run.labels["team"], run.labels["cluster"] = "a", "here"
    return message


def _frame(values: random.Random, step: int, rank: int, ranks: int, layers: int, heads: int) -> Any:
    message = INGEST.ClientMessage(seq=step + 1)
    frame = message.frame
    frame.step, frame.parts = step, 1
    frame.time_unix_ns = 1_700_000_000_000_000_000 + step * 1_000_000_000
    if rank == 0:
        block = frame.blocks.add(signal=SIGNALS.SIGNAL_LOSS, layer_count=1, head_count=1)
        block.values.append(3 + values.random())
    share = heads // ranks
    for signal in SIGNALS_OF_HEADS:
        block = frame.blocks.add(
            signal=getattr(SIGNALS, f"SIGNAL_{signal}"),
            layer_count=layers,
            head_begin=rank * share,
            head_count=share,
        )
        for _ in range(layers * share):
            value = 4096.0 if signal == "ROWS" else values.lognormvariate(0, 0.1)
            # From the middle on a head is not measured well, and says so.
            block.values.append(math.nan if step % 97 == 96 and value > 1.2 else value)
    return message


def write_recording(
    path: Path,
    name: str,
    steps: int,
    ranks: int = 2,
    layers: int = 2,
    heads: int = 4,
    seed: int = 1,
    events: int = 0,
) -> Path:
    """`steps` of `ranks` in turn, then events of the first, then a goodbye of each."""
    compress = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj()
    values = random.Random(f"{seed} {name}")
    written = 0
    with open(path, "wb") as file:

        def write(rank: int, message: Any) -> None:
            nonlocal written
            bytes_ = recording_pb2.RecordedMessage(rank=rank, message=message).SerializeToString()
            length, prefix = len(bytes_), b""
            while length >= 0x80:
                prefix += bytes([length & 0x7F | 0x80])
                length >>= 7
            file.write(compress.compress(prefix + bytes([length]) + bytes_))
            written += 1
            if written % MESSAGES_PER_FLUSH == 0:
                file.write(compress.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))

        file.write(b"BWRUN\0\0\1")
        for rank in range(ranks):
            write(rank, _hello(name, rank, ranks, layers, heads))
        for step in range(steps):
            for rank in range(ranks):
                write(rank, _frame(values, step, rank, ranks, layers, heads))
        for number in range(events):
            event = INGEST.ClientMessage(seq=steps + number + 1)
            event.event.kind, event.event.text = 13, "e" * 250  # An annotation.
            write(0, event)
        for rank in range(ranks):
            bye = INGEST.ClientMessage()
            bye.bye.reason = INGEST.BYE_REASON_FINISHED
            write(rank, bye)
        file.write(compress.flush())
    return path
