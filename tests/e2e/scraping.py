"""A trainer whose every value a test says, and a real Prometheus that scrapes a server."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, free_port, wait_for

from bellwether.client import Block, OwnValues, RunClient, RunOptions

DASHBOARDS = ROOT / "dashboards"
LAYERS = HEADS = 4
EVERY = 10  # Steps between two frames.
SICK = (1, 0)
TENSOR, MODULE = 7, 8  # Of the granularities.
HEAD_SIGNALS = {
    "rows": 1024.0, "common_mode_sum": 1024.0, "spread_sum": 1024.0, "key_leak_sum": 1e-4, "key_gradient_sum": 1.0,
    "tied_rows_bf16": 50.0, "logit_max": 9.0, "entropy_sum": 512.0, "delta_bias_sum": 0.01, "delta_bias_sumsq": 1e-3, "wq_sigma": 2.0,
    "law_a3": 0.1, "law_a3_variance": 1.0, "law_a3_alike": 0.0, "law_a4": 0.1, "law_a4_variance": 1.0, "law_a4_alike": 0.0,
    **{f"shadow_{tensor}_{of}": value for tensor in ("o", "dq", "dk", "dv") for of, value in (("rest", 0.5), ("variance", 1.0), ("variance_sq", 0.01), ("factor", 20.0), ("factor_variance", 1e6), ("factor_alike", 0.0))},
}  # fmt: skip
# What a run tells beside, where its job measures it.
STEPS = {
    "moment_lag_max": 0.9, "grad_saturated": 2.0, "loss_max": 2.1, "grad_norm_max": 1.2, "skipped_steps": 1.0, "loss_scale": 65536.0,
    "clip_factor": 0.8, "data_seconds": 1e-3, "forward_seconds": 3e-3, "backward_seconds": 5e-3, "optimizer_seconds": 1e-3,
    "data_share": 0.1, "memory_allocated": 2e9, "memory_peak": 3e9,
}  # fmt: skip
SEQUENCES = {"loss_sequence_max": 3.0, "loss_microbatch_max": 2.2, "loss_tokens": 4000.0, "loss_repeated_tokens": 80.0}
POLICY = {"reward": 1.0, "kl": 0.01, "entropy": 2.0}
RUN_SIGNALS = {"loss": 2.0, "grad_norm": 1.0, "tokens": 4096.0, "step_seconds": 0.01, "hook_seconds": 1e-5}


class Trainer:
    """A rank that reports the values above, but for what is said at each step."""

    def __init__(self, server: Server, run: str, without: tuple[str, ...] = (), **options: int) -> None:
        self._client = RunClient(RunOptions(run=run, layers=LAYERS, heads=HEADS, score_dtype="bf16", server=server.grpc, **options))
        self._without = without
        self._rank = options.get("rank", 0)
        self._random = random.Random(run)
        self._named = False  # The one row of its modules.
        self._parameters = False  # Its two have names.
        self.step = 0

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def report(self, **unusual: float) -> None:
        """One frame.  A value of a head signal is the sick head's, law_difference that of lm_head, of which a size is told
        with it.  tensor_moved is that of one of two parameters, as tensor_grad_sumsq.  expert_load is that of one of two
        experts of each layer; clip_share, of at most 1, and those of POLICY are the job's own."""
        blocks = []
        for name, usual in RUN_SIGNALS.items():
            blocks.append(Block(name, [unusual.get(name, usual * self._random.uniform(0.98, 1.02))]))
        for name, usual in HEAD_SIGNALS.items():
            if name in self._without:
                continue
            values = [usual] * (LAYERS * HEADS)
            values[SICK[0] * HEADS + SICK[1]] = unusual.get(name, usual)
            blocks.append(Block(name, values, 0, LAYERS, 0, HEADS))
        if "law_difference" in unusual:
            if not self._named:
                self._named = self._client.push_names(MODULE, ["lm_head dx=dW"]) == 1
            of_module = {"law_difference": unusual["law_difference"], "law_variance": 1.0, "module_elements": 64.0, "module_sumsq": 64.0, "module_top_sumsq": 8.0}  # fmt: skip
            blocks += [Block(name, [value], 0, 1) for name, value in of_module.items()]
        if "tensor_moved" in unusual:
            if not self._parameters:
                self._parameters = self._client.push_names(TENSOR, ["embed", "head"]) == 2
            blocks += [Block("tensor_moved", [1.0, unusual["tensor_moved"]], 0, 2)]
            blocks += [Block(name, [1.0, 1.0], 0, 2) for name in ("tensor_elements", "tensor_grad_max", "tensor_change_sumsq", "tensor_change_weight_sumsq")]
            blocks.append(Block("tensor_grad_sumsq", [1.0, unusual.get("tensor_grad_sumsq", 1.0)], 0, 2))
        if "expert_load" in unusual:
            load = unusual["expert_load"]
            blocks += [Block("expert_load", [load, 100.0] * LAYERS, 0, LAYERS, 0, 2), Block("expert_dead", [float(load == 0), 0.0] * LAYERS, 0, LAYERS, 0, 2)]
            layers = {"expert_ideal_load": (load + 100) / 2, "expert_largest_load": max(load, 100.0), "router_entropy_sum": 60.0, "router_entropy_largest_sum": 69.0, "router_logit_max": 3.0}  # fmt: skip
            blocks += [Block(name, [value] * LAYERS, 0, LAYERS) for name, value in layers.items()]
        blocks += [Block(name, [unusual[name] * self._random.uniform(0.98, 1.02)]) for name in (*STEPS, *SEQUENCES) if name in unusual]
        if "rank_grad_norm" in unusual:
            blocks.append(Block("rank_grad_norm", [unusual["rank_grad_norm"]], self._rank))
        own = [OwnValues("clip_share", [unusual["clip_share"]], high=1.0)] if "clip_share" in unusual else []
        own += [OwnValues(name, [unusual[name]]) for name in POLICY if name in unusual]
        assert self._client.push(self.step, blocks, own=own)
        self.step += EVERY
        if self.step % 500 == 0:
            assert self._client.flush(20)

    def drift(self) -> None:
        """The sick head's drift ratio doubles every 500 steps; all else that a run can tell is healthy."""
        self.report(common_mode_sum=1024 * 2 ** (self.step / 500), law_difference=0.5, tensor_moved=1.0, expert_load=100.0, rank_grad_norm=1.0, **STEPS, **SEQUENCES, **POLICY)


