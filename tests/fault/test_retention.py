"""Goal: a real server makes what is old smaller and tells of it, before and after a kill; a
configuration that makes no sense is refused with the key.
Method: days of a few seconds, a run that has ended, one that goes on, kill -9 between the tiers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

DAY = 1 / 86_400  # A second.
STEPS = 1000


def retention(raw: float, rounded: float, summary: float) -> str:
    return (
        f"retention: {{raw_days: {raw * DAY:.9f}, rounded_days: {rounded * DAY:.9f},"
        f" summary_days: {summary * DAY:.9f}}}\n"
    )


def record(server: Server, run: str) -> None:
    with RunClient(RunOptions(run=run, layers=2, heads=4, server=server.grpc)) as client:
        for step in range(STEPS):
            while not client.push(step, [Block("loss", [1 / (step + 3)])]):
                client.flush(5)
        assert client.flush(60), client.counters()


def rows(server: Server, result: str) -> float:
    lines = server.get("/metrics").splitlines()
    name = f'bellwether_retention_rows_total{{result="{result}"}} '
    return sum(float(line[len(name) :]) for line in lines if line.startswith(name))


def test_old_values_are_rounded_summarized_and_dropped_over_kills(tmp_path: Path) -> None:
    with Server(tmp_path, retention(10, 3600, 7200)) as server:
        record(server, "old")
        # Acknowledged is in the log, and what is read comes behind it.
        wait_for("all is stored", lambda: len(server.series("old", "loss")) >= STEPS)
        whole = server.series("old", "loss")
        assert len(whole) == STEPS
        wait_for("12 bits", lambda: rows(server, "rounded") > 0, 60)
        # Counted before it is committed.
        wait_for("what is rounded is read", lambda: server.series("old", "loss") != whole)
        rounded = server.series("old", "loss")
        assert rounded.keys() == whole.keys()
        assert all(abs(rounded[step] / whole[step] - 1) <= 2**-13 for step in whole)
        server.kill()
    with server:
        server.await_applied()
        assert server.series("old", "loss") == pytest.approx(whole, rel=2**-12)
        server.kill()
    (tmp_path / "server.yml").write_text(retention(1, 2, 3600))
    with server:
        wait_for("summaries", lambda: rows(server, "summarized") > 0, 60)

        def summary() -> Any:
            answer = server.call(
                "GetSeries", run="old", series=[{"signal": "loss"}], points_max=10_000, attempt=-1
            )
            return answer["series"][0] if answer["series"][0]["downsampled"] else None

        series = wait_for("the summary is read", summary)
        assert 4 <= len(series["step"]) <= 5
        assert float(series["max"][0]) == pytest.approx(1 / 3, rel=1e-6)
        server.kill()
    (tmp_path / "server.yml").write_text(retention(1, 2, 3))
    with server:
        wait_for("nothing is left", lambda: rows(server, "dropped") > 0, 60)
        wait_for(
            "no points",
            lambda: (
                not server.call(
                    "GetSeries", run="old", series=[{"signal": "loss"}], points_max=10, attempt=-1
                )["series"][0].get("step")
            ),
        )
        assert server.call("GetRun", run="old")["description"]["name"] == "old"
        assert server.metric("bellwether_retention_failures_total") == 0
        assert server.stop() == 0
    checked = subprocess.run(
        [str(BIN / "bellwetherd"), f"--storage.path={server.storage}", "check-data"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "retention: {raw_days: 8, rounded_days: 7}",
            "rounded_days must be 0, or at least retention.raw_days",
        ),
        (
            "retention: {rounded_days: 0}",
            "summary_days must be 0, or at least retention.rounded_days",
        ),
        (
            "retention: {raw_days: 0}",
            "retention.rounded_days is 30: must be 0 where retention.raw_days is 0",
        ),
        ("retention: {raw_days: -1}", "retention.raw_days = -1: must be a number in [0, 36500]"),
        ("retention: {raw_days: soon}", "retention.raw_days = soon: must be a number in [0, 36500]"),
    ],
)
def test_bad_retention_settings_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "server.yml").write_text(text)
    done = subprocess.run(
        [str(BIN / "bellwetherd"), f"--config.file={tmp_path / 'server.yml'}", "--config.check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and words in done.stderr + done.stdout, done.stderr + done.stdout
