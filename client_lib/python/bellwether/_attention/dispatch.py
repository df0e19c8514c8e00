"""attention(): the stabilized attention, and PyTorch's where there is no kernel of ours."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch
import torch.nn.functional as functional
from torch import Tensor

from .._kernels.probe import DTYPES
from .._native.attention_c_api import MODES
from .._util import log
from .attention_op import attention_forward, machine_lacks
from .center_keys import INT32_MAX, center_keys, offsets_on
from .composed import composed
from .seen import Seen, as_mask, mask_lacks, mask_of_four, sdpa_mask, visible

HEAD_DIM_MAX = {"cpu": 1024, "cuda": 256}

MASK_TRAINS = "the mask requires a gradient, and one that does not is served"

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


def unsupported(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None) -> Optional[str]:
    """Why no kernel takes these [batch, heads, tokens, dim]; None if one does."""
    device = q.device
    lacks = machine_lacks(device)
    if lacks is not None:
        return lacks
    on_cuda = device.type == "cuda"
    if q.dtype not in DTYPES or (on_cuda and q.dtype == torch.float32):
        served = "bfloat16 and float16" if on_cuda else "bfloat16, float16 and float32"
        return f"q is {q.dtype} on {device.type}, and {served} are served"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}"
    if v.shape[3] == 0:
        return "the values have no elements"
    widest = max(q.shape[3], v.shape[3])
    if widest > HEAD_DIM_MAX[device.type]:
        return f"heads have {widest} elements, and {HEAD_DIM_MAX[device.type]} is the most"
    for dim in (q.shape[3], v.shape[3]) if on_cuda else ():
        if dim % 8:
            return f"heads have {dim} elements, which is no multiple of 8"
    if k.shape[2] == 0:
        return "there are no keys"
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return MASK_TRAINS
    return None


def check(
    q: Tensor, k: Tensor, v: Tensor, mode: str, scale: float, window: int, softcap: float,
    center: bool, enable_gqa: bool,
) -> None:  # fmt: skip
    """Raises ValueError for what no attention computes."""
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


def _key_bounds(lengths: Tensor, batch: int, device: torch.device) -> Tensor:
    """key_lengths as the kernels take them: int32 [batch, 2]."""
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"key_lengths is {lengths.dtype}, but must be torch.int32 or torch.int64")
    if lengths.device != device:
        raise ValueError(f"key_lengths is on {lengths.device}, but must be on {device}")
    if tuple(lengths.shape) not in ((batch,), (batch, 2)):
        raise ValueError(
            f"key_lengths is {list(lengths.shape)}, but must be [{batch}] or [{batch}, 2]"
        )
    if lengths.dim() == 1:
        lengths = torch.stack((torch.zeros_like(lengths), lengths), 1)
    return lengths.clamp(0, INT32_MAX).to(torch.int32).contiguous()


def _seen(
    q: Tensor, k: Tensor, causal: bool, window: int, cu_seqlens: Optional[CuSeqlens],
    mask: Optional[Tensor], key_lengths: Optional[Tensor],
) -> Seen:  # fmt: skip
    for name, given in (("mask", mask), ("key_lengths", key_lengths)):
        if given is not None and cu_seqlens is not None:
            raise ValueError(f"{name} is given, but must be None with cu_seqlens")
    if mask is not None:
        lacks = mask_lacks(mask, q, k)
        if lacks is not None:
            raise ValueError(lacks)
        mask = mask_of_four(mask)
    bounds = None if key_lengths is None else _key_bounds(key_lengths, q.shape[0], q.device)
    return Seen(causal, window, *_packed(cu_seqlens, q.shape[0], q.device), mask, bounds)


def _sinks(sinks: Tensor, q: Tensor) -> Tensor:
    """float32 [heads], with their gradient."""
    if sinks.dim() != 1 or sinks.shape[0] != q.shape[1] or not sinks.is_floating_point():
        raise ValueError(
            f"sinks is {sinks.dtype} {list(sinks.shape)}, but must be floating [{q.shape[1]}]"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}, but must be on {q.device} as q is")
    return sinks.float().contiguous()


def _fallback(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen, softcap: float, center: bool,
    enable_gqa: bool, sinks: Optional[Tensor],
) -> Tensor:  # fmt: skip
    if center:
        k = center_keys(k, seen.of_k, visible=visible(seen, q, k))
    if softcap or sinks is not None:
        return composed(
            q, k, v, scale=scale, mask=as_mask(seen, q, k), softcap=softcap, sinks=sinks,
        )  # fmt: skip
    return _sdpa(q, k, v, scale=scale, enable_gqa=enable_gqa, **sdpa_mask(seen, q, k))


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, *,
    mode: str, center: bool, softcap: float, scale: float, sinks: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator, on what unsupported() has nothing against; lse [batch, heads, q_len]."""
    seed = torch.randint(2**62, ()) if mode == "sr" else None
    o, _, lse, _, _ = attention_forward(
        q, k, v, seen.of_q, seen.of_k, seen.mask, seen.key_bounds, sinks, seed,
        mode, scale, seen.causal, seen.window, softcap, center,
    )  # fmt: skip
    return o, lse


