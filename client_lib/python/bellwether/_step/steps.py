"""The steps of a model under watch, from one optimizer step to the next.

Forward passes put taps around the attention.  Backward passes add statistics to the layers'
buffers.  The optimizer's post hook measures the weights.  The step is closed by mon.step(), or
else when the next forward pass begins; that pushes one frame.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from .._hook import made_once
from .._hook.capturing import Capture
from .._hook.law_turns import KEYS_EVERY, SHARE_ON_GPUS, LawTurn, law_turn
from .._hook.layer import mask_parts
from .._hook.layer.layer import Layer
from .._hook.model.parallel import Parallel
from .._hook.patches.discovery import Discovery
from .._kernels import probe
from .._kernels.memory import Memories, capturing
from .._native.run_client import RunClient
from .._util import log
from .._util.guard import harmless, watched_by
from .._util.integers import step as step_number
from .._util.ranks import rank_and_world
from ..settings import Settings
from .activations import Activations
from .at_rest import AtRest
from .balances import Balances
from .every_step import EveryStep
from .experts import Experts
from .fp8 import Fp8
from .frames import number_at_hand
from .governor import Governor
from .health import Health
from .linears import Linears
from .rank_norms import RankNorms
from .reporter import Breadth, Number, Reporter
from .step_actions import StepActions
from .step_ends import StepEnds, in_backward
from .step_weights import StepWeights
from .tensor_rows import HELD_AS_COPIES, UNHEARD, TensorRows
from .tensors import Tensors

_SEED_MASK = 0xFFFFFFFFFFFFFFFF


class Steps:
    """A StepHost and an ActionHost.  Called on the training thread."""

    actions: StepActions  # Set by the owner, since they are made of these steps.

    def __init__(
        self, model: Optional[nn.Module], settings: Settings, placed: Optional[Parallel],
        silent: bool,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.silent = silent
        self.parallel = placed or Parallel()
        self.lock = threading.RLock()
        self.layers: list[Layer] = []
        self.memories = Memories()
        self.hook_seconds = 0.0  # Of the running step.
        self.health = Health(settings.disabled, self.stop_sampling)
        self.ends = StepEnds(self._parameters)
        self.weights = StepWeights(
            settings.gram_bytes, self.parallel, self.model, compared=settings.ranks == "all"
        )
        self.reporter = Reporter(
            settings, self.parallel, self.layers, self.memories, self.lock,
            Linears(self, self.model), Balances(self, self.model), AtRest(self.model),
            Breadth(
                Tensors(
                    TensorRows(
                        self.model, self.parallel, settings.ranks == "all",
                        self.weights.copies.settle,
                    ),
                    self.memories,
                ),
                Activations(self, self.model, self.layers, self.parallel),
                Experts(self, self.model, self.parallel),
                Fp8(self, self.model, self.parallel),
                EveryStep(self.model, self.measures("steps") and not silent),
                RankNorms(self, self.model, self.parallel),
            ),
        )  # fmt: skip
        self.discovery: Optional[Discovery] = None
        self.capture: Optional[Capture] = None
        if settings.capture_dir and not silent:
            self.capture = Capture(
                settings.capture_dir, settings.capture_files, settings.capture_bytes,
                f"{settings.run}-rank{rank_and_world()[0]}", self.parallel.first_layer,
            )  # fmt: skip
        self._model = weakref.ref(model) if model is not None else None
        self._cannot: dict[str, Optional[str]] = {}
        self._number = 0  # Of the running step.
        self._counts_from_attach = True
        self._sampling = False
        self._began = time.perf_counter()
        self._centred = False
        watched_by(self)

    def trouble(self, error: Exception, where: str) -> None:
        self.health.trouble(error, where)

    def live(self) -> bool:
        return self.health.live

    def model(self) -> Optional[nn.Module]:
        return self._model() if self._model is not None else None

    def _parameters(self) -> Iterable[torch.Tensor]:
        model = self.model()
        return model.parameters() if model is not None else ()

    # ---- what is measured ----

    def measures(self, part: str) -> bool:
        return part in self.settings.stats

    def cannot_measure_on(self, device: str) -> Optional[str]:
        """None if the kernels run on devices of this type, else why not."""
        if device not in self._cannot:
            self._cannot[device] = probe.available(device)
        return self._cannot[device]

    def samples_step(self) -> bool:
        """Whether the running step is sampled: eager models go without taps between samples."""
        return self._sampling and not self.ends.endless

    def reads_calls(self) -> bool:
        """Until the layout is told all calls are, unless no step may ever end."""
        return self.samples_step() or not (self.numbered() or self.ends.endless)

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

    def law_turn(self, layer: int, device: str) -> LawTurn:
        """On CPUs all layers in each sample, on GPUs some, unless the settings say how many."""
        count = sum(other.index >= 0 for other in self.layers)
        on_gpu, at_once = device != "cpu", self.settings.law_layers
        if at_once is None:
            if not on_gpu and layer < 0:
                return LawTurn(True)
            at_once = max(count // SHARE_ON_GPUS, 1) if on_gpu else max(count, 1)
        every = KEYS_EVERY if on_gpu else 1
        return law_turn(layer, count, self.reporter.samples, at_once, every)

    def _step_seed(self) -> int:
        return (self._number * 0x9E3779B97F4A7C15) & _SEED_MASK

    def weights_in_backward(self) -> bool:
        """Whether the weights are whole only while gradients are computed (FSDP, ZeRO-3)."""
        return self.weights.whole_in_backward_only()

    def add_layer(self, layer: Layer, before: Callable[[Layer, Layer], bool]) -> None:
        """One more layer, behind the last of those that stand `before` it."""
        places = [i for i, other in enumerate(self.layers) if before(other, layer)]
        self.layers.insert(places[-1] + 1 if places else 0, layer)

    def layer_of(self, module: nn.Module) -> Optional[Layer]:
        return next((layer for layer in self.layers if layer.module() is module), None)

    def numbered(self) -> bool:
        """Whether the layout was sent: layers that call attention later are left out."""
        return self.reporter.link.begun

    # ---- what happens in a step ----

    @staticmethod
    def in_backward() -> bool:
        return in_backward()

    def forward_begins(self) -> None:
        if self.reporter.breadth.every.phases.waits:
            self._data_ends()
        self._forward_begins()

    def _data_ends(self) -> None:
        """Unless it is a recomputation, in a backward pass that was not told of."""
        if self.health.live and not in_backward():
            self.reporter.every.phases.forward_begins()

    def _forward_begins(self) -> None:
        self.ends.between = False
        self.weights.copies.forward_begins()
        self.reporter.activations.forward_begins()
        if self.reporter.rest.pending:
            self._look_at_weights()
        if self.ends.forward_begins() and self.health.live:
            self._close({})

    def _look_at_weights(self) -> None:
        start = time.perf_counter()
        for flip in self.reporter.rest.forward_begins() if self.health.live else ():
            log.warning(f"step {self._number}: {flip.name}: {flip.text()}")
            self.tell(self._number, "annotation", f"{flip.name}: {flip.text()}")
        self.hook_seconds += time.perf_counter() - start

    def backward_begins(self) -> None:
        """Of a compiled module, whose forward is not seen."""
        self.ends.between = False
        if self.ends.backward_begins() and self.health.live:
            self._close({})

    def passes(self, count: int) -> None:
        self.ends.between = False
        if self.ends.passes(count) and self.health.live:
            self._close({})

    @property
    def hooks_called(self) -> int:
        return self.ends.hooks_called

    @harmless("GradScaler.scale()")
    def loss_scaled(self, factor: Optional[torch.Tensor]) -> None:
        """A GradScaler has multiplied the loss of the next backward."""
        if factor is None or not self.health.live:
            return
        self._forward_begins()
        self.reporter.scaling.scaled(factor, self._sampling)

    @harmless("GradScaler.step()")
    def step_withheld(self, scaler: Any, optimizer: Any) -> None:
        """GradScaler.step() has called no hook: a gradient was not finite, or what it called is
        compiled.  The sample of a skipped step would hold numbers that are not used.  The retry is
        the step's, unless mon.step() counts it as one."""
        if not self.health.live:
            return
        if not self.reporter.scaling.skips(scaler, optimizer, self.ends.trainers, self.layers):
            return
        if not self.ends.explicit and not self.ends.pending:
            self._drop_sample()
            self.reporter.every.skips()
        self.reporter.scaling.skipped()

    def _drop_sample(self) -> None:
        """The running step begins anew."""
        for layer in self.layers:
            layer.step_again()
        if not self._sampling:
            return
        self.reporter.scaling.drop_sample()
        self.reporter.sample(self.weights)
        self._begin_step()
        if self.reporter.scaling.drops_too_many():
            self._sampling = False
            self.stop_sampling()

    @harmless("optimizer hook")
    def optimizer_steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before its step."""
        if not self.health.live or capturing():
            return
        self.ends.between = False
        if self.ends.under_way.begins(optimizer):
            return
        closures = (*args[1:2], kwargs.get("closure"))  # Behind the optimizer itself.
        closure = any(given is not None for given in closures)
        # Its forward would end the step before, behind what is measured now.
        ends = closure and self.ends.pending and self.measures("tensors")
        if ends and self.ends.trainers.trains(optimizer):
            self._close({})
        self._see_step(optimizer, closure)
        self._measure_tensors(optimizer, closure)
        if self.actions.rate_factor() != 1.0 and self.ends.trainers.trains(optimizer):
            self.actions.optimizer_steps(optimizer)

    def _see_step(self, optimizer: Optimizer, closure: bool) -> None:
        if self.reporter.every.on and self.ends.trainers.trains(optimizer):
            start = time.perf_counter()
            self.reporter.every.optimizer_steps(optimizer, closure)
            self.hook_seconds += time.perf_counter() - start

    @harmless("backward()")
    def backward_called(self) -> None:
        if not self.health.live:
            return
        if self.reporter.every.on:
            self.reporter.every.phases.backward_begins()
        self.reporter.rank_norms.backward_begins()

    @harmless("backward()")
    def backward_returned(self) -> None:
        if self.reporter.every.on:
            self.reporter.every.phases.backward_ends()
        self.reporter.rank_norms.backward_ends()

    def _measure_tensors(self, optimizer: Optimizer, closure: bool) -> None:
        trainers = self.ends.trainers
        if not self._samples_tensors() or not trainers.trains(optimizer):
            return
        if trainers.of_copies(optimizer):
            self.reporter.tensors.rows.leave_out_all(HELD_AS_COPIES)
            return
        self._close_stepped([p for group in optimizer.param_groups for p in group["params"]])
        if not self.samples_step():
            return
        start = time.perf_counter()
        self.reporter.tensors.rows.heard()
        self.reporter.tensors.optimizer_steps(optimizer, trainers.known(), closure)
        self.hook_seconds += time.perf_counter() - start

    def _close_stepped(self, parameters: list[torch.Tensor]) -> None:
        """Of a model without attention no forward is seen: that these step again ends the step."""
        if self.ends.pending and self.reporter.tensors.stepped(parameters):
            self._close({})

    def _samples_tensors(self) -> bool:
        return self.samples_step() and self.measures("tensors")

    @harmless("clip_grad_norm_()")
    def gradients_clip(
        self, parameters: list[torch.Tensor], limit: Any, norm: Any, order: Optional[float]
    ) -> None:
        """Before torch clips them."""
        if not self.health.live or capturing():
            return
        if self.reporter.every.on:
            self.reporter.every.clips(parameters, limit, norm, order)
        if not self._samples_tensors():
            return
        self._close_stepped(parameters)
        if self.samples_step():
            start = time.perf_counter()
            self.reporter.tensors.clips(parameters)
            self.hook_seconds += time.perf_counter() - start

    def optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._rates_back()  # Also where the watching has ended since the step began.
        self._step_seen(optimizer)

    @harmless("optimizer hook")
    def _rates_back(self) -> None:
        self.actions.optimizer_stepped()

    @harmless("optimizer hook")
    def _step_seen(self, optimizer: Optimizer) -> None:
        if not self.health.live or capturing():
            self.ends.graphed = self.ends.graphed or self.health.live
            return
        start = time.perf_counter()
        if self.reporter.every.on and self.ends.trainers.trains(optimizer):
            self.reporter.every.phases.optimizer_ends()
        ends_step, ahead = self.ends.optimizer_stepped(optimizer)
        if not self.ends.under_way.any(self.ends.trainers.trains):  # The outermost one.
            self.reporter.tensors.optimizer_stepped(optimizer)
        if ends_step:
            group = optimizer.param_groups[0]
            self.reporter.rate = number_at_hand(
                group.get("lr")
            )  # None: it sets its own, or a GPU's.
            self.reporter.metadata["weight_decay"] = (
                number_at_hand(group.get("weight_decay")) or 0.0
            )
            if self.ends.pending:
                self._close({})
            self.reporter.scaling.stepped(optimizer, self.ends.explicit)
        if self.ends.trainers.trains(optimizer) and not self.ends.trainers.of_copies(optimizer):
            self.weights.changed(self.layers)
            last = self.ends.is_last(optimizer)
            if ends_step if last is None else last:
                self._measure_weights()
                due = self.reporter.governor.due(self._number + 1)
                if due and self.measures("rest") and not self.silent:
                    self.reporter.rest.optimizer_stepped()
        if ends_step:
            self.ends.pending = not self.ends.explicit
            self._end_discovery()
            self._expect_blocks()
        if ahead is not None:
            self.actions.boundary(self._number + ahead)
        self.hook_seconds += time.perf_counter() - start

    def _expect_blocks(self) -> None:
        """The step ends with the next forward."""
        due = self.ends.pending and self.reporter.governor.due(self._number + 1)
        if not due or self.silent or not self.numbered():
            return
        if self.measures("modules"):
            self.reporter.activations.expect(self.forward_begins)
        # Behind a sample it is due only where each step is one.
        due = not self._sampling or self.reporter.governor.period == 1
        if due and self.measures("rank_norms"):
            self.reporter.rank_norms.expect()

    # ---- from step to step ----

    def begin(self) -> None:
        """The model is watched from now on."""
        self.health.live = True
        self._begin_step()

    def count_from(self, step: int) -> None:
        """The running step is the trainer's number `step`, before anything was reported."""
        if self._renumber(step):
            self.reporter.governor.restart(self._number)
            self._begin_step()

    def close_explicitly(self, step: Optional[int], told: dict[str, Number]) -> None:
        """mon.step()."""
        self.ends.explicit = True
        self._renumber(self._number if step is None else step)
        self._close(told)
        self.reporter.every.phases.step_is_told()
        self.ends.between = True
        self._end_discovery()

    def _end_discovery(self) -> None:
        """The first step is over; while gradients are computed, forwards may be yet to come."""
        if self.discovery is not None and not in_backward():
            self.discovery.end()
            self.discovery = None

    def close_pending(self) -> None:
        """Closes a step that the optimizer has ended."""
        if self.ends.pending or (self.health.live and self.ends.over()):
            self._close({})

    def _renumber(self, step: int) -> bool:
        """False where it is no number of a step: the steps count on."""
        try:
            number = step_number(step)
        except ValueError as e:
            self.reporter.frames.leave_out("step", e)
            return False
        self._counts_from_attach = False
        if number != self._number:
            self._number = number
            self.reporter.governor.restart(number)
        return True

    def _begin_step(self) -> None:
        self._sampling = not self.silent and self.reporter.governor.due(self._number)
        self.weights.begin_step()
        # As all ranks count them that sample in step.
        samples = self.reporter.governor.samples_before(self._number, self.reporter.samples)
        self.reporter.tensors.begin_step(self._sampling, samples)
        mask_parts.forget()
        made_once.forget()
        self.reporter.scaling.begin_step(self._sampling)
        self.memories.begin_step(self._sampling, self._step_seed())
        # In the first step it is not known yet what is compiled.
        known = self._sampling and self.numbered()
        self.reporter.begin_laws(known and self.measures("linear"))
        self.reporter.activations.counts(samples)
        self.reporter.activations.begin_step(known and self.measures("modules"))
        self.reporter.experts.begin_step(known and self.measures("experts"))
        self.reporter.fp8.begin_step(known and self.measures("fp8"))
        self.reporter.rank_norms.begin_step(known and self.measures("rank_norms"))

    def stop_sampling(self) -> None:
        """The device measures nothing more in this step."""
        self.memories.begin_step(False, 0)
        self.reporter.begin_laws(False)
        self.reporter.activations.begin_step(False)
        self.reporter.experts.begin_step(False)
        self.reporter.fp8.begin_step(False)
        self.reporter.rank_norms.stop()

    def _measure_weights(self) -> None:
        if self._sampling and self.measures("sigma"):
            self.weights.measure(self.layers, self._number)

    @harmless("end of the step")
    def _close(self, told: dict[str, Number]) -> None:
        """Ends the running step: one frame, then the next step begins."""
        start = time.perf_counter()
        self.ends.pending = False
        sampled = self._sampling
        step_seconds = start - self._began
        self.reporter.every.phases.step_ends(step_seconds)
        if self.ends.skipped():
            self.reporter.every.skips()
        if sampled and self.measures("tensors") and self.ends.unheard and not self.optimizers():
            self.reporter.tensors.rows.leave_out_all(UNHEARD)
        self._measure_weights()
        if self.silent:
            self._push_nothing()
        else:
            self.reporter.push(
                self._number, told, step_seconds, self.hook_seconds,
                self.weights if sampled else None, self.actions, self._counts_from_attach,
            )  # fmt: skip
            self.reporter.hear(self.weights, self.actions)
        if self.capture is not None:
            self.capture.step_ends(self._number)
        for layer in self.layers:
            layer.begin_step()
        now = time.perf_counter()
        hook_seconds = self.hook_seconds + now - start
        self.reporter.count(self._number, hook_seconds, now - self._began, sampled)
        self._number += 1
        self.reporter.events.step_ends()
        if self.ends.closed():
            self.actions.boundary(self._number)
        self.hook_seconds = 0.0
        self._began = time.perf_counter()
        self._begin_step()

    def _push_nothing(self) -> None:
        if not self.reporter.link.begun:
            self.reporter.number_layers()
            self.actions.ranks_agree()
        self.reporter.events.of_step.clear()

    def say_goodbye(self) -> None:
        self.close_pending()
        self.reporter.tell_judged(ended=True)
        self.reporter.link.say_goodbye(self.reporter.frames, max(0, self._number - 1))
        if self.capture is not None:
            self.capture.close()

    # ---- what actions ask and do ----

    @property
    def graphed_step(self) -> bool:
        return self.ends.graphed

    @property
    def steps_unheard(self) -> int:
        return self.ends.unheard

    @property
    def governor(self) -> Governor:
        return self.reporter.governor

    def client(self) -> Optional[RunClient]:
        return self.reporter.link.client

    def current_step(self) -> int:
        return self._number

    def optimizers(self) -> list[Optimizer]:
        """Those that were seen to train the model."""
        return self.ends.trainers.known()

    def own_rate(self) -> Optional[float]:
        """The learning rate of the first group, as the trainer has set it."""
        return self.reporter.rate

    def tell(self, step: int, kind: str, text: str = "", value: float = 0.0) -> None:
        """An event of `step`, the running one or the next."""
        self.reporter.events.add(kind, text, value, next_step=step > self._number)

    def centring_changed(self, step: Optional[int] = None) -> None:
        """A layer's keys are centred from now (or `step`) on, or not any more.  The state of the
        first step is sent when the stream begins."""
        centred = any(layer.seen.centred for layer in self.layers)
        if self.numbered() and centred != self._centred:
            kind = "centring_on" if centred else "centring_off"
            self.tell(self._number if step is None else step, kind)
        self._centred = centred

    def weights_changed(self) -> None:
        """By an action: what differs from before is not the optimizer's doing."""
        self.weights.forget()
