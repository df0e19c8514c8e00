"""The stabilized attention in PyTorch's slot for flash attention implementations.

import bellwether.sdpa
bellwether.sdpa.register()
torch.nn.attention.activate_flash_attention_impl("bellwether")
...                                                 # all of scaled_dot_product_attention on GPUs
torch.nn.attention.restore_flash_attention_impl()   # PyTorch's own again

While it is active, every call of scaled_dot_product_attention for which PyTorch chooses its flash
backend is computed by bellwether.attention, in all models of the process; stabilize() does it for
one model.  PyTorch's choice itself stays as it is: on Hopper it prefers cuDNN, so pin the flash
backend with torch.nn.attention.sdpa_kernel.  What was compiled before stays as it was.

PyTorch carries nothing between a provider's forward and its backward that could hold the residual
of the output.  So the operator is replaced where autograd sees it, and differentiates as
bellwether.attention does, compiled or not.  Under inference_mode, where nothing is
differentiated, it stays PyTorch's.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
import torch.nn.attention
from torch import Tensor
from torch.compiler import config as compiler_config
from torch.library import Library

from ._attention.attention_op import machine_lacks
from ._attention.center_keys import center_keys
from ._attention.dispatch import attention_and_lse, say_once, unsupported
from ._attention.seen import Seen
from ._native.attention_c_api import MODES

NAME = "bellwether"
OPERATOR = "_scaled_dot_product_flash_attention"


class _PyTorchs(torch.autograd.Function):
    """The operator as PyTorch has it, with the gradient that ours hides while it is active."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool,
        return_debug_mask: bool, scale: Optional[float],
    ) -> tuple[Any, ...]:  # fmt: skip
        with torch._C._AutoDispatchBelowAutograd():
            result: tuple[Any, ...] = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        o, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = result
        ctx.save_for_backward(query, key, value, o, lse, cu_q, cu_k, seed, offset)
        ctx.settings = (max_q, max_k, dropout_p, is_causal, scale)
        ctx.mark_non_differentiable(*(t for t in result[1:] if isinstance(t, Tensor)))
        return result

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, *_none: Any) -> tuple[Optional[Tensor], ...]:
        query, key, value, o, lse, cu_q, cu_k, seed, offset = ctx.saved_tensors
        max_q, max_k, dropout_p, is_causal, scale = ctx.settings
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            d_o, query, key, value, o, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal,
            seed, offset, scale=scale,
        )  # fmt: skip
        return dq, dk, dv, None, None, None, None


def _unfit(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, scale: Optional[float],
) -> Optional[str]:  # fmt: skip
    """Why this call of the operator is none that our attention computes."""
    if dropout_p > 0:
        return "dropout_p is above 0"
    if return_debug_mask:
        return "return_debug_mask is set"
    if is_causal and query.shape[2] != key.shape[2]:
        return "causal with as many queries as keys only"  # PyTorch aligns the first rows.
    if scale is not None and not scale > 0:
        return "scale is not above 0"
    return unsupported(query, key, value)


class _Provider:
    """What activate_flash_attention_impl keeps; remove() undoes the activation."""

    def __init__(self, mode: str, center: bool) -> None:
        self._mode, self._center = mode, center
        self._library: Optional[Library] = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library.impl(  # type: ignore[no-untyped-call]
            OPERATOR, self._flash_attention, "AutogradCUDA"
        )
        self._tag: str = compiler_config.cache_key_tag
        self._compile_anew(f"{self._tag} {NAME} {mode} {center}".strip())

    def _compile_anew(self, tag: str) -> None:
        """What torch.compile remembers of the operator is of the implementation before: graphs, on
        disk, too, and what a dispatch found."""
        compiler_config.cache_key_tag = tag
        operator = torch.ops.aten._scaled_dot_product_flash_attention.default
        getattr(operator, "_dispatch_cache", {}).clear()

    def remove(self) -> None:
        self._library = None  # What it registered goes with it.
        self._compile_anew(self._tag)

    def _flash_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: Optional[float] = None,
    ) -> tuple[Any, ...]:
        """The operator: o, logsumexp, two of packed sequences, the lengths, three of dropout."""
        reason = _unfit(query, key, value, dropout_p, is_causal, return_debug_mask, scale)
        if reason is not None:
            say_once(reason)
            if self._center:
                key = center_keys(key)
            others: tuple[Any, ...] = _PyTorchs.apply(  # type: ignore[no-untyped-call]
                query, key, value, dropout_p, is_causal, return_debug_mask, scale
            )
            return others
        o, lse = attention_and_lse(
            query, key, value, Seen(is_causal), mode=self._mode, center=self._center,
            softcap=0.0, scale=query.shape[-1] ** -0.5 if scale is None else scale,
        )  # fmt: skip
        # Nothing is dropped and nothing shown, in the shapes that compiled code asserts.
        seed, offset = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
        mask = query.new_empty(0)
        return o, lse, None, None, query.shape[2], key.shape[2], seed, offset, mask


def _activate(mode: str, center: bool) -> _Provider:
    reason: Optional[str] = "torch sees no GPU"
    if torch.cuda.is_available():
        reason = machine_lacks(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        raise RuntimeError(f'the flash attention "{NAME}" cannot be activated: {reason}')
    return _Provider(mode, center)


def has_slot() -> bool:
    """Whether this torch takes flash attention from others."""
    return hasattr(torch.nn.attention, "register_flash_attention_impl")


def register(*, mode: str = "hp", center: bool = False) -> None:
    """Makes the name "bellwether" known to torch.nn.attention.activate_flash_attention_impl.

    mode, center  as in bellwether.attention; those of the last call hold from an activation on

    Raises RuntimeError if this torch has no such slot; so does the activation where there is no
    GPU, or no kernel for it.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, but must be one of {', '.join(MODES)}")
    if not has_slot():
        raise RuntimeError(
            f"torch {torch.__version__} has no register_flash_attention_impl: "
            "use bellwether.stabilize"
        )
    torch.nn.attention.register_flash_attention_impl(
        NAME, register_fn=functools.partial(_activate, mode, center)
    )
