"""Which forwards of attention modules run in this thread, and what surrounds them: checkpoints,
and whatever writes down what runs."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch

from .calls.call_sites import Forward
from .hosts import PatchedLayer


@dataclasses.dataclass(eq=False)
class Entry:
    """What holds inside a module's forward that runs."""

    __slots__ = ("forward", "function", "layer", "mark", "sees", "word")

    layer: Optional[PatchedLayer]
    forward: Optional[Forward]  # Of the layer.
    function: Callable[..., Any]  # What scaled_dot_product_attention means.
    mark: Any  # Of the module, for torch.compile (compiled_taps.py).
    word: str  # Of the module (attention_switch.py).
    sees: bool  # Whether calls are to be seen.


class Running(threading.local):
    def __init__(self) -> None:
        self.stack: list[Entry] = []
        # Roots that run.  They are not on the stack, on which what torch.compile makes depends.
        self.roots = 0
        self.inside = False  # A call that was seen: what it calls is not seen again.

    def sees(self) -> bool:
        """Whether a call that is made now is to be seen."""
        if self.inside:
            return False
        return self.stack[-1].sees if self.stack else self.roots > 0


running = Running()


def saved_tensor_hooks() -> Any:
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False)
    except (AttributeError, TypeError):  # A private function: another torch, another signature.
        return None


def checkpointed() -> bool:
    """Whether saved tensors are being intercepted: a checkpointed region, in its forward or in
    its recomputation, which must do the same operations, or offloading."""
    return saved_tensor_hooks() is not None


def host_reads_back() -> bool:
    """Whether what is saved now is read back by code of the host that may fail and must be heard:
    a checkpoint's recomputation, which no second reading makes good.  What torch itself packs away
    (save_on_cpu) fails for lack of memory only, perhaps of ours."""
    hooks = saved_tensor_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") != "torch.autograd.graph"


def checkpoint_inside() -> bool:
    """Whether a checkpointed region was opened inside the running attention module: its
    recomputation would not pass through the module, so nothing may be added to it."""
    if not running.stack:
        return False
    forward = running.stack[-1].forward
    hooks, recording = (None, False) if forward is None else (forward.hooks, forward.recording)
    # A reentrant one has no hooks, but computes without a graph at first.
    return hooks != saved_tensor_hooks() or (recording and not torch.is_grad_enabled())


def apart() -> AbstractContextManager[Any]:
    """In it our own calls of torch are none of those that a mode of the host sees."""
    if torch._C._len_torch_function_stack() > 0:
        return torch._C.DisableTorchFunction()
    return nullcontext()


def being_traced() -> bool:
    """Whether what runs is being written down: jit.trace, fx, make_fx.  What they make of the model
    outlives us, and must be the model alone.  (torch.compile and export: is_compiling().)"""
    if torch._C._get_tracing_state() is not None:
        return True
    fx = sys.modules.get("torch.fx._symbolic_trace")
    if fx is not None and getattr(fx, "_is_fx_tracing_flag", False):
        return True
    modes: Any = torch._C._TorchDispatchModeKey
    if torch._C._len_torch_dispatch_stack() > 0:
        return torch._C._get_dispatch_mode(modes.PROXY) is not None
    before_dispatch = getattr(torch._ops, "_get_dispatch_mode_pre_dispatch", None)
    return before_dispatch is not None and before_dispatch(modes.PROXY) is not None
