"""What the laws of norms, lm_head and linear layers need of their tensors, by the kernels library.

kernels/include/bellwether/kernels/law_modules.h says what is added.  Tensors are of the types in
DTYPES, on one device.  On a GPU one or two kernels on the current stream, and nothing is waited
for.  All raise KernelError for what the library refuses.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .._native import c_api
from .memory import Memory
from .probe import DTYPES, call

PARTS_MAX = c_api.LAW_PARTS_MAX
_ROWS, _FEATURES = len(c_api.LAW_NORM_ROWS), len(c_api.LAW_NORM_FEATURES)
_OFF = c_api.LAW_NORM_ROWS.index("off")


def _lined(rows: Tensor) -> Tensor:
    """[n, d], a row's elements beside each other."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _matrix(to: c_api.LawMatrix, rows: Tensor) -> None:
    to.data, to.dtype, to.row_stride = rows.data_ptr(), DTYPES[rows.dtype], rows.stride(0)


@dataclasses.dataclass(frozen=True)
class NormSums:
    """float64, where the tensors are: differences, variances and what may be alike.

    scale, mean  [3, rows]
    features     [4, d], the sum of absolute values behind them
    rest         [2]
    """

    scale: Tensor
    mean: Tensor
    features: Tensor
    rest: Tensor


def norm_sums(
    memory: Memory, x: Tensor, y: Tensor, d_x: list[Tensor], d_y: list[Tensor], gain: Tensor,
    shift: Tensor, eps: float, centred: bool, inside: float,
) -> NormSums:  # fmt: skip
    """x, y [rows, d]; d_x, d_y their gradients, in PARTS_MAX parts at most that add up to them;
    gain, shift float64 [d]."""
    rows, d = x.shape
    sizes = _ROWS * rows, _FEATURES * d, 2
    of_rows, features, rest = torch.zeros(
        sum(sizes), dtype=torch.float64, device=x.device
    ).split_with_sizes(sizes)
    tensors = [_lined(t) for t in (x, y, *d_x, *d_y)]
    gain, shift = gain.contiguous(), shift.contiguous()
    params = c_api.struct(
        c_api.LawNormsParams, centred=int(centred), rows=rows, n=d, d_x_parts=len(d_x),
        d_y_parts=len(d_y), gain=gain.data_ptr(), shift=shift.data_ptr(), eps=eps, inside=inside,
        row_stats=of_rows.data_ptr(), feature_stats=features.data_ptr(), rest=rest.data_ptr(),
        **memory.call_fields(),
    )  # fmt: skip
    to = [params.x, params.y, *params.d_x[: len(d_x)], *params.d_y[: len(d_y)]]
    for matrix, tensor in zip(to, tensors):
        _matrix(matrix, tensor)
    with memory.running():
        call("bw_law_norms", params)
    of_rows = of_rows.view(_ROWS, rows)
    return NormSums(of_rows[:3], of_rows[3:_OFF], features.view(_FEATURES, d), rest)


def sure_rows(memory: Memory, z: Tensor) -> Tensor:
    """float64 [2, n]: 1 - p of the likeliest class, and what all p of a row may be off, in units of
    a rounding of log p.  z [n, classes]"""
    z = _lined(z)
    found = torch.zeros(2, z.shape[0], dtype=torch.float64, device=z.device)
    params = c_api.struct(
        c_api.LawLogitsParams, rows=z.shape[0], classes=z.shape[1], out=found.data_ptr(),
        **memory.call_fields(),
    )  # fmt: skip
    _matrix(params.z, z)
    with memory.running():
        call("bw_law_logits", params)
    return found


def new_equals(count: int, device: torch.device) -> Tensor:
    """Zeros for so many tensors: float64 [count, EQUAL_GROUPS, 2]."""
    shape = count, c_api.EQUAL_GROUPS, len(c_api.LAW_EQUAL_STATS)
    return torch.zeros(shape, dtype=torch.float64, device=device)


def add_equal_rows(memory: Memory, rows: Tensor, found: Tensor) -> None:
    """Adds to found [EQUAL_GROUPS, 2] how many rows are not zero, and the sum over them of how many
    are like the row.  rows [n, width].  A row is known by a few columns, each group by others: rows
    that are equal nearly everywhere are found by some of them."""
    scratch = None
    if rows.is_cuda:
        size = c_api.kernels().bw_law_equal_rows_scratch_bytes(rows.shape[0])
        scratch = torch.empty(size, dtype=torch.uint8, device=rows.device)
    params = c_api.struct(
        c_api.LawEqualRowsParams, dtype=DTYPES[rows.dtype], rows=rows.shape[0],
        width=rows.shape[1], row_stride=rows.stride(0), column_stride=rows.stride(1),
        data=rows.data_ptr(), scratch=None if scratch is None else scratch.data_ptr(),
        scratch_bytes=0 if scratch is None else scratch.numel(), out=found.data_ptr(),
        **memory.call_fields(),
    )  # fmt: skip
    with memory.running():
        call("bw_law_equal_rows", params)


def equal_rows(memory: Memory, rows: Tensor) -> Tensor:
    """The same of one tensor, as float64 [EQUAL_GROUPS, 2]."""
    found = new_equals(1, rows.device)[0]
    add_equal_rows(memory, rows, found)
    return found
