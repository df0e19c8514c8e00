"""Sums of a tensor's bits, which are equal where the tensors are, bit for bit."""

from __future__ import annotations

import torch

from .probe import mixed

CHUNK = 1 << 18  # Elements whose places have weights of their own.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D

_weights: dict[torch.device, torch.Tensor] = {}


def weights_on(device: torch.device) -> torch.Tensor:
    if device not in _weights:
        _weights[device] = mixed(torch.arange(CHUNK)).to(device) | 1  # Odd.
    return _weights[device]


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum modulo 2^64 over the elements of w_i b_i: b_i the element's bits, w_i an odd number
    of its place.  An int64 on the tensor's device; nothing is waited for."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    weights = weights_on(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), CHUNK):
        chunk = bits[first : first + CHUNK]
        total = total * _ODD + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return total
