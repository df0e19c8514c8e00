"""What PyTorch is about to do with a call of scaled_dot_product_attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

SDPA = functional.scaled_dot_product_attention  # Itself, whatever the name means later.
_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # SDPBackend
NAMES = frozenset({"sdpa", *_KERNELS.values()})  # All that kernel_of() returns.

_CAST = frozenset({torch.float32, torch.bfloat16, torch.float16})  # Types that autocast changes.

_autocast_covers: dict[tuple[str, torch.dtype], bool] = {}


def unseen() -> AbstractContextManager[Any]:
    """In it a TorchDispatchMode of the host sees nothing of what we do."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return torch._C._DisableTorchDispatch()
    return nullcontext()


def narrowed_dtype(*tensors: Tensor) -> Optional[torch.dtype]:
    """The type that autocast gives these in a matrix product; None where all have it, or some would
    keep their own."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    types = {t.dtype for t in tensors}
    return dtype if types <= _CAST and types != {dtype} else None


def autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> Optional[torch.dtype]:
    """The type that autocast is about to give q, k and v, of whatever types they are, or None."""
    device, dtype = q.device.type, narrowed_dtype(q, k, v)
    if dtype is None:
        return None
    if isinstance(q, FakeTensor):  # While torch.compile traces.
        return dtype
    key = (device, dtype)
    if key not in _autocast_covers:
        with torch.no_grad():
            small = torch.zeros(1, 1, 1, 8, dtype=torch.float32, device=q.device)
            _autocast_covers[key] = SDPA(small, small, small).dtype == dtype
    return dtype if _autocast_covers[key] else None


def kernel_of(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> str:
    """The implementation that PyTorch would pick for this call."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return "sdpa"
    options = {n: given[n] for n in ("scale", "enable_gqa") if n in given}
    mask, dropout = given.get("attn_mask"), float(given.get("dropout_p", 0.0))
    try:
        # (Of torch.compile's stand-ins for tensors dispatch would ask no device.)
        disabled: Any = torch._C._DisableTorchDispatch
        with disabled() if isinstance(q, FakeTensor) else unseen():
            picked = choose(q, k, v, mask, dropout, bool(given.get("is_causal", False)), **options)
    except (RuntimeError, TypeError):  # A private function: another torch, another signature.
        return "sdpa"
    return _KERNELS.get(int(picked), "sdpa")
