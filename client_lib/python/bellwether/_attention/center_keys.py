"""center_keys(): keys minus their mean, for any attention kernel."""

import functools
from typing import Any, Optional

import torch
from torch import Tensor

from .._hook.patches.patched_forward import look_closer
from .._kernels.probe import DTYPES, call, expanded
from .._native import c_api
from .._util import log
from .attention_op import machine_lacks, on, place, view, writable_like

HEAD_DIM_MAX = 1024


@torch.library.custom_op("bellwether::center_keys", mutates_args=(), device_types=("cpu", "cuda"))
def _center_keys(k: Tensor, cu_seqlens: Optional[Tensor], visible: Optional[Tensor]) -> Tensor:
    out = writable_like(k)
    if k.numel() == 0:
        return out
    if k.stride(-1) != 1:
        k = k.contiguous()
    with on(k.device):
        params = c_api.struct(
            c_api.CenterKeysParams, **place(k.device),
            dtype=DTYPES[k.dtype], k=view(k), out=view(out),
        )  # fmt: skip
        params.batch, params.kv_heads, params.k_len, params.head_dim = k.shape
        if cu_seqlens is not None:
            params.cu_seqlens, params.sequences = cu_seqlens.data_ptr(), cu_seqlens.numel() - 1
        if visible is not None:
            visible = visible.expand(k.shape[:3])
            params.visible, params.visible_key_stride = visible.data_ptr(), visible.stride(2)
            params.visible_batch_stride, params.visible_head_stride = visible.stride()[:2]
        call("bw_center_keys", params)
    return out


@_center_keys.register_fake
def _(k: Tensor, cu_seqlens: Optional[Tensor], visible: Optional[Tensor]) -> Tensor:
    return writable_like(k)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])
    look_closer()  # Whether keys are centred is told of the step in which it begins.


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    # A symmetric projection: its own adjoint.
    return _center_keys(gradient, *ctx.saved_tensors), None, None


_center_keys.register_autograd(_backward, setup_context=_setup_context)


def _composed(k: Tensor, cu_seqlens: Optional[Tensor], visible: Optional[Tensor] = None) -> Tensor:
    """The same out of PyTorch's operations."""
    wide = k if k.dtype == torch.float64 else k.float()
    if visible is not None:
        seen = visible.expand(k.shape[:3])[..., None]
        count = seen.sum(2, keepdim=True).clamp(min=1)
        mean = wide.masked_fill(~seen, 0.0).sum(2, keepdim=True) / count
        return torch.where(seen, wide - mean, wide).to(k.dtype)
    if cu_seqlens is None:
        return (wide - wide.mean(dim=2, keepdim=True)).to(k.dtype)
    sequences = cu_seqlens.numel() - 1
    token = torch.arange(k.shape[2], device=k.device, dtype=cu_seqlens.dtype)
    sequence = torch.bucketize(token, cu_seqlens[1:], right=True)
    count = (cu_seqlens[1:] - cu_seqlens[:-1]).clamp(min=1)[:, None]
    total = wide.new_zeros((*k.shape[:2], sequences, k.shape[3])).index_add(2, sequence, wide)
    return (wide - (total / count).index_select(2, sequence)).to(k.dtype)


INT32_MAX = 2**31 - 1  # Of lengths and offsets in the kernels.

_warn_once = functools.cache(log.warning)


# torch.compile calls it while it traces: it cannot log.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_composed(reason: str) -> None:
    _warn_once(f"keys are centred by PyTorch's operations, not by one kernel: {reason}")


def _unsupported(k: Tensor) -> Optional[str]:
    if k.dtype not in DTYPES:
        return f"{k.dtype}"
    if k.shape[3] > HEAD_DIM_MAX:
        return f"heads have {k.shape[3]} elements, and {HEAD_DIM_MAX} is the most"
    return machine_lacks(k.device)


def offsets_on(cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """cu_seqlens as the kernels take it.  Raises ValueError."""
    t = cu_seqlens
    if t.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens is {t.dtype}, but must be torch.int32 or torch.int64")
    if t.device != device:  # The kernels would take its address for one of theirs.
        raise ValueError(f"cu_seqlens is on {t.device}, but must be on {device}")
    if t.dtype == torch.int64:  # What does not fit stays out of range, for the kernel to refuse.
        t = t.clamp(-1, INT32_MAX).to(torch.int32)
    return t.contiguous()


def center_keys(
    k: Tensor, cu_seqlens: Optional[Tensor] = None, *, visible: Optional[Tensor] = None
) -> Tensor:
    """k minus its mean over the tokens of each sequence and key head, rounded once.

    k           [batch, kv_heads, tokens, dim], after positions were rotated in
    cu_seqlens  [sequences + 1] integers, not decreasing, from 0 to tokens, on k's device: packed
                sequences, with batch 1; none = each batch entry is one sequence
    visible     bool, broadcasts to [batch, kv_heads, tokens]: tokens that some query sees.  Others
                (padding) are outside the mean and stay as they are.  Not with cu_seqlens.

    The result has k's shape and type.  Softmax does not see the shift, whatever the mask, so any
    attention gives the same output.  Its gradient for W_K, and through q @ k for W_Q, loses the
    direction that a biased backward pass pushes along.  Not for scores with a softcap or with
    learned sinks, which are not shift invariant.  Differentiable; the gradient passes through the
    mean.

    One kernel does it on the CPU and on GPUs of compute capability 8.0 and later, also under
    torch.compile(fullgraph=True) and in CUDA graphs.  Elsewhere PyTorch's operations do, and the
    log has the reason, once.  Raises ValueError if the arguments do not fit each other.
    """
    if k.dim() != 4:
        raise ValueError(f"k has {k.dim()} dimensions, but must have 4")
    if cu_seqlens is not None:
        if k.shape[0] != 1:
            raise ValueError(f"batch is {k.shape[0]}, but must be 1 with cu_seqlens")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens is {list(cu_seqlens.shape)}, but must be [sequences + 1]")
        cu_seqlens = offsets_on(cu_seqlens, k.device)
    if visible is not None:
        if cu_seqlens is not None:
            raise ValueError("visible is given, but must be None with cu_seqlens")
        if visible.dtype != torch.bool:
            raise ValueError(f"visible is {visible.dtype}, but must be torch.bool")
        visible = expanded("visible", visible, k, tuple(k.shape[:3]))
    reason = _unsupported(k)
    if reason is not None:
        _say_composed(reason)
        return _composed(k, cu_seqlens, visible)
    out: Tensor = _center_keys(k, cu_seqlens, visible)
    return out
