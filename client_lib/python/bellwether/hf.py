"""Hugging Face transformers: the stabilized attention, and a callback for its Trainer.

import bellwether.hf
bellwether.hf.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="bellwether")
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[bellwether.hf.Callback()])
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ._attention.composed import composed
from ._attention.dispatch import attention, say_once
from ._attention.seen import Seen, as_mask, sdpa_mask

NAME = "bellwether"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    position_bias: Optional[Tensor] = None,
    s_aux: Optional[Tensor] = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [batch, heads, tokens, dim] and k, v with kv heads in,
    [batch, tokens, heads, dim] out, in mode "hp".

    A mask, a position bias (T5) and sinks (`s_aux`, gpt-oss) are part of it.  With dropout, or
    where the kernels lack something, PyTorch computes the attention, and the log says so once.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and query.shape[2] > 1 and attention_mask is None
    window = 0 if attention_mask is not None else min(sliding_window or 0, key.shape[2])
    if dropout > 0:
        say_once("dropout_p is above 0")
        o = _dropped(
            query, key, value, Seen(causal, window), attention_mask, dropout, scaling,
            softcap or 0.0, position_bias, s_aux,
        )  # fmt: skip
    else:
        o = attention(
            query, key, value, causal=causal, window=window, softcap=softcap or 0.0,
            scale=scaling, enable_gqa=True, mask=_with_bias(attention_mask, position_bias),
            sinks=s_aux,
        )  # fmt: skip
    return o.transpose(1, 2).contiguous(), None


def _with_bias(mask: Optional[Tensor], bias: Optional[Tensor]) -> Optional[Tensor]:
    """Both as one mask; either has all that it hides."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _dropped(
    query: Tensor, key: Tensor, value: Tensor, seen: Seen, mask: Optional[Tensor], dropout: float,
    scaling: Optional[float], softcap: float, bias: Optional[Tensor], sinks: Optional[Tensor],
) -> Tensor:  # fmt: skip
    """The attention with dropout, by PyTorch's operations."""
    if softcap or sinks is not None or bias is not None:
        return composed(
            query, key, value, scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            mask=_with_bias(as_mask(seen, query, key) if mask is None else mask, bias),
            softcap=softcap, sinks=sinks, dropout=dropout,
        )  # fmt: skip
    how = sdpa_mask(seen, query, key) if mask is None else {"attn_mask": mask}
    o: Tensor = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=True, **how
    )
    return o


def register() -> None:
    """Makes attn_implementation="bellwether" known, with the masks of "sdpa"."""
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
    )
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def __getattr__(name: str) -> Any:
    if name != "Callback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._hf_callback import Callback  # Needs transformers, which the rest does not.

    return Callback
