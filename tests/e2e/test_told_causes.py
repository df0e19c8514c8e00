"""Goal: people are told the same cause of an illness wherever they read it: from a WatchAlerts stream,
a webhook, an Alertmanager or the page in a browser.  It is the cause that instabilities/causes.py has
for the family.  A cause that becomes known later takes the place of the unknown one.  Nothing is told of
a healthy run.
Method: six illnesses of six families, each pushed by the Python client into a run of its own, over real
gRPC, to one bellwetherd; a real Alertmanager and Chromium.  Each run is healthy at first.
"""

from __future__ import annotations

import random
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, wait_for
from telling import alertmanager, lines_of, receiver

from bellwether.client import Block, RunClient, RunOptions

sys.path.insert(0, str(ROOT))
from instabilities.causes import FAMILIES, UNKNOWN

PLACES = ("watch", "webhook", "alertmanager", "page")
LAYERS = HEADS = 4
EXPERTS = 2
HEALTHY_STEPS, ILL_STEPS = 150, 30
HEALTHY = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "wq_sigma": 2.0, "expert_load": 100.0}

# By the name of the family, what is wrong.  A value is that of one head or expert; of two ranks the last one's.
ILL: dict[str, dict[str, float]] = {
    "dead-experts": {"expert_load": 0.0},
    "replicas-apart": {"wq_sigma": 3.0},
    "corruption": {"wq_sigma": 200.0},
    "nothing-to-learn": {"loss": 2.0},
    "learning-rate-too-high": {"learning_rate": 1e-2},
    "gradients-scaled-wrongly": {"grad_norm": 100.0},
}


