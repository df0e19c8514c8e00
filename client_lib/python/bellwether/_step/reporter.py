"""What a run reports: its layout once, then a frame each step.  What the server wants comes back on
the same link."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, Optional, Union

import torch
from torch import nn

from .._hook import compiling
from .._hook.layer.judged import Judged
from .._hook.layer.layer import Layer
from .._hook.layer.notes import why
from .._hook.model.parallel import Parallel
from .._kernels.memory import Memories
from .._native.run_client import RunClient
from .._util import log
from ..settings import Settings
from .activations import Activations
from .at_rest import AtRest
from .balances import Balances
from .cost import Cost
from .events import Events
from .every_step import EveryStep
from .experts import Experts
from .fp8 import Fp8
from .frames import Frames
from .governor import Governor, RateWatch
from .hello import run_options
from .linears import Linears
from .link import Link
from .loss_scaling import LossScaling
from .rank_norms import RankNorms
from .sample import Sample
from .since_sample import Lags, SinceSample
from .step_actions import StepActions
from .step_weights import StepWeights
from .tensors import Tensors

Number = Union[float, int, torch.Tensor, None]


@dataclasses.dataclass
class Breadth:
    """What is measured beside attention and the laws."""

    tensors: Tensors
    activations: Activations
    experts: Experts
    fp8: Fp8
    every: EveryStep
    rank_norms: RankNorms


class Reporter:
    def __init__(
        self, settings: Settings, placed: Parallel, layers: list[Layer], memories: Memories,
        lock: AbstractContextManager[Any], linears: Linears, balances: Balances,
        rest: AtRest, breadth: Breadth,
    ) -> None:  # fmt: skip
        """layers  all candidates, filled by attach(); lock  held while memories are read"""
        self._settings, self._placed, self._layers = settings, placed, layers
        self.linears, self.balances, self.rest = linears, balances, rest
        self.breadth = breadth
        self._memories, self._lock = memories, lock
        self.link = Link(settings)
        self.frames = Frames()
        self.frames.partial_rows = placed.context[1] > 1
        if breadth.every.on:
            self.frames.since = SinceSample()
        self.events = Events()
        self.scaling = LossScaling()
        self.judged = Judged(settings)
        self.cost = Cost(settings.byte_budget)
        self.frames.handed_over = self.cost.volume.add
        self.governor = Governor(
            settings.every, settings.overhead_budget,
            in_step=settings.ranks == "all" or placed.shards > 1,
            byte_budget=settings.byte_budget,
        )  # fmt: skip
        self.metadata: dict[str, Any] = {}  # Fields of RunOptions.
        self.rate: Optional[float] = None  # Of the first group, as the trainer has set it.
        self.samples = 0  # That were closed.
        self._rates = RateWatch()

    @property
    def tensors(self) -> Tensors:
        return self.breadth.tensors

    @property
    def activations(self) -> Activations:
        return self.breadth.activations

    @property
    def every(self) -> EveryStep:
        return self.breadth.every

    @property
    def experts(self) -> Experts:
        return self.breadth.experts

    @property
    def fp8(self) -> Fp8:
        return self.breadth.fp8

    @property
    def rank_norms(self) -> RankNorms:
        return self.breadth.rank_norms

    # ---- the layout ----

    def describe(self, model: nn.Module) -> None:
        self.metadata = {
            "framework": f"torch {torch.__version__}"[:64],
            "model": type(model).__name__[:128],
        }

    def reporting(self) -> list[Layer]:
        return [layer for layer in self._layers if layer.index >= 0]

    def unmeasured(self) -> list[Layer]:
        """Attention of the run that is trained and reports nothing: not healthy, but not judged."""
        return [x for x in self._layers if self.link.begun and x.index < 0 and x.unmeasured()]

    def not_judged_by(self, layer: Layer, unmeasured: list[Layer]) -> list[str]:
        return list(self.judged.wanted) if layer in unmeasured else self.judged.lacks(layer)

    def tell_judged(self, ended: bool = False) -> None:
        if not self.judged.due(ended):
            return
        line = self.judged.line(self.reporting(), self.unmeasured())
        if line is not None:
            log.warning(line)

    def why_nothing(self) -> str:
        """Why no layer reports."""
        called = next((x for x in self._layers if x.watched and x.calls and x.notes), None)
        if called is None:
            return "no attention call was seen in the first step"
        name = f"{called.name or 'the model'} ({called.module_class.__name__})"
        return f"no attention was measured in the first step. {name}: {why(called.notes)}"

    def number_layers(self) -> None:
        """Layers are those that called attention by the end of the first step, in order."""
        self.link.begun = True
        index = 0
        for layer in self._layers:
            if layer.heads:
                layer.number(index)
                index += 1

    def _open(self, actions: StepActions, step_from_attach: bool) -> Optional[RunClient]:
        if self.link.begun:
            return self.link.client
        self.number_layers()
        layers = self.reporting()
        if not layers:
            log.warning(
                f"{self.why_nothing()}: only loss, gradient norm and times are reported "
                "(python -m bellwether doctor names each layer)"
            )
        if "experts" in self._settings.stats:
            self.experts.place([(layer.name, layer.index) for layer in layers])
        else:
            self.experts.not_asked()
        self.link.open(
            run_options(
                self._settings, layers, len(self.unmeasured()), self._placed, self.link.server,
                self.link.record_path, step_from_attach=step_from_attach,
                layers_needed=self.experts.layers_needed(), experts=self.experts.most,
                ranks_agree=actions.ranks_agree(), actions_mask=actions.mask(), **self.metadata,
            )
        )  # fmt: skip
        return self.link.client

    # ---- a step ----

    def watch_laws(self) -> None:
        """Of what is not attention, from the next sampled step on; and activations."""
        self.linears.watch()
        self.balances.watch()
        self.activations.watch()
        self.experts.watch()
        self.fp8.watch()

    def laws_end(self) -> None:
        """torch.compile is asked for something."""
        self.linears.compiled()
        self.balances.compiled()
        self.activations.compiled()
        self.experts.compiled()
        self.fp8.compiled()

    def begin_laws(self, sampled: bool) -> None:
        """A step begins that asks them, or none."""
        compiling.look()
        self.linears.begin_step(sampled)
        self.balances.begin_step(sampled)

    def sample(self, weights: StepWeights) -> Sample:
        """What was measured in this step; the buffers are then empty again."""
        timed = self.samples < 8 or self.samples % 8 == 0
        with self._lock:
            copies = self._memories.collect(timed)
            sample = Sample(
                self.reporting(), self._settings.stats, weights.increments, copies, self._placed,
                weights.gram_batch, weights.replicas, self.linears.sample(),
                self.balances.sample(), self.rest.sample(), self.tensors.sample(),
                self.link.named, self.activations.sample(), self.experts.sample(),
                self.fp8.sample(), self.rank_norms.sample(),
            )  # fmt: skip
            for layer in self._layers:
                for part in (layer.sums, layer.wq, layer.wk):
                    if part is not None:
                        part.begin_sample()
        return sample

    def push(
        self, step: int, told: dict[str, Number], step_seconds: float, hook_seconds: float,
        weights: Optional[StepWeights], actions: StepActions, step_from_attach: bool,
    ) -> None:  # fmt: skip
        """weights  None where the step is not sampled"""
        values: dict[str, Number] = self.frames.readable({**self.frames.said, **told})
        self.frames.said.clear()
        if "learning_rate" not in values and self.rate is not None:
            values["learning_rate"] = self.rate
        rate = values.get("learning_rate")
        if isinstance(rate, (int, float)) and self._rates.jumped(float(rate)):
            self.events.add("learning_rate", f"learning rate is now {rate:g}", float(rate))
        if isinstance(rate, (int, float, torch.Tensor)) and actions.rate_factor() != 1.0:
            values["learning_rate"] = rate * actions.rate_factor()
        values["step_seconds"] = step_seconds
        values["hook_seconds"] = self.cost.price.of_step(
            hook_seconds, self.frames.device_seconds, weights is not None
        )
        values["sampling_period"] = float(self.governor.period)
        values.update(self.scaling.values())
        lags: Optional[Lags] = None
        if self.every.on:
            self.every.of_frame(values)
            if weights is not None:
                lags = self.every.of_sample(values, self._memories.gpu())
        client = self._open(actions, step_from_attach)
        if client is not None and weights is not None:
            self.link.name_tensors(self.tensors.rows.names or weights.copies.names)
        sample = self.sample(weights) if weights is not None else None
        if sample is not None:
            self.judged.add(sample.families())
            self.tell_judged()
        if client is None:
            self.frames.push(None, step, values, sample, lags)
            return
        for kind, text, value in self.events.of_step:
            client.push_event(step, kind, text, value)
        self.events.of_step.clear()
        self.frames.push(client, step, values, sample, lags)

    def hear(self, weights: StepWeights, actions: StepActions) -> None:
        """What the server wants since the last step."""
        if self.link.client is None:
            return
        wanted, payloads = self.link.client.poll()
        for payload in payloads:
            actions.take(payload)
        if wanted is not None:
            if wanted.period:
                self.governor.set_base(wanted.period)
            heads = max((layer.heads for layer in self.reporting()), default=0)
            weights.ask(wanted.deeper, heads)

    def count(self, step: int, hook_seconds: float, step_seconds: float, sampled: bool) -> None:
        """The step's price; after a sample, when the next one is due and what that costs."""
        gpu, price = self._memories.gpu(), self.cost.price
        self.cost.count(hook_seconds, self.frames.device_seconds, step_seconds, sampled, gpu)
        if sampled:
            self.samples += 1
            share = self.overhead() if price.known() else None  # A price of 0 is one, too.
            every_step = price.every_step(self.governor.period)
            if self.governor.sampled(step, share, every_step, self.cost.volume.closed()):
                self.cost.volume.is_rarer(self.governor.period)
            line = self.cost.line(self.governor.period, len(self.reporting()), gpu is not None)
            if line is not None:
                log.info(line)
        if self.frames.sample_again():
            self.governor.restart(step + 1)

    def metrics(self) -> dict[str, float]:
        """The numbers of the newest sample, for other loggers."""
        found = dict(self.frames.last)
        found["sampling_period"] = float(self.governor.period)
        found["hook_overhead"] = self.overhead()
        return found

    def overhead(self) -> float:
        """Share of the training time that watching costs; 0 while that is not known."""
        return self.cost.price.share(self.governor.period)
