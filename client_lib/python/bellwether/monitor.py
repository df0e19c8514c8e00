"""A running model under watch, from one optimizer step to the next.

The life of a step: forwards put taps around the attention, backwards add statistics to the
layers' buffers, the optimizer's post hook measures the weights, and the step is closed, which
pushes one frame, by mon.step() or else when the next forward begins.  Nothing in here may ever
raise into training, block it, or change a result.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Optional, Union

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from . import __version__
from ._actions.callbacks import Callback, check_kind
from ._actions.executor import Actions
from ._hook import intercept, parallel, weights
from ._hook.judged import Judged
from ._hook.layer import Layer
from ._hook.parallel import Parallel
from ._kernels import probe
from ._kernels.memory import Memories, capturing
from ._native import c_api
from ._native.run_client import ClientError, RunClient
from ._server.alerts import Follower
from ._step import grad_scale, optimizer_hooks
from ._step.boundaries import Boundaries
from ._step.frames import FOUND_INF, GRAD_SCALE, OVERFLOWS_MAX, Frames, number_at_hand
from ._step.governor import Governor, RateWatch
from ._step.grams import GramBatch, Grams
from ._step.hello import run_options
from ._step.increments import Increments
from ._step.price import Price
from ._step.report import layer_status
from ._step.sample import Sample
from ._step.trainers import Trainers
from ._util import log
from ._util.guard import harmless, in_words, watched_by
from ._util.integers import step as step_number
from ._util.presence import Presence
from .settings import Settings

Number = Union[float, int, torch.Tensor, None]

_SEED_MASK = 0xFFFFFFFFFFFFFFFF
FLUSH_SECONDS_MAX = 1e6
DEVICE_WAIT_SECONDS = 1.0  # At the end, for the last numbers on their way from a GPU.
SAMPLES_TOLD = 8  # That count; then the price is told, ...
# ... on a GPU later: the first samples of a compiled job cost it half as much again.
SAMPLES_TOLD_ON_GPU = 20
PRICE_NEWS = 5e-4  # ... and again if it is so far from what was told, in shares of the time.
PRICES_TOLD_MAX = 4
BACKWARDS_MAX = 64  # Backward passes without a step, then one warning.

_monitors: weakref.WeakValueDictionary[int, Monitor] = weakref.WeakValueDictionary()
_kept: dict[int, Monitor] = {}


def watching(model: nn.Module) -> Optional[Monitor]:
    """The monitor that the model has, if it has one."""
    known = _monitors.get(id(model))
    if known is not None and known._model is not None and known._model() is model:
        return known
    return None


def _keep(model: nn.Module, monitor: Monitor) -> None:
    """A caller may drop the handle; the monitor lives as long as the model does."""
    key = id(model)
    _monitors[key] = _kept[key] = monitor

    weakref.finalize(model, _gone, key).atexit = False


@harmless("end of a model")
def _gone(key: int) -> None:
    held = _kept.pop(key, None)
    if held is not None:
        held.detach()


def live_monitors() -> list[Monitor]:
    """Those of this process that watch now."""
    return [monitor for monitor in list(_monitors.values()) if monitor._alive]


@harmless("fork()")
def _after_fork_in_child() -> None:
    """The parent goes on watching; in the child the model may be watched anew."""
    for monitor in list(_monitors.values()):
        monitor._alive = False
        monitor.why_off = monitor.why_off or "forked: call attach() again in this process"
    _monitors.clear()
    _kept.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
@harmless("end of the process")
def _at_exit() -> None:
    """Says goodbye for handles that nobody detached.  Waits for nothing."""
    for monitor in list(_monitors.values()):
        if monitor._alive:
            monitor.detach()


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
        self._cannot: dict[str, Optional[str]] = {}
        self.hook_seconds = 0.0  # Of the running step.
        self.server: Optional[str] = settings.server
        self.page_url = ""
        self.record_path = settings.record
        self.why_off = "disabled" if settings.disabled else ""
        self._model = weakref.ref(model) if model is not None else None
        self._alive = False
        self._installed = False
        self._intercepts = False  # The forward pass is patched.
        self._presence: Optional[Presence] = None
        self._client: Optional[RunClient] = None
        self._client_tried = False
        self._errors = 0
        self._error_text = ""
        self._step = 0
        self._explicit = False  # mon.step() is called: the optimizer's hook is not the step.
        self._counts_from_attach = True
        self._pending = False  # An optimizer step ended that is not closed yet.
        self._sampling = False
        self._weights_done = False
        self._passing = -1  # The backward pass of a compiled module that was heard of last.
        self._warned_backwards = False
        self._told_price: list[tuple[float, int]] = []  # Share, samples: of each line about it.
        self._price = Price()
        self._clock = self._price.clock
        self._judged = Judged(settings)
        self._governor = Governor(settings.every, settings.overhead_budget)
        self._rates = RateWatch()
        self._rate: Optional[float] = None
        self._step_began = time.perf_counter()
        self._samples = 0
        self._trainers = Trainers(self._parameters_now)
        self._unhook: list[Callable[[], None]] = []  # What ends the optimizers' hooks.
        self.graphed_step = False  # optimizer.step() was captured in a CUDA graph.
        self._boundaries = Boundaries()
        self._events: list[tuple[str, str, float]] = []
        self._next_events: list[tuple[str, str, float]] = []  # Of the step after this one.
        self._increment_ranks = Increments()
        self._increments: dict[int, Any] = {}  # Of the running step.
        self._grams = Grams(settings.gram_bytes, self.parallel)
        self._gram_batch: Optional[GramBatch] = None  # Of the running step.
        self._grad_scale: Optional[torch.Tensor] = None  # Of the running step's loss.
        self._graph_grad_scale: Optional[torch.Tensor] = None  # Where a CUDA graph has it.
        self.hooks_called = 0  # Of optimizers, of any model.
        self._hookless = False  # A GradScaler's optimizer steps without calling hooks.
        self._found_inf: Union[torch.Tensor, float, None] = None  # Of the running step's gradients.
        self._dropped = 0  # Samples in a row that were dropped because the step was skipped.
        self._sharded: Optional[bool] = None
        self._centred = False
        self._frames = Frames()
        self._frames.partial_rows = self.parallel.context[1] > 1
        self._metadata: dict[str, Any] = {}
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
        # A copy, since it may change before the step ends.
        if capturing():
            self._graph_grad_scale = factor.detach().clone()  # Made anew by each replay.
        elif self._sampling and self._grad_scale is None:
            self._grad_scale = factor.detach().clone()

    @harmless("GradScaler.step()")
    def step_withheld(self, scaler: Any, optimizer: Any) -> None:
        """GradScaler.step() has called no hook: a gradient was not finite, or what it called is
        compiled.  The sample of a skipped step would tell of numbers that nobody uses; the retry is
        the step's, unless mon.step() counts it as one."""
        if not self._alive or self._hookless or capturing():
            return
        ours = isinstance(optimizer, Optimizer) and self._trainers.trains(optimizer)
        if ours and not self._trainers.owned():
            ours = grad_scale.found_inf(scaler, optimizer)
            self._hookless = not ours
        if not ours or not any(x.calls_in_step or x.fired_in_step for x in self.layers):
            return  # Nothing of the running step: it was told before its optimizer.
        if not self._explicit and not self._pending:
            self._drop_sample()
        self._found_inf = 1.0

    def _drop_sample(self) -> None:
        """The running step begins anew."""
        for layer in self.layers:
            layer.fired_in_step = layer.calls_in_step = 0
        if not self._sampling:
            return
        self._dropped += 1
        self._sample()
        self._begin_step()
        if self._dropped > OVERFLOWS_MAX:  # No accident any more: not at the price of samples.
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
        if self._sharded is None:
            model = self._model() if self._model is not None else None
            self._sharded = model is not None and parallel.is_fully_sharded(model)
        return self._sharded

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
        self._metadata = {
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
        self._events.append(("attach", f"bellwether {__version__}", 0.0))
        _keep(model, self)
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
        model = self._model() if self._model is not None else None
        if model is not None and _monitors.get(id(model)) is self:
            del _monitors[id(model)]
            _kept.pop(id(model), None)
        if self._follower is not None:
            self._follower.stop()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _say_goodbye(self) -> None:
        if self._pending:
            self._close({})
        self._tell_judged(ended=True)
        if self._client is not None:
            self._frames.drain(self._client, DEVICE_WAIT_SECONDS)
            self._client.push_event(max(0, self._step - 1), "detach")

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
                self._governor.restart(number)
        except ValueError as e:
            self._frames.leave_out("step", e)
        self._close({"loss": loss, "grad_norm": grad_norm, "learning_rate": lr, "tokens": tokens})

    @harmless("count_from()")
    def count_from(self, step: int) -> None:
        """The running step is the trainer's number `step`, told before anything was reported."""
        try:
            self._step = step_number(step)
        except ValueError as e:
            self._frames.leave_out("step", e)
            return
        self._counts_from_attach = False
        self._governor.restart(self._step)
        self._begin_step()

    def _begin_step(self) -> None:
        self._sampling = not self.silent and self._governor.due(self._step)
        self._weights_done = False
        self._increments = {}
        self._gram_batch = None
        self._grad_scale = self._graph_grad_scale if self._sampling else None
        self._found_inf = None
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
            self._rate = number_at_hand(group.get("lr"))  # None: it sets its own, or a GPU's.
            self._metadata["weight_decay"] = number_at_hand(group.get("weight_decay")) or 0.0
            if self._pending:
                self._close({})
            self._dropped = 0
            self._overflow_of(optimizer)
            self._measure_weights()
            self._pending = not self._explicit
        if ahead is not None:
            self._acting.boundary(self._step + ahead)
        self.hook_seconds += time.perf_counter() - start

    def _overflow_of(self, optimizer: Optimizer) -> None:
        """A fused optimizer is called in any case and told by a number on its device to skip."""
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            self._found_inf = found.detach().clone()  # The scaler adds others' to it.
        elif not self._explicit:
            self._found_inf = None  # The retry.

    def _measure_weights(self) -> None:
        if not self._sampling or self._weights_done or not self.measures("sigma"):
            return
        self._weights_done = True
        found = [layer for layer in self.layers if layer.watched and layer.location is not None]
        for layer in found:
            layer.measure_weights()
        if not self.weights_in_backward():
            self._increments = self._increment_ranks.measure(found)
            self._gram_batch = self._grams.measure(found)

    @harmless("end of the step")
    def _close(self, told: dict[str, Number]) -> None:
        """Ends the running step: one frame, then the next step begins."""
        start = time.perf_counter()
        self._pending = False
        sampled = self._sampling
        step_seconds = start - self._step_began
        self._measure_weights()
        self._push(told, step_seconds)
        for layer in self.layers:
            layer.fired_in_step = layer.calls_in_step = layer.captured = 0
        now = time.perf_counter()
        self._count_price(self.hook_seconds + now - start, now - self._step_began, sampled)
        if sampled:
            self._samples += 1
            known = self._price.known()  # A price of 0 is one, too.
            every_step = self._price.every_step(self._governor.period)
            self._governor.sampled(self._step, self.overhead() if known else None, every_step)
            self._tell_price()
        if self._frames.sample_again():
            self._governor.restart(self._step + 1)
        self._step += 1
        if self._next_events:
            self._events, self._next_events = self._events + self._next_events, []
        if self._boundaries.closed(self._explicit, self.graphed_step):
            self._acting.boundary(self._step)
        self.hook_seconds = 0.0
        self._step_began = time.perf_counter()
        self._begin_step()

    def _count_price(self, hook_seconds: float, step_seconds: float, sampled: bool) -> None:
        gpu = self.memories.gpu()
        if gpu is None:
            self._clock.add(step_seconds, sampled)
        elif not capturing():
            self._clock.mark(gpu, sampled)
        if sampled:
            kernels = self._frames.device_seconds
            self._price.sampled(hook_seconds, kernels, step_seconds, gpu is not None)
        else:
            self._price.between(hook_seconds)

    def _tell_price(self) -> None:
        """Once, and again when it turns out to be another one."""
        enough = SAMPLES_TOLD if self.memories.gpu() is None else SAMPLES_TOLD_ON_GPU
        if not self._price.known() or self._price.samples < enough:
            return
        share, measured = self.overhead(), self._price.measured()
        if self._told_price:
            told, over = self._told_price[-1]
            news = abs(share - told) > max(told / 4, PRICE_NEWS) and measured >= 2 * over
            if not news or len(self._told_price) >= PRICES_TOLD_MAX:
                return
        self._told_price.append((share, measured))
        period = self._governor.period
        every_step = self._price.every_step(period)
        most = f"; each step pays {100 * every_step:.2f} %" if every_step > share / 2 else ""
        log.info(
            f"watching {len(self._reporting())} attention layers costs about {100 * share:.2f} % "
            f"of the training time, measured over {measured} samples; a sample every "
            + ("step" if period == 1 else f"{period} steps")
            + most
        )

    def _tell_judged(self, ended: bool = False) -> None:
        if not self._judged.due(ended):
            return
        line = self._judged.line(self._reporting(), self._unmeasured())
        if line is not None:
            log.warning(line)

    @harmless("overhead()", lambda self: 0.0)
    def overhead(self) -> float:
        """Share of the training time that watching costs; 0 while that is not known."""
        return self._price.share(self._governor.period)

    # ---- what goes out ----

    def tell(self, step: int, kind: str, text: str = "", value: float = 0.0) -> None:
        """An event of `step`, the running one or the next."""
        events = self._events if step <= self._step else self._next_events
        events.append((kind, text, value))

    def _push(self, told: dict[str, Number], step_seconds: float) -> None:
        if self.silent:
            if not self._client_tried:
                self._client_tried = True
                self._number_layers()
                self._acting.ranks_agree()
            self._events.clear()
            return
        values: dict[str, Number] = self._frames.readable(told)
        if "learning_rate" not in values and self._rate is not None:
            values["learning_rate"] = self._rate
        rate = values.get("learning_rate")
        if isinstance(rate, (int, float)) and self._rates.jumped(float(rate)):
            self._events.append(("learning_rate", f"learning rate is now {rate:g}", float(rate)))
        if isinstance(rate, (int, float, torch.Tensor)) and self._acting.rates.factor != 1.0:
            values["learning_rate"] = rate * self._acting.rates.factor
        values["step_seconds"] = step_seconds
        values["hook_seconds"] = self._price.of_step(
            self.hook_seconds, self._frames.device_seconds, self._sampling
        )
        values["sampling_period"] = float(self._governor.period)
        if self._grad_scale is not None:
            values[GRAD_SCALE] = self._grad_scale
        if self._found_inf is not None:
            values[FOUND_INF] = self._found_inf
        client = self._open_client()
        sample = self._sample() if self._sampling else None
        if sample is not None:
            self._judged.add(sample.families())
            self._tell_judged()
        if client is None:
            self._frames.push(None, self._step, values, sample)
            return
        for kind, text, value in self._events:
            client.push_event(self._step, kind, text, value)
        self._events.clear()
        self._frames.push(client, self._step, values, sample)
        wanted, asked = client.poll()
        for payload in asked:
            self._acting.take(payload)
        if wanted is not None:
            if wanted.period:
                self._governor.set_base(wanted.period)
            heads = max((layer.heads for layer in self._reporting()), default=0)
            self._grams.ask(wanted.deeper, heads)

    def _sample(self) -> Sample:
        """What was measured in this step; the buffers are then empty again."""
        timed = self._samples < 8 or self._samples % 8 == 0
        with self.lock:
            copies = self.memories.collect(timed)
            sample = Sample(
                self._reporting(), self.settings.stats, self._increments, copies, self.parallel,
                self._gram_batch,
            )  # fmt: skip
            for layer in self.layers:
                for part in (layer.sums, layer.wq, layer.wk):
                    if part is not None:
                        part.begin_sample()
        return sample

    def _reporting(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.index >= 0]

    def _unmeasured(self) -> list[Layer]:
        """Attention of the run that is trained and reports nothing: not healthy, but not judged."""
        return [x for x in self.layers if self.numbered() and x.index < 0 and x.unmeasured()]

    def numbered(self) -> bool:
        """Whether the layout was told: layers that call attention later are left out."""
        return self._client_tried

    def _number_layers(self) -> None:
        """Layers are those that called attention by the end of the first step, in order."""
        index = 0
        for layer in self.layers:
            if layer.heads:
                layer.index = index
                index += 1

    def _open_client(self) -> Optional[RunClient]:
        if self._client_tried:
            return self._client
        self._client_tried = True
        self._number_layers()
        layers = self._reporting()
        if not layers:
            log.warning(
                "no attention call was seen in the first step: only loss, gradient norm and "
                "times are reported (python -m bellwether doctor says why)"
            )
        options = run_options(
            self.settings, layers, len(self._unmeasured()), self.parallel, self.server,
            self.record_path, step_from_attach=self._counts_from_attach,
            ranks_agree=self._acting.ranks_agree(), actions_mask=self._acting.mask(),
            **self._metadata,
        )  # fmt: skip
        try:
            self._client = RunClient(options)
        except (ClientError, c_api.LibraryError) as e:
            log.warning(f"nothing is sent: {e}")
            self._error_text = str(e)
        return self._client

    # ---- what actions ask of it ----

    @property
    def governor(self) -> Governor:
        return self._governor

    def model(self) -> Optional[nn.Module]:
        return self._model() if self._model is not None else None

    def client(self) -> Optional[RunClient]:
        return self._client

    def current_step(self) -> int:
        return self._step

    def optimizers(self) -> list[Optimizer]:
        """Those that were seen to train the model."""
        return self._trainers.known()

    def own_rate(self) -> Optional[float]:
        """The learning rate of the first group, as the trainer has set it."""
        return self._rate

    def weights_changed(self) -> None:
        """By an action: what differs from before is not the optimizer's doing."""
        self._increment_ranks.forget()
        self._grams.forget()

    # ---- for people and other loggers ----

    @harmless("metrics()", lambda self: {})
    def metrics(self) -> dict[str, float]:
        """What was last measured, for any other logger; keys begin with `bellwether/`."""
        found = dict(self._frames.last)
        found["sampling_period"] = float(self._governor.period)
        found["hook_overhead"] = self.overhead()
        return {f"bellwether/{name}": value for name, value in found.items()}

    def _told_least(self) -> dict[str, Any]:
        """What is told when more cannot be."""
        return {
            "live": self._alive, "why_off": self.why_off, "run": self.settings.run,
            "errors": self._errors, "last_error": self._error_text, "layers": [], "samples": 0,
            "numbers_left_out": {},
        }  # fmt: skip

    @harmless("status()", _told_least)
    def status(self) -> dict[str, Any]:
        """What the monitor does and what it misses; see `python -m bellwether doctor`."""
        unmeasured = self._unmeasured()

        def lacks(layer: Layer) -> list[str]:
            return [*self._judged.wanted] if layer in unmeasured else self._judged.lacks(layer)

        told: dict[str, Any] = {
            "live": self._alive,
            "why_off": self.why_off,
            "run": self.settings.run,
            "step": self._step,
            "server": self.server,
            "record": self.record_path,
            "page_url": self.page_url,
            "errors": self._errors,
            "last_error": self._error_text,
            "numbers_left_out": dict(self._frames.left_out),
            "sampling_period": self._governor.period,
            "overhead": self.overhead(),
            "samples": self._samples,
            "layers": [
                {**layer_status(layer), "not_judged_by": lacks(layer)} for layer in self.layers
            ],
            "link": None,
            "actions": self._acting.status() if self._installed else None,
        }
        if self._client is not None:
            counters = self._client.counters()
            told["link"] = counters.link
            told["counters"] = counters
            told["page_url"] = counters.page_url or self.page_url
        return told

    @harmless("page_url", lambda self: "")
    def known_page_url(self) -> str:
        """Address of the run's page; "" while it is not known."""
        client = self._client
        if self.page_url or client is None:
            return self.page_url
        return client.counters().page_url

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
            self._events.append((kind, str(text), float(value)))
        except Exception as e:  # Whatever the trainer gave.
            self._frames.leave_out(f"event {kind}", e)

    @harmless("flush()", lambda self, timeout=5.0: False)
    def flush(self, timeout: float = 5.0) -> bool:
        """Waits until everything is durable, at most `timeout` seconds; closes a step that the
        optimizer has ended.  True if it is, or if there is nothing to wait for."""
        if self._alive and self._pending:
            self._close({})
        if self._client is None:
            return not self._alive
        try:
            timeout = min(max(0.0, float(timeout)), FLUSH_SECONDS_MAX)  # Not a number: no wait.
        except Exception as e:  # Whatever the trainer gave.
            self._frames.leave_out("timeout", e)
            return False
        deadline = time.monotonic() + timeout
        arrived = self._frames.drain(self._client, timeout)
        left = max(0.0, deadline - time.monotonic())
        return self._client.flush(left) and arrived
