#!/usr/bin/env python3
"""Writes the first inputs of the fuzz targets: small, valid, one of each kind.

    python3 tests/fuzz/make_corpus.py      # needs protoc and the packages protobuf and zstandard

What a fuzzer finds beyond them is added by hand when it found a bug, under the bug's name.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import zstandard
from google.protobuf.internal.encoder import _VarintBytes

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).with_name("corpus")


def protos():
    folder = tempfile.mkdtemp()
    files = sorted((ROOT / "proto" / "bellwether" / "v1").glob("*.proto"))
    subprocess.run(
        ["protoc", f"-I{ROOT / 'proto'}", f"--python_out={folder}", *map(str, files)], check=True
    )
    sys.path.insert(0, folder)
    from bellwether.v1 import ingest_pb2, recording_pb2

    return ingest_pb2, recording_pb2


def write(target: str, name: str, data: bytes) -> None:
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    (CORPUS / target / name).write_bytes(data)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def spool_segment(first: int, parts: list[tuple[bool, bytes]]) -> bytes:
    """What client_lib/sender/spool.h says of a file: one record for each (last part, body)."""
    data = b"BWspl\r\n\1"
    for ordinal, (last, body) in enumerate(parts, first):
        checked = struct.pack("<I4Q", len(body), last, ordinal, ordinal, ordinal) + body
        data += struct.pack("<I", crc32c(checked)) + checked
    return data


def spool_inputs(hello: bytes) -> None:
    def named(name: bytes, kind: int, data: bytes) -> bytes:
        return bytes([kind]) + name + struct.pack("<H", len(data)) + data

    whole = spool_segment(1, [(True, b"a"), (False, b"b"), (True, b"c")])
    behind = spool_segment(4, [(True, b"d"), (True, b"")])
    state = struct.pack("<IQQQqQQQ", 1, 2, 3, 5, -4, 1, 5, 2)
    state = struct.pack("<I", crc32c(state)) + state
    both = named(b"%016x" % 1, 5, whole) + named(b"%016x" % 4, 5, behind)
    beside = named(b"", 6, state) + named(b"", 7, hello)
    write("spool", "whole", b"\0\4" + both + beside)
    write("spool", "committed", b"\3\2" + both)
    write("spool", "window", b"\0\2" + named(b"%016x" % 1, 13, whole) + beside)
    write("spool", "half-a-frame", b"\0\1" + named(b"%016x" % 1, 5, whole[: 8 + 2 * 41]))
    write(
        "spool",
        "spelt-twice",
        b"\0\2" + named(b"%016x" % 10, 5, whole) + named(b"%016X" % 10, 5, whole),
    )
    write(
        "spool", "overlap", b"\0\2" + named(b"%016x" % 1, 5, whole) + named(b"%016x" % 2, 5, whole)
    )
    # How many records; for each its last part or not and the next ordinal, its length; damage.
    records = bytes([0, 6]) + bytes([1, 20, 0, 30, 1, 5, 0, 0, 0, 9, 2, 99]) + b"\0"
    write("spool", "records", bytes([0, 3]) + (bytes([0, 9]) + records) * 3)
    # Packed by us, and not.
    packed = bytes([0, 4]) + bytes([5, 200, 4, 90, 5, 90, 13, 3]) + b"abc" + b"\0"
    write("spool", "packed", bytes([0, 2]) + (bytes([0, 9]) + packed) * 2)
    write("spool", "damaged", bytes([0, 3]) + (bytes([0, 9]) + records[:-1] + b"\1\40\0\xff") * 3)


def judge_inputs() -> None:
    """As judge_fuzz.cc reads them: a layout, then what is done."""
    layout = bytes([3, 1, 1, 1, 1, 4, 0])

    def sample(signals: list[tuple[int, int]], apart: int = 10, times: int = 40) -> bytes:
        told = b"".join(struct.pack("<HBB", id, kind, 7) for id, kind in signals)
        return bytes([9, len(signals) - 1]) + told + bytes([apart - 1, 1, times - 1])

    quiet = 10
    names = bytes([3, 5]) + b"h.0.wq" + bytes([3]) + b"h.0"
    heads = [(id, quiet) for id in (17, 18, 19, 20, 33, 34, 48)]
    save, damage = bytes([0]), bytes([5]) + struct.pack("<IBB", 40, 3, 1)
    write("judge", "a-signal-stops", layout + sample(heads) + save + sample(heads[1:]) * 2)
    write("judge", "not-finite", layout + sample(heads) + sample([(17, 1), (20, 2), (1, 1)]) + save)
    write("judge", "tensors", layout + names * 3 + sample([(128, quiet), (1, quiet)]) + damage)
    told = bytes([1, 1]) + struct.pack("<f", 1e-3) + b"text"
    write("judge", "told", layout + sample(heads) + told + bytes([2]) + sample(heads) + bytes([4, 2]))
    every = [(id, 8) for id in range(1, 400)]
    parts = [every[at : at + 12] for at in range(0, len(every), 12)]
    write("judge", "all-signals", layout + names + b"".join(sample(p, times=4) for p in parts) + save)


def main() -> None:
    ingest, recording = protos()
    chance = random.Random(1)
    messages = {}
    hello = ingest.ClientMessage()
    hello.hello.protocol, hello.hello.rank = 1, 1
    run = hello.hello.run
    run.name, run.uuid, run.world, run.reporters = "gpt/seed-4", b"\7" * 16, 2, 2
    run.layout.layers, run.layout.heads, run.layout.kv_heads, run.layout.head_dim = 4, 8, 2, 64
    run.labels["team"] = "a"
    messages["hello"] = hello
    for step in range(3):
        frame = ingest.ClientMessage(seq=step + 1)
        frame.frame.step, frame.frame.parts = step, 1
        frame.frame.blocks.add(
            signal=17, layer_begin=1, layer_count=2, head_begin=2, head_count=2
        ).values.extend([1.0, float("nan"), float("inf"), -0.0])
        frame.frame.blocks.add(signal=40, layer_count=1, head_count=1).values.append(2.5)
        messages[f"frame{step}"] = frame
    names = ingest.ClientMessage(seq=2)
    names.names.granularity = 7  # TENSOR
    names.names.names.extend(["embed", "gr\u00f6\u00dfe", "head"])
    messages["names"] = names
    sums = ingest.ClientMessage(seq=3)
    sums.frame.step, sums.frame.parts = 3, 1
    sums.frame.blocks.add(
        signal=128, layer_begin=1, layer_count=3, head_count=1
    ).values.extend([1.0, 2.0, 3.0])
    messages["sums"] = sums
    spectrum = ingest.ClientMessage(seq=4)
    s = spectrum.spectrum
    s.step, s.layer, s.head, s.kind, s.n, s.scale = 1, 1, 2, 1, 3, 1.0
    s.upper.extend([4.0, 1.0, 0.5, 3.0, 0.2, 2.0])
    messages["spectrum"] = spectrum
    event = ingest.ClientMessage(seq=5)
    event.event.step, event.event.kind, event.event.value, event.event.text = (
        2,
        1,
        1e-3,
        "warmup ends",
    )
    messages["event"] = event
    result = ingest.ClientMessage(seq=6)
    result.action_result.SetInParent()
    messages["result"] = result
    beat = ingest.ClientMessage()
    beat.heartbeat.time_unix_ns = 5
    messages["heartbeat"] = beat
    bye = ingest.ClientMessage()
    bye.bye.reason, bye.bye.last_seq = 1, 6
    messages["bye"] = bye
    for name, message in messages.items():
        write("frame", name, message.SerializeToString())
    stream = b""
    for name in ("hello", "frame0", "frame1", "spectrum", "event", "frame2", "bye"):
        body = messages[name].SerializeToString()
        for rank in (0, 1):
            stream += struct.pack("<HB", len(body), rank) + body
    write("session", "two-ranks", stream)
    write("session", "no-hello", stream[-200:])
    stream = b""
    for name, rank in (("hello", 0), ("sums", 0), ("names", 0), ("sums", 1), ("names", 1)):
        body = messages[name].SerializeToString()
        stream += struct.pack("<HB", len(body), rank) + body
    write("session", "names", stream + struct.pack("<HB", len(body), 1) + body)
    plain = b""
    for name in ("hello", "frame0", "frame1", "bye"):
        body = recording.RecordedMessage(rank=1, message=messages[name]).SerializeToString()
        plain += _VarintBytes(len(body)) + body
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(plain)
    write("recording", "whole", b"BWRUN\0\0\1" + packed)
    write("recording", "cut", b"BWRUN\0\0\1" + packed[: len(packed) // 2])
    write("recording", "version", b"BWRUN\0\0\2" + packed)
    walk = [0.0]
    for _ in range(255):
        walk.append(walk[-1] + chance.gauss(0, 1e-3))
    write("chunk", "walk", bytes([1, 3, 0]) + struct.pack("256f", *walk))
    write(
        "chunk",
        "special",
        bytes([1, 0, 2]) + struct.pack("<8I", 0x7FC00001, 0xFF800000, 0, 0x80000000, 1, 2, 3, 4),
    )
    write("chunk", "bytes", bytes([0]) + bytes(range(64)))
    spool_inputs(messages["hello"].SerializeToString())
    for i in range(4):
        write(
            "wal", f"damage{i}", bytes([2, 20, i]) + bytes(chance.randrange(256) for _ in range(60))
        )
    write("wal", "whole", bytes([2, 20, 0, 0, 20, 0, 0, 5, 0, 0]))
    write("wal", "reused", bytes([2, 164, 0, 0, 164, 0, 0, 149, 0, 0]))
    for i, at in enumerate((8, 2056, 4096, 4120, 4300, 6000)):
        torn = struct.pack("<H", at) + bytes([3]) + bytes(4) + bytes([3])
        write("wal", f"reused-torn{i}", bytes([2, 164, 0, 0, 20, 0, 0, 149, 1]) + torn + bytes(1))
    # Payloads that look like headers: of records that reach to the end, with LSNs that fit.
    for i, length in enumerate((56, 400, 3000, 8000)):
        words = struct.pack("<QQ", length, 1010)
        write("wal", f"header-words{i}", bytes([129]) + words + bytes([149, 0, 0, 149, 0, 0]))
        torn = bytes([149, 1]) + struct.pack("<H", 4700) + bytes([3]) + bytes(4) + bytes([3, 0])
        write("wal", f"header-words-torn{i}", bytes([128]) + words + torn)
    rules = """thresholds:
  drift: {grown_factor: 4, hold_batches: 3}
