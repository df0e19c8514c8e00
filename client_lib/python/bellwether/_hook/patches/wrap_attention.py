"""Attention that is no scaled_dot_product_attention: a module of one's own, told how to read it.

    bellwether.wrap_attention(block.core_attention, layout="sbhd", causal=True)
    monitor = bellwether.attach(model)

Nothing is measured, and nothing computed differently, before attach().
"""

from __future__ import annotations

from typing import Optional

from torch import nn

from ..._util.guard import harmless
from ..calls.contract import ARITHMETIC, ATTRIBUTE, LAYOUTS, Contract, contract_of
from . import class_patches


@harmless("wrap_attention()", lambda module, *_, **__: module, passes=(ValueError,))
def wrap_attention(
    module: nn.Module,
    *,
    layout: str = "bthd",
    causal: bool = False,
    masked: bool = False,
    scale: Optional[float] = None,
    dropout: float = 0.0,
    kernel: str = "custom",
    arithmetic: Optional[str] = None,
) -> nn.Module:
    """Says that `module` is attention: its forward takes q, k, v first (or named query, key,
    value; q, k, v), as its kernel sees them, and returns the output, alone or first in a tuple.

    layout   the order of the dimensions of q, k, v: "bhtd", "bthd", "sbhd" (s, t = tokens), or
             "thd".  Packed sequences lie in "thd"; the forward takes their cu_seqlens by name.  An
             output of one dimension less has its heads side by side.
    causal   every row sees the keys up to its own
    masked   some other mask is applied: then only the key-gradient leak is measured
    scale    of the scores; default: 1 / sqrt(dim)
    dropout  of the probabilities; above 0 the delta statistics are left out
    kernel   its name, for people
    arithmetic  how it rounds to 16 bits.  "fused": the probabilities P and the scores' gradients dS
             before products, and the results, as FlashAttention does; all else is fp32.
             "composed": what each operation of PyTorch returns.  Default: not known.  Then the laws
             have the wider limits of "composed", and the shadow check is left out.

    The weights are found in the module, or in the one around it.  Returns the module.
    Raises ValueError for another layout or arithmetic.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}")
    if arithmetic not in (None, *ARITHMETIC):
        raise ValueError(f"arithmetic: {arithmetic!r} is not one of {', '.join(ARITHMETIC)}")
    known = contract_of(module) is not None
    contract = Contract(layout, causal, masked, scale, dropout, kernel, arithmetic)
    object.__setattr__(module, ATTRIBUTE, contract)
    if not known:
        class_patches.patch(type(module))
    return module


@harmless("unwrap_attention()")
def unwrap_attention(module: nn.Module) -> None:
    """Takes wrap_attention() back."""
    if contract_of(module) is not None:
        object.__delattr__(module, ATTRIBUTE)
        class_patches.restore(type(module))
