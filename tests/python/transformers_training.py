"""A model of transformers, trained for three steps with and without us."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

import bellwether


def trained(
    model: nn.Module, given: Mapping[str, Tensor], path: Optional[Path], **watch: Any
) -> tuple[list[float], Any]:
    """(losses, what the monitor says of the layers)

    path  of the recording; None: nothing of ours is there
    watch  told to attach()
    """
    model.train()
    monitor = None
    if path is not None:
        monitor = bellwether.attach(model, record=str(path), **watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(**given, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if monitor is None:
        return losses, None
    assert monitor.flush(20)
    status = monitor.status()
    assert status["errors"] == 0, status["last_error"]
    assert not any(layer["notes"] for layer in status["layers"]), status["layers"]
    found = {k: v for k, v in monitor.metrics().items() if "/layer" in k}
    monitor.detach()
    return losses, found
