"""stabilize(): the scaled_dot_product_attention of a model's modules becomes ours, until told."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._hook.calls.call import AttentionCall, Ours
from .._hook.calls.kernel_choice import SDPA
from .._hook.model.candidates import find_candidates, unwrapped
from .._hook.patches import intercept
from .._hook.running import checkpoint_inside
from .._native.attention_c_api import MODES
from .._weights import names
from .center_keys import center_keys
from .dispatch import (
    MASK_TRAINS,
    attention,
    attention_and_lse,
    cast_as_autocast,
    check,
    say_once,
    unsupported,
    why_not,
)
from .seen import Seen, mask_lacks, mask_of_four, visible

# Besides scaled_dot_product_attention; for people.
_FUNCTIONS = "scaled_dot_product_attention, transformers' eager attention and bellwether.attention"


def _unserved(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout: float
) -> Optional[str]:
    """Why no call with these has a stabilized counterpart, whatever its other arguments."""
    if dropout > 0:
        return "dropout_p is above 0, and 0 is served"
    for t in (q, k, v) if mask is None else (q, k, v, mask):
        if type(t) not in (Tensor, nn.Parameter):
            return f"{type(t).__name__} instead of a plain tensor"
        if t is not mask and t.dim() != 4:
            return f"{t.dim()} dimensions instead of [batch, head, token, dim]"
    if not q.device == k.device == v.device:
        return "q, k and v are on several devices"
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            return "torch.func transforms"
        if checkpoint_inside():
            return "checkpoint() inside the attention module, or no_grad()"
    return None


def _unfit(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Optional[Tensor] = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: Optional[float] = None, enable_gqa: bool = False,
) -> Optional[str]:  # fmt: skip
    """Why this call of scaled_dot_product_attention is none that attention() computes."""
    reason = _unserved(q, k, v, attn_mask, dropout_p)
    if reason is not None:
        return reason
    if q.shape[0] != k.shape[0] or (q.shape[1] != k.shape[1] and not enable_gqa):
        return "q and k differ in their batch or heads"
    if is_causal and q.shape[2] != k.shape[2]:
        return "causal with as many queries as keys only"  # PyTorch aligns the first rows.
    if attn_mask is not None:
        lacks = "is_causal with attn_mask" if is_causal else mask_lacks(attn_mask, q, k)
        if lacks is not None:
            return lacks
    if scale is not None and not scale > 0:
        return "scale is not above 0"
    return unsupported(*cast_as_autocast(q, k, v), mask=attn_mask)


def lacks(call: AttentionCall) -> Optional[str]:
    """Why attention() does not compute a call that was read; None if it does."""
    if call.mask_trains:
        return MASK_TRAINS
    if call.options is not None:
        return _unfit(call.q, call.k, call.v, **call.options)
    if call.unread is not None:
        return call.unread
    if not isinstance(call.ours, Ours):
        return call.ours or f"its attention is {call.kernel()}, and {_FUNCTIONS} are served"
    q, k, v = call.q_view(call.q), call.k_view(call.k), call.v_view(call.v)
    reason = _unserved(q, k, v, call.ours.arguments.get("mask"), call.dropout)
    return reason if reason is not None else why_not(q, k, v, **call.ours.arguments)


def compute(mode: str, call: AttentionCall) -> Any:
    """What the call's function returns, by attention() in this mode where it serves."""
    reason = lacks(call)
    if reason is not None or not isinstance(call.ours, Ours):
        say_once(str(reason))
        return call.run(call.q, call.k, call.v)
    q, k, v = call.q_view(call.q), call.k_view(call.k), call.v_view(call.v)
    return call.ours.result(attention(q, k, v, mode=mode, **call.ours.arguments))


def _visible(q: Tensor, k: Tensor, attn_mask: Optional[Tensor]) -> Optional[Tensor]:
    """Keys without padding; None where it is not known, which centres all of them."""
    if attn_mask is None or q.dim() != 4 or mask_lacks(attn_mask, q, k) is not None:
        return None
    return visible(Seen(mask=mask_of_four(attn_mask)), q, k)


def stabilized(
    mode: str,
    center: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention by our kernels, or by PyTorch where there is none."""
    reason = _unfit(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason is None:
        # Not attention(): a monitor sees this call as scaled_dot_product_attention.
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        check(query, key, value, mode, scale, 0, 0.0, center, enable_gqa)
        seen = Seen(is_causal, mask=None if attn_mask is None else mask_of_four(attn_mask))
        return attention_and_lse(
            *cast_as_autocast(query, key, value), seen, mode=mode, center=center, softcap=0.0,
            scale=scale,
        )[0]  # fmt: skip
    say_once(reason)
    if center and key.dim() == 4:  # Right with any mask, dropout and kernel.
        key = center_keys(key, visible=_visible(query, key, attn_mask))
    result: Tensor = SDPA(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result


class Stabilizer:
    """The handle of stabilize().  Its mode and center may be set at any time, also under
    torch.compile (which compiles anew); they hold from the next forward pass on."""

    def __init__(self, model: nn.Module, mode: str, center: bool) -> None:
        self.mode = mode
        self.center = center
        found = find_candidates(model, lambda _, module: names.named(module))
        if not found:
            raise ValueError(
                f"no module of {type(model).__name__} calls scaled_dot_product_attention"
            )
        self.modules = [name for name, _ in found]  # Names of the attention modules.
        self._model = weakref.ref(model)
        self._uninstall = intercept.install_function(
            [module for _, module in found], self._attention
        )
        self._closed = False

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, but must be one of {', '.join(MODES)}")
        self._mode = mode

    def close(self) -> None:
        """The model's attention is PyTorch's again.  Twice is once."""
        if self._closed:
            return
        self._closed = True
        self._uninstall()
        model = self._model()
        if model is not None:
            _handles.pop(model, None)

    def __enter__(self) -> Stabilizer:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """scaled_dot_product_attention with its own arguments."""
        return stabilized(self._mode, self.center, query, key, value, *args, **kwargs)


_handles: weakref.WeakKeyDictionary[nn.Module, Stabilizer] = weakref.WeakKeyDictionary()


def stabilize(model: nn.Module, *, mode: str = "hp", center: bool = False) -> Stabilizer:
    """Computes the attention of `model` with bellwether.attention from its next forward pass on.

    mode, center  as in bellwether.attention

    Works on every call of scaled_dot_product_attention inside the model's attention modules,
    together with bellwether.attach on the same model and under torch.compile.  Nothing of the
    model itself changes: weights, state_dict and copies are as before.  Calls that have no
    stabilized counterpart (dropout, other devices, ...) stay PyTorch's, with
    centred keys if center is set, and the log says why, once for each reason.

    Returns a handle: set its mode or center to switch in flight, close() it to undo.  A model
    that is stabilized already keeps its handle, which takes these settings.
    Raises ValueError for an unknown mode or a model without such attention.
    """
    model = unwrapped(model)
    handle = _handles.get(model)
    if handle is None:
        handle = _handles[model] = Stabilizer(model, mode, center)
    handle.mode, handle.center = mode, center
    return handle
