#!/usr/bin/env python3
"""Draws the figures of docs/paper.md: the paper's 2 to 7, 11 and 13, from our recorded runs.

    python docs/paper_figures.py                  # into docs/images/paper

It takes protoc and the Python packages of deploy/requirements-test.txt.  Figure 6 is arithmetic
and needs no run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import matplotlib
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "tests" / "support")]
matplotlib.use("Agg")
from compact_recording import protos  # noqa: E402
from matplotlib import pyplot  # noqa: E402

from recording import Recording  # noqa: E402

Array = NDArray[np.float64]
FAILING, LIVE, UNBIASED = "gpt-flash-s4", "gpt-live-flash-s4", "gpt-hp-s4"
LAYER = 1  # In which all of these runs fail.
SMOOTH = 25  # Samples of a running mean.


class Run:
    """A recording as arrays: NaN where a step has no such value."""

    def __init__(self, folder: Path, name: str) -> None:
        steps = Recording(folder / f"{name}.bwrun").steps()
        self.name = name
        self._samples = {step: values for step, values in sorted(steps.items())}

    def heads(self, signal: str) -> tuple[Array, Array]:
        """(steps [n], values [n, layers, heads]) of the steps that have it."""
        found = {s: v[signal] for s, v in self._samples.items() if signal in v}
        return np.array(list(found), float), np.array(list(found.values()), float)

    def scalar(self, signal: str) -> tuple[Array, Array]:
        steps, values = self.heads(signal)
        return steps, values[:, 0, 0]

    def ratio(self, above: str, below: str) -> tuple[Array, Array]:
        steps, values = self.heads(above)
        under = {s: v[below] for s, v in self._samples.items() if below in v}
        return steps, values / np.array([under[int(s)] for s in steps], float)


def smooth(values: Array) -> Array:
    """Means over the last SMOOTH samples, or as many as there are."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - SMOOTH)
    result: Array = (sums[ends] - sums[begins]) / (ends - begins)
    return result


