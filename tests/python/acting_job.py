"""One of several processes that train a small model together and are asked to do things:
`acting_job.py FOLDER CASE`, with RANK, WORLD_SIZE and the address in the environment.  Writes what
each rank did, and when, into FOLDER/rankN.json."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bellwether
from bellwether._actions import agreement
from bellwether._hook import attention_switch

import parallel_job
from asking import action
from models import Model, Shape, batch

SHAPE = Shape(heads=4, kv_heads=2, dtype=torch.bfloat16)
ALLOW = "attention.mode,attention.center_k,lr.scale,qk.clip,checkpoint.now,stop"
KILLED_AT = 76  # Votes are confirmed from 64 on, and looked at from 80 on.
# Until the last of what is asked is answered, three rounds of 16 steps behind the one before.
STEPS = {"agrees": 230, "refuses": 150, "raises": 110, "killed": 150, "tp": 90, "not all": 40}


def plant(case: str, rank: int, monitor: Any, did: dict[str, Any]) -> None:
    """What goes differently on rank 1."""
    monitor.on_action("checkpoint.now", lambda a: did["saves"].append(a.step))
    if case == "refuses" and rank == 0:
        # (Rank 1 carries no stop out: its vote is no.)
        monitor.on_action("stop", lambda a: did["stops"].append(a.step))
    if case == "raises" and rank == 1:
        put = attention_switch.put

        def failing(module: Any, text: str) -> None:
            if text == "hp":
                raise RuntimeError("planted")
            put(module, text)

        attention_switch.put = failing


def asked(case: str, step: int) -> list[str]:
    """What rank 0 is handed before this step."""
    head = {"heads": [{"layer": 1, "head": 0}]}
    plans: dict[str, dict[int, list[str]]] = {
        "agrees": {
            20: [action("attention.center_k", value=1), action("lr.scale", value=0.5)],
            60: [action("qk.clip", value=0.25, scope=head), action("checkpoint.now")],
        },
        "refuses": {20: [action("stop"), action("attention.center_k", value=1)]},
        "raises": {20: [action("attention.mode", mode="hp")]},
        "killed": {20: [action("lr.scale", value=0.5)], 100: [action("lr.scale", value=0.25)]},
        "tp": {20: [action("qk.clip", value=0.25, scope={"heads": [{"layer": 1, "head": 3}]})]},
        "not all": {20: [action("attention.center_k", value=1), action("lr.scale", value=0.5)]},
    }
    return plans[case].get(step, [])


def key_norms(model: Model) -> list[list[float]]:
    """Of W_Q and W_K of the last layer, head by head of this process."""
    last = model.attentions()[-1]
    local = [getattr(last, name).weight.to_local().detach() for name in ("q_proj", "k_proj")]
    dim = parallel_job.SHAPE.dim
    return [w.unflatten(0, (-1, dim)).flatten(1).norm(dim=1).tolist() for w in local]


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # The others come in any case, or never.
    agreement.CONNECT_SECONDS = 1.0 if case == "not all" else 60.0
    torch.manual_seed(3)
    model = Model(SHAPE)
    run: nn.Module = model
    more: dict[str, Any] = {}
    if case == "tp":
        torch.manual_seed(3)
        model = Model(parallel_job.SHAPE, kind=parallel_job.Local)
        run, _ = parallel_job.tensor_parallel(model)
        more["foreach"] = False  # Takes no DTensors beside plain tensors.
    elif case != "killed":  # There the ranks train each for itself, so that one can go on.
        run = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **more)
    absent = case == "not all" and rank == 1
    monitor = bellwether.attach(
        run, record=str(folder / "r.bwrun"), run="ranks", every=10, rows=0, overhead_budget=1e9,
        allow=None if absent else ALLOW,
    )  # fmt: skip
    did: dict[str, Any] = {"saves": [], "stops": [], "words": [], "rates": [], "launch": []}
    did["norms"] = []
    plant(case, rank, monitor, did)
    longest = 0.0
    for step in range(STEPS[case]):
        if case == "killed" and step <= KILLED_AT:
            dist.barrier()
            if rank == 1 and step == KILLED_AT:
                os._exit(9)
        for payload in asked(case, step) if rank == 0 else ():
            monitor.actions.take(payload)
        if monitor.live():
            did["words"].append([attention_switch.of(m) for m in model.attentions()])
            did["rates"].append(monitor.actions.rate_factor())
        if case == "tp":
            did["norms"].append(key_norms(model))
        loss = run(batch(SHAPE, 2 * step + rank)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        began = time.perf_counter()
        monitor.step(loss=loss)
        if step:  # The first waits for the other ranks.
            longest = max(longest, time.perf_counter() - began)
        if monitor.actions.agreement is not None:
            did["launch"].append(monitor.actions.agreement.launch_seconds)
    did["longest"] = longest
    local = [getattr(p, "to_local", lambda p=p: p)().detach() for p in model.parameters()]
    did["weights"] = [float(p.double().sum()) for p in local]
    status = monitor.status()
    did["errors"], did["why_off"] = status["last_error"], monitor.why_off
    if monitor.live():
        did["actions"] = status["actions"]
        monitor.flush(20)
    monitor.detach()
    (folder / f"rank{rank}.json").write_text(json.dumps(did))
    if case != "killed":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # Not all ranks are there to say goodbye to.


if __name__ == "__main__":
    main()
