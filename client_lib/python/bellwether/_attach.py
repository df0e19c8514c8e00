"""attach(): which settings, which server, and is there a monitor already?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Optional, Union

from torch import nn

from ._actions.agreement import usable
from ._adapters import functions
from ._hook.capturing import Capture
from ._hook.functions import function_calls
from ._hook.model.candidates import unwrapped
from ._hook.model.parallel import Parallel, detect
from ._hook.patches import intercept
from ._kernels import probe
from ._server import private_server
from ._server.alerts import Alert
from ._unwatched import Unwatched
from ._util import files, log
from ._util.guard import harmless
from ._util.ranks import COPY_REPORTS, RANK_REPORTS, own_path, rank_and_world
from .monitor import Monitor, live_monitors, watching
from .settings import Settings, resolve

WRONG_KERNEL = "kernel"  # The rule of the server that judges the laws of attention.


def _choose_sink(monitor: Monitor) -> None:
    """Server as told, else a private one, else a file."""
    settings, link = monitor.settings, monitor.steps.reporter.link
    default_path = own_path(f"{settings.run.replace('/', '-')}.bwrun")
    if settings.record:
        link.record_path = own_path(settings.record)
        why = files.why_no_file(link.record_path)
        if why is not None:
            problem = f"record is {link.record_path}: {why}"
            if settings.mode == "offline" or not settings.server:
                raise ValueError(problem)
            link.record_path = None
            log.warning(f"nothing is recorded: {problem}")
    if settings.mode == "offline" and not link.record_path:
        link.record_path = default_path
    if settings.mode == "offline":
        link.server = None
        log.info(f"recording to {link.record_path}")
        return
    if settings.server or settings.record:
        return
    rank = rank_and_world()[0]
    try:
        server = private_server.join_or_start()
        link.server, link.page_url = server.grpc, server.page_url(settings.run)
        link.data = server.data
        if rank == 0:
            log.info(f"run {settings.run} is watched; its page:\n{link.page_url}")
    except private_server.ServerError as e:
        link.record_path = default_path
        log.warning(
            f"no server ({e}); recording to {link.record_path}, "
            f"judge it with: bellwether replay {link.record_path}"
        )


def _numbered(path: str, number: int) -> str:
    stem, dot, end = path.rpartition(".")
    return f"{stem}-{number}.{end}" if dot and "/" not in end else f"{path}-{number}"


def _apart(settings: Settings) -> Settings:
    """Two models that are watched at a time are two runs, also if the job gave them no names: a
    server takes what one process of a rank sends, and a file holds one recording.
    """
    others = [other.settings for other in live_monitors()]
    changed: dict[str, Any] = {}
    if any(settings.run == other.run for other in others):
        runs = {other.run for other in others}
        names = (f"{settings.run[:120]}-{n}" for n in itertools.count(2))
        changed["run"] = next(name for name in names if name not in runs)
        changed["run_uuid"] = None  # That of the name.
        log.warning(
            f"run {settings.run} is watched already in this process: this model is run "
            f"{changed['run']} (run= gives it another name)"
        )
    if settings.record and any(settings.record == other.record for other in others):
        records = {other.record for other in others}
        paths = (_numbered(settings.record, n) for n in itertools.count(2))
        changed["record"] = next(path for path in paths if path not in records)
        log.warning(f"{settings.record} is written already: this run goes to {changed['record']}")
    return dataclasses.replace(settings, **changed)


def _detected(model: nn.Module) -> Optional[Parallel]:
    try:
        return detect(model)
    except Exception as e:  # Another torch: DTensors that answer to other names.
        log.warning(f"tensor parallelism was not recognised: {type(e).__name__}: {e}")
        return None


def attach(
    model: nn.Module,
    *,
    server: Optional[str] = None,
    run: Optional[str] = None,
    every: Optional[int] = None,
    layers: Optional[str] = None,
    stats: Union[str, Iterable[str], None] = None,
    ranks: Optional[str] = None,
    rows: Optional[int] = None,
    sequences: Optional[int] = None,
    microbatches: Optional[str] = None,
    overhead_budget: Optional[float] = None,
    byte_budget: Optional[int] = None,
    gram_bytes: Optional[int] = None,
    record: Optional[str] = None,
    spool_dir: Optional[str] = None,
    spool_bytes: Optional[int] = None,
    config: Optional[str] = None,
    settings: Optional[Settings] = None,
    weights: Optional[dict[str, tuple[str, str]]] = None,
    on_alert: Optional[Callable[[Alert], None]] = None,
    weights_only: bool = False,
    parallel: Optional[Parallel] = None,
    allow: Union[str, Iterable[str], None] = None,
    agree: bool = True,
) -> Monitor:
    """Watches `model` from its next forward pass on; the same handle if it is watched already.
    Several models of a process are several runs, "name" and "name-2"; a model that holds one that
    is watched already, or is held by one, is not watched, and the log and `why_off` say so.

    server    "host:port" or "unix:/path"; none = a private server, started or joined here
    run       the run's name; default: the script's name and the time
    every     a sample of the heads every so many steps (20)
    layers    regular expression on module names; default: all attention modules
    stats     any of drift, leak, ties, delta, sigma, laws, linear, rest, tensors, modules,
              experts, fp8, steps; default: all but the last five
    ranks     "dp0" (one data-parallel replica reports) or "all"
    rows      sampled query rows per head and sequence (64); 0 = all of them
    sequences sampled sequences of a batch (4); 0 = all of them
    microbatches  "first" or "all" micro-batches of a sampled step
    overhead_budget  share of the step time (0.005); above it samples become rarer
    byte_budget  of a rank's frames a second (4 MiB); above it samples become rarer; 0 = none
    gram_bytes  of Gram matrices of some heads, on average a sampled step (69632), for their full
              spectra; 0 = none
    record    write a .bwrun file, instead of a server or beside one
    spool_dir  folder on this machine for what the memory cannot hold (32 MiB) while the server is
              away; sent when it is back, or by the next attempt; default: none, frames are thinned
    spool_bytes  most bytes there, for each rank (1 GiB)
    config    file of `key: value` lines with these names
    settings  a bellwether.Settings with these names and more; the arguments beside it go first
    weights   {regular expression on module names: (path of W_Q, path of W_K)}, for projections
              whose names are not known here; paths go from the module or from the model on
    on_alert  called with a bellwether.Alert at each change of an alert of this run, on a thread of
              its own
    weights_only  leave the forward and backward pass alone, as a model must be that was compiled
              before: only the norms of W_Q and W_K are measured, at the optimizer step
    parallel  a bellwether.Parallel: where this process's layers and heads lie in the whole model;
              default: by the weights where they are split by tensor parallelism, else all of it
    allow     kinds of action that the server may ask for: any of attention.mode,
              attention.center_k, qk.clip, lr.scale, checkpoint.now, batch.skip, sampling.deepen,
              stop; default: none, and nothing is ever changed
    agree     with `allow` in a job of several ranks: all of them call attach() at the same point
              and agree on each action; False = each rank does what it is asked for itself

    Raises ValueError for a bad argument; nothing else, and nothing later.
    """
    arguments = {
        "server": server, "run": run, "every": every, "layers": layers, "stats": stats,
        "ranks": ranks, "rows": rows, "sequences": sequences, "microbatches": microbatches,
        "overhead_budget": overhead_budget, "byte_budget": byte_budget,
        "gram_bytes": gram_bytes, "record": record,
        "allow": allow, "spool_dir": spool_dir, "spool_bytes": spool_bytes,
    }  # fmt: skip
    chosen = _checked(arguments, config, settings)
    if isinstance(chosen, Unwatched):
        return chosen
    return _attached(model, chosen, parallel, weights, on_alert, weights_only, agree)


def _capturing(
    capture: Optional[Capture], on_alert: Optional[Callable[[Alert], None]]
) -> Optional[Callable[[Alert], None]]:
    """The same callback; before it, layers whose kernel an alert calls wrong are to be captured."""
    if capture is None:
        return on_alert

    def hears(alert: Alert) -> None:
        if alert.rule == WRONG_KERNEL and alert.state == "firing":
            capture.ask(layer for layer, _ in alert.heads if layer is not None)
        if on_alert is not None:
            on_alert(alert)

    return hears


def _failed(error: Exception) -> Any:
    """There is not even a monitor to hold the reason."""
    return Unwatched(f"attach(): {type(error).__name__}: {error}")


@harmless("attach()", answer=_failed, passes=(ValueError,))
def _checked(
    arguments: dict[str, Any], config: Optional[str], given: Optional[Settings]
) -> Settings:
    """Raises ValueError for what the caller got wrong."""
    complaints: list[str] = []
    settings = resolve(arguments, config, complain=complaints.append, settings=given)
    log.set_level(settings.log_level)
    for complaint in complaints:
        log.warning(complaint)
    return settings


@harmless("attach()", answer=_failed)
def _attached(
    model: nn.Module, settings: Settings, parallel: Optional[Parallel],
    weights: Optional[dict[str, tuple[str, str]]],
    on_alert: Optional[Callable[[Alert], None]], weights_only: bool, agree: bool,
) -> Monitor:  # fmt: skip
    model = unwrapped(model)
    known = watching(model)
    if known is not None:
        return known
    if not settings.disabled:
        settings = _apart(settings)
    placed = parallel or _detected(model)
    first = placed.data[0] == 0 if placed is not None else rank_and_world()[0] == 0
    aside = settings.ranks == "dp0" and not first
    # Such a rank only does what the others do.
    agree = agree and bool(settings.allow) and usable()
    monitor = Monitor(model, settings, placed, silent=aside and agree)
    if settings.disabled:
        return monitor
    _begin(monitor, model, placed, weights, weights_only, agree, aside)
    hears = _capturing(monitor.steps.capture, on_alert)
    if hears is not None and monitor.live():
        monitor.follow_alerts(hears)
    return monitor


@harmless("attach()")
def _begin(
    monitor: Monitor, model: nn.Module, placed: Optional[Parallel],
    weights: Optional[dict[str, tuple[str, str]]], weights_only: bool, agree: bool, aside: bool,
) -> None:  # fmt: skip
    if aside:
        monitor.steps.health.why_off = RANK_REPORTS if placed is None else COPY_REPORTS
        if not agree:
            return
    others = [] if weights_only else intercept.watched_in(model)
    if others:
        monitor.steps.health.end(
            f"{others[0].name or 'it'} is watched already, by the model around or in it"
        )
        log.warning(f"watching is off: {monitor.why_off} (run {others[0].host.settings.run})")
        return
    function_calls.use(functions)
    missing = intercept.unsupported() or probe.available()
    if missing is None and not weights_only:
        missing = intercept.unavailable()
    if missing is not None:
        monitor.steps.health.end(missing)
        log.warning(f"watching is off: {missing}")
        return
    try:
        if not aside:
            _choose_sink(monitor)
        monitor.install(model, dict(weights or {}), weights_only, agree)
    except Exception as e:
        monitor.trouble(e, "attach()")
        monitor.detach()  # What was done until then.
