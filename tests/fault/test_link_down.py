"""Goal: a network card that goes dark is found within ten seconds by the sending end, on both
sides, and costs no frame.
Method: two network name spaces with a pair of virtual cards between them, the real server in one
and the real client in the other.  One card is taken down, so that nothing is confirmed or closed.
Needs user name spaces, no root. Row 5 of the fault matrix.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, free_port, wait_for

from bellwether.client import Block, RunClient, RunOptions

HERE, THERE = "10.71.0.1", "10.71.0.2"


def possible() -> bool:
    return (
        shutil.which("ip") is not None
        and subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not possible(), reason="needs `ip` and user name spaces")
def test_a_card_that_goes_dark_is_found_within_ten_seconds(tmp_path: Path) -> None:
    inside = [sys.executable, str(Path(__file__).resolve()), str(tmp_path)]
    done = subprocess.run(
        ["unshare", "-rn", "--kill-child", *inside], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


class FarServer(Server):
    """A bellwetherd in the other name space."""

    def __init__(self, folder: Path, holder: int) -> None:
        super().__init__(folder, "", "--insecure-i-understand")
        self.enter = ["nsenter", "-t", str(holder), "-n"]
        self.grpc = f"{THERE}:{free_port()}"

    def program(self, name: str) -> list[str]:
        return [*(self.enter if name == "bellwetherd" else []), *super().program(name)]

    def streams(self) -> float:
        """Asked over there: the way here may be cut."""
        page = subprocess.run(
            [*self.enter, "curl", "-fsS", f"http://{self.http}/metrics"],
            capture_output=True,
            text=True,
            check=True,
        )
        name = "bellwether_ingest_streams "
        return next(float(x[len(name) :]) for x in page.stdout.splitlines() if x.startswith(name))


def main(folder: Path) -> None:
    holder = subprocess.Popen(["unshare", "-n", "sleep", "600"])
    try:
        wait_for(
            "the other name space",
            lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"),
        )
        enter = ["nsenter", "-t", str(holder.pid), "-n"]
        for command in (
            [
                "ip",
                "link",
                "add",
                "near",
                "type",
                "veth",
                "peer",
                "name",
                "far",
                "netns",
                str(holder.pid),
            ],
            ["ip", "addr", "add", f"{HERE}/24", "dev", "near"],
            ["ip", "link", "set", "near", "up"],
            ["ip", "link", "set", "lo", "up"],
            [*enter, "ip", "addr", "add", f"{THERE}/24", "dev", "far"],
            [*enter, "ip", "link", "set", "far", "up"],
            [*enter, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True)
        with FarServer(folder, holder.pid) as server:
            check(server, enter)
    finally:
        holder.kill()
        holder.wait()


def check(server: FarServer, enter: list[str]) -> None:
    client = RunClient(RunOptions(run="dark", layers=1, heads=1, server=server.grpc))
    steps = 0

    def push() -> None:
        nonlocal steps
        client.push(steps, [Block("loss", [float(steps)])])
        steps += 1
        time.sleep(0.01)

    while client.counters().frames_acked < 20:
        push()
    subprocess.run([*enter, "ip", "link", "set", "far", "down"], check=True)
    cut = time.monotonic()
    found_here = found_there = 0.0
    while not (found_here and found_there):
        push()
        if not found_here and client.counters().link != "streaming":
            found_here = time.monotonic() - cut
        # The server owes nothing but signs of life; it finds out by sending them.
        if not found_there and steps % 50 == 0 and server.streams() == 0:
            found_there = time.monotonic() - cut
        assert time.monotonic() - cut < 40, (found_here, found_there, client.counters())
    print(f"found after {found_here:.1f} s here and {found_there:.1f} s there")
    assert found_here <= 10, found_here
    assert found_there <= 15, found_there
    subprocess.run([*enter, "ip", "link", "set", "far", "up"], check=True)
    assert client.flush(60), client.counters()
    counters = client.counters()
    assert counters.frames_acked == steps and counters.frames_dropped_window == 0, counters
    client.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
