"""The norm of this rank's own gradient of each micro-batch, before ranks add theirs up.

In a sampled step a hook on each trained parameter reads the gradient that a backward pass gives it:
before it is accumulated, and so before DistributedDataParallel, FSDP2 or Megatron-Core reduce it.
It keeps none, since autograd copies a gradient that somebody else holds.  A pass ends as one
number, on the device.  Nothing is registered on steps without a sample.

A gradient that torch.autograd.grad() is asked for is none of a step, and is not read.  Squares are
added up in float32, so an element below 1e-22 counts as 0, and one above 1e19 as infinite.

Left out, and said in Monitor.status(): FSDP1 and ZeRO-3, whose parameters are in parts, CUDA graphs
and sparse gradients.  So are gradients that a kernel adds up by itself (Megatron's
gradient_accumulation_fusion), and fp16 with a loss scale that is not a GradScaler's.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn

from .._hook.hosts import LinearHost
from .._hook.model.averaging import fsdp_groups
from .._hook.model.parallel import Parallel, is_dtensor, is_fully_sharded
from .._kernels.large_tensors import flat
from .._kernels.memory import capturing
from .._kernels.tensors import dense
from .._native.run_client import Block
from .._util.guard import harmless
from .._util.ranks import rank_and_world
from .tapped_modules import Arriving
from .tensor_rows import FLAT, LEFT_OUT_MAX, SPARSE, global_name

SIGNALS = ("rank_grad_norm", "rank_grad_norm_max")
FUSED = "a kernel adds its gradient up (gradient_accumulation_fusion)"
IN_GRAPH = "its gradient is computed in a CUDA graph"
IN_PARTS = "one backward pass gives its gradient in parts (a reentrant checkpoint)"
OTHER_TYPE = "its gradient is no dense tensor of real numbers"
NO_SCALE = "gradients are in fp16, and their loss scale is not a GradScaler's"
NONE_SEEN = "no backward pass gave a parameter its gradient in a sampled step"
_ROW = 4096  # Elements whose squares a CPU adds up in float32.


class RankNormSample:
    """Of one step, perhaps still on its way from a GPU.

    passes  by device, the number of the pass and its norm there
    fp16    a gradient was in fp16
    """

    def __init__(
        self, passes: dict[torch.device, list[tuple[int, Tensor]]], fp16: bool,
        unknown: Callable[[], None],
    ) -> None:  # fmt: skip
        self._numbers = [[number for number, _ in of] for of in passes.values()]
        self._arriving = Arriving([torch.stack([norm for _, norm in of]) for of in passes.values()])
        self._fp16, self._unknown = fp16, unknown

    def ready(self) -> bool:
        return self._arriving.ready()

    def norms(self) -> list[float]:
        """Of each pass, of all devices together.  Must be ready."""
        squares: dict[int, float] = {}
        for numbers, norms in zip(self._numbers, self._arriving.values()):
            for number, norm in zip(numbers, norms):
                squares[number] = squares.get(number, 0.0) + norm * norm
        return [math.sqrt(of) for of in squares.values()]

    def blocks(self, scale: Optional[float]) -> list[Block]:
        """Must be ready.  scale  what the loss was multiplied by, None: no GradScaler was seen"""
        if scale is None and self._fp16:
            self._unknown()
            return []
        norms = [norm / (scale or 1.0) for norm in self.norms()]
        # NaN is the largest of all.
        largest = max(norms, key=lambda norm: math.inf if math.isnan(norm) else norm)
        if any(math.isnan(norm) for norm in norms):
            largest = math.nan
        rank = rank_and_world()[0]
        told = (sum(norms) / len(norms), largest)
        return [Block(signal, [value], rank) for signal, value in zip(SIGNALS, told)]


class _Pass:
    """One backward pass."""

    def __init__(self) -> None:
        self.norms: dict[torch.device, list[Tensor]] = {}
        self.seen: set[int] = set()  # Parameters that had their gradient.

    def add(self, row: int, norm: Tensor) -> None:
        self.seen.add(row)
        self.norms.setdefault(norm.device, []).append(norm)


class _Hook:
    """On one parameter, while a step is sampled."""

    def __init__(self, parameter: Tensor, called: Callable[[Tensor], None]) -> None:
        self._parameter, self._bare = parameter, parameter._backward_hooks is None
        self._handle = parameter.register_hook(called)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Leaves nothing."""
        self._handle.remove()
        if self._bare and not self._parameter._backward_hooks:
            self._parameter._backward_hooks = None


