"""Goal: a number that the job names itself goes the whole way.  By its name it is queried, exported and
imported again.  It survives restarts of the server, and of the job with other ranks.  What cannot be one
is left out, counted and said.

Method: bellwetherd and clients that say every value; the server is killed in between.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / room) for room in ("support", "python")]
from bellwether_process import ROOT, Server, wait_for

from bellwether.client import Block, OwnValues, RunClient, RunOptions


def loss(step: int) -> Block:
    return Block("loss", [2.0 + step % 3 / 1000])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running


def ranks_of(server: Server, world: int, attempt: int = 0) -> list[RunClient]:
    return [
        RunClient(RunOptions("own", layers=2, heads=2, rank=rank, world=world, attempt=attempt, server=server.grpc))
        for rank in range(world)
    ]


def numbers(rank: int, step: int) -> list[OwnValues]:
    """In another order on each rank."""
    of_rank = [
        OwnValues("train/kl", [step + rank], unit="nats", help="to the reference"),
        OwnValues("tokens_seen", [10.0], merge="sum"),
        OwnValues("longest", [100.0 * rank + step], merge="max"),
        OwnValues("router_z", [1.0, 2.0 + step], of="layer"),
        OwnValues("load", [step, 1.0, rank], of="expert", merge="sum", layer=1, head=4),
        OwnValues("wait", [rank + 0.5], of="rank", layer=rank),
    ]
    return of_rank if rank % 2 == 0 else of_rank[::-1]


def report(ranks: list[RunClient], steps: range) -> None:
    for step in steps:
        for rank, client in enumerate(ranks):
            assert client.push(step, [loss(step)], own=numbers(rank, step))
    for client in ranks:
        assert client.flush(30)


def await_own(server: Server, run: str, count: int) -> dict[str, Any]:
    """The run, once it is told that it has so many signals of its own."""

    def told() -> Any:
        found = server.call("GetRun", run=run)
        return found if len(found.get("own_signals", [])) == count else None

    return dict(wait_for(f"{run} has {count} own signals", told))


def await_step(server: Server, step: int, run: str = "own") -> None:
    wait_for(f"step {step} is told", lambda: int(server.call("GetRun", run=run)["step"]) == step)


def values(server: Server, signal: str, layer: int = 0, head: int = 0, run: str = "own") -> dict[int, float]:
    return server.series(run, signal, layer, head)


def test_own_numbers_go_the_whole_way(server: Server, tmp_path: Path) -> None:
    ranks = ranks_of(server, 2)
    report(ranks, range(20))
    await_own(server, "own", 6)
    await_step(server, 19)
    assert values(server, "train/kl") == {s: s + 0.5 for s in range(20)}
    assert values(server, "tokens_seen") == {s: 20 for s in range(20)}
    assert values(server, "longest") == {s: 100 + s for s in range(20)}
    assert values(server, "router_z", layer=1) == {s: 2 + s for s in range(20)}
    assert values(server, "load", layer=1, head=4) == {s: 2 * s for s in range(20)}
    assert values(server, "load", layer=1, head=6) == {s: 1 for s in range(20)}
    assert values(server, "wait", layer=1) == {s: 1.5 for s in range(20)}

    run = server.call("GetRun", run="own")
    assert {"train/kl", "load", "loss"} <= set(run["signals"]) and "own_mean" not in run["signals"]
    told = {signal["name"]: signal for signal in run["own_signals"]}
    assert told["train/kl"]["unit"] == "nats" and told["train/kl"]["help"] == "to the reference"
    assert (told["load"]["layers"], told["load"]["heads"]) == (2, 7)
    assert [told[name]["past"] for name in ("train/kl", "load")] == ["OWN_PAST_RISES", "OWN_PAST_UNSPECIFIED"]
    matrix = server.call("GetMatrix", run="own", signal="load", step=-1)
    assert (matrix["layers"], matrix["heads"], int(matrix["step"])) == (2, 7, 19)
    top = server.call("TopHeads", run="own", signal="load", limit=2, step=-1)["heads"]
    assert [head["name"] for head in top] == ["load[1,4]", "load[1,5]"]

    # Killed, and the job comes back with another number of ranks.
    server.kill()
    server.start()
    for client in ranks:
        assert client.flush(30)
        client.close()
    report(ranks_of(server, 3, attempt=1), range(20, 40))
    await_step(server, 39)
    kl = values(server, "train/kl")
    assert len(kl) == 40 and kl[5] == 5.5 and kl[39] == 40.0
    assert values(server, "wait", layer=2) == {s: 2.5 for s in range(20, 40)}
    assert values(server, "tokens_seen")[39] == 30

    # A recording has all of it, and another server makes the same of it.
    recording = tmp_path / "own.bwrun"
    server.run("run", "export", "own", str(recording))
    server.run("run", "import", str(recording), "--name", "again")
    again = await_own(server, "again", 6)
    await_step(server, 39, "again")
    for signal, layer, head in (("train/kl", 0, 0), ("load", 1, 4), ("wait", 2, 0), ("router_z", 1, 0)):
        assert values(server, signal, layer, head, "again") == values(server, signal, layer, head), signal
    assert {s["name"]: s.get("unit") for s in again["own_signals"]} == {s["name"]: s.get("unit") for s in told.values()}


def test_the_command_shows_them(server: Server) -> None:
    ranks = ranks_of(server, 1)
    report(ranks, range(5))
    await_own(server, "own", 6)
    await_step(server, 4)
    csv = server.run("series", "get", "own", "train/kl", "load:1:4", "-o", "csv").splitlines()
    assert len(csv) == 1 + 2 * 5, csv
    top = server.run("head", "top", "own", "--signal", "load", "-o", "csv").splitlines()
    assert top[1].startswith("1,4,4"), top
    assert "train/kl" in server.run("run", "get", "own", "-o", "json")
    ranks[0].close()


def test_prometheus_has_them_by_their_names(server: Server) -> None:
    client = ranks_of(server, 1)[0]
    share = [OwnValues("share", [float(expert) for expert in range(20)], of="expert", head=0)]
    for step in range(3):
        assert client.push(step, [loss(step)], own=numbers(0, step) + share)
    assert client.flush(30)
    await_step(server, 2)
    page = server.get("/metrics")
    assert 'bellwether_own_value{run="own",signal="train/kl",row="train/kl"} 2' in page
    assert 'bellwether_own_value{run="own",signal="router_z",row="router_z[1]"} 4' in page
    assert 'bellwether_own_value{run="own",signal="share",row="share[0,19]"} 19' in page
    assert page.count('signal="share",row=') == 8, "of one signal, eight cells"
    assert server.metric('bellwether_run_own_left_out{run="own"}') == 20 - 8
    client.close()


RULES = """
thresholds: {context: {warmup_steps: 0}}
rules:
  - {name: kl_too_large, signal: own_mean, rows: train/kl, detector: level, stage: 5, severity: warning, above: 3, batch_steps: 2, hold_batches: 2}
  - {name: seen_too_few, signal: tokens_seen, detector: level, stage: 5, severity: warning, below: 11, batch_steps: 2, hold_batches: 2}
  - {name: expert_starves, signal: load, rows: 'load[1,*', scope: row, detector: level, stage: 5, severity: warning, below: 0.5, batch_steps: 2, hold_batches: 2}
