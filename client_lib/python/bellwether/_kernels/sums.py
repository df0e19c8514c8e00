"""Sums of a matrix along one of its dimensions by the kernels library, for the laws whose sums are
zero.

kernels/include/bellwether/kernels/law_sums.h says what is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._native import c_api
from .memory import Memory
from .probe import DTYPES, call


def sums_along(memory: Memory, t: Tensor, dim: int) -> Tensor:
    """float64 [LAW_SUM_STATS, size of the other dimension], where t is.  On a GPU one kernel on the
    current stream.  t [n, d], of a type in DTYPES.  Raises KernelError for what the library
    refuses."""
    kept = t.shape[1 - dim]
    found = torch.zeros(kept, len(c_api.LAW_SUM_STATS), dtype=torch.float64, device=t.device)
    params = c_api.struct(
        c_api.LawSumsParams, dtype=DTYPES[t.dtype], kept=kept, summed=t.shape[dim],
        kept_stride=t.stride(1 - dim), summed_stride=t.stride(dim), data=t.data_ptr(),
        out=found.data_ptr(), **memory.call_fields(),
    )  # fmt: skip
    with memory.running():
        call("bw_law_sums", params)
    return found.t()
