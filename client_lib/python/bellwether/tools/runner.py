"""python -m bellwether run script.py args: the script, untouched, under watch.

The model is the outermost nn.Module that owns the parameters of the first optimizer; it is
attached when that optimizer is made, so the very first step is seen.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .._attach import attach
from .._hook.model.find_model import owner_of
from .._util import log
from .._util.counted import counted
from .._util.guard import harmless
from ..monitor import Monitor


class Watcher:
    """Attaches to the model of the first optimizer that is made while it is active."""

    def __init__(self, hold: bool = False, **attach_arguments: Any) -> None:
        """With `hold` the model outlives the script, as long as the watcher: a monitor says
        goodbye with its model."""
        self.monitor: Optional[Monitor] = None
        self.model: Optional[nn.Module] = None  # If it is held.
        self._hold = hold
        self._arguments = attach_arguments
        self._init: Optional[Callable[..., None]] = None

    def __enter__(self) -> Watcher:
        original = Optimizer.__init__
        self._init = original

        @functools.wraps(original)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made(optimizer)

        Optimizer.__init__ = made  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._init is not None:
            Optimizer.__init__ = self._init  # type: ignore[method-assign]
            self._init = None

    @harmless("run")
    def _made(self, optimizer: Optimizer) -> None:
        if self.monitor is not None:
            return
        model = owner_of([p for group in optimizer.param_groups for p in group["params"]])
        if model is None:
            return
        self.monitor = attach(model, **self._arguments)
        self.model = model if self._hold else None
        if self.monitor.live():
            layers = len(self.monitor.layers)
            log.info(f"watching {type(model).__name__}: {counted(layers, 'attention layer')}")
        self._restore()


class _Enough(BaseException):
    """Ends a script that the doctor has seen enough of."""


def _run_script(script: str, arguments: list[str]) -> None:
    before = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def run_steps(
    script: str, arguments: list[str], steps: int, server: Optional[str], run: Optional[str] = None
) -> tuple[Watcher, str]:
    """Runs the script for so many optimizer steps; (what watched it, what ended it)."""
    seen = 0

    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal seen
        seen += 1
        if seen >= steps:
            raise _Enough

    hook: Any = None
    ended = "its end"
    with Watcher(hold=True, server=server, run=run, every=1) as watcher:
        hook = register_optimizer_step_post_hook(count)
        try:
            _run_script(script, arguments)
        except _Enough:
            ended = f"step {steps}"
        except SystemExit as e:
            ended = f"it exited with {e.code}"
        finally:
            hook.remove()
    if watcher.monitor is not None:
        watcher.monitor.flush(5.0)
    return watcher, ended


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether run", description="Runs a training script under watch."
    )
    parser.add_argument("--server", help="host:port or unix:/path; default: a private server")
    parser.add_argument("--run", help="the run's name")
    parser.add_argument("--every", type=int, help="steps between two samples")
    parser.add_argument("--record", help="write a .bwrun file")
    parser.add_argument("--config", help="file of `key: value` lines")
    parser.add_argument("--allow", help="kinds of action that the server may ask for: a,b,...")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    given = parser.parse_args(arguments)
    if not Path(given.script).is_file():
        print(f"{given.script}: no such file", file=sys.stderr)
        return 2
    with Watcher(
        server=given.server,
        run=given.run,
        every=given.every,
        record=given.record,
        config=given.config,
        allow=given.allow,
    ) as watcher:
        try:
            _run_script(given.script, given.arguments)
        finally:
            if watcher.monitor is None:
                log.warning("no optimizer of torch.optim was made: nothing was watched")
            else:
                watcher.monitor.detach()
    return 0
