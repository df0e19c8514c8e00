#!/usr/bin/env python3
"""Goal: no attention kernel spills a register or has its wgmma pipeline serialised.

Method: compiles every .cu of kernels/cuda/sm90 with ptxas -v and reads what it
says; needs nvcc, no GPU.  A planted kernel that must spill shows that the check
sees spills.

    attention_ptxas_check.py [nvcc]
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels"
# Forward: 2 types x 3 tile shapes x 2 modes; backward: 2 types x 2 head dims, three
# kernels each.
EXPECTED_KERNELS = 12 + 12
SPILLING = """
__global__ void __launch_bounds__(1024) Spill(float* p) {
  float x[200];
#pragma unroll
  for (int i = 0; i < 200; ++i) x[i] = p[i * 1024 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 200; ++i) p[threadIdx.x * 200 + (i * 7) % 200] = x[i] * x[199 - i];
}
"""


def report(nvcc: str, source: pathlib.Path, work: str) -> str:
    """What ptxas says about one file."""
    done = subprocess.run(
        [nvcc, "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin",
         f"-I{KERNELS}", f"-I{KERNELS / 'include'}", "-o", f"{work}/out.cubin", str(source)],
        capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def complaints(text: str) -> list[str]:
    spills = [line.strip() for line in text.splitlines()
              if re.search(r"bytes spill", line)
              and not re.search(r"\b0 bytes spill stores, 0 bytes spill loads", line)]
    return spills + re.findall(r"\(C75\d\d\).{0,120}", text)


def main() -> int:
    nvcc = sys.argv[1] if len(sys.argv) > 1 else "nvcc"
    kernels, bad = 0, []
    with tempfile.TemporaryDirectory() as work:
        planted = pathlib.Path(work) / "spill.cu"
        planted.write_text(SPILLING)
        if not complaints(report(nvcc, planted, work)):
            print("the planted spill was not seen")
            return 1
        for source in sorted((KERNELS / "cuda" / "sm90").glob("*.cu")):
            text = report(nvcc, source, work)
            kernels += text.count("Compiling entry function")
            bad += [f"{source.name}: {line}" for line in complaints(text)]
    print("\n".join(bad) or f"{kernels} kernels, no spill, no serialised wgmma")
    if kernels != EXPECTED_KERNELS:
        print(f"{kernels} kernels were built, but {EXPECTED_KERNELS} are expected")
    return 1 if bad or kernels != EXPECTED_KERNELS else 0


if __name__ == "__main__":
    sys.exit(main())
