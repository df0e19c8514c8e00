"""The stabilized attention as a pair of PyTorch operators: bellwether::attention_forward and
bellwether::attention_backward, which autograd calls for it.

They pass addresses, strides and the current stream to libbellwether_kernels
(attention_c_api.h), so nothing is linked against torch.  All memory is torch's: it follows the
stream, activation checkpointing and the pools of CUDA graphs.  The operators have fake
implementations, so torch.compile keeps them whole; they have no second derivative.
"""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
from torch import Tensor

from .._kernels.probe import DTYPES, MASK_DTYPES, NO_ROCM, call
from .._native import attention_c_api as c
from .._native import c_api

PAPER_EPS, PAPER_BETA = 1e-3, 2.0  # The paper's choice, attention.h's defaults.
_SETTINGS = 6  # mode, scale, causal, window, softcap, center: the last inputs of both operators
_MASK, _SINKS = 5, 7  # Which inputs of attention_forward these are.


def _readable(t: Tensor) -> Tensor:
    """`t`, or a copy whose layout the kernels can read: rows of adjacent elements and, on a GPU,
    aligned to the 16 bytes that its copy engine moves."""
    rows_adjacent = t.stride(-1) == 1 or t.shape[-1] == 1
    if t.device.type == "cpu":
        return t if rows_adjacent else t.contiguous()
    aligned = t.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in t.stride()[:-1])
    return t if rows_adjacent and aligned else t.clone(memory_format=torch.contiguous_format)


def writable_like(t: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Uninitialized, in t's layout if its rows can be written through: adjacent elements."""
    out = torch.empty_like(t, dtype=dtype)
    if out.stride(-1) == 1:
        return out
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)


def _output_like(q: Tensor, dim: int, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Uninitialized [batch, heads, q_len, dim], in q's layout."""
    if dim == q.shape[3]:
        return writable_like(q, dtype)
    batch, heads, q_len, _ = q.shape
    dtype = q.dtype if dtype is None else dtype
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, q_len, heads, dim), dtype=dtype).transpose(1, 2)
    return q.new_empty((batch, heads, q_len, dim), dtype=dtype)


def view(t: Tensor) -> c_api.Tensor4:
    if t.numel() == 0:
        return c_api.Tensor4()
    return c_api.Tensor4(t.data_ptr(), t.stride(0), t.stride(1), t.stride(2))


def _pointer(t: Optional[Tensor]) -> Optional[int]:
    return None if t is None or t.numel() == 0 else t.data_ptr()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """In it this device is the current one: kernels launch there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# torch.compile calls it while it traces: it cannot load a library.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_lacks(kind: str, index: int) -> Optional[str]:
    try:
        library = c_api.kernels()
    except c_api.LibraryError as e:
        return str(e)
    if kind == "cpu":
        return None
    if kind != "cuda":
        return f"there is no kernel for device {kind}"
    if torch.version.hip is not None:
        return NO_ROCM
    with torch.cuda.device(index):
        if library.bw_kernels_available(c_api.CUDA):
            return None
    major, minor = torch.cuda.get_device_capability(index)
    return (
        f"this libbellwether_kernels was built without CUDA, or the GPU, which has compute "
        f"capability {major}.{minor}, is older than 8.0"
    )


def machine_lacks(device: torch.device) -> Optional[str]:
    """Why tensors on this device cannot be served whatever their shapes; None if they can."""
    reason: Optional[str] = _device_lacks(device.type, -1 if device.index is None else device.index)
    return reason


def place(device: torch.device) -> dict[str, Any]:
    """The fields of every call that say where it runs: backend, stream, threads."""
    on_cuda = device.type == "cuda"
    return {
        "backend": c_api.CUDA if on_cuda else c_api.CPU,
        "stream": torch.cuda.current_stream(device).cuda_stream if on_cuda else None,
        "threads": torch.get_num_threads(),
    }


def _workspace(name: str, params: c.ForwardParams, device: torch.device) -> Optional[Tensor]:
    size = getattr(c.attention(), name)(ctypes.byref(params)) if device.type == "cuda" else 0
    return torch.empty(size, dtype=torch.uint8, device=device) if size else None


def _forward_params(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    seen: tuple[Optional[Tensor], ...],
    mode: str,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    seed: int = 0,
) -> c.ForwardParams:
    """seen: cu_seqlens of q and k, mask, key_bounds, sinks."""
    cu_seqlens_q, cu_seqlens_k, mask, key_bounds, sinks = seen
    o, o_lo, lse, anchor, rounded_sum = outputs
    params: c.ForwardParams = c_api.struct(
        c.ForwardParams, **place(q.device), dtype=DTYPES[q.dtype], mode=c.MODES.index(mode),
        q=view(q), k=view(k), v=view(v), o=view(o), o_lo=view(o_lo),
        lse=_pointer(lse), anchor=_pointer(anchor), rounded_sum=_pointer(rounded_sum),
        lse_batch_stride=lse.stride(0), lse_head_stride=lse.stride(1),
        scale=scale, causal=causal, window=window, softcap=softcap, seed=seed,
        paper_eps=PAPER_EPS, paper_beta=PAPER_BETA,
    )  # fmt: skip
    params.batch, params.heads, params.q_len, params.head_dim = q.shape
    params.kv_heads, params.k_len, params.v_dim = k.shape[1], k.shape[2], v.shape[3]
    params.key_bounds, params.sinks = _pointer(key_bounds), _pointer(sinks)
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
        params.mask, params.mask_dtype = mask.data_ptr(), MASK_DTYPES[mask.dtype]
        params.mask_batch_stride, params.mask_head_stride = mask.stride()[:2]
        params.mask_row_stride, params.mask_key_stride = mask.stride()[2:]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        params.cu_seqlens_q = cu_seqlens_q.data_ptr()
        params.cu_seqlens_k = cu_seqlens_k.data_ptr()
        params.sequences = cu_seqlens_q.numel() - 1
    return params


def _outputs(q: Tensor, v: Tensor, mode: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, o_lo, lse, anchor, rounded_sum, uninitialized; empty where the mode has none."""
    absent = (0,)
    dim = v.shape[3]
    o, o_lo = _output_like(q, dim), q.new_empty(absent, dtype=torch.bfloat16)
    if mode in c.RESIDUAL_MODES:
        o_lo = _output_like(q, dim, torch.bfloat16)
    anchored = mode == c.ANCHORED_MODE
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    anchor, rounded_sum = (
        q.new_empty(q.shape[:3] if anchored else absent, dtype=torch.float32) for _ in range(2)
    )
    return o, o_lo, lse, anchor, rounded_sum


