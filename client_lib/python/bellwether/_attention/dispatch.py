"""attention(): the stabilized attention, and PyTorch's where there is no kernel of ours."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
import torch.nn.functional as functional
from torch import Tensor

from .._kernels.probe import DTYPES
from .._native.attention_c_api import MODES
from .._util import log
from .attention_op import attention_forward, machine_lacks
from .center_keys import INT32_MAX, center_keys, offsets_on
from .composed import composed

HEAD_DIM_MAX = {"cpu": 1024, "cuda": 256}

CuSeqlens = Union[Tensor, tuple[Tensor, Tensor]]

# Before anybody patches the name: what we fall back to must not lead back to us.
_sdpa = functional.scaled_dot_product_attention
_said: set[str] = set()


# torch.compile calls it while it traces: it cannot log.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def say_once(reason: str) -> None:
    if reason not in _said:
        _said.add(reason)
        log.warning(f"attention is PyTorch's own, not stabilized: {reason}")


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> Optional[str]:
    """Why no kernel takes these [batch, heads, tokens, dim]; None if one does."""
    device = q.device
    lacks = machine_lacks(device)
    if lacks is not None:
        return lacks
    on_cuda = device.type == "cuda"
    if q.dtype not in DTYPES or (on_cuda and q.dtype == torch.float32):
        return f"{q.dtype} on {device.type}"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}"
    if v.shape[3] != q.shape[3]:
        return f"the values have {v.shape[3]} elements a head and the keys {q.shape[3]}"
    if q.shape[3] > HEAD_DIM_MAX[device.type]:
        return f"heads have {q.shape[3]} elements, and {HEAD_DIM_MAX[device.type]} is the most"
    if on_cuda and q.shape[3] % 8:
        return f"heads have {q.shape[3]} elements, which is no multiple of 8"
    if k.shape[2] == 0:
        return "there are no keys"
    return None


def _check(
    q: Tensor, k: Tensor, v: Tensor, mode: str, scale: float, window: int, softcap: float,
    center: bool, enable_gqa: bool,
) -> None:  # fmt: skip
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, but must be one of {', '.join(MODES)}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ValueError(f"{name} has {t.dim()} dimensions, but must have 4")
        if t.device != q.device:  # The kernels would take its address for one of theirs.
            raise ValueError(f"{name} is on {t.device}, but must be on {q.device} as q is")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3]):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has {q.shape[3]} elements a head, but k {k.shape[3]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and not (enable_gqa and kv_heads > 0 and heads % kv_heads == 0):
        raise ValueError(
            f"{kv_heads} key heads do not serve {heads} query heads"
            + ("" if enable_gqa else " without enable_gqa=True")
        )
    if not scale > 0:
        raise ValueError(f"scale is {scale}, but must be above 0")
    if window < 0 or softcap < 0:
        raise ValueError(f"window is {window} and softcap {softcap}, but neither may be negative")
    if window > INT32_MAX:
        raise ValueError(f"window is {window}, but must be at most {INT32_MAX}; 0 sees all")
    if center and softcap:
        raise ValueError("center=True with softcap: capped scores are not shift invariant")


def _packed(
    cu_seqlens: Optional[CuSeqlens], batch: int, device: torch.device
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    if cu_seqlens is None:
        return None, None
    if batch != 1:
        raise ValueError(f"batch is {batch}, but must be 1 with cu_seqlens")
    of_q, of_k = (cu_seqlens, cu_seqlens) if isinstance(cu_seqlens, Tensor) else cu_seqlens
    if of_q.dim() != 1 or of_q.shape != of_k.shape or of_q.shape[0] < 2:
        raise ValueError("cu_seqlens must be [sequences + 1], the same for queries and keys")
    return offsets_on(of_q, device), offsets_on(of_k, device)


def cast_as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast does to the arguments of scaled_dot_product_attention."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (t.to(dtype) if t.dtype in DTYPES else t for t in (q, k, v))
    return q, k, v


def _allowed(
    q_len: int, k_len: int, causal: bool, window: int,
    of_q: Optional[Tensor], of_k: Optional[Tensor], device: torch.device,
) -> Optional[Tensor]:  # fmt: skip
    """[q_len, k_len]: which keys a row sees, as attention.h defines it; None = all of them."""
    if of_q is None and not causal and not window:
        return None
    row = torch.arange(q_len, device=device)[:, None]
    key = torch.arange(k_len, device=device)[None, :]
    allowed = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    last = row + (k_len - q_len)
    if of_q is not None and of_k is not None:
        mine = torch.bucketize(row, of_q[1:], right=True)
        allowed = mine == torch.bucketize(key, of_k[1:], right=True)
        last = row + (of_k[1:] - of_q[1:])[mine]  # Both sequences end at the same position.
    if causal:
        allowed = allowed & (key <= last)
    if window:
        allowed = allowed & (key > last - window)
    return allowed


def allowed_keys(q: Tensor, k: Tensor, causal: bool, window: int) -> Optional[Tensor]:
    """[q_len, k_len]: which keys a row of attention() sees; None = all of them."""
    return _allowed(q.shape[2], k.shape[2], causal, window, None, None, q.device)


def sdpa_mask(
    q: Tensor, k: Tensor, causal: bool, window: int,
    of_q: Optional[Tensor] = None, of_k: Optional[Tensor] = None,
) -> dict[str, Any]:  # fmt: skip
    """The same mask in the words of scaled_dot_product_attention, whose causal aligns the first
    rows."""
    if of_q is None and not window and (not causal or q.shape[2] == k.shape[2]):
        return {"is_causal": causal}
    return {"attn_mask": _allowed(q.shape[2], k.shape[2], causal, window, of_q, of_k, q.device)}


def _fallback(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int, softcap: float,
    center: bool, enable_gqa: bool, of_q: Optional[Tensor], of_k: Optional[Tensor],
) -> Tensor:  # fmt: skip
    if center:
        k = center_keys(k, of_k)
    if softcap:
        allowed = _allowed(q.shape[2], k.shape[2], causal, window, of_q, of_k, q.device)
        return composed(q, k, v, scale=scale, mask=allowed, softcap=softcap)
    mask = sdpa_mask(q, k, causal, window, of_q, of_k)
    return _sdpa(q, k, v, scale=scale, enable_gqa=enable_gqa, **mask)


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, of_q: Optional[Tensor], of_k: Optional[Tensor], *,
    mode: str, center: bool, causal: bool, window: int, softcap: float, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator, on what unsupported() has nothing against; lse [batch, heads, q_len]."""
    seed = torch.randint(2**62, ()) if mode == "sr" else None
    o, _, lse, _, _ = attention_forward(
        q, k, v, of_q, of_k, seed, mode, scale, causal, window, softcap, center
    )
    return o, lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mode: str = "hp",
    center: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    cu_seqlens: Optional[CuSeqlens] = None,
) -> Tensor:
    """softmax(scale q k^T) v whose backward pass is not biased by the rounded output.

    q           [batch, heads, q_len, dim]; bfloat16, float16 or, on the CPU, float32
    k, v        [batch, kv_heads, k_len, dim]; kv_heads divides heads, below it with enable_gqa
    causal      row t sees the keys up to t + k_len - q_len: the last row sees all
    mode        "hp": unbiased (default); "hpm": also if V goes with the rounding of the
                probabilities, for 8 bytes a row; "sr": no extra memory, more noise; "fa": as
                FlashAttention, biased; "paper", "hp-nolt", "lt": for comparison
    center      gradients as if the keys were centred (see center_keys); not with softcap
    window      each row sees at most so many keys up to its own; 0 = all
    softcap     scores are softcap tanh(score / softcap); 0 = none
    scale       of the scores, above 0; default dim ** -0.5
    cu_seqlens  packed sequences: [sequences + 1] integers from 0 to the tokens, on q's device,
                or a pair for queries and keys; batch is 1 then

    Returns [batch, heads, q_len, dim] in q's type, in the layout of q; a row that sees no key is
    0.  Under autocast q, k and v are cast as for scaled_dot_product_attention.  Works under
    torch.compile(fullgraph=True), activation checkpointing and CUDA graphs; once differentiable.
    Mode sr draws its seed from torch's CPU generator; a CUDA graph replays the captured one.

    Where no kernel serves the call (float32 on a GPU, heads of more than 256 elements, ...)
    PyTorch's attention computes it, and the log says why, once.  With a softcap that holds every
    score in memory.  Raises ValueError if the arguments do not fit each other.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check(q, k, v, mode, scale, window, softcap, center, enable_gqa)
    of_q, of_k = _packed(cu_seqlens, q.shape[0], q.device)
    q, k, v = cast_as_autocast(q, k, v)
    reason = unsupported(q, k, v)
    if reason is not None:
        say_once(reason)
        return _fallback(q, k, v, scale, causal, window, softcap, center, enable_gqa, of_q, of_k)
    return attention_and_lse(
        q, k, v, of_q, of_k, mode=mode, center=center, causal=causal, window=window,
        softcap=softcap, scale=scale,
    )[0]  # fmt: skip
