"""The kernels library on torch tensors: shapes and strides in, sums added to a Memory.

No tensor is kept and none is changed.  A call runs where its tensors are: on the CPU it is done on
return, on a GPU it is enqueued on the current stream.
"""

from __future__ import annotations

import array
import ctypes
import math
from typing import Optional

import torch
from torch import Tensor

from .._native import c_api
from .memory import Copy, Memory, floats

DTYPES = {torch.float32: c_api.F32, torch.bfloat16: c_api.BF16, torch.float16: c_api.F16}


class KernelError(RuntimeError):
    """The kernels library refused a call; the text is its own."""


class Unsupported(KernelError):
    """Legal, but not built for this shape, type or device."""


def call(name: str, params: ctypes.Structure) -> None:
    """Calls one function of the kernels library.  Raises KernelError."""
    library = c_api.kernels()
    status = getattr(library, name)(ctypes.byref(params))
    if status != 0:
        unsupported = status in (c_api.KERNEL_UNSUPPORTED, c_api.KERNEL_UNAVAILABLE)
        text = f"{name}: {c_api.text(library.bw_kernels_last_error())}"
        raise Unsupported(text) if unsupported else KernelError(text)


def _tensor4(tensor: Tensor, group: int = 1) -> tuple[c_api.Tensor4, Tensor]:
    """The view for C, every group-th head of it, and the tensor that must outlive it."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    view = c_api.Tensor4(
        tensor.data_ptr(), tensor.stride(0), tensor.stride(1) * group, tensor.stride(2)
    )
    return view, tensor


class Sums:
    """What one layer adds up during a sampled step; the layouts are those of c_api.h."""

    def __init__(self, memory: Memory, heads: int, kv_heads: int) -> None:
        self.memory, self.heads, self.kv_heads = memory, heads, kv_heads
        # One row of each signal, [heads] or [kv_heads].
        self._places: dict[str, tuple[int, int]] = {}
        initial = floats(0)
        for names, count in (
            (c_api.PROBE_STATS, heads),
            (c_api.PROBE_KV_STATS, kv_heads),
            (("key_leak_sum", "key_gradient_sum"), kv_heads),
        ):
            for name in names:
                self._places[name] = len(initial), count
                initial.extend(floats(count, -math.inf if name == "logit_max" else 0.0))
        self._begin = memory.take(initial)
        # What a CUDA graph adds whenever it runs in a sampled step.
        self.graph_probes = self.graph_has_delta = self.graph_leaks = False
        self.begin_sample()

    def begin_sample(self) -> None:
        """After the memory was collected."""
        self.probed = 0  # Calls that were added.
        self.with_delta = 0
        self.leaked = 0

    def address(self, signal: str) -> int:
        return self.memory.address(self._begin + self._places[signal][0])

    def row(self, copy: Copy, signal: str) -> array.array[float]:
        """The values of one signal, one for each (key) head."""
        at, count = self._places[signal]
        return copy.read(self._begin + at, count)


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
    drift_only: bool = False,
) -> None:
    """Adds the statistics of one call to `sums`.

    q, o, d_o [batch, heads, tokens, dim]; k, v [batch, kv_heads, tokens, dim], or with `group`
    every key head repeated that many times.  Without d_o the delta statistics stay as they are,
    with drift_only all but rows, drift and coherence.
    """
    params = c_api.struct(c_api.ProbeParams, dtype=DTYPES[q.dtype], **sums.memory.call_fields())
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
    params.scale, params.causal, params.drift_only = scale, int(causal), int(drift_only)
    params.rows_per_head = rows
    params.seed = seed & 0xFFFFFFFFFFFFFFFF
    params.stat_stride, params.out = sums.heads, sums.address(c_api.PROBE_STATS[0])
    params.kv_stat_stride = sums.kv_heads
    params.kv_out = sums.address(c_api.PROBE_KV_STATS[0])
    params.gate = sums.memory.gate()
    with sums.memory.running():
        call("bw_probe", params)
    if params.gate is not None:
        sums.graph_probes, sums.graph_has_delta = True, d_o is not None
        return
    sums.probed += 1
    sums.with_delta += d_o is not None


def add_key_leak(sums: Sums, d_k: Tensor, group: int = 1) -> None:
    """Adds one call's key-gradient leak.  d_k [batch, key heads as the kernel saw them, tokens,
    dim]; the gradients of repeated keys belong to one key and are added first, in fp32."""
    with sums.memory.running():
        if group > 1:
            batch, _, tokens, dim = d_k.shape
            d_k = d_k.float().reshape(batch, sums.kv_heads, group, tokens, dim).sum(2)
        params = c_api.struct(
            c_api.KeyLeakParams, dtype=DTYPES[d_k.dtype], **sums.memory.call_fields()
        )
        params.batch, params.kv_heads, params.k_len, params.head_dim = d_k.shape
        params.d_k, kept = _tensor4(d_k)
        params.leak_sum = sums.address("key_leak_sum")
        params.gradient_sum = sums.address("key_gradient_sum")
        params.gate = sums.memory.gate()
        call("bw_key_leak", params)
    if params.gate is not None:
        sums.graph_leaks = True
    else:
        sums.leaked += 1
    del kept


class Spectrum:
    """Spectral norms of the heads of one weight, warm-started from the last sample."""

    OUTPUTS = ("sigma", "residual", "stable_rank", "overlap")

    def __init__(self, memory: Memory, device: torch.device, heads: int, dim: int) -> None:
        self.memory, self.heads, self.dim = memory, heads, dim
        self._begin = memory.take(floats(len(self.OUTPUTS) * heads, math.nan))
        self._direction = torch.zeros(heads, dim, dtype=torch.float32, device=device)
        self.device = device
        self.samples = 0
        self.begin_sample()

    def begin_sample(self) -> None:
        """After the memory was collected."""
        self.measured = False

    def row(self, copy: Copy, output: str) -> array.array[float]:
        return copy.read(self._begin + self.OUTPUTS.index(output) * self.heads, self.heads)

    def measure(self, weight: Tensor) -> None:
        """weight [heads, dim, width], any strides."""
        weight = weight.detach()
        if weight.dtype not in DTYPES:
            weight = weight.float()
        params = c_api.struct(
            c_api.SpectralParams, dtype=DTYPES[weight.dtype], **self.memory.call_fields()
        )
        params.heads, params.rows, params.columns = weight.shape
        params.weight = weight.data_ptr()
        params.head_stride, params.row_stride, params.column_stride = weight.stride()
        for i, output in enumerate(self.OUTPUTS):
            setattr(params, output, self.memory.address(self._begin + i * self.heads))
        params.direction = self._direction.data_ptr()
        with self.memory.running():
            call("bw_spectral_norms", params)
        self.samples += 1
        self.measured = True


def increment_rank(
    wq: Tensor, wq_before: Tensor, wk: Tensor, wk_before: Tensor
) -> array.array[float]:
    """Effective rank of the change of W_Q^T W_K per query head, NOT_MEASURED without one;
    all float32 and contiguous, [heads, dim, width] and [kv_heads, dim, width]."""
    result = floats(wq.shape[0])
    params = c_api.struct(c_api.IncrementRankParams, threads=torch.get_num_threads())
    params.heads, params.rows, params.columns = wq.shape
    params.kv_heads = wk.shape[0]
    params.wq, params.wq_before = wq.data_ptr(), wq_before.data_ptr()
    params.wk, params.wk_before = wk.data_ptr(), wk_before.data_ptr()
    params.q_head_stride, params.q_row_stride = wq.stride()[:2]
    params.k_head_stride, params.k_row_stride = wk.stride()[:2]
    params.effective_rank = result.buffer_info()[0]
    call("bw_increment_rank", params)
    # NaN: nothing has changed, as in a step that a GradScaler has skipped.
    return array.array("f", [c_api.NOT_MEASURED if math.isnan(x) else x for x in result])


def available(device: str = "cpu") -> Optional[str]:
    """None if the kernels can be used on devices of this type, else why not."""
    try:
        library = c_api.kernels()
    except c_api.LibraryError as e:
        return str(e)
    backend = {"cpu": c_api.CPU, "cuda": c_api.CUDA}.get(device)
    if backend is None or not library.bw_kernels_available(backend):
        return f"libbellwether_kernels has no {device} backend on this machine"
    return None
