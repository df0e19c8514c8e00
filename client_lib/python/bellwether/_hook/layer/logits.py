"""log Z, largest logit and margin of some tokens' logits.

    log Z = log sum_j exp(z_j)     margin = largest z_j less the second one

A token whose logits are not all finite is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 512  # Tokens of a call, that lie evenly.
_AT_ONCE = 1 << 22  # Logits, as float32 16 MiB,
_AT_ONCE_ON_GPUS = 1 << 25  # where a call costs more than what it reads.
STATS = ("rows", "log_z_sum", "log_z_max", "max", "margin_sum")


def new_logits(device: torch.device) -> Tensor:
    """float64 [STATS], to add to."""
    found = torch.zeros(len(STATS), dtype=torch.float64, device=device)
    found[2:4].fill_(-torch.inf)
    return found


def add_logits(logits: Tensor, found: Tensor) -> None:
    """logits [.., words], two or more of them, of any float type.  Nothing waits for a GPU."""
    rows = logits.reshape(-1, logits.shape[-1])
    rows = rows[:: max(1, -(-rows.shape[0] // ROWS))]
    at_once = _AT_ONCE_ON_GPUS if rows.is_cuda else _AT_ONCE
    parts = [_of_rows(some.float()) for some in torch.split(rows, max(1, at_once // rows.shape[1]))]
    log_z, least, first, second = (parts[0] if len(parts) == 1 else torch.cat(parts)).unbind(1)
    # What is not finite is the least or the largest one, or makes a NaN of both.
    finite = (first - least).isfinite()
    sums = torch.stack([torch.ones_like(log_z), log_z, first - second])
    count, total, margins = torch.where(finite, sums, 0.0).sum(1).unbind()
    largest = torch.where(finite, torch.stack([log_z, first]), -torch.inf).amax(1)
    found[0] += count
    found[1] += total
    found[4] += margins
    found[2:4] = torch.maximum(found[2:4], largest)


def _of_rows(z: Tensor) -> Tensor:
    """float64 [rows, 4]: log Z, the least, the largest and the second one; numbers only where all
    are finite."""
    tops = z.topk(2, 1).values
    return torch.cat([z.logsumexp(1)[:, None], z.amin(1)[:, None], tops], 1).double()
