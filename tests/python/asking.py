"""A training that is asked to do things: what the tests of actions share."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

import bellwether
from bellwether.actions import JSON_KINDS

from models import Model, Shape, batch

SHAPE = Shape()
ALL = "attention.mode,attention.center_k,qk.clip,lr.scale,sampling.deepen"
_numbers = itertools.count(1)


def action(kind: str, **fields: Any) -> str:
    """The JSON of an action, as the sender hands it down."""
    word = next(word for word, name in JSON_KINDS.items() if name == kind)
    return json.dumps({"id": f"00000000-{next(_numbers)}", "kind": word, **fields})


class Training:
    """A small model, its optimizer and its monitor; `told` calls mon.step() after each step."""

    def __init__(
        self,
        path: Optional[Path],
        shape: Shape = SHAPE,
        allow: Any = ALL,
        told: bool = True,
        model: Optional[nn.Module] = None,
        optimizer: Optional[Callable[[Any], torch.optim.Optimizer]] = None,
        **attach: Any,
    ) -> None:
        torch.manual_seed(7)
        self.shape, self.told = shape, told
        self.model: Any = Model(shape) if model is None else model
        self.run: Any = self.model
        make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        self.optimizer = make(self.model.parameters())
        self.take_step: Any = None  # Instead of the optimizer's.
        self.monitor: Any = None
        self.steps = 0
        self.losses: list[Tensor] = []
        if path is not None:
            self.monitor = bellwether.attach(
                self.model, record=str(path), run="asked", every=1, rows=0, overhead_budget=1e9,
                allow=allow, **attach,
            )  # fmt: skip

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            loss = self.run(batch(self.shape, self.steps)).float().square().mean()
            loss.backward()
            (self.take_step or self.optimizer.step)()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
            self.steps += 1
            if self.monitor is not None and self.told:
                self.monitor.step(loss=loss)

    def ask(self, kind: str, **fields: Any) -> str:
        """Hands an action down; its id."""
        payload = action(kind, **fields)
        self.monitor.actions.take(payload.encode())
        return str(json.loads(payload)["id"])

    def answer(self, id: str) -> Optional[dict[str, Any]]:
        found: Optional[dict[str, Any]] = self.monitor.status()["actions"]["answers"].get(id)
        return found

    def ends(self) -> None:
        assert self.monitor.flush(20), self.monitor.status()
        status = self.monitor.status()
        assert status["errors"] == 0, status["last_error"]
        self.monitor.detach()