off: [overhead, drift.leak]
rules:
- name: entropy_gone
  signal: entropy_ratio
  detector: level
  below: 0.05
  stage: 4
  severity: warning
"""
    write("rules", "own", rules.encode())
    write("rules", "empty", b"")
    write("rules", "comma", b", a: 1\n")  # Of this yaml-cpp's LoadAll() found no end.
    write("policy", "comma", b", a: 1\n")
    write("rules", "anchor", b"a: &a [*a]\nthresholds: {<<: *a}\n")
    policies = sorted((ROOT / "deploy" / "config").glob("policy*.yml"))
    for policy in policies:
        write("policy", policy.stem, policy.read_bytes())
    write(
        "policy",
        "enforce",
        b"mode: enforce\nrules:\n- {alert: drift, actions: [attention.center_k]}\n",
    )
    for config in sorted((ROOT / "deploy" / "config").glob("bellwetherd*.yml")):
        write("config", config.stem, config.read_bytes())
    write(
        "config",
        "limits",
        b"limits: {streams_max: 100}\nstorage: {cache_bytes: 1048576}\nexport: {per_head: all}\n"
        b"alerting:\n  webhooks:\n  - {url: http://h/x, severity: warning, send_resolved: false}\n"
        b"  alertmanagers: [{url: http://am:9093, resend_seconds: 30}]\nweb: {hosts: [a, b]}\n",
    )
    judge_inputs()
    write("written", "access", b"\0tenants: {a: {runs_max: 12}}\nidentities:\n- {name: b, roles: [read]}\n")
    write("written", "tokens", b"\1sha256:" + b"a" * 64 + b" alice never never\n")
    example = ROOT / "deploy" / "rules" / "example_test.yml"
    write("written", "rule_tests", b"\2" + example.read_bytes())
    slack = ROOT / "deploy" / "webhook" / "slack.json"
    write("written", "template", b"\3" + slack.read_bytes())
    write(
        "query_json",
        "get",
        b'run=llama\nlimit=10\nseries={"signal":"loss"}\nseries=[1]\nall=true\n\n{"run":"x"}',
    )
    write(
        "query_json",
        "body",
        b'\n{"run":"r","series":[{"signal":"loss","layer":1}],"points_max":5,"attempt":-1}',
    )
    write("query_json", "deep", b"\n" + b'{"a":' * 40 + b"1" + b"}" * 40)


if __name__ == "__main__":
    main()
