"""Goal: the tests' list of operations that wait for a GPU has all that client code may write.
Method: each of them, and others that look alike, on tensors that are said to be on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from no_waiting import DEVICE, NoWaiting, Waits

WAIT: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool((t > 0).any()),
    "int": lambda t: int(t.argmax()),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "masked_select": lambda t: t.masked_select(t > 0),
    "list": lambda t: t[:, [0, 1]],
    "written by mask": lambda t: t.index_put_((t > 0,), torch.zeros((), device=DEVICE)),
    "unique": lambda t: torch.unique(t),
    "equal": lambda t: torch.equal(t, t + 1),
    "written by list": lambda t: t.__setitem__([0, 1], 0.0),
    "new_tensor": lambda t: t.new_tensor([1.0]),
    "tensor": lambda t: torch.tensor([1.0], device=DEVICE),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu", torch.float64),
    "cuda": lambda t: torch.zeros(2).to(DEVICE),
    "copy": lambda t: torch.empty(3, 4).copy_(t),
    "repeats": lambda t: torch.repeat_interleave(t, (t[:, 0] > 0).long(), dim=0),
    "bincount": lambda t: torch.bincount(t.long().flatten()),
    "inverse": lambda t: torch.linalg.inv(t @ t.mT),
}
RUN_ON: dict[str, Callable[[Tensor], Any]] = {
    "sums": lambda t: torch.isfinite(t).flatten(1).all(1).to(torch.int64).argmax(),
    "where": lambda t: torch.where(t > 0, 3, t),
    "index_select": lambda t: t.index_select(0, torch.zeros(1, dtype=torch.int64, device=DEVICE)),
    "index": lambda t: t[torch.zeros(1, dtype=torch.int64, device=DEVICE)],
    "full": lambda t: torch.full((2,), -1, device=DEVICE),
    "masked_fill": lambda t: t.masked_fill(t > 0, 0.0),
    "copy on it": lambda t: torch.empty_like(t).copy_(t),
    "type": lambda t: t.to(torch.float64),
    "copy behind": lambda t: torch.empty(3, 4).copy_(t, non_blocking=True),
    "to behind": lambda t: t.to("cpu", non_blocking=True),
    "element": lambda t: t[0, 1:].add_(t[1, :3]),
    "on the host": lambda t: torch.zeros(2)[torch.tensor([True, False])].sum(),
}


@pytest.mark.parametrize("name", WAIT)
def test_an_operation_that_waits_is_found(name: str) -> None:
    t = torch.empty(3, 4, device=DEVICE)
    with pytest.raises(Waits), NoWaiting():
        WAIT[name](t)


@pytest.mark.parametrize("name", RUN_ON)
def test_an_operation_that_runs_on_is_let_through(name: str) -> None:
    t = torch.empty(3, 4, device=DEVICE)
    with NoWaiting() as seen:
        RUN_ON[name](t)
    assert seen.operations
