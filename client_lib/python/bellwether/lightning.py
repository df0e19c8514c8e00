"""bellwether.lightning.Callback: for Lightning's Trainer and for Fabric.

Trainer(callbacks=[bellwether.lightning.Callback()])
Fabric(callbacks=[bellwether.lightning.Callback()])
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Optional

from torch import Tensor, nn

from ._attach import attach
from ._hook.model.candidates import find_candidates
from ._util.guard import harmless
from ._weights import names
from .actions import Action
from .monitor import Monitor

_Base: Any
try:
    _Base = importlib.import_module("lightning.pytorch.callbacks").Callback
except ImportError:
    _Base = importlib.import_module("pytorch_lightning.callbacks").Callback


class Callback(_Base):  # type: ignore[misc,unused-ignore]
    """Attaches to the module before it is compiled or wrapped, detaches when fitting ends.

    Takes the arguments of bellwether.attach.  A step is an optimizer step, with the Trainer's
    number and the loss that training_step returned last; under Fabric, where no loop is known,
    steps are counted by the optimizer, and `monitor.step(loss=...)` tells more.  checkpoint.now
    saves beside the Trainer's own checkpoints; stop sets should_stop.
    """

    def __init__(self, **attach_arguments: Any) -> None:
        super().__init__()
        self._arguments = attach_arguments
        self._steps = 0
        self.monitor: Optional[Monitor] = None

    def _attach(self, module: nn.Module) -> None:
        if self.monitor is None:
            self.monitor = attach(module, **self._arguments)

    # ---- Trainer ----

    @harmless("the Trainer's callback", passes=(ValueError,))
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # A module that is built in configure_model() has nothing to attach to yet.
        found = find_candidates(pl_module, lambda _, module: names.named(module))
        if stage == "fit" and found:
            self._attach(pl_module)

    @harmless("the Trainer's callback", passes=(ValueError,))
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._attach(pl_module)
        if self.monitor is None:
            return

        def save(action: Action) -> str:
            kept = getattr(trainer.checkpoint_callback, "dirpath", None)
            folder = kept or trainer.default_root_dir
            name = f"bellwether-step={trainer.global_step}.ckpt"
            trainer.save_checkpoint(os.path.join(folder, name))
            return name

        def stop(action: Action) -> None:
            trainer.should_stop = True

        self.monitor.offer_action("checkpoint.now", save)
        self.monitor.offer_action("stop", stop)

    @harmless("the Trainer's callback")
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        if self.monitor is not None and self._steps:
            self.monitor.event("restore", "resumed", float(self._steps))

    @harmless("the Trainer's callback")
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.monitor is None or trainer.global_step == self._steps:
            return  # A micro-batch: its optimizer step is still to come.
        self._steps = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        told = loss.detach() if isinstance(loss, Tensor) else None
        self.monitor.step(self._steps - 1, loss=told)

    @harmless("the Trainer's callback")
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._detach()

    @harmless("the Trainer's callback")
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach()

    def _detach(self) -> None:
        if self.monitor is not None:
            self.monitor.detach()
            self.monitor = None

    # ---- Fabric ----

    @harmless("the Trainer's callback", passes=(ValueError,))
    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        self._attach(getattr(module, "module", module))
