"""The handle of a model under watch, which attach() returns.

Nothing in here may ever raise into training, block it, or change a result.  The work is done by
the steps (_step/steps.py), by the actions (_actions/executor.py) and by the patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Optional

from torch import nn

from . import __version__
from ._actions.callbacks import Callback, check_kind
from ._actions.executor import Actions
from ._hook.layer.layer import Layer
from ._hook.layer.routers import Read
from ._hook.model.parallel import Parallel
from ._native import c_api
from ._server.alerts import Alert, Follower
from ._server.terminal import Terminal
from ._step import optimizer_hooks
from ._step.ending import ending
from ._step.handles import Handles
from ._step.own_log import OwnLog
from ._step.patches import Patches, layers_of
from ._step.reporter import Number
from ._step.status import Status, least_status, status
from ._step.steps import Steps
from ._util.guard import harmless
from ._util.ranks import rank_and_world
from .settings import Settings

handles: Handles[Monitor] = Handles()


def watching(model: nn.Module) -> Optional[Monitor]:
    """The monitor that the model has, if it has one."""
    return handles.of(model)


def live_monitors() -> list[Monitor]:
    """Those of this process that watch now."""
    return [monitor for monitor in handles.all() if monitor.live()]


class Monitor(OwnLog):
    """The handle that attach() returns.  Every method is safe to call at any time."""

    def __init__(
        self,
        model: Optional[nn.Module],
        settings: Settings,
        placed: Optional[Parallel] = None,
        silent: bool = False,
    ) -> None:
        """`silent`: it measures and reports nothing, and only does what all ranks do."""
        self.settings = settings
        # For hooks, tools and tests of ours; users need neither.
        self.steps = Steps(model, settings, placed, silent)
        self.actions = self.steps.actions = Actions(self.steps)
        self._patches = Patches(self.steps)
        self._follower: Optional[Follower] = None

    # ---- attach and detach ----

    def install(
        self,
        model: nn.Module,
        overrides: dict[str, tuple[str, str]],
        weights_only: bool = False,
        agree: bool = False,
    ) -> None:
        """`agree`: all ranks of the job attach now, and agree on what actions they apply."""
        steps, patches = self.steps, self._patches
        steps.layers += layers_of(steps, model, overrides)
        steps.reporter.describe(model)
        patches.add(steps.stop_sampling)
        patches.add(optimizer_hooks.after_step.add(steps.optimizer_stepped))
        patches.add(optimizer_hooks.before_step.add(steps.optimizer_steps))
        patches.add(self.actions.end)
        patches.see_scaling()
        patches.see_clipping(self.steps)
        if steps.reporter.every.on or steps.measures("rank_norms"):
            patches.see_backwards(steps)
        if weights_only:
            for layer in steps.layers:
                if layer.watched:
                    layer.watch_weights()
        else:
            patches.see_forwards(list(steps.layers))
            patches.discover(steps, model, overrides)
            steps.reporter.watch_laws()
            patches.see_compiling(steps.reporter.laws_end)
        self.actions.install(not weights_only, agree)
        patches.show_presence()
        if self.settings.terminal and not steps.silent and rank_and_world()[0] == 0:
            told = Terminal(self.settings, self.known_page_url, steps.reporter.link.server)
            patches.add(lambda: told.end(ending(steps)))
        steps.reporter.events.add("attach", f"bellwether {__version__}")
        handles.keep(model, self)
        steps.begin()

    @harmless("detach()")
    def detach(self) -> None:
        """Sends what is left and takes every patch back.  Twice is once."""
        if self._patches.installed:
            if self.live():
                self._say_goodbye()
            self.steps.health.detached()
            self._patches.take_back()
        model = self.model()
        if model is not None:
            handles.forget(model, self)
        if self._follower is not None:
            self._follower.stop()
        self.steps.reporter.link.close()

    @harmless("detach()")
    def _say_goodbye(self) -> None:
        self.steps.say_goodbye()

    def forked(self) -> None:
        """This process is a child of the one that watches."""
        self.steps.health.end("forked: call attach() again in this process")

    def trouble(self, error: Exception, where: str) -> None:
        """An error of ours: it ends the watching."""
        self.steps.health.trouble(error, where)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.detach()

    def __deepcopy__(self, memo: Any) -> Monitor:
        return self

    def __copy__(self) -> Monitor:
        return self

    def __reduce__(self) -> Any:
        """A model may hold its handle: what is pickled opens elsewhere, and without us."""
        return type(None), ()

    # ---- steps ----

    @harmless("step()")
    def step(
        self,
        step: Optional[int] = None,
        *,
        loss: Number = None,
        grad_norm: Number = None,
        lr: Number = None,
        tokens: Number = None,
    ) -> None:
        """Ends one optimizer step and reports its numbers.

        Call it once per optimizer step, before or after optimizer.step().  `step` is the
        trainer's own count if it is not counted from 0, 0 to 2^53; another one is left out, and
        the steps count on.  Tensors may be on any device and are never waited for.
        """
        if self.live():
            numbers = {"loss": loss, "grad_norm": grad_norm, "learning_rate": lr, "tokens": tokens}
            self.steps.close_explicitly(step, numbers)

    @harmless("count_from()")
    def count_from(self, step: int) -> None:
        """The running step is the trainer's number `step`; call it before anything is reported."""
        self.steps.count_from(step)

    @harmless("event()", passes=(ValueError,))
    def event(self, kind: str, text: str = "", value: float = 0.0) -> None:
        """Something the judges should know of: "restore", "data", "centring_on", ...

        Raises ValueError for a kind that does not exist, also on a handle that is off.
        """
        if not isinstance(kind, str) or kind not in c_api.EVENT_KINDS:
            raise ValueError(f"kind: {kind!r} is not one of {', '.join(c_api.EVENT_KINDS)}")
        if not self.live():
            return
        try:
            self.steps.reporter.events.add(kind, str(text), float(value))
        except Exception as e:  # Whatever the trainer gave.
            self.steps.reporter.frames.leave_out(f"event {kind}", e)

    @harmless("flush()", lambda self, timeout=5.0: False)
    def flush(self, timeout: float = 5.0) -> bool:
        """Waits until everything is durable, at most `timeout` seconds; closes a step that the
        optimizer has ended.  True if it is, or if there is nothing to wait for."""
        reporter = self.steps.reporter
        if self.live():
            self.steps.close_pending()
        if reporter.link.client is None:
            return not self.live()
        return reporter.link.flush(reporter.frames, timeout)

    @harmless(
        "wrap_router()", lambda self, router, *_, **__: router, passes=(ValueError, TypeError)
    )
    def wrap_router(
        self, router: Any, *, name: str = "", experts: Optional[int] = None,
        top_k: Optional[int] = None, layer: Optional[int] = None, read: Optional[Read] = None,
    ) -> Any:  # fmt: skip
        """As bellwether.wrap_router(), also of a function, of which it returns what is to be
        called in its place.  In the first step at the latest.  A function needs `experts`;
        `layer` is its place among the functions, behind all modules, if not said."""
        return self.steps.reporter.experts.wrap(router, name, experts, top_k, layer, read)

    # ---- alerts and actions ----

    @harmless("on_alert")
    def follow_alerts(self, callback: Callable[[Alert], None]) -> None:
        """Calls `callback` with each change of an alert, on a thread of its own."""
        if self._follower is None:
            self._follower = Follower(self.settings, self.known_page_url, callback)

    @harmless("on_action()", passes=(ValueError,))
    def on_action(self, kind: str, callback: Callback) -> None:
        """As bellwether.on_action(), for this model only.

        Raises ValueError for a kind that does not exist, also on a handle that is off.
        """
        check_kind(kind)
        self.actions.callbacks.register(kind, callback)

    @harmless("capture_calls()")
    def capture_calls(self, layers: Optional[Sequence[int]] = None) -> None:
        """Keeps the next sampled call of these layers' attention on disk, of all without `layers`:
        for an alert's callback.  Needs capture_dir; at most capture_files and capture_bytes."""
        if self.steps.capture is not None:
            self.steps.capture.ask(layers)

    @harmless("offer_action()")
    def offer_action(self, kind: str, callback: Callback) -> None:
        """For frameworks: what is done where the user has registered nothing."""
        self.actions.callbacks.offer(kind, callback)

    # ---- for people and other loggers ----

    def live(self) -> bool:
        return self.steps.live()

    @property
    def why_off(self) -> str:
        """Why it does not watch, "" while it does."""
        return self.steps.health.why_off

    @property
    def layers(self) -> Sequence[Layer]:
        """The model's attention modules."""
        return self.steps.layers

    def model(self) -> Optional[nn.Module]:
        """None once it is gone: the handle does not keep it."""
        return self.steps.model()

    @property
    def server(self) -> Optional[str]:
        return self.steps.reporter.link.server

    @property
    def record_path(self) -> Optional[str]:
        return self.steps.reporter.link.record_path

    @property
    def page_url(self) -> str:
        return self.steps.reporter.link.page_url

    @harmless("page_url", lambda self: "")
    def known_page_url(self) -> str:
        """Address of the run's page; "" while it is not known."""
        return self.steps.reporter.link.known_page_url()

    @harmless("overhead()", lambda self: 0.0)
    def overhead(self) -> float:
        """Share of the training time that watching costs; 0 while that is not known."""
        return self.steps.reporter.overhead()

    @harmless("metrics()", lambda self: {})
    def metrics(self) -> dict[str, float]:
        """What was last measured, for any other logger; keys begin with `bellwether/`."""
        return {
            f"bellwether/{name}": value for name, value in self.steps.reporter.metrics().items()
        }

    @harmless("status()", lambda self: least_status(self.steps))
    def status(self) -> Status:
        """What the monitor does and what it misses; see `python -m bellwether doctor`."""
        return status(self.steps, self.actions.status() if self._patches.installed else None)
