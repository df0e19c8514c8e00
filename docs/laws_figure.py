#!/usr/bin/env python3
"""Measures and draws the figure of docs/concepts/laws.md, on the CPU.

    python docs/laws_figure.py                  # into docs/images/laws.png, two to four minutes

Above: z of each law, for all healthy kernels of doctor --kernels, beside a normal distribution.
Below: the largest z of each law, and the largest excess in the shadow check, for planted faults.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "client_lib" / "python"), str(ROOT / "tests" / "python")]
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

from bellwether._laws.attention import LAWS, laws  # noqa: E402
from bellwether._laws.judge import Limits  # noqa: E402
from bellwether._laws.reference import reference  # noqa: E402
from bellwether._laws.shadow import shadow  # noqa: E402
from bellwether.tools.kernel_backends import Kernel, kernels  # noqa: E402
from bellwether.tools.kernel_cases import Case, Shape, make  # noqa: E402
from bellwether.tools.kernel_check import graded  # noqa: E402

from planted_kernels import FAULTS, planted  # noqa: E402

CPU = torch.device("cpu")
TENSORS = ("o", "dq", "dk", "dv")


def healthy(questions: int) -> tuple[dict[tuple[str, str], list[float]], int]:
    """z by law and kind of values, from so many questions or a few more."""
    found: dict[tuple[str, str], list[float]] = {}
    asked = 0
    tried = [k for k in kernels(CPU) if k.name != "torch flex"]
    seed = 0
    while asked < questions:
        for values in ("normal", "peaked", "broad"):
            for dtype in (torch.bfloat16, torch.float16):
                dim = (32, 64, 128, 256)[seed % 4]
                shape = Shape(8, (8, 4, 2)[seed % 3], dim, dtype, 97 + seed % 64, seed % 2 == 0)
                case = Case(values, shape, batch=4, values=values)
                inputs = make(case, CPU, seed)
                for kernel in tried:
                    call = graded(kernel, inputs)
                    for name, law in laws(call, reference(call)).items():
                        z = law.z().flatten().tolist()
                        found.setdefault((name, values), []).extend(z)
                        asked += len(z)
        seed += 1
        print(f"seed {seed}: {asked} questions", flush=True)
    return found, asked


def faulty(fault: str) -> dict[str, float]:
    """The largest z of each law, and sqrt of the largest excess of each tensor."""
    function = planted(fault)

    def run(inputs: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = function(q, k, v, inputs.mask, inputs.causal)
        return result

    call = graded(Kernel(fault, run, ""), make(Case("normal", Shape(tokens=141), batch=2), CPU))
    if fault == "nan_in_a_head_of_dq":  # Counted, not summed.
        call = dataclasses.replace(call, dq=call.dq.nan_to_num(0.0))
    known = reference(call)
    values = {name: float(law.z().abs().max()) for name, law in laws(call, known).items()}
    for name, of in shadow(call, known).items():
        values[name] = float(of.excess.max()) ** 0.5
    return values


def draw(path: Path, questions: int) -> None:
    z, asked = healthy(questions)
    figure, axes = pyplot.subplots(2, 1, figsize=(8, 8.4), height_ratios=(1, 1.25))
    at = np.linspace(-8, 8, 161)
    for name in LAWS:
        values = np.concatenate([z[name, "normal"], z[name, "peaked"]])
        counts, edges = np.histogram(values, at, density=True)
        axes[0].step(edges[:-1], np.maximum(counts, 1e-7), where="post", label=name)
        rms, most = float(np.sqrt(np.mean(values**2))), float(np.abs(values).max())
        print(f"{name}: {len(values)} z, rms {rms:.2f}, largest {most:.2f}")
    broad = np.concatenate([z["A1", "broad"]])
    print(f"A1 broad: {len(broad)} z, largest {np.abs(broad).max():.2f}")
    axes[0].plot(at, np.exp(-(at**2) / 2) / np.sqrt(2 * np.pi), "k:", label="normal")
    axes[0].set(yscale="log", ylim=(1e-6, 2), xlabel="z, healthy kernels",
                title=f"{asked:,} questions to healthy kernels")  # fmt: skip
    axes[0].legend(loc="upper left", fontsize=8)
    names = [name for name in FAULTS if name != "nan_in_a_head_of_dq"]
    columns = (*LAWS, *TENSORS)
    rows = [faulty(name) for name in ("", *names)]
    cells = np.array([[row.get(column, np.nan) for column in columns] for row in rows])
    limit = Limits(10**7).z
    axes[1].imshow(np.log10(np.maximum(cells, 1) / limit), cmap="RdBu_r", vmin=-1.5, vmax=1.5,
                   aspect="auto")  # fmt: skip
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            axes[1].text(column, row, f"{value:.1f}" if value < 100 else f"{value:.0f}",
                         ha="center", va="center", fontsize=8)  # fmt: skip
    axes[1].set_xticks(range(len(columns)), columns)
    labels = ["no fault", *(name.replace("_", " ") for name in names)]
    axes[1].set_yticks(range(len(labels)), labels, fontsize=8)
    axes[1].set_title("planted faults: z of the laws; sqrt of excess of o, dq, dk, dv", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"{path}: {os.path.getsize(path) >> 10} KiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "laws.png")
    parser.add_argument("--questions", type=int, default=100_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw(given.out, given.questions)
