"""Goal: every query of the dashboards returns data from a real Prometheus that scrapes a real page.

Method: the test server with a failing run, a Prometheus on loopback with the
project's rules, and the queries as Grafana would send them. argv[1] is the folder
of the binaries. Exit code 77: prometheus is not installed.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {"$__rate_interval": "20s", "$__interval": "15s", "$run": "gpt2-small/bf16-fa2", "$layer": ".*"}
# Nothing restarts in this test.
MAY_BE_EMPTY = {"changes(bellwether_run_attempt"}
PATIENCE_S = 60


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def ask(port: int, path: str, **query: str) -> dict:  # type: ignore[type-arg]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return dict(json.load(answer))


def queries() -> list[tuple[str, str]]:
    found = []
    for path in sorted((ROOT / "dashboards/grafana").glob("*.json")):
        board = json.loads(path.read_text())
        found += [(f"{path.name}: {p['title']}", t["expr"]) for p in board["panels"] for t in p["targets"]]
        found += [(f"{path.name}: annotation {a['name']}", a["expr"]) for a in board["annotations"]["list"]]
    return found


def fill(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def main() -> int:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        print("prometheus is not installed")
        return 77
    wanted = {name: fill(expr) for name, expr in queries() if not any(expr.startswith(m) for m in MAY_BE_EMPTY)}
    wanted["planted: no such metric"] = "bellwether_no_such_metric"
    server = subprocess.Popen([f"{sys.argv[1]}/console_test_server", "--scenario=ill"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin and server.stdout
    target = json.loads(server.stdout.readline())["port"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{ROOT / 'dashboards/alerts/rules.yml'}]\n"
            "scrape_configs:\n- job_name: bellwether\n  sample_limit: 50000\n  label_limit: 20\n  label_value_length_limit: 200\n"
            f"  static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
        )
        port = free_port()
        watcher = subprocess.Popen(
            [prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        )
        missing = dict(wanted)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while len(missing) > 1 and time.monotonic() < deadline:
                server.stdin.write("step\n")
                server.stdin.flush()
                server.stdout.readline()
                try:
                    for name, expr in list(missing.items()):
                        if ask(port, "/api/v1/query", query=expr)["data"]["result"]:
                            del missing[name]
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.2)  # Prometheus is starting.
                time.sleep(0.2)
            targets = ask(port, "/api/v1/targets")["data"]["activeTargets"]
            rules = ask(port, "/api/v1/alerts")["data"]["alerts"]
        finally:
            watcher.terminate()
            watcher.wait(20)
            server.stdin.close()
            server.wait(20)
    failed = set(missing) - {"planted: no such metric"}
    if "planted: no such metric" not in missing:
        failed.add("a metric that does not exist has data")
    if [t["health"] for t in targets] != ["up"]:
        failed.add(f"target: {targets}")
    if not any(a["labels"]["alertname"] == "BellwetherDriftGrowing" and a["labels"].get("layer") == "1" for a in rules):
        failed.add(f"drift does not fire: {rules}")
    for name in sorted(failed):
        print(f"no data: {name}: {wanted.get(name, '')}")
    print(f"{len(wanted) - 1} queries, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
