"""How large a cluster must be, and what happens when a server of it dies.

    python3 deploy/sizing cost --runs 5000 --servers 8 --databases 2
    python3 deploy/sizing simulate --runs 100000 --servers 128 --databases 16 [--plot FILE]

docs/operate/sizing.md explains the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from pathlib import Path

from cost import Answer, Ceilings, Costs, Figure, Plan, answer
from simulation import Kill, Spread, Takeover, kill, quantile, spread


def tell_cost(found: Answer) -> str:
    plan, first = found.plan, found.first
    low, high = found.partitions
    lines = [
        f"{plan.runs} runs x {plan.ranks} ranks x {plan.frames:g} frames/s of {plan.frame_bytes} "
        f"bytes; {plan.servers} servers, {plan.databases} databases",
        "",
        "a database",
        f"  frames/s                  {found.frames:,.0f}",
        f"  commits/s                 {found.commits:,.0f}",
        f"  bytes/s of frames, packed {found.body_bytes:,.0f}",
        f"  bytes/s into its log      {found.wal_bytes:,.0f}  (to each standby, too)",
        f"  states saved /s           {found.saves:,.2f}",
        f"  lease renewals /s         {found.renewals:,.2f}  (looks: {found.looks:,.1f})",
        f"  connections               {found.connections}",
        f"  rows of the log a day     {found.rows_per_day:,.0f}",
        f"  disk, log of two days     {found.log_bytes / 1e9:,.1f} GB",
        f"  disk, series              {found.series_bytes / 1e9:,.1f} GB "
        f"after {plan.history_days} days",
        "a server",
        f"  partitions                {low}" + ("" if low == high else f" to {high}"),
        f"  runs                      {found.server_runs:,.0f}",
        f"  frames/s, values/s        {found.server_frames:,.0f}, {found.server_values:,.0f}",
        "",
        f"{'ceilings':44}{'use':>14}{'of':>14}",
    ]
    for use in sorted(found.uses, key=lambda use: -use.share):
        lines.append(
            f"  {use.name:42}{use.value:14,.2f}{use.ceiling:14,.2f}{use.share:8.0%}  {use.source}"
        )
    verdict = "is met first" if first.share <= 1 else "IS EXCEEDED"
    lines.append(f"{first.name} {verdict}: {first.share:.0%}")
    return "\n".join(lines)


def simulate(options: argparse.Namespace) -> tuple[Spread, list[Kill]]:
    """Each server of each database is killed once, in a cluster of its own."""
    takeover = Takeover(frames_behind=Takeover.frames_behind * options.frames)
    spread_ = spread(options.runs, options.servers, options.databases, options.seed)
    chance = random.Random(options.seed + 1)
    kills = []
    for counts, owner in zip(spread_.partitions, spread_.owners):
        for victim in sorted(set(owner)):
            for _ in range(options.kills):
                kills.append(
                    kill(counts, owner, victim, options.lease_seconds, takeover, chance, 100)
                )
    return spread_, kills


def summary(spread_: Spread, kills: list[Kill]) -> dict[str, float]:
    owned = [at for each in kills for at in each.owned_s]
    served = [at for each in kills for at in each.served_s]
    welcomed = [at for each in kills for at in each.welcomed_s]
    runs = sum(sum(database) for database in spread_.partitions)
    return {
        "runs": runs,
        "partition_max_over_mean": spread_.partition_imbalance,
        "server_max_over_mean": spread_.server_imbalance,
        "database_max_over_mean": spread_.database_imbalance,
        "kills": len(kills),
        "runs_moved_mean": statistics.mean(each.runs for each in kills),
        "runs_moved_max": max(each.runs for each in kills),
        "owned_s_p50": quantile(owned, 0.5),
        "owned_s_max": max(owned),
        "served_s_p50": quantile(served, 0.5),
        "served_s_p99": quantile(served, 0.99),
        "served_s_max": max(served),
        "welcomed_s_p50": quantile(welcomed, 0.5),
        "welcomed_s_p99": quantile(welcomed, 0.99),
        "takeover_mb_read_max": max(each.read_bytes for each in kills) / 1e6,
        "takeover_mb_per_second_max": max(each.read_bytes_per_second for each in kills) / 1e6,
    }


def given(kind: type[Costs] | type[Ceilings], pairs: list[str]) -> dict[str, Figure]:
    """NAME=VALUE of the fields of `kind`."""
    known = {each.name for each in dataclasses.fields(kind)}
    figures = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in known:
            continue
        figures[name] = Figure(float(text), "given")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="sizing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    cost = commands.add_parser("cost", help="load, disk and the ceiling that is met first")
    for each in dataclasses.fields(Plan):
        kind = float if each.type == "float" else int
        cost.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=each.default)
    names = [each.name for kind in (Costs, Ceilings) for each in dataclasses.fields(kind)]
    cost.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=", ".join(names)
    )
    cost.add_argument("--json", action="store_true")
    simulated = commands.add_parser("simulate", help="balance, and what a killed server moves")
    simulated.add_argument("--runs", type=int, default=100_000)
    simulated.add_argument("--frames", type=float, default=0.05, help="of a run, a second")
    simulated.add_argument("--servers", type=int, default=128)
    simulated.add_argument("--databases", type=int, default=16)
    simulated.add_argument("--lease-seconds", type=int, default=5)
    simulated.add_argument("--kills", type=int, default=10, help="of each server")
    simulated.add_argument("--seed", type=int, default=11)
    simulated.add_argument("--plot", type=Path, help="a picture; its ending says the format")
    options = parser.parse_args()
    try:
        if options.command == "cost":
            unknown = [pair for pair in options.set if pair.partition("=")[0] not in names]
            if unknown:
                raise ValueError(f"--set {unknown[0]}: known are {', '.join(names)}")
            plan = Plan(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Plan)})
            found = answer(
                plan, Costs(**given(Costs, options.set)), Ceilings(**given(Ceilings, options.set))
            )
            text = json.dumps(dataclasses.asdict(found)) if options.json else tell_cost(found)
            print(text)
            return 0
        spread_, kills = simulate(options)
        print(json.dumps({k: round(v, 3) for k, v in summary(spread_, kills).items()}, indent=1))
        if options.plot:
            from plot import draw

            draw(spread_, kills, options.plot)
    except (OSError, ValueError) as error:
        print(f"sizing: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