def round_to_bf16(values: Array) -> Array:
    """To the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    near = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    result: Array = (near & np.uint32(0xFFFF0000)).view(np.float32).astype(float)
    return result


# ---- one function a figure; each gets the runs and the axes ----


def figure_2(run: Callable[[str], Run], axes: Sequence[Any]) -> None:
    for name, label in ((FAILING, "FlashAttention 2, bf16"), (UNBIASED, "unbiased delta (hp)")):
        steps, loss = run(name).scalar("loss")
        axes[0].plot(steps, smooth(loss), lw=1, label=label)
    axes[0].set(xlabel="step", ylabel="training loss", ylim=(1, 8), xlim=(0, 13000))
    axes[0].legend(fontsize=8)


def figure_3(run: Callable[[str], Run], axes: Sequence[Any]) -> None:
    steps, sigma = run(LIVE).heads("wq_sigma")
    last = sigma[-1]
    for layer in range(last.shape[0]):
        at = np.arange(last.shape[1]) + layer * (last.shape[1] + 1)
        axes[0].bar(at, last[layer], color=f"C{layer}", label=f"layer {layer}")
    axes[0].set(ylabel=f"sigma(W_Q) at step {steps[-1]:.0f}", xlabel="head, layer by layer")
    axes[0].set_xticks([])
    axes[0].legend(fontsize=8)


def figure_4(run: Callable[[str], Run], axes: Sequence[Any]) -> None:
    parts = (
        ("key_coherence_sum", "sequences", "share of the mean key"),
        ("wq_direction_overlap", None, "overlap of W_Q's first\ndirection with the last sample's"),
        ("wq_stable_rank", None, "stable rank of W_Q"),
    )
    for axis, (signal, below, label) in zip(axes, parts):
        live = run(LIVE)
        steps, values = live.ratio(signal, below) if below else live.heads(signal)
        rest = np.delete(values, LAYER, axis=1).reshape(len(steps), -1)
        low, high = np.nanquantile(rest, 0.1, axis=1), np.nanquantile(rest, 0.9, axis=1)
        axis.fill_between(steps, low, high, alpha=0.25, color="C0", label="other layers, 10-90 %")
        axis.plot(steps, values[:, LAYER], lw=0.8, color="C3")
        axis.set(xlabel="step", ylabel=label)
    axes[0].plot([], [], color="C3", label=f"heads of layer {LAYER}")
    axes[0].legend(fontsize=8)


def figure_5(run: Callable[[str], Run], axes: Sequence[Any]) -> None:
    steps, bias = run(FAILING).heads("delta_bias_sum")
    shown = steps < 4000  # Up to the explosion: behind it all scales change.
    for layer in range(bias.shape[1]):
        sums = bias[shown, layer].sum(axis=1)
        so_far, noise = np.cumsum(sums), np.sqrt(np.cumsum(sums**2))
        axes[0].plot(steps[shown], 1e3 * so_far, lw=1, color=f"C{layer}", label=f"layer {layer}")
        axes[1].plot(steps[shown], so_far / noise, lw=1, color=f"C{layer}")
    axes[0].set(xlabel="step", ylabel="sum of delta_lp - delta_hp\nover the samples so far, 1e-3")
    axes[0].legend(fontsize=8)
    axes[1].set(xlabel="step", ylabel="the same over the root of the\nsamples' sum of squares")


def figure_6(run: Callable[[str], Run], axes: Sequence[Any]) -> None:
    draws, tokens = 2000, 64
    generator = np.random.default_rng(0)
    # A feature of V that is negative nearly everywhere, and small probabilities but for some ones.
    v = round_to_bf16(generator.normal(-2.3, 0.4, (draws, tokens)))
    for ones, color in ((1, "C0"), (2, "C3"), (3, "C1")):
        p = round_to_bf16(np.exp(generator.uniform(-16, -10, (draws, tokens))))
        at = np.arange(1, ones + 1) * tokens // (ones + 1)
        p[:, at] = 1.0
        exact = np.cumsum(p * v, axis=1)
        error = (round_to_bf16(exact) - exact).mean(axis=0)
        axes[0].plot(error, lw=1.2, color=color, label=f"P = 1 at {ones} of {tokens} keys")
        axes[1].hist((round_to_bf16(exact) - exact)[:, -1], bins=60, color=color, alpha=0.5)
    axes[0].axhline(0, color="0.7", lw=0.8)
    axes[0].set(xlabel="keys summed up so far", ylabel="mean rounding error of (P V)")
    axes[0].legend(fontsize=8)
    axes[1].axvline(0, color="0.7", lw=0.8)
    axes[1].set(xlabel="rounding error of the finished sum", ylabel="rows of 2,000")


def figure_7(run: Callable[[str], Run], axes: Sequence[Any]) -> None:
    shown = (
        (FAILING, "FlashAttention 2"),
        ("gpt-center-s4", "keys centred from step 0"),
        (UNBIASED, "hp from step 0"),
        ("gpt-flash-center-at-4000-s4", "keys centred from step 4,000"),
        ("gpt-flash-hp-at-sigma30-s4", "hp once sigma passes 30"),
    )
    for name, label in shown:
        steps, loss = run(name).scalar("loss")
        axes[0].plot(steps, smooth(loss), lw=1, label=label)
        steps, sigma = run(name).heads("wq_sigma")
        axes[1].plot(steps, np.nanmax(sigma, axis=(1, 2)), lw=1)
    axes[0].set(xlabel="step", ylabel="training loss", ylim=(1, 4), xlim=(0, 14000))
    axes[0].legend(fontsize=8)
    axes[1].set(xlabel="step", ylabel="sigma(W_Q), worst head", yscale="log", xlim=(0, 14000))


def figure_11(run: Callable[[str], Run], axes: Sequence[Any]) -> None:
    steps, sigma = run(FAILING).heads("wq_sigma")
    for layer in range(sigma.shape[1]):
        worst = np.nanmax(sigma[:, layer], axis=1)
        axes[0].plot(steps, worst, lw=1.2 if layer == LAYER else 0.8, label=f"layer {layer}")
    axes[0].set(xlabel="step", ylabel="sigma(W_Q), worst head of the layer", yscale="log")
    axes[0].legend(fontsize=8)


def figure_13(run: Callable[[str], Run], axes: Sequence[Any]) -> None:
    steps, ties = run(FAILING).ratio("tied_rows_bf16", "rows")
    axes[0].plot(steps, smooth(np.nanmax(ties[:, LAYER], axis=1)), color="C3", lw=1)
    axes[0].set(xlabel="step", ylim=(0, 1))
    axes[0].set_ylabel(f"rows with repeated maxima,\nworst head of layer {LAYER}", color="C3")
    steps, common = run(FAILING).ratio("common_mode_sum", "spread_sum")
    other = axes[0].twinx()
    other.plot(steps, np.nanmax(common[:, LAYER], axis=1), color="C0", lw=0.8, alpha=0.6)
    other.set_ylabel("drift ratio, worst head", color="C0")
    other.set_yscale("log")
    steps, loss = run(FAILING).scalar("loss")
    axes[1].plot(steps, smooth(loss), color="black", lw=1)
    axes[1].set(xlabel="step", ylabel="training loss", ylim=(1, 8))


#            number -> what draws it, axes side by side
FIGURES: dict[int, tuple[Callable[[Callable[[str], Run], Sequence[Any]], None], int]] = {
    2: (figure_2, 1),
    3: (figure_3, 1),
    4: (figure_4, 3),
    5: (figure_5, 2),
    6: (figure_6, 2),
    7: (figure_7, 2),
    11: (figure_11, 1),
    13: (figure_13, 2),
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "tests" / "testdata" / "runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "paper")
    parser.add_argument("--figure", type=int, action="append", choices=FIGURES, help="only these")
    args = parser.parse_args(argv)
    protos()
    args.out.mkdir(parents=True, exist_ok=True)
    known: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in known:
            known[name] = Run(args.runs, name)
        return known[name]

    for number in args.figure or FIGURES:
        draw, count = FIGURES[number]
        figure, axes = pyplot.subplots(
            1, count, figsize=(4 + 3.6 * count, 3.2), dpi=80, squeeze=False, layout="constrained"
        )
        draw(run, list(axes[0]))
        path = args.out / f"figure-{number}.png"
        figure.savefig(path)
        pyplot.close(figure)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
