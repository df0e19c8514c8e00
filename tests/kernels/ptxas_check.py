#!/usr/bin/env python3
"""Goal: no CUDA kernel of the build spills a register, none has its wgmma pipeline serialised,
and there are few enough of them to compile in minutes.

Method: gives the build's own compile commands once more and reads what ptxas -v says; ccache
has the answers of the build that just ran.  What was not built (./check builds one of each
family) is left out and counted.  Needs nvcc, no GPU.  A planted kernel that must
spill shows that the check sees spills.

    ptxas_check.py BUILD_FOLDER
"""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

# Each takes a second of one core: a template parameter more has to be worth it.  The portable
# path counts twice, for compute capability 8.0 and 9.0.
KERNELS_MAX = 840
SPILLING = """
__global__ void __launch_bounds__(1024) Spill(float* p) {
  float x[200];
#pragma unroll
  for (int i = 0; i < 200; ++i) x[i] = p[i * 1024 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 200; ++i) p[threadIdx.x * 200 + (i * 7) % 200] = x[i] * x[199 - i];
}
"""


def compile_commands(build: str) -> dict[str, list[str]]:
    """How the build compiles each CUDA source of kernels/, by object."""
    listed = subprocess.check_output(["ninja", "-C", build, "-t", "commands", "all"], text=True)
    commands = (shlex.split(line) for line in listed.splitlines() if re.search(r"-x cu -c \S*/kernels/\S+\.cu\b", line))
    return {command[command.index("-o") + 1]: command for command in commands}


def report(command: list[str], build: str) -> str:
    """What ptxas says when the command runs."""
    done = subprocess.run(command, cwd=build, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def planted(command: list[str], build: str) -> str:
    """What ptxas says of a kernel that spills, under the flags of `command`."""
    with tempfile.TemporaryDirectory() as work:
        source = pathlib.Path(work) / "spill.cu"
        source.write_text(SPILLING)
        changed = command.copy()
        changed[changed.index("-c") + 1] = str(source)
        changed[changed.index("-o") + 1] = f"{work}/spill.o"
        changed[changed.index("-MF") + 1] = f"{work}/spill.d"
        return report(changed, build)


def complaints(text: str) -> list[str]:
    spills = [line.strip() for line in text.splitlines()
              if "bytes spill" in line
              and not re.search(r"\b0 bytes spill stores, 0 bytes spill loads", line)]
    return spills + re.findall(r"\(C75\d\d\).{0,120}", text)


def main() -> int:
    build = sys.argv[1]
    listed = compile_commands(build)
    commands = {built: command for built, command in listed.items() if pathlib.Path(build, built).exists()}
    if not commands:
        print(f"{build} has compiled no CUDA source")
        return 1
    if not complaints(planted(next(iter(commands.values())), build)):
        print("the planted spill was not seen")
        return 1
    kernels, bad = 0, []
    for built, command in commands.items():
        text = report(command, build)
        of_this = text.count("Compiling entry function")
        kernels += of_this
        bad += [f"{built}: {line}" for line in complaints(text)]
        if not of_this:
            bad.append(f"{built}: ptxas names no kernel; is -Xptxas=-v among the flags?")
    if kernels > KERNELS_MAX:
        bad.append(f"{kernels} kernels, but {KERNELS_MAX} at most")
    print("\n".join(bad) or f"{kernels} kernels, no spill, no serialised wgmma; "
          f"{len(listed) - len(commands)} of {len(listed)} sources not built")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
