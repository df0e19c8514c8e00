"""bellwether.hf.Callback: watches the model of a transformers.Trainer."""

from __future__ import annotations

from typing import Any, Optional

from transformers import TrainerCallback

from .attaching import attach
from .monitor import Monitor


class Callback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Attaches when training begins and detaches when it ends.

    Takes the arguments of bellwether.attach.  A step is an optimizer step and has the Trainer's
    number; what the Trainer logs for it (loss, grad_norm, learning_rate) is told with it.
    """

    def __init__(self, **attach_arguments: Any) -> None:
        self._arguments = attach_arguments
        self._ended: Optional[int] = None  # A step that is over and not told yet.
        self._logged: dict[str, float] = {}
        self.monitor: Optional[Monitor] = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.monitor = attach(model, **self._arguments)
        if state.global_step:
            self.monitor.event("restore", "resumed", float(state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell()
        # The log of this step comes after it.
        self._ended = state.global_step - 1

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Optional[dict[str, Any]] = None, **_: Any
    ) -> None:
        for name in ("loss", "grad_norm", "learning_rate"):
            value = (logs or {}).get(name)
            if isinstance(value, (int, float)):
                self._logged[name] = float(value)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.monitor is not None:
            self.monitor.event("checkpoint_saved", f"step {state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell()
        if self.monitor is not None:
            self.monitor.detach()

    def _tell(self) -> None:
        if self._ended is None or self.monitor is None:
            return
        logged, self._logged = self._logged, {}
        self.monitor.step(
            self._ended,
            loss=logged.get("loss"),
            grad_norm=logged.get("grad_norm"),
            lr=logged.get("learning_rate"),
        )
        self._ended = None
