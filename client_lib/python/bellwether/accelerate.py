"""bellwether.accelerate.Tracker: watches a model under accelerate, as one of its trackers.

tracker = bellwether.accelerate.Tracker(run="llama")
accelerator = Accelerator(log_with=["tensorboard", tracker])
tracker.attach(model)                       # before accelerator.prepare
accelerator.log({"loss": loss}, step=step)  # goes to all trackers
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Optional

from torch import nn

from ._attach import attach
from ._util.guard import harmless
from .monitor import Monitor
from .trackers import Logger

_Base: Any = importlib.import_module("accelerate.tracking").GeneralTracker


class Tracker(_Base):  # type: ignore[misc,unused-ignore]
    """Takes the arguments of bellwether.attach, and `names` as bellwether.trackers.Logger does.

    What is logged before attach() is left out.  accelerator.end_training() detaches.
    """

    name = "bellwether"
    requires_logging_directory = False
    main_process_only = True  # Only that one is given what the script logs.

    def __init__(self, names: Iterable[str] = (), **attach_arguments: Any) -> None:
        super().__init__()
        self._names, self._arguments = names, attach_arguments
        self._logger: Optional[Logger] = None
        self.monitor: Optional[Monitor] = None

    @property
    def tracker(self) -> Optional[Monitor]:
        """What accelerator.get_tracker("bellwether", unwrap=True) gives."""
        return self.monitor

    def attach(self, model: nn.Module) -> Monitor:
        """In each process, as bellwether.attach."""
        self.monitor = attach(model, **self._arguments)
        self._logger = Logger(self.monitor, names=self._names)
        return self.monitor

    @harmless("accelerate's tracker")
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """A server keeps what the model is, not how it was configured."""

    def log(self, values: dict[str, Any], step: Optional[int] = None, **_: Any) -> None:
        if self._logger is not None:
            self._logger.log(values, step)

    @harmless("accelerate's tracker")
    def finish(self) -> None:
        if self.monitor is not None:
            self.monitor.detach()
