"""Other people's trackers: their numbers become the run's, and the run's verdicts their alerts.

trainer.metrics_processor.logger = bellwether.trackers.Logger(
    mon, beside=trainer.metrics_processor.logger)                     # torchtitan
tracking.logger["bellwether"] = bellwether.trackers.Logger(mon)       # verl
mon.follow_alerts(bellwether.trackers.alerts_to(wandb))               # W&B; so does trackio

accelerate's is bellwether.accelerate.Tracker.  For transformers and TRL there is
bellwether.hf.Callback, and for Lightning bellwether.lightning.Callback.
"""

from __future__ import annotations

import contextvars
import fnmatch
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

from ._server.alerts import Alert
from ._util import files
from ._util.guard import harmless
from .rl import METRICS_MAX, is_number, metrics_of

# What trainers call the numbers that mon.step() takes, the first that is there.
_NUMBERS = {
    "loss": ("loss", "train_loss", "train/loss", "loss_metrics/global_avg_loss"),
    "grad_norm": ("grad_norm", "train/grad_norm", "gradient_norm", "actor/grad_norm"),
    "lr": ("learning_rate", "lr", "train/learning_rate", "train/lr", "actor/lr"),
}
_TITLE_MAX = 63  # W&B takes fewer than 64 characters.
_LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}  # By severity.


class Logger:
    """Has `log`, `close` and `finish` as loggers of torchtitan, verl and others have.

    monitor  that attach() has returned
    beside   the logger in whose place this one comes: it gets everything first, with the newest
             numbers of `monitor` among it
    names    patterns of numbers that are taken as mon.log() takes them, beside those of
             bellwether.rl.NAMES; * is any number of characters

    Call it between the optimizer's step and the next forward, as trainers do: the numbers are of
    that step, whatever `step` says.  Loss, gradient norm and learning rate are told as mon.step()
    tells them, unless the loop calls that itself.
    """

    def __init__(self, monitor: Any, beside: Any = None, names: Iterable[str] = ()) -> None:
        self.monitor, self._beside = monitor, beside
        self._names = (names,) if isinstance(names, str) else tuple(names)

    def log(self, data: Any, step: Optional[int] = None, **more: Any) -> None:
        if self._beside is not None:
            # Its errors are the trainer's, as before.
            self._beside.log({**data, **self.monitor.metrics()}, step, **more)
        self._take(data)

    @harmless("a tracker's log()")
    def _take(self, data: Any) -> None:
        if not isinstance(data, Mapping):
            return
        found = {
            number: next((data[name] for name in names if is_number(data.get(name))), None)
            for number, names in _NUMBERS.items()
        }
        if any(value is not None for value in found.values()):
            self.monitor.numbers(**found)
        own = metrics_of(data)
        for name, value in data.items():
            wanted = any(fnmatch.fnmatchcase(str(name), each) for each in self._names)
            if wanted and is_number(value) and len(own) < METRICS_MAX:
                own[name] = value
        if own:
            self.monitor.log_alike(own)

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def finish(self, *_: Any, **__: Any) -> None:
        """The monitor stays: its script detaches it, or the end of the process does."""
        if hasattr(self._beside, "finish"):
            self._beside.finish()


def _level(target: Any, severity: str) -> Any:
    """In the package's own words."""
    module = target if hasattr(target, "AlertLevel") else None
    package = module or sys.modules.get(type(target).__module__.partition(".")[0])
    name = _LEVELS.get(severity, "INFO")
    return getattr(getattr(package, "AlertLevel", None), name, name)


def alerts_to(target: Any, resolved: bool = False) -> Callable[[Alert], None]:
    """For attach(on_alert=) or mon.follow_alerts(): each change of an alert becomes one of the
    tracker's.

    target    wandb or trackio after their init(), or what that has returned
    resolved  also that it is over, as information
    """
    here = contextvars.copy_context()  # trackio knows its run by that, on this thread alone.

    def tell(alert: Alert) -> None:
        over = alert.state != "firing"
        if over and not resolved:
            return
        level = _level(target, "info" if over else alert.severity)
        where = "" if alert.layer is None else f" in layer {alert.layer}"
        where += "" if alert.head is None else f" head {alert.head}"
        title = f"{'over' if over else alert.severity}: {alert.rule}{where}"
        cause = "" if alert.cause in ("", "unknown") else f" [{alert.cause}]"
        text = f"{files.one_line(alert.summary)}{cause}; step {alert.step}"
        here.copy().run(target.alert, title=title[:_TITLE_MAX], text=text, level=level)

    return tell
