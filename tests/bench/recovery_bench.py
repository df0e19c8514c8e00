#!/usr/bin/env python3
"""How soon a killed server takes up its work again, by how much log it finds.

Fills a log with frames of 16 KiB, none of which is in the database, and kills the server.  Measures
from its next start until it is ready, until it has acknowledged a new frame, and until all of the
log is applied.  Beside it stands what reading the same bytes takes.

    python3 tests/bench/recovery_bench.py --mib 1024
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

LAYERS, HEADS = 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), "storage: {wal_bytes_flush: 17179869184}\n")
        with server:
            clients = [
                RunClient(RunOptions(run=f"r{i}", layers=LAYERS, heads=HEADS, server=server.grpc))
                for i in range(options.runs)
            ]
            step = 0
            # A segment is set aside whole: what is in records counts.
            while (
                sum(client.counters().frames_acked for client in clients) * 16.5 / 1024
                < options.mib
            ):
                block = Block("wq_sigma", [float(step)] * (LAYERS * HEADS), 0, LAYERS, 0, HEADS)
                for client in clients:
                    client.push(step, [Block("loss", [float(step)]), block])
                step += 1
            for client in clients:
                client.flush(60)
            server.kill()
            files = sorted((server.storage / "wal").glob("*.wal"))
            began = time.monotonic()
            read = sum(len(file.read_bytes()) for file in files)
            reading = time.monotonic() - began
            began = time.monotonic()
            server.start()
            ready = time.monotonic() - began
            acked = clients[0].counters().frames_acked
            clients[0].push(step, [Block("loss", [1.0])])
            wait_for("a new ack", lambda: clients[0].counters().frames_acked > acked, 60)
            first_ack = time.monotonic() - began
            unapplied = server.metric("bellwether_wal_unapplied_frames")
            server.await_applied()
            applied = time.monotonic() - began
            result = {
                "log_mib": read >> 20,
                "reading_s": round(reading, 2),
                "ready_s": round(ready, 2),
                "first_ack_s": round(first_ack, 2),
                "unapplied_then": int(unapplied),
                "applied_s": round(applied, 2),
            }
            print(json.dumps(result))


if __name__ == "__main__":
    main()
