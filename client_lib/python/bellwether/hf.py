"""Hugging Face transformers: the stabilized attention, and a callback for its Trainer.

import bellwether.hf
bellwether.hf.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="bellwether")
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[bellwether.hf.Callback()])
"""

from __future__ import annotations

from typing import Any, Optional

import torch.nn.functional as functional
from torch import Tensor, nn

from ._attention.composed import composed
from ._attention.dispatch import allowed_keys, attention, say_once, sdpa_mask

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

    With a mask (padding), a position bias (T5), sinks (`s_aux`, gpt-oss) or dropout PyTorch
    computes the attention, and the log says so once.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and query.shape[2] > 1
    window = min(sliding_window or 0, key.shape[2])  # A longer one sees all.
    given = {
        "attn_mask is given": attention_mask is not None,
        "position_bias is given": position_bias is not None,
        "s_aux is given": s_aux is not None,
        "dropout_p is above 0": dropout > 0,
    }
    reason = next((reason for reason, there in given.items() if there), None)
    if reason is None:
        o = attention(
            query, key, value, causal=causal, window=window, softcap=softcap or 0.0,
            scale=scaling, enable_gqa=True,
        )  # fmt: skip
        return o.transpose(1, 2).contiguous(), None
    say_once(reason)
    mask: dict[str, Any] = {"attn_mask": attention_mask}  # It has all that is hidden.
    if attention_mask is None:
        mask = sdpa_mask(query, key, causal, window)
    if softcap or s_aux is not None or position_bias is not None:
        if mask.get("is_causal"):
            mask = {"attn_mask": allowed_keys(query, key, causal, window)}
        o = composed(
            query, key, value, scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            mask=mask.get("attn_mask"), bias=position_bias, softcap=softcap or 0.0, sinks=s_aux,
            dropout=dropout,
        )  # fmt: skip
    else:
        o = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=True, **mask
        )
    return o.transpose(1, 2).contiguous(), None


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