class Told:
    """What stands in each place of each run, and which causes it has ever told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing: defaultdict[tuple[str, str], dict[Hashable, str]] = defaultdict(dict)
        self._ever: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self.shown: set[str] = set()  # Runs that the page has shown without a cause.
        self.page_is_open = threading.Event()

    def tell(self, place: str, run: str, alert: Hashable, cause: str, fires: bool) -> None:
        with self._lock:
            if fires:
                self._standing[place, run][alert] = cause
                self._ever[place, run].add(cause)
            else:
                self._standing[place, run].pop(alert, None)

    def standing(self, run: str) -> dict[str, set[str]]:
        with self._lock:
            return {place: set(self._standing[place, run].values()) for place in PLACES}

    def ever(self, run: str) -> dict[str, set[str]]:
        with self._lock:
            return {place: set(self._ever[place, run]) for place in PLACES}

    def from_watch(self, alert: dict[str, Any]) -> None:
        self.tell("watch", alert["run"], alert["key"], alert["cause"], alert["state"] == "ALERT_STATE_FIRING")

    def from_post(self, path: str, body: dict[str, Any]) -> None:
        """What a webhook and an Alertmanager tell, each at the path of its name."""
        place = path.strip("/")
        for alert in body["alerts"]:
            labels, notes = alert["labels"], alert["annotations"]
            # An Alertmanager tells alerts apart by their labels, of which one may change under a key.
            of: Hashable = notes["alert"] if place == "webhook" else frozenset(labels.items())
            self.tell(place, labels["run"], of, notes["cause"], alert["status"] == "firing")

    def from_page(self, line: dict[str, Any]) -> None:
        if "live" in line:
            self.page_is_open.set()
            return
        if not line["cause"]:
            self.shown.add(line["run"])
        self.tell("page", line["run"], "verdict", line["cause"], bool(line["cause"]))


class Job:
    """A run whose ranks report what is above."""

    def __init__(self, server: Server, run: str, ranks: int) -> None:
        options = {"layers": LAYERS, "heads": HEADS, "experts": EXPERTS, "world": ranks, "server": server.grpc}
        self._server, self._run = server, run
        self._ranks = [RunClient(RunOptions(run, rank=rank, **options)) for rank in range(ranks)]
        self._random = random.Random(run)
        self._step = 0

    def report(self, steps: int, **ill: float) -> None:
        for _ in range(steps):
            usual = {name: value * self._random.uniform(0.99, 1.01) for name, value in HEALTHY.items()}
            for rank, client in enumerate(self._ranks):
                last = rank == len(self._ranks) - 1
                assert client.push(self._step, self._blocks(usual, {**usual, **ill} if last else usual))
            self._step += 1
        for client in self._ranks:
            assert client.flush(60)

        def is_judged() -> bool:
            runs = {run["description"]["name"]: run for run in self._server.call("ListRuns")["runs"]}
            return self._run in runs and int(runs[self._run]["step"]) == self._step - 1

        wait_for(f"step {self._step - 1} of {self._run} is judged", is_judged)

    @staticmethod
    def _blocks(usual: dict[str, float], now: dict[str, float]) -> list[Block]:
        heads = [usual["wq_sigma"]] * (LAYERS * HEADS)
        heads[HEADS] = now["wq_sigma"]
        load = now["expert_load"]
        loads, dead = [load, HEALTHY["expert_load"]] * LAYERS, [float(load == 0), 0.0] * LAYERS
        return [
            *(Block(name, [now[name]]) for name in ("loss", "grad_norm", "learning_rate")),
            Block("wq_sigma", heads, 0, LAYERS, 0, HEADS),
            Block("expert_load", loads, 0, LAYERS, 0, EXPERTS),
            Block("expert_dead", dead, 0, LAYERS, 0, EXPERTS),
        ]

    def close(self) -> None:
        for client in self._ranks:
            client.close()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Told, IO[str]]]:
    folder = tmp_path_factory.mktemp("server")
    told = Told()
    node = shutil.which("node")
    assert node, "Debian's package nodejs is missing"
    with ExitStack() as stack:
        url = stack.enter_context(receiver(told.from_post))
        address = stack.enter_context(alertmanager(folder, f"{url}alertmanager"))
        # No rank is silent, however busy the machine is.
        config = (
            "ingest:\n  silence_ms_min: 600000\n"
            "alerting:\n"
            f"  alertmanagers:\n    - {{url: 'http://{address}', severity: info}}\n"
            f"  webhooks:\n    - {{url: '{url}webhook', severity: info}}\n"
        )
        server = stack.enter_context(Server(folder, config))
        watch = [str(BIN / "bellwether"), "--server", server.grpc, "alert", "watch", "-o", "json"]
        stack.enter_context(lines_of(watch, told.from_watch))
        page = [node, str(ROOT / "tests/dashboards/run_causes.mjs"), f"http://{server.http}/"]
        browser = stack.enter_context(lines_of(page, told.from_page))
        assert told.page_is_open.wait(180), "no page: it needs Chromium and `npm ci` in tests/dashboards"
        yield server, told, browser


def open_page(browser: IO[str], told: Told, run: str) -> None:
    browser.write(f"{run}\n")
    browser.flush()
    wait_for(f"the page of {run}, on which no alert fires", lambda: run in told.shown)


def everywhere(told: Told, run: str, cause: str) -> None:
    """Waits until each place tells this cause and no other."""
    try:
        wait_for("every place tells it", lambda: told.standing(run) == {place: {cause} for place in PLACES})
    except AssertionError:
        pytest.fail(f"{cause}: {told.standing(run)}, ever {told.ever(run)}")


@pytest.mark.parametrize("family", ILL)
def test_every_place_tells_the_cause_of_the_family(told: tuple[Server, Told, IO[str]], family: str) -> None:
    server, places, browser = told
    cause = FAMILIES[family].cause
    job = Job(server, family, ranks=2 if family == "replicas-apart" else 1)
    job.report(HEALTHY_STEPS)
    open_page(browser, places, family)
    assert not any(places.ever(family).values()), "a healthy run"
    job.report(ILL_STEPS, **ILL[family])
    everywhere(places, family, cause)
    # A sign may be told before its cause is known.
    assert all(causes <= {cause, UNKNOWN} for causes in places.ever(family).values()), places.ever(family)
    job.close()


def test_a_cause_that_becomes_known_replaces_the_unknown(told: tuple[Server, Told, IO[str]]) -> None:
    """Eight gradients that are too large are a wrong scale, fewer are anything.  With its cause the alert gets another
    rule, which is a label: in an Alertmanager what stood before has to end."""
    server, places, browser = told
    job = Job(server, "becomes-known", ranks=1)
    job.report(HEALTHY_STEPS)
    open_page(browser, places, "becomes-known")
    job.report(3, **ILL["gradients-scaled-wrongly"])
    everywhere(places, "becomes-known", UNKNOWN)
    job.report(ILL_STEPS, **ILL["gradients-scaled-wrongly"])
    everywhere(places, "becomes-known", FAMILIES["gradients-scaled-wrongly"].cause)
    job.close()


def test_no_place_tells_anything_of_a_healthy_run(told: tuple[Server, Told, IO[str]]) -> None:
    server, places, browser = told
    healthy, ill = Job(server, "healthy", ranks=2), Job(server, "ill", ranks=1)
    healthy.report(HEALTHY_STEPS)
    open_page(browser, places, "healthy")
    healthy.report(ILL_STEPS)
    # What came later has arrived everywhere but on the page, which shows one run.
    ill.report(HEALTHY_STEPS)
    ill.report(ILL_STEPS, **ILL["learning-rate-too-high"])
    wait_for("a later one is told", lambda: all(places.standing("ill")[place] for place in PLACES if place != "page"))
    assert not any(places.ever("healthy").values())
    for job in (healthy, ill):
        job.close()