class _Step:
    """What a sampled step has, up to now."""

    def __init__(self) -> None:
        self.passes: dict[torch.device, list[tuple[int, Tensor]]] = {}
        self.count = 0  # Of passes.
        self.running: Optional[_Pass] = None
        self.fp16 = False
        self.why: Optional[str] = None  # Why its norms are none.

    def begin_pass(self) -> _Pass:
        self.end_pass()
        self.running = _Pass()
        return self.running

    def end_pass(self) -> None:
        ended, self.running = self.running, None
        if ended is None or not ended.norms:
            return
        with torch.no_grad():
            for device, norms in ended.norms.items():
                norm = torch.linalg.vector_norm(torch.stack(norms))
                self.passes.setdefault(device, []).append((self.count, norm))
        self.count += 1


class RankNorms:
    """model  gives the model, None once it is gone"""

    def __init__(
        self, host: LinearHost, model: Callable[[], Optional[nn.Module]], placed: Parallel
    ) -> None:
        self.host, self._model, self._placed = host, model, placed
        self.parameters = 0  # That are read.
        self.passes = 0  # Of the newest sample.
        self.not_measured: Optional[str] = None  # Why there is no norm.
        self.left_out: dict[str, str] = {}  # By parameter: why the norm is without it.
        self._hooks: list[_Hook] = []
        self._names: list[str] = []
        self._parameters: list[weakref.ref[Tensor]] = []
        self._step = _Step()
        self._early = False  # The step that is measured has not begun yet.
        self._before: Optional[RankNormSample] = None  # Then: that of the step before.
        self._called = False  # torch.autograd.backward() is.
        self._missed = False  # It was before the step began: a part of the pass was not seen.
        self._missed_task = -1  # Likewise, of a pass that another function runs.
        self._task = -1  # Of autograd, that was seen last.
        self._accumulates = False  # What it computes goes into the parameters' gradients.

    def expect(self) -> None:
        """The next step will be sampled, and perhaps it is only in its first backward pass that it
        is known to have begun."""
        if self._early:
            return
        self._before = self._taken()
        self._begin()
        self._early = True

    def begin_step(self, sampled: bool) -> None:
        early, self._early, self._before = self._early, False, None
        if early and sampled and self._hooks:
            return
        self.stop()
        if sampled:
            self._begin()

    def _begin(self) -> None:
        self._step = _Step()
        self._missed, self._missed_task = self._called, torch._C._current_graph_task_id()
        model = self._model()
        self._names, self._parameters = [], []
        for name, p in self._trained(model) if model is not None else ():
            row = len(self._names)
            see = self._see_fused if hasattr(p, "main_grad") else self._see
            self._hooks.append(_Hook(p, partial(see, row)))
            self._names.append(name)
            self._parameters.append(weakref.ref(p))
        self.parameters = len(self._names)

    def stop(self) -> None:
        """No parameter has a hook any more."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _trained(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Those into which a backward pass puts gradients."""
        groups = fsdp_groups(model)
        if is_fully_sharded(model) and not groups:
            self.not_measured = FLAT
            return
        # FSDP2 computes with whole ones of its own.
        whole = {
            id(part.sharded_param): getattr(part, "_unsharded_param", None)
            for group in groups for part in group.fsdp_params
        }  # fmt: skip
        for name, p in model.named_parameters():
            used = whole.get(id(p), p)
            if used is not None and used.requires_grad:
                yield global_name(name, self._placed), used

    def leave_out(self, row: int, why: str) -> None:
        name = self._names[row]
        if name in self.left_out or len(self.left_out) < LEFT_OUT_MAX:
            self.left_out[name] = why

    # ---- passes ----

    def backward_begins(self) -> None:
        """torch.autograd.backward() is called: whatever runs until it returns is one pass."""
        self._called = True
        if self._hooks:
            self._step.begin_pass()

    def backward_ends(self) -> None:
        self._step.end_pass()
        self._called = self._missed = False

    def _pass_of(self, row: int) -> Optional[_Pass]:
        """None: what is computed is no gradient of the step."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._accumulates = task, _accumulates(self._parameters[row]())
        if not self._accumulates or self._missed or task == self._missed_task:
            return None
        running = self._step.running
        if running is None:
            return self._step.begin_pass()
        if row not in running.seen:
            return running
        # Where no call is known, nothing but this tells passes apart.
        if not self._called:
            return self._step.begin_pass()
        self._gives_up(row, IN_PARTS)
        return None

    def _gives_up(self, row: int, why: str) -> None:
        """A norm without this parameter would be another one."""
        self.leave_out(row, why)
        self._step.why = why

    @harmless("a parameter's gradient")
    def _see_fused(self, row: int, grad: Tensor) -> None:
        """Of a parameter to which Megatron-Core adds gradients up."""
        p = self._parameters[row]()
        if p is not None and getattr(p, "grad_added_to_main_grad", False):
            self._gives_up(row, FUSED)
        else:
            self._see(row, grad)

    @harmless("a parameter's gradient")
    def _see(self, row: int, grad: Tensor) -> None:
        start = time.perf_counter()
        self._read(row, grad)
        self.host.hook_seconds += time.perf_counter() - start

    def _read(self, row: int, grad: Tensor) -> None:
        if not self._hooks or not self.host.live():
            return
        if capturing():
            self._gives_up(row, IN_GRAPH)
            return
        into = self._pass_of(row)
        if into is None:
            return
        if is_dtensor(grad):
            grad = grad._local_tensor  # type: ignore[attr-defined]
        if type(grad) not in (Tensor, nn.Parameter) or not grad.is_floating_point():
            self.leave_out(row, OTHER_TYPE)
        elif grad.layout is not torch.strided:
            self.leave_out(row, SPARSE)
        else:
            self._step.fp16 = self._step.fp16 or grad.dtype is torch.float16
            with torch.no_grad():
                into.add(row, norm_of(grad))

    def sample(self) -> Optional[RankNormSample]:
        """What was measured in this step."""
        if self._early:
            before, self._before = self._before, None
            return before
        return self._taken()

    def _taken(self) -> Optional[RankNormSample]:
        if not self._hooks:
            return None
        self.stop()
        step, self._step = self._step, _Step()
        step.end_pass()
        self.passes = step.count
        if self.parameters:
            self.not_measured = step.why or (None if step.count else NONE_SEEN)
        if self.not_measured is not None:
            return None
        return RankNormSample(step.passes, step.fp16, self._no_scale)

    def _no_scale(self) -> None:
        self.not_measured = NO_SCALE


def _accumulates(p: Optional[Tensor]) -> bool:
    """Whether the pass that runs puts gradients into parameters, and does not only return them."""
    if p is None:
        return False
    try:
        node = torch.autograd.graph.get_gradient_edge(p).node
        return bool(torch._C._will_engine_execute_node(node))
    except (RuntimeError, AttributeError):  # It refuses in torch.autograd.grad().
        return False


def norm_of(grad: Tensor) -> Tensor:
    """Where it is, of no dimension; of whatever is in it, NaN and infinity too."""
    vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm
    if grad.dtype is torch.float64:
        return vector_norm(grad)
    if grad.device.type != "cpu":
        return vector_norm(grad, dtype=torch.float32)
    values = flat(grad) if dense(grad) else grad.reshape(-1)
    if values.numel() <= _ROW:
        return vector_norm(values.double())
    # Of many elements a CPU's own sum in float32 is off.
    whole = values.numel() // _ROW * _ROW
    rows = vector_norm(values[:whole].view(-1, _ROW), dim=1, dtype=torch.float32)
    rest = vector_norm(values[whole:].double())
    return vector_norm(torch.cat([rows.double(), rest.reshape(1)]))
