"""Size, extremes and shape of activations, by the kernels library.

kernels/include/bellwether/kernels/module_stats.h is the specification.
"""

from __future__ import annotations

import ctypes
from typing import Optional

import torch
from torch import Tensor

from .._native import c_api
from .memory import Memory
from .probe import DTYPES, call

STATS = len(c_api.MODULE_STATS)


def add_activation(memory: Memory, x: Tensor, out: Tensor, channels: Optional[Tensor]) -> None:
    """Adds what x [.., channels] has to `out`, float64 [STATS], and to its channels' sums of
    squares, float64 [channels], where the top one is asked for.  x is of a type in DTYPES.  On a
    GPU three kernels on the current stream.  Raises KernelError for what the library refuses."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        rows = rows.contiguous()
    params = c_api.struct(
        c_api.ModuleStatsParams, dtype=DTYPES[rows.dtype], data=rows.data_ptr(),
        rows=rows.shape[0], channels=rows.shape[1], row_stride=rows.stride(0), out=out.data_ptr(),
        channel_sumsq=None if channels is None else channels.data_ptr(), **memory.call_fields(),
    )  # fmt: skip
    if rows.is_cuda:
        size = c_api.kernels().bw_module_stats_workspace_bytes(ctypes.byref(params))
        workspace = torch.empty(size // 8, dtype=torch.float64, device=rows.device)
        params.workspace = workspace.data_ptr()
    with memory.running():
        call("bw_module_stats", params)
