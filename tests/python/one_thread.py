"""One thread for what is computed here and in children, so that a training repeats bit for bit.

MKL finds the code of a function (sqrt, exp, log ...) when it is first called.  Where two threads
make that first call at once, one of them may get code of low accuracy for this one call
(https://github.com/pytorch/pytorch/issues/188792; torch 2.13 has such an MKL).  AdamW's first
square root in a process then differs from the next one, watched or not.
"""

from __future__ import annotations

import os
import sys


def compute_on_one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # Read when torch is loaded; children inherit it.
    torch = sys.modules.get("torch")
    if torch is not None:  # It was loaded first, so it did not read that.
        torch.set_num_threads(1)
