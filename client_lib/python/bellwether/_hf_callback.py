"""bellwether.hf.Callback: watches the model of a transformers.Trainer."""

from __future__ import annotations

from typing import Any, Optional

from transformers import TrainerCallback

from ._attach import attach
from ._util.guard import harmless
from .actions import Action
from .monitor import Monitor
from .rl import give


class Callback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Attaches when training begins and detaches when it ends.

    Takes the arguments of bellwether.attach.  A step is an optimizer step and has the Trainer's
    number; what the Trainer logs for it (loss, grad_norm, learning_rate) is told with it.  Of what
    TRL's trainers log it takes the names of bellwether.rl.NAMES (reward, kl, entropy) as mon.log().
    checkpoint.now saves as the Trainer does, at the end of the next step; stop ends training there.
    """

    def __init__(self, **attach_arguments: Any) -> None:
        self._arguments = attach_arguments
        self._ended: Optional[int] = None  # A step that is over and not told yet.
        self._logged: dict[str, float] = {}
        self._save = self._stop = False  # Asked for by an action.
        self.monitor: Optional[Monitor] = None

    @harmless("the Trainer's callback", passes=(ValueError,))
    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.monitor = attach(model, **self._arguments)
        self.monitor.offer_action("checkpoint.now", self._ask_to_save)
        self.monitor.offer_action("stop", self._ask_to_stop)
        if state.global_step:
            self.monitor.event("restore", "resumed", float(state.global_step))

    @harmless("the Trainer's callback")
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell()

    @harmless("the Trainer's callback")
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell()
        control.should_save = control.should_save or self._save
        control.should_training_stop = control.should_training_stop or self._stop
        self._save = False
        # The log of this step comes after it.
        self._ended = state.global_step - 1

    @harmless("the Trainer's callback")
    def on_log(
        self, args: Any, state: Any, control: Any, logs: Optional[dict[str, Any]] = None, **_: Any
    ) -> None:
        for name in ("loss", "grad_norm", "learning_rate"):
            value = (logs or {}).get(name)
            if isinstance(value, (int, float)):
                self._logged[name] = float(value)
        if self.monitor is not None and logs:
            give(self.monitor.log_alike, logs)  # A Trainer logs what it has gathered.

    @harmless("the Trainer's callback")
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.monitor is not None:
            self.monitor.event("checkpoint_saved", f"step {state.global_step}")

    @harmless("the Trainer's callback")
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell()
        if self.monitor is not None:
            self.monitor.detach()

    def _ask_to_save(self, action: Action) -> str:
        self._save = True
        return "saved by the Trainer at the end of the step"

    def _ask_to_stop(self, action: Action) -> str:
        self._stop = True
        return "the Trainer stops at the end of the step"

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
