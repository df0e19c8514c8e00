"""log Z, largest logit and margin of some tokens' logits.

    log Z = log sum_j exp(z_j)     margin = largest z_j less the second one

A token whose logits are not all finite is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 512  # Tokens of a call, that lie evenly.
_AT_ONCE = 64
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
    for some in torch.split(rows, _AT_ONCE):
        z = some.float()
        finite = z.isfinite().all(1)
        z = torch.where(finite[:, None], z, 0.0)
        log_z = z.logsumexp(1).double()
        first, second = z.topk(2, 1).values.double().unbind(1)
        sums = torch.stack([torch.ones_like(log_z), log_z, first - second])
        count, total, margins = torch.where(finite, sums, 0.0).sum(1).unbind()
        largest = torch.where(finite, torch.stack([log_z, first]), -torch.inf).amax(1)
        found[0] += count
        found[1] += total
        found[4] += margins
        found[2:4] = torch.maximum(found[2:4], largest)
