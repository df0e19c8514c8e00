"""How far gradients are beyond what second moments expect, in every step: the largest is kept where
the tensors are, and leaves with the next sample.

It leads the loss by some steps, first in the embedding and the first layers.  So some elements of
those are read whenever their optimizer steps, one in every `stride` of a parameter, from another
place each time.  The stride has no factor in common with a row's length: neighbours in a row, which
move together, are not read together.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .._hook.model.parallel import is_dtensor
from .._kernels.moment_lags import MomentLags, Moments
from .._kernels.probe import DTYPES, available
from .._kernels.tensors import dense
from .._native import c_api
from .frames import number_at_hand
from .since_sample import Lags

PARAMETERS_MAX = 6
EMBEDDINGS_MAX = 2  # Of them.
ELEMENTS_ON_GPU, ELEMENTS_ON_CPU = 1 << 18, 1 << 14  # Of all parameters, in one step.
OPTIMIZERS_MAX = 8


def _local(t: Any) -> Any:
    return getattr(t, "_local_tensor", None) if is_dtensor(t) else t


def stride_of(elements: int, row: int, room: int) -> int:
    """Of a parameter with rows of so many elements, of which about `room` are read."""
    stride = max(1, -(-elements // room))
    while stride > 1 and math.gcd(stride, row) > 1:
        stride += 1
    return stride


class _Part:
    """One parameter."""

    def __init__(self, parameter: Tensor, second: Tensor, room: int) -> None:
        self._parameter = weakref.ref(parameter)
        self._second = weakref.ref(second)
        self._layout, self._device = second.stride(), second.device
        self._second_dtype, self._second_size = DTYPES[second.dtype], second.element_size()
        self._elements = second.numel()
        row = second.shape[-1] if second.dim() else 1
        self._stride = stride_of(self._elements, int(row), room)

    @property
    def size(self) -> tuple[int, int]:
        """Its elements, and how many of them are read in one step."""
        return self._elements, -(-self._elements // self._stride)

    def moments(self, states: dict[Any, Any], turn: int, group: _Group) -> Optional[Moments]:
        """Of the coming step; None: not of this one."""
        p = self._parameter()
        grad = p.grad if p is not None else None
        if grad is None:
            return None
        if type(grad) is not Tensor:
            grad = _local(grad)
        state = states.get(p)
        if not isinstance(state, dict) or type(grad) is not Tensor or grad.is_sparse:
            return None
        dtype, second = DTYPES.get(grad.dtype), _second_of(state)
        if dtype is None or grad.stride() != self._layout:
            return None
        if second is not self._second():
            if not _fits(second, grad) or second.numel() != self._elements:
                return None
            self._second = weakref.ref(second)
            self._second_dtype, self._second_size = DTYPES[second.dtype], second.element_size()
        # The kernel's device is that of the plan: they may have moved since, or shrunk in place.
        if any(t.device != self._device or t.numel() != self._elements for t in (grad, second)):
            return None
        steps, steps_at = _steps_of(state.get("step", group.steps), grad)
        if steps <= 0:
            return None
        begin, stride = 0, self._stride
        if stride < self._elements:
            begin = turn % stride
        return Moments(
            grad.data_ptr() + begin * (4 if dtype == c_api.F32 else 2),
            second.data_ptr() + begin * self._second_size,
            dtype, self._second_dtype, -(-(self._elements - begin) // stride), stride,
            group.beta2, group.eps, steps, steps_at,
        )  # fmt: skip


def _second_of(state: Any) -> Any:
    if not isinstance(state, dict):
        return None
    second = state.get("exp_avg_sq")
    if second is None:
        second = state.get("state2")
    return second if type(second) is Tensor else _local(second)


def _fits(second: Any, grad_like: Tensor) -> bool:
    """Whether it has an element for each of the parameter's, in the same order."""
    if type(second) is not Tensor or second.dtype not in DTYPES or second.numel() == 0:
        return False
    same = second.shape == grad_like.shape and second.stride() == grad_like.stride()
    return same and second.device == grad_like.device and dense(second)


def _steps_of(taken: Any, grad: Tensor) -> tuple[float, int]:
    """(steps, steps_at) of Moments; (0, 0): not known without waiting."""
    if type(taken) is Tensor:
        if taken.dtype != torch.float32 or taken.numel() != 1:
            return 0.0, 0
        if taken.is_cpu:
            return taken.item() + 1, 0
        return (1.0, taken.data_ptr()) if taken.device == grad.device else (0.0, 0)
    number = number_at_hand(taken)
    return (0.0, 0) if number is None or number < 0 else (number + 1, 0)


class _Group:
    """What a group of an optimizer's parameters says, in one step."""

    def __init__(self, group: dict[str, Any]) -> None:
        betas, eps = group.get("betas"), number_at_hand(group.get("eps"))
        pair = isinstance(betas, (tuple, list)) and len(betas) > 1
        beta2 = number_at_hand(betas[1]) if pair and betas is not None else None
        known = beta2 is not None and eps is not None and 0 <= beta2 < 1
        self.known = known and eps is not None and 0 <= eps < math.inf
        self.beta2, self.eps = beta2 or 0.0, eps or 0.0
        self.steps = group.get("k")  # Of schedule-free ones, for all at once.


