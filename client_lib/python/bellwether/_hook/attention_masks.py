"""What the mask of a call means, in the words of the probe."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

try:
    from torch.nn.attention.bias import CausalBias, CausalVariant
except ImportError:  # Another torch: no such mask can come.
    CausalBias = CausalVariant = None  # type: ignore[assignment,misc]


def mask_of(mask: Any, is_causal: Any, q: Tensor, k: Tensor) -> tuple[bool, Optional[str]]:
    """(causal as the probe has it, why the call's mask is none that it knows, or None).

    The probe's causal mask ends at the bottom right: the last row sees all keys.  That of
    is_causal, and of causal_upper_left(), begins at the top left.
    """
    queries, keys = q.shape[2], k.shape[2]
    if mask is None:
        if is_causal and queries != keys:
            return True, "causal from the top left, with other keys than queries"
        return bool(is_causal), None
    if CausalBias is None or type(mask) is not CausalBias:
        return bool(is_causal), "attn_mask given"
    if (mask.seq_len_q, mask.seq_len_kv) != (queries, keys):
        return True, "a causal mask of another length"
    if queries == keys:
        return True, None
    if mask.variant == CausalVariant.UPPER_LEFT:
        return True, "causal from the top left, with other keys than queries"
    if queries > keys:
        return True, "causal from the bottom right, with rows that see no key"
    return True, None
