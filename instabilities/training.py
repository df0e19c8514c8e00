"""One training of a Setting, with or without a fault, watched or not.

What is random follows from the seed and the step alone.  So a run and its twin without the fault
see the same batches and begin with the same weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import corpus, models, optimizers, policy, rounding
from .settings import Setting

MASKED = -100
SIGMA_EVERY = 10
BALANCE = 0.01  # What the routers' balancing losses count.
# All that attach() can measure on a CPU, for breadth.
ALL_STATS = "drift,leak,ties,delta,sigma,laws,linear,rest,tensors,modules,experts,steps,fp8"


class NoFault:
    """What a fault may do; each does nothing here.  `training` is at its step, from 0."""

    def common(self, setting: Setting) -> Setting:
        """The setting of the run and of its twin: what the fault needs to be possible."""
        return setting

    def changes(self, setting: Setting) -> Setting:
        """The setting of the run alone."""
        return setting

    def apart(self, training: Training) -> list[str]:
        """Names of parameters that get a group of the optimizer of their own."""
        return []

    def built(self, training: Training) -> None:
        """Once, before the first step and before attach()."""

    def begins(self, training: Training) -> None:
        """Before the batch of the step; the optimizer's groups have their rates."""

    def batch(self, training: Training, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, labels

    def gradients(self, training: Training) -> None:
        """Behind the backward pass, before clipping."""

    def steps(self, training: Training) -> bool:
        """Whether the optimizer is stepped."""
        return True

    def weights(self, training: Training) -> None:
        """Behind the optimizer's step."""

    def clears(self, training: Training) -> None:
        for optimizer in training.optimizers:
            optimizer.zero_grad(set_to_none=True)


@dataclass
class Watch:
    """How a run is watched."""

    record: Path
    run: str
    default_stats: bool = False


@dataclass
class Curves:
    """What a run tells of itself, one value a step."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    # What tells whether the training goes well, smaller is better: the loss, in reinforcement
    # learning 1 - reward, of classes the largest singular value of all W_Q.
    measure: list[float] = field(default_factory=list)


class Training:
    def __init__(
        self, setting: Setting, seed: int, fault: Optional[NoFault] = None,
        watch: Optional[Watch] = None, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.fault = fault or NoFault()
        self.setting = self.fault.changes(setting)
        self.seed, self.watch, self.device = seed, watch, device
        self.step = 0
        self.curves = Curves()
        self.model = models.build(self.setting, seed).to(device)
        for mixture in self.model.mixtures():
            # Before attach(): a router of one's own has to be declared.
            import bellwether

            bellwether.wrap_router(mixture.router, top_k=models.TOP_K)
        self.rollout: Optional[policy.Rollout] = None
        if self.setting.task == "policy":
            self.rollout = policy.Rollout(self.model, self.setting)
        self.scaler = torch.amp.GradScaler(device) if self.setting.dtype == "float16" else None
        self.forward: nn.Module = self.model  # With several ranks: what reduces the gradients.
        self.monitor: Any = None
        self.optimizers: list[torch.optim.Optimizer] = []

    # ---- before the first step ----

    def _begin(self) -> None:
        if self.setting.ranks > 1:
            self.forward = nn.parallel.DistributedDataParallel(self.model)
        self._train_before()
        self.fault.built(self)
        self.optimizers = optimizers.optimizers_of(self.model, self.setting, self.fault.apart(self))
        if self.watch is not None:
            import bellwether

            for block in self.model.blocks():
                if block.self_attn.rounded is not None:
                    bellwether.wrap_attention(
                        block.self_attn.rounded, layout="bhtd", causal=True,
                        kernel="own", arithmetic="fused",
                    )  # fmt: skip
            stats = None if self.watch.default_stats else ALL_STATS
            # A step takes milliseconds: what a sample costs must not thin them out.
            self.monitor = bellwether.attach(
                self.model, run=self.watch.run, record=str(self.watch.record),
                every=self.setting.every, stats=stats, overhead_budget=1e9, byte_budget=0,
                ranks="all" if self.setting.ranks > 1 else None,
            )  # fmt: skip

    def _train_before(self) -> None:
        """What a run goes on from that began long before it."""
        if not self.setting.warm_start:
            return
        before = optimizers.optimizers_of(self.model, self.setting)
        for step in range(self.setting.warm_start):
            for optimizer in before:
                for group in optimizer.param_groups:
                    group["lr"] = self.setting.lr * min(1.0, (step + 1) / 50)
                optimizer.zero_grad(set_to_none=True)
            tokens, labels = self._read(step, self.seed + 500_000)
            self._loss(self.forward(tokens), labels)[0].backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in before:
                optimizer.step()
        self.model.zero_grad(set_to_none=True)

    # ---- a step ----

    def _read(self, number: int, seed: int) -> tuple[Tensor, Tensor]:
        shape = (self.setting.batch, self.setting.tokens)
        tokens, labels = corpus.batch(self.setting.corpus, seed, number, shape)
        return tokens.to(self.device), labels.to(self.device)

    def _loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(the mean over all labels that count, the means of the sequences)."""
        each = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=MASKED
        ).view_as(labels)
        counts = (labels != MASKED).float()
        total = each.sum() / counts.sum().clamp(min=1)
        return total, each.detach().sum(1) / counts.sum(1).clamp(min=1)

    def _sigma(self) -> float:
        """The largest singular value of all W_Q, anew every SIGMA_EVERY steps."""
        if self.step % SIGMA_EVERY == 0 or not self.curves.measure:
            with torch.no_grad():
                weights = torch.stack([b.self_attn.q_proj.weight for b in self.model.blocks()])
                return float(torch.linalg.matrix_norm(weights, ord=2).max())
        return self.curves.measure[-1]

    def _backward(self, micro: int) -> tuple[float, float]:
        """(loss, measure) of one micro-batch."""
        setting = self.setting
        rank = torch.distributed.get_rank() if setting.ranks > 1 else 0
        number = (self.step * setting.accumulation + micro) * setting.ranks + rank
        tokens, labels = self.fault.batch(self, *self._read(number, self.seed))
        if self.rollout is not None:
            loss, reward, told = self.rollout.loss(tokens, labels, self.seed * 7919 + number)
            if self.monitor is not None:
                self.monitor.log(told)
            measure = 1 - reward
        else:
            # Dropout, where there is any, is the same whatever was random before.
            torch.manual_seed(self.seed * 7919 + number)
            if setting.task == "classes":
                each = rounding.losses(self.forward(tokens), tokens)
                loss, each = each.mean(), each.detach()
            else:
                loss, each = self._loss(self.forward(tokens), labels)
            if self.monitor is not None and setting.losses:
                ids = [f"{number}.{row}" for row in range(setting.batch)]
                asked = None if setting.task == "classes" else labels
                self.monitor.losses(each, ids=ids, labels=asked)
            measure = self._sigma() if setting.task == "classes" else loss.item()
        counted = loss + BALANCE * self.model.balance()
        if self.step < setting.weight_until:
            counted = counted / 30
        if self.scaler is not None:
            counted = self.scaler.scale(counted)
        (counted / setting.accumulation).backward()
        return loss.item(), measure

    def _step(self) -> None:
        setting = self.setting
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizers.rate(setting, self.step)
        self.fault.begins(self)
        told = [self._backward(micro) for micro in range(setting.accumulation)]
        loss, measure = (sum(values) / len(told) for values in zip(*told))
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        self.fault.gradients(self)
        limit = math.inf if setting.clip is None else setting.clip
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        if self.fault.steps(self):
            for optimizer in self.optimizers:
                if self.scaler is not None:
                    self.scaler.step(optimizer)
                else:
                    optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        self.fault.weights(self)
        self.fault.clears(self)
        if self.rollout is not None:
            self.rollout.follow(self.model)
        if self.monitor is not None:
            rates = [g["lr"] for o in self.optimizers for g in o.param_groups if not g["apart"]]
            tokens = setting.batch * setting.tokens * setting.accumulation
            self.monitor.step(
                self.step, loss=loss, grad_norm=grad_norm, lr=max(rates, default=0.0), tokens=tokens
            )
        self.curves.loss.append(loss)
        self.curves.grad_norm.append(float(grad_norm))
        self.curves.measure.append(measure)

    def run(self) -> Curves:
        """Until its steps are done.  Raises RuntimeError where it was not watched as it should."""
        self._begin()
        for step in range(self.setting.steps):
            self.step = step
            self._step()
        if self.monitor is not None:
            wrong = self.monitor.why_off or self.monitor.status()["last_error"]
            self.monitor.detach()
            if wrong:
                raise RuntimeError(f"the watching ended: {wrong}")
        return self.curves