class _Given(NamedTuple):
    """The arguments of a call, which fit each other, as the kernels take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Seen
    sinks: Optional[Tensor]
    scale: float
    reason: Optional[str]  # Why no kernel takes them.


def _given(
    q: Tensor, k: Tensor, v: Tensor, *, mode: str, causal: bool = False, center: bool = False,
    window: int = 0, softcap: float = 0.0, scale: Optional[float] = None,
    enable_gqa: bool = False, cu_seqlens: Optional[CuSeqlens] = None,
    mask: Optional[Tensor] = None, key_lengths: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
) -> _Given:  # fmt: skip
    """Those of attention().  Raises ValueError if they do not fit each other."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    check(q, k, v, mode, scale, window, softcap, center, enable_gqa)
    if center and sinks is not None:
        raise ValueError("center=True with sinks: they do not move with the keys")
    seen = _seen(q, k, causal, window, cu_seqlens, mask, key_lengths)
    sinks = None if sinks is None else _sinks(sinks, q)
    q, k, v = cast_as_autocast(q, k, v)
    return _Given(q, k, v, seen, sinks, scale, unsupported(q, k, v, seen.mask))


def why_not(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Optional[str]:
    """Why no kernel would compute attention() with these arguments, in any mode."""
    try:
        return _given(q, k, v, mode="hp", **arguments).reason
    except ValueError as e:
        return str(e)


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
    mask: Optional[Tensor] = None,
    key_lengths: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
) -> Tensor:
    """softmax(scale q k^T) v whose backward pass is not biased by the rounded output.

    q           [batch, heads, q_len, dim]; bfloat16, float16 or, on the CPU, float32
    k, v        [batch, kv_heads, k_len, dim or v_dim]; kv_heads divides heads, below it with
                enable_gqa
    causal      row t sees the keys up to t + k_len - q_len: the last row sees all
    mode        "hp": unbiased (default); "hpm": also if V goes with the rounding of the
                probabilities, for 8 bytes a row; "sr": no extra memory, more noise; "fa": as
                FlashAttention, biased; "paper", "hp-nolt", "lt": for comparison
    center      gradients as if the keys were centred (see center_keys), over those that the mask
                and key_lengths leave; not with softcap or sinks
    window      each row sees at most so many keys up to its own; 0 = all
    softcap     scores are softcap tanh(score / softcap); 0 = none
    scale       of the scores, above 0; default dim ** -0.5
    cu_seqlens  packed sequences: [sequences + 1] integers from 0 to the tokens, on q's device,
                or a pair for queries and keys; batch is 1 then
    mask        broadcasts to [batch, heads, q_len, k_len]; not with cu_seqlens.  Bool: true = may
                see.  Floating: added to the scores, behind a softcap; -10000 and less hides.  With
                causal and window a key must pass all.
    key_lengths padding: [batch] integers, how many keys there are, or [batch, 2], the first and
                one behind the last.  The diagonal stays.  Not with cu_seqlens.
    sinks       [heads] one more logit of each row, without a value; its gradient is computed

    Returns [batch, heads, q_len, v_dim] in q's type, in the layout of q; a row that sees no key is
    0.  Under autocast q, k and v are cast as for scaled_dot_product_attention.  Works under
    torch.compile(fullgraph=True), activation checkpointing and CUDA graphs; once differentiable.
    Mode sr draws its seed from torch's CPU generator; a CUDA graph replays the captured one.

    Where no kernel serves the call PyTorch's attention computes it, and the log says why, once.  On
    a GPU that are float32 and heads of more than 256 elements, or of no multiple of 8.  Everywhere
    it is a mask that requires a gradient.  With a softcap or sinks every score is in memory then.
    Raises ValueError if the arguments do not fit each other.
    """
    given = _given(
        q, k, v, mode=mode, causal=causal, center=center, window=window, softcap=softcap,
        scale=scale, enable_gqa=enable_gqa, cu_seqlens=cu_seqlens, mask=mask,
        key_lengths=key_lengths, sinks=sinks,
    )  # fmt: skip
    q, k, v, seen, sinks, scale, reason = given
    if reason is not None:
        say_once(reason)
        return _fallback(q, k, v, scale, seen, softcap, center, enable_gqa, sinks)
    return attention_and_lse(
        q, k, v, seen, mode=mode, center=center, softcap=softcap, scale=scale, sinks=sinks
    )[0]