"""


def test_own_rules_judge_them_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(RULES)
    with Server(tmp_path, "rules_file: rules.yml\n") as server:
        ranks = ranks_of(server, 1)
        report(ranks, range(120))  # Its kl rises by 1 a step; one expert never has a token.

        def found() -> Any:
            alerts = [alert["last"] for alert in server.call("ListAlerts", run="own", limit=100).get("alerts", [])]
            by_rule = {alert["rule"]: alert for alert in alerts}
            return by_rule if {"kl_too_large", "expert_starves", "seen_too_few"} <= set(by_rule) else None

        alerts = wait_for("the rules have fired", found)
        assert "train/kl" in str(alerts["kl_too_large"])
        assert "load[1,6]" in str(alerts["expert_starves"]) and "load[1,5]" not in str(alerts["expert_starves"])
        assert "tokens_seen 10 (limit 11)" in str(alerts["seen_too_few"])
        ranks[0].close()


# Rule of the shipped file, a name of TRL's or verl's, what is healthy and what is not.
COLLAPSES = (
    ("reward_fell", "reward", 1.0, 0.1),
    ("kl_jumped", "kl", 0.1, 5.0),
    ("entropy_fell", "entropy", 2.0, 0.1),
    ("router_z_jumped", "router_z", 1.0, 50.0),
    ("rewards_fell", "rewards/accuracy/mean", 0.8, 0.1),
    ("score_fell", "critic/score/mean", 1.0, 0.1),
    ("scores_fell", "objective/scores", 1.0, 0.1),
    ("rlhf_reward_fell", "objective/rlhf_reward", 1.0, 0.1),
    ("accuracies_fell", "rewards/accuracies", 0.8, 0.1),
    ("margins_fell", "rewards/margins", 1.0, 0.1),
    ("reward_spread_fell", "reward_std", 0.5, 0.0),
    ("clipping_is_large", "clip_ratio/region_mean", 0.1, 0.9),
    ("clipped_share_is_large", "actor/pg_clipfrac", 0.1, 0.9),
    ("balance_loss_jumped", "aux_loss", 1.0, 50.0),
    ("load_balancing_jumped", "load_balancing_loss", 1.0, 50.0),
    ("rollout_kl_jumped", "rollout_corr/k3_kl", 0.1, 5.0),
    ("rollout_chi2_jumped", "rollout_corr/chi2_token", 0.1, 10.0),
    ("rollout_samples_fell", "rollout_corr/rollout_is_eff_sample_size", 0.9, 0.05),
    ("rollout_ess_fell", "rollout_corr/ess", 0.9, 0.05),
)


def test_the_shipped_rules_know_the_names_of_the_field(tmp_path: Path) -> None:
    noise = random.Random(30)
    shipped, collapse, end = ROOT / "deploy/rules/own_signals.yml", 2000, 2120
    with Server(tmp_path, f"rules_file: {shipped}\n") as server:
        (client,) = ranks_of(server, 1)
        for step in range(end):
            pairs = [(name, wrong if step >= collapse else good) for _, name, good, wrong in COLLAPSES]
            own = [OwnValues(name, [value * (1 + 0.2 * noise.gauss(0, 1))]) for name, value in pairs]
            # A clip ratio that is seldom not 0 is none that jumps.
            own.append(OwnValues("clip_ratio/low_mean", [1e-3 if noise.random() < 0.01 else 0.0]))
            wait_for("there is room for a frame", lambda own=own, step=step: client.push(step, [loss(step)], own=own))
        assert client.flush(30)
        wanted = {rule for rule, *_ in COLLAPSES}

        def found() -> Any:
            alerts = [alert["last"] for alert in server.call("ListAlerts", run="own", limit=100).get("alerts", [])]
            by_rule = {alert["rule"]: alert for alert in alerts}
            return by_rule if wanted <= set(by_rule) else None

        alerts = wait_for("all have fired", found)
        assert set(alerts) == wanted | {"own"}
        for rule, name, *_ in COLLAPSES:
            assert name in str(alerts[rule]) and int(alerts[rule]["step"]) >= collapse, alerts[rule]
            assert "low_mean" not in str(alerts[rule])
        client.close()


def test_two_runs_are_compared_by_own_signals(server: Server) -> None:
    for run, factor in (("base", 1.0), ("changed", 8.0)):
        with RunClient(RunOptions(run, layers=2, heads=2, server=server.grpc)) as client:
            for step in range(64):
                reward = (2 + step % 3) * (factor if step >= 40 else 1)
                own = [OwnValues("reward", [reward]), OwnValues("load", [1.0, 1.0, reward], of="layer")]
                assert client.push(step, [loss(step)], own=own if run == "base" else own[::-1])
            assert client.push(64, [loss(64)], own=[OwnValues(f"only_{run}", [1.0])])
            assert client.flush(30)
        await_step(server, 64, run)
    for signal, layer in (("reward", 0), ("load", 2)):
        compared = server.call("CompareRuns", run="changed", baseline="base", signal=signal)
        (worst,) = [head for head in compared["heads"] if int(head["first_step"]) >= 0]
        assert (int(worst["first_step"]), worst["ratio"], worst.get("layer", 0)) == (40, 3, layer), signal
    with pytest.raises(Exception, match="has none of that name"):
        server.call("CompareRuns", run="base", baseline="changed", signal="only_base")


def test_with_no_rules_file_what_is_wrong_is_told(server: Server) -> None:
    client = ranks_of(server, 1)[0]
    for step in range(40):
        kl = OwnValues("kl", [math.inf if step >= 20 else 0.1])
        share = OwnValues("clip_share", [1.5 if step >= 30 else 0.5], low=0.0, high=1.0)
        assert client.push(step, [loss(step)], own=[kl, share])
    assert client.flush(30)

    def told() -> Any:
        alerts = server.call("ListAlerts", run="own").get("alerts", [])
        return alerts if alerts and "clip_share" in alerts[0]["last"]["summary"] else None

    (alert,) = wait_for("the alert is told again", told)
    history = server.call("GetAlert", run="own", key=alert["last"]["key"])["alert"]["history"]
    assert [(entry["rule"], entry["summary"]) for entry in history] == [
        ("own", "own: kl is inf at step 20, after finite values."),
        ("own", "own: clip_share is 1.5 at step 30, above its high limit of 1; also wrong: kl."),
    ]
    assert alert["last"]["severity"] == "SEVERITY_WARNING"
    assert "clip_share is 1.5" in server.run("alert", "list", "--run", "own", "-o", "json")
    client.close()


def refused(server: Server, cause: str) -> float:
    return server.metric(f'bellwether_ingest_own_values_refused_total{{cause="{cause}"}}')


def test_a_number_that_is_refused_costs_no_other(server: Server) -> None:
    first, second = ranks_of(server, 2)
    assert first.push(0, [loss(0)], own=[OwnValues("kl", [1.0], unit="nats")])
    assert first.flush(30)
    await_own(server, "own", 1)
    assert second.push(0, [loss(0)], own=[OwnValues("kl", [1.0], merge="sum"), OwnValues("reward", [3.0])])
    assert second.push(1, [loss(1)], own=[OwnValues("kl", [1.0], unit="bits"), OwnValues("kl", [1.0, 2.0], of="layer")])
    many = [OwnValues(f"s{i}", [float(i)]) for i in range(300)]
    assert second.push(2, [loss(2)], own=many) and first.push(2, [loss(2)])
    assert first.push(1, [loss(1)]) is True
    assert first.flush(30) and second.flush(30)
    await_own(server, "own", 256)
    await_step(server, 2)
    assert refused(server, "disagrees") == 1 + 1 + 2
    assert refused(server, "signals") == 300 - 254
    assert values(server, "reward") == {0: 3.0} and values(server, "s9") == {2: 9.0}
    events = [event["text"] for event in server.call("ListEvents", run="own")["events"]]
    assert sum("own signal kl: " in text for text in events) == 1, "each cause is said once"
    assert any("merge is sum, and was mean before" in text for text in events)
    assert any("at most 256 own signals" in text for text in events)
    for client in (first, second):
        client.close()


def test_a_job_logs_them_by_their_names(server: Server) -> None:
    torch = pytest.importorskip("torch")
    import bellwether

    from models import Model, Shape, batch

    shape = Shape(layers=2)
    model = Model(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = bellwether.attach(model, server=server.grpc, run="job", every=5)
    for step in range(12):
        model(batch(shape, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log({"Reward": torch.tensor(float(step)), "kl": math.nan if step == 7 else 0.5})
        monitor.log("router_z", torch.arange(4.0), layer=1, of="expert")
    assert monitor.flush(30)
    monitor.detach()
    server.await_end("job")
    await_own(server, "job", 3)
    assert values(server, "reward", run="job") == {s: float(s) for s in range(12)}
    kl: dict[int, Any] = values(server, "kl", run="job")
    assert math.isnan(kl[7]) and kl[8] == 0.5
    assert values(server, "router_z", 1, 3, "job")[11] == 3.0