class Prometheus:
    def __init__(self, folder: Path, target: str, alertmanager: str = "", rules: Path = DASHBOARDS / "alerts/rules.yml") -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._log = folder / "prometheus.log"
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{rules}]\n"
            "scrape_configs:\n- job_name: bellwether\n  sample_limit: 50000\n  label_limit: 20\n  label_value_length_limit: 200\n"
            f"  static_configs: [{{targets: ['{target}']}}]\n"
            f"alerting: {{alertmanagers: [{{static_configs: [{{targets: [{alertmanager}]}}]}}]}}\n"
        )
        program = shutil.which("prometheus")
        assert program, "Debian's package prometheus is missing"
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={self.address}"]
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen([program, *flags], stderr=log)

    def get(self, path: str, **query: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            return bool(self.get("targets")["activeTargets"])
        except OSError:
            return False

    def has(self, expr: str) -> bool:
        """Whether a query gives at least one number."""
        return any(not math.isnan(float(found["value"][1])) for found in self.get("query", query=expr)["result"])


@contextmanager
def prometheus_of(server: Server, folder: Path, **options: Any) -> Iterator[Prometheus]:
    prometheus = Prometheus(folder, server.http, **options)
    try:
        wait_for("Prometheus is ready", prometheus.is_ready, 60)
        yield prometheus
    finally:
        prometheus.process.terminate()
        prometheus.process.wait(60)
