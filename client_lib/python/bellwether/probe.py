"""The kernels library on torch tensors: shapes and strides in, sums added to plain buffers.

No tensor is kept and none is changed.  Everything here is for tensors on the CPU.
"""

from __future__ import annotations

import array
import ctypes
import math
from typing import Optional

import torch
from torch import Tensor

from . import _native

DTYPES = {torch.float32: _native.F32, torch.bfloat16: _native.BF16, torch.float16: _native.F16}


class KernelError(RuntimeError):
    """The kernels library refused a call; the text is its own."""


def call(name: str, params: ctypes.Structure) -> None:
    """Calls one function of the kernels library.  Raises KernelError."""
    library = _native.kernels()
    if getattr(library, name)(ctypes.byref(params)) != 0:
        raise KernelError(f"{name}: {_native.text(library.bw_kernels_last_error())}")


def floats(count: int, value: float = 0.0) -> array.array[float]:
    return array.array("f", [value]) * count


def _address(values: array.array[float], offset: int = 0) -> int:
    return values.buffer_info()[0] + 4 * offset


def _tensor4(tensor: Tensor, group: int = 1) -> tuple[_native.Tensor4, Tensor]:
    """The view for C, every group-th head of it, and the tensor that must outlive it."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    view = _native.Tensor4(
        tensor.data_ptr(), tensor.stride(0), tensor.stride(1) * group, tensor.stride(2)
    )
    return view, tensor


class Sums:
    """What one layer has added up since the last sample; the layouts are those of c_api.h."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.query = floats(len(_native.PROBE_STATS) * heads)
        self.key = floats(len(_native.PROBE_KV_STATS) * kv_heads)
        self.leak = floats(2 * kv_heads)  # [leak_sum, gradient_sum][kv_heads]
        self.reset()

    def reset(self) -> None:
        for buffer in (self.query, self.key, self.leak):
            ctypes.memset(_address(buffer), 0, 4 * len(buffer))
        at = _native.PROBE_STATS.index("logit_max") * self.heads
        for head in range(self.heads):
            self.query[at + head] = -math.inf
        self.probed = 0  # Calls that were added.
        self.with_delta = 0
        self.leaked = 0

    def row(self, signal: str) -> array.array[float]:
        """The values of one signal, one for each (key) head."""
        if signal in _native.PROBE_STATS:
            at = _native.PROBE_STATS.index(signal) * self.heads
            return self.query[at : at + self.heads]
        if signal in _native.PROBE_KV_STATS:
            at = _native.PROBE_KV_STATS.index(signal) * self.kv_heads
            return self.key[at : at + self.kv_heads]
        at = ("key_leak_sum", "key_gradient_sum").index(signal) * self.kv_heads
        return self.leak[at : at + self.kv_heads]


def add_probe(
    sums: Sums,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Optional[Tensor],
    *,
    scale: float,
    causal: bool,
    rows: int,
    seed: int,
    group: int = 1,
) -> None:
    """Adds the statistics of one call to `sums`.

    q, o, d_o [batch, heads, tokens, dim]; k, v [batch, kv_heads, tokens, dim], or with `group`
    every key head repeated that many times.  Without d_o the delta statistics stay as they are.
    """
    params = _native.struct(_native.ProbeParams, backend=_native.CPU, dtype=DTYPES[q.dtype])
    params.threads = torch.get_num_threads()
    params.batch, params.heads, params.q_len, params.head_dim = q.shape
    params.kv_heads, params.k_len, params.v_dim = sums.kv_heads, k.shape[2], v.shape[3]
    params.q, keep_q = _tensor4(q)
    params.k, keep_k = _tensor4(k, group)
    kept = [keep_q, keep_k]
    if d_o is not None:
        for name, tensor, each in (("v", v, group), ("o", o, 1), ("d_o", d_o, 1)):
            view, keep = _tensor4(tensor, each)
            setattr(params, name, view)
            kept.append(keep)
    params.scale, params.causal = scale, int(causal)
    params.rows_per_head = rows
    params.seed = seed & 0xFFFFFFFFFFFFFFFF
    params.stat_stride, params.out = sums.heads, _address(sums.query)
    params.kv_stat_stride, params.kv_out = sums.kv_heads, _address(sums.key)
    call("bw_probe", params)
    sums.probed += 1
    sums.with_delta += d_o is not None


def add_key_leak(sums: Sums, d_k: Tensor, group: int = 1) -> None:
    """Adds one call's key-gradient leak.  d_k [batch, key heads as the kernel saw them, tokens,
    dim]; the gradients of repeated keys belong to one key and are added first, in fp32."""
    if group > 1:
        batch, _, tokens, dim = d_k.shape
        d_k = d_k.float().reshape(batch, sums.kv_heads, group, tokens, dim).sum(2)
    params = _native.struct(_native.KeyLeakParams, backend=_native.CPU, dtype=DTYPES[d_k.dtype])
    params.threads = torch.get_num_threads()
    params.batch, params.kv_heads, params.k_len, params.head_dim = d_k.shape
    params.d_k, kept = _tensor4(d_k)
    params.leak_sum = _address(sums.leak)
    params.gradient_sum = _address(sums.leak, sums.kv_heads)
    call("bw_key_leak", params)
    sums.leaked += 1
    del kept


class Spectrum:
    """Spectral norms of the heads of one weight, warm-started from the last sample."""

    def __init__(self, heads: int, dim: int) -> None:
        self.heads, self.dim = heads, dim
        self.sigma, self.residual = floats(heads), floats(heads)
        self.stable_rank, self.overlap = floats(heads), floats(heads)
        self.direction = floats(heads * dim)
        self.samples = 0

    def measure(self, weight: Tensor) -> None:
        """weight [heads, dim, width], any strides."""
        weight = weight.detach()
        if weight.dtype not in DTYPES:
            weight = weight.float()
        params = _native.struct(
            _native.SpectralParams, backend=_native.CPU, dtype=DTYPES[weight.dtype]
        )
        params.threads = torch.get_num_threads()
        params.heads, params.rows, params.columns = weight.shape
        params.weight = weight.data_ptr()
        params.head_stride, params.row_stride, params.column_stride = weight.stride()
        params.sigma, params.residual = _address(self.sigma), _address(self.residual)
        params.stable_rank, params.overlap = _address(self.stable_rank), _address(self.overlap)
        params.direction = _address(self.direction)
        call("bw_spectral_norms", params)
        self.samples += 1


def increment_rank(
    wq: Tensor, wq_before: Tensor, wk: Tensor, wk_before: Tensor
) -> array.array[float]:
    """Effective rank of the change of W_Q^T W_K per query head; all float32 and contiguous,
    [heads, dim, width] and [kv_heads, dim, width]."""
    result = floats(wq.shape[0])
    params = _native.struct(_native.IncrementRankParams, threads=torch.get_num_threads())
    params.heads, params.rows, params.columns = wq.shape
    params.kv_heads = wk.shape[0]
    params.wq, params.wq_before = wq.data_ptr(), wq_before.data_ptr()
    params.wk, params.wk_before = wk.data_ptr(), wk_before.data_ptr()
    params.q_head_stride, params.q_row_stride = wq.stride()[:2]
    params.k_head_stride, params.k_row_stride = wk.stride()[:2]
    params.effective_rank = _address(result)
    call("bw_increment_rank", params)
    return result


def available() -> Optional[str]:
    """None if the kernels can be used, else why not."""
    try:
        library = _native.kernels()
    except _native.LibraryError as e:
        return str(e)
    if not library.bw_kernels_available(_native.CPU):
        return "libbellwether_kernels has no CPU backend on this machine"
    return None
