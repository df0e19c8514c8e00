"""Whether what a tensor holds can be read."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def readable(tensor: Tensor) -> bool:
    """Whether its elements lie in memory: others free what they offload, or let others lie."""
    if wrapped(tensor) or tensor.layout != torch.strided:
        return False
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    end = (tensor.storage_offset() + reach + 1) * tensor.element_size()
    try:
        return tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= end
    except (NotImplementedError, RuntimeError):  # It has none: batched gradients.
        return False


def wrapped(tensor: Tensor) -> bool:
    """By torch.func, or no tensor of torch's own: what it holds is not to be had."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return True
    asks = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
    return asks is not None and bool(asks(tensor))