class _Plan:
    """What is read of one optimizer's parameters on one device."""

    def __init__(
        self, lags: MomentLags, parts: list[tuple[int, _Part]], device: torch.device
    ) -> None:
        """parts  with the number of the group that each is in"""
        self._lags, self.parts, self._device = lags, parts, device
        self._steps = 0  # Since the sample before.

    def step(self, optimizer: Optimizer, turn: int) -> int:
        """How many were read."""
        groups: dict[int, _Group] = {}
        states, read = optimizer.state, 0
        scale, found_inf = (_number_of(optimizer, name) for name in ("grad_scale", "found_inf"))
        if not all(t is None or t.device == self._device for t in (scale, found_inf)):
            return 0  # GradScaler's are where the loss is.
        for at, (number, part) in enumerate(self.parts):
            group = groups.get(number)
            if group is None:
                there = number < len(optimizer.param_groups)
                group = groups[number] = _Group(optimizer.param_groups[number] if there else {})
            moments = part.moments(states, turn, group) if group.known else None
            self._lags.put(at, moments)
            read += moments is not None
        if read:
            self._lags.add(scale, found_inf)
            self._steps += 1
        return read

    def take(self) -> Optional[Tensor]:
        steps, self._steps = self._steps, 0
        return self._lags.take() if steps else None


def _number_of(optimizer: Optimizer, name: str) -> Optional[Tensor]:
    """What a GradScaler gives a fused optimizer."""
    value = getattr(optimizer, name, None)
    fits = isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel() == 1
    return value if fits else None


class _Seen:
    """An optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.known = weakref.ref(optimizer)
        self.plans: list[_Plan] = []
        self.steps = 0
        self.next_look = 2  # Its parameters have second moments from its second step on.


class LagOfSteps:
    """model  gives the model, None once it is gone"""

    def __init__(self, model: Callable[[], Optional[nn.Module]]) -> None:
        self._model = model
        self._seen: dict[int, _Seen] = {}  # By the optimizer's id.

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Before a step of an optimizer that trains the model."""
        seen = self._seen.get(id(optimizer))
        if seen is None or seen.known() is not optimizer:
            seen = self._first_seen(optimizer)
        if seen is None:
            return
        seen.steps += 1
        read = 0
        for plan in seen.plans:
            read += plan.step(optimizer, seen.steps)
        # What it holds may be others by now.  It is not looked for each time.
        if read == 0 and seen.steps >= seen.next_look:
            seen.next_look = 2 * seen.steps
            seen.plans = self._made(optimizer)
            for plan in seen.plans:
                plan.step(optimizer, seen.steps)

    def _first_seen(self, optimizer: Optimizer) -> Optional[_Seen]:
        self._seen = {k: seen for k, seen in self._seen.items() if seen.known() is not None}
        self._seen.pop(id(optimizer), None)
        if len(self._seen) >= OPTIMIZERS_MAX:
            return None
        return self._seen.setdefault(id(optimizer), _Seen(optimizer))

    def _made(self, optimizer: Optimizer) -> list[_Plan]:
        groups = {
            id(p): number for number, g in enumerate(optimizer.param_groups) for p in g["params"]
        }
        devices: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}
        for p in self._worth_it(optimizer, groups):
            second = _second_of(optimizer.state[p])
            if second.device.type not in ("cpu", "cuda") or available(second.device.type):
                continue
            devices.setdefault(second.device, []).append((groups[id(p)], p, second))
        plans = []
        for device, of in devices.items():
            room = ELEMENTS_ON_CPU if device.type == "cpu" else ELEMENTS_ON_GPU
            parts = [(number, _Part(p, second, room // len(of))) for number, p, second in of]
            plans.append(_Plan(MomentLags(device, len(of)), parts, device))
        return plans

    def _worth_it(self, optimizer: Optimizer, groups: dict[int, int]) -> list[Tensor]:
        """Embeddings, then the first matrices of the model, as far as their moments are known."""
        model = self._model()
        embeddings: list[Tensor] = []
        first: list[Tensor] = []
        for embeds, p in _matrices(model) if model is not None else ():
            if id(p) not in groups or p not in optimizer.state:
                continue
            if not _fits(_second_of(optimizer.state[p]), _local(p)):
                continue
            if embeds and len(embeddings) < EMBEDDINGS_MAX:
                embeddings.append(p)
            elif not embeds and len(first) < PARAMETERS_MAX:
                first.append(p)
        return (embeddings + first)[:PARAMETERS_MAX]

    def take(self) -> Optional[Lags]:
        """Of the steps since this was asked last; None: of none."""
        plans = [plan for seen in self._seen.values() for plan in seen.plans]
        found = [lags for plan in plans if (lags := plan.take()) is not None]
        return Lags(found) if found else None

    def parts(self) -> list[tuple[int, int]]:
        """Elements of each parameter that is read, and how many of them are in one step."""
        return [
            part.size for seen in self._seen.values() for plan in seen.plans
            for _, part in plan.parts
        ]  # fmt: skip


def _matrices(model: nn.Module) -> Iterator[tuple[bool, Tensor]]:
    """Trained ones of two dimensions or more, and whether each is an embedding."""
    seen: set[int] = set()
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.requires_grad and p.dim() > 1 and id(p) not in seen:
                seen.add(id(p))
                yield isinstance(module, nn.Embedding), p
