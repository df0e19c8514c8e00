"""A running model under watch, from one optimizer step to the next.

The life of a step: forwards put taps around the attention, backwards add statistics to the
layers' buffers, the optimizer's post hook measures the weights, and the step is closed, which
pushes one frame, by mon.step() or else when the next forward begins.  Nothing in here may ever
raise into training, block it, or change a result.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Optional

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from . import __version__
from ._actions.callbacks import Callback, check_kind
from ._actions.executor import Actions
from ._hook import intercept, weights
from ._hook.layer import Layer
from ._hook.parallel import Parallel
from ._kernels import probe
from ._kernels.memory import Memories, capturing
from ._native import c_api
from ._native.run_client import RunClient
from ._server.alerts import Follower
from ._step import grad_scale, optimizer_hooks
from ._step.boundaries import Boundaries
from ._step.frames import number_at_hand
from ._step.governor import Governor
from ._step.handles import Handles
from ._step.outgoing import Number, Outgoing
from ._step.report import layer_status
from ._step.step_weights import StepWeights
from ._step.trainers import Trainers
from ._util import log
from ._util.guard import harmless, in_words, watched_by
from ._util.integers import step as step_number
from ._util.presence import Presence
from .settings import Settings

_SEED_MASK = 0xFFFFFFFFFFFFFFFF
BACKWARDS_MAX = 64  # Backward passes without a step, then one warning.

handles: Handles[Monitor] = Handles()


def watching(model: nn.Module) -> Optional[Monitor]:
    """The monitor that the model has, if it has one."""
    return handles.of(model)


def live_monitors() -> list[Monitor]:
    """Those of this process that watch now."""
    return [monitor for monitor in handles.all() if monitor.live()]


class Monitor:
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
        self.silent = silent
        self.parallel = placed or Parallel()
        self.lock = threading.RLock()
        self.layers: list[Layer] = []
        self.candidates = 0
        self.memories = Memories()
        self.out = Outgoing(settings, self.parallel, self.layers, self.memories, self.lock)
        self._cannot: dict[str, Optional[str]] = {}
        self.hook_seconds = 0.0  # Of the running step.
        self.why_off = "disabled" if settings.disabled else ""
        self._model = weakref.ref(model) if model is not None else None
        self._alive = False
        self._installed = False
        self._intercepts = False  # The forward pass is patched.
        self._presence: Optional[Presence] = None
        self._errors = 0
        self._error_text = ""
        self._step = 0
        self._explicit = False  # mon.step() is called: the optimizer's hook is not the step.
        self._counts_from_attach = True
        self._pending = False  # An optimizer step ended that is not closed yet.
        self._sampling = False
        self._passing = -1  # The backward pass of a compiled module that was heard of last.
        self._warned_backwards = False
        self._step_began = time.perf_counter()
        self._trainers = Trainers(self._parameters_now)
        self._unhook: list[Callable[[], None]] = []  # What ends the optimizers' hooks.
        self.graphed_step = False  # optimizer.step() was captured in a CUDA graph.
        self._boundaries = Boundaries()
        self._weights = StepWeights(settings.gram_bytes, self.parallel, self.model)
        self.hooks_called = 0  # Of optimizers, of any model.
        self._centred = False
        self._follower: Optional[Follower] = None
        self._acting = Actions(self)
        watched_by(self)

    # ---- what the hooks ask ----

    def live(self) -> bool:
        return self._alive

    def _parameters_now(self) -> Iterable[torch.Tensor]:
        model = self.model()
        return model.parameters() if model is not None else ()

    def measures(self, part: str) -> bool:
        return part in self.settings.stats

    def cannot_measure_on(self, device: str) -> Optional[str]:
        """None if the kernels run on devices of this type, else why not."""
        if device not in self._cannot:
            self._cannot[device] = probe.available(device)
        return self._cannot[device]

    def samples_call(self, calls_before: int) -> bool:
        """Whether a call is measured in this step, after so many that were."""
        return self._sampling and (calls_before == 0 or self.settings.microbatches == "all")

    def captures_call(self, calls_before: int) -> bool:
        """Whether a CUDA graph measures a call, after so many that were captured in one go."""
        return calls_before == 0 or self.settings.microbatches == "all"

    def row_seed(self, layer: int) -> int:
        """Other rows each step and layer; the same on every rank.  In a CUDA graph the part of
        the step comes from the gate, when it runs."""
        step = 0 if capturing() else self._step_seed()
        return (step + layer) & _SEED_MASK

    def _step_seed(self) -> int:
        return (self._step * 0x9E3779B97F4A7C15) & _SEED_MASK

    def samples_step(self) -> bool:
        """Whether the running step is sampled: eager models go without taps between samples."""
        return self._sampling

    def forward_begins(self) -> None:
        self._boundaries.computes()
        if self.in_backward():  # A recomputation.
            return
        self._trainers.forward()
        if self._alive and self._pending and not capturing():
            self._close({})

    def backward_begins(self) -> None:
        """A compiled module's forward tells nothing: its backward may be the step's first word."""
        self._boundaries.computes()
        passing = torch._C._current_graph_task_id()
        if passing != self._passing:  # An optimizer may step within one, after each weight.
            self._passing = passing
            self._trainers.forward()
        if self._alive and self._pending and not capturing():
            self._close({})

    @harmless("GradScaler.scale()")
    def loss_scaled(self, factor: Optional[torch.Tensor]) -> None:
        """A GradScaler has multiplied the loss of the next backward."""
        if factor is None or not self._alive:
            return
        self.forward_begins()
        self.out.scaling.scaled(factor, self._sampling)

    @harmless("GradScaler.step()")
    def step_withheld(self, scaler: Any, optimizer: Any) -> None:
        """GradScaler.step() has called no hook: a gradient was not finite, or what it called is
        compiled.  The sample of a skipped step would tell of numbers that nobody uses; the retry is
        the step's, unless mon.step() counts it as one."""
        if not self._alive:
            return
        if not self.out.scaling.skips(scaler, optimizer, self._trainers, self.layers):
            return
        if not self._explicit and not self._pending:
            self._drop_sample()
        self.out.scaling.skipped()

    def _drop_sample(self) -> None:
        """The running step begins anew."""
        for layer in self.layers:
            layer.fired_in_step = layer.calls_in_step = 0
        if not self._sampling:
            return
        self.out.scaling.drop_sample()
        self.out.sample(self._weights)
        self._begin_step()
        if self.out.scaling.drops_too_many():
            self._sampling = False
            self.memories.begin_step(False, 0)

    def centring_changed(self, step: Optional[int] = None) -> None:
        """A layer's keys are centred now (from `step` on), or not any more.  What the first step
        has is told when the stream begins."""
        centred = any(layer.centred for layer in self.layers)
        if self.numbered() and centred != self._centred:
            kind = "centring_on" if centred else "centring_off"
            self.tell(self._step if step is None else step, kind)
        self._centred = centred

    def weights_in_backward(self) -> bool:
        """Whether the weights are whole while gradients are computed only (FSDP, ZeRO-3)."""
        return self._weights.whole_in_backward_only()

    @staticmethod
    def in_backward() -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def passes(self, count: int) -> None:
        """Forward or backward passes of a layer were counted: between samples an eager model has
        no taps, and its backwards are not heard of."""
        if self._warned_backwards or self._explicit:
            return
        if count > BACKWARDS_MAX:
            self._warned_backwards = True
            log.warning(
                f"{BACKWARDS_MAX} passes without an optimizer step; if the optimizer is "
                "not from torch.optim, call mon.step() once per step"
            )

    def trouble(self, error: Exception, where: str) -> None:
        """An error of ours: it ends the watching, which is told once.  Whatever it has left behind
        half done, no number is made from it."""
        self._errors += 1
        self._error_text = f"{where}: {in_words(error)}"
        if self._errors > 1 and not self._alive:
            return
        self._alive = False
        self.why_off = self._error_text
        log.warning(f"watching is off: {self._error_text} (training is not affected)")
        self.memories.begin_step(False, 0)

    # ---- attach and detach ----

    def install(
        self,
        model: nn.Module,
        overrides: dict[str, tuple[str, str]],
        weights_only: bool = False,
        agree: bool = False,
    ) -> None:
        """`agree`: all ranks of the job attach now, and agree on what actions they apply."""
        pattern = self.settings.layers

        def named(name: str, module: nn.Module) -> bool:
            return weights.named(module) or weights.override_for(overrides, name) is not None

        for name, module in intercept.find_candidates(model, named):
            watched = pattern is None or re.search(pattern, name) is not None
            paths = weights.override_for(overrides, name)
            self.layers.append(Layer(self, name, module, watched, paths))
        self.candidates = len(self.layers)
        self.out.metadata = {
            "framework": f"torch {torch.__version__}"[:64],
            "model": type(model).__name__[:128],
        }
        self._installed = True  # From here on detach() has something to take back.
        self._unhook.append(optimizer_hooks.after_step.add(self._optimizer_stepped))
        if "lr.scale" in self.settings.allow:
            self._unhook.append(optimizer_hooks.before_step.add(self._optimizer_steps))
        grad_scale.install(self)
        if weights_only:
            for layer in self.layers:
                if layer.watched:
                    layer.watch_weights()
        else:
            intercept.install(self.layers)
            self._intercepts = True
        self._acting.install(not weights_only, agree)
        self._presence = Presence()
        self._alive = True
        self.out.events.add("attach", f"bellwether {__version__}")
        handles.keep(model, self)
        self._begin_step()

    @harmless("detach()")
    def detach(self) -> None:
        """Sends what is left and takes every patch back.  Twice is once."""
        if self._installed:
            if self._alive:
                self._take_back(self._say_goodbye)
            self._alive = False
            for undo in (
                lambda: self.memories.begin_step(False, 0),
                *self._unhook,
                self._acting.end,
                lambda: grad_scale.uninstall(self),
                lambda: intercept.uninstall(self.layers if self._intercepts else []),
                lambda: self._presence.end() if self._presence is not None else None,
            ):
                self._take_back(undo)
            self._installed = False
            self.why_off = self.why_off or "detached"
        model = self.model()
        if model is not None:
            handles.forget(model, self)
        if self._follower is not None:
            self._follower.stop()
        self.out.link.close()

    def forked(self) -> None:
        """This process is a child of the one that watches."""
        self._alive = False
        self.why_off = self.why_off or "forked: call attach() again in this process"

    def _say_goodbye(self) -> None:
        if self._pending:
            self._close({})
        self.out.tell_judged(ended=True)
        self.out.link.say_goodbye(self.out.frames, max(0, self._step - 1))

    @harmless("detach()")
    def _take_back(self, undo: Callable[[], None]) -> None:
        """One of the things that detach() does, whatever becomes of the others."""
        undo()

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
        """Ends one optimizer step and tells what it gave.

        Call it once per optimizer step, before or after optimizer.step().  `step` is the
        trainer's own count if it is not counted from 0, 0 to 2^53; another one is left out, and
        the steps count on.  Tensors may be on any device and are never waited for.
        """
        if not self._alive:
            return
        self._explicit = True
        try:
            number = self._step if step is None else step_number(step)
            self._counts_from_attach = False
            if number != self._step:
                self._step = number
                self.out.governor.restart(number)
        except ValueError as e:
            self.out.frames.leave_out("step", e)
        self._close({"loss": loss, "grad_norm": grad_norm, "learning_rate": lr, "tokens": tokens})

    @harmless("count_from()")
    def count_from(self, step: int) -> None:
        """The running step is the trainer's number `step`, told before anything was reported."""
        try:
            self._step = step_number(step)
        except ValueError as e:
            self.out.frames.leave_out("step", e)
            return
        self._counts_from_attach = False
        self.out.governor.restart(self._step)
        self._begin_step()

    def _begin_step(self) -> None:
        self._sampling = not self.silent and self.out.governor.due(self._step)
        self._weights.begin_step()
        self.out.scaling.begin_step(self._sampling)
        self.memories.begin_step(self._sampling, self._step_seed())

    @harmless("optimizer hook")
    def _optimizer_steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """With lr.scale allowed only."""
        if not self._alive or capturing():
            return
        if self._acting.rates.factor != 1.0 and self._trainers.trains(optimizer):
            self._acting.rates.before_step(optimizer)

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._rates_back()  # Whatever has become of us since it began.
        self._step_seen(optimizer)

    @harmless("optimizer hook")
    def _rates_back(self) -> None:
        self._acting.rates.after_step()

    @harmless("optimizer hook")
    def _step_seen(self, optimizer: Optimizer) -> None:
        if not self._alive or capturing():
            self.graphed_step = self.graphed_step or self._alive
            return
        start = time.perf_counter()
        self.hooks_called += 1
        ahead: Optional[int] = None
        trains = self._trainers.trains(optimizer)
        if trains:
            ahead = self._boundaries.optimizer_stepped(id(optimizer), self._explicit)
        if trains and self._trainers.ends_step(optimizer):
            group = optimizer.param_groups[0]
            self.out.rate = number_at_hand(group.get("lr"))  # None: it sets its own, or a GPU's.
            self.out.metadata["weight_decay"] = number_at_hand(group.get("weight_decay")) or 0.0
            if self._pending:
                self._close({})
            self.out.scaling.stepped(optimizer, self._explicit)
            self._measure_weights()
            self._pending = not self._explicit
        if ahead is not None:
            self._acting.boundary(self._step + ahead)
        self.hook_seconds += time.perf_counter() - start

    def _measure_weights(self) -> None:
        if self._sampling and self.measures("sigma"):
            self._weights.measure(self.layers)

    @harmless("end of the step")
    def _close(self, told: dict[str, Number]) -> None:
        """Ends the running step: one frame, then the next step begins."""
        start = time.perf_counter()
        self._pending = False
        sampled = self._sampling
        step_seconds = start - self._step_began
        self._measure_weights()
        if self.silent:
            self._push_nothing()
        else:
            weights = self._weights if sampled else None
            self.out.push(
                self._step, told, step_seconds, self.hook_seconds, weights, self._acting,
                self._counts_from_attach,
            )  # fmt: skip
            self.out.hear(self._weights, self._acting)
        for layer in self.layers:
            layer.fired_in_step = layer.calls_in_step = layer.captured = 0
        now = time.perf_counter()
        self.out.count(self._step, self.hook_seconds + now - start, now - self._step_began, sampled)
        self._step += 1
        self.out.events.step_ends()
        if self._boundaries.closed(self._explicit, self.graphed_step):
            self._acting.boundary(self._step)
        self.hook_seconds = 0.0
        self._step_began = time.perf_counter()
        self._begin_step()

    @harmless("overhead()", lambda self: 0.0)
    def overhead(self) -> float:
        """Share of the training time that watching costs; 0 while that is not known."""
        return self.out.overhead()

    # ---- what goes out ----

    def tell(self, step: int, kind: str, text: str = "", value: float = 0.0) -> None:
        """An event of `step`, the running one or the next."""
        self.out.events.add(kind, text, value, next_step=step > self._step)

    def _push_nothing(self) -> None:
        if not self.out.link.begun:
            self.out.number_layers()
            self._acting.ranks_agree()
        self.out.events.of_step.clear()

    def numbered(self) -> bool:
        """Whether the layout was told: layers that call attention later are left out."""
        return self.out.link.begun

    # ---- what actions ask of it ----

    @property
    def governor(self) -> Governor:
        return self.out.governor

    def model(self) -> Optional[nn.Module]:
        return self._model() if self._model is not None else None

    def client(self) -> Optional[RunClient]:
        return self.out.link.client

    def current_step(self) -> int:
        return self._step

    def optimizers(self) -> list[Optimizer]:
        """Those that were seen to train the model."""
        return self._trainers.known()

    def own_rate(self) -> Optional[float]:
        """The learning rate of the first group, as the trainer has set it."""
        return self.out.rate

    def weights_changed(self) -> None:
        """By an action: what differs from before is not the optimizer's doing."""
        self._weights.forget()

    # ---- for people and other loggers ----

    @property
    def server(self) -> Optional[str]:
        return self.out.link.server

    @property
    def record_path(self) -> Optional[str]:
        return self.out.link.record_path

    @property
    def page_url(self) -> str:
        return self.out.link.page_url

    @harmless("metrics()", lambda self: {})
    def metrics(self) -> dict[str, float]:
        """What was last measured, for any other logger; keys begin with `bellwether/`."""
        found = dict(self.out.frames.last)
        found["sampling_period"] = float(self.out.governor.period)
        found["hook_overhead"] = self.overhead()
        return {f"bellwether/{name}": value for name, value in found.items()}

    def _told_least(self) -> dict[str, Any]:
        """What is told when more cannot be."""
        return {
            "live": self._alive, "why_off": self.why_off, "run": self.settings.run,
            "errors": self._errors, "last_error": self._error_text or self.out.link.why_not,
            "layers": [], "samples": 0, "numbers_left_out": {},
        }  # fmt: skip

    @harmless("status()", _told_least)
    def status(self) -> dict[str, Any]:
        """What the monitor does and what it misses; see `python -m bellwether doctor`."""
        unmeasured = self.out.unmeasured()
        told: dict[str, Any] = {
            "live": self._alive,
            "why_off": self.why_off,
            "run": self.settings.run,
            "step": self._step,
            "server": self.server,
            "record": self.record_path,
            "page_url": self.page_url,
            "errors": self._errors,
            "last_error": self._error_text or self.out.link.why_not,
            "numbers_left_out": dict(self.out.frames.left_out),
            "sampling_period": self.out.governor.period,
            "overhead": self.overhead(),
            "samples": self.out.samples,
            "layers": [
                {**layer_status(layer), "not_judged_by": self.out.not_judged_by(layer, unmeasured)}
                for layer in self.layers
            ],
            "actions": self._acting.status() if self._installed else None,
        }
        return {**told, **self.out.link.status()}

    @harmless("page_url", lambda self: "")
    def known_page_url(self) -> str:
        """Address of the run's page; "" while it is not known."""
        return self.out.link.known_page_url()

    @harmless("on_alert")
    def follow_alerts(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Calls `callback` with each change of an alert, from a thread of its own.

        The argument is the server's Transition as JSON: run, state, severity, rule, stage, step,
        layer, head, heads, eta, evidence, cause, summary, advice.
        """
        if self._follower is None:
            self._follower = Follower(self.settings, self.known_page_url, callback)

    @harmless("on_action()", passes=(ValueError,))
    def on_action(self, kind: str, callback: Callback) -> None:
        """As bellwether.on_action(), for this model only.

        Raises ValueError for a kind that does not exist, also on a handle that is off.
        """
        check_kind(kind)
        self._acting.callbacks.register(kind, callback)

    @harmless("offer_action()")
    def offer_action(self, kind: str, callback: Callback) -> None:
        """For frameworks: what is done where the user has registered nothing."""
        self._acting.callbacks.offer(kind, callback)

    @harmless("event()", passes=(ValueError,))
    def event(self, kind: str, text: str = "", value: float = 0.0) -> None:
        """Something the judges should know of: "restore", "data", "centring_on", ...

        Raises ValueError for a kind that does not exist, also on a handle that is off.
        """
        if not isinstance(kind, str) or kind not in c_api.EVENT_KINDS:
            raise ValueError(f"kind: {kind!r} is not one of {', '.join(c_api.EVENT_KINDS)}")
        if not self._alive:
            return
        try:
            self.out.events.add(kind, str(text), float(value))
        except Exception as e:  # Whatever the trainer gave.
            self.out.frames.leave_out(f"event {kind}", e)

    @harmless("flush()", lambda self, timeout=5.0: False)
    def flush(self, timeout: float = 5.0) -> bool:
        """Waits until everything is durable, at most `timeout` seconds; closes a step that the
        optimizer has ended.  True if it is, or if there is nothing to wait for."""
        if self._alive and self._pending:
            self._close({})
        if self.out.link.client is None:
            return not self._alive
        return self.out.link.flush(self.out.frames, timeout)
