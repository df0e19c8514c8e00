"""Draws a simulation: how full the partitions are, and how soon a killed server's runs go on."""

from __future__ import annotations

from pathlib import Path

from simulation import Kill, Spread


def draw(spread: Spread, kills: list[Kill], path: Path) -> None:
    """Needs matplotlib; the path's ending says the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8), dpi=110)
    runs = sorted(count for database in spread.partitions for count in database)
    mean = sum(runs) / len(runs)
    left.plot([i / len(runs) for i in range(len(runs))], [count / mean for count in runs])
    servers = sorted(spread.servers)
    mean = sum(servers) / len(servers)
    left.plot([i / len(servers) for i in range(len(servers))], [count / mean for count in servers])
    left.axhline(1, color="0.8", lw=0.8, zorder=0)
    left.legend(["partitions", "servers"], frameon=False)
    left.set_xlabel("part of all, emptiest first")
    left.set_ylabel("runs, mean = 1")
    for name, times in (
        ("has a new owner", [at for each in kills for at in each.owned_s]),
        ("is served again", [at for each in kills for at in each.served_s]),
        ("its sender is welcomed", [at for each in kills for at in each.welcomed_s]),
    ):
        times = sorted(times)
        right.plot(times, [(i + 1) / len(times) for i in range(len(times))], label=name)
    right.set_xlim(0, None)
    right.set_ylim(0, 1)
    right.set_xlabel("seconds since the kill")
    right.set_ylabel("part of the partitions, or runs")
    right.legend(frameon=False, loc="lower right")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
