"""Sums of a tensor's bits, which are equal where the tensors are, bit for bit."""

from __future__ import annotations

from typing import Optional

import torch

from .probe import mixed

CHUNK = 1 << 18  # Elements whose places have weights of their own.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D

_WORDS = 1 << 16  # Of eight bytes, whose places have weights of their own.
_TOGETHER = 16  # Chunks that are taken at once on a GPU, so that few kernels do.

_weights: dict[torch.device, torch.Tensor] = {}
_powers: dict[torch.device, torch.Tensor] = {}


def weights_on(device: torch.device) -> torch.Tensor:
    if device not in _weights:
        _weights[device] = mixed(torch.arange(CHUNK, device=device)) | 1  # Odd.
    return _weights[device]


def _powers_on(device: torch.device) -> torch.Tensor:
    """Of _ODD: _TOGETHER - 1 down to 0."""
    if device not in _powers:
        up = torch.full((_TOGETHER,), _ODD, dtype=torch.int64, device=device)
        up[:1].fill_(1)
        _powers[device] = up.cumprod(0).flip(0)
    return _powers[device]


def _signed(x: int) -> int:
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def sum_of_words(flat: torch.Tensor) -> Optional[int]:
    """Another sum of the bits of a tensor on the CPU, of eight bytes at once: 52 bits of it.  An
    element that changes alone always changes the 64 that they are of.  None: it does not lie so."""
    each = 8 // flat.element_size()
    if flat.storage_offset() % each or flat.data_ptr() % 8:
        return None
    weights = weights_on(flat.device)[:_WORDS]
    whole = flat.numel() // each * each
    words = flat[:whole].view(torch.int64)
    sums = torch.zeros(min(_WORDS, words.numel()), dtype=torch.int64, device=flat.device)
    for i in range(0, words.numel(), _WORDS):
        piece = words[i : i + _WORDS]
        sums[: piece.numel()].add_(piece, alpha=_signed(pow(_ODD, i // _WORDS, 1 << 64)))
    total = sums.mul_(weights[: sums.numel()]).sum()
    rest = flat[whole:].view(INTEGERS[flat.element_size()]).to(torch.int64)
    total = total * 3 + (rest * weights[: rest.numel()]).sum()
    return int(mixed(total)) & ((1 << 52) - 1)


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum modulo 2^64 over the elements of w_i b_i: b_i the element's bits, w_i an odd number
    of its place.  An int64 on the tensor's device; nothing is waited for."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    return _of_bits(bits, _TOGETHER if bits.is_cuda else 1)


def _of_bits(bits: torch.Tensor, together: int) -> torch.Tensor:
    weights = weights_on(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    whole = bits.numel() // CHUNK
    for first in range(0, whole, together):
        count = min(together, whole - first)
        chunks = bits[first * CHUNK : (first + count) * CHUNK].view(count, CHUNK)
        sums = (chunks.to(torch.int64) * weights).sum(1)
        if count > 1:
            sums = (sums * _powers_on(bits.device)[-count:]).sum(0, keepdim=True)
        total = total * _signed(_ODD**count) + sums[0]
    rest = bits[whole * CHUNK :]
    if rest.numel():
        total = total * _ODD + (rest.to(torch.int64) * weights[: rest.numel()]).sum()
    return total
