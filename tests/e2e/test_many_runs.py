"""Goal: a server that watches all the runs it may still gives Prometheus a page within its limit.
What is left out is counted, what people need first is there, and a run too many is refused.
Method: the real bellwetherd with 1,000 live runs of 12 x 12 heads, whose layers alone are five
times the limit, and a recorded failing one; promtool reads the page.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server

from bellwether.client import Block, RunOptions, recording

FAILING = "gpt-flash-s4"
RUNS_LIVE_MAX = 1000  # docs/design/ingest.md, Limits.
SERIES_MAX = 20_000
LAYERS = HEADS = 12
SIGNALS = ("rows", "common_mode_sum", "spread_sum", "tied_rows_bf16", "logit_max", "entropy_sum", "wq_sigma")


def record_live_run(path: Path) -> None:
    """A rank of two that said goodbye: a run of it goes on, for the other one may still come."""
    cells = LAYERS * HEADS
    with recording(path, RunOptions(run="live", layers=LAYERS, heads=HEADS, world=2)) as client:
        for step in range(3):
            blocks = [Block(name, [1.0 + step] * cells, 0, LAYERS, 0, HEADS) for name in SIGNALS]
            assert client.push(step, [Block("loss", [1.0]), *blocks])
        assert client.flush(20)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    record_live_run(folder / "live.bwrun")
    with Server(folder, "ingest:\n  step_deadline_ms: 10\n") as server:
        server.run("run", "import", "--notify", str(ROOT / f"tests/testdata/runs/{FAILING}.bwrun"))
        with ThreadPoolExecutor(2) as pool:
            names = [f"live-{i}" for i in range(RUNS_LIVE_MAX)]
            list(pool.map(lambda name: server.run("run", "import", "--notify", str(folder / "live.bwrun"), "--name", name), names))
        yield server


def value(page: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    assert found, series
    return float(found[1])


def test_the_page_stays_within_its_limit_and_is_clean(crowded: Server) -> None:
    page = crowded.get("/metrics")
    series = [line for line in page.splitlines() if not line.startswith("#")]
    assert 0.9 * SERIES_MAX < len(series) <= SERIES_MAX
    levels = ("server", "alert", "run", "layer", "head")
    assert sum(value(page, f'bellwether_series_exported{{level="{level}"}}') for level in levels) == len(series)
    promtool = shutil.which("promtool")
    assert promtool, "Debian's package prometheus is missing"
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr


def test_suppressed_series_are_counted_and_failing_run_is_complete(crowded: Server) -> None:
    before, page = crowded.get("/metrics"), crowded.get("/metrics")
    for level in ("layer", "head"):
        suppressed = f'bellwether_series_suppressed_total{{level="{level}"}}'
        assert value(page, suppressed) > value(before, suppressed) > 0
    assert len(re.findall(r"^bellwether_run_stage\{", page, re.MULTILINE)) == RUNS_LIVE_MAX + 1
    assert f'bellwether_alert_active{{run="{FAILING}",rule="drift"' in page
    for layer in range(6):
        value(page, f'bellwether_layer_drift_ratio_max{{run="{FAILING}",layer="{layer}"}}')


def test_one_run_too_many_is_refused_and_counted(crowded: Server) -> None:
    refused = 'bellwether_ingest_limit_refused_total{limit="runs"}'
    assert value(crowded.get("/metrics"), refused) == 0
    crowded.run("run", "import", str(crowded.folder / "live.bwrun"), "--name", "too-many", exit_code=1)
    assert value(crowded.get("/metrics"), refused) == 1
