"""What happens inside a process that was entered: at the next optimizer step, attach or detach.

begin() is called at an arbitrary safe point of the main thread and only registers hooks.  So the
work is done where a monitor may come and go: between two optimizer steps, on the thread that
trains.  PyTorch iterates over its dictionaries of hooks while it calls them, and changing one then
would raise into training.  So begin() stays away while any thread is inside an optimizer step.  The
hook before a step registers the one after it, which is thereby the last one, and behind the last
one nothing is iterated any more.
"""

from __future__ import annotations

import collections
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Optional

import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import Optimizer

from .. import __version__, monitor
from .._attach import attach
from .._hook.model import already_compiled
from .._hook.model.candidates import find_candidates, unwrapped
from .._hook.model.find_model import owner_of
from .._util import log
from .._util.guard import harmless
from .._util.integers import step as step_number
from .._util.ranks import ASIDE, rank_and_world
from .._weights import names
from .mailbox import QUEUED, Mailbox

_RETRY_SECONDS = 0.003
_RETRIES_MAX = 10_000

# The interpreter holds only the address of a visit's callback: it must not be collected.
_visits: collections.deque[Visit] = collections.deque(maxlen=64)


def _frames(frame: Optional[FrameType]) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _inside_optimizer(but: Optional[int] = None) -> bool:
    """Whether a thread (other than `but`) is running hooks of an optimizer step."""
    home = optimizers.__file__
    return any(
        frame.f_code.co_filename == home and frame.f_code.co_name == "wrapper"
        for thread, top in sys._current_frames().items()
        if thread != but
        for frame in _frames(top)
    )


def _steps_done(optimizer: Optimizer) -> Optional[int]:
    """The optimizer's own count of its steps, where it keeps one (Adam and its kin)."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if step is not None:
            try:
                return step_number(step)
            except ValueError:  # No count that could be told.
                return None
    return None


class Visit:
    """One request, from begin() to its report."""

    def __init__(self, folder: str) -> None:
        self._box = Mailbox(Path(folder))
        self._request = self._box.request()
        self._before: Any = None
        self._after: Any = None
        self._tried: set[int] = set()  # Optimizers that were seen to have nothing to watch.
        self._retries = 0
        self._again = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._retry)

    def begin(self) -> None:
        if self._request is None or time.time() > self._request["deadline"]:
            return
        if self._request["version"] != __version__:
            self._refuse(f"the process uses bellwether {__version__} already")
        elif already_compiled.optimizer_step():
            self._refuse("optimizer.step() is compiled: no hook would be called")
        elif _inside_optimizer():
            self._later()
        else:
            self._before = optimizers.register_optimizer_step_pre_hook(self._step_begins)
            self._box.write(QUEUED, "")

    def _refuse(self, text: str) -> None:
        if self._box.take():
            self._tell(ok=False, text=text)

    def _tell(self, **told: Any) -> None:
        try:
            self._box.report(**told)
        except OSError:  # Nobody waits any more, and the folder is gone.
            log.info(f"attach: {told['text']}")

    def _later(self) -> None:
        """Once more in a moment, again at a safe point of the main thread."""
        self._retries += 1
        if self._retries <= _RETRIES_MAX:
            timer = threading.Timer(
                _RETRY_SECONDS, ctypes.pythonapi.Py_AddPendingCall, (self._again, None)
            )
            timer.daemon = True
            timer.start()

    @harmless("attach", lambda self, _: 0)
    def _retry(self, _: Any) -> int:
        self.begin()
        return 0

    # ---- the hooks ----

    @harmless("attach")
    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._after is not None:
            self._after.remove()
        self._after = optimizers.register_optimizer_step_post_hook(self._step_ended)

    @harmless("attach")
    def _step_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            last = next(reversed(optimizers._global_optimizer_post_hooks), None)
            if last != self._after.id or _inside_optimizer(but=threading.get_ident()):
                return  # Not now: the next step begins with a new try.
            if self._request is None or self._box.request() is None:
                self._leave()  # It was withdrawn.
            elif self._request["action"] == "detach":
                self._detach()
            else:
                self._attach(optimizer)
        except Exception as e:
            self._leave()  # No more tries, whatever it was.
            self._tell(ok=False, text=f"{type(e).__name__}: {e}")

    def _leave(self) -> None:
        self._before.remove()
        self._after.remove()

    def _detach(self) -> None:
        if not self._box.take():
            return
        self._leave()
        watched = monitor.handles.all()
        for each in watched:
            each.detach()
        runs = ", ".join(each.settings.run for each in watched)
        self._tell(
            ok=bool(watched),
            text=f"run {runs} is no longer watched" if watched else "it is not watched",
        )

    def _attach(self, optimizer: Optimizer) -> None:
        assert self._request is not None
        if id(optimizer) in self._tried:
            return
        model = owner_of([p for group in optimizer.param_groups for p in group["params"]])
        if model is not None:
            model = unwrapped(model)
        if model is None or not find_candidates(model, lambda _, m: names.named(m)):
            self._tried.add(id(optimizer))
            name = type(model).__name__ if model is not None else "the optimizer's model"
            self._box.write(QUEUED, f"no attention module was found in {name}")
            return
        if not self._box.take():
            return
        self._leave()
        self._tell(**self._watch(model, optimizer, self._request["arguments"]))

    def _watch(
        self, model: nn.Module, optimizer: Optimizer, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        assert self._request is not None
        rank, world = rank_and_world()
        if monitor.watching(model) is not None:
            return {"ok": False, "text": "it is watched already; --detach ends that"}
        steps = _steps_done(optimizer)
        if steps is None and world > 1 and arguments.get("ranks") == "all":
            return {
                "ok": False,
                "text": f"{type(optimizer).__name__} keeps no count of its steps, so the steps of "
                "the ranks cannot be told apart: use --ranks dp0",
            }
        # Where the libraries are was known to the command only.
        os.environ.setdefault("BELLWETHER_LIB_DIR", self._request["libraries"])
        without_forward = already_compiled.attention(model)
        # Not all ranks are at the same step when they are entered: each acts for itself.
        handle = attach(model, weights_only=bool(without_forward), agree=False, **arguments)
        if handle.why_off:
            aside = handle.why_off in ASIDE
            return {"ok": aside, "text": f"rank {rank}: {handle.why_off}"}
        if steps is not None:
            handle.count_from(steps)
        text = f"run {handle.settings.run}: {len(handle.layers)} attention layers of "
        text += f"{type(model).__name__} are watched from step {steps or 0} on"
        if steps is None:
            text += ", counted from now"
        if without_forward:
            text += f"; {without_forward}: only the norms of W_Q and W_K are measured"
        return {
            "ok": True, "text": text, "run": handle.settings.run, "rank": rank, "world": world,
            "page_url": handle.page_url, "record": handle.record_path, "torch": torch.__version__,
        }  # fmt: skip


def begin(folder: str) -> None:
    """Called by the line that was brought in.  Does no more than register a hook."""
    visit = Visit(folder)
    _visits.append(visit)
    visit.begin()