@torch.library.custom_op("bellwether::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    mask: Optional[Tensor],
    key_bounds: Optional[Tensor],
    sinks: Optional[Tensor],
    seed: Optional[Tensor],
    mode: str,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o and what the backward needs: o_lo, lse, anchor, rounded_sum; empty if not of this mode.

    q [batch, heads, q_len, dim]; k, v [batch, kv_heads, k_len, dim or v_dim]; o, o_lo
    [batch, heads, q_len, v_dim], o_lo in bf16; the others [batch, heads, q_len] float32.
    cu_seqlens_*: int32 on q's device; batch is 1 then.  mask: bool or floating, four dimensions
    that broadcast; without a gradient.  key_bounds: int32 [batch, 2].  sinks: float32 [heads].
    seed: one int64 on the CPU, for mode sr.  `center` concerns the backward only: the
    output does not depend on a shift of the keys.
    """
    outputs = _outputs(q, v, mode)
    if q.numel() == 0:
        return outputs
    q, k, v = _readable(q), _readable(k), _readable(v)
    with on(q.device):
        params = _forward_params(
            q, k, v, outputs, (cu_seqlens_q, cu_seqlens_k, mask, key_bounds, sinks),
            mode, scale, causal, window, softcap,
            0 if seed is None else int(seed.item()),
        )  # fmt: skip
        workspace = _workspace("bw_attention_forward_workspace", params, q.device)
        if workspace is not None:
            params.workspace, params.workspace_bytes = workspace.data_ptr(), workspace.numel()
        call("bw_attention_forward", params)
    return outputs


@attention_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, _, v, *_ = inputs
    return _outputs(q, v, inputs[-_SETTINGS])


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of q, k, v and sinks, uninitialized."""
    d_sinks = q.new_empty(0 if sinks is None else q.shape[1], dtype=torch.float32)
    return writable_like(q), writable_like(k), writable_like(v), d_sinks


@torch.library.custom_op("bellwether::attention_backward", mutates_args=())
def attention_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    o_lo: Tensor,
    lse: Tensor,
    anchor: Tensor,
    rounded_sum: Tensor,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    mask: Optional[Tensor],
    key_bounds: Optional[Tensor],
    sinks: Optional[Tensor],
    mode: str,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and d_sinks, empty without sinks, for what attention_forward was given and
    returned.

    Under torch.use_deterministic_algorithms() dq repeats bit for bit on a GPU too.
    """
    gradients = dq, dk, dv, d_sinks = _gradients(q, k, v, sinks)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), d_sinks.zero_()
    q, k, v, d_o = _readable(q), _readable(k), _readable(v), _readable(d_o)
    o, o_lo = _readable(o), _readable(o_lo)
    with on(q.device):
        forward = _forward_params(
            q, k, v, (o, o_lo, lse, anchor, rounded_sum),
            (cu_seqlens_q, cu_seqlens_k, mask, key_bounds, sinks),
            mode, scale, causal, window, softcap,
        )  # fmt: skip
        params = c_api.struct(
            c.BackwardParams, forward=forward, d_o=view(d_o),
            dq=view(dq), dk=view(dk), dv=view(dv), d_sinks=_pointer(d_sinks), center=center,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        workspace = _workspace("bw_attention_backward_workspace", forward, q.device)
        if workspace is not None:
            params.workspace, params.workspace_bytes = workspace.data_ptr(), workspace.numel()
        call("bw_attention_backward", params)
    return gradients


@attention_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, q, k, v, *_ = inputs
    return _gradients(q, k, v, inputs[-_SETTINGS - 1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *seen, _seed = inputs[:-_SETTINGS]
    if ctx.needs_input_grad[_MASK]:
        raise RuntimeError("the mask requires a gradient, which this operator does not compute")
    ctx.save_for_backward(q, k, v, *output, *seen)
    ctx.settings = inputs[-_SETTINGS:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_o: Optional[Tensor], *_none: Any) -> tuple[Optional[Tensor], ...]:
    dq = dk = dv = d_sinks = None
    if d_o is not None:
        dq, dk, dv, d_sinks = attention_backward(d_o, *ctx.saved_tensors, *ctx.settings)
        d_sinks = d_sinks if ctx.needs_input_grad[_SINKS] else None
    return dq, dk, dv, None, None, None, None, d_sinks, None, *[None] * _SETTINGS


attention_forward.register_autograd(_backward, setup_context=_setup_context)
